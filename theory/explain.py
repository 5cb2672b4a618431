"""One layout's sums, as one would write them on a blackboard: each formula, the numbers in it, the result."""

from theory.footprint import course_parts, layer_keeps, rank_numbers, rank_stages
from theory.gpus import GIB, Gpu
from theory.layouts import Layout, network
from theory.peak_layers import CHUNK
from theory.recipes import Recipe
from theory.search import evaluate, rates
from theory.seconds import COMPUTE, bandwidth, boundary_seconds, piece_of, rank_work, ring
from theory.sent import sent_bytes
from theory.shapes import Shape, layer_weights, model_flops, total_weights


def blackboard(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe) -> str:
    """The memory of the fullest rank, and where the seconds of a step go."""
    x, found = layout, evaluate(m, layout, gpu, recipe)
    way = (x.schedule, x.pp, x.chunks, recipe.split)
    by_rank = rank_numbers(m, *way, x.tp, x.ep)
    fullest = max(range(x.pp), key=lambda rank: sum(by_rank[rank]))
    numbers = by_rank[fullest]
    busy, _, (f, b, w) = rank_work(m, piece_of(x), gpu, recipe, *way[:3])
    data, tp = network(x, "shard"), network(x, "tp")
    layers = max(sum(len(stage.layers) for stage in stages) for stages in rank_stages(m, *way))
    kinds = [m.has_experts(n) for n in range(m.n_layers)]
    one = sum(layer_weights(m, kinds[-1], x.tp, x.ep))
    tokens, n, memory, seconds = x.mbs * m.seq_len // x.cp, x.micro_batches, found.held, found.seconds
    cut = [data.ranks if x.zero >= stage else 1 for stage in (3, 2, 1)]
    per_weight = recipe.weight / cut[0] + recipe.gradient / cut[1] + recipe.state / cut[2]
    if recipe.name == "course":
        kept = course_parts(m, x.mbs, x.cp, x.tp, x.sp, x.recompute, x.cp_mode, kinds[-1]).layer
    else:
        kept = layer_keeps(m, x, recipe, kinds[-1], x.recompute)
    lines = [
        "MEMORY of the fullest rank",
        f"weights of the model         N = {total_weights(m):.4g};  of a layer / tp: {one:.4g} (tp {x.tp}, ep {x.ep})",
        f"weights of this rank         P = {layers} layers x {one:.4g} + embedding or head / tp = {sum(numbers):.4g}",
        f"bytes a weight, ZeRO {x.zero}       {recipe.weight:g}/{cut[0]} + {recipe.gradient:g}/{cut[1]} + "
        f"{recipe.state:g}/{cut[2]} = {per_weight:.3g}   (weight, gradient, masters and moments; cut over dp x cp"
        f"{f' / {x.replicas} replicas' * (x.replicas > 1)})",
        f"  weights                    {memory.weights / GIB:8.2f} GiB",
        f"  gradients                  {memory.gradients / GIB:8.2f} GiB",
        f"  optimizer                  {memory.optimizer / GIB:8.2f} GiB",
        f"tokens of a micro-batch      T = b s / cp = {x.mbs} x {m.seq_len} / {x.cp} = {tokens}",
        f"a layer keeps                {kept / 2**20:.0f} MiB of T "
        f"(recompute {x.recompute}, tp {x.tp}, {'with' if x.sp else 'no'} sequence parallelism)",
        f"  activations                {memory.activations / GIB:8.2f} GiB: all micro-batches that {x.schedule} "
        f"lets wait, of {layers} layers",
        f"  logits, buffers            {(memory.logits + memory.buffers) / GIB:8.2f} GiB "
        f"(loss of {CHUNK} tokens at a time, gathered units, a layer computed again, CUDA)",
        f"  sum                        {memory.total / GIB:8.2f} GiB of {gpu.memory / GIB:.0f} GiB",
        "",
        f"TIME of a step               n = batch / dp / b = {x.gbs} / {x.dp} / {x.mbs} = {n} micro-batches",
        "one micro-batch on the busiest rank, forward and backward:",
        f"  matmuls                    {busy['matmul'] * 1e3:8.2f} ms = FLOPs / ({gpu.flops:.3g} x {gpu.matmul:g}) + "
        f"bytes / {gpu.hbm:.3g} + launches",
        f"  attention                  {busy['attention'] * 1e3:8.2f} ms",
        f"  norms, products, loss      {busy['memory'] * 1e3:8.2f} ms = bytes / {gpu.hbm:.3g}",
    ]
    if x.tp > 1:
        sent = ring(tp, tokens * m.dim * 2) / 2**20
        lines.append(
            f"  tp                         {busy['tp'] * 1e3:8.2f} ms: "
            f"one gather sends (tp-1)/tp x 2 T h = {sent:.1f} MiB "
            f"at {bandwidth(gpu, tp) / 1e9:.0f} GB/s, half of backward's hidden"
        )
    lines += [f"  {dim}                         {busy[dim] * 1e3:8.2f} ms" for dim in ("cp", "ep") if busy.get(dim)]
    compute = n * sum(busy[part] for part in COMPUTE)
    lines.append(
        f"compute                      {compute:8.3f} s = n x these (of it computed again {seconds.recompute:.3f} s)"
    )
    if x.pp > 1:
        ideal = n * (x.chunks if x.schedule != "dualpipe" else 1) * (f + b + w)
        message = boundary_seconds(m, x, gpu, recipe)
        lines.append(
            f"bubble                       {seconds.bubble:8.3f} s: {x.schedule} simulated with f, b, w = "
            f"{f * 1e3:.1f}, {b * 1e3:.1f}, {w * 1e3:.1f} ms a chunk; without idling {ideal:.3f} s; "
            f"a message {message * 1e3:.2f} ms"
        )
    for dim, exposed in seconds.exposed.items():
        net = network(x, "data") if dim == "dp" else network(x, dim)
        where = "between nodes" if net.leaves else "within a node"
        lines.append(f"exposed over {dim:2}              {exposed:8.3f} s, {net.ranks} ranks {where}")
    if m.mlp_matrices == 3 and m.latent is None:  # what the course's trainer can run, and its ledger books
        sent = sorted(sent_bytes(m, x, fullest).items())
        booked = ", ".join(f"{dim} {operation} {n_bytes / GIB:.3g}" for (dim, operation), n_bytes in sent)
        lines.append(f"sent by this rank, GiB       {booked or 'nothing'}")
    got = rates(m, found, gpu)
    lines += [
        f"update                       {seconds.update:8.3f} s = bytes of weights and state / {gpu.hbm:.3g}",
        f"step                         {seconds.step:8.3f} s",
        f"tokens/s of a GPU            {got['tokens']:8.1f} = {x.gbs} x {m.seq_len} / {x.world} GPUs / step",
        f"MFU                          {got['mfu']:8.1%} = {model_flops(m):.4g} FLOPs x tokens/s / {gpu.flops:.3g}"
        f";  HFU {got['hfu']:.1%}",
    ]
    return "\n".join(lines)
