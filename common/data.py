"""Token batches: a pure function of (seed, step), the same on every rank and in every layout.

    documents -> bytes 0-255 of each, then END -> one long stream:   d e f ... END i m p o r t ... END ...
    window w  = stream[w*seq : w*seq + seq + 1]                    tokens = its first seq, targets = its last seq
    sample j of step s = window order[i mod n], i = s*B + j        B = global batch size, n = windows to train on;
                                                                   epoch = i // n; order: drawn from (seed, epoch)

Targets are shifted here, before a sequence is sharded. Every rank reads the whole global batch, since token ids are
small, and works on its share. The last twentieth of the windows is held out for validation. Token ids are the bytes of
the text, even if the model's vocabulary is larger.
"""

import os
import sysconfig
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import UserError
from common.model import IGNORE, ModelConfig

END = 256  # the token that ends a document
SKIPPED = {"test", "tests", "idlelib", "site-packages", "__pycache__"}


def to_tokens(texts: Iterable[str]) -> np.ndarray:
    """Texts -> one stream of token ids: the bytes of each text, then END."""
    texts = (np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts)
    return np.concatenate([np.append(text, np.uint16(END)) for text in texts])


def text_of(path: Path) -> str:
    """Read a text file; bytes that are not UTF-8 become U+FFFD. Raises UserError for NULs, a sign of UTF-16."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "\0" in text:
        raise UserError(f"--dataset {path}: it has NULs, as UTF-16 has: convert it to UTF-8")
    return text


def read_files(paths: list[Path]) -> tuple[np.ndarray, None]:
    """Read text files in a fixed random order, so that the held-out tail resembles the rest (neighbours are alike)."""
    order = np.random.default_rng(0).permutation(len(paths))
    return to_tokens(text_of(paths[i]) for i in order), None


def read_library(_source: str) -> tuple[np.ndarray, None]:
    """Read the source code of Python's standard library."""
    paths = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = sorted(set(inside) - SKIPPED)
        paths += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return read_files(paths)


def read_hub(source: str) -> tuple[np.ndarray, None]:
    """Read a data set of the Hugging Face hub that has a column `text`."""
    import datasets  # takes seconds to import

    try:
        return to_tokens(datasets.load_dataset(source, split="train")["text"]), None
    except Exception as error:
        raise UserError(f"--dataset {source}: no such file, and as a data set of the hub: {error!r:.200}") from error


# The kind of a source (a suffix, for example) -> its reader, which returns tokens and labels (None: the next tokens).
READERS: dict[str, Callable[[str], tuple[Any, Any]]] = {
    "": read_library,
    ".txt": lambda source: read_files([Path(source)]),
    "hub": read_hub,
}


def kind_of(source: str) -> str:
    """The key in READERS for a value of `--dataset`."""
    if not source:
        return ""
    if not Path(source).exists():
        return "hub"
    return "folder" if Path(source).is_dir() else Path(source).suffix or "file without a suffix"


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers 0 to n-1 in the random order of an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(n)


class Data:
    """The batches of a run."""

    def __init__(self, source: str, shape: ModelConfig, batch_size: int, seed: int):
        """`source`: see READERS. `batch_size`: in sequences. Raises UserError if data are unreadable or too few."""
        kind = kind_of(source)
        if kind not in READERS:
            raise UserError(f"--dataset {source}: cannot read a {kind}; known are {', '.join(filter(None, READERS))}")
        self.tokens, self.labels = READERS[kind](source)
        self.source, self.shape, self.batch_size, self.seed = source, shape, batch_size, seed
        n_windows = (len(self.tokens) - 1) // shape.seq_len
        self.n_train = n_windows - max(1, n_windows // 20)
        if self.n_train < 1:
            few = f"{len(self.tokens)} tokens are less than two sequences of {shape.seq_len}"
            raise UserError(f"--dataset {source or '(default)'}: {few}")

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step: tokens and targets, int64 [batch_size, seq]."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        places = [divmod(place, self.n_train) for place in places]
        return self.read([shuffled(self.n_train, self.seed, epoch)[place] for epoch, place in places])

    def read(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Tokens and targets of `windows`, int64 [windows, seq]. Raises UserError for an id outside the vocabulary."""
        seq = self.shape.seq_len
        rows = np.stack([self.tokens[i * seq : (i + 1) * seq + 1] for i in windows]).astype(np.int64)
        targets = rows[:, 1:]
        if self.labels is not None:
            targets = np.stack([self.labels[i * seq + 1 : (i + 1) * seq + 1] for i in windows]).astype(np.int64)
        for ids in rows, targets[targets != IGNORE]:
            if ids.size and not 0 <= ids.min() <= ids.max() < self.shape.vocab_size:
                raise UserError(f"--dataset {self.source}: ids {ids.min()} to {ids.max()} are not in the vocabulary")
        return torch.from_numpy(rows[:, :-1]), torch.from_numpy(targets)
