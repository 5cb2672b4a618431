"""Chapter 1, one device: step01_single_gpu.py, and common/model.py, data.py, layout.py and trainer.py.

Later chapters are compared with step 1. So here expected values come from elsewhere: from transformers' Llama, plain
torch, formulas written out, and laws.
"""

import hashlib
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import DoubleTensor, Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import step01_single_gpu as step
from common import UserError, data, layout
from common.model import IGNORE, PRESETS, Decoder, ModelConfig, apply_rope, summed_cross_entropy, wide
from common.trainer import Run, choose_device, main, parse
from tests.equal import BASE, SHAPE, Watch, close, decoder, draw, launched, train_step1
from tests.tape import Live

task, cases, ROOT = pytest.mark.task, pytest.mark.parametrize, Path(__file__).parents[1]
FP64, FP32, BF16, CPU = torch.float64, torch.float32, torch.bfloat16, torch.device("cpu")

# --- The model ------------------------------------------------------------------------------------------------------

LLAMA3 = dict(n_kv_heads=1, rope_theta=500000.0)
LLAMAS = [(dict(n_kv_heads=2), 1), (dict(n_heads=8, n_kv_heads=2, tied=True, norm_eps=1e-3, rope_theta=100.0), 37)]
LLAMAS += [(LLAMA3 | dict(rope_scaling=32.0), 3001), (LLAMA3 | dict(rope_scaling=8.0, tied=True), 701)]


def llama(ours: ModelConfig) -> nn.Module:
    """transformers' model of that shape."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds to import

    rope = dict(rope_theta=ours.rope_theta, rope_type="llama3" if ours.rope_scaling != 1 else "default")
    rope |= dict(original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    sizes = dict(hidden_size=ours.dim, intermediate_size=ours.ffn_dim, num_attention_heads=ours.n_heads)
    sizes |= dict(num_key_value_heads=ours.n_kv_heads, num_hidden_layers=ours.n_layers, vocab_size=ours.vocab_size)
    sizes |= dict(rms_norm_eps=ours.norm_eps, tie_word_embeddings=ours.tied, max_position_embeddings=131072)
    return LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope | dict(factor=ours.rope_scaling)))


@cases("shape, stride", LLAMAS)
def test_the_model_is_llama(shape, stride):
    """transformers loads our state dict unchanged: logits, loss, gradients. Positions are `stride` apart."""
    ours, seen = decoder(**dict(dim=32) | shape), []
    for name, param in ours.named_parameters():  # norms that are not one
        nn.init.normal_(param, float(param.dim() == 1), 0.3, torch.Generator().manual_seed(len(name)))
    tokens, positions = (draw("tokens", 0, 2, 6).abs() * 5).long() % 13, torch.arange(6) * stride
    targets = tokens.roll(-1, 1)
    targets[:, -1] = targets[0, 2] = IGNORE
    ours.lm_head.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits))
    loss = ours(tokens, targets, positions) if stride > 1 else ours(tokens, targets)
    loss.backward()
    in_fp64 = dict(float=FP64, float32=FP64)  # theirs goes through fp32, whatever it is given
    with mock.patch.multiple(torch, **in_fp64), mock.patch.object(Tensor, "float", Tensor.double):
        theirs = llama(ours.config).double()
        theirs.load_state_dict(ours.state_dict())
        labels = torch.cat((torch.full((2, 1), IGNORE), targets[:, :-1]), 1)  # they shift
        found = theirs(tokens, torch.ones(2, 6), positions.expand(2, 6), labels=labels)
        (expected := found.loss * 9).backward()
    close(seen[0], found.logits, "logits")
    close(loss, expected, "the loss, summed over 9 targets")
    close(len([*ours.parameters()]), len([*theirs.parameters()]), "parameters: a tied matrix is one")
    for name, param in theirs.named_parameters():
        close(ours.get_parameter(name).grad, param.grad, f"the gradient of {name}")


def test_presets_have_their_published_size():
    """Parameters, as Hugging Face counts them: SmolLM, and Llama 3."""
    sizes = [134515008, 361821120, 1711376384, 1235814400, 8030261248, 70553706496, 405853388800]
    with torch.device("meta"):
        for name, expected in zip([*PRESETS][2:], sizes, strict=True):
            close(sum(param.numel() for param in Decoder(PRESETS[name]).parameters()), expected, name)


@cases("dtype, bound", [(BF16, 2e-4), (FP64, 1e-12)])
def test_angles_are_fp32_in_a_bf16_run(dtype, bound):
    """bf16 has no number 257. The pair (i, i + d/2), as a complex number, times e^(i angle), is rounded once."""
    model, seen = decoder(**SHAPE).to(dtype), []
    model.model.layers["1"].register_forward_pre_hook(lambda _module, inputs: seen.extend(inputs[1:]))
    model(torch.zeros(1, 2049).long(), torch.zeros(1, 2049).long())
    angles = torch.arange(2049).double()[:, None, None] * 10000.0 ** -(torch.arange(4).double() / 4)
    close(seen[0], angles.cos().tile(2), "cosines", bound=bound)
    close(seen[1], angles.sin().tile(2), "sines", bound=bound)
    x = draw("x", 0, 2, 2049, 3, 8).to(dtype)
    z = torch.complex(*x.double().chunk(2, -1)) * torch.exp(1j * angles)
    close((found := apply_rope(x, *seen)).dtype, dtype, "dtype")
    close(found, torch.cat((z.real, z.imag), -1).to(dtype), "rotated", bound=2 * bound)


@cases("dtype, bound", [(FP64, 1e-12), (BF16, 1e-6)])
def test_cross_entropy(dtype, bound):
    """log(sum of e^logit) - logit of the target, summed over targets but IGNORE; of bf16 logits as in fp32."""
    logits, targets = (draw("logits", 0, 2, 40, 300) * 3).to(dtype), (torch.arange(80) * 7 % 300).view(2, 40)
    targets[0, 3] = targets[1] = IGNORE
    loss = summed_cross_entropy(logits.requires_grad_(), targets)
    exact, at = logits.detach().double().requires_grad_(), targets.clamp(min=0)[..., None]
    expected = (exact.logsumexp(-1) - exact.gather(-1, at)[..., 0])[targets != IGNORE].sum()
    close(loss.dtype, wide(dtype), "dtype of the loss")
    close(loss, expected, "the loss", bound=bound)
    (loss / 7).backward(), (expected / 7).backward()
    close(logits.grad, exact.grad.to(dtype), "the gradient, rounded once", bound=1e-3 if dtype == BF16 else bound)


# --- Initial values, and data ---------------------------------------------------------------------------------------


def test_initial_values():
    """A function of name and seed; normal, 0.02, for what writes to the residual stream 0.02 / sqrt(2 L); norms one."""
    number = int.from_bytes(hashlib.sha256(b"3:w").digest()[:8], "little", signed=True)
    expected = torch.empty(4, 5).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(number))
    close(layout.draw("w", [4, 5], 1, seed=3), expected, "drawn")
    close(layout.draw("a.norm.weight", [7], 3, seed=0), torch.ones(7), "a norm")
    for name, std in dict(q_proj=0.02, up_proj=0.02, lm_head=0.02, o_proj=0.005, down_proj=0.005).items():
        close(layout.draw(f"{name}.weight", [300, 400], 8, 0).std().item(), std, f"spread of {name}", bound=0.02)


@cases("tied", [False, True])
def test_materialize(tied):
    """A tied matrix stays one, what does not train stays so, a shard is cut from what the whole would be."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SHAPE | dict(tied=tied)))
        attention = model.model.layers["2"].self_attn
        attention.o_proj.weight = nn.Parameter(torch.empty(32, 20))  # columns 20 to 39 of 32
    attention.k_proj.weight.requires_grad_(False)
    layout.note_layout(attention.o_proj.weight, shards=(layout.Shard(1, "tp", 20, 40, 32),))
    for only in ["model.norm.weight"], ():
        layout.materialize(model, 5, CPU, BF16, only)
        close([n for n, p in model.named_parameters() if only and not p.is_meta], [*only], "what `only` names")
    for name, param in model.named_parameters():
        whole = layout.draw(name, [32, 32] if "o_proj" in name else [*param.shape], 3, 5)
        close(param, (F.pad(whole[:, 20:], (0, 8)) if "2.self_attn.o_proj" in name else whole).bfloat16(), name)
        close((param.dtype, param.requires_grad), (BF16, "2.self_attn.k_proj" not in name), f"{name}: kind")
    close(model.lm_head.weight is model.model.embed_tokens.weight, tied, "embedding and head are one parameter")


@pytest.fixture
def batches(tmp_path):
    """Data of 43 windows of four bytes, each its own number: 0000 0001 ... Three a batch; 41 are trained on."""
    (tmp_path / "text.txt").write_text("".join(f"{i:04d}" for i in range(43)))
    shape = SHAPE | dict(seq_len=4)
    return lambda seed=0, **more: data.Data(str(tmp_path / "text.txt"), ModelConfig(**shape | more), 3, seed)


def test_targets_are_the_next_tokens(batches):
    """Of bytes, and END after a document; or a reader's labels, of which IGNORE is no word."""
    tokens, targets = batches().read([7, 42])
    close(tokens, torch.tensor([[*b"0007"], [*b"0042"]]), "tokens")
    close(targets, torch.tensor([[*b"0070"], [*b"042", data.END]]), "targets")
    close((tokens.dtype, targets.dtype), (torch.int64, torch.int64), "dtypes")
    close(data.to_tokens(["ab", "é"]).tolist(), [97, 98, 256, 195, 169, 256], "two documents")
    labels = np.arange(173) % 7
    labels[30:32] = IGNORE
    with mock.patch.dict(data.READERS, {".txt": lambda source: (np.arange(173) % 7, labels)}):
        close(batches(vocab_size=7).read([7])[1], torch.tensor([[1, IGNORE, IGNORE, 4]]), "a reader's targets")
        labels[30] = 7
        with pytest.raises(UserError, match=r"--dataset .* ids 1 to 7 are not in the vocabulary"):
            batches(vocab_size=7).read([7])
    with pytest.raises(UserError, match=r"--dataset .*less than two sequences of --seq-len 87"):
        batches(seq_len=87)
    close(batches(seq_len=86).batch(1)[0].shape, (3, 86), "batches of the one window of two that is trained on")


def test_each_epoch_has_every_window_once_in_another_order(batches):
    """Three epochs under two seeds; the last twentieth is in none; a batch does not depend on what was read before."""
    orders = []
    for seed in range(2):
        found, again = batches(seed), batches(seed)
        read = [found.batch(i)[0] for i in range(41)]
        orders += [tuple(int(bytes(row.tolist())) for row in some) for some in torch.cat(read).split(41)]
        for i in 40, 3, 14, 13:
            close(again.batch(i)[0], read[i], f"batch {i}, asked for by itself")
    close([sorted(order) for order in orders], [[*range(41)]] * 6, "windows of each epoch")
    close(len(set(orders)), 6, "different orders, of three epochs under two seeds")


# --- Rates, AdamW, masters, recomputation ---------------------------------------------------------------------------


def rate(i: int, peak: float, warmup: int, steps: int) -> float:
    """Linear to the peak, then a cosine from it to a tenth."""
    part = (i - warmup) / max(1, steps - warmup)
    return peak * ((i + 1) / warmup if i < warmup else 0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2)


@task("learning rate", 3)
@cases("warmup, steps", [(5, 23), (0, 7), (4, 4), (4, 24)])
def test_learning_rate(warmup, steps):
    """By the formula, and a few values as numbers."""
    found = [step.learning_rate(i, step.Config(lr=2.0, warmup_steps=warmup, steps=steps)) for i in range(steps + 1)]
    for i in range(steps + 1):
        close(found[i], rate(i, 2.0, warmup, steps), f"the rate of step {i}")
    if steps == 24:
        close(DoubleTensor(found)[[0, 1, 3, 4, 14, 24]], DoubleTensor([0.5, 1, 2, 2, 1.1, 0.2]), "rates")


@task("adamw", 3)
def test_adamw_and_what_decays():
    """Loshchilov and Hutter's formula, with Llama's 0.9 and 0.95. Matrices decay, also the head; norms do not."""
    shapes = {
        "0.q_proj.weight": (6, 5),
        "0.input_layernorm.weight": (5,),
        "norm.weight": (5,),
        "lm_head.weight": (7, 5),
    }
    masters = {name: draw(name, 0, *shape) for name, shape in shapes.items()}
    expected = {name: weight.clone() for name, weight in masters.items()}
    mean, square = dict.fromkeys(shapes, 0.0), dict.fromkeys(shapes, 0.0)
    rule = step.adamw(masters, step.Config(weight_decay=0.3))
    for t in 1, 2, 3:
        for name, weight in expected.items():
            g = masters[name].grad = draw(f"{name} {t}", 0, *shapes[name])
            mean[name], square[name] = 0.9 * mean[name] + 0.1 * g, 0.95 * square[name] + 0.05 * g**2
            move = mean[name] / (1 - 0.9**t) / ((square[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            expected[name] = weight - 0.1 / t * (move + 0.3 * ("norm" not in name) * weight)
        for group in rule.param_groups:
            group["lr"] = 0.1 / t
        rule.step()
    for name, master in masters.items():
        close(master, expected[name], f"{name} after three updates")


@task("masters", 10)
@cases("dtype, bound", [(FP64, 1e-12), (FP32, 1e-4), (BF16, 1e-4)])
def test_optimizer(dtype, bound):
    """Gradients of three backwards add up in fp32, 40 updates (SGD's) in masters; weights are masters rounded."""
    model = nn.ParameterDict({name: draw(name, 0, 6, 5).to(dtype) for name in ("norm", "proj", "frozen")})
    start = {name: param.detach().double().clone() for name, param in model.items()}
    places, moved = [param.data_ptr() for param in model.values()], dict(norm=0.0, proj=0.0)
    model.frozen.requires_grad_(False)
    with mock.patch.dict(step.OPTIMIZERS, sgd=lambda masters, config: torch.optim.SGD(masters.values())):
        optimizer = step.Optimizer(model, SimpleNamespace(optimizer="sgd"))
    close([sorted(optimizer.masters), sorted(optimizer.gradients())], [["norm", "proj"]] * 2, "names, of what trains")
    for turn in range(1, 41):
        for name in moved:
            terms = [draw(f"{name} {i}", turn % 2, 6, 5).to(dtype) for i in range(3)]
            for term in terms:
                (model[name] * term).sum().backward()
            found, expected = optimizer.gradients()[name], sum(term.to(wide(dtype)) for term in terms)
            close(found.dtype, wide(dtype), f"dtype of the gradient of {name}")
            close(found, expected, f"the gradient of {name}")
            moved[name] = moved[name] - 0.01 / turn * expected.double()
        optimizer.step(0.01 / turn)
        optimizer.zero_grad()
        close([x for x in [*model.values(), *optimizer.masters.values()] if x.grad is not None], [], "gradients left")
    for name, master in optimizer.masters.items():
        close(master.dtype, wide(dtype), f"dtype of the master of {name}")
        close(master.double() - start[name], moved[name], f"how far {name} has moved", bound=bound)
        close(model[name], master.to(dtype), f"{name}: the master, rounded")
    close(model.frozen, start["frozen"], "what does not train")
    close([param.data_ptr() for param in model.values()], places, "where weights lie in memory")


@task("recomputation", 6)
@cases("recompute, saved", [("none", (6 + 2) * 32 + 2 * 16 + 4 * 48 + 4 + 2), ("full", 32)])
def test_law_of_saved_numbers_and_flops(recompute, saved):
    """The docstring's, of a layer more: what it saves of 32 tokens, what it computes. Gradients do not change."""
    tokens, found, again = (draw("tokens", 0, 2, 16).abs() * 50).long(), [], recompute == "full"
    kernels = [f"_scaled_dot_product_flash_attention_for_cpu{back}" for back in ("", "_backward")]
    products = [lambda q, *_, **__: 2 * 2 * math.prod(q) * 16, lambda q, *_, **__: 5 * 2 * math.prod(q) * 16]
    costs = {getattr(torch.ops.aten, kernel): cost for kernel, cost in zip(kernels, products, strict=True)}
    for n_layers in 2, 3:
        plain, model = (decoder(**SHAPE | dict(n_layers=n_layers)) for _ in range(2))
        step.RECOMPUTE[recompute](model)
        with FlopCounterMode(display=False, custom_mapping=costs) as flops:
            with Live() as live:
                loss = model(tokens, tokens.flip(1))
            held = live.bytes()
            loss.backward()
        counts = flops.get_flop_counts()["Global"]
        found.append((held, counts.pop(torch.ops.aten.mm), sum(counts.values())))
        plain(tokens, tokens.flip(1)).backward()
        for name, param in plain.named_parameters():
            close(model.get_parameter(name).grad, param.grad, f"the gradient of {name}")
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    more = [(after - before) / 32 for before, after in zip(*found, strict=True)]  # a token
    close(more[0], 8.0 * saved, "bytes that a layer saves, in fp64")
    close(more[1], 6.0 * weights + 2 * again * (weights - 32 * 48), "FLOPs of matrices, the last of which runs once")
    close(more[2] / 2, (7.0 + 2 * again) * 16 * 32, "FLOPs of attention, half of which is masked")


# --- The loop -------------------------------------------------------------------------------------------------------


def by_hand(options: dict) -> tuple:
    """Plain torch's run: of each batch at once the mean over its targets, torch's norm and clipping, torch's AdamW."""
    options = dict(weight_decay=0.1, seed=0) | BASE | options
    shape = ModelConfig(**{key: options.get(key, value) for key, value in SHAPE.items()})
    with torch.device("meta"):
        model = Decoder(shape)
    layout.materialize(model, options["seed"], CPU, FP64)
    read = data.Data(options["dataset"], shape, options["global_batch_size"], options["seed"])
    params, losses, norms, gradients = dict(model.named_parameters()), [], [], []
    groups = [
        dict(params=[p for p in params.values() if p.dim() == n], weight_decay=decay)
        for n, decay in ((2, options["weight_decay"]), (1, 0.0))
    ]
    rule = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    model.loss = lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())
    for i in range(options["steps"]):
        rule.zero_grad()
        loss = model(*read.batch(i))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: param.grad.clone() for name, param in params.items()})
        norms.append(nn.utils.get_total_norm(gradients[-1].values()).item())
        clip = options["grad_clip"] or torch.inf
        nn.utils.clip_grad_norm_(params.values(), clip * (1 + 1e-6 / norms[-1]))  # it divides by norm + 1e-6
        for group in rule.param_groups:
            group["lr"] = rate(i, options["lr"], options["warmup_steps"], options["steps"])
        rule.step()
    return losses, norms, gradients, {name: param.detach() for name, param in params.items()}


RUNS = [dict(steps=5), dict(micro_batch_size=5, tied=True, seed=3)]  # the second: 5, 5 and 2 sequences
RUNS += [dict(grad_clip=0.0, recompute="full"), dict(dataset="all count", warmup_steps=0)]
RUNS += [dict(grad_clip=1e4, weight_decay=0.0, micro_batch_size=12)]  # larger than any norm


@task("loop", 8)
@cases("options", RUNS)
def test_train(options):
    """As plain torch: each step's loss, norm and gradients, and weights. A third of the targets does not count."""
    found, expected = train_step1(options), by_hand(options)
    close(DoubleTensor(found[0]), DoubleTensor(expected[0]), "losses")
    close(DoubleTensor(found[1]), DoubleTensor(expected[1]), "norms")
    for i, gradients in enumerate(found[2]):
        for name, gradient in gradients.items():
            close(gradient, expected[2][i][name], f"step {i + 1}: the gradient of {name}")
    for name, weight in found[3].items():
        close(weight, expected[3][name], f"at the end: {name}")


@task("loop", 1)
def test_a_batch_without_targets_changes_nothing():
    """Loss and norm are 0."""
    with mock.patch.dict(data.READERS, hub=lambda source: (np.arange(999) % 250, np.full(999, IGNORE))):
        losses, norms, _, weights = train_step1(dict(weight_decay=0.0))
    close((losses, norms), ([0.0] * 3, [0.0] * 3), "losses and norms")
    for name, weight in weights.items():
        close(weight, layout.draw(name, [*weight.shape], 3, 0), name)


class Laws(Watch):
    """While a step is recorded, gradients are freed. In the second one is `bad`."""

    bad: float = 0.0

    def steps(self, **parts):
        for i in super().steps(**parts):
            if i == 1 and self.bad:
                parts["model"].model.norm.weight.register_hook(lambda gradient: torch.full_like(gradient, self.bad))
            yield i

    def require_finite(self, i: int, **found: float):
        super().require_finite(i, **found)
        self.held = [StorageWeakRef(gradient.untyped_storage()) for gradient in self.optimizer.gradients().values()]

    def record(self, *args: int, **found: float):
        close(sum(not memory.expired() for memory in self.held), 0, "gradients that live on")
        super().record(*args, **found)


@task("loop", 1)
@cases("bad", [torch.inf, torch.nan, 0.0])
def test_a_norm_that_is_not_finite_ends_the_run_before_the_update(bad):
    """The loss is fine. A line names step, norm and flag. In any step gradients are freed after the update."""
    train_step1(dict(steps=1))  # makes the preset
    run = Laws(step.Config(**BASE, model="test"))
    run.bad = bad
    with run, pytest.raises(UserError, match=f"^step 2: the grad norm is {bad}: lower --lr$") if bad else run:
        step.train(run.config, run)
    close(len(run.history), 1 if bad else 3, "steps")
    assert all(param.isfinite().all() for param in run.model.parameters()), "weights are not finite"


# --- Flags, and what a run leaves -----------------------------------------------------------------------------------


@dataclass
class More(step.Config):
    """More flags."""

    depth: int = 3  # how deep, 100%
    least: int = 5  # 0: nothing
    quick: bool = True  # whether it is quick


def test_flags_become_a_config(capsys):
    """A flag for each field, with its comment as help; those of a class before those of its bases."""
    words = "--depth=2 --no-quick --lr=0.5 --least=0 --warmup-steps=0 --dtype=fp64 --out=here"
    expected = More(depth=2, quick=False, lr=0.5, least=0, warmup_steps=0, dtype="fp64", out="here")
    close(parse(More, words.split()), expected, "the config")
    with mock.patch.object(step, "__doc__", None):  # python -OO
        close(parse(step.Config, []), step.Config(), "defaults")
    with pytest.raises(SystemExit):
        parse(More, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in "how deep, 100%", "on matrices, not on norms", "{none,full}", "--depth DEPTH .* --global-batch-size":
        assert re.search(text, shown), f"--help does not say {text}: {shown}"


WRONG = ["--micro-batch 4", "--steps many", "--steps 0", "--steps 1.5", "--lr -1", "--grad-clip nan", "--dtype fp12"]
WRONG += ["--seed -1", "--model huge", "--device tpu", "--recompute half", "--optimizer magic", f"--dataset {__file__}"]
WRONG += [f"--dataset {ROOT}", "--micro-batch-size 0", "--warmup-steps -1", "--out /dev/null/x"]
WRONG += ["--lr 1e38 --warmup-steps 0", "RANK 3", "LOCAL_RANK 0", "WORLD_SIZE 1"]  # of another job, without a launcher


@cases("flags", WRONG)
def test_what_is_wrong_is_one_line(monkeypatch, capsys, tmp_path, flags):
    """It names the flag or variable. An earlier run's files stay as they are."""
    for name in "config.json", "metrics.jsonl", "loss.png":
        (tmp_path / name).write_text("of an earlier run")
    words = f"step --model=debug --device=cpu --steps=2 --global-batch-size=4 --out={tmp_path} {flags}".split()
    if "--" not in flags:
        monkeypatch.setenv(words.pop(-2), words.pop())
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main(step.train, step.Config)
    close(ended.value.code, 2, "exit status")
    *said, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ") and flags.split()[0].replace("--out", "'/dev/null") in last, last
    if "1e38" not in flags:
        close(said, [], "other lines")
        close({path.read_text() for path in tmp_path.iterdir()}, {"of an earlier run"}, "files of an earlier run")


def test_an_error_in_training_is_no_users_mistake(monkeypatch, tmp_path):
    """It shows where it was raised; loss.png is not drawn."""
    monkeypatch.setattr(sys, "argv", f"step --model=debug --device=cpu --out={tmp_path}".split())
    with pytest.raises(FileNotFoundError):
        main(step.train, step.Config, type("Fails", (Run,), dict(record=lambda *_, **__: Path("none").read_text())))
    close([path.name for path in tmp_path.iterdir()], ["config.json"], "files")


DEVICES = """
    auto auto 0 GPUs of 0.0, rank 0: cpu float32     auto auto 2 GPUs of 8.0, rank 1: cuda:1 bfloat16
    cuda fp64 2 GPUs of 9.0, rank 0: cuda:0 float64  auto auto 2 GPUs of 7.5, rank 1: cuda:1 float32
    cpu  bf16 2 GPUs of 9.0, rank 0: cpu bfloat16    auto auto 1 GPUs of 8.0, rank 1: lower --nproc_per_node, or use
    cuda auto 0 GPUs of 0.0, rank 0: here: use --device cpu"""


@cases("case", re.split(r"\n\s+|\s\s+(?=auto)", DEVICES.strip()))
def test_choose_device(monkeypatch, case):
    """auto: this process's GPU if there is one, with bf16 if it computes in it (from 8.0 on)."""
    kind, dtype, n, a, b, rank, expected = re.match(
        r"(\w+) +(\w+) (\d) GPUs of (\d).(\d), rank (\d): (.*)", case
    ).groups()
    monkeypatch.setenv("LOCAL_RANK", rank)
    known = dict(is_available=n > "0", device_count=int(n), get_device_capability=(int(a), int(b)), set_device=None)
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    try:
        found = "{} {}".format(*choose_device(step.Config(device=kind, dtype=dtype))).replace("torch.", "")
    except UserError as error:
        found = expected if expected in str(error) else str(error)
    close(found, expected, "device and dtype")


def test_a_plain_launch(tmp_path):
    """It leaves three files. Two ranks, each of which reads Python's sources itself, train to the same numbers."""
    (tmp_path / "metrics.jsonl").write_text("of an earlier run")
    words = [sys.executable, "step01_single_gpu.py", "--model=debug", "--dtype=fp64", "--device=cpu", "--steps=2"]
    words += ["--global-batch-size=4", f"--out={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "2/2" in done.stderr and "tok/s" in done.stderr, done.stderr
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    close(sorted(left), ["config.json", "loss.png", "metrics.jsonl"], "files")
    close(json.loads(left["config.json"])["global_batch_size"], 4, "--global-batch-size in config.json")
    assert left["loss.png"].startswith(b"\x89PNG") and len(left["loss.png"]) > 5000
    ones = [json.loads(line) for line in left["metrics.jsonl"].splitlines()]
    twos = launched(2, "step02_ddp", "--dtype=fp64", "--micro-batch-size=1", out=tmp_path)
    for key in "step", "tokens", "lr", "loss", "grad_norm":
        close(DoubleTensor([row[key] for row in twos]), DoubleTensor([row[key] for row in ones]), key, 2)
    assert abs(ones[0]["loss"] - math.log(257)) < 0.1, "the first loss is not that of a guess"
    assert all(abs(row["tokens_per_second"] * row["seconds"] - 256) < 1e-6 for row in ones), "tokens per second"
