"""What NVIDIA's own programs say of the GPUs: nvidia-smi, and the driver's lines in the kernel's log.

Each reading is a command and a function from its text, so a test needs no GPU. Where a command is missing, or fails, as
in a container or without its rights, there is no text, and so no reading.
"""

import csv
import re
import subprocess
from collections import Counter

import torch

CLOCKS = ["uuid", "clocks.sm", "clocks.max.sm", "ecc.errors.uncorrected.volatile.total"]
REASONS = ["clocks_event_reasons.active", "clocks_throttle_reasons.active"]  # the second until driver 535
SLOWED = {  # bits of a reason: what holds clocks down. Others, as a power cap, healthy GPUs have under load, too (NVML)
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
OF_PROGRAMS = {13, 31, 43, 45}  # Xids that a mistake of the program may bring, too (NVIDIA, Xid Errors)
XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+)")
TOPOLOGY, LOG = ["nvidia-smi", "topo", "-m"], ["dmesg"]


def command(fields: list[str]) -> list[str]:
    """nvidia-smi, asked for these fields of all GPUs."""
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def say(words: list[str], seconds: float = 30.0) -> str:
    """What a command prints; "" if it is missing, fails or hangs."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def cells(text: str, count: int) -> list[list[str]]:
    """The rows of a CSV that have so many cells: not the warnings among them."""
    return [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == count]


def own(uuid: str) -> str:
    """As PyTorch says it: without nvidia-smi's "GPU-"."""
    return uuid.strip().removeprefix("GPU-")


def read_clocks(text: str) -> dict[str, dict[str, float]]:
    """The text of CLOCKS and one of REASONS -> by a GPU's uuid, its numbers; what it does not count is left out."""
    by_gpu = {}
    for uuid, clock, most, errors, reasons in cells(text, len(CLOCKS) + 1):
        numbers = {}
        if clock.isdigit() and most.isdigit() and int(most):
            numbers["SM clock"] = int(clock) / int(most)
        if errors.isdigit():  # "[N/A]" on GPUs without
            numbers["uncorrected ECC errors"] = float(errors)
        if reasons.startswith("0x"):
            numbers |= {name: float(bool(int(reasons, 16) & bit)) for bit, name in SLOWED.items()}
        by_gpu[own(uuid)] = numbers
    return by_gpu


def clocks() -> dict[str, dict[str, float]]:
    """By a GPU's uuid, what nvidia-smi says of it now; {} if it says nothing."""
    asked = (say(command([*CLOCKS, reasons])) for reasons in REASONS)
    return read_clocks(next(filter(None, asked), ""))


def read_topology(text: str) -> dict[tuple[int, int], str]:
    """The text of `nvidia-smi topo -m` -> by two of its GPUs, their link: "NV18" (NVLinks), "PIX", ..., "SYS"."""
    lines = [line.split() for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    rows = {int(line[0][3:]): line[1:] for line in lines if line and re.fullmatch(r"GPU\d+", line[0])}
    rows = {gpu: row for gpu, row in rows.items() if "X" in row}  # not the line above them
    order = sorted(rows)
    return {(a, b): rows[a][place] for a in order for place, b in enumerate(order) if a != b}


def read_log(text: str) -> dict[str, Counter]:
    """Lines of the kernel's log -> by a GPU's bus address, how often it had which Xid."""
    by_gpu: dict[str, Counter] = {}
    for address, xid in XID.findall(text):
        by_gpu.setdefault(address, Counter())[int(xid)] += 1
    return by_gpu


def links() -> dict[tuple[int, int], str]:
    """By two GPUs, as PyTorch counts them, their link; {} if nvidia-smi does not say."""
    number = {own(uuid): int(index) for index, uuid in cells(say(command(["index", "uuid"])), 2)}
    topology = read_topology(say(TOPOLOGY)) if number else {}
    ours = {
        gpu: number.get(str(torch.cuda.get_device_properties(gpu).uuid)) for gpu in range(torch.cuda.device_count())
    }
    pairs = {(a, b): topology.get((ours[a], ours[b])) for a in ours for b in ours if a != b}
    return {pair: link for pair, link in pairs.items() if link}
