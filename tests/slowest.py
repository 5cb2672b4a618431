"""What a run of tests says at its end: its wall time, and which five took longest. tests/conftest.py takes the hook."""

import time
from collections import Counter

import pytest

STARTED = time.monotonic()


def pytest_terminal_summary(terminalreporter):
    """Before pytest's own last line; a test's time has in it what it sets up for others."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    terminalreporter.section(f"{time.monotonic() - STARTED:.0f} s of wall time; the slowest of {len(seconds)} tests")
    for name, each in seconds.most_common(5):
        terminalreporter.write_line(f"{each:8.2f} s  {name}")
