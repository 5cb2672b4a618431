"""A hang ends the job: a step that takes longer than `--timeout` seconds ends its rank, which says where it stands.

All ranks end a step at about the same time, so if one hangs, all their times run out together, and each prints its own
place. The others stand in a collective; the rank that stands elsewhere is the one they wait for. A main thread that
holds Python's lock for ever cannot be looked at from a thread: then `faulthandler` does it, a little later.

Time runs during a step alone. Nobody knows how long data, weights or a checkpoint take; a rank that waits for another
one meanwhile is in a collective, and gloo's and NCCL's raise after twice `--timeout`.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRACE = 5.0  # seconds after which faulthandler takes over


class Watchdog:
    """A thread beside the main thread, from the begin of a run to its end."""

    def __init__(self, seconds: float):
        """`seconds`: that a step may take. Call it on the main thread."""
        self.seconds, self.rank, self.main = seconds, int(os.environ.get("RANK", 0)), threading.main_thread().ident
        self.step, self.began, self.stopped = 0, float("inf"), threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def begin(self, step: int):
        """A step begins."""
        self.step, self.began = step, time.monotonic()
        faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True, file=sys.__stderr__)

    def pause(self):
        """The step has ended."""
        self.began = float("inf")
        faulthandler.cancel_dump_traceback_later()

    def stop(self):
        """The run has ended."""
        self.pause()
        self.stopped.set()

    def watch(self):
        """The thread."""
        while not self.stopped.wait(min(1.0, self.seconds / 10)):
            if time.monotonic() - self.began > self.seconds:
                print(self.report(), file=sys.stderr, flush=True)
                time.sleep(GRACE / 2)  # others print theirs, before torchrun ends them
                os._exit(1)  # an exception could not reach a thread that waits in C++

    def report(self) -> str:
        """Where the main thread stands, in our own files."""
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        ours = [frame for frame in stack if Path(frame.filename).is_relative_to(ROOT)]
        places = "".join(f"\n  {Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in ours)
        return f"error: rank {self.rank}: step {self.step + 1} has not ended in {self.seconds:g} s (--timeout):{places}"
