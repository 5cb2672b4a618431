"""Context parallelism: which rank computes which blocks at which hop, for ring and zigzag; cp_work.png and .json.

    python -m tests.bench cp_work --cp 4

One attention in each mode, on real ranks, with the trace switched on: the figure shows what was computed.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

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


def traces(tokens: int) -> dict[str, list[step05.Work]]:
    """Runs on every rank: the blocks that it computed, by mode."""
    n, found = torch.distributed.get_world_size(), {}
    with open_mesh({"cp": n}, torch.device("cpu"), "gloo") as mesh:
        for mode in MODES:
            core = step05.ContextAttention(mesh["cp"], mode)
            core.trace = found[mode] = []
            core(*(torch.ones(1, tokens, 1, 8) for _ in range(3)))
    return found


def bench(config: Config):
    """Run, write the trace, draw it, print the sums."""
    if config.cp < 2 or config.tokens < 2 or config.tokens % 2:
        raise UserError(f"--cp {config.cp} must be at least 2, --tokens {config.tokens} even, and at least 2")
    pool = Pool(config.cp)
    try:
        by_rank = pool.run(traces, config.tokens)
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
