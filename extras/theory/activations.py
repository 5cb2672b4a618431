"""Counts the bytes of activations that a rank keeps of a micro-batch in 16 bits; for a layer the count is exact.

From F to B, a layer keeps what its backward needs. If a schedule has separate actions W, it keeps the inputs and
gradients of its products from B to W. A rank's list of actions says how many micro-batches wait (`kept_along`).
"""

from itertools import accumulate
from typing import NamedTuple

from common.schedules import Action, Place
from extras.theory.layouts import Layout
from extras.theory.shapes import Shape

NARROW, WIDE = 2, 4  # bytes of a number, and of one that is accumulated
MOST = 2**30  # most bytes of a chunk's logits in 32 bits (extras/variants/step01/chunked_loss.py)
CHUNK = 2048  # tokens whose logits exist at the same time: a plan's --loss-chunk


class MicroBatch(NamedTuple):
    """The sizes of a micro-batch on one rank of a layout. `on_cpu`: it runs a CPU's kernels, as in the dry run."""

    m: Shape
    x: Layout
    on_cpu: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on this rank."""
        return self.x.micro_batch_size * self.m.seq_len // self.x.cp

    @property
    def own(self) -> float:
        """Tokens that the rank holds between blocks."""
        return self.tokens / self.x.tp if self.x.sp else self.tokens

    @property
    def share(self) -> float:
        """The rank's share of the work inside blocks, counted in tokens; its routers see as many."""
        return self.tokens / self.x.tp

    @property
    def visits(self) -> float:
        """Rows that the rank's experts compute if all experts are equally busy."""
        return self.share * self.m.experts_per_token

    @property
    def kv(self) -> float:
        """Channels of keys (and as many of values) on this rank, which has at least one head."""
        return self.m.kv_dim / min(self.x.tp, self.m.n_kv_heads)

    @property
    def rows(self) -> int:
        """Rows of the embedding and of the head on this rank."""
        return -(-self.m.vocab_size // self.x.tp)

    @property
    def at_once(self) -> int:
        """Tokens whose logits exist at the same time."""
        return min(self.tokens, CHUNK, max(1, MOST // (self.rows * WIDE)))


def products_of(p: MicroBatch, experts: bool) -> list[tuple[float, float, float, float]]:
    """A layer's matrix products on one rank: (rows, inner, outer, number of products in one launch).

    Matrices with the same input are one product: q, k and v; gate and up.
    """
    m, tp, up = p.m, p.x.tp, 1 if p.m.gpt else 2
    width = m.shared_experts * m.expert_width if experts else m.ffn_dim  # of the MLP that every token visits
    products = [(p.tokens, m.dim, m.dim / tp + 2 * p.kv, 1), (p.tokens, m.dim / tp, m.dim, 1)]
    if width:
        products += [(p.tokens, m.dim, up * width / tp, 1), (p.tokens, width / tp, m.dim, 1)]
    if experts:
        here, width = m.experts / p.x.ep, m.expert_width
        products += [(p.visits / here, m.dim, up * width, here), (p.visits / here, width, m.dim, here)]
    return products


def norm_bytes(p: MicroBatch) -> float:
    """Bytes that a norm keeps of a token: its input, one wide number, and on a CPU also what its kernels keep."""
    return p.m.dim * NARROW + WIDE + p.on_cpu * p.m.dim * (2 * WIDE - NARROW)


def layer_bytes(p: MicroBatch, experts: bool, recompute: str) -> float:
    """Bytes that one layer keeps until its backward. tp shards all that is inside the blocks; SP also all between them.

    Of two norms, see `norm_bytes`. Of attention: input, q, k, v, output and a number a head. Of an MLP: input, gate,
    up, silu(gate), their product. Of experts: the same and the outputs, for each choice of a token, and the routers'
    results. Full recomputation keeps only the layer's input; elementwise recomputation also the outputs of matrices
    and attention. (step01/attention_scores.py may keep the scores, too.)
    """
    m, e, cheap = p.m, NARROW, recompute == "elementwise"
    if recompute == "full":
        return p.own * m.dim * e
    whole = p.tokens * m.dim * e  # a block's input, or the output of its last matrix
    keys = p.tokens * 2 * p.kv * e * (1 if cheap else p.x.gathered)  # else they are gathered again
    kept = whole + keys + p.share * (2 * m.dim * e + WIDE * m.n_heads)
    kept += p.own * (m.dim * e if cheap else 2 * norm_bytes(p))
    products = 2 if cheap else 4
    if not experts:
        return kept + whole + p.share * e * products * m.ffn_dim
    if cheap:
        kept += p.visits * e * (2 * m.expert_width + m.dim) + p.share * WIDE * m.experts
    else:
        kept += p.visits * e * (4 * m.expert_width + 2 * m.dim) + p.share * WIDE * (m.dim + 2 * m.experts)
    if m.shared_experts and (cheap or p.x.tp > 1):
        kept += whole
    return kept + p.share * e * products * m.shared_experts * m.expert_width


def end_bytes(p: MicroBatch) -> float:
    """Bytes that norm, head and loss keep: the inputs of norm and head, and the logarithms of all probabilities.

    A loss in chunks instead keeps the gradients of the hidden states and of the head, which it computes in forward.
    """
    kept = p.own * norm_bytes(p) + p.tokens * p.m.dim * NARROW
    if p.at_once < p.tokens:
        return kept + p.rows * p.m.dim * NARROW
    return kept + p.tokens * p.rows * WIDE


def stage_bytes(p: MicroBatch, place: Place, split: bool) -> tuple[float, float]:
    """Bytes that a stage keeps of a micro-batch from F to B and, if `split`, from B to W.

    From B to W it keeps the inputs and gradients of its products. Its layers share the tables of RoPE.
    """
    kinds = [p.m.has_experts(n) for n in place.layers]
    kept = sum(layer_bytes(p, kind, p.x.recompute) for kind in kinds)
    kept += 2 * p.m.seq_len // p.x.cp * p.m.head_dim * WIDE
    if place.before is None and p.x.tp > 1:
        kept += 9 * p.tokens  # int64 and bool: which rows of the embedding
    if place.after is None:
        kept += end_bytes(p)
    products = [product for kind in kinds for product in products_of(p, kind)] if split else []
    return kept, NARROW * sum(n * rows * (inner + outer) for rows, inner, outer, n in products)


def kept_along(row: list[Action], kept: dict[int, tuple[float, float]]) -> list[float]:
    """Bytes that a rank keeps before each action of its list, and after the last. `kept`: stage -> `stage_bytes`."""
    changes = []
    for kind, _, stage in row:
        until_b, until_w = kept[stage]
        changes.append({"F": until_b, "B": until_w - until_b, "W": -until_w}[kind])
    return [*accumulate(changes, initial=0.0)]
