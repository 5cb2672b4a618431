"""Step 1, one device: step01_single_gpu.py, and the model and initial values in common/.

Later steps are compared with step 1. So the expected values in this file come from elsewhere: from
the Llama of transformers, from torch, from definitions, and from numbers that are written out."""

import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import DoubleTensor, Tensor, nn
from torch.utils.checkpoint import noop_context_fn
from torch.utils.flop_counter import FlopCounterMode

import step01_single_gpu as step
from common import UserError, initial, layout
from common.data import Data
from common.model import (
    IGNORE,
    PRESETS,
    Decoder,
    ModelConfig,
    summed_cross_entropy,
)
from common.run import Run
from tests.equal import (
    BASE,
    SHAPE,
    STEP1,
    Watch,
    alive,
    close,
    close_gradients,
    decoder,
    draw,
    run_of,
    together,
    train,
)
from tests.script import Script
from tests.script import step as script_of
from tests.tape import Live, traced_graphs

task = pytest.mark.task
cases = pytest.mark.parametrize
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
CPU = torch.device("cpu")


# --- The model ------------------------------------------------------------------------------------


def llama_of(model: Decoder) -> nn.Module:
    """The Llama of transformers, with the shape and the weights of `model`, in fp64."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds to import

    shape = model.config
    rope = dict(rope_type="llama3", rope_theta=shape.rope_theta, factor=shape.rope_scaling)
    rope |= dict(original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    config = LlamaConfig(
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )
    llama = LlamaForCausalLM(config).double()
    llama.load_state_dict(model.state_dict())
    return llama


def llama_loss(llama: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
    """The loss of the Llama's logits, summed over all targets but IGNORE."""
    mask = torch.ones_like(tokens)
    logits = llama(tokens, mask, positions.expand(tokens.shape)).logits
    return F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="sum")


LLAMAS = [
    (1, dict(n_kv_heads=2)),
    (37, dict(n_heads=8, n_kv_heads=2, tied=True, norm_eps=1e-3, rope_theta=100.0)),
    (3001, dict(n_kv_heads=1, rope_theta=500000.0, rope_scaling=32.0)),
]


@cases("stride, shape", LLAMAS)
def test_the_model_is_llama(monkeypatch, stride, shape):
    """Loss and gradients equal those of transformers' Llama, which loads our state dict.

    Positions are `stride` apart, and one of the targets is IGNORE."""
    model = decoder(**dict(dim=32) | shape)
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.uniform_(param, -0.5, 0.5)  # else the weights of norms would be one
    for namespace, name in ((torch, "float"), (torch, "float32")):
        monkeypatch.setattr(namespace, name, FP64)  # transformers casts to fp32, fp64 models too
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    llama = llama_of(model)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    targets = torch.tensor([[1, 4, 1, 5, 9, 2], [6, 5, IGNORE, 5, 8, 12]])
    positions = torch.arange(6) * stride
    loss = model(tokens, targets, positions)
    loss.backward()
    expected = llama_loss(llama, tokens, targets, positions)
    expected.backward()
    close(loss, expected, "the loss")
    names = sorted(name for name, _ in llama.named_parameters())
    close(sorted(name for name, _ in model.named_parameters()), names, "parameters")
    close_gradients(model, llama)


PARAMETERS = {
    "debug": 125_376,
    "tiny": 804_224,
    "smollm-135m": 134_515_008,  # from here on as Hugging Face counts them
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@cases("preset", PRESETS)
def test_presets_have_their_size(preset):
    """Each preset has as many parameters as its model card says (debug and tiny have none: they are
    counted by hand). A tied matrix counts once.
    """
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    close(sum(param.numel() for param in model.parameters()), PARAMETERS[preset], "parameters")


def test_rope_has_at_least_fp32_in_a_bf16_run():
    """Layers get the cosine of 257 rad for position 257, which bf16 would round to 256."""
    model = decoder(**SHAPE).to(BF16)
    inputs = []
    layer = model.model.layers["1"]
    layer.register_forward_pre_hook(lambda module, args: inputs.extend(args))
    tokens = torch.zeros(1, 258, dtype=torch.int64)
    model(tokens, tokens)
    x, cos, sin = inputs
    close((x.dtype, cos.dtype, sin.dtype), (BF16, FP32, FP32), "dtypes")
    close(cos[257, 0, 0].item(), math.cos(257), "the cosine", bound=1e-5)


def test_the_loss_of_bf16_logits_is_summed_in_fp32():
    """The loss of bf16 logits is that of the same numbers in fp64, up to the precision of fp32."""
    logits = draw("logits", 0, 2, 40, 300).to(BF16)
    targets = (torch.arange(80) * 7 % 300).view(2, 40)
    loss = summed_cross_entropy(logits, targets)
    close(loss.dtype, FP32, "dtype")
    close(loss, F.cross_entropy(logits.double().mT, targets, reduction="sum"), "loss", bound=1e-6)


# --- Initial values -------------------------------------------------------------------------------


def drawn(name: str, shape: list[int], n_layers: int, seed: int) -> Tensor:
    """The initial value of a parameter."""
    return initial.draw(torch.empty(shape), name, n_layers, seed)


def test_initial_values_follow_from_name_and_seed():
    """A matrix is drawn by a generator whose seed is a hash of seed and name; norms are one."""
    digest = hashlib.sha256(b"3:w").digest()
    number = int.from_bytes(digest[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(number)
    expected = torch.empty(4, 5).normal_(0.0, 0.02, generator=generator)
    close(drawn("w", [4, 5], 1, seed=3), expected, "a matrix")
    close(drawn("a.norm.weight", [7], 3, seed=0), torch.ones(7), "a norm")


def test_matrices_that_write_to_the_residual_stream_are_smaller():
    """With eight layers, o_proj and down_proj have std 0.02 / sqrt(2 x 8) = 0.005."""
    for name, std in dict(q_proj=0.02, lm_head=0.02, o_proj=0.005, down_proj=0.005).items():
        matrix = drawn(f"{name}.weight", [300, 400], n_layers=8, seed=0)
        close(matrix.std().item(), std, f"{name}: the standard deviation", bound=0.02)


def on_meta(**shape) -> Decoder:
    """A model of three layers without memory."""
    return decoder(dtype=None, **SHAPE | shape)


def test_materialize_keeps_a_tie():
    """A tied matrix remains one parameter of two modules."""
    model = on_meta(tied=True)
    initial.materialize(model, 5, CPU, BF16)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "the tie is cut"


def test_materialize_cuts_shards_from_whole_matrices():
    """Columns 20 to 39 of a matrix with 32 columns are its last twelve, and eight of zeros."""
    model = on_meta()
    o_proj = model.model.layers["2"].self_attn.o_proj
    o_proj.weight = nn.Parameter(torch.empty(32, 20, device="meta"))
    layout.note_record(o_proj.weight, shard=layout.Shard(1, "tp", 20, 40, 32))
    initial.materialize(model, 5, CPU, FP32)
    whole = drawn("model.layers.2.self_attn.o_proj.weight", [32, 32], 3, 5)
    close(o_proj.weight[:, :12], whole[:, 20:], "columns 20 to 31")
    close(o_proj.weight[:, 12:], torch.zeros(32, 8), "the padding")


# --- Learning rate, update rules, masters ---------------------------------------------------------


@task("learning rate", 3)
@cases(
    "warmup, steps, rates",
    [
        (4, 24, {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0, 9: 1.7363961, 14: 1.1, 24: 0.2}),
        (0, 8, {0: 2.0, 4: 1.1, 8: 0.2}),  # no warm-up
        (4, 4, {0: 0.5, 3: 2.0}),  # nothing but warm-up
        (20, 2, {0: 0.1, 1: 0.2}),  # the run ends during the warm-up
    ],
)
def test_learning_rate(warmup, steps, rates):
    """A linear warm-up to the peak, 2; then a cosine, which would reach a tenth at step `steps`."""
    config = step.Config(lr=2.0, warmup_steps=warmup, steps=steps)
    for number, rate in rates.items():
        close(step.learning_rate(number, config), rate, f"step {number}", bound=1e-7)


@task("adamw", 3)
def test_adamw_and_what_decays():
    """Two updates, by hand: gradients 1 and 0, rate 1, betas 0.9 and 0.95, weights from 0.

    The first moves a weight by -1. Then the mean is 0.09 / 0.19, the mean square 0.0475 / 0.0975,
    and the move -0.473684 / sqrt(0.487179) = -0.678647. A matrix also decays, by 0.3 x 1."""
    names = ["0.q_proj.weight", "0.input_layernorm.weight", "model.norm.weight", "lm_head.weight"]
    masters = {name: torch.zeros(1, dtype=FP64) for name in names}
    optimizer = SimpleNamespace(masters=masters, config=step.Config(weight_decay=0.3))
    rule = step.adamw(optimizer)
    for group in rule.param_groups:
        group["lr"] = 1.0
    for gradient in (1.0, 0.0):
        for master in masters.values():
            master.grad = torch.full((1,), gradient, dtype=FP64)
        rule.step()
    expected = DoubleTensor([-1.378647, -1.678647, -1.678647, -1.378647])
    close(torch.cat(list(masters.values())), expected, "the masters", bound=1e-6)


def two_params() -> nn.ParameterDict:
    """A norm and a matrix in bf16. 0.02 is there 0.02001953125."""
    params = {name: torch.full((2, 3), 0.02, dtype=BF16) for name in ("norm", "proj")}
    return nn.ParameterDict(params)


SGD = step.Config(optimizer="sgd", weight_decay=0.0)


@task("masters", 3)
def test_masters_keep_updates_that_bf16_would_lose():
    """With updates by 1e-5 a bf16 weight moves only at the seventh: 7e-5 is more than half the gap
    to the next number, 1.22e-4. The master has all of them.
    """
    model = two_params()
    optimizer = step.Optimizer(model, SGD)
    before = 0.02001953125
    after = 0.0201416015625
    for number in range(1, 11):
        weight = before if number < 7 else after
        (-model.proj.sum() - model.norm.sum()).backward()
        optimizer.step(1e-5)
        optimizer.zero_grad()
        master = torch.full((2, 3), before + number * 1e-5)
        close(optimizer.masters["proj"].dtype, FP32, "dtype of the masters")
        close(optimizer.masters["proj"], master, f"the master after {number} updates", bound=1e-6)
        close(model.proj, torch.full((2, 3), weight), f"the weight after {number} updates")


@task("masters", 3)
def test_gradients_of_bf16_weights_add_up_in_fp32():
    """256 + 1 + 1 is 258. In bf16, which has no 257, it would be 256."""
    model = two_params()
    optimizer = step.Optimizer(model, SGD)
    for gradient in (256.0, 1.0, 1.0):
        (model.proj * gradient).sum().backward()
    found = optimizer.gradients()["proj"]
    close(found.dtype, FP32, "dtype")
    close(found, torch.full((2, 3), 258.0), "the gradient")


@task("masters", 4)
def test_an_update_changes_weights_in_place():
    """Weights of 0.02 in bf16, gradients of 1. They are scaled in place, as clipping does, here by
    4; at rate 0.5, without decay, 2 is subtracted, in the same memory. zero_grad then frees all
    gradients. Without gradients, as after --resume, masters are still published.
    """
    model = two_params()
    addresses = [param.data_ptr() for param in model.values()]
    optimizer = step.Optimizer(model, SGD)
    (model.norm.sum() + model.proj.sum()).backward()
    for gradient in optimizer.gradients().values():
        gradient *= 4  # as clipping does
    optimizer.step(0.5)
    for name, param in model.items():
        # 0.02 - 2 in bf16
        close(param, torch.full((2, 3), -1.9765625), f"{name}, after 0.5 x 4 was subtracted")
    close([param.data_ptr() for param in model.values()], addresses, "addresses of the weights")
    optimizer.zero_grad()
    tensors = [*model.values(), *optimizer.masters.values()]
    close([x for x in tensors if x.grad is not None], [], "gradients that are left")
    optimizer.masters["norm"].fill_(3.0)
    optimizer.publish()
    close(model.norm, torch.full((2, 3), 3.0), "the weight, after its master was restored")


# --- Memory and FLOPs, recomputation, compilation -------------------------------------------------


def tiny(dtype: torch.dtype, **shape) -> Decoder:
    """The preset tiny, with random weights."""
    return decoder(dtype=dtype, **vars(PRESETS["tiny"]) | shape)


def tokens_of(model: Decoder) -> Tensor:
    """A sequence of full length."""
    return torch.arange(model.config.seq_len)[None] * 7 % model.config.vocab_size


@task("masters", 2)
@cases("dtype, nbytes", [(BF16, 14_476_032), (FP32, 12_867_584)])
def test_law_of_training_state(dtype, nbytes):
    """Weights, gradients, masters and moments take 18 bytes for each of 804,224 parameters, in fp32
    16. (`Live` leaves out scalars, such as AdamW's counts of steps.)
    """
    with Live() as live:
        model = tiny(dtype)
        optimizer = step.Optimizer(model, step.Config())
        tokens = tokens_of(model)
        model(tokens, tokens).backward()
        begun = []
        hook = optimizer.torch_optimizer.register_step_pre_hook
        hook(lambda *args: begun.append(live.bytes))
        del tokens
        optimizer.step(0.1)
        close(begun, [nbytes - 8 * 804_224], "bytes when the update begins: all but the moments")
        close(live.bytes, nbytes, "bytes")


@task("recomputation", 2)
@cases(
    "dtype, recompute, nbytes",
    [
        # On a CPU each of two norms saves more: the normalised input in fp32 (4 bytes), and of bf16
        # also the input in fp32 (2 more)
        (BF16, "none", 4_648 + 2 * 128 * (4 + 2)),
        (FP32, "none", 9_256 + 2 * 128 * 4),
        (BF16, "full", 2 * 128),
    ],
)
def test_law_of_saved_bytes(dtype, recompute, nbytes):
    """What a layer of tiny saves for each token: 4,648 bytes in bf16, 9,256 in fp32, and on a CPU
    more for its norms. With recomputation only its input."""
    held = []
    for n_layers in (1, 2):
        model = tiny(dtype, n_layers=n_layers)
        tokens = tokens_of(model)
        step.RECOMPUTE[recompute](model)
        with Live() as live:
            loss = model(tokens, tokens)
            held.append(live.bytes)
        del loss
    close((held[1] - held[0]) / 256, float(nbytes), "bytes for each token")


def attention_flops(q: tuple, *args, **kwargs) -> int:
    """Two matrix products of [seq, seq] with [seq, head_dim] a head; half of them is masked."""
    batch, heads, length, head_dim = q
    return 2 * batch * heads * length * length * head_dim


def attention_backward_flops(dy: tuple, *args, **kwargs) -> float:
    """Five such products: the scores are computed again."""
    return 2.5 * attention_flops(dy)


@task("recomputation", 2)
@cases("recompute, flops", [("none", 5_538_560.0), ("full", 5_538_560.0 + 1_376_256.0)])
def test_law_of_flops(recompute, flops):
    """A token costs tiny 5,538,560 FLOPs. Recomputation repeats all of a layer but down_proj:
    four times 2 x 139,264 weights and 2 x 256 x 128 of attention.
    """
    model = tiny(FP32)
    tokens = tokens_of(model)
    step.RECOMPUTE[recompute](model)
    operators = torch.ops.aten
    attention = {
        operators._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        operators._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        model(tokens, tokens).backward()
    close(counter.get_total_flops() / 256, flops, "FLOPs of a token")


def backward_twice(model: Decoder):
    """Add up the gradients of two micro-batches."""
    step.accumulate_wide(model.parameters())
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    for shift in (1, 2):
        model(tokens, tokens.roll(shift)).backward()


def require_gradients_without_options(model: Decoder, bound: float = 1e-10):
    """Two micro-batches give `model` the gradients of the same model, in the same dtype, without
    --compile and --recompute.
    """
    plain = decoder(dtype=next(model.parameters()).dtype)
    for each in (model, plain):
        backward_twice(each)
    close_gradients(model, plain, bound=bound)


@task("recomputation", 3)
def test_recomputation_keeps_gradients():
    """With `full`, two micro-batches have the gradients of the model without it. Each forward of
    a layer hands `context_fn` on to torch's `checkpoint`.
    """
    model = decoder()
    context_fn = mock.Mock(side_effect=noop_context_fn)
    step.set_up_layers(model, step.Config(recompute="full"), context_fn=context_fn)
    require_gradients_without_options(model)
    close(context_fn.call_count, 6, "calls: 3 layers in 2 micro-batches")


@cases("dtype, recompute, bound", [(FP64, "full", 1e-10), (BF16, "none", 1e-2)])
def test_compile_traces_layers_and_loss(monkeypatch, dtype, recompute, bound):
    """--compile makes two graphs: one that all layers share, and the loss. Gradients stay the same.

    In bf16, fp32 gradients that exist before the first forward would break the layers' graph into
    several (8 graphs in all), if `run_with_grads_hidden` did not put them aside."""
    graphs = traced_graphs(monkeypatch)
    model = decoder(dtype=dtype)
    step.set_up_layers(model, step.Config(compile=True, recompute=recompute))
    step.accumulate_wide(model.parameters())
    for param in model.parameters():  # step 2's buckets, too, exist before the first forward
        param.grad = torch.zeros(param.shape, dtype=param.grad_dtype)
    require_gradients_without_options(model, bound)
    close(len(graphs), 2, "graphs")


@pytest.mark.exhaustive  # compiles C++ for about a minute
@cases("dtype, bound", [(FP32, 1e-5), (BF16, 2e-2)])
def test_compiled_gradients_are_those_of_eager(dtype, bound):
    """After two micro-batches, beside the same model in the same dtype without --compile."""
    torch._dynamo.reset()
    model = decoder(dtype=dtype)
    step.set_up_layers(model, step.Config(compile=True))
    require_gradients_without_options(model, bound)


# --- The loop -------------------------------------------------------------------------------------


def torch_optimizer(model: Decoder, config: step.Config) -> torch.optim.Optimizer:
    """PyTorch's AdamW or SGD, with decay on matrices."""
    norms = [param for param in model.parameters() if param.dim() == 1]
    matrices = [param for param in model.parameters() if param.dim() == 2]
    groups = [dict(params=norms, weight_decay=0.0), dict(params=matrices)]
    decay = config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, weight_decay=decay)
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=decay)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all targets of a batch but IGNORE."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


RATES = [0.025, 0.05, 0.05]  # of the flags in BASE: peak 0.05, two steps of warm-up


def plain_step(model: Decoder, batch: tuple, limit: float) -> tuple[float, float, dict]:
    """One backward of a whole batch; clip to the norm `limit`. Returns loss, norm and gradients."""
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    norm = nn.utils.get_total_norm(gradients.values()).item()
    if norm > limit > 0:
        for param in model.parameters():
            param.grad *= limit / norm
    return loss.item(), norm, gradients


RUNS = [
    (dict(steps=5), [*RATES, 0.03875, 0.01625]),  # a third and two thirds of the cosine
    (dict(optimizer="sgd", micro_batch_size=5), RATES),  # micro-batches of 5, 5 and 2 sequences
    (dict(tied=True, seed=3, grad_clip=0.0, recompute="full"), RATES),
    (
        dict(
            dataset="all-count",
            warmup_steps=0,
            weight_decay=0.0,
            grad_clip=1e4,
            micro_batch_size=12,
        ),
        [0.05, 0.05 * 0.775, 0.05 * 0.325],
    ),
]


@task("loop", 7)
@cases("flags, rates", RUNS)
def test_train(flags, rates):
    """Training equals a loop of torch alone, on whole batches, with the mean over all targets.

    Of --dataset uneven, the tests' default, more than half of the targets are IGNORE (`read_uneven`
    in equal.py). All others, here all-count, have none."""
    losses, norms, gradients, weights = train(STEP1, flags)
    flags = BASE | flags
    model = on_meta(tied=flags.pop("tied", False))
    config = step.Config(**flags)
    initial.materialize(model, config.seed, CPU, FP64)
    model.loss = mean_loss
    rule = torch_optimizer(model, config)
    data = Data(config.dataset, model.config, 12, config.seed)
    for number, rate in enumerate(rates):
        loss, norm, expected = plain_step(model, data.batch(number), config.grad_clip)
        close(losses[number], loss, f"step {number + 1}: the loss")
        close(norms[number], norm, f"step {number + 1}: the norm")
        found = together(gradients[number])
        for name, gradient in expected.items():
            close(found[name], gradient, f"step {number + 1}: gradient of {name}")
        for group in rule.param_groups:
            group["lr"] = rate
        rule.step()
    masters = together(weights)
    for name, param in model.named_parameters():
        close(masters[name], param, f"at the end: {name}")


@task("loop", 1)
def test_the_loss_of_a_bf16_run_is_a_mean_in_fp32():
    """Of 36 micro-batches with 275 targets. In bf16 their sum, and 275, would be rounded."""
    losses, *_ = train(STEP1, dict(dtype="bf16", steps=1, global_batch_size=36))
    model = on_meta()
    initial.materialize(model, 0, CPU, BF16)
    tokens, targets = Data("uneven", model.config, 36, 0).batch(0)
    total = sum(model(x[None], y[None]).item() for x, y in zip(tokens, targets, strict=True))
    close(losses[0], total / 275, "the loss", bound=1e-6)


@task("loop", 1)
def test_what_is_recorded():
    """The number of a step, the tokens of its 12 sequences of 16, and the rate of its update."""
    flags = dict(global_batch_size=12, micro_batch_size=5, lr=0.05, warmup_steps=2)
    run = run_of(STEP1, flags)
    rows = [(row["step"], row["tokens"], row["lr"]) for row in run.history]
    close(rows, [(1, 192, 0.025), (2, 192, 0.05), (3, 192, 0.05)], "steps, tokens and rates")


@task("loop", 1)
def test_without_targets_loss_and_gradients_are_zero(monkeypatch):
    """If all targets are IGNORE, losses and norms are 0, and not 0 / 0, which is nan. The last
    norm's weight stays 1. Matrices still decay.
    """
    batch = (torch.ones(12, 16, dtype=torch.int64), torch.full((12, 16), IGNORE))
    monkeypatch.setattr(Data, "batch", lambda data, number: batch)
    losses, norms, _, weights = train(STEP1, {})
    close((losses, norms), ([0.0] * 3, [0.0] * 3), "losses and gradient norms")
    close(together(weights)["model.norm.weight"], torch.ones(32), "the last norm's weight")
    model = on_meta()
    initial.materialize(model, 0, CPU, FP64)
    head = model.lm_head.weight * math.prod(1 - 0.1 * rate for rate in RATES)
    close(together(weights)["lm_head.weight"], head, "the head, which decays")


def train_watched(monkeypatch: pytest.MonkeyPatch, watch: Callable, **flags):
    """Train the preset debug, and call `watch` with its model before the first step. Until it is
    initialised, the model has no memory.
    """

    class WatchModel(Watch):
        def steps(self, model: Decoder, **others: Any) -> Iterator[int]:
            watch(model)
            return super().steps(model=model, **others)

    def new_decoder(shape: ModelConfig) -> Decoder:
        close(torch.get_default_device().type, "meta", "where the model is made")
        return Decoder(shape)

    monkeypatch.setattr(step, "Decoder", new_decoder)
    compiled = []
    monkeypatch.setattr(step, "compile_model", compiled.append)
    run = WatchModel(step.Config(**BASE | flags, model="debug", compile=True))
    step.train(run.config, run)
    close(len(compiled), 1, "calls of compile_model")


@task("loop", 1)
@cases("what", ["grad norm", "loss"])
def test_a_number_that_is_not_finite_ends_the_run_before_the_update(monkeypatch, what):
    """If it becomes inf in step 2, the error names it and --lr, and weights stay finite."""
    weights = []
    calls = []

    def spoil(*args: Any) -> Tensor:
        calls.append(args)
        return args[-1] * math.inf if len(calls) == 2 else args[-1]

    def watch(model: Decoder):
        weights.extend(model.parameters())
        if what == "loss":
            model.register_forward_hook(spoil)
        else:
            model.model.norm.weight.register_hook(spoil)

    with pytest.raises(UserError, match=f"step 2: the {what} is inf: lower --lr"):
        train_watched(monkeypatch, watch, micro_batch_size=12)
    assert all(weight.isfinite().all() for weight in weights), "weights are not finite"


@task("loop", 1)
def test_memory_of_a_micro_batch_is_freed(monkeypatch):
    """A micro-batch is 5, 5 or 2 of 12 sequences. A step's gradients are freed after it, a
    micro-batch's activations before the next, and its graph before the next but one.
    """
    begun = []
    gradients = []
    graphs = []
    activations = []
    held = []

    def note(module: nn.Module, inputs: tuple):
        begun.append((len(inputs[0]), alive(gradients) > 0))
        held.append([alive(activations), alive(graphs)])

    def mark(module: nn.Module, inputs: tuple, loss: Tensor):
        marker = nn.Module()
        loss.grad_fn.metadata["marker"] = marker  # lives as long as the graph
        graphs.append(weakref.ref(marker))

    def see(module: nn.Module, inputs: tuple, output: Tensor):
        activations.append(weakref.ref(output))

    def watch(model: Decoder):
        model.register_forward_pre_hook(note)
        model.register_forward_hook(mark)
        model.model.norm.register_forward_hook(see)
        head = model.lm_head.weight
        head.register_post_accumulate_grad_hook(lambda p: gradients.append(weakref.ref(p.grad)))

    train_watched(monkeypatch, watch, steps=2, micro_batch_size=5)
    sizes = [(5, False), (5, True), (2, True)]
    close(begun, sizes * 2, "each forward's sequences, and whether a gradient is there before it")
    close(held, [[0, 0]] + [[0, 1]] * 5, "activations and graphs that are alive before a forward")
    close(alive(gradients), 0, "gradients of the head that are alive after the last step")


@task("loop", 1)
def test_batches_follow_the_number_of_the_step(monkeypatch):
    """A run that has done three of five steps reads batches 3 and 4, from the fourth step's rate
    on: 0.05, after a third of the cosine.
    """
    batch = Data.batch
    read = []

    def note(data: Data, number: int) -> tuple[Tensor, Tensor]:
        read.append(number)
        return batch(data, number)

    monkeypatch.setattr(Data, "batch", note)
    monkeypatch.setattr(Run, "restore", lambda run: 3)
    history = run_of(STEP1, dict(steps=5)).history
    close(read, [3, 4], "batches")
    close(history[0]["lr"], 0.03875, "the rate")


def test_launch(tmp_path):
    """The script trains on the default data, and begins with the loss of a guess: ln 257 = 5.55."""
    flags = ["--model=debug", "--device=cpu", "--steps=2", "--global-batch-size=4"]
    script = Script(script_of(STEP1), *flags, f"--out={tmp_path}", log=tmp_path / "log")
    close(script.end().status, 0, "status")
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    close(json.loads(first)["loss"], 5.55, "the first loss", bound=0.02)
