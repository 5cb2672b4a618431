"""Readers turn the value of --dataset into texts, or into an array of token ids. You can follow
every step without this file.

    --dataset            what is read
    (nothing)            the source code of Python's standard library, without its tests and IDLE
                         (its text, and so the losses, may differ between two installations)
    a.txt                one document (\\r\\n is read as \\n)
    a.jsonl, a.jsonl.gz  a document from each line, {"text": "..."}
    a.parquet            a document from each row, in the column `text`
    a folder             all files in it and its subfolders, all with the same suffix of those above
                         (hidden files are skipped)
    NAME, NAME:CONFIG    a data set of the Hugging Face hub: column `text` of the split `train`
    a.bin                token ids, as nanoGPT's prepare.py writes them: uint16, without a header

A file a.bin.json beside it may hold {"dtype": "uint32", "tokens": N}: ids above 65,535 need uint32,
and N shows whether a.bin is complete.
"""

import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common import UserError

# Folders of the standard library that are not read: not every Python has its tests and IDLE
SKIPPED = {"test", "tests", "idlelib", "site-packages", "__pycache__"}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[^/\\]+)?")  # NAME or OWNER/NAME, and :CONFIG

# What a reader returns: a description of the source, and its documents or an array of token ids.
Contents = tuple[str, Iterable[str] | np.ndarray]


def read_txt(path: Path) -> Iterator[str]:
    """Yield the one text of a file; bytes that are not UTF-8 become U+FFFD."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "\0" in text:
        raise UserError(f"--dataset {path}: it has NULs, as UTF-16 has: convert it to UTF-8")
    yield text


def read_jsonl(path: Path) -> Iterator[Any]:
    """Yield the value of `text` of each line, or None if there is none; skips blank lines."""
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as lines:
        for line in lines:
            if line.strip():
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row.get("text")
                else:
                    yield None


def read_parquet(path: Path) -> Iterator[Any]:
    """Yield the values of the column `text`. Other columns are not read, and may differ."""
    import pyarrow.parquet  # takes a moment to import; comes with `datasets`

    yield from pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()


# The suffix of a file of documents -> a function that yields its texts.
FORMATS: dict[str, Callable] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".parquet": read_parquet,
}


def checked(texts: Iterable[Any], source: str | Path) -> Iterator[str]:
    """Yield the texts of a file or data set, and check them.

    Raises UserError if the source is damaged, if a text is not a string, or if all are empty.
    """
    number = 0
    n_characters = 0
    try:
        for text in texts:
            number += 1
            if not isinstance(text, str):
                raise ValueError(f"a document needs a string `text`, not {text!r:.40}")
            n_characters += len(text)
            yield text
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
    ) as error:  # ValueError: ours, json's, pyarrow's
        raise UserError(
            f"--dataset {source}: unreadable near document {number}: {error}"
        ) from error
    if not n_characters:
        raise UserError(f"--dataset {source}: it has no text")


def in_random_order(paths: list[Path]) -> list[Path]:
    """Shuffle files, always in the same way: neighbours are alike, and the held-out tail should
    resemble the whole.
    """
    return [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]


def read_library(source: str) -> Contents:
    """Read the source code of Python's standard library. (`source` is "": it has no name.)"""
    paths = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = sorted(set(inside) - SKIPPED)  # os.walk enters only these
        paths += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    texts = (text for path in in_random_order(paths) for text in read_txt(path))
    return f"{len(paths):,} files of Python's standard library", checked(texts, "(default)")


def visible_files(path: Path, around: tuple[Path, ...] = ()) -> list[Path]:
    """A file itself, or all files in a folder and its subfolders, sorted, except hidden ones.

    `around`: the folders through which the recursion came to `path`. Raises UserError for a link to
    one of them, which would have no end.
    """
    if not path.is_dir():
        return [path]
    folder = path.resolve()
    if folder in around:
        raise UserError(f"--dataset {path}: it is a link to a folder that it is in: remove it")
    paths = []
    for entry in sorted(path.iterdir()):
        if not entry.name.startswith("."):
            paths += visible_files(entry, (*around, folder))
    return paths


def texts_of(paths: list[Path]) -> Iterator[str]:
    """Yield the texts of files, each read by its entry in FORMATS."""
    for path in paths:
        reader = FORMATS[suffix_of(path)]
        yield from checked(reader(path), path)


def read_files(source: str) -> Contents:
    """Read a file, or all files of a folder. Raises UserError unless they have one suffix of
    FORMATS.
    """
    paths = visible_files(Path(source))
    examples = {suffix_of(path): str(path) for path in paths}  # one file for each suffix
    if len(examples) != 1 or not examples.keys() <= FORMATS.keys():
        raise UserError(
            f"--dataset {source}: the files of a folder must be of one kind "
            f"({', '.join(FORMATS)}), and it has {', '.join(examples.values()) or 'no file'}: "
            "leave files of one kind"
        )
    names = ", ".join(map(str, paths[:20]))
    if len(paths) > 20:
        names += f" and {len(paths) - 20:,} more"
    return names, texts_of(in_random_order(paths))


def read_hub(source: str) -> Contents:
    """Read a data set of the Hugging Face hub, `NAME` or `NAME:CONFIG`.

    Raises UserError if the hub is out of reach, or has no such data set, configuration or column.
    """
    import datasets  # takes seconds to import
    import huggingface_hub as hub

    name, _, config = source.partition(":")
    try:
        if not datasets.config.HF_HUB_OFFLINE:
            # Ask once whether the hub is there: `load_dataset` would retry for half a minute
            hub.get_session().head(hub.constants.ENDPOINT, timeout=5)
        rows = datasets.load_dataset(name, config or None, split="train").select_columns("text")
    except Exception as error:  # of many types, from several libraries
        raise UserError(
            f"--dataset {source}: no such file, and as a data set of the hub: {error} "
            "(HF_HUB_OFFLINE=1 reads one that was downloaded before)"
        ) from error
    return f"{len(rows):,} rows of the hub's {source}", checked(rows["text"], source)


def read_bin(source: str) -> Contents:
    """Map token ids into memory. Raises UserError if their file, or SOURCE.json, is damaged."""
    description = Path(source + ".json")
    about = {"dtype": "uint16"}
    try:
        if description.exists():
            about = json.loads(description.read_text())
        tokens = np.memmap(source, about["dtype"], "r")
        if tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"its dtype is {tokens.dtype}, and must be uint16 or uint32")
        if len(tokens) != about.get("tokens", len(tokens)):
            raise ValueError(f"it has {len(tokens)} tokens, and had {about['tokens']}")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"--dataset {source}: it or {description} is damaged: {error}") from error
    return f"{tokens.dtype} ids of {source}", tokens


# The reader of each kind of --dataset (`kind_of` says of which kind a value is)
READERS: dict[str, Callable[[str], Contents]] = {
    "": read_library,
    **{suffix: read_files for suffix in FORMATS},
    "folder": read_files,
    ".bin": read_bin,
    "hub": read_hub,
}


def suffix_of(path: Path) -> str:
    """The key of READERS that is a suffix of a file's name, or "" if there is none."""
    for kind in READERS:
        if kind.startswith(".") and path.name.endswith(kind):
            return kind
    return ""


def kind_of(source: str) -> str:
    """The key in READERS for a value of `--dataset`. Raises UserError if there is none.

    What exists is a folder or a file of a known kind. What does not exist is looked up on the hub
    if it has the form of a name there, and does not end like a file: "trian.jsonl" is a mistake.
    """
    if not source:
        return ""
    path = Path(source)
    if path.is_dir():
        return "folder"
    suffix = suffix_of(path)
    if path.exists():
        if not suffix:
            raise UserError(
                f"--dataset {source}: this kind of file cannot be read, only a folder, "
                f"{', '.join(FORMATS)} and .bin"
            )
        return suffix
    if suffix or not HUB_NAME.fullmatch(source):
        raise UserError(f"--dataset {source}: no such file")
    return "hub"
