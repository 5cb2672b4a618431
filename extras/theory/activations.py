"""Activations: what a rank of the course's trainer keeps of a micro-batch; of a layer, to the byte.

A layer keeps what its backward needs, from F to B. Where a schedule has W apart, it keeps something else from B to W.
How many micro-batches wait at a time, the rank's list of actions says (`kept_along`).
"""

from itertools import accumulate
from typing import NamedTuple

from common.schedules import Action, Place
from extras.theory.layouts import Layout
from extras.theory.shapes import Shape

MOST = 2**30  # bytes of a chunk's logits, wide (extras/variants/step01/chunked_loss.py)
CHUNK = 2048  # tokens whose logits exist at the same time: a plan's --loss-chunk


class MicroBatch(NamedTuple):
    """A micro-batch on one rank of a layout."""

    m: Shape
    x: Layout
    e: int = 2  # bytes of an element
    wide: int = 4  # bytes of an element of what is added up
    on_cpu: bool = False

    @property
    def tokens(self) -> int:
        """All that this rank has."""
        return self.x.micro_batch_size * self.m.seq_len // self.x.cp

    @property
    def own(self) -> float:
        """Those that the rank has between blocks."""
        return self.tokens / self.x.tp if self.x.sp else self.tokens

    @property
    def share(self) -> float:
        """Tokens whose worth of what is inside the blocks the rank has; so many its routers see."""
        return self.tokens / self.x.tp

    @property
    def rows(self) -> int:
        """Of the vocabulary's matrices."""
        return -(-self.m.vocab_size // self.x.tp)

    @property
    def at_once(self) -> int:
        """Tokens whose logits exist at the same time."""
        most = max(1, MOST // (self.rows * self.wide))
        return min(self.tokens, CHUNK, most)


def norm_bytes(p: MicroBatch) -> float:
    """What a norm keeps of a token: its input, one wide number; on a CPU also what its kernels keep."""
    kept = p.m.dim * p.e + p.wide
    if p.on_cpu:
        kept += p.m.dim * (2 * p.wide - p.e if p.e < p.wide else p.wide)
    return kept


def layer_bytes(p: MicroBatch, experts: bool, recompute: str) -> float:
    """What one layer keeps until its backward. All inside the blocks is 1/tp wide; with SP all between them is, too.

    Two norms. Attention: input, q, k, v, output and a number a head. MLP: input, gate, up, silu(gate), the product.
    Experts, of each token's choices: the same, and their outputs; of its tokens what routers found. With full
    recomputation only the layer's input stays; with elementwise recomputation that, and what matrices and attention
    made. (Scores, where they stay: step01/attention_scores.py.)
    """
    m, e, wide, cheap = p.m, p.e, p.wide, recompute == "elementwise"
    if recompute == "full":
        return p.own * m.dim * e
    whole = p.tokens * m.dim * e  # a block's input, or what its last matrix made
    kv_dim = m.kv_dim * max(1, p.x.tp / m.n_kv_heads)
    if recompute == "none" and not (p.on_cpu or e == 2):
        kv_dim = m.dim  # a GPU's kernels in fp32 want as many k as q
    kv_dim *= 1 if cheap else p.x.gathered  # else they are gathered again
    kept = whole + p.share * (e * (2 * m.dim + 2 * kv_dim) + wide * m.n_heads)
    kept += p.own * (m.dim * e if cheap else 2 * norm_bytes(p))
    products = 2 if cheap else 4
    if not experts:
        return kept + whole + p.share * e * products * m.ffn_dim
    rows, width = p.share * m.experts_per_token, m.expert_width
    if cheap:
        kept += rows * e * (2 * width + m.dim) + p.share * wide * m.experts
    else:
        kept += rows * e * (4 * width + 2 * m.dim) + p.share * wide * (m.dim + 2 * m.experts)
    if m.shared_experts and (cheap or p.x.tp > 1):
        kept += whole
    return kept + p.share * e * products * m.shared_experts * width


def end_bytes(p: MicroBatch) -> float:
    """What norm, head and loss keep: the inputs of norm and head, and the logarithms of all probabilities.

    In chunks: the gradients of the hidden states and of the head, which are known since forward.
    """
    kept = p.own * norm_bytes(p) + p.tokens * p.m.dim * p.e
    if p.at_once < p.tokens:
        return kept + p.rows * p.m.dim * p.e
    return kept + p.tokens * p.rows * p.wide


def stage_bytes(p: MicroBatch, place: Place) -> float:
    """What a stage keeps of a micro-batch until its backward. Tables of RoPE are shared by its layers."""
    kept = sum(layer_bytes(p, p.m.has_experts(n), p.x.recompute) for n in place.layers)
    kept += 2 * p.m.seq_len // p.x.cp * p.m.head_dim * p.wide
    if place.before is None and p.x.tp > 1:
        kept += 9 * p.tokens  # int64 and bool: which rows of the embedding
    if place.after is None:
        kept += end_bytes(p)
    return kept


def waiting_bytes(p: MicroBatch, experts: bool) -> float:
    """What one layer keeps between B and W: the inputs of its matrices, and the gradients of their outputs."""
    m, kv_dim = p.m, p.m.kv_dim * max(1, p.x.tp / p.m.n_kv_heads)
    width = m.ffn_dim  # of what every token visits
    if experts:
        width = m.shared_experts * m.expert_width
    inputs = p.tokens * m.dim + p.share * m.dim  # of q, k and v, which is one; of o
    gradients = p.share * (m.dim + 2 * kv_dim) + p.tokens * m.dim
    if width:
        inputs += p.tokens * m.dim + p.share * width
        gradients += p.tokens * m.dim + p.share * 2 * width
    if experts:
        rows = p.share * m.experts_per_token
        inputs += rows * (m.dim + m.expert_width)
        gradients += rows * (m.dim + 2 * m.expert_width)
    return p.e * (inputs + gradients)


class Kept(NamedTuple):
    """Bytes that a stage keeps of one micro-batch."""

    until_b: float  # from F on
    until_w: float = 0.0  # from B on, where W comes apart


def kept_of(p: MicroBatch, place: Place, split: bool) -> Kept:
    """Of a stage. `split`: W comes apart."""
    waits = sum(waiting_bytes(p, p.m.has_experts(n)) for n in place.layers) if split else 0.0
    return Kept(stage_bytes(p, place), waits)


def kept_along(row: list[Action], kept: dict[int, Kept]) -> list[float]:
    """What a rank keeps before each action of its list, and after the last. `kept`: by stage."""
    changes = []
    for kind, _, stage in row:
        until_b, until_w = kept[stage]
        changes.append({"F": until_b, "B": until_w - until_b, "W": -until_w}[kind])
    return [*accumulate(changes, initial=0.0)]
