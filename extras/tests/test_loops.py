"""Scripts with a `train` of their own: lines that differ from the step's, and what they compute."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import step04_tp_sp as step04
import step06_pipeline as step06
from common import UserError
from common.comm import Group, Mesh
from common.data import Data
from common.flags import parse
from common.model import IGNORE, PRESETS, ModelConfig
from extras.loops import diloco, fp16, pipedream
from step01_single_gpu import Optimizer, learning_rate
from tests.equal import BASE, SHAPE, STEP1, Watch, close, decoder, equals_step1, together, train
from tests.tape import Tape

ranks = pytest.mark.ranks
cases = pytest.mark.parametrize
LOOPS = [(fp16, step06), (diloco, step04), (pipedream, step06)]
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


@cases("loop", [loop for loop, _ in LOOPS])
def test_launch_lines(loop):
    """The launch line names the module, and has flags that it accepts."""
    ((name, flags),) = re.findall(r"^Run it: .*? -m (\S+) (.*)$", loop.__doc__, re.MULTILINE)
    assert name == loop.__name__ and parse(loop.Config, flags.split())


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

    def spoil(model: nn.Module, gradients: dict[str, Tensor], group: Group):
        calls.append(group)
        if len(calls) == 2 and torch.distributed.get_rank() == 1:
            part = next(gradient for gradient in gradients.values() if gradient.numel())
            part.view(-1)[0] = torch.inf

    with mock.patch.object(fp16, "sum_tied", spoil), Watch(config) as run:
        fp16.train(config, run)
    (state, *_) = run.optimizer.torch_optimizer.state.values()
    return [row["loss_scale"] for row in run.history], int(state["step"])


@cases("layout", [dict(zero="2"), dict(pp=2)])
def test_all_ranks_skip_an_overflow(pools, layout):
    """If one rank's gradient overflows, all skip the update, and halve their factor."""
    found = pools(2).run(overflow_on_last_rank, layout)
    close(found, [([2.0**16, 2.0**16, 2.0**15], 2)] * 2, "factors and number of updates")


def test_fp16_stays_near(pools):
    """With fp16 weights, losses are near one process's in fp64."""
    (plain,) = pools(1).run(train, STEP1, {})
    for losses, *_ in pools(2).run(train, "extras.loops.fp16", dict(dtype="fp16", tp=2)):
        errors = [abs(a - b) for a, b in zip(losses, plain[0], strict=True)]
        assert 0 < max(errors) < 0.02, errors


# --- DiLoCo --------------------------------------------------------------------------------------

MEETING = dict(steps=6, micro_batch_size=2, lr=0.02, inner_steps=3, weight_decay=0.0, grad_clip=0.0)


def torch_step(rule: torch.optim.Optimizer, loss: Tensor) -> float:
    """One update; returns the loss."""
    loss.backward()
    rule.step()
    rule.zero_grad()
    return loss.item()


def outer_step(models: list[nn.Module], shared: nn.Parameter, outer: torch.optim.Optimizer):
    """Update the flat weights `shared` by the mean of the models' moves, and copy them to both."""
    moved = torch.stack([parameters_to_vector(model.parameters()) for model in models])
    shared.grad = (shared - moved.mean(0)).detach()
    outer.step()
    for model in models:
        vector_to_parameters(shared.detach().clone(), model.parameters())


def two_models() -> tuple[list[float], nn.Module]:
    """DiLoCo in one process: two models, each with half of every batch. Losses, and one of them."""
    config = diloco.Config(**BASE | MEETING)
    data = Data(config.dataset, ModelConfig(**SHAPE), config.global_batch_size, config.seed)
    models = [decoder(**SHAPE), decoder(**SHAPE)]
    inner = [torch.optim.AdamW(m.parameters(), betas=(0.9, 0.95), weight_decay=0) for m in models]
    shared = nn.Parameter(parameters_to_vector(models[0].parameters()).detach().clone())
    outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    losses = []
    for step in range(config.steps):
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum()
        losses.append(0.0)
        for model, rule, x, y in zip(models, inner, tokens.chunk(2), targets.chunk(2), strict=True):
            rule.param_groups[0]["lr"] = learning_rate(step, config)
            losses[-1] += torch_step(rule, model(x, y) / (n_targets / 2)) / 2
        if step % 3 == 2:
            outer_step(models, shared, outer)
    return losses, models[0]


def test_ranks_of_dp_are_models(pools):
    """Two ranks of dp, each of two ranks of tp, have the losses and weights of `two_models`."""
    losses, model = two_models()
    found = pools(4).run(train, "extras.loops.diloco", MEETING | dict(tp=2))
    for rank_losses, *_ in found:
        close(torch.tensor(rank_losses), torch.tensor(losses), "the losses")
    weights = together([piece for rank in found for piece in rank[3]])
    for name, param in model.named_parameters():
        close(weights[name], param, name)


GROWING = dict(growth_steps=3, zero="0")


@ranks(4)
def test_law_of_diloco():
    """An outer step sends 2 (n-1)/n S over dp; a rank holds 2 S more."""
    optimizer = Optimizer(decoder(), diloco.Config())
    outer = diloco.OuterStep(optimizer, diloco.Config(), Mesh(dp=4)["dp"])
    nbytes = sum(master.nbytes for master in optimizer.masters.values())
    held = sum(x.nbytes for x in [*outer.weights.values(), *outer.momenta.values()])
    with Tape() as tape:
        outer.take()
    close((held, tape.sent), (2 * nbytes, 2 * 3 * nbytes // 4), "bytes held, and bytes sent")


@cases("step, flags", [("extras.loops.diloco", MEETING), ("extras.loops.fp16", GROWING)])
def test_a_resumed_run_computes_the_same(pools, tmp_path, step, flags):
    """A run that resumes after 4 of 6 steps, between outer steps, computes the same bits."""
    flags = flags | dict(steps=6)
    whole = pools(2).run(train, step, flags | dict(out=f"{tmp_path}/whole", save_every=4))
    saved = f"{tmp_path}/whole/checkpoints/step-00000004"
    rest = pools(2).run(train, step, flags | dict(out=f"{tmp_path}/rest", resume=saved))
    for (losses, *_, weights), (rest_losses, *_, rest_weights) in zip(whole, rest, strict=True):
        close(rest_losses, losses[4:], "losses after the resumption")
        for (name, *_, values), (*_, rest_values) in zip(weights, rest_weights, strict=True):
            close(torch.tensor(rest_values), torch.tensor(values), name, bound=0.0)


def test_a_run_ends_after_an_outer_step():
    """Other numbers of steps are refused: between outer steps the ranks' weights differ."""
    with pytest.raises(UserError, match="--steps 25 must be a multiple of --inner-steps 10"):
        diloco.train(diloco.Config(steps=25), None)
