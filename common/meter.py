"""MFU and peak memory of a run. You can follow every step without this file.

MFU (model FLOPs utilisation) = FLOPs of a token x tokens per second / the peak of all GPUs. A peak
is the FLOP/s that a data sheet gives for the run's dtype. The FLOPs are counted as in step 1 (FLOPs
OF A TOKEN). Each token costs

    6                for each weight in a matrix; of experts, only those that the token visits. The
                     embedding is only looked up, so it counts only if it is also the head (tied)
    7 x seq x dim    for each layer's causal attention

For tiny, 5,538,560 FLOPs a token (step 1) at 100,000 tokens a second are 0.55 TFLOP/s: on an H100,
with a peak of 989, an MFU of 0.06 %.

Others count attention differently, so compare an MFU only with one that is counted alike. Attention
has this share of a token's FLOPs in smollm-1.7b (1,711,276,032 weights in matrices; seq 2048, dim
2048, 24 layers):

    7 x seq x dim     6.4 %     here: the causal half of 7 products. One of them, the scores in
                                backward, is a repetition: every fused attention makes it, so it
                                counts. What --recompute repeats does not count
    12 x seq x dim    10.5 %    PaLM (Chowdhery et al. 2022): all pairs of tokens in 6 products
"""

import math

import torch

from common.model import ModelConfig

# A GPU's name (torch.cuda.get_device_name) -> its peaks (bf16, fp32) in TFLOP/s, from data sheets
# and white papers: for dense matrices, and fp32 without TF32. 0: the GPU has no bf16
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


def flops_per_token(shapes: dict[str, tuple], config: ModelConfig, top_k: int) -> float:
    """FLOPs of one token, forward and backward. `shapes`: name -> shape, of all parameters of the
    model. `top_k`: how many experts a token visits.
    """
    weights = 0.0
    for name, shape in shapes.items():
        size = math.prod(shape)
        is_only_looked_up = "embed_tokens" in name and not config.tied
        # 2 dimensions: a matrix. 3: experts, [experts, out, in]. (1: a norm, which is not counted)
        if len(shape) == 2 and not is_only_looked_up:
            weights += size
        elif len(shape) == 3:
            weights += size * top_k / shape[0]
    return 6 * weights + 7 * config.seq_len * config.dim * config.n_layers


class Meter:
    """Measures the MFU of a step, and the peak memory of this rank's GPU. metrics.jsonl has rank
    0's.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, token_flops: float, world: int):
        """`world`: the number of ranks, all with the same kind of device."""
        self.is_gpu = device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(device) if self.is_gpu else "cpu"
        self.peak = world * peak_flops(self.device_name, dtype)
        self.token_flops = token_flops

    def measure(self, tokens_per_second: float) -> dict[str, float]:
        """`mfu`, if the peak is known, and on a GPU `peak_memory`: the most bytes that tensors have
        taken since the launch, without NCCL's buffers.
        """
        measured = {}
        if self.peak:
            measured["mfu"] = self.token_flops * tokens_per_second / self.peak
        if self.is_gpu:
            measured["peak_memory"] = torch.cuda.max_memory_allocated()
        return measured
