"""Token batches: a pure function of (seed, step), the same for every layout.

    documents --tokenise once--> one long stream of tokens:   d e f ... END i m p o r t ... END ...
    window i  = stream[i*seq : i*seq + seq + 1]               tokens = its first seq, targets = its last seq
    sample j of step s = window order(seed, epoch)[s*B + j]   B = global batch size, in sequences

Text becomes bytes (ids 0-255) with END (256) after each document; attention is not stopped at document borders. Data
sets that already have an `input_ids` column are used as they are; a `labels` column beside it (same length, -100 where
no loss is wanted) supplies the targets. Everything is stored once by `datasets` as Arrow files and memory-mapped: all
ranks of a node share one copy in the page cache, and a batch costs one slice per sample. The last twentieth of the
stream is held out for validation.
"""

from typing import NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor

from common import UserError
from common.model import IGNORE
from services.readers import load_columns


class Batch(NamedTuple):
    """Some rows of a global batch: tokens and targets int64 [rows, seq]; target tokens in the *whole* global batch."""

    tokens: Tensor
    targets: Tensor
    n_targets: int


class Stream:
    """One column of token lists seen as a single memory-mapped sequence."""

    def __init__(self, data: datasets.Dataset, column: str):
        chunks = data.data.column(column).chunks
        self.pieces = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
        self.ends = np.cumsum([len(piece) for piece in self.pieces])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1, int64."""
        out = np.empty(stop - start, np.int64)
        piece, done = int(np.searchsorted(self.ends, start, side="right")), 0
        while done < len(out):
            offset = start + done - (int(self.ends[piece]) - len(self.pieces[piece]))
            part = self.pieces[piece][offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            piece, done = piece + 1, done + len(part)
        return out


class TokenData:
    """All batches of a run. Every rank builds the same object and asks it for its own rows."""

    def __init__(self, source: str, seq_len: int, batch_size: int, seed: int, vocab_size: int):
        """`batch_size` in sequences, of the global batch. Raises UserError if the data does not suffice or fit."""
        data, needs = load_columns(source)
        if needs > vocab_size:
            raise UserError(f"--dataset {source}: bytes and END are {needs} tokens: set --vocab-size to at least that")
        self.source, self.seq_len, self.batch_size, self.seed = source, seq_len, batch_size, seed
        self.vocab_size = vocab_size
        self.tokens = Stream(data, "input_ids")
        self.labels = Stream(data, "labels") if "labels" in data.column_names and not needs else None
        n_windows = (len(self.tokens) - 1) // seq_len
        self.n_validation = max(1, n_windows // 20)
        self.n_train = n_windows - self.n_validation
        if self.n_train < 1:
            raise UserError(
                f"--dataset {source}: {len(self.tokens)} tokens are too few for --seq-len {seq_len}: one training and "
                f"one validation sequence need {2 * seq_len + 1}; give more text or a shorter --seq-len"
            )
        if self.labels is not None and len(self.labels) != len(self.tokens):
            raise UserError(f"--dataset {source}: `labels` and `input_ids` differ in length")
        self.orders: dict[int, np.ndarray] = {}
        self.read([0])  # a vocabulary that does not fit shows here, not after the model is built

    def windows(self, step: int) -> list[int]:
        """The window numbers of the global batch of `step`, each epoch a new permutation of all training windows."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = range(places[0] // self.n_train, places[-1] // self.n_train + 1)
        if any(epoch not in self.orders for epoch in epochs):
            self.orders = {e: np.random.default_rng((self.seed, e)).permutation(self.n_train) for e in epochs}
        return [int(self.orders[place // self.n_train][place % self.n_train]) for place in places]

    def read(self, windows: list[int]) -> tuple[Tensor, Tensor]:
        """tokens and targets, int64 [windows, seq]. Targets are shifted here, before anything cuts the sequence.

        Raises UserError for an id outside the vocabulary.
        """
        starts = [window * self.seq_len for window in windows]
        rows = np.stack([self.tokens.read(at, at + self.seq_len + 1) for at in starts])
        tokens, targets = rows[:, :-1], rows[:, 1:]
        if self.labels is not None:
            targets = np.stack([self.labels.read(at + 1, at + self.seq_len + 1) for at in starts])
        for ids in (rows, targets[targets != IGNORE]):
            if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
                raise UserError(
                    f"--dataset {self.source}: token ids {ids.min()} to {ids.max()} occur, the vocabulary is "
                    f"0 to {self.vocab_size - 1}: set --vocab-size, or choose data made for this one"
                )
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The given rows of global batch `step`, and the number of target tokens in all of it."""
        windows = self.windows(step)
        tokens, targets = self.read(windows[rows])
        if self.labels is None:
            return Batch(tokens, targets, self.batch_size * self.seq_len)
        return Batch(tokens, targets, max(1, int((self.read(windows)[1] != IGNORE).sum())))

    def validation(self, n_sequences: int) -> tuple[Tensor, Tensor]:
        """The first `n_sequences` held-out windows (fewer if there are fewer): the same ones at every evaluation."""
        n = min(n_sequences, self.n_validation)
        return self.read(list(range(self.n_train, self.n_train + n)))
