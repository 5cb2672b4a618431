"""How a run ends early: `Signals`, after the present step; `HangWatch`, if a step takes longer than
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C; batch systems send the others


class Signals:
    """In this context a first Ctrl-C, SIGTERM or SIGUSR1 does not end the process: its time is
    noted, so that the run can save.

    (SIGHUP, which a terminal sends when it is closed, is not among them: it ends the process. Under
    `nohup` a script ignores it, but torchrun does not, unless it is started with
    --signals-to-handle SIGTERM,SIGINT.)
    """

    def __init__(self):
        self.first_at: float | None = None  # when the first one came, by the monotonic clock

    def __enter__(self) -> "Signals":
        self.old_handlers = {number: signal.signal(number, self.handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: Any):
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: Any):
        """Note the first signal. A Ctrl-C more than a second later ends the process at once,
        without saving. (Within a second it may be the same Ctrl-C, passed on by torchrun.)

        Python runs a handler only between its own instructions. A rank that waits in C code, as in
        a collective, runs none. So Ctrl-C seems to do nothing until torchrun kills the rank (30
        seconds later), or --timeout ends it.
        """
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
        elif number == signal.SIGINT and now > self.first_at + 1:
            os._exit(130)


class HangWatch:
    """If a step takes longer than `seconds` (0: never), print where this rank waits, and end its
    process.

    If one rank is stuck, the others soon wait for it in a collective, so all print their stacks at
    about the same time. The rank whose stack differs is usually the one that the others wait for.
    When the first rank has exited, torchrun sends SIGTERM to the others, and SIGKILL 30 seconds
    later. `Signals` only notes the SIGTERM, so they still print.

    On GPUs each rank also writes PyTorch's record of its last NCCL collectives, OUT/nccl-RANK:
    `torchfrtrace --prefix nccl- OUT`, which comes with PyTorch, says in which collective each rank
    is. PyTorch itself ends a single collective after 10 minutes (NCCL) or 30 (gloo), whatever
    --timeout is. (The default of 10 minutes comes before NCCL's: it counts from the start of the
    step.)
    """

    def __init__(self, seconds: float, out: Path):
        self.seconds = seconds
        self.out = out
        self.timer: threading.Timer | None = None

    def start(self):
        """Begin a step."""
        if self.seconds:
            self.timer = threading.Timer(self.seconds, self.print_stacks_and_exit)
            self.timer.daemon = True
            self.timer.start()

    def stop(self):
        """End the step."""
        if self.timer is not None:
            self.timer.cancel()

    def print_stacks_and_exit(self):
        """The timer's thread calls this, after `seconds`."""
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
            sys.stderr.write(text)  # at once, so that the ranks' stacks rarely mix
            sys.stderr.flush()
            if dist.is_initialized() and dist.get_backend() == "nccl":
                record = torch._C._distributed_c10d._dump_nccl_trace()  # no public function has it
                (self.out / f"nccl-{rank}").write_bytes(record)
        except Exception as error:
            traceback.print_exception(error)
        finally:
            os._exit(1)
