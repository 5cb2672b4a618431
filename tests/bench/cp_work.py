"""Context parallelism: which rank computes which blocks at which hop, for ring and zigzag; cp_work.png and .json.

    python -m tests.bench cp_work --cp 4

One attention in each mode, on real ranks, watched: the figure shows what was computed.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import step05_cp_ring as step05
from common import UserError
from services import plots
from services.flags import main as run_main
from services.launch import open_mesh
from services.tables import table
from tests.pool import Hang, Pool, RankError

MODES = ("ring", "zigzag")


@dataclass
class Config:
    """Flags of this benchmark."""

    cp: int = 4  # ranks that share the sequence
    tokens: int = 64  # of each rank
    out: str = "tests/bench/figures"  # folder for cp_work.json and cp_work.png


class Work(NamedTuple):
    """One block as a rank computed it: at which hop, whose keys (-1: all), and how many query-key pairs x heads."""

    hop: int
    source: int
    pairs: int


def pairs(queries: int, keys: int, causal: bool) -> int:
    """Query-key pairs of a block; each costs 4 x head_dim FLOPs a head forward."""
    return queries * (queries + 1) // 2 if causal else queries * keys


@contextmanager
def watched() -> Iterator[list[Work]]:
    """The blocks of one attention that is computed meanwhile, as the kernels are asked for them."""
    found: list[Work] = []
    looked_at: list[int] = []  # by hop, whose keys
    visible, block_attention, attend = step05.visible, step05.block_attention, step05.attend

    def look(rank: int, source: int, *rest) -> tuple[slice, slice, bool] | None:
        looked_at.append(source)
        return visible(rank, source, *rest)

    def block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        found.append(Work(len(looked_at) - 1, looked_at[-1], q.shape[2] * pairs(q.shape[1], k.shape[1], causal)))
        return block_attention(q, k, v, causal)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found.append(Work(0, -1, q.shape[2] * pairs(q.shape[1], k.shape[1], True)))
        return attend(q, k, v)

    with mock.patch.multiple(step05, visible=look, block_attention=block, attend=whole):
        yield found


def blocks_on_rank(tokens: int) -> dict[str, list[Work]]:
    """Runs on every rank: the blocks that it computed, by mode."""
    n, found = torch.distributed.get_world_size(), {}
    with open_mesh({"cp": n}, torch.device("cpu"), "gloo") as mesh:
        for mode in MODES:
            with watched() as found[mode]:
                step05.ContextAttention(mesh["cp"], mode)(*(torch.ones(1, tokens, 1, 8) for _ in range(3)))
    return found


def bench(config: Config):
    """Run, write down what was computed, draw it, print the sums."""
    if config.cp < 2 or config.tokens < 2 or config.tokens % 2:
        raise UserError(f"--cp {config.cp} must be at least 2, --tokens {config.tokens} even, and at least 2")
    pool = Pool(config.cp)
    try:
        by_rank = pool.run(blocks_on_rank, config.tokens)
    except (RankError, Hang) as error:
        sys.exit(str(error))  # the rank's traceback, or where each one stood
    pool.stop()
    modes = {mode: [[work._asdict() for work in found[mode]] for found in by_rank] for mode in MODES}
    Path(config.out).mkdir(parents=True, exist_ok=True)
    file, figure = Path(config.out, "cp_work.json"), Path(config.out, "cp_work.png")
    file.write_text(json.dumps(dict(tokens=config.tokens * config.cp, modes=modes)) + "\n")
    plots.context_work(file, figure)
    length = config.tokens * config.cp
    rows = [["rank", *(f"{mode}: share of all pairs" for mode in MODES)]]
    for rank in range(config.cp):
        sums = [sum(work["pairs"] for work in modes[mode][rank]) / (length * (length + 1) // 2) for mode in MODES]
        rows.append([str(rank), *(f"{share:.2%}" for share in sums)])
    print(f"{table(rows)}\n\nsee {figure}")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
