"""Restricts attention to tokens of the same document (`--documents mask`).

A sequence is a window of the token stream and holds several documents (*packing*: Krell et al. 2021). Token i attends
to the tokens j <= i of its own document (Llama 3: Dubey et al. 2024, section 3.2). RoPE is relative, so its positions
need not restart. A document ends with --end-token, whose target, the next document's first token, counts in the loss.
In step 5 this would be another `visible`. No mask is built: in whole sequences each document is a causal triangle.

    keys ->    a a b | b c c      Queries and keys of one chunk (consecutive tokens): a causal triangle for each
    queries a  #     |            document. Keys of an earlier chunk: one rectangle or none, because only the
            a  # #   |            document of that chunk's last key can continue in the queries' chunk.
            b      # |
            ---------+-----       Law: all ranks together compute sum L (L+1) / 2 pairs for documents of L tokens,
            b      # | #          however the sequence is sharded. No messages are needed to find the documents:
            c        |   # #      each rank reads the whole batch.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Literal

import torch
from torch import Tensor

from common import UserError
from common.model import PRESETS, attend
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from step05_cp_ring import CONTEXT


def segments(numbers: Tensor, positions: Tensor) -> list[tuple[int, int, int, int]]:
    """Cuts `positions` [s] at gaps, and where `numbers` (int64 [seq]) change -> (start, stop, position, document)."""
    documents = numbers[positions]  # the document of each token
    borders = 1 + ((positions.diff() != 1) | (documents.diff() != 0)).nonzero().flatten()
    runs = pairwise([0, *borders.tolist(), len(positions)])  # of adjacent tokens in one document
    return [(start, stop, int(positions[start]), int(documents[start])) for start, stop in runs]


class MicroBatch:
    """The documents of a micro-batch. All ranks that share its sequences find the same documents."""

    def __init__(self, tokens: Tensor, end: int, positions: Tensor):
        """Takes tokens int64 [batch, seq], on the CPU, and the positions of each rank's tokens, int64 [n, s/n]."""
        rows, ends = torch.arange(len(tokens)), (tokens == end).long().flatten()
        self.numbers = (ends.cumsum(0) - ends).view_as(tokens) + rows[:, None]  # [batch, seq]: each token's document
        self.places = positions + rows[:, None, None] * tokens.shape[1]  # [batch, n, s/n], in concatenated sequences
        self.lengths = self.numbers.flatten().unique_consecutive(return_counts=True)[1].tolist()
        self.found: dict[int, list[tuple]] = {}  # by source rank; the same in all layers, forward and backward

    def visible(self, rank: int, source: int, _length: int) -> list[tuple[slice, slice, bool]]:
        """Replaces `zigzag_visible` of step 5, and allows any positions, and several concatenated sequences."""
        if source not in self.found:
            both = (segments(self.numbers.flatten(), self.places[:, r].flatten()) for r in (rank, source))
            self.found[source] = [
                (slice(start, stop), slice(first, end), key_at == at)
                for (start, stop, at, document), (first, end, key_at, other) in product(*both)
                if document == other and key_at <= at
            ]
        return self.found[source]


class Documents:
    """Restricts attention to documents. `now` is the micro-batch whose forward or backward is running."""

    def __init__(self, config: Any, parts: Parts):
        self.config, self.progress = config, parts.progress
        seq = parts.model.config.seq_len
        self.mine = parts.mesh["dp"].share(config.global_batch_size, "batch")
        cp, cp_mode = getattr(config, "cp", 1), getattr(config, "cp_mode", "zigzag")
        n = cp // config.ulysses if cp_mode == "usp" else cp  # ranks that have different tokens in attention
        self.positions = torch.stack([CONTEXT[cp_mode].positions(seq, rank, n) for rank in range(n)])
        within = self.within(CONTEXT[cp_mode].attention if cp > 1 else attend)
        for layer in parts.model.model.layers.values():
            parts.around(layer.self_attn, "attend", within, by=__name__)
        parts.around(parts.data, "batch", self.batch, by=__name__)
        parts.progress.starts = self.enter

    def within(self, core: Callable) -> Callable:
        """Wraps the attention function `core`: pass `visible` to it or, for whole sequences, use `attend`."""
        known = inspect.signature(core).parameters
        if "visible" in known:  # sequences are concatenated
            return lambda core, *xs: core(*(x.flatten(0, 1)[None] for x in xs), visible=self.now.visible).view_as(xs[0])
        return lambda core, *qkv: core(*qkv, attend=self.attend) if "attend" in known else self.attend(*qkv)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Like `attend` of common/model.py, with one call for each document. (A GPU's varlen kernel needs only one.)"""
        split = (x.flatten(0, 1)[None].split(self.now.lengths, 1) for x in (q, k, v))
        return torch.cat([attend(*one) for one in zip(*split, strict=True)], 1).view(q.shape)

    def batch(self, read: Callable, step: int) -> tuple[Tensor, Tensor]:
        """Wraps `Data.batch`: find the documents of this rank's sequences."""
        tokens, targets = read(step)
        parts = tokens[self.mine].split(self.config.micro_batch_size)
        self.all = [MicroBatch(part, self.config.end_token, self.positions) for part in parts]
        return tokens, targets

    def enter(self):
        """Called before a forward or backward: in training, set `now` to the current micro-batch."""
        if torch.is_grad_enabled():
            self.now = self.all[self.progress.now]

    def look(self, tokens: Tensor):
        """Called before validation or generation: set `now`, on the CPU, to the documents of `tokens` [batch, seq]."""
        self.now = MicroBatch(tokens, self.config.end_token, self.positions)


@dataclass
class Flags:
    """Documents."""

    documents: Literal["off", "mask"] = "off"  # mask: attention only within a document
    end_token: int = 256  # with --documents: the token that ends a document (0: token 0); 256 is the course's own


COMPUTED = True
BESIDE = TRIED = dict(end_token=32)
NEEDS = [("end_token", "documents", "mask")]
REFUSES = [Refusal(dict(documents=SET, dry_run=SET), "a dry run has no tokens, and does not know where documents end")]


def check(config: Any, world: int):
    """Raises UserError unless --end-token is in the vocabulary."""
    if config.documents != "off" and config.end_token >= PRESETS[config.model].vocab_size:
        raise UserError(f"--end-token {config.end_token} is not in the vocabulary ({PRESETS[config.model].vocab_size})")


def attach(config: Any, parts: Parts) -> Documents | None:
    """Restrict the attention of every layer to documents."""
    if config.documents == "off":
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)  # Hopper's default, which takes 20 ms or more to plan for a new length
    return Documents(config, parts)
