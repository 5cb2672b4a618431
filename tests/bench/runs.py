"""Whole runs beside one another: what they hold, what they send, the loss that they reach; with a figure.

Each run is a step's `train` with all services around it, on ranks of its own; it keeps no files. Predicted bytes are
theory's, measured ones those that the run has seen.
"""

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from services.run import ServedRun, compose
from services.tables import human, table
from tests.bench import figures
from tests.bench.harness import command, on_ranks

KINDS = ("parameters", "gradients", "masters", "moments")


class Runs(NamedTuple):
    """Runs by label: (ranks, step, flags), with `shared` flags. `show(found, shared)` prints them."""

    about: str
    show: Callable[[dict[str, list[SimpleNamespace]], dict], None]
    shared: dict[str, Any]
    rows: dict[str, tuple[int, str, dict[str, Any]]]


def served(step: str, flags: dict[str, Any]) -> SimpleNamespace:
    """Runs on every rank: train with everything around; what the run has seen."""
    module = importlib.import_module(step)
    with tempfile.TemporaryDirectory() as out:
        config = compose(module)(**dict(save_every=0, eval_every=0, peak_tflops=1.0, out=out) | flags)
        with ServedRun(config) as run:
            module.train(config, run)
        pictures = {path.stem: path.read_bytes() for path in Path(out).glob("*.png")}
    held, curves = run.screen.held, None
    if flags.get("profile_memory"):
        curves = dict(zip(("seconds", "bytes"), held.timeline.curves(), strict=True))
    n = sum(param.numel() for param in run.parts.model.parameters())
    seen = dict(predicted=run.screen.predicted, most=held.most, curves=curves, n=n, pictures=pictures)
    return SimpleNamespace(rows=run.history, **seen)


def last(found: list[SimpleNamespace], key: str) -> float:
    """The mean of a number over a run's last ten steps."""
    rows = [row[key] for row in found[0].rows[-10:]]
    return sum(rows) / len(rows)


def show_kept(found: dict[str, list[SimpleNamespace]], shared: dict):
    """Activations that a forward leaves for backward, the most of any rank."""
    rows, bars = [["kept for backward", "predicted", "measured", "of the first"]], {}
    first = max(rank.most["activations"] for rank in next(iter(found.values())))
    for label, ranks in found.items():
        predicted, measured = (max(getattr(r, what)["activations"] for r in ranks) for what in ("predicted", "most"))
        rows.append([label, human(predicted), human(measured), f"{measured / first:.3f}"])
        kind, _, size = label.partition(", ")
        bars.setdefault(kind, {})[size] = predicted, measured
    print(table(rows))
    if all("tp" in group for each in bars.values() for group in each):
        print(f"\nsee {figures.bars(bars, 'kept for backward by a rank', 'tp_memory')}")


def show_zero(found: dict[str, list[SimpleNamespace]], shared: dict):
    """Bytes per parameter by kind, the mean of all ranks; the staircase."""
    rows = [["bytes per parameter, predicted / measured", *KINDS, "sum"]]
    for label, ranks in found.items():
        pairs = [
            [sum(getattr(rank, what)[kind] / rank.n for rank in ranks) / len(ranks) for what in ("predicted", "most")]
            for kind in KINDS
        ]
        pairs.append([sum(column) for column in zip(*pairs, strict=True)])
        rows.append([label, *(f"{theory:.3f} / {seen:.3f}" for theory, seen in pairs)])
    title = f"rank 0 of {len(ranks)}, {shared['dtype']}, two training steps"
    picture = figures.staircase({label: ranks[0].curves for label, ranks in found.items()}, title, "zero_memory")
    print(f"{table(rows)}\n\nsee {picture}")


def show_curves(name: str, dims: tuple[str, ...], found: dict[str, list[SimpleNamespace]], shared: dict):
    """Bytes sent by dimension, and losses."""
    heads = [text for dim in dims for text in (f"sent over {dim}", "of the first")]
    rows, first = [["", *heads, "last loss", "mean of ten", "validation"]], next(iter(found.values()))[0].rows[-1]
    for label, (run, *_) in found.items():
        row, cells = run.rows[-1], []
        for dim in dims:
            sent, whole = row["sent"].get(dim, 0), first["sent"].get(dim, 0)
            cells += [human(sent), f"{sent / whole:.1%}" if whole else "-"]
        validation = f"{row['validation_loss']:.4f}" if "validation_loss" in row else "-"
        rows.append([label, *cells, f"{row['loss']:.4f}", f"{last([run], 'loss'):.4f}", validation])
    picture = figures.losses({label: run.rows for label, (run, *_) in found.items()}, f"{name}, same seed", name)
    print(f"{table(rows)}\n\nsee {picture}")


def show_experts(found: dict[str, list[SimpleNamespace]], shared: dict):
    """How busy the experts are at the end, means over ten steps."""
    rows = [["--balance", "loss", "busiest expert", "idlest expert"]]
    for label, (run, *_) in found.items():
        tail = [row["expert_load"] for row in run.rows[-10:]]
        means = [
            sum(load[layer][e] for load in tail) / len(tail) * len(tail[0][layer])
            for layer in tail[0]
            for e in range(len(tail[0][layer]))
        ]
        rows.append([label, f"{last([run], 'loss'):.3f}", f"{max(means):.2f} x 1/E", f"{min(means):.2f} x 1/E"])
    picture = figures.loads({label: run.rows for label, (run, *_) in found.items()}, "expert_load")
    print(f"{table(rows)}\n\nmeans of the last ten steps; see {picture}")


def show_first(found: dict[str, list[SimpleNamespace]], shared: dict):
    """The end of the first command; its pictures become the README's."""
    ((first, *_),) = found.values()
    for name in ("loss", "timeline"):
        (figures.FIGURES / f"first_run_{name}.png").write_bytes(first.pictures[name])
    rows, speed = first.rows, last([first], "tokens_per_second")
    losses = f"loss {rows[0]['loss']:.2f} to {rows[-1]['loss']:.2f}, validation {rows[-1]['validation_loss']:.2f}"
    print(f"{losses}; {speed:,.0f} tokens/s; see first_run_*.png in {figures.FIGURES}")


ONE, SIZES = dict(steps=1, global_batch_size=4), (1, 2, 4, 8)
SMALL16 = dict(dim=160, n_layers=16, ffn_dim=448, seq_len=64, global_batch_size=8, micro_batch_size=1)
RUNS = {
    "first_run": Runs(
        "the first command (figures of the README)", show_first, dict(steps=40, eval_every=40),
        {"first": (8, "step07_moe_ep", dict(pp=2, cp=2, tp=2, ep=2, global_batch_size=16))},
    ),
    "recompute_memory": Runs(
        "activations kept with each --recompute", show_kept, dict(micro_batch_size=4) | ONE,
        {f"--recompute {way}": (1, "step01_single_gpu", dict(recompute=way)) for way in ("none", "selective", "full")},
    ),
    "tp_memory": Runs(
        "activations kept under tensor and sequence parallelism (figure)", show_kept, dict(micro_batch_size=4) | ONE,
        {f"{flag}, tp {n}": (n, "step04_tp_sp", dict(tp=n, **on))
         for flag, on in {"--no-sp": dict(sp=False), "--sp": {}, "--sp --tp-overlap": dict(tp_overlap=True)}.items()
         for n in SIZES if n > 1 or flag == "--no-sp"},
    ),
    "pp_memory": Runs(
        "activations kept by each schedule, 4 stages", show_kept,
        dict(pp=4, n_layers=8, zero=0, steps=1, global_batch_size=16, micro_batch_size=2),
        {f"--schedule {name}": (4, "step06_pipeline", dict(schedule=name))
         for name in ("afab", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe")},
    ),
    "zero_memory": Runs(
        "bytes over time and per parameter in stages 0 to 3 (figure)", show_zero,
        dict(dtype="bf16", device="cpu", steps=2, profile_memory=2, **SMALL16),
        {f"stage {stage}": (4, "step03_zero", dict(zero=stage)) for stage in range(4)},
    ),
    "compress": Runs(
        "bytes and loss of every --compress (figure)",
        lambda *found: show_curves("compress", ("dp",), *found), dict(steps=100, eval_every=100),
        {f"--compress {way}": (2, "step02_ddp", dict(compress=way)) for way in ("none", "bf16", "int8", "topk")},
    ),
    "compress_activations": Runs(
        "bytes and loss of every --compress-activations (figure)",
        lambda *found: show_curves("compress_activations", ("tp", "pp"), *found),
        dict(steps=100, eval_every=100, pp=2, tp=2),
        {f"--compress-activations {way}": (4, "step06_pipeline", dict(compress_activations=way))
         for way in ("none", "bf16", "int8")},
    ),
    "expert_load": Runs(
        "how busy experts are with every --balance (figure)", show_experts,
        dict(model="debug", expert_dim=88, experts_per_token=1, steps=300, lr=1e-2, balance_weight=0.02,
             bias_speed=0.005, micro_batch_size=16),
        {way: (1, "step07_moe_ep", dict(balance=way)) for way in ("none", "loss", "bias")},
    ),
}  # fmt: skip


@dataclass
class Config:
    """Flags of all runs."""

    model: str = ""  # preset; default: tiny, or what the measurement has
    steps: int = 0  # steps of each run; 0: as the measurement has them


def main(name: str, argv: list[str]):
    """The command line."""

    def bench(config: Config):
        about, show, shared, rows = RUNS[name]
        shared = shared | {key: value for key, value in vars(config).items() if value}
        if shared.get("eval_every"):
            shared["eval_every"] = min(shared["eval_every"], shared["steps"])
        found = {label: on_ranks(n, served, step, shared | flags) for label, (n, step, flags) in rows.items()}
        print(f"{name}: {about}\n{' '.join(f'{key} {value}' for key, value in shared.items())}\n")
        show(found, shared)

    command(bench, Config, argv)
