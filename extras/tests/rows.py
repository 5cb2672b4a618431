"""Trains a row of a test's table: a launch line with techniques, beside one process.

This module is also a step: its Config has the flags of all techniques, and of its `script`.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import step03_zero as step03
import step06_pipeline as step06
import step07_moe_ep as step07
from common.flags import flag, parse
from common.trainer import Run
from extras.__main__ import techniques, with_flags
from extras.techniques import int8_pipeline, zero_offload, zero_replicas
from tests.equal import equals_step1

TECHNIQUES = techniques()  # imports all of them


@dataclass
class Config(with_flags(step07.Config, TECHNIQUES)):
    """All flags."""

    script: str = flag("step01_single_gpu", "the step whose `train` runs")


def train(config: Config, run: Run):
    """Train as a step does."""
    importlib.import_module(config.script).train(config, run)


class Both(zero_replicas.Zero3Replicas, zero_offload.Zero3Offload):
    """ZeRO 3 with replicas and on the host: two entries of one menu, combined by their classes."""


class Unrounded(int8_pipeline.Int8Pipeline):
    """1f1b-int8 without the rounding."""

    buffer = step06.Pipeline.buffer

    def pack(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    unpack = pack


step03.ZERO["3+replicas+offload"] = Both
step06.SCHEDULES["unrounded"] = Unrounded


def check_row(pools: Any, n: int, base: dict[str, Any], line: str):
    """Compare a run of n ranks with one process, which trains step 1, or step 7 with experts.

    base: flags and sizes of the model that both have. line: a step, and flags that it alone has.
    """
    script, *words = line.split()
    default = Config()
    config = parse(Config, ["--script", script, *words])
    layout = {name: x for name, x in vars(config).items() if x != getattr(default, name)}
    if "experts" in base:
        base = dict(script="step07_moe_ep") | base
    equals_step1(pools, n, __name__, base, beside=__name__, **layout)
