"""A variant for all steps: attention that stops at the borders of documents (--documents mask or reset).

A sequence is a window of the stream, so it holds several documents in a row (*packing*: Krell et al. 2021, "Efficient
Sequence Packing without Cross-contamination"), the first and the last of them cut (Ding et al. 2024, "Fewer Truncations
Improve Language Modeling"). Causal attention also looks at the documents before. With

    mask    token i looks at the tokens j <= i of its own document (Llama 3: Dubey et al. 2024, section 3.2)
    reset   the same, and RoPE's positions begin with 0 in each document (RoPE is relative: only rounding changes)

A document ends with its END, the token --end-token. The target of END, the first token of the next document, counts.
Nothing is padded, and no mask is made. Documents lie in a row, so what is computed is made of triangles and rectangles:

    keys ->    a a a b | b c c c      A rank's own tokens: a triangle for each document, causal attention to itself.
    queries a  #       |
            a  # #     |              Keys of the past that another rank has: a rectangle, or nothing. Only one document
            a  # # #   |              can reach from these keys to these queries: that of the last key, if the first
            b        # |              query is in it. Its keys are the last ones, its queries the first ones.
            -----------+-------
            b        # | #            The law of visited blocks: all ranks together compute  sum L (L+1) / 2  pairs for
            c          |   #          documents of L tokens, no matter how the sequence is cut; causal attention,
            c          |   # #        s (s+1) / 2.
            c          |   # # #

One device, and Ulysses after its exchange, have whole sequences: triangles alone. A batch is a pure function of (seed,
step), so all ranks, and all stages of a pipeline, know where documents end. Nothing is sent for it; keys and values
travel as ever. A number that theory predicts is that of attention without borders: FLOPs, MFU, what selective
recomputation keeps of a ring. `attention_pairs` in metrics.jsonl is the part of the pairs that is left.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.model import Decoder, attend

Block = tuple[slice, slice, slice, bool]  # sequences, query rows, key rows, causal


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """int64 [batch, seq], whole sequences -> the number of each token's document in its sequence: the ENDs before."""
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def run_lengths(numbers: Tensor) -> list[int]:
    """The lengths of all documents of [batch, seq] numbers, sequence after sequence; together batch x seq."""
    apart = numbers + torch.arange(len(numbers))[:, None] * (numbers.shape[1] + 1)
    return apart.unique_consecutive(return_counts=True)[1].tolist()


def restarted(numbers: Tensor) -> Tensor:
    """Numbers [batch, seq] of whole sequences -> the place of each token in its document, int64 [batch, seq]."""
    places = torch.arange(numbers.shape[1]).expand_as(numbers)
    begins = F.pad(numbers.diff(dim=1) != 0, (1, 0))
    return places - (places * begins).cummax(1).values


def triangles(numbers: Tensor) -> list[tuple[slice, slice, bool]]:
    """A rank's own tokens of one sequence, numbers [seq]: (query rows, key rows, causal) of each document."""
    borders = accumulate(run_lengths(numbers[None]), initial=0)
    return [(slice(*run), slice(*run), True) for run in pairwise(borders)]


def rectangle(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice, bool]]:
    """Keys that are all before the queries, numbers [s_k] and [s_q] of one sequence: the one document in both, if any.

    Numbers never fall. So those of both that are equal can only be the last key's, and are first among the queries'.
    """
    reaching = keys[-1]
    s_q, s_k = int((queries == reaching).sum()), int((keys == reaching).sum())
    return [(slice(0, s_q), slice(len(keys) - s_k, len(keys)), False)] if s_q else []


def moved(rows: slice, inside: slice) -> slice:
    """Rows given from the beginning of `inside`, as rows of the whole."""
    return slice(inside.start + rows.start, inside.start + rows.stop)


class MicroBatch:
    """The documents of a few sequences: which are at which place, on every rank that shares them."""

    def __init__(self, tokens: Tensor, end: int, positions: Callable[[int], Tensor]):
        """tokens int64 [batch, seq], whole sequences on the CPU; `positions` of the tokens that a rank of cp holds."""
        self.numbers, self.positions = document_numbers(tokens, end), positions
        self.lengths = run_lengths(self.numbers)
        self.rope: Tensor | None = None  # positions of this rank's tokens, if they restart: [batch, seq], on the device
        self.found: dict[int, list[Block]] = {}  # by rank, what was cut: the same in all layers, forward and backward

    def cut(self, rank: int, source: int, block: tuple[slice, slice, bool] | None) -> list[Block]:
        """Of a block that `visible` of step 5 found for `rank` and the keys of `source`, what is within documents."""
        if source not in self.found:
            self.found[source] = [] if block is None else self.within(rank, source, *block)
        return self.found[source]

    def within(self, rank: int, source: int, rows: slice, keys: slice, causal: bool) -> list[Block]:
        """The same for a block that is there."""
        queries, looked_at = (self.numbers[:, self.positions(r)] for r in (rank, source))
        blocks = []
        for i, (q, k) in enumerate(zip(queries[:, rows], looked_at[:, keys], strict=True)):
            for some, at, diagonal in triangles(q) if causal else rectangle(q, k):
                blocks.append((slice(i, i + 1), moved(some, rows), moved(at, keys), diagonal))
        return blocks


class Documents:
    """The micro-batches of a step, and attention within their documents: one for all layers of a rank.

    It follows the model: `now` is the micro-batch that is computed, forward, backward or again.
    """

    def __init__(self, run: Any):
        """`run`: a Trainer that knows its model, positions and pipeline. Replaces the attention core of every layer."""
        self.run, self.config, self.rank, self.count = run, run.config, 0, 0
        self.micro_batches: list[MicroBatch] = []
        self.now: MicroBatch | None = None
        self.positions: Callable[[int], Tensor] = lambda rank: run.positions
        for layer in run.model.model.layers.values():
            core = layer.self_attn
            if hasattr(core.attend, "cut"):  # step 5's, where the sequence is cut
                core = core.attend
                core.cut, self.rank = self.cut, core.group.rank
                self.positions = partial(core.positions, run.shape.seq_len)
            core.attend = self.attend
        if run.pipeline is None:
            run.model.register_forward_pre_hook(self.enter)
        else:
            run.pipeline.act = partial(self.act, run.pipeline, run.pipeline.act)

    def begin(self, tokens: Tensor):
        """Whole sequences int64 [rows, seq] that are computed next, in micro-batches, in order."""
        parts = tokens.split(self.config.micro_batch_size)
        self.micro_batches = [MicroBatch(part, self.config.end_token, self.positions) for part in parts]
        self.count = 0
        for micro_batch in self.micro_batches if self.config.documents == "reset" else ():
            micro_batch.rope = restarted(micro_batch.numbers)[:, self.run.positions].to(self.run.device)

    def share_of_pairs(self) -> float:
        """The query-key pairs within documents of these micro-batches, as a part of those of causal attention."""
        lengths = [length for micro_batch in self.micro_batches for length in micro_batch.lengths]
        return sum(n * (n + 1) for n in lengths) / (sum(lengths) * (self.run.shape.seq_len + 1))

    def enter(self, model: Decoder, inputs: tuple) -> tuple | None:
        """Before the model is called: the next micro-batch, with its positions if they are not the usual ones."""
        self.now, self.count = self.micro_batches[self.count], self.count + 1
        return None if self.now.rope is None else (inputs[0], self.now.rope)

    def act(self, pipeline: Any, right: Callable, action: Any, peer: Any):
        """Before an action of a pipeline, the same."""
        self.now = self.micro_batches[action.micro_batch]
        pipeline.positions = pipeline.positions if self.now.rope is None else self.now.rope
        right(action, peer)

    def cut(self, source: int, block: tuple | None) -> list[Block]:
        """Instead of step 5's `every_sequence`."""
        return self.now.cut(self.rank, source, block)

    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Instead of `attend` of common/model.py, on whole sequences: document by document, none in two sequences.

        q [batch, seq, heads, head_dim]; k, v [batch, seq, kv_heads, head_dim] -> as q. A call of the kernel for each
        document. (On a GPU, torch.nn.attention.varlen would take all in one.)
        """
        parts = (x.flatten(0, 1)[None].split(self.now.lengths, 1) for x in (q, k, v))
        return torch.cat([attend(*document) for document in zip(*parts, strict=True)], 1).view(q.shape)
