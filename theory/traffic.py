"""Bytes that a rank sends in one step, by (mesh dimension, operation): the laws in the docstrings of steps 2 to 7."""

from collections import Counter
from typing import NamedTuple

from common.model import ModelConfig
from theory.flops import Experts

Traffic = Counter  # of bytes, by (mesh dimension, operation)


class Work(NamedTuple):
    """What one rank does in a step."""

    m: ModelConfig
    tokens: int  # of a micro-batch, in this rank's part of its sequences
    layers: int  # layers passed forward, all micro-batches together
    embeddings: int  # micro-batches that begin here
    heads: int  # micro-batches that end here
    e: int  # bytes of an element
    wide: int  # bytes of an element of what is added up
    recompute: bool


def gradient_traffic(dim: str, n: int, n_bytes: int, ring: bool = False) -> Traffic:
    """Step 2: the sum of `n_bytes` of gradients over n ranks."""
    return Traffic({(dim, "send" if ring else "all_reduce"): 2 * (n - 1) / n * n_bytes})


def unit_traffic(dim: str, n: int, elements: int, e: int, wide: int, reductions: int, gatherings: int) -> Traffic:
    """Step 3: a unit of so many elements, whose gradient is summed and whose weights are gathered so many times."""
    passed = (n - 1) / n * elements
    return Traffic({(dim, "reduce_scatter"): reductions * passed * wide, (dim, "all_gather"): gatherings * passed * e})


def gatherings(uses: list[list], runs: list[tuple[str, list[int]]], first_layer: int) -> Counter:
    """How often ZeRO 3 gathers each unit in a step.

    `uses`: by module, in the order of forward, the units that it computes with. `runs`: ("F" or "B", its modules) of
    everything that the rank does. A module fetches its own units and the next one's. They go after its forward, but for
    the last module, and after their last use in a backward. An embedding, before `first_layer`, needs no weights there.
    """
    there, found, last = set(), Counter(), len(uses) - 1
    for kind, modules in runs:
        for at, i in enumerate(modules if kind == "F" else modules[::-1]):
            following = min(i + 1, last) if kind == "F" else max(i - 1, first_layer)
            if kind == "F" or i >= first_layer:
                wanted = {*uses[i], *uses[following]}
                found.update(wanted - there)
                there |= wanted
            if kind == "F":
                there -= {*uses[i]} if i < last else set()
            else:
                there -= {*uses[i]} - {unit for j in modules[: len(modules) - 1 - at] for unit in uses[j]}
    return found


def tensor_traffic(w: Work, n: int, sp: bool) -> Traffic:
    """Step 4: f and g around two blocks a layer, g behind the embedding, f before the head, and two numbers a token.

    With recomputation forward is done again up to a layer's last g.
    """
    passed = (n - 1) / n * w.tokens * w.m.dim * w.e
    found = Traffic({("tp", "all_gather"): 2 * (n - 1) * w.tokens * w.wide * w.heads})
    if not sp:
        return found + Traffic(
            {("tp", "all_reduce"): 2 * passed * (w.layers * (4 + w.recompute) + w.embeddings + w.heads)}
        )
    found["tp", "all_gather"] += passed * (w.layers * (4 + 2 * w.recompute) + w.embeddings + w.heads)
    found["tp", "reduce_scatter"] += passed * (w.layers * (4 + w.recompute) + w.embeddings + w.heads)
    return found


def context_traffic(w: Work, n: int, tp: int) -> Traffic:
    """Step 5: keys and values go round the ring, in backward once more, followed by their gradients."""
    kv = w.tokens * 2 * w.m.n_kv_heads // tp * w.m.head_dim
    return Traffic({("cp", "send"): w.layers * (kv * ((2 + w.recompute) * (n - 1) * w.e + n * w.wide))})


def expert_traffic(w: Work, n: int, cp: int, experts: Experts) -> Traffic:
    """Step 7: a row for each choice goes and comes, forward and backward, if all experts are equally busy; counts."""
    passes, counts = 1 + w.recompute, 8 * experts.number
    rows = (n - 1) / n * w.tokens * experts.visited * w.m.dim * w.e
    found = Traffic({("ep", "all_to_all"): w.layers * (2 * (1 + passes) * rows + passes * (n - 1) / n * counts)})
    found["cp", "all_reduce"] += w.layers * passes * 2 * (cp - 1) / cp * counts
    return found


def sum_traffic(dim: str, n: int, n_bytes: int) -> Traffic:
    """An all-reduce of something small: partial gradients, the loss, the norm."""
    return Traffic({(dim, "all_reduce"): 2 * (n - 1) / n * n_bytes})
