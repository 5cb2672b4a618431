"""Token batches: a pure function of (seed, step), the same for every layout.

    documents --tokenise once--> one long stream of tokens:   d e f ... END i m p o r t ... END ...
    window i  = stream[i*seq : i*seq + seq + 1]               tokens = its first seq, targets = its last seq
    sample j of step s = window order(seed, epoch)[s*B + j]   B = global batch size, in sequences

The stream is one column of a table, memory-mapped (services/readers.py): all ranks of a node share one copy in the page
cache. Attention stops at document borders only with --documents. The stream's last twentieth is for validation.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common import UserError
from common.model import IGNORE


class Batch(NamedTuple):
    """Some rows of a global batch: tokens and targets int64 [rows, seq]; target tokens in the *whole* global batch."""

    tokens: Tensor
    targets: Tensor
    n_targets: int

    def micro_batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """(tokens, targets) of `size` rows at a time."""
        return list(zip(self.tokens.split(size), self.targets.split(size), strict=True))


class TokenData:
    """All batches of a run. Every rank builds the same object and asks it for its own rows."""

    def __init__(
        self, tokens: Any, labels: Any | None, source: str, seq_len: int, batch_size: int, seed: int, vocab_size: int
    ):
        """`tokens`, and `labels` if targets are not the tokens: streams, with len() and `read(start, stop)` -> int64.

        `source`: their name in messages. `batch_size`: sequences of a global batch. Raises UserError for unfit data.
        """
        self.tokens, self.labels, self.source, self.seq_len = tokens, labels, source, seq_len
        self.batch_size, self.seed, self.vocab_size = batch_size, seed, vocab_size
        n_windows = (len(self.tokens) - 1) // seq_len
        self.n_validation = max(1, n_windows // 20)
        self.n_train = n_windows - self.n_validation
        if self.n_train < 1:
            raise UserError(
                f"--dataset {source}: {len(self.tokens)} tokens are too few for --seq-len {seq_len}: one training and "
                f"one validation sequence need {2 * seq_len + 1}; give more text or a shorter --seq-len"
            )
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
