"""Checkpoints: common/checkpoint.py, storage.py, resume.py and ranks.py. Read them after step 4.

Small exact cases come first, then runs that are resumed in other layouts, damaged, and interrupted.
"""

import math
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from common import UserError, storage
from common.checkpoint import Checkpoint, Piece, Place, place_of, write_file
from common.layout import Shard, note_record, shard_of
from common.ranks import Ranks
from common.resume import check_flags, choose_checkpoint
from common.storage import candidates, find_sound, name_checkpoint, save_checkpoint
from tests.equal import STEP1, close, close_together, draw, train
from tests.pool import RankError

cases = pytest.mark.parametrize

# --- Pieces


def shards_of(whole: Tensor, dim: int, n: int) -> list[nn.Parameter]:
    """The shards of n ranks, cut along dimension `dim`."""
    size = whole.shape[dim]
    length = math.ceil(size / n)
    shards = []
    for rank in range(n):
        record = Shard(dim, "tp", rank * length, (rank + 1) * length, size)
        shard = nn.Parameter(shard_of(whole, record))
        note_record(shard, shard=record)
        shards.append(shard)
    return shards


def saved_pieces(whole: Tensor, cut: tuple, n: int) -> dict[Place, dict[str, Tensor]]:
    """What all ranks save of a tensor: ZeRO cuts each shard into spans for n ranks."""
    pieces = {}
    for shard in shards_of(whole, *cut):
        step = math.ceil(shard.numel() / n)
        for start in range(0, shard.numel(), step):
            span = (start, min(start + step, shard.numel()))
            pieces[place_of(shard, span)] = dict(values=shard.flatten()[slice(*span)])
    return pieces


CUTS = {
    # The dimension of a 10 x 7 tensor that tp cuts, and the ranks of tp
    "not cut": (0, 1),
    "rows": (0, 2),
    "columns, with padding": (1, 2),
    "only padding on a rank": (0, 7),
}


def checkpoint_of(pieces: dict[Place, dict[str, Tensor]]) -> Checkpoint:
    """A checkpoint with these pieces of a tensor "weight"."""
    saved = Checkpoint.__new__(Checkpoint)
    saved.folder = Path("X")
    saved.pieces = dict(weight=pieces)
    saved.any_piece = dict(weight=Piece(*next(iter(pieces.items()))))
    return saved


@cases("n", [1, 3])
@cases("cut", CUTS.values(), ids=CUTS)
def test_a_piece_is_assembled_from_those_of_any_layout(cut, n):
    """A tensor was saved in one of CUTS by n ranks of ZeRO. In each of CUTS, with 2 ranks of ZeRO,
    a rank gets the values that it would have saved itself.
    """
    whole = draw("whole", 0, 10, 7)
    saved = checkpoint_of(saved_pieces(whole, cut, n))
    for name, other in CUTS.items():
        for place, tensors in saved_pieces(whole, other, 2).items():
            close(saved.saved_at("weight", "values", place), tensors["values"], name)


@cases("missing", range(6))
def test_a_missing_piece_is_an_error(missing):
    """Without one of six pieces, a whole tensor is not filled up with zeros."""
    whole = draw("whole", 0, 10, 7)
    pieces = saved_pieces(whole, CUTS["rows"], 3)
    del pieces[list(pieces)[missing]]
    saved = checkpoint_of(pieces)
    with pytest.raises(UserError, match="--resume X: its files have only a part of weight"):
        saved.saved_at("weight", "values", piece_of(whole).place)


def piece_of(master: Tensor) -> Piece:
    """A whole tensor as one piece."""
    return Piece(place_of(master, (0, master.numel())), dict(values=master))


def weight_of(rank: int) -> Tensor:
    """A tensor whose elements show the rank that has saved it."""
    return torch.full((100,), rank + 0.1)


def save_by_hand(folder: Path, n: int):
    """Write files of n ranks, each with its own "weight RANK"."""
    for rank in range(n):
        pieces = {f"weight {rank}": piece_of(weight_of(rank))}
        write_file(folder / f"rank-0000{rank}.pt", dict(rank=rank, ranks=n), pieces)


# --- Resumed runs

DENSE = dict(steps=4, save_every=2, n_layers=4, micro_batch_size=2)
LAYOUTS = [
    (1, STEP1, {}),
    (2, "step02_ddp", dict(sync="ring")),
    (3, "step03_zero", dict(zero="3", micro_batch_size=4)),
    (4, "step03_zero", dict(zero="2", recompute="full")),
    (4, "step04_tp_sp", dict(tp=2, sp=False, zero="1")),
    (4, "step05_cp_ring", dict(cp=2, tp=2, zero="0")),
    (4, "step06_pipeline", dict(pp=2, zero="0", sync="naive")),
    (8, "step06_pipeline", dict(pp=2, cp=2, tp=2, zero="3", schedule="interleaved")),
]
EXPERTS = DENSE | dict(experts=4, aux_loss_coeff=0.3)
S7 = "step07_moe_ep"
ROWS = [
    (
        DENSE | dict(tied=True),
        (4, "step06_pipeline", dict(pp=2, tp=2, zero="3", schedule="interleaved")),
        LAYOUTS[2],
    ),
    (EXPERTS, (1, S7, {}), (4, S7, dict(cp=2, ep=4, zero="2"))),
    (
        EXPERTS | dict(balance="bias", bias_rate=0.3),
        (4, S7, dict(pp=2, tp=2, ep=2, zero="3")),
        (1, S7, {}),
    ),
]
MATRIX = [(DENSE, one, other) for one in LAYOUTS for other in LAYOUTS]


@cases(
    "base, saved, resumed",
    ROWS + [pytest.param(*row, marks=pytest.mark.exhaustive) for row in MATRIX],
)
def test_a_run_resumes_in_another_layout(pools, tmp_path, base, saved, resumed):
    """Losses, norms and final weights are those of the uninterrupted run, to 1e-10 in fp64."""
    n, step, flags = saved
    whole = pools(n).run(train, step, base | flags | dict(out=f"{tmp_path}/a"))
    n, step, flags = resumed
    flags = flags | dict(out=f"{tmp_path}/b", resume=f"{tmp_path}/a/checkpoints/step-00000002")
    rest = pools(n).run(train, step, base | flags)
    close(torch.tensor(rest[0].losses), torch.tensor(whole[0].losses[2:]), "losses")
    close(torch.tensor(rest[0].norms), torch.tensor(whole[0].norms[2:]), "norms")
    expected = [piece for rank in whole for piece in rank.weights]
    close_together([rank.weights for rank in rest], expected, "at the end:", n, 1e-10)


# --- Which checkpoint, and with which flags


def saved_run(out: Path, *names: str) -> Path:
    """A run directory with checkpoints of these names, whose files are empty."""
    for name in names:
        (out / "checkpoints" / name).mkdir(parents=True)
        (out / "checkpoints" / name / "rank-00000.pt").touch()
    return out


def test_saving_removes_what_is_older_than_the_previous_checkpoint(tmp_path):
    """A run resumes from 2, because 3 and 9 could not be read, and saves 4, 6, 12 and 15. Each save
    removes the numbers below that of the save before: 1 goes at 4, 2 and 3 at 6, and 9 only at 15.
    A user's copy stays, also the link 5 to it. What a killed run has left, under a hidden name,
    goes.
    """
    names = ["step-00000001", "step-00000002", "step-00000003", "step-00000009"]
    saved_run(tmp_path, *names, "step-00000001-best", ".step-00000057")
    folder = tmp_path / "checkpoints"
    (folder / "step-00000005").symlink_to(folder / "step-00000001-best")
    previous = folder / "step-00000002"
    saves = {  # the step that is saved -> all folders then, sorted as text
        4: "1-best 2 3 4 5 9",
        6: "1-best 4 5 6 9",
        12: "1-best 12 5 6 9",
        15: "1-best 12 15 5",
    }
    for step, expected in saves.items():
        saved = folder / f"step-{step:08d}"
        save_checkpoint(saved, {}, {}, Ranks(), previous)
        found = sorted(path.name.removeprefix("step-").lstrip("0") for path in folder.iterdir())
        close(found, expected.split(), f"folders after step {step}")
        previous = saved


def test_a_run_removes_no_checkpoint_of_the_run_that_it_resumes(tmp_path):
    """Those of another directory, from which it began, stay; and so does its own, although 6 is a
    lower number than 8.
    """
    other = saved_run(tmp_path / "other", "step-00000004", "step-00000008") / "checkpoints"
    own = tmp_path / "own/checkpoints/step-00000006"
    save_checkpoint(own, {}, {}, Ranks(), other / "step-00000008")
    assert own.exists() and (other / "step-00000004").exists()


REFUSED = [
    ("", "--out .* has checkpoints: set --resume .* to continue from its newest, or another"),
    ("OUT/checkpoints/step-00000002", "--out .* has checkpoints"),
    ("OTHER", "--out .* has checkpoints"),
    ("MISSING", "--resume MISSING: no checkpoint is there"),
]


@cases("name, text", REFUSED)
def test_runs_do_not_mix(tmp_path, monkeypatch, name, text):
    """If --out has checkpoints, --resume must choose the newest: nothing, an older one and another
    run are refused. So is a path without any.
    """
    monkeypatch.chdir(tmp_path)
    saved_run(Path("OUT"), "step-00000002", "step-00000004")
    saved_run(Path("OTHER"), "step-00000002")
    with pytest.raises(UserError, match=text):
        choose_checkpoint(name, Path("OUT"), Ranks())


def test_resume_may_name_the_run_itself(tmp_path, monkeypatch):
    """`auto` starts anew if --out has no checkpoint. If it has one, `auto`, --out, that checkpoint,
    and paths through a link to --out all continue it: none is refused as another run's.
    """
    monkeypatch.chdir(tmp_path)
    close(choose_checkpoint("auto", Path("OUT"), Ranks()), None, "auto in an empty place")
    only = Path("OUT/checkpoints/step-00000004")
    save_checkpoint(only, {}, {}, Ranks())
    Path("link").symlink_to("OUT")
    for name in ("auto", "OUT", "link", str(only), f"link/checkpoints/{only.name}"):
        found = choose_checkpoint(name, Path("OUT"), Ranks())
        close(found.resolve(), only.resolve(), f"--resume {name}")


FLAGS = dict(lr=0.1, tp=2, dataset="a.txt", micro_batch_size=4, dtype="fp32")
CHANGES = [
    # flags of the resumed run; the fingerprint of its data, which was "abc"; the error
    (dict(lr=0.2), "abc", "--lr was 0.1: keep it"),
    (dict(tp=1, dataset="b.txt", micro_batch_size=2, balance="bias", dtype="bf16"), "abc", ""),
    (dict(micro_batch_size=2, balance="loss"), "abc", "--micro-batch-size was 4: keep it"),
    ({}, "other", "--dataset has other tokens"),
]


@cases("changed, fingerprint, text", CHANGES)
def test_flags_that_must_stay(changed, fingerprint, text):
    """A changed flag that decides what is computed is refused. Layout, files and dtype may change,
    --micro-batch-size only without an auxiliary loss. A flag that the saved run did not have
    (--balance) is not compared.
    """
    about = dict(flags=FLAGS, fingerprint="abc")
    saved = SimpleNamespace(folder=Path("X"), about=about)
    flags = FLAGS | changed
    if not text:
        check_flags(saved, flags, fingerprint)
        return
    with pytest.raises(UserError, match=f"--resume X: {text}"):
        check_flags(saved, flags, fingerprint)


# --- Damage, full disks, and ranks that die

STEP3 = "step03_zero"
WAYS = ["bytes", "truncated", "missing", "of the other rank"]


def damage(folder: Path, random_: random.Random) -> str:
    """Damage rank 1's file of two in one of several ways; returns which."""
    path = folder / "rank-00001.pt"
    content = bytearray(path.read_bytes())
    way = random_.choice(WAYS)
    start = random_.randrange(len(content))
    if way == "bytes":
        length = random_.randrange(1, 64)
        content[start : start + length] = random_.randbytes(length)
    elif way == "truncated":
        del content[start:]
    elif way == "of the other rank":
        content = (folder / "rank-00000.pt").read_bytes()
    path.write_bytes(content)
    if way == "missing":
        path.unlink()
    return way


def test_a_damaged_checkpoint_is_skipped(tmp_path):
    """Whatever happens to the newest one, an older one is found, or the damage has no effect.

    If all are damaged, one line says so."""
    older = tmp_path / "checkpoints/step-00000002"
    newer = tmp_path / "checkpoints/step-00000004"
    save_by_hand(older, 2)
    for seed in range(200):
        shutil.copytree(older, newer)
        way = damage(newer, random.Random(seed))
        found = find_sound(tmp_path, Ranks())
        assert found == older or way == "bytes", f"{seed}: {way} was not noticed"
        for rank in range(2):
            saved = Checkpoint(found)
            weight = saved.load_tensor(f"weight {rank}", "values", piece_of(torch.zeros(100)))
            close(weight, weight_of(rank), f"{seed}, {way}: the weight")
        shutil.rmtree(newer)
    (older / "rank-00000.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* is sound: .* another --out"):
        find_sound(tmp_path, Ranks())


def train_and_die(options: dict[str, Any]):
    """Train; when rank 1 saves step 4, it writes half of its file, and is killed."""

    def write_half(path: Path, content: dict, pieces: dict):
        write_file(path, content, pieces)
        if content["rank"] == 1 and content["step"] == 4:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(storage, "write_file", write_half):
        train(STEP3, options)


def test_a_rank_killed_while_saving_costs_only_that_checkpoint(pools, tmp_path):
    """Rank 1 of 2 is killed when half of its file of step 4 is written. Three ranks resume from
    step 2, so that ZeRO's shards are cut anew, and save step 4 again.
    """
    flags = dict(steps=4, save_every=2, out=f"{tmp_path}/a")
    (expected,) = pools(1).run(train, STEP1, dict(steps=4))
    with pytest.raises(RankError, match=r"reset|closed|died"):
        pools(2).run(train_and_die, flags)
    found = candidates(tmp_path / "a", Ranks())
    close([path.name for path in found], ["step-00000002"], "checkpoints")
    ranks = pools(3).run(train, STEP3, flags | dict(resume="auto"))
    close_together([rank.weights for rank in ranks], expected.weights, "at the end:", 3, 1e-10)
    names = sorted(path.name for path in (tmp_path / "a/checkpoints").iterdir())
    close(names, ["step-00000002", "step-00000004"], "folders")


def test_a_file_that_is_seen_late_is_waited_for(tmp_path):
    """On a network's disk rank 0 may see rank 1's file some time after it was written."""
    hidden = tmp_path / ".step-00000002"
    hidden.mkdir()
    (hidden / "rank-00000.pt").touch()
    threading.Timer(0.3, (hidden / "rank-00001.pt").touch).start()
    name_checkpoint(hidden, tmp_path / "step-00000002", 2)
    assert (tmp_path / "step-00000002/rank-00001.pt").exists()


# A rank that does not see a file then gives up at once
impatient = mock.patch.object(storage, "PATIENCE", 0.0)


@impatient
def train_without_a_shared_disk(options: dict[str, Any]):
    """Train with a directory of its own for each rank, as nodes without a shared disk have."""
    train(STEP3, options | dict(out=f"{options['out']}/{os.environ['RANK']}"))


def test_without_a_shared_disk_no_checkpoint_gets_a_name(pools, tmp_path):
    """Rank 0 does not see rank 1's file, so the first save ends the run, and leaves nothing."""
    text = "UserError: --out: cannot save .*: rank 0: rank-00001.pt is not there: nodes must share"
    with pytest.raises(RankError, match=text):
        pools(2).run(train_without_a_shared_disk, dict(save_every=2, out=str(tmp_path)))
    close(list(tmp_path.glob("*/checkpoints/*")), [], "checkpoints, and unfinished ones")


@impatient
def find_below(folder: str, names: list[str]) -> Path | None:
    """Find a checkpoint from a working directory that is another one on each rank."""
    before = os.getcwd()
    os.chdir(Path(folder) / names[int(os.environ["RANK"])])
    try:
        return find_sound(Path("out"), Ranks())
    finally:
        os.chdir(before)


def test_files_that_a_rank_does_not_see_are_no_damage(pools, tmp_path):
    """Rank 0 works in a, rank 1 in b, where there is no such folder: one line names the rank, and
    no checkpoint is skipped.
    """
    save_checkpoint(tmp_path / "a/out/checkpoints/step-00000002", {}, {}, Ranks())
    (tmp_path / "b").mkdir()
    text = "step-00000002, as rank 0 sees it: rank 1: rank-00000.pt is not there"
    with pytest.raises(RankError, match=text):
        pools(2).run(find_below, str(tmp_path), ["a", "b"])


def test_a_full_disk_is_an_oserror(tmp_path):
    """Also if torch.save raises a RuntimeError after the file's OSError. (After another error than
    OSError, `Ranks.attempt` would leave the other ranks waiting.)
    """

    def fail(content: dict, file: Any):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904 (torch does not say `from`)

    with mock.patch.object(torch, "save", fail), pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "rank-00000.pt", {}, {})


def test_a_checkpoint_that_cannot_be_written_leaves_the_others(tmp_path):
    """The disk is full when half of a file is written: the unfinished checkpoint's hidden folder
    goes, and those before stay.
    """
    folder = tmp_path / "checkpoints"
    saved_run(tmp_path, "step-00000001", "step-00000002")

    def write_half(path: Path, *content: Any):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half")
        raise OSError(28, "No space left")

    full = mock.patch.object(storage, "write_file", write_half)
    with full, pytest.raises(UserError, match=r"--out: .*step-00000004: rank 0: No space left"):
        save_checkpoint(
            folder / "step-00000004", {}, {}, Ranks(), previous=folder / "step-00000002"
        )
    left = sorted(path.name for path in folder.iterdir())
    close(left, ["step-00000001", "step-00000002"], "folders")


@pytest.mark.ranks(3)
def test_an_error_of_one_rank_is_that_of_all():
    """`attempt` raises on every rank what one rank's disk says."""

    def fail_on_rank_1():
        if ranks.rank == 1:
            raise OSError(28, "No space left on device")

    ranks = Ranks()
    with pytest.raises(UserError, match="saving: rank 1: No space left on device"):
        ranks.attempt("saving", fail_on_rank_1)
