"""NOT_YET.md names exactly the flags of the older house that this one does not have yet, so that none is lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

COURSE = Path(__file__).parents[1]


def flags(house: Path) -> set[str]:
    """`--flag`, and `--flag=value` for each of its choices, of step 7, which has all flags of a house."""
    command = [sys.executable, "step07_moe_ep.py", "--help"]
    text = subprocess.run(command, cwd=house, text=True, capture_output=True, check=True).stdout
    usage = text.split("\n\n")[0]
    found = set(re.findall(r"\[(--[a-z-]+)", usage))
    for flag, values in re.findall(r"\[(--[a-z-]+)\s+\{([^}]*)\}", usage):
        found |= {f"{flag}={value}" for value in re.sub(r"\s", "", values).split(",")}
    return found


def listed(heading: str) -> set[str]:
    """The flags that a section of NOT_YET.md lists, one a row: `--flag` or `--flag=value`."""
    sections = re.split(r"^## ", (COURSE / "NOT_YET.md").read_text(), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(heading)]
    return set(re.findall(r"`(--[^`]+)`", section))


@pytest.mark.skipif(not (COURSE.parent / "step07_moe_ep.py").exists(), reason="the older house is gone")
def test_no_flag_is_forgotten():
    """Missing flags = those listed as not there yet, and those listed as gone for good."""
    missing = flags(COURSE.parent) - flags(COURSE)
    assert missing == listed("Not there yet") | listed("Gone")
