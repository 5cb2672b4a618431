"""Writes the planner's report: the best layouts, and the laws."""

from dataclasses import fields
from math import ceil

from extras.plan.gpus import GIB, GPUS, NODE, ROOM, Gpu
from extras.plan.layouts import RECOMPUTE, Layout
from extras.plan.memory import layer_bytes, micro_batch, total_weights
from extras.plan.search import Plan, fits
from extras.plan.shapes import GPTS, Experts, Shape, flops_per_token
from extras.plan.tables import table

DAY = 24 * 3600  # seconds
LAWS = """\
What decides. N weights; n ranks of a dimension; a rank computes m micro-batches of b sequences of
s tokens, h wide, and v stages of a pipeline:
    state        18 N bytes = {state:,.1f} GiB need {least} of these GPUs, or more. Of each weight
                 on a rank, ZeRO 0 to 3 leave 18, 6 + 12 / n, 2 + 16 / n or 18 / n bytes, where
                 n = dp x cp = {x.dp} x {x.cp} (steps 1 and 3)
    activations  grow with b s. All layers keep {none:,.1f} GiB of a sequence; with --recompute
                 selective {selective:,.1f}; with full {full:,.1f}, \
for a quarter more FLOPs (step 1)
    batch        {x.global_batch_size:,} sequences = dp b m = \
{x.dp} x {x.micro_batch_size} x {x.micro_batches}. If there are more GPUs
                 than sequences, several must share a sequence or the model
    computation  6 FLOPs a token for each weight that it visits, and its attention (step 1), at
                 {gpu.matmul:.0%} of {gpu.flops:.3g} FLOP/s
    tp           a layer waits for 8 (n-1)/n b s h numbers in a micro-batch (step 4): in a node of
                 8, at {gpu.within:.2g} bytes/s; outside, at {gpu.between:.2g}
    cp           attention hides the ring's messages from s / n = {ring:,} tokens on (step 5)
    pp           sends only b s h numbers at a boundary, so it may cross nodes. But a rank is idle
                 for (n-1)/(v m + n-1) of the time, here {idle:.1%} (step 6)
    dp           sums gradients of 4 bytes while backward computes (step 2). If they are summed once
                 a step, a rank sends 2 (n-1)/n of its own"""
EXPERTS = """
    ep           a token's row goes to K = {m.experts_per_token} of {m.experts} experts and comes \
back, and so do its
                 gradients: 4 (n-1)/n K b s h numbers a layer. For the experts' state and
                 gradients, n = dp x cp x tp / ep (step 7)"""
REPORT = """\
{name} on {x.world:,} {gpu_name}: sequences of {m.seq_len:,} tokens, {x.global_batch_size:,} a step

{table}

The first one's seconds of a step (of messages, those that nothing hides):
    {seconds}
The first one's GiB of the fullest GPU:
    {memory}

{laws}
{days}
{verdict}: {total:.1f} GiB of {size:.1f} GiB on the fullest GPU.
{launch}"""


def rates(m: Shape, plan: Plan, gpu: Gpu) -> tuple[float, float]:
    """MFU, and tokens/s of one GPU."""
    x = plan.layout
    tokens = x.global_batch_size * m.seq_len / x.world / plan.seconds.step
    return flops_per_token(m) * tokens / gpu.flops, tokens


def plans_table(m: Shape, plans: list[Plan], gpu: Gpu) -> str:
    """A line for each plan: its flags and its numbers."""
    rows = [["flags", "step, s", "MFU", "tokens/s of a GPU", "GiB"]]
    for plan in plans:
        mfu, tokens = rates(m, plan, gpu)
        numbers = [f"{plan.seconds.step:.3f}", f"{mfu:.1%}", f"{tokens:,.0f}"]
        rows.append([plan.layout.flags(), *numbers, f"{plan.held.total / GIB:.1f}"])
    return table(rows)


def parts(values: dict[str, float], unit: float) -> str:
    """Format the parts of a sum that are not 0."""
    return ", ".join(f"{name} {part / unit:,.3f}" for name, part in values.items() if part)


def laws(m: Shape, plan: Plan, gpu: Gpu) -> str:
    """The laws of the course, with the numbers of this model and layout."""
    x = plan.layout
    weights = total_weights(m)
    sequence = micro_batch(m, Layout(micro_batch_size=1))
    kept = {}
    for kind in RECOMPUTE:
        each = [layer_bytes(sequence, m.has_experts(n), kind) for n in range(m.n_layers)]
        kept[kind] = sum(each) / GIB
    text = LAWS + EXPERTS if m.experts else LAWS
    return text.format(
        m=m,
        x=x,
        gpu=gpu,
        state=18 * weights / GIB,
        least=ceil(18 * weights / (ROOM * gpu.memory)),
        ring=ceil(2 * m.kv_dim / m.dim * gpu.flops * gpu.matmul / gpu.within),
        idle=(x.pp - 1) / (x.stages * x.micro_batches + x.pp - 1),
        **kept,
    )


def days(m: Shape, plan: Plan, tokens: float) -> str:
    """How long training on so many tokens takes; "" for none."""
    steps = tokens / plan.layout.global_batch_size / m.seq_len
    time = steps * plan.seconds.step / DAY
    return f"\n{tokens:.4g} tokens are {steps:,.0f} steps, {time:,.1f} days." if tokens else ""


def launch(name: str, m: Shape, x: Layout) -> str:
    """The command that launches a layout, on nodes of 8 GPUs."""
    step = "step07_moe_ep.py" if m.experts else "step06_pipeline.py"
    words = [f"torchrun --nnodes={ceil(x.world / NODE)} --nproc_per_node={min(NODE, x.world)}"]
    words.append(f"-m extras {step} --model {name},seq_len={m.seq_len} {x.flags()}")
    if x.cp > 1:
        words.append("--cp-mode flash")
    if m.shared_experts:
        words.append("--balance shared")
    for field in fields(Experts):
        value = getattr(m, field.name)
        if value != field.default:
            words.append(f"--{field.name.replace('_', '-')} {value}")
    return " ".join(words)


def report(name: str, m: Shape, plans: list[Plan], gpu_name: str, tokens: float = 0.0) -> str:
    """The whole report. A launch command is added unless the course cannot train the model."""
    gpu = GPUS[gpu_name]
    plan = plans[0]
    text = REPORT.format(
        name=name,
        gpu_name=gpu_name,
        m=m,
        x=plan.layout,
        table=plans_table(m, plans, gpu),
        seconds=parts(plan.seconds._asdict(), 1),
        memory=parts(plan.held._asdict(), GIB),
        laws=laws(m, plan, gpu),
        days=days(m, plan, tokens),
        verdict="So" if fits(plan.held, gpu) else f"It does not fit into {ROOM:.0%} of a GPU",
        total=plan.held.total / GIB,
        size=gpu.memory / GIB,
        launch="" if name in GPTS or m.dense_layers else launch(name, m, plan.layout),
    )
    return text.rstrip()
