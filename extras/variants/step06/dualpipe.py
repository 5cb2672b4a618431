"""DualPipe (`--schedule dualpipe`; DeepSeek-V3, 3.2): micro-batches enter at both ends of two copies of the model.

    first way: half of them      stage 0  stage 1  stage 2  stage 3      Rank r has stage r of the first way and stage
    rank                            0        1        2        3         p-1-r of the second. So ranks r and p-1-r have
    second way: the other half   stage 3  stage 2  stage 1  stage 0      the same layers.

If F, B (dx) and W (dW) take the same time, and m >= 2p is even, the bubble is (p/2-1) / (3 m + p/2-1). Ranks r and
p-1-r sum their gradients before each update. Unlike in DeepSeek's code, a forward does not overlap with a backward.

`--schedule dualpipev` (DeepSeek's DualPipe repository) folds both ways into a V on half as many ranks, as in zbv: the
second way takes the same micro-batches back up. Each layer is on one rank, so no gradients are summed over pairs.

In step 6, `keep_stage` would note that two stages hold each parameter; the sum over pairs would follow `sync.finish()`.
"""

from typing import Any

import numpy as np

from common import UserError
from common.layout import layout_of, note_layout
from common.schedules import SCHEDULES, Action, Place, Schedule, round_robin
from extras.variants import Parts
from extras.variants.step06.split_backward import UNIT
from extras.variants.step06.zero_bubble import in_vee, write_out


def eight_steps(near: int, inner: int, each_way: int) -> list[tuple[int, str]]:
    """Returns a rank's schedule as phases for `write_out`, numbered 1 to 8 like the steps of DeepSeek's code.

    `each_way` micro-batches of way 0 (F0, B0) enter at the end nearer to this rank; as many of way 1, at the other end.
    There are `near` ranks from the near end up to this one, and `inner` between this one and the middle.
    """
    return [  # W follows its B at once, except in the second half of phase 6 and in phase 7
        (2 * inner, "F0"),  # 1: forward from the near end, until the first micro-batch of the other way is here
        (near, "F0 F1"),  # 2: forward both ways, until the first gradient is here
        (inner, "B1 W F1"),  # 3: backward of way 1, the first one here, because its loss is at the near end
        (each_way - 2 * inner - near, "F0 B1 W F1 B0 W"),  # 4: all four, until all F0 are done
        (inner, "B1 W F1 B0 W"),  # 5: no F0 is left
        (near // 2, "B1 W B0 W"),  # 6: no forward is left
        (near % 2, "B1 W B0"),  # 6: the pair in the middle of this phase, if `near` is odd
        (near // 2, "B1 B0"),  # 6: in its second half W waits, because other ranks wait for B
        (inner, "W B0"),  # 7: W fills the gaps between the last B
    ]  # 8: `write_out` appends every W that still waits


def dualpipe(p: int, m: int, v: int, rank: int) -> list[Action]:
    """Returns a rank's list of actions, with at most p + 1 micro-batches in flight. Raises UserError.

    If m is odd or below 2p, the list is made for a larger even m; the actions of the added micro-batches are left out.
    """
    if p % 2:
        raise UserError(f"--schedule dualpipe: micro-batches enter at both ends of an even number of ranks, not {p}")
    if m < 2:
        raise UserError("--schedule dualpipe: use at least 2 micro-batches, one for each end")
    sizes = (m + 1) // 2, m // 2  # of the two halves of the micro-batches
    near = min(rank + 1, p - rank)  # stages from the nearer end to this one. F0, B0: of the way that begins there
    phases = eight_steps(near, p // 2 - near, max(sizes[0], p))
    ways = (rank, 2 * p - 1 - rank) if rank < p // 2 else (2 * p - 1 - rank, rank)  # our stage of way 0, and of way 1
    actions = [action for action in write_out(ways, *phases) if action.micro_batch < sizes[int(action.stage >= p)]]
    return [a._replace(micro_batch=a.micro_batch + sizes[0]) if a.stage >= p else a for a in actions]


def dualpipev(p: int, m: int, v: int, rank: int) -> list[Action]:
    """Returns a rank's list: as `dualpipe` on 2p ranks, but stage p gets the micro-batches that leave stage p-1."""
    row = write_out((rank, 2 * p - 1 - rank), *eight_steps(rank + 1, p - 1 - rank, max(m, 2 * p)))
    return [action for action in row if action.micro_batch < m]


def two_ways(n_layers: int, p: int, v: int) -> list[Place]:
    """The places of 2p stages: 0 to p-1 on ranks 0 to p-1; p to 2p-1, with the same layers, on ranks p-1 to 0."""
    down = round_robin(n_layers, p, 1)
    link = lambda stage: None if stage is None else stage + p  # noqa: E731
    return down + [Place(p - 1 - rank, layers, link(before), link(after)) for rank, layers, before, after in down]


SCHEDULES["dualpipe"] = lambda config: Schedule(dualpipe, two_ways, costs=UNIT)
SCHEDULES["dualpipev"] = in_vee(dualpipev)


def attach(config: Any, parts: Parts):
    """Note in layouts that gradients must be summed over a pair of ranks, both of which hold each parameter."""
    if config.schedule != "dualpipe":
        return
    mesh = parts.mesh
    pairs = np.stack([mesh.ranks, mesh.ranks[::-1]], -1)[: config.pp // 2]  # pp is the mesh's first dimension
    mesh.enter("mirror", pairs.reshape(-1, 2))
    for param in parts.model.parameters():
        note_layout(param, partial_over=(*layout_of(param).partial_over, "mirror"), stage_copies=2)
