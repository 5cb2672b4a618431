"""Prints a run's tables before its first step and after its last, computes each step's metrics, and draws pictures."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common import comm
from common.comm import Mesh
from common.schedules import SCHEDULES, Action, Place, simulate
from extras.services import plots
from extras.services.clocks import Clock
from extras.services.devices import peak_flops
from extras.services.legal import layout_of_flags
from extras.services.memory import MemoryTimeline, MemoryWatch, memory_table, peak_memory
from extras.services.ranks import gather_objects
from extras.services.tables import Ledger, human, reduction_table, traffic_table
from extras.plan.shapes import flops_per_token, shape_of, total_weights
from extras.variants import Parts
from step06_pipeline import plan


@dataclass
class Flags:
    """Screen and pictures."""

    profile_memory: int = 0  # draw memory over time for the first N steps
    peak_tflops: float = 0.0  # dense peak of a device in TFLOP/s; 0: from a table of GPUs, or measured


def mesh_picture(mesh: Mesh) -> str:
    """Draw each rank's place in the mesh: a row has the ranks that differ only in the last dimension."""
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


def stages_picture(config: Any, places: list[Place], lists: list[list[Action]]) -> str:
    """List each rank's layers, and what part of the time ranks are idle if backward takes twice as long as forward."""
    spans = simulate(lists, places, SCHEDULES[config.schedule](config).costs)
    idle = idle_fraction([(rank, start, end) for end, rank, start, _ in spans], len(lists))
    rows: list[list[str]] = [[] for _ in lists]
    for stage, place in enumerate(places):
        first, last = place.layers.start, place.layers.stop - 1
        has = ["embedding"] * (place.before is None)
        has += [f"layer {first}" if first == last else f"layers {first}-{last}"]
        has += ["norm and head"] * (place.after is None)
        rows[place.rank].append(f"stage {stage}: {', '.join(has)}")
    lines = [f"  pp {rank}  {';  '.join(shown)}" for rank, shown in enumerate(rows)]
    return "\n".join([f"stages of {config.schedule}, which is idle for {idle:.1%} of the time:", *lines])


class ExpertLoad:
    """Counts how often each expert of each layer was chosen since the last `take`."""

    def __init__(self, config: Any, parts: Parts):
        self.mesh, shape = parts.mesh, (parts.model.config.n_layers, config.experts)
        self.counts = torch.zeros(shape, dtype=torch.float64, device=next(parts.model.parameters()).device)
        for number, layer in parts.model.model.layers.items():
            if hasattr(layer.mlp, "experts"):
                parts.around(layer.mlp, "aux_loss", partial(self.count, int(number)), by=__name__)

    def count(self, layer: int, plain: Callable, p: Tensor, counts: Tensor) -> Tensor:
        """Wrap `aux_loss`: add up `counts` [experts], how often each expert was chosen. p: [tokens, experts]."""
        self.counts[layer] += counts
        return plain(p, counts)

    def take(self) -> dict[str, float]:
        """Return metrics over all ranks, and reset the counts. A collective, of which `comm.observer` is not told.

        `expert_load_p50` and `_p90`: percentiles, over layers, of the load of a layer's busiest expert divided by the
        layer's mean load. `unused_experts`: how many experts, in all layers together, no token has chosen.
        """
        observer, comm.observer = comm.observer, None
        for dim in ("data", "tp", "pp"):
            comm.all_reduce(self.counts, self.mesh[dim]).wait()
        comm.observer = observer
        counts = self.counts.cpu()  # one wait for the device
        counts = counts[counts.any(1)]  # of layers with experts; a copy, because `zero_` comes next
        self.counts.zero_()
        if not len(counts):
            return {}
        p50, p90 = (counts.amax(1) / counts.mean(1)).quantile(counts.new_tensor([0.5, 0.9])).tolist()
        return dict(expert_load_p50=p50, expert_load_p90=p90, unused_experts=(counts == 0).sum().item())


class Screen:
    """Shows a run: tables, metrics and pictures. Rank 0 prints and draws; all ranks contribute their numbers."""

    def __init__(self, run: Any, parts: Parts, ledger: Ledger):
        self.run, self.config, self.parts, self.ledger = run, run.config, parts, ledger
        some = next(parts.model.parameters())
        self.device, self.world = some.device, parts.mesh.world
        shape = shape_of(parts.model.config, self.config)
        self.flops = flops_per_token(shape, self.config.recompute == "full" or "R" in parts.kinds)
        self.peak = self.world * peak_flops(self.device, some.dtype, self.config.peak_tflops)
        self.load = ExpertLoad(self.config, parts) if hasattr(self.config, "experts") else None
        self.clock, self.timeline = Clock(parts), MemoryTimeline()
        self.held, self.watching = MemoryWatch(parts, self.timeline, self.clock), ExitStack()
        self.say(f"{self.config.model}: {total_weights(shape):,.0f} parameters, {some.dtype}, {self.device}")
        self.introduce()

    def say(self, text: str):
        """Print on rank 0, above the progress bar."""
        if self.run.first:
            tqdm.write(text)

    def introduce(self):
        """Print the tables before the first step. A collective."""
        parts = self.parts
        if parts.sync is not None:
            self.say(mesh_picture(parts.mesh))
            self.say(reduction_table(parts.model, parts.mesh))
        if parts.pipeline is not None:
            lists = plan(self.config, layout_of_flags(self.config, self.world).micro_batches)[1]
            self.say(stages_picture(self.config, parts.pipeline.places, lists))
        for text in parts.said():
            self.say(text)

    def begin(self, step: int):
        """Begin a step. --profile-memory N tracks the first N steps' memory; 0 means 1 step on a CPU, none on a GPU."""
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
        load = self.load.take() if self.load is not None else {}
        memory = peak_memory(self.device)
        return dict(mfu=model, hfu=executed, peak_memory_bytes=memory) | self.ledger.take() | load

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
        if loads := [row for row in self.run.history if "unused_experts" in row]:
            plots.experts(out, loads)
        if self.parts.pipeline is not None and self.config.pp > 1:
            rows = timelines[:: self.world // self.config.pp]  # of one pipeline's ranks
            spans = [(rank, start, end) for rank, row in enumerate(rows) for *_, start, end in row]
            plots.timeline(out, self.config.schedule, rows, idle_fraction(spans, len(rows)))
        mean = {key: sum(row[key] for row in steady) / len(steady) for key in ("tokens_per_second", "mfu", "hfu")}
        self.say(
            f"step {last['step']}: loss {last['loss']:.4f}; {mean['tokens_per_second']:,.0f} tokens/s, "
            f"MFU {mean['mfu']:.1%}, HFU {mean['hfu']:.1%} of {self.peak / 1e12:.2f} TFLOP/s; "
            f"peak memory {human(last['peak_memory_bytes'])}; see {out}/"
        )
