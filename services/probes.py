"""What services/certify.py asks of the machine's kernels and links, each in processes of their own.

    python -m services.probes attention           and grouped, documents
    torchrun --nproc_per_node=2 -m services.probes exchange            and uneven, matmul, and the others

Each prints one line of JSON, by rank {name: number}: what all ranks have found, each for itself. With a GPU it computes
there, in bf16 (fp16 before Ampere); else on the CPU.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from statistics import median
from threading import Timer
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from common import comm
from services import devices, nvidia
from services.launch import gather_objects
from services.seam import plugins
from step05_cp_ring import same_heads, scaled_scores

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count() if GPU else 0)
DEVICE = DEVICE if GPU else torch.device("cpu")


HALF = torch.float16 if GPU and torch.cuda.get_device_capability(DEVICE) < (8, 0) else torch.bfloat16


def normal(*shape: int) -> Tensor:
    """Random numbers in 16 bits."""
    return torch.randn(shape, dtype=HALF).to(DEVICE)


def farthest(ours: Tensor, right: Tensor) -> float:
    """The largest difference, as a part of the largest right number if that is above 1."""
    return ((ours.double() - right.double()).abs().max() / right.abs().max().clamp(min=1)).item()


def attention() -> dict[str, float]:
    """The kernels of --cp-kernel beside formulas in fp64: outputs, lse, gradients.

    With grouped heads or not, heads of 64 and 128, and a length that no tile divides.
    """
    from variants import cp_flash  # here, as the handout of a lab may lack it

    errors, kernels = dict(output=0.0, lse=0.0, gradients=0.0), [(cp_flash.flash_attention, cp_flash.flash_gradients)]
    if GPU and cp_flash.fits(normal(1, 64), "cudnn"):
        kernels.append(cp_flash.CUDNN)
    cases = product((True, False), (8, 2), ((256, 64), (201, 128)), kernels)
    for causal, kv_heads, (n, size), (kernel, backward) in cases:
        q, do, k, v = (normal(2, heads, n, size) for heads in (8, 8, kv_heads, kv_heads))
        o, lse = kernel(q, k, v, causal)
        given = [x.double().requires_grad_() for x in (q, k, v)]
        scores = scaled_scores(*same_heads(*given[:2]), causal)
        right = scores.softmax(-1) @ same_heads(*given)[2]
        ours = backward(do, q, k, v, o, lse, causal)
        gradients = zip(ours, torch.autograd.grad(right, given, do.double()), strict=True)
        errors["output"] = max(errors["output"], farthest(o, right.detach()))
        errors["lse"] = max(errors["lse"], (lse - scores.logsumexp(-1)).abs().max().item())
        errors["gradients"] = max(errors["gradients"], *(farthest(a, b) for a, b in gradients))
    return errors


@contextmanager
def no_waits():
    """Inside, a host that waits for its GPU raises RuntimeError."""
    if GPU:
        torch.cuda.set_sync_debug_mode("error")
    yield
    if GPU:
        torch.cuda.set_sync_debug_mode("default")


def grouped() -> dict[str, float]:
    """Products of experts, one without rows, beside a loop in fp64. The host may not wait for the GPU."""
    from variants.grouped_matmul import GroupedLinear  # as in `documents`

    rows, weight, dy, counts = normal(96, 64), normal(4, 32, 64), normal(96, 32), [40, 0, 24, 32]
    given = [x.requires_grad_() for x in (rows, weight)]
    for _ in range(2):  # the first call may set up
        with no_waits():
            out = GroupedLinear.apply(*given, counts)
            gradients = torch.autograd.grad(out, given, dy)
    exact = [x.detach().double().requires_grad_() for x in given]
    parts = zip(exact[0].split(counts), exact[1], strict=True)
    right = torch.cat([part @ w.T for part, w in parts])
    pairs = zip((out, *gradients), (right, *torch.autograd.grad(right, exact, dy.double())), strict=True)
    return dict(error=max(farthest(ours.detach(), b.detach()) for ours, b in pairs), waits=0.0)


def documents() -> dict[str, float]:
    """Seconds of attention over documents of new lengths by those of known lengths; with cuDNN, and as we do it."""
    from variants.documents import Documents, MicroBatch  # here, as the handout of a lab may lack it

    q, batch, ratios = normal(1, 2048, 8, 64), Documents.__new__(Documents), {}
    for cudnn in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        batches, times = [torch.randint(0, 200, (1, 2048)) for _ in range(4)], []
        for tokens in (batches[0], batches[0], *batches[1:], *batches[1:]):
            batch.now = MicroBatch(tokens, 0, lambda _: torch.arange(2048))
            start = time.perf_counter()
            batch.attend(q, q, q).float().sum().item()
            times.append(time.perf_counter() - start)
        ratios["with cuDNN" if cudnn else "new / known"] = sum(times[2:5]) / sum(times[5:])
    return ratios


def join() -> comm.Group:
    """Meet the others, as a run would."""
    devices.set_environment()
    devices.meet(SimpleNamespace(device="auto", backend="auto", timeout=60.0, sync=""))
    return comm.Mesh(dp=dist.get_world_size())["dp"]


def exchange() -> dict[str, float]:
    """All-reduces of 1 KiB to 64 MiB, on GPUs 256: how many sums are wrong, and the speed of each size, by the median.

    Microseconds for the least; GB/s for others, of the 2 (n-1)/n of the message that a rank sends.
    """
    group, seen = join(), dict(wrong=0.0)
    for n_bytes in (2**10, 2**20, 2**26, *([2**28] * GPU)):
        message, times = torch.ones(n_bytes // 4, device=DEVICE), []
        for _ in range(3 + min(10, 2**25 // n_bytes)):
            start = time.perf_counter()
            comm.all_reduce(message, group).wait()
            message[0].item()  # waits for a GPU
            times.append(time.perf_counter() - start)
            seen["wrong"] += (message != group.size).sum().item()
            message.fill_(1.0)
        seconds = median(times[2:])  # the first ones make connections
        sent = 2 * (group.size - 1) / group.size * n_bytes
        seen |= {"us for 1 KiB": 1e6 * seconds} if n_bytes == 2**10 else {f"{n_bytes >> 20} MiB": sent / seconds / 1e9}
    return seen


def uneven() -> dict[str, float]:
    """An all-to-all in which rank r sends r + p rows to rank p, also with one rank: how many numbers are wrong."""
    group = join()
    n, r = group.size, group.rank
    sent, received = [r + p for p in range(n)], [p + r for p in range(n)]
    rows = torch.full((sum(sent), 3), float(r), device=DEVICE)
    arrived = torch.full((sum(received), 3), -1.0, device=DEVICE)
    dist.all_to_all_single(arrived, rows, received, sent, group=group.handle)
    right = torch.cat([torch.full((p + r, 3), float(p)) for p in range(n)])
    return dict(wrong=float((arrived.cpu() != right).sum()))


def matmul(n: int = 8192 if GPU else 512, warm: float = 2.0) -> dict[str, float]:
    """TFLOP/s of n x n x n while all GPUs compute; what nvidia-smi, if it is there, says of this one after `warm` s.

    And how many numbers differ from those of the first product: the same kernel on the same GPU finds the same bits.
    """
    a, b, times, said = normal(n, n), normal(n, n), [], {}
    first, wrong, reader = a @ b, torch.zeros((), device=DEVICE), Timer(warm, lambda: said.update(nvidia.clocks()))
    gather_objects(None)  # all begin together
    reader.start()
    while reader.is_alive() or not times:
        start = time.perf_counter()
        for _ in range(10):
            again = a @ b
        again[0, 0].item()  # waits for a GPU
        times.append((time.perf_counter() - start) / 10)
        wrong += (again != first).sum()
    numbers = {"wrong": wrong.item(), "TFLOP/s": 2 * n**3 / median(times) / 1e12}
    if GPU:
        numbers |= said.get(str(torch.cuda.get_device_properties(DEVICE).uuid), {})
        if peak := devices.known_peak(torch.cuda.get_device_name(DEVICE)):
            numbers["of peak"] = numbers["TFLOP/s"] / peak[0]
    return numbers


PROBES: dict[str, Callable[[], dict[str, float]]] = {
    probe.__name__: probe for probe in (attention, grouped, documents, exchange, uneven, matmul)
}

if __name__ == "__main__":
    plugins()
    torch.manual_seed(0)
    if sys.argv[1:] not in [[name] for name in PROBES]:
        sys.exit(f"error: give one of {', '.join(PROBES)}")
    if "RANK" in os.environ:
        join()
    everyone = gather_objects(PROBES[sys.argv[1]]())
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps({f"rank {rank}": found for rank, found in enumerate(everyone)}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
