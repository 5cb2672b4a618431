"""How a run ends early: after a signal, when its step is done; or because a step hangs."""

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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C; batch systems send the others


class Signals(AbstractContextManager):
    """In this context a signal does not end the process: it is noted, so that the run can save.

    (torchrun passes SIGINT and SIGTERM on to the ranks, SIGUSR1 only if --signals-to-handle names
    it, and kills them after its --shutdown-timeout, 30 seconds.)
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
        """Handle a signal. A second Ctrl-C ends the process, unless it comes within a second of the
        first signal: then it may be the same one, which torchrun has passed on.
        """
        now = time.monotonic()
        if not self.received:
            self.received = now
        elif number == signal.SIGINT and now > self.received + 1:
            os._exit(130)


class HangWatch:
    """Ends this rank if a step takes longer than `seconds` (0: never), and prints where it waits.

    If one rank waits for ever, the others soon wait for it in a collective. So all ranks print
    their stacks at about the same time, and the rank whose stack differs is usually the one that
    they wait for. (The first to exit makes torchrun end the others by SIGTERM, which `Signals` only
    notes.) On a machine with GPUs, PyTorch's record of the last NCCL collectives is written, too,
    which `torchfrtrace --prefix nccl- OUT` reads. (PyTorch itself ends a collective after 10
    minutes with NCCL, and after 30 with gloo: a larger --timeout has no effect there.)
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
        text = f"error: rank {rank}: a step has taken {self.seconds:g} s (--timeout), and is in\n"
        try:
            with tempfile.TemporaryFile("w+") as stacks:
                faulthandler.dump_traceback(stacks)
                stacks.seek(0)
                text += stacks.read()
            sys.stderr.write(text)  # at once, so that the ranks' stacks do not mix
            sys.stderr.flush()
            if torch.cuda.is_available():
                record = torch._C._distributed_c10d._dump_nccl_trace()  # no public function has it
                (self.out / f"nccl-{rank}").write_bytes(record)
        except Exception as error:
            traceback.print_exception(error)
        finally:
            os._exit(1)
