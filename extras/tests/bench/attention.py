"""Attention alone: what each rank of a ring computes (figure), and every --cp-mode beside one call.

Forward and backward of causal attention with grouped queries. The modes take turns; rank 0 alone makes the call on the
whole sequence, while the others wait. FLOPs are those of the pairs that causal attention needs, 4 x head_dim x heads a
pair forward and 10 backward; a mode's speed is that of one rank if all did equal work, in the seconds of the slowest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch

import step05_cp_ring as step05
from common import UserError
from common.comm import Mesh
from common.model import attend
from extras.services.seam import plugins
from extras.services.tables import table
from extras.tests.bench import figures
from extras.tests.bench.harness import command, on_ranks, take_turns, where
from extras.variants.step05.flash import FLASH
from extras.variants.step05.kernels import FORMULAS, kernel_ring

WHOLE = "one call"
RINGS = ("ring", "zigzag")


@dataclass
class Config:
    """Flags of this measurement."""

    cp: int = 2  # ranks that share the sequence
    seq_len: int = 2048  # tokens of the whole sequence
    n_heads: int = 8  # query heads
    n_kv_heads: int = 2  # key/value heads
    head_dim: int = 64  # size of a head
    kernel: Literal["formula", "flash"] = "flash"  # what computes the parts of the keys, as --cp-kernel
    rounds: int = 7  # turns of each mode, after one to warm up
    device: str = "cpu"  # where to compute
    work_of: int = 4  # ranks in the figure of who computes what; 0: no figure


def work(mode: str, n: int, length: int) -> list[list[tuple[int, int, int]]]:
    """By rank: (hop, whose keys, query-key pairs) of what a ring of n ranks with `length` tokens each computes."""
    function, found = step05.CONTEXT[mode].attention, []
    visible = function.keywords["visible"] if isinstance(function, partial) else step05.zigzag_visible
    tensor = torch.empty(1, 1, length, device="meta")
    for rank in range(n):
        found.append([])
        for hop in range(n):
            for queries, keys, causal in visible(rank, (rank - hop) % n, length):
                s_q, s_k = tensor[:, :, queries].shape[2], tensor[:, :, keys].shape[2]
                pairs = s_q * (s_q + 1) // 2 if causal else s_q * s_k
                found[-1].append((hop, (rank - hop) % n, pairs))
    return found


def step_of(config: Config, attention: Callable, tokens: int) -> Callable[[], Any]:
    """A function that runs forward and backward on so many tokens."""
    generator = torch.Generator().manual_seed(0)
    heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads, config.n_heads)
    q, k, v, grad = (torch.randn(1, tokens, h, config.head_dim, generator=generator).to(config.device) for h in heads)
    given = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attention(*given), given, grad)


def modes_on_rank(config: Config) -> dict[str, list[tuple]]:
    """Runs on every rank: what `take_turns` returns."""
    plugins()
    group = Mesh(cp=config.cp)["cp"]
    steps = {WHOLE: step_of(config, attend, config.seq_len) if group.rank == 0 else lambda: None}
    kernel = FLASH if config.kernel == "flash" else FORMULAS
    for name, mode in step05.CONTEXT.items():
        attention = partial(mode.attention, group=group)
        if attention.func is step05.ring_attention:
            attention = partial(kernel_ring, **attention.keywords)
        if name != "ulysses":
            attention = partial(attention, kernel=kernel)
        steps[name] = step_of(config, attention, config.seq_len // config.cp)
    return take_turns(steps, config.rounds)


def bench(config: Config):
    """The figure, and both tables."""
    if config.cp < 2 or config.seq_len % (2 * config.cp) or config.n_heads % config.n_kv_heads:
        raise UserError("--cp must be at least 2, --seq-len a multiple of 2 x --cp, --n-heads one of --n-kv-heads")
    plugins()  # more modes
    if config.work_of:
        n, length = config.work_of, 64
        modes, total = {mode: work(mode, n, length) for mode in RINGS}, n * length * (n * length + 1) // 2
        rows = [["rank", *(f"{mode}: share of all pairs" for mode in RINGS)]]
        for rank in range(n):
            shares = (sum(pairs for *_, pairs in modes[mode][rank]) / total for mode in RINGS)
            rows.append([str(rank), *(f"{share:.2%}" for share in shares)])
        picture = figures.ring_work(modes, total, "cp_work")
        print(f"{table(rows)}\n\nsee {picture}\n")
    found, *_ = on_ranks(config.cp, modes_on_rank, config)
    flops = 14 * config.head_dim * config.n_heads * config.seq_len * (config.seq_len + 1) / 2
    base, rows = None, [["attention", "ranks", "seconds", "a rank's speed", "of one call", "CPU seconds of all"]]
    for name, rounds in found.items():
        n = 1 if name == WHOLE else config.cp
        seconds, busy = (median(column) for column in zip(*rounds, strict=True))
        speed = flops / n / seconds
        base = base or speed
        rows.append(
            [name, str(n), f"{seconds:.4f}", f"{speed / 1e9:.1f} GFLOP/s", f"{speed / base:.1%}", f"{busy:.4f}"]
        )
    print(
        f"{config.seq_len} tokens, {config.n_heads} query and {config.n_kv_heads} key/value heads of {config.head_dim}"
    )
    print(f"{where(config.cp)}\n\n{table(rows)}")


def main(_name: str, argv: list[str]):
    """The command line."""
    command(bench, Config, argv)
