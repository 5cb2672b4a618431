"""Reports why a job failed, once for all its ranks; or, if a step hangs, where each rank waits.

All ranks end a step at about the same time, so if one hangs, all of them reach `--timeout` together, and each prints
its own stack. Most ranks are in a collective; the rank that is elsewhere is the one that they wait for. Only steps are
timed, as loading data or weights and writing a checkpoint may take any time. Outside of steps, a collective raises an
error after twice `--timeout`, with gloo and with NCCL.
"""

import faulthandler
import os
import re
import sys
import textwrap
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch

from common import UserError

# What the errors of gloo and NCCL say if another rank is gone.
LOST_PEER = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited|timed out", re.IGNORECASE)


def memory_is_full(error: BaseException) -> str:
    """Advice for a user whose GPU memory is full. The error's notes are names of files that list what was allocated."""
    asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
    return (
        f"GPU memory is full{f' (it asked for {asked[1]} more)' * bool(asked)}: lower --micro-batch-size, "
        "use --recompute full or more ranks; the same flags with --dry-run N count the bytes"
        + "".join(f"; pytorch.org/memory_viz shows what is in {file}" for file in getattr(error, "__notes__", ()))
    )


def describe(error: BaseException) -> str:
    """Describe an error in one line. Unless the user can fix it, the traceback's lines in our files follow."""
    if isinstance(error, UserError):
        return f"error: {error}"
    rank, text = f"error: rank {os.environ.get('RANK', 0)}", textwrap.shorten(str(error), 600)
    if isinstance(error, torch.OutOfMemoryError):
        return f"{rank}: {memory_is_full(error)}"
    if LOST_PEER.search(text):
        text = f"another rank died, was killed or hangs ({text})"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(str(Path(__file__).parents[2]))]
    where = "".join(f"\n  {Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in ours)
    return f"{rank}: {type(error).__name__}: {text}{where}"


def report(error: BaseException, early: bool = False):
    """Report the error of a run once per job, and end this process if torchrun has started it together with others.

    The first rank to reach the launcher's store reports; if there is no store, each does. Others may be gone, so a rank
    does not wait for them, and skips the interpreter's shutdown, which can block. If `early` (before step 1), an
    OSError counts as a UserError. Without torchrun or peers, raise UserError if GPU memory is full, else return.
    """
    if isinstance(error.__cause__ or error, BrokenPipeError):
        os._exit(2)  # nobody reads our output any more, as after `| head`
    if early and isinstance(error, OSError):
        error = UserError(" ".join(str(error).split()))
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        if isinstance(error, torch.OutOfMemoryError):
            raise UserError(memory_is_full(error)) from error
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    reports = 1
    with suppress(RuntimeError):  # the launcher is gone: each rank reports
        store = torch.distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
        reports = store.add(f"reported/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1)
    if reports == 1:
        print(describe(error), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UserError) else 1)


class Watchdog:
    """Ends this rank if a step takes longer than `seconds`, and prints the stack of its main thread."""

    def __init__(self, seconds: float):
        self.seconds, self.main = seconds, threading.main_thread().ident
        self.timer: threading.Timer | None = None

    def begin(self, step: int):
        """Start a step's timer. If the main thread never releases the GIL, `faulthandler` ends the rank 5 s later."""
        self.timer = threading.Timer(self.seconds, self.end, [step + 1])
        self.timer.daemon = True
        self.timer.start()
        faulthandler.dump_traceback_later(self.seconds + 5.0, exit=True, file=sys.__stderr__)

    def pause(self):
        """Stop the timer: the step, or the run, has ended."""
        if self.timer is not None:
            self.timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def end(self, step: int):
        """On the timer's thread: print the main thread's stack, leave other ranks 2.5 s to print theirs, and exit.

        It calls `os._exit`, because an exception could not reach a main thread that waits in C++.
        """
        stack = "".join(traceback.format_stack(sys._current_frames()[self.main]))
        rank, limit = int(os.environ.get("RANK", 0)), f"{self.seconds:g} s (--timeout)"
        print(f"error: rank {rank}: step {step} has not ended in {limit}:\n{stack}", file=sys.stderr, flush=True)
        time.sleep(2.5)
        os._exit(1)
