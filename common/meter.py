"""How fast a run is, and how much memory it takes: MFU, and peak memory. You can follow every step
without this file.

MFU (model FLOPs utilisation) = FLOPs of a step / (its seconds x the peak of all GPUs), which is
FLOPs of a token x tokens per second / the peak of all GPUs. A peak is the FLOP/s that a data sheet
gives for the run's dtype. The FLOPs are counted as in step 1 (FLOPs OF A TOKEN). Each token costs

    6                for each weight in a matrix. (Not for the embedding, in which a row is only
                     looked up; but for a tied one, as the head. Of experts, only for those that
                     the token visits)
    7 x seq x dim    for each layer's causal attention

For tiny, 5,538,560 FLOPs a token (step 1) at 100,000 tokens a second are 0.55 TFLOP/s: on an H100,
with a peak of 989, an MFU of 0.06 %.

Others count attention differently, so compare an MFU only with one that is counted alike:

                      attention's share of a token's FLOPs, smollm-1.7b (1,711,276,032 weights in
                      matrices; seq 2048, dim 2048, 24 layers)
    7 x seq x dim     6.4 %     here: the causal half of 7 products. One of them, the scores in
                                backward, is a repetition; it always counts, because every fused
                                attention repeats it. (What --recompute repeats does not count.)
    12 x seq x dim    10.5 %    PaLM (Chowdhery et al. 2022): all pairs of tokens in 6 products
"""

import math

import torch

from common.model import ModelConfig
from common.report import Row

# (bf16, fp32) in TFLOP/s, dense (without the factor 2 for sparse matrices), from data sheets and
# white papers, by the GPU's name as torch.cuda.get_device_name gives it. bf16: 0 if the GPU does
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


def flops_per_token(rows: dict[str, Row], config: ModelConfig, top_k: int) -> float:
    """FLOPs of one token, forward and backward. `rows`: of the whole model (with pp, gathered from
    all ranks); `row.whole` is the shape of a parameter. Experts are recognised by their shape, the
    embedding by its name. `top_k`: how many experts a token visits.
    """
    weights = 0.0
    for name, row in rows.items():
        size = math.prod(row.whole)
        is_only_looked_up = "embed_tokens" in name and not config.tied
        # 1 dimension: a norm, which is not counted. 2: a matrix. 3: experts, [experts, out, in]
        if len(row.whole) == 3:
            weights += size * top_k / row.whole[0]
        elif len(row.whole) == 2 and not is_only_looked_up:
            weights += size
    return 6 * weights + 7 * config.seq_len * config.dim * config.n_layers


class Meter:
    """Measures the MFU of a step, and the peak memory of this rank's GPU. (metrics.jsonl has rank
    0's; ranks can differ, for example with pp.)
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, token_flops: float, world: int):
        """`world`: the number of ranks, all with the same kind of device."""
        self.is_gpu = device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(device) if self.is_gpu else "cpu"
        self.peak = world * peak_flops(self.device_name, dtype)
        self.token_flops = token_flops

    def measure(self, tokens_per_second: float) -> dict[str, float]:
        """`mfu`, if the peak is known, and on a GPU `peak_memory`: the most bytes that tensors have
        taken since the launch. (NCCL's buffers are not in it.)
        """
        measured = {}
        if self.peak:
            measured["mfu"] = self.token_flops * tokens_per_second / self.peak
        if self.is_gpu:
            measured["peak_memory"] = torch.cuda.max_memory_allocated()
        return measured
