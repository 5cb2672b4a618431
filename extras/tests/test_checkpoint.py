"""Tests checkpoints: a run resumes under any layout as if it had never stopped; a crash leaves a valid checkpoint."""

import importlib
import os
import shutil
import signal
import socket
import sys
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from common import UserError
from common.layout import Shard
from common.model import PRESETS
from common.trainer import Run
from extras.services import hub, resume
from extras.services.checkpoint import Checkpoint, Saver, find, newest
from extras.services.pieces import Piece, assemble
from extras.services.plots import read_metrics
from extras.services.run import ServedRun
from extras.tests.equal import config_of, difference
from extras.tests.faults import Fault, with_fault
from extras.tests.pool import error_of
from extras.tests.rows import EXPERTS, TIED

STEPS = dict(steps=4, save_every=2, eval_every=0, global_batch_size=6)
ALONE = (1, {})
LAYOUTS = [  # each row: flags that all its runs have, then several layouts (ranks, flags); see `cases`
    (TIED, ALONE, (3, dict(zero=3)), (4, dict(tp=2, zero=3)), (3, dict(pp=3)), (4, dict(pp=2, zero=2)), ALONE),
    (TIED, (4, dict(pp=2, tp=2)), (4, dict(cp=2, tp=2, zero=1)), (3, dict(zero=0)), (3, dict(zero=2))),
    (EXPERTS, (4, dict(ep=2, tp=2, zero=1)), (4, dict(pp=2, ep=2, zero=3)), (4, dict(ep=4, cp=2, zero=0)), ALONE),
]


def train_on_rank(step_name: str, options: dict, killed_at: int = 0, number: int = signal.SIGTERM) -> list[dict]:
    """Runs on every rank: train with all services except pictures; returns the metrics.

    In the step `killed_at`, the last rank receives the signal `number`.
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


def train(pools, base: dict, layout: tuple[int, dict], fault: str | Fault = "", **options) -> list[dict]:
    """Call `train_on_rank` on the ranks of `layout`, with `fault` injected if given; returns rank 0's metrics."""
    ranks, flags = layout
    step = "step07_moe_ep" if "experts" in base else "step06_pipeline"
    given = base | flags | {name: str(value) for name, value in options.items()}
    return pools(ranks).run(with_fault, fault, train_on_rank, step, given)[0]


def stored(folder: Path, step: int = STEPS["steps"]) -> dict[tuple[str, str], Tensor]:
    """All whole tensors of a run's last checkpoint, by (kind, name). It must be the checkpoint of `step`."""
    found = Checkpoint(newest(folder))
    assert found.index["step"] == step
    return {(kind, name): found.whole(kind, name) for name, kinds in found.stored.items() for kind in kinds}


def require_same(found: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor], bound: float = 0.0):
    """Assert that `found` and `expected` have the same tensors, to a relative difference of `bound` (0: same bits)."""
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert difference(tensor, expected[key]) <= bound, key


@pytest.fixture(scope="session")
def continues(pools, tmp_path_factory):
    """`continues(base, saved, resumed)` trains under the layout `saved`, and resumes under the layout `resumed`.

    It asserts that losses, masters and moments then equal those of one process that never stopped, to 1e-10. `fault`
    is a mistake that is injected into the resumed run.
    """
    made: dict[str, tuple] = {}

    def compare(base: dict, saved: tuple[int, dict], resumed: tuple[int, dict], fault: str | Fault = ""):
        folder, options = tmp_path_factory.mktemp("continues"), base | dict(eval_every=4, eval_sequences=6)
        if str(base) not in made:
            history = train(pools, options, ALONE, out=folder / "whole")
            made[str(base)] = stored(folder / "whole"), history[2:]
        expected, history = made[str(base)]
        train(pools, options | dict(stop_after=2), saved, out=folder / "first")
        rows = train(pools, options, resumed, fault, out=folder / "second", resume=folder / "first")
        for key in "step", "loss", "validation_loss":
            found, right = ([row[key] for row in each if key in row] for each in (rows[-2:], history))
            assert difference(found, right) < 1e-10, f"{key}: {found}, not {right}"
        require_same(stored(folder / "second"), expected, 1e-10)

    return compare


def cases() -> list:
    """For each LAYOUTS row, all pairs (saved, resumed). All but (1st, 2nd), (3rd, 4th) ... are marked `exhaustive`."""
    found = []
    for base, *layouts in LAYOUTS:
        for (i, saved), (j, resumed) in product(enumerate(layouts), repeat=2):
            marks = [pytest.mark.exhaustive] * (j != i + 1 or i % 2)
            found.append(pytest.param(base, saved, resumed, marks=marks, id=f"{saved} to {resumed}"))
    return found


@pytest.mark.parametrize("base, saved, resumed", cases())
def test_saved_under_one_layout_resumed_under_another(continues, base, saved, resumed):
    """A run that changes its layout when it is resumed equals a run of one process that never stopped."""
    continues(base, saved, resumed)


def plain_on_rank(step_name: str, options: dict, model: str = "test") -> list[dict]:
    """Runs on every rank: train without services, as the course alone does; returns the metrics."""
    cls, served = importlib.import_module(step_name).Config, config_of(step_name, STEPS | options)
    config = cls(**{field.name: getattr(served, field.name) for field in fields(cls)} | dict(model=model))
    with mock.patch("common.trainer.draw_loss"), Run(config) as run:
        importlib.import_module(step_name).train(config, run)
    return run.history


@pytest.mark.parametrize("step, layout", [("step06_pipeline", dict(pp=2, tp=2, zero=3)), ("step02_ddp", {})])
def test_what_a_plain_run_has_saved_goes_on_elsewhere(pools, tmp_path, step, layout):
    """A checkpoint that four ranks have saved without services can be resumed on two ranks, and can be exported."""
    out, resumed = f"{tmp_path}/first", f"{tmp_path}/first/checkpoints/step-00000002"
    options = asdict(PRESETS["debug"]) | dict(global_batch_size=8, micro_batch_size=2)
    pools(4).run(plain_on_rank, step, options | layout | dict(out=out), "debug")
    pools(2).run(train_on_rank, "step05_cp_ring", options | dict(cp=2, out=f"{tmp_path}/second", resume=resumed))
    hub.convert("export", out, f"{tmp_path}/hf")
    require_same(stored(tmp_path / "second"), stored(tmp_path / "first"), 1e-10)


def test_a_plain_run_goes_on_from_what_extras_have_saved(pools, tmp_path):
    """A run without extras resumes a checkpoint of a run with extras, and gets the same losses, bit for bit."""
    options = dict(tp=2, zero=2, out=f"{tmp_path}/first")
    history = pools(4).run(train_on_rank, "step04_tp_sp", options)[0]
    more = dict(out=f"{tmp_path}/second", resume=f"{tmp_path}/first/checkpoints/step-00000002")
    rows = pools(4).run(plain_on_rank, "step04_tp_sp", options | more)[0]
    assert [row["loss"] for row in rows] == [row["loss"] for row in history] and len(rows) == 4


def test_debts_of_another_layout_are_left_out(pools, tmp_path):
    """Errors left by --compress (`owed`) are not restored on another number of ranks. A resumed run saves new ones."""
    base = dict(compress="topk", zero=2)
    train(pools, base | dict(stop_after=2), (2, {}), out=tmp_path / "two")
    train(pools, base, (3, {}), out=tmp_path / "three", resume=tmp_path / "two")
    for name, ranks, step in ("two", 2, 2), ("three", 3, 4):
        owed = [tensor for (kind, _), tensor in stored(tmp_path / name, step).items() if kind == "owed"]
        assert owed and all(len(tensor) == ranks for tensor in owed)


def test_what_does_not_fit_is_one_line(tmp_path):
    """A checkpoint that does not fit the flags, or that is missing, gives an error of one line."""
    out = str(tmp_path / "run")
    train_on_rank("step01_single_gpu", dict(out=out, steps=1))
    for change, says in [
        (dict(n_layers=2), "its n_layers is 3, not 2; use --model test"),
        (dict(dtype="fp32"), "written with dtype torch.float64, not torch.float32: set --dtype"),
        (dict(optimizer="sgd"), "written with optimizer adamw, not sgd: set --optimizer"),
        (dict(resume=str(tmp_path)), f"no checkpoint in {tmp_path}: give a run, "),
        (dict(resume="required"), f"no checkpoint in {tmp_path}/other: give .*, or auto"),
        (dict(resume="auto", generate="x"), f"no checkpoint in {tmp_path}/other: give .*, or auto"),
        (dict(resume="", generate="x"), "--generate x matters only with --resume set"),
    ]:
        with pytest.raises(UserError, match=says):
            train_on_rank("step01_single_gpu", dict(resume=out, out=str(tmp_path / "other")) | change)


def test_a_run_directory_has_one_run(pools, tmp_path):
    """While a run uses a directory, a second run is refused there on every rank, and changes no file."""
    (tmp_path / "metrics.jsonl").touch()
    with resume.hold(tmp_path):
        said = pools(2).run(error_of, UserError, train_on_rank, "step02_ddp", dict(out=str(tmp_path)))
    owner = f"process {os.getpid()} on host {socket.gethostname()}"
    assert said == [f"--out {tmp_path} is in use by {owner}: choose another --out"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "metrics.jsonl"}


@pytest.mark.parametrize("kind, wrong", [(Run, dict(dataset="x.py")), (ServedRun, dict(resume="x"))])
def test_a_launch_that_fails_leaves_the_earlier_run_as_it_is(tmp_path, kind, wrong):
    """A launch with a wrong --dataset or --resume fails before it moves or changes a file of the earlier run."""
    options = STEPS | dict(out=str(tmp_path / "run"), steps=1)
    train_on_rank("step01_single_gpu", options)
    there = {path: path.read_bytes() for path in tmp_path.glob("run/*.json*")}
    with pytest.raises(UserError), kind(config_of("step01_single_gpu", options | wrong)) as run:
        importlib.import_module("step01_single_gpu").train(run.config, run)
    assert {path: path.read_bytes() for path in tmp_path.glob("run*/*.json*")} == there and len(there) == 2


def test_what_a_resumed_run_says_and_keeps(tmp_path, capsys):
    """A resumed run prints what it resumes and which flags changed. Complete rows up to the saved step are kept."""
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
    """The state of fp16 (its loss scale) is resumed: at the end it equals that of a run that never stopped."""
    options = dict(dtype="fp16", out=str(tmp_path / "cut"), resume="auto")
    for changed in dict(stop_after=2), {}, dict(out=str(tmp_path / "whole")):
        train_on_rank("step01_single_gpu", options | changed)
    cut, whole = (Checkpoint(newest(tmp_path / name)).index["state"] for name in ("cut", "whole"))
    assert cut == whole and whole["fp16"]["scale"] <= 2.0**16


# --- files


def save(out: Path, step: int):
    """Save a checkpoint of one small tensor, filled with the number `step`."""
    some = Piece("master", "w", torch.full((3, 4), float(step)), (3, 4))
    Saver(out).save(step, [some, some.like("step", torch.tensor(step))], dict(config={}, model={}))


class Death(BaseException):
    """Simulates that the process dies. No `except Exception` catches it, because it is a BaseException."""


@pytest.fixture(scope="session")
def life():
    """After `life.left = n`, the n-th call that opens, makes, renames or removes a file or folder raises Death."""
    life = SimpleNamespace(left=0)

    def hook(event: str, _arguments: tuple):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            life.left -= 1
            if life.left == 0:
                raise Death

    sys.addaudithook(hook)  # it stays for ever: Python cannot remove such a hook
    return life


def test_death_at_every_call_while_saving_leaves_a_valid_one(tmp_path, life):
    """If the process dies at any file operation, either the previous or the new checkpoint is complete."""
    save(tmp_path / "count", 10), save(tmp_path / "count", 20)
    life.left = -1
    save(tmp_path / "count", 30)
    calls = -1 - life.left
    assert calls > 10
    for dies_at in range(1, calls + 1):
        out = tmp_path / str(dies_at)
        save(out, 10), save(out, 20)
        life.left = dies_at
        with pytest.raises(Death):
            save(out, 30)
        found = find("auto", out)
        step = found.index["step"]
        assert step in (20, 30), dies_at
        assert torch.equal(found.whole("master", "w"), torch.full((3, 4), float(step)))
        save(out, 40)  # the next save removes what the dead process has left behind
        left = sorted(path.name for path in (out / "checkpoints").iterdir())
        assert left == [f"step-000000{step}", "step-00000040"]


def test_any_flipped_byte_is_noticed(tmp_path, capsys):
    """If a file is cut short or a bit flips, the previous checkpoint is used; without one, `find` raises UserError."""
    save(tmp_path, 1), save(tmp_path, 2)
    last = newest(tmp_path)
    for path in list(last.iterdir()):
        right = path.read_bytes()
        wrong = [right[:-1]]
        for place in range(0, len(right), max(1, len(right) // 40)):
            wrong.append(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
        for content in wrong:
            path.write_bytes(content)
            assert find("auto", tmp_path).index["step"] == 1, (path.name, content)
            assert f"step-00000002 is damaged ({path.name} is " in capsys.readouterr().err
        path.write_bytes(right)
    assert find("auto", tmp_path).index["step"] == 2
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000001")
    (last / "rank-00000.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint there is sound"):
        find(str(tmp_path), tmp_path)


def save_on_a_full_disk(options: dict) -> str:
    """Runs on two ranks: train while the disk of rank 1 is full in step 4; returns the error."""
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.match("*00000004*/rank-00001.pt"):
            raise OSError(28, "No space left on device")
        return write(path, content)

    with mock.patch.object(Path, "write_bytes", full):
        return error_of(UserError, train_on_rank, "step02_ddp", options)


@pytest.mark.parametrize("how", [dict(save_async=False), dict(save_async=True)])
def test_a_full_disk_ends_the_run_in_one_line(pools, tmp_path, how):
    """On all ranks the error is a line that names the rank whose disk is full. The previous checkpoint stays valid."""
    options = how | dict(out=str(tmp_path / "run"), steps=6)
    said = pools(2).run(save_on_a_full_disk, options)
    assert said == [f"--out {tmp_path / 'run'}: rank 1 cannot write (No space left on device)"] * 2
    assert find("auto", tmp_path / "run").index["step"] == 2


def test_a_whole_tensor_is_cut_and_assembled():
    """A tensor is cut into shards, with padding, and these into slices; the pieces together give the tensor again."""
    whole, pieces = torch.arange(21).view(7, 3), []
    for i, j, (first, n) in product(range(4), range(2), ((0, 1), (1, 2))):
        shards = Shard(0, "tp", 2 * i, 2 * i + 2, 7), Shard(0, "ep", j, j + 1, 2)
        piece = Piece("master", "w", torch.empty(n, dtype=torch.int64), (1, 3), shards, first)
        pieces.append(replace(piece, tensor=piece.cut(whole)))
    assert torch.cat([piece.tensor for piece in pieces]).tolist() == [*range(21), 0, 0, 0]
    assert torch.equal(assemble(pieces[3:] + pieces), whole)
    for n in range(14):
        with pytest.raises(ValueError, match="some of master w is on no rank"):
            assemble(pieces[:n] + pieces[n + 1 :])
