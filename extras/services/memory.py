"""An instrument that watches every tensor being born and freed, and so draws memory over time on any device.

PyTorch's dispatcher shows each operator's outputs to a `TorchDispatchMode`. A storage seen for the first time is an
allocation; a weak reference tells when it is freed. What a kernel allocates and frees inside itself is not seen.
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

from extras.services.tables import human, table
from extras.variants import Parts

KINDS = ("parameters", "gradients", "masters", "moments", "activations", "other")


class Event(NamedTuple):
    """One allocation (bytes > 0) or release (bytes < 0)."""

    seconds: float
    storage: int
    bytes: int


class MemoryTimeline(TorchDispatchMode):
    """Allocations and releases in order, each storage under one of KINDS."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """`clock`: the seconds of an event."""
        super().__init__()
        self.clock, self.watching = clock, False
        self.born = "other"  # the kind of new storages
        self.total: Counter[str] = Counter()  # bytes now alive, by kind
        self.kept = 0  # most bytes of activations at the end of a forward
        self.events: list[Event] = []
        self.kind: dict[int, str] = {}  # by running number of a storage
        self.known: dict[int, tuple[int, int]] = {}  # address of a live storage -> (running number, bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator, and note the storages of its inputs, which were there before, and of its outputs."""
        self.note_all((args, kwargs), "other")
        out = func(*args, **(kwargs or {}))
        self.note_all(out, self.born)
        return out

    def note_all(self, values: Any, kind: str):
        """Note the tensors among an operator's arguments or results; on the meta device they have no memory."""
        for value in tree_iter(values):
            if isinstance(value, Tensor) and value.device.type != "meta":
                self.note(value, kind)

    def note(self, tensor: Tensor, kind: str) -> int:
        """Look at a tensor's storage: it may be new, or have been emptied or filled. Returns its running number."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.known:
            self.known[address] = len(self.kind), 0
            self.kind[len(self.kind)] = kind
            weakref.finalize(storage, self.release, address).atexit = False
        self.resize(address, storage.nbytes())
        return self.known[address][0]

    def resize(self, address: int, n_bytes: int):
        """A known storage has so many bytes now."""
        number, before = self.known[address]
        if n_bytes != before:
            self.known[address] = number, n_bytes
            self.events.append(Event(self.clock(), number, n_bytes - before))
            self.total[self.kind[number]] += n_bytes - before

    def release(self, address: int):
        """Called when a storage dies."""
        self.resize(address, 0)
        del self.known[address]

    def __enter__(self) -> "MemoryTimeline":
        """Also watch storages that are emptied and filled in place, as ZeRO 3 does."""
        self.watching, right = True, torch.UntypedStorage.resize_
        self.right = right

        def resize_(storage: torch.UntypedStorage, n_bytes: int):
            right(storage, n_bytes)
            if storage._cdata in self.known:
                self.resize(storage._cdata, n_bytes)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error):
        """Stop."""
        torch.UntypedStorage.resize_, self.watching = self.right, False
        super().__exit__(*error)

    def label(self, kind: str, tensors: Iterable[Tensor | None]):
        """Put these tensors' storages under a kind, from their birth on."""
        for tensor in tensors:
            if tensor is not None:
                number, n_bytes = self.note(tensor, kind), tensor.untyped_storage().nbytes()
                self.total[self.kind[number]] -= n_bytes
                self.total[kind] += n_bytes
                self.kind[number] = kind

    def phase(self, name: str):
        """A listener of the clock: what is born in forward is an activation."""
        if self.born == "activations" and name != "forward":
            self.kept = max(self.kept, self.total["activations"])
        self.born = "activations" if name == "forward" else "other"

    def curves(self) -> tuple[list[float], dict[str, list[int]]]:
        """Times in seconds from the first event, and for each kind its bytes after each event."""
        times, totals = [], dict.fromkeys(KINDS, 0)
        curves: dict[str, list[int]] = {name: [] for name in KINDS}
        for event in self.events:
            totals[self.kind[event.storage]] += event.bytes
            times.append(event.seconds - self.events[0].seconds)
            for name in KINDS:
                curves[name].append(totals[name])
        return times, curves


def held_tensors(parts: Parts) -> dict[str, list[Tensor | None]]:
    """What a rank holds when gradients are complete, by kind."""
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
    """The most bytes of each kind that a rank has held, measured around updates. It labels them in a timeline, too."""

    def __init__(self, parts: Parts, timeline: MemoryTimeline):
        self.parts, self.timeline = parts, timeline
        self.most: dict[str, int] = {}
        parts.around(parts.optimizer, "step", self.update, by=__name__)
        if parts.pipeline is not None:
            parts.around(parts.pipeline, "forward", self.receive, by=__name__)

    def update(self, step: Callable, lr: float):
        """Around the optimizer's step."""
        self.measure()
        step(lr)
        self.measure()  # the first update makes the moments

    def receive(self, forward: Callable, i: int, stage: int, x: Tensor | None) -> Tensor:
        """Around a stage's forward: what has arrived for it waits for its backward, too."""
        if self.timeline.watching:
            self.timeline.label("activations", [x])
        return forward(i, stage, x)

    def measure(self):
        """Note what there is: bytes of distinct storages, and of activations what backward will need."""
        for kind, tensors in held_tensors(self.parts).items():
            sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
            self.most[kind] = max(self.most.get(kind, 0), sum(sizes.values()))
            if self.timeline.watching:
                self.timeline.label(kind, tensors)
        if self.timeline.watching:
            self.most["activations"] = self.timeline.kept


def memory_table(most: dict[str, int]) -> str:
    """The most bytes that were held of each kind."""
    rows = [[kind, human(n)] for kind, n in (most | dict(sum=sum(most.values()))).items()]
    return table([["memory", "held at most"], *rows])


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest point so far: the allocator's on a GPU, the resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
