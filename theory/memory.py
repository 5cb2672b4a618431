"""Bytes of each kind of tensor that a rank holds."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from common.model import ModelConfig
from common.moe import MoEConfig
from common.schedules import Action, Step
from theory.traffic import UnitShape


def kept_heads(kv_heads: int, heads: int, e: int, on_cpu: bool) -> int:
    """Heads of k, and of v, that attention keeps: a GPU's kernels want as many as of q, but in 16 bits (model.py)."""
    return kv_heads if on_cpu or e == 2 else heads


def adds_at_once(config: Any, dtype: torch.dtype) -> bool:
    """Whether the head adds its weight gradient to `.grad` in forward (services/fused_gradients.py)."""
    return getattr(config, "fuse_gradients", False) and not (dtype.itemsize == 2 and config.grad_dtype == "same")


def activation_bytes(
    m: ModelConfig, batch: int, dtype: torch.dtype, recompute: str, on_cpu: bool, at_once: bool = False
) -> int:
    """Bytes that a forward pass of [batch, seq_len] tokens leaves for backward: RECOMPUTATION in step 1's docstring.

    `at_once`: the head's weight gradient does not wait (`adds_at_once`).
    """
    e, wide, kv_dim, tokens = dtype.itemsize, max(4, dtype.itemsize), m.n_kv_heads * m.head_dim, batch * m.seq_len
    norm = wide + on_cpu * m.dim * (2 * wide - e if e < wide else wide)
    kept = kept_heads(m.n_kv_heads, m.n_heads, e, on_cpu)
    layer = {
        "none": e * (6 * m.dim + 2 * kept * m.head_dim + 4 * m.ffn_dim) + wide * m.n_heads + 2 * norm,
        "selective": e * (5 * m.dim + 2 * kv_dim + 2 * m.ffn_dim) + wide * m.n_heads,
        "full": e * m.dim,
    }[recompute]
    rope = 2 * m.seq_len * m.head_dim * wide
    words = 0 if at_once else m.vocab_size
    head = e * m.dim * (2 * tokens + words) + norm * tokens  # its input; two gradients, known since forward
    return tokens * m.n_layers * layer + rope + head


def document_bytes(config: Any, m: ModelConfig, tp: int, cp: int, dtype: torch.dtype) -> int:
    """What --documents adds to the activations of a micro-batch on one of tp x cp ranks.

    Where sequences are not cut, attention's output twice: by document, and in one piece (which Ulysses need not keep).
    With reset, RoPE tables for each sequence. (What selective recomputation keeps of a ring is counted in full.)
    """
    kind, tokens = getattr(config, "documents", "off"), config.micro_batch_size * m.seq_len // cp
    twice = kind != "off" and config.recompute == "none" and cp == 1
    found = twice * m.n_layers * tokens * m.dim // tp * dtype.itemsize
    tables = 2 * (tokens - m.seq_len // cp) * m.head_dim * max(4, dtype.itemsize)
    return found + (kind == "reset") * tables


def whole_activation_bytes(config: Any, m: ModelConfig, dtype: torch.dtype, on_cpu: bool) -> int:
    """`activation_bytes` and `document_bytes` of a rank that has whole sequences and matrices."""
    at_once = adds_at_once(config, dtype)
    kept = activation_bytes(m, config.micro_batch_size, dtype, config.recompute, on_cpu, at_once)
    return kept + document_bytes(config, m, 1, 1, dtype)


# Numbers that the update rule keeps for each element of a parameter; muon: one less for elements of hidden matrices.
MOMENTS = {"adamw": 2, "sgd": 0, "muon": 2}


def memory_rows(
    config: Any, m: ModelConfig, n: int, factored: int, dtype: torch.dtype, on_cpu: bool, hidden: int = 0
) -> dict[str, int | None]:
    """Predicted bytes of each kind of tensor for `n` parameters, of which adafactor keeps `factored` numbers.

    `hidden`: how many of them Muon updates.
    """
    mixed, wide = dtype.itemsize == 2, max(4, dtype.itemsize)
    return {
        "parameters": n * dtype.itemsize,
        "gradients": n * (dtype.itemsize if config.grad_dtype == "same" else wide),
        "masters": n * 4 * mixed,
        "moments": (n * MOMENTS[config.optimizer] - hidden if config.optimizer in MOMENTS else factored) * wide,
        "activations": whole_activation_bytes(config, m, dtype, on_cpu),
    }


def zero_memory_rows(
    config: Any, m: ModelConfig, units: list[UnitShape], dtype: torch.dtype, on_cpu: bool, hidden: int = 0
) -> dict[str, int | None]:
    """Predicted bytes of each kind of tensor on one rank, after step 3's second table (with padding).

    `hidden`: elements of its slices that Muon updates.
    """
    wide = max(4, dtype.itemsize)
    cut = sum(unit.length for unit in units)
    trained = sum(unit.length for unit in units if unit.trained)
    gradients = sum(unit.length * unit.ranks * unit.gradient_bytes for unit in units if unit.trained)
    separate = dtype.itemsize == 2 or config.offload_optimizer != "none"
    in_memory = config.offload_optimizer != "disk"
    return {
        "parameters": (cut if config.zero == 3 else sum(unit.length * unit.ranks for unit in units)) * dtype.itemsize,
        "gradients": trained * wide if config.zero > 1 else gradients,
        "masters": cut * wide * separate * in_memory,
        "moments": (trained * MOMENTS[config.optimizer] - hidden) * wide * in_memory,
        "activations": whole_activation_bytes(config, m, dtype, on_cpu),
    }


def tp_activation_bytes(config: Any, m: ModelConfig, tp: int, dtype: torch.dtype, on_cpu: bool) -> int:
    """Step 1's `activation_bytes` on one of `tp` ranks: between blocks s/n tokens with SP, else s; inside, 1/n wide.

    Without overlap, the gathered input of each block is kept instead of s/n tokens of it. "selective" keeps what all
    matmuls made, and so of those cut by rows a part of the sum for all s tokens, which is not divided.
    """
    e, wide, h, n = dtype.itemsize, max(4, dtype.itemsize), m.dim, tp
    tokens = config.micro_batch_size * m.seq_len
    own = tokens // n if config.sp else tokens
    inputs = own if config.tp_overlap or not config.sp else tokens
    norm = wide + on_cpu * h * (2 * wide - e if e < wide else wide)
    kv_heads = max(1, m.n_kv_heads // n)
    kept = kept_heads(kv_heads, m.n_heads // n, e, on_cpu)
    attention, kept_attention = (
        tokens * (e * (2 * h // n + 2 * kv * m.head_dim) + wide * m.n_heads // n) for kv in (kv_heads, kept)
    )
    layer = {
        "none": own * (2 * e * h + 2 * norm) + inputs * 2 * e * h + kept_attention + tokens * 4 * e * m.ffn_dim // n,
        "selective": own * e * h + attention + tokens * e * (2 * m.ffn_dim // n + 2 * h),
        "full": own * e * h,
    }[config.recompute]
    rope = 2 * m.seq_len * m.head_dim * wide
    embedding = tokens * 9  # which rows were looked up, and which of them are here
    head = own * (2 * e * h + norm) + (0 if adds_at_once(config, dtype) else e * h * -(-m.vocab_size // n))
    return m.n_layers * layer + rope + embedding + head


def cp_activation_bytes(
    config: Any, m: ModelConfig, tp: int, cp: int, dtype: torch.dtype, on_cpu: bool, rank: int = 0
) -> int:
    """What one of tp x cp ranks keeps: that of its s/cp tokens, and what the mode adds.

    "selective" keeps what the attention kernel returned for every part of the keys that `rank` of cp meets.
    """
    local = replace(m, seq_len=m.seq_len // cp)
    if tp > 1:
        found = tp_activation_bytes(config, local, tp, dtype, on_cpu)
    else:
        at_once = adds_at_once(config, dtype)
        found = activation_bytes(local, config.micro_batch_size, dtype, config.recompute, on_cpu, at_once)
    if config.recompute == "selective" and cp > 1 and config.cp_mode != "ulysses":
        parts = (
            rank if config.cp_mode == "ring" else rank + (cp - 1 - rank) / 2
        )  # besides its own; later ones count half
        row = m.dim // tp * dtype.itemsize + max(4, dtype.itemsize) * m.n_heads // tp
        found += int(m.n_layers * config.micro_batch_size * local.seq_len * parts * row)
    if config.recompute == "none" and cp > 1:
        tokens, kv_heads = config.micro_batch_size * local.seq_len * dtype.itemsize, max(1, m.n_kv_heads // tp)
        more = {
            "allgather": (cp - 1) * 2 * kv_heads * m.head_dim,
            "ulysses": m.dim // tp + 2 * (max(kv_heads, cp) - kv_heads) * m.head_dim,
        }.get(config.cp_mode, 0)
        found += m.n_layers * tokens * more
    return found + document_bytes(config, m, tp, cp, dtype)


def in_flight_bytes(actions: list[Action], whole: list[int], waiting: list[int]) -> int:
    """The most that one rank's list of actions keeps for backward at a time.

    `whole`, by chunk: bytes of a micro-batch from its F to its B; `waiting`: what of them stays until its W.
    """
    held = most = 0
    for kind, _, chunk in actions:
        if kind == "F":
            held += whole[chunk]
        elif kind == "B":
            held -= whole[chunk] - waiting[chunk]
        else:
            held -= waiting[chunk] if kind == "W" else whole[chunk]
        most = max(most, held)
    return most


def program_bytes(
    program: list[Step], chunks: list, whole: list[int], waiting: list[int], message: int, slices: int = 1
) -> int:
    """The most that one rank's program keeps for backward at a time, at the end of an F.

    `whole`, by chunk: bytes of a micro-batch from its F to its B; `waiting`: what of them stays until its W. `message`:
    bytes of the activation that a stage gives to the next, in `slices` parts if it has to be put together. One that
    comes is there from its recv on, and then a part of `whole` (but what is put together is not born in F, and not
    counted). One that goes stays until something has come from the same rank, for which this rank has waited.
    """
    held = most = 0
    gone: dict[int, int] = defaultdict(int)  # by rank, bytes sent since the last recv from there
    coming: dict[tuple[str, int], list[int]] = defaultdict(list)  # by kind and micro-batch: its bytes, and those gone
    kept: dict[tuple[int, int], int] = {}  # by micro-batch and chunk
    for kind, what, peer in program:
        forward = what[0] == "F"
        if kind == "send" and forward:
            gone[peer] += message * (slices == 1)
            held -= message * (slices > 1)  # the part that goes is a copy, born outside of F
        elif kind == "recv":
            coming[what[:2]].append(forward * message // slices + gone.pop(peer, 0))
            held += forward * message // slices
        elif kind == "run":
            (name, i, chunk), messages = what, coming[what.kind[0], what.micro_batch]
            here = forward and not (messages or chunks[chunk].first)  # from another stage of this rank
            own = kept.pop((i, chunk), whole[chunk] - (message if messages and slices > 1 else 0))
            kept[i, chunk] = {"F": own, "B": waiting[chunk]}.get(name, 0)
            held += kept[i, chunk] - (0 if forward else own) - (messages.pop(0) if messages else here * message)
            if forward:
                held += message * (not chunks[chunk].last)
                most = max(most, held)
    return most


class StageParts(NamedTuple):
    """Bytes that one micro-batch leaves on a rank, by what a stage may have."""

    layer: int  # each of its layers
    rope: int
    embedding: int
    head: int
    inputs: int  # of a layer's matmuls, which stay until W if that comes apart from B


def stage_parts(
    config: Any, m: ModelConfig, tp: int, cp: int, dtype: torch.dtype, on_cpu: bool, rank: int = 0
) -> StageParts:
    """Step 5's bytes taken apart.

    The inputs of all matmuls are e (3 h + f) a token and layer. Over tp they are cut by channels, or by tokens where W
    gathers them; else each rank has the two inputs of column-parallel layers whole. With recomputation they are made in
    backward, but for the output of attention, if that is kept.
    """
    one, two = (cp_activation_bytes(config, replace(m, n_layers=n), tp, cp, dtype, on_cpu, rank) for n in (1, 2))
    tokens = config.micro_batch_size * m.seq_len // cp
    rope = 2 * m.seq_len // cp * m.head_dim * max(4, dtype.itemsize)
    rope += document_bytes(config, replace(m, n_layers=0), tp, cp, dtype)
    embedding = tokens * 9 * (tp > 1)
    by_tokens = config.sp and config.tp_overlap
    inputs = (tokens * 2 * m.dim // (tp if by_tokens else 1) + tokens * (m.dim + m.ffn_dim) // tp) * dtype.itemsize
    if config.recompute != "none":
        inputs = (config.recompute == "selective" and cp == 1) * tokens * m.dim // tp * dtype.itemsize
    return StageParts(two - one, rope, embedding, 2 * one - two - rope - embedding, inputs)


def pp_activation_bytes(
    config: Any,
    m: ModelConfig,
    chunks: list,
    program: list[Step],
    slices: int,
    tp: int,
    cp: int,
    dtype: torch.dtype,
    on_cpu: bool,
    more: Callable[[Any], tuple[int, int]] = lambda chunk: (0, 0),
    rank: int = 0,
) -> int:
    """What a rank keeps at most: step 5's bytes of its layers (and `more`), times the micro-batches in flight.

    With W apart from B, the inputs of all matmuls stay until W. (The gradients of the outputs, which wait with them,
    are born in backward, and not counted here; nor is an input that is put together from `slices` parts.) `more` says
    what experts add to both. `rank`: of cp.
    """
    parts = stage_parts(config, m, tp, cp, dtype, on_cpu, rank)
    extra = [more(chunk) for chunk in chunks]
    whole = [len(c.layers) * parts.layer + parts.rope + c.last * parts.head + c.first * parts.embedding for c in chunks]
    whole = [n + added for n, (added, _) in zip(whole, extra, strict=True)]
    waiting = [len(c.layers) * parts.inputs + added for c, (_, added) in zip(chunks, extra, strict=True)]
    own = config.micro_batch_size * m.seq_len // cp // (tp if config.sp else 1) * m.dim * dtype.itemsize
    return program_bytes(program, chunks, whole, waiting, own, slices)


def expert_activation_bytes(
    config: Any, m: MoEConfig, tp: int, cp: int, dtype: torch.dtype, chunk: Any
) -> tuple[int, int]:
    """What the experts of a chunk add to step 5's bytes: until B, and of them until W; on average over the ranks.

    Instead of 4 f e, each token of a layer keeps for each expert that it visits, of width f', its input and output and
    what lies between, e (2 h + 4 f') (h the same on all tp ranks, f' cut over them), where it goes and its gate; for
    the router p and, if e is 2, the input in fp32. With selective recomputation, what the matmuls made.
    """
    layers = sum(m.has_experts(int(number)) for number in chunk.layers)
    if not layers or config.recompute == "full":
        return 0, 0
    e, wide, k = dtype.itemsize, max(4, dtype.itemsize), m.experts_per_token
    tokens = config.micro_batch_size * m.seq_len // cp
    own = tokens // tp if config.sp else tokens
    width, dense = m.expert_width // tp, tokens * m.ffn_dim // tp * e
    if config.recompute == "selective":
        products = tokens * e * (k + (m.shared_experts > 0)) * m.dim + tokens * e * 2 * width * (k + m.shared_experts)
        return layers * (products + own * m.experts * wide - 2 * dense - tokens * e * m.dim), 0
    visits = tokens * k * (e * (2 * m.dim + 4 * width) + wide + 16)
    router = own * (m.experts * wide + k * (2 * wide + 9) + wide) + (own + m.experts) * m.dim * wide * (e < wide)
    shared = tokens * 4 * e * m.shared_experts * width
    inputs, unread = tokens * k * e * (m.dim + width) + tokens * e * m.shared_experts * width - dense, 0
    if not m.shared_experts:  # nobody keeps the layer's input, but the router if it need not be widened
        inputs -= tokens * m.dim * e // (tp if config.sp and config.tp_overlap else 1)
        unread = ((own if config.tp_overlap else tokens) - own * (e == wide)) * m.dim * e
    return layers * (visits + router + shared - unread - 4 * dense), layers * inputs
