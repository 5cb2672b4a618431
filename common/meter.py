"""What a run measures: speed and memory, the table of its parameters, and a profile.

MFU, model FLOPs utilisation, is the part of the GPUs' peak that the model's FLOPs take. We count
step 1's law: 6 per token and weight of a matrix (of the experts, only those that the token visits),
and 7 x seq x dim per token and layer for causal attention: half of all pairs, and in backward the
scores once more, as FlashAttention computes them. FLOPs of --recompute are not counted.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, schedule

from common import UserError
from common.checkpoint import place_of
from common.comm import Mesh
from common.layout import layout_of
from common.model import ModelConfig

# Dense TFLOP/s in bf16 and in fp32 (without TF32), from data sheets, by the exact name of the GPU:
# "NVIDIA H100 80GB HBM3 MIG 1g.10gb" is a small slice of one, and has another name.
PEAKS = {
    "Tesla T4": (0, 8.1),
    "NVIDIA L4": (121, 30.3),
    "NVIDIA A100-SXM4-40GB": (312, 19.5),
    "NVIDIA A100-SXM4-80GB": (312, 19.5),
    "NVIDIA A100-PCIE-40GB": (312, 19.5),
    "NVIDIA A100 80GB PCIe": (312, 19.5),
    "NVIDIA H100 80GB HBM3": (989, 66.9),
    "NVIDIA H100 PCIe": (756, 51.2),
    "NVIDIA H200": (989, 66.9),
    "NVIDIA GH200 480GB": (989, 66.9),
    "NVIDIA B200": (2250, 75),
    "NVIDIA GB200": (2500, 80),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The peak of one GPU in FLOP/s; 0.0 if it is not known, and for CPUs."""
    if device.type != "cuda":
        return 0.0
    bf16, fp32 = PEAKS.get(torch.cuda.get_device_name(device), (0, 0))
    return {torch.bfloat16: bf16, torch.float32: fp32}.get(dtype, 0) * 1e12


def flops_per_token(wholes: dict[str, tuple], shape: ModelConfig, top_k: int) -> float:
    """FLOPs of forward and backward. `wholes`: the whole shape of each parameter, by name.

    `top_k`: how many experts a token visits; their weights are [experts, out, in].
    """
    weights = 0.0
    for name, whole in wholes.items():
        if len(whole) == 3:
            weights += math.prod(whole) * top_k / whole[0]
        elif len(whole) == 2 and ("embed_tokens" not in name or shape.tied):
            weights += math.prod(whole)
    return 6 * weights + 7 * shape.seq_len * shape.dim * shape.n_layers


class Row(NamedTuple):
    """What a rank holds of a parameter."""

    whole: tuple[int, ...]  # the shape of the whole parameter
    shard: tuple[int, ...]
    sharded: str  # for example "dim 0 over tp 2"
    summed: str  # over which ranks its gradient is summed, for example "dp 4, tp 2"
    nbytes: int


def rows_of(model: nn.Module, mesh: Mesh) -> dict[str, Row]:
    """This rank's rows of the table, by the names of the parameters."""
    rows = {}
    for name, param in model.named_parameters():
        record = layout_of(param)
        whole, _ = place_of(param)
        cuts = [f"dim {cut.dim} over {cut.over} {mesh[cut.over].size}" for cut in record.shards]
        groups = [mesh[dim] for dim in (record.data_dim, *record.partial_over)]
        sums = [f"{group.name} {group.size}" for group in groups if group.size > 1]
        if record.stage_copies > 1:
            sums.append("first and last stage")
        row = Row(whole, tuple(param.shape), ", ".join(cuts), ", ".join(sums), param.nbytes)
        rows[name] = row
    return rows


def parameter_table(rows: dict[str, Row]) -> str:
    """A table of the parameters. Those that differ only in the number of their layer share a row."""
    layers: dict[str, list[Row]] = defaultdict(list)
    for name, row in rows.items():
        layers[re.sub(r"\.\d+\.", ".*.", name)].append(row)
    lines = [("", "parameter", "whole", "on a rank", "bytes", "sharded", "gradient summed over")]
    for pattern, (row, *others) in layers.items():
        shapes = ["x".join(map(str, shape)) for shape in (row.whole, row.shard)]
        number = f"{1 + len(others)} x"
        lines.append((number, pattern, *shapes, f"{row.nbytes:,}", row.sharded, row.summed))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{width}}}" for width in widths)
    return "\n".join(form.format(*line).rstrip() for line in lines)


@contextmanager
def profiling(
    n: int, steps: int, out: Path, rank: int, device: torch.device
) -> Iterator[Callable[[], Any]]:
    """Trace n of the next `steps` steps, after two others. Yields what to call after each step.

    OUT/trace-RANK.json.gz opens in https://ui.perfetto.dev: operators, messages, `wait tp` where a
    rank waits for tp, F0.1 for the forward of micro-batch 0 through stage 1, and the optimizer's
    step. On a GPU, OUT/memory-RANK.pickle has the memory allocated since the first step, and where;
    it opens in https://pytorch.org/memory_viz. A signal may end the trace early. Raises UserError.
    """
    if n == 0 or steps == 0:
        yield bool  # nothing to do after a step
        return
    if n + 2 > steps:
        raise UserError(f"--profile {n}: it needs {n + 2} steps, and {steps} are left")
    gpu = device.type == "cuda"

    def write(profiler: torch.profiler.profile):
        profiler.export_chrome_trace(str(out / f"trace-{rank}.json.gz"))
        if gpu:
            torch.cuda.memory._dump_snapshot(str(out / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    if gpu:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    when = schedule(wait=1, warmup=1, active=n, repeat=1)
    with torch.profiler.profile(activities=kinds, schedule=when, on_trace_ready=write) as profiler:
        yield profiler.step
