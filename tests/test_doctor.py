"""The doctor: one screen that says what is here, what is wrong and its mend; two ranks that add up."""

import importlib.util
import os
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common import UserError
from services import devices, doctor
from services.doctor import GIB, SIZES, Exchange, Finding
from tests.pool import forkserver


@pytest.mark.parametrize("how", ["forkserver", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_the_screen_and_the_picture(tmp_path, capsys, monkeypatch, how):
    """The command: at most 40 lines of 120 letters, a row for each message size, status 1 if there is a problem."""
    if how == "forkserver":
        monkeypatch.setattr(torch.multiprocessing, "get_context", lambda _: forkserver())
    status = doctor.main(["--picture", str(tmp_path / "doctor.png")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for word in (torch.__version__, "gloo yes", "open files", "/dev/shm", "GPU", "two ranks", "64.00 MiB"):
        assert word in text, word
    assert ("0 problems" in text) == (status == 0)
    assert (tmp_path / "doctor.png").stat().st_size > 10_000
    start = next(number for number, line in enumerate(lines) if line.startswith("all-reduce  "))
    rows = [line.split() for line in lines[start + 2 : start + 2 + len(SIZES)]]
    microseconds, speeds = ([float(row[column]) for row in rows] for column in (2, 3))
    assert min(microseconds) > 0 and max(speeds) > 0  # no more: how fast a busy machine is, is not the test's matter
    for row, size, us, speed in zip(rows, SIZES, microseconds, speeds, strict=True):
        assert row[:2] == doctor.human(size).split() and speed == pytest.approx(size / us / 1e3, abs=1e-3 + speed / 50)


def test_ranks_that_do_not_meet_are_a_problem(monkeypatch):
    """The two are ended, and the line has a mend."""
    context, started = forkserver(), []
    start = context.Process.start
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(context.Process, "start", lambda self: started.append(start(self)))
    rows, finding = doctor.exchange(seconds=0.0)
    assert len(started) == 2
    assert rows == [] and "they did not meet within 0 s" in finding.problem and "GLOO_SOCKET_IFNAME" in finding.mend


def no_address(*_):
    """A host that nobody knows."""
    raise socket.gaierror(-2, "Name or service not known")


def usage(free: int):
    """What a disk with so many free bytes says."""
    return lambda _: SimpleNamespace(total=64 * GIB, free=free)


def gpus(patch: pytest.MonkeyPatch, peers: bool):
    """Two GPUs, with a link or without."""
    about = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB)
    for name, value in dict(is_available=lambda: True, device_count=lambda: 2).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
    patch.setattr(doctor, "copy_seconds", lambda a, b, n_bytes: n_bytes / 50e9)


real_spec = importlib.util.find_spec
PROBLEMS = {  # what is patched; who looks; what the screen then says
    "an old torch": ([(torch, "__version__", "2.9.1")], doctor.look_at_torch, "torch 2.11 are needed"),
    "no driver": (
        [(torch.version, "cuda", "12.8"), (torch.cuda, "is_available", lambda: False)],
        doctor.look_at_torch,
        "built for CUDA 12.8 but sees no GPU",
    ),
    "an old driver": (
        [
            (torch.version, "cuda", "13.0"),
            (torch.cuda, "is_available", lambda: False),
            (doctor, "driver_version", lambda: "535.104.05"),
            (devices, "driver_version", lambda: "535.104.05"),
            (Path, "glob", lambda *_: [Path("/dev/nvidia0")]),
        ],
        doctor.look_at_torch,
        "(driver 535.104.05) update the driver to 580 or newer, or install a torch wheel for an older CUDA",
    ),
    "a CPU build": (
        [(torch.version, "cuda", None), (torch.version, "hip", None), (shutil, "which", lambda _: "/bin/nvidia-smi")],
        doctor.look_at_torch,
        "built for CPUs alone",
    ),
    "a missing package": (
        [(importlib.util, "find_spec", lambda name: None if name == "tqdm" else real_spec(name))],
        doctor.look_at_packages,
        "missing: tqdm",
    ),
    "no gloo": ([(dist, "is_gloo_available", lambda: False)], doctor.look_at_backends, "gloo is missing"),
    "no nccl": (
        [(torch.cuda, "device_count", lambda: 2), (dist, "is_nccl_available", lambda: False)],
        doctor.look_at_backends,
        "several GPUs, but no NCCL",
    ),
    "little shared memory": ([(shutil, "disk_usage", usage(2**26))], doctor.look_at_shared_memory, "--shm-size"),
    "few open files": ([(resource, "getrlimit", lambda _: (256, 4096))], doctor.look_at_limits, "ulimit -n 4096"),
    "no address": ([(socket, "getaddrinfo", no_address)], doctor.look_at_names, "/etc/hosts"),
    "a full disk": ([(shutil, "disk_usage", usage(2**20))], doctor.look_at_disk, "HF_HOME on another disk"),
    "a folder of others": ([(os, "access", lambda *_: False)], doctor.look_at_disk, "cannot be written"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_has_its_mend(monkeypatch, name):
    """Marked, counted and mended on the screen; before the patch there is none of it here."""
    patches, look, says = PROBLEMS[name]
    sound = look()
    with monkeypatch.context() as patch:
        for where, what, value in patches:
            patch.setattr(where, what, value)
        found = look()
    assert found.problem and found.mend and says in f"{found.problem} {found.mend}" and found != sound
    text = doctor.screen([Finding("host", "fine"), found], [])
    assert f"! {found.what}" in text and "1 problem:" in text and f"mend: {found.mend}" in text


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


@pytest.mark.parametrize(
    "driver, mend",
    [("535.104.05", "update the driver to 580"), ("", "update the driver to 580"), ("580.65.06", "nvidia-smi")],
)
def test_a_gpu_that_this_torch_cannot_use_is_not_passed_over(monkeypatch, driver, mend):
    """A line with driver, wheel and mend instead of days on the CPU; --device cpu, or hiding the GPU, is on purpose."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "driver_version", lambda: driver)
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev/nvidia0")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError) as raised:
        devices.choose_device("auto")
    said = str(raised.value)
    assert "\n" not in said and f"torch {torch.__version__}, built for CUDA 13.0" in said and mend in said
    assert (driver or "unknown") in said and said.endswith("--device cpu")
    assert devices.choose_device("cpu").type == "cpu"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert devices.choose_device("auto").type == "cpu"


def test_without_a_gpu_all_is_well(monkeypatch):
    """A wheel for GPUs on a machine without one trains on the CPU, and so does a wheel for CPUs beside a GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, files in (("13.0", []), (None, [Path("/dev/nvidia0")])):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(Path, "glob", lambda *_, files=files: files)
        assert devices.choose_device("auto").type == "cpu"


@pytest.mark.parametrize("peers", [True, False])
def test_gpus_and_their_links(monkeypatch, peers):
    """Each GPU's memory, and the speed of a copy to each other; without a direct link, what not to cut over it."""
    with monkeypatch.context() as patch:
        gpus(patch, peers)
        found = doctor.look_at_gpus()
    assert [finding.what for finding in found] == ["GPU 0", "GPU 1"]
    for finding, other in zip(found, (1, 0), strict=True):
        assert f"NVIDIA H100, 80.00 GiB; to {other}: 50 GB/s" in finding.found
        assert bool(finding.problem) == ("through the host" in finding.found) == (not peers)


def test_a_slow_exchange_is_a_problem_of_the_screen():
    """The table shows messages in a row each, with seconds and bandwidth of the median."""
    text = doctor.screen([Finding("two ranks", "slow", "slower than 50 MB/s", "wait")], [Exchange(1024, 1e-3, 2e-3)])
    assert "1.00 KiB" in text and "2000" in text and "0.001" in text and "1. two ranks: slower than 50 MB/s" in text
