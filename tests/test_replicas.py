"""Hybrid sharding (--zero-replicas): equal to one device, who is with whom, exact bytes and calls, faults noticed."""

import math
import re
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import step03_zero as step03
import step07_moe_ep as step07
from common import UserError
from services.checkpoint import find
from services.checks import check as check_flags
from services.launch import open_mesh
from services.run import Run
from tests import equivalence
from tests.equivalence import SMALL, Recording, check, label
from tests.pool import RankError
from tests.test_step02 import micro_batch_size
from tests.test_step03 import EVEN, bytes_on_rank, documented_bytes, history_on_rank, train_and_predict

STEP = {n: name for n, name in enumerate(("zero", "tp_sp", "cp_ring", "pipeline"), 3)}
STEP = {n: f"step0{n}_{name}" for n, name in STEP.items()}
STAGES = [1, 2, 3]

# --- equal to one device ---------------------------------------------------------------------------------------------

LAYOUTS = [  # (ranks, step, flags): dp 4 or 8 under each dimension
    (4, 3, dict()),
    (8, 3, dict()),
    (8, 4, dict(tp=2)),
    (8, 5, dict(tp=1, cp=2)),
    (8, 6, dict(tp=1, cp=1, pp=2)),
]
CASES = [
    pytest.param(ranks, step, flags | dict(zero=stage, zero_replicas=count), id=f"step{step}-{ranks}-{stage}-{count}")
    for ranks, step, flags in LAYOUTS
    for stage in STAGES
    for count in (2, 4)
]


@pytest.mark.picked(5, 14)
@pytest.mark.parametrize("ranks, step, flags", CASES)
def test_equals_one_device(pools, ranks, step, flags):
    """Two micro-batches, SGD, which shows the gradient's scale: dp 4 and 8, with tensors, sequences and layers cut."""
    base = dict(optimizer="sgd", n_layers=2, micro_batch_size=1, global_batch_size=16)
    check(pools(ranks), STEP[step], base, flags)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "dualpipe"])
@pytest.mark.parametrize("stage", STAGES)
def test_equals_one_device_in_other_schedules(pools, stage, schedule):
    """Weight gradients put off, units that several chunks have, and a matrix tied over the first and the last stage."""
    base = dict(optimizer="adamw", n_layers=4, tied=True, micro_batch_size=1, global_batch_size=8)
    flags = dict(pp=2, cp=1, tp=1, zero=stage, zero_replicas=2, schedule=schedule)
    check(pools(4), STEP[6], base, flags)


@pytest.mark.picked(0)
@pytest.mark.parametrize(
    "ranks, flags",
    [
        (4, dict(ep=2, zero=1)),
        (4, dict(ep=2, zero=3)),
        (4, dict(ep=1, cp=2, zero=2)),
        (8, dict(ep=2, zero=2, tp=2)),
        (8, dict(ep=4, zero=3, cp=2)),
        (8, dict(ep=2, zero=1, pp=2, dense_layers=1)),
    ],
    ids=lambda flags: label(flags) if isinstance(flags, dict) else f"{flags}",
)
def test_experts_equal_one_process(pools, ranks, flags):
    """Experts are cut over the ranks of a block that hold them; a stage may have no experts at all."""
    base = dict(n_layers=2, experts=8, experts_per_token=2, expert_dim=12, balance_weight=0.5, optimizer="sgd")
    base |= dict(global_batch_size=8, micro_batch_size=1, dense_layers=flags.get("dense_layers", 0))
    check(pools(ranks), "step07_moe_ep", base, dict(pp=1, tp=1, cp=1, zero_replicas=2) | flags, against=step07)


@pytest.mark.picked(4, 8)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "base, more",
    [
        (dict(tied=True, recompute="full"), dict()),
        (dict(), dict(offload_optimizer="cpu")),
        (dict(dim=10, n_heads=1, n_kv_heads=1, ffn_dim=7), dict(check_replicas=1)),
    ],
    ids=["tied", "offloaded", "odd"],
)
def test_equals_one_device_for_every_kind_of_model(pools, stage, base, more):
    """Tied weights, offloaded states, units that are padded; and all replicas hold the same bits after every step."""
    base = dict(optimizer="adamw", n_layers=2, micro_batch_size=2, global_batch_size=24) | base
    check(pools(4), STEP[3], base, dict(zero=stage, zero_replicas=2) | more)


# --- laws ------------------------------------------------------------------------------------------------------------


def ranks_with_me(sizes: dict[str, int], count: int) -> dict[str, list[int]]:
    """Runs on every rank: the ranks in its group along each dimension."""
    with open_mesh(sizes, torch.device("cpu"), "gloo") as mesh:
        mesh.add_blocks(count)
        here = {name: group.handle for name, group in mesh.groups.items()}
        alone = [dist.get_rank()]
        return {name: dist.get_process_group_ranks(handle) if handle else alone for name, handle in here.items()}


@pytest.mark.parametrize("sizes", [dict(dp=4, tp=2), dict(pp=2, dp=4), dict(dp=8)], ids=label)
def test_a_shard_is_of_neighbours_and_replicas_are_far(pools, sizes):
    """A group over which ZeRO cuts lies in one block of ranks, and a group of replicas has one rank in each."""
    tp, blocks = sizes.get("tp", 1), 8 // sizes.get("pp", 1) // 2
    for rank, found in enumerate(pools(8).run(ranks_with_me, sizes, 2)):
        assert len(found["shard"]) == sizes["dp"] // 2 and len(found["replicas"]) == 2
        assert {other // blocks for other in found["shard"]} == {rank // blocks}
        assert {b - a for a, b in pairwise(found["shard"])} <= {tp}
        assert {b - a for a, b in pairwise(found["replicas"])} == {blocks}
        assert found["dp"] == sorted({*found["dp"]} | {*found["shard"], *found["replicas"]})


def said_on_rank(options: dict) -> str:
    """Runs on every rank: train a step; all that the run says."""
    said = []
    with mock.patch.object(Run, "say", lambda _, text: said.append(text)):
        step03.train(step03.Config(**options))
    return "\n".join(said)


def test_the_run_says_who_is_with_whom(pools, tmp_path):
    """For rank 0, which alone prints."""
    options = SMALL | dict(zero=1, zero_replicas=2, steps=1, out=str(tmp_path / "run")) | micro_batch_size(4, 1)
    said = pools(4).run(said_on_rank, options)[0]
    assert "rank 0 cuts with its block, [0, 1], and sums its slices with its replicas, [0, 2]" in said


def traffic_on_rank(options: dict) -> tuple[list[dict], dict, int]:
    """Runs on every rank: each step's (bytes, calls) without the metrics' few, what theory says, and the model's P."""
    trained, costs = train_and_predict(step03.Config(**options))
    rows = [
        {
            (dim, op): (n_bytes, row["calls"][dim][op])
            for dim, by_op in row["traffic"].items()
            for op, n_bytes in by_op.items()
            if "(" not in op
        }
        for row in trained.history
    ]
    return rows, costs.traffic, sum(p.numel() for p in trained.model.parameters())


@pytest.mark.picked(0, 10)
@pytest.mark.parametrize("count, dtype", [(1, "fp32"), (3, "bf16")])
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_traffic_is_what_theory_says(pools, tmp_path, stage, replicas, count, dtype):
    """Within a block ZeRO's bytes over n/R ranks; across blocks 2 (R-1)/R of the slices, once, in all stages.

    So an element sends 2 (R-1)/R / (n/R) = 2 (R-1) / n elements between nodes, where ZeRO over all n sends, of its
    (n-1)/n, whatever the stage says.
    """
    n, units = 8, SMALL["n_layers"] + 2
    options = SMALL | EVEN | dict(zero=stage, zero_replicas=replicas, dtype=dtype, steps=2, out=str(tmp_path / "run"))
    for rows, predicted, P in pools(n).run(traffic_on_rank, options | micro_batch_size(n, count)):
        size, e, g = n // replicas, 2 if dtype == "bf16" else 4, 4
        across = {("replicas", "all_reduce"): (2 * (replicas - 1) / replicas * P / size * g, units)}
        reduced = 1 if stage == 1 else count
        for row in rows:
            assert {name: entry for name, entry in row.items() if name[0] == "replicas"} == across
            assert {name: sent for name, (sent, _) in row.items()} == {k: v for k, v in predicted.items() if v}
            sent, calls = row["shard", "reduce_scatter"]
            assert (sent, calls) == ((size - 1) / size * P * g * reduced, units * reduced)
            if stage < 3:
                assert row["shard", "all_gather"] == ((size - 1) / size * P * e, units)
            assert {dim for dim, _ in row} == {"shard", "replicas"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage, grad_dtype", [(1, "same"), (2, "fp32"), (3, "fp32")])
def test_bytes_are_what_theory_says(pools, tmp_path, stage, grad_dtype):
    """The docstring's bytes per parameter with n/R in the place of n."""
    options = SMALL | EVEN | dict(dtype="bf16", grad_dtype=grad_dtype, zero=stage, zero_replicas=2, steps=2)
    for found in pools(4).run(bytes_on_rank, options | dict(out=str(tmp_path / "run")) | micro_batch_size(4, 2)):
        assert found["measured"] == found["predicted"] and found["padding"] == 0
        per_parameter = documented_bytes(grad_dtype, stage, 2)
        assert sum(found["measured"].values()) == pytest.approx(per_parameter * found["P"], rel=1e-12)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "first, second",
    [
        ((4, dict(zero=1, zero_replicas=2)), (4, dict(zero=3, zero_replicas=4))),
        ((4, dict(zero=3, zero_replicas=2)), (3, dict(zero=2))),
        ((2, dict(zero=0)), (4, dict(zero=2, zero_replicas=2))),
        ((4, dict(zero=2, zero_replicas=4)), (4, dict(zero=1, zero_replicas=2))),
    ],
    ids=lambda run: f"dp={run[0]}-{label(run[1])}",
)
def test_resuming_with_other_replicas(pools, tmp_path, first, second):
    """A slice is written once, by one of its replicas, and read under any other number of them."""
    base = SMALL | dict(optimizer="adamw", micro_batch_size=1, global_batch_size=24)
    expected = Recording(**torch.load(equivalence.reference(base)))
    out = str(tmp_path / "first")
    pools(first[0]).run(history_on_rank, base | first[1] | dict(out=out, stop_after=2, save_every=2))
    kinds = find(out, tmp_path).meta["tensors"]
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        written = sum(math.prod(size) for about in kinds[kind].values() for *_, size in about["boxes"])
        assert written == sum(parameter.numel() for parameter in expected.parameters.values()), kind
    runs = pools(second[0]).run(history_on_rank, base | second[1] | dict(out=str(tmp_path / "second"), resume=out))
    history, weights = runs[0]
    assert [row["loss"] for row in history] == pytest.approx(expected.losses[2:], rel=1e-10)
    for name, parameter in expected.parameters.items():
        assert equivalence.difference(weights[name], parameter) < 1e-10, name


# --- negative controls -----------------------------------------------------------------------------------------------


@pytest.mark.picked(0, 2, 3, 4)
@pytest.mark.parametrize(
    "fault, stage, optimizer, what",
    [
        ("replicas_not_summed", 1, "adamw", "the gradient of"),
        ("replicas_not_summed", 3, "sgd", "the gradient of"),
        ("replicas_summed_twice", 2, "sgd", "the gradient of"),
        ("replicas_summed_before_all_has_landed", 2, "sgd", "the gradient of"),
        ("every_replica_in_the_norm", 1, "sgd", "the gradient norm"),
    ],
)
def test_faults_are_noticed(pools, tmp_path, fault, stage, optimizer, what):
    """Each makes the comparison with one device fail on every rank, at the first thing that it spoils."""
    base = SMALL | dict(optimizer=optimizer) | micro_batch_size(4, 3)
    layout = dict(zero=stage, zero_replicas=2, out=str(tmp_path / "run"))
    args = equivalence.on_rank, STEP[3], base | layout, str(equivalence.reference(base)), 1e-10, [fault]
    for found in pools(4).run(equivalence.complaint_on_rank, *args):
        assert re.search(f"step 1: {what}.* differs by", found)


def test_replicas_that_drift_apart_are_named(pools):
    """--check-replicas compares what the replicas hold, bit for bit, and says which tensor it is."""
    base = dict(optimizer="sgd") | micro_batch_size(4, 1)
    layout = dict(zero=2, zero_replicas=2, check_replicas=1)
    with pytest.raises(RankError, match=r"model of .* is not the same on ranks 0 and 2"):
        check(pools(4), STEP[3], base, layout, fault="replicas_not_summed")


@pytest.mark.parametrize(
    "step, world, flags, message",
    [
        (step03, 4, dict(zero_replicas=3), r"--zero-replicas 3 .* dp x cp = 4 ranks.* use one of \[1, 2, 4\]"),
        (step03, 4, dict(zero_replicas=0), r"--zero-replicas 0 .* use one of \[1, 2, 4\]"),
        (step03, 4, dict(zero=0, zero_replicas=2), "--zero-replicas 2 .* use it with --zero 1, 2 or 3"),
        (
            step07,
            8,
            dict(pp=1, tp=1, cp=2, ep=4, experts=4, zero_replicas=4),
            r"--zero-replicas 4 .* / ep = 8 / 4 = 2 ranks.* experts: use one of \[1, 2\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(step, world, flags, message):
    """One line that names the flag and what it could be."""
    with pytest.raises(UserError, match=message):
        check_flags(step.Config(**SMALL | dict(dtype="fp32") | flags), world)
