"""Data sets of many kinds for `--dataset`: files, folders, the hub (`name:config`), stored data sets.

Text becomes bytes (ids 0-255) with END (256) after each document. A column `input_ids` is used as it is, and so are,
beside it, `labels` (the targets, -100 where no loss is wanted), `loss_mask` (0: this token is not a target), and
`attention_mask` (0: padding, which is dropped). All is stored once by `datasets` as Arrow files and memory-mapped.

A folder stands for all files of known kinds in and below it, kind after kind, each sorted by path. It is read without
hidden files, __pycache__, and held-out splits: files and folders whose name begins or ends with the name of a split
(test.jsonl, c4-validation.00000-of-00008.json.gz). A line at the start says what was read, and what was left out.
"""

import hashlib
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common import UserError
from common.data import END, READERS, kind_of
from common.model import IGNORE
from extras.variants import Parts

KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".jsonl.gz": "json", ".json.gz": "json"}
KINDS |= {".txt": "text", ".py": "text"}
LISTS = ("input_ids", "labels", "attention_mask", "loss_mask")
HIDDEN, SPLIT = re.compile(r"(^|/)(\.[^/]|__pycache__)"), "(test|valid|validation|val|dev|eval)"
LAST = rf"([^a-z/]|of)*({'|'.join(map(re.escape, KINDS))})?(/|$)"  # only numbers and a suffix follow
HELD_OUT = re.compile(rf"(^|/){SPLIT}(?![a-z])|(?<![a-z]){SPLIT}{LAST}", re.IGNORECASE)


@dataclass
class Flags:
    """Data."""

    text_column: str = "text"  # the column of --dataset that holds text


NEEDS = [("text_column", "dataset")]


def tokenise(table: Any) -> dict:
    """Arrow's column of texts -> lists of byte tokens, END after each; null is no text."""
    texts = (text.encode("utf-8", errors="replace") for text in table.column(0).to_pylist() if text is not None)
    return {"input_ids": [np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(END)) for text in texts]}


def apply_masks(table: Any) -> dict:
    """Arrow's columns of lists -> all tokens but padding in one list, and their labels."""
    flat = {name: table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in table.column_names}
    labels = np.where(flat.get("loss_mask", 1), flat.get("labels", flat["input_ids"]), IGNORE)
    kept = np.flatnonzero(flat.get("attention_mask", np.ones(len(labels))))
    return {"input_ids": [flat["input_ids"][kept]], "labels": [labels[kept]]}


class Stream:
    """Lists of ids seen as one memory-mapped sequence, whose slices are arrays; `about` says what was read."""

    def __init__(self, columns: tuple[Any, ...], about: tuple[int, int, list[str]]):
        """`columns` of Arrow, of one type. `about`: files, documents, what was left out."""
        import pyarrow as pa
        import pyarrow.compute as pc

        chunks = [chunk for column in columns for chunk in pc.list_flatten(column).chunks]
        self.ids, self.about = pa.chunked_array(chunks, columns[0].type.value_type), about
        self.pieces = [chunk.to_numpy() for chunk in chunks]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, where: slice) -> np.ndarray:
        return self.ids[where].to_numpy()


def format_of(file: Path) -> str:
    """What `datasets` calls a file's kind; "" if it is not known."""
    return KINDS.get("".join(file.suffixes[-2:])) or KINDS.get(file.suffix, "")


def files_of(source: str) -> tuple[list[Path], list[str]]:
    """The data files of a file or folder, in the order of reading, and the names of others. Raises UserError."""
    root, kinds = Path(source), [*KINDS.values()]
    paths = [path for path in sorted(root.rglob("*")) if path.is_symlink() or not path.is_dir()] or [root]
    names = {path: name for path in paths if not HIDDEN.search(name := path.relative_to(root).as_posix())}
    files = [path for path in names if path.is_file() and format_of(path) and not HELD_OUT.search(names[path])]
    if not files:
        raise UserError(f"--dataset {source}: no {', '.join(KINDS)} file (of a held-out split, give the file itself)")
    if not any(file.stat().st_size for file in files):
        raise UserError(f"--dataset {source}: empty")
    others = [names[path] for path in names.keys() - {*files}]
    return sorted(files, key=lambda file: kinds.index(format_of(file))), sorted(others)


def digest(files: list[Path], source: str) -> str:
    """A hash of what files hold, for the cache's key, as a file can change and keep its time: 1.2 GB/s from memory.

    Raises UserError for NULs in text, which is then UTF-16, or no text.
    """
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.stat().st_size} ".encode())
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                if b"\0" in block and file.suffix not in (".gz", ".parquet"):
                    raise UserError(f"--dataset {source}: {file.name} has NULs, as UTF-16 has: convert it to UTF-8")
                found.update(block)
    return found.hexdigest()[:32]


def open_path(source: str) -> tuple[list[Callable[[], Any]], int, list[str]]:
    """What opens a file or folder, a call for each kind; how many files that reads; the names of those left out."""
    import datasets  # takes seconds to import

    if any((Path(source) / name).exists() for name in ("state.json", "dataset_dict.json")):
        return [partial(datasets.load_from_disk, source)], 0, []
    calls, (files, others) = [], files_of(source)
    for kind in dict.fromkeys(map(format_of, files)):
        some = [file for file in files if format_of(file) == kind]
        options = dict(sample_by="document", encoding_errors="replace") if kind == "text" else {}
        options |= dict(cache_dir=str(Path(datasets.config.HF_DATASETS_CACHE, digest(some, source))))
        calls.append(partial(datasets.load_dataset, kind, data_files=[*map(str, some)], split="train", **options))
    return calls, len(files), others


def open_hub(source: str) -> Any:
    """A data set of the hub, `name` or `name:config`."""
    import datasets
    from huggingface_hub import HfApi

    if source.startswith((".", "/", "~")) or source.count("/") > 1 or format_of(Path(source)):
        raise UserError(f"--dataset {source}: no such file or folder")
    name, _, config = source.partition(":")
    if not datasets.config.HF_HUB_OFFLINE:
        try:  # one quick question first: without a network, load_dataset would retry for half a minute, noisily
            HfApi().dataset_info(name, timeout=10)
        except Exception as error:
            raise ConnectionError(source) from error
    try:
        return datasets.load_dataset(name, config or None)
    except ValueError as error:
        known = re.search(r"[Cc]onfig.*?\[(.*?)\]", str(error), re.DOTALL)  # it has several, or not this one
        if not known:
            raise
        names = textwrap.shorten(known.group(1).replace("'", ""), 300)
        raise UserError(f"--dataset {source}: use --dataset {name}:CONFIG with one of its configs: {names}") from error


def masked(columns: dict[str, Any], source: str) -> bool:
    """Whether a mask has a 0. Raises UserError unless Arrow's columns hold lists of whole numbers, of equal lengths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    zeros, lengths = False, None
    for name, column in columns.items():
        inner, is_mask = getattr(column.type, "value_type", pa.null()), name.endswith("_mask")
        if not pa.types.is_integer(inner) and not (is_mask and pa.types.is_boolean(inner)):
            raise UserError(f"--dataset {source}: `{name}` holds {column.type}, not lists of integers")
        values, lengths = pc.list_flatten(column), lengths or pc.list_value_length(column)
        found = {*pc.unique(values).to_pylist()} if is_mask else {1}
        zeros |= 0 in found
        wrong = "" if found <= {0, 1} else "holds other numbers than 0 and 1"
        if column.null_count or values.null_count:
            row = next(i for i, row in enumerate(column.to_pylist()) if row is None or None in row)
            wrong = f"has a null in row {row + 1}"
        elif not pc.list_value_length(column).equals(lengths):
            wrong = "and `input_ids` differ in length"
        if wrong:
            raise UserError(f"--dataset {source}: `{name}` {wrong}")
    return zeros


def columns_of(data: Any, source: str, text: str) -> tuple[bool, Any, Any, int, list[str]]:
    """Whether it was text; columns of tokens, and of labels or again of tokens; documents; what was left out.

    Raises UserError.
    """
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc

    left_out, integers = [], lambda kind: datasets.List(datasets.Value(kind))
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise UserError(f"--dataset {source}: no `train` split, only {list(data)}")
        data, left_out = data["train"], [f"split {name}" for name in data if name != "train"]
    if not len(data):
        raise UserError(f"--dataset {source}: no rows")
    names = data.column_names
    is_text = text != Flags.text_column or "input_ids" not in names
    used = [text] if is_text else [name for name in LISTS if name in names]
    if used[0] not in names:
        raise UserError(f"--dataset {source}: no `{text}` and no `input_ids` column, only {names}")
    left_out += [f"column {name}" for name in names if name not in used]
    columns = {name: data.data.column(name) for name in used}
    if is_text and columns[text].type not in (pa.string(), pa.large_string()):
        raise UserError(f"--dataset {source}: `{text}` holds {columns[text].type}, not strings")
    given, rows = columns[used[0]], len(data)
    if is_text or masked(columns, source):
        function = tokenise if is_text else apply_masks
        features = dict(input_ids=integers("uint16")) if is_text else dict.fromkeys(LISTS[:2], integers("int64"))
        options = dict(batched=True, remove_columns=used, features=datasets.Features(features), desc=function.__name__)
        data = data.select_columns(used).with_format("arrow").map(function, **options)
        columns = {name: data.data.column(name) for name in features}
    tokens = columns["input_ids"]
    padding = 0 if is_text else len(pc.list_flatten(given)) - len(pc.list_flatten(tokens))
    less = {"rows without text": given.null_count, "padding tokens": padding}
    left_out += [f"{what}: {n:,}" for what, n in less.items() if n]
    return is_text, tokens, columns.get("labels", tokens), rows - given.null_count, left_out


def read(source: str, text: str = Flags.text_column) -> tuple[Stream, Stream | None]:
    """Open and, if it is text, tokenise `--dataset`; `text` is the name of its column.

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
    try:
        calls, files, others = open_path(source) if Path(source).exists() else ([partial(open_hub, source)], 0, [])
        with FileLock(cache / "tokenise.lock"):
            found = [columns_of(call(), source, text) for call in calls]
    except UserError:
        raise
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        raise UserError(
            f"--dataset {source}: not a local path, and the hub cannot be reached or does not have it; "
            "give a local .txt, .jsonl or .parquet file or folder, or leave --dataset away for Python's own sources"
        ) from error
    except Exception as error:
        reason = textwrap.shorten(str(error.__cause__ or error) or type(error).__name__, 200)
        reason = reason.replace('Instruction "train" corresponds to no data!', "no rows")
        raise UserError(f"--dataset {source}: cannot be read ({reason})") from error
    kinds, tokens, labels, documents, left = zip(*found, strict=True)
    if len({*kinds}) > 1 or any(len({column.type for column in columns}) > 1 for columns in (tokens, labels)):
        raise UserError(f"--dataset {source}: files of several kinds differ in what they hold: give those of one kind")
    names = textwrap.shorten(", ".join(others), 100, placeholder=" ...")
    left_out = [f"{len(others):,} file{'s' * (len(others) > 1)} ({names})"] * bool(others)
    about = files, sum(documents), [*left_out, *chain.from_iterable(left)]
    return Stream(tokens, about), None if labels == tokens else Stream(labels, about)


def attach(_config: Any, parts: Parts):
    """Say what was read. Raises UserError, before the first step, if ids do not fit the vocabulary, or no label counts.

    For this each rank looks at all ids, 1.5 s for 1e9 in memory.
    """
    data, tokens = parts.data, getattr(parts.data, "tokens", None)
    if tokens is None:  # a dry run
        return
    source, vocab_size = data.source or "(Python's own sources)", data.shape.vocab_size
    for ids, but in [(tokens, None)] + [(data.labels, IGNORE)] * (data.labels is not None):
        pieces = (piece if but is None else piece[piece != but] for piece in getattr(ids, "pieces", [ids]))
        spans = [(int(piece.min()), int(piece.max())) for piece in pieces if len(piece)]
        if not spans:
            raise UserError(f"--dataset {source}: all labels are {but}: there is nothing to learn")
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        if low < 0 or high >= vocab_size:
            raise UserError(f"--dataset {source}: ids {low} to {high} do not fit --vocab-size {vocab_size}")
    if parts.run.first:
        ends = 0 if isinstance(tokens, Stream) else int((tokens == END).sum())  # of a plain reader's files
        files, documents, left_out = getattr(tokens, "about", (ends, ends, []))
        counts = dict(file=files, document=documents, token=len(tokens))
        line = ", ".join(f"{n:,} {what}{'s' * (n > 1)}" for what, n in counts.items() if n)
        print(f"data: {line}" + f"; left out: {', '.join(left_out)}" * bool(left_out), flush=True)


def prepare(config: Any, parts: Parts):
    """What the plain readers cannot: of the hub, configs, token ids, labels; another column of text."""
    kind = kind_of(config.dataset)
    if kind in READERS and (kind == "hub" or config.text_column != Flags.text_column):
        parts.instead(READERS, kind, partial(read, text=config.text_column), by=__name__)


READERS |= {kind: read for kind in (*KINDS, ".gz", "folder") if kind not in READERS}
