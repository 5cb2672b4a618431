"""Tracks when the storage of each tensor is allocated and freed, to draw memory over time on any device.

PyTorch's dispatcher shows each operator's outputs to a `TorchDispatchMode`. A storage seen for the first time is an
allocation; a weak reference tells when it is freed. Memory that a kernel uses only while it runs is not seen.
"""

import resource
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from extras.services.clocks import Clock
from extras.services.tables import human, table
from extras.variants import Parts

KINDS = ("parameters", "gradients", "masters", "moments", "activations", "other")


class Event(NamedTuple):
    """One allocation (bytes > 0) or release (bytes < 0) of a storage; `storage`: the storage's running number."""

    seconds: float
    storage: int
    bytes: int


class MemoryTimeline(TorchDispatchMode):
    """Records allocations and releases in order, and assigns each storage to one of KINDS."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """`clock`: returns the present time in seconds."""
        super().__init__()
        self.clock, self.watching = clock, False
        self.born = "other"  # the kind of new storages
        self.total: Counter[str] = Counter()  # bytes allocated now, by kind
        self.kept = 0  # most bytes of activations at the end of a forward
        self.events: list[Event] = []
        self.kind: dict[int, str] = {}  # running number of a storage -> its kind
        self.known: dict[int, tuple[int, int]] = {}  # address of a live storage -> (running number, bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator, and note the storages of its inputs, which existed before, and of its outputs."""
        self.note_all((args, kwargs), "other")
        out = func(*args, **(kwargs or {}))
        self.note_all(out, self.born)
        return out

    def note_all(self, values: Any, kind: str):
        """Note the tensors in an operator's arguments or results; skip the meta device, which allocates no memory."""
        for value in tree_iter(values):
            if isinstance(value, Tensor) and value.device.type != "meta":
                self.note(value, kind)

    def note(self, tensor: Tensor, kind: str) -> int:
        """Note a tensor's storage, which may be new or have changed its size; returns the storage's running number."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.known:
            self.known[address] = len(self.kind), 0
            self.kind[len(self.kind)] = kind
            weakref.finalize(storage, self.release, address).atexit = False
        self.resize(address, storage.nbytes())
        return self.known[address][0]

    def resize(self, address: int, n_bytes: int):
        """Record the new size of a known storage, in bytes."""
        number, before = self.known[address]
        if n_bytes != before:
            self.known[address] = number, n_bytes
            self.events.append(Event(self.clock(), number, n_bytes - before))
            self.total[self.kind[number]] += n_bytes - before

    def release(self, address: int):
        """Record that a storage has been freed."""
        self.resize(address, 0)
        del self.known[address]

    def __enter__(self) -> "MemoryTimeline":
        """Start watching operators, and also `resize_`, by which ZeRO 3 frees and allocates a storage in place."""
        self.watching, self.right = True, torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, n_bytes: int):
            self.right(storage, n_bytes)
            if storage._cdata in self.known:
                self.resize(storage._cdata, n_bytes)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error):
        """Stop watching."""
        torch.UntypedStorage.resize_, self.watching = self.right, False
        super().__exit__(*error)

    def label(self, kind: str, tensors: Iterable[Tensor | None]):
        """Assign these tensors' storages to a kind, retroactively from their allocation on."""
        for tensor in tensors:
            if tensor is not None:
                number, n_bytes = self.note(tensor, kind), tensor.untyped_storage().nbytes()
                self.total[self.kind[number]] -= n_bytes
                self.total[kind] += n_bytes
                self.kind[number] = kind

    def phase(self, name: str):
        """Begin a phase (see clocks.py). Forward allocates activations; `kept` is their maximum at a forward's end."""
        if self.born == "activations" and name != "forward":
            self.kept = max(self.kept, self.total["activations"])
        self.born = "activations" if name == "forward" else "other"

    def curves(self) -> tuple[list[float], dict[str, list[int]]]:
        """Times in seconds from the first event, and for each kind its bytes after each event."""
        times, totals = [], dict.fromkeys(KINDS, 0)
        curves: dict[str, list[int]] = {name: [] for name in KINDS}
        for seconds, number, n_bytes in self.events:
            totals[self.kind[number]] += n_bytes
            times.append(seconds - self.events[0][0])
            for name in KINDS:
                curves[name].append(totals[name])
        return times, curves


def held_tensors(parts: Parts) -> dict[str, list[Tensor | None]]:
    """The tensors that a rank holds when gradients are complete, by kind."""
    params, units = list(parts.model.parameters()), parts.units
    rule = parts.optimizer.torch_optimizer
    masters = [unit.master for unit in units] or list(parts.optimizer.masters.values())
    weights = [*params, *(unit.shard for unit in units)]
    own = {tensor.untyped_storage()._cdata for tensor in weights}
    states = [value for state in getattr(rule, "state", {}).values() for value in state.values()]
    return {
        "parameters": weights,
        "gradients": [*(param.grad for param in params), *(t for u in units for t in (u.gradient, u.grad_shard))],
        "masters": [tensor for tensor in masters if tensor.untyped_storage()._cdata not in own],
        "moments": [value for value in states if isinstance(value, Tensor) and value.dim()],
    }


class MemoryWatch:
    """Measures the most bytes of each kind that a rank holds before or after updates; labels a timeline's tensors."""

    def __init__(self, parts: Parts, timeline: MemoryTimeline, clock: Clock):
        self.parts, self.timeline = parts, timeline
        self.most: dict[str, int] = {}
        clock.listeners.append(self.hear)

    def hear(self, phase: str):
        """Begin a phase (see clocks.py). Measure before and after updates: the first update creates the moments."""
        self.timeline.phase(phase)
        if phase in ("optimizer", "data"):
            self.measure()

    def measure(self):
        """Update `most`. A shared storage counts once. Activations are measured only at the end of a forward."""
        for kind, tensors in held_tensors(self.parts).items():
            sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
            self.most[kind] = max(self.most.get(kind, 0), sum(sizes.values()))
            if self.timeline.watching:
                self.timeline.label(kind, tensors)
        if self.timeline.watching:
            self.most["activations"] = self.timeline.kept


def memory_table(most: dict[str, int]) -> str:
    """A table of `most`: for each kind, the most bytes that were held."""
    rows = [[kind, human(n)] for kind, n in (most | dict(sum=sum(most.values()))).items()]
    return table([["memory", "held at most"], *rows])


def peak_memory(device: torch.device) -> int:
    """The peak of memory so far, in bytes: on a GPU what PyTorch's allocator gave out, on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
