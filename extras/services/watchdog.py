"""A watchdog on every rank: when nothing moves any more, it says who is behind, and ends the job.

One rank that hangs (a deadlock, a dead disk, a stopped process) makes all others wait in a collective, and from outside
all look alike. So a thread on each rank writes down in the store of the process group, now and then, which step and
phase its rank is in, and how many collectives it has entered in each of its groups.

WHO IS BEHIND. All ranks of a group enter the same collectives. So a rank that has entered fewer than another rank of
its group keeps that one waiting. The rank to blame is behind in some group and ahead in none. Times alone would not
show this on a GPU: there the hosts run ahead of their streams, and then all stop at the same line. Where no count
differs, it is the rank whose last movement lies farthest back. (Clocks of nodes should agree.)

BEFORE THE FIRST STEP a rank reads its data, draws its weights, loads a checkpoint. That may take longer than any step,
and nobody can see from outside whether it moves. So it is only warned of. (Whoever waits for such a rank is in a
collective, and those raise after twice `--timeout`.)

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
START = "start"  # the phase before the first step
SAVES = "saves"  # among the groups of collectives: here the files are counted that a rank has written


class Whereabouts(NamedTuple):
    """Where a rank is; `entered`: how many collectives since the start, by group ("tp of ranks 0 1"), and SAVES."""

    step: int
    phase: str
    collective: str  # the last one
    entered: dict[str, int]


class Sign(NamedTuple):
    """What a rank writes down for the others: where it is, when it last moved, and when it wrote this.

    Times in seconds of the clock; 0: never, or it will write no more.
    """

    at: Whereabouts
    moved: float
    wrote: float


def whereabouts_of(run: Any) -> Whereabouts:
    """Where a run is, from its parts as far as they are there."""
    entered, screen = dict(run.ledger.entered), getattr(run, "screen", None)
    entered[SAVES] = run.keeper.saver.files_written
    return Whereabouts(len(run.history), screen.clock.phase if screen else START, run.ledger.last, entered)


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
    """The thread of one rank. `where()` tells where it is; `seconds` without a change, anywhere, end the job."""

    def __init__(
        self,
        where: Callable[[], Whereabouts],
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
        self.where, self.seconds, self.rank, self.world, self.store, self.end = where, seconds, rank, world, store, end
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
            self.publish(Sign(self.where(), time.time(), 0.0))
            if failed:
                self.store.set("failed", "")

    def publish(self, sign: Sign):
        """Write it down."""
        self.store.set(f"sign/{self.rank}", json.dumps(sign))

    def watch(self):
        """The thread."""
        with suppress(RuntimeError):  # the store is gone, and with it the launcher
            self.look()
        self.stopped.set()

    def listen(self):
        """A thread beside it: where a cable is pulled, a store does not answer, and raises nothing."""
        while not self.stopped.wait(min(1.0, self.seconds / 4)):
            if time.monotonic() - self.heard > 2 * self.seconds + GRACE:
                return self.end(f"error: rank {self.rank} is cut off: the store of all ranks does not answer")

    def look(self):
        """Until stopped: publish where this rank is; at half the time warn. Shortly before all of it end the job, if
        this rank has begun to train.
        """
        seen, since, warned, asked, added = None, time.time(), False, False, 0
        while not self.stopped.wait(min(1.0, self.seconds / 40)):
            self.heard, where, written = time.monotonic(), self.where(), self.written()
            state = where, self.store.add("written", written - added)  # of all ranks
            added = written
            if state != seen:
                seen, since, warned = state, time.time(), False
            self.publish(Sign(where, since, time.time()))
            asked = self.signalled() or asked
            if self.lost(asked):
                return self.end("")
            idle = time.time() - since
            if idle > self.seconds / 2 and not warned:
                warned = True
                if self.store.add(f"warned/{where.step}", 1) == 1:
                    print(self.report(idle, "waiting"), file=sys.stderr, flush=True)
            if idle > 0.85 * self.seconds and where.phase != START:
                first = self.store.add("ended", 1) == 1
                if not first:
                    self.stopped.wait(self.seconds / 20)  # for the first one's report
                return self.end(self.report(idle, "ending the job") if first else "")

    def lost(self, asked: bool) -> bool:
        """Whether another rank is gone, and this one has had its time to leave. `asked`: a signal has come."""
        if not self.lost_since:
            gone = self.store.check(["failed"])
            if not gone and asked:
                gone = any(time.time() - sign.wrote > SILENT for sign in self.signs().values() if sign.wrote)
            self.lost_since = time.time() if gone else 0.0
        return self.lost_since > 0 and time.time() - self.lost_since > GRACE

    def signs(self) -> dict[int, Sign]:
        """Of all ranks."""
        signs = dict.fromkeys(range(self.world), Sign(Whereabouts(0, START, "", {}), 0.0, 0.0))
        for rank in signs:
            if self.store.check([f"sign/{rank}"]):
                at, *times = json.loads(self.store.get(f"sign/{rank}"))
                signs[rank] = Sign(Whereabouts(*at), *times)
        return signs

    def report(self, idle: float, then: str) -> str:
        """Who is behind, and a table of all ranks, that one first."""
        now, signs = time.time(), self.signs()
        behind, ahead = compare({rank: sign.at.entered for rank, sign in signs.items()})
        order = sorted(signs, key=lambda r: (r not in behind, r in ahead, signs[r].at.step, signs[r].moved))
        first, at = order[0], signs[order[0]].at
        lines = [
            f"error: no progress for {idle:.1f} s (--timeout {self.seconds:g}), {then}: rank {first} is behind, "
            f"in step {at.step + 1}, {at.phase}, after entering {at.collective or 'no collective'}"
            + behind.get(first, "")
        ]
        for rank in order:
            at, moved, _ = signs[rank]
            ago = f"last moved {now - moved:.1f} s ago" if moved else "never heard of"
            last = f"last collective {at.collective or 'none'} (number {sum(at.entered.values())})"
            lines.append(f"  rank {rank}: step {at.step + 1}, {at.phase}; {last}; {ago}")
        return "\n".join(lines)


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
        store = dist.PrefixStore(f"watchdog/{number}", store)
        self.dog = Watchdog(
            *(lambda: whereabouts_of(run), run.config.timeout, rank, world, store),
            signalled=self.signals.came,
            written=lambda: run.keeper.saver.bytes_written,
        )

    def stop(self, error: BaseException | None):
        """The run has ended; an error that not all ranks have seen leaves the others waiting."""
        self.dog.stop(failed=error is not None)
        self.signals.close()
