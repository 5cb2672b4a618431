"""A function on some ranks, in processes of their own in which a student's modules take the place of the project's.

The grader has imported torch and the project, and never runs a student's line itself. For each run it forks a host in
a new process group. The host forgets the project's modules and imports them again, the student's among them. It then
forks one process for each rank. They meet through a file, and each writes its answer into a pipe. When time is up the
whole group is killed. So a crash, a hang, an endless loop, `os._exit` or a patched clock costs this one run.
"""

import ast
import contextlib
import faulthandler
import importlib
import importlib.abc
import importlib.util
import io
import os
import re
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labs.source import SHIFT

PROJECT = re.compile(r"(step0[1-7]_\w+|common|theory|services|tests|labs\.(lab\d+|faults|bench))(\..*)?$")
MOST_OUTPUT = 2**24  # bytes that a student's prints may write to a file
MOST_ANSWER = 2**28  # bytes of one rank's answer


@dataclass
class World:
    """Whose code the ranks run: by module, the parsed source and the file that takes the place of the project's."""

    modules: dict[str, tuple[ast.Module, str]] = field(default_factory=dict)
    folder: Path | None = None  # the student's, for helper modules
    output: Path | None = None  # where prints go


class Failed(Exception):
    """Some rank did not answer. `text` is one line that says which one, and why or where it stood."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules of a `World` from their parsed source."""

    def __init__(self, modules: dict[str, tuple[ast.Module, str]]):
        self.modules = modules

    def find_spec(self, name: str, path: Any, target: Any = None):
        """Serve the names that are replaced, and leave the others to Python."""
        if name in self.modules:
            return importlib.util.spec_from_loader(name, self, origin=self.modules[name][1])
        return None

    def create_module(self, spec: Any):
        """An ordinary module."""
        return None

    def exec_module(self, module: Any):
        """Run the source."""
        tree, module.__file__ = self.modules[module.__name__]
        exec(compile(tree, module.__file__, "exec"), module.__dict__)


def frame_of(files: Sequence[str], frames: list[tuple[str, int, str]]) -> str:
    """ " (file.py:12 in name)" for the innermost of the frames (file, line, function) that is a student's line."""
    for file, line, name in reversed(frames):
        if file in files and line < SHIFT:
            return f" ({Path(file).name}:{line} in {name})"
    return ""


def complaint(error: BaseException, files: Sequence[str]) -> str:
    """One line about an exception, with the student's line that it comes from."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, NotImplementedError) and "task" in str(error):
        return f"not written yet: {error}{frame_of(files, frames)}"
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({Path(error.filename or '').name}:{error.lineno})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "gloo" in str(error):
        lines = ["the ranks' collectives do not match in order or size, or a rank has ended"]
    text = " ".join(lines[:2])[:300]
    return f"{type(error).__name__}: {text}{frame_of(files, frames)}"


def plain(value: Any) -> Any:
    """Tensors as copies, and containers of them: what can be loaded without running code."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().contiguous()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def answer(pipe: int, value: dict[str, Any]):
    """Write an answer, all of it, and stay until the group is killed: to ranks at work, one that ends is a crash."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = memoryview(buffer.getvalue())
    while data:
        data = data[os.write(pipe, data) :]
    os.close(pipe)
    while True:
        signal.pause()


def host(world: World, size: int, function: str, args: tuple, pipes: list[int], scratch: str):
    """The forked host: import the student's modules, fork the ranks, wait for them."""
    os.setsid()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_OUTPUT, MOST_OUTPUT))
    out = os.open(world.output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(scratch)
    files = [file for _, file in world.modules.values()]
    try:
        for name in [name for name in sys.modules if PROJECT.fullmatch(name)]:
            del sys.modules[name]
            package, _, part = name.rpartition(".")
            if hasattr(sys.modules.get(package), part):  # "from package import part" would still find it
                delattr(sys.modules[package], part)
        sys.meta_path.insert(0, Finder(world.modules))
        if world.folder is not None:
            sys.path.insert(1, str(world.folder))
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
    except BaseException as error:
        for pipe in pipes[1:]:
            os.close(pipe)
        answer(pipes[0], dict(error=complaint(error, files), alone=True))
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            one_rank(rank, size, call, args, pipes, scratch, files)
        children.append(child)
    for pipe in pipes:
        os.close(pipe)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def one_rank(rank: int, size: int, call: Any, args: tuple, pipes: list[int], scratch: str, files: list[str]):
    """A forked rank: join the group, call, answer."""
    for other, pipe in enumerate(pipes):
        if other != rank:
            os.close(pipe)
    trace = open(f"{scratch}/where-{rank}", "w")  # noqa: SIM115  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)
    try:
        torch.set_num_threads(1)
        if size > 1:
            meeting = f"file://{scratch}/rendezvous"
            dist.init_process_group("gloo", meeting, timedelta(minutes=5), world_size=size, rank=rank)
        value = dict(value=plain(call(*args)))
    except BaseException as error:
        value = dict(error=complaint(error, files))
    sys.stdout.flush()
    answer(pipes[rank], value)


def where(scratch: str, size: int, files: Sequence[str]) -> dict[int, str]:
    """By rank: the student's line at which it stood when it was asked."""
    places = {}
    for rank in range(size):
        path = Path(scratch) / f"where-{rank}"
        found = re.findall(r'File "(.+)", line (\d+) in (\S+)', path.read_text() if path.exists() else "")
        places[rank] = frame_of(files, [(file, int(line), name) for file, line, name in reversed(found)])
    return places


def run(world: World, size: int, function: str, args: tuple = (), seconds: float = 60.0) -> list[Any]:
    """What `function`, "module:name", returns on each of `size` ranks, given `args`. Raises Failed.

    It returns numbers, strings, tensors, and lists and dicts of them.
    """
    scratch, pipes = tempfile.mkdtemp(prefix="lab-"), [os.pipe() for _ in range(size)]
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if not child:
        try:
            for reading, _ in pipes:
                os.close(reading)
            host(world, size, function, args, [writing for _, writing in pipes], scratch)
        finally:
            os._exit(1)
    for _, writing in pipes:
        os.close(writing)
    try:
        return collect(child, [reading for reading, _ in pipes], scratch, world, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for reading, _ in pipes:
            os.close(reading)
        shutil.rmtree(scratch, ignore_errors=True)


def collect(child: int, pipes: list[int], scratch: str, world: World, seconds: float) -> list[Any]:
    """Read the answers of all ranks until the time is up; a rank's error leaves the others two seconds."""
    deadline, data, ended = time.monotonic() + seconds, {pipe: bytearray() for pipe in pipes}, False
    files, answers = [file for _, file in world.modules.values()], {}
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                part = os.read(key.fd, 2**20)
                data[key.fd] += part
                if part and len(data[key.fd]) <= MOST_ANSWER:
                    continue
                selector.unregister(key.fd)
                rank = pipes.index(key.fd)
                try:
                    answers[rank] = torch.load(io.BytesIO(bytes(data[key.fd])), weights_only=True)
                except Exception:
                    answers[rank] = dict(error="the process ended without an answer (os._exit, a crash, or killed)")
                if "error" in answers[rank] and not ended:
                    ended, deadline = True, min(deadline, time.monotonic() + 2)
    size = len(pipes)
    late = sorted(set(range(size)) - answers.keys())
    errors = {rank: found["error"] for rank, found in answers.items() if "error" in found}
    echoes = ["collectives do not match", "without an answer", ""]  # the first are of what another rank has done
    level = max(min(i for i, echo in enumerate(echoes) if echo in text) for text in errors.values()) if errors else 0
    spoken = {rank: text for rank, text in errors.items() if not any(echo in text for echo in echoes[:level])}
    if spoken:
        rank, text = min(spoken.items())
        raise Failed(text if answers[rank].get("alone") or size == 1 else f"rank {rank} of {size}: {text}")
    if late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGUSR1)
        time.sleep(0.3)
        places = where(scratch, size, files)
        stood = ", ".join(f"rank {rank}{places[rank] or ' in the code around it'}" for rank in late)
        raise Failed(f"no answer within {seconds:g} s (an endless loop, or ranks that wait for one another): {stood}")
    return [answers[rank]["value"] for rank in range(size)]
