"""Will it fit, how fast will it be, which layout do I take?

    python -m extras.theory.plan --model llama3-70b --gpus 128 --gpu h100-80 --seq-len 8192 --global-batch-size 1024
    python -m extras.theory.plan --model llama3-70b --gpus 128 --explain "--tp 8 --pp 4 --micro-batch-size 1"
    python -m extras.theory.plan --model llama3-70b --gpus 128 --guide
    python -m extras.theory.plan --gpus 8 --largest
    python -m extras.theory.plan --model llama3-8b --gpus 8 --longest

It prints the ten best layouts of the course's own trainer, as flags of step 7, or without experts of step 6. GPUs are
in nodes of 8; tp is innermost, then cp, dp, pp. Memory is a bound (extras/theory/memory.py); what it
bounds, a step's --dry-run counts. Seconds: theory/seconds.py; how it searches: theory/search.py; what it is held
against: `python -m extras.tests.bench plan`.
"""

import importlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from common import UserError
from common.model import PRESETS
from common.trainer import among, parse
from extras.theory.gpus import GIB, GPUS, NODE, ROOM, Gpu
from extras.theory.guide import always, guide, script
from extras.theory.layouts import Layout, illegal
from extras.theory.memory import Held
from extras.theory.search import Found, evaluate, fits, rates, search, smallest
from extras.theory.seconds import Seconds
from extras.theory.shapes import GPTS, Shape, shape_of, total_weights
from extras.theory.tables import table

MOST_GPUS = 2**17


@dataclass
class Flags:
    """What is asked."""

    model: str = "llama3-8b"  # a preset of the course, or one of gpt3-22b, gpt3-175b, gpt3-530b, gpt3-1t
    gpus: int = 8  # how many; nodes have 8
    gpu: str = among(GPUS, "h100-80")  # of which kind
    seq_len: int = 0  # tokens of a sequence; 0: the model's
    global_batch_size: int = 0  # sequences of a step; 0: about 4M tokens
    guide: bool = False  # the questions of a plan in their order, each with its law; last, a line that launches it
    explain: str = ""  # the same of one layout: "--tp 8 --pp 4 ..."
    largest: bool = False  # the largest model that fits
    longest: bool = False  # the longest sequence that fits
    json: str = ""  # write the ten layouts, their memory and their seconds to this file


def models() -> dict[str, Shape]:
    """All by name. Variants, a folder beside the course, add models with experts, and schedules."""
    experts = {}
    if importlib.util.find_spec("extras.variants") is not None:
        importlib.import_module("extras.services.seam").plugins()
        experts = importlib.import_module("extras.variants.step07.expert_presets").EXPERTS
    return {name: shape_of(m, SimpleNamespace(**experts.get(name, {}))) for name, m in PRESETS.items()} | GPTS


def asked(flags: Flags, known: dict[str, Shape]) -> tuple[Shape, int]:
    """Model and batch. Raises UserError."""
    if flags.model not in known:
        raise UserError(f"--model {flags.model}: no such model; choose one of {', '.join(known)}")
    if flags.gpus > MOST_GPUS:
        raise UserError(f"--gpus {flags.gpus}: the planner counts up to {MOST_GPUS}")
    if flags.json and not Path(flags.json).parent.is_dir():
        raise UserError(f"--json {flags.json}: there is no folder {Path(flags.json).parent}; make it, or name another")
    questions = [flags.explain, flags.largest, flags.longest, flags.guide]
    if sum(map(bool, questions)) > 1:
        raise UserError("--guide, --explain, --largest and --longest are questions: ask one at a time")
    m = known[flags.model]
    m = replace(m, seq_len=flags.seq_len or m.seq_len)
    about_4m = 2 ** max(0, (2**22 // m.seq_len).bit_length() - 1)
    return m, flags.global_batch_size or max(flags.gpus, about_4m)


def no_fit(m: Shape, flags: Flags, batch: int) -> UserError:
    """What would be needed, if nothing fits."""
    gpu, least, gpus = GPUS[flags.gpu], smallest(m, flags.gpus, batch), flags.gpus
    if least is None:
        return UserError(
            f"no layout of {gpus} GPUs is legal for {flags.model}, --seq-len {m.seq_len} and "
            f"--global-batch-size {batch}: use a number of GPUs and a batch with more common divisors"
        )
    more = "no number of GPUs is enough"
    while gpus < MOST_GPUS:
        gpus *= 2
        enough = smallest(m, gpus, max(batch, gpus))
        if enough and fits(enough.held, gpu):
            more = f"with --gpus {gpus} it does"
            break
    need = least.held.total / GIB
    return UserError(
        f"{flags.model} with --seq-len {m.seq_len} does not fit on {flags.gpus} {flags.gpu}: the smallest layout needs "
        f"{need:.1f} GiB a GPU, {need - ROOM * gpu.memory / GIB:.1f} GiB too much ({least.layout.flags()}); {more}"
    )


def show(m: Shape, best: list[Found], gpu: Gpu) -> str:
    """The tables of the best layouts: memory, time, and their flags."""
    dims = [dim for dim in ("tp", "cp", "pp", "ep", "dp") if any(dim in plan.seconds.exposed for plan in best)]
    memory = [["", *Held._fields, "GiB of a GPU"]]
    times = [["", "compute", "again", "bubble", *dims, "update", "step, s", "MFU", "HFU", "tokens/s of a GPU"]]
    for number, plan in enumerate(best, 1):
        s, got = plan.seconds, rates(m, plan, gpu)
        memory.append([str(number), *(f"{n / GIB:.1f}" for n in plan.held), f"{plan.held.total / GIB:.1f}"])
        parts = [s.compute, s.recompute, s.bubble, *(s.exposed.get(dim, 0.0) for dim in dims), s.update, s.step]
        shares = [f"{got['mfu']:.1%}", f"{got['hfu']:.1%}", f"{got['tokens']:.0f}"]
        times.append([str(number), *(f"{part:.3f}" for part in parts), *shares])
    layouts = "\n".join(f"{number:2}  {plan.layout.flags()}" for number, plan in enumerate(best, 1))
    return (
        f"flags after torchrun ... -m extras {script(m)} --model ... --seq-len {m.seq_len} {always(m)}:\n{layouts}\n\n"
        f"memory of the fullest GPU, GiB:\n{table(memory)}\n\n"
        f"time of a step, s; by dimension what communication is not hidden:\n{table(times)}"
    )


def report(name: str, m: Shape, one: Found, gpu: Gpu) -> str:
    """One layout: its tables, and the questions of a plan."""
    return f"{show(m, [one], gpu)}\n\n{guide(name, m, one, gpu)}"


def parts_of(s: Seconds) -> dict[str, float]:
    """Where a step's seconds go, by name."""
    parts = {"computing again": s.recompute, "the bubble": s.bubble, "the update": s.update, "computation": s.compute}
    return parts | {f"communication over {dim}": seconds for dim, seconds in s.exposed.items()}


def alternatives(m: Shape, best: Found, gpu: Gpu) -> list[str]:
    """One line each: the obvious other choices, made in the best layout, and why they lose."""
    x, room, zero = best.layout, ROOM * gpu.memory, dict(zero=0, zero_keep=False, zero_overlap=False)
    tries = {
        "tp alone, one node": replace(x, tp=NODE, pp=1, cp=1, dp=x.world // NODE),
        "tp over two nodes": replace(x, tp=2 * NODE, pp=1, cp=1, dp=x.world // NODE // 2),
        "tp 8 x pp 8": replace(x, tp=8, pp=8, cp=1, dp=x.world // 64),
        "no tp": replace(x, tp=1, dp=x.dp * x.tp),
        "no pipeline": replace(x, pp=1, dp=x.dp * x.pp),
        "ZeRO 3 alone": replace(x, pp=1, tp=1, cp=1, dp=x.world, micro_batch_size=1, **zero | dict(zero=3)),
        "a deeper pipeline": replace(x, pp=2 * x.pp, dp=x.dp // 2, schedule="1f1b"),
        "no ZeRO": replace(x, **zero),
        "nothing computed again": replace(x, recompute="none"),
        "everything computed again": replace(x, recompute="full"),
        "larger micro-batches": replace(x, micro_batch_size=2 * x.micro_batch_size),
        "experts not sharded": replace(x, ep=1, ep_overlap=False),
        "messages of experts not hidden": replace(x, ep_overlap=False),
    }
    lines = []
    for name, layout in tries.items():
        layout = replace(layout, schedule="1f1b", ep_overlap=False) if layout.pp == 1 else layout
        if layout == x or layout.world != x.world or layout.dp < 1:
            continue
        if reason := illegal(m, layout):
            lines.append(f"{name}: {reason}")
            continue
        other = evaluate(m, layout, gpu)
        if other.held.total > room:
            lines.append(f"{name}: does not fit by {(other.held.total - room) / GIB:.1f} GiB")
            continue
        slower = other.seconds.step / best.seconds.step - 1
        parts, before = parts_of(other.seconds), parts_of(best.seconds)
        worst = max(parts, key=lambda part: parts[part] - before.get(part, 0.0))
        leaves = "; tp leaves the node" if layout.tp > NODE else ""
        lines.append(
            f"{name}: {slower:+.1%} time; {worst} is {parts[worst] / other.seconds.step:.1%} of its step{leaves}"
        )
    return lines


def layout_of(text: str, gpus: int, batch: int, m: Shape) -> Layout:
    """The layout of --explain. Raises UserError."""
    try:
        x = parse(Layout, shlex.split(text))
    except ValueError as error:
        raise UserError(f"--explain {text!r}: {error}") from None
    inner = x.pp * x.cp * x.tp
    if gpus % inner:
        raise UserError(f"--pp {x.pp} x --cp {x.cp} x --tp {x.tp} = {inner} does not divide --gpus {gpus}: change one")
    if x.dp not in (1, gpus // inner):
        raise UserError(f"--explain {text!r}: --dp is what is left of --gpus {gpus}, {gpus // inner}; leave it away")
    own = x.global_batch_size if "--global-batch-size" in text else batch
    x = replace(x, dp=gpus // inner, global_batch_size=own)
    if reason := illegal(m, x):
        raise UserError(f"--explain {text!r}: {reason}")
    return x


def largest(flags: Flags, known: dict[str, Shape], bar: Callable[[Iterable], Iterable]) -> str:
    """Every model, from small to large, and whether any layout of it fits."""
    rows, fitting, gpu = [["model", "weights", "least GiB a GPU", "fits"]], ["none"], GPUS[flags.gpu]
    for name, m in bar(sorted(known.items(), key=lambda entry: total_weights(entry[1]))):
        m = replace(m, seq_len=flags.seq_len or m.seq_len)
        least = smallest(m, flags.gpus, flags.global_batch_size or flags.gpus)
        taken = least is not None and fits(least.held, gpu)
        fitting += [name] * taken
        need = f"{least.held.total / GIB:.1f}" if least else "-"
        rows.append([name, f"{total_weights(m):.3g}", need, "yes" if taken else "no"])
    return f"{table(rows)}\n\nthe largest that fits on {flags.gpus} {flags.gpu}: {fitting[-1]}"


def longest(m: Shape, flags: Flags) -> str:
    """Sequences, twice as long each time, then in finer steps, and the layout that takes them with the least memory.

    Raises UserError if not even 1,024 tokens fit.
    """
    batch = flags.global_batch_size or flags.gpus
    rows, best, step, growing = [["tokens", "least GiB a GPU", "layout"]], 0, 1024, True
    while step >= max(1024, best // 8):
        tokens = best + step
        least = smallest(replace(m, seq_len=tokens), flags.gpus, batch)
        taken = least is not None and fits(least.held, GPUS[flags.gpu]) and tokens < 2**25
        if taken:
            best = tokens
            rows.append([str(best), f"{least.held.total / GIB:.1f}", least.layout.flags()])
        elif not best:
            raise no_fit(replace(m, seq_len=tokens), flags, batch)
        growing = growing and taken
        step = best if growing else step // 2
    return f"{table(rows)}\n\nthe longest sequence that fits on {flags.gpus} {flags.gpu}: {best} tokens"


def answer(argv: list[str] | None = None):
    """The command. Raises UserError."""
    flags, known = parse(Flags, argv), models()
    (m, batch), gpu = asked(flags, known), GPUS[flags.gpu]
    bar = lambda tries: tqdm(tries, disable=None, leave=False)  # noqa: E731
    if flags.explain:
        return print(report(flags.model, m, evaluate(m, layout_of(flags.explain, flags.gpus, batch, m), gpu), gpu))
    if flags.largest:
        return print(largest(flags, known, bar))
    if flags.longest:
        return print(longest(m, flags))
    result = search(m, flags.gpus, batch, gpu, bar=bar)
    if not result.best:
        raise no_fit(m, flags, batch)
    if flags.guide:
        return print(report(flags.model, m, result.best[0], gpu))
    print(f"{flags.model}, {flags.gpus} {flags.gpu}, --seq-len {m.seq_len}, --global-batch-size {batch}")
    print(f"{result.legal} legal layouts; bounds left {result.timed} to time; the best of each mesh, ten meshes:\n")
    print(show(m, result.best, gpu))
    print("\nthe obvious alternatives to layout 1:")
    print("\n".join(f"  {line}" for line in alternatives(m, result.best[0], gpu)))
    if flags.json:
        plans = [dict(layout=asdict(x), bytes=h._asdict(), seconds=s._asdict()) for x, h, s in result.best]
        Path(flags.json).write_text(json.dumps(plans, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """`answer`; a mistake is one line and exit status 2."""
    try:
        answer(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
