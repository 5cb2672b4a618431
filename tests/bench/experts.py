"""One grouped matmul for all experts of a layer beside a loop over them: forward and backward, in turns."""

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

import step07_moe_ep as step07
from services.tables import table
from tests.bench.harness import command, on_ranks, spread, take_turns, where
from variants.grouped_matmul import group


@dataclass
class Config:
    """Flags of this measurement."""

    tokens: int = 2048  # rows of all experts together, dealt unevenly
    dim: int = 256  # width of a token
    expert_dim: int = 128  # width of an expert
    rounds: int = 11  # turns of each, after one to warm up
    dtype: str = "fp32"  # fp32 or bf16
    device: str = "cpu"  # where to compute


def contest(config: Config, n: int) -> dict[str, list[tuple]]:
    """Runs in one process: what `take_turns` returns, for n experts."""
    dtype = dict(fp32=torch.float32, bf16=torch.bfloat16)[config.dtype]
    generator, steps = torch.Generator().manual_seed(0), {}
    chosen = (torch.randn(config.tokens, generator=generator).abs() * n / 3).long().clamp(max=n - 1)
    counts = torch.bincount(chosen, minlength=n)
    rows = torch.randn(config.tokens, config.dim, generator=generator).to(config.device, dtype).requires_grad_()
    for way in ("looped", "grouped"):
        experts = step07.Experts(n, config.dim, config.expert_dim)
        for param in experts.parameters():
            param.data.normal_(0, 0.02, generator=generator)
        experts.to(config.device, dtype)
        for linear in experts.children() if way == "grouped" else ():
            linear.forward = partial(group, linear)
        steps[way] = lambda experts=experts: experts(rows, counts).sum().backward()
    return take_turns(steps, config.rounds)


def bench(config: Config):
    """The table."""
    rows = [["experts", "looped", "grouped", "looped / grouped"]]
    for n in (4, 16, 64, 256):
        found = on_ranks(1, contest, config, n)[0]
        looped, grouped = ([seconds for seconds, _ in found[way]] for way in ("looped", "grouped"))
        ratios = [a / b for a, b in zip(looped, grouped, strict=True)]
        rows.append([str(n), *(f"{1e3 * median(times):.2f} ms" for times in (looped, grouped)), spread(ratios)])
    print(f"{config.tokens} rows, {config.dim} x {config.expert_dim}, {config.dtype}; {where(1)}\n\n{table(rows)}")


def main(_name: str, argv: list[str]):
    """The command line."""
    command(bench, Config, argv)
