"""What --dataset takes (services/readers.py): every kind of file gives the same stream; mistakes are one line."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from common.data import END, Data, read_files
from common.model import IGNORE, PRESETS, ModelConfig
from extras.services import evaluation, readers, shapes
from extras.services.seam import compose
from extras.variants import Parts

SEQ = 8
TEXTS = ["Hello, world.\n", "Grüße, Welt!", "", "third " * 20]


def shape(vocab_size: int) -> ModelConfig:
    """As far as data need one."""
    return ModelConfig(8, 1, 1, 1, 8, vocab_size, SEQ)


def read(source: str | Path, vocab_size: int = END + 1, text_column: str = "text") -> Data:
    """Batches of 4."""
    parts = Parts(SimpleNamespace(config=shape(vocab_size), first=True))
    readers.prepare(SimpleNamespace(dataset=str(source), text_column=text_column), parts)
    try:
        parts.data = Data(str(source), shape(vocab_size), 4, 0)
        readers.attach(None, parts)
        return parts.data
    finally:
        parts.give_back()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test looks into the user's cache, or to the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def jsonl(path: Path, **columns) -> Path:
    """A file with a row for each element of the columns."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_kinds_give_the_same_stream(tmp_path):
    """jsonl, also packed, parquet, a folder, text, and a stored data set; text as the plain reader has it."""
    expected = [*b"".join(text.encode() + b"\0" for text in TEXTS)]
    expected = [END if token == 0 else token for token in expected]
    sources = [
        jsonl(tmp_path / "a.jsonl", text=TEXTS),
        tmp_path / "a.parquet",
        tmp_path / "stored",
        tmp_path / "folder",
        tmp_path / "b.jsonl.gz",
    ]
    sources[4].write_bytes(gzip.compress(sources[0].read_bytes()))
    data = datasets.Dataset.from_dict(dict(text=TEXTS))
    data.to_parquet(sources[1]), data.save_to_disk(sources[2])
    sources[3].mkdir()
    jsonl(sources[3] / "1.jsonl", text=TEXTS[:2]), jsonl(sources[3] / "2.jsonl", text=TEXTS[2:])
    for source in sources:
        tokens = read(source).tokens
        assert len(tokens) == len(expected) and tokens[0 : len(expected)].tolist() == expected, source
        assert tokens[5:9].tolist() == expected[5:9]
    (tmp_path / "b.txt").write_text("".join(TEXTS))
    assert read(tmp_path / "b.txt").tokens[0:400].tolist() == read_files([tmp_path / "b.txt"])[0].tolist()


def test_labels_are_the_targets(tmp_path):
    """Where there is a column `labels`; -100 counts nowhere."""
    tokens = np.arange(400)
    labels = np.where(tokens % 3 == 0, tokens, IGNORE)
    source = jsonl(
        tmp_path / "a.jsonl", input_ids=tokens.reshape(10, 40).tolist(), labels=labels.reshape(10, 40).tolist()
    )
    data = read(source, 400)
    for step in range(5):
        x, y = data.batch(step)
        assert torch.equal(y, torch.where((x + 1) % 3 == 0, x + 1, IGNORE))


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("nowhere/at/all.txt", None, "no such file or folder"),
        ("some/corpus", None, "the hub cannot be reached or does not have it"),
        ("empty.jsonl", b"", "empty"),
        ("short.txt", b"15 letters, END", "16 tokens are less than two sequences of 8"),
        ("table.csv", b"text\nhello\n", "cannot read a .csv"),
        ("body.jsonl", b'{"body": "hello"}\n', "no `text` and no `input_ids` column, only ['body']"),
        ("number.jsonl", b'{"text": 5}\n', "`text` holds int64, not strings"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": 5x}\n', "cannot be read"),
        ("flat.jsonl", b'{"input_ids": 5}\n', "not lists of integers"),
        ("none.jsonl", b'{"input_ids": [1], "labels": [-100]}\n' * 99, "all labels are -100"),
        ("two.jsonl", b'{"input_ids": [1, 2], "labels": [1]}\n', "`labels` and `input_ids` differ in length"),
        (
            "rows.jsonl",
            b'{"input_ids": [1, 2], "labels": [1]}\n{"input_ids": [3], "labels": [2, 3]}\n',
            "differ in len",
        ),
        ("null.jsonl", b'{"input_ids": [1]}\n{"input_ids": [2, null]}\n', "`input_ids` has a null in row 2"),
        ("mask.jsonl", b'{"input_ids": [1], "loss_mask": [2]}\n', "`loss_mask` holds other numbers than 0 and 1"),
        ("none.jsonl", b"\n", "no rows"),
        ("README", b"text", "cannot read a file without a suffix"),
        ("wide.txt", "text".encode("utf-16"), "convert it to UTF-8"),
        ("wide.jsonl", '{"text": "a"}'.encode("utf-16"), "convert it to UTF-8"),
    ],
)
def test_bad_data_is_one_line(tmp_path, name, content, says):
    """A UserError that names --dataset and the source, and nothing else of what failed."""
    source = name if content is None else tmp_path / name
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(Exception, match="--dataset") as caught:
        read(source)
    assert type(caught.value).__name__ == "UserError" and says in str(caught.value)
    assert str(caught.value).startswith(f"--dataset {source}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "vocab_size, columns, says",
    [
        (256, dict(text=TEXTS), "ids 10 to 256 do not fit --vocab-size 256"),
        (9, dict(input_ids=[[*range(30)]]), "ids 0 to 29 do not fit --vocab-size 9"),
        (40, dict(input_ids=[[*range(30), IGNORE]]), "ids -100 to 29 do not fit --vocab-size 40"),
        (40, dict(input_ids=[[*range(30)]], labels=[[-1] * 30]), "ids -1 to -1 do not fit --vocab-size 40"),
        (40, dict(input_ids=[[*range(30)]], labels=[[IGNORE] * 30]), "all labels are -100"),
    ],
)
def test_ids_that_do_not_fit(tmp_path, vocab_size, columns, says):
    """Are told before the first batch."""
    with pytest.raises(Exception, match=says):
        read(jsonl(tmp_path / "a.jsonl", **columns), vocab_size)


def test_a_folder_is_read_as_the_line_says(tmp_path, capsys):
    """All kinds, one after the other; no split but that to train on, nothing hidden."""
    folders = [tmp_path / "data" / name for name in ("", ".ipynb_checkpoints", "__pycache__", "dev", "sub")]
    for folder in folders:
        folder.mkdir()
        jsonl(folder / "train.jsonl", text=[f"in {folder.name}", None], url=[1, 2])
    for name in ("test.jsonl", "c4-validation.00000-of-00008.json", "notes.md", "wiki.valid.txt"):
        (folders[0] / name).write_text('{"text": "no"}')
    for name in ("z.txt", "latest.txt", "testament.py"):
        (folders[0] / name).write_text(name)
    data = read(folders[0])
    text = evaluation.decode(data.tokens[0 : len(data.tokens)].tolist())
    assert text.split("\n\n")[:-1] == ["in sub", "in data", "latest.txt", "testament.py", "z.txt"]
    files = "5 files (c4-validation.00000-of-00008.json, dev/train.jsonl, notes.md, test.jsonl, wiki.valid.txt)"
    line = f"data: 5 files, 5 documents, 45 tokens; left out: {files}, column url, rows without text: 2\n"
    assert capsys.readouterr().out == line
    datasets.Dataset.from_dict(dict(input_ids=[[1, 2]])).to_parquet(folders[0] / "ids.parquet")
    with pytest.raises(Exception, match="files of several kinds differ in what they hold"):
        read(folders[0])


@pytest.mark.parametrize(
    "columns, tokens, targets",
    [
        (dict(attention_mask=[[1, 1, 0], [0, 1, 1]]), [1, 2, 5, 6], [1, 2, 5, 6]),
        (dict(attention_mask=[[True, True, False], [False, False, False]]), [1, 2], [1, 2]),
        (dict(loss_mask=[[0, 1, 1], [1, 0, 1]]), [1, 2, 3, 4, 5, 6], [IGNORE, 2, 3, 4, IGNORE, 6]),
        (dict(labels=[[7, 8, 9]] * 2, loss_mask=[[0, 1, 1]] * 2), [1, 2, 3, 4, 5, 6], [IGNORE, 8, 9] * 2),
        (dict(loss_mask=[[0, 1, 1]] * 2, attention_mask=[[1, 1, 0], [0, 1, 1]]), [1, 2, 5, 6], [IGNORE, 2, 5, 6]),
    ],
)
def test_masks(tmp_path, columns, tokens, targets):
    """What is padding is in neither; a masked loss is that of predicting this token."""
    columns = {name: 20 * rows for name, rows in columns.items()}
    data = read(jsonl(tmp_path / "a.jsonl", input_ids=20 * [[1, 2, 3], [4, 5, 6]], **columns), 10)
    x, y = data.read([0])
    assert x[0].tolist() == (tokens * 20)[:SEQ] and y[0].tolist() == (targets * 20)[1 : SEQ + 1]
    assert len(data.tokens) == 20 * len(tokens)


def test_a_file_that_changes_and_keeps_its_time_is_read_anew(tmp_path):
    """Also packed; and another column of it is another text."""
    for name, pack in (("a.jsonl", bytes), ("b.jsonl.gz", gzip.compress)):
        source = tmp_path / name
        for word in ("first", "other"):
            source.write_bytes(pack(b'{"text": "%s", "body": "of %s"}\n' % (word.encode(), word.encode()) * 9))
            os.utime(source, (10**9, 10**9))
            assert evaluation.decode(read(source).tokens[0:5].tolist()) == word
            assert evaluation.decode(read(source, text_column="body").tokens[0:8].tolist()) == f"of {word}"


def test_held_out_sequences_are_not_trained_on(tmp_path):
    """No target is in both, and what fills up the last micro-batch does not count."""
    data = read(jsonl(tmp_path / "a.jsonl", input_ids=[[*range(993)]]), 1000)  # 8 x 124 + 1: all are used
    trained = {target for step in range(data.n_train) for target in data.batch(step)[1].flatten().tolist()}
    _, targets = evaluation.held_out(data, 10**6, 4)
    assert len(targets) % 4 == 0
    assert data.n_train == 118 and not trained & set(targets.flatten().tolist())
    assert sorted(trained | set(targets[targets != IGNORE].tolist())) == list(range(1, 993))


def test_shape_flags():
    """They make an entry of the menu, whose name says how; parts that do not fit together are one line."""
    import step01_single_gpu as step01

    made = compose(step01)
    config = made(model="debug", dim=32, tied=True)
    for _ in range(2):  # the second time nothing is left to change
        shapes.settle(config, 1)
    assert config.model == "debug --dim 32 --tied"
    assert PRESETS[config.model].dim == 32 and PRESETS[config.model].tied and PRESETS[config.model].n_layers == 2
    for flags, says in [(dict(dim=36), "choose --dim as a multiple of 8"), (dict(n_kv_heads=3), "divisors of 4")]:
        with pytest.raises(Exception, match=says):
            shapes.settle(made(model="debug", **flags), 1)
