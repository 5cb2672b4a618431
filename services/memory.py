"""An instrument that watches every tensor being born and freed, and so draws memory over time on any device.

PyTorch's dispatcher shows each operator's outputs to a `TorchDispatchMode`. A storage seen for the first time is an
allocation; a weak reference tells when it is freed. What a kernel allocates and frees inside itself is not seen.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
BORN_IN = {"forward": "activations", "receive": "activations"}  # in other phases "other", until `label` knows better


class Event(NamedTuple):
    """One allocation (bytes > 0) or release (bytes < 0)."""

    seconds: float
    storage: int
    bytes: int


class MemoryTimeline(TorchDispatchMode):
    """Allocations and releases in order, each storage under one of CATEGORIES."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """`clock`: the seconds of an event."""
        super().__init__()
        self.clock = clock
        self.total: Counter[str] = Counter()  # bytes now alive, by category
        self.events: list[Event] = []
        self.category: dict[int, str] = {}
        self.number: dict[int, int] = {}  # address of a live storage -> its running number
        self.size: dict[int, int] = {}  # address of a live storage -> its bytes as last seen
        self.resizable: dict[int, weakref.ref] = {}  # storages of parameters: ZeRO-3 empties and refills them in place
        self.birth_category = "other"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator and note the storages of its inputs, which were there before, and of its outputs."""
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.note(tensor, "other")
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.note(tensor, self.birth_category)
        self.look_again()
        return out

    def look_again(self):
        """Record which parameters have been emptied or filled."""
        for storage in [ref() for ref in self.resizable.values()]:
            self.look(storage)

    def look(self, storage: torch.UntypedStorage):
        """Record that a known storage has changed its size."""
        address, n_bytes = storage._cdata, storage.nbytes()
        if n_bytes != self.size[address]:
            self.enter(self.number[address], n_bytes - self.size[address])
            self.size[address] = n_bytes

    def enter(self, number: int, n_bytes: int):
        """Record an event of a storage."""
        self.events.append(Event(self.clock(), number, n_bytes))
        self.total[self.category[number]] += n_bytes

    def note(self, tensor: Tensor, category: str) -> int:
        """Record the tensor's storage under `category` if it is new; returns its running number."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.number:
            number = self.number[address] = len(self.category)
            self.category[number] = category
            self.size[address] = storage.nbytes()
            self.enter(number, storage.nbytes())
            weakref.finalize(storage, self.release, address).atexit = False
        return self.number[address]

    def release(self, address: int):
        """Called when a storage dies."""
        self.resizable.pop(address, None)
        self.enter(self.number.pop(address), -self.size.pop(address))

    def label(self, category: str, tensors: Iterable[Tensor | None]):
        """Put these tensors' storages under `category`, from their birth on."""
        for tensor in tensors:
            if tensor is not None:
                number, n_bytes = self.note(tensor, category), self.size[tensor.untyped_storage()._cdata]
                self.total[self.category[number]] -= n_bytes
                self.total[category] += n_bytes
                self.category[number] = category
                if category == "parameters":
                    storage = tensor.untyped_storage()
                    self.resizable[storage._cdata] = weakref.ref(storage)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch the enclosed operators, those of forward as activations."""
        self.birth_category = BORN_IN.get(name, "other")
        with self:
            yield
        self.birth_category = "other"

    def live(self, category: str) -> int:
        """Bytes now alive under `category`."""
        return self.total[category]

    def curves(self) -> tuple[list[float], dict[str, list[int]]]:
        """Times in seconds from the first event, and for each category its bytes after each event."""
        times, totals = [], dict.fromkeys(CATEGORIES, 0)
        curves: dict[str, list[int]] = {name: [] for name in CATEGORIES}
        for event in self.events:
            totals[self.category[event.storage]] += event.bytes
            times.append(event.seconds - self.events[0].seconds)
            for name in CATEGORIES:
                curves[name].append(totals[name])
        return times, curves


def storage_bytes_made_by(function, *args) -> tuple[int, object]:
    """Run `function(*args)`; returns the bytes of all storages it created that are still alive, and its result."""
    timeline = MemoryTimeline()
    with timeline.phase("forward"), torch.enable_grad():
        result = function(*args)
    return timeline.live("activations"), result
