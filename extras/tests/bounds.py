"""How far apart two right results may be: what a dtype and an operation can hold, not what one processor showed.

PyTorch takes other kernels on other processors (ATEN_CPU_CAPABILITY, MKL_CBWR and OMP_NUM_THREADS choose among those of
one). They add in another order, in parts, with fused multiply-adds or without, and some have a coarser exp. All of them
round each result by at most half a unit in its last place, so a bound is a number of roundings, or a named fact.
Every bound is far below what the fault does that its test is there to notice.
"""

import torch


def roundings(dtype: torch.dtype, n: int) -> float:
    """Relative, norm-wise: each of `n` roundings one after another, in any order, is half a unit in the last place."""
    return n * torch.finfo(dtype).eps / 2


# A run of a few steps against another one, norm-wise: a thousand times what its sums of some thousand numbers, its
# division by a norm and Adam's division by a root make of a rounding; any fault is at 1e-6 or above (in fp32, 1e-4).
RUN = {"fp64": 1e-10, "fp32": 1e-5}

# One layer, operator or collective in fp64: 9,000 roundings, for sums of up to some hundred numbers. Adjoints, merged
# softmaxes and sums over ranks are all of this kind, and what is wrong with them is wrong in the first three digits.
FP64 = 1e-12

# exp in PyTorch's attention for 16 bits (AVX2, AVX-512 and SVE; from 8 or 16 keys on) is a cubic that is off by at most
# 1.07e-4 of exp (Malossi et al. 2015). A log-sum-exp is off by as much, absolutely. In 16 bits it would be off by four
# times as much (fp16, from 1 to 2) and more.
EXP_FOR_16_BITS = 2**-13

# Losses (nats) of two runs in 16 bits that round in different places, over some steps: one rounding in bf16, 2^-8, of
# the first loss, log(259) = 5.6. Sums and masters are fp32, so drift does not grow with the steps.
DRIFT = 0.02


def attention(dtype: torch.dtype) -> float:
    """Of its output and gradients, and of a log-sum-exp, for scores of a few units and tens of keys.

    64 roundings in fp32 at least: two dots of 6 numbers, exp, its sum over 10 keys, a division, and a dot of 10; both
    ways of finding it. In 16 bits weights (or scores' gradients) and both results are rounded, too, and exp is off.
    """
    wide = roundings(torch.promote_types(dtype, torch.float32), 64)
    return wide + (roundings(dtype, 3) + EXP_FOR_16_BITS if dtype.itemsize == 2 else 0)
