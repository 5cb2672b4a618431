"""What the default run takes of long lists of cases, and what it calls them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def sampled(cases: Sequence[Any], every: int) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: every so many of the cases; `-m exhaustive` runs the others."""

    def later(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)

    return [case if i % every == 0 else later(case) for i, case in enumerate(cases)]


def label(flags: dict) -> str:
    """A short test id for some flags."""
    return "-".join(f"{key}={Path(str(value)).name}" for key, value in flags.items()) or "default"
