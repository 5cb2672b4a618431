"""Tests `--dataset` (services/readers.py): all formats give the same tokens; bad data gives one line."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from common import UserError
from common.data import END, Data, read_files
from common.model import IGNORE, PRESETS, ModelConfig
from extras.services import evaluation, readers, shapes
from extras.services.seam import compose
from extras.tests.pool import error_of
from extras.variants import Parts

SEQ = 8
TEXTS = ["Hello, world.\n", "Grüße, Welt!", "", "third " * 20]


def read(source: str | Path, vocab_size: int = END + 1, text_column: str = "text") -> Data:
    """Read a source as a run does, in batches of 4."""
    shape = ModelConfig(8, 1, 1, 1, 8, vocab_size, SEQ)
    parts = Parts(SimpleNamespace(config=shape, first=True))
    readers.prepare(SimpleNamespace(dataset=str(source), text_column=text_column), parts)
    try:
        parts.data = Data(str(source), shape, 4, 0)
        readers.attach(None, parts)
        return parts.data
    finally:
        parts.give_back()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep all tests away from the user's cache, and from the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def jsonl(path: Path, **columns) -> Path:
    """Write a file of JSON lines; returns its path. Each of `columns` is a list with a value for each row."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_kinds_give_the_same_stream(tmp_path):
    """The same texts give the same tokens in each format. A .txt file gives the tokens of the course's own reader."""
    expected = [END if byte == 0 else byte for text in TEXTS for byte in text.encode() + b"\0"]
    names = "a.jsonl", "a.parquet", "stored", "b.jsonl.gz", "folder"
    sources = [tmp_path / name for name in names]
    data = datasets.Dataset.from_dict(dict(text=TEXTS))
    jsonl(sources[0], text=TEXTS), data.to_parquet(sources[1]), data.save_to_disk(sources[2])
    sources[3].write_bytes(gzip.compress(sources[0].read_bytes()))
    sources[4].mkdir()
    jsonl(sources[4] / "1.jsonl", text=TEXTS[:2]), jsonl(sources[4] / "2.jsonl", text=TEXTS[2:])
    for source in sources:
        tokens = read(source).tokens
        assert len(tokens) == len(expected) and tokens[0 : len(expected)].tolist() == expected, source
        assert tokens[5:9].tolist() == expected[5:9]
    (tmp_path / "b.txt").write_text("".join(TEXTS))
    assert read(tmp_path / "b.txt").tokens[0:400].tolist() == read_files([tmp_path / "b.txt"])[0].tolist()


BAD = [  # name, content (None: no file), a part of the error
    ("nowhere/at/all.txt", None, "no such file, and as ID or ID:CONFIG of the hub: "),
    ("some/corpus", None, "no such file, and as ID or ID:CONFIG of the hub: Couldn't reach 'some/corpus'"),
    ("empty.jsonl", "", "it has no .parquet, .jsonl, "),
    ("short.txt", "15 letters, END", "16 tokens are less than two sequences of 8"),
    ("table.csv", "text\nhello\n", "cannot read a .csv"),
    ("README", "text", "cannot read a file without a suffix"),
    ("body.jsonl", '{"body": "hello"}\n', "no `text` and no `input_ids` column, only ['body']"),
    ("number.jsonl", '{"text": 5}\n', "`text` holds int64, not strings"),
    ("broken.jsonl", '{"text": "a"}\n{"text": 5x}\n', "Unexpected character"),
    ("wide.txt", "text".encode("utf-16"), "convert it to UTF-8"),
    ("nul.jsonl", '{"text": "a\\u0000"}\n', "convert it to UTF-8"),
    ("torn.jsonl", '{"input_ids": [1, 2], "labels": [1]}\n', "`labels` and `input_ids` differ in length"),
    ("null.jsonl", '{"input_ids": [1]}\n{"input_ids": [2, null]}\n', "`input_ids` has a null"),
    ("mask.jsonl", '{"input_ids": [1], "loss_mask": [2]}\n', "`loss_mask` holds other numbers than 0 and 1"),
    ("labels.jsonl", '{"input_ids": [1], "labels": [-1]}\n' * 99, "ids below 0, other than labels of -100"),
    ("never.jsonl", '{"input_ids": [1], "labels": [-100]}\n' * 99, "all its labels are -100"),
    ("large.jsonl", '{"input_ids": [257]}\n' * 99, "its id 257 needs --vocab-size 258, not 257"),
    ("target.jsonl", '{"input_ids": [1], "labels": [999]}\n' * 99, "its id 999 needs --vocab-size 1000, not 257"),
]


@pytest.mark.parametrize("name, content, says", BAD)
def test_bad_data_is_one_line(tmp_path, name, content, says):
    """Bad data raises UserError before the first batch, in one line that names --dataset and the source."""
    source = name if content is None else tmp_path / name
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = error_of(UserError, read, source)
    assert said.startswith(f"--dataset {source}: ") and says in said and "\n" not in said


def test_a_folder_is_read_as_the_line_says(tmp_path, capsys, caplog):
    """In a folder, training files of one format are read. A line lists other visible files; the log, damaged ones."""
    folders = [tmp_path / "data" / name for name in ("", ".ipynb_checkpoints", "__pycache__", "dev", "sub")]
    for folder in folders:
        folder.mkdir()
        jsonl(folder / "train.jsonl", text=[f"in {folder.name}", None], url=[1, 2])
    jsonl(folders[0] / "latest.json", text=["testament"], url=[3])
    for name in ("test.jsonl", "c4-validation.00000-of-00008.json", "notes.md", "wiki.txt", "empty.json"):
        (folders[0] / name).write_text('{"text": "no"}' * (name != "empty.json"))
    data = read(folders[0])
    text = evaluation.decode(data.tokens[0 : len(data.tokens)].tolist())
    assert text.split("\n\n")[:-1] == ["testament", "in sub", "in data"]
    files = "6 files (c4-validation.00000-of-00008.json, dev/train.jsonl, empty.json, notes.md, test.jsonl, wiki.txt)"
    line = f"data: 25 tokens of 3 documents; left out: {files}, column url, rows without text: 2\n"
    assert capsys.readouterr().out == line
    (folders[4] / "torn.jsonl").write_text('{"text": 5x}')
    datasets.logging.enable_propagation()
    assert "Missing a comma" in error_of(UserError, read, folders[0]) and "sub/torn.jsonl" in caplog.text


@pytest.mark.parametrize(
    "columns, tokens, targets",
    [
        (dict(labels=[[7, 8, 9], [IGNORE, 8, 0]]), [1, 2, 3, 4, 5, 6], [7, 8, 9, IGNORE, 8, 0]),
        (dict(attention_mask=[[1, 1, 0], [0, 1, 1]]), [1, 2, 5, 6], [1, 2, 5, 6]),
        (dict(attention_mask=[[True, True, False], [False, False, False]]), [1, 2], [1, 2]),
        (dict(loss_mask=[[0, 1, 1], [1, 0, 1]]), [1, 2, 3, 4, 5, 6], [IGNORE, 2, 3, 4, IGNORE, 6]),
        (dict(labels=[[7, 8, 9]] * 2, loss_mask=[[0, 1, 1]] * 2), [1, 2, 3, 4, 5, 6], [IGNORE, 8, 9] * 2),
        (dict(loss_mask=[[0, 1, 1]] * 2, attention_mask=[[1, 1, 0], [0, 1, 1]]), [1, 2, 5, 6], [IGNORE, 2, 5, 6]),
    ],
)
def test_labels_and_masks(tmp_path, columns, tokens, targets):
    """`labels` are targets. A 0 in `attention_mask` removes a token and its target; in `loss_mask`, only a target."""
    columns = {name: 20 * rows for name, rows in columns.items()}
    data = read(jsonl(tmp_path / "a.jsonl", input_ids=20 * [[1, 2, 3], [4, 5, 6]], **columns), 10)
    x, y = data.read([0])
    assert x[0].tolist() == (tokens * 20)[:SEQ] and y[0].tolist() == (targets * 20)[1 : SEQ + 1]
    assert len(data.tokens) == 20 * len(tokens)


def test_a_file_that_changes_and_keeps_its_time_is_read_anew(tmp_path):
    """Another column gives other tokens. A changed file is read again even if its time of modification is the same."""
    for name, pack in (("a.jsonl", bytes), ("b.jsonl.gz", gzip.compress)):
        source = tmp_path / name
        for word in ("first", "other"):
            source.write_bytes(pack(b'{"text": "%s", "body": "of %s"}\n' % (word.encode(), word.encode()) * 9))
            os.utime(source, (10**9, 10**9))
            assert evaluation.decode(read(source).tokens[0:5].tolist()) == word
            assert evaluation.decode(read(source, text_column="body").tokens[0:8].tolist()) == f"of {word}"


def test_held_out_sequences_are_not_trained_on(tmp_path):
    """Each target is used either in training or in validation. Padding of the last micro-batch has no targets."""
    data = read(jsonl(tmp_path / "a.jsonl", input_ids=[[*range(993)]]), 1000)  # 8 x 124 + 1: all are used
    trained = {target for step in range(data.n_train) for target in data.batch(step)[1].flatten().tolist()}
    _, targets = evaluation.held_out(data, 10**6, 4)
    assert len(targets) % 4 == 0
    assert data.n_train == 118 and not trained & set(targets.flatten().tolist())
    assert sorted(trained | set(targets[targets != IGNORE].tolist())) == list(range(1, 993))


def test_shape_flags():
    """Shape flags make a new preset, whose name lists them. Sizes that do not fit together raise UserError."""
    import step01_single_gpu as step01

    made = compose(step01)
    config = made(model="debug", dim=32, tied=True)
    for _ in range(2):  # the second time nothing is left to change
        shapes.settle(config, 1)
    assert config.model == "debug --dim 32 --tied"
    assert PRESETS[config.model].dim == 32 and PRESETS[config.model].tied and PRESETS[config.model].n_layers == 2
    for flags, says in [(dict(dim=36), "choose --dim as a multiple of 8"), (dict(n_kv_heads=3), "divisors of 4")]:
        assert says in error_of(UserError, shapes.settle, made(model="debug", **flags), 1)
