"""Data sets of many kinds for `--dataset`, read by Hugging Face's `load_dataset`.

    FILE          .txt, .py (a document each), .jsonl, .json, .csv (a document a row), also as .gz, and .parquet
    FOLDER        what `load_dataset(FOLDER)` reads of it: the files of one kind whose names do not say test or
                  validation; or what `save_to_disk` has stored there
    NAME[:CONFIG] a data set of the hub

The split `train` is read. Text becomes bytes (ids 0-255) with END (256) after each document. A column `input_ids` is
used as it is, and so are, beside it, `labels` (the targets, -100 where no loss is wanted), `loss_mask` (0: this token
is not a target), and `attention_mask` (0: padding, which is dropped). `datasets` stores all tokens once as Arrow files,
which are memory-mapped. A line at the start says what was read, and what was left out.
"""

import re
import sys
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common import UserError
from common.data import READERS, kind_of, to_tokens
from common.model import IGNORE
from extras.variants import Parts

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text", ".py": "text"}
LISTS = ("input_ids", "labels", "attention_mask", "loss_mask")


@dataclass
class Flags:
    """Data."""

    text_column: str = "text"  # the column of --dataset that holds text


NEEDS = [("text_column", "dataset")]


def load(source: str) -> tuple[Any, list[str]]:
    """The rows of a data set, and what to say of files that are left out. Raises whatever `datasets` raises."""
    import datasets  # takes seconds to import

    path, documents = Path(source), dict(sample_by="document", encoding_errors="replace")
    if not path.exists():
        name, _, config = source.partition(":")
        return datasets.load_dataset(name, config or None, split="train"), []
    if path.is_file():
        if not path.stat().st_size:
            raise UserError(f"--dataset {source}: the file is empty")
        kind = BUILDERS.get((path.with_suffix("") if path.suffix == ".gz" else path).suffix, "json")
        options = documents if kind == "text" else {}
        return datasets.load_dataset(kind, data_files=source, split="train", **options), []
    if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        data = datasets.load_from_disk(source)
        return data["train"] if isinstance(data, datasets.DatasetDict) else data, []
    config = datasets.load_dataset_builder(source).config
    others = sum(file.is_file() for file in path.rglob("*")) - len(config.data_files.get("train", ()))
    options = documents if hasattr(config, "sample_by") else {}
    return datasets.load_dataset(source, split="train", **options), [f"other files: {others:,}"] * (others > 0)


def tokenise(table: Any, source: str) -> dict:
    """Arrow's column of texts -> one list of byte tokens, END after each text; null is no text. Raises UserError."""
    texts = [text for text in table.column(0).to_pylist() if text is not None]
    if any("\0" in text for text in texts):
        raise UserError(f"--dataset {source}: it has NULs, as UTF-16 has: convert it to UTF-8")
    return {"input_ids": [to_tokens(texts)] if texts else []}


def apply_masks(table: Any, source: str) -> dict:
    """Arrow's columns of lists -> all tokens but padding in one list, and their labels. Raises UserError."""
    flat, lengths = {}, table["input_ids"].combine_chunks().value_lengths()
    for name in table.column_names:
        column = table[name].combine_chunks()
        values = column.flatten()
        flat[name] = values.to_numpy(zero_copy_only=False)
        if column.null_count or values.null_count:
            raise UserError(f"--dataset {source}: `{name}` has a null")
        if not column.value_lengths().equals(lengths):
            raise UserError(f"--dataset {source}: `{name}` and `input_ids` differ in length")
        if name.endswith("_mask") and not np.isin(flat[name], (0, 1)).all():
            raise UserError(f"--dataset {source}: `{name}` holds other numbers than 0 and 1")
    labels = np.where(flat.get("loss_mask", 1), flat.get("labels", flat["input_ids"]), IGNORE)
    kept = np.flatnonzero(flat.get("attention_mask", np.ones(len(labels))))
    return {"input_ids": [flat["input_ids"][kept]], "labels": [labels[kept]]}


class Stream:
    """Lists of ids seen as one memory-mapped sequence, whose slices are arrays; `about` says what was read."""

    def __init__(self, column: Any, about: str):
        """`column`: Arrow's, of lists."""
        import pyarrow.compute as pc

        self.ids, self.about = pc.list_flatten(column), about

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, where: slice) -> np.ndarray:
        return self.ids[where].to_numpy()


def streams(data: Any, source: str, text: str, left_out: list[str]) -> tuple[Stream, Stream | None]:
    """Rows -> their tokens, and labels if the targets are others. Raises UserError."""
    import datasets

    names = data.column_names
    is_text = text != Flags.text_column or "input_ids" not in names
    used = [text] if is_text else [name for name in LISTS if name in names]
    if used[0] not in names:
        raise UserError(f"--dataset {source}: no `{text}` and no `input_ids` column, only {names}")
    wanted = "strings" if is_text else "lists of integers"
    for name in used:
        kind = str(data.data.column(name).type)
        if not re.fullmatch(r"(large_)?string" if is_text else r"(large_)?list<\w+: (u?int\d+|bool)>", kind):
            raise UserError(f"--dataset {source}: `{name}` holds {kind}, not {wanted}")
    function, dtype = (tokenise, "uint16") if is_text else (apply_masks, "int32")
    features = datasets.Features({name: datasets.List(datasets.Value(dtype)) for name in LISTS[: 2 - is_text]})
    options = dict(batched=True, remove_columns=used, features=features, fn_kwargs=dict(source=source))
    made = data.select_columns(used).with_format("arrow").map(function, desc=function.__name__, **options)
    nulls = data.data.column(used[0]).null_count
    left_out += [f"column {name}" for name in names if name not in used]
    left_out += [f"rows without text: {nulls:,}"] * (nulls > 0)
    about = f"{len(data) - nulls:,} documents" + f"; left out: {', '.join(left_out)}" * bool(left_out)
    columns = [Stream(made.data.column(name), about) for name in features]
    return columns[0], columns[1] if len(used) > 1 else None


def read(source: str, text: str = Flags.text_column) -> tuple[Stream, Stream | None]:
    """Open and, if it is text, tokenise `--dataset`; `text` is the name of its column.

    One process of a node does the work (and shows the progress bar) while the others wait at a file lock, and then find
    the result in `datasets`' cache. Raises UserError, in one line, for whatever is wrong with the data.
    """
    import datasets
    from filelock import FileLock

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error says it
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        with FileLock(cache / "tokenise.lock"):
            data, left_out = load(source)
            return streams(data, source, text, left_out)
    except UserError:
        raise
    except Exception as error:
        reason = textwrap.shorten(str(error.__cause__ or error) or type(error).__name__, 200)
        raise UserError(f"--dataset {source}: cannot be read ({reason})") from error


def attach(_config: Any, parts: Parts):
    """Say what was read. Raises UserError, before the first step, if no label counts."""
    tokens, labels = (getattr(parts.data, name, None) for name in ("tokens", "labels"))
    if labels is not None and all((chunk.to_numpy() == IGNORE).all() for chunk in labels.ids.chunks):
        raise UserError(f"--dataset {parts.data.source}: all labels are {IGNORE}: there is nothing to learn")
    if isinstance(tokens, Stream) and parts.run.first:
        print(f"data: {len(tokens):,} tokens, {tokens.about}", flush=True)


def prepare(config: Any, parts: Parts):
    """Replace the plain readers where they do not suffice: for data sets of the hub, and another column of text."""
    kind = kind_of(config.dataset)
    if kind in READERS and (kind == "hub" or config.text_column != Flags.text_column):
        parts.instead(READERS, kind, partial(read, text=config.text_column), by=__name__)


READERS |= {kind: read for kind in (*BUILDERS, ".gz", "folder") if kind not in READERS}
