"""The certificate: what it finds on a machine, how it judges, and all that a CPU can show."""

import importlib.util
import json
import os
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from services import certify, devices, machine, probes
from services.certify import PARTS, Certificate
from services.machine import GIB
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
        assert f"NVIDIA H100, 80.00 GiB; to {other}: 50 GB/s" in finding.found
        assert bool(finding.problem) == bool(finding.mend) == (not peers)


class Told(Certificate):
    """One whose runs are told, not started: `losses` by (ranks, step)."""

    def __init__(self, out: Path, losses: dict, minutes: float = 10.0):
        self.losses = losses
        super().__init__(out, minutes)

    def train(self, ranks, step, flags):
        """As asked."""
        if self.left() < 0:
            raise TimeoutError
        if (ranks, step) not in self.losses:
            raise RuntimeError("exit status 2: error: no such step")
        return [dict(loss=self.losses[ranks, step], grad_norm=1.0)]


ONE = certify.Trial(2, "step03_zero", "--zero 3", "step01_single_gpu", 1e-9)


@pytest.mark.parametrize(
    "loss, passed, says",
    [(3.0, True, "0.0e+00 (below 1e-09)"), (3.1, False, "3.3e-02 (below 1e-09)"), (None, False, "no such step")],
)
def test_a_layout_is_held_beside_another_run(tmp_path, loss, passed, says):
    """Equal is a pass, unequal or an error a failure; both are in the files."""
    losses = {(0, "step01_single_gpu"): 3.0} | ({(2, "step03_zero"): loss} if loss else {})
    one = Told(tmp_path, losses)
    one.beside("equality", [ONE], "fp64")
    one.keep()
    (row,) = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert row["passed"] is passed and says in row["found"]
    text = (tmp_path / "certificate.txt").read_text()
    assert f"{'pass' if passed else 'FAIL'}  equality   2 x step03_zero --zero 3\n" in text and says in text


def test_what_does_not_begin_in_time_is_not_certified(tmp_path):
    """It is no failure, and no pass."""
    one = Told(tmp_path, {}, minutes=-1.0)
    one.beside("equality", [ONE], "fp64")
    assert one.rows[0].passed is None and "0 passed, 0 failed, 1 not certified" in one.text()


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_layouts_fit_the_gpus(gpus):
    """Each run's ranks are a multiple of its cuts, and so many GPUs are there, or they share one."""
    for one in (*certify.equality(gpus), *certify.precision(gpus)):
        words = one.flags.split()
        cuts = [int(words[i + 1]) for i, word in enumerate(words) if word in ("--pp", "--cp", "--tp")]
        assert one.ranks % torch.tensor(cuts or [1]).prod() == 0, one
        assert gpus < 4 or one.ranks in (1, gpus), one
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
    """Uneven messages arrive, and each size has its seconds."""
    for uneven, seconds in pools(2).run(exchange_on_rank):
        assert uneven == dict(wrong=0.0)
        assert list(seconds) == ["1024", "16384", "262144", "4194304", "67108864"] and min(seconds.values()) > 0


@pytest.mark.exhaustive
def test_the_certificate_of_a_cpu(tmp_path, capsys):
    """All that it can show is passed, and it says what it cannot. (Minutes: this machine may do more.)"""
    status = certify.main(["--out", str(tmp_path), "--minutes", "5"])
    said = capsys.readouterr().out
    rows = json.loads((tmp_path / "certificate.json").read_text())["rows"]
    assert said.startswith("no GPU here") and {row["part"] for row in rows} == {*PARTS}
    assert {row["part"] for row in rows if row["passed"] is None} == {"speed"}, said
    assert status == 0, said
