"""Token batches: pure functions of (seed, step), from every kind of source, with every mistake told in one line."""

import json
import logging
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
import torch

from common import UserError
from common.data import TokenData
from common.model import IGNORE
from services import readers
from services.readers import BYTE_VOCAB, END, decode, open_tokens
from tests.jobs import Forked

ROOT = Path(__file__).parents[1]
SEQ = 8


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Keeps what the tests tokenise out of the user's cache, and opens it each time."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(readers, "load_columns", readers.load_columns.__wrapped__)


def stored(tmp_path, **columns) -> str:
    """A data set with these columns, written by `save_to_disk`."""
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "stored"))
    return str(tmp_path / "stored")


@pytest.fixture
def counting(tmp_path) -> str:
    """The tokens 0, 1, 2, ... 999 in documents of 30: a token shows where it comes from."""
    return stored(tmp_path, input_ids=np.array_split(np.arange(1000), 33))


def open_counting(source: str, batch_size: int = 6, seed: int = 0) -> TokenData:
    """The counting data in sequences of SEQ."""
    return open_tokens(source, SEQ, batch_size, seed, vocab_size=1000)


# Batches


def test_a_batch_depends_on_seed_and_step_only(counting):
    """Asked for at once, after others, or in another object, batch 40 is the same; so a resumed run needs no replay."""
    first = open_counting(counting)
    here = first.batch(40)
    for step in (3, 41, 0, 39):
        first.batch(step)
    for again in (first.batch(40), open_counting(counting).batch(40)):
        assert torch.equal(again.tokens, here.tokens) and torch.equal(again.targets, here.targets)
    assert not torch.equal(open_counting(counting, seed=1).batch(40).tokens, here.tokens)
    assert not torch.equal(first.batch(41).tokens, here.tokens)


def test_rows_of_a_batch_are_the_same_for_every_layout(counting):
    """However the rows are shared out, together they are the batch; the count of targets is that of all of it."""
    data = open_counting(counting, batch_size=12)
    whole = data.batch(5)
    for ranks in (1, 2, 3, 4, 6, 12):
        size = 12 // ranks
        parts = [open_counting(counting, 12).batch(5, slice(r * size, (r + 1) * size)) for r in range(ranks)]
        assert torch.equal(torch.cat([p.tokens for p in parts]), whole.tokens)
        assert torch.equal(torch.cat([p.targets for p in parts]), whole.targets)
        assert {p.n_targets for p in parts} == {12 * SEQ}


@pytest.mark.parametrize("batch_size", [1, 6, 7, 500])
def test_an_epoch_is_a_permutation(counting, batch_size):
    """Every training window comes once an epoch, in another order each time, also if a batch spans several epochs."""
    data = open_counting(counting, batch_size)
    steps = -(-3 * data.n_train // batch_size)
    seen = torch.cat([data.batch(step).tokens for step in range(steps)])[: 3 * data.n_train, 0]
    epochs = (seen // SEQ).view(3, data.n_train).tolist()
    assert all(sorted(epoch) == list(range(data.n_train)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(data.n_train))


def test_targets_are_the_next_tokens(counting):
    """Shifted by one, across document borders, and the last target reaches into the next window."""
    batch = open_counting(counting).batch(0)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.tokens.shape == (6, SEQ) and batch.tokens.dtype == torch.int64


def test_validation_is_held_out(counting):
    """No target is both trained on and validated on, nothing is lost between them, about a twentieth is held out."""
    data = open_counting(counting, batch_size=1)
    trained = torch.cat([data.batch(step).targets.flatten() for step in range(data.n_train)])
    held_out = data.validation(10**6)[1].flatten()
    assert not set(trained.tolist()) & set(held_out.tolist())
    assert sorted(trained.tolist() + held_out.tolist()) == list(range(1, (data.n_train + data.n_validation) * SEQ + 1))
    assert data.n_validation == (999 // SEQ) // 20
    assert torch.equal(data.validation(2)[0], data.validation(10**6)[0][:2])


def test_labels_are_the_targets(tmp_path):
    """A `labels` column supplies the targets, -100 counts nowhere, every rank knows the count of the whole batch."""
    tokens = np.arange(400)
    labels = np.where(tokens % 3 == 0, tokens, IGNORE)
    labels[:200] = IGNORE
    source = stored(tmp_path, input_ids=tokens.reshape(10, 40), labels=labels.reshape(10, 40))
    data = open_tokens(source, SEQ, 10, 0, 400)
    counts = []
    for step in range(5):
        whole = data.batch(step)
        next_tokens = whole.tokens + 1
        expected = torch.where((next_tokens % 3 == 0) & (next_tokens >= 200), next_tokens, IGNORE)
        assert torch.equal(whole.targets, expected)
        parts = [data.batch(step, slice(r, r + 1)) for r in range(10)]
        assert {p.n_targets for p in parts} == {max(1, int((expected != IGNORE).sum()))}
        counts += [int((p.targets != IGNORE).sum()) for p in parts]
    assert 0 in counts and max(counts) > 0


def test_a_batch_without_any_target_divides_by_one(tmp_path):
    """Its loss is 0, not 0/0."""
    source = stored(tmp_path, input_ids=[list(range(100))], labels=[[IGNORE] * 100])
    assert open_tokens(source, SEQ, 2, 0, 100).batch(0).n_targets == 1


# Sources

TEXTS = ["Hello, world.\n", "Grüße, Welt!", "", "third " * 20]
STREAM = b"".join(text.encode() + b"\0" for text in TEXTS)  # \0 stands for END


def write(kind: str, folder: Path) -> str:
    """TEXTS as a file or folder of the given kind."""
    folder.mkdir()
    rows = datasets.Dataset.from_dict({"text": TEXTS, "other": [1, 2, 3, 4]})
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
    elif kind == "jsonl":
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in TEXTS))
    elif kind == "parquet":
        rows.to_parquet(folder / "data.parquet")
    elif kind == "saved":
        rows.save_to_disk(str(folder))
    elif kind == "saved with splits":
        datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(folder))
    return str(folder)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "saved", "saved with splits"])
def test_text_becomes_bytes_with_an_end_after_each_document(tmp_path, kind):
    """The same stream from every kind of folder, and from the file itself."""
    source = write(kind, tmp_path / "texts")
    for path in [source, *map(str, Path(source).glob("data.*"))]:
        data = open_tokens(path, SEQ, 1, 0, BYTE_VOCAB)
        stream = data.tokens.read(0, len(data.tokens)).tolist()
        assert stream == [END if byte == 0 else byte for byte in STREAM]
    assert decode(stream) == "".join(text + "\n\n" for text in TEXTS)


def test_bytes_that_are_no_text_do_not_stop_a_run(tmp_path):
    """A broken encoding is replaced, a missing text is an empty document."""
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 30)
    assert len(open_tokens(str(tmp_path / "latin.txt"), SEQ, 1, 0, BYTE_VOCAB).tokens) > 120
    rows = [{"text": "words " * 20}, {"text": None}]
    (tmp_path / "gaps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gaps = open_tokens(str(tmp_path / "gaps.jsonl"), SEQ, 1, 0, BYTE_VOCAB)
    assert gaps.tokens.read(119, 122).tolist() == [32, END, END]


def test_a_stored_selection(tmp_path):
    """`datasets` keeps a selection as a list of indices, until it is stored: the stream follows it."""
    rows = datasets.Dataset.from_dict({"input_ids": [[i] * 20 for i in range(10)]})
    rows.select([7, 3, 5]).save_to_disk(str(tmp_path / "selected"))
    stream = open_tokens(str(tmp_path / "selected"), SEQ, 1, 0, 10).tokens
    assert stream.read(0, 60).tolist() == [7] * 20 + [3] * 20 + [5] * 20


def test_a_stream_reads_across_chunks_and_empty_rows(counting):
    """Arrow may cut a column anywhere."""
    stream = open_counting(counting).tokens
    array = pa.chunked_array([[[0, 1, 2], []], [[]], [[3], [4, 5]], [[], []], [[6]]])
    table = pa.table({"input_ids": array})
    stream.__init__(datasets.Dataset(table), "input_ids")
    assert len(stream) == 7
    for start in range(7):
        for stop in range(start, 8):
            assert stream.read(start, stop).tolist() == list(range(start, stop))


def test_tokens_are_mapped_not_copied(tmp_path):
    """Opening 8 MB of stored tokens allocates next to nothing in Arrow, and the arrays do not own their memory."""
    source = stored(tmp_path, input_ids=np.arange(2**20).reshape(-1, 64))
    before = pa.total_allocated_bytes()
    data = open_tokens(source, SEQ, 4, 0, 2**20)
    data.batch(11)
    assert not any(piece.flags.owndata for piece in data.tokens.pieces)
    assert pa.total_allocated_bytes() - before < 2**19


def test_python_sources_by_default(monkeypatch):
    """Without --dataset there are millions of tokens of Python, the held-out part no exception."""
    monkeypatch.undo()  # this one lives in the user's cache, as in every run
    data = open_tokens("", 256, 8, 0, BYTE_VOCAB)
    assert len(data.tokens) > 5e6
    for tokens in (*(data.batch(step).tokens for step in range(3)), data.validation(100)[0]):
        text = decode(tokens.flatten().tolist())
        assert "self" in text and "def " in text
        assert tokens.min() >= 0 and tokens.max() <= END


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """A folder with two configs, "first" and "second", which stands for whatever is asked of the hub."""
    folder = tmp_path / "corpus"
    lines = ["---", "configs:"]
    for name in ("first", "second"):
        (folder / name).mkdir(parents=True)
        (folder / name / "data.jsonl").write_text(json.dumps({"text": f"{name} text " * 20}) + "\n")
        lines += [f"- config_name: {name}", f"  data_files: {name}/data.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *more, **options: real(str(folder), *more, **options))
    return folder


def test_a_data_set_with_configs(corpus):
    """--dataset some/corpus:second reads that one; without a name, or with a wrong one, the line lists the names."""
    stream = open_tokens("some/corpus:second", SEQ, 1, 0, BYTE_VOCAB).tokens
    assert decode(stream.read(0, 11).tolist()) == "second text"
    for source in ("some/corpus", "some/corpus:third"):
        with pytest.raises(UserError) as caught:
            open_tokens(source, SEQ, 1, 0, BYTE_VOCAB)
        message = f"--dataset {source}: use --dataset some/corpus:CONFIG with one of its configs: first, second"
        assert str(caught.value) == message


# Mistakes


def junk(name: str, content: bytes = b""):
    """A file of that name and content."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def saved(**columns):
    """A stored data set."""
    return lambda folder: Path(stored(folder, **columns))


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda folder: folder / "nowhere.txt", "no such file or folder"),
        (lambda folder: folder / "no" / "folder", "no such file or folder"),
        (lambda folder: folder, "the folder holds no .parquet"),
        (junk("empty.txt"), "empty"),
        (junk("empty.jsonl"), "empty"),
        (junk("short.txt", b"short"), "6 tokens are too few for --seq-len 8"),
        (junk("table.csv", b"text\nhello\n"), "cannot read *.csv"),
        (junk("body.jsonl", b'{"body": "hello"}\n'), "no `text` and no `input_ids` column, only ['body']"),
        (junk("number.jsonl", b'{"text": 5}\n'), "`text` holds int64, not strings"),
        (junk("broken.jsonl", b'{"text": "a"}\n{"text": 5x}\n'), "cannot be read"),
        (junk("junk.jsonl", bytes(range(256))), "cannot be read"),
        (junk("junk.parquet", bytes(range(256))), "cannot be read"),
        (saved(input_ids=["abc"]), "`input_ids` holds string, not lists of integers"),
        (saved(input_ids=[1, 2]), "not lists of integers"),
        (saved(input_ids=[[0.5, 1.0]]), "`input_ids` holds list<item: double>"),
        (saved(input_ids=[[300] * 99]), "token ids 300 to 300 occur, the vocabulary is 0 to 256"),
        (saved(input_ids=[[-1] * 99]), "token ids -1 to -1 occur"),
        (saved(input_ids=[[1] * 99], labels=[[-1] * 99]), "token ids -1 to -1 occur"),
        (saved(input_ids=[[1] * 99], labels=[[1] * 98]), "`labels` and `input_ids` differ in length"),
        (lambda folder: Path("some/corpus"), "the hub cannot be reached or does not have it"),
    ],
)
def test_bad_data_is_told_in_one_line(tmp_path, make, says):
    """A UserError of one line that names --dataset and the path, and no word from the library that failed."""
    (tmp_path / "bad").mkdir()
    path, said = make(tmp_path / "bad"), []
    handler = logging.Handler()
    handler.emit = said.append
    logging.getLogger("datasets").addHandler(handler)
    with pytest.raises(UserError) as caught:
        open_tokens(str(path), SEQ, 4, 0, BYTE_VOCAB)
    logging.getLogger("datasets").removeHandler(handler)
    message = str(caught.value)
    assert not said
    assert message.startswith(f"--dataset {path}: ") and says in message and "\n" not in message


def test_just_enough_text(tmp_path):
    """Two windows need 2 seq + 1 tokens: one trains, one validates. One token less is refused."""
    enough = open_tokens(str(junk("a.txt", b"x" * 2 * SEQ)(tmp_path)), SEQ, 4, 0, BYTE_VOCAB)
    assert (enough.n_train, enough.n_validation) == (1, 1)
    assert enough.batch(3).tokens.shape == (4, SEQ)
    with pytest.raises(UserError, match=f"need {2 * SEQ + 1}"):
        open_tokens(str(junk("b.txt", b"x" * (2 * SEQ - 1))(tmp_path)), SEQ, 4, 0, BYTE_VOCAB)


def test_a_vocabulary_smaller_than_bytes(counting, tmp_path):
    """Text needs 257 tokens."""
    with pytest.raises(UserError, match="set --vocab-size to at least"):
        open_tokens(str(junk("a.txt", b"x" * 100)(tmp_path)), SEQ, 4, 0, 256)


def test_an_unreachable_hub_is_asked_once(monkeypatch):
    """Nothing listens at the hub's address: one question, no retries, and what to do instead."""
    asked, ask = [], readers.HfApi.dataset_info
    monkeypatch.setattr(readers.HfApi, "dataset_info", lambda *a, **options: (asked.append(a), ask(*a, **options)))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(readers, "HfApi", partial(readers.HfApi, endpoint="http://127.0.0.1:9"))
    with pytest.raises(UserError, match=r"--dataset some/corpus: .* leave --dataset away"):
        open_tokens("some/corpus", SEQ, 4, 0, BYTE_VOCAB)
    assert len(asked) == 1


@pytest.mark.exhaustive
def test_an_unreachable_hub_is_told_at_once():
    """The command: one line on stderr, within seconds."""
    offline = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"}
    environment = {key: value for key, value in os.environ.items() if key not in offline}
    done = subprocess.run(
        [sys.executable, "step01_single_gpu.py", "--dataset", "some/corpus", "--model", "debug"],
        cwd=ROOT,
        env=environment | {"HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: --dataset some/corpus:") and "leave --dataset away" in done.stderr


def open_counted(text: Path, cache: Path, log: Path):
    """Runs in a process of its own: open a text; prints how many tokens it has, and logs that it was tokenised."""
    real = readers.tokenise

    def counted(rows: dict) -> dict:
        with log.open("a") as out:
            out.write("worked\n")
        time.sleep(0.5)
        return real(rows)

    readers.tokenise, datasets.config.HF_DATASETS_CACHE = counted, cache
    print(len(open_tokens(str(text), SEQ, 1, 0, BYTE_VOCAB).tokens))


def test_one_process_of_a_node_tokenises(tmp_path):
    """Two processes that open the same new text at the same time: one does the work, both have the tokens."""
    text, log = tmp_path / "text.txt", tmp_path / "log"
    text.write_text("some text " * 20)
    both = [Forked(open_counted, text, tmp_path / "cache", log) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["201\n"] * 2
    assert log.read_text() == "worked\n"


def test_a_second_opening_finds_the_tokens(tmp_path, monkeypatch):
    """Text is tokenised once: the next run reads `datasets`' cache."""
    source = str(junk("a.txt", b"words " * 50)(tmp_path))
    first = open_tokens(source, SEQ, 4, 0, BYTE_VOCAB).batch(0)
    made = list((tmp_path / "cache").rglob("*.arrow"))
    monkeypatch.setattr(readers.np, "append", None)  # what tokenising would need
    assert torch.equal(open_tokens(source, SEQ, 4, 0, BYTE_VOCAB).batch(0).tokens, first.tokens)
    assert list((tmp_path / "cache").rglob("*.arrow")) == made
