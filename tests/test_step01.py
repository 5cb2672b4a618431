"""Chapter 1, one device: step01_single_gpu.py, and common/model.py, layout.py and trainer.py.

Later chapters are compared with step 1. So the expected values in this file come from elsewhere: from the Llama of
transformers, from plain torch, from formulas that are written out, and from the laws in step 1's docstring.
"""

import hashlib
import json
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import DoubleTensor, Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import step01_single_gpu as step
from common import UserError, data, layout
from common.model import IGNORE, PRESETS, Decoder, ModelConfig, apply_rope, summed_cross_entropy, wide
from common.trainer import Run, choose_device, main
from tests.equal import BASE, SHAPE, STEP1, Watch, close, decoder, draw, launched, train_whole
from tests.tape import Live

task, cases, ROOT = pytest.mark.task, pytest.mark.parametrize, Path(__file__).parents[1]
FP64, BF16, CPU = torch.float64, torch.bfloat16, torch.device("cpu")

# --- The model ------------------------------------------------------------------------------------------------------

LLAMA3 = dict(n_kv_heads=1, rope_theta=500000.0)
LLAMAS = [(dict(n_kv_heads=2), 1), (dict(n_heads=8, n_kv_heads=2, tied=True, norm_eps=1e-3, rope_theta=100.0), 37)]
LLAMAS += [(LLAMA3 | dict(rope_scaling=32.0), 3001), (LLAMA3 | dict(rope_scaling=8.0, tied=True), 701)]


@cases("shape, stride", LLAMAS)
def test_the_model_is_llama(shape, stride):
    """transformers' Llama loads our state dict; logits, loss and gradients are equal. Positions are `stride` apart."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds to import

    ours, seen, c = (model := decoder(**dict(dim=32) | shape)), [], model.config
    rope = dict(
        rope_theta=c.rope_theta, rope_type="llama3" if c.rope_scaling != 1 else "default", factor=c.rope_scaling
    )
    rope |= dict(original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    sizes = dict(hidden_size=c.dim, intermediate_size=c.ffn_dim, num_attention_heads=c.n_heads, vocab_size=c.vocab_size)
    sizes |= dict(num_key_value_heads=c.n_kv_heads, num_hidden_layers=c.n_layers, rms_norm_eps=c.norm_eps)
    sizes |= dict(tie_word_embeddings=c.tied, max_position_embeddings=131072, rope_parameters=rope)
    for name, param in ours.named_parameters():  # else all weights of norms would be one
        nn.init.normal_(param, float(param.dim() == 1), 0.3, torch.Generator().manual_seed(len(name)))
    tokens, positions = (draw("tokens", 0, 2, 6).abs() * 5).long() % 13, torch.arange(6) * stride
    targets = tokens.roll(-1, 1)
    targets[:, -1] = targets[0, 2] = IGNORE
    ours.lm_head.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits))
    (loss := ours(tokens, targets, positions) if stride > 1 else ours(tokens, targets)).backward()
    in_fp64 = dict(float=FP64, float32=FP64)  # transformers casts to fp32 even if the model is fp64
    with mock.patch.multiple(torch, **in_fp64), mock.patch.object(Tensor, "float", Tensor.double):
        theirs = LlamaForCausalLM(LlamaConfig(**sizes)).double()
        theirs.load_state_dict(ours.state_dict())
        labels = torch.cat((torch.full((2, 1), IGNORE), targets[:, :-1]), 1)  # transformers shifts them
        found = theirs(tokens, torch.ones(2, 6), positions.expand(2, 6), labels=labels)
        (expected := found.loss * 9).backward()
    close(seen[0], found.logits, "logits")
    close(loss, expected, "the loss, summed over 9 targets")
    close(len([*ours.parameters()]), len([*theirs.parameters()]), "number of parameters (a tied matrix counts once)")
    for name, param in theirs.named_parameters():
        close(ours.get_parameter(name).grad, param.grad, f"the gradient of {name}")


def test_presets_have_their_published_size():
    """The presets of SmolLM and Llama 3 have as many parameters as Hugging Face counts."""
    sizes = [134515008, 361821120, 1711376384, 1235814400, 8030261248, 70553706496, 405853388800]
    with torch.device("meta"):
        for name, expected in zip([*PRESETS][2:], sizes, strict=True):
            close(sum(param.numel() for param in Decoder(PRESETS[name]).parameters()), expected, name)


@cases("dtype, bound", [(BF16, 2e-4), (FP64, 1e-12)])
def test_angles_are_fp32_in_a_bf16_run(dtype, bound):
    """In a bf16 run RoPE's tables are fp32, because bf16 cannot represent position 257. Rotated vectors are bf16."""
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


def test_cross_entropy_of_bf16():
    """The loss is log(sum of e^logit) - the target's logit, summed over all targets but IGNORE, in fp32."""
    logits, targets = (draw("logits", 0, 2, 40, 300) * 3).to(BF16), (torch.arange(80) * 7 % 300).view(2, 40)
    targets[0, 3] = targets[1] = IGNORE
    loss = summed_cross_entropy(logits.requires_grad_(), targets)
    exact, at = logits.detach().double().requires_grad_(), targets.clamp(min=0)[..., None]
    expected = (exact.logsumexp(-1) - exact.gather(-1, at)[..., 0])[targets != IGNORE].sum()
    close(loss, expected, "the loss", bound=1e-6)
    (loss / 7).backward(), (expected / 7).backward()
    close(logits.grad, exact.grad.to(BF16), "the gradient, rounded once", bound=1e-3)


# --- Initial values, and data ---------------------------------------------------------------------------------------


def test_initial_values():
    """Name and seed decide initial values: std 0.02, but 0.02 / sqrt(2 L) for o_proj and down_proj; norms are one."""
    number = int.from_bytes(hashlib.sha256(b"3:w").digest()[:8], "little", signed=True)
    expected = torch.empty(4, 5).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(number))
    close(layout.draw("w", [4, 5], 1, seed=3), expected, "drawn")
    close(layout.draw("a.norm.weight", [7], 3, seed=0), torch.ones(7), "a norm")
    for name, std in dict(q_proj=0.02, lm_head=0.02, o_proj=0.005, down_proj=0.005).items():
        close(layout.draw(f"{name}.weight", [300, 400], 8, 0).std().item(), std, f"std of {name}", bound=0.02)


@cases("tied", [False, True])
def test_materialize(tied):
    """A tied matrix stays tied, a frozen parameter stays frozen, and a shard is cut from the whole matrix."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SHAPE | dict(tied=tied)))
        (o_proj := model.model.layers["2"].self_attn.o_proj).weight = nn.Parameter(torch.empty(32, 20), False)
    del model.model.layers["0"]  # as on a pipeline stage, whose layers keep their numbers
    layout.note_layout(o_proj.weight, shards=(layout.Shard(1, "tp", 20, 40, 32),))  # columns 20-39 of 32: 8 are padding
    for only in ["model.norm.weight"], ():
        layout.materialize(model, 5, CPU, BF16, only)
        close([n for n, p in model.named_parameters() if only and not p.is_meta], [*only], "initialised by `only`")
    for name, param in model.named_parameters():
        whole = layout.draw(name, [32, 32] if "o_proj" in name else [*param.shape], 3, 5)
        close(param, (nn.functional.pad(whole[:, 20:], (0, 8)) if param is o_proj.weight else whole).to(BF16), name)
        close((param.dtype, param.requires_grad), (BF16, param is not o_proj.weight), f"{name}: dtype, requires_grad")
    close(model.lm_head.weight is model.model.embed_tokens.weight, tied, "embedding and head are one parameter")


# --- Rates, AdamW, masters, recomputation ---------------------------------------------------------------------------


@task("learning rate", 3)
@cases("warmup, steps", [(5, 23), (0, 7), (4, 4)])
def test_learning_rate(warmup, steps):
    """Linear warm-up, if any, to the peak; then, if steps are left, a cosine, a tenth of the peak after the last."""
    config = step.Config(lr=0.7, warmup_steps=warmup, steps=steps)
    for i in range(steps + 1):
        part = (i - warmup) / max(1, steps - warmup)
        share = (i + 1) / warmup if i < warmup else 0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2
        close(step.learning_rate(i, config), 0.7 * share, f"rate of step {i}")
    rates = [step.learning_rate(i, step.Config(lr=2.0, warmup_steps=4, steps=24)) for i in (0, 1, 3, 4, 14, 24)]
    close(DoubleTensor(rates), DoubleTensor([0.5, 1.0, 2.0, 2.0, 1.1, 0.2]), "rates")


@task("adamw", 3)
def test_adamw_and_what_decays():
    """Updates follow Loshchilov and Hutter, with Llama's betas. Matrices decay, including the head; norms do not."""
    names = ["0.q_proj.weight", "0.input_layernorm.weight", "model.norm.weight", "lm_head.weight"]
    masters = {name: draw(name, 0, 6, 5) for name in names}
    expected, mean, square = ({name: copy * masters[name] for name in names} for copy in (1, 0, 0))
    rule = step.adamw(masters, step.Config(weight_decay=0.3))
    for t in 1, 2, 3:
        for name in names:
            g = masters[name].grad = draw(f"{name} {t}", 0, 6, 5)
            mean[name], square[name] = 0.9 * mean[name] + 0.1 * g, 0.95 * square[name] + 0.05 * g**2
            move = mean[name] / (1 - 0.9**t) / ((square[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            expected[name] -= 0.1 / t * (move + 0.3 * ("norm" not in name) * expected[name])
        for group in rule.param_groups:
            group["lr"] = 0.1 / t
        rule.step()
    for name, master in masters.items():
        close(master, expected[name], f"{name} after three updates")


@task("masters", 10)
@cases("dtype, bound", [(FP64, 1e-12), (BF16, 1e-4)])
def test_optimizer(dtype, bound):
    """For each of 40 SGD updates, three gradients add up in fp32 (or fp64). The weights are the rounded masters."""
    model = nn.ParameterDict({name: draw(name, 0, 6, 5).to(dtype) for name in ("norm", "proj", "frozen")})
    start, moved = {name: param.double().detach().clone() for name, param in model.items()}, dict(norm=0.0, proj=0.0)
    places, high = [param.data_ptr() for param in model.values()], wide(dtype)
    model.frozen.requires_grad = False
    with mock.patch.dict(step.OPTIMIZERS, sgd=lambda masters, config, **_: torch.optim.SGD(masters.values())):
        optimizer = step.Optimizer(model, step.Config(optimizer="sgd"))
    close([sorted(optimizer.masters), sorted(optimizer.gradients())], [["norm", "proj"]] * 2, "the trained parameters")
    for turn in range(1, 41):
        for name in moved:
            terms = [draw(f"{name} {i}", turn % 2, 6, 5).to(dtype) for i in range(3)]
            for term in terms:
                (model[name] * term).sum().backward()
            found, expected = optimizer.gradients()[name], sum(term.to(high) for term in terms)
            close(found.dtype, high, f"dtype of the gradient of {name}")
            close(found, expected, f"the gradient of {name}")
            moved[name] = moved[name] - 0.01 / turn * expected.double()
        optimizer.step(0.01 / turn)
        optimizer.zero_grad()
        close([x for x in [*model.values(), *optimizer.masters.values()] if x.grad is not None], [], "gradients left")
    for name, master in optimizer.masters.items():
        close(master.dtype, high, f"dtype of the master of {name}")
        close(master.double() - start[name], moved[name], f"the total change of {name}", bound=bound)
        close(model[name], master.to(dtype), f"{name}, its rounded master")
    close(model.frozen, start["frozen"], "the frozen parameter")
    close([param.data_ptr() for param in model.values()], places, "addresses of the weights")


@task("recomputation", 6)
@cases("recompute, saved", [("none", (6 + 2) * 32 + 2 * 16 + 4 * 48 + 4 + 2), ("full", 32)])
def test_law_of_saved_numbers_and_flops(recompute, saved):
    """What a layer saves and computes is what step 1's docstring says. Recomputation does not change the gradients."""
    tokens, found, again = (draw("tokens", 0, 2, 16).abs() * 50).long(), [], recompute == "full"
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    costs = {attention: lambda q, *_, **__: 2 * 32 * math.prod(q), backward: lambda q, *_, **__: 5 * 32 * math.prod(q)}
    for n_layers in 2, 3:
        plain, model = (decoder(**SHAPE | dict(n_layers=n_layers)) for _ in range(2))
        step.set_up_layers(model, step.Config(recompute=recompute))
        with FlopCounterMode(display=False, custom_mapping=costs) as flops:
            with Live() as live:
                loss = model(tokens, tokens.flip(1))
            held = live.bytes
            loss.backward()
        counts = flops.get_flop_counts()["Global"]
        found.append((held, counts.pop(torch.ops.aten.mm), sum(counts.values())))
        plain(tokens, tokens.flip(1)).backward()
        for name, param in plain.named_parameters():
            close(model.get_parameter(name).grad, param.grad, f"the gradient of {name}")
    weights, more = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48, [(y - x) / 32 for x, y in zip(*found, strict=True)]
    close(more[0], 8.0 * saved, "bytes that a layer saves per token, in fp64")
    close(more[1], 6.0 * weights + 2 * again * (weights - 32 * 48), "FLOPs of matrices (down_proj is not repeated)")
    close(more[2] / 2, (7.0 + 2 * again) * 16 * 32, "FLOPs of attention, half of which is masked")


# --- The loop -------------------------------------------------------------------------------------------------------

RUNS = [dict(steps=5), dict(micro_batch_size=5, tied=True, seed=3)]  # the second: micro-batches of 5, 5 and 2 sequences
RUNS += [dict(grad_clip=0.0, recompute="full"), dict(dataset="all-count", warmup_steps=0)]
RUNS += [dict(grad_clip=1e4, weight_decay=0.0, micro_batch_size=12)]  # the limit is larger than any norm


@task("loop", 8)
@cases("options", RUNS)
def test_train(options):
    """Step 1 equals a plain torch loop whose loss is the mean over all targets of a batch. Many targets are IGNORE."""
    losses, norms, gradients, weights = train_whole(STEP1, options)
    config = step.Config(**{key: value for key, value in (BASE | options).items() if key != "tied"})
    with torch.device("meta"):
        model = Decoder(shape := ModelConfig(**SHAPE | dict(tied=options.get("tied", False))))
    layout.materialize(model, config.seed, CPU, FP64)
    read, params = data.Data(config.dataset, shape, 12, config.seed), dict(model.named_parameters())
    kinds = [[param for param in params.values() if param.dim() == dims] for dims in (1, 2)]
    groups = [dict(params=kinds[0], weight_decay=0.0), dict(params=kinds[1], weight_decay=config.weight_decay)]
    rule = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    model.loss = lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    for i in range(config.steps):
        rule.zero_grad()
        (loss := model(*read.batch(i))).backward()
        norm = nn.utils.get_total_norm(param.grad for param in params.values()).item()
        close(losses[i], loss.item(), f"step {i + 1}: the loss")
        close(norms[i], norm, f"step {i + 1}: the norm")
        for name, param in params.items():
            close(gradients[i][name], param.grad, f"step {i + 1}: the gradient of {name}")
        clip = config.grad_clip or torch.inf
        nn.utils.clip_grad_norm_(params.values(), clip * (1 + 1e-6 / norm))  # torch divides by norm + 1e-6
        for group in rule.param_groups:
            group["lr"] = step.learning_rate(i, config)
        rule.step()
    for name, param in params.items():
        close(weights[name], param, f"at the end: {name}")


@task("loop", 1)
def test_batches_without_targets_change_nothing():
    """If all targets are IGNORE, losses and gradient norms are 0, and the weights of the last RMSNorm stay 1."""
    batch = torch.ones(12, 16, dtype=torch.int64), torch.full((12, 16), IGNORE)
    with mock.patch.object(data.Data, "batch", lambda _data, _step: batch):
        losses, norms, _, weights = train_whole(STEP1, {})
    found = losses, norms, weights["model.norm.weight"].tolist()
    close(found, ([0.0] * 3, [0.0] * 3, [1.0] * 32), "losses, gradient norms, and the last norm's weight")


@task("loop", 1)
@cases("bad", [torch.inf, torch.nan])
def test_a_norm_that_is_not_finite_ends_the_run_before_the_update(bad):
    """If the norm is inf or nan, the error names --lr. Gradients are freed after a step, graphs after a micro-batch."""
    memory, graphs, alive = [], [], []

    def spoil(model: Decoder, keep: tuple = ()):
        model.model.norm.weight.register_hook(lambda g: torch.full_like(g, bad) if len(memory) >= 12 else g)
        model.model.norm.weight.register_post_accumulate_grad_hook(note)
        model.register_forward_hook(lambda _model, _inputs, loss: hold(loss, lambda g: g))

    def hold(loss: Tensor, hook: Callable):
        loss.register_hook(hook)  # the hook lives as long as the loss's graph
        graphs.append(weakref.ref(hook))

    def note(param: nn.Parameter):
        alive.append((bool(memory) and not memory[0].expired(), sum(graph() is not None for graph in graphs)))
        memory.append(StorageWeakRef(param.grad.untyped_storage()))

    said = f"step 2: the grad norm is {bad}: lower --lr.* bug .* model.norm.weight"
    run = Watch(step.Config(**BASE, model="debug"))
    with mock.patch.dict(step.RECOMPUTE, none=spoil), run, pytest.raises(UserError, match=said):
        step.train(run.config, run)
    assert all(param.isfinite().all() for param in run.model.parameters()), "weights are not finite"
    close([row["tokens"] for row in run.history], [12 * 64], "tokens of the steps that were recorded")
    close(alive, [(False, 1)] + [(True, 1)] * 11 + [(False, 1)] * 12, "step 1's gradient is alive; number of graphs")


# --- Flags, and the files of a run ----------------------------------------------------------------------------------


WRONG = ["--micro-batch 4", "--steps many", "--steps 0", "--steps 1.5", "--lr -1", "--grad-clip nan", "--dtype fp12"]
WRONG += ["--seed -1", "--model huge", "--device tpu", "--recompute half", "--optimizer magic", f"--dataset {__file__}"]
WRONG += [f"--dataset {ROOT}", "--micro-batch-size 0", "--warmup-steps -1", "--out /dev/null/x"]
WRONG += ["--lr 1e38 --warmup-steps 0", "RANK 3", "LOCAL_RANK 0", "WORLD_SIZE 1"]  # variables of another job


@cases("flags", WRONG)
def test_what_is_wrong_is_one_line(monkeypatch, capsys, tmp_path, flags):
    """A user's mistake gives one line, which names the flag or variable. An earlier run's files stay as they are."""
    for name in "config.json", "metrics.jsonl", "loss.png":
        (tmp_path / name).write_text("of an earlier run")
    words = f"step --model=debug --device=cpu --steps=2 --global-batch-size=4 --out={tmp_path} {flags}".split()
    if "--" not in flags:
        monkeypatch.setenv(words.pop(-2), words.pop())
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        main(step.train, step.Config)
    *said, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ") and flags.split()[0] in last, last
    if "1e38" not in flags:
        close(said, [], "further lines of stderr")
        close({path.read_text() for path in tmp_path.iterdir()}, {"of an earlier run"}, "files of an earlier run")


def test_what_is_saved_stays(tmp_path):
    """A new run in a folder with checkpoints is refused, and so is resuming with other flags. Old metrics are kept."""
    config = step.Config(**BASE | dict(steps=3), model="debug", out=f"{tmp_path}/a", save_every=2)
    saved = f"{config.out}/checkpoints/step-00000002"
    runs = [({}, ""), ({}, "--out .*a has checkpoints"), (dict(resume=config.out, lr=1.0), "--lr was 0.05: keep it")]
    runs += [(dict(resume=f"{tmp_path}/c"), "no checkpoint is there"), (dict(out=f"{tmp_path}/b", resume=saved), "")]
    for flags, said in runs:
        with pytest.raises(UserError, match=said) if said else nullcontext(), Run(replace(config, **flags)) as run:
            step.train(run.config, run)
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*/metrics.jsonl")]
    close(*([(row["step"], row["loss"]) for row in rows] for rows in found), "steps and losses of the two runs")


GPUS = [("auto", "auto", 0, 0.0, 0, "cpu torch.float32"), ("auto", "auto", 2, 8.0, 1, "cuda:1 torch.bfloat16")]
GPUS += [("auto", "auto", 2, 7.5, 1, "cuda:1 torch.float32"), ("cuda", "fp64", 2, 9.0, 0, "cuda:0 torch.float64")]
GPUS += [("cpu", "bf16", 2, 9.0, 0, "cpu torch.bfloat16"), ("cuda", "auto", 0, 0.0, 0, "0 are here: use --device cpu")]
GPUS += [("auto", "auto", 1, 8.0, 1, "1 are here: lower --nproc_per_node, or use --device cpu")]


@cases("kind, dtype, gpus, has, rank, expected", GPUS)
def test_choose_device(monkeypatch, kind, dtype, gpus, has, rank, expected):
    """`auto` selects this process's GPU, if there is one, and bf16 from compute capability 8.0 on, else fp32."""
    monkeypatch.setenv("LOCAL_RANK", str(rank)) if rank else monkeypatch.delenv("LOCAL_RANK", raising=False)
    known = dict(is_available=gpus > 0, device_count=gpus, get_device_capability=(int(has), has % 1), set_device=None)
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    try:
        found = "{} {}".format(*choose_device(step.Config(device=kind, dtype=dtype)))
    except UserError as error:
        found = str(error)
    assert found.endswith(expected), found


def test_a_plain_launch(tmp_path):
    """Step 1 writes three files. Step 2, on two ranks, trains to the same numbers (on the default dataset)."""
    (tmp_path / "metrics.jsonl").write_text("of an earlier run")
    flags = f"--model=debug --dtype=fp64 --device=cpu --steps=2 --global-batch-size=4 --out={tmp_path}".split()
    words = [sys.executable, "step01_single_gpu.py", *flags]
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
    assert abs(ones[0]["loss"] - math.log(257)) < 0.1, "the first loss is not that of a random guess"
    assert all(abs(row["tokens_per_second"] * row["seconds"] - 256) < 1e-6 for row in ones), "tokens per second"
