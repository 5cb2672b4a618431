"""A few steps of training with a whole file, laid beside one device: losses, norms and final weights.

The one device is written out here with torch and common alone: the steps hold the solutions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from common import data
from common.comm import Mesh
from common.model import IGNORE, PRESETS, Decoder, ModelConfig
from common.trainer import Run
from labs.course import BOUND, Case, Criterion, Row
from labs.probes import adamw, fill, update

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


kept: dict[str, dict[str, Any]] = {}  # what one device finds, by case


class Trained(Case):
    """Train: losses, norms, and on one rank the final weights. `layout`: the flags that one device does not know."""

    def setup(self):
        self.shape, self.flags, self.layout = (self.sizes.get(name, {}) for name in ("shape", "flags", "layout"))
        key = f"{type(self)} {self.seed} {self.shape} {self.flags}"
        if key not in kept:
            kept[key] = self.one_device()
        self.wanted = kept[key]

    def model(self, config: ModelConfig) -> Decoder:
        """That of one device."""
        return Decoder(config)

    def all_flags(self) -> dict[str, Any]:
        """Of the step."""
        PRESETS["lab"] = ModelConfig(**SHAPE | self.shape)
        return FLAGS | dict(model="lab", seed=self.seed % 1000, dataset=__file__, out="run") | self.flags | self.layout

    def train(self, step: Any, watch: type[Watch]) -> Watch:
        """With the step."""
        config = step.Config(**self.all_flags())
        with tokens(self), watch(config) as run:
            step.train(config, run)
        return run

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        run = self.train(step, Watch)
        for name in ("loss", "grad_norm"):
            yield f"the {name} of each step", [row[name] for row in run.history], self.wanted[name]
        for name, param in run.parts.model.named_parameters():
            if self.ranks == 1:  # on several, weights may be parts, or have no memory between steps
                yield f"after training, {name}", param, self.wanted[name]

    def one_device(self) -> dict[str, Any]:
        """The same in one process, from the formulas: a plain loop. Losses, norms, and final weights by name."""
        flags, losses, norms = SimpleNamespace(**self.all_flags()), [], []
        with torch.device("meta"):
            model = self.model(PRESETS["lab"])
        fill(model, flags.seed)
        named = dict(model.named_parameters())
        rule = adamw(named.values(), 0.1)
        with tokens(self):
            batches = data.Data(__file__, PRESETS["lab"], flags.global_batch_size, flags.seed)
            for step in range(flags.steps):
                x, y = batches.batch(step)
                loss = model(x, y) / (y != IGNORE).sum()
                loss.backward()
                norm = torch.stack([p.grad.norm() for p in named.values()]).norm().item()
                for param in named.values():
                    param.grad *= min(1.0, flags.grad_clip / norm) if flags.grad_clip else 1.0
                update(rule, flags.lr * min(1.0, (step + 1) / flags.warmup_steps))
                rule.zero_grad()
                losses.append(loss.item()), norms.append(norm)
        return named | {"loss": losses, "grad_norm": norms}


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
