"""A watchdog on every rank: when nothing moves any more, it says who is behind, and ends the job.

One rank that hangs (a deadlock, a dead disk, a stopped process) makes all others wait in a collective, and from outside
all look alike. So a thread on each rank writes down in the store of the process group, now and then, which step and
phase its rank is in, and how many collectives it has entered in each of its groups.

WHO IS BEHIND. All ranks of a group enter the same collectives. So a rank that has entered fewer than another rank of
its group keeps that one waiting. The rank to blame is behind in some group and ahead in none. Times alone would not
show this on a GPU: there the hosts run ahead of their streams, and then all stop at the same line. Where no count
differs, it is the rank whose last movement lies farthest back. (Clocks of nodes should agree.)

SAVING. A rank that writes a checkpoint enters no collective, and the others wait for it. So all ranks add the bytes
that they have written to one number in the store: while it grows, the job moves.

A RANK THAT DIED. Under NCCL the others notice nothing, and Python cannot handle the launcher's SIGTERM while the main
thread waits in C++ for a GPU. This thread can. A rank that fails says so in the store. One that was killed writes no
more. The others then have a few seconds to leave by themselves.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

SILENT = 4.0  # seconds after which a rank that writes nothing is taken for dead, if a signal has come, too
GRACE = 4.0  # seconds for the main thread to leave by itself, after another rank has died
SAVES = "saves"  # among the groups of collectives: here the files are counted that a rank has written


class Place(NamedTuple):
    """Where a rank is; `entered`: how many collectives since the start, by group ("tp of ranks 0 1"), and SAVES."""

    step: int
    phase: str
    collective: str  # the last one
    entered: dict[str, int]


def place_of(run: Any) -> Place:
    """Where a run is, from its parts as far as they are there."""
    entered, screen = dict(run.ledger.entered), getattr(run, "screen", None)
    entered[SAVES] = run.keeper.saver.files_written
    return Place(len(run.history), screen.clock.phase if screen else "start", run.ledger.last, entered)


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


class Signals:
    """Tells any thread whether a signal has come, also while the main thread cannot run Python."""

    def __init__(self):
        """Call it on the main thread. Handlers of signals stay as they are."""
        self.reader, self.writer = os.pipe()
        for end in (self.reader, self.writer):
            os.set_blocking(end, False)
        self.before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)

    def came(self) -> bool:
        """Whether one has come since the last call."""
        try:
            return bool(os.read(self.reader, 4096))
        except BlockingIOError:
            return False

    def close(self):
        """Give back what was taken."""
        signal.set_wakeup_fd(self.before)
        os.close(self.reader)
        os.close(self.writer)


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
        signalled: Callable[[], bool] = lambda: False,
        written: Callable[[], int] = lambda: 0,
    ):
        """`end` gets the report on one rank, "" on the others. `signalled`: whether a signal has come.

        `written`: how many bytes this rank has saved since the start.
        """
        self.place, self.seconds, self.rank, self.world, self.store, self.end = place, seconds, rank, world, store, end
        self.signalled, self.written, self.lost_since = signalled, written, 0.0
        self.stopped, self.heard = threading.Event(), time.monotonic()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        threading.Thread(target=self.listen, daemon=True).start()

    def stop(self, failed: bool = False):
        """The run is over on this rank. `failed`: the others need not wait for it."""
        self.stopped.set()
        self.thread.join(timeout=1)
        with suppress(RuntimeError):  # the store is gone, and with it the launcher
            self.publish(time.time(), 0.0)
            if failed:
                self.store.set("failed", "")

    def publish(self, since: float, now: float):
        """Write down where this rank is, when it last moved, and when it wrote this (0: it will write no more)."""
        self.store.set(f"place/{self.rank}", json.dumps([*self.place(), since, now]))

    def watch(self):
        """The thread."""
        with suppress(RuntimeError):  # the store is gone, and with it the launcher
            self.look()
        self.stopped.set()

    def listen(self):
        """A thread beside it: where a cable is pulled, a store does not answer, and raises nothing."""
        while not self.stopped.wait(min(1.0, self.seconds / 4)):
            if time.monotonic() - self.heard > 2 * self.seconds:
                return self.end(f"error: rank {self.rank} is cut off: the store of all ranks does not answer")

    def look(self):
        """Until stopped: publish this rank's place; at half the time warn, and shortly before all of it end."""
        seen, since, warned, asked, added = None, time.time(), False, False, 0
        while not self.stopped.wait(min(1.0, self.seconds / 40)):
            self.heard, place, written = time.monotonic(), self.place(), self.written()
            moved = place, self.store.add("written", written - added)  # of all ranks
            added = written
            if moved != seen:
                seen, since, warned = moved, time.time(), False
            self.publish(since, time.time())
            asked = self.signalled() or asked
            if self.lost(asked):
                return self.end("")
            idle = time.time() - since
            if idle > self.seconds / 2 and not warned:
                warned = True
                if self.store.add(f"warned/{place.step}", 1) == 1:
                    print(self.report(idle, "waiting"), file=sys.stderr, flush=True)
            if idle > 0.85 * self.seconds:
                first = self.store.add("ended", 1) == 1
                if not first:
                    self.stopped.wait(self.seconds / 20)  # for the first one's report
                return self.end(self.report(idle, "ending the job") if first else "")

    def lost(self, asked: bool) -> bool:
        """Whether another rank is gone, and this one has had its time to leave. `asked`: a signal has come."""
        if not self.lost_since:
            gone = self.store.check(["failed"])
            if not gone and asked:
                gone = any(time.time() - written > SILENT for *_, written in self.places().values() if written)
            self.lost_since = time.time() if gone else 0.0
        return self.lost_since > 0 and time.time() - self.lost_since > GRACE

    def places(self) -> dict[int, list]:
        """By rank: its place, when it last moved, and when it last wrote."""
        keys = {rank: f"place/{rank}" for rank in range(self.world)}
        never = [0, "start", "", {}, 0.0, 0.0]
        return {
            rank: json.loads(self.store.get(key)) if self.store.check([key]) else never for rank, key in keys.items()
        }

    def report(self, idle: float, then: str) -> str:
        """Who is behind, and a table of all ranks, that one first."""
        now, places = time.time(), self.places()
        behind, ahead = compare({rank: entered for rank, (_, _, _, entered, *_) in places.items()})
        order = sorted(places, key=lambda r: (r not in behind, r in ahead, places[r][0], places[r][4]))
        lines = []
        for rank in order:
            step, phase, collective, entered, at, _ = places[rank]
            moved = f"last moved {now - at:.1f} s ago" if at else "never heard of"
            lines.append(
                f"  rank {rank}: step {step + 1}, {phase}; last collective {collective or 'none'} "
                f"(number {sum(entered.values())}); {moved}"
            )
        step, phase, collective, *_ = places[order[0]]
        head = (
            f"error: no progress for {idle:.1f} s (--timeout {self.seconds:g}), {then}: rank {order[0]} is behind, "
            f"in step {step + 1}, {phase}, after entering {collective or 'no collective'}" + behind.get(order[0], "")
        )
        return "\n".join([head, *lines])


def compare(entered: dict[int, dict[str, int]]) -> tuple[dict[int, str], set[int]]:
    """`entered` collectives by rank and group -> (ranks that are behind in some group, with a text; ranks ahead)."""
    behind: dict[int, str] = {}
    ahead: set[int] = set()
    for group in dict.fromkeys(name for counts in entered.values() for name in counts):
        counts = {rank: theirs[group] for rank, theirs in entered.items() if group in theirs}
        least, most = min(counts.values()), max(counts.values())
        for rank, count in counts.items():
            if count < most:
                what = "files written" if group == SAVES else "collectives entered"
                behind[rank] = f" (in {group}: {count} {what}, others {most})"
            if count > least:
                ahead.add(rank)
    return behind, ahead


class Guard:
    """The watchdog of a run, from its begin to its end."""

    def __init__(self, run: Any):
        """Reads `run.history`, `.ledger`, `.screen`, and `.keeper`, which saves."""
        alone = not dist.is_initialized()
        rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self.signals, store = Signals(), shared_store()
        number = store.add(f"runs of {rank}", 1)  # the keys of an earlier run in this process are not ours
        self.dog = Watchdog(
            *(lambda: place_of(run), run.config.timeout, rank, world, dist.PrefixStore(f"watchdog/{number}", store)),
            signalled=self.signals.came,
            written=lambda: run.keeper.saver.bytes_written,
        )

    def stop(self, error: BaseException | None):
        """The run has ended; an error that not all ranks have seen leaves the others waiting."""
        self.dog.stop(failed=error is not None)
        self.signals.close()
