"""A pipeline that is never flushed (`--pipedream N`; PipeDream, Narayanan et al. 2019): N updates, beside flushed ones.

Every micro-batch makes an update, and none waits for it: 1F1B continues without end, and a rank updates its stage after
each backward. On its way back a micro-batch would find newer weights than it used in forward. So a stage *stashes* the
weights of each forward, and its backward uses them. On 3 ranks, the numbers are the version of the weights that a stage
uses in forward and, from the stash, in backward:

    rank 0    F0:0 F1:0 F2:0 B0:0 F3:1 B1:0 F4:2 B2:0 F5:3 B3:1 ...      version t: after t updates
    rank 1         F0:0 F1:0 B0:0 F2:1 B1:0 F3:2 B2:1 F4:3 ...           micro-batch 3 uses 1, 2, 3
    rank 2              F0:0 B0:0 F1:1 B1:1 F2:2 B2:2 F3:3 ...

Laws. Update t + 1 of stage s = 0 .. p-1 is that of micro-batch t (their section 3.3; before w(0) there is w(0)):

    w_s(t+1) = w_s(t) - lr dF_t/dw_s (w_0(t-p+1), w_1(t-p+2), ..., w_p-1(t))      a gradient of weights of p ages
    rank s keeps p - s versions of its weights, the newest with them
    a rank idles for p-1 turns of m + p-1 after m micro-batches, however many: of 1F1B the same, but in each update

With *vertical sync* all stages use versions of one age: `--stale p-1`. Printed are losses of N updates by SGD (`--lr`;
no warm-up, no clipping), never flushed, and flushed after each. A micro-batch is a whole `--global-batch-size`. In step
6, `backward` would end with the update.
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
from step06_pipeline import Config, OneForwardOneBackward

SINCE = Config
Weights = dict[str, Tensor]  # by name, of one stage


def hold(model: Decoder, weights: Weights):
    """From here on its modules compute with these parameters."""
    for name, weight in weights.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_parameter(last, weight)


class Stashed(OneForwardOneBackward):
    """1F1B whose micro-batches make an update each, and go back through the weights through which they came."""

    def __init__(self, lr: float, weights: Weights, *same: Any):
        super().__init__(*same)
        self.lr, self.now, self.stash, self.versions = lr, dict(weights), {}, 0
        self.losses: list[Tensor] = []

    def forward(self, i: int, stage: int, x: Tensor | None) -> Tensor:
        """Through the newest weights, which micro-batch i gets as parameters of its own, with gradients of its own."""
        self.stash[i] = {name: nn.Parameter(weight) for name, weight in self.now.items()}
        self.versions = max(self.versions, len({next(iter(w.values())).data_ptr() for w in self.stash.values()}))
        hold(self.model, self.stash[i])
        self.n_targets = (self.ys[i] != IGNORE).sum().clamp(min=1)
        y = super().forward(i, stage, x)
        if self.places[stage].after is None:
            self.losses.append(y)
        return y

    def backward(self, i: int, stage: int, dy: Tensor | None) -> Tensor | None:
        """Through those of its forward; then the newest move on. They are new tensors: the stash still has the old."""
        hold(self.model, self.stash[i])  # what is computed again uses them, too
        dx = super().backward(i, stage, dy)
        for name, weight in self.stash.pop(i).items():
            self.now[name] = self.now[name] - self.lr * weight.grad
        return dx


class Shown(NamedTuple):
    """Of N updates: losses; by rank the most versions of its weights that it kept; this rank's weights in the end."""

    losses: list[float]
    versions: list[int]
    weights: Weights


def run(config: Any, parts: Parts, weights: Weights, xs: list[Tensor], ys: list[Tensor], flushed: bool) -> Shown:
    """N updates from these weights on. A collective of the pipeline's ranks."""
    group, device = parts.mesh["pp"], xs[0].device
    same = parts.model, parts.pipeline.places, group, parts.positions, 1
    pipeline = Stashed(config.lr, weights, *same)
    for x, y in zip([[x] for x in xs], [[y] for y in ys], strict=True) if flushed else [(xs, ys)]:
        pipeline.step(x, y, torch.ones((), device=device))
    numbers = torch.zeros(config.pipedream + group.size, dtype=torch.float64, device=device)
    if pipeline.losses:
        numbers[: config.pipedream] = torch.stack(pipeline.losses)
    numbers[config.pipedream + group.rank] = pipeline.versions
    all_reduce(numbers, group).wait()
    losses, versions = numbers[: config.pipedream].tolist(), numbers[config.pipedream :].int().tolist()
    return Shown(losses, versions, pipeline.now)


def both(config: Any, parts: Parts) -> tuple[Shown, Shown]:
    """Never flushed, and flushed after each update, from the same weights; in fp32 at least."""
    params = dict(parts.model.named_parameters())
    weights = {name: param.detach().to(wide(param.dtype), copy=True) for name, param in params.items()}
    hold(parts.model, {name: nn.Parameter(weight) for name, weight in weights.items()})  # x has their dtype
    batches, device = (parts.data.batch(i) for i in range(config.pipedream)), next(iter(weights.values())).device
    xs, ys = ([half.to(device) for half in halves] for halves in zip(*batches, strict=True))
    return run(config, parts, weights, xs, ys, False), run(config, parts, weights, xs, ys, True)


def table(late: Shown, flushed: Shown) -> list[str]:
    """What is printed: a mean loss for each tenth of the updates."""
    n, p = len(late.losses), len(late.versions)
    size = -(-n // 10)
    lines = [f"versions of weights on ranks 0 to {p - 1}: {late.versions}, flushed {flushed.versions}"]
    lines += [f"idle turns of a rank: {p - 1} of {n + p - 1}, flushed after each {n * (p - 1)} of {n * p}"]
    lines += ["updates   never flushed   flushed"]
    for start in range(0, n, size):
        means = [sum(part) / len(part) for part in (shown.losses[start : start + size] for shown in (late, flushed))]
        lines.append(f"{min(start + size, n):7}   {means[0]:13.4f}   {means[1]:7.4f}")
    return lines


@dataclass
class Flags:
    """PipeDream."""

    pipedream: int = 0  # updates of a pipeline that is never flushed, shown beside one that is, instead of training


NEEDS = [("pipedream", "pp"), ("pipedream", "schedule", "1f1b"), ("pipedream", "zero", 0, 1, 2)]
REFUSES = [Refusal(dict(pipedream=SET, dry_run=SET), "it prints losses, and a dry run has none; leave one out")]


def settle(config: Any, world: int):
    """No steps are left to be trained."""
    if config.pipedream:
        config.steps = 0


def check(config: Any, world: int):
    """Raises UserError."""
    if config.pipedream and config.pp != world:
        raise UserError(f"--pipedream: all {world} ranks must be stages, without dp, cp or tp: use --pp {world}")
    if config.pipedream and PRESETS[config.model].tied:
        raise UserError(f"--pipedream: --model {config.model} has one matrix on two stages, of two ages; take another")


def attach(config: Any, parts: Parts):
    """Run both pipelines, and print their losses."""
    if config.pipedream:
        lines = table(*both(config, parts))
        if parts.mesh.rank == 0:
            print("\n".join(lines))
