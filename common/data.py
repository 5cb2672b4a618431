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

import os
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from filelock import FileLock
from huggingface_hub import HfApi
from torch import Tensor

from common.model import IGNORE
from common.run import UserError

END = 256
BYTE_VOCAB = 257
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".py": "text"}
SKIPPED = {"test", "tests", "idlelib", "site-packages", "__pycache__"}


class Batch(NamedTuple):
    """Some rows of a global batch: tokens and targets int64 [rows, seq]; target tokens in the *whole* global batch."""

    tokens: Tensor
    targets: Tensor
    n_targets: int


def tokenise(rows: dict) -> dict:
    """Texts -> lists of byte tokens, END after each (a batched function for `datasets.map`)."""
    texts = ((text or "").encode("utf-8", errors="replace") for text in rows["text"])
    return {"input_ids": [np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(END)) for text in texts]}


def decode(tokens: list[int]) -> str:
    """Byte tokens -> text; END becomes a blank line, ids that are no byte are skipped."""
    return b"".join(b"\n\n" if t == END else bytes([t]) for t in tokens if t <= END).decode("utf-8", errors="replace")


def local_files(source: str) -> list[Path]:
    """The data files that `source` (a file, a folder, or "" for Python's own library) stands for, in a fixed order."""
    if not source:
        found = []
        for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
            inside[:] = sorted(set(inside) - SKIPPED)
            found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
        # Neighbours in the alphabet are alike: a fixed shuffle makes the held-out tail look like the rest.
        return [found[i] for i in np.random.default_rng(0).permutation(len(found))]
    path = Path(source)
    if path.is_file():
        return [path]
    for suffix in READERS:
        if found := sorted(path.rglob(f"*{suffix}")):
            return found
    raise UserError(f"--dataset {source}: the folder holds no {', '.join(READERS)} file")


def open_dataset(source: str) -> datasets.Dataset | datasets.DatasetDict:
    """The raw data behind `--dataset`: rows with a `text` or an `input_ids` column. May raise UserError."""
    path = Path(source)
    if source and any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_from_disk(source)
    if not source or path.exists():
        files = local_files(source)
        reader = READERS.get(files[0].suffix)
        if reader is None:
            raise UserError(f"--dataset {source}: cannot read *{files[0].suffix}; use one of {', '.join(READERS)}")
        if not any(file.stat().st_size for file in files):
            raise UserError(f"--dataset {source}: empty")
        options = dict(sample_by="document", encoding_errors="replace") if reader == "text" else {}
        return datasets.load_dataset(reader, data_files=[str(file) for file in files], split="train", **options)
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or path.suffix in READERS:
        raise UserError(f"--dataset {source}: no such file or folder")
    if not datasets.config.HF_HUB_OFFLINE:
        try:  # one quick question first: without a network, load_dataset would retry for half a minute, noisily
            HfApi().dataset_info(source, timeout=10)
        except Exception as error:
            raise ConnectionError(source) from error
    return datasets.load_dataset(source, split="train")


def columns_of(data: datasets.Dataset | datasets.DatasetDict, source: str) -> tuple[datasets.Dataset, int]:
    """Rows with lists of tokens, made from `text` if there are none, and the vocabulary size that bytes need, or 0."""
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise UserError(f"--dataset {source}: no `train` split, only {list(data)}")
        data = data["train"]
    schema = data.data.schema
    if "input_ids" not in data.column_names:
        if "text" not in data.column_names:
            raise UserError(f"--dataset {source}: no `text` and no `input_ids` column, only {data.column_names}")
        if schema.field("text").type not in (pa.string(), pa.large_string()):
            raise UserError(f"--dataset {source}: `text` holds {schema.field('text').type}, not strings")
        features = datasets.Features({"input_ids": datasets.List(datasets.Value("uint16"))})
        options = dict(batched=True, remove_columns=data.column_names, features=features, desc="tokenise")
        return data.map(tokenise, **options), BYTE_VOCAB
    for column in {"input_ids", "labels"} & set(data.column_names):
        held = schema.field(column).type
        if not pa.types.is_integer(getattr(held, "value_type", pa.null())):
            raise UserError(f"--dataset {source}: `{column}` holds {held}, not lists of integers")
    return data, 0


def load_columns(source: str) -> tuple[datasets.Dataset, int]:
    """Open and, if it is text, tokenise `--dataset`; returns it and the vocabulary size it needs.

    One process of a node does the work (and shows the progress bar) while the others wait at a file lock, then find
    the result in `datasets`' cache. Raises UserError, in one line, for whatever is wrong with the data.
    """
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said once, below
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with FileLock(cache / "tokenise.lock"):
        try:
            return columns_of(open_dataset(source), source)
        except UserError:
            raise
        except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
            raise UserError(
                f"--dataset {source}: not a local path, and the hub cannot be reached or does not have it; "
                "give a local .txt, .jsonl or .parquet file or folder, or leave --dataset away for Python's own sources"
            ) from error
        except Exception as error:
            cause = error.__cause__ or error
            reason = (str(cause) or type(cause).__name__).splitlines()[0]
            raise UserError(f"--dataset {source}: cannot be read ({reason})") from error


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
