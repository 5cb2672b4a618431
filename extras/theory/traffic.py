"""Bytes that a rank sends in one step, by (mesh dimension, operation): the laws in the docstrings of steps 2 to 7."""

from collections import Counter
from typing import NamedTuple

from extras.theory.shapes import Shape

Traffic = Counter  # of bytes, by (mesh dimension, operation)


class Passes(NamedTuple):
    """What passes through one rank in a step."""

    m: Shape
    tokens: float  # of a micro-batch (if they differ, in the mean), in this rank's part of its sequences
    layers: int  # layers passed forward, all micro-batches together
    routers: int  # of these, layers with experts
    embeddings: int  # micro-batches that begin here
    heads: int  # micro-batches that end here
    e: int  # bytes of an element
    wide: int  # bytes of an element of what is added up
    recompute: bool  # backward passes layers forward once more

    @property
    def attentions(self) -> int:
        """Times that attention is passed forward."""
        return self.layers * (1 + self.recompute)

    def heads_of(self, tp: int) -> tuple[int, int]:
        """Numbers of queries, and of keys and values, that a layer has of a micro-batch, on one of tp ranks."""
        channels = self.tokens * self.m.head_dim
        return self.m.n_heads // tp * channels, 2 * max(1, self.m.n_kv_heads // tp) * channels


def gradient_traffic(dim: str, n: int, n_bytes: int, ring: bool = False) -> Traffic:
    """Step 2: the sum of `n_bytes` of gradients over n ranks."""
    return Traffic({(dim, "send" if ring else "all_reduce"): 2 * (n - 1) / n * n_bytes})


def unit_traffic(dim: str, n: int, elements: int, e: int, wide: int, reductions: int, gatherings: int) -> Traffic:
    """Step 3: a unit of so many elements, whose gradient is summed and whose weights are gathered so many times."""
    passed = (n - 1) / n * elements
    return Traffic({(dim, "reduce_scatter"): reductions * passed * wide, (dim, "all_gather"): gatherings * passed * e})


def unit_travels(
    uses: list[list], runs: list[tuple[str, list[int]]], layers: set[int], shared: set
) -> tuple[Counter, Counter]:
    """How often stages 2 and 3 of ZeRO reduce, and stage 3 gathers, each unit in a step. Its hooks, as step 3 has them.

    `uses`: the units that embedding, each layer, and norm with head compute with, as far as they are on the rank.
    `layers`: which of these are layers. `runs`: (F, B or W, which of these) of all that the rank does. Without a
    pipeline: each unit is gathered for F and for B, but for those of the last, which stay, and an embedding, which
    needs no weights in B; and reduced once a micro-batch. A tied matrix is gathered as embedding and for the head.
    """
    there, reduced, gathered, last, first = set(), Counter(), Counter(), len(uses) - 1, min(layers, default=0)
    split = any(kind == "W" for kind, _ in runs)

    def fetch(i: int, ahead: int):
        """Entry `i` of `uses` is about to compute, and `ahead` after it."""
        wanted = {*uses[i], *uses[ahead]}
        gathered.update(wanted - there)
        there.update(wanted)

    def forward(i: int):
        """Units go, unless the next entry uses them; those of the last stay until their gradients are there."""
        fetch(i, min(i + 1, last))
        if i < last:
            there.difference_update({*uses[i]} - {*uses[i + 1]})

    def complete(kind: str, i: int) -> list:
        """Units whose gradients are now there: those of layers after W, if there is any; all others after B."""
        if split and (i in layers) != (kind == "W"):
            return []
        return [unit for unit in uses[i] if i == 0 or unit not in shared]  # head and embedding: when the latter is done

    for kind, modules in runs:
        done: set = set()
        for i in modules if kind == "F" else reversed(modules):
            if kind == "F":
                forward(i)
                continue
            if kind == "B" and i >= first:
                fetch(i, max(i - 1, first))
            done.update(complete(kind, i))
        reduced.update(done)
        there.difference_update(done)
    return reduced, gathered


def tensor_traffic(w: Passes, n: int, sp: bool) -> Traffic:
    """Step 4: f and g around two blocks a layer, g behind the embedding, f before the head, and two numbers a token.

    With recomputation forward is done again up to a layer's last g. Experts have no f and no g (step 7); without SP
    their outputs are gathered in forward, and the gradients of their inputs in backward.
    """
    passed = (n - 1) / n * w.tokens * w.m.dim * w.e
    sent = Traffic({("tp", "all_gather"): 2 * (n - 1) * w.tokens * w.wide * w.heads})
    mlps = w.layers - w.routers
    gs = 2 * (w.layers + mlps) + w.layers * w.recompute + w.embeddings + w.heads  # sums, forward and backward
    if not sp:
        return sent + Traffic({("tp", "all_reduce"): 2 * passed * gs, ("tp", "all_gather"): 2 * passed * w.routers})
    sent["tp", "all_gather"] += passed * (gs + mlps * w.recompute)
    sent["tp", "reduce_scatter"] += passed * gs
    return sent


def context_traffic(w: Passes, n: int, tp: int) -> Traffic:
    """Step 5: keys and values go round the ring, in backward once more, followed by their gradients."""
    kv = w.heads_of(tp)[1]
    return Traffic({("cp", "send"): kv * ((w.attentions + w.layers) * (n - 1) * w.e + w.layers * n * w.wide)})


def row_traffic(w: Passes, n: int, tp: int) -> Traffic:
    """Step 7: a row for each choice goes and comes, forward and backward, if all experts are equally busy.

    Each of the tp ranks routes its own tokens.
    """
    rows = (n - 1) / n * w.tokens / tp * w.m.experts_per_token * w.m.dim * w.e
    return Traffic({("ep", "all_to_all"): w.routers * 2 * (2 + w.recompute) * rows})


def count_traffic(w: Passes, n: int, sharers: int) -> Traffic:
    """Step 7: before each forward, how many rows go where; for the loss, how many in the `sharers` of a sequence."""
    passed = w.routers * (1 + w.recompute) * 8 * w.m.experts
    sent = Traffic({("ep", "all_to_all"): passed * (n - 1) / n})
    return sent + sum_traffic("sequence", sharers, passed)


def sum_traffic(dim: str, n: int, n_bytes: int) -> Traffic:
    """An all-reduce of something small: partial gradients, the loss, the norm."""
    return Traffic({(dim, "all_reduce"): 2 * (n - 1) / n * n_bytes})
