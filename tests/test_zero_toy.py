"""The four-weight example prints what the top of step 3 says."""

import torch
import torch.distributed as dist

from common.comm import Mesh
from variants import zero_toy


def lines() -> list[str]:
    """Runs on every rank."""
    mesh = Mesh(dp=dist.get_world_size())
    return [zero_toy.toy(stage, mesh, torch.device("cpu")) for stage in range(4)]


def test_prints_the_example(pools):
    """Rank 0's lines stand in the docstring."""
    first, second = pools(2).run(lines)
    assert all(line in zero_toy.__doc__ for line in first), first
    assert second[3] == "stage 3, rank 1: weights 3 4, gradient 25 25 -> own 0.5 1.5, all -1.5 -0.5 0.5 1.5"
