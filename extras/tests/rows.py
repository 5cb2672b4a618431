"""Trains a row of a test's table: a launch line with techniques, beside one process.

This module is also a step: its Config has the flags of all techniques, and of its `script`.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import step07_moe_ep as step07
from common.flags import flag, parse
from common.run import Run
from extras.__main__ import techniques, with_flags
from tests.equal import equals_step1

TECHNIQUES = techniques()  # imports all of them


@dataclass
class Config(with_flags(step07.Config, TECHNIQUES)):
    """All flags."""

    script: str = flag("step01_single_gpu", "the step whose `train` runs")


def train(config: Config, run: Run):
    """Train as a step does."""
    importlib.import_module(config.script).train(config, run)


def check_row(pools: Any, n: int, base: dict[str, Any], line: str, bound: float = 1e-10):
    """Compare a run of n ranks with one process, which trains step 1, or step 7 with experts.

    base: flags and sizes of the model that both have. line: a step, and flags that it alone has.
    """
    script, *words = line.split()
    default = Config()
    config = parse(Config, ["--script", script, *words])
    layout = {name: x for name, x in vars(config).items() if x != getattr(default, name)}
    if "experts" in base:
        base = dict(script="step07_moe_ep") | base
    equals_step1(pools, n, __name__, base, bound, beside=__name__, **layout)
