"""The certificate: what it finds on a machine, how it judges, and all that a CPU can show."""

import importlib
import json
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common import comm
from common.model import PRESETS
from common.trainer import parse
from services import certify, devices, launch, machine, nvidia, probes
from services.certify import PARTS, Certificate
from services.limits import FAIL, NOTE, OPEN, PASS, Limit, NotCertified, judge
from services.machine import GIB
from services.seam import check, compose
from tests import equal, launches, sick
from tests.rows import ROWS, sized
from variants import cp_flash, grouped_matmul


def no_address(*_):
    """A host that nobody knows."""
    raise socket.gaierror(-2, "Name or service not known")


def usage(free: int):
    """What a disk with so many free bytes says."""
    return lambda _: SimpleNamespace(total=64 * GIB, free=free)


# fmt: off
DRIVER = [(module, "driver_version", lambda: "535.104.05") for module in (machine, devices)]
DRIVER += [(torch.version, "cuda", "13.0"), (torch.cuda, "is_available", lambda: False)]
PROBLEMS = {  # what is patched; who looks; what the screen then says
    "an old torch": ([(torch, "__version__", "2.9.1")], machine.look_at_torch, "torch 2.11 are needed"),
    "an old driver": ([*DRIVER, (Path, "glob", lambda *_: [Path("/dev/nvidia0")])], machine.look_at_torch,
                      "update the driver to 580 or newer, or install a torch wheel for an older CUDA"),
    "a CPU build": ([*((torch.version, kind, None) for kind in ("cuda", "hip")),
                     (shutil, "which", lambda _: "/bin/nvidia-smi")], machine.look_at_torch, "built for CPUs alone"),
    "a missing package": ([(importlib.util, "find_spec", lambda name: name != "tqdm" or None)],
                          machine.look_at_packages, "missing: tqdm"),
    "no nccl": ([(torch.cuda, "device_count", lambda: 2), (dist, "is_nccl_available", lambda: False)],
                machine.look_at_backends, "several GPUs, but no NCCL"),
    "little shared memory": ([(shutil, "disk_usage", usage(2**26))], machine.look_at_host, "--shm-size"),
    "few open files": ([(resource, "getrlimit", lambda _: (256, 4096))], machine.look_at_limits, "ulimit -n 4096"),
    "no address": ([(socket, "getaddrinfo", no_address)], machine.look_at_names, "/etc/hosts"),
    "a full disk": ([(shutil, "disk_usage", usage(2**20))], machine.look_at_disk, "HF_HOME on another disk"),
    "a folder of others": ([(os, "access", lambda *_: False)], machine.look_at_disk, "cannot be written"),
}
# fmt: on


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_has_its_mend(monkeypatch, name):
    """Before the patch there is none of it here."""
    patches, look, says = PROBLEMS[name]
    sound = look()
    with monkeypatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for where, what, value in patches:
            patch.setattr(where, what, value)
        found = look()
    assert found.problem and found.mend and says in f"{found.problem} {found.mend}" and found != sound


KERNEL_MODULES = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12": "535",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n": "580",
    "something else": "",
}


def test_the_driver_is_read_from_its_kernel_module(tmp_path):
    """Of both kinds of modules; "" if there is no such file."""
    for text, version in KERNEL_MODULES.items():
        (tmp_path / "version").write_text(text)
        assert devices.driver_version(tmp_path / "version").split(".")[0] == version
    assert devices.driver_version(tmp_path / "none") == ""


@pytest.mark.parametrize("fault", sick.FAULTS)
def test_a_sick_node_is_told_from_a_healthy_one(tmp_path, fault):
    """Each row of the table anew: the lines that are no pass are those that the fault is about, with their verdicts."""
    node, odd = sick.FAULTS[fault]
    lines = sick.certificate(node, tmp_path).lines
    assert len(lines) > 7 and odd.keys() == {key for key in odd for line in lines if line.what.startswith(key)}
    for line in lines:
        expected = next((verdict for key, verdict in odd.items() if line.what.startswith(key)), PASS)
        assert line.verdict == expected, line
    rows = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert [row["verdict"] for row in rows] == [line.verdict for line in lines]


def test_a_failure_names_its_place():
    """The rank, the pair of GPUs, or the GPU's address; and how far it is from which limit."""
    says = {
        "a slow link": "GPU 2 to 5: copy 190 GB/s (at least 266",
        "a slow rank 3": "rank 3: TFLOP/s 520 (at least 585",
        "rank 5 adds wrong": "rank 5: wrong 64 (at most 0",
        "a GPU too hot": "rank 6: hardware thermal slowdown 1 (at most 0",
        "ECC errors": "rank 1: uncorrected ECC errors 3 (at most 0",
        "an Xid of the hardware": "0000:3b:00: Xid 79 1 times (at most 0",
        "a wheel without sm_90": "is built for sm_75, sm_80: install a wheel for this GPU",
    }
    for fault, text in says.items():
        with tempfile.TemporaryDirectory() as folder:
            said = [line.found for line in sick.certificate(sick.FAULTS[fault][0], Path(folder)).lines]
        assert any(text in found for found in said), said


RANKS = {f"rank {n}": dict(speed=10.0 + n, wrong=0.0) for n in range(8)}
JUDGED = [  # limits of (speed, wrong); what rank 5 has found instead; the verdict, and what is said
    (Limit(least=10), {}, PASS, "speed 10 - 17 (at least 10)"),
    (Limit(least=10), dict(speed=9.9), FAIL, "rank 5: speed 9.9 (at least 10)"),
    (Limit("slow", " GB/s", part=0.7), dict(speed=9.6), PASS, "speed 9.6 - 17 GB/s (at least 8.75)"),
    (Limit("slow", " GB/s", part=0.8), dict(speed=9.6), FAIL, "rank 5: speed 9.6 GB/s (at least 10: slow)"),
    (Limit(most=20), dict(speed=float("nan")), FAIL, "rank 5: speed nan"),
    (Limit(least=1, part=0.5), dict(speed=float("nan")), FAIL, "rank 5: speed nan"),
    (Limit(most=20), dict(speed=float("inf")), FAIL, "rank 5: speed inf"),
    (Limit("who knows"), {}, NOTE, "speed 10 - 17 (who knows); wrong 0 (at most 0)"),
    (Limit("who knows"), dict(wrong=1.0), FAIL, "rank 5: wrong 1 (at most 0)"),
    (Limit(least=16), {}, FAIL, "rank 3: speed 13, 2 more (at least 16)"),
]


@pytest.mark.parametrize("limit, other, verdict, says", JUDGED)
def test_a_measurement_is_judged_on_every_rank(limit, other, verdict, says):
    """By its limits alone; all ranks but one are always the same."""
    found = RANKS | {"rank 5": RANKS["rank 5"] | other}
    judged, text = judge(found, dict(speed=limit, wrong=Limit(most=0), nowhere=Limit(least=1)))
    assert judged == verdict and says in text and "nowhere" not in text


def test_what_one_rank_lacks_it_fails():
    """What none has, nobody is judged by; where nothing was measured, nothing is certified."""
    assert judge(RANKS | {"rank 5": dict(wrong=0.0)}, dict(speed=Limit(least=1)))[0] == FAIL
    assert judge(RANKS, dict(nowhere=Limit(least=1))) == judge({}, {}) == (OPEN, "nothing was measured")
    assert judge({"": dict(speed=1.0)}, dict(speed=Limit(part=0.9)))[0] == NOTE  # it is its own median


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tSYS\t X

Legend:

  X    = Self
"""


def test_texts_of_nvidia_programs(monkeypatch):
    """As nvidia-smi and the driver write them; without them there is nothing."""
    assert nvidia.read_topology(TOPOLOGY) == {(0, 1): "NV12", (1, 0): "NV12"}
    seen = nvidia.read_clocks("GPU-a, 990, 1980, 2, 0x00000000000000A4\nGPU-b, [N/A], 1980, [N/A], [N/A]\nWARNING\n")
    slowed = {"software thermal slowdown", "power brake"}
    reasons = {reason: float(reason in slowed) for reason in nvidia.SLOWED.values()}
    assert seen == {"a": {"SM clock": 0.5, "uncorrected ECC errors": 2.0} | reasons, "b": {}}
    log = "[1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n[2] usb 1\n[3] NVRM: Xid (PCI:0000:3b:00): 79, pid=1"
    assert nvidia.read_log(log) == {"0000:3b:00": {79: 2}}
    assert nvidia.say(["no-such-program"]) == nvidia.say(["false"]) == "" and nvidia.say(["echo", "a"]) == "a\n"
    asked = []
    monkeypatch.setattr(nvidia, "say", lambda words: asked.append(words[1]) or "")
    assert nvidia.clocks() == {} and [word.split(",")[-1] for word in asked] == nvidia.REASONS  # the older name, too


def test_a_gpu_goes_by_its_own_number(monkeypatch):
    """PyTorch may count the GPUs in another order than nvidia-smi, or see some alone."""
    texts = dict(index="0, GPU-x\n1, GPU-y\n", topo=TOPOLOGY)
    monkeypatch.setattr(nvidia, "say", lambda words: texts["topo" if "topo" in words else "index"])
    for uuids, links in (("yx", {(0, 1): "NV12", (1, 0): "NV12"}), ("y", {}), ("zx", {})):
        monkeypatch.setattr(torch.cuda, "device_count", lambda uuids=uuids: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n, uuids=uuids: SimpleNamespace(uuid=uuids[n]))
        assert nvidia.links() == links


@pytest.mark.parametrize(
    "links, name, least",
    [
        ({"NVLink"}, "NVIDIA H100 80GB HBM3", 150.0),
        ({"NV4"}, "NVIDIA A100-SXM4-40GB", 150.0),  # four GPUs, with four links to each other one
        ({"NV4"}, "NVIDIA GeForce RTX 3090", 24.0),
        ({"NV1", "NV2", "SYS, not direct"}, "Tesla V100-SXM2-32GB", 1.0),
        ({"PHB"}, "NVIDIA H100 PCIe", 1.0),
        ({"unknown"}, "NVIDIA H100 80GB HBM3", None),
        ({"NVLink", "unknown, not direct"}, "NVIDIA H100 80GB HBM3", None),
        (set(), "", 0.05),
    ],
)
def test_an_all_reduce_is_as_fast_as_its_slowest_link(links, name, least):
    """By the kinds of links, and by GPUs that are known; where the kind is not, there is no limit."""
    assert machine.bus_limit(links, name).least == least


class Told(Certificate):
    """One whose runs are told, not started: `losses` by launch line."""

    def __init__(self, out: Path, losses: dict, minutes: float = 10.0):
        self.losses = losses
        super().__init__(out, minutes)

    def train(self, ranks, line):
        """As asked."""
        if self.left() < 0:
            raise self.over()
        if line not in self.losses:
            raise RuntimeError("exit status 2: error: no such step")
        return [dict(loss=self.losses[line], grad_norm=1.0)]


ONE = certify.Trial("equality", "2 x zero 3", 2, "step03_zero.py --zero 3", "step01.py", ["loss", "grad_norm"], 1e-9)


@pytest.mark.parametrize(
    "loss, verdict, says",
    [(3.0, PASS, "apart 0 (at most 1e-09)"), (3.1, FAIL, "apart 0.0333 (at most 1e-09)"), (None, FAIL, "no such step")],
)
def test_a_layout_is_held_beside_another_run(tmp_path, loss, verdict, says):
    """Equal is a pass, unequal or an error a failure; both are in the files. Rows of another part are left."""
    one = Told(tmp_path, {ONE.beside: 3.0} | ({ONE.line: loss} if loss else {}))
    one.beside("equality", [ONE, ONE._replace(part="precision")])
    one.keep()
    (row,) = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert row["verdict"] == verdict and says in row["found"]
    text = (tmp_path / "certificate.txt").read_text()
    assert f"{verdict}  equality   2 x zero 3\n" in text and says in text


def test_what_does_not_begin_in_time_is_not_certified(tmp_path):
    """It is no failure, and no pass."""
    one = Told(tmp_path, {}, minutes=-1.0)
    one.beside("equality", [ONE])
    assert one.lines[0].verdict == OPEN and "0 passed, 0 failed, 0 notes, 1 not certified" in one.text()


def test_each_part_has_its_share_of_the_time(tmp_path, monkeypatch):
    """And what those before it have left; together they have all of it, which is 25 minutes. No share hides a hang."""
    assert sum(PARTS.values()) == 25 and PARTS.keys() == certify.LONGEST.keys()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    one, until = Certificate(tmp_path, 25.0), 0.0
    one.began = time.monotonic()
    for one.now, share in PARTS.items():
        until += 60 * share
        assert one.left() == pytest.approx(until, abs=5)
        assert certify.LONGEST[one.now] <= until
    one.began -= 24.9 * 60  # no job begins that could not end
    with pytest.raises(NotCertified, match=r"25 minutes those for recovery are over"):
        one.start(0, "-c pass")


def test_each_run_has_the_backend_for_its_ranks(tmp_path, monkeypatch):
    """Two GPUs, as many ranks or more; without GPUs gloo. A run that has another one is shown."""
    monkeypatch.setattr(Certificate, "rows", lambda *_: None)
    two, four = "device: 2 ranks on 2 x GPU; backend nccl", "device: 4 ranks on 2 x GPU; backend staged"
    cases = [(2, [two, four], PASS), (2, [two, two.replace("nccl", "gloo")], FAIL), (0, [two], FAIL), (0, [], OPEN)]
    cases += [(0, ["device: 1 rank on cpu; no backend", "device: 2 ranks on cpu; backend gloo"], PASS)]
    for gpus, lines, verdict in cases:
        one = Certificate(tmp_path, 5.0)
        one.gpus, one.devices = gpus, lines
        one.equality()
        assert one.lines[0].verdict == verdict, (gpus, lines)
        assert verdict != FAIL or one.lines[0].found == lines[-1].removeprefix("device: ")


SLEEPERS = "import subprocess, time; subprocess.Popen(['sleep', '999'], start_new_session=True); time.sleep(999)"


def within_a_minute(what: Callable[[], Any]) -> Any:
    """What it returns as soon as that is true."""
    deadline = time.monotonic() + 60
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("longest, verdict, says", [(0.1, FAIL, "it did not end in 0.1 s"), (600.0, OPEN, "are over")])
def test_a_job_without_end(tmp_path, monkeypatch, longest, verdict, says):
    """It fails if it hangs, and is not certified if the time is over; all its processes end, in any session."""
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    monkeypatch.setitem(certify.LONGEST, "recovery", longest)
    one = Certificate(tmp_path / "out", minutes=10.0)
    job, log = one.start(0, str(tmp_path / "sleepers.py"))
    (sleeper,) = within_a_minute(lambda: launch.descendants(job.pid))
    one.minutes = 10.0 if verdict == FAIL else 0.0
    one.attempt("recovery", "a job", lambda: one.until(lambda: False, job, log))
    assert one.lines[0].verdict == verdict and says in one.lines[0].found
    assert within_a_minute(lambda: not Path(f"/proc/{sleeper}/exe").exists())


def config_of(line: str) -> Any:
    """What a launch line asks for."""
    script, *words = line.split()
    return parse(compose(importlib.import_module(script.removesuffix(".py"))), words)


def test_a_launch_line_says_what_its_row_is():
    """It trains the same model under the same flags as the row does in the tests."""
    other = {"model", "device", "out", "eval_every", "save_every", *equal.SHAPE}
    for does, (_, flags, *_) in launches.PARTS.items():
        for row in (sized(row) for row in ROWS if does in row.does + row.swept):
            ours = config_of(launches.trial(row, does).line)
            theirs = equal.config_of(row.step, row.base | row.layout | flags)
            for name in vars(theirs).keys() - other:
                assert getattr(ours, name) == getattr(theirs, name), (row, name)
            check(ours, row.ranks)
            assert PRESETS[ours.model] == PRESETS[theirs.model], row


@pytest.mark.parametrize("gpus", [0, 8, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 4))])
def test_rows_fit_the_gpus(gpus):
    """Every launch line is legal with its ranks: as many as GPUs, or they share them. Each part has some."""
    for one in (found := launches.trials(gpus)):
        assert one.ranks == (gpus or 2) or gpus == 1 or "README" in one.what, one
        check(config_of(one.line), one.ranks)
        check(config_of(one.beside), 1)
    assert {one.part for one in found} == {"equality", "precision"}
    assert [one.what for one in found if one.what == "README's first command"] == ["README's first command"] * (
        gpus > 0
    )
    assert any("--compile" in one.line.split() for one in found) == (gpus > 0)
    assert {line.step[:6] for line in certify.speeds(8)} == {f"step0{n}" for n in range(1, 6)}


@pytest.mark.parametrize("owner, name", [(os, "listdir"), (Path, "read_text")])
def test_who_ends_while_it_is_looked_at_has_no_children(monkeypatch, owner, name):
    """Its folder is gone before its threads are listed, or before one of them is asked."""
    monkeypatch.setattr(owner, name, mock.Mock(side_effect=FileNotFoundError))
    assert launch.children(os.getpid()) == []


def test_kernels_agree_with_their_formulas():
    """On the CPU; and the probe sees a kernel that does not."""
    torch.manual_seed(0)
    found = probes.attention()
    assert max(found["output"], found["gradients"]) < 0.06 and found["lse"] < 1e-3
    assert probes.grouped()["error"] < 0.03


def test_a_wrong_kernel_is_seen(monkeypatch):
    """Gradients without the output's part of them; an expert whose rows are another one's."""
    right = cp_flash.flash_gradients
    monkeypatch.setattr(cp_flash, "flash_gradients", lambda do, q, k, v, o, *more: right(do, q, k, v, 0 * o, *more))
    assert probes.attention()["gradients"] > 0.06
    product = grouped_matmul.GroupedLinear.apply
    moved = SimpleNamespace(apply=lambda rows, weight, counts: product(rows, weight, [24, *counts[1:3], 48]))
    monkeypatch.setattr(grouped_matmul, "GroupedLinear", moved)
    assert probes.grouped()["error"] > 0.03


def exchange_on_rank(sick: int) -> list[dict]:
    """Runs on every rank. On one of them a bit of each sum is wrong."""
    right = comm.all_reduce

    def wrong(message: torch.Tensor, group: comm.Group) -> comm.Pending:
        pending = right(message, group)
        pending.wait()
        message[-1] += 1
        return pending

    with mock.patch.object(comm, "all_reduce", wrong if dist.get_rank() == sick else right):
        return [probes.uneven(), probes.exchange(), probes.matmul(n=64, warm=0.0)]


def test_ranks_exchange(pools):
    """Uneven messages arrive, and each size has its speed; what one rank alone finds wrong is its own answer."""
    for rank, (uneven, sums, products) in enumerate(pools(2).run(exchange_on_rank, 1)):
        assert uneven == dict(wrong=0.0) and products["wrong"] == 0 < products["TFLOP/s"]
        assert [*sums] == ["wrong", "us for 1 KiB", "1 MiB", "64 MiB"] and (sums["wrong"] > 0) == (rank == 1)
        assert min(speed for name, speed in sums.items() if name != "wrong") > 0


@pytest.mark.exhaustive
def test_the_certificate_of_a_cpu(tmp_path, capsys):
    """All that it can show is passed, and it says what it cannot. (Minutes: this machine may do more.)"""
    status = certify.main(["--out", str(tmp_path), "--minutes", "10"])
    said = capsys.readouterr().out
    rows = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert said.startswith("no GPU here") and {row["part"] for row in rows} == {*PARTS}
    assert {row["part"] for row in rows if row["verdict"] == OPEN} == {"speed"}, said
    assert status == 0, said
