"""Experts: how busy each one is over training, and how alike they are, for every --balance; two figures and a table.

    python -m tests.bench expert_load

The same small model three times on one process; only what keeps the experts busy differs.

Two experts are alike if they make the same of the same tokens. All experts of a layer get all tokens of a fixed batch;
their outputs Y_i [tokens, dim], with the mean over tokens taken off, are compared by linear CKA (Kornblith et al. 2019,
"Similarity of Neural Network Representations Revisited", section 3.3): 1 if they are equal but for a rotation and a
factor, 0 if nothing of one is a linear function of the other.

    CKA(Y_i, Y_j) = |Y_i^T Y_j|^2 / (|Y_i^T Y_i| |Y_j^T Y_j|),    |.| the Frobenius norm
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

import step07_moe_ep as step07
from common import UserError
from common.model import PRESETS, Decoder
from common.moe import MoE
from services import plots
from services.flags import main as run_main
from services.readers import open_tokens
from services.tables import table

MODES = ("none", "loss", "bias")


@dataclass
class Config:
    """Flags of this benchmark."""

    steps: int = 300  # of training
    experts: int = 8  # in each of the two layers
    experts_per_token: int = 1  # that a token visits
    samples: int = 30  # comparisons of the experts over training
    lr: float = 1e-2  # peak learning rate
    balance_weight: float = 0.02  # of --balance loss
    bias_speed: float = 0.005  # of --balance bias
    runs: str = "runs/expert_load"  # folder for the runs
    out: str = "tests/bench/figures"  # folder for expert_load.png and expert_similarity.png


def linear_cka(a: Tensor, b: Tensor) -> float:
    """Similarity of two outputs [tokens, dim] of the same tokens, 0 to 1."""
    a, b = a - a.mean(0), b - b.mean(0)
    return float((a.T @ b).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm()))


@torch.no_grad()
def similarities(model: Decoder, tokens: Tensor) -> dict[str, float]:
    """By layer with experts: the mean CKA of all pairs of its experts, on tokens int64 [batch, seq]."""
    inputs: dict[MoE, Tensor] = {}
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    hooks = [layer.register_forward_pre_hook(lambda one, args: inputs.update({one: args[0]})) for layer in layers]
    model(tokens)
    for hook in hooks:
        hook.remove()
    found = {}
    for layer in layers:
        x, m = inputs[layer].flatten(0, -2), layer.m
        gates = torch.eye(m.experts, dtype=x.dtype)[:, None].expand(-1, len(x), -1)  # all tokens to one expert
        outputs = [layer.experts(x, gate) for gate in gates]
        pairs = [linear_cka(a, b) for a, b in combinations(outputs, 2)]
        found[str(layer.number)] = sum(pairs) / len(pairs)
    return found


def bench(config: Config):
    """Train, draw, print the end of each run."""
    if config.steps < 10 or config.experts < 2:
        raise UserError(f"--steps {config.steps} must be at least 10, --experts {config.experts} at least 2")
    rows = [["--balance", "loss", "busiest expert", "idlest expert", "router's entropy", "experts' CKA, first to last"]]
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    shape = PRESETS["debug"]
    tokens = open_tokens("", shape.seq_len, 16, 0, shape.vocab_size).batch(0).tokens
    for mode in MODES:
        options = {name: value for name, value in vars(config).items() if name not in ("runs", "out", "samples")}
        options |= dict(model="debug", expert_dim=88, balance=mode, micro_batch_size=16, eval_every=0, save_every=0)
        options |= dict(global_batch_size=32)
        curve = curves[mode] = defaultdict(list)

        def compare(step: int, optimizer, curve=curve):
            if step % max(1, config.steps // config.samples) == 0 or step + 1 == config.steps:
                for layer, cka in similarities(optimizer.model, tokens).items():
                    curve[layer].append((step + 1, cka))

        run = step07.Config(**options, ep=1, device="cpu", out=f"{config.runs}/{mode}")
        history = step07.train(run, observe=compare).history[-10:]
        loads = [
            sum(row["expert_load"][layer][e] for row in history) / len(history) * config.experts
            for layer in history[0]["expert_load"]
            for e in range(config.experts)
        ]
        loss, entropy = (sum(row[key] for row in history) / len(history) for key in ("loss", "router_entropy"))
        alike = [sum(each[at][1] for each in curve.values()) / len(curve) for at in (0, -1)]
        busy = [f"{max(loads):.2f} x 1/E", f"{min(loads):.2f} x 1/E"]
        rows.append([mode, f"{loss:.3f}", *busy, f"{entropy:.2f} nats", f"{alike[0]:.2f} to {alike[1]:.2f}"])
    Path(config.out).mkdir(parents=True, exist_ok=True)
    plots.expert_load({mode: Path(config.runs, mode) for mode in MODES}, Path(config.out, "expert_load.png"))
    plots.expert_similarity(curves, Path(config.out, "expert_similarity.png"))
    print(f"{table(rows)}\n\nmeans of the last ten steps; see expert_load.png, expert_similarity.png in {config.out}/")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
