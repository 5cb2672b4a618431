"""What --dataset names becomes texts, or an array of token ids. No step needs this to be
understood.

    --dataset            what is read
    (nothing)            the source code of Python's standard library, without its tests (another
                         Python, perhaps of the same version, has another text, and other losses)
    a.txt                one document
    a.jsonl, a.jsonl.gz  a document from each line, {"text": "..."}
    a.parquet            a document from each row, in the column `text`
    a folder             all files in it and its subfolders, all of one of the kinds above (hidden
                         files are skipped)
    NAME, NAME:CONFIG    a data set of the Hugging Face hub: column `text` of the split `train`
    a.bin                token ids, as nanoGPT's prepare.py writes them: uint16, without a header

Beside a.bin, a file a.bin.json may hold {"dtype": "uint32", "tokens": N}.
"""

import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common import UserError

SKIPPED = {"test", "tests", "idlelib", "site-packages", "__pycache__"}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[^/\\]+)?")  # NAME or OWNER/NAME, and :CONFIG

# What a reader returns: a description of the source, and its documents or an array of token ids.
Contents = tuple[str, Iterable[str] | np.ndarray]


def read_txt(path: Path) -> Iterator[str]:
    """Yield the one text of a file; bytes that are not UTF-8 become U+FFFD."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "\0" in text:
        raise UserError(f"--dataset {path}: it has NULs, as UTF-16 has: convert it to UTF-8")
    yield text


def read_jsonl(path: Path) -> Iterator[Any]:
    """Yield the value of `text` of each line, or None if there is none; skips blank lines."""
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as lines:
        for line in lines:
            if line.strip():
                row = json.loads(line)
                yield row.get("text") if isinstance(row, dict) else None


def read_parquet(path: Path) -> Iterator[Any]:
    """Yield the values of the column `text`. Other columns are not read, and may differ."""
    import pyarrow.parquet  # takes a moment to import; comes with `datasets`

    yield from pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()


# The suffix of a file of documents -> a function that yields its texts.
FORMATS: dict[str, Callable] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".parquet": read_parquet,
}


def strings(values: Iterable[Any], source: str | Path) -> Iterator[str]:
    """Yield the texts of a file or data set, and check them.

    Raises UserError if the source is damaged, if a text is not a string, or if all are empty.
    """
    row = 0
    n_characters = 0
    try:
        for text in values:
            row += 1
            if not isinstance(text, str):
                raise ValueError(f"a row needs a string `text`, not {text!r:.40}")
            n_characters += len(text)
            yield text
    except (OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: of json and pyarrow
        raise UserError(f"--dataset {source}: unreadable near row {row}: {error}") from error
    if not n_characters:
        raise UserError(f"--dataset {source}: it has no text")


def in_random_order(paths: list[Path]) -> list[Path]:
    """Shuffle files, always in the same way: neighbours are alike, and the held-out tail should
    resemble the whole.
    """
    return [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]


def read_library(source: str) -> Contents:
    """Read the source code of Python's standard library. (`source` is "": it has no name.)"""
    paths = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = sorted(set(inside) - SKIPPED)  # os.walk enters only these
        paths += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    texts = (text for path in in_random_order(paths) for text in read_txt(path))
    return f"{len(paths):,} files of Python's standard library", strings(texts, source)


def visible_files(path: Path) -> list[Path]:
    """A file itself, or all files in a folder and its subfolders, sorted, except hidden ones.

    Raises UserError for a link to a folder around it, which would have no end.
    """
    if not path.is_dir():
        return [path]
    paths = []
    for entry in sorted(path.iterdir()):
        if path.resolve().is_relative_to(entry.resolve()):
            raise UserError(f"--dataset {entry}: it is a link to a folder that it is in: remove it")
        if not entry.name.startswith("."):
            paths += visible_files(entry)
    return paths


def texts_of(paths: list[Path]) -> Iterator[str]:
    """Yield the texts of files, each read by its entry in FORMATS."""
    for path in paths:
        reader = FORMATS[suffix_of(path)]
        yield from strings(reader(path), path)


def read_files(source: str) -> Contents:
    """Read a file, or all files of a folder. Raises UserError unless one of FORMATS reads all."""
    paths = visible_files(Path(source))
    examples = {}  # a reader -> a file that it reads; None: a file that nothing reads
    for path in paths:
        examples[FORMATS.get(suffix_of(path))] = str(path)
    if len(examples) != 1 or None in examples:
        rule = f"the files of a folder must be of one kind ({', '.join(FORMATS)})"
        found = ", ".join(examples.values()) or "no file"
        raise UserError(f"--dataset {source}: {rule}, and it has {found}: leave files of one kind")
    names = ", ".join(map(str, paths[:20]))
    if len(paths) > 20:
        names += f" and {len(paths) - 20:,} more"
    return names, texts_of(in_random_order(paths))


def read_hub(source: str) -> Contents:
    """Read a data set of the Hugging Face hub, `NAME` or `NAME:CONFIG`.

    Raises UserError if the hub is out of reach, or has no such data set, configuration or column.
    """
    import datasets  # takes seconds to import
    import huggingface_hub as hub

    name, _, config = source.partition(":")
    known = (
        hub.errors.HTTPError,
        datasets.exceptions.DatasetsError,
        OSError,
        ValueError,
        RuntimeError,
    )
    try:
        if not datasets.config.HF_HUB_OFFLINE:  # `load_dataset` would retry for half a minute
            hub.get_session().head(hub.constants.ENDPOINT, timeout=5)
        rows = datasets.load_dataset(name, config or None, split="train").select_columns("text")
    except known as error:
        problem = f"no such file, and as a data set of the hub: {error}"
        hint = "(HF_HUB_OFFLINE=1 reads one that was downloaded before)"
        raise UserError(f"--dataset {source}: {problem} {hint}") from error
    return f"{len(rows):,} rows of the hub's {source}", strings(rows["text"], source)


def read_bin(source: str) -> Contents:
    """Map token ids into memory. Raises UserError if their file, or SOURCE.json, is damaged."""
    facts = Path(source + ".json")
    try:
        known = json.loads(facts.read_text()) if facts.exists() else {"dtype": "uint16"}
        tokens = np.memmap(source, known["dtype"], "r")
        if tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"its dtype is {tokens.dtype}, and must be uint16 or uint32")
        if len(tokens) != known.get("tokens", len(tokens)):
            raise ValueError(f"it has {len(tokens)} tokens, and had {known['tokens']}")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"--dataset {source}: it or {facts} is damaged: {error}") from error
    return f"{tokens.dtype} ids of {source}", tokens


# The kind of a source (a suffix, for example) -> its reader.
READERS: dict[str, Callable[[str], Contents]] = {
    "": read_library,
    **dict.fromkeys(FORMATS, read_files),
    "folder": read_files,
    ".bin": read_bin,
    "hub": read_hub,
}


def suffix_of(path: Path) -> str:
    """The key of READERS that is a suffix of a file's name, or "" if there is none."""
    for kind in READERS:
        if kind.startswith(".") and path.name.endswith(kind):
            return kind
    return ""


def kind_of(source: str) -> str:
    """The key in READERS for a value of `--dataset`. Raises UserError if there is none.

    What exists is a folder or a file of a known kind. What does not exist is looked up on the hub
    if it has the form of a name there, and does not end like a file: "trian.jsonl" is a mistake.
    """
    path = Path(source)
    suffix = suffix_of(path)
    if not source:
        return ""
    if path.is_dir():
        return "folder"
    if not path.exists():
        if suffix or not HUB_NAME.fullmatch(source):
            raise UserError(f"--dataset {source}: no such file")
        return "hub"
    if not suffix:
        known = f"a folder, {', '.join(FORMATS)} and .bin"
        raise UserError(f"--dataset {source}: this kind of file cannot be read, only {known}")
    return suffix
