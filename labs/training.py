"""A few steps of training with a whole file, laid beside one device: losses, norms and final weights.

The one device is written out here with torch and common alone: the steps hold the solutions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from common import data
from common.layout import materialize
from common.model import IGNORE, PRESETS, Decoder, ModelConfig
from common.trainer import Run
from labs.course import BOUND, Case, Criterion

SHAPE = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=259, seq_len=16)
FLAGS = dict(steps=2, warmup_steps=2, global_batch_size=12, micro_batch_size=1, lr=0.05, grad_clip=0.5)
FLAGS |= dict(dtype="fp64", device="cpu")


class Watch(Run):
    """A run that draws and writes nothing."""

    def __enter__(self) -> "Watch":
        self.first = False
        return self

    def steps(self, **parts: Any) -> Iterator[int]:
        """As the plain run's; keeps the parts."""
        self.parts = SimpleNamespace(**parts)
        yield from super().steps(**parts)


@contextmanager
def tokens(case: Case) -> Iterator[None]:
    """Training data are drawn from the case. A third of the targets do not count, unevenly."""
    length = 4000
    ids = case.ids("stream", 257, length).numpy()
    labels = ids.copy()
    labels[case.draw("which count", length).numpy() < -0.43] = IGNORE
    labels[1 : 1 + (length - 1) // 16 * 16].reshape(-1, 16)[::3] = IGNORE
    data.READERS[".py"], kept = lambda _: (ids, labels), data.READERS.get(".py")
    try:
        yield
    finally:
        data.READERS[".py"] = kept


def flags_of(case: Case) -> dict[str, Any]:
    """The flags of a training case; its layout's flags are in `layout`, the model's in `shape`."""
    PRESETS["lab"] = ModelConfig(**SHAPE | case.sizes.get("shape", {}))
    return FLAGS | dict(model="lab", seed=case.seed % 1000, dataset=__file__, out="run") | case.sizes.get("flags", {})


def one_device(case: Case) -> dict[str, Any]:
    """The same in one process, from the formulas: a plain loop."""
    flags = SimpleNamespace(**dict(optimizer="adamw", weight_decay=0.1) | flags_of(case))
    shape, losses, norms = PRESETS["lab"], [], []
    with torch.device("meta"):
        model = Decoder(shape)
    materialize(model, flags.seed, torch.device("cpu"), torch.float64)
    named = dict(model.named_parameters())
    groups = [dict(params=[p], weight_decay=flags.weight_decay * (p.dim() > 1)) for p in named.values()]
    rule = torch.optim.AdamW(groups, betas=(0.9, 0.95), lr=0.0)
    with tokens(case):
        batches = data.Data(__file__, shape, flags.global_batch_size, flags.seed)
        for step in range(flags.steps):
            x, y = batches.batch(step)
            loss = model(x, y) / (y != IGNORE).sum()
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in named.values()]).norm().item()
            warm = min(1.0, (step + 1) / flags.warmup_steps)
            for group in rule.param_groups:
                group["lr"] = flags.lr * warm
            for param in named.values():
                param.grad *= min(1.0, flags.grad_clip / norm) if flags.grad_clip else 1.0
            rule.step()
            rule.zero_grad()
            losses.append(loss.item()), norms.append(norm)
    return {"the losses": losses, "the gradient norms": norms} | {
        f"after training, {name}": param.detach() for name, param in named.items()
    }


kept: dict[str, dict[str, Any]] = {}  # what one device finds, by case


class Trained(Case):
    """Train: losses, norms, and on one rank the final weights."""

    one_device = staticmethod(one_device)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        config = step.Config(**flags_of(self) | self.layout)
        with tokens(self), Watch(config) as run:
            step.train(config, run)
        found = {"the losses": [row["loss"] for row in run.history]}
        found["the gradient norms"] = [row["grad_norm"] for row in run.history]
        if self.ranks == 1:  # on several, weights may be parts, or have no memory between steps
            found |= {f"after training, {name}": param.detach() for name, param in run.parts.model.named_parameters()}
        return found

    def expected(self, rank: int) -> dict[str, Any]:
        key = f"{type(self)} {self.seed} {self.sizes.get('shape')} {self.sizes.get('flags')}"
        if key not in kept:
            kept[key] = self.one_device(self)
        return {name: value for name, value in kept[key].items() if self.ranks == 1 or name.startswith("the ")}


def trains(points: int, *layouts: tuple[int, dict[str, Any]], says: str = "", **more: Any) -> Criterion:
    """A criterion: the whole file trains as one device in each layout, (ranks, flags of the step).

    `more`: `shape` (fields of the model) and `flags`, of all layouts; `kind`, `bound`.
    """
    words = {True: "--{}", False: "--no-{}"}
    names = [
        " ".join([f"{n} ranks", *(words.get(v, f"--{{}} {v}").format(k.replace("_", "-")) for k, v in flags.items())])
        for n, flags in layouts
    ]
    kind, bound = more.pop("kind", Trained), more.pop("bound", BOUND)
    cases = tuple(dict(mesh=dict(dp=n), layout=flags, **more) for n, flags in layouts)
    says = says or f"the file trains as one device: {'; '.join(names)}"
    return Criterion(says, points, kind, cases, bound=bound, whole=True)
