"""What the default run takes of long lists of cases."""

from collections.abc import Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[Any], every: int) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: every so many of the cases; `-m exhaustive` runs the others."""

    def later(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)

    return [case if i % every == 0 else later(case) for i, case in enumerate(cases)]
