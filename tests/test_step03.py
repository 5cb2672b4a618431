"""ZeRO: every stage equal to one device, exact bytes and traffic, checkpoints that change stage, faults noticed."""

import contextlib
import io
import itertools
import mmap
import os
import re
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

import step01_single_gpu as step01
import step03_zero as step03
from common import UserError, trainer
from services import offload, zero_toy
from services.checks import check_zero
from services.devices import choose_device
from services.launch import open_mesh
from services.predictions import Costs
from services.run import Run
from services.state import full_gradients, full_state, held
from services.tables import bytes_of
from tests import equivalence, faults
from tests.equivalence import SMALL, Recording, check, compare, record
from tests.pool import RankError
from tests.test_step02 import micro_batch_size

STEP = "step03_zero"
STAGES = [0, 1, 2, 3]
EVEN = dict(vocab_size=264)  # all units of SMALL can then be cut in 2, 4 and 8
ODD = dict(dim=10, n_heads=1, n_kv_heads=1, ffn_dim=7, tied=True)  # no unit can be cut in 3, and on 8 ranks some own
# nothing of the last unit, whose norm has 10 elements
OFFLOADS = {
    "device": dict(),
    "cpu": dict(offload_optimizer="cpu"),
    "disk": dict(offload_optimizer="disk"),
    "params": dict(offload_params="cpu"),
    "cpu-params": dict(offload_optimizer="cpu", offload_params="cpu"),
    "disk-params": dict(offload_optimizer="disk", offload_params="cpu"),
}
OFFLOADED = [
    (stage, name)
    for stage, name in itertools.product(STAGES, OFFLOADS)
    if name == "device" or (stage and (stage == 3 or "params" not in name))
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """What runs in this process shares the cores with the pools: threads that wait for one another only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def named(options: dict) -> str:
    """A test's name from its flags."""
    return "-".join(f"{key}={value}" for key, value in options.items()) or "plain"


# --- equal to one device ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dp", [2, 3, 4])
def test_equals_one_device(pools, dp, stage):
    """Three micro-batches, with plain SGD, which shows the gradient's scale; on three ranks every unit is padded."""
    check(pools(dp), STEP, dict(optimizer="sgd") | micro_batch_size(dp, 3), dict(zero=stage))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_equals_one_device_on_eight_ranks(pools, stage):
    """AdamW on eight ranks and a model that is padded there; some ranks own nothing of the last unit."""
    base = dict(optimizer="adamw", n_layers=1, micro_batch_size=1, global_batch_size=24) | ODD
    check(pools(8), STEP, base, dict(zero=stage))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_one_device_for_every_number_of_micro_batches(pools, stage, count):
    """One micro-batch, and four."""
    check(pools(2), STEP, dict(optimizer="sgd") | micro_batch_size(2, count), dict(zero=stage))


@pytest.mark.picked(3, 9, 12)
@pytest.mark.parametrize(
    "base",
    [
        dict(optimizer="adamw"),
        dict(optimizer="sgd", tied=True, grad_clip=0.0),
        dict(optimizer="adamw", recompute="full", tied=True),
        dict(optimizer="sgd", recompute="selective", n_kv_heads=4),
        dict(optimizer="adamw") | ODD,
    ],
    ids=named,
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_one_device_for_every_kind_of_model(pools, stage, base):
    """AdamW, tied weights, recomputation, with and without grouped queries and clipping, sizes that do not divide."""
    check(pools(3), STEP, base | micro_batch_size(3, 2), dict(zero=stage))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dp, stage", [(2, 0), (2, 1), (2, 2), (2, 3), (8, 2)])
def test_equals_one_device_with_frozen_parameters(pools, dp, stage):
    """A frozen matrix and a frozen norm stay; on eight ranks one rank owns nothing else of its unit."""
    base = dict(optimizer="adamw", n_layers=2, micro_batch_size=1, global_batch_size=2 * dp)
    check(pools(dp), STEP, base, dict(zero=stage), "frozen")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_one_device_with_a_frozen_layer(pools, stage):
    """A unit without gradient stays, while the others are clipped."""
    check(pools(2), STEP, dict(optimizer="adamw") | micro_batch_size(2, 2), dict(zero=stage), "frozen_layer")


@pytest.mark.picked(0, 2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_one_device_with_one_update_of_all_units(pools, stage):
    """As on a GPU, where a kernel for all units starts once."""
    base = dict(optimizer="adamw", tied=stage == 2) | micro_batch_size(3, 2)
    check(pools(3), STEP, base, dict(zero=stage), fault="units_updated_together")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", STAGES)
def test_equals_one_device_with_uneven_targets(pools, uneven_data, stage):
    """Ranks and micro-batches with different numbers of target tokens, some with none."""
    base = dict(optimizer="sgd", dataset=uneven_data, micro_batch_size=1, global_batch_size=12)
    check(pools(4), STEP, base, dict(zero=stage))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage, offload", [pair for pair in OFFLOADED if pair[1] != "device"])
def test_equals_one_device_when_offloaded(pools, stage, offload):
    """Masters, moments and slices on the host or on the disk."""
    check(pools(2), STEP, dict(optimizer="adamw") | micro_batch_size(2, 3), dict(zero=stage) | OFFLOADS[offload])


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("stage, offload", OFFLOADED)
@pytest.mark.parametrize("dp", [2, 3, 4, 8])
def test_equals_one_device_under_every_layout(pools, dp, stage, offload, count, optimizer):
    """The whole product."""
    check(
        pools(dp), STEP, dict(optimizer=optimizer) | micro_batch_size(dp, count), dict(zero=stage) | OFFLOADS[offload]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_one_device_when_compiled(pools, stage, recompute):
    """torch.compile of each layer: hooks are outside, and the graph reads a parameter's memory as it is found."""
    base = dict(optimizer="adamw", n_layers=2, recompute=recompute) | micro_batch_size(2, 2)
    check(pools(2), STEP, base, dict(zero=stage, compile=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_process_equals_step01(tmp_path, stage):
    """A group of one: the same code, no communication."""
    ours, theirs = (
        record(step, step.Config(**SMALL | dict(micro_batch_size=6, out=str(tmp_path / step.__name__)), **flags))
        for step, flags in ((step03, dict(zero=stage)), (step01, {}))
    )
    compare(ours, theirs, 1e-10)


class PartlyUsedLayer(torch.nn.Module):
    """Parameters: one always used, one now and then and, if there is a third, one never."""

    def __init__(self, names: str):
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))

    def forward(self, x: torch.Tensor, with_b: bool) -> torch.Tensor:
        """A scalar."""
        return (self.a.sum() + (self.b.sum() if with_b else 0)) * x


class PartlyUsed(torch.nn.Module):
    """Such a layer where a decoder has its layers; what is before and behind it has no parameters."""

    def __init__(self, names: str):
        super().__init__()
        self.model, self.lm_head = torch.nn.Module(), torch.nn.Module()
        self.model.embed_tokens, self.model.norm = torch.nn.Identity(), torch.nn.Identity()
        self.model.layers = torch.nn.ModuleDict({"0": PartlyUsedLayer(names)})

    def forward(self, x: torch.Tensor, with_b: bool) -> torch.Tensor:
        """A scalar."""
        return self.model.norm(self.model.layers["0"](self.model.embed_tokens(x), with_b))


def partly_used_on_rank(stage: int, names: str, pattern: list[bool]) -> dict[str, list[float]]:
    """Runs on every rank: the step's gradients, when micro-batch i uses `b` if pattern[i]; x is the rank plus one."""
    config = step03.Config(zero=stage, optimizer="sgd", dtype="fp64")
    with open_mesh({"dp": torch.distributed.get_world_size()}, torch.device("cpu"), "gloo") as mesh:
        model = PartlyUsed(names)
        optimizer = step03.ZeroOptimizer(model, config, mesh, torch.float64, offload.Homes())
        assert len(optimizer.units) == 1
        optimizer.begin()
        for i, with_b in enumerate(pattern):
            if i + 1 == len(pattern):
                optimizer.last_micro_batch()
            model(torch.tensor(mesh.rank + 1.0, dtype=torch.float64), with_b).backward()
        optimizer.finish()
        return {name[-1]: gradient.tolist() for name, gradient in full_gradients(optimizer, mesh).items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pattern", [[True, True], [False, True, False], [True, False], [False, False]], ids=str)
@pytest.mark.parametrize("names", ["ab", "abc"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_a_micro_batch_does_not_use(pools, stage, names, pattern):
    """A unit that one micro-batch does not complete keeps what it has until the next; unused, a gradient is zero.

    And if there is but one unit, a micro-batch adds to it while the one before is still being summed.
    """
    expected = dict(a=[3.0 * len(pattern)] * 3, b=[3.0 * sum(pattern)] * 3, c=[0.0] * 3)
    for found in pools(2).run(partly_used_on_rank, stage, names, pattern):
        assert found == {name: expected[name] for name in names}


# --- helpers that run on every rank ----------------------------------------------------------------------------------


def weights_of(optimizer) -> dict[str, torch.Tensor]:
    """Every full parameter by name. A collective."""
    return full_state(optimizer, equivalence.job())["model"]


def train_and_predict(config: step03.Config, observe=None) -> tuple[step03.Trained, Costs]:
    """Train; returns also what the program predicts for its tables."""
    costs, predict = [], trainer.predict

    def noted(*args) -> Costs:
        costs.append(predict(*args))
        return costs[0]

    with mock.patch.object(trainer, "predict", noted), equivalence.without_instruments():
        trained = step03.train(config, observe)
    (found,) = costs
    return trained, found


def history_on_rank(options: dict) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Runs on every rank: train; returns the metrics, and the parameters as they are in the model or, cut, gathered."""
    with equivalence.without_instruments():
        trained = step03.train(step03.Config(**options))
    held = {name: p.detach().clone() for name, p in trained.model.named_parameters() if p.untyped_storage().nbytes()}
    gathered = weights_of(trained.optimizer)
    for name, value in held.items():
        assert torch.equal(gathered[name], value), f"the model's {name} is not what the optimizer says"
    return trained.history, gathered


def losses(history: list[dict]) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    return [(row["loss"], row["grad_norm"]) for row in history]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- the stages among themselves -------------------------------------------------------------------------------------


@pytest.mark.numerics
@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("count", [1, 3])
def test_stages_agree_bit_for_bit(pools, tmp_path, optimizer, count):
    """In fp32 on two ranks all stages compute the same bits, without clipping (a norm is a sum in another order).

    With one micro-batch a gradient is a + b in every stage. With more, stages 0 and 1 add up on each rank first,
    (a1 + a2 + a3) + (b1 + b2 + b3), and 2 and 3 over the ranks first, (a1 + b1) + (a2 + b2) + (a3 + b3): the two pairs
    then differ by rounding.
    """
    options = SMALL | dict(optimizer=optimizer, dtype="fp32", grad_clip=0.0, lr=0.01) | micro_batch_size(2, count)
    runs = [pools(2).run(history_on_rank, options | dict(zero=s, out=str(tmp_path / f"{s}")))[0] for s in STAGES]
    weights = [parameters for _, parameters in runs]
    by_loss = [[loss for loss, _ in losses(history)] for history, _ in runs]
    assert same(weights[0], weights[1]) and by_loss[0] == by_loss[1]
    assert same(weights[2], weights[3]) and by_loss[2] == by_loss[3]
    assert same(weights[1], weights[2]) == (count == 1)
    for name in weights[1]:
        assert torch.allclose(weights[1][name], weights[2][name], rtol=0, atol=1e-4)


@pytest.mark.numerics
@pytest.mark.picked(0)
@pytest.mark.parametrize(
    "dtype, grad_dtype, bound", [("bf16", "fp32", 1e-3), ("bf16", "same", 3e-2), ("fp16", "fp32", 1e-3)]
)
def test_sixteen_bits_drift_by_rounding_only(pools, tmp_path, dtype, grad_dtype, bound):
    """In 16 bits the losses of stages 1 to 3 stay near those of stage 0: masters and sums are as wide there."""
    options = SMALL | dict(dtype=dtype, grad_dtype=grad_dtype, lr=0.01, steps=8) | micro_batch_size(2, 2)
    runs = [pools(2).run(history_on_rank, options | dict(zero=s, out=str(tmp_path / f"{s}")))[0][0] for s in STAGES]
    expected = [row["loss"] for row in runs[0]]
    assert expected[-1] < expected[0] - 0.5
    for history in runs[1:]:
        assert [row["loss"] for row in history] == pytest.approx(expected, abs=bound)


def overflow_on_rank(options: dict) -> tuple[list[dict], float, list[bool]]:
    """Runs on every rank: train in fp16; in step 2 a single element on a single rank overflows.

    Returns the metrics, the loss scale at the end, and for each step whether the weights changed.
    """
    before, changed = {}, []

    def observe(step, optimizer):
        weights = weights_of(optimizer)
        changed.append(not same(weights, before) if step else True)
        before.update(weights)
        if step == 1 and torch.distributed.get_rank() == 1:
            optimizer.units[1].grad_slice[0] = torch.inf

    trained = step03.train(step03.Config(**options), observe)
    return trained.history, trained.optimizer.loss_scale, changed


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_ranks_skip_a_step_that_overflows(pools, tmp_path, stage):
    """One rank's infinity reaches every rank through the norm: nobody updates, everybody halves the scale."""
    options = SMALL | dict(dtype="fp16", zero=stage, out=str(tmp_path / "run")) | micro_batch_size(2, 1)
    for history, scale, changed in pools(2).run(overflow_on_rank, options):
        assert [row["grad_norm"] is None for row in history] == [False, True, False, False]
        assert scale == 2**15
        assert changed == [True, True, False, True]


@pytest.mark.picked(1)
@pytest.mark.parametrize("dp, stage", [(2, 1), (3, 2), (3, 3)])
def test_validation_changes_nothing(pools, tmp_path, dp, stage):
    """A validation every second step, of sequences that cannot be dealt evenly: no hang, and the same numbers.

    The validation loss is step01's, the training is as without it, and so is its traffic.
    """
    options = SMALL | dict(eval_sequences=10, eval_every=2) | micro_batch_size(dp, 3)
    alone = step01.train(step01.Config(**options, out=str(tmp_path / "step01"))).history
    options |= dict(zero=stage, out=str(tmp_path / "run"))
    with_it, without = (pools(dp).run(history_on_rank, options | dict(eval_every=every)) for every in (2, 0))
    for (history, weights), (plain, plain_weights) in zip(with_it, without, strict=True):
        assert losses(history) == losses(plain) and same(weights, plain_weights)
        assert [row["traffic"] for row in history] == [row["traffic"] for row in plain]
        validations = [
            [row["validation_loss"] for row in rows if "validation_loss" in row] for rows in (history, alone)
        ]
        assert len(validations[0]) == 2 and validations[0] == pytest.approx(validations[1], rel=1e-10)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def resumed(pools, folder: Path, base: dict, first: tuple[int, dict], second: tuple[int, dict]) -> tuple:
    """Train two steps with one (ranks, flags), then two with another, from the checkpoint; returns rank 0's answer."""
    out = str(folder / "first")
    pools(first[0]).run(history_on_rank, base | first[1] | dict(out=out, stop_after=2, save_every=2))
    return pools(second[0]).run(history_on_rank, base | second[1] | dict(out=str(folder / "second"), resume=out))[0]


@pytest.mark.picked(1, 4, 5)
@pytest.mark.parametrize(
    "stage, offload, dtype",
    [
        (0, "device", "fp32"),
        (1, "device", "bf16"),
        (2, "device", "fp32"),
        (3, "device", "bf16"),
        (3, "device", "fp32"),
        (3, "disk-params", "bf16"),
    ],
)
def test_resuming_changes_no_bit(pools, tmp_path, stage, offload, dtype):
    """Four steps are two, a checkpoint, and two more."""
    base = SMALL | dict(optimizer="adamw", dtype=dtype) | micro_batch_size(2, 2)
    flags = dict(zero=stage) | OFFLOADS[offload]
    whole, weights = pools(2).run(history_on_rank, base | flags | dict(out=str(tmp_path / "whole")))[0]
    history, weights_again = resumed(pools, tmp_path, base, (2, flags), (2, flags))
    assert losses(history) == losses(whole)[2:]
    assert same(weights, weights_again)


@pytest.mark.picked(3, 4)
@pytest.mark.parametrize(
    "first, second",
    [
        ((2, dict(zero=0)), (3, dict(zero=1))),
        ((3, dict(zero=1)), (2, dict(zero=2))),
        ((2, dict(zero=2)), (4, dict(zero=3))),
        ((3, dict(zero=3)), (2, dict(zero=0))),
        ((2, dict(zero=3, offload_optimizer="disk")), (3, dict(zero=1, offload_optimizer="cpu"))),
    ],
    ids=lambda ranks_and_flags: f"dp={ranks_and_flags[0]}-{named(ranks_and_flags[1])}",
)
def test_resuming_under_another_stage(pools, tmp_path, first, second):
    """A checkpoint of any stage and number of ranks goes on under any other, to one device's numbers."""
    base = SMALL | dict(optimizer="adamw", micro_batch_size=1, global_batch_size=24)
    expected = Recording(**torch.load(equivalence.reference(base)))
    history, weights = resumed(pools, tmp_path, base, first, second)
    assert [row["loss"] for row in history] == pytest.approx(expected.losses[2:], rel=1e-10)
    for name, parameter in expected.parameters.items():
        assert equivalence.difference(weights[name], parameter) < 1e-10, name


@pytest.mark.picked(1, 2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resuming_on_one_device_and_back(pools, tmp_path, stage):
    """step01 goes on from a checkpoint of every stage, and every stage from one of step01."""
    base = SMALL | dict(optimizer="adamw") | micro_batch_size(2, 2)
    expected = Recording(**torch.load(equivalence.reference(base)))
    cut, alone = str(tmp_path / "cut"), str(tmp_path / "alone")
    half = dict(stop_after=2, save_every=2)
    pools(2).run(history_on_rank, base | half | dict(zero=stage, out=cut))
    trained = step01.train(step01.Config(**base | dict(resume=cut, out=str(tmp_path / "cut-on"))))
    step01.train(step01.Config(**base | half | dict(out=alone)))
    _, weights = pools(2).run(history_on_rank, base | dict(zero=stage, resume=alone, out=str(tmp_path / "alone-on")))[0]
    for name, parameter in expected.parameters.items():
        assert equivalence.difference(trained.model.get_parameter(name), parameter) < 1e-10, name
        assert equivalence.difference(weights[name], parameter) < 1e-10, name


# --- laws: bytes -----------------------------------------------------------------------------------------------------


def bytes_on_rank(options: dict) -> dict:
    """Runs on every rank: train two steps; returns bytes by kind, measured when the second gradient is complete, and
    predicted; the number of parameters, and how many elements of padding there are in all and in this rank's slices.
    """
    measured = {}

    config = step03.Config(**options)

    def observe(_, optimizer):
        now = held(optimizer, on_disk=config.offload_optimizer == "disk")
        measured.update({kind: bytes_of(tensors) for kind, tensors in now.items()})

    (model, optimizer, _), costs = train_and_predict(config, observe)
    if config.zero:
        used = [sum(len(unit.cut(unit.slice, name)) for name in unit.named) for unit in optimizer.units]
        own_padding = sum(unit.length - n for unit, n in zip(optimizer.units, used, strict=True))
        padded = sum(unit.length * unit.group.size for unit in optimizer.units)
    else:
        own_padding, padded = 0, sum(p.numel() for p in model.parameters())
    predicted = {kind: n_bytes for kind, n_bytes in costs.memory.items() if kind != "activations"}
    n_params = sum(p.numel() for p in model.parameters())
    return dict(measured=measured, predicted=predicted, P=n_params, padding=padded - n_params, own_padding=own_padding)


def documented_bytes(grad_dtype: str, stage: int, n: int) -> float:
    """Bytes per parameter in 16-bit training as step03's docstring has them: the formulas in its table, evaluated."""
    (row,) = re.findall(rf"--grad-dtype {grad_dtype} \(.*?\) +(.*)", step03.__doc__)
    return eval(row.split()[stage], dict(n=n))


@pytest.mark.picked(3, 6, 9, 15)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "dp, shape, grad_dtype",
    [(2, EVEN, "fp32"), (2, EVEN, "same"), (3, EVEN, "fp32"), (4, ODD, "same")],
    ids=["2-fp32", "2-same", "3-fp32-padded", "4-same-padded"],
)
def test_bytes_are_what_theory_says(pools, tmp_path, dp, shape, stage, grad_dtype):
    """On every rank the live storages hold what the program predicts, and that is the docstring's sum per parameter.

    Padding is the only difference: none where units divide. (A moment has none: the update works on pieces.)
    """
    options = SMALL | shape | micro_batch_size(dp, 2)
    options |= dict(dtype="bf16", grad_dtype=grad_dtype, zero=stage, steps=2, out=str(tmp_path / "run"))
    for found in pools(dp).run(bytes_on_rank, options):
        measured, predicted = found["measured"], found["predicted"]
        predicted["moments"] -= 2 * 4 * found["own_padding"]
        assert measured == predicted
        padding = found["padding"]
        assert (padding > 0) == (shape is ODD or dp == 3) or stage == 0
        per_parameter = documented_bytes(grad_dtype, stage, dp)
        allowed = per_parameter * padding + 2 * 4 * found["own_padding"] + 1e-6
        assert abs(sum(measured.values()) - per_parameter * found["P"]) <= allowed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_wide_parameters_need_no_masters(pools, tmp_path, stage, dtype):
    """In fp32 and fp64 the update works on the parameters' own slice."""
    options = SMALL | EVEN | dict(dtype=dtype, zero=stage, steps=2, out=str(tmp_path / "run")) | micro_batch_size(2, 2)
    for found in pools(2).run(bytes_on_rank, options):
        assert found["measured"] == found["predicted"]
        assert found["measured"]["masters"] == 0 < found["measured"]["moments"]


def test_host_copies_are_pinned_to_the_byte_until_the_run_ends(monkeypatch):
    """Pages of their own, registered with as many bytes as the tensor has, and given back once."""
    pinned = {}
    runtime = mock.MagicMock()
    runtime.cudaHostRegister = lambda address, n_bytes, flags: pinned.update({address: n_bytes}) or 0
    runtime.cudaHostUnregister = pinned.pop
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    given = [torch.randn(3, 5), torch.randn(1000).bfloat16(), torch.randn(2**12 + 1)]
    with contextlib.ExitStack() as stack:
        homes = offload.homes(
            step03.Config(zero=3, offload_params="cpu", offload_optimizer="cpu"), stack, torch.device("cuda")
        )
        for home in homes[:2]:
            copies = [home(tensor) for tensor in given]
            assert all(torch.equal(*both) and both[0] is not both[1] for both in zip(copies, given, strict=True))
            assert [pinned[copy.data_ptr()] for copy in copies] == [60, 2000, 4 * (2**12 + 1)]
            assert all(copy.data_ptr() % mmap.PAGESIZE == 0 for copy in copies)
    assert not pinned


@pytest.mark.parametrize("given, local_ranks, threads", [("1", 4, [4]), ("1", 32, [1]), (None, 1, [16]), ("3", 4, [])])
def test_the_host_beside_a_gpu_uses_its_cores(monkeypatch, given, local_ranks, threads):
    """Torchrun's one thread a rank would make drawing and the host's update slow. A number of the user's stays."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert choose_device("auto").type == "cuda" and found == threads


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage, offload", [pair for pair in OFFLOADED if pair[1] != "device"])
def test_offloaded_bytes_are_what_theory_says(pools, tmp_path, stage, offload):
    """Files count for nothing; what is on the host counts as before."""
    options = SMALL | EVEN | dict(dtype="bf16", zero=stage, steps=2, out=str(tmp_path / "run")) | micro_batch_size(2, 2)
    for found in pools(2).run(bytes_on_rank, options | OFFLOADS[offload]):
        assert found["measured"] == found["predicted"]
        if "disk" in offload:
            assert found["measured"]["masters"] == found["measured"]["moments"] == 0


def gathered_on_rank(options: dict, fault: str = "") -> tuple[int, int, int]:
    """Runs on every rank: bytes of gathered parameters, the most at any time of the second step and when it is over,
    and the law: the units of two neighbouring modules.
    """
    most, after, allowed = 0, 0, 0

    def observe(step, optimizer):
        nonlocal after, allowed
        provide = optimizer.provide

        def now() -> int:
            return sum(unit.flat.untyped_storage().nbytes() for unit in optimizer.units)

        def watched(i, then):
            nonlocal most
            provide(i, then)
            most = max(most, now())

        if step == 0:
            optimizer.provide = watched
            uses = [{*units} for units in optimizer.uses]
            allowed = max(sum(unit.nbytes for unit in a | b) for a, b in itertools.pairwise(uses))
        else:
            after = now()

    with faults.applied(fault), equivalence.without_instruments():
        step03.train(step03.Config(**options), observe)
    return most, after, allowed


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True])
def test_stage_3_holds_two_units(pools, tmp_path, tied, recompute):
    """In forward and backward the module at work and the one that is prefetched are there, and nothing afterwards."""
    options = SMALL | dict(zero=3, steps=2, tied=tied, recompute=recompute) | micro_batch_size(2, 3)
    for most, after, allowed in pools(2).run(gathered_on_rank, options | dict(out=str(tmp_path / "run"))):
        assert most == allowed and after == 0


def test_units_that_are_kept_are_noticed(pools, tmp_path):
    """The law above fails if units are not freed, which no other number shows."""
    options = SMALL | dict(zero=3, steps=2, out=str(tmp_path / "run")) | micro_batch_size(2, 1)
    for most, _, allowed in pools(2).run(gathered_on_rank, options, "never_freed"):
        assert most > allowed


def table_on_rank(options: dict) -> list[list[str]]:
    """Runs on every rank: train a step; the cells of the last memory table that the run prints."""
    said, say = [], Run.say
    with mock.patch.object(Run, "say", lambda self, text: (said.append(text), say(self, text))):
        step03.train(step03.Config(**options))
    (table,) = [text for text in said if text.startswith("memory")][-1:]
    return [re.split("  +", line) for line in table.splitlines()]


@pytest.mark.parametrize("offload", ["device", "cpu", "disk", "params", "disk-params"])
def test_the_memory_table_parts_host_from_device(pools, tmp_path, offload):
    """What is offloaded to the host stands below the device's sum, with a sum of its own; each sum is of its rows."""
    options = SMALL | EVEN | dict(dtype="bf16", zero=3, steps=1, out=str(tmp_path / "run")) | micro_batch_size(2, 1)
    rows = pools(2).run(table_on_rank, options | OFFLOADS[offload])[0][2:]
    states = ["masters", "moments"]
    host = {"cpu": states, "params": ["parameters", *states], "disk-params": ["parameters"]}.get(offload, [])
    kinds = ["parameters", "gradients", *states, "activations"]
    expected = [f"{kind}, device" for kind in [*(k for k in kinds if k not in host), "sum"]]
    expected += [f"{kind}, host" for kind in [*host, "sum"]]
    assert [row[0] for row in rows] == (expected if host else [*kinds, "sum"])
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    total, checked = [0.0, 0.0], 0
    for name, *cells in rows:
        numbers = [float(cell.split()[0]) * units[cell.split()[1]] for cell in cells]
        if name.startswith("sum"):
            assert numbers == pytest.approx(total, abs=30)  # two decimals of a KiB in each row
            total, checked = [0.0, 0.0], checked + 1
        else:
            total = [a + b for a, b in zip(total, numbers, strict=True)]
    assert checked == 1 + bool(host)


def test_space_on_a_disk_is_reserved_without_posix_fallocate(tmp_path, monkeypatch):
    """On macOS: by writing; a full disk shows then, not when the map is written to."""
    tensor = torch.arange(3 * 2**18 + 5, dtype=torch.float32)
    monkeypatch.delattr(os, "posix_fallocate")
    assert torch.equal(offload.to_file(tmp_path, tensor), tensor)
    with open(tmp_path / "file", "wb") as file:
        offload.reserve(file, tensor.nbytes)
        assert os.fstat(file.fileno()).st_size == tensor.nbytes <= os.fstat(file.fileno()).st_blocks * 512
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            offload.to_file(tmp_path, tensor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# --- laws: traffic ---------------------------------------------------------------------------------------------------


def traffic_on_rank(options: dict) -> tuple[list[dict], dict, dict[str, int]]:
    """Runs on every rank: each step's traffic, the predicted one, and the sizes of this rank's parameters."""
    trained, costs = train_and_predict(step03.Config(**options))
    sizes = {name: p.numel() for name, p in trained.model.named_parameters()}
    assert {dim for dim, _ in costs.traffic} == {"dp"}
    return [row["traffic"]["dp"] for row in trained.history], {op: n for (_, op), n in costs.traffic.items()}, sizes


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "dp, dtype, count, tied",
    [(2, "fp32", 1, False), (2, "fp32", 3, False), (2, "bf16", 3, True), (4, "bf16", 1, False)],
)
@pytest.mark.parametrize("stage", STAGES)
def test_traffic_is_what_theory_says(pools, tmp_path, stage, dp, dtype, count, tied):
    """The ledger's bytes are those that the program predicts, and these are the docstring's, (n-1)/n times

        2 P      2 P      (k+1) P      k P + k (P + P_layers, and the tied matrix once more)

    elements, of which gradients have 4 bytes and weights 2 in bf16.
    """
    options = SMALL | EVEN | dict(zero=stage, dtype=dtype, tied=tied, steps=2, out=str(tmp_path / "run"))
    for sent, predicted, sizes in pools(dp).run(traffic_on_rank, options | micro_batch_size(dp, count)):
        P, share, e, g = sum(sizes.values()), (dp - 1) / dp, 2 if dtype == "bf16" else 4, 4
        layers = sum(size for name, size in sizes.items() if "layers" in name)
        shared = tied * sizes["model.embed_tokens.weight"]
        law = {
            0: dict(all_reduce=2 * P * g),
            1: dict(reduce_scatter=P * g, all_gather=P * e),
            2: dict(reduce_scatter=count * P * g, all_gather=P * e),
            3: dict(reduce_scatter=count * P * g, all_gather=count * (P + layers + shared) * e),
        }[stage]
        assert predicted == {operation: share * n_bytes for operation, n_bytes in law.items()}
        for row in sent:
            assert {op: n_bytes for op, n_bytes in row.items() if "(" not in op} == predicted


# --- the toy ---------------------------------------------------------------------------------------------------------


def toy_on_rank() -> str:
    """Runs on every rank: what `--toy` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        step03.train(step03.Config(toy=True, device="cpu"))
    return printed.getvalue()


def test_the_toy_prints_what_the_docstring_says(pools):
    """Every line in the docstring is printed, and all stages and ranks come to [-1.5, -0.5, 0.5, 1.5]."""
    printed, nothing = pools(2).run(toy_on_rank)
    lines = printed.splitlines()
    documented = [line.strip() for line in zero_toy.__doc__.splitlines() if line.startswith("    stage ")]
    assert len(documented) == 4 and set(documented) < set(lines)
    assert [line.split(":")[0] for line in lines] == [f"stage {s}, rank {r}" for s in STAGES for r in (0, 1)]
    assert all(line.endswith(" all -1.5 -0.5 0.5 1.5") for line in lines) and nothing == ""


# --- offload to disk -------------------------------------------------------------------------------------------------


def files_on_rank(options: dict, crash: bool) -> tuple[list[str], int]:
    """Runs on every rank: every file that was in the run directory while running, and how many bytes of masters and
    moments lie in nameless ones (nothing else does).
    """
    out, seen, mapped = Path(options["out"]), set(), 0

    def observe(step, optimizer):
        nonlocal mapped
        seen.update(path.name for path in out.rglob("*"))
        lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        ends = [fields[0].split("-") for fields in lines if str(out) in fields[-1] and "(deleted)" in fields[-1]]
        spans = [range(int(start, 16), int(end, 16)) for start, end in ends]

        def in_a_file(tensor) -> bool:
            return any(tensor.data_ptr() in span and tensor.data_ptr() + tensor.nbytes - 1 in span for span in spans)

        now = held(optimizer, on_disk=False)
        mapped = sum(t.nbytes for kind in ("masters", "moments") for t in now[kind] if in_a_file(t))
        assert not any(in_a_file(t) for kind in ("parameters", "gradients") for t in now[kind])
        if crash and step == 1:
            raise ValueError("in the middle")

    try:
        step03.train(step03.Config(**options), observe)
    except ValueError:
        assert crash
    return sorted(seen), mapped


@pytest.mark.parametrize("crash", [False, True], ids=["to the end", "crash"])
def test_offload_files_have_no_name(pools, tmp_path, crash):
    """Nothing but a run's usual files is ever in the run directory, although masters and moments are mapped from it."""
    out = tmp_path / "run"
    options = SMALL | dict(zero=2, offload_optimizer="disk", out=str(out), dtype="bf16") | micro_batch_size(2, 2)
    usual = {"config.json", "metrics.jsonl", "metrics.partial"}
    for seen, mapped in pools(2).run(files_on_rank, options, crash):
        assert set(seen) <= usual
        assert mapped >= 3 * 4 * 39_840 / 2  # masters and two moments, half of the parameters
    assert {path.name for path in out.rglob("*")} <= usual


def full_disk_on_rank(options: dict, free_by_rank: list[int]) -> None:
    """Runs on every rank: train where the disk has so many free bytes."""
    free = free_by_rank[torch.distributed.get_rank()]
    with mock.patch.object(offload.shutil, "disk_usage", return_value=mock.Mock(free=free)):
        step03.train(step03.Config(**options))


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_disk_that_is_too_small_is_refused(pools, tmp_path, full_rank):
    """All ranks refuse before anything is written if one of them has too little, naming the bytes."""
    out = tmp_path / "run"
    options = SMALL | EVEN | dict(zero=1, offload_optimizer="disk", out=str(out), dtype="bf16") | micro_batch_size(2, 2)
    free = [10**9, 10**9]
    n_bytes = 3 * 4 * sum(p.numel() for p in one_device_model(options).parameters())
    free[full_rank] = n_bytes - 1
    with pytest.raises(RankError, match=f"rank 0 of 2 failed.*also .1(?s:.*)UserError.*disk needs {n_bytes} bytes"):
        pools(2).run(full_disk_on_rank, options, free)
    assert not out.exists()
    pools(2).run(full_disk_on_rank, options, [n_bytes, n_bytes])


def one_device_model(options: dict) -> step03.Decoder:
    """The plain model of some flags, on the meta device."""
    with torch.device("meta"):
        return step03.Decoder(
            step01.Config(**{k: v for k, v in options.items() if k in vars(step01.Config())}).model_config()
        )


# --- negative controls -----------------------------------------------------------------------------------------------


@pytest.mark.picked(1, 2, 4, 5, 6, 8, 11, 13)
@pytest.mark.parametrize(
    "fault, stage, optimizer",
    [
        ("moments_of_another_rank", 1, "adamw"),
        ("moments_of_another_rank", 3, "adamw"),
        ("memory_without_weights", 3, "sgd"),
        ("slices_not_accumulated", 2, "sgd"),
        ("slices_not_accumulated", 3, "adamw"),
        ("reduced_at_every_micro_batch", 1, "sgd"),
        ("norm_of_own_slice", 1, "adamw"),
        ("norm_of_own_slice", 3, "sgd"),
        ("piece_off_by_one", 1, "sgd"),
        ("piece_off_by_one", 3, "adamw"),
        ("no_reduce_scatter", 1, "adamw"),
        ("no_reduce_scatter", 2, "sgd"),
        ("no_reduce_scatter", 3, "sgd"),
        ("updates_not_gathered", 1, "sgd"),
        ("updates_not_gathered", 2, "adamw"),
    ],
)
def test_faults_are_noticed(pools, tmp_path, fault, stage, optimizer):
    """Each makes the comparison with one device fail on every rank."""
    base = SMALL | dict(optimizer=optimizer) | micro_batch_size(2, 3)
    layout = dict(zero=stage, out=str(tmp_path / "run"))
    args = equivalence.on_rank, STEP, base | layout, str(equivalence.reference(base)), 1e-10, [fault]
    for found in pools(2).run(equivalence.complaint_on_rank, *args):
        assert "differs by" in found


def test_a_unit_freed_before_its_last_use_is_noticed(pools):
    """PyTorch refuses to look into memory that is not there."""
    with pytest.raises(RankError, match="out of bounds for storage of size 0"):
        check(pools(2), STEP, micro_batch_size(2, 3), dict(zero=3), fault="freed_before_last_use")


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(zero=1, optimizer="adafactor"), "--optimizer adafactor .* use it with --zero 0"),
        (dict(zero=0, offload_optimizer="cpu"), "--offload-optimizer cpu .* use it with --zero 1, 2 or 3"),
        (dict(zero=0, offload_optimizer="disk"), "--offload-optimizer disk .* use it with --zero 1, 2 or 3"),
        (dict(zero=2, offload_params="cpu"), "--offload-params cpu .* use it with --zero 3"),
        (dict(zero=1, sync="torch", dtype="fp32"), "--zero 1 .* leave --sync and --compress"),
        (dict(zero=2, sync="naive"), "--zero 2 .* leave --sync and --compress"),
        (dict(zero=3, compress="int8", dtype="fp32"), "--zero 3 .* leave --sync and --compress"),
    ],
    ids=lambda value: named(value) if isinstance(value, dict) else "",
)
def test_flags_that_exclude_one_another(flags, message):
    """Refused before anything starts."""
    with pytest.raises(UserError, match=message):
        check_zero(step03.Config(**SMALL | flags), 2)
