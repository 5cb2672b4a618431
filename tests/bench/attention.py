"""Attention alone: which rank computes what in the ring (figure), and every --cp-mode beside one call on one device.

Forward and backward of causal attention with grouped queries. The modes take turns; rank 0 alone makes the call on the
whole sequence, while the others wait. FLOPs are those of the pairs that causal attention needs, 4 x head_dim x heads a
pair forward and 10 backward; a mode's speed is that of one rank if all did equal work, in the seconds of the slowest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import step05_cp_ring as step05
from common import UserError
from common.comm import Mesh
from common.model import attend
from services.run import plugins
from services.tables import table
from tests.bench import figures
from tests.bench.harness import command, on_ranks, take_turns, where

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
    rounds: int = 7  # turns of each mode, after one to warm up
    device: str = "cpu"  # where to compute
    work_of: int = 4  # ranks in the figure of who computes what; 0: no figure


def work_on_rank(length: int) -> dict[str, list[tuple[int, int, int]]]:
    """Runs on every rank: (hop, whose keys, query-key pairs) of the blocks that one attention has computed, by mode."""
    plugins()  # more modes
    n, found = torch.distributed.get_world_size(), {}
    group, right = Mesh(cp=n)["cp"], step05.block_attention
    for mode in RINGS:
        done, asked = found.setdefault(mode, []), []
        visible = step05.CONTEXT[mode].attention

        def block(q: Tensor, k: Tensor, v: Tensor, causal: bool, done=done, asked=asked) -> tuple[Tensor, Tensor]:
            s_q, s_k = q.shape[2], k.shape[2]
            done.append((*asked[-1], s_q * (s_q + 1) // 2 if causal else s_q * s_k))
            return right(q, k, v, causal)

        def looking(rank: int, source: int, length: int, right, asked=asked) -> list[tuple]:
            asked.append(((rank - source) % n, source))
            return right(rank, source, length)

        kept = visible.keywords["visible"] if isinstance(visible, partial) else step05.zigzag_visible
        with mock.patch.object(step05, "block_attention", block):
            tensors = [torch.ones(1, length // n, 1, 8) for _ in range(3)]
            step05.ring_attention(*tensors, group, partial(looking, right=kept))
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
    for name, mode in step05.CONTEXT.items():
        steps[name] = step_of(config, partial(mode.attention, group=group), config.seq_len // config.cp)
    return take_turns(steps, config.rounds)


def bench(config: Config):
    """The figure, and both tables."""
    if config.cp < 2 or config.seq_len % (2 * config.cp) or config.n_heads % config.n_kv_heads:
        raise UserError("--cp must be at least 2, --seq-len a multiple of 2 x --cp, --n-heads one of --n-kv-heads")
    if config.work_of:
        length, n = 64 * config.work_of, config.work_of
        ranks = on_ranks(n, work_on_rank, length)
        total = length * (length + 1) // 2
        rows = [["rank", *(f"{mode}: share of all pairs" for mode in RINGS)]]
        for rank, found in enumerate(ranks):
            rows.append([str(rank), *(f"{sum(pairs for *_, pairs in found[mode]) / total:.2%}" for mode in RINGS)])
        picture = figures.ring_work({mode: [found[mode] for found in ranks] for mode in RINGS}, total, "cp_work")
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
