"""Experts: how busy each one is over training, for every --balance; expert_load.png and a table.

    python -m tests.bench expert_load

The same small model three times on one process; only what keeps the experts busy differs.
"""

from dataclasses import dataclass
from pathlib import Path

import step07_moe_ep as step07
from common import UserError
from services import plots
from services.flags import main as run_main
from services.tables import table

MODES = ("none", "loss", "bias")


@dataclass
class Config:
    """Flags of this benchmark."""

    steps: int = 300  # of training
    experts: int = 8  # in each of the two layers
    experts_per_token: int = 1  # that a token visits
    lr: float = 1e-2  # peak learning rate
    balance_weight: float = 0.02  # of --balance loss
    bias_speed: float = 0.005  # of --balance bias
    runs: str = "runs/expert_load"  # folder for the runs
    out: str = "tests/bench/figures"  # folder for expert_load.png


def bench(config: Config):
    """Train, draw, print the end of each run."""
    if config.steps < 10 or config.experts < 2:
        raise UserError(f"--steps {config.steps} must be at least 10, --experts {config.experts} at least 2")
    rows = [["--balance", "loss", "busiest expert", "idlest expert", "router's entropy"]]
    for mode in MODES:
        options = {name: value for name, value in vars(config).items() if name not in ("runs", "out")}
        options |= dict(model="debug", expert_dim=88, balance=mode, micro_batch_size=16, eval_every=0, save_every=0)
        history = step07.train(step07.Config(**options, ep=1, out=f"{config.runs}/{mode}")).history[-10:]
        loads = [
            sum(row["expert_load"][layer][e] for row in history) / len(history) * config.experts
            for layer in history[0]["expert_load"]
            for e in range(config.experts)
        ]
        loss, entropy = (sum(row[key] for row in history) / len(history) for key in ("loss", "router_entropy"))
        rows.append([mode, f"{loss:.3f}", f"{max(loads):.2f} x 1/E", f"{min(loads):.2f} x 1/E", f"{entropy:.2f} nats"])
    Path(config.out).mkdir(parents=True, exist_ok=True)
    plots.expert_load({mode: Path(config.runs, mode) for mode in MODES}, Path(config.out, "expert_load.png"))
    print(f"{table(rows)}\n\nmeans of the last ten steps; see {config.out}/expert_load.png")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
