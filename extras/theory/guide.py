"""The questions of a plan, in the order in which they are asked: does it fit, which batch, how long a sequence, where?

    python -m extras.theory.plan --guide --model llama3-70b --gpus 128 --seq-len 8192

Each is answered by the law of a step, with this model's and this cluster's numbers, and by what the planner's best
layout, or the one that is asked about, does about it. The last line is that layout, as a launch.

N: weights. n: ranks. b: sequences of a micro-batch; a rank has m of these in a step. s: tokens of a sequence.
"""

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from common.model import PRESETS
from extras.theory.activations import CHUNK
from extras.theory.footprint import COURSE, held
from extras.theory.gpus import GIB, NODE, ROOM, Gpu
from extras.theory.layouts import Layout, network, schedule_of, stages
from extras.theory.search import Found, rates
from extras.theory.seconds import ring
from extras.theory.shapes import Shape, total_weights

STATE = 2 + 4 + 12  # bytes a weight in 16 bits: itself, its gradient, master and moments


class Answer(NamedTuple):
    """One question: what the law says of it in numbers, what the plan does, and where that is taught."""

    question: str
    law: str
    plan: str
    step: str

    def __str__(self) -> str:
        return f"{self.question}\n    law   {self.law}\n    plan  {self.plan}\n    read  {self.step}"


def script(m: Shape) -> str:
    """The step that trains this model: the last, if it has experts."""
    return "step07_moe_ep.py" if m.experts else "step06_pipeline.py"


def always(m: Shape) -> str:
    """Flags beside those of a layout."""
    return f"--pp-split cost --loss-chunk {CHUNK} --prefetch" + " --expert-matmul grouped" * (m.experts > 0)


def gib(n_bytes: float) -> str:
    """Bytes as text."""
    return f"{n_bytes / GIB:,.1f} GiB"


def state(m: Shape, zero: int, n: int) -> float:
    """Bytes of weights, gradients, masters and moments that each of n ranks of ZeRO holds."""
    return sum(held(m, Layout(zero=zero, dp=n, global_batch_size=n), COURSE)[:3])


def alone(m: Shape, recompute: str) -> float:
    """Bytes of activations of one sequence in all layers of one GPU."""
    return held(m, Layout(global_batch_size=1, zero=0, recompute=recompute), COURSE).activations


def questions(m: Shape, chosen: Found, gpu: Gpu) -> Iterator[Answer]:
    """All that are to be asked of this model, cluster and batch; `chosen`: the layout, its memory and its seconds."""
    x, memory, seconds = chosen
    room, n, whole = ROOM * gpu.memory, total_weights(m), STATE * total_weights(m)
    sums = x.dp * x.cp  # ranks of ZeRO
    yield Answer(
        "Does the training state fit on one GPU?",
        f"18 N = 18 x {n:.4g} = {gib(whole)}, of {gib(room)}: {'yes' if whole < room else 'no'}; "
        f"so at least {ceil(whole / room)} GPUs",
        f"this rank holds {gib(memory.weights + memory.gradients + memory.optimizer)} of it: "
        f"--tp {x.tp} --pp {x.pp}, and --zero {x.zero} over {sums} ranks",
        "step 1: precision",
    )
    yield Answer(
        "Do the activations fit?",
        f"they grow with b s: a sequence keeps {gib(alone(m, 'none'))} in {m.n_layers} layers; recomputed in full, "
        f"{gib(alone(m, 'full'))} for about a third more FLOPs",
        f"--micro-batch-size {x.micro_batch_size} --recompute {x.recompute}: {gib(memory.activations)} wait",
        "step 1: recomputation; step 6: how many micro-batches a schedule lets wait",
    )
    by_stage = ", ".join(f"ZeRO {zero} {gib(state(m, zero, sums))}" for zero in range(4))
    yield Answer(
        "If ranks of data parallelism share the state, does it fit?",
        f"18 N, 6 N + 12 N / n, 2 N + 16 N / n, 18 N / n; with n = dp x cp = {sums}: {by_stage}",
        f"--zero {x.zero}" + f", of 1/{x.tp * x.pp} of the weights" * (x.tp * x.pp > 1),
        "step 3",
    )
    sequences = x.dp * x.micro_batch_size
    yield Answer(
        "Which batch?",
        f"{x.global_batch_size} sequences = b m dp, {x.global_batch_size * m.seq_len / 1e6:.2f} M tokens; so dp is at "
        f"most {x.global_batch_size}, and what it leaves of {x.world} GPUs must share a sequence, or the model",
        f"dp {x.dp} x --micro-batch-size {x.micro_batch_size} x m = {x.global_batch_size // sequences}",
        "step 1: accumulation; step 2: data parallelism",
    )
    tokens = ceil(2 * m.kv_dim / m.dim * gpu.flops * gpu.matmul / gpu.within)
    yield Answer(
        "Is a sequence too long for one GPU?",
        f"a sequence keeps {gib(alone(m, 'full'))} even if recomputed; ring attention hides its messages from "
        f"s / cp >= 2 (kv / h) FLOP/s / (bytes/s) = {tokens:,} tokens on",
        f"--cp {x.cp}" + (f": {m.seq_len // x.cp:,} tokens a rank" if x.cp > 1 else ": no"),
        "step 5",
    )
    nodes = ceil(x.world / NODE)
    yield Answer(
        f"What must stay inside a node of {NODE}?",
        f"a GPU sends {gpu.within / 1e9:.0f} GB/s inside, {gpu.between / 1e9:.0f} outside; a layer sends (n-1)/n x 8 "
        "activations b s h over tp in each micro-batch, and waits for them",
        f"--tp {x.tp}: {'inside' if x.tp <= NODE else 'over several nodes'}; it is "
        f"{seconds.exposed.get('tp', 0.0) / seconds.step:.1%} of the step",
        "step 4",
    )
    if x.pp > 1:
        v, count = stages(schedule_of(x), x.pp), x.micro_batches
        yield Answer(
            "What does a pipeline cost?",
            f"few messages, b s h at a boundary; and idle time, in 1F1B (p-1)/(m+p-1) = "
            f"{(x.pp - 1) / (count + x.pp - 1):.1%}",
            f"--schedule {x.schedule}, {v} stage{'s' * (v > 1)} a rank: the bubble is "
            f"{seconds.bubble / seconds.step:.1%} of the step",
            "step 6",
        )
    if nodes > 1:
        size, net = n / x.tp / x.pp * 4, network(x, "shard")
        yield Answer(
            f"What crosses the {nodes} nodes?",
            f"gradients, once a step: 2 (n-1)/n x 4 bytes x {n / x.tp / x.pp:.3g} weights = "
            f"{2 * ring(net, size) / 1e9:.1f} GB a rank; backward hides it while its batch is large enough",
            f"{net.ranks} ranks, {'between' if net.leaves else 'within'} nodes: "
            f"{seconds.exposed.get('dp', 0.0) / seconds.step:.1%} of the step is not hidden",
            "step 2: buckets; step 3: what ZeRO sends instead",
        )
    if m.experts:
        yield Answer(
            "Where are the experts?",
            f"{m.experts} in a layer, {m.experts_per_token} a token: a row goes and comes for each, "
            "4 (ep-1)/ep T K h a layer",
            f"--ep {x.ep}: {seconds.exposed.get('ep', 0.0) / seconds.step:.1%} of the step",
            "step 7",
        )


def launch(name: str, m: Shape, x: Layout) -> str:
    """The command of a layout."""
    each = max(n for n in range(1, NODE + 1) if x.world % n == 0)
    start = f"torchrun --nnodes={x.world // each} --nproc_per_node={each}"
    more = always(m) if x.pp > 1 else always(m).replace("--pp-split cost ", "")
    return f"{start} -m extras {script(m)} --model {name} --seq-len {m.seq_len} --dtype bf16 {x.flags()} {more}"


def guide(name: str, m: Shape, chosen: Found, gpu: Gpu) -> str:
    """All questions with their answers; then what the plan comes to, and the launch line of a preset."""
    answers = [f"{number}. {answer}" for number, answer in enumerate(questions(m, chosen, gpu), 1)]
    x, memory, seconds = chosen
    got = rates(m, chosen, gpu)
    last = f"So: {gib(memory.total)} of {gib(gpu.memory)} on the fullest GPU, {seconds.step:.2f} s a step, "
    last += f"{got['tokens']:.0f} tokens/s of a GPU, MFU {got['mfu']:.0%}."
    return "\n".join([*answers, "", last, *[launch(name, m, x)] * (name in PRESETS)])
