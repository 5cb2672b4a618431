"""Writes the planner's report: tables of the best layouts, how other layouts compare, and answers to usual questions.

Most answers give a law from the course, with the numbers of this model and cluster, then the best layout's flags.

In the laws, N is the number of weights, n of ranks, m of a rank's micro-batches in a step, b of sequences in a
micro-batch, and s of tokens in a sequence; h is the model's width, `dim`.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from math import ceil

from common.model import PRESETS
from extras.plan.gpus import GIB, NODE, ROOM, Gpu
from extras.plan.layouts import Layout, illegal, network
from extras.plan.memory import CHUNK, held, state_bytes
from extras.plan.search import Found, evaluate, fits, leanest
from extras.plan.seconds import Seconds, ring
from extras.plan.shapes import Shape, flops_per_token, total_weights
from extras.plan.tables import table


def command(m: Shape, pipeline: bool) -> tuple[str, str]:
    """The course's file that trains this model, and launch flags that are not part of a layout."""
    flags = "--pp-split cost " * pipeline + f"--loss-chunk {CHUNK} --prefetch"
    if m.experts:
        return "step07_moe_ep.py", f"{flags} --expert-matmul grouped"
    return "step06_pipeline.py", flags


def gib(n_bytes: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{n_bytes / GIB:,.1f} GiB"


def rates(m: Shape, one: Found, gpu: Gpu) -> tuple[float, float, float]:
    """MFU (which counts the model's FLOPs), HFU (which counts all executed FLOPs), and tokens/s per GPU."""
    x = one.layout
    tokens = x.global_batch_size * m.seq_len / x.world / one.seconds.step
    model, executed = flops_per_token(m, x.recompute == "full")
    return model * tokens / gpu.flops, executed * tokens / gpu.flops, tokens


def tables(m: Shape, best: list[Found], gpu: Gpu) -> str:
    """Format the best layouts as tables of their flags, memory and time."""
    parts = [part for part in Seconds._fields if any(getattr(one.seconds, part) for one in best)]
    memory = [["", *best[0].held._fields, "GiB of a GPU"]]
    times = [["", *parts, "step, s", "MFU", "HFU", "tokens/s of a GPU"]]
    for number, one in enumerate(best, 1):
        mfu, hfu, tokens = rates(m, one, gpu)
        memory.append([str(number), *(f"{n / GIB:.1f}" for n in (*one.held, one.held.total))])
        seconds = [*(getattr(one.seconds, part) for part in parts), one.seconds.step]
        times.append([str(number), *(f"{part:.3f}" for part in seconds), f"{mfu:.1%}", f"{hfu:.1%}", f"{tokens:.0f}"])
    layouts = "\n".join(f"{number:2}  {one.layout.flags()}" for number, one in enumerate(best, 1))
    step, flags = command(m, pipeline=True)
    return (
        f"flags after torchrun ... -m extras {step} --model ... --seq-len {m.seq_len} {flags}:\n{layouts}\n\n"
        f"memory of the fullest GPU, GiB:\n{table(memory)}\n\n"
        f"time of a step, s; by dimension, communication that is not hidden:\n{table(times)}"
    )


def alternatives(m: Shape, best: Found, gpu: Gpu) -> Iterator[str]:
    """Yield a line for each obvious change of the best layout: why it fails, or by how much a step's time changes."""
    x, alone = best.layout, dict(tp=1, pp=1, cp=1)
    tries = [dict(tp=1), alone | dict(tp=NODE), alone | dict(tp=2 * NODE), dict(pp=1), dict(pp=2 * x.pp), dict(ep=1)]
    tries += [alone | dict(zero=3, micro_batch_size=1), dict(zero=0), dict(recompute="none"), dict(recompute="full")]
    tries += [dict(micro_batch_size=2 * x.micro_batch_size)]
    for changed in tries:
        other = replace(x, **changed)
        other = replace(other, dp=x.world // (other.pp * other.cp * other.tp))
        if other.pp != x.pp:
            other = replace(other, schedule="1f1b")
        if other == x or other.world != x.world:
            continue
        name = " ".join(f"--{flag.replace('_', '-')} {n}" for flag, n in changed.items() if getattr(x, flag) != n)
        if reason := illegal(m, other):
            yield f"{name}: {reason}"
            continue
        found = evaluate(m, other, gpu)
        if not fits(found.held, gpu):
            yield f"{name}: does not fit by {gib(found.held.total - ROOM * gpu.memory)}"
            continue
        parts, before, step = found.seconds._asdict(), best.seconds._asdict(), found.seconds.step
        worst = max(parts, key=lambda part: parts[part] - before[part])
        yield f"{name}: {step / best.seconds.step - 1:+.1%} time; {worst} is {parts[worst] / step:.1%} of its step"


def can_fit(m: Shape, x: Layout, gpu: Gpu) -> bool:
    """Whether a model fits on a mesh if --zero, --schedule, --recompute, --micro-batch-size are set to save memory."""
    return any(fits(held(m, x), gpu) for x in leanest(m, replace(x, micro_batch_size=1, recompute="full")))


def largest(known: dict[str, Shape], m: Shape, x: Layout, gpu: Gpu) -> str:
    """The name of the largest known model that fits on a mesh, with sequences as long as those of `m`; or "none"."""
    others = {name: replace(other, seq_len=m.seq_len) for name, other in known.items()}
    fitting = [name for name, other in others.items() if can_fit(other, x, gpu)]
    return max(fitting, key=lambda name: total_weights(others[name]), default="none")


def longest(m: Shape, x: Layout, gpu: Gpu) -> int:
    """The number of tokens of the longest sequence that fits on a mesh; 0 if not even 1,024 tokens fit."""
    lengths = ((8 + part) << doubled for doubled in range(7, 24) for part in range(8))
    legal = (s for s in lengths if leanest(replace(m, seq_len=s), x))
    return max(takewhile(lambda s: can_fit(replace(m, seq_len=s), x, gpu), legal), default=0)


def questions(known: dict[str, Shape], m: Shape, chosen: Found, gpu: Gpu) -> Iterator[tuple[str, ...]]:
    """Yield each question with the lines of its answer."""
    x, memory, seconds = chosen
    room, n, ranks = ROOM * gpu.memory, total_weights(m), x.dp * x.cp
    alone, plain = Layout(global_batch_size=1), Layout(dp=ranks, global_batch_size=ranks)
    stages = [sum(state_bytes(m, replace(plain, zero=zero), 0)) for zero in range(4)]
    once = {kind: held(m, replace(alone, recompute=kind)).activations for kind in ("none", "full")}
    yield (
        "Does the training state fit in memory?",
        f"18 N = 18 x {n:.4g} = {gib(18 * n)}, of {gib(room)} on a GPU: at least {ceil(18 * n / room)} GPUs",
        f"shared by {ranks} ranks of dp x cp, 18 N, 6 N + 12 N / n, 2 N + 16 N / n, 18 N / n: "
        + ", ".join(f"ZeRO {zero} {gib(state)}" for zero, state in enumerate(stages)),
        f"here: --zero {x.zero} of 1/{x.tp * x.pp} of the weights, {gib(sum(memory[:3]))} (steps 1 and 3)",
    )
    yield (
        "Do the activations fit?",
        f"they grow with b s: a sequence keeps {gib(once['none'])} in {m.n_layers} layers; recomputed in full, "
        f"{gib(once['full'])} for about a quarter more FLOPs",
        f"here: --micro-batch-size {x.micro_batch_size} --recompute {x.recompute}, {gib(memory.activations)} wait for "
        "their backward pass (step 1; step 6: how many micro-batches a schedule lets wait)",
    )
    yield (
        "Which batch?",
        f"{x.global_batch_size} sequences = b m dp, {x.global_batch_size * m.seq_len / 1e6:.2f} M tokens; so dp is at "
        f"most {x.global_batch_size}, and what it leaves of {x.world} GPUs must share a sequence, or the model",
        f"here: dp {x.dp} x --micro-batch-size {x.micro_batch_size} x m = {x.micro_batches} (steps 1 and 2)",
    )
    parts = sorted(seconds._asdict().items(), key=lambda part: -part[1])
    yield (
        "What bounds the time?",
        f"computation: 6 FLOPs a token for each weight that it visits, and its attention, at {gpu.matmul:.0%} of "
        f"{gpu.flops / 1e12:.0f} TFLOP/s; and the messages and idle time that it does not hide",
        "here: " + ", ".join(f"{name} {part / seconds.step:.1%}" for name, part in parts if part),
    )
    hidden = ceil(2 * m.kv_dim / m.dim * gpu.flops * gpu.matmul / gpu.within)
    count, net, size = x.micro_batches, network(x, "shard"), n / x.tp / x.pp * 4
    yield (
        "Which dimension first?",
        f"tp, inside a node of {gpu.node}: a layer waits for (n-1)/n x 8 activations b s h in each micro-batch, at "
        f"{gpu.within / 1e9:.0f} GB/s inside and {gpu.between / 1e9:.0f} outside (step 4)",
        "cp, if a sequence does not fit: a ring hides its messages from s / cp >= 2 (kv / h) FLOP/s / (bytes/s) "
        f"= {hidden:,} tokens on (step 5)",
        f"pp, between nodes: b s h at a boundary; but it is idle, in 1F1B (p-1)/(m+p-1) of the time: here "
        f"{(x.pp - 1) / (count + x.pp - 1):.1%} (step 6)",
        f"dp, with what is left: gradients once a step, 2 (n-1)/n x 4 bytes: here {2 * ring(net, size) / 1e9:.1f} GB a "
        f"rank, {'between' if net.leaves else 'within'} nodes, while backward computes (step 2)",
        f"here: --tp {x.tp} --cp {x.cp} --pp {x.pp}, dp {x.dp}",
    )
    if m.experts:
        yield (
            "Where are the experts?",
            f"{m.experts} in a layer, {m.experts_per_token} (K) a token: a row is sent and comes back for each, and so "
            "do gradients: 4 (ep-1)/ep T K h a layer (step 7)",
            f"here: --ep {x.ep}",
        )
    yield (
        "How large can the model be on this mesh?",
        "with --zero 3 --recompute full and one sequence at a time, of the models that the planner knows: "
        f"{largest(known, m, x, gpu)}",
    )
    tokens = longest(m, x, gpu)
    yield (
        "How long can the context be on this mesh?",
        f"with the same flags: {f'{tokens:,} tokens' if tokens else 'the state alone does not fit'}; twice the cp, "
        "about twice the tokens (step 5)",
    )


def launch(name: str, m: Shape, x: Layout) -> str:
    """The command that launches a layout."""
    each = max(n for n in range(1, NODE + 1) if x.world % n == 0)
    step, flags = command(m, x.pp > 1)
    start = f"torchrun --nnodes={x.world // each} --nproc_per_node={each} -m extras {step}"
    return f"{start} --model {name} --seq-len {m.seq_len} --dtype bf16 {x.flags()} {flags}"


def report(name: str, known: dict[str, Shape], m: Shape, best: list[Found], gpu: Gpu) -> str:
    """The whole report. A launch command is added only for a preset, because the course trains no other models."""
    one = best[0]
    mfu, _, tokens = rates(m, one, gpu)
    lines = [tables(m, best, gpu), "", "the obvious alternatives to layout 1:"]
    lines += [f"    {line}" for line in alternatives(m, one, gpu)]
    for number, (question, *answers) in enumerate(questions(known, m, one, gpu), 1):
        lines += ["", f"{number}. {question}", *(f"    {answer}" for answer in answers)]
    so = "So" if fits(one.held, gpu) else f"It does not fit ({ROOM:.0%} of a GPU's memory may be planned)"
    memory = f"{gib(one.held.total)} of {gib(gpu.memory)} on the fullest GPU"
    time = f"{one.seconds.step:.2f} s a step, {tokens:.0f} tokens/s of a GPU, MFU {mfu:.0%}"
    lines += ["", f"{so}: {memory}, {time}."]
    return "\n".join([*lines, *[launch(name, m, one.layout)] * (name in PRESETS)])
