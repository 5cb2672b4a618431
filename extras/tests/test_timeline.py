"""Tests the timeline: a made trace gives the boxes of its last step, and a real run's trace is
drawn.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path

from extras.tools.timeline import Box, main, read_boxes, read_ranks

ROOT = Path(__file__).parents[2]


def event(name: str, start: float, length: float) -> dict:
    """A range of a trace, in microseconds."""
    return dict(name=name, cat="user_annotation", ts=start, dur=length)


def test_boxes_of_the_last_step_without_nested_waits(tmp_path):
    """A wait inside a forward is left out, and so is the step before."""
    events = [
        event("ProfilerStep#1", 0, 900),
        event("F0.0", 100, 200),
        event("ProfilerStep#2", 1000, 9000),
        event("F0.0", 2000, 3000),
        event("wait tp", 2500, 100),
        event("wait pp", 5500, 500),
        event("B0.0", 6000, 2000),
        dict(name="aten::mm", cat="cpu_op", ts=6100, dur=5),
    ]
    path = tmp_path / "trace-0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(dict(traceEvents=events)).encode()))
    expected = [Box("F0.0", 2.0, 5.0), Box("wait pp", 5.5, 6.0), Box("B0.0", 6.0, 8.0)]
    assert read_boxes(path) == expected


def test_a_run_is_drawn(tmp_path):
    """--profile 1 writes a trace that the command draws."""
    out = tmp_path / "run"
    words = "step06_pipeline.py --model debug --steps 4 --global-batch-size 4 --micro-batch-size 2"
    flags = ["--profile", "1", "--device", "cpu", "--out", str(out)]
    subprocess.run(
        [sys.executable, *words.split(), *flags], cwd=ROOT, check=True, capture_output=True
    )
    main([str(out)])
    (boxes,) = read_ranks(out)
    assert {"F0.0", "B0.0", "F1.0", "B1.0", "Optimizer.step"} <= {box.name for box in boxes}
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
