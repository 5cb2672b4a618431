"""Attention within documents: pairs that are left, seconds on one device, and how evenly cp ranks share the work.

    python -m tests.bench documents
    python -m tests.bench documents --seq-len 8192 --cp 8

Sequences are random tokens of which some are END, 1 to 64 documents of random lengths each, and windows of the default
text. Seconds are CPU seconds of forward and backward of one attention, one thread: causal over all, with --documents,
and with a boolean mask of s x s. They take turns; the least of the rounds counts, as other work on the machine adds.
"busiest": its pairs over the mean of the ranks, the mean over the sequences. Ranks meet at every layer's messages, so
attention takes that much longer than if they shared the pairs evenly, as Ulysses' ranks do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

import step05_cp_ring as step05
from common.model import attend
from services.documents import Documents, MicroBatch, document_numbers, run_lengths
from services.flags import main as run_main
from services.readers import END, open_tokens
from services.tables import table
from tests.bench.cp_work import pairs


@dataclass
class Config:
    """Flags of this benchmark."""

    seq_len: int = 4096  # tokens of a sequence
    n_heads: int = 8  # query heads
    n_kv_heads: int = 2  # key/value heads
    head_dim: int = 64  # size of a head
    cp: int = 4  # ranks that share a sequence
    rounds: int = 7  # rounds to measure, after one to warm up
    sequences: int = 16  # over which the pairs are counted; the first one is timed


def sequences(config: Config) -> dict[str, Tensor]:
    """By name: tokens int64 [sequences, seq]."""
    shape, found = (config.sequences, config.seq_len), {}
    for count in (1, 4, 16, 64):
        generator = torch.Generator().manual_seed(count)
        ends = torch.rand(shape, generator=generator) < (count - 1) / config.seq_len
        found[f"{count} documents"] = torch.zeros(shape, dtype=torch.int64).masked_fill(ends, END)
    return found | {"default text": open_tokens("", config.seq_len, config.sequences, 0, END + 1).batch(0).tokens}


def masked(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by PyTorch's kernel with a boolean mask [seq, seq]."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*by_head, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def seconds(step: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    step()
    return time.process_time() - start


def timed(config: Config, tokens: Tensor) -> list[float]:
    """Seconds of attention to one sequence [1, seq]: causal over all, by documents, with a mask."""
    here = MicroBatch(tokens, END, lambda rank: torch.arange(config.seq_len))
    same = here.numbers[0][:, None] == here.numbers[0]
    cores: list[Callable] = [attend, partial(Documents.attend, SimpleNamespace(now=here)), partial(masked, same.tril())]
    heads = config.n_heads, config.n_kv_heads, config.n_kv_heads, config.n_heads
    q, k, v, grad = (torch.randn(1, config.seq_len, n, config.head_dim).requires_grad_() for n in heads)
    steps = [lambda core=core: torch.autograd.grad(core(q, k, v), (q, k, v), grad) for core in cores]
    taken = [[seconds(step) for step in steps] for _ in range(config.rounds + 1)]
    return [min(column) for column in zip(*taken[1:], strict=True)]


def busiest(config: Config, tokens: Tensor, mode: str) -> float:
    """The pairs of the rank that has most to do with a sequence [1, seq], over the mean of the ranks."""
    n = config.cp
    here = [MicroBatch(tokens, END, partial(step05.own_positions, config.seq_len, n=n, mode=mode)) for _ in range(n)]
    work = []
    for rank, micro_batch in enumerate(here):
        seen = [step05.visible(rank, source, config.seq_len // n, mode != "ring") for source in range(n)]
        blocks = [block for source in range(n) for block in micro_batch.cut(rank, source, seen[source])]
        work.append(sum(pairs(q.stop - q.start, k.stop - k.start, causal) for _, q, k, causal in blocks))
    return max(work) / mean(work)


def bench(config: Config):
    """Count, measure, print."""
    torch.set_num_threads(1)
    whole = config.seq_len * (config.seq_len + 1) // 2
    rows = [["sequences", "pairs left", "causal s", "documents s", "of causal", "mask s"]]
    rows[0] += [f"busiest of {config.cp}: {mode}" for mode in ("zigzag", "ring")]
    for name, tokens in sequences(config).items():
        left = sum(n * (n + 1) // 2 for n in run_lengths(document_numbers(tokens, END))) / whole / len(tokens)
        causal, documents, mask = timed(config, tokens[:1])
        uneven = [mean(busiest(config, row[None], mode) for row in tokens) for mode in ("zigzag", "ring")]
        row = [name, f"{left:.1%}", f"{causal:.3f}", f"{documents:.3f}", f"{documents / causal:.1%}", f"{mask:.3f}"]
        rows.append(row + [f"{share:.2f}" for share in uneven])
    shape = f"{config.n_heads} query and {config.n_kv_heads} key/value heads of {config.head_dim}"
    print(f"1 x {config.seq_len} tokens, {shape}, fp32, CPU, one thread\n\n{table(rows)}")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
