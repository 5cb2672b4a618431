"""Data parallelism: equal to one device under every sync mode, exact traffic, and faults that must be noticed."""

import os
import re
import signal
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import step01_single_gpu as step01
import step02_ddp as step02
import step04_tp_sp as step04
from common import UserError
from common.comm import all_gather, all_reduce, all_to_all, exchange, reduce_scatter
from services import relief, residuals, resume
from services.boxes import gather
from services.checkpoint import find
from services.checks import check_dp
from services.compression import COMPRESSED_SUMS, CompressedSum, summed
from services.flags import report
from services.launch import open_mesh
from services.plots import read_metrics
from services.readers import open_tokens
from tests import bounds, equivalence
from tests.equivalence import SMALL, check, label
from tests.jobs import Job, forked_torchrun, ranks_of, steps_done, torchrun, wait_for
from tests.pool import Hang, RankError

STEP = "step02_ddp"
TINY_BUCKETS = dict(bucket_mb=0.02)  # several buckets, the last partly filled


def micro_batch_size(dp: int, count: int) -> dict[str, int]:
    """Flags that give each of `dp` ranks `count` micro-batches of two sequences."""
    return dict(micro_batch_size=2, global_batch_size=2 * dp * count)


@pytest.mark.picked(7, 14, 28, 35)
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("sync", ["naive", "overlap", "bucket", "torch"])
@pytest.mark.parametrize("dp", [2, 3, 4, 8])
def test_equals_one_device(pools, dp, sync, count):
    """Every sync mode and number of micro-batches, with plain SGD, which shows the gradient's scale."""
    check(pools(dp), STEP, dict(optimizer="sgd") | micro_batch_size(dp, count), dict(sync=sync) | TINY_BUCKETS)


@pytest.mark.picked(4, 8, 10, 12)
@pytest.mark.parametrize(
    "base",
    [
        dict(optimizer="adamw"),
        dict(optimizer="adafactor"),
        dict(optimizer="sgd", tied=True),
        dict(optimizer="adamw", recompute="full"),
        dict(optimizer="sgd", recompute="selective", tied=True),
        dict(optimizer="sgd", n_kv_heads=4),
        dict(optimizer="sgd", grad_clip=0.0),
    ],
    ids=label,
)
@pytest.mark.parametrize("sync", ["overlap", "bucket"])
def test_equals_one_device_for_every_kind_of_model(pools, sync, base):
    """AdamW and Adafactor, tied weights, recomputation, with and without grouped queries and clipping."""
    check(pools(4), STEP, base | micro_batch_size(4, 3), dict(sync=sync) | TINY_BUCKETS)


@pytest.mark.picked(2, 3)
@pytest.mark.parametrize("sync", ["naive", "overlap", "bucket", "torch"])
def test_equals_one_device_with_a_frozen_parameter(pools, sync):
    """A parameter that does not train is in no bucket, and stays."""
    check(pools(2), STEP, dict(optimizer="sgd") | micro_batch_size(2, 3), dict(sync=sync) | TINY_BUCKETS, "frozen")


@pytest.mark.picked(1, 2)
@pytest.mark.parametrize("sync", ["naive", "overlap", "bucket", "torch"])
def test_equals_one_device_with_uneven_targets(pools, uneven_data, sync):
    """Ranks and micro-batches with different numbers of target tokens, some with none."""
    base = dict(optimizer="sgd", dataset=uneven_data) | micro_batch_size(4, 3)
    check(pools(4), STEP, base | dict(micro_batch_size=1), dict(sync=sync) | TINY_BUCKETS)


@pytest.mark.picked(0, 2)
@pytest.mark.parametrize("sync", ["naive", "overlap", "bucket", "torch"])
def test_fp32_drifts_by_rounding_only(pools, sync):
    """fp32 on four ranks stays within 1e-5 of one device."""
    base = dict(optimizer="sgd", dtype="fp32", lr=0.01) | micro_batch_size(4, 3)
    check(pools(4), STEP, base, dict(sync=sync) | TINY_BUCKETS)


def test_uneven_data_is_uneven(uneven_data):
    """The fixture does what it is for: some micro-batches of one sequence have no target, and ranks differ."""
    data = open_tokens(uneven_data, SMALL["seq_len"], 24, 0, 257)
    counts = (data.batch(0).targets != -100).sum(1)
    assert 0 in counts and len({int(n) for n in counts.view(4, 6).sum(1)}) > 1


@pytest.mark.picked(0, 1, 2, 3, 5, 6, 8, 9, 14, 17)
@pytest.mark.parametrize(
    "fault, sync",
    [
        ("weights_reduced_instead_of_gradients", "naive"),
        ("only_last_micro_batch", "naive"),
        ("early_buckets", "overlap"),
        ("early_buckets", "bucket"),
        ("averaged", "bucket"),
        ("no_sync", "bucket"),
        ("bucket_forgotten", "bucket"),
        ("summed_twice", "bucket"),
        ("mean_of_means", "bucket"),
        ("mean_of_local_targets", "bucket"),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_faults_are_noticed(pools, uneven_data, fault, sync, optimizer):
    """What peers got wrong makes the comparison with one device fail, whatever the optimizer hides."""
    base = dict(optimizer=optimizer, dataset=uneven_data) | micro_batch_size(2, 3)
    with pytest.raises(RankError, match=r"differs by|not the same on all ranks"):
        check(pools(2), STEP, base, dict(sync=sync) | TINY_BUCKETS, fault=fault)


def run_history(options: dict) -> list[dict]:
    """Runs on every rank: train and return the metrics."""
    with equivalence.without_instruments():
        return step02.train(step02.Config(**options)).history


def buckets_by_hand(sizes: list[int]) -> int:
    """How many buckets of 0.02 MiB hold tensors of these sizes in bytes, filled from the last tensor to the first."""
    count, room = 0, 0
    for size in reversed(sizes):
        if size > room:
            count, room = count + 1, int(0.02 * 2**20)
        room -= size
    return count


@pytest.mark.picked(0, 6, 10)
@pytest.mark.parametrize("dp", [2, 3, 8])
@pytest.mark.parametrize("sync", ["naive", "overlap", "bucket", "torch"])
def test_traffic_is_what_theory_says(pools, tmp_path, sync, dp):
    """2 (n-1)/n x gradient bytes a step, byte for byte, and sent only once however many micro-batches there are."""
    options = SMALL | micro_batch_size(dp, 3) | TINY_BUCKETS | dict(sync=sync, out=str(tmp_path / "run"))
    model = step01.Config(**SMALL).model_config()
    with torch.device("meta"):
        params = list(step02.Decoder(model).parameters())
    sizes = [p.numel() * 8 for p in params]
    for history in pools(dp).run(run_history, options):
        for row in history[1:]:  # PyTorch's DDP rebuilds its buckets after the first step
            assert row["traffic"]["dp"]["all_reduce"] == pytest.approx(2 * (dp - 1) / dp * sum(sizes), rel=1e-12)
            calls = row["calls"]["dp"]["all_reduce"]
            if sync == "torch":
                assert 1 < calls < len(params)
            else:
                assert calls == (buckets_by_hand(sizes) if sync == "bucket" else len(params))


def test_the_loss_is_the_same_on_every_rank(pools, tmp_path, uneven_data):
    """Every rank logs the same global loss and norm, bit for bit."""
    options = SMALL | micro_batch_size(4, 3) | dict(dataset=uneven_data, out=str(tmp_path / "run"))
    histories = pools(4).run(run_history, options)
    assert len({tuple((r["loss"], r["grad_norm"]) for r in history) for history in histories}) == 1


@pytest.mark.parametrize("sync", ["bucket", "torch"])
def test_validation_is_that_of_one_device(pools, tmp_path, sync):
    """In the midst of training, however the model is wrapped, and if the sequences do not divide."""
    base = SMALL | micro_batch_size(3, 2) | dict(eval_every=2, eval_sequences=7)
    runs = [step01.train(step01.Config(**base, out=str(tmp_path / "one"))).history]
    runs += pools(3).run(run_history, base | dict(sync=sync, out=str(tmp_path / sync)))
    losses = [[row["validation_loss"] for row in run if "validation_loss" in row] for run in runs]
    assert len(losses[0]) == 2
    for ours in losses[1:]:
        assert ours == pytest.approx(losses[0], rel=1e-10)


# --- collectives -----------------------------------------------------------------------------------------------------


def collectives_on_rank() -> dict:
    """Runs on every rank: each collective once on small integers; returns results and the ledger."""
    world = torch.distributed.get_world_size()
    with open_mesh({"dp": world}, torch.device("cpu"), "gloo") as mesh:
        group, r = mesh["dp"], mesh.rank
        summed = torch.arange(4.0) + r
        all_reduce(summed, group).wait()
        part = torch.empty(3)
        reduce_scatter(part, torch.arange(3.0 * world) * (r + 1), group).wait()
        gathered = torch.empty(2 * world)
        all_gather(gathered, torch.tensor([r, -r]).float(), group).wait()
        sent = [(r + peer) % 3 for peer in range(world)]  # uneven, some empty
        received = torch.empty(sum(sent), dtype=torch.int64)
        all_to_all(received, torch.full((sum(sent),), r), group, sent, sent).wait()
        neighbour = torch.empty(2, dtype=torch.bfloat16)
        message = torch.full((2,), r, dtype=torch.bfloat16)
        exchange([(message, (r + 1) % world)], [(neighbour, (r - 1) % world)], group).wait()
        by_hand = torch.arange(10, dtype=torch.float64) ** (r + 1)  # 10 is not divisible by 3 or 4
        by_library = by_hand.clone()
        taken = mesh.ledger.take()
        step02.ring_all_reduce(by_hand, group)
        ring_bytes = mesh.ledger.take()["traffic"]["dp"]["send"]
        all_reduce(by_library, group).wait()
        return dict(
            summed=summed, part=part, gathered=gathered, received=received, sent=sent, neighbour=neighbour.float(),
            by_hand=by_hand, by_library=by_library, ring_bytes=ring_bytes, ledger=taken,
        )  # fmt: skip


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU; its copy on the host is a plain one."""

    is_cuda = True

    def cpu(self) -> torch.Tensor:
        """The same numbers elsewhere."""
        return self.as_subclass(torch.Tensor).clone()


def collectives_through_the_host(fake: bool) -> list[list[float]]:
    """Runs on every rank: three collectives and a message of tensors that may be on a GPU."""
    world = torch.distributed.get_world_size()
    with open_mesh({"dp": world}, torch.device("cpu"), "gloo") as mesh:
        place = (lambda x: x.as_subclass(OnGpu)) if fake else lambda x: x
        numbers = place(torch.arange(2.0 * world) + mesh.rank)
        parts, everyones, theirs = (place(torch.zeros(n)) for n in (2, 2 * world**2, 2 * world))
        peers = ((mesh.rank + step) % world for step in (1, -1))
        exchange([(numbers, next(peers))], [(theirs, next(peers))], mesh["dp"]).wait()
        reduce_scatter(parts, numbers, mesh["dp"]).wait()
        all_gather(everyones, numbers, mesh["dp"]).wait()
        all_reduce(numbers, mesh["dp"]).wait()
        return [x.as_subclass(torch.Tensor).tolist() for x in (theirs, numbers, parts, everyones)]


def test_gloo_takes_a_gpus_tensors_through_host_memory(pools):
    """Results are where they are without the detour."""
    assert pools(2).run(collectives_through_the_host, True) == pools(2).run(collectives_through_the_host, False)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_and_their_bytes(pools, world):
    """Results against arithmetic, ledger entries against the ring formulas, the hand-written ring against gloo's."""
    total = world * (world + 1) / 2
    results = pools(world).run(collectives_on_rank)
    for r, found in enumerate(results):
        assert found["summed"].tolist() == [x * world + total - world for x in range(4)]
        assert found["part"].tolist() == [x * total for x in range(3 * r, 3 * r + 3)]
        assert found["gathered"].tolist() == [x for q in range(world) for x in (q, -q)]
        assert found["received"].tolist() == [q for q in range(world) for _ in range((r + q) % 3)]
        assert found["neighbour"].tolist() == [(r - 1) % world] * 2
        assert torch.equal(found["by_hand"], found["by_library"])  # whole numbers: every order adds them exactly
        share = (world - 1) / world
        assert found["ledger"]["traffic"]["dp"] == pytest.approx(
            dict(
                all_reduce=2 * share * 4 * 4,
                reduce_scatter=share * 3 * world * 4,
                all_gather=share * 2 * world * 4,
                all_to_all=8 * (sum(found["sent"]) - found["sent"][r]),
                send=4,
            )
        )
        assert found["ledger"]["calls"]["dp"]["all_reduce"] == 1
    assert sum(found["ring_bytes"] for found in results) == 2 * (world - 1) * 10 * 8


def mismatched(shape: tuple, dtype: torch.dtype) -> None:
    """Runs on every rank: rank 0 expects something else than rank 1 sends."""
    with open_mesh({"dp": 2}, torch.device("cpu"), "gloo") as mesh:
        mine = torch.zeros(4) if mesh.rank == 1 else torch.zeros(shape, dtype=dtype)
        sends = [(mine, 0)] if mesh.rank == 1 else []
        receives = [(mine, 1)] if mesh.rank == 0 else []
        exchange(sends, receives, mesh["dp"]).wait()


@pytest.mark.parametrize("shape, dtype", [((2, 2), torch.float32), ((8,), torch.float32), ((4,), torch.int32)])
def test_a_message_of_another_shape_or_dtype_is_refused(pools, shape, dtype):
    """gloo would deliver it silently."""
    with pytest.raises(RankError, match=r"expects .* from rank 1, which sent \[4\] torch.float32"):
        pools(2).run(mismatched, shape, dtype)


def test_a_group_of_one_is_a_no_op():
    """Without a process group every collective returns its input, so the same code runs on one process."""
    with open_mesh({"dp": 1, "tp": 1}, torch.device("cpu"), "auto") as mesh:
        x, out = torch.arange(3.0), torch.empty(3)
        all_reduce(x, mesh["dp"]).wait()
        for collective in (reduce_scatter, all_gather, all_to_all):
            collective(out, x, mesh["tp"]).wait()
            assert torch.equal(out, torch.arange(3.0))
        step02.ring_all_reduce(x, mesh["dp"])
        assert torch.equal(x, torch.arange(3.0)) and mesh.ledger.take()["traffic"] == {}


def test_one_process_equals_step01(tmp_path):
    """All groups of size one: the same code is step01, bit for bit."""
    options = SMALL | dict(micro_batch_size=6)
    runs = [step.train(step.Config(**options, out=str(tmp_path / step.__name__))) for step in (step01, step02)]
    rows = [[(r["loss"], r["grad_norm"]) for r in run.history] for run in runs]
    assert rows[0] == rows[1]
    for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# --- the harness itself ----------------------------------------------------------------------------------------------


def hang_on_rank(rank: int) -> None:
    """Runs on every rank: one never joins the all-reduce."""
    if torch.distributed.get_rank() == rank:
        time.sleep(10**6)
    torch.distributed.all_reduce(torch.ones(1))


def fail_on_rank(rank: int) -> None:
    """Runs on every rank: one raises, the others wait for it."""
    if torch.distributed.get_rank() == rank:
        raise ValueError("a readable reason")
    torch.distributed.all_reduce(torch.ones(1))


def test_a_hang_is_ended_and_located(pools):
    """A collective that never completes is killed; the report says where each rank stood, and the pool recovers."""
    places = re.compile(r"(?s)ranks \[0, 1, 2\].*rank 0 stood at.*in hang_on_rank.*rank 2 stood at")
    for seconds in (2, 20, 120):  # a busy machine may need longer to come as far as the line that hangs
        with pytest.raises(Hang) as hang:
            pools(3).run(hang_on_rank, 1, timeout=seconds)
        if places.search(str(hang.value)):
            break
    assert places.search(str(hang.value))
    assert pools(3).run(torch.distributed.get_rank) == [0, 1, 2]


def test_the_failing_rank_is_named(pools):
    """The traceback is the one of the rank that failed, not of those that waited for it."""
    with pytest.raises(RankError, match=r"(?s)rank 2 of 3 failed.*a readable reason.*rank 0 stood at"):
        pools(3).run(fail_on_rank, 2)


def test_the_comparison_names_what_differs_first():
    """The report names step and parameter, and sees a wrong scale that a cosine would not."""
    good = equivalence.Recording([2.0], [1.0], [{"w": torch.ones(3)}], {"w": torch.ones(3)})
    bad = equivalence.Recording([2.0], [1.0], [{"w": 1.001 * torch.ones(3)}], {"w": torch.ones(3)})
    assert equivalence.compare(good, good, 1e-10) == 0
    with pytest.raises(AssertionError, match=r"step 1: the gradient of w differs by 0.001"):
        equivalence.compare(bad, good, 1e-10)


# --- compression -----------------------------------------------------------------------------------------------------


def compressed_sums(mode: str, feedback: bool, steps: int) -> tuple[float, dict]:
    """Runs on every rank: sum `steps` gradients with compression; returns the relative error of the running total."""
    world = torch.distributed.get_world_size()
    config = step02.Config(compress=mode, topk_fraction=0.05)
    with open_mesh({"dp": world}, torch.device("cpu"), "gloo") as mesh:
        n, lost = 256 * world * 2, 0.0
        exact, received = torch.zeros(n), torch.zeros(n)
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * step + mesh.rank)
            # A steady direction with noise of very different sizes, as gradients have.
            gradient = (0.1 + torch.randn(n, generator=generator)) * torch.logspace(-3, 0, n)
            whole = gradient.clone()
            all_reduce(whole, mesh["dp"]).wait()
            exact += whole
            mesh.ledger.take()
            total, left = summed(COMPRESSED_SUMS[mode](gradient + lost, mesh["dp"], config))
            lost = left if feedback else 0.0
            received += total
        return ((received - exact).norm() / exact.norm()).item(), mesh.ledger.take()["traffic"]["dp"]


@pytest.mark.numerics
@pytest.mark.picked(2)
@pytest.mark.parametrize("mode, bound, ratio", [("bf16", 2e-4, 5.0), ("int8", 1e-3, 5.0), ("topk", 0.5, 1.2)])
def test_error_feedback_keeps_the_sum_close(pools, mode, bound, ratio):
    """What is lost in one step arrives later: the accumulated update stays near the exact one; without, it drifts."""
    (with_feedback, _), *_ = pools(4).run(compressed_sums, mode, True, 100)
    (without, _), *_ = pools(4).run(compressed_sums, mode, False, 100)
    assert with_feedback < bound and without > ratio * with_feedback, (with_feedback, without)


def messages_of_two_buckets(mode: str) -> list[dict[str, int]]:
    """Runs on every rank: the calls when one bucket has been sent, when another has been, and at the end."""
    with open_mesh({"dp": 2}, torch.device("cpu"), "gloo") as mesh:
        call, seen = CompressedSum(step02.Config(compress=mode, topk_fraction=0.05)), []
        sums = []
        for bucket in (torch.ones(600), torch.ones(600)):
            sums.append(call(bucket, mesh["dp"]))
            seen.append(dict(mesh.ledger.take()["calls"]["dp"]))
        for one in sums:
            one.wait()
        return [*seen, dict(mesh.ledger.take()["calls"].get("dp", {}))]


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("int8", [{"all_to_all": 1}, {"all_to_all": 1, "all_gather": 1}, {"all_gather": 1}]),
        ("topk", [{"all_gather": 1}, {"all_gather": 1}, {}]),
    ],
)
def test_a_hook_does_not_wait_for_its_own_message(pools, mode, expected):
    """A bucket's first message travels until the next bucket is sent; only then is its second one sent."""
    for seen in pools(2).run(messages_of_two_buckets, mode):
        assert seen == expected


@pytest.mark.parametrize("mode", ["bf16", "int8", "topk"])
def test_compressed_traffic_is_what_theory_says(pools, tmp_path, mode):
    """The ledger's bytes equal those the step predicts, and are as small as the docstring says."""
    options = SMALL | micro_batch_size(4, 1) | dict(compress=mode, dtype="fp32", out=str(tmp_path / "run"))
    full = (
        2
        * 3
        / 4
        * 4
        * sum(p.numel() for p in step01.train(step01.Config(**SMALL, out=str(tmp_path / "one"))).model.parameters())
    )
    traffic = pools(4).run(run_history, options)[0][-1]["traffic"]["dp"]
    sent = sum(n_bytes for operation, n_bytes in traffic.items() if "(" not in operation)
    assert sent / full == pytest.approx({"bf16": 1 / 2, "int8": 260 / 256 / 4, "topk": 4 * 0.01}[mode], rel=0.06)


@pytest.mark.numerics
@pytest.mark.picked(1)
@pytest.mark.parametrize("mode, bound", [("bf16", 0.01), ("int8", 0.01), ("topk", 0.5)])
def test_compressed_training_stays_near(pools, tmp_path, mode, bound):
    """Lossy by design: the loss after 20 steps is within `bound` nats of the exact one (and not equal to it)."""
    options = SMALL | micro_batch_size(2, 2) | dict(dtype="fp32", lr=0.01, steps=20, optimizer="adamw")
    losses = [
        pools(2).run(run_history, options | dict(compress=kind, out=str(tmp_path / kind)))[0][-1]["loss"]
        for kind in ("none", mode)
    ]
    assert 0 < abs(losses[1] - losses[0]) < bound, losses


def forgetful_on_rank(options: dict) -> list[dict]:
    """Runs on every rank: go on, owing nothing."""
    with mock.patch.object(resume, "take_over", lambda *_: None):
        return run_history(options)


def owed_on_rank(options: dict) -> dict[str, torch.Tensor]:
    """Runs on every rank: go on with step 4; what all ranks together owe of each parameter when it begins."""
    found, right = {}, resume.resume

    def watched(optimizer, spikes, config, mesh, sync):
        start = right(optimizer, spikes, config, mesh, sync)
        rows = gather(residuals.owed(sync, optimizer, mesh), mesh)["owed"]
        found.update({name: row.sum(0) for name, row in rows.items()})
        return start

    with equivalence.without_instruments(), mock.patch.object(resume, "resume", watched):
        step04.train(step04.Config(**options))
    return found


@pytest.mark.picked(1, 2)
@pytest.mark.parametrize("mode", ["bf16", "int8", "topk"])
def test_what_is_owed_survives_a_resume(pools, tmp_path, mode):
    """Three steps and three are six, bit for bit; a resume that owes nothing ends elsewhere."""
    options = SMALL | micro_batch_size(2, 1) | dict(dtype="fp32", lr=0.01, compress=mode, topk_fraction=0.05, steps=6)
    cut = str(tmp_path / "cut")

    def losses(function, **flags) -> list[float]:
        rows = pools(2).run(function, options | dict(out=str(tmp_path / "run")) | flags)[0]
        return [row["loss"] for row in rows][-3:]

    whole = losses(run_history)
    losses(run_history, stop_after=3, save_every=3, out=cut)
    assert losses(run_history, resume=cut) == whole
    assert losses(forgetful_on_rank, resume=cut) != whole
    assert len(losses(run_history, resume=cut, compress="none")) == 3  # which asks for nothing of it


@pytest.mark.picked(2)
@pytest.mark.parametrize("ranks, tp", [(4, 2), (4, 1), (3, 1)])
def test_other_ranks_owe_as_much_together(pools, tmp_path, ranks, tp):
    """From 4 ranks, dp 2 x tp 2, to others: of each parameter the sum over the ranks is the same."""
    options = SMALL | dict(compress="topk", zero=0, global_batch_size=12, steps=4, lr=0.01, tp=2)
    cut = str(tmp_path / "cut")
    pools(4).run(step_4_on_rank, options | dict(stop_after=2, save_every=2, out=cut))
    stored = find(cut, tmp_path)
    together: dict[str, torch.Tensor] = {}
    for found in pools(ranks).run(owed_on_rank, options | dict(tp=tp, resume=cut, out=str(tmp_path / "on"))):
        together |= found
    assert together.keys() == stored.shapes("owed").keys() == stored.shapes("model").keys()
    for name, total in together.items():
        expected = stored.full("owed", name).sum(0)
        assert expected.abs().sum() > 0 and equivalence.difference(total, expected) < bounds.FP64, name


def step_4_on_rank(options: dict):
    """Runs on every rank: step 4."""
    with equivalence.without_instruments():
        step04.train(step04.Config(**options))


# --- from the command line -------------------------------------------------------------------------------------------


def train_job(*flags: str, start: Callable[..., Job] = forked_torchrun) -> Job:
    """Step 2 under torchrun on two local processes."""
    own = ["--standalone", "--nproc_per_node=2", "step02_ddp.py", "--model", "debug", "--device", "cpu"]
    return start(*own, *flags)


def own_lines(text: str) -> list[str]:
    """The complaints of the ranks, not of the launcher."""
    return [line for line in text.splitlines() if line.startswith("error:")]


def test_a_batch_that_does_not_divide_is_refused(pools):
    """Every rank refuses alike, naming the flag and a legal value."""
    with pytest.raises(RankError, match=r"--global-batch-size 20 cannot be dealt to 3 ranks .* use a multiple of 15"):
        pools(3).run(run_history, SMALL | dict(micro_batch_size=5, global_batch_size=20))


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(compress="int8", sync="naive"), "--compress int8 works on buckets"),
        (dict(sync="torch", dtype="bf16"), "--sync torch adds gradients up in 16 bits"),
        (dict(bucket_mb=-1.0), "--bucket-mb must be positive"),
        (dict(compress="bf16", dtype="fp16"), "fp16"),
    ],
)
def test_flags_that_exclude_one_another(flags, message):
    """Refused before anything starts."""
    with pytest.raises(UserError, match=message):
        check_dp(step02.Config(**SMALL | flags), 1)


def test_a_rank_without_zero_is_said_to_hold_what_one_device_holds():
    """Data parallelism alone cuts nothing: what a full GPU is said to hold does not depend on the ranks."""
    config = step02.Config(model="smollm-135m", micro_batch_size=2, global_batch_size=8)
    assert relief.device_bytes(config, 4) == relief.device_bytes(config, 1)


@pytest.mark.parametrize(
    "world, elastic, came, said", [(1, True, 1, 1), (2, False, 2, 1), (2, True, 1, 1), (2, True, 2, 0)]
)
def test_an_error_is_said_once_a_job(monkeypatch, capsys, world, elastic, came, said):
    """Of torchrun's ranks, the first that comes to its store speaks; one rank, or another launcher's, asks nobody."""
    store = mock.Mock(**{"return_value.add.return_value": came})
    monkeypatch.setattr(torch.distributed, "TCPStore", store)
    names = dict(WORLD_SIZE=str(world), MASTER_ADDR="here", MASTER_PORT="1")
    with mock.patch.dict(os.environ, names | dict(TORCHELASTIC_RUN_ID="job") if elastic else names):
        report("error: full")
    assert capsys.readouterr().err == "error: full\n" * said and store.called == (world == 2 and elastic)


@pytest.mark.exhaustive
def test_one_line_for_bad_flags_under_torchrun():
    """Two ranks, one message, non-zero exit."""
    process = train_job("--global-batch-size", "31")
    printed, _ = process.communicate()
    assert process.wait(60) != 0
    assert own_lines(printed) == [
        "error: --global-batch-size 31 is not a multiple of --micro-batch-size 4: change one of them"
    ]


def test_ranks_with_different_flags_are_named(pools):
    """The first collective compares all flags."""
    with pytest.raises(RankError, match=r"rank 1 was started with --lr 0.5, rank 0 with 0.05"):
        pools(2).run(different_flags)


def different_flags() -> None:
    """Runs on every rank: rank 1 has another learning rate."""
    lr = 0.5 if torch.distributed.get_rank() == 1 else 0.05
    step02.train(step02.Config(**SMALL | dict(lr=lr)))


@pytest.mark.picked(0)
@pytest.mark.parametrize("start", [forked_torchrun, torchrun])
def test_a_rank_that_dies_ends_the_job(tmp_path, start):
    """One rank is killed in the middle: the others end, long before their --timeout, with one readable message."""
    flags = ["--steps", "100000", "--eval-every", "0", "--out", str(tmp_path / "run")]
    process = train_job(*flags, start=start)
    wait_for(lambda: steps_done(tmp_path / "run") > 0, process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    killed = time.monotonic()
    lines = own_lines(process.communicate()[0])
    assert process.wait(240) != 0 and time.monotonic() - killed < 240  # --timeout is 600
    assert len(lines) <= 1 and "another rank died" in "".join(lines)


def test_sigterm_saves_on_all_ranks_and_resumes(pools, tmp_path):
    """A pre-empted two-rank job saves, exits cleanly, and goes on to the numbers of an uninterrupted one."""
    flags = ["--dtype", "fp64", "--global-batch-size", "8", "--eval-every", "0"]
    cut, options = tmp_path / "cut", dict(dtype="fp64", global_batch_size=8, eval_every=0, steps=10**6)
    options |= dict(model="debug", device="cpu", save_every=0)
    process = train_job(*flags, "--steps", str(10**6), "--out", str(cut))
    wait_for(lambda: steps_done(cut) > 1, process)
    process.send_signal(signal.SIGTERM)
    process.wait(240)
    options["stop_after"] = steps_done(cut) + 2
    assert options["stop_after"] >= 4
    whole = pools(2).run(run_history, options | dict(out=str(tmp_path / "whole")))[0]
    pools(2).run(run_history, options | dict(resume=str(cut), out=str(cut)))
    assert [row["loss"] for row in read_metrics(cut)] == [row["loss"] for row in whole]
