"""Lab 1: what is demanded of the model and the trainer on one device. Functions `..._on_rank` run in a student's world.

Each comparison is with the formula written out plainly: complex numbers for RoPE, an explicit softmax for attention,
whole logits for the loss, fp32 weights for the update.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step01_single_gpu as step01
from common import model
from common.data import Batch, TokenData
from common.layout import materialize
from common.model import IGNORE, Decoder, ModelConfig
from labs import training
from labs.bench import IN_BF16, IN_FP32, Bench, Wrong, numbers
from services.memory import MemoryTimeline
from services.run import Run
from tests.bench.recompute import MODES, counted_flops, saved_bytes
from tests.equivalence import SMALL
from theory.flops import flops_per_token
from theory.memory import activation_bytes

CPU = torch.device("cpu")
RUN = dict(optimizer="sgd", n_layers=2, micro_batch_size=2, global_batch_size=8, steps=4)
WHOLE = (1, dict(recompute="full"))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def shape_of(heads: int, kv_heads: int, head_dim: int, **more: Any) -> ModelConfig:
    """A small decoder's shape."""
    sizes = dict(dim=heads * head_dim, n_layers=2, n_heads=heads, n_kv_heads=kv_heads, ffn_dim=20, vocab_size=13)
    return ModelConfig(**sizes | dict(seq_len=8) | more)


# --- task 1: RoPE ----------------------------------------------------------------------------------------------------


def rope_on_rank(seed: int, batch: int, heads: int, head_dim: int, theta: int, scaling: float) -> dict:
    """Tables for positions [seq] and [batch, seq], in three dtypes, with and without scaling; tensors rotated."""
    config, found = shape_of(heads, heads, head_dim, rope_theta=float(theta)), {}
    for name, positions in rope_positions(seed, batch).items():
        cos, sin = model.rope_tables(positions, config, torch.float64)
        x = numbers(seed, f"x {name}", batch, positions.shape[-1], heads, head_dim)
        found |= {f"cos for positions {name}": cos, f"sin for positions {name}": sin}
        found[f"x rotated, positions {name}"] = model.apply_rope(x, *rope_by_hand(positions, config)[1:])
    cos, sin = model.rope_tables(positions, replace(config, rope_scaling=scaling), torch.float64)
    found |= {"cos with rope_scaling": cos, "sin with rope_scaling": sin}
    for name in ("bf16", "fp32"):
        tables = model.rope_tables(torch.arange(0, 4000, 131), config, DTYPES[name])
        found |= {f"dtypes of the tables in {name}": [str(t.dtype) for t in tables], f"cos in {name}": tables[0]}
        x = torch.ones(1, 3, heads, head_dim, dtype=DTYPES[name])
        tables = [t.float() for t in rope_by_hand(torch.arange(3), config)[1:]]
        found[f"dtype of x rotated in {name}"] = str(model.apply_rope(x, *tables).dtype)
    return found


def rope_positions(seed: int, batch: int) -> dict[str, Tensor]:
    """Positions of shape [seq] and [batch, seq], not from 0 on."""
    some = numbers(seed, "positions", batch, 6).abs().mul(900).long()
    return {"[seq]": some[0], "[batch, seq]": some}


def rope_by_hand(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(e^(i angle) complex [..., seq, 1, head_dim/2], cos, sin [..., seq, 1, head_dim])."""
    half = config.head_dim // 2
    frequency = torch.tensor([config.rope_theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    if config.rope_scaling != 1:
        turns = frequency * 8192 / (2 * math.pi)
        kept = torch.where(turns >= 4, 1.0, torch.where(turns <= 1, 0.0, (turns - 1) / 3))
        frequency = frequency * (kept + (1 - kept) / config.rope_scaling)
    turned = torch.polar(torch.ones(half, dtype=torch.float64), positions[..., None, None] * frequency)
    return turned, torch.cat([turned.real] * 2, -1), torch.cat([turned.imag] * 2, -1)


def rope_case(bench: Bench) -> tuple:
    """(seed, batch, heads, head_dim, theta, scaling) of task 1."""
    draw = bench.draws()
    return (draw.randrange(10**6), draw.randint(2, 3), draw.randint(1, 3), 2 * draw.randint(2, 8),
            draw.choice((10000, 500000)), draw.choice((8.0, 32.0)))  # fmt: skip


def rope_config(case: tuple) -> ModelConfig:
    """The shape of a case."""
    return shape_of(case[2], case[2], case[3], rope_theta=float(case[4]))


def rope_angles(bench: Bench):
    """The tables of fp64."""
    case = rope_case(bench)
    run, expected = bench.ranks(1, rope_on_rank, *case), {}
    for name, positions in rope_positions(*case[:2]).items():
        _, cos, sin = rope_by_hand(positions, rope_config(case))
        expected |= {f"cos for positions {name}": cos, f"sin for positions {name}": sin}
    bench.same(run, lambda r: expected)


def rope_rotation(bench: Bench):
    """The rotation, as a product of complex numbers."""
    case = rope_case(bench)
    seed, batch, heads, head_dim, *_ = case
    run, expected = bench.ranks(1, rope_on_rank, *case), {}
    for name, positions in rope_positions(seed, batch).items():
        x = numbers(seed, f"x {name}", batch, positions.shape[-1], heads, head_dim)
        turned = torch.complex(*x.chunk(2, -1)) * rope_by_hand(positions, rope_config(case))[0]
        expected[f"x rotated, positions {name}"] = torch.cat((turned.real, turned.imag), -1)
    expected |= {f"dtype of x rotated in {name}": str(DTYPES[name]) for name in ("bf16", "fp32")}
    bench.same(run, lambda r: expected)


def rope_precision(bench: Bench):
    """fp32 tables in a bf16 run."""
    case = rope_case(bench)
    run, (_, cos, _) = bench.ranks(1, rope_on_rank, *case), rope_by_hand(torch.arange(0, 4000, 131), rope_config(case))
    bench.same(run, lambda r: {f"dtypes of the tables in {name}": ["torch.float32"] * 2 for name in ("bf16", "fp32")})
    bench.same(run, lambda r: {f"cos in {name}": cos for name in ("bf16", "fp32")}, bound=1e-3)


def rope_scaled(bench: Bench):
    """Llama 3.1's stretched wave lengths."""
    case = rope_case(bench)
    config = replace(rope_config(case), rope_scaling=case[5])
    _, cos, sin = rope_by_hand(rope_positions(*case[:2])["[batch, seq]"], config)
    run = bench.ranks(1, rope_on_rank, *case)
    bench.same(run, lambda r: {"cos with rope_scaling": cos, "sin with rope_scaling": sin})


# --- task 2: the layer -----------------------------------------------------------------------------------------------


def layer_on_rank(seed: int, batch: int, heads: int, kv_heads: int, head_dim: int, s: int) -> dict:
    """Attention's core, both blocks, a layer, the decoder and a gradient, of drawn weights; then with other cores."""
    config = shape_of(heads, kv_heads, head_dim)
    decoder, x, cos, sin, tokens = layer_inputs(seed, config, batch, s)
    layer, calls = decoder.model.layers["0"], []
    q, k, v = (
        numbers(seed, name, batch, s, n, head_dim) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    found = {"attend": model.attend(q, k, v), "Attention": layer.self_attn(x, cos, sin), "MLP": layer.mlp(x)}
    found |= {"DecoderLayer": layer(x, cos, sin), "Decoder": (hidden := decoder(tokens))}
    found["Decoder at other positions"] = decoder(tokens, torch.arange(s) * 2 + 5)
    hidden.backward(numbers(seed, "dy", *hidden.shape))
    found["the gradient of the embedding"] = decoder.model.embed_tokens.weight.grad

    def project(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        calls.append(f"project {len(linears)}")
        return [2 * linear(x) for linear in linears]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(f"attend {list(q.shape)} {list(k.shape)} {list(v.shape)}")
        return q + k.sum(2, keepdim=True) + v.sum(2, keepdim=True)

    layer.self_attn.project = layer.mlp.project = project
    layer.self_attn.attend = attend
    found |= {"Attention with other cores": layer.self_attn(x, cos, sin), "MLP with another `project`": layer.mlp(x)}
    return found | {"calls of the cores": calls}


def layer_inputs(seed: int, config: ModelConfig, batch: int, s: int) -> tuple:
    """(a decoder with drawn weights, also of the norms; x; RoPE's tables; tokens)."""
    decoder = Decoder(config).double()
    for name, param in decoder.named_parameters():
        drawn = numbers(seed, name, *param.shape)
        param.data.copy_(drawn / param.shape[-1] ** 0.5 if param.dim() > 1 else 1 + drawn / 4)
    tokens = numbers(seed, "tokens", batch, s).abs().mul(1e6).long() % config.vocab_size
    cos, sin = rope_by_hand(torch.arange(s), config)[1:]
    return decoder, numbers(seed, "x", batch, s, config.dim), cos, sin, tokens


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with an explicit softmax, one query head after another."""
    s, outputs = q.shape[1], []
    later = torch.ones(s, s, dtype=torch.bool).triu(1)
    for head in range(q.shape[2]):
        own = head * k.shape[2] // q.shape[2]
        scores = torch.einsum("bid,bjd->bij", q[:, :, head], k[:, :, own]) / q.shape[-1] ** 0.5
        outputs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, :, own])
    return torch.stack(outputs, 2)


def norm_by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layers_by_hand(decoder: Decoder, x: Tensor, rotate: Callable, layers: list[str]) -> Tensor:
    """The residual stream after these layers."""
    for number in layers:
        layer, c = decoder.model.layers[number], decoder.config
        x = x + attention_block(layer.self_attn, norm_by_hand(x, layer.input_layernorm.weight, c.norm_eps), rotate)
        x = x + mlp_block(layer.mlp, norm_by_hand(x, layer.post_attention_layernorm.weight, c.norm_eps))
    return x


def attention_block(
    block: Any, x: Tensor, rotate: Callable, attend: Callable = attention_by_hand, by: int = 1
) -> Tensor:
    """Attention from its weights; `by`: a factor of what they project."""
    q, k, v = (
        (by * x @ p.weight.T).unflatten(-1, (-1, block.head_dim)) for p in (block.q_proj, block.k_proj, block.v_proj)
    )
    return attend(rotate(q), rotate(k), v).flatten(-2) @ block.o_proj.weight.T


def mlp_block(block: Any, x: Tensor, by: int = 1) -> Tensor:
    """SwiGLU from its weights."""
    gate, up = by * x @ block.gate_proj.weight.T, by * x @ block.up_proj.weight.T
    return (gate / (1 + (-gate).exp()) * up) @ block.down_proj.weight.T


def rotation(positions: Tensor, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """RoPE for these positions."""
    turned = rope_by_hand(positions, config)[0]

    def rotate(x: Tensor) -> Tensor:
        y = torch.complex(*x.chunk(2, -1)) * turned
        return torch.cat((y.real, y.imag), -1)

    return rotate


def layer_case(bench: Bench) -> tuple[int, ...]:
    """(seed, batch, heads, key/value heads, head_dim, tokens) of task 2."""
    draw = bench.draws()
    kv_heads = draw.choice((2, 3))
    return draw.randrange(10**6), draw.randint(1, 2), 2 * kv_heads, kv_heads, 2 * draw.randint(2, 4), draw.randint(5, 8)


def layer_expected(case: tuple) -> dict[str, Any]:
    """All by hand."""
    seed, batch, heads, kv_heads, head_dim, s = case
    config = shape_of(heads, kv_heads, head_dim)
    decoder, x, _, _, tokens = layer_inputs(seed, config, batch, s)
    layer, rotate = decoder.model.layers["0"], rotation(torch.arange(s), config)
    q, k, v = (
        numbers(seed, name, batch, s, n, head_dim) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    found = {"attend": attention_by_hand(q, k, v), "Attention": attention_block(layer.self_attn, x, rotate)}
    found |= {"MLP": mlp_block(layer.mlp, x), "DecoderLayer": layers_by_hand(decoder, x, rotate, ["0"])}
    for name, positions in (("Decoder", torch.arange(s)), ("Decoder at other positions", torch.arange(s) * 2 + 5)):
        y = layers_by_hand(decoder, decoder.model.embed_tokens(tokens), rotation(positions, config), ["0", "1"])
        found[name] = norm_by_hand(y, decoder.model.norm.weight, config.norm_eps)
    found["Decoder"].backward(numbers(seed, "dy", batch, s, config.dim))
    found["the gradient of the embedding"] = decoder.model.embed_tokens.weight.grad
    sums = lambda q, k, v: q + k.sum(2, keepdim=True) + v.sum(2, keepdim=True)  # noqa: E731
    found["Attention with other cores"] = attention_block(layer.self_attn, x, rotate, sums, 2)
    found["MLP with another `project`"] = mlp_block(layer.mlp, x, 2)
    shapes = [[batch, s, n, head_dim] for n in (heads, kv_heads, kv_heads)]
    found["calls of the cores"] = ["project 3", f"attend {shapes[0]} {shapes[1]} {shapes[2]}", "project 2"]
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in found.items()}


def layer_parts(bench: Bench, *keys: str):
    """Some of the answers."""
    case = layer_case(bench)
    run, expected = bench.ranks(1, layer_on_rank, *case), layer_expected(case)
    bench.same(run, lambda r: {key: expected[key] for key in keys})


def layer_attention(bench: Bench):
    """The attention block and its core."""
    layer_parts(bench, "attend", "Attention")


def layer_mlp(bench: Bench):
    """SwiGLU and the layer around it."""
    layer_parts(bench, "MLP", "DecoderLayer")


def layer_decoder(bench: Bench):
    """The whole model, both ways."""
    layer_parts(bench, "Decoder", "Decoder at other positions", "the gradient of the embedding")


def layer_cores(bench: Bench):
    """`self.project` and `self.attend` are called, and can be replaced."""
    layer_parts(bench, "calls of the cores", "Attention with other cores", "MLP with another `project`")


# --- task 3: the loss ------------------------------------------------------------------------------------------------


def loss_on_rank(seed: int, batch: int, s: int, dim: int, vocab: int, chunk: int) -> dict:
    """The loss of a head, in chunks, with gradients, bytes and frozen inputs; and that of a part of the vocabulary."""
    hidden, weight, targets = loss_inputs(seed, batch, s, dim, vocab)
    hidden, head, found = hidden.requires_grad_(), head_of(weight), {}
    timeline = MemoryTimeline()
    with timeline.phase("forward"):
        loss = head.loss(hidden, targets, chunk)
    found["bytes kept for backward"] = timeline.live("activations") - loss.nbytes
    found["bytes of the largest tensor"] = max(event.bytes for event in timeline.events)
    (loss / 7).backward()
    found |= {"the loss": loss, "the gradient of hidden": hidden.grad, "the gradient of the weight": head.weight.grad}
    with torch.no_grad():
        found["the loss without gradients"] = head.loss(hidden, targets, chunk)
    for frozen in ("hidden", "weight"):
        x, w = (
            t.detach().clone().requires_grad_(name != frozen) for name, t in (("hidden", hidden), ("weight", weight))
        )
        model.ChunkedCrossEntropy.apply(x.flatten(0, -2), w, targets.flatten(), chunk).backward()
        found[f"gradients if {frozen} is frozen"] = [x.grad is not None, w.grad is not None]
    return found | part_of_vocabulary(seed, batch, s, dim, vocab, chunk) | narrow_loss(seed, batch, s, dim, vocab)


def part_of_vocabulary(seed: int, batch: int, s: int, dim: int, vocab: int, chunk: int) -> dict:
    """cross_entropy_and_gradients of rows 3 to vocab-1 of the vocabulary and two rows of padding."""
    hidden, weight, targets = loss_inputs(seed, batch, s, dim, vocab)
    x, targets, place = hidden.flatten(0, -2), targets.flatten(), [0]
    others = x @ weight[:3].T

    def combine(log_sum: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        own = slice(place[0], place[0] + len(log_sum))
        place[0] += len(log_sum)
        theirs = torch.where(
            (targets[own] >= 0) & (targets[own] < 3), others[own].gather(1, targets[own, None].clamp(0, 2))[:, 0], 0
        )
        return torch.logaddexp(log_sum, others[own].logsumexp(-1, keepdim=True)), picked + theirs[:, None]

    part = F.pad(weight[3:], (0, 0, 0, 2))
    answer = model.cross_entropy_and_gradients(x, part, targets, chunk, (True, True), range(3, vocab), combine)
    names = ("the loss", "the part of hidden's gradient", "the gradient of the part")
    return {
        f"rows 3 to {vocab - 1} of the vocabulary: {name}": value for name, value in zip(names, answer, strict=True)
    }


def narrow_loss(seed: int, batch: int, s: int, dim: int, vocab: int) -> dict:
    """In bf16, where many chunks add to one weight gradient."""
    hidden, weight, targets = loss_inputs(seed, 8 * batch, s, dim, vocab)
    hidden, head = hidden.bfloat16().requires_grad_(), head_of(weight.bfloat16())
    loss = head.loss(hidden, targets, 1)
    loss.backward()
    found = {"dtypes in bf16": [str(t.dtype) for t in (loss, hidden.grad, head.weight.grad)]}
    return found | {"the gradient of the weight in bf16, one token a chunk": head.weight.grad.double()}


def head_of(weight: Tensor) -> model.Head:
    """A head with these weights."""
    head = model.Head(weight.shape[1], weight.shape[0], bias=False)
    head.weight = nn.Parameter(weight.clone())
    return head


def loss_inputs(seed: int, batch: int, s: int, dim: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [batch, seq, dim], weight [vocab, dim], targets int64 [batch, seq], some of them IGNORE."""
    targets = numbers(seed, "targets", batch, s).abs().mul(1e6).long() % vocab
    targets[0, 1], targets[-1, -1], targets[0, 0] = IGNORE, vocab - 1, 1
    return numbers(seed, "hidden", batch, s, dim), numbers(seed, "weight", vocab, dim), targets


def loss_case(bench: Bench) -> tuple[int, ...]:
    """(seed, batch, tokens, dim, vocabulary, tokens of a chunk), many words, and a last chunk that is shorter."""
    draw = bench.draws()
    return (
        draw.randrange(10**6),
        2,
        2 * draw.randint(10, 14) + 1,
        draw.randint(5, 9),
        draw.randint(200, 300),
        draw.randint(5, 7),
    )


def loss_expected(seed: int, batch: int, s: int, dim: int, vocab: int) -> dict[str, Tensor]:
    """With whole logits, by autograd."""
    hidden, weight, targets = loss_inputs(seed, batch, s, dim, vocab)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logits = (hidden @ weight.T).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    dlogits, dhidden, dweight = torch.autograd.grad(loss, (logits, hidden, weight))
    part = (dlogits[:, 3:] @ weight[3:]).detach()
    return dict(loss=loss.detach(), hidden=dhidden, weight=dweight, part=part)


def loss_values(bench: Bench):
    """The sum, in chunks, of what is not IGNORE."""
    case = loss_case(bench)
    right = loss_expected(*case[:5])["loss"]
    bench.same(bench.ranks(1, loss_on_rank, *case), lambda r: {"the loss": right, "the loss without gradients": right})


def loss_gradients(bench: Bench):
    """Its gradients, only where they are wanted."""
    case = loss_case(bench)
    right, run = loss_expected(*case[:5]), bench.ranks(1, loss_on_rank, *case)
    expected = {"the gradient of hidden": right["hidden"] / 7, "the gradient of the weight": right["weight"] / 7}
    expected |= {"gradients if hidden is frozen": [False, True], "gradients if weight is frozen": [True, False]}
    bench.same(run, lambda r: expected)


def loss_bytes(bench: Bench):
    """The logits of one chunk at a time; kept are two gradients."""
    case = loss_case(bench)
    _, batch, s, dim, vocab, chunk = case
    run = bench.ranks(1, loss_on_rank, *case)
    most = 8 * max(vocab * dim, vocab * chunk, batch * s * dim)
    found = run.answers[0]["bytes of the largest tensor"]
    if found > most:
        whole = " - all logits at once" if found == 8 * batch * s * vocab else ""
        raise Wrong(f"the largest tensor has {found} bytes, more than {most}{whole}")
    bench.same(run, lambda r: {"bytes kept for backward": 8 * (batch * s * dim + vocab * dim)})


def loss_narrow(bench: Bench):
    """In bf16 the loss is fp32, and chunks are added in fp32."""
    case = loss_case(bench)
    seed, batch, s, dim, vocab, _ = case
    hidden, weight, targets = (t.bfloat16().double() if t.is_floating_point() else t
                               for t in loss_inputs(seed, 8 * batch, s, dim, vocab))  # fmt: skip
    weight = weight.requires_grad_()
    F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    run = bench.ranks(1, loss_on_rank, *case)
    bench.same(run, lambda r: {"dtypes in bf16": ["torch.float32", "torch.bfloat16", "torch.bfloat16"]})
    bench.same(run, lambda r: {"the gradient of the weight in bf16, one token a chunk": weight.grad}, IN_BF16)


def loss_of_a_part(bench: Bench):
    """Where step 4 cuts the vocabulary: other ranks' words, and padding."""
    case = loss_case(bench)
    right, vocab = loss_expected(*case[:5]), case[4]
    expected = {"the loss": right["loss"], "the part of hidden's gradient": right["part"]}
    expected["the gradient of the part"] = F.pad(right["weight"][3:], (0, 0, 0, 2))
    expected = {f"rows 3 to {vocab - 1} of the vocabulary: {name}": value for name, value in expected.items()}
    bench.same(bench.ranks(1, loss_on_rank, *case), lambda r: expected)


# --- task 4: the update ----------------------------------------------------------------------------------------------


def optimizer_of(seed: int, dtype: str, **flags: Any) -> step01.Optimizer:
    """Step 1's optimizer of a small decoder."""
    config = step01.Config(**SMALL | dict(n_layers=1, optimizer="sgd", weight_decay=0.0) | flags)
    with torch.device("meta"):
        decoder = Decoder(shape_of(2, 1, 4))
    materialize(decoder, seed, CPU, DTYPES[dtype])
    return step01.Optimizer(decoder, config)


def give(optimizer: step01.Optimizer, seed: int, size: float, leave_out: str = ""):
    """Drawn gradients, times the loss scale; the parameter `leave_out` has none."""
    for name, param in optimizer.params.items():
        drawn = numbers(seed, f"gradient of {name}", *param.shape) * size * optimizer.loss_scale
        param.grad = None if name == leave_out else drawn.to(param.grad_dtype or param.dtype)


def weights(optimizer: step01.Optimizer) -> dict[str, Tensor]:
    """All parameters."""
    return {name: param.detach().clone() for name, param in optimizer.params.items()}


NORM, LEFT_OUT = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


def update_on_rank(seed: int, size: float) -> dict:
    """Norm, clipping and updates in fp64; then masters in bf16; then the loss scale in fp16."""
    found: dict[str, Any] = {}
    for clip in (0.0, 1.0, 1e6):
        optimizer = optimizer_of(seed, "fp64", grad_clip=clip)
        give(optimizer, seed, size, LEFT_OUT)
        found["the norm"] = norm = optimizer.grad_norm()
        found["names of the gradients"] = sorted(optimizer.gradients())
        found[f"step returns, grad_clip={clip:g}"] = optimizer.step(0.1, norm)
        found |= {f"grad_clip={clip:g}: {name}": value for name, value in weights(optimizer).items()}
    optimizer.zero_grad()
    found["gradients after zero_grad"] = len(optimizer.gradients())
    optimizer = optimizer_of(seed, "bf16", grad_clip=0.0)
    for _ in range(40):
        give(optimizer, seed, 0.01)
        optimizer.step(1e-3, optimizer.grad_norm())
        optimizer.zero_grad()
    found |= {f"bf16, after 40 small steps: {name}": value.float() for name, value in weights(optimizer).items()}
    found["tensors left by zero_grad"] = sum(t.grad is not None for t in optimizer.masters.values())
    return found | scales(seed, size)


def scales(seed: int, size: float) -> dict:
    """The loss scale of fp16, from 65536 on: 999 good steps, one more, and an overflow."""
    optimizer = optimizer_of(seed, "fp16", grad_clip=0.5)
    give(optimizer, seed, size)
    found = {"fp16: the norm": optimizer.grad_norm()}
    optimizer.step(0.1, found["fp16: the norm"])
    found |= {f"fp16, one step: {name}": value.float() for name, value in weights(optimizer).items()}
    optimizer.good_steps = 998
    for good in (999, 1000):
        give(optimizer, seed, size)
        optimizer.step(0.0, optimizer.grad_norm())
        found[f"the loss scale after {good} good steps"] = optimizer.loss_scale
    give(optimizer, seed, size)
    before = weights(optimizer)
    optimizer.params[NORM].grad[0] = torch.inf
    found["step returns after an overflow"] = optimizer.step(0.1, optimizer.grad_norm())
    found["the loss scale after an overflow"] = optimizer.loss_scale
    found["weights changed by an overflow"] = sum(not torch.equal(before[n], w) for n, w in weights(optimizer).items())
    optimizer.good_steps = optimizer.good_steps + 999  # 999, if the overflow has set it to 0
    give(optimizer, seed, size)
    optimizer.step(0.0, optimizer.grad_norm())
    return found | {"the loss scale 1000 good steps after an overflow": optimizer.loss_scale}


def update_case(bench: Bench) -> tuple[int, float]:
    """(seed, size of the gradients)."""
    draw = bench.draws()
    return draw.randrange(1000), draw.choice((0.5, 0.75, 1.5))


def start_weights(seed: int) -> dict[str, Tensor]:
    """The initial values."""
    with torch.device("meta"):
        decoder = Decoder(shape_of(2, 1, 4))
    materialize(decoder, seed, CPU, torch.float64)
    return {name: param.detach() for name, param in decoder.named_parameters()}


def drawn_gradients(
    seed: int, size: float, dtype: torch.dtype = torch.float64, leave_out: str = ""
) -> dict[str, Tensor]:
    """Those of `give`, without the loss scale; zero for what is left out."""
    shapes = {name: value.shape for name, value in start_weights(seed).items()}
    drawn = {
        name: (numbers(seed, f"gradient of {name}", *shape) * size).to(dtype).double() for name, shape in shapes.items()
    }
    return {name: value * (name != leave_out) for name, value in drawn.items()}


def total_norm(gradients: dict[str, Tensor]) -> float:
    """The L2 norm of all."""
    return sum(float(g.square().sum()) for g in gradients.values()) ** 0.5


def update_norm(bench: Bench):
    """The norm, without the loss scale; gradients freed."""
    case = update_case(bench)
    run, names = bench.ranks(1, update_on_rank, *case), sorted(set(start_weights(case[0])) - {LEFT_OUT})
    expected = {"names of the gradients": names, "the norm": total_norm(drawn_gradients(*case, leave_out=LEFT_OUT))}
    bench.same(run, lambda r: expected | {"gradients after zero_grad": 0, "tensors left by zero_grad": 0})
    narrow = {"fp16: the norm": total_norm(drawn_gradients(*case))}
    bench.same(run, lambda r: narrow, IN_FP32)


def update_clipped(bench: Bench):
    """Plain SGD with the gradient times min(1, clip / norm)."""
    case = update_case(bench)
    run, before = bench.ranks(1, update_on_rank, *case), start_weights(case[0])
    gradients = drawn_gradients(*case, leave_out=LEFT_OUT)
    for clip in (1e6, 0.0, 1.0):
        factor = min(1.0, clip / total_norm(gradients)) if clip else 1.0
        expected = {f"grad_clip={clip:g}: {name}": w - 0.1 * factor * gradients[name] for name, w in before.items()}
        bench.same(run, lambda r, e=expected, clip=clip: {f"step returns, grad_clip={clip:g}": True} | e)


def update_masters(bench: Bench):
    """In bf16, the rounded sum of what fp32 weights would be."""
    case = update_case(bench)
    run, expected = bench.ranks(1, update_on_rank, *case), {}
    gradients = drawn_gradients(case[0], 0.01, torch.float32)
    for name, value in start_weights(case[0]).items():
        master = value.bfloat16().float() - 40 * 1e-3 * gradients[name]
        expected[f"bf16, after 40 small steps: {name}"] = master.bfloat16().float()
    bench.same(run, lambda r: expected, bound=2e-3)


def update_scale(bench: Bench):
    """fp16: scale taken out, halved at an overflow, doubled after 1000 good steps."""
    case = update_case(bench)
    run, gradients, before = bench.ranks(1, update_on_rank, *case), drawn_gradients(*case), start_weights(case[0])
    factor, expected = 0.5 / total_norm(gradients), {}
    for name, value in before.items():
        expected[f"fp16, one step: {name}"] = (value.half().double() - 0.1 * factor * gradients[name]).half().float()
    bench.same(run, lambda r: expected, bound=1e-3)
    law = {"the loss scale after 999 good steps": 2.0**16, "the loss scale after 1000 good steps": 2.0**17}
    law |= {"step returns after an overflow": False, "the loss scale after an overflow": 2.0**16}
    law |= {"weights changed by an overflow": 0, "the loss scale 1000 good steps after an overflow": 2.0**17}
    bench.same(run, lambda r: law)


# --- task 5: the loop ------------------------------------------------------------------------------------------------


@contextmanager
def uneven_targets() -> Iterator[None]:
    """Most targets do not count in the first two of every four sequences: micro-batches have few or many."""
    right = TokenData.batch

    def batch(self: TokenData, step: int, rows: slice = slice(None)) -> Batch:
        tokens, targets, _ = right(self, step)
        masked = torch.zeros_like(targets, dtype=torch.bool)
        masked[torch.arange(len(targets)) % 4 < 2, 2:] = True
        targets = targets.masked_fill(masked, IGNORE)
        return Batch(tokens[rows], targets[rows], int((targets != IGNORE).sum()))

    with mock.patch.object(TokenData, "batch", batch):
        yield


def uneven_on_rank(step: str, options: str) -> dict[str, Any]:
    """`training.trained` with uneven targets."""
    with uneven_targets():
        return training.trained(step, options)


def booked_on_rank(options: str) -> dict[str, Any]:
    """The phases that `train` books, in order."""
    booked: list[str] = []
    right = Run.phase

    def phase(self: Run, name: str, action: Any = None) -> Any:
        booked.append(name)
        return right(self, name, action)

    with mock.patch.object(Run, "phase", phase):
        training.losses("step01_single_gpu", options)
    return {"phases of two steps, in order": booked}


def loop_options(bench: Bench, **flags: Any) -> dict:
    """Two steps of five micro-batches."""
    draw = bench.draws()
    drawn = dict(seed=draw.randrange(1000), tied=draw.random() < 0.5)
    return drawn | dict(optimizer="sgd", n_layers=1, global_batch_size=10, micro_batch_size=2, steps=2) | flags


def loop_trains(bench: Bench):
    """As the project's loop."""
    training.equal_to_one_device(bench, "step01_single_gpu", 1, loop_options(bench), {})


def loop_uneven(bench: Bench):
    """The same where micro-batches have different numbers of targets."""
    options = json.dumps(loop_options(bench))
    run = bench.ranks(1, uneven_on_rank, "step01_single_gpu", options)
    right = bench.ranks(1, uneven_on_rank, "step01_single_gpu", options, project=True).answers[0]
    training.same_recordings(bench, run, right, "two of every four sequences with few targets")


def loop_scaled(bench: Bench):
    """In fp16 the loss is scaled before backward, and nowhere else."""
    options = json.dumps(loop_options(bench, dtype="fp16"))
    run = bench.ranks(1, training.trained, "step01_single_gpu", options)
    right = bench.ranks(1, training.trained, "step01_single_gpu", options, project=True).answers[0]
    training.same_recordings(bench, run, right, "dtype=fp16", bound=1e-2)


def loop_phases(bench: Bench):
    """Forward and backward of each micro-batch, and the optimizer, are booked under their names."""
    run = bench.ranks(1, booked_on_rank, json.dumps(loop_options(bench)))
    right = ["data", *["forward", "backward"] * 5, "optimizer"] * 2
    bench.same(run, lambda r: {"phases of two steps, in order": right})


# --- task 6: recomputation -------------------------------------------------------------------------------------------


def recomputed_on_rank(heads: int, kv_heads: int, layers: int, s: int) -> dict:
    """Bytes kept, FLOPs and gradients in the three modes."""
    config, found = recompute_shape(heads, kv_heads, layers, s), {}
    for mode in MODES:
        with torch.device("meta"):
            decoder = Decoder(config)
        materialize(decoder, 0, CPU, torch.float32)
        step01.wrap_layers(decoder, step01.Config(recompute=mode))
        found[f"bytes kept with {mode}"], found[f"FLOPs a token with {mode}"] = (
            saved_bytes(decoder, 2),
            counted_flops(decoder, 2),
        )
        found[f"gradients with {mode}"] = {name: p.grad for name, p in decoder.named_parameters()}
    return found


def recompute_shape(heads: int, kv_heads: int, layers: int, s: int) -> ModelConfig:
    """A shape that is large enough for the law, 5% off, to tell the modes apart."""
    return ModelConfig(16 * heads, layers, heads, kv_heads, 40 * heads, vocab_size=97, seq_len=s)


def recompute_case(bench: Bench) -> tuple[int, ...]:
    """(heads, key/value heads, layers, tokens) of task 6."""
    draw = bench.draws()
    return 4, draw.choice((1, 2, 4)), draw.randint(3, 5), 16 * draw.randint(3, 5)


def recompute_gradients(bench: Bench):
    """The same bits in all modes."""
    case = recompute_case(bench)
    right = bench.ranks(1, recomputed_on_rank, *case, project=True).answers[0]["gradients with none"]
    run = bench.ranks(1, recomputed_on_rank, *case)
    bench.same(run, lambda r: {f"gradients with {mode}": right for mode in MODES}, bound=0.0)


def recompute_bytes(bench: Bench):
    """Within 5% of the docstring's law."""
    case = recompute_case(bench)
    config, found = recompute_shape(*case), bench.ranks(1, recomputed_on_rank, *case).answers[0]
    law = {mode: activation_bytes(config, 2, torch.float32, mode, True) for mode in MODES}
    for mode in ("none", "full", "selective"):
        kept = found[f"bytes kept with {mode}"]
        if abs(kept / law[mode] - 1) > 0.05:
            like = [other for other in MODES if abs(kept / law[other] - 1) < 0.02]
            other = f" - that is what {like[0]} keeps" if like else ""
            raise Wrong(f"--recompute {mode} keeps {kept} bytes; the law says {law[mode]}{other}")


def recompute_flops(bench: Bench):
    """Selective does no matmul again; full does almost a forward more."""
    case = recompute_case(bench)
    config, found = recompute_shape(*case), bench.ranks(1, recomputed_on_rank, *case).answers[0]
    for mode in MODES:
        flops, law = found[f"FLOPs a token with {mode}"], flops_per_token(config, mode)[1]
        if abs(flops / law - 1) > 0.01:
            raise Wrong(f"--recompute {mode} executes {flops:.6g} FLOPs a token; the law says {law:.6g}")


# --- the file as it stands -------------------------------------------------------------------------------------------


def picture_run() -> dict:
    """Losses with recomputation; bytes kept for backward in each mode, measured and predicted."""
    found, config = training.pictured("step01_single_gpu", json.dumps(RUN | WHOLE[1])), recompute_shape(4, 2, 4, 64)
    modes = recomputed_on_rank(4, 2, 4, 64)
    law = {mode: activation_bytes(config, 2, torch.float32, mode, True) for mode in MODES}
    return found | dict(kept={mode: [modes[f"bytes kept with {mode}"], law[mode]] for mode in MODES})


def memory(runs: list[dict]) -> Any:
    """A figure: bytes that a forward pass keeps."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3))
    for shift, name in enumerate(("your file, measured", "the docstring's law")):
        heights = [pair[shift] / 1e6 for pair in runs[0]["kept"].values()]
        axis.bar([i + 0.4 * shift for i in range(len(MODES))], heights, 0.4, label=name)
    axis.set_xticks([i + 0.2 for i in range(len(MODES))], MODES)
    axis.set(xlabel="--recompute", ylabel="MB kept for backward", title="4 layers, dim 64, 2 x 64 tokens, fp32")
    axis.legend()
    return figure


PICTURES = [memory]
