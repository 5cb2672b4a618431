"""Measure four of a GPU's constants on this machine, for theory/gpus.py; the peak is the data sheet's.

python -m theory.calibrate                                    one GPU: matmul, hbm, launch
torchrun --nproc_per_node=8 -m theory.calibrate               one node: also `within`
torchrun --nnodes=2 --nproc_per_node=8 ... -m theory.calibrate   several nodes: `between` instead
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def seconds(work: Callable[[], object], times: int = 20) -> float:
    """Seconds of one call, the mean of `times` after three to warm up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def measure() -> dict[str, float]:
    """FLOP/s of a large bf16 matmul, bytes/s of an elementwise sum, seconds of a launch; bytes/s of an all-reduce."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x, y = (torch.randn(2**28, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tiny = torch.zeros(1, device="cuda")
    found = {"matmul, FLOP/s": 2 * 8192**3 / seconds(lambda: a @ a)}
    found["hbm, bytes/s"] = 3 * x.nbytes / seconds(lambda: torch.add(x, y, out=y))
    found["launch, s"] = seconds(lambda: tiny.add_(1), 1000)
    if dist.is_initialized():
        n, in_node = dist.get_world_size(), torch.cuda.device_count()
        sent = 2 * (n - 1) / n * x.nbytes / seconds(lambda: dist.all_reduce(x))
        # over nodes, each of a node's GPUs sends its share of the node's traffic
        found |= {"within, bytes/s": sent} if n == in_node else {"between, bytes/s": sent / in_node}
    return found


def main() -> int:
    """Print what was measured; without a GPU one line, and exit status 2."""
    if not torch.cuda.is_available():
        print("error: PyTorch sees no GPU here: run this on the GPU whose constants you want", file=sys.stderr)
        return 2
    torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl")
    found = measure()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(torch.cuda.get_device_name())
        print("\n".join(f"{name:18} {value:.4g}" for name, value in found.items()))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
