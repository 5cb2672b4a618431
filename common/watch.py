"""How a run ends early: after a signal, when its step is done; or because a step hangs."""

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C; batch systems send the others


class Signals(AbstractContextManager):
    """In this context a signal does not end the process: it is noted, so that the run can save."""

    def __init__(self):
        self.received = 0.0  # when the first one came, by the monotonic clock; 0: none has come

    def __enter__(self) -> "Signals":
        self.before = {number: signal.signal(number, self.note) for number in SIGNALS}
        return self

    def __exit__(self, *error: Any):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, frame: Any):
        """Handle a signal. A second Ctrl-C ends the process, unless torchrun repeats the first."""
        now = time.monotonic()
        if number == signal.SIGINT and 0 < self.received < now - 1:
            os._exit(130)
        if not self.received:
            self.received = now


class HangWatch:
    """Ends this rank if a step takes longer than `seconds` (0: never), and prints where it waits.

    If one rank waits for ever, the others soon wait for it in a collective. So all ranks print
    their stacks at about the same time, and the rank whose stack differs is the one that they wait
    for. With NCCL, PyTorch's record of the last collectives is written, too: see `torchfrtrace`.
    """

    def __init__(self, seconds: float, out: Path):
        self.seconds = seconds
        self.out = out
        self.timer = threading.Timer(seconds, self.explain)

    def start(self):
        """Begin a step."""
        self.timer = threading.Timer(self.seconds, self.explain)
        self.timer.daemon = True
        if self.seconds:
            self.timer.start()

    def stop(self):
        """End the step."""
        self.timer.cancel()

    def explain(self):
        """Print the stacks of all threads, and end the process. (The timer's thread calls this.)"""
        rank = os.environ.get("RANK", "0")
        text = f"error: rank {rank}: a step has taken {self.seconds:g} s (--timeout), and is in"
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        try:
            if torch.cuda.is_available():
                record = torch._C._distributed_c10d._dump_nccl_trace()
                (self.out / f"nccl-{rank}.pickle").write_bytes(record)
        finally:
            os._exit(1)
