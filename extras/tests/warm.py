"""Imported before ranks are forked: the default text, which takes longer to read than a tiny run, is read once."""

import functools

from common import data

data.READERS[""] = functools.lru_cache(data.READERS[""])
data.READERS[""]("")
