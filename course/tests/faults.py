"""Mistakes that the tests must notice: a name, where the text stands, what it becomes, and what that would mean.

A fault is put into the source of a function or class, which is compiled anew. One whose text is gone raises KeyError.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Fault(NamedTuple):
    """One mistake."""

    module: str
    owner: str  # function, or class
    old: str
    new: str
    meaning: str


FAULTS: dict[str, Fault] = {
    "sent_and_still_owed": Fault(
        "variants.compress",
        "Compression",
        "self.owed[key] = values - self.widen(message, length, dtype)",
        "self.owed[key] = values",
        "what has been sent is sent again in the next step",
    ),
    "last_pass_not_awaited": Fault(
        "variants.torch_ddp", "TorchSync", "self.left == 0", "self.left < 0", "DDP never sums the gradients"
    ),
    "chunk_forgets_the_head": Fault(
        "variants.chunked_loss",
        "ChunkedLoss",
        "grad_weight += more",
        "grad_weight = more",
        "only the last chunk counts",
    ),
    "muon_of_a_part": Fault(
        "variants.muon", "Muon", "for split in splits:", "for split in ():", "each part is made orthogonal alone"
    ),
    "muon_of_a_slice": Fault(
        "variants.muon",
        "Muon",
        "all_gather(whole, own, unit.group).wait()",
        "whole.zero_(), unit.mine(whole).copy_(own)",
        "what lies on other ranks counts as zero",
    ),
    "scale_stays": Fault(
        "variants.fp16", "LossScaling", "gradient.mul_(1 / self.scale)", "pass", "the update sees the loss scale"
    ),
    "ring_skips_the_past": Fault(
        "variants.cp_ring", "ordered_visible", "if source <= rank", "if source == rank", "a rank sees its own keys only"
    ),
    "gathered_shares_not_summed": Fault(
        "variants.cp_allgather",
        "GatheredAttention",
        "reduce_scatter(dkv.view(-1), dparts.view(-1), ctx.group).wait()",
        "dkv.copy_(dparts[ctx.group.rank])",
        "the gradients that other ranks have found for our keys are lost",
    ),
    "ulysses_swaps_forward_again": Fault(
        "variants.cp_ulysses",
        "Swap",
        "not ctx.to_heads",
        "ctx.to_heads",
        "backward repeats the exchange of forward instead of the reverse one",
    ),
}


@contextmanager
def injected(name: str) -> Iterator[None]:
    """Inside, the named mistake is in the program."""
    fault = FAULTS[name]
    module = importlib.import_module(fault.module)
    right = getattr(module, fault.owner)
    source = textwrap.dedent(inspect.getsource(right))
    if fault.old not in source:
        raise KeyError(f"{name}: {fault.old!r} is not in {fault.module}.{fault.owner}")
    made: dict = {}
    exec(compile(source.replace(fault.old, fault.new), f"<fault {name}>", "exec"), vars(module), made)
    wrong = made[fault.owner]
    if inspect.isclass(right):  # menus and importers hold the class itself: its methods are exchanged
        kept = {key: value for key, value in vars(right).items() if key in vars(wrong) and callable(value)}
        kept |= {key: value for key, value in vars(right).items() if isinstance(value, staticmethod)}
        for key in kept:
            setattr(right, key, vars(wrong)[key])
        try:
            yield
        finally:
            for key, value in kept.items():
                setattr(right, key, value)
    else:
        code = right.__code__
        right.__code__ = wrong.__code__
        try:
            yield
        finally:
            right.__code__ = code
