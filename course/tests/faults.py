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
    "kv_copies_not_summed": Fault(
        "variants.few_kv_heads",
        "cut_heads",
        "note_layout(part,",
        "dict(",
        "ranks with the same key/value head each keep their own queries' share of its gradient",
    ),
    "overlapped_gradient_not_summed": Fault(
        "variants.block_overlap",
        "start_total",
        "pending = all_reduce(x, group)",
        "pending = all_reduce(x.clone(), group)",
        "each rank goes on with its part of dx",
    ),
    "replicas_not_summed": Fault(
        "variants.zero_replicas",
        "with_replicas",
        "for unit in zero.units if",
        "for unit in [] if",
        "each replica trains on its own tokens",
    ),
    "documents_see_the_one_before": Fault(
        "variants.documents", "MicroBatch", "document == other and", "document >= other and", "borders are open"
    ),
    "offloaded_update_is_lost": Fault(
        "variants.offload_optimizer",
        "Update",
        "unit.slice.copy_(unit.master, non_blocking=True)",
        "pass",
        "the host updates masters, and the weights stay as they are",
    ),
    "offloaded_masters_are_not_the_rules": Fault(
        "variants.offload_optimizer",
        "move",
        "zero.pieces[name].data = unit.part(master, name)",
        "pass",
        "the rule updates tensors that nobody reads",
    ),
    "narrow_sum_has_one_part": Fault(
        "variants.compress_activations",
        "Bits",
        "all_to_all(received, ours, group)",
        "all_to_all(received, ours, group); received[1:] = 0",
        "of a sum of parts only the first is taken",
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
