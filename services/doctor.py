"""Can this machine train? One screen: what is here, what is wrong and its mend, and how fast two ranks add up.

    python -m services.doctor                 tables, and doctor.png: bandwidth of an all-reduce by message size
    python -m services.doctor --picture ""    without the picture

Two processes are started for the last part. With two GPUs or more they take one each and use NCCL, else gloo. The bytes
of an all-reduce are those that each rank sends: 2 (n-1)/n S, and so S for two ranks and a message of S bytes.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.comm import all_reduce
from services import plots
from services.devices import driver_version, unusable_gpu
from services.launch import open_mesh
from services.tables import human, table

SIZES = [2**power for power in range(10, 27, 2)]  # bytes of a message: 1 KiB to 64 MiB
PACKAGES = ("numpy", "safetensors", "datasets", "tqdm", "matplotlib")
GIB = 2**30
OLDEST = (2, 11)


class Finding(NamedTuple):
    """One line of the screen; `problem` and its `mend` are empty if all is well."""

    what: str
    found: str
    problem: str = ""
    mend: str = ""


class Exchange(NamedTuple):
    """Messages of `bytes` added up by two ranks: the least and the median seconds of one."""

    bytes: int
    least: float
    median: float


def look_at_torch() -> Finding:
    """Python and PyTorch, and whether its build fits the machine."""
    found = f"Python {platform.python_version()}, torch {torch.__version__}"
    if torch.version.cuda:
        found += f", built for CUDA {torch.version.cuda}; NVIDIA driver {driver_version() or 'none'}"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if sys.version_info < (3, 10) or version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Finding("software", found, f"Python 3.10 and torch {oldest} are needed", "pip install torch==2.13.0")
    problem, mend = unusable_gpu()
    if problem:
        return Finding("software", found, problem, mend)
    if torch.version.cuda and not torch.cuda.is_available():
        problem = f"torch is built for CUDA {torch.version.cuda} but sees no GPU"
        return Finding("software", found, problem, "see what nvidia-smi says; start containers with --gpus all")
    if not torch.version.cuda and not torch.version.hip and shutil.which("nvidia-smi"):
        problem = "there is NVIDIA's driver, but this torch is built for CPUs alone"
        return Finding("software", found, problem, "pip install torch==2.13.0, with the index that pytorch.org names")
    return Finding("software", found)


def look_at_packages() -> Finding:
    """What training needs besides PyTorch."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    here = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if name not in missing]
    if missing:
        return Finding("packages", ", ".join(here), f"missing: {', '.join(missing)}", "pip install -r requirements.txt")
    return Finding("packages", ", ".join(here))


def look_at_backends() -> Finding:
    """What ranks can talk through."""
    known = dict(gloo=dist.is_gloo_available(), nccl=dist.is_nccl_available())
    found = ", ".join(f"{name} {'yes' if here else 'no'}" for name, here in known.items())
    if not known["gloo"]:
        return Finding("backends", found, "gloo is missing: ranks on CPUs cannot meet", "install torch from PyPI")
    if torch.cuda.device_count() > 1 and not known["nccl"]:
        return Finding("backends", found, "several GPUs, but no NCCL", "use --backend gloo, or a torch with NCCL")
    return Finding("backends", found)


def look_at_memory() -> Finding:
    """Cores, and memory of the host: what is free now."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), pages * size)
    found = f"{os.cpu_count()} cores, memory {human(pages * size)}, free {human(free)}"
    if free < 4 * GIB:
        return Finding("host", found, "eight ranks need about 4 GiB", "use fewer ranks: torchrun --nproc_per_node=2")
    return Finding("host", found)


def look_at_shared_memory(folder: str = "/dev/shm") -> Finding:
    """Where NCCL's ranks of a node exchange what no link carries."""
    if not Path(folder).exists():
        return Finding("shared memory", f"no {folder}")
    usage = shutil.disk_usage(folder)
    found = f"{folder} {human(usage.total)}, free {human(usage.free)}"
    if usage.free < GIB:
        return Finding("shared memory", found, "NCCL may need 1 GiB of it", "docker run --shm-size=8g, or --ipc=host")
    return Finding("shared memory", found)


def look_at_limits() -> Finding:
    """Files that a process may open: sockets between ranks, and mapped data, count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if locked == resource.RLIM_INFINITY else human(locked)
    found = f"{soft} open files (at most {hard}), {shown} of locked memory"
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Finding("limits", found, "1024 open files are needed", f"ulimit -n {min(65536, max(hard, 1024))}")
    return Finding("limits", found)


def look_at_names() -> Finding:
    """Whether this host's name leads to an address, as torchrun wants it."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        mend = f"add '127.0.1.1 {name}' to /etc/hosts, or torchrun --local-addr=localhost"
        return Finding("network", name, f"the host's own name has no address ({error.strerror})", mend)
    return Finding("network", f"{name} is {address}")


def look_at_disk(folder: str = ".") -> Finding:
    """Room for runs/."""
    usage = shutil.disk_usage(folder)
    found = f"{human(usage.free)} free here"
    if not os.access(folder, os.W_OK):
        return Finding("disk", found, "this folder cannot be written", "start runs with --out DIR in another folder")
    if usage.free < GIB:
        return Finding("disk", found, "checkpoints and data sets need about 1 GiB", "--out, HF_HOME on another disk")
    return Finding("disk", found)


def copy_seconds(a: int, b: int, n_bytes: int) -> float:
    """The seconds of a copy from one GPU to another, the least of five."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device=f"cuda:{a}")
    target, found = torch.empty_like(source, device=f"cuda:{b}"), []
    for _ in range(5):
        for gpu in (a, b):
            torch.cuda.synchronize(gpu)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(b)
        found.append(time.perf_counter() - start)
    return min(found)


def look_at_gpus() -> list[Finding]:
    """A line for each GPU: its name, memory and links, whether it reads each other one's memory, and how fast."""
    count, size = torch.cuda.device_count() if torch.cuda.is_available() else 0, 2**28
    if not count:
        return [Finding("GPUs", "none: all steps run on the CPU, with gloo")]
    findings = []
    for gpu in range(count):
        about, links, without = torch.cuda.get_device_properties(gpu), [], []
        for other in range(count):
            if other != gpu:
                peer = torch.cuda.can_device_access_peer(gpu, other)
                without += [] if peer else [str(other)]
                speed = size / copy_seconds(gpu, other, size) / 1e9
                links.append(f"{other}: {speed:.0f} GB/s{'' if peer else ' through the host'}")
        found = f"{about.name}, {human(about.total_memory)}" + (f"; to {', '.join(links)}" if links else "")
        problem = f"no direct link to GPU {', '.join(without)}" if without else ""
        mend = "keep --tp and --ep at 1 between them" if without else ""
        findings.append(Finding(f"GPU {gpu}", found, problem, mend))
    return findings


def exchange_on_rank(rank: int, folder: str, nccl: bool, results: Any):
    """One of two processes: add up messages of all sizes, several times; rank 0 puts [Exchange, ...] into `results`."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    backend = "nccl" if nccl else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store", timedelta(seconds=60), world_size=2, rank=rank)
    found = []
    with open_mesh({"dp": 2}, device, backend, 60.0) as mesh:
        for n_bytes in SIZES:
            message, seconds = torch.ones(n_bytes // 4, device=device), []
            for _ in range(3 + min(20, 2**26 // n_bytes)):
                start = time.perf_counter()
                all_reduce(message, mesh["dp"]).wait()
                message[0].item()  # waits for a GPU
                seconds.append(time.perf_counter() - start)
                message.fill_(1.0)
            seconds = sorted(seconds[3:])  # the first ones make connections
            found.append(Exchange(n_bytes, seconds[0], seconds[len(seconds) // 2]))
    dist.destroy_process_group()
    if rank == 0:
        results.put(found)


def exchange(seconds: float = 120.0) -> tuple[list[Exchange], Finding]:
    """Start two ranks and let them add up: what they measured, and a line about it."""
    nccl = torch.cuda.device_count() > 1 and dist.is_nccl_available() and torch.cuda.is_available()
    what, context = f"two ranks, {'nccl' if nccl else 'gloo'}", torch.multiprocessing.get_context("spawn")
    results, rows, deadline = context.Queue(), [], time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=exchange_on_rank, args=(r, folder, nccl, results)) for r in range(2)]
        for process in ranks:
            process.start()
        while time.monotonic() < deadline and not rows and all(process.exitcode in (None, 0) for process in ranks):
            if not results.empty():
                rows = results.get()
            time.sleep(0.05)
        for process in ranks:
            process.join(5 if rows else 0)
            process.kill()
            process.join()
    if not rows:
        mend = "NCCL_DEBUG=INFO says more" if nccl else "export GLOO_SOCKET_IFNAME=lo, then see what the ranks print"
        return rows, Finding(what, "no answer", f"they did not meet within {seconds:g} s, or one of them failed", mend)
    best = max(row.bytes / row.median for row in rows)
    found = f"all-reduce up to {best / 1e9:.2f} GB/s; {rows[0].median * 1e6:.0f} us for {human(rows[0].bytes)}"
    if best < 5e7:
        mend = "end other jobs; torchrun sets OMP_NUM_THREADS=1, so that ranks share the cores: set it, too"
        return rows, Finding(what, found, "slower than 50 MB/s", mend)
    return rows, Finding(what, found)


def examine() -> tuple[list[Finding], list[Exchange]]:
    """Everything, in the order of the screen."""
    findings = [look_at_torch(), look_at_packages(), look_at_backends(), look_at_memory(), look_at_shared_memory()]
    findings += [look_at_limits(), look_at_names(), look_at_disk(), *look_at_gpus()]
    rows, finding = exchange()
    return [*findings, finding], rows


def screen(findings: list[Finding], rows: list[Exchange]) -> str:
    """All of it as text: what was found, the messages, the problems with their mends."""
    width = max(len(finding.what) for finding in findings)
    lines = [f"{'!' if f.problem else ' '} {f.what.ljust(width)}  {f.found}" for f in findings]
    if rows:
        cells = [[human(r.bytes), f"{r.median * 1e6:.0f}", f"{r.bytes / r.median / 1e9:.3f}"] for r in rows]
        lines += ["", table([["all-reduce", "median, us", "GB/s"], *cells])]
    problems = [finding for finding in findings if finding.problem]
    lines += ["", f"{len(problems)} problem{'s' * (len(problems) != 1)}{':' * bool(problems)}"]
    for number, finding in enumerate(problems, 1):
        lines += [f"  {number}. {finding.what}: {finding.problem}", f"     mend: {finding.mend}"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="python -m services.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--picture", default="doctor.png", metavar="FILE", help="of the bandwidth; empty: none")
    args = parser.parse_args(argv)
    findings, rows = examine()
    print(screen(findings, rows))
    if args.picture and rows:
        plots.bandwidth([(row.bytes, row.median) for row in rows], Path(args.picture), findings[-1].what)
        print(f"see {args.picture}")
    return int(any(finding.problem for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
