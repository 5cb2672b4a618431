"""Data sets of many kinds become one table with a column of token lists.

Text becomes bytes (ids 0-255) with END (256) after each document. Data sets that already have an `input_ids` column are
used as they are; a `labels` column beside it (same length, -100 where no loss is wanted) supplies the targets. All is
stored once by `datasets` as Arrow files and memory-mapped.
"""

import os
import re
import sys
import sysconfig
import textwrap
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from filelock import FileLock
from huggingface_hub import HfApi

from common import UserError
from common.data import TokenData

END = 256
BYTE_VOCAB = 257
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".py": "text"}
SKIPPED = {"test", "tests", "idlelib", "site-packages", "__pycache__"}


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
    name, _, config = source.partition(":")
    if not datasets.config.HF_HUB_OFFLINE:
        try:  # one quick question first: without a network, load_dataset would retry for half a minute, noisily
            HfApi().dataset_info(name, timeout=10)
        except Exception as error:
            raise ConnectionError(source) from error
    try:
        return datasets.load_dataset(name, config or None, split="train")
    except ValueError as error:
        known = re.search(r"[Cc]onfig.*?\[(.*?)\]", str(error), re.DOTALL)  # it has several, or not this one
        if not known:
            raise
        names = textwrap.shorten(known.group(1).replace("'", ""), 300)
        raise UserError(f"--dataset {source}: use --dataset {name}:CONFIG with one of its configs: {names}") from error


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


def open_tokens(source: str, seq_len: int, batch_size: int, seed: int, vocab_size: int) -> TokenData:
    """The batches of `--dataset`. Raises UserError, in one line, if the data cannot be read, is too short or unfit."""
    data, needs = load_columns(source)
    if needs > vocab_size:
        raise UserError(f"--dataset {source}: bytes and END are {needs} tokens: set --vocab-size to at least that")
    tokens, labels = Stream(data, "input_ids"), None
    if "labels" in data.column_names:
        labels = Stream(data, "labels")
        if len(labels) != len(tokens):
            raise UserError(f"--dataset {source}: `labels` and `input_ids` differ in length")
    return TokenData(tokens, labels, source, seq_len, batch_size, seed, vocab_size)
