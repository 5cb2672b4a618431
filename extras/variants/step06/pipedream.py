"""Makes N updates without pipeline flushes, then N with them (`--pipedream N`; PipeDream, Narayanan et al. 2019).

Every micro-batch makes an update, and 1F1B never pauses: a rank updates its stage after each backward. A micro-batch
would then find newer weights in backward than in forward. So a stage *stashes* the weights of each forward, and its
backward uses them. On 3 ranks, with the version of the weights that each forward and each backward uses:

    rank 0    F0:0 F1:0 F2:0 B0:0 F3:1 B1:0 F4:2 B2:0 F5:3 B3:1 ...      F3:1: forward of micro-batch 3, version 1
    rank 1         F0:0 F1:0 B0:0 F2:1 B1:0 F3:2 B2:1 F4:3 ...           version t: weights after t updates
    rank 2              F0:0 B0:0 F1:1 B1:1 F2:2 B2:2 F3:3 ...           micro-batch 3 uses versions 1, 2, 3

Laws (section 3.3). w_s(t): version t of the weights of stage s = 0 .. p-1 (t < 0: w_s(0)). F_t: micro-batch t's loss.

    w_s(t+1) = w_s(t) - lr dF_t/dw_s (w_0(t-p+1), w_1(t-p+2), ..., w_p-1(t))      a gradient at weights of p ages
    rank s keeps p - s versions of its weights, including the newest
    a turn: F and B. In m updates a rank idles for p-1 of m + p-1 turns; with a flush after each, for m (p-1) of m p

A run makes N updates by SGD (`--lr`; no warm-up, no clipping) without flushes, then N from the same initial weights
with a flush after each, and prints the losses of both. A micro-batch has `--global-batch-size` sequences. In
step 6, `backward` would end with the update.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common import UserError
from common.comm import all_reduce
from common.model import IGNORE, PRESETS, Decoder, wide
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from step06_pipeline import OneForwardOneBackward

Weights = dict[str, Tensor]  # of one stage, by name


def hold(model: Decoder, weights: Weights):
    """Register these weights as the parameters of a model's modules."""
    for name, weight in weights.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_parameter(last, weight)


class Stashed(OneForwardOneBackward):
    """1F1B in which each micro-batch makes an update, and its backward uses the weights of its forward."""

    def __init__(self, lr: float, weights: Weights, *same: Any):
        super().__init__(*same)
        self.lr, self.now, self.stash, self.versions = lr, dict(weights), {}, 0
        self.losses: list[Tensor] = []

    def forward(self, i: int, stage: int, x: Tensor | None) -> Tensor:
        """Run micro-batch i through the newest weights, wrapped in new parameters that get gradients of their own."""
        self.stash[i] = {name: nn.Parameter(weight) for name, weight in self.now.items()}
        self.versions = max(self.versions, len({next(iter(w.values())).data_ptr() for w in self.stash.values()}))
        hold(self.model, self.stash[i])
        self.n_targets = (self.ys[i] != IGNORE).sum().clamp(min=1)
        y = super().forward(i, stage, x)
        if self.places[stage].after is None:
            self.losses.append(y)
        return y

    def backward(self, i: int, stage: int, dy: Tensor | None) -> Tensor | None:
        """Run backward with the weights of the forward. The update makes new tensors: stashed weights do not change."""
        hold(self.model, self.stash[i])  # recomputation uses them, too
        dx = super().backward(i, stage, dy)
        for name, weight in self.stash.pop(i).items():
            self.now[name] = self.now[name] - self.lr * weight.grad
        return dx


class Shown(NamedTuple):
    """Results of N updates: losses, the maximum number of weight versions on each rank, and this rank's weights."""

    losses: list[float]
    versions: list[int]
    weights: Weights


def run(config: Any, parts: Parts, weights: Weights, xs: list[Tensor], ys: list[Tensor], flushed: bool) -> Shown:
    """Make N updates, starting from these weights. All ranks of the pipeline must call this function."""
    group, device, n = parts.mesh["pp"], xs[0].device, config.pipedream
    pipeline = Stashed(config.lr, weights, parts.model, parts.pipeline.places, group, parts.positions, 1)
    for x, y in zip([[x] for x in xs], [[y] for y in ys], strict=True) if flushed else [(xs, ys)]:
        pipeline.step(x, y, torch.ones((), device=device))
    numbers = torch.zeros(n + group.size, dtype=torch.float64, device=device)
    if pipeline.losses:
        numbers[:n] = torch.stack(pipeline.losses)
    numbers[n + group.rank] = pipeline.versions
    all_reduce(numbers, group).wait()
    return Shown(numbers[:n].tolist(), numbers[n:].int().tolist(), pipeline.now)


def both(config: Any, parts: Parts) -> tuple[Shown, Shown]:
    """Train twice from the same weights, in fp32 or wider: without flushes, then with a flush after each update."""
    params = dict(parts.model.named_parameters())
    weights = {name: param.detach().to(wide(param.dtype), copy=True) for name, param in params.items()}
    hold(parts.model, {name: nn.Parameter(weight) for name, weight in weights.items()})  # x takes their dtype
    batches = zip(*(parts.data.batch(i) for i in range(config.pipedream)), strict=True)
    xs, ys = ([half.to(parts.positions.device) for half in halves] for halves in batches)
    return run(config, parts, weights, xs, ys, False), run(config, parts, weights, xs, ys, True)


def table(late: Shown, flushed: Shown) -> list[str]:
    """Returns the lines to print, with a mean loss for each tenth of the updates."""
    n, p = len(late.losses), len(late.versions)
    lines = [f"versions of weights on ranks 0 to {p - 1}: {late.versions}, flushed {flushed.versions}"]
    lines += [f"idle turns of a rank: {p - 1} of {n + p - 1}, flushed after each {n * (p - 1)} of {n * p}"]
    lines += ["updates   never flushed   flushed"]
    for part in torch.arange(n).split(-(-n // 10)):
        mean, beside = (torch.tensor(shown.losses)[part].mean().item() for shown in (late, flushed))
        lines.append(f"{part[-1] + 1:7}   {mean:13.4f}   {beside:7.4f}")
    return lines


@dataclass
class Flags:
    """PipeDream."""

    pipedream: int = 0  # instead of training, make this many updates without flushes, and as many with them


NEEDS = [("pipedream", "pp"), ("pipedream", "schedule", "1f1b"), ("pipedream", "zero", 0, 1, 2)]
REFUSES = [Refusal(dict(pipedream=SET, dry_run=SET), "it prints losses, and a dry run has none; leave one out")]


def settle(config: Any, world: int):
    """Set --steps to 0: `attach` makes all updates, and no training steps follow."""
    if config.pipedream:
        config.steps = 0


def check(config: Any, world: int):
    """Raises UserError unless all ranks are stages, and no parameter is in two stages."""
    if config.pipedream and config.pp != world:
        raise UserError(f"--pipedream: all {world} ranks must be stages, without dp, cp or tp: use --pp {world}")
    if config.pipedream and PRESETS[config.model].tied:
        raise UserError(f"--pipedream: --model {config.model} has one matrix on two stages, of two ages; take another")


def attach(config: Any, parts: Parts):
    """Make the updates without flushes, then with flushes; rank 0 prints the losses of both."""
    if config.pipedream:
        lines = table(*both(config, parts))
        if parts.mesh.rank == 0:
            print("\n".join(lines))
