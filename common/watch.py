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

    (torchrun passes signals on to the ranks, and ends them for good after its --shutdown-timeout.)
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
        """Handle a signal. A Ctrl-C more than a second after the first signal ends the process: an
        earlier one may be the first, repeated by torchrun.
        """
        now = time.monotonic()
        if number == signal.SIGINT and 0 < self.received < now - 1:
            os._exit(130)
        if not self.received:
            self.received = now


class HangWatch:
    """Ends this rank if a step takes longer than `seconds` (0: never), and prints where it waits.

    If one rank waits for ever, the others soon wait for it in a collective. So all ranks print
    their stacks at about the same time, and the rank whose stack differs is usually the one that
    they wait for. With NCCL, PyTorch's record of the last collectives is written, too, which
    `torchfrtrace --prefix nccl- OUT` reads. (PyTorch itself ends a collective after 10 minutes with
    NCCL, and after 30 with gloo.)
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
        text = f"error: rank {rank}: a step has taken {self.seconds:g} s (--timeout), and is in\n"
        try:
            with tempfile.TemporaryFile("w+") as stacks:
                faulthandler.dump_traceback(stacks)
                stacks.seek(0)
                text += stacks.read()
            sys.stderr.write(text)  # at once, so that the ranks' stacks do not mix
            sys.stderr.flush()
            if torch.cuda.is_available():
                record = torch._C._distributed_c10d._dump_nccl_trace()
                (self.out / f"nccl-{rank}").write_bytes(record)
        except Exception as error:
            traceback.print_exception(error)
        finally:
            os._exit(1)
