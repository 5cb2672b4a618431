"""Prints a run's tables before its first step and after its last, computes each step's metrics, and draws pictures.

Screen(run, parts, ledger)      prints the mesh, how parameters are sharded, and the layers of each rank
screen.begin(step)              before a step
screen.more(tokens)             fields for metrics.jsonl
screen.line(row)                after a step: prints a line, if there is no terminal for a progress bar
screen.finish()                 tables and pictures
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common import comm
from common.comm import Mesh
from common.layout import layout_of
from common.schedules import SCHEDULES, Action, Place, simulate
from extras.services import plots
from extras.services.clocks import Clock
from extras.services.devices import peak_flops
from extras.services.ledger import Ledger, traffic_table
from extras.services.legal import layout_of_flags
from extras.services.memory import MemoryTimeline, MemoryWatch, memory_table, peak_memory
from extras.services.ranks import gather_objects
from extras.services.tables import full_shape, human, reduction_table
from extras.theory.shapes import flops_per_token, shape_of
from extras.variants import Parts
from step06_pipeline import plan


@dataclass
class Flags:
    """Screen and pictures."""

    profile_memory: int = 0  # draw memory over time for the first N steps
    peak_tflops: float = 0.0  # the device's dense peak; 0: from the table, or measured


def mesh_picture(mesh: Mesh) -> str:
    """Draw each rank's place in the mesh: the last dimension runs from left to right, the others from row to row."""
    *outer, inner = mesh.sizes
    lines = [f"mesh: {' x '.join(f'{name} {size}' for name, size in mesh.sizes.items())} ({inner} along the row)"]
    places = product(*(range(mesh.sizes[name]) for name in outer))
    for place, ranks in zip(places, mesh.ranks.reshape(-1, mesh.sizes[inner]).tolist(), strict=True):
        label = "  ".join(f"{name} {index}" for name, index in zip(outer, place, strict=True))
        lines.append(f"  {label}  [" + " ".join(f"{rank:2d}" for rank in ranks) + " ]")
    return "\n".join(lines)


def idle_fraction(spans: list[tuple[int, float, float]], ranks: int) -> float:
    """The fraction of the ranks' time, from the first start to the last end, that no span (rank, start, end) covers."""
    length = max(end for *_, end in spans) - min(start for _, start, _ in spans)
    return 1 - sum(end - start for _, start, end in spans) / (ranks * length)


def simulated_idle(lists: list[list[Action]], places: list[Place], costs: dict) -> float:
    """The idle fraction (bubble) of a schedule; `costs`: the seconds of an action, by kind."""
    spans = simulate(lists, places, costs)
    return idle_fraction([(rank, start, end) for end, rank, start, _ in spans], len(lists))


def stages_picture(config: Any, places: list[Place], lists: list[list[Action]]) -> str:
    """List each rank's layers, and the idle fraction if backward takes twice as long as forward."""
    idle = simulated_idle(lists, places, SCHEDULES[config.schedule](config).costs)
    rows: list[list[str]] = [[] for _ in lists]
    for stage, place in enumerate(places):
        first, last = place.layers.start, place.layers.stop - 1
        has = ["embedding"] * (place.before is None)
        has += [f"layer {first}" if first == last else f"layers {first}-{last}"]
        has += ["norm and head"] * (place.after is None)
        rows[place.rank].append(f"stage {stage}: {', '.join(has)}")
    lines = [f"  pp {rank}  {';  '.join(shown)}" for rank, shown in enumerate(rows)]
    return "\n".join([f"stages of {config.schedule}, which is idle for {idle:.1%} of the time:", *lines])


def parameters_in_all(parts: Parts) -> int:
    """The number of elements of all parameters, each counted once. A collective."""
    named = parts.model.named_parameters()
    sizes = {name: prod(full_shape(param.shape, layout_of(param).shards)) for name, param in named}
    return sum({name: n for theirs in gather_objects(sizes) for name, n in theirs.items()}.values())


class ExpertLoad:
    """Counts the routing decisions of all layers with experts since the last `take`."""

    def __init__(self, config: Any, parts: Parts):
        self.mesh, shape = parts.mesh, (parts.model.config.n_layers, config.experts + 3)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=next(parts.model.parameters()).device)
        for number, layer in parts.model.model.layers.items():
            if hasattr(layer.mlp, "experts"):
                sums = self.sums[int(number)]  # choices of each expert; rows that experts are given, tokens, entropy
                layer.mlp.experts.register_forward_pre_hook(partial(self.give, sums))
                parts.around(layer.mlp, "aux_loss", partial(self.choose, sums), by=__name__)

    @staticmethod
    def give(sums: Tensor, _module: torch.nn.Module, given: tuple[Tensor, Tensor]):
        """Forward pre-hook of a layer's experts on this rank; `given`: (rows, the number of rows for each expert)."""
        sums[-3] += given[1].sum()

    @staticmethod
    def choose(sums: Tensor, plain: Callable, p: Tensor, counts: Tensor) -> Tensor:
        """Wrap a layer's `aux_loss`; p: [tokens, experts]; counts: [experts], how often each expert was chosen."""
        sums[:-3] += counts
        sums[-2] += len(p)
        sums[-1] += torch.special.entr(p.detach()).sum()
        return plain(p, counts)

    def take(self) -> dict[str, Any]:
        """Return the metrics of all ranks, and reset the counts. A collective that the observer does not count.

        `expert_load`: by which factor a layer's busiest expert exceeds the mean, as percentiles 50 and 90 of the
        layers. `unused_experts`: how many no token chose. `drop_rate`: the fraction of choices that were dropped.
        `router_entropy`: the mean entropy of p in nats, log(experts) for a uniform router.
        """
        observer, comm.observer = comm.observer, None
        for dim in ("data", "tp", "pp"):
            comm.all_reduce(self.sums, self.mesh[dim]).wait()
        comm.observer = observer
        sums = self.sums.cpu()  # one wait for the device
        choices, (rows, tokens, entropy) = sums[sums.any(1), :-3], sums[:, -3:].sum(0).tolist()  # by layer with experts
        if not tokens:  # no layer has experts
            return {}
        busiest = choices.amax(1) / choices.mean(1)
        p50, p90 = busiest.quantile(busiest.new_tensor([0.5, 0.9])).tolist()
        unused, dropped = (choices == 0).sum().item(), 1 - rows / choices.sum().item()
        self.sums.zero_()
        numbers = dict(expert_load_p50=p50, expert_load_p90=p90, unused_experts=unused)
        return numbers | dict(drop_rate=dropped, router_entropy=entropy / tokens)


class Screen:
    """Shows a run: tables, metrics and pictures. Rank 0 prints and draws; all ranks contribute their numbers."""

    def __init__(self, run: Any, parts: Parts, ledger: Ledger):
        self.run, self.config, self.parts, self.ledger = run, run.config, parts, ledger
        some = next(parts.model.parameters())
        self.device, self.world = some.device, parts.mesh.world
        self.flops = flops_per_token(shape_of(parts.model.config, self.config), self.config.recompute == "full")
        self.peak = self.world * peak_flops(self.device, some.dtype, self.config.peak_tflops)
        self.load = ExpertLoad(self.config, parts) if hasattr(self.config, "experts") else None
        self.clock, self.timeline = Clock(parts), MemoryTimeline()
        self.held, self.watching = MemoryWatch(parts, self.timeline, self.clock), ExitStack()
        for text in self.introduction(some.dtype):
            self.say(text)

    def say(self, text: str):
        """Print on rank 0, above the bar."""
        if self.run.first:
            tqdm.write(text)

    def introduction(self, dtype: torch.dtype) -> list[str]:
        """The tables before the first step. A collective."""
        config, parts = self.config, self.parts
        texts = [f"{config.model}: {parameters_in_all(parts):,} parameters, {dtype}, {self.device}"]
        if parts.sync is not None:
            texts += [mesh_picture(parts.mesh), reduction_table(parts.model, parts.mesh)]
        if parts.pipeline is not None:
            texts.append(stages_picture(config, parts.pipeline.places, self.lists()))
        return [*texts, *parts.said()]

    def lists(self) -> list[list[Action]]:
        """The actions of each pipeline rank in a step, in order."""
        return plan(self.config, layout_of_flags(self.config, self.world).micro_batches)[1]

    def begin(self, step: int):
        """Begin a step. Tensors are watched in the first --profile-memory steps; on a CPU, at least in the first."""
        self.ledger.take()  # discards what was not part of a step
        if step == self.run.start:
            self.watching.enter_context(self.timeline)
        if step == self.run.start + (self.config.profile_memory or int(self.device.type == "cpu")):
            self.watching.close()
        self.clock.begin()
        if step == self.run.start and self.run.first and not sys.stderr.isatty():  # lines instead of a bar
            self.run.bar.clear()
            self.run.bar.disable = True

    def more(self, tokens: int) -> dict[str, Any]:
        """Compute the services' metrics of a step. A collective, if there are experts."""
        seconds = time.perf_counter() - self.run.began
        model, executed = (flops * tokens / seconds / self.peak for flops in self.flops)
        numbers = dict(mfu=model, hfu=executed) | self.clock.take()
        numbers |= dict(peak_memory_bytes=peak_memory(self.device)) | self.ledger.take()
        if self.load is not None:
            numbers |= self.load.take()
        for kept in self.parts.keeps("figures"):
            numbers |= kept.figures()
        return numbers

    def line(self, row: dict[str, Any]):
        """Print a line every tenth of the run, if there is no terminal for a progress bar."""
        end = self.config.steps
        if self.run.first and self.run.bar.disable and (row["step"] % max(1, end // 10) == 0 or row["step"] == end):
            print(
                f"step {row['step']}/{end}  loss {row['loss']:.4f}  norm {row['grad_norm']:.3f}  "
                f"{row['tokens_per_second']:,.0f} tok/s  MFU {row['mfu']:.1%}  {human(row['peak_memory_bytes'])}",
                flush=True,
            )

    def finish(self):
        """Print tables and draw pictures, after the last step. A collective."""
        self.watching.close()
        timelines = gather_objects(self.clock.timeline())
        if not self.run.first or not self.run.history:
            return
        last, steady, out = self.run.history[-1], self.run.history[1:] or self.run.history, self.run.out
        self.say(memory_table(self.held.most))
        if last["traffic"]:
            self.say(traffic_table(last))
        if self.config.profile_memory:
            plots.memory(out, *self.timeline.curves())
        if self.parts.pipeline is not None and self.config.pp > 1:
            self.draw_timeline(timelines[:: self.world // self.config.pp])
        mean = {key: sum(row[key] for row in steady) / len(steady) for key in ("tokens_per_second", "mfu", "hfu")}
        self.say(
            f"step {last['step']}: loss {last['loss']:.4f}; {mean['tokens_per_second']:,.0f} tokens/s, "
            f"MFU {mean['mfu']:.1%}, HFU {mean['hfu']:.1%} of {self.peak / 1e12:.2f} TFLOP/s; "
            f"peak memory {human(last['peak_memory_bytes'])}; see {out}/"
        )

    def draw_timeline(self, rows: list[list]):
        """Draw the actions of one pipeline's ranks over time, in the last step."""
        places, lists = self.parts.pipeline.places, self.lists()
        kinds = {kind for row in rows for kind, *_ in row}
        spans = {kind: [end - start for row in rows for k, *_, start, end in row if k == kind] for kind in kinds}
        costs = {kind: sum(seconds) / len(seconds) for kind, seconds in spans.items()}
        idle = idle_fraction([(rank, *box[3:]) for rank, row in enumerate(rows) for box in row], len(rows))
        plots.timeline(self.run.out, self.config.schedule, rows, idle, simulated_idle(lists, places, costs))
