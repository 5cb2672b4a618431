"""Will it fit, how fast will it be, which layout do I take?

    python -m theory.plan --model llama3-70b --gpus 128 --gpu h100-80 --seq-len 8192 --global-batch-size 1024
    python -m theory.plan --model llama3-70b --gpus 128 --explain "--tp 8 --pp 4 --micro-batch-size 1"
    python -m theory.plan --gpus 8 --largest
    python -m theory.plan --model llama3-8b --gpus 8 --longest

It prints the ten best layouts of the course's own trainer. The flags are those of step07_moe_ep.py. GPUs are in nodes
of 8; tp is innermost, then cp, dp, pp. How it counts: theory/footprint.py and theory/seconds.py; how it searches:
theory/search.py; what it was held against: `python -m tests.bench plan`.
"""

import argparse
import csv
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from theory.explain import blackboard
from theory.footprint import Held
from theory.gpus import GIB, GPUS, NODE, ROOM, Gpu
from theory.layouts import Layout, illegal, meshes, variants
from theory.picture import draw
from theory.search import COURSE, Found, evaluate, fits, rates, search, smallest
from theory.seconds import Seconds
from theory.shapes import MODELS, Shape, total_weights

MOST_GPUS = 2**17


class PlanError(Exception):
    """A mistake, in one line."""


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise PlanError."""
        raise PlanError(message)


def flags() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m theory.plan", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", default="llama3-8b", help="one of " + ", ".join(MODELS))
    parser.add_argument("--gpus", type=int, default=8, help="how many; nodes have 8")
    parser.add_argument("--gpu", default="h100-80", help="one of " + ", ".join(GPUS))
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence; default: the model's")
    parser.add_argument("--global-batch-size", type=int, help="sequences of a step; default: about 4M tokens")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--explain", metavar="FLAGS", help='one layout on the blackboard: "--tp 8 --pp 4 ..."')
    instead.add_argument("--largest", action="store_true", help="the largest model that fits")
    instead.add_argument("--longest", action="store_true", help="the longest sequence that fits")
    parser.add_argument("--list", metavar="FILE", help="write memory and time of every legal layout to a .csv (slow)")
    parser.add_argument("--picture", metavar="FILE", default="plan.png", help="of the ten; empty: none")
    return parser


def choose(args: Any) -> tuple[Shape, Gpu, int]:
    """Model, GPU and batch. Raises PlanError."""
    if args.model not in MODELS:
        raise PlanError(f"--model {args.model}: no such model; choose one of {', '.join(MODELS)}")
    if args.gpu not in GPUS:
        raise PlanError(f"--gpu {args.gpu}: no such GPU; choose one of {', '.join(GPUS)}")
    m = MODELS[args.model]
    m = replace(m, seq_len=m.seq_len if args.seq_len is None else args.seq_len)
    batch = args.global_batch_size
    if batch is None:
        batch = max(args.gpus, 2 ** max(0, (2**22 // max(1, m.seq_len)).bit_length() - 1))
    for name, value in (("gpus", args.gpus), ("seq-len", m.seq_len), ("global-batch-size", batch)):
        if value < 1:
            raise PlanError(f"--{name} is {value}: it must be at least 1")
    for name, path in (("list", args.list), ("picture", args.picture)):
        if path and not Path(path).parent.is_dir():
            raise PlanError(f"--{name} {path}: there is no folder {Path(path).parent}; make it, or name another")
    if args.gpus > MOST_GPUS:
        raise PlanError(f"--gpus {args.gpus}: the planner counts up to {MOST_GPUS}")
    return m, GPUS[args.gpu], batch


def no_fit(m: Shape, args: Any, gpu: Gpu, batch: int) -> PlanError:
    """What would be needed, if nothing fits."""
    least = smallest(m, args.gpus, batch)
    if least is None:
        return PlanError(
            f"no layout of {args.gpus} GPUs is legal for {args.model}, --seq-len {m.seq_len} and "
            f"--global-batch-size {batch}: use a number of GPUs and a batch with more common divisors"
        )
    need, gpus = least.held.total / GIB, args.gpus
    while gpus < MOST_GPUS:
        gpus *= 2
        found = smallest(m, gpus, max(batch, gpus))
        if found and fits(found.held, gpu):
            more = f"with --gpus {gpus} it does"
            break
    else:
        more = "no number of GPUs is enough"
    return PlanError(
        f"{args.model} with --seq-len {m.seq_len} does not fit on {args.gpus} {args.gpu}: the smallest layout needs "
        f"{need:.1f} GiB a GPU, {need - ROOM * gpu.memory / GIB:.1f} GiB too much ({least.layout.flags()}); {more}"
    )


def table(rows: list[list[str]]) -> str:
    """Rows of cells, the first a header, aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def show(m: Shape, best: list[Found], gpu: Gpu) -> str:
    """The tables of the best layouts: memory, time, and their flags."""
    dims = [dim for dim in ("tp", "cp", "pp", "ep", "dp") if any(dim in found.seconds.exposed for found in best)]
    memory = [["", *Held._fields, "GiB of a GPU"]]
    times = [["", "compute", "again", "bubble", *dims, "update", "step, s", "MFU", "HFU", "tokens/s of a GPU"]]
    for number, found in enumerate(best, 1):
        s, got = found.seconds, rates(m, found, gpu)
        memory.append([str(number), *(f"{n / GIB:.1f}" for n in found.held), f"{found.held.total / GIB:.1f}"])
        exposed = [f"{s.exposed.get(dim, 0):.3f}" for dim in dims]
        shares = [f"{got['mfu']:.1%}", f"{got['hfu']:.1%}", f"{got['tokens']:.0f}"]
        parts = [f"{part:.3f}" for part in (s.compute, s.recompute, s.bubble)]
        times.append([str(number), *parts, *exposed, f"{s.update:.3f}", f"{s.step:.3f}", *shares])
    layouts = "\n".join(f"{number:2}  {found.layout.flags()}" for number, found in enumerate(best, 1))
    return (
        f"flags after torchrun ... step07_moe_ep.py --model ... --seq-len {m.seq_len}:\n{layouts}\n\n"
        f"memory of the fullest GPU, GiB:\n{table(memory)}\n\n"
        f"time of a step, s; by dimension what communication is not hidden:\n{table(times)}"
    )


def parts_of(s: Seconds) -> dict[str, float]:
    """Where a step's seconds go, by name."""
    parts = {"computing again": s.recompute, "the bubble": s.bubble, "the update": s.update, "computation": s.compute}
    return parts | {f"communication over {dim}": seconds for dim, seconds in s.exposed.items()}


def alternatives(m: Shape, best: Found, gpu: Gpu) -> list[str]:
    """One line each: the obvious other choices, made in the best layout, and why they lose."""
    x, room = best.layout, ROOM * gpu.memory
    tries = {
        "tp alone, one node": replace(x, tp=NODE, pp=1, cp=1, dp=x.world // NODE),
        "tp over two nodes": replace(x, tp=2 * NODE, pp=1, cp=1, dp=x.world // NODE // 2),
        "tp 8 x pp 8": replace(x, tp=8, pp=8, cp=1, dp=x.world // 64),
        "no tp": replace(x, tp=1, dp=x.dp * x.tp),
        "no pipeline": replace(x, pp=1, dp=x.dp * x.pp),
        "ZeRO 3 alone": replace(x, pp=1, tp=1, cp=1, dp=x.world, zero=3, mbs=1),
        "a deeper pipeline": replace(x, pp=2 * x.pp, dp=x.dp // 2, schedule="1f1b", chunks=1),
        "no ZeRO": replace(x, zero=0),
        "nothing computed again": replace(x, recompute="none"),
        "everything computed again": replace(x, recompute="full"),
        "larger micro-batches": replace(x, mbs=2 * x.mbs),
        "experts not cut": replace(x, ep=1),
    }
    lines = []
    for name, layout in tries.items():
        if layout.pp == 1:
            layout = replace(layout, schedule="1f1b", chunks=1)
        if layout == x or layout.world != x.world or layout.dp < 1 or m.n_layers < layout.pp:
            continue
        if reason := illegal(m, layout):
            lines.append(f"{name}: {reason}")
            continue
        found = evaluate(m, layout, gpu)
        if found.held.total > room:
            lines.append(f"{name}: does not fit by {(found.held.total - room) / GIB:.1f} GiB")
            continue
        slower = found.seconds.step / best.seconds.step - 1
        parts, before = parts_of(found.seconds), parts_of(best.seconds)
        worst = max(parts, key=lambda part: parts[part] - before.get(part, 0.0))
        leaves = "; tp leaves the node" if layout.tp > NODE else ""
        lines.append(
            f"{name}: {slower:+.1%} time; {worst} is {parts[worst] / found.seconds.step:.1%} of its step{leaves}"
        )
    return lines


def layout_of(text: str, gpus: int, batch: int, m: Shape) -> Layout:
    """The layout of --explain. Raises PlanError."""
    parser = Parser(prog="--explain", allow_abbrev=False)
    for name in ("pp", "cp", "tp", "ep", "micro-batch-size", "chunks", "zero-replicas"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2, 3))
    parser.add_argument("--global-batch-size", type=int, default=batch)
    schedules = ("1f1b", "afab", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe")
    parser.add_argument("--schedule", default="1f1b", choices=schedules)
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--cp-mode", default="zigzag", choices=("zigzag", "ring", "allgather", "ulysses"))
    parser.add_argument("--sp", action=argparse.BooleanOptionalAction, default=True)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlanError(f"--explain {text!r}: {error}") from None
    x = parser.parse_args(words)
    inner = x.pp * x.cp * x.tp
    if inner < 1 or gpus % inner:
        raise PlanError(f"--pp {x.pp} x --cp {x.cp} x --tp {x.tp} = {inner} does not divide --gpus {gpus}: change one")
    layout = Layout(
        x.pp, gpus // inner, x.cp, x.tp, x.ep, x.zero, x.micro_batch_size, x.global_batch_size, x.schedule, x.chunks,
        x.recompute, x.sp, x.cp_mode, x.zero_replicas,
    )  # fmt: skip
    if min(x.ep, x.micro_batch_size, x.global_batch_size) < 1:
        raise PlanError("--ep, --micro-batch-size and --global-batch-size must be at least 1")
    if reason := illegal(m, layout):
        raise PlanError(f"--explain {text!r}: {reason}")
    return layout


def largest(args: Any, gpu: Gpu) -> str:
    """Every model, from small to large, and whether any layout of it fits."""
    rows = [["model", "weights", "least GiB a GPU", "fits"]]
    for name, m in tqdm(sorted(MODELS.items(), key=lambda entry: total_weights(entry[1])), disable=None, leave=False):
        m = replace(m, seq_len=args.seq_len or m.seq_len)
        least = smallest(m, args.gpus, args.global_batch_size or args.gpus)
        need = f"{least.held.total / GIB:.1f}" if least else "-"
        rows.append([name, f"{total_weights(m):.3g}", need, "yes" if least and fits(least.held, gpu) else "no"])
    fitting = [row[0] for row in rows[1:] if row[3] == "yes"]
    last = f"the largest that fits on {args.gpus} {args.gpu}: {fitting[-1]}" if fitting else "none fits"
    return f"{table(rows)}\n\n{last}"


def longest(m: Shape, args: Any, gpu: Gpu) -> str:
    """Sequences, twice as long each time, then in finer steps, and the layout that takes them with the least memory.

    Raises PlanError if not even 1,024 tokens fit.
    """
    batch = args.global_batch_size or args.gpus
    rows, best, step, growing = [["tokens", "least GiB a GPU", "layout"]], 0, 1024, True
    while step >= max(1024, best // 8):
        tokens = best + step
        least = smallest(replace(m, seq_len=tokens), args.gpus, batch)
        taken = least is not None and fits(least.held, gpu) and tokens < 2**25
        if taken:
            best = tokens
            rows.append([str(best), f"{least.held.total / GIB:.1f}", least.layout.flags()])
        elif not best:
            raise no_fit(replace(m, seq_len=tokens), args, gpu, batch)
        growing = growing and taken
        step = best if growing else step // 2
    return f"{table(rows)}\n\nthe longest sequence that fits on {args.gpus} {args.gpu}: {best} tokens"


def write_list(path: str, m: Shape, gpus: int, batch: int, gpu: Gpu):
    """Memory and time of every legal layout, one a line."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        names = [field.name for field in fields(Layout)]
        writer.writerow([*names, "gib", "fits", "step_s"])
        for mesh in tqdm(list(meshes(m, gpus, batch)), desc="meshes", disable=None):
            for layout in variants(m, mesh):
                found = evaluate(m, layout, gpu)
                memory = f"{found.held.total / GIB:.3f}"
                row = [getattr(layout, name) for name in names]
                writer.writerow([*row, memory, fits(found.held, gpu), f"{found.seconds.step:.4f}"])


def run(argv: list[str] | None = None):
    """The command. Raises PlanError."""
    args = flags().parse_args(argv)
    m, gpu, batch = choose(args)
    if args.explain is not None:
        print(blackboard(m, layout_of(args.explain, args.gpus, batch, m), gpu, COURSE))
        return
    if args.largest:
        print(largest(args, gpu))
        return
    if args.longest:
        print(longest(m, args, gpu))
        return
    if args.list:
        write_list(args.list, m, args.gpus, batch, gpu)
    result = search(m, args.gpus, batch, gpu, bar=lambda tries: tqdm(tries, disable=None, leave=False))
    if not result.best:
        raise no_fit(m, args, gpu, batch)
    print(f"{args.model}, {args.gpus} {args.gpu}, --seq-len {m.seq_len}, --global-batch-size {batch}")
    print(f"{result.legal} legal layouts; bounds left {result.timed} to time; the best of each mesh, ten meshes:\n")
    print(show(m, result.best, gpu))
    print("\nthe obvious alternatives to layout 1:")
    print("\n".join(f"  {line}" for line in alternatives(m, result.best[0], gpu)))
    if args.picture:
        draw(result.best, gpu, args.picture, f"{args.model} on {args.gpus} {args.gpu}")
        print(f"\nsee {args.picture}")


def main(argv: list[str] | None = None) -> int:
    """`run`; a mistake is one line and exit status 2."""
    try:
        run(argv)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
