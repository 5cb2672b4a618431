"""What a machine has for training, what is wrong with it, and its mend: the first part of services/certify.py.

Links are of kinds, and a link is judged beside others of its kind. An all-reduce goes as fast as the slowest kind, so
its floor is that kind's: a small part of what so many NVLinks, or one lane of PCIe, carry by their standards.
"""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from services import nvidia
from services.devices import cores, driver_version, gpu_of, has_kernels, unusable_gpu
from services.limits import Found, Limit
from services.tables import human

PACKAGES = ("numpy", "safetensors", "datasets", "tqdm", "matplotlib")
GIB = 2**30
OLDEST = (2, 11)
COPIED = 2**28  # bytes
SWITCHED = 12  # NVLinks of a GPU to a switch, of 25 GB/s each way or more: A100 has 12, H100 18


class Finding(NamedTuple):
    """One line of the screen; `problem` and its `mend` are empty if all is well."""

    what: str
    found: str
    problem: str = ""
    mend: str = ""


def look_at_torch() -> Finding:
    """Python and PyTorch, and whether its build fits the machine."""
    seen = f"Python {platform.python_version()}, torch {torch.__version__}"
    if torch.version.cuda:
        seen += f", built for CUDA {torch.version.cuda}; NVIDIA driver {driver_version() or 'none'}"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if sys.version_info < (3, 10) or version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Finding("software", seen, f"Python 3.10 and torch {oldest} are needed", "pip install torch==2.13.0")
    problem, mend = unusable_gpu()
    if problem:
        return Finding("software", seen, problem, mend)
    if not torch.version.cuda and not torch.version.hip and shutil.which("nvidia-smi"):
        problem = "there is NVIDIA's driver, but this torch is built for CPUs alone"
        return Finding("software", seen, problem, "pip install torch==2.13.0, with the index that pytorch.org names")
    return Finding("software", seen)


def look_at_packages() -> Finding:
    """What training needs besides PyTorch."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    here = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if name not in missing)
    if missing:
        return Finding("packages", here, f"missing: {', '.join(missing)}", "pip install -r requirements.txt")
    return Finding("packages", here)


def look_at_backends() -> Finding:
    """What ranks can talk through."""
    known = dict(gloo=dist.is_gloo_available(), nccl=dist.is_nccl_available())
    seen = ", ".join(f"{name} {'yes' if here else 'no'}" for name, here in known.items())
    if torch.cuda.device_count() > 1 and not known["nccl"]:
        return Finding("backends", seen, "several GPUs, but no NCCL", "use --backend gloo, or a torch with NCCL")
    return Finding("backends", seen)


def look_at_host() -> Finding:
    """Cores, memory that is free now, and shared memory, through which NCCL's ranks exchange what no link carries."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), pages * size)
    seen, shared = f"{cores()} cores, memory {human(pages * size)}, free {human(free)}", Path("/dev/shm")
    if free < 4 * GIB:
        return Finding("host", seen, "eight ranks need about 4 GiB", "use fewer ranks: torchrun --nproc_per_node=2")
    if shared.exists():
        free = shutil.disk_usage(shared).free
        seen += f"; {shared} free {human(free)}"
        if free < GIB:
            return Finding("host", seen, "NCCL may need 1 GiB of it", "docker run --shm-size=8g, or --ipc=host")
    return Finding("host", seen)


def look_at_limits() -> Finding:
    """Files that a process may open: sockets between ranks, and mapped data, count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{soft} open files (at most {hard})"
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Finding("limits", seen, "1024 open files are needed", f"ulimit -n {min(65536, max(hard, 1024))}")
    return Finding("limits", seen)


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
    free = shutil.disk_usage(folder).free
    seen = f"{human(free)} free here"
    if not os.access(folder, os.W_OK):
        return Finding("disk", seen, "this folder cannot be written", "start runs with --out DIR in another folder")
    if free < GIB:
        return Finding("disk", seen, "checkpoints and data sets need about 1 GiB", "--out, HF_HOME on another disk")
    return Finding("disk", seen)


def copy_seconds(a: int, b: int, n_bytes: int) -> float:
    """The seconds of a copy from one GPU to another, the least of five."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device=f"cuda:{a}")
    target, times = torch.empty_like(source, device=f"cuda:{b}"), []
    for _ in range(5):
        for gpu in (a, b):
            torch.cuda.synchronize(gpu)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(b)
        times.append(time.perf_counter() - start)
    del source, target
    torch.cuda.empty_cache()  # runs that follow want all of it
    return min(times)


def look_at_gpus() -> list[Finding]:
    """A line for each GPU: its name and memory, and whether this PyTorch has kernels for it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [Finding("GPUs", "none: all steps run on the CPU, with gloo")]
    findings, built = [], torch.cuda.get_arch_list()
    for gpu in range(count):
        about, (major, minor) = torch.cuda.get_device_properties(gpu), torch.cuda.get_device_capability(gpu)
        finding = Finding(f"GPU {gpu}", f"{about.name}, {human(about.total_memory)}, architecture {major}.{minor}")
        if built and not has_kernels(built, (major, minor)):
            problem = f"torch {torch.__version__} is built for {', '.join(built)}"
            finding = finding._replace(problem=problem, mend="install a wheel for this GPU")
        findings.append(finding)
    return findings


def kind_of(link: str, direct: bool) -> str:
    """The kind of a link, of nvidia-smi's names: "NVLink" where there are as many as to a switch, else as they are."""
    if link.startswith("NV"):
        return "NVLink" if int(link[2:]) >= SWITCHED else link
    return (link or "unknown") + ", not direct" * (not direct)


def look_at_links() -> dict[str, Found]:
    """By kind of link, by two GPUs of this process: GB/s of a copy from one to the other."""
    gpus, names = range(torch.cuda.device_count() if torch.cuda.is_available() else 0), nvidia.links()
    speeds: dict[str, Found] = {}
    for a, b in ((a, b) for a in gpus for b in gpus if a != b):
        kind = kind_of(names.get((a, b), ""), torch.cuda.can_device_access_peer(a, b))
        speed = COPIED / copy_seconds(a, b, COPIED) / 1e9
        speeds.setdefault(kind, {})[f"GPU {a} to {b}"] = dict(copy=speed)
    return speeds


def link_limit(kind: str) -> Limit:
    """For the copies over one kind of link. Those through the host have none: what they reach is the host's."""
    if "not direct" in kind:  # slower, and nothing is wrong
        return Limit("no direct link: keep --tp and --ep at 1 between them", " GB/s")
    return Limit("a sick link", " GB/s", part=0.7)


def bus_limit(kinds: set[str], name: str) -> Limit:
    """For an all-reduce of the largest message over such links, between GPUs of this name: what each rank sends."""
    if not kinds:
        return Limit("ranks talk through the host", " GB/s", least=0.05)
    if any(kind.startswith("unknown") for kind in kinds):
        return Limit("nvidia-smi does not say over which links", " GB/s")
    large = bool(gpu_of(name))  # all their NVLinks together carry at least 300
    floors = [
        (150.0 if large or kind == "NVLink" else 6.0 * int(kind[2:])) if kind.startswith("NV") else 1.0
        for kind in kinds
    ]
    return Limit(f"over {' and '.join(sorted(kinds))}", " GB/s", least=min(floors))


def examine() -> list[Finding]:
    """Everything, in the order of the screen."""
    findings = [look_at_torch(), look_at_packages(), look_at_backends(), look_at_host()]
    return [*findings, look_at_limits(), look_at_names(), look_at_disk(), *look_at_gpus()]
