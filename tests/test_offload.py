"""Offload: masters and moments live where the flag says, and stay there."""

import re
from pathlib import Path

import pytest

from tests import equal


def in_files(options: dict) -> list[int]:
    """Runs on every rank: how many masters and moments there are, and how many of them lie in files without a name."""
    kept = {}

    class Kept(equal.Watch):
        def __exit__(self, *how):
            kept.update(zero=self.parts.optimizer)
            super().__exit__(*how)

    watch, equal.Watch = equal.Watch, Kept
    try:
        equal.record("step03_zero", options)
    finally:
        equal.Watch = watch
    zero, lines = kept["zero"], Path("/proc/self/maps").read_text().splitlines()
    files = [re.split("[- ]", line)[:2] for line in lines if "(deleted)" in line and "/dev/shm" not in line]
    states = [*zero.pieces.values(), *(t for state in zero.rule.state.values() for t in state.values() if t.dim())]
    states = [state for state in states if state.numel()]
    found = [any(int(a, 16) <= state.data_ptr() < int(b, 16) for a, b in files) for state in states]
    return [len(found), sum(found)]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux where memory is")
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_state_is_where_the_flag_says(pools, where):
    """After three steps all masters and both moments of AdamW; on the CPU none is in a file."""
    for total, mapped in pools(2).run(in_files, dict(zero=1, offload_optimizer=where)):
        assert total > 3 and mapped == (total if where == "disk" else 0)
