"""Reads many kinds of `--dataset`: files, folders, the hub (`id` or `id:config`) and data sets saved to disk.

Text becomes bytes (ids 0-255) with END (256) after each document. A column `input_ids` has token ids instead of text.
Beside it there may be `labels` (the targets, -100 where no loss is wanted), `loss_mask` (0: no target), and
`attention_mask` (0: padding, which is dropped). `datasets` converts everything once, and memory-maps the result.

From a folder and its subfolders, all files of one kind are read, sorted by path: the first kind of KINDS that occurs.
Hidden files, __pycache__ and held-out splits are skipped. A held-out split has a word of SPLITS in its path, such as
dev/a.jsonl and c4-validation.00000-of-00008.json.gz. The run prints what was read, and what was left out.
"""

import hashlib
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

KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".jsonl.gz": "json", ".json.gz": "json"}
KINDS |= {".txt": "text", ".py": "text"}  # suffix -> the name of a builder of `datasets`
LISTS = ("input_ids", "labels", "attention_mask", "loss_mask")
HIDDEN = re.compile(r"(^|/)(\.[^/]|__pycache__)")
SPLITS = {"test", "valid", "validation", "val", "dev", "eval"}


@dataclass
class Flags:
    """Data."""

    text_column: str = "text"  # the column of --dataset that holds text


NEEDS = [("text_column", "dataset")]


class Stream:
    """A column of lists of ids as one memory-mapped sequence, whose slices are arrays; `about` says what was read."""

    def __init__(self, column: Any, about: str = ""):
        """`column`: an Arrow column of lists."""
        import pyarrow.compute as pc

        self.ids, self.about = pc.list_flatten(column), about

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, where: slice) -> np.ndarray:
        return self.ids[where].to_numpy()

    def max(self) -> int:
        """The largest id."""
        return max(int(chunk.to_numpy().max()) for chunk in self.ids.chunks if len(chunk))


def tokenise(table: Any) -> dict[str, list[np.ndarray]]:
    """Turn each text of column 0 into uint16 ids: its bytes, then END. Skips nulls. Raises ValueError for UTF-16."""
    texts = [text for text in table.column(0).to_pylist() if text is not None]
    if any(text.count("\0") > len(text) // 4 for text in texts):
        raise ValueError("it has NULs, as UTF-16 has: convert it to UTF-8")
    return {"input_ids": [to_tokens([text]) for text in texts]}


def join_rows(table: Any) -> dict[str, list[np.ndarray]]:
    """Join the lists of all rows into one list of tokens and one list of labels, without padding. Raises ValueError."""
    import pyarrow.compute as pc

    flat, lengths = {}, {}
    for name in table.column_names:
        lengths[name], values = pc.list_value_length(table[name]), pc.list_flatten(table[name])
        flat[name] = values.to_numpy()
        if table[name].null_count or values.null_count:
            raise ValueError(f"`{name}` has a null")
        if not lengths[name].equals(lengths["input_ids"]):
            raise ValueError(f"`{name}` and `input_ids` differ in length")
        if name.endswith("_mask") and not np.isin(flat[name], (0, 1)).all():
            raise ValueError(f"`{name}` holds other numbers than 0 and 1")
    kept = np.flatnonzero(flat.get("attention_mask", np.ones(len(flat["input_ids"]))))
    tokens = flat["input_ids"]
    labels = np.where(flat.get("loss_mask", 1), flat.get("labels", tokens), IGNORE)[kept]
    if min(tokens[kept].min(initial=0), labels[labels != IGNORE].min(initial=0)) < 0:
        raise ValueError("it has ids below 0, other than labels of -100")
    return {"input_ids": [tokens[kept]], "labels": [labels]}


def format_of(file: Path) -> str:
    """The kind of a file, which is the name of a builder of `datasets`; "" if the kind is not known."""
    return next((kind for suffix, kind in KINDS.items() if file.name.endswith(suffix)), "")


def files_of(root: Path, left_out: list[str]) -> tuple[str, list[str]]:
    """Return a kind and its files to read: the kind of file `root`, or the first of KINDS that is in folder `root`.

    Other files (also empty or held-out ones), unless hidden, are noted in `left_out`. ValueError if none can be read.
    """
    paths = [path for path in sorted(root.rglob("*")) or [root] if path.is_file()]
    names = {path: name for path in paths if not HIDDEN.search(name := path.relative_to(root).as_posix())}
    files = [path for path in names if format_of(path) and path.stat().st_size]
    files = [path for path in files if not SPLITS & {*re.split("[^a-z]+", names[path].lower())}]
    if not files:
        raise ValueError(f"it has no {', '.join(KINDS)} file, or only empty or held-out ones")
    kind = min(map(format_of, files), key=[*KINDS.values()].index)
    files = [path for path in files if format_of(path) == kind]
    if others := [name for path, name in names.items() if path not in files]:
        shown = textwrap.shorten(", ".join(others), 100, placeholder=" ...")
        left_out.append(f"{len(others):,} file{'s' * (len(others) > 1)} ({shown})")
    return kind, [*map(str, files)]


def open_source(source: str, left_out: list[str]) -> Any:
    """Open the data set of a file, a folder, or the hub; files that are not read are noted in `left_out`.

    A changed file is read again, even if its time of modification is unchanged. Raises any error of `datasets`.
    """
    import datasets  # takes seconds to import

    root, (name, _, config) = Path(source), source.partition(":")
    if not root.exists():
        return datasets.load_dataset(name, config or None, split="train")
    root /= "train" if (root / "dataset_dict.json").exists() else ""
    if (root / "state.json").exists():
        return datasets.load_from_disk(str(root))
    kind, files = files_of(root, left_out)
    changed = repr([(file, Path(file).stat().st_ctime_ns) for file in files])  # ctime cannot be set back
    cache = Path(datasets.config.HF_DATASETS_CACHE, hashlib.sha256(changed.encode()).hexdigest()[:32])
    options = dict(sample_by="document", encoding_errors="replace") if kind == "text" else {}
    return datasets.load_dataset(kind, data_files=files, split="train", cache_dir=str(cache), **options)


def to_ids(data: Any, text: str, left_out: list[str]) -> tuple[Any, int]:
    """Text -> uint16 `input_ids`; lists -> int32 `input_ids`, `labels`. Returns (data set, number of documents).

    Skipped columns and rows are noted in `left_out`. Raises ValueError if a column is missing or has another type.
    """
    import datasets

    names = data.column_names
    is_text = text != Flags.text_column or "input_ids" not in names
    used = [text] if is_text else [name for name in LISTS if name in names]
    if used[0] not in names:
        raise ValueError(f"it has no `{text}` and no `input_ids` column, only {names}")
    known, wanted = r"(large_)?string", "strings"
    if not is_text:
        known, wanted = r"\w*list<\w+: (u?int\d+|bool)\b.*", "lists of integers"
    for name in used:
        if not re.fullmatch(known, kind := str(data.data.schema.field(name).type)):
            raise ValueError(f"`{name}` holds {kind}, not {wanted}")
    kinds = dict(input_ids="uint16") if is_text else dict.fromkeys(LISTS[:2], "int32")
    features = datasets.Features({name: datasets.List(datasets.Value(kind)) for name, kind in kinds.items()})
    options = dict(batched=True, remove_columns=used, features=features)
    found = data.select_columns(used).with_format("arrow").map(tokenise if is_text else join_rows, **options)
    left_out += [f"column {name}" for name in names if name not in used]
    left_out += [f"rows without text: {len(data) - len(found):,}"] * (is_text and len(found) < len(data))
    return found, len(found) if is_text else len(data)


def read(source: str, text: str = Flags.text_column) -> tuple[Stream, Stream | None]:
    """Open `--dataset`, and tokenise it if it is text; `text`: the name of the text column. Returns tokens and labels.

    One process of a node does the work and shows the progress bar. The others wait at a file lock, and then find the
    result in the cache of `datasets`. Raises UserError, in one line, for any problem with the data.
    """
    import datasets
    from filelock import FileLock

    cache, left_out = Path(datasets.config.HF_DATASETS_CACHE), []
    cache.mkdir(parents=True, exist_ok=True)
    datasets.logging.set_verbosity_error()  # errors are still logged: they name a damaged file
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        with FileLock(cache / "tokenise.lock"):
            found, documents = to_ids(open_source(source, left_out), text, left_out)
        about = f" of {documents:,} documents" + f"; left out: {', '.join(left_out)}" * bool(left_out)
        tokens, *labels = (Stream(found.data.column(name), about) for name in found.column_names)
        if labels and labels[0].max() == IGNORE:
            raise ValueError("all its labels are -100: there is nothing to learn")
        return tokens, labels[0] if labels else None
    except Exception as error:
        reason = textwrap.shorten(str(error.__cause__ or error) or type(error).__name__, 300)
        hub = "" if Path(source).exists() else "no such file, and as ID or ID:CONFIG of the hub: "
        raise UserError(f"--dataset {source}: cannot be read: {hub}{reason}") from error


def attach(_config: Any, parts: Parts):
    """Print what was read. Raises UserError, before the first step, if ids do not fit the vocabulary."""
    data = parts.data
    if not hasattr(data, "tokens"):  # a dry run
        return
    for ids in (data.tokens,) if data.labels is None else (data.tokens, data.labels):
        if (largest := int(ids.max())) >= data.shape.vocab_size:
            need = f"needs --vocab-size {largest + 1}, not {data.shape.vocab_size}"
            raise UserError(f"--dataset {data.source or '(default)'}: its id {largest} {need}")
    if parts.run.first:
        print(f"data: {len(data.tokens):,} tokens{getattr(data.tokens, 'about', '')}", flush=True)


def prepare(config: Any, parts: Parts):
    """If --dataset is on the hub or --text-column is set, open the data by `read` with the value of --text-column."""
    kind = kind_of(config.dataset)
    if kind in READERS and (kind == "hub" or config.text_column != Flags.text_column):
        parts.instead(READERS, kind, partial(read, text=config.text_column), by=__name__)


READERS |= {kind: read for kind in (*KINDS, ".gz", "folder") if kind not in READERS}
