"""Persistent worker processes joined by gloo, one pool per world size: a test sends a function, every rank runs it.

Starting eight Pythons that import torch takes ten seconds; here one server process imports it once and the workers
are forked from it. They meet through a file, never a port, and have one thread each.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

FIGURES = ("loss_curve", "memory_over_time", "pipeline_timelines", "traffic", "expert_load")
PRELOADED = [
    "torch",
    "torch.distributed",
    "services.run",
    "common.data",
    "step07_moe_ep",
    "tests.equivalence",
    "tests.frozen",
]


class RankError(AssertionError):
    """A function failed on some rank; the text is that rank's traceback."""


class Hang(AssertionError):
    """Some ranks did not return in time; the text says where each one stood."""


def forkserver() -> BaseContext:
    """Starts processes from a server that has imported what is slow to import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def open_data_once():
    """Tests train hundreds of times on the same data: this process opens each set, and shuffles its windows, once."""
    import services.readers
    from common import trainer

    services.readers.load_columns = functools.lru_cache(services.readers.load_columns)
    trainer.open_tokens = functools.lru_cache(maxsize=8)(trainer.open_tokens)


def leave_figures_out():
    """A run's figures take longer than a tiny run: from now on they are drawn only for `with_figures`."""
    from services import plots

    for name in FIGURES:
        if not hasattr(draw := getattr(plots, name), "drawn"):
            setattr(plots, name, lambda *_: None)
            getattr(plots, name).drawn = draw


def with_figures(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which draws its figures; also to be sent to a pool."""
    from services import plots

    with mock.patch.multiple(plots, **{name: getattr(plots, name).drawn for name in FIGURES}):
        return function(*args)


def note_hooks() -> list[Any]:
    """The handles of hooks on gradients that are added from now on, to be removed after a task.

    Such a hook is held by C++, where Python's garbage collector does not look. It holds the trainer that added it,
    which holds the parameter: a cycle that would never be freed, megabytes for each task.
    """
    import torch

    handles, right = [], torch.Tensor.register_post_accumulate_grad_hook

    def register(tensor: torch.Tensor, hook: Callable) -> Any:
        handles.append(right(tensor, hook))
        return handles[-1]

    torch.Tensor.register_post_accumulate_grad_hook = register
    return handles


def serve(rank: int, world: int, folder: str, connection: Connection):
    """A worker's life: join the group, then run what arrives until the connection closes."""
    import torch
    import torch.distributed as dist

    from common.comm import Mesh

    torch.set_num_threads(1)
    open_data_once()
    leave_figures_out()
    hooks = note_hooks()
    made, join = [], Mesh.join
    Mesh.join = lambda self, name, ranks: (join(self, name, ranks), made.append(self.groups[name]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trace = open(f"{folder}/where-{rank}", "w")  # noqa: SIM115  # stays open as long as the process
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rendezvous, timedelta(minutes=10), world_size=world, rank=rank)
    connection.send_bytes(pickle.dumps(("ready", None)))
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        while hooks:
            hooks.pop().remove()
        # A group of gloo's has threads, which end with the last reference to it: hundreds would slow down everything.
        # Whatever keeps a trainer alive for a while keeps its groups: they are taken out of its hands. Only now, when
        # all ranks have answered the last task: to a rank that is still joining a group, another one that has left it
        # already looks like a crash.
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        group = None
        while made:
            made.pop().handle = None
        try:
            answer = ("done", function(*args))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


class Pool:
    """`world` processes; `run(function, *args)` calls it on all of them and returns the results by rank."""

    def __init__(self, world: int):
        self.world = world
        self.processes: list[multiprocessing.Process] = []

    def start(self):
        """Fork the workers and wait until they have found one another."""
        context = forkserver()
        self.folder = tempfile.mkdtemp(prefix=f"pool-{self.world}-")
        self.connections: list[Connection] = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.world, self.folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        self.collect(time.monotonic() + 600)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 900.0) -> list[Any]:
        """Results of `function(*args)` by rank. Raises RankError or Hang; the pool then starts anew on next use,
        unless all ranks have failed alike.
        """
        if not self.processes:
            self.start()
        message = pickle.dumps((function, args))
        for connection in self.connections:
            connection.send_bytes(message)
        return self.collect(time.monotonic() + timeout)

    def collect(self, deadline: float) -> list[Any]:
        """Wait for all ranks' answers."""
        answers: dict[int, tuple[str, Any]] = {}
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
            if failed and len(answers) < self.world:
                # The others may wait for the failed rank for ever: give them a moment, then report what is known.
                deadline = min(deadline, time.monotonic() + 3)
            if not ready:
                places = self.where(set(range(self.world)) - answers.keys())
                self.stop()
                if failed:
                    self.fail(failed, places)
                raise Hang(f"no answer in time from ranks {sorted(places)} of {self.world}:\n" + self.show(places))
        if failed:
            if len(failed) < self.world or len({text.splitlines()[-1] for text in failed.values()}) > 1:
                self.stop()  # else all have left from the same place, and none waits for another
            self.fail(failed, {})
        return [answers[rank][1] for rank in range(self.world)]

    def fail(self, failed: dict[int, str], places: dict[int, str]):
        """Raise the first failing rank's traceback, and say who waited for it where."""
        rank, text = min(failed.items())
        also = f" (also {sorted(failed)[1:]})" if len(failed) > 1 else ""
        raise RankError(f"rank {rank} of {self.world} failed{also}:\n{text}\n{self.show(places)}")

    @staticmethod
    def show(places: dict[int, str]) -> str:
        """A line for every rank that did not come back."""
        return "\n".join(f"rank {rank} stood at {place}" for rank, place in sorted(places.items()))

    def where(self, ranks: set[int]) -> dict[int, str]:
        """Ask the given ranks for their stack: the innermost three lines of the project."""
        root, places = str(Path(__file__).parents[1]), {}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 60  # a rank writes as soon as it gets a core
        for rank in ranks:
            file = Path(f"{self.folder}/where-{rank}")
            while "pool.py" not in file.read_text() and self.processes[rank].is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)
            lines = file.read_text().splitlines()
            ours = [line.strip().replace(root + "/", "") for line in lines if root in line and "pool.py" not in line]
            places[rank] = " <- ".join(ours[:3]) or "an unknown place"
        return places

    def stop(self):
        """Kill all workers."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []
        shutil.rmtree(self.folder, ignore_errors=True)


class Pools:
    """The pools of a test session, each started when it is first needed."""

    def __init__(self):
        self.by_world: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        """The pool of `world` ranks."""
        return self.by_world.setdefault(world, Pool(world))

    def stop(self):
        """Kill everything."""
        for pool in self.by_world.values():
            if pool.processes:
                pool.stop()
