"""Checkpoints: resumed equals uninterrupted, in any pair of layouts; a death while saving, or damage, costs little.

The table PAIRS holds (base, saved under, resumed under). A layout is (ranks, flags).
"""

import importlib
import io
import os
import shutil
import signal
import socket
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from common import UserError
from common.model import PRESETS
from common.trainer import Run
from extras.services import checkpoint, hub, resume
from extras.services.boxes import Box, Piece, flat_boxes, overlap
from extras.services.checkpoint import Checkpoint, Saver, find, newest
from extras.services.plots import read_metrics
from extras.services.run import ServedRun
from extras.services.tables import human
from extras.tests.equal import config_of, difference
from extras.tests.faults import with_fault
from extras.tests.pool import error_of
from extras.tests.rows import EXHAUSTIVE, EXPERTS, TIED

STEPS = dict(steps=4, save_every=2, eval_every=0, global_batch_size=6)


def train_on_rank(step_name: str, options: dict, killed_at: int = 0, number: int = signal.SIGTERM) -> list[dict]:
    """Runs on every rank: a run with everything around it but pictures; returns its metrics.

    In a step the last rank may be told to stop, by this signal.
    """
    no_pictures = mock.patch("extras.services.screen.plots"), mock.patch("common.trainer.draw_loss")
    with no_pictures[0], no_pictures[1], ServedRun(config_of(step_name, STEPS | options)) as run:
        record = run.record

        def struck(step: int, tokens: int, **numbers: float):
            record(step, tokens, **numbers)
            last = int(os.environ.get("WORLD_SIZE", 1)) - 1
            if step + 1 == killed_at and int(os.environ.get("RANK", 0)) == last:
                os.kill(os.getpid(), number)

        run.record = struck
        importlib.import_module(step_name).train(run.config, run)
    return run.history


def train(pools, base: dict, layout: tuple[int, dict], **options) -> list[dict]:
    """The same, on a pool of ranks."""
    ranks, flags = layout
    step = "step07_moe_ep" if "experts" in base else "step06_pipeline"
    return pools(ranks).run(train_on_rank, step, base | flags | {k: str(v) for k, v in options.items()})[0]


def stored(folder: Path, step: int = STEPS["steps"]) -> dict[tuple[str, str], Tensor]:
    """All whole tensors of the last checkpoint of a run, which is of this step."""
    found = Checkpoint(newest(folder))
    assert found.index["step"] == step
    return {(kind, name): found.whole(kind, name) for name, kinds in found.stored.items() for kind in kinds}


def require_same_bits(found: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor]):
    """The same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


ALONE = (1, {})
ZEROS = {zero: (3, dict(zero=zero)) for zero in range(4)}
LAYOUTS = [
    ALONE,
    *ZEROS.values(),
    (4, dict(tp=2, zero=3)),
    (4, dict(pp=2, zero=2)),
    (4, dict(pp=2, tp=2)),
    (4, dict(cp=2, tp=2, zero=1)),
    (3, dict(pp=3)),
]
MOE_LAYOUTS = [ALONE, (4, dict(ep=2, tp=2, zero=1)), (4, dict(pp=2, ep=2, zero=3)), (4, dict(ep=4, cp=2, zero=0))]
PAIRS = [
    ({}, ALONE, ZEROS[3]),
    (TIED, (4, dict(tp=2, zero=3)), (3, dict(pp=3))),
    (TIED, (4, dict(pp=2, zero=2)), ALONE),
    ({}, (4, dict(pp=2, tp=2)), (4, dict(cp=2, tp=2, zero=1))),
    (EXPERTS, (4, dict(ep=2, tp=2, zero=1)), (4, dict(pp=2, ep=2, zero=3))),
    (EXPERTS | dict(optimizer="sgd", lr=0.5), (4, dict(ep=4, cp=2, zero=0)), ALONE),
]
SWEEP = [(TIED, a, b) for a in LAYOUTS for b in LAYOUTS] + [(EXPERTS, a, b) for a in MOE_LAYOUTS for b in MOE_LAYOUTS]


def cases() -> list:
    """The table, and all pairs for the sweep."""
    marked = [(pair, []) for pair in PAIRS] + [(pair, [getattr(pytest.mark, EXHAUSTIVE)]) for pair in SWEEP]

    def label(layout: tuple[int, dict]) -> str:
        return "-".join([str(layout[0]), *(f"{key}={value}" for key, value in layout[1].items())])

    return [pytest.param(*p, marks=marks, id=f"{label(p[1])}-to-{label(p[2])}") for p, marks in marked]


@pytest.fixture(scope="session")
def uninterrupted(pools, tmp_path_factory):
    """`uninterrupted(base)`: tensors and metrics of one process that trains to the end."""
    made: dict[str, tuple] = {}

    def make(base: dict) -> tuple:
        if str(base) not in made:
            out = tmp_path_factory.mktemp("uninterrupted") / "run"
            history = train(pools, base, ALONE, out=out)
            made[str(base)] = stored(out), history
        return made[str(base)]

    return make


@pytest.mark.parametrize("base, saved, resumed", cases())
def test_saved_under_one_layout_resumed_under_another(pools, uninterrupted, tmp_path, base, saved, resumed):
    """Masters and moments after training, and every loss, as if one process had never stopped."""
    expected, history = uninterrupted(base)
    train(pools, base | dict(stop_after=2), saved, out=tmp_path / "first")
    rows = train(pools, base, resumed, out=tmp_path / "second", resume=tmp_path / "first")
    assert [row["step"] for row in rows] == [3, 4]
    assert difference([row["loss"] for row in rows], [row["loss"] for row in history[2:]]) < 1e-10
    found = stored(tmp_path / "second")
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert difference(tensor, expected[key]) < 1e-10, key


def plain_on_rank(step_name: str, options: dict, model: str = "test") -> list[dict]:
    """Runs on every rank: the run of the course alone; returns its metrics."""
    cls, served = importlib.import_module(step_name).Config, config_of(step_name, STEPS | options)
    config = cls(**{field.name: getattr(served, field.name) for field in fields(cls)} | dict(model=model))
    with mock.patch("common.trainer.draw_loss"), Run(config) as run:
        importlib.import_module(step_name).train(config, run)
    return run.history


@pytest.mark.parametrize("step, layout", [("step06_pipeline", dict(pp=2, tp=2, zero=3)), ("step02_ddp", {})])
def test_what_a_plain_run_has_saved_goes_on_elsewhere(pools, tmp_path, step, layout):
    """On four ranks; its files get an index when they are first read: by two ranks, or to be exported."""
    out, resumed = f"{tmp_path}/first", f"{tmp_path}/first/checkpoints/step-00000002"
    options = asdict(PRESETS["debug"]) | dict(global_batch_size=8, micro_batch_size=2)
    pools(4).run(plain_on_rank, step, options | layout | dict(out=out), "debug")
    pools(2).run(train_on_rank, "step05_cp_ring", options | dict(cp=2, out=f"{tmp_path}/second", resume=resumed))
    hub.main(["export", out, f"{tmp_path}/hf"])
    found, expected = stored(tmp_path / "second"), stored(tmp_path / "first")
    assert found.keys() == expected.keys()
    assert all(difference(tensor, expected[key]) < 1e-10 for key, tensor in found.items())


def test_a_plain_run_goes_on_from_what_extras_have_saved(pools, tmp_path):
    """Under the same flags, to the same bits."""
    options = dict(tp=2, zero=2, out=f"{tmp_path}/first")
    history = pools(4).run(train_on_rank, "step04_tp_sp", options)[0]
    more = dict(out=f"{tmp_path}/second", resume=f"{tmp_path}/first/checkpoints/step-00000002")
    rows = pools(4).run(plain_on_rank, "step04_tp_sp", options | more)[0]
    assert [row["loss"] for row in rows] == [row["loss"] for row in history] and len(rows) == 4


@pytest.fixture(scope="session")
def goes_on_elsewhere(pools, tmp_path_factory):
    """What is wrong with a run of one process that goes on in a layout, with a mistake in it; "" if nothing is."""
    folder, options = tmp_path_factory.mktemp("elsewhere"), dict(eval_every=4, eval_sequences=6)
    whole: list[dict] = []

    def answer(fault: str, ranks: int, layout: dict) -> str:
        if not whole:
            whole.extend(train(pools, options, ALONE, out=folder / "whole"))
            train(pools, options | dict(stop_after=2), ALONE, out=folder / "cut")
        where = dict(out=str(folder / "on"), resume=str(folder / "cut"))
        call = with_fault, fault, train_on_rank, "step06_pipeline", options | layout | where
        rows = pools(ranks).run(*call)[0]
        found, right = ([*(row["loss"] for row in rows[-2:]), rows[-1]["validation_loss"]] for rows in (rows, whole))
        return "" if difference(found, right) < 1e-10 else f"losses, and validation loss, are {found}, not {right}"

    return answer


@pytest.mark.parametrize("base", [dict(compress="int8"), dict(compress="topk", zero=2)])
def test_what_is_owed_is_kept(pools, tmp_path, base):
    """A layout goes on with what its compressed sums owe, bit for bit; another layout starts without debts."""
    train(pools, base, (2, {}), out=tmp_path / "whole")
    train(pools, base | dict(stop_after=2), (2, {}), out=tmp_path / "cut")
    train(pools, base, (2, {}), out=tmp_path / "cut", resume="auto")
    expected, found = stored(tmp_path / "whole"), stored(tmp_path / "cut")
    require_same_bits(found, expected)
    assert any(kind == "owed" for kind, _ in found)
    cut = dict(out=str(tmp_path / "other"), resume=str(tmp_path / "cut/checkpoints/step-00000002"))
    said = pools(3).run(said_on_rank, "step06_pipeline", base | cut)
    assert [("still owed" in text) for text in said] == [True, False, False]


def said_on_rank(*args) -> str:
    """Runs on every rank: what a run prints."""
    with redirect_stdout(io.StringIO()) as text:
        train_on_rank(*args)
    return text.getvalue()


def test_what_does_not_fit_is_one_line(pools, tmp_path):
    """Another model, precision or rule; no checkpoint at all, or none where one is needed."""
    out = str(tmp_path / "run")
    train_on_rank("step01_single_gpu", dict(out=out, steps=1))
    for change, says in [
        (dict(n_layers=2), "its n_layers is 3, not 2; use --model test"),
        (dict(dtype="fp32"), "written with dtype torch.float64, not torch.float32: set --dtype"),
        (dict(optimizer="sgd"), "written with optimizer adamw, not sgd: set --optimizer"),
        (dict(resume=str(tmp_path)), f"no checkpoint in {tmp_path}: give a run, "),
        (dict(resume="required"), f"no checkpoint in {tmp_path}/other: give .*, or auto"),
        (dict(resume="", generate="x"), "--generate x matters only with --resume set"),
    ]:
        with pytest.raises(UserError, match=says):
            train_on_rank("step01_single_gpu", dict(resume=out, out=str(tmp_path / "other")) | change)


def test_a_run_directory_has_one_run(pools, tmp_path):
    """Another one is refused on every rank, and what is there stays as it is."""
    (tmp_path / "metrics.jsonl").touch()
    with resume.hold(tmp_path):
        said = pools(2).run(error_of, UserError, train_on_rank, "step02_ddp", dict(out=str(tmp_path)))
    owner = f"process {os.getpid()} on host {socket.gethostname()}"
    assert said == [f"--out {tmp_path} is in use by {owner}: choose another --out"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "metrics.jsonl"}


@pytest.mark.parametrize("kind, wrong", [(Run, dict(dataset="x.py")), (ServedRun, dict(resume="x"))])
def test_a_launch_that_fails_leaves_the_earlier_run_as_it_is(tmp_path, kind, wrong):
    """Nothing moves aside, and no file is opened, before data, layout and checkpoint are known to be sound."""
    options = STEPS | dict(out=str(tmp_path / "run"), steps=1)
    train_on_rank("step01_single_gpu", options)
    there = {path: path.read_bytes() for path in tmp_path.glob("run/*.json*")}
    with pytest.raises(UserError), kind(config_of("step01_single_gpu", options | wrong)) as run:
        importlib.import_module("step01_single_gpu").train(run.config, run)
    assert {path: path.read_bytes() for path in tmp_path.glob("run*/*.json*")} == there and len(there) == 2


def test_what_a_resumed_run_says_and_keeps(tmp_path, capsys):
    """Whether there is something to go on from; the flags that are others; metrics but for a line that is torn."""
    options, metrics = dict(out=str(tmp_path), resume="auto", seq_len=16), tmp_path / "metrics.jsonl"
    train_on_rank("step01_single_gpu", options | dict(stop_after=2))
    assert "nothing to resume: starting at step 1\n" in capsys.readouterr().out
    os.truncate(metrics, metrics.stat().st_size - 30)
    changed = dict(resume="required", steps=3, global_batch_size=4, seq_len=8, save_every=1)
    assert [row["step"] for row in train_on_rank("step01_single_gpu", options | changed)] == [1, 3]
    said = "step-00000002\n--resume: --steps was 4, is 3; --global-batch-size was 6, is 4; --seq-len was 16, is 8\n"
    assert said in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]


def test_a_variants_own_state_is_kept(tmp_path):
    """The scale of fp16 and how long it has been good; the numbers that a spike is compared with."""
    options = dict(dtype="fp16", skip_spikes=9.0, out=str(tmp_path / "run"), resume="auto")
    train_on_rank("step01_single_gpu", options | dict(stop_after=2))
    train_on_rank("step01_single_gpu", options)
    state = Checkpoint(newest(tmp_path / "run")).index["state"]
    assert state["fp16"] == dict(scale=2.0**16, good_steps=4)
    assert len(state["skip_spikes"]) == 4


# --- files


def some(step: int) -> list[Piece]:
    """What a small run holds."""
    return [Piece("master", "w", torch.full((3, 4), float(step)), (3, 4)), Piece("step", "w", torch.tensor(step), ())]


def save(out: Path, step: int):
    """A checkpoint of it."""
    Saver(out).save(step, some(step), dict(config={}, model={}))


class Death(BaseException):
    """The process is gone: nothing after this runs."""


def mortal(monkeypatch, calls: list, dies_at: int):
    """Let every call that changes the disk be counted, and the one of that number die, half of them before it works."""
    owners = [(checkpoint, "save_file"), (checkpoint, "flush"), (checkpoint.shutil, "rmtree")]
    for owner, name in [*owners, (Path, "rename"), (Path, "write_text"), (Path, "mkdir")]:
        right = getattr(owner, name)

        def struck(*args, _right=right, _name=name, **options):
            calls.append(_name)
            mine = len(calls) == (dies_at + 1) // 2  # others may come inside
            if mine and dies_at % 2:
                raise Death
            result = _right(*args, **options)
            if mine:
                raise Death
            return result

        monkeypatch.setattr(owner, name, struck)
    monkeypatch.setattr(Saver, "writing", lambda saver: False)


class Now:
    """A thread that runs at once, so that a death in it is one of the process."""

    def __init__(self, target, args, daemon):
        self.start, self.join = (lambda: target(*args)), lambda: None


def test_death_at_every_call_while_saving_leaves_a_valid_one(tmp_path, monkeypatch):
    """Before or after each call that changes the disk: the one before, or the new one, is there and whole."""
    calls: list[str] = []
    monkeypatch.setattr(checkpoint.threading, "Thread", Now)
    with monkeypatch.context() as patch:
        save(tmp_path / "count", 10), save(tmp_path / "count", 20)
        mortal(patch, calls, 0)
        save(tmp_path / "count", 30)
    deaths = 2 * len(calls)
    assert {"save_file", "rename", "write_text", "mkdir", "flush", "rmtree"} <= set(calls)
    for dies_at in range(1, deaths + 1):
        out = tmp_path / str(dies_at)
        save(out, 10), save(out, 20)
        with monkeypatch.context() as patch:
            mortal(patch, [], dies_at)
            with pytest.raises(Death):
                save(out, 30)
        found = find("auto", out)
        step = found.index["step"]
        assert step in (20, 30), dies_at
        assert torch.equal(found.whole("master", "w"), torch.full((3, 4), float(step)))
        save(out, 40)  # and the next one finds a clean place
        left = sorted(path.name for path in (out / "checkpoints").iterdir())
        assert left == [f"step-000000{step}", "step-00000040"]


def test_any_flipped_byte_is_noticed(tmp_path, capsys):
    """In any file: then the one before is taken. Without one before, it is one line."""
    save(tmp_path, 1), save(tmp_path, 2)
    last = newest(tmp_path)
    for path in list(last.iterdir()):
        right = path.read_bytes()
        for place in range(0, len(right), max(1, len(right) // 40)):
            path.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
            assert find("auto", tmp_path).index["step"] == 1, (path.name, place)
            assert "step-00000002 is damaged" in capsys.readouterr().err
        path.write_bytes(right[:-1])
        assert find("auto", tmp_path).index["step"] == 1
        path.write_bytes(right)
    assert find("auto", tmp_path).index["step"] == 2
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000001")
    (last / "rank-00000.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint there is sound"):
        find(str(tmp_path), tmp_path)


def fail_on_rank(out: str, rank: int) -> str:
    """Runs on every rank: the disk of one is full. Returns what the user is told."""
    save(Path(out), 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    mine = torch.distributed.get_rank() == rank
    with mock.patch.object(checkpoint, "save_file", full if mine else checkpoint.save_file):
        return error_of(UserError, save, Path(out), 2)


def test_one_ranks_full_disk_is_known_to_all(pools, tmp_path):
    """All say so, and name the checkpoint that is intact."""
    for text in pools(2).run(fail_on_rank, str(tmp_path), 1):
        assert "saving step 2 failed (rank 1: No space left on device); the checkpoint " in text
        assert text.endswith("step-00000001 is intact")
    assert find("auto", tmp_path).index["step"] == 1


def go_on_with_a_full_disk(options: dict, full_at: int) -> tuple[list[int], str, list[str]]:
    """Runs on every rank: train while the disks of first and last are full in one step: the steps, what was said."""
    save_file, record, said, heard, patch = checkpoint.save_file, Run.record, io.StringIO(), "", mock.patch.object

    def torn(run: Run, step: int, *args, **numbers: float):
        record(run, step, *args, **numbers)
        if run.first and step + 1 == full_at:
            os.truncate(run.out / "metrics.jsonl", 30)
            raise OSError(28, "No space left on device")

    def full(tensors, path):
        if torch.distributed.get_rank() == 1 and f"{full_at:08d}" in path.parent.name:
            raise OSError(28, "No space left on device")
        return save_file(tensors, path)

    with patch(checkpoint, "save_file", full), patch(Run, "record", torn), redirect_stderr(said):
        try:
            rows = train_on_rank("step02_ddp", options)
        except UserError as error:
            rows, heard = [], str(error)
    lines = [line for line in said.getvalue().splitlines() if "warning: " in line]  # behind what moves a bar away
    return [row["step"] for row in rows], heard, lines


@pytest.mark.parametrize("how", [dict(save_async=False), dict(save_async=True)])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(pools, tmp_path, how):
    """Warnings on rank 0, all four steps and their metrics, the next checkpoint. Only the last has to be written."""
    options = how | dict(out=str(tmp_path / "run"))
    (*first, warnings), (*second, none) = pools(2).run(go_on_with_a_full_disk, options, 2)
    assert first == second == [[1, 2, 3, 4], ""] and none == []
    assert len(warnings) == 2 and "metrics.jsonl is incomplete (No space left on device)" in warnings[0]
    assert "saving step 2 failed (rank 1: No space left on device)" in warnings[1]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert find("auto", tmp_path / "run").index["step"] == 4
    for rows, error, _ in pools(2).run(go_on_with_a_full_disk, options | dict(resume="auto", steps=6), 6):
        assert not rows and "saving step 6 failed" in error and error.endswith("step-00000004 is intact")


@pytest.mark.parametrize("free, said", [(2e6, "too little: see"), (4e6, "each, three for a moment"), (1e9, "")])
def test_room_for_checkpoints_is_looked_at_before_the_first(monkeypatch, tmp_path, free, said):
    """39,840 weights, 24 bytes each in fp64, and 30 counts of updates: the file that is written is as large."""
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    rooms, room = [], resume.Keeper.room
    monkeypatch.setattr(resume.Keeper, "room", lambda keeper: rooms.append(room(keeper)) or "")
    train_on_rank("step01_single_gpu", dict(out=str(tmp_path), steps=2))
    assert said in rooms[0] if said else rooms == [""]
    (file,) = tmp_path.glob("checkpoints/*/*.pt")
    if said:
        assert f"about {human(24 * 39840 + 30 * 4)} each" in rooms[0]
        assert 24 * 39840 < file.stat().st_size < 1.1 * 24 * 39840


def test_boxes_of_a_range():
    """A range of elements is a few boxes, which hold these elements in order."""
    whole = torch.arange(4 * 3 * 5).view(4, 3, 5)
    for start in range(60):
        for stop in range(start, 61):
            boxes = list(flat_boxes((4, 3, 5), start, stop))
            found = [whole[checkpoint.place_in(Box((0, 0, 0), (4, 3, 5)), box)].flatten() for box in boxes]
            assert torch.cat([torch.empty(0), *found]).tolist() == list(range(start, stop))
            assert len(boxes) <= 5
    assert overlap(Box((0, 2), (3, 3)), Box((1, 0), (9, 3))) == Box((1, 2), (2, 1))
    assert overlap(Box((0,), (3,)), Box((3,), (1,))) is None
