"""common/data.py and readers.py: what each kind of --dataset becomes, which batches are made of it,
and what is refused in one line.

The expected tokens are the bytes of the texts, written out by Python's own `encode`.
"""

import gzip
import io
import json
import os
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch

from common import UserError, data, readers
from common.data import END, Data
from common.model import ModelConfig

TEXTS = ["Hello, world.\n", "Grüße, Welt!", "", "third " * 20]
TOKENS = [END if byte == 0 else byte for text in TEXTS for byte in text.encode() + b"\0"]


def opened(source: str | Path, seq_len: int = 8, vocab_size: int = 257, seed: int = 0) -> Data:
    """The data of a run whose batches have three sequences."""
    shape = ModelConfig(8, 1, 1, 1, 8, vocab_size=vocab_size, seq_len=seq_len)
    with mock.patch.object(data, "read_source", readers.read_source):  # other tests replace it
        return Data(str(source), shape, 3, seed)


def refused(source: str | Path, **options: int) -> str:
    """The error for a data set that cannot be used: a UserError of one line."""
    with pytest.raises(UserError) as caught:
        opened(source, **options)
    return " ".join(str(caught.value).split())


def lines(*rows: object) -> bytes:
    """Rows as JSON lines."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def parquet(**columns: list) -> bytes:
    """A .parquet file with these columns."""
    file = io.BytesIO()
    datasets.Dataset.from_dict(columns).to_parquet(file)
    return file.getvalue()


def hub_of(monkeypatch: pytest.MonkeyPatch, **columns: list) -> list:
    """A hub on which every data set has these columns. Returns what it is asked for."""
    asked = []

    def load_dataset(*words: str, **options: str) -> datasets.Dataset:
        asked.append((words, options))
        return datasets.Dataset.from_dict(columns)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return asked


# --- Batches ---------------------------------------------------------------------------------


@pytest.fixture
def numbered(tmp_path):
    """A function that opens a text of 43 windows, "0000" to "0042", of which 41 are trained on."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i:04d}" for i in range(43)))
    return lambda **options: opened(path, **dict(seq_len=4) | options)


def test_targets_are_the_next_tokens(numbered):
    """The targets of a window are the bytes one place further on, and END after the last one."""
    tokens, targets = numbered().read([7, 42])
    assert tokens.tolist() == [[*b"0007"], [*b"0042"]]
    assert targets.tolist() == [[*b"0070"], [*b"042", END]]


def test_each_epoch_has_every_window_once_in_another_order(numbered):
    """Each epoch has every training window once, in an order that depends on seed and epoch. Each
    batch is read by itself, as after a resumption: it does not depend on earlier ones. 41 batches
    of 3 are three epochs of 41 windows.
    """
    orders = []
    for seed in range(2):
        batches = [numbered(seed=seed).batch(step)[0] for step in range(41)]
        for epoch in torch.cat(batches).split(41):
            orders.append(tuple(int(bytes(row.tolist())) for row in epoch))
    assert [sorted(order) for order in orders] == [[*range(41)]] * 6
    assert len(set(orders)) == 6  # of 2 seeds x 3 epochs


def test_two_windows_are_the_fewest(numbered):
    """One window to train on and one to hold out are enough; with fewer, an error says so. (Of the
    text's 43 x 4 bytes and END, 173 tokens, two windows of 86 take 2 x 86 + 1.)
    """
    assert numbered(seq_len=86).batch(1)[0].shape == (3, 86)
    with pytest.raises(UserError, match=r"--dataset .*173 tokens are too few: .* need 175$"):
        numbered(seq_len=87)


# --- Kinds -----------------------------------------------------------------------------------


def test_json_lines_gzip_and_parquet_give_the_same_tokens(tmp_path):
    """The texts' bytes, and END after each, also after an empty one."""
    rows = lines(*(dict(text=text) for text in TEXTS))
    (tmp_path / "a.jsonl").write_bytes(rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows))
    (tmp_path / "a.parquet").write_bytes(parquet(text=TEXTS))
    for name in "a.jsonl", "a.jsonl.gz", "a.parquet":
        assert opened(tmp_path / name).tokens.tolist() == TOKENS, name


def test_a_data_set_of_the_hub(monkeypatch):
    """NAME:CONFIG is the column `text` of that configuration's split `train`."""
    asked = hub_of(monkeypatch, url=["u"] * 4, text=TEXTS)
    assert opened("owner/name:part").tokens.tolist() == TOKENS
    assert asked == [(("owner/name", "part"), dict(split="train"))]


def test_files_of_a_folder_may_differ_in_other_columns(tmp_path):
    """Beside `text`, each file of a folder may have other columns, of any type."""
    (tmp_path / "a.parquet").write_bytes(parquet(text=["text"], meta=[dict(url="u")]))
    (tmp_path / "b.parquet").write_bytes(parquet(text=["text"], meta=[5]))
    assert opened(tmp_path, seq_len=4).tokens.tolist() == [*b"text", END] * 2


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    """Otherwise its texts would be missing without a word."""
    denied = mock.patch.object(os, "scandir", side_effect=PermissionError(13, "denied", "part"))
    with denied, pytest.raises(UserError, match="cannot read part: denied"):
        opened(tmp_path)


def test_what_is_read_of_a_folder(tmp_path):
    """A folder is read with its subfolders, without hidden files and folders; links to folders are
    not followed. The summary names each file.
    """
    for folder in ("part", ".folder"):
        (tmp_path / folder).mkdir()
    (tmp_path / "part/up").symlink_to(tmp_path)  # it would have no end
    texts = {"a.txt": "first", "part/b.txt": "second", ".hidden.txt": "no", ".folder/c.txt": "no"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = opened(tmp_path, seq_len=4)
    documents = bytes((found.tokens % END).tolist()).split(b"\0")
    assert sorted(documents) == [b"", b"first", b"second"]
    assert found.summary == f"data: 13 tokens of {tmp_path}/a.txt, {tmp_path}/part/b.txt"


def test_bytes_that_are_not_utf_8_are_counted(tmp_path):
    """A text in Latin-1 is read, and the summary says how many of its bytes were replaced."""
    path = tmp_path / "latin.txt"
    # Six accented letters, 400 times
    path.write_text(400 * "Élève à l'école, où était-il? ", encoding="latin-1")
    assert "2,400 U+FFFD: for bytes that are not UTF-8" in opened(path).summary


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_ids_are_mapped_into_memory(tmp_path, dtype):
    """A .bin file is uint16, as nanoGPT writes it, unless its .json says uint32. It is mapped."""
    ids = np.arange(100) * 650  # the last is 64,350, which a signed int16 could not hold
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    if dtype == "uint32":
        (tmp_path / "train.bin.json").write_text('{"dtype": "uint32", "tokens": 100}')
    found = opened(tmp_path / "train.bin", vocab_size=64351)
    assert found.read([11])[0].tolist() == [ids[88:96].tolist()]
    assert isinstance(found.tokens, np.memmap)


# --- What is refused -------------------------------------------------------------------------

GOOD = lines(*(dict(text=f"a text with the number {i}") for i in range(9)))
FILES = [  # name, content, a part of the error
    ("wide.txt", "a text in UTF-16".encode("utf-16"), "convert it to UTF-8"),
    ("table.csv", b"text\nhello\n", "use a .bin file, or files of the same kind"),
    ("half.jsonl", GOOD[:-9], "near document 9: Unterminated string"),
    ("words.jsonl", b"a plain text", "near document 1: Expecting value"),
    ("column.jsonl", lines(dict(body="hello")), "a document needs a string `text`, not None"),
    ("list.jsonl", lines(["text"]), "a document needs a string `text`, not None"),
    ("plain.jsonl.gz", GOOD, "Not a gzipped file"),
    ("half.jsonl.gz", gzip.compress(GOOD, mtime=0)[:-12], "Compressed file ended"),
    ("damaged.parquet", b"PAR1 and so on", "Parquet magic bytes not found in footer"),
    ("column.parquet", parquet(body=["hello"]), "it has no column `text`"),
    ("odd.bin", b"12345", "odd.bin.json is damaged: Size of available data"),
]


@pytest.mark.parametrize("name, content, reason", FILES)
def test_an_unusable_file_is_named(tmp_path, name, content, reason):
    """A file that cannot be read is refused in a line that names it, also in a folder."""
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name)
    assert message.startswith(f"--dataset {tmp_path}/{name}: ") and reason in message, message
    assert name in refused(tmp_path)


def test_too_little_text_is_refused(tmp_path):
    """An empty file and blank lines have no tokens, which is no damage."""
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(b"\n\n")
    assert "0 tokens are too few: two windows of 8 + 1 tokens, which share one, need 17" in refused(
        tmp_path
    )


@pytest.mark.parametrize("names", ["a.txt b.jsonl", "a.txt notes.md", "a.csv", "a.txt b.bin", ""])
def test_a_folder_of_several_kinds_is_refused(tmp_path, names):
    """A folder is refused unless one kind fits all its files; the line names one of each kind."""
    for name in names.split():
        (tmp_path / name).write_text('{"text": "text"}' * 9)
    message = refused(tmp_path)
    assert "files of the same kind, one of .txt, .jsonl, .jsonl.gz, .par" in message
    assert all(name in message for name in names.split() or ["no file"])


MISSING = ["data/trian.jsonl", "trian.txt", "train.bin", "a/b.parquet", "/nowhere/at/all"]
MISSING += ["./corpus", "../corpus", "~/corpus", "corpus/", "a/b/c", "C:\\corpus", "a corpus"]


@pytest.mark.parametrize("source", MISSING)
def test_a_missing_file_is_not_looked_up_on_the_hub(monkeypatch, tmp_path, source):
    """What has a file's suffix, or a form that no name of the hub has, is just not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readers, "read_hub", lambda _source: pytest.fail("the hub was asked"))
    assert refused(source) == f"--dataset {source}: no such file"


DESCRIPTIONS = [  # the .json of a file with 48 token ids, all 12,593
    ("", "token id 12593 needs a --model with vocab_size=12594 or more"),
    ('{"dty', "train.bin.json is damaged: Unterminated string"),
    ('{"dtype": "float32"}', "its dtype is float32"),
    ('{"dtype": "uint32", "tokens": 25}', "it has 24 tokens, and should have 25"),
]


@pytest.mark.parametrize("description, reason", DESCRIPTIONS)
def test_a_bin_file_that_does_not_fit_is_refused(tmp_path, description, reason):
    """It has ids outside the vocabulary; or its .json is damaged, names another dtype, or another
    number of ids.
    """
    path = tmp_path / "train.bin"
    path.write_bytes(96 * b"1")
    if description:
        (tmp_path / "train.bin.json").write_text(description)
    message = refused(path)
    assert message.startswith(f"--dataset {path}: ") and reason in message


# --- The hub ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [True, False])
def test_without_network_the_error_is_one_line(monkeypatch, capfd, offline):
    """Without the hub, the error comes at once: nothing is tried again."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody's
    for config in huggingface_hub.constants, datasets.config:
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", offline)
    message = refused("owner/name")
    assert message.startswith("--dataset owner/name: it is neither a file here nor a data set")
    assert ("OfflineModeIsEnabled" if offline else "Connection refused") in message
    assert "Retry" not in capfd.readouterr().err


def test_a_missing_text_column_is_named(monkeypatch):
    """The one-line error has the library's words."""
    hub_of(monkeypatch, body=["hello"])
    message = refused("owner/name")
    assert message.startswith("--dataset owner/name: ")
    assert "Column name ['text'] not in the dataset" in message


# --- Fingerprints ----------------------------------------------------------------------------


@pytest.mark.parametrize("block, place", [(2**21, 0), (2**21, 999), (10, 500), (10, 990)])
def test_a_changed_token_changes_the_fingerprint(monkeypatch, numbered, block, place):
    """So does one token more, but not another dtype. With blocks of 10, only the first 10 of each
    15 or 16 tokens are read, as in a large file (500 and 990 are).
    """
    monkeypatch.setattr(data, "BLOCK", block)
    ids = np.arange(1000, dtype=np.uint16) % 250
    changed = ids.copy()
    changed[place] += 1
    stream = numbered()
    found = set()
    for tokens in ids, ids.astype(np.uint32), changed, np.append(ids, ids[:1]):
        stream.tokens = tokens
        found.add(stream.fingerprint())
    assert len(found) == 3
