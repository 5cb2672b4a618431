"""Functions on some ranks, in processes of their own in which a student's modules take the place of the project's.

The grader has imported torch and the project, and never parses or runs a student's line itself. For each session it
forks a host, which builds the student's modules and forks a process for each rank. They meet through a file and work
through a list of jobs; each writes its answers into a pipe. In the end all descendants are killed, even those that
have left the process group: the grader is their subreaper. A failed job costs this job; the rest get a new session.
"""

import ast
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import math
import os
import re
import resource
import selectors
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from extras.labs.course import Case
from extras.labs.source import SHIFT, assemble, definitions
from extras.services.launch import descendants

MOST_OUTPUT = 2**24  # bytes that a student's prints may write to a file
MOST_ANSWER = 2**28  # bytes of one rank's answer
REBUILT = re.compile(r"(step0\d_\w+|variants|services|theory|tests)(\.|$)")  # modules that may have met a step
LATE = "not tried: an earlier criterion of this task ran out of time"
SILENT = "ended without an answer (os._exit, a crash, or killed); what it printed is in output.txt"


@dataclass
class World:
    """Whose code the ranks run. By module: the student's source, the project's, and the holes that are given.

    An empty `student` is the project's own code. `files`: others of the folder, by name. `wanted`: holes that must be
    there. `before`: called in each rank before a job (for a fault), with the job's number. `left`: seconds, in a list,
    that all runs of this folder may still take. `walls`: what the ranks must not see (a file), or change (a folder).
    """

    modules: tuple[str, ...]
    student: dict[str, str] = field(default_factory=dict)
    project: dict[str, str] = field(default_factory=dict)
    given: dict[str, Collection[str]] = field(default_factory=dict)
    wanted: dict[str, Collection[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    output: Path | None = None
    before: Callable[[int], Any] | None = None
    walls: tuple[Path, ...] = ()
    left: list[float] = field(default_factory=lambda: [math.inf])


class Failed(Exception):
    """Some rank did not answer: one line that says which, and why or where it stood.

    `fatal`: all jobs fail so. `late`: time was up.
    """

    fatal = late = False


def frame_of(frames: list[tuple[str, int, str]]) -> str:
    """ " (file.py:12 in name)" for the innermost of the frames (file, line, function) that is a student's line."""
    for file, line, name in reversed(frames):
        if file.startswith("lab/") and line < SHIFT:
            return f" ({file[4:]}:{line} in {name})"
    return ""


def complaint(error: BaseException) -> str:
    """One line about an exception, with the student's line that it comes from."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, NotImplementedError) and "task" in str(error):
        return f"not written yet: {error}{frame_of(frames)}"
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({Path(error.filename or '').name}:{error.lineno})"
    text = " ".join(line.strip() for line in str(error).splitlines()[:2] if line.strip())[:200]
    if "gloo" in text:
        text = re.sub(r"^\[[^\]]*?([\w.]+:\d+)\]", r"[\1]", text)
        return f"the ranks' collectives do not match in order or size, or a rank has ended{frame_of(frames)}: {text}"
    return f"{type(error).__name__}: {text}{frame_of(frames)}"


def build(world: World) -> ModuleType:
    """The modules, in order, in the place of the project's; returns the last, the step.

    What has met the project's own steps is forgotten: whoever imports it again gets one that meets the student's.
    """
    for name in [name for name in sys.modules if REBUILT.match(name)]:
        del sys.modules[name]
    for name in world.modules:
        if name not in world.student:
            continue
        where = f"lab/{name.rpartition('.')[2]}.py"
        text = world.student[name]
        if not text.strip():
            raise Failed(f"{where[4:]} is missing or empty")
        try:
            if lost := world.wanted[name] - definitions(ast.parse(text)).keys():
                raise Failed(f"{where[4:]} has no {min(lost)} any more")
            code = compile(assemble(text, world.project[name], world.given[name]), where, "exec")
        except SyntaxError as error:
            error.filename = where
            raise
        module = ModuleType(name)
        module.__file__ = where
        sys.modules[name] = module
        package, _, part = name.rpartition(".")
        if package:
            setattr(importlib.import_module(package), part, module)
        exec(code, vars(module))
    return importlib.import_module(world.modules[-1])


def plain(value: Any) -> Any:
    """Tensors as copies, and containers of them: what can be loaded without running code."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().contiguous()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def answer(pipe: int, value: dict[str, Any]):
    """Write an answer, all of it."""
    sys.stdout.flush()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = memoryview(struct.pack("q", buffer.tell()) + buffer.getvalue())
    while data:
        data = data[os.write(pipe, data) :]


def stay():
    """Until killed: to ranks at work, one that ends is a crash."""
    while True:
        signal.pause()


def control(option: int, value: int):
    """Linux' prctl."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def enclose(walls: tuple[Path, ...]):
    """Go on in namespaces of our own, if the kernel has them: no process outside is seen, and walls are closed."""
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    private, bind, locked = 0x44000, 0x5000, 0x1 | 0x20 | 0x1000  # MS_PRIVATE and _BIND with MS_REC; read-only, remount
    if not walls or sys.platform != "linux" or libc.unshare(0x10000000 | 0x20000000 | 0x20000):  # user, PID, mount
        return
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{name}").write_text(text)
    libc.mount(None, b"/", None, private, None)
    for path in map(os.fsencode, walls):
        folder = os.path.isdir(path)
        libc.mount(path if folder else b"/dev/null", path, None, bind, None)
        if folder:
            libc.mount(None, path, None, locked | os.statvfs(path).f_flag & 0xE, None)
    if child := os.fork():  # the first process of the new namespace; all end with it
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.waitpid(child, 0)
        os._exit(0)
    libc.mount(b"proc", b"/proc", b"proc", 0, None)


def host(world: World, ranks: int, jobs: list[Case], pipes: list[int], scratch: str):
    """The forked host: build the student's modules, fork the ranks, wait for them."""
    os.setsid()
    control(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends if the grader does
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.disable()  # pytest has its own, which would print a crash into its output
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_OUTPUT, MOST_OUTPUT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, these go first
    out = os.open(world.output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in {0, *map(int, os.listdir("/proc/self/fd"))} - {1, 2, *pipes} if sys.platform == "linux" else {0}:
        with contextlib.suppress(OSError):  # no other pipe of the grader's is open here
            os.dup2(nothing, fd)
    os.chdir(scratch)
    for name, data in world.files.items():
        Path(name).write_bytes(data)
    sys.path.insert(1, scratch)  # for a student's own helper modules
    try:
        step = build(world)
    except BaseException as error:
        text = str(error) if isinstance(error, Failed) else complaint(error)
        for pipe in pipes[1:]:
            os.close(pipe)
        answer(pipes[0], dict(error=text, fatal=True))
        stay()
    with contextlib.suppress(Exception):  # else each rank tries again, and says what is wrong
        for kind in {type(job) for job in jobs}:
            kind.prepare()
    gc.freeze()  # what is there now is no garbage: a rank that looks for some would copy all of this memory
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            one_rank(world, rank, ranks, step, jobs, pipes, scratch)
        children.append(child)
    for pipe in pipes:
        os.close(pipe)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def one_rank(world: World, rank: int, ranks: int, step: Any, jobs: list[Case], pipes: list[int], scratch: str):
    """A forked rank: join the others, work through the jobs, answer each."""
    from common.comm import Mesh

    control(1, signal.SIGKILL)
    for other, pipe in enumerate(pipes):
        if other != rank:
            os.close(pipe)
    trace = open(f"{scratch}/where-{rank}", "w")  # noqa: SIM115  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)
    try:
        torch.set_num_threads(1)
        if ranks > 1:
            os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
            where = f"file://{scratch}/rendezvous"
            dist.init_process_group("gloo", where, timedelta(minutes=5), world_size=ranks, rank=rank)
        for number, case in enumerate(jobs):
            with world.before(number) if world.before else contextlib.nullcontext():
                value = plain(list(case.run(step, Mesh(**case.mesh))))
            answer(pipes[rank], dict(value=value))
    except BaseException as error:
        answer(pipes[rank], dict(error=complaint(error)))
    stay()


# --- what the grader does with them ----------------------------------------------------------------------------------


def adopt():
    """Become the parent of orphans among our descendants, so that `end` finds them."""
    control(36, 1)  # PR_SET_CHILD_SUBREAPER


def end(others: set[int]):
    """Kill all of our descendants but these, and wait for them; they may be making new ones meanwhile."""
    for turn in range(1000):
        left = [pid for pid in descendants(os.getpid()) if pid not in others]
        if not left:
            return
        for which in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, which)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001 * min(turn, 20))


def run(world: World, jobs: list[Case], seconds: float = 60.0) -> Iterator[list[Any] | Failed]:
    """For each job, what it returns by rank, or why there is no answer. All jobs have the same number of ranks."""
    done = 0
    while done < len(jobs):
        for outcome in session(world, jobs[done:], seconds):
            done += 1
            yield outcome
            if isinstance(outcome, Failed):
                break
        while isinstance(outcome, Failed) and (outcome.fatal or outcome.late) and done < len(jobs):
            done += 1
            yield outcome if outcome.fatal else Failed(LATE)


def session(world: World, jobs: list[Case], seconds: float) -> Iterator[list[Any] | Failed]:
    """The jobs of one set of processes, to the first that fails."""
    ranks = jobs[0].ranks
    adopt()
    others = set(descendants(os.getpid()))
    scratch, pipes = tempfile.mkdtemp(prefix="lab-"), [os.pipe() for _ in range(ranks)]
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if not child:
        try:
            for reading, _ in pipes:
                os.close(reading)
            control(1, signal.SIGKILL)
            enclose(world.walls)
            host(world, ranks, jobs, [writing for _, writing in pipes], scratch)
        finally:
            os._exit(1)
    for _, writing in pipes:
        os.close(writing)
    try:
        streams = [Stream(reading) for reading, _ in pipes]
        for _ in jobs:
            began, limit = time.monotonic(), min(seconds, world.left[0])
            outcome = collect(child, streams, scratch, limit)
            world.left[0] -= time.monotonic() - began
            yield outcome
            if isinstance(outcome, Failed):
                return
    finally:
        end(others)
        for reading, _ in pipes:
            os.close(reading)
        shutil.rmtree(scratch, ignore_errors=True)


class Stream:
    """What one rank writes: its answers, one after the other."""

    def __init__(self, pipe: int):
        self.pipe, self.data = pipe, bytearray()

    def fileno(self) -> int:
        """For a selector."""
        return self.pipe

    def taken(self) -> dict[str, Any] | None:
        """The first answer in what has been read, if it is complete."""
        if len(self.data) < 8 or len(self.data) < 8 + (size := struct.unpack("q", self.data[:8])[0]):
            return None
        message = bytes(self.data[8 : 8 + size])
        del self.data[: 8 + size]
        try:
            found = torch.load(io.BytesIO(message), weights_only=True)
            return found if isinstance(found, dict) and found else dict(error=SILENT)
        except Exception:
            return dict(error=SILENT)

    def read(self) -> dict[str, Any] | None:
        """Read on, and the answer that is complete now."""
        part = os.read(self.pipe, 2**20)
        self.data += part
        return self.taken() if part and len(self.data) <= MOST_ANSWER else dict(error=SILENT)


def patience(answer: dict[str, Any]) -> float:
    """Seconds that the other ranks have after an answer: a rank's error leaves them two."""
    return math.inf if "value" in answer else 0.0 if answer.get("fatal") else 2.0


def collect(child: int, streams: list[Stream], scratch: str, seconds: float) -> list[Any] | Failed:
    """The next answer of every rank, until the time is up."""
    deadline, answers = time.monotonic() + seconds, {}
    with selectors.DefaultSelector() as selector:
        for rank, stream in enumerate(streams):
            selector.register(stream, selectors.EVENT_READ, rank)
        found = [(rank, stream.taken()) for rank, stream in enumerate(streams)]
        while True:
            for rank, answer in found:
                if answer is not None:
                    answers[rank] = answer
                    selector.unregister(streams[rank])
                    deadline = min(deadline, time.monotonic() + patience(answer))
            left = deadline - time.monotonic()
            if len(answers) == len(streams) or left <= 0:
                break
            found = [(key.data, key.fileobj.read()) for key, _ in selector.select(left)]
    errors = {rank: str(found.get("error", SILENT)) for rank, found in answers.items() if "value" not in found}
    if not errors and len(answers) == len(streams):
        return [answers[rank]["value"] for rank in range(len(streams))]
    return failure(child, answers, errors, len(streams), scratch, seconds)


def failure(child: int, answers: dict, errors: dict[int, str], ranks: int, scratch: str, seconds: float) -> Failed:
    """The error that comes first, or where the ranks stand that have not answered."""
    echoes = (SILENT, "collectives do not match")  # what one rank's end does to others
    first = sorted(errors, key=lambda rank: (sum((i + 1) * (e in errors[rank]) for i, e in enumerate(echoes)), rank))
    if first:
        fatal, text = bool(answers[first[0]].get("fatal")), errors[first[0]]
        alike = fatal or ranks == 1 or text.startswith("not written yet")
        failed = Failed(text if alike else f"rank {first[0]} of {ranks}: {text}")
        failed.fatal = fatal
        return failed
    for pid in descendants(child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3)
    late, stood = sorted(set(range(ranks)) - answers.keys()), []
    for rank in late:
        path = Path(scratch) / f"where-{rank}"
        text = path.read_text(errors="replace") if path.exists() else ""
        found = [(file, int(line), name) for file, line, name in re.findall(r'File "(.+)", line (\d+) in (\S+)', text)]
        stood.append(f"rank {rank}{frame_of(found[::-1]) or ' in the code around it'}")
    kinds = "an endless loop, ranks that wait for one another, or a busy machine: --seconds"
    failed = Failed(f"no answer within {max(0, seconds):.0f} s ({kinds}): {', '.join(stood)}")
    failed.late = True
    return failed
