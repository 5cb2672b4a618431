"""A watchdog on every rank: when nothing moves any more, it says who is behind, and ends the job.

One rank that hangs (a deadlock, a dead disk, a stopped process) makes all others wait in a collective, and from outside
all look alike. So a thread on each rank writes down in the store of the process group, now and then, which step and
phase its rank is in, which collective it entered last, and when that changed. The rank that others wait for is the
one whose last movement lies farthest back: the others went on until they needed it. (Clocks of nodes should agree.)
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist


class Place(NamedTuple):
    """Where a rank is."""

    step: int
    phase: str
    collective: str
    entered: int


def shared_store() -> dist.Store:
    """A connection of our own to the store that the ranks met in; alone, one of this process."""
    if not dist.is_initialized():
        return dist.HashStore()
    return dist.distributed_c10d._get_default_store().clone()


def say_and_exit(text: str):
    """Print and leave at once: whoever hangs in a collective cannot be reached by an exception."""
    if text:
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


class Watchdog:
    """The thread of one rank. `place()` tells where it is; `seconds` without a change, anywhere, end the job."""

    def __init__(
        self,
        place: Callable[[], Place],
        seconds: float,
        rank: int,
        world: int,
        store: dist.Store,
        end: Callable[[str], None] = say_and_exit,
    ):
        """`end` gets the report on one rank, "" on the others."""
        self.place, self.seconds, self.rank, self.world, self.store, self.end = place, seconds, rank, world, store, end
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def stop(self):
        """The run is over."""
        self.stopped.set()
        self.thread.join(timeout=1)

    def watch(self):
        """The thread."""
        try:
            self.look()
        except RuntimeError:  # the store is gone, and with it the launcher
            return

    def look(self):
        """Until stopped: publish this rank's place; at half the time warn, and shortly before all of it end."""
        seen, since, warned = None, time.time(), False
        while not self.stopped.wait(self.seconds / 40):
            place = self.place()
            if place != seen:
                seen, since, warned = place, time.time(), False
                self.store.set(f"watchdog/{self.rank}", json.dumps([*place, since]))
            idle = time.time() - since
            if idle > self.seconds / 2 and not warned:
                warned = True
                if self.store.add(f"watchdog/warned/{place.step}", 1) == 1:
                    print(self.report(idle, "waiting"), file=sys.stderr, flush=True)
            if idle > 0.85 * self.seconds:
                first = self.store.add("watchdog/ended", 1) == 1
                if not first:
                    self.stopped.wait(self.seconds / 20)  # for the first one's report
                self.end(self.report(idle, "ending the job") if first else "")
                return

    def report(self, idle: float, then: str) -> str:
        """Who is behind, and a table of all ranks, the last one to have moved at the end."""
        now, places = time.time(), {}
        for rank in range(self.world):
            key = f"watchdog/{rank}"
            places[rank] = json.loads(self.store.get(key)) if self.store.check([key]) else [0, "start", "none", 0, 0.0]
        order = sorted(places, key=lambda rank: (places[rank][0], places[rank][4]))
        lines = []
        for rank in order:
            step, phase, collective, entered, at = places[rank]
            moved = f"last moved {now - at:.1f} s ago" if at else "never heard of"
            lines.append(
                f"  rank {rank}: step {step + 1}, {phase}; last collective {collective or 'none'} "
                f"(number {entered}); {moved}"
            )
        step, phase, collective, *_ = places[order[0]]
        return "\n".join(
            [
                f"error: no progress for {idle:.1f} s (--timeout {self.seconds:g}), {then}: rank {order[0]} is behind, "
                f"in step {step + 1}, {phase}, after entering {collective or 'no collective'}",
                *lines,
            ]
        )
