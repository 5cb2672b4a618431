"""What every rank sends: calls and bytes by mesh dimension and operation, as common/comm.py books them."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from common.comm import Group


@dataclass
class Ledger:
    """Calls and bytes sent by this rank, by (mesh dimension, operation), and seconds waited, since the last `take`."""

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    wait_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[str, Any, Any]] = field(default_factory=list)
    entered: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # collectives by dimension, never cleared
    last: str = ""  # the call entered last

    def book(self, group: Group, operation: str, n_bytes: float):
        """Enter one call that sends `n_bytes` from this rank."""
        self.entered[group.name] += operation != "send"
        self.last = f"{group.name} {operation}"
        self.calls[group.name, operation] += 1
        self.bytes[group.name, operation] += n_bytes

    @contextmanager
    def waiting(self, group: Group) -> Iterator[None]:
        """Book the enclosed time, during which this rank (or its GPU's compute stream) does nothing but wait."""
        if group.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self.events.append((group.name, first, last))
        else:
            start = time.perf_counter()
            yield
            self.wait_seconds[group.name] += time.perf_counter() - start

    def take(self) -> dict[str, Any]:
        """The entries as metrics, `traffic` {dim: {operation: bytes}}, `calls` and `wait_seconds`; then start anew."""
        for name, first, last in self.events:
            last.synchronize()
            self.wait_seconds[name] += first.elapsed_time(last) / 1e3
        traffic, calls = defaultdict(dict), defaultdict(dict)
        for (dim, operation), n_bytes in self.bytes.items():
            traffic[dim][operation] = n_bytes
            calls[dim][operation] = self.calls[dim, operation]
        taken = dict(traffic=dict(traffic), calls=dict(calls), wait_seconds=dict(self.wait_seconds))
        for entries in (self.calls, self.bytes, self.wait_seconds, self.events):
            entries.clear()
        return taken
