"""Checkpoints: common/checkpoint.py, resume.py and ranks.py. Read them after step 3.

Small exact cases come first, then runs that are resumed in other layouts, damaged, and interrupted.
"""

import math
import os
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from common import UserError, checkpoint
from common.checkpoint import (
    Checkpoint,
    Piece,
    Place,
    candidates,
    find,
    place_of,
    save,
    write,
)
from common.layout import ParamLayout, Shard, shard_of
from common.ranks import Ranks
from common.resume import check_flags, choose_checkpoint
from tests.equal import STEP1, close, draw, together, train
from tests.pool import RankError

cases = pytest.mark.parametrize

# --- Pieces and boxes


def param_of(whole: tuple, *shards: Shard) -> nn.Parameter:
    """This rank's shard of a parameter whose elements are 1, 2, 3, ..."""
    value = torch.arange(1.0, math.prod(whole) + 1).view(whole)
    for shard in shards:
        value = shard_of(value, shard)
    param = nn.Parameter(value)
    param.parallel_layout = ParamLayout(shards=shards)
    return param


RECORDS = {
    "not sharded": ((3, 4), []),
    "rows": ((6, 4), [Shard(0, "tp", 2, 4, 6)]),
    "columns": ((3, 7), [Shard(1, "tp", 4, 8, 7)]),  # 7 columns on 2 ranks: one is padding
    "only padding": ((3, 4), [Shard(0, "tp", 4, 6, 3)]),
    "experts and rows": ((4, 6, 2), [Shard(0, "ep", 2, 4, 4), Shard(1, "tp", 3, 6, 6)]),
    "rows twice": ((10, 2), [Shard(0, "ep", 5, 10, 10), Shard(0, "tp", 3, 6, 5)]),
    "padding before others' rows": ((10, 2), [Shard(0, "ep", 0, 5, 10), Shard(0, "tp", 3, 6, 5)]),
}


@cases("whole, shards", RECORDS.values(), ids=RECORDS)
def test_box_is_where_shard_of_takes_elements_from(whole, shards):
    """A shard's box in the whole tensor has exactly the elements that `shard_of` keeps of it."""
    param = param_of(whole, *shards)
    place = place_of(param, (0, param.numel()))
    close((place.whole, place.shape), (whole, tuple(param.shape)), "shapes of whole and shard")
    inside = param_of(whole).detach()[tuple(slice(start, stop) for start, stop in place.box)]
    close(sorted(inside.flatten().tolist()), sorted(param[param > 0].tolist()), "elements")


def saved_pieces(whole: Tensor, tp: int, dim: int, zero: int) -> dict[Place, dict[str, Tensor]]:
    """What tp x zero ranks save of a tensor: shards along `dim`, each cut into `zero` spans."""
    pieces = {}
    length = math.ceil(whole.shape[dim] / tp)
    for rank in range(tp):
        shard = Shard(dim, "tp", rank * length, (rank + 1) * length, whole.shape[dim])
        local = shard_of(whole, shard)
        param = nn.Parameter(local)
        param.parallel_layout = ParamLayout(shards=(shard,))
        step = math.ceil(local.numel() / zero)
        for start in range(0, local.numel(), step):
            span = (start, min(start + step, local.numel()))
            pieces[place_of(param, span)] = dict(master=local.flatten()[slice(*span)].clone())
    return pieces


@cases("tp, dim, zero", [(1, 0, 1), (2, 0, 3), (3, 1, 2), (5, 1, 4)])
@cases("to_tp, to_dim", [(1, 0), (2, 1), (4, 0)])
def test_a_shard_is_assembled_from_pieces_of_any_layout(tp, dim, zero, to_tp, to_dim):
    """Each shard of a new layout gets the elements that `shard_of` takes from the whole tensor."""
    whole = draw("whole", 0, 7, 6)
    saved = Checkpoint.__new__(Checkpoint)
    saved.pieces = dict(weight=saved_pieces(whole, tp, dim, zero))
    length = math.ceil(whole.shape[to_dim] / to_tp)
    for rank in range(to_tp):
        shard = Shard(to_dim, "tp", rank * length, (rank + 1) * length, whole.shape[to_dim])
        param = nn.Parameter(shard_of(whole, shard))
        param.parallel_layout = ParamLayout(shards=(shard,))
        place = place_of(param, (0, param.numel()))
        found = saved.assemble_shard("weight", "master", place.box, place.shape)
        close(found, param, f"shard of rank {rank}")


def piece_of(master: Tensor) -> Piece:
    """A whole tensor as one piece."""
    return Piece(place_of(master, (0, master.numel())), dict(master=master))


def weight_of(rank: int) -> Tensor:
    """A tensor whose elements show the rank that has saved it."""
    return torch.full((100,), rank + 0.1)


def save_by_hand(folder: Path, n: int):
    """Write files of n ranks, each with its own "weight RANK", and with a copy of "norm"."""
    for rank in range(n):
        about = dict(rank=rank, ranks=n)
        pieces = {f"weight {rank}": piece_of(weight_of(rank)), "norm": piece_of(torch.ones(4))}
        write(folder / f"rank-0000{rank}.pt", about, pieces)


def test_of_copies_one_is_kept(tmp_path):
    """Ranks that update the same elements save copies: one piece of them remains."""
    save_by_hand(tmp_path, 3)
    close(len(Checkpoint(tmp_path).pieces["norm"]), 1, "pieces")


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
    for i, what in enumerate(("losses", "norms")):
        close(torch.tensor(rest[0][i]), torch.tensor(whole[0][i][2:]), what)
    expected = together([piece for rank in whole for piece in rank[3]])
    found = together([piece for rank in rest for piece in rank[3]])
    close(sorted(found), sorted(expected), "names")
    for name, value in expected.items():
        close(found[name], value, name)


# --- Which checkpoint, and with which flags


def saved_run(out: Path, *names: str) -> Path:
    """A run directory with checkpoints of these names, whose files are empty."""
    for name in names:
        (out / "checkpoints" / name).mkdir(parents=True)
        (out / "checkpoints" / name / "rank-00000.pt").touch()
    return out


def test_a_users_copy_is_no_checkpoint_of_the_run(tmp_path):
    """Only names that a run gives count, and the newest is first."""
    names = ["step-00000002", "step-00000010", "step-best", "step-00000010-copy", ".step-00000012"]
    saved_run(tmp_path, *names)
    found = [path.name for path in candidates(tmp_path, Ranks())]
    close(found, ["step-00000010", "step-00000002"], "checkpoints")
    copy = tmp_path / "checkpoints/step-best"
    close(candidates(copy, Ranks()), [copy], "a copy that --resume names")


def test_saving_removes_what_is_older_than_the_checkpoint_before(tmp_path):
    """3 and 9 could not be read when the run resumed from 2. 3 goes with the old ones; 9 may be
    sound, and goes when two newer ones have been saved. A user's copy stays.
    """
    names = ["step-00000001", "step-00000002", "step-00000003", "step-00000009", "step-best"]
    folder = saved_run(tmp_path, *names) / "checkpoints"
    previous = folder / "step-00000002"
    saves = {4: "2 3 4 9 best", 6: "4 6 9 best", 12: "12 6 9 best", 15: "12 15 best"}
    for step, expected in saves.items():
        saved = folder / f"step-{step:08d}"
        save(saved, dict(state={}), {}, Ranks(), previous)
        found = sorted(path.name.removeprefix("step-").lstrip("0") for path in folder.iterdir())
        close(found, expected.split(), f"folders after step {step}")
        previous = saved


def test_a_run_removes_no_checkpoint_of_the_run_that_it_resumes(tmp_path):
    """Those of another directory, from which it began, all stay, and so does its own."""
    names = ["step-00000002", "step-00000004", "the-best"]
    other = saved_run(tmp_path / "other", *names) / "checkpoints"
    own = tmp_path / "own/checkpoints/step-00000006"
    for previous in ("step-00000004", "the-best"):
        save(own, dict(state={}), {}, Ranks(), other / previous)
        close(sorted(path.name for path in other.iterdir()), names, "the other run's checkpoints")
        assert own.exists()


REFUSED = [
    ("", "--out .* has checkpoints: set --resume .* to continue from its newest, or another"),
    ("OUT/checkpoints/step-00000002", "--out .* has checkpoints"),
    ("OTHER", "--out .* has checkpoints"),
    ("MISSING", "--resume MISSING: no checkpoint is there"),
]


@cases("name, text", REFUSED)
def test_runs_do_not_mix(tmp_path, monkeypatch, name, text):
    """A directory with checkpoints is continued from its newest one, or left alone."""
    monkeypatch.chdir(tmp_path)
    saved_run(Path("OUT"), "step-00000002", "step-00000004")
    saved_run(Path("OTHER"), "step-00000002")
    with pytest.raises(UserError, match=text):
        choose_checkpoint(name, Path("OUT"), Ranks())


def test_where_resume_looks(tmp_path, monkeypatch):
    """`auto` starts anew without checkpoints; a link to --out, or its newest, is --out itself."""
    monkeypatch.chdir(tmp_path)
    close(choose_checkpoint("auto", Path("OUT"), Ranks()), None, "auto in an empty place")
    newest = Path("OUT/checkpoints/step-00000004")
    save(newest, dict(state={}), {}, Ranks())
    Path("link").symlink_to("OUT")
    for name in ("auto", "OUT", "link", str(newest), f"link/checkpoints/{newest.name}"):
        found = choose_checkpoint(name, Path("OUT"), Ranks())
        close(found.resolve(), newest.resolve(), f"--resume {name}")


FLAGS = dict(lr=0.1, tp=2, dataset="a.txt", micro_batch_size=4, experts=8)
CHANGES = [
    (dict(lr=0.2), {}, "--lr was 0.1: keep it"),
    (dict(tp=1, dataset="b.txt", micro_batch_size=2), {}, ""),
    (dict(new_flag=1), {}, ""),  # another script's, with the same computation
    (dict(micro_batch_size=2), dict(balance="loss"), "--micro-batch-size was 4: keep it"),
    (dict(micro_batch_size=2), dict(balance="bias"), ""),
    (dict(fingerprint="other"), {}, "--dataset has other tokens"),
]


@cases("changed, more, text", CHANGES)
def test_a_resumed_run_computes_the_same(changed, more, text):
    """Flags that change results must stay, those of layout and of files may change."""
    flags = FLAGS | more
    about = dict(flags=flags, fingerprint="abc")
    saved = SimpleNamespace(folder=Path("X"), about=about)
    flags = flags | changed
    fingerprint = flags.pop("fingerprint", "abc")
    if not text:
        check_flags(saved, flags, fingerprint)
        return
    with pytest.raises(UserError, match=f"--resume X: {text}"):
        check_flags(saved, flags, fingerprint)


# --- Damage, full disks, and ranks that die

STEP3 = "step03_zero"
WAYS = ["weight", "bytes", "truncated", "empty", "missing", "of the other rank", "longer"]


def damage(folder: Path, random_: random.Random) -> str:
    """Damage a checkpoint of two ranks in one of several ways; returns which."""
    rank = random_.randrange(2)
    path = folder / f"rank-0000{rank}.pt"
    content = bytearray(path.read_bytes())
    way = random_.choice(WAYS)
    if way == "weight":  # one bit of it
        content[content.find(weight_of(rank).numpy().tobytes()) + random_.randrange(400)] ^= 1
    elif way == "bytes":
        start = random_.randrange(len(content))
        length = random_.randrange(1, 64)
        content[start : start + length] = random_.randbytes(length)
    elif way == "truncated":
        del content[random_.randrange(len(content)) :]
    elif way == "empty":
        content.clear()
    elif way == "of the other rank":
        content = (folder / f"rank-0000{1 - rank}.pt").read_bytes()
    elif way == "longer":
        content += random_.randbytes(1000)
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
        found = find(tmp_path, Ranks())
        assert found == older or way in ("bytes", "longer"), f"{seed}: {way} was not noticed"
        for rank in range(2):
            saved = Checkpoint(found)
            weight = saved.load_tensor(f"weight {rank}", "master", piece_of(torch.zeros(100)))
            close(weight, weight_of(rank), f"{seed}, {way}: the weight")
        shutil.rmtree(newer)
    (older / "rank-00001.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* is sound: .* another --out"):
        find(tmp_path, Ranks())


def train_and_die(options: dict[str, Any]):
    """Train; when rank 1 saves step 4, it writes half of its file, and is killed."""

    def write_half(path: Path, content: dict, pieces: dict):
        write(path, content, pieces)
        if content["rank"] == 1 and content["step"] == 4:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(checkpoint, "write", write_half):
        train(STEP3, options)


def test_a_rank_killed_while_saving_costs_only_that_checkpoint(pools, tmp_path):
    """Rank 1 of 2 is killed when half of its file of step 4 is written. Three ranks resume from
    step 2, so that ZeRO's shards are cut anew, and save step 4 again.
    """
    flags = dict(steps=4, save_every=2, out=f"{tmp_path}/a")
    expected = together(pools(1).run(train, STEP1, dict(steps=4))[0].weights)
    with pytest.raises(RankError, match=r"reset|closed|died"):
        pools(2).run(train_and_die, flags)
    found = candidates(tmp_path / "a", Ranks())
    close([path.name for path in found], ["step-00000002"], "checkpoints")
    ranks = pools(3).run(train, STEP3, flags | dict(resume="auto"))
    for name, value in together([piece for rank in ranks for piece in rank.weights]).items():
        close(value, expected[name], name)
    names = sorted(path.name for path in (tmp_path / "a/checkpoints").iterdir())
    close(names, ["step-00000002", "step-00000004"], "folders")


def train_apart(options: dict[str, Any]):
    """Train with a directory of its own for each rank, as nodes without a shared disk have."""
    train(STEP3, options | dict(out=f"{options['out']}/{os.environ['RANK']}"))


def test_without_a_shared_disk_no_checkpoint_gets_a_name(pools, tmp_path):
    """The first save ends the run with one line."""
    text = "--out: cannot save .*: rank 0: the file of rank 1 is not there: nodes must share"
    with pytest.raises(RankError, match=text):
        pools(2).run(train_apart, dict(save_every=2, out=str(tmp_path)))
    close(list(tmp_path.glob("*/checkpoints/step-*")), [], "checkpoints")


def find_below(folder: str, names: list[str]) -> Path | None:
    """Find a checkpoint from a working directory that is another one on each rank."""
    before = os.getcwd()
    os.chdir(Path(folder) / names[int(os.environ["RANK"])])
    try:
        return find(Path("out"), Ranks())
    finally:
        os.chdir(before)


def test_files_that_a_rank_does_not_see_are_no_damage(pools, tmp_path):
    """Rank 0 works in a, rank 1 in b, where there is no such folder: one line names the rank, and
    no checkpoint is skipped.
    """
    save(tmp_path / "a/out/checkpoints/step-00000002", dict(state={}), {}, Ranks())
    (tmp_path / "b").mkdir()
    with pytest.raises(RankError, match=r"step-00000002, as rank 0 sees it: rank 1: No such file"):
        pools(2).run(find_below, str(tmp_path), ["a", "b"])


def test_a_save_removes_what_killed_runs_have_left(tmp_path):
    """A hidden folder, of another step, would otherwise stay for ever."""
    (tmp_path / ".step-00000057").mkdir()
    save(tmp_path / "step-00000060", dict(state={}), {}, Ranks())
    close([path.name for path in tmp_path.iterdir()], ["step-00000060"], "folders")


def test_a_full_disk_is_an_oserror(tmp_path):
    """A file that cannot be written raises the system's error."""
    path = tmp_path / "rank-00000.pt"
    path.symlink_to("/dev/full")  # a file that is always full
    for pieces in ({}, dict(weight=piece_of(torch.zeros(1000, 1000)))):
        with pytest.raises(OSError, match="No space left on device"):
            write(path, {}, pieces)


def test_the_error_that_follows_a_full_disk_is_not_shown(tmp_path):
    """torch.save can raise a RuntimeError after the file's OSError; `write` raises the first."""

    def fail(content: dict, file: Any):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904 (torch does not say `from`)

    with mock.patch.object(torch, "save", fail), pytest.raises(OSError, match="No space left"):
        write(tmp_path / "rank-00000.pt", {}, {})


def test_a_checkpoint_that_cannot_be_written_leaves_the_others(tmp_path):
    """The hidden folder goes, and earlier checkpoints stay."""
    folder = tmp_path / "checkpoints"
    save(folder / "step-00000002", dict(state={}), {}, Ranks())
    full = mock.patch.object(checkpoint, "write", side_effect=OSError(28, "No space left"))
    with full, pytest.raises(UserError, match=r"--out: .*step-00000004: rank 0: No space left"):
        save(folder / "step-00000004", dict(state={}), {}, Ranks())
    close([path.name for path in folder.iterdir()], ["step-00000002"], "folders")


@pytest.mark.ranks(3)
def test_an_error_of_one_rank_is_that_of_all():
    """`attempt` raises on every rank what one rank's disk says."""

    def fail_on_rank_1():
        if ranks.rank == 1:
            raise OSError(28, "No space left on device")

    ranks = Ranks()
    with pytest.raises(UserError, match="rank 1: No space left on device"):
        ranks.attempt(fail_on_rank_1)
