"""Batches of tokens. Which tokens a training step sees depends only on the data, --seed, the
sequence length, the global batch size, the number of the step and NumPy's version: never on ranks
or layout.

    documents -> the bytes of each, then END -> one stream:   100 101 102 ("def") ... 256 (END) ...
    window number w: the seq + 1 tokens from w*seq on; its first seq are the inputs, its last seq
    the targets. With seq 4:    window 0: inputs stream[0:4], targets stream[1:5]
                                window 1: inputs stream[4:8], targets stream[5:9]

The last twentieth of the windows (at least one) is held out: no step trains on their targets, so
that a tool can compute a trained model's loss on them. Each epoch goes through the other n windows
once, in a random order of its own, which NumPy draws from (seed, epoch). With the global batch size
B, and all numbers counted from 0:

    sample i           the window order[i mod n], where `order` is that of epoch i // n
    training step s    samples s B to s B + B - 1

With n = 10 and B = 4, training step 2 has the samples 8 to 11: the windows order[8] and order[9] of
epoch 0, then order[0] and order[1] of epoch 1.

Targets are shifted here, in the whole sequence, before step 5 shards it. Attention may look back
across END into an earlier document. Every rank reads the whole global batch, since token ids are
small, and works on its share.

readers.py reads files and data sets. Text becomes bytes, whatever the size of the vocabulary.

MEMORY. Each rank holds all tokens, two bytes for each, and four or more while text is read. Of a
.bin file of token ids it holds none: the system reads parts of the file when they are used. (At the
start each rank reads all of it once, to find the largest id.) So write a large corpus to such a
file first, in the format of readers.py.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from common import UserError
from common.model import ModelConfig
from common.readers import read_source

END = 256  # the token that ends a document
PARTS = 64  # a fingerprint cuts the stream into so many parts
BLOCK = 2**21  # and reads at most so many ids at the start of each


@lru_cache(maxsize=1)  # epochs come one after another
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers 0 to n-1 in an epoch's random order, which may change with NumPy's version."""
    return np.random.default_rng((seed, epoch)).permutation(n)


class Data:
    """The batches of a run. `summary` is a line that says what has been read."""

    def __init__(self, source: str, shape: ModelConfig, global_batch_size: int, seed: int):
        """`source`: a value of --dataset. `global_batch_size`: in sequences.

        Raises UserError if data cannot be read, are too few, or have ids outside the vocabulary.
        """
        self.source = source
        self.shape = shape
        self.global_batch_size = global_batch_size
        self.seed = seed
        description, contents = read_source(source)
        warning = ""
        if isinstance(contents, np.ndarray):
            self.tokens = contents
        else:
            self.tokens, replaced = to_tokens(contents)
            if replaced:
                warning = f" ({replaced:,} U+FFFD: for bytes that are not UTF-8, or the text's own)"
        self.summary = f"data: {len(self.tokens):,} tokens{warning} of {description}"
        self.n_windows = (len(self.tokens) - 1) // shape.seq_len
        self.n_train = self.n_windows - max(1, self.n_windows // 20)
        self.check_tokens()

    def check_tokens(self):
        """Raise UserError if there are too few tokens, or ids outside the vocabulary."""
        name = self.source or "(default)"
        if self.n_train < 1:
            raise UserError(
                f"--dataset {name}: {len(self.tokens)} tokens are too few: two windows of "
                f"{self.shape.seq_len} + 1 tokens, which share one, need "
                f"{2 * self.shape.seq_len + 1}"
            )
        largest = int(self.tokens.max())  # a mapped file is read piece by piece
        if largest >= self.shape.vocab_size:
            raise UserError(
                f"--dataset {name}: its token id {largest} needs a --model with "
                f"vocab_size={largest + 1} or more, not {self.shape.vocab_size}"
            )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step: tokens and targets, int64 [global_batch_size, seq]."""
        windows = []
        for sample in range(step * self.global_batch_size, (step + 1) * self.global_batch_size):
            epoch, i = divmod(sample, self.n_train)
            windows.append(shuffled(self.n_train, self.seed, epoch)[i])
        return self.read(windows)

    def read(self, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens and targets of `windows`, int64 [windows, seq]."""
        starts = np.asarray(windows) * self.shape.seq_len
        indices = starts[:, None] + np.arange(self.shape.seq_len + 1)  # [windows, seq + 1]
        rows = torch.from_numpy(self.tokens[indices].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

    def fingerprint(self) -> str:
        """A short hash of the stream, by which ranks check that they have the same tokens, and a
        resumed run that it has those of the saved one.

        It is the start of the SHA-256 of the stream's length and of the first BLOCK ids of each of
        64 nearly equal parts. This covers a stream of up to 64 BLOCK = 2**27 tokens, and only parts
        of a longer one.
        """
        digest = hashlib.sha256(str(len(self.tokens)).encode())
        for part in np.array_split(self.tokens, PARTS):
            # As uint32: the same ids have the same fingerprint, whatever the file's dtype
            digest.update(part[:BLOCK].astype(np.uint32))
        return digest.hexdigest()[:16]


def to_tokens(texts: Iterable[str]) -> tuple[np.ndarray, int]:
    """Texts -> (tokens, replaced).

    tokens: one stream of ids, uint16: the bytes of each text, then END. replaced, for a warning:
    how often U+FFFD occurs, which `txt_texts` puts in place of bytes that are not UTF-8. Those of
    the text itself are counted, too.
    """
    streams = [np.array([], np.uint16)]  # np.concatenate needs at least one array
    replaced = 0
    for text in texts:
        # A JSON string may hold half of a surrogate pair, which becomes "?"
        document = np.frombuffer(text.encode(errors="replace"), np.uint8)
        streams += [document.astype(np.uint16), np.array([END], np.uint16)]
        replaced += text.count("\ufffd")
    return np.concatenate(streams), replaced
