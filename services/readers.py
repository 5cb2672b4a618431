"""Data sets of many kinds for `--dataset`: .jsonl, .parquet, folders, the hub (`name:config`), stored data sets.

Text becomes bytes (ids 0-255) with END (256) after each document. Data sets that have a column `input_ids` are used as
they are; a column `labels` beside it (same length, -100 where no loss is wanted) supplies the targets. All is stored
once by `datasets` as Arrow files and memory-mapped.
"""

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from common import UserError
from common.data import END, READERS
from common.model import IGNORE
from variants import Parts

KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".py": "text"}


def tokenise(rows: dict) -> dict:
    """Texts -> lists of byte tokens, END after each (a batched function for `datasets.map`)."""
    texts = ((text or "").encode("utf-8", errors="replace") for text in rows["text"])
    return {"input_ids": [np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(END)) for text in texts]}


class Stream:
    """One column of token lists seen as a single memory-mapped sequence; slices of it are int64 arrays."""

    def __init__(self, data: Any, column: str):
        chunks = data.data.column(column).chunks
        self.pieces = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
        self.ends = np.cumsum([len(piece) for piece in self.pieces])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(len(self))
        out = np.empty(max(0, stop - start), np.int64)
        piece, done = int(np.searchsorted(self.ends, start, side="right")), 0
        while done < len(out):
            offset = start + done - (int(self.ends[piece]) - len(self.pieces[piece]))
            part = self.pieces[piece][offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            piece, done = piece + 1, done + len(part)
        return out


class Bytes(Stream):
    """One that was text: bytes and END."""


def files_of(source: str) -> list[Path]:
    """The data files of a file or folder, in a fixed order. Raises UserError."""
    path = Path(source)
    files = [path] if path.is_file() else []
    for suffix in KINDS:
        files = files or sorted(path.rglob(f"*{suffix}"))
    if not files:
        raise UserError(f"--dataset {source}: the folder holds no {', '.join(KINDS)} file")
    if not any(file.stat().st_size for file in files):
        raise UserError(f"--dataset {source}: empty")
    return files


def open_path(source: str) -> Any:
    """The raw data behind a file or folder: rows with a `text` or an `input_ids` column."""
    import datasets  # takes seconds to import

    if any((Path(source) / name).exists() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_from_disk(source)
    files = files_of(source)
    kind = KINDS[files[0].suffix]
    options = dict(sample_by="document", encoding_errors="replace") if kind == "text" else {}
    return datasets.load_dataset(kind, data_files=[str(file) for file in files], split="train", **options)


def open_hub(source: str) -> Any:
    """The same of a data set of the hub, `name` or `name:config`."""
    import datasets
    from huggingface_hub import HfApi

    if source.startswith((".", "/", "~")) or source.count("/") > 1 or Path(source).suffix in KINDS:
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


def columns_of(data: Any, source: str) -> tuple[Stream, Stream | None]:
    """Tokens, made from `text` if there are none, and labels if there are any. Raises UserError."""
    import datasets
    import pyarrow as pa

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
        return Bytes(data.map(tokenise, **options), "input_ids"), None
    for column in sorted({"input_ids", "labels"} & set(data.column_names)):
        held = schema.field(column).type
        if not pa.types.is_integer(getattr(held, "value_type", pa.null())):
            raise UserError(f"--dataset {source}: `{column}` holds {held}, not lists of integers")
    tokens, labels = Stream(data, "input_ids"), None
    if "labels" in data.column_names:
        labels = Stream(data, "labels")
        if len(labels) != len(tokens):
            raise UserError(f"--dataset {source}: `labels` and `input_ids` differ in length")
    return tokens, labels


def read(source: str) -> tuple[Stream, Stream | None]:
    """Open and, if it is text, tokenise `--dataset`.

    One process of a node does the work (and shows the progress bar) while the others wait at a file lock, then find
    the result in `datasets`' cache. Raises UserError, in one line, for whatever is wrong with the data.
    """
    import datasets
    from filelock import FileLock

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said once, below
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with FileLock(cache / "tokenise.lock"):
        try:
            return columns_of((open_path if Path(source).exists() else open_hub)(source), source)
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


def attach(_config: Any, parts: Parts):
    """Raises UserError if bytes do not fit the vocabulary, or if no target counts, before the first step."""
    data = parts.data
    if not hasattr(data, "tokens"):  # a dry run reads none
        return
    name, labels, some = f"--dataset {data.source or '(default)'}", data.labels, 2**20
    if isinstance(data.tokens, Bytes | np.ndarray) and data.shape.vocab_size <= END:  # arrays: of the plain readers
        raise UserError(f"{name}: bytes and END are {END + 1} tokens: set --vocab-size to at least that")
    if labels is not None and all((labels[i : i + some] == IGNORE).all() for i in range(0, len(labels), some)):
        raise UserError(f"{name}: all labels are {IGNORE}, so no target counts and nothing can be learned")


def prepare(config: Any, parts: Parts):
    """Of the hub, more than a column `text`: configs, token ids, labels."""
    if config.dataset and not Path(config.dataset).exists():
        parts.instead(READERS, "hub", read, by=__name__)


READERS |= {kind: read for kind in (*KINDS, "folder") if kind not in READERS}
