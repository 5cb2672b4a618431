"""The certificate: what it finds on a machine, how it judges, and all that a CPU can show."""

import importlib
import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.model import PRESETS
from common.trainer import parse
from services import certify, devices, launch, machine, probes
from services.certify import PARTS, Certificate
from services.machine import GIB
from services.seam import check, compose
from tests import equal, launches
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


@pytest.mark.parametrize("peers", [True, False])
def test_gpus_and_their_links(monkeypatch, peers):
    """Each GPU's memory, and the speed of a copy to each other; without a direct link, what not to cut over it."""
    about = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    with monkeypatch.context() as patch:
        for name, value in dict(is_available=lambda: True, device_count=lambda: 2).items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: about)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
        patch.setattr(machine, "copy_seconds", lambda a, b, n_bytes: n_bytes / 50e9)
        found = machine.look_at_gpus()
    assert [finding.what for finding in found] == ["GPU 0", "GPU 1"]
    for finding, other in zip(found, (1, 0), strict=True):
        assert f"NVIDIA H100, 80.00 GiB; to {other}: 50 GB/s" in finding.found and not finding.problem
        assert (f"no direct link to GPU {other}: keep --tp" in finding.found) == (not peers)


class Told(Certificate):
    """One whose runs are told, not started: `losses` by launch line."""

    def __init__(self, out: Path, losses: dict, minutes: float = 10.0):
        self.losses = losses
        super().__init__(out, minutes)

    def train(self, ranks, line):
        """As asked."""
        if self.left() < 0:
            raise TimeoutError
        if line not in self.losses:
            raise RuntimeError("exit status 2: error: no such step")
        return [dict(loss=self.losses[line], grad_norm=1.0)]


ONE = certify.Trial("equality", "2 x zero 3", 2, "step03_zero.py --zero 3", "step01.py", ["loss", "grad_norm"], 1e-9)


@pytest.mark.parametrize(
    "loss, passed, says",
    [(3.0, True, "0.0e+00 (below 1.0e-09)"), (3.1, False, "3.3e-02 (below 1.0e-09)"), (None, False, "no such step")],
)
def test_a_layout_is_held_beside_another_run(tmp_path, loss, passed, says):
    """Equal is a pass, unequal or an error a failure; both are in the files. Rows of another part are left."""
    one = Told(tmp_path, {ONE.beside: 3.0} | ({ONE.line: loss} if loss else {}))
    one.beside("equality", [ONE, ONE._replace(part="precision")])
    one.keep()
    (row,) = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert row["passed"] is passed and says in row["found"]
    text = (tmp_path / "certificate.txt").read_text()
    assert f"{'pass' if passed else 'FAIL'}  equality   2 x zero 3\n" in text and says in text


def test_what_does_not_begin_in_time_is_not_certified(tmp_path):
    """It is no failure, and no pass."""
    one = Told(tmp_path, {}, minutes=-1.0)
    one.beside("equality", [ONE])
    assert one.lines[0].passed is None and "0 passed, 0 failed, 1 not certified" in one.text()


SLEEPERS = "import subprocess, time; subprocess.Popen(['sleep', '999'], start_new_session=True); time.sleep(999)"


def within_a_minute(what: Callable[[], Any]) -> Any:
    """What it returns as soon as that is true."""
    deadline = time.monotonic() + 60
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("longest, passed, says", [(0.1, False, "it did not end in 0.1 s"), (600.0, None, "are over")])
def test_a_job_without_end(tmp_path, monkeypatch, longest, passed, says):
    """It fails if it hangs, and is not certified if the time is over; all its processes end, in any session."""
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    monkeypatch.setattr(certify, "LONGEST", longest)
    monkeypatch.setattr(certify, "LEAST", 0.2)
    one = Certificate(tmp_path / "out", minutes=10.0)
    job, log = one.start(0, str(tmp_path / "sleepers.py"))
    (sleeper,) = within_a_minute(lambda: launch.descendants(job.pid))
    one.minutes = 0.0
    one.attempt("equality", "a job", lambda: one.until(lambda: False, job, log))
    assert one.lines[0].passed is passed and says in one.lines[0].found
    assert within_a_minute(lambda: not Path(f"/proc/{sleeper}/exe").exists())


def config_of(line: str) -> Any:
    """What a launch line asks for."""
    script, *words = line.split()
    return parse(compose(importlib.import_module(script.removesuffix(".py"))), words)


def test_a_launch_line_says_what_its_row_is():
    """It trains the same model under the same flags as the row does in the tests."""
    other = {"model", "device", "out", "eval_every", "save_every", *equal.SHAPE}
    for does, (_, flags, *_) in launches.PARTS.items():
        for row in (sized(row) for row in ROWS if does in row.does):
            ours = config_of(launches.trial(row, does).line)
            theirs = equal.config_of(row.step, row.base | row.layout | flags)
            for name in vars(theirs).keys() - other:
                assert getattr(ours, name) == getattr(theirs, name), (row, name)
            check(ours, row.ranks)
            assert PRESETS[ours.model] == PRESETS[theirs.model], row


@pytest.mark.parametrize("gpus", [0, 1, 4, 8])
def test_rows_fit_the_gpus(gpus):
    """Every launch line is legal with its ranks: as many as GPUs, or they share them. Each part has some."""
    for one in (found := launches.trials(gpus)):
        assert one.ranks == (gpus or 2) or gpus == 1, one
        check(config_of(one.line), one.ranks)
        check(config_of(one.beside), 1)
    assert {one.part for one in found} == {"equality", "precision"}
    assert {row[1] for row in certify.speeds(8)} == {"step01_single_gpu", "step03_zero", "step05_cp_ring"}


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


def exchange_on_rank() -> list[dict]:
    """Runs on every rank."""
    return [probes.uneven(), probes.exchange()]


def test_ranks_exchange(pools):
    """Uneven messages arrive, and each size has its seconds; what one rank alone finds wrong is the answer."""
    assert probes.worst([dict(wrong=0.0, seconds=2.0), dict(wrong=3.0, seconds=1.0)]) == dict(wrong=3.0, seconds=2.0)
    for uneven, seconds in pools(2).run(exchange_on_rank):
        assert uneven == dict(wrong=0.0)
        assert list(seconds) == ["1024", "16384", "262144", "4194304", "67108864"] and min(seconds.values()) > 0


@pytest.mark.exhaustive
def test_the_certificate_of_a_cpu(tmp_path, capsys):
    """All that it can show is passed, and it says what it cannot. (Minutes: this machine may do more.)"""
    status = certify.main(["--out", str(tmp_path), "--minutes", "10"])
    said = capsys.readouterr().out
    rows = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert said.startswith("no GPU here") and {row["part"] for row in rows} == {*PARTS}
    assert {row["part"] for row in rows if row["passed"] is None} == {"speed"}, said
    assert status == 0, said
