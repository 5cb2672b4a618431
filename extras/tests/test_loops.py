"""Scripts with a `train` of their own: lines that differ from the step's, and what they compute."""

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import step02_ddp as step02
import step06_pipeline as step06
from common import UserError
from common.comm import Mesh
from common.model import PRESETS, ModelConfig
from extras.loops import diloco, fp16, pipedream
from step01_single_gpu import Optimizer
from tests.equal import (
    BASE,
    SHAPE,
    STEP1,
    Watch,
    close,
    close_together,
    decoder,
    draw,
    equals_step1,
    run_of,
    train,
)

ranks = pytest.mark.ranks
cases = pytest.mark.parametrize
LOOPS = [(fp16, step06), (diloco, step02), (pipedream, step06)]
SGD = dict(optimizer="sgd", lr=0.5, micro_batch_size=2)


# --- Lines ---------------------------------------------------------------------------------------


def statements(function: Callable) -> Iterator[tuple[str, bool]]:
    """The first line of each statement, and whether it is marked as new."""
    source = inspect.getsource(function)
    lines = source.splitlines()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    for node in sorted(nodes[2:], key=lambda node: node.lineno):  # without `def` and docstring
        yield ast.unparse(node).splitlines()[0], "# new" in lines[node.lineno - 1]


@cases("loop, step", LOOPS)
def test_unmarked_lines_are_the_steps(loop, step):
    """Without the lines marked `# new`, a loop has lines of its step's, in the same order."""
    remaining = (line for line, _ in statements(step.train))
    for line, new in statements(loop.train):
        assert new or line in remaining, f"not in the step, or in another order: {line}"


# --- fp16 ----------------------------------------------------------------------------------------

LAYOUTS = [(SGD, dict(pp=2, tp=2)), (dict(tied=True, micro_batch_size=2), dict(cp=2, zero="3"))]


@cases("base, layout", LAYOUTS)
def test_a_scaled_loss_has_the_same_gradients(pools, base, layout):
    """In fp64 a factor of 65536 changes nothing: one process's numbers, to 1e-10."""
    equals_step1(pools, 4, "extras.loops.fp16", base, **layout)


def test_factors_are_torchs():
    """The factors of 14 steps, of which four overflow, are those of torch.amp.GradScaler."""
    loss_scale = fp16.LossScale(2.0**16, growth_steps=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    param = nn.Parameter(torch.zeros(1))
    rule = torch.optim.SGD([param])
    for norm in [1.0, torch.inf, torch.inf, *[1.0] * 7, torch.nan, *[1.0] * 3]:
        close(loss_scale.factor, scaler.get_scale(), "the factor")
        scaler.scale(norm * param.sum()).backward()
        scaler.step(rule)
        scaler.update()
        rule.zero_grad()
        close(loss_scale.update(norm), norm == 1.0, "whether the step is good")


def overflow_on_last_rank(flags: dict[str, Any]) -> tuple[list[float], int]:
    """Runs on every rank: in step 2 of 3 the last rank's gradient becomes inf. Factors, updates."""
    PRESETS["test"] = ModelConfig(**SHAPE)
    config = fp16.Config(model="test", **BASE | flags)
    calls = []

    def spoil(model: nn.Module, gradients: dict[str, Tensor], mesh: Mesh):
        calls.append(mesh)
        if len(calls) == 2 and torch.distributed.get_rank() == 1:
            part = next(gradient for gradient in gradients.values() if gradient.numel())
            part.view(-1)[0] = torch.inf

    run = Watch(config)
    with mock.patch.object(fp16, "sum_partial_gradients", spoil):
        fp16.train(config, run)
    (state, *_) = run.optimizer.torch_optimizer.state.values()
    return [row["loss_scale"] for row in run.history], int(state["step"])


@cases("layout", [dict(zero="2"), dict(pp=2)])
def test_all_ranks_skip_an_overflow(pools, layout):
    """If one rank's gradient overflows, all skip the update, and halve their factor."""
    found = pools(2).run(overflow_on_last_rank, layout)
    close(found, [([2.0**16, 2.0**16, 2.0**15], 2)] * 2, "factors and number of updates")


def test_fp16_stays_near(pools):
    """With fp16 weights, all numbers are near one process's in fp64."""
    equals_step1(pools, 2, "extras.loops.fp16", SGD, 1e-2, dtype="fp16", tp=2)


# --- DiLoCo --------------------------------------------------------------------------------------

DILOCO = "extras.loops.diloco"


def test_after_one_step_the_mean_of_the_models_is_step_2s(pools):
    """H = 1, SGD and weights that are averaged: one process's losses and weights."""
    base = SGD | dict(grad_clip=0.0)
    (one,) = pools(1).run(train, STEP1, base)
    averaged = base | dict(inner_steps=1, outer_lr=1.0, outer_momentum=0.0)
    found = pools(4).run(train, DILOCO, averaged)
    for rank in found:
        close(torch.tensor(rank.losses), torch.tensor(one.losses), "the losses")
    close_together([rank.weights for rank in found], one.weights, "the weight", 4, 1e-10)


@ranks(4)
def test_outer_steps_are_torchs():
    """SGD with Nesterov momentum, whose gradient is the mean move. A rank holds 2 S for it."""
    optimizer = Optimizer(decoder(), diloco.Config())
    outer = diloco.OuterStep(optimizer, diloco.Config(), Mesh(dp=4)["dp"])
    nbytes = sum(master.nbytes for master in optimizer.masters.values())
    held = sum(x.nbytes for x in [*outer.weights.values(), *outer.momenta.values()])
    close(held, 2 * nbytes, "bytes held")
    master = optimizer.masters["lm_head.weight"]
    expected = nn.Parameter(master.clone())
    rule = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    for turn in range(3):
        moves = [draw(f"{turn}", rank, *master.shape) for rank in range(4)]
        master += moves[outer.dp.rank]
        expected.grad = -sum(moves) / 4
        outer.take()
        rule.step()
        close(master, expected, f"the weights after outer step {turn + 1}", 4)


@ranks(4)
def test_law_of_diloco():
    """An outer step sends 2 (n-1)/n S over dp, once in H steps; each step sends its loss."""
    run = run_of(DILOCO, dict(steps=4, inner_steps=2))
    loss = 2 * 3 * 8 // 4
    outer = sum(2 * 3 * master.nbytes // 4 for master in run.optimizer.masters.values())
    sent = [row["sent"]["dp"] for row in run.history]
    close(sent, [loss, loss + outer, loss, loss + outer], "bytes of each step")


def test_a_run_ends_after_an_outer_step():
    """Other numbers of steps are refused: between outer steps the ranks' weights differ."""
    with pytest.raises(UserError, match="--steps 25 must be a multiple of --inner-steps 10"):
        diloco.train(diloco.Config(steps=25), None)
