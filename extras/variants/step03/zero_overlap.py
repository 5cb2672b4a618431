"""Lets ZeRO 1 start gradient sums during the last backward (`--zero-overlap`), as step 2 does (Li et al. 2020).

    backward of the last micro-batch     H   1   0   E                units in the order in which gradients are complete
    step 3's stage 1                                     H 1 0 E      all reduce-scatters after it
    with --zero-overlap                      H   1   0   E            each unit's, during the next one's backward

A unit's sum starts when that unit and all before it have the gradients of all micro-batches, so all ranks send in the
same order. Only the sum of E is left when backward ends. Bytes and calls stay the same. In step 3, `Zero1` would count
the additions to gradients, as `BucketSync` of step 2 does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from extras.variants import Parts
from step02_ddp import BucketSync
from step03_zero import Unit, Zero1


class Early(BucketSync):
    """Starts the gradient sums of ZeRO 1's units during backward, as step 2 starts those of buckets."""

    def __init__(self, zero: Zero1):
        self.zero = zero
        for unit in zero.units:
            for param in unit.trained.values():
                param.register_post_accumulate_grad_hook(partial(self.mark_ready, unit))

    def begin(self, plain: Callable, n_micro_batches: int):
        """Wraps `Zero1.begin`: expect this many additions to each gradient."""
        plain(n_micro_batches)
        self.unsent, self.pending = self.zero.units[::-1], []
        for unit in self.zero.units:
            unit.missing = n_micro_batches * len(unit.trained)

    def send(self, unit: Unit):
        """Start to sum a unit's gradients."""
        self.pending.append(self.zero.reduce(unit))

    def finish(self):
        """Replaces `Zero1.finish`: send what is left, and wait for all sums."""
        super().finish()
        for unit in self.zero.units:
            unit.grad_shard = unit.reduced_shard


@dataclass
class Flags:
    """Overlapped sums of ZeRO 1."""

    zero_overlap: bool = False  # with --zero 1: start a unit's sum as soon as its last gradient is complete


NEEDS = [("zero_overlap", "zero", 1)]


def attach(config: Any, parts: Parts):
    """Replace the sums after backward by sums that start during backward."""
    if config.zero_overlap:
        early = Early(parts.optimizer)
        parts.around(parts.sync, "begin", early.begin, by=__name__)
        parts.instead(parts.sync, "finish", early.finish, by=__name__)
