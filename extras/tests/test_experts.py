"""Experts beyond the table: a layer against its definition, token by token; kernels; presets."""

from math import ceil
from types import SimpleNamespace

import pytest
import torch

import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError
from common.comm import Group, Mesh
from common.model import PRESETS, Decoder
from common.trainer import Run
from extras.services.seam import check, compose
from extras.tests.equal import config_of
from extras.variants import Parts
from extras.variants.step07 import routing
from extras.variants.step07.balance_bias import update
from extras.variants.step07.grouped_matmul import GroupedLinear, can_group, grouped_matmul, grouped_outer
from extras.variants.step07.routing import RoutedMoE

ALONE = dict.fromkeys(("sequence", "tp"), Group("sequence", 0, 1, None))


def by_definition(moe: RoutedMoE, config, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [batch, seq, dim] -> the output, and the losses that the layer adds, each step as the papers have it."""
    tokens, E, k = x.flatten(0, 1), config.experts, config.experts_per_token
    logits = tokens @ moe.router.weight.T
    p, rows, taken, asked = logits.softmax(-1), [], [0] * E, torch.zeros(E)
    capacity = ceil(config.capacity_factor * k * len(tokens) / E) if config.capacity_factor else len(tokens)
    mlp = lambda gate, up, down, t: down @ (torch.nn.functional.silu(gate @ t) * (up @ t))  # noqa: E731
    for t, token in enumerate(tokens):
        score = p[t].detach() + (0 if moe.bias is None else moe.bias)
        size = E // config.expert_groups
        if config.groups_per_token:
            best_of = lambda g: score[g * size : (g + 1) * size].topk(max(1, k // config.groups_per_token))[0].sum()  # noqa: B023, E731
            groups = sorted(range(config.expert_groups), key=best_of, reverse=True)[: config.groups_per_token]
        else:
            groups = range(config.expert_groups)
        chosen = sorted((e for e in range(E) if e // size in groups), key=lambda e: -score[e])[:k]
        out = torch.zeros_like(token)
        for e in chosen:
            asked[e] += 1
            taken[e] += 1
            if taken[e] <= capacity:
                gate = p[t, e] / p[t, chosen].sum() if k > 1 else p[t, e]
                weights = (linear.weight[e] for linear in moe.experts.children())
                out = out + gate * mlp(*weights, token)
        if moe.shared_experts is not None:
            out = out + mlp(*(linear.weight for linear in moe.shared_experts.children()), token)
        rows.append(out)
    balance = E * (asked / asked.sum() * p.mean(0)).sum() * (config.balance == "loss")
    z = logits.logsumexp(-1).square().mean()
    share = config.micro_batch_size / config.global_batch_size
    return torch.stack(rows).view_as(x), share * (config.aux_loss_coeff * balance + config.z_loss * z)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        dict(capacity_factor=0.7, z_loss=0.3),
        dict(expert_groups=4, groups_per_token=2, experts_per_token=3, shared_experts=2),
        dict(balance="bias", capacity_factor=1.0, experts_per_token=1),
        dict(balance="none", z_loss=0.5),
    ],
)
def test_a_layer_is_its_definition(flags):
    """Output and all gradients, of which the added losses are a part."""
    torch.manual_seed(0)
    config = config_of("step07_moe_ep", dict(experts=8, aux_loss_coeff=0.5) | flags)
    moe = RoutedMoE(32, 48, config, ALONE).double()
    for param in moe.parameters():
        torch.nn.init.normal_(param, std=0.3)
    if config.balance == "bias":
        moe.bias, moe.load = torch.randn(8), torch.zeros(8)
    x, dy = torch.randn(2, 2, 16, 32, dtype=torch.float64)
    x.requires_grad_()
    ours = moe(x)
    (theirs, loss), leaves = by_definition(moe, config, x), [x, *moe.parameters()]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    wanted = torch.autograd.grad((theirs * dy).sum() + loss, leaves)
    names, found = ["x", *dict(moe.named_parameters())], torch.autograd.grad(ours, leaves, dy)
    for name, a, b in zip(names, found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_a_bias_follows_the_load():
    """It goes up where an expert had less than its share, and the load starts anew."""
    moe = SimpleNamespace(bias=torch.zeros(3), load=torch.tensor([1.0, 2.0, 3.0]))
    update([moe], Mesh(data=1, tp=1), 0.5, lambda lr: None, 0.1)
    assert moe.bias.tolist() == [0.5, 0.0, -0.5] and not moe.load.any()


def test_grouped_is_expert_by_expert():
    """Outputs and gradients in fp32 and bf16; an expert without a row gets a gradient of zero."""
    torch.manual_seed(0)
    counts = [3, 0, 5]
    for dtype, bound in (torch.float32, 1e-5), (torch.bfloat16, 2e-2):
        rows, weight, dy = (torch.randn(*shape).to(dtype) for shape in ((8, 16), (3, 24, 16), (8, 24)))
        assert can_group(rows, weight.mT, dy) and not can_group(rows.double())
        rows.requires_grad_(), weight.requires_grad_()
        y = GroupedLinear.apply(rows, weight, counts)
        plain = step07.ExpertLinear.forward(SimpleNamespace(weight=weight), rows, counts)
        close = dict(rtol=bound, atol=bound * 10)
        torch.testing.assert_close(y, plain, **close)
        for a, b in zip(*(torch.autograd.grad(out, (rows, weight), dy) for out in (y, plain)), strict=True):
            torch.testing.assert_close(a, b, **close)
        torch.testing.assert_close(grouped_matmul(rows, weight.mT, counts), plain, **close)
        assert not grouped_outer(dy, rows.detach(), counts)[1].any()


SIZES = {"tiny-moe": 2_430_336, "mixtral-8x7b": 46_702_792_704, "deepseek-v3-like": 672e9}  # Mixtral's: as published


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_their_size(name):
    """All weights, as step 7 builds them."""
    config = compose(step07)(model=name)
    check(config, 1)
    parts = Parts(Run(config))
    routing.prepare(config, parts)
    with torch.device("meta"):
        model = Decoder(PRESETS[name])
    step07.shard_experts(model, Mesh(pp=1, dp=1, cp=1, tp=1), config)
    parts.give_back()
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(
        SIZES[name], rel=1e-3 * (SIZES[name] == 672e9)
    )


def test_presets_set_the_flags():
    """What the user gives stays; a step without experts refuses."""
    config = compose(step07)(model="deepseek-v3-like", experts_per_token=4)
    check(config, 1)
    assert (config.experts, config.experts_per_token, config.dense_layers, config.shared_experts) == (256, 4, 3, 1)
    with pytest.raises(UserError, match="step 7"):
        check(compose(step06)(model="tiny-moe"), 1)
