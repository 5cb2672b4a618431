"""Readers turn the value of --dataset into texts, or into an array of token ids. You can follow
every step without this file.

    --dataset            what is read
    (nothing)            the source code of Python's standard library (SKIPPED has what is left out)
                         (its text, and so the losses, may differ between two installations)
    a.txt                one document (line ends become LF)
    a.jsonl              a document from each line, {"text": "..."}
    a.jsonl.gz           the same, compressed with gzip
    a.parquet            a document from each row, in the column `text`
    a folder             every file in it and in its subfolders, except hidden ones, in a random
                         order (`in_random_order`); all must be of the same kind, one of the
                         four above
    OWNER/NAME:CONFIG    a data set of the Hugging Face hub: column `text` of the split `train`
                         (OWNER/ and :CONFIG may be left out)
    a.bin                token ids, as nanoGPT's prepare.py writes them: uint16, without a header

To write a .bin file with numpy: ids.astype(np.uint16).tofile("a.bin"). Ids above 65,535 need
uint32, and a file a.bin.json beside a.bin with {"dtype": "uint32"}. If that file also has "tokens":
N, a.bin must have N ids: so an incomplete one is noticed.
"""

import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common import UserError

# Not read in the standard library: tests and IDLE, which not every Python has; other people's code;
# and compiled files
SKIPPED = {"test", "tests", "idlelib", "site-packages", "__pycache__"}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[^/\\]+)?")  # NAME or OWNER/NAME, perhaps :CONFIG

# What a reader returns: a description of the source, and its texts or an array of token ids
Reading = tuple[str, Iterable[str] | np.ndarray]


def txt_texts(path: Path) -> Iterator[str]:
    """Yield the one text of a file; bytes that are not UTF-8 become U+FFFD. Raises UserError if it
    has NULs.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if "\0" in text:
        raise UserError(f"--dataset {path}: it has NULs, as UTF-16 has: convert it to UTF-8")
    yield text


def jsonl_texts(path: Path) -> Iterator[Any]:
    """Yield the value of `text` of each line, or None if there is none; skips blank lines."""
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as lines:
        for line in lines:
            if line.strip():
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row.get("text")
                else:
                    yield None


def parquet_texts(path: Path) -> Iterator[Any]:
    """Yield the values of the column `text`. Other columns are not read, and may differ between
    files.
    """
    import pyarrow.parquet  # takes a moment to import; comes with `datasets`

    if "text" not in pyarrow.parquet.read_schema(path).names:
        raise ValueError("it has no column `text`")
    yield from pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()


# The suffix of a file of documents -> a function that yields its texts
FORMATS: dict[str, Callable] = {
    ".txt": txt_texts,
    ".jsonl": jsonl_texts,
    ".jsonl.gz": jsonl_texts,
    ".parquet": parquet_texts,
}
SUFFIXES = (*FORMATS, ".bin")


def suffix_of(path: Path) -> str:
    """The one of SUFFIXES with which a file's name ends, or ""."""
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return suffix
    return ""


def refuse_damaged(texts: Iterable[Any], source: str | Path) -> Iterator[str]:
    """Yield the texts of a file or data set. Raises UserError if it is damaged, or if a text is not
    a string.
    """
    # OSError comes from the system or gzip, EOFError and zlib.error from gzip, ValueError from
    # json, pyarrow and our own checks
    damaged = (OSError, EOFError, zlib.error, ValueError)
    number = 1
    try:
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a document needs a string `text`, not {repr(text)[:40]}")
            yield text
            number += 1
    except damaged as error:
        raise UserError(
            f"--dataset {source}: unreadable near document {number}: {error}"
        ) from error


def in_random_order(paths: list[Path]) -> list[Path]:
    """The files in a random order, always the same with one version of NumPy. In the folders' order
    the end of the data, which is held out, could be unlike the rest.
    """
    return [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]


def files_in(folder: str | Path, skipped: Collection[str] = ()) -> list[Path]:
    """The files in a folder and its subfolders, in a fixed order, without hidden ones, and without
    folders whose name is in `skipped`. Links to folders are not followed. Raises UserError if a
    folder cannot be read.
    """

    def refuse(error: OSError):
        raise UserError(f"--dataset {folder}: cannot read {error.filename}: {error.strerror}")

    paths = []
    for where, inside, names in os.walk(folder, onerror=refuse):
        # In place: os.walk then enters only the folders that are left in this list, in its order
        inside[:] = sorted(name for name in inside if name not in skipped and name[0] != ".")
        paths += [Path(where, name) for name in sorted(names) if name[0] != "."]
    return paths


def read_library() -> Reading:
    """The source code of Python's standard library."""
    files = files_in(sysconfig.get_paths()["stdlib"], SKIPPED)
    paths = [path for path in files if path.suffix == ".py"]
    description = f"{len(paths):,} files of Python's standard library"
    return description, document_texts(paths, ".txt")


def document_texts(paths: list[Path], suffix: str) -> Iterator[str]:
    """Yield the texts of files, in random order, each read as a file with this suffix."""
    texts_of = FORMATS[suffix]
    for path in in_random_order(paths):
        yield from refuse_damaged(texts_of(path), path)


def read_files(source: Path) -> Reading:
    """The texts of a file, or of all files of a folder. Raises UserError unless all are of one kind
    of FORMATS.
    """
    paths = files_in(source) if source.is_dir() else [source]
    examples = {suffix_of(path): str(path) for path in paths}  # one file of each suffix
    if len(examples) != 1 or not examples.keys() <= FORMATS.keys():
        raise UserError(
            f"--dataset {source}: use a .bin file, or files of the same kind, one of "
            f"{', '.join(FORMATS)}; it has {', '.join(examples.values()) or 'no file'}"
        )
    (suffix,) = examples
    names = ", ".join(map(str, paths[:20]))
    if len(paths) > 20:
        names += f" and {len(paths) - 20:,} more"
    return names, document_texts(paths, suffix)


def read_hub(source: str) -> Reading:
    """A data set of the Hugging Face hub, `OWNER/NAME:CONFIG`; OWNER/ and :CONFIG are optional.
    Raises UserError if the hub is out of reach (with HF_HUB_OFFLINE set, if the data set was not
    downloaded before), or if there is no such data set, configuration, column or split `train`.
    """
    import datasets  # takes seconds to import
    import huggingface_hub as hub

    name, _, config = source.partition(":")
    try:
        if not datasets.config.HF_HUB_OFFLINE:
            # Ask once whether the hub is there: `load_dataset` would retry for half a minute
            hub.get_session().head(hub.constants.ENDPOINT, timeout=5)
        rows = datasets.load_dataset(name, config or None, split="train").select_columns("text")
    except Exception as error:  # of many types, from several libraries
        raise UserError(
            f"--dataset {source}: it is neither a file here nor a data set that the hub gives: "
            f"{error} (Without a network, HF_HUB_OFFLINE=1 reads one that was downloaded before)"
        ) from error
    return f"{len(rows):,} rows of the hub's {source}", refuse_damaged(rows["text"], source)


def read_bin(source: str) -> Reading:
    """Map a file of token ids into memory. Raises UserError if it, or SOURCE.json, is damaged."""
    about_path = Path(source + ".json")
    about = {"dtype": "uint16"}
    try:
        if about_path.exists():
            about |= json.loads(about_path.read_text())
        tokens = np.memmap(source, dtype=about["dtype"], mode="r")
        if tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"its dtype is {tokens.dtype}, and must be uint16 or uint32")
        if len(tokens) != about.get("tokens", len(tokens)):
            raise ValueError(f"it has {len(tokens)} tokens, and should have {about['tokens']}")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--dataset {source}: it or {about_path} is damaged: {error}") from error
    return f"{tokens.dtype} ids of {source}", tokens


def read_source(source: str) -> Reading:
    """What the value of --dataset names. Raises UserError if there is no such thing.

    A path that exists must be a folder or a file of a known kind. Another value with the form of a
    hub name is looked up there, unless it ends in one of SUFFIXES. So a mistyped file name such as
    "trian.jsonl" is an error.
    """
    if not source:
        return read_library()
    path = Path(source)
    if not path.exists():
        if suffix_of(path) or not HUB_NAME.fullmatch(source):
            raise UserError(f"--dataset {source}: no such file")
        return read_hub(source)
    if path.is_file() and suffix_of(path) == ".bin":
        return read_bin(source)
    return read_files(path)
