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

import sysconfig
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import torch
from filelock import FileLock
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
    texts = (text.encode("utf-8", errors="replace") for text in rows["text"])
    return {"input_ids": [np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(END)) for text in texts]}


def decode(tokens: list[int]) -> str:
    """Byte tokens -> text; END becomes a blank line, ids that are no byte are skipped."""
    return b"".join(b"\n\n" if t == END else bytes([t]) for t in tokens if t <= END).decode("utf-8", errors="replace")


def local_files(source: str) -> list[Path]:
    """The data files that `source` (a file, a folder, or "" for Python's own library) stands for, in a fixed order."""
    if not source:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
        # Neighbours in the alphabet are alike: a fixed shuffle makes the held-out tail look like the rest.
        return [found[i] for i in np.random.default_rng(0).permutation(len(found))]
    path = Path(source)
    if path.is_file():
        return [path]
    for suffix in READERS:
        if found := sorted(path.rglob(f"*{suffix}")):
            return found
    raise UserError(f"--dataset {source}: the folder holds no {', '.join(READERS)} file")


def open_dataset(source: str) -> datasets.Dataset:
    """The raw data behind `--dataset`: rows with a `text` or an `input_ids` column. May raise UserError."""
    path = Path(source)
    if source and path.is_dir() and (path / "state.json").exists():
        return datasets.load_from_disk(source)
    if not source or path.exists():
        files = local_files(source)
        reader = READERS.get(files[0].suffix)
        if reader is None:
            raise UserError(f"--dataset {source}: cannot read *{files[0].suffix}; use one of {', '.join(READERS)}")
        options = dict(sample_by="document", encoding_errors="replace") if reader == "text" else {}
        return datasets.load_dataset(reader, data_files=[str(file) for file in files], split="train", **options)
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or path.suffix in READERS:
        raise UserError(f"--dataset {source}: no such file or folder")
    once = datasets.DownloadConfig(max_retries=0)
    return datasets.load_dataset(source, split="train", download_config=once)


def load_columns(source: str) -> tuple[datasets.Dataset, int]:
    """Open and, if it is text, tokenise `--dataset`; returns it and the vocabulary size it needs.

    One process of a node does the work (and shows the progress bar) while the others wait at a file lock, then find
    the result in `datasets`' cache. Raises UserError, in one line, for whatever is wrong with the data.
    """
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "tokenise.lock"):
        try:
            data = open_dataset(source)
        except UserError:
            raise
        except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
            raise UserError(
                f"--dataset {source}: not a local path, and the hub cannot be reached or does not have it; "
                "give a local .txt, .jsonl or .parquet file or folder, or leave --dataset away for Python's own sources"
            ) from error
        except Exception as error:
            raise UserError(f"--dataset {source}: cannot be read ({str(error).splitlines()[0]})") from error
        if isinstance(data, datasets.DatasetDict):
            data = data["train"]
        if "input_ids" in data.column_names:
            data = data.flatten_indices() if data._indices is not None else data
            return data, 0
        if "text" not in data.column_names:
            raise UserError(f"--dataset {source}: no `text` and no `input_ids` column, only {data.column_names}")
        features = datasets.Features({"input_ids": datasets.List(datasets.Value("uint16"))})
        columns = data.column_names
        return data.map(tokenise, batched=True, remove_columns=columns, features=features, desc="tokenise"), BYTE_VOCAB


class Stream:
    """One column of token lists seen as a single memory-mapped sequence."""

    def __init__(self, data: datasets.Dataset, column: str):
        chunks = data.data.column(column).chunks
        self.pieces = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks if len(chunk)]
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
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.tokens = Stream(data, "input_ids")
        self.labels = Stream(data, "labels") if "labels" in data.column_names and not needs else None
        self.n_train = (int(len(self.tokens) * 0.95) - 1) // seq_len
        self.n_validation = (len(self.tokens) - self.n_train * seq_len - 1) // seq_len
        if self.n_train < 1 or self.n_validation < 1:
            raise UserError(
                f"--dataset {source}: {len(self.tokens)} tokens are too few for --seq-len {seq_len}: one training and "
                f"one validation sequence need about {max(20, 2 * seq_len + 2)}; give more text or a shorter --seq-len"
            )
        if self.labels is not None and len(self.labels) != len(self.tokens):
            raise UserError(f"--dataset {source}: `labels` and `input_ids` differ in length")
        needs = needs or 1 + int(max(piece.max() for piece in self.tokens.pieces))
        if needs > vocab_size:
            raise UserError(f"--dataset {source} has token ids up to {needs - 1}: set --vocab-size to at least {needs}")
        self.orders: dict[int, np.ndarray] = {}

    def windows(self, step: int) -> list[int]:
        """The window numbers of the global batch of `step`, each epoch a new permutation of all training windows."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        for epoch in {place // self.n_train for place in places} - self.orders.keys():
            self.orders = {e: order for e, order in self.orders.items() if e >= epoch - 1}
            self.orders[epoch] = np.random.default_rng((self.seed, epoch)).permutation(self.n_train)
        return [int(self.orders[place // self.n_train][place % self.n_train]) for place in places]

    def read(self, windows: list[int]) -> tuple[Tensor, Tensor]:
        """tokens and targets, int64 [windows, seq]. Targets are shifted here, before anything cuts the sequence."""
        starts = [window * self.seq_len for window in windows]
        rows = torch.from_numpy(np.stack([self.tokens.read(at, at + self.seq_len + 1) for at in starts]))
        if self.labels is None:
            return rows[:, :-1], rows[:, 1:]
        labels = np.stack([self.labels.read(at + 1, at + self.seq_len + 1) for at in starts])
        return rows[:, :-1], torch.from_numpy(labels)

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
