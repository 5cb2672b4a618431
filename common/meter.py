"""What a run reports of itself: a table of its parameters, MFU, and memory.

MFU (model FLOPs utilisation) = FLOPs of a step / (its seconds x the peak of all GPUs). The FLOPs
are those of step 1's law. Each token costs 6 for each weight in a matrix, except the embedding's
(of the experts, only those that it visits), and 7 x seq x dim for each layer's causal attention.
For tiny, 5,538,560 FLOPs a token (step 1) at 100,000 tokens a second are 0.55 TFLOP/s: on an H100,
with a peak of 989, an MFU of 0.06 %.

Others count attention differently, so compare an MFU only with one that is counted alike:

    7 x seq x dim     here: the causal half of 7 products. One of them, the scores in backward, is a
                      repetition; it counts because every fused attention repeats it. (What
                      --recompute repeats does not.) For smollm-1.7b it is 6.4 % of the whole
    12 x seq x dim    PaLM (Chowdhery et al. 2022): all pairs of tokens in 6 products: 10.5 %
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import nn

from common.comm import Mesh
from common.layout import data_group_of, full_shape, layout_of
from common.model import ModelConfig

# --- The table of parameters ----------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the table: a parameter's whole shape, and the part that the rank of the row holds.

    What ZeRO shards is not in the table, because its shards cut across parameters: with --zero 3 a
    rank keeps fewer bytes, except while it uses a parameter.
    """

    whole: tuple[int, ...]  # shape
    shard: tuple[int, ...]  # shape on this rank
    nbytes: int  # of the shard
    sharded: str  # for example "dim 0 over tp 2"
    summed: str  # over which ranks its gradient is summed: "dp 4, tp 2"


def rows_of(model: nn.Module, mesh: Mesh) -> dict[str, Row]:
    """The rows of the parameters that this rank holds, by name.

    They show the record of layout.py: `shards`, how the parameter was cut; `data_group` and
    `partial_over`, over which ranks its gradient is summed; `stage_copies`, whether two stages hold
    it.
    """
    rows = {}
    for name, param in model.named_parameters():
        record = layout_of(param)
        sharded = [f"dim {cut.dim} over {cut.over} {mesh[cut.over].size}" for cut in record.shards]
        groups = [data_group_of(param, mesh)]
        groups += [mesh[over] for over in record.partial_over]
        summed = [f"{group.name} {group.size}" for group in groups if group.size > 1]
        if record.stage_copies > 1:
            summed.append("first and last stage")
        whole = tuple(full_shape(param))
        shape = tuple(param.shape)
        rows[name] = Row(whole, shape, param.nbytes, ", ".join(sharded), ", ".join(summed))
    return rows


def parameter_table(rows: dict[str, Row]) -> str:
    """The rows as text. Parameters whose names differ only in the number of their layer share a
    row, which shows the first of them.
    """
    kinds = defaultdict(list)  # name without the layer's number -> the rows of all layers
    for name, row in rows.items():
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(row)
    lines = [("", "parameter", "whole", "on a rank", "bytes", "sharded", "gradient summed over")]
    for name, rows_of_kind in kinds.items():
        row = rows_of_kind[0]
        whole = "x".join(str(size) for size in row.whole)
        shard = "x".join(str(size) for size in row.shard)
        number = f"{len(rows_of_kind)} x"
        lines.append((number, name, whole, shard, f"{row.nbytes:,}", row.sharded, row.summed))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


# --- MFU and memory -------------------------------------------------------------------------------

# (bf16, fp32) in dense TFLOP/s, from data sheets, by the GPU's exact name. bf16: 0 if the GPU does
# not have it; fp32: without TF32. (A MIG slice has another name, "NVIDIA H100 80GB HBM3 MIG
# 1g.10gb", and no peak here.)
PEAKS = {
    "Tesla T4": (0, 8.1),
    "NVIDIA L4": (121, 30.3),
    "NVIDIA A100-SXM4-40GB": (312, 19.5),
    "NVIDIA A100-SXM4-80GB": (312, 19.5),
    "NVIDIA A100 80GB PCIe": (312, 19.5),
    "NVIDIA H100 80GB HBM3": (989, 66.9),
    "NVIDIA H100 PCIe": (756, 51.2),
    "NVIDIA H200": (989, 66.9),
    "NVIDIA GH200 480GB": (989, 66.9),
    "NVIDIA B200": (2250, 75),
    "NVIDIA GB200": (2500, 80),
}


def peak_flops(name: str, dtype: torch.dtype) -> float:
    """The peak of a GPU in FLOP/s; 0.0 if it is not known."""
    bf16, fp32 = PEAKS.get(name, (0, 0))
    peaks = {torch.bfloat16: bf16, torch.float32: fp32}
    return peaks.get(dtype, 0) * 1e12


def flops_per_token(rows: dict[str, Row], shape: ModelConfig, top_k: int) -> float:
    """FLOPs of one token, forward and backward. `rows`: of the whole model (with pp, gathered from
    all ranks); experts are recognised by their shape, the embedding by its name. `top_k`: how many
    experts a token visits.
    """
    weights = 0.0
    for name, row in rows.items():
        size = math.prod(row.whole)
        if len(row.whole) == 3:  # a stack of experts, [experts, out, in]
            weights += size * top_k / row.whole[0]
        elif len(row.whole) == 2 and ("embed_tokens" not in name or shape.tied):
            weights += size  # looking up an embedding costs nothing; a tied one is also the head
    return 6 * weights + 7 * shape.seq_len * shape.dim * shape.n_layers


class Meter:
    """Measures the MFU of a step, and the peak memory of this rank's GPU. (metrics.jsonl has rank
    0's; with pp, ranks differ in memory.)
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, flops_per_token: float, world: int
    ):
        """`world`: the number of ranks, all with the same kind of device."""
        self.is_gpu = device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(device) if self.is_gpu else "cpu"
        self.peak = world * peak_flops(self.device_name, dtype)
        self.flops_per_token = flops_per_token

    def measure(self, tokens_per_second: float) -> dict[str, float]:
        """`mfu`, if the peak is known, and on a GPU `peak_memory`: the most bytes that tensors have
        taken since the launch. (NCCL's buffers are not in it.)
        """
        found = {}
        if self.peak:
            found["mfu"] = self.flops_per_token * tokens_per_second / self.peak
        if self.is_gpu:
            found["peak_memory"] = torch.cuda.max_memory_allocated()
        return found
