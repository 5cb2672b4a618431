"""Token batches: for given data, a function of (seed, step), the same on every rank and in every
layout. On a first reading, `to_tokens` and `Data` are enough; the readers of files may be skipped.

    documents -> bytes 0-255 of each, then END -> one stream:   d e f ... END i m p o r t ... END
    window w = seq + 1 tokens from w*seq on: the first seq are tokens, the last seq their targets

A step takes the next B windows, B the global batch size. Each epoch has all n windows once, in a
random order of its own, drawn from (seed, epoch): sample i, counted over all steps, is the window
at place i mod n in the order of epoch i // n.

Targets are shifted here, before a sequence is sharded. Attention may look back across END into an
earlier document. Every rank reads the whole global batch, since token ids are small, and works on
its share. The last twentieth of the windows (at least one) is held out: no batch has them, and
`Data.held_out` returns them.

    --dataset            what is read
    (nothing)            the source code of Python's standard library
    a.txt                one document
    a.jsonl, a.jsonl.gz  a document from each line, {"text": "..."}
    a.parquet            a document from each row, in the column `text`
    a folder             all files in it and its subfolders, which must be of one of these kinds
    NAME, NAME:CONFIG    a data set of the Hugging Face hub: column `text` of the split `train`
    a.bin                token ids, as nanoGPT's prepare.py writes them: uint16, without a header

Text becomes bytes even if the model's vocabulary is larger, and each rank holds the whole stream,
two bytes a token. A .bin file stays on disk and is mapped into memory, so a large corpus should be
one. Beside a.bin, a file a.bin.json may hold {"dtype": "uint32", "tokens": N}; without it, ids are
uint16.
"""

import gzip
import hashlib
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import UserError
from common.model import ModelConfig

END = 256  # the token that ends a document
REPLACED = b"\xef\0\xbf\0\xbd\0"  # in UTF-8 U+FFFD is EF BF BD; in memory, three uint16
SKIPPED = {"test", "tests", "idlelib", "site-packages", "__pycache__"}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[^/\\]+)?")  # NAME or OWNER/NAME, and :CONFIG
BLOCK = 2**21  # tokens in each of the 64 blocks of a fingerprint

# What a reader returns: a description of the source, and its documents or an array of token ids.
Contents = tuple[str, Iterable[str] | np.ndarray]


def to_tokens(texts: Iterable[str]) -> np.ndarray:
    """Texts -> one stream of token ids, uint16: the bytes of each text, then END."""
    texts = (np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts)
    return np.concatenate([np.append(text, np.uint16(END)) for text in texts])


def read_txt(path: Path) -> Iterator[str]:
    """Yield the one text of a file; bytes that are not UTF-8 become U+FFFD."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "\0" in text:
        raise UserError(f"--dataset {path}: it has NULs, as UTF-16 has: convert it to UTF-8")
    yield text


def read_jsonl(path: Path) -> Iterator[Any]:
    """Yield the value of `text` of each line, or None if there is none; skips blank lines."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
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
    row = n_characters = 0
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


def read_library(_source: str) -> Contents:
    """Read the source code of Python's standard library."""
    paths = []
    for folder, inside, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inside[:] = sorted(set(inside) - SKIPPED)
        paths += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    texts = (text for path in in_random_order(paths) for text in read_txt(path))
    return f"{len(paths):,} files of Python's standard library", texts


def visible_files(path: Path) -> list[Path]:
    """A file itself, or all files in a folder and its subfolders, sorted, except hidden ones."""
    if not path.is_dir():
        return [path]
    paths = []
    for entry in sorted(path.iterdir()):
        if not entry.name.startswith("."):
            paths += visible_files(entry)
    return paths


def read_files(source: str) -> Contents:
    """Read a file, or all files of a folder. Raises UserError unless one of FORMATS reads all."""
    paths = visible_files(Path(source))
    examples = {FORMATS.get(suffix_of(path)): str(path) for path in paths}
    if len(examples) != 1 or None in examples:
        rule = f"the files of a folder must be of one kind ({', '.join(FORMATS)})"
        found = ", ".join(examples.values()) or "no file"
        raise UserError(f"--dataset {source}: {rule}, and it has {found}: name files of one kind")
    order = in_random_order(paths)
    texts = (text for path in order for text in strings(FORMATS[suffix_of(path)](path), path))
    return ", ".join(map(str, paths)), texts


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
    """The suffix in READERS with which a file's name ends, or "" if it has none of them."""
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


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers 0 to n-1 in the random order of an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(n)


class Data:
    """The batches of a run. `summary` is a line that says what has been read."""

    def __init__(self, source: str, shape: ModelConfig, batch_size: int, seed: int):
        """`source`: a value of --dataset. `batch_size`: in sequences.

        Raises UserError if data cannot be read, are too few, or have ids outside the vocabulary.
        """
        self.source = source
        self.shape = shape
        self.batch_size = batch_size
        self.seed = seed
        description, self.tokens = READERS[kind_of(source)](source)
        warning = ""
        if not isinstance(self.tokens, np.ndarray):
            self.tokens = to_tokens(self.tokens)
            if replaced := self.tokens.tobytes().count(REPLACED):
                warning = f" ({replaced:,} U+FFFD mark bytes that are not UTF-8)"
        self.summary = f"data: {len(self.tokens):,} tokens{warning} of {description}"
        self.n_windows = (len(self.tokens) - 1) // shape.seq_len
        self.n_train = self.n_windows - max(1, self.n_windows // 20)
        name = source or "(default)"
        largest = int(self.tokens.max())  # numpy reads a mapped file piece by piece
        if self.n_train < 1:
            few = f"{len(self.tokens)} tokens are too few for two sequences of {shape.seq_len}"
            raise UserError(f"--dataset {name}: {few}")
        if largest >= shape.vocab_size:
            need = f"its token id {largest} needs a --model with vocab_size={largest + 1} or more"
            raise UserError(f"--dataset {name}: {need}, not {shape.vocab_size}")

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step: tokens and targets, int64 [batch_size, seq].

        It replaces PyTorch's DistributedSampler, whose order changes only if `set_epoch` is called.
        """
        windows = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(position, self.n_train)
            windows.append(shuffled(self.n_train, self.seed, epoch)[place])
        return self.read(windows)

    def held_out(self, n: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the first n held-out windows (or all, if fewer), int64 [n, seq]."""
        return self.read(range(self.n_train, min(self.n_train + n, self.n_windows)))

    def read(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Tokens and targets of `windows`, int64 [windows, seq]."""
        starts = np.asarray(windows) * self.shape.seq_len
        indices = starts[:, None] + np.arange(self.shape.seq_len + 1)
        rows = torch.from_numpy(self.tokens[indices].astype(np.int64))
        return rows[:, :-1], rows[:, 1:]

    def fingerprint(self) -> str:
        """A short hash of the stream, by which ranks can tell whether they read the same tokens.

        SHA-256 of its length and of the first BLOCK tokens of each of 64 equal parts: all tokens
        of a stream of up to 256 MiB (uint16), and a sample of a longer one, so it takes a second.
        """
        digest = hashlib.sha256(str(len(self.tokens)).encode())
        for part in np.array_split(self.tokens, 64):
            digest.update(part[:BLOCK])
        return digest.hexdigest()[:16]
