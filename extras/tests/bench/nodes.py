"""Functions on ranks that are on different nodes of a cluster in this machine (extras/services/cluster.py).

on_nodes(function, *args)            calls it on every rank, and returns what it returns, by rank, as harness.on_ranks
python -m extras.tests.bench.nodes FOLDER   what each rank runs: the call that lies in the folder
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import UserError

ROOT = Path(__file__).parents[3]
SECONDS = 1800  # that a call may take
HEADERS = 14 + 20 + 32  # bytes of a packet before its payload: Ethernet, IP, TCP with timestamps


def on_nodes(function: Callable, *args: Any, nodes: int = 2, ranks: int = 1, gbit: float = 1.0) -> list[Any]:
    """`ranks` on each node. Raises UserError with what the cluster says if it fails, or is not allowed here."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args)))
        size = ["--nodes", str(nodes), "--ranks-per-node", str(ranks), "--gbit", str(gbit)]
        line = [sys.executable, "-m", "extras.services.cluster", *size, "--", "-m", "extras.tests.bench.nodes", folder]
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        done = subprocess.run(line, cwd=ROOT, timeout=SECONDS, **streams)
        if done.returncode:
            raise UserError(done.stdout.decode())
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(nodes * ranks)]


def passed() -> int:
    """Bytes of payload that this node's interface has sent and received; packets without payload do not count."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    numbers = [int(word) for word in line.partition(":")[2].split()]  # received: bytes, packets, ...; then sent
    return numbers[0] + numbers[8] - HEADERS * (numbers[1] + numbers[9])


def rate(gbit: float):
    """The speed at which this node sends from now on. (The switch goes on with that of the cluster's --gbit.)"""
    from extras.services.cluster import speed

    line = f"tc qdisc change dev eth0 root tbf {speed(gbit)}"
    subprocess.run(line.split(), check=True)


def work(folder: str):
    """One rank's life."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    with contextlib.redirect_stdout(sys.stderr):
        found = function(*args)
    torch.save(found, f"{folder}/{dist.get_rank()}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    work(sys.argv[1])
