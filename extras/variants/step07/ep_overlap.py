"""Messages of experts behind another micro-batch (`--ep-overlap`; DeepSeek-V3, section 3.2: what DualPipe is for).

Where a rank's list has a forward, and next the backward of another micro-batch, both are done in turns: whoever has
started an all-to-all lets the other compute, and waits only when it is let on again.

    F of micro-batch 3    attention, router |~ dispatch ~|             experts |~ combine ~|             attention ...
    B of micro-batch 1                      | combine's, |~ dispatch ~|        | experts'  |~ combine ~| ...

All ranks wait for the one that has fewest such pairs. In 1F1B that is the last one, whose backward follows the forward
of the same micro-batch; what others send when their pairs are done comes later, so a step is nearly twice as long: it
is refused. `--schedule ahead`, interleaved, zbv, dualpipe and dualpipev have pairs on all ranks. Law: the share of
messages hidden is that of forwards in pairs on the rank with fewest; without any saving a step is as long.

Both are the code of step 7, each in a thread of its own; one thread runs at a time, and the turns are the same on all
ranks, so their collectives have one order. Bytes are the same. F's output leaves when both are done: so a pair whose B
waits for what becomes of its F, on whatever way, is taken apart (paired_actions.py).

REFUSES names what two micro-batches at once cannot share. Counts go first, and are waited for at once, as the host must
know them. --loss-chunk is refused because its forward asks for gradients while B waits in autograd's thread of a GPU.

In step 7, `dispatch` and `combine` would say between start and wait whose turn it is; in step 6, `execute` would do two
actions at once.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import step07_moe_ep as step07
from common.comm import Group, all_to_all
from extras.variants import Parts
from extras.variants.record import SET, Refusal, but
from extras.variants.step07.paired_actions import execute, program_of
from step04_tp_sp import Conjugate
from step06_pipeline import plan
from step07_moe_ep import MoE, transpose_blocks

SINCE = step07.Config


class Turns:
    """Two functions, of which one runs at a time; the first in a thread that lasts, as cuDNN's plans are a thread's."""

    def __init__(self, device: torch.device):
        self.changed, self.turn, self.left = threading.Condition(), 0, set()
        begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # else GPU 0
        self.thread = ThreadPoolExecutor(1, initializer=begin)

    def both(self, *functions: Callable) -> list:
        """Run both to their ends. Returns what they return, raises what one of them raises."""
        results, errors = [None, None], []
        self.turn, self.left = 0, {0, 1}

        def run(i: int):
            with self.changed:
                self.changed.wait_for(lambda: self.turn == i)
            try:
                results[i] = functions[i]()
            except BaseException as error:  # of a thread: it would be lost
                errors.append(error)
            self.left.discard(i)
            self.give(1 - i)

        first = self.thread.submit(run, 0)
        run(1)
        first.result()
        if errors:
            raise errors[0]
        return results

    def give(self, i: int):
        """It is the turn of function i."""
        with self.changed:
            self.turn = i
            self.changed.notify_all()

    def switch(self):
        """Who calls this, in whatever thread, has the turn: let the other one compute, if it has not ended."""
        me = self.turn
        if 1 - me in self.left:
            self.give(1 - me)
            with self.changed:
                self.changed.wait_for(lambda: self.turn == me)


def travel(rows: Tensor, group: Group, turns: Turns, leaving_Ge: Tensor, arriving_Ge: Tensor, home: bool) -> Tensor:
    """As `dispatch` of step 7, or `combine` on the way home; while they are under way, it is the other's turn."""
    sent = transpose_blocks(rows, arriving_Ge.T) if home else rows.contiguous()
    sizes = [blocks.sum(1).tolist() for blocks in (leaving_Ge, arriving_Ge)]
    in_rows, out_rows = reversed(sizes) if home else sizes
    received = rows.new_empty(sum(out_rows), rows.shape[1])
    pending = all_to_all(received, sent, group, in_rows, out_rows)
    turns.switch()
    pending.wait()
    return received if home else transpose_blocks(received, arriving_Ge)


def visit_in_turns(turns: Turns, experts: Callable, group: Group, rows: Tensor, counts_E: Tensor) -> Tensor:
    """As `visit_experts` of step 7."""
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


PAIRED = ("ahead", "interleaved", "rounds", "zbv", "dualpipe", "dualpipev")  # all ranks have F before B of another
BOTH = "it knows one micro-batch at a time, and two are computed at once; choose one of them"
FREED = "ZeRO 3 frees weights that the other micro-batch needs"
ONE_STAGE = dict(schedule="ahead", chunks=1)  # forward and backward compute with the same layers
NEEDS = [("ep_overlap", "pp"), ("ep_overlap", "ep"), ("ep_overlap", "ep_mode", "alltoall")]
REFUSES = [
    Refusal(
        dict(ep_overlap=SET, schedule=but(*PAIRED)), "a rank has no pairs, and all wait; use ahead or dualpipe", None
    ),
    Refusal(
        dict(ep_overlap=SET, schedule=("interleaved", "rounds"), chunks=(1,)),
        "this is 1F1B, in which a rank has no pairs; use --schedule ahead",
        None,
    ),
    Refusal(
        dict(ep_overlap=SET, zero=(3,), zero_keep=(False,)), f"{FREED}; add --zero-keep", ONE_STAGE | dict(n_layers=2)
    ),
    Refusal(dict(ep_overlap=SET, zero_keep_mb=SET), f"{FREED}; leave it out", None),
    Refusal(dict(ep_overlap=SET, documents=SET), BOTH, ONE_STAGE),
    Refusal(dict(ep_overlap=SET, dropout=SET), BOTH),
    Refusal(dict(ep_overlap=SET, batch_ramp=SET), "it leaves micro-batches out of the list; choose one of them"),
    Refusal(dict(ep_overlap=SET, compile=SET), "graphs cannot be recorded in two threads at once; choose one of them"),
    Refusal(dict(ep_overlap=SET, loss_chunk=SET), "it finds gradients in forward, beside a backward; choose one", None),
    Refusal(dict(ep_overlap=SET, dry_run=SET), "a dry run sees one of two threads; leave it out, bytes are equal"),
]


def attach(config: Any, parts: Parts):
    """Do in pairs what the schedule's lists have side by side."""
    if not config.ep_overlap:
        return
    pipeline, turns = parts.pipeline, Turns(parts.pipeline.reference_param.device)
    mine = config.global_batch_size // parts.mesh["dp"].size
    lists = plan(config, m=math.ceil(mine / config.micro_batch_size))[1]
    program = program_of(lists, pipeline.places)[pipeline.group.rank]
    parts.instead(pipeline, "execute", partial(execute, pipeline, program, turns.both), by=__name__)
    for module in parts.model.modules():
        if isinstance(module, MoE):
            plain = module.experts.forward.args  # of `visit_experts`: the experts' own, and the group
            parts.instead(module.experts, "forward", partial(visit_in_turns, turns, *plain), by=__name__)
