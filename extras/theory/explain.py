"""One layout's sums, as one would write them on a blackboard: each formula, the numbers in it, the result."""

from extras.theory.activations import layer_bytes
from extras.theory.footprint import COURSE
from extras.theory.gpus import GIB, Gpu
from extras.theory.layouts import Layout, communicators, network
from extras.theory.memory import micro_batch_of, rank_numbers
from extras.theory.pipelines import rank_places
from extras.theory.search import evaluate, rates
from extras.theory.seconds import (
    COMPUTE,
    bandwidth,
    boundary_seconds,
    layer_layout,
    rank_work,
    ring,
    stages_of,
    tokens_of,
)
from extras.theory.shapes import Shape, flops_per_token, layer_weights, total_weights


def blackboard(m: Shape, x: Layout, gpu: Gpu) -> str:
    """The memory of the fullest rank, and where the seconds of a step go."""
    chosen, way = evaluate(m, x, gpu), (x.schedule, x.pp, x.chunks)
    memory, seconds = chosen.held, chosen.seconds
    numbers = max(rank_numbers(m, *way, x.tp, x.ep), key=sum)
    busy, _, (f, b, w) = rank_work(m, layer_layout(x), gpu, COURSE, *way)
    data, tp, experts = network(x, "shard", gpu.node), network(x, "tp", gpu.node), m.has_experts(m.n_layers - 1)
    ranks = rank_places(m, *way)
    layers = max(sum(len(place.layers) for place in places.values()) for places in ranks)
    one = sum(layer_weights(m, experts, x.tp, x.ep))
    tokens, n = tokens_of(m, x), x.micro_batches
    cut = [data.ranks if x.zero >= stage else 1 for stage in (3, 2, 1)]
    micro_batch = micro_batch_of(m, x)
    lines = [
        "MEMORY of the fullest rank",
        f"weights of the model         N = {total_weights(m):.4g};  here of a layer: {one:.4g} (tp {x.tp}, ep {x.ep})",
        f"weights of this rank         P = {layers} layers x {one:.4g} + embedding or head / tp = {sum(numbers):.4g}",
        f"bytes a weight, ZeRO {x.zero}       2/{cut[0]} + 4/{cut[1]} + 12/{cut[2]} = "
        f"{2 / cut[0] + 4 / cut[1] + 12 / cut[2]:.3g}   (weight, gradient, masters and moments; sharded over dp x cp"
        f"{f' / {x.zero_replicas} replicas' * (x.zero_replicas > 1)}"
        f"{', experts over dp x cp x tp / ep' * (m.experts > 0)})",
        f"  weights                    {memory.weights / GIB:8.2f} GiB",
        f"  gradients                  {memory.gradients / GIB:8.2f} GiB",
        f"  optimizer                  {memory.optimizer / GIB:8.2f} GiB",
        f"tokens of a micro-batch      T = b s / cp = {x.micro_batch_size} x {m.seq_len} / {x.cp} = {tokens}",
        f"a layer keeps                {layer_bytes(micro_batch, experts) / 2**20:.0f} MiB of T "
        f"(recompute {x.recompute}, tp {x.tp}, {'with' if x.sp else 'no'} sequence parallelism)",
        f"  activations                {memory.activations / GIB:8.2f} GiB: all micro-batches that {x.schedule} "
        f"lets wait, of {layers} layers",
        f"  for a moment               {memory.moment / GIB:8.2f} GiB "
        f"(loss of {micro_batch.at_once} tokens at a time, gathered units, a layer computed again, CUDA, "
        f"{communicators(m, x)} communicators)",
        f"  sum                        {memory.total / GIB:8.2f} GiB of {gpu.memory / GIB:.0f} GiB",
        "",
        f"TIME of a step               n = batch / dp / b = {x.global_batch_size} / {x.dp} / {x.micro_batch_size} "
        f"= {n} micro-batches",
        "one micro-batch on the busiest rank, forward and backward:",
        f"  matmuls                    {busy['matmul'] * 1e3:8.2f} ms = FLOPs / ({gpu.flops:.3g} x {gpu.matmul:g}) + "
        f"bytes / {gpu.hbm:.3g} + launches",
        f"  attention                  {busy['attention'] * 1e3:8.2f} ms: half of the pairs of query and key, 2.5 "
        f"times as much backward (documents in a sequence would leave fewer pairs)",
        f"  norms, products, loss      {busy['memory'] * 1e3:8.2f} ms = bytes / {gpu.hbm:.3g}",
    ]
    if x.tp > 1:
        lines.append(
            f"  tp                         {busy['tp'] * 1e3:8.2f} ms: one gather sends (tp-1)/tp x 2 T h = "
            f"{ring(tp, tokens * m.dim * 2) / 2**20:.1f} MiB at {bandwidth(gpu, tp) / 1e9:.0f} GB/s"
        )
    lines += [f"  {dim}                         {busy[dim] * 1e3:8.2f} ms" for dim in ("cp", "ep") if busy.get(dim)]
    compute = n * sum(busy[part] for part in COMPUTE)
    lines.append(
        f"compute                      {compute:8.3f} s = n x these (of it computed again {seconds.recompute:.3f} s)"
    )
    if x.pp > 1:
        lines.append(
            f"bubble                       {seconds.bubble:8.3f} s: {x.schedule} simulated with f, b, w = "
            f"{f * 1e3:.1f}, {b * 1e3:.1f}, {w * 1e3:.1f} ms a stage; without idling "
            f"{n * stages_of(x) * (f + b + w):.3f} s; a message {boundary_seconds(m, x, gpu, COURSE) * 1e3:.2f} ms"
        )
    for dim, exposed in seconds.exposed.items():
        net = network(x, dim, gpu.node)
        where = "between nodes" if net.leaves else "within a node"
        lines.append(f"exposed over {dim:2}              {exposed:8.3f} s, {net.ranks} ranks {where}")
    got, model = rates(m, chosen, gpu), flops_per_token(m)[0]
    lines += [
        f"update                       {seconds.update:8.3f} s = bytes of weights and state / {gpu.hbm:.3g}",
        f"step                         {seconds.step:8.3f} s",
        f"tokens/s of a GPU            {got['tokens']:8.1f} = {x.global_batch_size} x {m.seq_len} / {x.world} / step",
        f"MFU                          {got['mfu']:8.1%} = {model:.4g} FLOPs x tokens/s / {gpu.flops:.3g}"
        f";  HFU {got['hfu']:.1%}",
    ]
    return "\n".join(lines)
