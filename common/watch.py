"""How a run ends early: by a signal, after the present step; or because a step takes longer than
--timeout.
"""

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C; batch systems send the others


class Signals(AbstractContextManager):
    """In this context a first Ctrl-C, SIGTERM or SIGUSR1 does not end the process: it is noted, so
    that the run can save. A second Ctrl-C, more than a second later, ends it.

    Others end it without a checkpoint, for example SIGHUP, which a terminal sends when it is
    closed. (Under `nohup` a script ignores SIGHUP, but torchrun handles it, and ends the run,
    unless it is started with --signals-to-handle SIGTERM,SIGINT.)
    """

    def __init__(self):
        self.received = 0.0  # when the first one came, by the monotonic clock; 0: none has come

    def __enter__(self) -> "Signals":
        self.before = {number: signal.signal(number, self.note) for number in SIGNALS}
        return self

    def __exit__(self, *error: Any):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: Any):
        """Handle a signal. The first one is only noted. A Ctrl-C more than a second later ends the
        process at once, without saving. (Within a second it may be the same Ctrl-C, passed on by
        torchrun.)

        Python runs a handler only between its own instructions. A rank that hangs in a collective
        runs none, so Ctrl-C seems dead until torchrun kills the rank (30 seconds later), or
        --timeout ends it.
        """
        now = time.monotonic()
        if not self.received:
            self.received = now
        elif number == signal.SIGINT and now > self.received + 1:
            os._exit(130)


class HangWatch:
    """If a step takes longer than `seconds` (0: never), print where this rank waits, and end its
    process.

    If one rank is stuck, the others soon wait for it in a collective, so all print their stacks at
    about the same time. The rank whose stack differs is usually the one that the others wait for.
    When the first rank has exited, torchrun sends SIGTERM to the others, and SIGKILL 30 seconds
    later. `Signals` only notes the SIGTERM, so they still print.

    On GPUs each rank also writes PyTorch's record of its last NCCL collectives, OUT/nccl-RANK:
    `torchfrtrace --prefix nccl- OUT` says in which collective each rank is. A --timeout above 10
    minutes (NCCL) or 30 (gloo) has no effect while a rank is in a collective: then PyTorch ends it
    first. (The default, 10 minutes, comes before NCCL's, which count from the collective.)
    """

    def __init__(self, seconds: float, out: Path):
        self.seconds = seconds
        self.out = out
        self.timer: threading.Timer | None = None

    def start(self):
        """Begin a step."""
        if self.seconds:
            self.timer = threading.Timer(self.seconds, self.explain)
            self.timer.daemon = True
            self.timer.start()

    def stop(self):
        """End the step."""
        if self.timer is not None:
            self.timer.cancel()

    def explain(self):
        """Print the stacks of all threads, and end the process. (The timer's thread calls this.)"""
        rank = os.environ.get("RANK", "0")
        text = (
            f"error: rank {rank}: a step has taken {self.seconds:g} s (--timeout). Its threads:\n"
        )
        try:
            # faulthandler writes to the descriptor of a file, not to a string
            with tempfile.TemporaryFile("w+") as stacks:
                faulthandler.dump_traceback(stacks)
                stacks.seek(0)
                text += stacks.read()
            sys.stderr.write(text)  # at once, so that the ranks' stacks do not mix
            sys.stderr.flush()
            if dist.is_initialized() and dist.get_backend() == "nccl":
                record = torch._C._distributed_c10d._dump_nccl_trace()  # no public function has it
                (self.out / f"nccl-{rank}").write_bytes(record)
        except Exception as error:
            traceback.print_exception(error)
        finally:
            os._exit(1)
