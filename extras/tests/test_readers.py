"""What --dataset takes (services/readers.py): every kind of file gives the same stream; mistakes are one line."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from common import UserError
from common.data import END, Data, read_files
from common.model import IGNORE, PRESETS, ModelConfig
from extras.services import evaluation, readers, shapes
from extras.tests.equal import config_of
from extras.tests.pool import error_of
from extras.variants import Parts

SEQ = 8
TEXTS = ["Hello, world.\n", "Grüße, Welt!", "", "third " * 20]


def read(source: str | Path, vocab_size: int = END + 1, text_column: str = "text") -> Data:
    """Batches of 4, as a run reads them."""
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
    """No test looks into the user's cache, or to the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def jsonl(path: Path, **columns) -> Path:
    """A file with a row for each element of the columns."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_kinds_give_the_same_stream(tmp_path):
    """Also packed, stored, as a folder, and in another column; text as the plain reader has it. null is no text."""
    expected = [*b"".join(text.encode() + b"\0" for text in TEXTS)]
    expected = [END if token == 0 else token for token in expected]
    data = datasets.Dataset.from_dict(dict(text=[*TEXTS, None], body=[None, *TEXTS]))
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "a.parquet", "stored", "folder")]
    jsonl(paths[0], **data.to_dict())
    paths[1].write_bytes(gzip.compress(paths[0].read_bytes()))
    data.to_parquet(paths[2]), data.save_to_disk(paths[3]), paths[4].mkdir()
    for name, some in ("1.jsonl", TEXTS[:2]), ("2.jsonl", TEXTS[2:]):
        jsonl(paths[4] / name, text=some, body=some)
    for path in paths:
        for tokens in (read(path, text_column=name).tokens for name in ("text", "body")):
            assert tokens[0 : len(tokens)].tolist() == expected and tokens[5:9].tolist() == expected[5:9], path
    for name in ("a.txt", "a.py"):
        (tmp_path / name).write_text("".join(TEXTS))
    (tmp_path / "a.csv").write_text('text\n"{}"\n'.format("".join(TEXTS)))
    for name in ("a.py", "a.csv"):
        assert read(tmp_path / name).tokens[0:400].tolist() == read_files([tmp_path / "a.txt"])[0].tolist()


def test_a_folder_is_read_as_the_line_says(tmp_path, capsys):
    """Files of the most frequent kind, without hidden ones and a held-out split; each text file is a document."""
    for folder in (tmp_path / "data" / name for name in ("", ".ipynb_checkpoints", "sub")):
        folder.mkdir()
        jsonl(folder / "train.jsonl", text=[f"text in {folder.name}", None], url=[1, 2])
    for name in ("data/test.jsonl", "data/notes.md"):
        (tmp_path / name).write_text('{"text": "no"}')
    left_out = "left out: other files: 3, column url, rows without text: 2"
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / "texts" / name).write_text(f"first line\nof {name}")
    for name, texts, said in [
        ("data", {"text in data", "text in sub"}, f"data: 25 tokens, 2 documents; {left_out}\n"),
        ("texts", {"first line\nof a.txt", "first line\nof sub/b.txt"}, "data: 44 tokens, 2 documents\n"),
    ]:
        data = read(tmp_path / name)
        assert {*evaluation.decode(data.tokens[0 : len(data.tokens)].tolist()).split("\n\n")[:-1]} == texts
        assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    "columns, tokens, targets",
    [
        (dict(labels=[[7, IGNORE, 9]] * 2), [1, 2, 3, 4, 5, 6], [7, IGNORE, 9] * 2),
        (dict(attention_mask=[[1, 1, 0], [0, 1, 1]]), [1, 2, 5, 6], [1, 2, 5, 6]),
        (dict(attention_mask=[[True, True, False], [False, False, False]]), [1, 2], [1, 2]),
        (dict(loss_mask=[[0, 1, 1], [1, 0, 1]]), [1, 2, 3, 4, 5, 6], [IGNORE, 2, 3, 4, IGNORE, 6]),
        (dict(labels=[[7, 8, 9]] * 2, loss_mask=[[0, 1, 1]] * 2), [1, 2, 3, 4, 5, 6], [IGNORE, 8, 9] * 2),
        (dict(loss_mask=[[0, 1, 1]] * 2, attention_mask=[[1, 1, 0], [0, 1, 1]]), [1, 2, 5, 6], [IGNORE, 2, 5, 6]),
    ],
)
def test_labels_and_masks(tmp_path, columns, tokens, targets):
    """Labels are the targets. Padding is in neither; a masked loss is that of predicting this token."""
    columns = {name: 20 * rows for name, rows in columns.items()}
    data = read(jsonl(tmp_path / "a.jsonl", input_ids=20 * [[1, 2, 3], [4, 5, 6]], **columns), 10)
    x, y = data.read([0])
    assert x[0].tolist() == (tokens * 20)[:SEQ] and y[0].tolist() == (targets * 20)[1 : SEQ + 1]
    assert len(data.tokens) == 20 * len(tokens)


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("some/corpus", None, "cannot be read (Couldn't reach 'some/corpus' on the Hub"),
        ("empty.jsonl", b"", "the file is empty"),
        ("short.txt", b"15 letters, END", "16 tokens are less than two sequences of --seq-len 8"),
        ("body.jsonl", b'{"body": "hello"}\n', "no `text` and no `input_ids` column, only ['body']"),
        ("number.jsonl", b'{"text": 5}\n', "`text` holds int64, not strings"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": 5x}\n', "cannot be read"),
        ("flat.jsonl", b'{"input_ids": 5}\n', "`input_ids` holds int64, not lists of integers"),
        ("rows.jsonl", b'{"input_ids": [1, 2], "labels": [1]}\n{"input_ids": [3], "labels": [2, 3]}\n', "differ in"),
        ("null.jsonl", b'{"input_ids": [1]}\n{"input_ids": [2, null]}\n', "`input_ids` has a null"),
        ("mask.jsonl", b'{"input_ids": [1], "loss_mask": [2]}\n', "`loss_mask` holds other numbers than 0 and 1"),
        ("wide.py", "text".encode("utf-16"), "convert it to UTF-8"),
        ("none.jsonl", b'{"input_ids": [1], "labels": [-100]}\n' * 99, "all labels are -100"),
    ],
)
def test_bad_data_is_one_line(tmp_path, name, content, says):
    """A UserError, which names --dataset and the source, and nothing else of what failed."""
    source = name if content is None else tmp_path / name
    if content is not None:
        source.write_bytes(content)
    said = error_of(UserError, read, source)
    assert said.startswith(f"--dataset {source}: ") and says in said and "\n" not in said


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
    config = config_of("step01_single_gpu", {})
    for flags, says in [(dict(dim=36), "choose --dim as a multiple of 8"), (dict(n_kv_heads=3), "divisors of 4")]:
        assert says in error_of(UserError, shapes.settle, replace(config, model="debug", **flags), 1)
    config = replace(config, model="debug", dim=32, tied=True)
    for _ in range(2):  # the second time nothing is left to change
        shapes.settle(config, 1)
    assert config.model == "debug --dim 32 --tied"
    assert PRESETS[config.model] == replace(PRESETS["debug"], dim=32, tied=True)
