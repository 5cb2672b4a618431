"""Bounds on the difference between two correct results, derived from dtype and operation, not from one processor.

PyTorch uses different kernels on different processors (ATEN_CPU_CAPABILITY, MKL_CBWR and OMP_NUM_THREADS select among
those of one). Kernels differ in the order of additions, in fused multiply-adds, and in the accuracy of exp. But all
round each result by at most half a unit in its last place, so a bound is a number of roundings, or a named fact.
Every bound is far below the effect of the fault that its test must notice.
"""

# Two runs of a few steps, compared norm-wise: a thousand times the rounding errors of sums of some thousand numbers, of
# the division by a norm, and of Adam's division by a root. Every fault causes 1e-6 or more (in fp32, 1e-4).
RUN = {"fp64": 1e-10, "fp32": 1e-5}

# One layer, operator or collective in fp64: 9,000 roundings, for sums of up to some hundred numbers. Adjoints, merged
# softmaxes and sums over ranks are all of this kind, and a mistake in them changes the first three digits.
FP64 = 1e-12

# The losses (nats) of two 16-bit runs that round in different places may differ by one bf16 rounding, 2^-8, of the
# first loss, log(259) = 5.6. Sums and masters are fp32, so drift does not grow with the steps.
DRIFT = 0.02
