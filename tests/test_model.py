"""The model alone: published sizes, Hugging Face's numbers, and each part against a plain formula in this file."""

import hashlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from common import UserError
from common.layout import Layout, Split, layout_of, materialize, note_gradient_sum
from common.model import (
    IGNORE,
    PRESETS,
    Attention,
    Decoder,
    DecoderLayer,
    Head,
    ModelConfig,
    apply_rope,
    draw_parameter,
    rope_tables,
)
from services.flags import check_shape
from tests import bounds

pytestmark = pytest.mark.numerics

SMALL = dict(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=53, seq_len=16)
CPU = torch.device("cpu")


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> Decoder:
    """A small decoder with weights."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SMALL | changes))
    materialize(model, seed, CPU, dtype)
    return model


PUBLISHED = {
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_parameter_counts(preset):
    """Each preset has exactly as many parameters as its model card says; the two home-made ones by the formula."""
    m = PRESETS[preset]
    with torch.device("meta"):
        model = Decoder(m)
    kv_dim = m.n_kv_heads * m.head_dim
    layer = m.dim * (2 * m.dim + 2 * kv_dim + 3 * m.ffn_dim + 2)
    formula = m.vocab_size * m.dim * (1 if m.tied else 2) + m.n_layers * layer + m.dim
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED.get(preset, formula) == formula


@pytest.mark.parametrize(
    "changes, flag",
    [
        (dict(dim=25), "--dim 25"),
        (dict(dim=20), "--dim 20"),  # four heads of the odd size 5
        (dict(n_kv_heads=3), "--n-kv-heads 3"),
        (dict(n_layers=0), "--n-layers is 0"),
        (dict(seq_len=0), "--seq-len is 0"),
    ],
)
def test_a_shape_that_does_not_fit_names_the_flag(changes, flag):
    """Sizes that do not divide are refused with the flag to change."""
    with pytest.raises(UserError, match=flag):
        check_shape(ModelConfig(**SMALL | changes))


# Loss


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What the chunked loss must equal: full logits, then PyTorch's cross entropy."""
    return F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("upstream", [1.0, -0.37])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 10, 30, 64])
def test_chunked_loss_equals_cross_entropy(chunk_tokens, ignored, upstream):
    """Value and both gradients, with ignored targets, chunks that do not divide, and an incoming gradient not 1."""
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 10, 8, generator=g, dtype=torch.float64, requires_grad=True)
    head = Head(8, 23, bias=False, dtype=torch.float64)
    nn.init.normal_(head.weight, generator=g)
    targets = torch.randint(23, (3, 10), generator=g)
    targets[torch.rand(3, 10, generator=g) < ignored] = IGNORE

    wanted = plain_loss(hidden.flatten(0, 1), head.weight, targets.flatten())
    wanted_grads = torch.autograd.grad(wanted * upstream, (hidden, head.weight))
    loss = head.loss(hidden, targets, chunk_tokens)
    grads = torch.autograd.grad(loss * upstream, (hidden, head.weight))
    torch.testing.assert_close(loss, wanted, rtol=bounds.FP64, atol=bounds.FP64)
    for found, expected in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=bounds.FP64, atol=bounds.FP64)


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_chunked_loss_with_one_side_frozen(frozen):
    """A frozen head gets no gradient and the hidden states the right one, and the other way round."""
    hidden, weight = torch.randn(9, 4, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    targets = torch.randint(11, (9,))
    head = Head(4, 11, bias=False, dtype=torch.float64)
    head.weight = nn.Parameter(weight, requires_grad=frozen != "weight")
    hidden.requires_grad_(frozen != "hidden")
    learns, still = (hidden, head.weight) if frozen == "weight" else (head.weight, hidden)
    head.loss(hidden, targets, 4).backward()
    (expected,) = torch.autograd.grad(plain_loss(hidden, head.weight, targets), learns)
    torch.testing.assert_close(learns.grad, expected, rtol=bounds.FP64, atol=bounds.FP64)
    assert still.grad is None


def test_the_loss_scales_a_16_bit_gradient_in_fp32():
    """1/777 in bf16 is off by 0.1%; every gradient would be off by as much, all in one direction."""
    hidden = torch.randn(64, 32).bfloat16().requires_grad_()
    head = Head(32, 50, bias=False, dtype=torch.bfloat16)
    loss = head.loss(hidden, torch.randint(50, (64,)))
    (whole,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (part,) = torch.autograd.grad(loss / 777, hidden)
    assert torch.equal(part, (whole.float() * torch.tensor(1 / 777)).bfloat16())


class LargestTensor(TorchDispatchMode):
    """Notes the largest number of elements of any tensor that an operator makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator, look at its outputs."""
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_iter(out) if isinstance(t, Tensor))])
        return out


def test_full_logits_never_exist():
    """Forward and backward make no tensor larger than a chunk's logits, where the plain loss makes all of them."""
    tokens, dim, vocab, chunk = 512, 4, 1000, 32
    hidden = torch.randn(tokens, dim, requires_grad=True)
    head = Head(dim, vocab, bias=False)
    targets = torch.randint(vocab, (tokens,))
    with LargestTensor() as chunked:
        head.loss(hidden, targets, chunk).backward()
    with LargestTensor() as plain:
        plain_loss(hidden, head.weight, targets).backward()
    assert chunked.elements == chunk * vocab
    assert plain.elements == tokens * vocab


def test_an_evaluation_computes_no_gradients():
    """Without gradients, the loss costs one matmul a chunk, not three."""
    head, hidden = Head(8, 100, bias=False), torch.randn(64, 8)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        head.loss(hidden, torch.randint(100, (64,)))
    assert counted.get_total_flops() == 2 * 64 * 8 * 100


# Attention and positions


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, one query head, one query at a time. q [batch, seq, heads, d], k, v fewer heads."""
    out = torch.zeros_like(q)
    shared_by = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        for i in range(q.shape[1]):
            past_k, past_v = k[:, : i + 1, head // shared_by], v[:, : i + 1, head // shared_by]
            scores = torch.einsum("bd,bjd->bj", q[:, i, head], past_k) / math.sqrt(q.shape[3])
            out[:, i, head] = torch.einsum("bj,bjd->bd", scores.softmax(-1), past_v)
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_causal_softmax_with_shared_heads(kv_heads):
    """The whole attention block against one written as the textbook has it; kv head j serves a block of query heads."""
    config = ModelConfig(**SMALL | dict(n_kv_heads=kv_heads))
    block = Attention(config).double()
    x = torch.randn(2, 9, config.dim, dtype=torch.float64)
    cos, sin = rope_tables(torch.arange(9), config, torch.float64)
    q, k, v = (p(x).view(2, 9, -1, config.head_dim) for p in (block.q_proj, block.k_proj, block.v_proj))
    expected = block.o_proj(plain_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v).flatten(-2))
    torch.testing.assert_close(block(x, cos, sin), expected, rtol=bounds.FP64, atol=bounds.FP64)


def test_attention_core_can_be_replaced():
    """`attend` is called with unrepeated kv heads, and its result is what goes on."""
    block = Attention(ModelConfig(**SMALL)).double()
    seen = []

    def core(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return torch.zeros_like(q)

    block.attend = core
    cos, sin = rope_tables(torch.arange(5), ModelConfig(**SMALL), torch.float64)
    assert block(torch.randn(2, 5, 24, dtype=torch.float64), cos, sin).abs().max() == 0
    assert seen == [((2, 5, 4, 6), (2, 5, 2, 6), (2, 5, 2, 6))]


@pytest.mark.parametrize("dtype, expected", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_rope_tables_are_never_16_bit(dtype, expected):
    """In bf16 positions 256 and 257 are the same number: the angles must be computed wider."""
    config = ModelConfig(**SMALL)
    cos, sin = rope_tables(torch.arange(256, 258), config, dtype)
    assert cos.dtype == sin.dtype == expected
    angle = torch.tensor([256.0, 257.0], dtype=torch.float64)  # the first component turns by 1 a token
    torch.testing.assert_close(cos[:, 0, 0].double(), angle.cos(), rtol=0, atol=bounds.roundings(torch.float32, 4))
    torch.testing.assert_close(sin[:, 0, 0].double(), angle.sin(), rtol=0, atol=bounds.roundings(torch.float32, 4))


def test_a_bf16_model_rotates_in_fp32():
    """`apply_rope` on bf16 equals the fp32 rotation rounded once."""
    config = ModelConfig(**SMALL)
    x = torch.randn(1, 9, 4, config.head_dim).bfloat16()
    tables = rope_tables(torch.arange(1000, 1009), config, torch.bfloat16)
    assert torch.equal(apply_rope(x, *tables), apply_rope(x.float(), *tables).bfloat16())


def test_only_relative_positions_matter():
    """All positions shifted by 1000: same output. Positions permuted together with the tokens' order: another one."""
    model = build()
    tokens = torch.randint(53, (2, 16))
    here = model(tokens, torch.arange(16))
    torch.testing.assert_close(model(tokens, torch.arange(1000, 1016)), here, rtol=1e-9, atol=1e-9)
    assert (model(tokens, torch.arange(16).flip(0)) - here).abs().max() > 1e-3
    assert (model(tokens, 2 * torch.arange(16)) - here).abs().max() > 1e-3


def test_positions_count_from_zero_by_default():
    """Without positions, the tokens are the first ones of their sequences."""
    model, tokens = build(), torch.randint(53, (2, 11))
    assert torch.equal(model(tokens), model(tokens, torch.arange(11)))


def test_positions_may_differ_by_sequence():
    """[batch, seq] positions give each row its own."""
    model = build()
    tokens = torch.randint(53, (2, 16))
    rows = torch.stack((torch.arange(16), 3 * torch.arange(16)))
    both = model(tokens, rows)
    for i in range(2):
        torch.testing.assert_close(
            both[i : i + 1], model(tokens[i : i + 1], rows[i]), rtol=bounds.FP64, atol=bounds.FP64
        )


# Initial values


def test_initial_values_depend_on_seed_and_name_only():
    """A model of some layers, built in any order, has the numbers of the whole one; another seed or name has not."""
    whole = dict(build(seed=3).named_parameters())
    part = build(seed=3)
    part.model.layers = nn.ModuleDict({"1": part.model.layers["1"]})
    with torch.device("meta"):
        part.model.layers["1"] = DecoderLayer(part.config)
        part.model.norm = nn.RMSNorm(24)
    materialize(part, 3, CPU, torch.float64)
    for name, param in part.named_parameters():
        assert torch.equal(param, whole[name]), name
    shape = torch.Size((8, 8))
    first = draw_parameter("model.layers.0.mlp.up_proj.weight", shape, 2, 3)
    torch.manual_seed(99)
    assert torch.equal(draw_parameter("model.layers.0.mlp.up_proj.weight", shape, 2, 3), first)
    assert not torch.equal(draw_parameter("model.layers.1.mlp.up_proj.weight", shape, 2, 3), first)
    assert not torch.equal(draw_parameter("model.layers.0.mlp.up_proj.weight", shape, 2, 4), first)


def test_threads_change_no_bit():
    """A matrix of three blocks has the same numbers whoever draws them, in fp32 and rounded; the blocks differ."""
    shape, before, drawn = torch.Size((2100, 1024)), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            drawn += [draw_parameter("q_proj.weight", shape, 2, 0, dtype) for dtype in (torch.float32, torch.bfloat16)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert torch.equal(drawn[0].bfloat16(), drawn[1]) and not torch.equal(drawn[0][:1024], drawn[0][1024:2048])
    assert drawn[0].std().item() == pytest.approx(0.02, rel=0.01) and drawn[0].mean().abs() < 1e-4


@pytest.mark.parametrize("dims, blocks", [((0,), 2), ((1,), 5), ((0, 1), 2)])
def test_a_rank_draws_the_blocks_that_it_needs(monkeypatch, dims, blocks):
    """Parts of a matrix in five blocks, the last with padding, are those of the whole, and each draws so many blocks.

    What was not drawn is not a number here, so a slice that took some of it would differ.
    """
    shape, seeds = torch.Size((5000, 1024)), []
    full = draw_parameter("up_proj.weight", shape, 2, 0)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, math.nan, **options))
    monkeypatch.setattr(hashlib, "sha256", lambda text, right=hashlib.sha256: seeds.append(text) or right(text))
    for rank in range(4):
        splits = (
            Split(0, "tp", 1300 * rank, 1300 * (rank + 1), 5000),
            Split(1, "ep", 256 * rank, 256 * rank + 256, 1024),
        )
        layout = Layout(tuple(split for split in splits if split.dim in dims))
        seeds.clear()
        found = draw_parameter("up_proj.weight", shape, 2, 0, rows=layout.rows(5000))
        assert torch.equal(layout.slice(found), layout.slice(full))
        assert len({*seeds}) == len(seeds) == blocks
        if rank and 0 in dims:  # a rank that thought its rows were the first would be noticed
            found = draw_parameter("up_proj.weight", shape, 2, 0, rows=range(1300))
            assert not torch.equal(layout.slice(found), layout.slice(full))


def test_rows_are_those_without_padding():
    """Of 10 rows on 4 ranks in 3, 3, 3, 1; and cut again."""
    cuts = [Split(0, "a", 3 * rank, 3 * rank + 3, 10) for rank in range(4)]
    assert [Layout((cut,)).rows(10) for cut in cuts] == [range(3), range(3, 6), range(6, 9), range(9, 10)]
    assert Layout((cuts[1], Split(1, "b", 0, 2, 4), Split(0, "b", 1, 3, 3))).rows(10) == range(4, 6)


@pytest.mark.parametrize("name, std", [("q_proj.weight", 0.02), ("o_proj.weight", 0.005), ("down_proj.weight", 0.005)])
def test_initial_spread(name, std):
    """0.02, and for what writes to the residual stream 0.02 / sqrt(2 L)."""
    assert draw_parameter(name, torch.Size((400, 400)), 8, 0).std().item() == pytest.approx(std, rel=0.02)


def test_materialize_keeps_ties_records_and_frozen_parameters():
    """Tied weights stay one tensor, a record and `requires_grad` survive."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SMALL, tied=True))
    model.model.norm.weight.requires_grad_(False)
    note_gradient_sum(model.parameters(), "dp")
    materialize(model, 0, CPU, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.model.norm.weight.requires_grad and model.lm_head.weight.requires_grad
    assert all(layout_of(p).partial_over == ("dp",) and not p.is_meta for p in model.parameters())


@pytest.mark.parametrize("size, ranks", [(12, 3), (10, 4), (3, 5), (7, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_put_together_are_the_whole(size, ranks, dim):
    """Slices of all ranks concatenate to the full tensor, with zeros where the size does not divide."""
    full = torch.randn((size, 6) if dim == 0 else (6, size))
    share = -(-size // ranks)
    layouts = [Layout((Split(dim, "tp", r * share, (r + 1) * share, size),)) for r in range(ranks)]
    parts = [layout.slice(full) for layout in layouts]
    joined = torch.cat(parts, dim)
    assert torch.equal(joined.narrow(dim, 0, size), full)
    assert joined.narrow(dim, size, share * ranks - size).abs().sum() == 0
    assert all(layout.full_shape(p.shape) == full.shape for layout, p in zip(layouts, parts, strict=True))


def test_two_cuts_of_one_parameter():
    """Cut over two mesh dimensions, along two tensor dimensions or twice along one, slices are blocks of the whole."""
    full = torch.arange(48.0).view(8, 6)
    crossed = Layout((Split(0, "tp", 4, 8, 8), Split(1, "pp", 0, 3, 6)))
    assert torch.equal(crossed.slice(full), full[4:8, 0:3])
    nested = Layout((Split(0, "tp", 4, 8, 8), Split(0, "dp", 2, 4, 4)))
    assert torch.equal(nested.slice(full), full[6:8])
    for layout in (crossed, nested):
        assert layout.full_shape(layout.slice(full).shape) == full.shape


def test_materialize_slices_what_it_draws():
    """A parameter with a record gets its rows of the same full numbers that one device has."""
    whole = build(seed=5)
    with torch.device("meta"):
        model = Decoder(whole.config)
        projection = model.model.layers["1"].self_attn.q_proj
        projection.weight = nn.Parameter(projection.weight[12:18])
    projection.weight.parallel_layout = Layout((Split(0, "tp", 12, 18, 24),))
    materialize(model, 5, CPU, torch.float64)
    assert torch.equal(projection.weight, whole.model.layers["1"].self_attn.q_proj.weight[12:18])


# Hugging Face


def norms_in_fp64(theirs: nn.Module):
    """Hugging Face normalises in fp32 even in an fp64 model: the same formula here, in fp64."""
    for norm in theirs.modules():
        if type(norm).__name__ == "LlamaRMSNorm":
            norm.forward = lambda x, n=norm: (
                n.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.variance_epsilon)
            )


def rotary_in_fp64(rotary: nn.Module, m: ModelConfig, scaling: dict | None):
    """Hugging Face computes its rotary tables in fp32 even in an fp64 model: the same formula here, in fp64."""
    inverse = m.rope_theta ** -(torch.arange(0, m.head_dim, 2, dtype=torch.float64) / m.head_dim)
    if scaling is not None:
        wave_length, old = 2 * math.pi / inverse, scaling["original_max_position_embeddings"]
        low, high, factor = (scaling[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
        smooth = (old / wave_length - low) / (high - low)
        between = (1 - smooth) * inverse / factor + smooth * inverse
        between = torch.where(wave_length > old / low, inverse / factor, between)
        inverse = torch.where(wave_length < old / high, inverse, between)
    bound = bounds.roundings(
        torch.float32, 40
    )  # of a power, whose exponent's rounding counts ln(theta) = 13 times; twice
    torch.testing.assert_close(rotary.inv_freq.double(), inverse, rtol=bound, atol=0)  # the same formula as theirs

    def forward(x, position_ids):
        angle = position_ids[..., None].double() * inverse
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    rotary.forward = forward


@pytest.mark.parametrize("rope_scaling", [1.0, 8.0], ids=["plain-rope", "llama3-rope"])
@pytest.mark.parametrize("n_kv_heads", [2, 4], ids=["gqa", "mha"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_hugging_face_computes_the_same(tied, n_kv_heads, rope_scaling):
    """Our state dict loads unchanged into LlamaForCausalLM, whose fp64 logits and loss equal ours to 1e-10."""
    transformers = pytest.importorskip("transformers")
    shape = dict(dim=256, n_heads=4, n_kv_heads=n_kv_heads)  # heads of 64: wave lengths on both sides of the ramp
    model = build(**shape, tied=tied, rope_scaling=rope_scaling, rope_theta=500000.0)
    m, scaling = model.config, None
    if rope_scaling != 1.0:
        scaling = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
        scaling |= dict(rope_type="llama3", factor=rope_scaling)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=m.dim,
            num_hidden_layers=m.n_layers,
            num_attention_heads=m.n_heads,
            num_key_value_heads=m.n_kv_heads,
            intermediate_size=m.ffn_dim,
            vocab_size=m.vocab_size,
            max_position_embeddings=16384,
            rms_norm_eps=m.norm_eps,
            rope_parameters=(scaling or dict(rope_type="default")) | dict(rope_theta=m.rope_theta),
            tie_word_embeddings=tied,
        )
    ).double()
    theirs.load_state_dict(model.state_dict(), strict=True)
    norms_in_fp64(theirs)
    rotary_in_fp64(theirs.model.rotary_emb, m, scaling)

    tokens = torch.randint(m.vocab_size, (2, 12))
    positions = torch.arange(5000, 5012)  # far out, where scaled and plain rotations differ much
    with torch.no_grad():
        expected = theirs(input_ids=tokens, position_ids=positions.expand(2, -1), labels=tokens)
        hidden = model(tokens, positions)
        torch.testing.assert_close(model.lm_head(hidden), expected.logits, rtol=1e-10, atol=1e-10)
        loss = model.lm_head.loss(hidden[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        in_fp32 = bounds.RUN["fp32"]  # as their loss is computed
        torch.testing.assert_close(loss, expected.loss.double(), rtol=in_fp32, atol=0)
