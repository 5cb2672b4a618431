"""Checkpoints outlive layouts, and runs outlive faults: every pair of layouts, every kind of damage, killed ranks."""

import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from math import lcm, prod
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import step01_single_gpu as step01
import step03_zero as step03
import step04_tp_sp as step04
import step05_cp_ring as step05
import step07_moe_ep as step07
from common import UserError
from common.layout import Layout, Split
from common.model import Decoder, ModelConfig
from services import checkpoint as checkpoints
from services import hub, ledger, resume, saver, watchdog
from services.boxes import Box, Entry, Piece, divide, flat_boxes, overlap, part, without
from services.checkpoint import Checkpoint, find, newest
from services.health import Spikes
from services.launch import open_mesh
from services.plots import read_metrics
from services.saver import Saver
from services.state import full_state, pieces
from services.watchdog import GRACE, SAVES, SILENT, Place, Signals, Watchdog, compare, shared_store
from tests import faults
from tests.bench.resume import BASE, BEFORE, PAIRS, Saved, cp, one, run, tp, uninterrupted, worst_difference, zero
from tests.equivalence import SMALL, difference, job, without_instruments
from tests.jobs import (
    Forked,
    Job,
    as_flags,
    end,
    forked_torchrun,
    lines_until,
    ranks_of,
    steps_done,
    torchrun,
    wait_for,
)
from tests.pool import RankError
from tests.test_model import norms_in_fp64, rotary_in_fp64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """What runs in this process shares the cores with the pools."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- boxes -----------------------------------------------------------------------------------------------------------


def cells(box: Box) -> set[tuple[int, ...]]:
    """The indices in a box."""
    return set(
        map(
            tuple,
            torch.cartesian_prod(*map(torch.arange, box.size))
            .view(-1, len(box.size))
            .add(torch.tensor(box.start))
            .tolist(),
        )
    )


def test_a_range_of_elements_is_a_few_boxes():
    """All ranges of some shapes: the boxes list the elements in memory order, at most 2 d - 1 of them."""
    for shape in [(), (5,), (3, 4), (2, 3, 4), (1, 1, 3), (4, 1)]:
        numbers = torch.arange(prod(shape)).view(shape)
        for start in range(prod(shape)):
            for stop in range(start, prod(shape) + 1):
                boxes = list(flat_boxes(shape, start, stop))
                found = [part(numbers, Box((0,) * len(shape), shape), box).flatten() for box in boxes]
                assert torch.cat([*found, torch.empty(0)]).tolist() == list(range(start, stop))
                assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_overlap_and_difference_of_boxes():
    """Against sets of indices, for random boxes."""
    rng = random.Random(0)
    for _ in range(500):
        a, b = (
            Box(tuple(rng.randrange(4) for _ in range(3)), tuple(rng.randrange(1, 4) for _ in range(3)))
            for _ in range(2)
        )
        common, rest = overlap(a, b), without(a, b)
        assert (cells(common) if common else set()) == cells(a) & cells(b)
        assert sum(prod(box.size) for box in rest) == len(cells(a) - cells(b))
        assert set().union(*map(cells, rest)) == cells(a) - cells(b)


def random_cut(full: torch.Tensor, rng: random.Random) -> Piece:
    """A piece of a tensor as some rank could hold it: cut along a dimension (padded at its end), then a flat range."""
    layout, splits = Layout(), ()
    for dim in range(full.dim()):
        n = rng.randrange(1, 4)
        length = -(-full.shape[dim] // n)
        start = rng.randrange(n) * length
        splits = (*splits, Split(dim, "tp", start, start + length, full.shape[dim])) if n > 1 else splits
    layout = Layout(splits)
    local = layout.slice(full)
    start = rng.randrange(local.numel() + 1)
    stop = rng.randrange(start, local.numel() + 1)
    return Piece("model", "w", local.flatten()[start:stop].clone(), tuple(local.shape), layout, start)


def test_any_pieces_are_written_once_and_read_by_any_others(tmp_path):
    """Random cuts and ranges, overlapping and padded: what is read back is what was there, and each byte once."""
    rng = random.Random(1)
    for trial in range(60):
        full = torch.randn(tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4))), dtype=torch.float64)
        pieces = [random_cut(full, rng) for _ in range(rng.randrange(4))]
        pieces.append(Piece("model", "w", full.clone(), tuple(full.shape)))  # whoever else, somebody holds the rest
        rng.shuffle(pieces)
        Saver(tmp_path / f"{trial}").save(1, pieces, {})
        found = find(str(tmp_path / f"{trial}"), tmp_path)
        boxes = found.meta["tensors"]["model"]["w"]["boxes"]
        assert sum(prod(size) for *_, size in boxes) == full.numel()
        assert all(at % 64 == 0 for _, at, *_ in boxes)
        assert 0 <= (found.path / "rank-00000.bin").stat().st_size - full.numel() * 8 < 2048 * len(boxes)
        for _ in range(5):
            wanted = random_cut(full, rng)
            expected = wanted.tensor.clone()
            wanted.tensor.zero_()
            assert found.fill(wanted) and torch.equal(wanted.tensor, expected)


def test_replicas_are_written_by_one_rank_in_turn():
    """Eight equal tensors on four ranks: each rank writes two."""
    entries = [Entry("model", f"w{i}", (4, 4), "float32", Box((0, 0), (4, 4))) for i in range(8)]
    shares = divide([entries] * 4)
    assert [len(share) for share in shares] == [2, 2, 2, 2]
    assert sorted(entry for share in shares for entry in share) == sorted(entries)


def test_a_tensor_that_is_not_whole_is_not_saved(tmp_path):
    """A part that no rank holds would be noticed only when it is needed; so would parts of two shapes."""
    half = Piece("model", "w", torch.zeros(6), (3, 4))
    with pytest.raises(RuntimeError, match="model of w: no rank holds some of its 12 elements"):
        Saver(tmp_path).save(1, [half], {})
    with pytest.raises(RuntimeError, match="model of w: ranks hold parts of different tensors"):
        Saver(tmp_path).save(1, [half, Piece("model", "w", torch.zeros(6), (2, 6), start=6)], {})


def saved_on_rank(options: dict) -> list[int]:
    """Runs on every rank: train; returns how many collectives of the mesh the save took."""
    taken = []
    right = resume.save

    def save(run, *args):
        before = sum(run.mesh.ledger.entered.values())
        right(run, *args)
        taken.append(sum(run.mesh.ledger.entered.values()) - before)

    with mock.patch.object(resume, "save", save), without_instruments():
        step05.train(step05.Config(**options))
    return taken


@pytest.mark.picked(2)
@pytest.mark.parametrize("layout", [dict(tp=4, zero=0), dict(cp=2, tp=1, zero=1), dict(cp=2, tp=2, zero=3)], ids=str)
def test_a_save_gathers_nothing_and_writes_each_number_once(pools, tmp_path, layout):
    """Weights and two moments of 8 bytes each, step counts and the RNG's state; shared evenly by the ranks."""
    options = BASE | layout | dict(steps=1, out=str(tmp_path), global_batch_size=8, micro_batch_size=2)
    assert pools(4).run(saved_on_rank, options)[0] == [0]
    found = find(str(tmp_path), tmp_path)
    shapes = found.shapes("model")
    numbers, archives = [0] * 4, [0] * 4
    for about in (about for tensors in found.meta["tensors"].values() for about in tensors.values()):
        for rank, *_, size in about["boxes"]:
            numbers[rank] += prod(size) * getattr(torch, about["dtype"]).itemsize
            archives[rank] += 1
    assert sum(numbers) == sum(prod(shape) * 3 * 8 + 4 for shape in shapes.values()) + 5056
    assert max(numbers) < 1.25 * min(numbers)
    for rank in range(4):
        assert 0 < (found.path / checkpoints.file_name(rank)).stat().st_size - numbers[rank] < 2048 * archives[rank]
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in Decoder(ModelConfig(**found.meta["model"])).named_parameters()}
    assert shapes == expected


# --- any layout to any other -----------------------------------------------------------------------------------------


DENSE = [pair for pair in PAIRS if not pair[0].step.startswith("step07")]
SAVED, RESUMED = ([pair[i] for pair in DENSE] for i in (0, 1))
PRODUCT = list(product([*SAVED, cp(8, 2, 2, 1), tp(8, 4, 3)], [*RESUMED, cp(8, 2, 2, 3)]))


def few_micro_batches(*layouts: Saved) -> dict[str, int]:
    """The flag that leaves a rank one micro-batch a step, or two of a pipeline (more, if data ranks differ)."""
    data = [s.ranks // prod(s.flags.get(dim, 1) for dim in ("pp", "cp", "tp")) for s in layouts]
    two = any("pp" in s.flags for s in layouts)
    return dict(micro_batch_size=max(1, BASE["global_batch_size"] // lcm(*data) // (1 + two)))


@pytest.mark.picked(12, 21)  # with the tied pair below, each dimension and stage is in one of them
@pytest.mark.parametrize("saved, resumed", PAIRS, ids=lambda layout: str(layout).replace(" ", "_"))
def test_saved_under_one_layout_resumed_under_another(pools, tmp_path, saved, resumed):
    """The losses after the checkpoint, and the final weights, are those of one device that never stopped."""
    assert worst_difference(pools, saved, resumed, tmp_path, few_micro_batches(saved, resumed)) < 1e-10


SWEPT = pytest.mark.exhaustive
TIED = [(tp(4, 2, 1), tp(4, 4, 0)), (tp(4, 4, 1), one()), (one(), cp(4, 2, 2, 2)), (cp(4, 2, 2, 3), tp(2, 2, 0))]


@pytest.mark.picked(0)
@pytest.mark.parametrize("saved, resumed", TIED)
def test_tied_weights_change_layouts(pools, tmp_path, saved, resumed):
    """The matrix that is both embedding and head is one tensor in the checkpoint."""
    base = few_micro_batches(saved, resumed) | dict(tied=True)
    assert worst_difference(pools, saved, resumed, tmp_path, base) < 1e-10


@pytest.mark.exhaustive
@pytest.mark.parametrize("saved, resumed", random.Random(9).sample(PRODUCT, 24), ids=str)
def test_any_layout_to_any_other(pools, tmp_path, saved, resumed):
    """A sample, drawn with a fixed seed, of the product of all the layouts of the pairs."""
    assert worst_difference(pools, saved, resumed, tmp_path, {}) < 1e-10


LITTLE = BASE | dict(steps=BEFORE + 2, n_layers=1, micro_batch_size=6)


@pytest.mark.parametrize(
    "fault, saved, resumed",
    [
        ("resumed_weights_only", zero(2, 1), one()),
        ("resumed_at_the_first_batch", one(), one()),
        ("resumed_with_the_first_learning_rate", one(), one()),
    ],
)
def test_an_incomplete_resume_is_noticed(pools, tmp_path, fault, saved, resumed):
    """Fault 17: weights without moments, data position or learning rate."""
    losses, _ = uninterrupted("step01_single_gpu", json.dumps(LITTLE))
    run(pools, saved, LITTLE | dict(out=str(tmp_path / "a"), stop_after=BEFORE))
    with faults.applied(fault):
        later, _ = run(pools, resumed, LITTLE | dict(out=str(tmp_path / "b"), resume=str(tmp_path / "a")))
    assert max(difference(a, b) for a, b in zip(later, losses[BEFORE:], strict=True)) > 1e-6


def resumed_with_fault(options: dict, fault: str) -> list[float]:
    """Runs on every rank: go on under a fault; returns the losses."""
    with faults.applied(fault):
        return [row["loss"] for row in step04.train(step04.Config(**options)).history]


def test_reading_rank_0s_part_is_noticed(pools, tmp_path):
    """Fault 8: every tensor-parallel rank is given rank 0's heads and rows."""
    losses, _ = uninterrupted("step01_single_gpu", json.dumps(LITTLE))
    run(pools, one(), LITTLE | dict(out=str(tmp_path / "a"), stop_after=BEFORE))
    options = LITTLE | dict(tp=2, resume=str(tmp_path / "a"), out=str(tmp_path / "b"))
    later = pools(2).run(resumed_with_fault, options, "read_as_rank_0")[0]
    assert difference(later[0], losses[BEFORE]) > 1e-6
    options["out"] = str(tmp_path / "c")
    assert difference(pools(2).run(resumed_with_fault, options, "")[0][0], losses[BEFORE]) < 1e-10


def test_data_position_rng_and_schedule_are_in_the_checkpoint(tmp_path):
    """Said in words, beside being what the numbers depend on."""
    torch.manual_seed(5)
    step01.train(step01.Config(**BASE | dict(out=str(tmp_path), stop_after=3)))
    state = torch.get_rng_state()
    found = find(str(tmp_path), tmp_path)
    assert found.meta["position"] == dict(step=3, sequences=36) and found.meta["config"]["lr"] == BASE["lr"]
    torch.manual_seed(6)
    step01.train(step01.Config(**BASE | dict(out=str(tmp_path), resume="auto", stop_after=3)))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(found.full("rng", "cpu"), state)


def test_one_device_generates_from_any_checkpoint(pools, tmp_path, capsys):
    """Saved by 2 x 2 ranks with ZeRO 3, read by one."""
    options = LITTLE | dict(steps=1, out=str(tmp_path))
    run(pools, cp(4, 2, 2, 3), options)
    capsys.readouterr()
    step01.train(step01.Config(**options | dict(resume=str(tmp_path), generate="def ")))
    assert capsys.readouterr().out.startswith("def ")


def auto_on_rank(options: dict) -> tuple[list[int], list[float]]:
    """Runs on every rank: step 5 with its own choice of layout."""
    with without_instruments():
        history = step05.train(step05.Config(**options)).history
    return [row["step"] for row in history], [row["loss"] for row in history]


def test_a_job_shrinks_and_grows(pools, tmp_path):
    """The same command on 4, 2, 3 and 1 ranks: each picks a legal layout, keeps the batch, and goes on."""
    base = BASE | dict(steps=4, n_layers=2, micro_batch_size=2)
    losses, _ = uninterrupted("step01_single_gpu", json.dumps(base))
    options = base | dict(out=str(tmp_path / "run"), resume="auto", save_every=100)
    for ranks, stop in [(4, 1), (2, 2), (3, 3), (1, 4)]:
        on = pools(ranks).run if ranks > 1 else lambda function, *args: [function(*args)]
        steps, found = on(auto_on_rank, options | dict(stop_after=stop))[0]
        assert steps == list(range(1, stop + 1))
        assert found == pytest.approx(losses[:stop], rel=1e-10)
    assert [row["loss"] for row in read_metrics(tmp_path / "run")] == pytest.approx(losses, rel=1e-10)


# --- damage ----------------------------------------------------------------------------------------------------------


TINY = dict(dim=16, ffn_dim=24, n_layers=2, micro_batch_size=2)


@pytest.fixture(scope="module")
def two_ranks_run(pools, tmp_path_factory) -> Path:
    """A run of two ranks that saved after its second and fourth step."""
    out = tmp_path_factory.mktemp("damage") / "run"
    run(pools, zero(2, 2), BASE | TINY | dict(out=str(out), steps=4, save_every=2))
    return out


def contents(found: Checkpoint) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint."""
    return {(kind, name): found.full(kind, name) for kind in found.meta["tensors"] for name in found.shapes(kind)}


DAMAGES = ["truncate", "flip", "flip", "flip", "delete", "swap ranks", "swap steps", "swap names", "delete all"]
DAMAGES += ["append", "zeros", "empty", "copy", "folder", "stray", "rename", "half"]


def damage(folder: Path, rng: random.Random) -> str:
    """Do something to the checkpoints of a run; returns what."""
    older, newer = sorted((folder / "checkpoints").glob("step-*"))
    target = rng.choice([newer, newer, newer, older])
    path = target / rng.choice(["rank-00000.bin", "rank-00001.bin", "meta.json"])
    content, what = bytearray(path.read_bytes()), rng.choice(DAMAGES)
    at = rng.randrange(len(content))
    if what == "truncate":
        os.truncate(path, at)
    elif what == "flip":
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif what == "delete":
        path.unlink()
    elif what in ("swap ranks", "swap steps"):
        other = (target if what == "swap ranks" else older if target == newer else newer) / path.name
        other = target / "rank-00001.bin" if what == "swap ranks" and path.name != "rank-00001.bin" else other
        other = target / "rank-00000.bin" if other == path else other
        theirs = other.read_bytes()
        other.write_bytes(content)
        path.write_bytes(theirs)
    elif what == "swap names":
        older.rename(folder / "elsewhere")
        newer.rename(older)
        (folder / "elsewhere").rename(newer)
    elif what == "delete all":
        shutil.rmtree(target)
    elif what == "append":
        path.write_bytes(content + bytes(rng.randrange(1, 100)))
    elif what == "zeros":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
        path.write_bytes(content)
    elif what == "empty":
        os.truncate(path, 0)
    elif what == "copy":
        shutil.copy(path, target / "rank-00001.bin") if path.name != "rank-00001.bin" else path.write_bytes(b"x" * at)
    elif what == "folder":
        path.unlink()
        path.mkdir()
    elif what == "stray":
        (target / "rank-00002.bin").write_bytes(content)
    elif what == "rename":
        target.rename(target.parent / f"step-{rng.randrange(10**8):08d}")
    else:
        path.write_bytes(content[: at // 2] + content[at:])
    return f"{what} {target.name}/{path.name} at {at}"


def test_pytorchs_own_tool_opens_our_checkpoints(two_ranks_run, tmp_path):
    """dcp_to_torch_save, of ZeRO's slices, random cuts and other dtypes: bit for bit what we read."""
    rng, full = random.Random(2), torch.rand(5, 6, 2).half()
    held = [*(random_cut(full, rng) for _ in range(5)), Piece("model", "w", full, (5, 6, 2))]
    held += [Piece("exp_avg", "a.b", torch.rand(3, 4).bfloat16(), (3, 4)), Piece("step", "a.b", torch.tensor(7), ())]
    Saver(tmp_path / "run").save(1, held, {})
    for folder in (tmp_path / "run", two_ranks_run):
        found = find(str(folder), folder)
        dcp_to_torch_save(found.path, tmp_path / "file.pt")
        theirs, ours = torch.load(tmp_path / "file.pt"), contents(found)
        assert {(kind, name) for kind in theirs for name in theirs[kind]} == ours.keys()
        for (kind, name), tensor in ours.items():
            assert theirs[kind][name].dtype == tensor.dtype and torch.equal(theirs[kind][name], tensor)


def signed(path: Path, meta: dict, *altered: str):
    """Write meta.json with the checksums of what is there now, as whoever wrote the files could."""
    meta["files"] |= {name: checkpoints.checksum(path / name) for name in altered}
    meta["sha256"] = checkpoints.meta_checksum(meta)
    (path / "meta.json").write_text(json.dumps(meta))


def test_a_checkpoint_of_version_2_is_read(two_ranks_run, tmp_path):
    """There, a rank's file held numbers alone, each box from a multiple of 8 bytes on, and .metadata was not there."""
    shutil.copytree(two_ranks_run, tmp_path / "run")
    found = find(str(tmp_path / "run"), tmp_path)
    files = {rank: bytearray() for rank in range(2)}
    for about in (about for tensors in found.meta["tensors"].values() for about in tensors.values()):
        for box in about["boxes"]:
            raw = (found.path / checkpoints.file_name(box[0])).read_bytes()
            n, file = prod(box[3]) * getattr(torch, about["dtype"]).itemsize, files[box[0]]
            box[1], numbers = len(file), raw[box[1] : box[1] + n]
            file += numbers + bytes(-n % 8)
    for rank, file in files.items():
        (found.path / checkpoints.file_name(rank)).write_bytes(file)
    (found.path / ".metadata").unlink()
    found.meta["files"].pop(".metadata")
    signed(found.path, found.meta | dict(format="nd-parallel checkpoint, version 2"), *found.meta["files"])
    ours, expected = contents(find(str(found.path), tmp_path)), contents(find(str(two_ranks_run), tmp_path))
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in ours)
    signed(found.path, found.meta | dict(format="nd-parallel checkpoint, version 1"))
    with pytest.raises(UserError, match=r"meta.json is damaged, or of another program or version\); give another"):
        find(str(found.path), tmp_path)


class Program:
    """Pickled, this leaves a file where it is opened."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_strangers_program_is_not_run(two_ranks_run, tmp_path):
    """In .metadata, and in the archives, around the numbers: we read these only. (PyTorch's tool runs it.)"""
    expected = contents(find(str(two_ranks_run), tmp_path))
    shutil.copytree(two_ranks_run, tmp_path / "run")
    found = find(str(tmp_path / "run"), tmp_path)
    (found.path / ".metadata").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    assert ".metadata is truncated or altered" in checkpoints.problem(found.path)
    raw = bytearray((found.path / "rank-00000.bin").read_bytes())
    while (at := raw.find(b"archive/data.pkl")) >= 0:
        raw[at : at + 200] = pickle.dumps(Program(tmp_path / "ran")).ljust(200, b".")[:200]
    (found.path / "rank-00000.bin").write_bytes(raw)
    signed(found.path, found.meta, ".metadata", "rank-00000.bin")
    ours = contents(find(str(found.path), tmp_path))
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in ours)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointException):
        dcp_to_torch_save(found.path, tmp_path / "file.pt")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("trials", [60, pytest.param(200, marks=SWEPT)])
def test_corruptions_are_detected_or_harmless(two_ranks_run, tmp_path, capsys, trials):
    """Whatever is taken is bit for bit what was saved at its step; whatever is refused is so in one line.

    Where the newest is damaged it is named, and the one before it taken.
    """
    sound = {step: contents(find(str(two_ranks_run / "checkpoints" / f"step-{step:08d}"), tmp_path)) for step in (2, 4)}
    rng, outcomes = random.Random(0), {"detected": 0, "harmless": 0}
    for trial in range(trials):
        folder = tmp_path / str(trial)
        shutil.copytree(two_ranks_run, folder)
        what = damage(folder, rng)
        capsys.readouterr()
        try:
            found = find(str(folder), folder)
        except UserError as error:
            assert what.startswith("swap") and "none of this run is sound" in str(error), what
            outcomes["detected"] += 1
            continue
        lines = capsys.readouterr().err.splitlines()
        step = found.meta["step"]
        ours = contents(found)
        assert ours.keys() == sound[step].keys(), what
        assert all(torch.equal(ours[key], sound[step][key]) for key in ours), what
        assert all(" is damaged (" in line for line in lines) and len(lines) <= 1, (what, lines)
        assert step == 4 or lines or what.startswith(("delete all", "rename")), (what, step)
        outcomes["detected" if lines else "harmless"] += 1
        shutil.rmtree(folder)
    assert outcomes["detected"] > trials / 2


def test_both_damaged_is_one_line(two_ranks_run, tmp_path):
    """Nothing sound is left: no traceback, no fresh start in silence."""
    shutil.copytree(two_ranks_run, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        os.truncate(path / "rank-00001.bin", 8)
    for where in ("auto", str(tmp_path / "run")):
        with pytest.raises(UserError, match=r"is damaged \(rank-00001.bin is truncated or altered\); none of this run"):
            find(where, tmp_path / "run")


def test_all_ranks_take_the_same_one(pools, two_ranks_run, tmp_path):
    """Each rank looks at its share of the files; what one finds, all act on."""
    shutil.copytree(two_ranks_run, tmp_path / "run")
    newer = tmp_path / "run" / "checkpoints" / "step-00000004"
    os.truncate(newer / "rank-00001.bin", 8)
    options = BASE | TINY | dict(steps=5, resume="auto")
    for ranks in (2, 3):
        shutil.copytree(tmp_path / "run", tmp_path / f"{ranks}")
        found = pools(ranks).run(auto_on_rank, options | dict(out=str(tmp_path / f"{ranks}")))
        assert all(steps == list(range(3 if rank else 1, 6)) for rank, (steps, _) in enumerate(found))


# --- failures while saving -------------------------------------------------------------------------------------------


def failing_on_rank(options: dict, rank: int, at: int) -> str:
    """Runs on every rank: the disk of one rank is full at its `at`-th save; returns the error."""
    right, calls = saver.write_boxes, []

    def write_boxes(path, tensors, note):
        calls.append(path)
        if dist.get_rank() == rank and len(calls) == at:
            raise OSError(28, "No space left on device")
        return right(path, tensors, note)

    with mock.patch.object(saver, "write_boxes", write_boxes):
        try:
            step03.train(step03.Config(**options))
        except UserError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("rank, at", [(1, 2), (0, 2), (1, 4)])
def test_one_ranks_full_disk_is_known_to_all(pools, tmp_path, background, rank, at):
    """On every rank alike, at once or at the next save or the end; the checkpoint before is intact."""
    options = SMALL | TINY | dict(zero=1, save_every=1, save_async=background, out=str(tmp_path), micro_batch_size=12)
    for text in pools(2).run(failing_on_rank, options, rank, at):
        assert f"saving step {at} failed (rank {rank}: No space left on device)" in text
        assert f"step-{at - 1:08d} is intact" in text
    assert find(str(tmp_path), tmp_path).meta["step"] == at - 1
    assert not list((tmp_path / "checkpoints").glob(".*"))


def async_on_rank(options: dict) -> tuple[list[dict], int]:
    """Runs on every rank: train, and write the first snapshot of `save_async` only when the next step is at work.

    Returns the metrics, and how many saves were under way at once.
    """
    right, under_way, most, next_step = saver.write_boxes, [], [], threading.Event()

    def write_boxes(path, tensors, note):
        under_way.append(path)
        most.append(len(under_way))
        assert next_step.wait(240) or not options["save_async"], "training waits for the snapshot to be written"
        digest = right(path, tensors, note)
        under_way.pop()
        return digest

    def observe(step, optimizer):
        if step == options["save_every"] or not options["save_async"]:
            next_step.set()

    with mock.patch.object(saver, "write_boxes", write_boxes):
        history = step03.train(step03.Config(**options), observe).history
    return history, max(most)


def test_every_pause_is_told(tmp_path, capsys):
    """That of each save in the next step's metrics, that of the last save at the end."""
    options = SMALL | TINY | dict(steps=4, save_every=2, out=str(tmp_path), micro_batch_size=12)
    history = step01.train(step01.Config(**options)).history
    assert [row["step"] for row in history if row.get("save_seconds", 0) > 0] == [3]
    assert re.search(r"the last save took a pause of \d+\.\d{3} s", capsys.readouterr().out)


@pytest.mark.picked(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_async_saves_what_was_there(pools, tmp_path, stage):
    """Training goes on while the first snapshot is written: it holds that step's numbers."""
    options = BASE | TINY | dict(zero=stage, steps=5, save_every=3)
    for background in (False, True):
        out = str(tmp_path / str(background))
        history, most = pools(2).run(async_on_rank, options | dict(save_async=background, out=out))[0]
        assert most == 1 and len([row for row in history if "save_seconds" in row]) == 1
    for step in (3, 5):
        ours, theirs = (
            contents(find(str(tmp_path / name / "checkpoints" / f"step-{step:08d}"), tmp_path))
            for name in ("True", "False")
        )
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def logits_of(folder: Path, tokens: torch.Tensor, m: ModelConfig) -> torch.Tensor:
    """What Hugging Face computes from an exported folder, in fp64 throughout."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    scaling = dict(factor=m.rope_scaling, **hub.LLAMA3_ROPE) if m.rope_scaling != 1.0 else None
    norms_in_fp64(theirs)
    rotary_in_fp64(theirs.model.rotary_emb, m, scaling)
    with torch.no_grad():
        return theirs(tokens).logits


@pytest.mark.parametrize(
    "base, saved",
    [
        (dict(), tp(4, 4, 0)),
        (dict(model="llama3.2-1b", dim=256, tied=True), zero(2, 3)),
        (dict(tied=False, n_kv_heads=4), one()),
    ],
    ids=["padded-vocabulary", "llama3-rope-tied", "mha"],
)
def test_hugging_face_opens_what_is_exported(pools, tmp_path, capsys, base, saved):
    """From any layout: the same fp64 logits; and importing it back gives the same bits, which a run begins with."""
    options = BASE | dict(steps=2, out=str(tmp_path / "run"), micro_batch_size=6) | base
    run(pools, saved, options)
    found = find(str(tmp_path / "run"), tmp_path)
    m = ModelConfig(**found.meta["model"])
    hub.main(["export", str(tmp_path / "run"), str(tmp_path / "hf")])
    tokens = torch.randint(0, 257, (2, m.seq_len), generator=torch.Generator().manual_seed(0))
    model = Decoder(m).double()
    model.load_state_dict({name: found.full("model", name) for name in found.shapes("model")}, strict=not m.tied)
    with torch.no_grad():
        ours = model.lm_head(model(tokens, torch.arange(m.seq_len)))
    assert difference(logits_of(tmp_path / "hf", tokens, m), ours) < 1e-10
    hub.main(["import", str(tmp_path / "hf"), str(tmp_path / "again")])
    flags = re.search(r"go on with (.*)", capsys.readouterr().out).group(1).split()
    assert flags[:2] == ["--model", base.get("model", "debug")] and flags[-2:] == ["--resume", str(tmp_path / "again")]
    again = find(str(tmp_path / "again"), tmp_path)
    assert again.meta["step"] == 0 and again.shapes("model") == found.shapes("model")
    assert all(torch.equal(again.full("model", name), found.full("model", name)) for name in found.shapes("model"))
    seen = {}

    def observe(step, optimizer):
        if step == 0:
            seen.update(full_state(optimizer, None)["model"])

    options |= dict(resume=str(tmp_path / "again"), out=str(tmp_path / "on"))
    assert len(step01.train(step01.Config(**options), observe).history) == 2
    assert all(torch.equal(seen[name], found.full("model", name)) for name in seen)


def test_a_model_of_hugging_face_is_imported(tmp_path, capsys):
    """Saved by transformers itself, grouped queries: the same fp64 logits; bf16 may start from it as well."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=259,
        max_position_embeddings=16,
        rms_norm_eps=1e-5,
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "hf")
    hub.main(["import", str(tmp_path / "hf"), str(tmp_path / "run")])
    assert "--model debug --dim 32 --n-layers 3" in capsys.readouterr().out
    found = find(str(tmp_path / "run"), tmp_path)
    model = Decoder(ModelConfig(**found.meta["model"])).double()
    model.load_state_dict({name: found.full("model", name) for name in found.shapes("model")})
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.lm_head(model(tokens, torch.arange(16)))
    assert difference(logits_of(tmp_path / "hf", tokens, model.config), ours) < 1e-10
    options = BASE | dict(dtype="bf16", steps=1, resume=str(tmp_path / "run"), out=str(tmp_path / "on"))
    assert len(step01.train(step01.Config(**options)).history) == 1


def test_what_cannot_be_exported_or_imported_is_one_line(tmp_path, capsys):
    """An odd tensor, another architecture, missing files, a folder that is there already."""
    step01.train(step01.Config(**BASE | dict(steps=1, out=str(tmp_path / "run"))))
    found = find(str(tmp_path / "run"), tmp_path)
    shapes = found.shapes("model")
    pieces = [Piece("model", name, found.full("model", name), shape) for name, shape in shapes.items()]
    pieces.append(Piece("model", "model.layers.0.mlp.experts.up_proj", torch.zeros(4, 8, 2), (4, 8, 2)))
    Saver(tmp_path / "moe").save(1, pieces, dict(model=found.meta["model"]))
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    hub.main(["export", str(tmp_path / "run"), str(tmp_path / "hf")])
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"garbage")
    for argv, says in [
        (["export", "moe", "out"], "does not fit the model that its meta.json describes"),
        (["export", "nowhere", "out"], "no checkpoint there"),
        (["export", "run"], "usage"),
        (["import", "gpt", "out"], "its model_type is gpt2"),
        (["import", "list", "out"], "cannot be read"),
        (["import", "hf", "out"], "cannot be read"),
        (["import", "nowhere", "out"], "cannot be read"),
        (["import", "hf", "run"], "exists already"),
    ]:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            hub.main([argv[0], *(str(tmp_path / name) for name in argv[1:])])
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and err.startswith("error: ") and says in err, err


# --- health ----------------------------------------------------------------------------------------------------------


def spike_on_rank(options: dict, at: int) -> tuple[list[dict], list[bool]]:
    """Runs on every rank: in one step, the gradient is a thousand times too large on rank 1 alone."""
    before, changed = {}, []

    def observe(step, optimizer):
        weights = full_state(optimizer, job())["model"]
        changed.append(any(not torch.equal(weights[name], before.get(name)) for name in weights) if before else True)
        before.update(weights)
        if step == at and dist.get_rank() == 1:
            for part in optimizer.gradients().values():
                part.mul_(1000)

    return step03.train(step03.Config(**options), observe).history, changed


@pytest.mark.parametrize("stage, stop", [(1, 0), (3, 9)])
def test_a_spike_is_skipped_by_all_ranks(pools, tmp_path, stage, stop):
    """Nobody updates, everybody says so, training goes on; also after a resume, as the medians are saved."""
    options = SMALL | TINY | dict(steps=13, zero=stage, lr=0.01, skip_spikes=5.0, out=str(tmp_path))
    options |= dict(global_batch_size=8, micro_batch_size=4)
    if stop:
        pools(2).run(spike_on_rank, options | dict(stop_after=stop, save_every=100), 99)
        options |= dict(resume="auto")
    for history, changed in pools(2).run(spike_on_rank, options, 10):
        assert [row["step"] for row in history if row.get("skipped")] == [11]
        assert [step for step, yes in enumerate(changed, stop) if not yes] == [11]  # seen at the next step
    for history, changed in pools(2).run(spike_on_rank, options | dict(skip_spikes=0.0, resume=""), 10):
        assert not any(row.get("skipped") for row in history) and all(changed)


def test_what_lasts_is_no_spike():
    """A level five times higher is skipped at first, then it is the median."""
    spikes = Spikes(3.0)
    assert not any(spikes.is_spike(2.0, 1.0) for _ in range(20))
    found = [spikes.is_spike(2.0, 5.0) for _ in range(20)]
    assert found[0] and not found[-1]
    assert spikes.is_spike(7.0, 5.0)
    assert not any(Spikes(0.0).is_spike(10.0**step, 1.0) for step in range(20))


def diverged_on_rank(options: dict, rank: int, kind: str, name: str) -> int:
    """Runs on every rank: on one rank, one number of one tensor changes by a few bits in the second step."""

    def observe(step, optimizer):
        if step == 1 and dist.get_rank() == rank:
            [piece] = [p for p in pieces(optimizer) if p.kind == kind and p.name == name]
            assert piece.tensor.numel()
            piece.tensor.view(-1)[0] += 1e-9

    with without_instruments():
        return len(step05.train(step05.Config(**options), observe).history)


@pytest.mark.parametrize(
    "ranks, layout, rank, kind, name",
    [
        (2, dict(tp=1, cp=1, zero=0), 1, "model", "model.layers.1.mlp.up_proj.weight"),
        pytest.param(2, dict(tp=1, cp=2, zero=0), 1, "model", "lm_head.weight", marks=SWEPT),
        pytest.param(4, dict(tp=2, cp=1, zero=0), 2, "exp_avg", "model.norm.weight", marks=SWEPT),
        (4, dict(tp=2, cp=2, zero=1), 1, "exp_avg_sq", "model.norm.weight"),
        pytest.param(4, dict(tp=2, cp=1, zero=3), 1, "model", "model.norm.weight", marks=SWEPT),
        pytest.param(4, dict(tp=4, cp=1, zero=2), 3, "exp_avg", "model.layers.0.self_attn.k_proj.weight", marks=SWEPT),
    ],
    ids=str,
)
def test_a_diverging_replica_is_named(pools, tmp_path, ranks, layout, rank, kind, name):
    """Along dp, cp or tp, weights or moments, whole or sliced; and nothing is said of healthy ones.

    (A wrong moment shows in the weight as well after the update. What ZeRO 1 and 2 gather anew is healed.)
    """
    options = BASE | layout | dict(steps=2, n_layers=2, check_replicas=2, out=str(tmp_path), micro_batch_size=6)
    assert pools(ranks).run(diverged_on_rank, options, 99, kind, name) == [2] * ranks
    with pytest.raises(RankError, match=rf"(model|{kind}) of {name} is not the same on ranks \d and {rank}"):
        pools(ranks).run(diverged_on_rank, options, rank, kind, name)
    assert pools(ranks).run(diverged_on_rank, options | dict(check_replicas=0, zero=1), 99, kind, name) == [2] * ranks


def health_on_rank(options: dict) -> list[dict]:
    """Runs on every rank: step 5's metrics; rank 1 is slow.

    By a clock that all share: it stands still but for the seconds that rank 1 takes while rank 0 waits for somebody.
    """
    forward, rank, store = step04.VocabParallelHead.loss, dist.get_rank(), shared_store()

    def clock() -> int:
        store.add(f"looks of rank {rank}", 1)  # an odd number: it has begun to wait
        return store.add("clock", 0)

    def slow(self, *args):
        while rank == 1 and store.add("looks of rank 0", 0) % 2 == 0:
            time.sleep(0.001)
        store.add("clock", rank == 1)
        return forward(self, *args)

    patched = mock.patch.object(ledger, "time", SimpleNamespace(perf_counter=clock))
    with patched, mock.patch.object(step04.VocabParallelHead, "loss", slow):
        return step05.train(step05.Config(**options)).history


def test_each_ranks_health_is_in_the_metrics(pools, tmp_path):
    """Losses of data ranks add up to the loss; the slow rank of a pair is the one that waits less."""
    options = SMALL | dict(steps=2, n_layers=1, micro_batch_size=6, log_ranks=True, out=str(tmp_path), tp=2, cp=1)
    for history in pools(4).run(health_on_rank, options):
        for row in history:
            ranks = row["ranks"]
            assert [entry["rank"] for entry in ranks] == [0, 1, 2, 3]
            assert ranks[0]["loss"] == ranks[1]["loss"]
            assert ranks[0]["loss"] + ranks[2]["loss"] == pytest.approx(row["loss"], rel=1e-10)
            assert all(entry["grad_norm"] > 0 and entry["peak_memory_bytes"] > 10**7 for entry in ranks)
        waited = [sum(row["ranks"][rank]["waited_seconds"] for row in history) for rank in range(4)]
        assert waited[1] == 0 < waited[0]
    assert "ranks" in read_metrics(tmp_path)[0]


# --- the watchdog ----------------------------------------------------------------------------------------------------


class Clock:
    """The time of some watchdogs. It goes on when all that are left have looked at it, however busy the machine is."""

    def __init__(self):
        self.now, self.looks = 1e6, Counter()

    def time(self) -> float:
        """In place of the module `time`."""
        return self.now

    def looked(self, rank: int, place: Place) -> Place:
        """A watchdog asks where its rank is."""
        self.looks[rank] += 1
        return place

    def at_work(self, rank: int) -> Place:
        """The same of a rank that moves every second."""
        return self.looked(rank, Place(int(self.now), "forward", "", {}))

    def go_on(self, dogs: list[Watchdog], ticks: int, seconds: float = 1.0):
        """So many times so many seconds, after each of which all dogs look around once or more."""
        for _ in range(ticks):
            self.now += seconds
            looks = self.looks.copy()
            while any(dog.thread.is_alive() and self.looks[dog.rank] < looks[dog.rank] + 2 for dog in dogs):
                time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """What the watchdogs of this process take for the time. They look at it forty times in their `seconds`."""
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def test_the_watchdog_names_who_is_behind(clock):
    """Two ranks go on, the third stops in step 6: not ended before the time, then with the table of all."""
    store, told, places = dist.HashStore(), [], [Place(5, "forward", "tp all_reduce", {})] * 3
    dogs = [Watchdog(lambda r=r: clock.looked(r, places[r]), 1.0, r, 3, store, told.append) for r in range(3)]
    for messages in range(20):  # all move, longer than the limit
        places[:] = [p._replace(entered={"messages": messages}) for p in places]
        clock.go_on(dogs, 1, 0.1)
    clock.go_on(dogs, 1, 0.1)
    places[0] = places[1] = Place(5, "backward", "dp all_reduce", {})
    clock.go_on(dogs, 6, 0.1)
    assert not told
    clock.go_on(dogs, 5, 0.1)
    for dog in dogs:
        dog.thread.join()
    text = max(told, key=len)
    assert len(told) == 3 and sum(map(bool, told)) == 1
    assert "rank 2 is behind, in step 6, forward, after entering tp all_reduce" in text.splitlines()[0]
    assert len(text.splitlines()) == 4 and "rank 0: step 6, backward; last collective dp all_reduce" in text


def test_the_watchdog_compares_collectives_not_times(clock):
    """Hosts that run ahead of their GPUs all stop at once: who entered fewer collectives of a group is behind.

    Ranks 0 and 1 are a tp group, 2 and 3 another. Rank 3 left one out: 2 waits for it, and over dp 0 waits for 2.
    """
    counts = [
        {"tp of ranks 0 1": 7, "dp of ranks 0 2": 5},
        {"tp of ranks 0 1": 7, "dp of ranks 1 3": 4},
        {"tp of ranks 2 3": 7, "dp of ranks 0 2": 4},
        {"tp of ranks 2 3": 6, "dp of ranks 1 3": 4},
    ]
    behind, ahead = compare(dict(enumerate(counts)))
    assert set(behind) == {2, 3} and ahead == {0, 2}
    store, told = dist.HashStore(), []
    places = [Place(5, "forward", "tp all_reduce", entered) for entered in counts]
    ranks = (3, 2, 1, 0)
    dogs = [Watchdog(lambda r=r: clock.looked(r, places[r]), 0.4, r, 4, store, told.append) for r in ranks]
    clock.go_on(dogs, 6, 0.1)
    for dog in dogs:
        dog.thread.join()
    (text,) = filter(None, told)
    assert "rank 3 is behind" in text and "(in tp of ranks 2 3: 6 collectives entered, others 7)" in text


def test_a_save_may_take_longer_than_the_limit(clock):
    """While bytes reach the disk of one rank, no rank is ended; when none do any more, the one without its file is."""
    store, told, written, places = dist.HashStore(), [], [0, 0], [Place(5, "save", "dp all_gather", {SAVES: 0})] * 2
    dogs = [
        Watchdog(lambda r=r: clock.looked(r, places[r]), 1.0, r, 2, store, told.append, written=lambda r=r: written[r])
        for r in range(2)
    ]
    clock.go_on(dogs, 1, 0.1)
    places[0] = places[0]._replace(entered={SAVES: 1})  # rank 0 is done, and waits
    for _ in range(40):  # of the tenths of a second that rank 1 takes, four times the limit
        written[1] += 1
        clock.go_on(dogs, 1, 0.1)
    assert told == []
    clock.go_on(dogs, 12, 0.1)
    for dog in dogs:
        dog.thread.join()
    (text,) = filter(None, told)
    assert "rank 1 is behind, in step 6, save" in text and f"(in {SAVES}: 0 files written, others 1)" in text


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_bytes_count_as_soon_as_they_are_on_the_disk(tmp_path, monkeypatch, background):
    """In parts of a large tensor, too, and not when the file is complete: its last part may come much later."""
    progress, flush = [], os.fsync
    own = Saver(tmp_path)

    def fsync(descriptor: int):
        progress.append(own.bytes_written)
        flush(descriptor)

    monkeypatch.setattr(saver, "PART", 2**12)
    monkeypatch.setattr(os, "fsync", fsync)
    tensor = torch.arange(2**17, dtype=torch.float32)
    own.save(1, [Piece("model", "a", tensor, tensor.shape)], {}, background)
    own.settle()
    size = next((tmp_path / "checkpoints").glob("*/rank-00000.bin")).stat().st_size
    assert size > tensor.nbytes and own.bytes_written == size and own.files_written == (not background)
    assert progress[0] == 0 and len({*progress}) > tensor.nbytes // 2**13
    assert Checkpoint(newest(tmp_path)).full("model", "a").equal(tensor)


def test_a_runs_watchdog_hears_of_its_saves(tmp_path, monkeypatch):
    """The bytes and the files of all checkpoints so far; none before the first."""
    dogs, found = [], []

    def started(*args, **options) -> Watchdog:
        dogs.append(Watchdog(*args, **options))
        return dogs[-1]

    def observe(step, optimizer):
        found.append((dogs[-1].written(), dogs[-1].place().entered.get(SAVES, 0)))

    monkeypatch.setattr("services.run.Watchdog", started)

    step01.train(step01.Config(**SMALL | TINY | dict(steps=3, save_every=1, out=str(tmp_path))), observe)
    assert found[0] == (0, 0) and found[1][1:] == (1,) and found[2] == (2 * found[1][0], 2) and found[1][0] > 1000


def test_a_rank_that_failed_ends_the_others(clock):
    """One says that it failed: the others, whose main threads may hang in C++, end after a few seconds, silently."""
    store, told = dist.HashStore(), []
    dogs = [Watchdog(lambda r=r: clock.at_work(r), 2.0, r, 3, store, told.append) for r in range(3)]
    dogs[1].stop(failed=True)
    clock.go_on(dogs, int(GRACE))
    assert told == []
    clock.go_on(dogs, 3)
    for dog in dogs:
        dog.thread.join()
    assert told == ["", ""]


def stuck(peer_alive: bool):
    """Runs in a process of its own: two watchdogs, of this rank and a peer, while the main thread waits in C++.

    The wait ends some time after a signal has come, if the watchdog has not ended the process by then.
    """
    watchdog.time = clock = Clock()
    signals, store = Signals(), dist.HashStore()
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"handled\n"))
    came = threading.Event()

    def signalled() -> bool:
        if signals.came():
            came.set()
        return came.is_set()

    dogs = [Watchdog(lambda: clock.at_work(0), 2.0, 0, 2, store, signalled=signalled)]
    dogs.append(Watchdog(lambda: clock.at_work(1), 2.0, 1, 2, store))
    clock.go_on(dogs, 1)  # both have written down where they are
    if not peer_alive:
        dogs.pop().stopped.set()  # it is killed: it writes nothing any more

    def go_on():
        came.wait()
        clock.go_on(dogs, 2 * int(SILENT + GRACE))
        store.set("long enough", "")

    threading.Thread(target=go_on, daemon=True).start()
    print("stuck")
    store.wait(["long enough"], timedelta(minutes=5))
    print("waited")


@pytest.mark.parametrize("peer", ["dead", "alive"])
def test_a_signal_is_seen_while_the_main_thread_is_in_cpp(peer):
    """SIGTERM comes, as torchrun sends it when a rank has died: Python's handler cannot run, the watchdog ends it.

    If all peers are alive, the signal asks for a last save, and nobody is ended. (The signal may come just before the
    wait in C++ begins: then Python handles it at once.)
    """
    process = Forked(stuck, peer == "alive")
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[0].split()
    assert process.wait(240) == (1 if peer == "dead" else 0)
    assert "waited" not in said if peer == "dead" else said == ["handled", "waited"]


def sub_timeouts_on_rank(seconds: float) -> list[float]:
    """Runs on every rank: the time limits of a mesh's groups, and of one that is added later."""
    with open_mesh({"dp": 2, "tp": 2}, torch.device("cpu"), "gloo", seconds) as mesh:
        mesh.add("data", 4, stride=1)
        backends = [mesh[dim].handle._get_backend(torch.device("cpu")) for dim in ("dp", "tp", "data")]
        return [backend.options._timeout.total_seconds() for backend in backends]


def test_the_time_limit_reaches_every_group(pools):
    """--timeout 7: collectives of all groups give up after 14 s, not after the backend's 30 minutes."""
    assert pools(4).run(sub_timeouts_on_rank, 7.0) == [[14.0] * 3] * 4


def train_job(*flags: str, restarts: int = 0, start: Callable[..., Job] = forked_torchrun) -> Job:
    """Step 3 on two ranks under torchrun, on a free port."""
    launcher = [
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
        "--nproc_per_node=2",
        f"--max-restarts={restarts}",
    ]
    return start(*launcher, "step03_zero.py", *flags)


# --- killed ranks ----------------------------------------------------------------------------------------------------

KILLED = dict(BASE, steps=60, save_every=4, global_batch_size=8, lr=0.01)


def stop_one(out: Path, job: Job, seconds: int):
    """SIGSTOP to rank 1, once there is a checkpoint: the other one names it and ends."""
    wait_for(lambda: steps_done(out) > 8 and len(ranks_of(job)) == 2, job)
    pid = ranks_of(job)[1]
    os.kill(pid, signal.SIGSTOP)
    lines = lines_until(job, "ending the job")
    assert "rank 1 is behind" in lines[-1] and f"(--timeout {seconds}), ending the job" in lines[-1]
    assert re.search(r"rank 0: step \d+, \w+; last collective dp \w+", next(job.stdout) + next(job.stdout))
    os.kill(pid, signal.SIGKILL)  # torchrun would, after half a minute


@pytest.mark.exhaustive
def test_a_stopped_rank_is_named_and_the_job_ends(tmp_path):
    """torchrun's own ranks, and no restart: a status that is not 0."""
    flags = ["--model", "debug", "--global-batch-size", "8", "--eval-every", "0", "--steps", "100000"]
    job = train_job(*flags, "--timeout", "40", "--out", str(tmp_path), start=torchrun)
    try:
        stop_one(tmp_path, job, 40)
        job.communicate()
        assert job.wait(timeout=240) != 0
    finally:
        end(job)


def kept_losses_on_rank(options: dict) -> list[float]:
    """Runs on every rank: the losses of a run that nobody disturbs."""
    return [row["loss"] for row in step03.train(step03.Config(**options)).history]


def kill_at_random(out: Path, options: dict, seed: int, kills: int, stop: bool = False, start=torchrun):
    """Train under torchrun, killing a random rank at random moments, half of them during a save.

    Asserts that each restart goes on from the last checkpoint that was complete at the time, or a later one. `stop`:
    before that, a rank is stopped.
    """
    rng, steps = random.Random(seed), options["steps"]
    flags = as_flags(options | dict(out=str(out), resume="auto"))
    job = train_job(*flags, restarts=kills + stop, start=start)
    try:
        if stop:
            stop_one(out, job, options["timeout"])
            lines_until(job, f"going on from {out}/checkpoints/")
        for kill in range(kills):
            target = steps * (kill + 1) // (kills + 2) + rng.randrange(4)
            wait_for(lambda target=target: steps_done(out) >= target and len(ranks_of(job)) == 2, job)
            if rng.random() < 0.5:
                deadline = time.monotonic() + 1
                while not list(out.glob("checkpoints/.step-*")) and time.monotonic() < deadline:
                    time.sleep(0.0005)
            else:
                time.sleep(rng.random() * 0.05)
            complete = checkpoints.newest(out)
            os.kill(rng.choice(list(ranks_of(job).values())), signal.SIGKILL)
            line = lines_until(job, f"going on from {out}/checkpoints/")[-1]
            at = int(line.rsplit("step-", 1)[1])
            assert at >= int(complete.name[5:]), f"went back to step {at}, {complete} was complete"
        text = "".join(job.stdout)
        job.wait(timeout=240)
    finally:
        end(job)
    assert job.returncode == 0, text


def require_undisturbed(pools, out: Path, options: dict):
    """All steps are in the metrics once, with the losses of an undisturbed run, bit for bit; so are the weights."""
    whole = out.parent / "whole"
    pools(2).run(kept_losses_on_rank, options | dict(out=str(whole)))
    rows, expected = read_metrics(out), read_metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, options["steps"] + 1))
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    assert [row["grad_norm"] for row in rows] == [row["grad_norm"] for row in expected]
    ours, theirs = (contents(find(str(path), path)) for path in (out, whole))
    ours.pop(("rng", "cpu")), theirs.pop(("rng", "cpu"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_stopped_and_a_killed_rank_cost_nothing(pools, tmp_path):
    """SIGSTOP to a rank, which is named; then SIGKILL: the job restarts itself, and the end is the same bit for bit."""
    options = KILLED | dict(steps=40, micro_batch_size=2, zero=2, save_async=True, timeout=40)
    kill_at_random(tmp_path / "run", options, seed=0, kills=1, stop=True, start=forked_torchrun)
    require_undisturbed(pools, tmp_path / "run", options)


@pytest.mark.exhaustive
def test_kills_cost_nothing(pools, tmp_path):
    """Three in a run of torchrun's own ranks."""
    options = KILLED | dict(zero=2, save_async=True)
    kill_at_random(tmp_path / "run", options, seed=0, kills=3)
    require_undisturbed(pools, tmp_path / "run", options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("background", [False, True])
def test_twenty_kills_cost_nothing(pools, tmp_path, seed, background):
    """Two kills each in ten runs, of every stage in turn."""
    options = KILLED | dict(zero=seed % 4, save_async=background)
    kill_at_random(tmp_path / "run", options, seed=seed + 10 * background, kills=2)
    require_undisturbed(pools, tmp_path / "run", options)


def free_port() -> int:
    """A port that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def answers(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def agents(count: int, nodes: str, ranks: int, script: str, flags: list[str], restarts: int = 0):
    """Launchers of `ranks` ranks each, as on as many nodes, that meet on a port of this machine: the first one's."""
    port = free_port()
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=two", f"--nnodes={nodes}"]
    meeting += ["--local_addr=localhost", "--rdzv_conf=last_call_timeout=20"]
    jobs = []
    for _ in range(count):
        jobs.append(torchrun(*meeting, f"--nproc_per_node={ranks}", f"--max-restarts={restarts}", script, *flags))
        wait_for(lambda: answers(port), jobs[0])
    return jobs


@pytest.mark.exhaustive
def test_five_dimensions_over_two_nodes_and_then_one(tmp_path):
    """Two agents of four ranks, with pp across them; then one agent alone resumes on its four ranks."""
    experts = dict(experts=4, experts_per_token=2, expert_dim=12)
    options = KILLED | dict(steps=6, out=str(tmp_path / "run")) | experts
    one = step07.train(step07.Config(**options | dict(out=str(tmp_path / "one"))))
    for count, nodes, stop in ((2, "2", 3), (1, "1:2", 6)):
        flags = as_flags(options | dict(stop_after=stop, resume="auto"))
        jobs = agents(count, nodes, 4, "step07_moe_ep.py", flags)
        texts = [job.communicate(timeout=900)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0] * count, texts
        mesh = "mesh: pp 2 x dp 1 x cp 2 x tp 2" if count == 2 else "mesh: pp 2 x dp 1 x cp 2 x tp 1"
        assert mesh in "".join(texts)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert losses == pytest.approx([row["loss"] for row in one.history], rel=1e-10)


@pytest.mark.exhaustive
def test_a_node_is_lost_and_the_other_goes_on(tmp_path):
    """--nnodes=1:2: one of two agents is killed with its ranks; the other restarts alone, under a layout for two."""
    options = KILLED | dict(out=str(tmp_path / "run"), timeout=60)
    expected = step01.train(step01.Config(**options | dict(out=str(tmp_path / "one")))).history
    jobs = agents(2, "1:2", 2, "step05_cp_ring.py", as_flags(options | dict(resume="auto")), restarts=3)
    try:
        wait_for(lambda: steps_done(tmp_path / "run") >= 10, jobs[0])
        kept, lost = jobs  # where both meet has to stay
        end(lost)
        text = kept.communicate(timeout=900)[0]
    finally:
        for job in jobs:
            end(job)
    assert kept.returncode == 0, text
    assert "going on from" in text and "mesh: dp 1 x cp 2 x tp 1" in text
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, options["steps"] + 1))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-10)
