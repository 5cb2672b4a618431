"""What the certificate says of nodes that are not there: a healthy one, and others with one fault each.

    python -m tests.sick          the table: which fault, and what was said that is no pass; what is said twice, once

Replaced is what touches GPUs: CUDA's answers, the seconds of a copy, the texts of nvidia-smi and dmesg, and what each
rank of a probe or a run finds. All between is the certificate's own: who is asked, readers, kinds, limits, verdicts.
The numbers of healthy nodes are made up; they are no measurements.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from services import machine, nvidia
from services.certify import Certificate
from services.devices import known_peak
from services.expected import Expected, Launch, Range
from services.limits import FAIL, NOTE, OPEN, PASS, Found

GIB = 2**30
COUNTED = 33_666_651_012  # bytes: services.expected --line with the first of services.certify.speeds
PARTS = ("machine", "kernels", "speed")  # which look at GPUs
Change = Callable[[dict[str, float]], dict[str, float]]


@dataclass(frozen=True)
class Node:
    """GPUs of one kind, and what one of them, or a link, does otherwise."""

    gpus: int = 8
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * GIB
    architecture: tuple[int, int] = (9, 0)
    built: tuple[str, ...] = ("sm_75", "sm_80", "sm_90", "compute_90")
    link: str = "NV18"  # as nvidia-smi says it
    direct: bool = True
    copy: float = 380.0  # GB/s
    bus: float = 360.0
    tflops: float = 650.0
    mfu: float = 0.38
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)  # GB/s of some copies
    wrong: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)  # (probe, rank) -> its other numbers
    csv: dict[int, str] = field(default_factory=dict)  # what nvidia-smi says of some GPUs: clock, most, errors, reasons
    smi: bool = True  # whether it is there
    log: str = "[    0.000000] Linux version 6.8.0\n"  # dmesg

    def say(self, words: list[str], seconds: float = 30.0) -> str:
        """The commands of services/nvidia.py."""
        each = range(self.gpus)
        if words == nvidia.LOG:
            return self.log
        if not self.smi:
            return ""
        if words == nvidia.TOPOLOGY:
            cells = [[" X " if a == b else self.link for b in each] for a in each]
            rows = [f"GPU{a}\t" + "\t".join(row) + "\t0-51\t0\t\tN/A" for a, row in enumerate(cells)]
            return "\n".join(["\t" + "\t".join(f"GPU{a}" for a in each) + "\tCPU Affinity\tNUMA Affinity", *rows, ""])
        if words == nvidia.command(["index", "uuid"]):
            return "".join(f"{gpu}, GPU-{gpu:08x}\n" for gpu in each)
        if words == nvidia.command([*nvidia.CLOCKS, nvidia.REASONS[0]]):
            usual = "1755, 1980, 0, 0x0000000000000004"  # capped by its power, as it may be
            return "".join(f"GPU-{gpu:08x}, {self.csv.get(gpu, usual)}\n" for gpu in each)
        return ""

    def properties(self, gpu: int) -> Any:
        """Of torch.cuda."""
        return SimpleNamespace(name=self.name, total_memory=self.memory, uuid=f"{gpu:08x}")

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, this machine is that node."""
        answers = dict(
            is_available=lambda: True,
            device_count=lambda: self.gpus,
            get_arch_list=lambda: [*self.built],
            get_device_name=lambda gpu=0: self.name,
            get_device_capability=lambda gpu=0: self.architecture,
            get_device_properties=self.properties,
            can_device_access_peer=lambda a, b: self.direct,
        )
        with ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            seconds = lambda a, b, n_bytes: n_bytes / 1e9 / self.pairs.get((a, b), self.copy)  # noqa: E731
            stack.enter_context(mock.patch.object(machine, "copy_seconds", seconds))
            stack.enter_context(mock.patch.object(machine, "examine", machine.look_at_gpus))  # not this machine
            stack.enter_context(mock.patch.object(nvidia, "say", self.say))
            yield


class Stubbed(Certificate):
    """A certificate whose probes and runs are told by a node."""

    def __init__(self, node: Node, out: Path):
        self.node = node
        super().__init__(out, minutes=25.0, only=PARTS)

    def probe(self, ranks: int, name: str) -> Found:
        """As services/probes.py."""
        node, peak = self.node, known_peak(self.node.name)
        found: Found = {}
        for rank in range(ranks):
            own = {
                "exchange": {"wrong": 0.0, "us for 1 KiB": 30.0, "64 MiB": 0.8 * node.bus, "256 MiB": node.bus},
                "attention": dict(output=0.004, lse=1e-5, gradients=0.02),
                "grouped": dict(error=0.003, waits=0.0),
                "uneven": dict(wrong=0.0),
                "documents": {"new / known": 1.2, "with cuDNN": 15.0},
                "matmul": {"wrong": 0.0, "TFLOP/s": node.tflops},
            }[name]
            own = own | node.wrong.get((name, rank), {})
            if name == "matmul":
                own |= nvidia.clocks().get(f"{rank:08x}", {})
                own |= {"of peak": own["TFLOP/s"] / peak[0]} if peak else {}
            found[f"rank {rank}"] = own
        return found

    def counted(self, line: Launch) -> Expected:
        """What was counted for the line of one GPU; lines of eight are taken to be like it."""
        ranges = [Range(0.408, 0.907), Range(40131, 18059), Range(0.466, 0.210), Range(0.0, 0.0)]
        return Expected(*ranges, Range(COUNTED, 1.1 * COUNTED), by_host=False)

    def train(self, ranks: int, line: str) -> list[dict[str, Any]]:
        """Its rows of metrics."""
        return [dict(mfu=self.node.mfu, peak_memory_bytes=COUNTED)] * 7


H100 = Node()
CARDS = Node(2, "NVIDIA GeForce RTX 3090", 24 * GIB, (8, 6), link="NV4", copy=50.0, bus=40.0, tflops=62.0)
FAR = Node(
    *(4, "NVIDIA GeForce RTX 4090", 24 * GIB, (8, 9)), link="PHB", direct=False, copy=12.0, bus=6.0, tflops=150.0
)
FELL = "[ 91.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=711, GPU has fallen off the bus.\n"
FAULT = "[ 91.2] NVRM: Xid (PCI:0000:3b:00): 31, pid=711, name=python, Ch 00000008, MMU Fault\n"
HOT = "510, 1980, 0, 0x0000000000000048"  # MHz, of at most, uncorrected errors, slowed by hardware and by its heat
# fmt: off
FAULTS: dict[str, tuple[Node, dict[str, str]]] = {  # what is wrong -> the node; by line, all verdicts that are no pass
    "nothing: 8 x H100": (H100, {}),
    "a slow link": (replace(H100, pairs={(2, 5): 190.0}), {"links: NVLink": FAIL}),
    "all links slow": (replace(H100, copy=95.0, bus=90.0), {"all-reduce, 8 ranks": FAIL}),
    "NVLinks that are missing": (replace(H100, link="NV6", copy=125.0, bus=110.0), {"all-reduce, 8 ranks": FAIL}),
    "a slow rank 3": (replace(H100, wrong={("matmul", 3): {"TFLOP/s": 520.0}}), {"matmul": FAIL}),
    "all ranks slow": (replace(H100, tflops=300.0, mfu=0.2), {"matmul": FAIL, "1 x": FAIL, "8 x": FAIL}),
    "rank 5 adds wrong": (replace(H100, wrong={("exchange", 5): dict(wrong=64.0)}), {"all-reduce, 8 ranks": FAIL}),
    "rank 5 multiplies wrong": (replace(H100, wrong={("matmul", 5): dict(wrong=1.0)}), {"matmul": FAIL}),
    "rank 5 attends wrong": (replace(H100, wrong={("attention", 5): dict(gradients=0.3)}), {"attention": FAIL}),
    "rank 5 finds no number": (replace(H100, wrong={("grouped", 5): dict(error=float("nan"))}), {"grouped": FAIL}),
    "a GPU too hot": (replace(H100, csv={6: HOT}, wrong={("matmul", 6): {"TFLOP/s": 240.0}}), {"matmul": FAIL}),
    "ECC errors": (replace(H100, csv={1: "1755, 1980, 3, 0x0000000000000004"}), {"matmul": FAIL}),
    "an Xid of the hardware": (replace(H100, log=FELL), {"Xids": FAIL}),
    "an Xid of a program": (replace(H100, log=FAULT), {"Xids": NOTE}),
    "a wheel without sm_90": (replace(H100, built=("sm_75", "sm_80")), {f"GPU {n}": FAIL for n in range(8)}),
    "a low MFU": (replace(H100, mfu=0.2), {"1 x": FAIL, "8 x": FAIL}),
    "nothing, but no nvidia-smi and no dmesg": (replace(H100, smi=False, log=""),
                                                {"all-reduce, 8 ranks": NOTE, "Xids": OPEN}),
    "nothing: 2 x RTX 3090, 24 GB": (CARDS, {"1 x": OPEN}),
    "nothing: 4 x RTX 4090 without P2P": (FAR, {"links: PHB, not direct": NOTE, "1 x": OPEN}),
}
# fmt: on


def certificate(node: Node, out: Path) -> Certificate:
    """What the certificate finds on a node."""
    with node.here(), redirect_stdout(StringIO()):
        one = Stubbed(node, out)
        for part in PARTS:
            one.now = part
            getattr(one, part)()
        one.keep()
    return one


def main() -> int:
    """The command."""
    print("| fault put in | passed | what the certificate said of other lines |\n| --- | --- | --- |")
    for fault, (node, _) in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            lines = certificate(node, Path(folder)).lines
        odd = [line for line in lines if line.verdict != PASS]
        said = {
            line.found: f"**{line.verdict.strip()}** `{line.what.split(' --')[0]}`: {line.found}"
            for line in reversed(odd)
        }
        passed = f"{len(lines) - len(odd)} of {len(lines)}"
        print(f"| {fault} | {passed} | {'<br>'.join(reversed(said.values()))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
