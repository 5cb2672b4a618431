"""Hides the all-to-alls of experts behind another micro-batch (`--ep-overlap`; DualPipe in DeepSeek-V3, 3.2).

Where a rank's list has a forward F and then the backward B of another micro-batch, the two form a *pair* and take
turns: the one that has started an all-to-all lets the other one compute, and waits for its rows in its next turn.

    F of micro-batch 3    attention, router |~ dispatch ~|             experts |~ combine ~|             attention ...
    B of micro-batch 1                      | combine's, |~ dispatch ~|        | experts'  |~ combine ~| ...

Law: the share of hidden messages is the share of forwards in pairs on the rank with the fewest pairs, because all other
ranks wait for it; the bytes are the same. In 1F1B the last rank has no pairs, because each forward is followed by the
backward of the same micro-batch. Its step would take nearly twice as long, so 1F1B is refused.

F and B are the code of step 7, each in a thread. Only one thread runs at a time, and the turns are the same on all
ranks, so collectives start in one order. A single thread would need F and B cut into phases by hand: a layer calls its
experts inside `forward`, and autograd does not pause between two nodes. The counts of rows are exchanged without a
turn, because the host must know them before rows can be sent.

In step 7, `dispatch` and `combine` would hand over the turn between start and wait; in step 6, `execute` would compute
two actions at once.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Semaphore
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, all_to_all
from extras.variants import Parts
from extras.variants.record import SET, Refusal, but
from extras.variants.step07.paired_actions import InPairs, program_of
from step04_tp_sp import Conjugate
from step06_pipeline import ListPipeline, plan
from step07_moe_ep import MoE, transpose_blocks


class Turns:
    """Runs two functions that take turns. The first always has the same thread, because cuDNN caches by thread."""

    def __init__(self, device: torch.device):
        begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # else the thread has GPU 0
        self.thread, self.turn, self.left = ThreadPoolExecutor(1, initializer=begin), 0, set()

    def both(self, first: Callable, second: Callable) -> list:
        """Run both to their ends, beginning with `first`. Returns both results; raises the exception of either."""
        self.turn, self.left, self.go = 0, {0, 1}, (Semaphore(1), Semaphore(0))
        there = self.thread.submit(self.run, 0, first)
        try:
            here = self.run(1, second)
        finally:
            wait([there])
        return [there.result(), here]

    def run(self, i: int, function: Callable) -> Any:
        """Run function i from its first turn on; when it has ended, the other one keeps the turn."""
        self.go[i].acquire()
        try:
            return function()
        finally:
            self.left.discard(i)
            self.give(1 - i)

    def give(self, i: int):
        """Let function i compute."""
        self.turn = i
        self.go[i].release()

    def switch(self):
        """Hand the turn to the other function, unless it has ended, and wait to get it back. Any thread may call it."""
        me = self.turn
        if 1 - me in self.left:
            self.give(1 - me)
            self.go[me].acquire()


def travel(rows: Tensor, group: Group, turns: Turns, leaving_Ge: Tensor, arriving_Ge: Tensor, home: bool) -> Tensor:
    """Step 7's `dispatch`, or `combine` if `home`; while rows are being sent, the other function computes."""
    sent = transpose_blocks(rows, arriving_Ge.T) if home else rows.contiguous()
    sizes = [blocks.sum(1).tolist() for blocks in (leaving_Ge, arriving_Ge)]
    in_rows, out_rows = reversed(sizes) if home else sizes
    received = rows.new_empty(sum(out_rows), rows.shape[1])
    pending = all_to_all(received, sent, group, in_rows, out_rows)
    turns.switch()
    pending.wait()
    return received if home else transpose_blocks(received, arriving_Ge)


def visit_in_turns(turns: Turns, experts: Callable, group: Group, rows: Tensor, counts_E: Tensor) -> Tensor:
    """Replaces `visit_experts` of step 7: does the same, with `travel` as its exchange."""
    leaving_Ge = counts_E.view(group.size, -1)
    arriving_Ge = torch.empty_like(leaving_Ge)
    all_to_all(arriving_Ge, leaving_Ge, group).wait()
    leaving_Ge, arriving_Ge = torch.stack((leaving_Ge, arriving_Ge)).cpu()
    there, home = (
        partial(travel, turns=turns, leaving_Ge=leaving_Ge, arriving_Ge=arriving_Ge, home=way) for way in (False, True)
    )
    out = experts(Conjugate.apply(rows, group, there, home), arriving_Ge.sum(0))
    return Conjugate.apply(out, group, home, there)


@dataclass
class Flags:
    """Messages of experts."""

    ep_overlap: bool = False  # hide all-to-alls of a forward behind the backward of another micro-batch, and vice versa


PAIRED = ("ahead", "interleaved", "rounds", "zbv", "dualpipe", "dualpipev")  # schedules with pairs on all ranks
BOTH = "two micro-batches are computed at once, and only one can be tracked; choose one of them"
FREED = "ZeRO 3 frees weights that the other micro-batch needs"
NO_PAIRS = "a rank has no forward and backward to pair, and all wait for it; use --schedule ahead or dualpipe"
GRADIENTS = "its forward needs the only thread of autograd, which is busy with the backward; choose one"
ONE_STAGE = dict(schedule="ahead", chunks=1)  # forward and backward compute with the same layers
NEEDS = [("ep_overlap", "pp"), ("ep_overlap", "ep"), ("ep_overlap", "ep_mode", "alltoall")]
REFUSES = [
    Refusal(dict(ep_overlap=SET, schedule=but(*PAIRED)), NO_PAIRS, None),
    Refusal(dict(ep_overlap=SET, schedule=("interleaved", "rounds"), chunks=(1,)), NO_PAIRS, None),
    Refusal(
        dict(ep_overlap=SET, zero=(3,), zero_keep=(False,)), f"{FREED}; add --zero-keep", ONE_STAGE | dict(n_layers=2)
    ),
    Refusal(dict(ep_overlap=SET, documents=SET), BOTH, ONE_STAGE),
    Refusal(dict(ep_overlap=SET, dropout=SET), BOTH),
    Refusal(dict(ep_overlap=SET, compile=SET), "graphs cannot be recorded in two threads at once; choose one of them"),
    Refusal(dict(ep_overlap=SET, loss_chunk=SET), GRADIENTS, None),
    Refusal(dict(ep_overlap=SET, dry_run=SET), "a dry run counts one of two threads; leave it out, bytes are equal"),
]


def attach(config: Any, parts: Parts):
    """Let the pipeline compute its list in pairs, and experts take turns."""
    if not config.ep_overlap:
        return
    pipeline, turns = parts.pipeline, Turns(parts.pipeline.reference_param.device)
    mine = config.global_batch_size // parts.mesh["dp"].size
    lists = plan(config, m=math.ceil(mine / config.micro_batch_size))[1]
    own = (found[pipeline.group.rank] for found in program_of(lists, pipeline.places))
    view = InPairs(pipeline, turns.both, *own)
    parts.instead(pipeline, "execute", partial(ListPipeline.execute, view), by=__name__)
    for module in parts.model.modules():
        if isinstance(module, MoE):
            plain = module.experts.forward.args  # of `visit_experts`: the experts' own forward, and the group
            parts.instead(module.experts, "forward", partial(visit_in_turns, turns, *plain), by=__name__)
