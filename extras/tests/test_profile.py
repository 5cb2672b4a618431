"""Tests `--profile`: the traces of a pipeline, and the snapshot of a GPU's memory."""

import gzip
import json
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

import step01_single_gpu as step01
from common import UserError
from extras.services import profile
from extras.services.seam import check
from extras.tests.equal import config_of
from extras.tests.pool import error_of
from extras.tests.test_screen import serve_on_rank

SMALL = dict(steps=4, profile=2, global_batch_size=4, micro_batch_size=1, n_layers=2, save_every=0, eval_every=0)


def traced(folder: Path, rank: int) -> list[dict]:
    """Read the events of a trace that have a start `ts` and a duration `dur`, in microseconds."""
    with gzip.open(folder / f"trace-{rank}.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_a_pipelines_trace(pools, tmp_path):
    """In a rank's trace, the ranges of actions F and B contain all calls of attention, all-gather and step 4's f and g.

    `--profile 2` with too few steps is refused.
    """
    pools(4).run(serve_on_rank, "step06_pipeline", SMALL | dict(pp=2, tp=2, zero=3), str(tmp_path))
    for rank in range(4):
        events, stage = traced(tmp_path, rank), rank // 2
        actions = [event for event in events if event["name"][0] in "FB" and event["name"][1:2].isdigit()]
        expected = Counter({f"{kind}{i}.{stage}": 2 for kind in "FB" for i in range(4)})
        assert Counter(event["name"] for event in actions) == expected
        for name in ("f", "g", "attend", "c10d::_allgather_base_"):
            inner = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == name]
            assert inner, name
            for start, end in inner:
                assert any(span["ts"] <= start and end <= span["ts"] + span["dur"] for span in actions), name
        names = Counter(event["name"] for event in events)
        assert names["optimizer"] == 2 and names[f"gather layers.{stage}"] and names["wait tp"] and names["wait pp"]
    with pytest.raises(UserError, match="--profile 2: it needs --steps 4"):
        check(config_of("step01_single_gpu", dict(profile=2, steps=3)), 1)


def snapshots_on_rank(out: str) -> tuple[str, list]:
    """Runs in one process: training step 4 fills GPU memory; returns the error, and the calls of torch.cuda.memory."""
    update = mock.Mock(side_effect=[None] * 3 + [torch.OutOfMemoryError("Tried to allocate 2.50 GiB")])
    full = mock.patch.object(step01.Optimizer, "publish", update)
    on_gpu = mock.patch.object(profile, "attach", lambda _, parts: profile.Trace(2, parts, gpu=True))
    with mock.patch.object(torch.cuda, "memory") as memory, full, on_gpu:
        said = error_of(UserError, serve_on_rank, "step01_single_gpu", SMALL | dict(steps=5), out)
    return said, [call[:2] for call in memory.mock_calls]


def test_a_snapshot_of_memory_is_written_before_a_full_one_ends_the_run(pools, tmp_path):
    """When memory is full, a snapshot is written once, and the error is a line that names its file."""
    ((said, calls),) = pools(1).run(snapshots_on_rank, str(tmp_path))
    assert [call[0] for call in calls] == ["_record_memory_history", "_dump_snapshot", "_record_memory_history"]
    file = str(tmp_path / "memory-0.pickle")
    assert calls[1][1] == (file,) and file in said
