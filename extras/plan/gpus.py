"""The planner's constants: the memory, peak, bandwidths and latencies of each GPU, and some of all.

They come from data sheets and published measurements, or are fitted to published step times.
"""

from typing import NamedTuple

from common.meter import PEAKS

GIB = 2**30
ROOM = 0.95  # part of the memory that a plan may fill, because fragments make some of it useless
CONTEXT = 1.5 * GIB  # bytes of CUDA's context and libraries
COMMUNICATOR = 0.5e9  # bytes of NCCL's buffers for one group of ranks, an estimate (see below)
NODE = 8  # GPUs of a node


class Gpu(NamedTuple):
    """One GPU and its share of the networks."""

    memory: float  # bytes
    flops: float  # FLOP/s: dense 16-bit peak, from the data sheet
    matmul: float  # the part of `flops` that a large matmul reaches
    hbm: float  # bytes/s that an elementwise kernel reaches
    within: float  # bytes/s that a GPU sends to other GPUs of its node (NCCL's bus bandwidth)
    between: float  # bytes/s that a GPU sends to other nodes while all GPUs of its node do the same
    start: float = 34e-6  # seconds of a message besides those for its bytes and hops
    hop: float = 3.4e-6  # seconds from one rank of a ring to the next within a node
    hop_between: float = 14e-6  # seconds from a rank to the next one of the ring on another node
    launch: float = 12e-6  # seconds of a kernel besides those for its work


# `flops`: those of common/meter.py. `hbm`: 80 to 84% of the data sheets' 2.0, 3.35,
# 2.4 (HBM2e), 4.8 and 8 TB/s. `between`: each GPU has one network card of 200 or 400 Gbit/s; of
# the faster one, a sixth is lost to the protocol. `within`: near NCCL's bus bandwidth on NVLink 3,
# 4 and 5. Hops: NCCL's own model for rings of large messages (src/graph/tuning.cc since NCCL
# 2.18). `matmul`: fitted, one number for each GPU, to all published step times on it
# (extras/bench/published). Those on the A100 are by Megatron and vTrain, and `within`, `hbm`,
# `start` and `launch` are fitted to them, too. The H200 is an H100 with other memory.
#
# `COMMUNICATOR`: among more than two H100s, NCCL reports 288 MiB a rank for NVLink SHARP alone
# (vllm-project/vllm, issue 9699), and its channels have buffers, too. An all-to-all may need more,
# which is not included: one among eight H100s took 3.3 GB more (NVIDIA/nccl, issue 1685).
A100 = PEAKS["NVIDIA A100-SXM4-80GB"][0] * 1e12
H100 = PEAKS["NVIDIA H100 80GB HBM3"][0] * 1e12
B200 = PEAKS["NVIDIA B200"][0] * 1e12
GPUS = {
    "a100-80": Gpu(80 * GIB, A100, 0.84, 1.6e12, 280e9, 25e9),
    # four network cards of 200 Gbit/s a node
    "a100-80-half": Gpu(80 * GIB, A100, 0.84, 1.6e12, 280e9, 12.5e9),
    "h100-80": Gpu(80 * GIB, H100, 0.61, 2.8e12, 360e9, 42e9),
    # 500 W instead of 700 W; HBM2e
    "h100-96-500w": Gpu(94 * GIB, H100, 0.50, 2.0e12, 360e9, 42e9),
    "h200": Gpu(141e9, H100, 0.61, 4.0e12, 360e9, 42e9),
    "b200": Gpu(180e9, B200, 0.50, 6.4e12, 700e9, 42e9),
}
