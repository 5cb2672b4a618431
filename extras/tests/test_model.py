"""What all layouts share, and so cannot show one another: shapes, initial values, the schedule of the learning rate."""

import hashlib
from collections import Counter
from unittest import mock

import pytest
import torch

import step01_single_gpu as step01
from common import UserError, layout
from common.model import PRESETS, Attention, Decoder
from extras.tests import equal

PUBLISHED = {
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_their_published_size(preset):
    """Parameters, as Hugging Face counts them."""
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[preset]


def test_learning_rate():
    """Linear warm-up to the peak, then a cosine to a tenth; without a warm-up, the peak at once."""
    config = step01.Config(lr=2.0, warmup_steps=4, steps=24)
    rates = [step01.learning_rate(step, config) for step in range(25)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[14] == pytest.approx(1.1) and rates[24] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert step01.learning_rate(0, step01.Config(lr=2.0, warmup_steps=0)) == 2.0


def test_norms_do_not_decay():
    """All else does."""
    matrices, norms = step01.decay_groups({"a.weight": 1, "b_layernorm.weight": 2, "norm.weight": 3}, step01.Config())
    assert matrices == dict(params=[1], weight_decay=0.1) and norms == dict(params=[2, 3], weight_decay=0.0)


@pytest.mark.parametrize("name, std", [("q_proj.weight", 0.02), ("o_proj.weight", 0.005), ("down_proj.weight", 0.005)])
def test_initial_spread(name, std):
    """0.02, and for what writes to the residual stream 0.02 / sqrt(2 L)."""
    assert layout.draw(name, [400, 400], 8, 0).std().item() == pytest.approx(std, rel=0.02)


def test_a_value_depends_on_seed_and_name_alone():
    """Through a hash, so that neighbours in name or seed have nothing in common."""
    seed = int.from_bytes(hashlib.sha256(b"3:w").digest()[:8], "little", signed=True)
    expected = torch.empty(4, 5).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(layout.draw("w", [4, 5], 1, seed=3), expected)
    assert not torch.equal(layout.draw("v", [4, 5], 1, seed=3), expected)


@pytest.mark.parametrize("step", ["step01_single_gpu", "step06_pipeline"])
def test_recomputation_does_the_forward_again(step):
    """Of every layer, in every micro-batch: the numbers do not show it."""
    calls, forward = Counter(), Attention.forward

    def counted(self, *args):
        calls["forward"] += 1
        return forward(self, *args)

    with mock.patch.object(Attention, "forward", counted):
        for recompute, times in (("none", 1), ("full", 2)):
            calls.clear()
            equal.record(step, dict(steps=1, global_batch_size=4, recompute=recompute))
            assert calls["forward"] == times * 4 * equal.SMALL["n_layers"]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_norm_that_is_not_finite_ends_the_run_before_the_update(value):
    """The loss is fine. The line names the step and the norm, and no weight has become nan."""

    class Broken(equal.Watch):
        """A number of the second step's gradient is not finite."""

        def steps(self, **parts):
            """Before the first step."""
            self.weights, gradients, asked = parts["optimizer"].masters, parts["optimizer"].gradients, []

            def broken():
                asked.append(found := gradients())
                if len(asked) == 4:  # in each step the norm asks, the Watch, and the clip
                    found["model.norm.weight"][0] = value
                return found

            parts["optimizer"].gradients = broken
            yield from super().steps(**parts)

        def gather(self, local):
            """Nothing: what is nan cannot be put together."""
            return {}

    config = equal.config_of("step01_single_gpu", dict(out="unused"))
    with Broken(config) as run, pytest.raises(UserError, match=rf"step 2: the grad norm is {value}: lower --lr"):
        step01.train(config, run)
    assert all(weight.isfinite().all() for weight in run.weights.values())
