"""Persistent worker processes joined by gloo, one pool per world size: a test sends a function, every rank runs it.

Starting eight Pythons that import torch takes ten seconds; here one server process imports it once and the workers
are forked from it. They meet through a file, never a port, and have one thread each.
"""

import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# An optimizer's first step imports torch._dynamo, which takes longer than a tiny run.
PRELOADED = [
    "torch.distributed",
    "torch._dynamo",
    "step07_moe_ep",
    "extras.services.run",
    "extras.tests.equal",
    "extras.tests.warm",
]


class RankError(AssertionError):
    """A function failed on some rank, or did not return in time; the text is that rank's traceback."""


def error_of(kind: type[Exception], function: Callable, *args: Any) -> str:
    """Runs on every rank: what the error of this kind says with which a function ends; "" if it ends without one."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    return ""


def serve(rank: int, world: int, folder: str, backend: str, connection: Connection):
    """A worker's life: join the group, then run what arrives until the connection closes. Prints go to stderr.

    After each task the groups that it made end. A group of gloo's has a thread that wakes a hundred times a second.
    """
    import torch
    import torch.distributed as dist

    from common.comm import Group, Mesh

    gc.freeze()  # what was imported is no garbage: a look at the rest is short
    torch.set_num_threads(1)
    sys.stdout = sys.stderr
    if world > 1:
        os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        where = f"file://{folder}/rendezvous"
        dist.init_process_group(backend, where, timedelta(minutes=10), world_size=world, rank=rank)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        if not message:  # all ranks have done it
            function = args = answer = None
            for group in list(dist.distributed_c10d._world.pg_map) if world > 1 else ():
                if group is not dist.group.WORLD:
                    with contextlib.suppress(RuntimeError):  # one that a test has taken apart
                        dist.destroy_process_group(group)
            for thing in gc.get_objects():  # also what a hook of a tensor holds, which is never collected
                if type(thing) in (Group, Mesh):
                    vars(thing).clear()
            gc.collect()
            gc.freeze()  # what a task leaves for good would be looked at after every later one
            continue
        try:
            function, args = pickle.loads(message)
            answer = ("done", function(*args))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """While this lasts, no other pool of this user runs. Ranks wait for one another: two pools at once are slower."""
    with open(os.path.join(tempfile.gettempdir(), f"ranks-{os.getuid()}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
        yield


class Pool:
    """`world` processes; `run(function, *args)` calls it on all of them and returns the results by rank."""

    def __init__(self, world: int, method: str = "forkserver", backend: str = "gloo"):
        """`method`: how multiprocessing starts them; "spawn" is slow, and takes nothing over."""
        self.world, self.method, self.backend, self.processes = world, method, backend, []

    def start(self):
        """Start the workers."""
        context = multiprocessing.get_context(self.method)
        multiprocessing.set_forkserver_preload(PRELOADED)
        self.folder = tempfile.TemporaryDirectory(prefix=f"pool-{self.world}-")
        self.connections = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            about = rank, self.world, self.folder.name, self.backend, theirs
            process = context.Process(target=serve, args=about, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Results of `function(*args)` by rank. Raises RankError; the pool then starts anew on next use."""
        with turn() if self.world > 1 else contextlib.nullcontext():
            return self.ask(pickle.dumps((function, args)), timeout)

    def ask(self, message: bytes, timeout: float) -> list[Any]:
        """Send a task to all ranks, and collect their answers."""
        if not all(process.is_alive() for process in self.processes):
            self.stop()
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send_bytes(message)
        answers, deadline = {}, time.monotonic() + timeout
        while len(answers) < self.world:
            open_ones = [c for rank, c in enumerate(self.connections) if rank not in answers]
            ready = wait(open_ones, timeout=max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = self.connections.index(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank] = ("failed", "the process died")
            failed = {rank: text for rank, (kind, text) in answers.items() if kind == "failed"}
            if failed and len(answers) < self.world:  # the others may wait for it for ever: give them a moment
                deadline = min(deadline, time.monotonic() + 3)
            if not ready:
                missing = sorted(set(range(self.world)) - answers.keys())
                self.stop()
                text = next(iter(failed.values()), "")
                raise RankError(f"no answer from ranks {missing} of {self.world}\n{text}")
        if failed:
            if len(failed) < self.world or "the process died" in failed.values():
                self.stop()
            rank, text = min(failed.items())
            raise RankError(f"rank {rank} of {self.world} failed (also {sorted(failed)[1:]}):\n{text}")
        for connection in self.connections:
            connection.send_bytes(b"")
        return [answers[rank][1] for rank in range(self.world)]

    def stop(self):
        """Kill all workers."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []
