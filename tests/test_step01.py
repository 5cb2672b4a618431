"""The trainer on one device: its laws of memory and FLOPs, its arithmetic, its checkpoints, and what can go wrong."""

import dataclasses
import errno
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import step01_single_gpu as step01
from common import UserError
from common.comm import Mesh
from common.layout import materialize
from common.model import IGNORE, PRESETS, Decoder, ModelConfig
from common.moe import MOE_PRESETS
from common.trainer import Trainer
from services import checkpoint as checkpoints
from services import devices, flags, relief, saver, variants
from services import resume as resuming
from services.boxes import Piece
from services.checks import check_one
from services.ledger import Ledger
from services.plots import read_metrics
from services.readers import BYTE_VOCAB, open_tokens
from services.run import Run
from services.saver import Saver
from services.state import full_state, held
from services.tables import human
from step01_single_gpu import Config, Optimizer, wrap_layers
from tests import bounds
from tests.bench.recompute import MODES, counted_flops, random_loss, saved_bytes
from tests.equivalence import SMALL, compare, record
from tests.jobs import as_flags, launch, steps_done, wait_for
from tests.pool import with_figures
from theory.flops import flops_per_token
from theory.memory import activation_bytes, memory_rows

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small are faster with one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(out: Path, **changes) -> Config:
    """A run of a second: SMALL's model, in whole micro-batches of six."""
    return Config(**SMALL | dict(out=str(out), micro_batch_size=6) | changes)


def build(dtype: torch.dtype, recompute: str = "none", device: str = "cpu", **shape) -> Decoder:
    """A model with weights, outside of any run."""
    fields = {f.name for f in dataclasses.fields(ModelConfig)}
    shape = {key: value for key, value in (SMALL | shape).items() if key in fields}
    with torch.device("meta"):
        model = Decoder(ModelConfig(**shape))
    materialize(model, 0, torch.device(device), dtype)
    wrap_layers(model, Config(recompute=recompute))
    return model


def adamw(model: Decoder, **changes) -> Optimizer:
    """An optimizer for it."""
    return Optimizer(model, Config(**changes))


def take_step(optimizer: Optimizer, lr: float) -> float:
    """The end of a training step: clip, update, free the gradients; returns the norm before clipping."""
    norm = optimizer.grad_norm()
    optimizer.step(lr, norm)
    optimizer.zero_grad()
    return norm


def state_of(optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Everything it keeps, by kind and name."""
    return full_state(optimizer, Mesh({}, torch.device("cpu"), Ledger()))


# Recomputation, memory and FLOPs

SHAPES = {
    "mha": dict(dim=64, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=176, vocab_size=257, seq_len=128),
    "gqa": dict(dim=96, n_layers=8, n_heads=6, n_kv_heads=2, ffn_dim=256, vocab_size=257, seq_len=64),
    "large vocabulary": dict(dim=64, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=128, vocab_size=1000, seq_len=96),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_recomputation_does_not_change_a_bit(dtype):
    """All gradients are identical under the three modes."""
    gradients = {}
    for mode in MODES:
        model = build(DTYPES[dtype], mode)
        random_loss(model, 2).backward()
        gradients[mode] = {name: p.grad for name, p in model.named_parameters()}
    for mode in MODES[1:]:
        for name, gradient in gradients["none"].items():
            assert torch.equal(gradients[mode][name], gradient), (mode, name)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_predicted_activation_bytes(mode, shape, dtype, device):
    """The formula of the docstring is within 5% of what a forward pass leaves behind."""
    model = build(DTYPES[dtype], mode, device, **SHAPES[shape])
    predicted = activation_bytes(model.config, 3, DTYPES[dtype], mode, device == "cpu")
    assert predicted == pytest.approx(saved_bytes(model, 3), rel=0.05)


def test_full_recomputation_keeps_a_fifth_or_less():
    """Measured on a thin model of 24 layers (about 1/22); predicted for the presets at 4 x 2048 tokens in bf16.

    With few layers and a large vocabulary the head's share, which no mode changes, would hide it.
    """
    deep = dict(dim=32, n_layers=24, n_heads=2, n_kv_heads=2, ffn_dim=88, vocab_size=257, seq_len=64)
    none, selective, full = (saved_bytes(build(torch.float32, mode, **deep), 2) for mode in MODES)
    assert full <= none / 5 and full < selective < none
    for name in ("smollm-135m", "smollm-360m", "smollm-1.7b", "llama3.2-1b", "llama3-8b", "llama3-70b"):
        m = dataclasses.replace(PRESETS[name], seq_len=2048)
        assert activation_bytes(m, 4, torch.bfloat16, "full", False) <= (
            activation_bytes(m, 4, torch.bfloat16, "none", False) / 5
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_predicted_flops(mode, shape):
    """The formula for executed FLOPs is within 1% of PyTorch's counter."""
    model = build(torch.float32, mode, **SHAPES[shape])
    assert flops_per_token(model.config, mode)[1] == pytest.approx(counted_flops(model, 2), rel=0.01)


def test_what_recomputation_costs():
    """Selective at most 5% more FLOPs; full about a third more, less the skipped matmul and the head."""
    none, selective, full = (counted_flops(build(torch.float32, mode, **SHAPES["gqa"]), 2) for mode in MODES)
    assert selective <= 1.05 * none
    assert 1.2 * none < full < (1 + 1 / 3) * none


def test_flops_are_megatrons():
    """With f = 8h/3, k = h, whole layers done again and no flash attention: 96 B s l h^2 (1 + s/6h + V/16lh)."""
    m = ModelConfig(dim=768, n_layers=7, n_heads=12, n_kv_heads=12, ffn_dim=2048, vocab_size=1000, seq_len=512)
    flash = 2 * m.n_layers * m.seq_len * m.dim
    last_matmul = 2 * m.n_layers * m.ffn_dim * m.dim
    ours = flops_per_token(m, "full")[1] - flash + last_matmul
    s, h, layers = m.seq_len, m.dim, m.n_layers
    assert ours == pytest.approx(96 * layers * h**2 * (1 + s / (6 * h) + m.vocab_size / (16 * layers * h)), rel=1e-12)


# Arithmetic of a step


@pytest.mark.numerics
@pytest.mark.picked(0, 3)
@pytest.mark.parametrize("data", ["even", "uneven"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_micro_batches_do_not_matter(tmp_path, uneven_data, optimizer, data):
    """24 sequences in 1, 2, 4 or 8 micro-batches: losses, gradients, norms and parameters agree to 1e-10.

    SGD shows the gradient's scale, which Adam hides. The uneven data has micro-batches without any target.
    """
    options = dict(optimizer=optimizer, dataset=uneven_data if data == "uneven" else "")
    if data == "uneven":
        counts = [
            int((open_tokens(uneven_data, 16, 24, 0, 259).batch(step).targets[at : at + 3] != IGNORE).sum())
            for step in range(4)
            for at in range(0, 24, 3)
        ]
        assert 0 in counts and len(set(counts)) > 5
    whole = record(step01, small(tmp_path, micro_batch_size=24, **options))
    for k in (2, 4, 8):
        compare(record(step01, small(tmp_path, micro_batch_size=24 // k, **options)), whole, 1e-10)


@pytest.mark.numerics
def test_recomputation_trains_to_the_same_numbers(tmp_path):
    """A whole run with full or selective recomputation."""
    none = record(step01, small(tmp_path))
    for mode in MODES[1:]:
        compare(record(step01, small(tmp_path, recompute=mode)), none, bounds.RUN["fp64"])


@pytest.mark.picked(2)
@pytest.mark.parametrize("mode", MODES)
def test_compile_makes_one_graph_for_all_layers(tmp_path, monkeypatch, mode):
    """--compile is neither silently off nor given up after eight layers, whatever is recomputed; same losses."""
    torch._dynamo.reset()
    counters.clear()
    options = dict(recompute=mode, n_layers=10, steps=2)
    plain = step01.train(small(tmp_path, **options)).history
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # all but the code generation
    compiled = step01.train(small(tmp_path, compile=True, **options)).history
    assert counters["stats"]["unique_graphs"] == counters["frames"]["total"] == 1
    assert [row["loss"] for row in compiled] == pytest.approx([row["loss"] for row in plain], rel=bounds.RUN["fp64"])


@pytest.mark.numerics
@pytest.mark.picked(0)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_training_keeps_fp32_beside_it(tmp_path, dtype):
    """Weights are 16 bits, masters, gradients and moments fp32; the weights are the masters, rounded."""
    gradient_dtypes = set()

    def observe(step, optimizer):
        gradient_dtypes.update(p.grad.dtype for p in optimizer.params.values())

    model, optimizer, history = step01.train(small(tmp_path, dtype=dtype), observe)
    assert {p.dtype for p in model.parameters()} == {DTYPES[dtype]} and gradient_dtypes == {torch.float32}
    kept = held(optimizer, on_disk=False)
    assert {t.dtype for t in kept["masters"] + kept["moments"]} == {torch.float32}
    for name, param in model.named_parameters():
        assert torch.equal(param, optimizer.masters[name].to(param.dtype))
        assert not torch.equal(param.float(), optimizer.masters[name]) or param.dim() == 1
    assert history[-1]["loss"] < history[0]["loss"]


@pytest.mark.numerics
def test_gradients_add_up_in_fp32():
    """300 equal micro-batches give 300 times the gradient; a bf16 sum would stand still after 256."""
    model = build(torch.bfloat16, dim=16, n_layers=1, ffn_dim=16, seq_len=4)
    adamw(model)
    (once,) = torch.autograd.grad(random_loss(model, 1), [model.lm_head.weight])
    for _ in range(300):
        random_loss(model, 1).backward()
    torch.testing.assert_close(
        model.lm_head.weight.grad, 300 * once.float(), rtol=bounds.roundings(torch.float32, 300), atol=0
    )


@pytest.mark.numerics
def test_masters_take_updates_too_small_for_16_bits():
    """A step of 1e-6 leaves a bf16 weight as it was; a thousand of them must not be lost."""
    model = build(torch.bfloat16, dim=16, n_layers=1, ffn_dim=16, seq_len=4)
    optimizer = adamw(model, weight_decay=0.0)
    weight = model.model.layers["0"].self_attn.q_proj.weight
    before, master = weight.detach().clone(), optimizer.masters["model.layers.0.self_attn.q_proj.weight"].clone()
    for _ in range(1000):
        for param in optimizer.params.values():
            param.grad = torch.ones_like(param, dtype=torch.float32)
        take_step(optimizer, 1e-6)
    change = (optimizer.masters["model.layers.0.self_attn.q_proj.weight"] - master).mean().item()
    assert change == pytest.approx(-1e-3, rel=0.01)
    assert (weight.float() - before.float()).mean().item() == pytest.approx(-1e-3, rel=0.05)


def test_fp16_overflow_skips_and_halves(tmp_path, monkeypatch):
    """From a scale far too large the run halves its way down, changing nothing meanwhile, then learns."""
    real = Optimizer.__init__

    def overflowing(self, *args):
        real(self, *args)
        self.loss_scale = 2.0**24

    monkeypatch.setattr(Optimizer, "__init__", overflowing)
    weights = []

    def observe(step, optimizer):
        weights.append(next(iter(optimizer.masters.values())).clone())

    _, optimizer, history = step01.train(small(tmp_path, dtype="fp16", steps=12, lr=1e-3), observe)
    skipped = [row["grad_norm"] is None for row in history]
    first_good = skipped.index(False)
    assert 1 <= first_good < 16 and optimizer.loss_scale == 2.0 ** (24 - sum(skipped))
    assert optimizer.good_steps == skipped[::-1].index(True)
    assert all(torch.equal(weights[i], weights[0]) for i in range(first_good + 1))
    assert not torch.equal(weights[first_good + 1], weights[0])
    assert history[-1]["loss"] < history[0]["loss"]
    assert "Infinity" not in (tmp_path / "metrics.jsonl").read_text()  # which would not be JSON


@pytest.mark.numerics
def test_fp16_scale_doubles_after_1000_good_steps_and_is_taken_out():
    """The scale changes neither norm nor update: with SGD the masters move by the unscaled gradient."""
    moves = []
    for scale in (1.0, 2.0**6):
        model = build(torch.float16)
        optimizer = adamw(model, optimizer="sgd", weight_decay=0.0, grad_clip=0.0)
        optimizer.loss_scale, optimizer.good_steps = scale, 999
        master = optimizer.masters["model.layers.0.mlp.up_proj.weight"]
        before = master.clone()
        (random_loss(model, 2) * scale).backward()
        norm = take_step(optimizer, 1.0)
        assert optimizer.loss_scale == 2 * scale
        moves.append((norm, (master - before).norm().item()))
    assert moves[0] == pytest.approx(moves[1], rel=1e-2)


@pytest.mark.numerics
def test_fp16_follows_fp32(tmp_path):
    """Four steps in fp16 and in bf16 stay near fp32's loss (about 4 nats)."""
    losses = {d: [r["loss"] for r in step01.train(small(tmp_path, dtype=d)).history] for d in ("fp32", "bf16", "fp16")}
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=2 * bounds.DRIFT)
    assert losses["fp16"] == pytest.approx(losses["fp32"], abs=bounds.DRIFT)


def test_weight_decay_spares_norms():
    """With zero gradients, AdamW's step shrinks matrices by lr x decay and leaves norms alone."""
    model = build(torch.float64)
    optimizer = adamw(model, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    take_step(optimizer, 0.01)
    for name, param in model.named_parameters():
        factor = 1.0 if "norm" in name else 1 - 0.01 * 0.5
        torch.testing.assert_close(param.detach(), before[name] * factor, rtol=bounds.FP64, atol=0)


@pytest.mark.numerics
@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_clipping(clip):
    """The norm returned is that of the whole gradient; the update is scaled down to the limit, if there is one."""
    model = build(torch.float64)
    optimizer = adamw(model, optimizer="sgd", grad_clip=clip, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    random_loss(model, 2).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    assert take_step(optimizer, 0.1) == pytest.approx(norm, rel=bounds.FP64)
    factor = clip / norm if 0 < clip < norm else 1.0
    assert (factor < 1) == (clip == 0.01)
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            param.detach(), before[name] - 0.1 * factor * gradients[name], rtol=1e-10, atol=1e-14
        )


def test_learning_rate_schedule():
    """Linear warm-up to the peak, then a cosine to a tenth."""
    run = SimpleNamespace(config=Config(lr=2.0, warmup_steps=4, steps=24))
    rates = [Trainer.learning_rate(run, step) for step in range(25)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[14] == pytest.approx(1.1)  # half way: mean of 2 and 0.2
    assert rates[24] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert Trainer.learning_rate(SimpleNamespace(config=Config(lr=2.0, warmup_steps=0)), 0) == 2.0


@pytest.mark.picked(2, 4, 6, 11)
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("optimizer, lr", [("adamw", 0.01), ("sgd", 1.0), ("adafactor", 0.05), ("muon", 0.01)])
def test_every_optimizer_learns_and_is_accounted_for(tmp_path, monkeypatch, optimizer, lr, dtype):
    """The loss falls, and at the end every kind of memory measured equals the predicted one (activations: 5%)."""
    tables = []
    monkeypatch.setattr(Run, "finish", lambda self, predicted, _: tables.append((predicted, dict(self.measured))))
    history = step01.train(small(tmp_path, optimizer=optimizer, lr=lr, dtype=dtype, steps=8)).history
    assert history[-1]["loss"] < history[0]["loss"] - 0.1
    [(predicted, measured)] = tables
    assert measured.pop("activations") == pytest.approx(predicted.pop("activations"), rel=0.05)
    assert measured == predicted


def test_tied_weights_are_one_parameter(tmp_path):
    """Counted once in memory and norm, trained by both uses, and still one after a resume."""
    trained = step01.train(small(tmp_path, tied=True, save_every=4))
    assert trained.model.lm_head.weight is trained.model.model.embed_tokens.weight
    assert "lm_head.weight" not in trained.optimizer.params
    again = step01.train(small(tmp_path, tied=True, resume=str(tmp_path)))
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert torch.equal(again.model.lm_head.weight, trained.model.lm_head.weight)


@pytest.mark.numerics
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_an_update_rule_begins_with_all_of_its_state(optimizer):
    """It is there before the first step, all zero, and making it changed no weight; the first step is torch.optim's."""
    tensors = [torch.randn(5, 3, dtype=torch.float64).requires_grad_(), torch.randn(7, dtype=torch.float64)]
    tensors[1].requires_grad_()
    before = [t.detach().clone() for t in tensors]
    rule = step01.update_rule(tensors, Config(optimizer=optimizer, weight_decay=0.5), [True, False])
    assert all(torch.equal(t, old) and t.grad is None for t, old in zip(tensors, before, strict=True))
    begin = {i: {k: v.clone() for k, v in rule.state[t].items()} for i, t in enumerate(tensors)}
    assert all(not value.any() for entry in begin.values() for value in entry.values())
    options = dict(adamw=dict(betas=(0.9, 0.95)), sgd={}, adafactor={})[optimizer]
    kind = dict(adamw=torch.optim.AdamW, sgd=torch.optim.SGD, adafactor=torch.optim.Adafactor)[optimizer]
    plain = [old.clone().requires_grad_() for old in before]
    groups = [dict(params=plain[:1], weight_decay=0.5), dict(params=plain[1:], weight_decay=0.0)]
    expected = kind(groups, lr=0.1, **options)
    for group in rule.param_groups:
        group["lr"] = 0.1
    for step in range(3):
        for ours, theirs in zip(tensors, plain, strict=True):
            ours.grad = torch.full_like(ours, step + 1.0)
            theirs.grad = ours.grad.clone()
        rule.step()
        expected.step()
    for i, (ours, theirs) in enumerate(zip(tensors, plain, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=bounds.FP64, atol=0)
        assert begin[i].keys() == expected.state[theirs].keys()


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_frozen_parameter_stays(dtype):
    """No gradient, no update, no decay, no share in the norm."""
    model = build(DTYPES[dtype])
    still = model.model.layers["1"].mlp.up_proj.weight.requires_grad_(False)
    before = still.clone()
    optimizer = adamw(model)
    random_loss(model, 2).backward()
    norm = optimizer.grad_norm()
    exact = math.sqrt(sum(g.double().square().sum() for g in optimizer.gradients().values()))
    assert norm == pytest.approx(exact, rel=bounds.RUN["fp32"])
    assert take_step(optimizer, 0.01) == norm
    assert torch.equal(still, before) and len(optimizer.gradients()) == 0
    assert "model.layers.1.mlp.up_proj.weight" not in state_of(optimizer)["exp_avg"]


# Going on


def require_same(a: step01.Trained, b: step01.Trained):
    """Bit for bit: parameters, masters, moments, loss scale, and the records of all steps but their times."""
    for (name, ours), theirs in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(*(held(t.optimizer, on_disk=False)["masters"] for t in (a, b)), strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = state_of(a.optimizer), state_of(b.optimizer)
    assert ours.keys() == theirs.keys()
    for kind, tensors in ours.items():
        assert tensors.keys() == theirs[kind].keys()
        for name, value in tensors.items():
            assert torch.equal(value, theirs[kind][name]), (kind, name)
    assert a.optimizer.loss_scale == b.optimizer.loss_scale and a.optimizer.good_steps == b.optimizer.good_steps
    kept = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[row[k] for k in kept] for row in a.history] == [[row[k] for k in kept] for row in b.history]


@pytest.mark.picked(3, 5, 7)
@pytest.mark.parametrize(
    "options",
    [dict(dtype=dtype) for dtype in DTYPES]
    + [dict(optimizer=optimizer) for optimizer in ("sgd", "adafactor", "muon")]
    + [dict(tied=True, dtype="bf16"), dict(recompute="full")],
    ids=str,
)
def test_ten_steps_are_five_and_five(tmp_path, options):
    """A run that is stopped after 5 steps and resumed ends with the bits of one that was not."""
    options = dict(dtype="fp32", steps=10, save_every=100, eval_every=5, eval_sequences=6) | options
    whole = step01.train(small(tmp_path / "whole", **options))
    first = step01.train(small(tmp_path / "parts", **options, stop_after=5))
    assert [row["step"] for row in first.history] == [1, 2, 3, 4, 5]
    second = step01.train(small(tmp_path / "parts", **options, resume=str(tmp_path / "parts")))
    require_same(second, whole)
    assert [row["step"] for row in read_metrics(tmp_path / "parts")] == list(range(1, 11))
    validations = [[r["validation_loss"] for r in t.history if "validation_loss" in r] for t in (whole, second)]
    assert validations[0] == validations[1] and len(validations[0]) == 2


def test_fp16_skips_survive_a_resume(tmp_path, monkeypatch):
    """Stopped in the middle of a series of overflows, the scale and the untouched moments go on where they were."""
    real = Optimizer.__init__

    def overflowing(self, *args):
        real(self, *args)
        self.loss_scale = 2.0**24

    monkeypatch.setattr(Optimizer, "__init__", overflowing)
    options = dict(dtype="fp16", steps=10, save_every=2)
    whole = step01.train(small(tmp_path / "whole", **options))
    step01.train(small(tmp_path / "parts", **options, stop_after=2))
    assert whole.history[2]["grad_norm"] is None and whole.history[-1]["grad_norm"] is not None
    require_same(step01.train(small(tmp_path / "parts", **options, resume=str(tmp_path / "parts"))), whole)


def test_resume_from_an_older_checkpoint_rewinds_the_run(tmp_path):
    """Metrics are cut back to it, checkpoints of the abandoned steps go, and the end is the same."""
    whole = step01.train(small(tmp_path, steps=8, save_every=3))
    older = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in older] == ["step-00000006", "step-00000008"]
    options = dict(steps=8, save_every=1, resume=str(older[0]))
    stopped = step01.train(small(tmp_path, **options, stop_after=7))
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 8))
    assert checkpoints.newest(tmp_path).name == "step-00000007"
    require_same(step01.train(small(tmp_path, steps=8, resume=str(tmp_path))), whole)
    assert len(stopped.history) == 7


def test_resume_into_another_directory_leaves_the_first_alone(tmp_path):
    """`--resume A --out B` reads A only."""
    step01.train(small(tmp_path / "a", save_every=2, stop_after=2))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    step01.train(small(tmp_path / "b", save_every=2, resume=str(tmp_path / "a")))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == before
    assert [row["step"] for row in read_metrics(tmp_path / "b")] == [3, 4]


def test_a_finished_run_can_be_resumed(tmp_path):
    """Nothing is left to do, and nothing breaks, also with a memory profile of no step."""
    first = step01.train(small(tmp_path, save_every=4))
    again = step01.train(small(tmp_path, save_every=4, resume=str(tmp_path), profile_memory=2))
    require_same(again, first)


def test_a_record_cut_short_by_a_crash_is_dropped(tmp_path):
    """The last line of metrics.jsonl may be half a line if the machine died."""
    step01.train(small(tmp_path, save_every=2, stop_after=2))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    step01.train(small(tmp_path, resume=str(tmp_path)))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_an_earlier_run_is_moved_aside(tmp_path, capsys):
    """A fresh run into the same directory overwrites nothing."""
    for _ in range(3):
        step01.train(small(tmp_path / "run", steps=1, save_every=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    assert all((path / "checkpoints" / "step-00000001" / "meta.json").exists() for path in tmp_path.iterdir())
    assert f"the earlier run in {tmp_path}/run is now {tmp_path}/run.2" in capsys.readouterr().out


# Checkpoints


def save_value(folder: Path, step: int):
    """A checkpoint whose content is its step."""
    piece = Piece("model", "x", torch.full((1000,), float(step)), (1000,))
    Saver(folder).save(step, [piece], dict(config={}, loss_scale=1.0))


def saved_step(path: Path) -> int:
    """The step of a checkpoint, or of the newest in a run directory, by its name, its meta.json and its content."""
    found = checkpoints.find(str(path), path)
    assert found.full("model", "x").eq(found.meta["step"]).all()
    assert found.path.name == f"step-{found.meta['step']:08d}"
    return found.meta["step"]


def names(folder: Path) -> list[str]:
    """Everything in its checkpoints folder, hidden things included."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_last_two_checkpoints_are_kept(tmp_path):
    """Older ones go; after a return to an earlier step, the later ones too."""
    for step in (5, 10, 15, 20):
        save_value(tmp_path, step)
    assert names(tmp_path) == ["step-00000015", "step-00000020"]
    save_value(tmp_path, 17)
    assert names(tmp_path) == ["step-00000015", "step-00000017"]


class Crash(BaseException):
    """The machine dies here: nothing may catch it and tidy up."""


def dying(function, at: int, calls: list, effect=None):
    """`function`, whose turn to die comes when `calls` has `at` entries, having done half of its work."""

    def wrapper(*args, **kwargs):
        calls.append(function.__name__)
        if len(calls) == at:
            if effect is not None:
                effect(*args)
            raise Crash
        return function(*args, **kwargs)

    return wrapper


def half_a_file(path, *_):
    """A file with numbers got no further."""
    Path(path).write_bytes(b"half")


def half_a_folder(path, **_):
    """shutil.rmtree got no further."""
    next(iter(Path(path).iterdir())).unlink()


@pytest.mark.parametrize("before, step", [([1, 2], 3), ([1, 2], 2), ([8, 9], 3), ([], 1)], ids=str)
def test_a_crash_at_any_point_of_a_save_costs_nothing(tmp_path, monkeypatch, before, step):
    """Die at each system call of `save` in turn: what bears a final name is complete, and the next save works."""
    for at in itertools.count(1):
        folder, calls = tmp_path / str(at), []
        for earlier in before:
            save_value(folder, earlier)
        with monkeypatch.context() as patch:
            write_boxes = dying(saver.write_boxes, at, calls, half_a_file)
            patch.setattr(saver, "write_boxes", write_boxes)
            patch.setattr(shutil, "rmtree", dying(shutil.rmtree, at, calls, half_a_folder))
            patch.setattr(saver, "meta_checksum", dying(saver.meta_checksum, at, calls))
            patch.setattr(os, "fsync", dying(os.fsync, at, calls))
            for method in ("mkdir", "write_text", "rename"):
                patch.setattr(Path, method, dying(getattr(Path, method), at, calls))
            crashed = False
            try:
                save_value(folder, step)
            except Crash:
                crashed = True
        kept = sorted((folder / "checkpoints").glob("step-*"))
        for path in kept:
            saved_step(path)
        assert kept or not before
        save_value(folder, step + 1)
        assert names(folder)[-1] == f"step-{step + 1:08d}" and not any(n.startswith(".") for n in names(folder))
        if not crashed:
            break
    assert at > 8


@pytest.mark.parametrize(
    "failing", ["services.saver.write_boxes", "os.fsync", "pathlib.Path.rename", "pathlib.Path.write_text"]
)
def test_a_full_disk_at_save(tmp_path, monkeypatch, failing):
    """One line that names the flag, the reason and the checkpoint that is still there."""
    save_value(tmp_path, 1)

    def no_space(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(failing, no_space)
        with pytest.raises(
            UserError, match=r"saving step 2 failed \(No space left on device\).*step-00000001 is intact"
        ):
            save_value(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]
    assert saved_step(tmp_path) == 1
    save_value(tmp_path, 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that saved after its second and fourth step."""
    out = tmp_path_factory.mktemp("finished") / "run"
    step01.train(small(out, dtype="fp32", save_every=2))
    return out


def flip(path: Path, where: float):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "truncated": lambda at: os.truncate(at / "rank-00000.bin", 5000),
    "empty": lambda at: os.truncate(at / "rank-00000.bin", 0),
    "tensors missing": lambda at: (at / "rank-00000.bin").unlink(),
    "meta missing": lambda at: (at / "meta.json").unlink(),
    "meta truncated": lambda at: os.truncate(at / "meta.json", 100),
    "meta of another program": lambda at: (at / "meta.json").write_text('{"step": 3}'),
    "meta not an object": lambda at: (at / "meta.json").write_text("[1, 2]"),
    "meta binary": lambda at: (at / "meta.json").write_bytes(bytes(range(256))),
    "meta altered": lambda at: (at / "meta.json").write_text((at / "meta.json").read_text().replace("0.05", "0.06")),
    "step altered": lambda at: (at / "meta.json").write_text(
        re.sub('"step": 4', '"step": 5', (at / "meta.json").read_text())
    ),
    "tensors foreign": lambda at: torch.save({"w": torch.zeros(3)}, at / "rank-00000.bin"),
    "a directory": lambda at: ((at / "rank-00000.bin").unlink(), (at / "rank-00000.bin").mkdir()),
} | {
    f"bit flipped at {where}": (lambda at, where=where: flip(at / "rank-00000.bin", where))
    for where in (0, 0.01, 0.5, 0.99, 1)
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(tmp_path, finished, damage, capsys):
    """Whatever happened to it: one line names it. Asked for it alone, the run stays as it was; else the one before it
    is taken, and the end is the same."""
    shutil.copytree(finished, tmp_path / "run")
    older, newer = sorted((tmp_path / "run" / "checkpoints").iterdir())
    DAMAGES[damage](newer)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=f"--resume {newer}.* is damaged") as caught:
        step01.train(small(tmp_path / "run", dtype="fp32", resume=str(newer)))
    assert "\n" not in str(caught.value)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics
    whole = read_metrics(finished)
    again = step01.train(small(tmp_path / "run", dtype="fp32", resume=str(tmp_path / "run"), save_every=4))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{newer} is damaged (") and lines[0].endswith(f"trying {older}")
    assert [row["loss"] for row in again.history] == [row["loss"] for row in whole]
    assert checkpoints.find(str(newer), newer).meta["step"] == 4


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(n_layers=2), "does not fit this model; use --model debug"),
        (dict(dim=64), "does not fit this model"),
        (dict(tied=True), "does not fit this model"),
        (dict(optimizer="sgd"), "with optimizer adamw, not sgd: set --optimizer"),
        (dict(dtype="bf16"), "with dtype torch.float32, not torch.bfloat16: set --dtype"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, finished, changes, says):
    """Another model, optimizer or precision: the line says which flag to set."""
    with pytest.raises(UserError, match=says):
        step01.train(small(tmp_path, **dict(dtype="fp32", resume=str(finished)) | changes))


# Ends


WHERE = ["data", "forward", "backward", "optimizer", "validation", "log", "save"]


@pytest.mark.picked(0, 2, 3, 11, 12, 13)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("save_every", [0, 3])
def test_a_signal_at_any_moment_saves_the_last_step(tmp_path, monkeypatch, capsys, where, save_every):
    """SIGTERM in any phase of step 3: the run ends within a step, and the checkpoint is of the last step recorded."""
    if where == "save" and not save_every:
        pytest.skip("nothing is saved then")
    phase, log, save = Run.phase, Run.log, resuming.save

    def strike(run, place):
        if place == where and run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def striking_phase(self, name, action=None):
        with phase(self, name, action):
            yield
            strike(self, name)

    def striking_log(self, *args, **kwargs):
        log(self, *args, **kwargs)
        strike(self, "log")

    def striking_save(run, *args):
        save(run, *args)
        strike(run, "save")

    monkeypatch.setattr(Run, "phase", striking_phase)
    monkeypatch.setattr(Run, "log", striking_log)
    monkeypatch.setattr(resuming, "save", striking_save)
    before = signal.getsignal(signal.SIGTERM)
    history = step01.train(small(tmp_path, steps=9, eval_every=3, eval_sequences=2, save_every=save_every)).history
    last = history[-1]["step"]
    assert last == (4 if where in ("log", "save") else 3)
    assert checkpoints.find(str(tmp_path), tmp_path).meta["step"] == last
    assert f"interrupted after step {last}; go on with --resume {tmp_path}" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    """But not one that a launcher repeats within two seconds."""
    device = torch.device("cpu")
    run = Run(small(tmp_path), device, (1.0, 1.0), 1.0, Mesh({}, device, Ledger()))
    run.stop()
    run.stop()
    run.since -= 3
    with pytest.raises(KeyboardInterrupt):
        run.stop()


@pytest.mark.picked(0)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_the_command(tmp_path, number):
    """The real program, interrupted: clean exit, nothing on stderr, and it goes on from the step it said."""
    options = SMALL | dict(micro_batch_size=12, steps=10**6, out=tmp_path / "run")
    process = launch("step01_single_gpu.py", *as_flags(options), stderr=subprocess.PIPE)
    wait_for(lambda: steps_done(tmp_path / "run") > 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 and err == ""
    last = read_metrics(tmp_path / "run")[-1]["step"]
    assert f"interrupted after step {last}" in out
    options |= dict(resume=str(tmp_path / "run"), stop_after=last + 2, out=str(tmp_path / "run"))
    history = step01.train(Config(**options)).history
    assert [row["step"] for row in history] == list(range(1, last + 3))


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_nan_stops_the_run(tmp_path, what):
    """The step is named, the weights and the last good checkpoint stay good."""

    def poison(step, optimizer):
        if step == 2:
            param = optimizer.params["model.norm.weight"]
            (param if what == "loss" else param.grad).detach()[0] = math.nan

    with pytest.raises(UserError, match=rf"step {4 if what == 'loss' else 3}: the {what} is nan.*step-00000002"):
        step01.train(small(tmp_path, save_every=2, steps=8, dtype="fp32"), poison)
    assert checkpoints.newest(tmp_path).name == "step-00000002"
    found = checkpoints.find(str(tmp_path), tmp_path)
    assert all(found.full("model", name).isfinite().all() for name in found.shapes("model"))


def test_a_gradient_that_is_not_finite_changes_nothing():
    """In any precision, before anybody looks at the norm."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = build(dtype)
        optimizer = adamw(model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        random_loss(model, 2).backward()
        model.model.norm.weight.grad[3] = math.inf
        assert not math.isfinite(take_step(optimizer, 0.1))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert all(not value.any() for entry in optimizer.inner.state.values() for value in entry.values())
        assert optimizer.inner.state and all(p.grad is None for p in model.parameters())


# The command line


def run_main(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command line."""
    with pytest.raises(SystemExit) as left:
        flags.main(step01.train, Config, list(argv))
    return left.value.code or 0, *capsys.readouterr()


BAD_COMMANDS = {
    "--model gpt5": "--model gpt5: no such preset; choose one of debug, tiny",
    "--optimizer lion": "--optimizer: invalid choice: 'lion'",
    "--dtype int8": "--dtype: invalid choice: 'int8'",
    "--steps ten": "--steps: invalid int value: 'ten'",
    "--n-layer 3": "unrecognized arguments: --n-layer 3; did you mean --n-layers?",
    "--learning-rate=1": "unrecognized arguments: --learning-rate=1; --help lists the flags of this step",
    "--steps 0": "--steps is 0: it must be at least 1",
    "--seed -1": "--seed is -1: it must be at least 0",
    "--lr nan": "--lr is nan",
    "--eval-sequences 0": "--eval-sequences is 0: it must be at least 1",
    "--global-batch-size 10 --micro-batch-size 4": "--global-batch-size 10 is not a multiple of --micro-batch-size 4",
    "--dim 30": "--dim 30 does not split into 4 heads",
    "--n-kv-heads 3": "--n-heads 4 is not a multiple of --n-kv-heads 3",
    "--dataset /nowhere/text.txt": "--dataset /nowhere/text.txt: no such file or folder",
    "--vocab-size 100": "set --vocab-size to at least",
    "--seq-len 100000000": "too few for --seq-len 100000000",
    "--generate def": "--generate needs --resume",
    "--compile --profile-memory 2": "--profile-memory cannot look inside --compile",
    "--generate def --resume auto": "--resume auto: there is no checkpoint in",
    "--skip-spikes 1": "--skip-spikes 1: half of all steps exceed the median",
    "--timeout 0": "--timeout 0: it must be more than 0 seconds",
    "--resume /nowhere": "--resume /nowhere: no checkpoint there",
    "--device cuda": "--device cuda: PyTorch sees no GPU here",
    "--out /dev/null/run": "--out /dev/null/run: cannot be written (Not a directory)",
}


@pytest.mark.parametrize("command", BAD_COMMANDS)
def test_bad_input_is_one_line(tmp_path, capsys, command):
    """Status 2, one line on stderr that names the flag, nothing else printed or written."""
    if command == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    base = as_flags(dict(model="debug", out=tmp_path / "run", device="cpu"))
    status, out, err = run_main(capsys, *base, *command.split())
    assert status == 2 and len(err.splitlines()) == 1 and out == ""
    assert err.startswith("error: ") and BAD_COMMANDS[command] in err
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_the_command_in_one_line(tmp_path, capsys):
    """Files may not grow beyond 64 KB, as on a full disk: the second checkpoint fails, the first is intact."""
    out = tmp_path / "run"
    base = as_flags(SMALL | dict(out=out, micro_batch_size=6, save_every=1))
    step01.train(small(out, save_every=1, stop_after=1))
    before, limits = names(out), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        status, _, err = run_main(capsys, *base, "--resume", str(out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2 and len(err.splitlines()) == 1, err
    assert f"--out {out}: saving step 2 failed (" in err and "step-00000001 is intact" in err
    assert names(out) == before
    assert step01.train(small(out, resume=str(out))).history[-1]["step"] == 4


def test_a_full_disk_for_metrics(tmp_path, capsys):
    """The same if it is metrics.jsonl that does not fit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1200, limits[1]))
    try:
        status, _, err = run_main(capsys, *as_flags(SMALL | dict(out=tmp_path, micro_batch_size=6)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2 and err.splitlines() == [
        f"error: --out {tmp_path}: metrics.jsonl cannot be written (File too large)"
    ]


def test_an_unexpected_error_is_short_and_says_where(tmp_path, capsys, monkeypatch):
    """Status 1, the lines of this project it came through, no page of traceback."""

    def broken(*_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Trainer, "learning_rate", broken)
    status, _, err = run_main(capsys, *as_flags(SMALL | dict(out=tmp_path)))
    assert status == 1 and err.startswith("error: rank 0: ZeroDivisionError: by zero\n")
    assert "step01_single_gpu.py" in err and len(err.splitlines()) < 8


FULL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
)


def test_a_full_gpu_is_one_line_with_the_flags_that_help(tmp_path, capsys, monkeypatch):
    """An injected torch.OutOfMemoryError: what fills the memory, and the three flags that save most; each does."""

    def full(*_):
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(Trainer, "batch", full)
    options = dict(model="tiny", dtype="fp32", micro_batch_size=32, seq_len=4096, peak_tflops=1.0)
    status, _, err = run_main(capsys, *as_flags(options | dict(out=tmp_path, device="cpu")))
    assert status == 2 and len(err.splitlines()) == 1, err
    assert err.startswith(
        "error: rank 0: the GPU's memory of 79.10 GiB is full, 2.50 GiB more was asked for; by theory"
    )
    config = Config(**options)
    held = relief.device_bytes(config, 1)
    assert f"a rank needs {human(sum(held.values()))}: " in err
    assert max(held, key=held.get) == "activations" and f"activations {human(held['activations'])}" in err
    found = re.findall(r"(--[\w-]+) (\w+) \(saves ([\d.,]+ \w+)\)", err)
    assert {flag for flag, *_ in found} == {"--micro-batch-size", "--recompute", "--dtype"}
    for flag, value, saved in found:
        changed = flags.parse(Config, [*as_flags(options), flag, value])
        assert human(sum(held.values()) - sum(relief.device_bytes(changed, 1).values())) == saved


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_a_full_gpu_is_said_to_hold_is_the_memory_tables(dtype, optimizer):
    """On one device, kind by kind (but for buffers, which the table leaves out; fp32's activations within a tenth).

    Adafactor's few numbers are left out.
    """
    config = Config(model="smollm-135m", dtype=dtype, optimizer=optimizer, micro_batch_size=2)
    m = config.model_config()
    with torch.device("meta"):
        n = sum(p.numel() for p in Decoder(m).parameters())
    rows = memory_rows(config, m, n, 0, DTYPES[dtype], False)
    held = relief.device_bytes(config, 1)
    assert held["masters and moments"] == rows["masters"] + rows["moments"]
    for kind in ("parameters", "gradients"):
        assert held[kind] == rows[kind]
    assert held["activations"] == pytest.approx(rows["activations"], rel=1e-9 if dtype == "bf16" else 0.1)


def test_help_shows_the_comment_of_every_field(capsys):
    """A flag, its default's meaning and its text exist in one place: the dataclass."""
    status, out, _ = run_main(capsys, "--help")
    shown, comments = re.sub(r"\s+", " ", out), flags.field_help(Config)
    assert status == 0
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert len(comments[field.name]) > 10 and comments[field.name] in shown.replace("- ", "-"), field.name


def test_flags_become_the_config():
    """Numbers, choices, booleans and optional booleans."""
    parse = flags.parse
    assert parse(Config, []) == Config()
    assert all(parse(Config, as_flags(dict(tied=tied))).tied is tied for tied in (True, False))
    config = parse(Config, as_flags(dict(compile=True, n_layers=3, lr=0.5, dtype="fp16", dataset="a/b")))
    assert (config.compile, config.n_layers, config.lr, config.dtype, config.dataset) == (True, 3, 0.5, "fp16", "a/b")
    with pytest.raises(UserError):
        parse(Config, ["--tied", "no"])


METRICS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "hfu", "seconds", "data_seconds"}
METRICS |= {"forward_seconds", "backward_seconds", "optimizer_seconds", "peak_memory_bytes", "traffic"}


def test_metrics(tmp_path, capsys):
    """One JSON object per step with all fields; loss.png, a memory table and a summary at the end."""
    config = small(tmp_path, eval_every=2, eval_sequences=6, recompute="full")
    history = with_figures(step01.train, config).history
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == history and [row["step"] for row in rows] == [1, 2, 3, 4]  # floats at full precision
    for row in rows:
        assert row.keys() >= METRICS
        phases = sum(row[f"{name}_seconds"] for name in ("data", "forward", "backward", "optimizer"))
        assert 0 < phases <= row["seconds"] and row["tokens"] == row["step"] * 24 * 16
        assert row["tokens_per_second"] == pytest.approx(24 * 16 / row["seconds"])
        model, executed = flops_per_token(ModelConfig(32, 3, 4, 2, 48, 259, 16), "full")
        assert row["mfu"] == pytest.approx(model * row["tokens_per_second"] / 1e12)
        assert row["hfu"] == pytest.approx(executed * row["tokens_per_second"] / 1e12)
        assert row["peak_memory_bytes"] > 2**20 and row["traffic"] == {}
    assert ["validation_loss" in row for row in rows] == [False, True, False, True]
    assert (tmp_path / "loss.png").stat().st_size > 5000
    assert json.loads((tmp_path / "config.json").read_text())["recompute"] == "full"
    out = capsys.readouterr().out
    assert f"step 4: loss {rows[-1]['loss']:.4f}, validation loss" in out and out.count("predicted") == 2


def test_the_loss_is_the_mean_over_all_targets(tmp_path):
    """At the first step of an untrained model: about ln(vocabulary), and exactly the plain cross entropy."""
    history = step01.train(small(tmp_path, steps=1, micro_batch_size=4)).history
    batch = open_tokens("", 16, 24, 0, 259).batch(0)
    model = build(torch.float64)
    logits = model.lm_head(model(batch.tokens))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert history[0]["loss"] == pytest.approx(expected.item(), rel=bounds.FP64)
    assert history[0]["loss"] == pytest.approx(math.log(259), rel=0.01)


def test_validation_loss_does_not_depend_on_micro_batches(tmp_path):
    """Mean over the held-out targets, however they are cut; a last part may be smaller."""
    options = dict(steps=1, eval_every=1, eval_sequences=7)
    losses = [
        step01.train(small(tmp_path, micro_batch_size=size, **options)).history[0]["validation_loss"]
        for size in (1, 4, 24)
    ]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=bounds.FP64)


def test_profile_memory(tmp_path):
    """The curves of bytes over time: never negative, parameters throughout, gradients and activations come and go."""
    trained = with_figures(step01.train, small(tmp_path, profile_memory=2, dtype="fp32"))
    data = json.loads((tmp_path / "memory.json").read_text())
    curves, n = data["bytes"], sum(p.numel() for p in trained.model.parameters())
    assert {len(curve) for curve in curves.values()} == {len(data["seconds"])}
    assert data["seconds"] == sorted(data["seconds"])
    assert all(min(curve) >= 0 for curve in curves.values())
    assert curves["parameters"][-1] == max(curves["parameters"]) == 4 * n
    assert max(curves["gradients"]) == 4 * n and curves["gradients"][-1] == 0
    assert curves["optimizer"][-1] == pytest.approx(8 * n, rel=0.01)  # and AdamW's step counters
    activations = activation_bytes(trained.model.config, 6, torch.float32, "none", True)
    assert max(curves["activations"]) >= activations and curves["activations"][-1] < 100
    assert (tmp_path / "memory.png").stat().st_size > 5000


def test_generate_prints_text(tmp_path, capsys):
    """`--resume OUT --generate TEXT` continues the text, in whatever precision and touches nothing."""
    options = SMALL | dict(out=tmp_path, micro_batch_size=6)
    step01.train(Config(**options | dict(out=str(tmp_path), dtype="bf16", save_every=4)))
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    capsys.readouterr()
    texts = []
    for change in (
        dict(dtype="bf16"),
        dict(dtype="bf16"),
        dict(dtype="fp32", optimizer="sgd"),
        dict(dtype="bf16", seed=5),
    ):
        words = as_flags(options | dict(generate="def ", resume=tmp_path) | change)
        with mock.patch.object(variants, "generate", partial(variants.generate, n_tokens=120)):
            status, out, err = run_main(capsys, *words)
        assert status == 0 and err == "" and out.startswith("def ") and len(out) > 100
        texts.append(out)
    assert texts[0] == texts[1] != texts[3]
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before


# The device


def test_peak_is_from_the_table_the_flag_or_a_matmul(monkeypatch):
    """GPUs by name, the more special name first; ranks on one GPU share its peak; other devices are measured."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = {
        "NVIDIA H200": 989.4,
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA H100 NVL": 835.5,
        "NVIDIA A10": 125.0,
        "NVIDIA A10G": 70.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA L4": 121.0,
        "Tesla T4": 65.0,
    }
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert devices.peak_flops(torch.device("cuda"), torch.bfloat16, 0.0) == peak * 1e12
    assert devices.peak_flops(torch.device("cuda"), torch.bfloat16, 3.0) == 3e12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.peak_flops(torch.device("cuda"), torch.bfloat16, 3.0) == 3e12 / 4
    assert 1e9 < devices.peak_flops(torch.device("cpu"), torch.float32, 0.0) < 1e14


def test_the_default_model_reads_bytes():
    """`python step01_single_gpu.py` needs no flag: byte vocabulary (of all home-made presets), whole micro-batches."""
    config = Config()
    assert config.model_config().vocab_size == BYTE_VOCAB
    assert {MOE_PRESETS[name].vocab_size for name in ("tiny", "debug", "tiny-moe")} == {BYTE_VOCAB}
    check_one(config)


@pytest.mark.parametrize(
    "n_bytes, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * 2**40, "3,072.00 GiB")]
)
def test_bytes_for_people(n_bytes, text):
    """Binary units up to GiB; None is a dash."""
    assert human(n_bytes) == text and human(None) == "-"
