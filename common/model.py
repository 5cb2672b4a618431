"""The decoder: a Llama-style language model in plain PyTorch. It knows nothing of ranks.

    tokens [batch, seq] -> embed_tokens -> layers 0..L-1 -> norm (`forward` ends here) -> lm_head.loss -> sum of losses

    layer:   x = x + self_attn(input_layernorm(x))            RoPE rotates q and k by position; a group of query
             x = x + mlp(post_attention_layernorm(x))         heads shares one k and v (GQA); the MLP is a SwiGLU

Names, shapes and the RoPE convention are those of Hugging Face's `LlamaForCausalLM`: it loads our state dict unchanged.
Each dimension of parallelism is applied from outside: it replaces modules, `project`, `rotate` or `attend`. Layers live
in a dict under their *global* number: layer 17 is `model.layers.17` also where layers 0-16 have been taken away.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a target with this value counts neither in the loss nor among the target tokens


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    tied: bool = False  # one matrix serves as embedding and as head
    rope_theta: float = 10000.0
    rope_scaling: float = 1.0  # stretches RoPE's long wave lengths, as Llama 3.1 and 3.2 do
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.n_heads


SMOLLM = dict(vocab_size=49152, seq_len=2048, tied=True)
LLAMA3 = dict(vocab_size=128256, seq_len=8192, rope_theta=500000.0)
PRESETS = {
    "debug": ModelConfig(64, 2, 4, 2, 176, vocab_size=257, seq_len=64),
    "tiny": ModelConfig(128, 4, 8, 4, 352, vocab_size=257, seq_len=256),
    "smollm-135m": ModelConfig(576, 30, 9, 3, 1536, **SMOLLM),
    "smollm-360m": ModelConfig(960, 32, 15, 5, 2560, **SMOLLM),
    "smollm-1.7b": ModelConfig(2048, 24, 32, 32, 8192, **SMOLLM),
    "llama3.2-1b": ModelConfig(2048, 16, 32, 8, 8192, **LLAMA3, tied=True, rope_scaling=32.0),
    "llama3-8b": ModelConfig(4096, 32, 32, 8, 14336, **LLAMA3),
    "llama3-70b": ModelConfig(8192, 80, 64, 8, 28672, **LLAMA3),
    "llama3-405b": ModelConfig(16384, 126, 128, 8, 53248, **LLAMA3, rope_scaling=8.0),
}


def rope_tables(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding, RoPE (Su et al., "RoFormer", section 3.2.2).

    positions int64 [seq] or [batch, seq] -> two tensors [..., seq, 1, head_dim], fp32 (fp64 if `dtype` is fp64).
    """
    wide = torch.promote_types(dtype, torch.float32)  # in bf16, positions 256 and 257 are the same
    even = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=wide)
    frequency = config.rope_theta ** -(even / config.head_dim)
    if config.rope_scaling != 1.0:  # Llama 3.1: wave lengths over 8192 tokens grow, under 2048 stay, a ramp between
        turns = frequency * 8192 / (2 * torch.pi)
        keep = ((turns - 1) / 3).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / config.rope_scaling)
    angle = (positions[..., None].to(wide) * frequency).tile(2)[..., None, :]
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim/2) of `x` [batch, seq, heads, head_dim] in the tables' dtype; return x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch's fused kernel: the default core, which context parallelism replaces.

    q [batch, seq, heads, head_dim]; k, v [batch, seq, kv_heads, head_dim], each for heads/kv_heads query heads -> as q.
    """
    if q.is_cuda and q.dtype.itemsize > 2 and (n := q.shape[2] // k.shape[2]) > 1:  # no fused kernel groups these
        k, v = (x.repeat_interleave(n, dim=2) for x in (k, v))
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


def project(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """Several linear layers of one input x [batch, seq, dim]; tensor parallelism replaces it, to gather x only once."""
    return [linear(x) for linear in linears]


class Attention(nn.Module):
    """Grouped-query self-attention around the replaceable `self.project`, `self.rotate` and `self.attend`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim, kv_dim = config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.project: Callable[..., list[Tensor]] = project
        self.rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = apply_rope
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, seq, dim], tables from `rope_tables` -> [batch, seq, dim]."""
        projected = self.project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        return self.o_proj(self.attend(self.rotate(q, cos, sin), self.rotate(k, cos, sin), v).flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer"): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.project: Callable[..., list[Tensor]] = project

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        gate, up = self.project(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream, each added back to it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """`grad` times a wider scalar (as bf16 it would be up to 0.2% off) in one kernel, in grad's dtype."""
    return torch.mul(grad, factor.view(1), out=torch.empty_like(grad))  # [1]: a scalar would be cast to that dtype


def add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """`total` [n, k] += factor a [n, m] @ b [m, k], in place; a and b may have 16 bits where `total` has 32.

    If dtypes differ, the product is rounded, written and read once more, except on a GPU with torch 2.12 or newer.
    """
    if a.dtype == total.dtype:
        return total.addmm_(a, b, alpha=factor)
    if a.is_cuda and torch.__version__ >= (2, 12):
        return torch.addmm(total, a, b, out_dtype=total.dtype, alpha=factor, out=total)
    return total.add_(a @ b, alpha=factor)


def cross_entropy_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, want: tuple, rows: range, combine: Callable
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sum of the token cross entropies of softmax(hidden @ weight.T), and its gradients, `chunk_tokens` at a time.

    Full logits [tokens, vocab] would be the largest tensor of a small model (2048 x 128256 in fp32: 1 GB), and autograd
    would keep several. But the loss is a sum over tokens, so each chunk of tokens has its gradient at once, from
    d loss / d logits = softmax(logits) - onehot(target).

    hidden [tokens, dim], weight [vocab, dim], targets int64 [tokens] -> the loss, a scalar in fp32 (fp64 for fp64), and
    the gradients of hidden and weight in their dtypes, or None where `want` (two bools) says that it is not needed.
    With (total, factor) as `want[1]`, factor times weight's gradient is added to `total`, and None is returned for it.
    `rows` is the part of the vocabulary that `weight` holds where step 4 cuts it over ranks; any more rows are padding.
    `combine` turns (log sum exp, target's logit or 0) of that part, [chunk, 1] each, into those of all the vocabulary.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = hidden.new_zeros((), dtype=wide)
    grad_hidden = torch.empty_like(hidden) if want[0] else None
    grad_weight, factor = (torch.zeros_like(weight, dtype=wide), 1.0) if want[1] is True else want[1] or (None, 1.0)
    for start in range(0, hidden.shape[0], chunk_tokens):
        chunk, target = hidden[start : start + chunk_tokens], targets[start : start + chunk_tokens, None]
        valid, here = target != IGNORE, (target >= rows.start) & (target < rows.stop)
        target = (target - rows.start).clamp(0, weight.shape[0] - 1)
        logits = chunk @ weight.T
        logits[:, len(rows) :] = torch.finfo(logits.dtype).min  # padding: no probability
        top, at = logits.max(-1, keepdim=True)
        softmax = logits.softmax(-1, dtype=wide)  # of this part of the vocabulary, in one pass
        part_sum = top - softmax.gather(1, at).log()  # its log sum exp, as softmax at top is e^top / sum
        log_sum, picked = combine(part_sum, logits.gather(1, target).to(wide).where(here, 0.0))
        loss += ((log_sum - picked) * valid).sum()
        if any(want):  # exp(part_sum - log_sum) makes it the softmax of all; 0 at IGNORE; in the logits' memory
            at_target = ((picked - log_sum).exp() - 1) * valid
            grad = torch.mul(softmax, (part_sum - log_sum).exp() * valid, out=logits)
            grad.scatter_(1, target, at_target.to(grad.dtype).where(here, grad.gather(1, target)))
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[start : start + chunk_tokens])
        if grad_weight is not None:
            add_product(grad_weight, grad.T, chunk, factor)
        logits = softmax = grad = None  # before the next chunk's
    return loss, grad_hidden, grad_weight.to(weight.dtype) if want[1] is True else None


class ChunkedCrossEntropy(torch.autograd.Function):
    """That loss for autograd: forward finds the gradients for an incoming gradient of 1, and backward scales them."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        """hidden [tokens, dim], weight [vocab, dim], targets int64 [tokens] -> scalar, fp32 (fp64 for fp64)."""
        want, rows, whole = ctx.needs_input_grad[:2], range(len(weight)), lambda *sums: sums
        loss, *gradients = cross_entropy_and_gradients(hidden, weight, targets, chunk_tokens, want, rows, whole)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        """Scale the gradients found in forward by the incoming one, a scalar."""
        return *(None if grad is None else scaled(grad, grad_loss) for grad in ctx.saved_tensors), None, None


class Head(nn.Linear):
    """The output projection, with the loss that belongs to it: a sum, not a mean, in nats."""

    cross_entropy = ChunkedCrossEntropy

    def loss(self, hidden: Tensor, targets: Tensor, chunk_tokens: int = 4096) -> Tensor:
        """hidden [batch, seq, dim], targets int64 [batch, seq] -> summed cross entropy of all targets but IGNORE."""
        # An autograd function cannot see that gradients are off, and would compute them in an evaluation too.
        weight = self.weight if torch.is_grad_enabled() else self.weight.detach()
        return self.cross_entropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), chunk_tokens)


class Trunk(nn.Module):
    """Everything but the head (Hugging Face's `model.` prefix)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)


class Decoder(nn.Module):
    """The whole model. Build it under `torch.device("meta")` and fill it with `materialize` of common/layout.py."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Head(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens int64 [batch, seq] -> normalised hidden [batch, seq, dim].

        `positions` int64 [seq] or [batch, seq]: the tokens' places in their sequences, if not 0, 1, 2, ...
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.model.embed_tokens(tokens)
        cos, sin = rope_tables(positions, self.config, x.dtype)
        for layer in self.model.layers.values():
            x = layer(x, cos, sin)
        return self.model.norm(x)


def draw_parameter(
    name: str, shape: torch.Size, n_layers: int, seed: int, dtype: torch.dtype = torch.float32, rows: range = range(0)
) -> Tensor:
    """The initial value of one parameter, on the CPU: a pure function of its global name and the seed.

    Norms start at one. Matrices are normal with standard deviation 0.02; those that write to the residual stream are
    divided by sqrt(2 L) (Radford et al., GPT-2, section 2.3). No rank, layout, device or order of drawing has a say.
    Every 2^20 numbers have a generator of their own. So threads share the work, and a rank draws only the blocks with
    some of the `rows` (indices of dimension 0; by default all) that it needs. All other numbers are not defined.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    std = 0.02 / (2 * n_layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
    full, block, row, rows = torch.empty(shape, dtype=dtype), 2**20, shape[1:].numel(), rows or range(shape[0])

    def draw(start: int):
        digest = hashlib.sha256(f"{seed}:{name}{f':{start}' if start else ''}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        for part in full.view(-1)[start : start + block].split(2**15):  # so few stay in the core's cache
            part.copy_(torch.empty(part.shape).normal_(0.0, std, generator=generator))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(draw, range(rows.start * row // block * block, rows.stop * row, block)))
    return full
