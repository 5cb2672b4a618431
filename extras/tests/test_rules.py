"""Compares rules (updates, loss scaling, routing, rounding) with implementations by others, which README.md lists.

rows.py compares a rule with itself in one process. Here a function for each rule raises AssertionError if our numbers
differ from those of other code. Other code may round to fp32 or bf16; `exact` prevents this, so that in fp64 even a
small error of a constant is noticed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from math import ceil
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import step01_single_gpu as step01
from common.comm import Group
from extras.tests import equal
from extras.tests.equal import BOUND, FP64, config_of, difference
from extras.tests.rows import BIAS, EXPERTS
from extras.variants.step01 import fp16
from extras.variants.step01.fp16 import LossScaling
from extras.variants.step02.compress import BLOCK, dequantise, quantise
from extras.variants.step07.routing import RoutedMoE
from step01_single_gpu import OPTIMIZERS

ALONE = Group("dp", 0, 1, None)


@contextmanager
def exact(**more: Callable) -> Iterator[None]:
    """Inside this context, float(), bfloat16() and type() only copy; torch.bfloat16 is fp64; `more`: other patches."""
    methods = dict(float=Tensor.clone, bfloat16=Tensor.clone, type=lambda x, _: x.clone()) | more
    with mock.patch.multiple(Tensor, **methods), mock.patch.object(torch, "bfloat16", torch.float64):
        yield


def same(ours: Any, theirs: Any, bound: float = FP64):
    """Raise AssertionError if `ours` and `theirs` differ by more than `bound` (relative)."""
    found = difference(ours, theirs)
    assert found <= bound, f"{found:.3g} (relative) from theirs"


# --- updates


def groups(masters: dict[str, Tensor], config: Any) -> list[dict]:
    """Parameter groups: weight decay applies to matrices, and not to tensors of one dimension."""
    params = [[tensor for tensor in masters.values() if (tensor.dim() == 1) == norms] for norms in (False, True)]
    return [dict(params=some, weight_decay=decay) for some, decay in zip(params, (config.weight_decay, 0), strict=True)]


def adamw(masters: dict[str, Tensor], config: Any) -> torch.optim.Optimizer:
    """AdamW with Llama's constants (Touvron et al. 2023, section 2.3)."""
    return torch.optim.AdamW(groups(masters, config), betas=(0.9, 0.95), eps=1e-8)


class TorchMuon:
    """Updates hidden matrices (each expert's separately) by torch.optim.Muon, and all other parameters by AdamW."""

    def __init__(self, masters: dict[str, Tensor], config: Any):
        others = ("embed_tokens", "lm_head", "norm", "router")
        hidden = {name: tensor for name, tensor in masters.items() if not name.split(".")[-2].endswith(others)}
        self.views = [(tensor, list(tensor.view(-1, *tensor.shape[-2:]))) for tensor in hidden.values()]
        matrices = [view for _, views in self.views for view in views]
        muon = torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        rest = adamw({name: tensor for name, tensor in masters.items() if name not in hidden}, config)
        self.rules, self.param_groups = (muon, rest), [*muon.param_groups, *rest.param_groups]

    def step(self):
        """Update by both rules."""
        for tensor, views in self.views:
            for view, grad in zip(views, tensor.grad.view(-1, *tensor.shape[-2:]), strict=True):
                view.grad = grad
        for rule in self.rules:
            rule.step()


THEIRS = dict(
    adafactor=lambda masters, config: torch.optim.Adafactor(groups(masters, config)),
    sgd=lambda masters, config: torch.optim.SGD(groups(masters, config)),
    muon=TorchMuon,
)


def updates(name: str, step: str = "step01_single_gpu", **flags: Any):
    """Train with our update rule and with that in THEIRS, and compare losses, gradients and weights."""
    flags = dict(steps=4, weight_decay=0.3) | flags
    ours = equal.record(step, flags | dict(optimizer=name))
    with mock.patch.dict(OPTIMIZERS, theirs=THEIRS[name]), exact():
        equal.compare(ours, equal.record(step, flags | dict(optimizer="theirs")), BOUND["fp64"])


BAD = {1: torch.inf, 2: -torch.inf, 8: torch.inf}  # step (from 0) -> a number that its gradient gets


@contextmanager
def overflows(bad: dict[int, float]) -> Iterator[list[float]]:
    """In this context, the steps in `bad` get a gradient that is not finite. The list collects each step's scale."""
    scales, plain = [], LossScaling.gradients

    def gradients(self, inner: Callable) -> dict[str, Tensor]:
        first, found = self.scaled, plain(self, inner)
        if first and (value := bad.get(len(scales))) is not None:
            next(iter(found.values())).view(-1)[0] = value
        scales.extend([self.scale] * first)
        return found

    with mock.patch.object(LossScaling, "gradients", gradients):
        yield scales


def overflow_on_rank(options: dict) -> list[float]:
    """Runs on every rank: the last rank gets an infinite gradient in its second step; returns each step's scale."""
    bad = {1: torch.inf} if dist.get_rank() == dist.get_world_size() - 1 else {}
    without = mock.patch.object(equal.Watch, "pieces", lambda *_: {})  # gradients with infinity cannot be compared
    with overflows(bad) as scales, without:
        equal.watch("step06_pipeline", options)
    return scales


@pytest.mark.parametrize("layout", [dict(zero=0), dict(zero=2), dict(pp=2, zero=0, grad_clip=0.0)])
def test_an_overflow_on_one_rank_skips_the_update_on_all(pools, layout):
    """If a gradient of one rank overflows, all ranks skip the update and halve the scale."""
    found = pools(2).run(overflow_on_rank, dict(optimizer="sgd", steps=3, dtype="fp16") | layout)
    assert found == [[2**16, 2**16, 2**15]] * 2


def scale():
    """Scales equal those of torch's GradScaler. Losses equal those of an fp64 run that skips the updates in BAD."""
    assert f"after {fp16.GROWTH} good steps" in fp16.__doc__
    options, update = dict(steps=14, grad_clip=0.0, lr=5e-3), step01.Optimizer.step  # 5e-2 amplifies rounding errors
    with overflows(BAD) as scales, mock.patch.object(fp16, "GROWTH", 3):
        ours = equal.record("step01_single_gpu", options | dict(dtype="fp16", patch="wide"))
    steps = count()
    with mock.patch.object(step01.Optimizer, "step", lambda self, lr: next(steps) in BAD or update(self, lr)):
        theirs = equal.record("step01_single_gpu", options)
    same(ours.losses, theirs.losses, BOUND["fp64"])
    for name, weight in theirs.parameters.items():
        same(ours.parameters[name], weight, BOUND["fp64"])

    param, scaler = nn.Parameter(torch.zeros(1)), torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    rule = torch.optim.SGD([param])
    for step, found in enumerate(scales):
        assert found == scaler.get_scale(), f"step {step + 1}: {found} and {scaler.get_scale()}"
        scaler.scale(BAD.get(step, 1.0) * param.sum()).backward()
        scaler.step(rule), scaler.update(), rule.zero_grad()
    assert len(scales) == 14


# --- routers


def layer(**flags: Any) -> RoutedMoE:
    """A layer of eight experts, with weights so large that the router prefers some experts."""
    torch.manual_seed(0)
    config = config_of("step07_moe_ep", dict(experts=8, aux_loss_coeff=0.5, micro_batch_size=2) | flags)
    moe = RoutedMoE(32, 48, config, dict.fromkeys(("sequence", "tp"), ALONE)).double()
    for param in moe.parameters():
        nn.init.normal_(param, std=0.3)
    return moe


def paired(moe: RoutedMoE, theirs: nn.Module) -> list[tuple[Callable, Tensor]]:
    """Copy our weights to theirs. Returns pairs (get, param): get(f) is f(our weights), arranged as `param`."""
    gate, up, down = moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj
    pairs = [
        (lambda of: of(moe.router.weight), theirs.gate.weight),
        (lambda of: torch.cat([of(gate.weight), of(up.weight)], 1), theirs.experts.gate_up_proj),
        (lambda of: of(down.weight), theirs.experts.down_proj),
    ]
    if getattr(moe, "shared_experts", None) is not None:
        for name, param in theirs.shared_experts.named_parameters():
            pairs.append((lambda of, name=name: of(moe.shared_experts.get_parameter(name)), param))
    for ours, param in pairs:
        param.data = ours(Tensor.detach).clone()
    return pairs


def block(moe: RoutedMoE, theirs: nn.Module, loss: Callable = lambda _: 0.0, **methods: Any):
    """Compare outputs and all gradients of both layers. `loss` maps router logits to the auxiliary loss of `theirs`."""
    theirs = theirs.double()
    pairs, (x, dy) = paired(moe, theirs), torch.randn(2, 2, 16, 32, dtype=torch.float64)
    x.requires_grad_()
    ours = moe(x)
    ours.backward(dy)
    mine, x.grad = x.grad, None
    with exact(**methods):
        right = theirs(x)
        ((right * dy).sum() + loss(theirs.gate(x)[0])).backward()
    same(ours, right)
    same(mine, x.grad)
    for found, param in pairs:
        same(found(lambda own: own.grad), param.grad)


def shape(**more: Any) -> dict[str, Any]:
    """Arguments for a configuration of `transformers` with the sizes of our small model, and `more` arguments."""
    return dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=1, vocab_size=9) | more


def mixtral():
    """Mixtral: each token visits two experts. Its auxiliary loss counts a token twice, so the test halves it."""
    from transformers.models.mixtral import modeling_mixtral as hf
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    def loss(logits: Tensor) -> Tensor:
        return (0.5 / 2 * hf.load_balancing_loss_func((logits,), 8, 2) + 0.3 * router_z_loss_func(logits[None])) / 6

    config = hf.MixtralConfig(**shape(num_local_experts=8, num_experts_per_tok=2))
    block(layer(experts_per_token=2, z_loss=0.3), hf.MixtralSparseMoeBlock(config), loss)


def deepseek_v3():
    """DeepSeek-V3 has groups of experts, biases, and shared experts. Here softmax replaces its sigmoid."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

    more = dict(n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=4, n_group=4, topk_group=2)
    more |= dict(moe_intermediate_size=48, routed_scaling_factor=1.0, norm_topk_prob=True, num_key_value_heads=4)
    theirs = hf.DeepseekV3MoE(hf.DeepseekV3Config(**shape(**more)))
    flags = dict(experts_per_token=4, expert_groups=4, groups_per_token=2, shared_experts=2, balance="bias")
    moe = layer(**flags)
    moe.bias, moe.load = 0.2 * torch.randn(8), torch.zeros(8)
    theirs.gate.e_score_correction_bias = moe.bias.double()
    block(moe, theirs, sigmoid=lambda logits: logits.softmax(-1))


def switch():
    """Switch Transformers: each expert takes the first tokens that choose it, up to its capacity."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

    config = SwitchTransformersConfig(hidden_size=32, num_experts=8, expert_capacity=ceil(0.7 * 24 / 8))
    router = SwitchTransformersTop1Router(config)
    router.eval().dtype, moe = torch.float64, layer(experts_per_token=1, capacity_factor=0.7)
    router.classifier.weight.data, x = moe.router.weight.data, torch.randn(1, 24, 32, dtype=torch.float64)
    found, scores, chosen = moe.route(x[0])
    experts, p, _ = router(x)
    assert 0 < (experts.sum(-1) == 0).sum() < 24
    same(torch.zeros_like(found).scatter(1, chosen, scores), (experts * p)[0])


def biases():
    """Wang et al. 2024: a step adds speed * sign(mean load - the expert's load) to the bias of each expert."""
    chosen, biases, choose = [], [], RoutedMoE.choose

    def seen(self, scores: Tensor) -> Tensor:
        biases.append(self.bias.numpy().copy())
        chosen.append(choose(self, scores))
        return chosen[-1]

    options = dict(steps=5, n_layers=1, micro_batch_size=4) | EXPERTS | BIAS
    with mock.patch.object(RoutedMoE, "choose", seen):
        equal.record("step07_moe_ep", options)
    b = np.zeros(4)
    for step in range(5):
        some = slice(3 * step, 3 * step + 3)  # three micro-batches
        assert all(np.allclose(b, found, atol=1e-6) for found in biases[some]), f"step {step + 1}"
        loads = sum(np.bincount(choice.flatten(), minlength=4) for choice in chosen[some])
        b += 0.1 * np.sign(loads.mean() - loads)
    assert b.any()


# --- roundings


def rounding():
    """int8 rounds to the nearest multiple of s / 127; s is the block's largest |x|. No inf or nan becomes finite."""
    send = lambda x: dequantise(quantise(x), x.shape[-1], x.dtype)  # noqa: E731
    torch.manual_seed(0)
    x = torch.randn(3, 2 * BLOCK + 44) * torch.logspace(-3, 3, 3)[:, None]
    x[1, BLOCK:] = 0
    largest = torch.cat([part.abs().amax(-1, keepdim=True).expand_as(part) for part in x.split(BLOCK, -1)], -1)
    off, half = (send(x) - x).abs(), largest / 127 / 2
    assert (off <= 1.001 * half).all() and (off > 0.98 * half).any() and not send(x)[1, BLOCK:].any()
    for bad in torch.inf, -torch.inf, torch.nan:
        y = x.clone()
        y[0, 3] = bad
        assert not send(y)[0, 3].isfinite() and torch.equal(send(y)[1:], send(x)[1:])


RULES: dict[str, Callable[[], None]] = {
    **{name: partial(updates, name) for name in ("adafactor", "sgd", "muon")},
    "muon, experts": partial(updates, "muon", "step07_moe_ep", steps=2, **EXPERTS),
    "loss scale": scale,
    "mixtral": mixtral,
    "deepseek-v3": deepseek_v3,
    "switch": switch,
    "biases": biases,
    "int8": rounding,
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_what_others_wrote(rule):
    """Our rule equals theirs, up to its bound. README.md says what each rule is compared with."""
    RULES[rule]()
