"""PipeDream: its updates obey the paper's law."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from common import UserError
from common.data import Data
from common.flags import parse
from common.model import IGNORE, PRESETS, ModelConfig
from extras.loops import pipedream
from step06_pipeline import Stage
from tests.equal import BASE, SHAPE, Watch, close, decoder, together

cases = pytest.mark.parametrize


class Weights(Watch):
    """Keeps the last weights, but no gradients: none are left when a step has ended."""

    def require_finite(self, step: int, **numbers: float):
        """Keep nothing."""


FLAGS = BASE | dict(
    model="test", steps=1, micro_batch_size=2, optimizer="sgd", grad_clip=0, weight_decay=0
)


def trained(layout: dict) -> tuple:
    """A rank's loss, the most versions that it has stashed, and its weights."""
    PRESETS["test"] = ModelConfig(**SHAPE)
    config = pipedream.Config(**FLAGS | layout)
    versions = []
    forward = pipedream.StashingStage.forward

    def counted(stage: Stage, i: int, x: Tensor | None) -> Tensor:
        y = forward(stage, i, x)
        versions.append(len(stage.stash))
        return y

    run = Weights(config)
    with mock.patch.object(pipedream.StashingStage, "forward", counted):
        pipedream.train(config, run)
    return run.history[0]["loss"], max(versions), run.weights


def descended(ages: dict[str, int], size: int) -> tuple[float, dict[str, Tensor]]:
    """The law in one process: each parameter's gradient is taken at weights `age` updates old.

    `size`: sequences of an update. Returns the mean loss and the last weights.
    """
    data = Data("uneven", ModelConfig(**SHAPE), 12, 0)
    tokens, targets = (x.split(size) for x in data.batch(0))
    n_targets = sum((y != IGNORE).sum() for y in targets) / len(targets)
    model = decoder(**SHAPE)
    versions = [{name: param.detach() for name, param in model.named_parameters()}]
    losses = []
    for t, batch in enumerate(zip(tokens, targets, strict=True)):
        used = {name: versions[max(0, t - ages[name])][name] for name in versions[0]}
        used = {name: weight.clone().requires_grad_() for name, weight in used.items()}
        losses.append(functional_call(model, used, batch) / n_targets)
        losses[t].backward()
        lr = 0.05 / 2  # the first step of two of warm-up
        versions.append({name: w - lr * used[name].grad for name, w in versions[t].items()})
    return torch.stack(losses).mean().item(), versions[-1]


LAYOUTS = [  # ranks, layout, sequences of an update
    (3, dict(pp=3), 2),
    (4, dict(pp=2, cp=2, zero="2", recompute="full"), 2),
    (4, dict(pp=2, tp=2, sync="naive"), 2),
    (4, dict(pp=2, micro_batch_size=6), 12),  # dp is 2: the whole batch is one update
]


@cases("n, layout, size", LAYOUTS, ids=str)
def test_updates_are_a_descent_by_weights_of_several_ages(pools, n, layout, size):
    """Loss and weights are those of the law, and rank s stashes p - s versions."""
    ages, pieces = {}, []
    ranks = pools(n).run(trained, layout)
    for rank, (_, versions, own) in enumerate(ranks):
        age = (n - 1 - rank) * layout["pp"] // n  # p - 1 - s; the mesh's first dimension is pp
        ages |= {name: age for name, *_ in own}
        close(versions, min(age + 1, 12 // size), f"versions on rank {rank}")
        pieces += own
    loss, weights = descended(ages, size)
    close(ranks[0][0], loss, "the loss")
    for name, weight in together(pieces).items():
        close(weight, weights[name], name)


def test_mistakes_are_refused():
    """A tied matrix on two stages, and clipping."""
    for words, error in (
        ("--pp 2 --model smollm-135m", "--model"),
        ("--grad-clip 1", "--grad-clip"),
    ):
        config = parse(pipedream.Config, words.split())
        with pytest.raises(UserError, match=error):
            pipedream.check(config, PRESETS[config.model])
