"""Experts: the grouped matmul equals a loop over experts, and presets have the published sizes and set their flags."""

from types import SimpleNamespace

import pytest
import torch

import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError
from common.comm import Mesh
from common.model import PRESETS, Decoder
from common.trainer import Run
from extras.services.seam import check, compose
from extras.variants import Parts
from extras.variants.step07 import routing
from extras.variants.step07.grouped_matmul import can_group, multiply


def test_grouped_is_expert_by_expert():
    """Outputs and gradients are equal in fp32 and bf16; an expert without a row gets a gradient of zero."""
    torch.manual_seed(0)
    counts = [3, 0, 5]
    for dtype, bound in (torch.float32, 1e-5), (torch.bfloat16, 2e-2):
        rows, weight, dy = (torch.randn(*shape).to(dtype) for shape in ((8, 16), (3, 24, 16), (8, 24)))
        assert can_group(rows, weight.mT, dy) and not can_group(rows.double())
        rows.requires_grad_(), weight.requires_grad_()
        linear = SimpleNamespace(weight=weight)
        outputs = [function(linear, rows, counts) for function in (multiply, step07.ExpertLinear.forward)]
        both = [(y, *torch.autograd.grad(y, (rows, weight), dy)) for y in outputs]
        for ours, plain in zip(*both, strict=True):
            torch.testing.assert_close(ours, plain, rtol=bound, atol=bound * 10)
        assert not both[0][2][1].any()


SIZES = {"tiny-moe": 2_430_336, "mixtral-8x7b": 46_702_792_704, "deepseek-v3-like": 672e9}  # Mixtral's: as published


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_their_size(name):
    """Count all weights of the model that step 7 builds."""
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
    """A preset sets the flags that the user has not given; a step without experts refuses it."""
    config = compose(step07)(model="deepseek-v3-like", experts_per_token=4)
    check(config, 1)
    assert (config.experts, config.experts_per_token, config.dense_layers, config.shared_experts) == (256, 4, 3, 1)
    with pytest.raises(UserError, match="step 7"):
        check(compose(step06)(model="tiny-moe"), 1)
