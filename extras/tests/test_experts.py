"""Tests of experts: the grouped matmul equals a loop over experts, and presets have their sizes and set flags."""

from types import SimpleNamespace

import pytest
import torch

import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError
from common.model import PRESETS
from extras.services.seam import check, compose
from extras.plan.shapes import shape_of, total_weights
from extras.variants.step07.grouped_matmul import can_group, multiply


def test_grouped_is_expert_by_expert():
    """The grouped matmul equals a loop over experts in outputs and gradients. An unused expert has gradient 0."""
    torch.manual_seed(0)
    rows, weight = torch.randn(8, 16, requires_grad=True), torch.randn(3, 24, 16, requires_grad=True)
    assert can_group(rows, weight.mT) and not can_group(rows.double())
    linear, calls = SimpleNamespace(weight=weight), (multiply, step07.ExpertLinear.forward)
    outputs = [call(linear, rows, [3, 0, 5]) for call in calls]
    ours, plain = ([y, *torch.autograd.grad(y.square().sum(), (rows, weight))] for y in outputs)
    torch.testing.assert_close(ours, plain)
    assert not ours[2][1].any()


SIZES = {"tiny-moe": 2_430_336, "mixtral-8x7b": 46_702_792_704, "deepseek-v3-like": 672e9}  # Mixtral's: as published


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_their_size(name):
    """A preset has as many weights as SIZES says, to 0.1 %."""
    config = compose(step07)(model=name)
    check(config, 1)
    assert total_weights(shape_of(PRESETS[name], config)) == pytest.approx(SIZES[name], rel=1e-3)


def test_presets_set_the_flags():
    """A preset sets the flags that the user has not given. Step 6 refuses a preset with experts."""
    config = compose(step07)(model="deepseek-v3-like", experts_per_token=4)
    check(config, 1)
    assert (config.experts, config.experts_per_token, config.dense_layers, config.shared_experts) == (256, 4, 3, 1)
    with pytest.raises(UserError, match="step 7"):
        check(compose(step06)(model="tiny-moe"), 1)
