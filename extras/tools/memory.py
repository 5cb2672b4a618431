"""Tracks the memory of tensors: what is allocated, of which kind it is, and when it is freed.

PyTorch's dispatcher shows each operator's outputs to a `TorchDispatchMode`. A storage that is seen
for the first time is an allocation; a weak reference tells when it is freed. Memory that a kernel
uses only while it runs is not seen.
"""

import weakref
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Kinds of memory. A tensor that could be of several is of the first of them. Activations: what
# autograd saves for backward. Messages: what a collective reads or fills. Other: mostly temporary.
KINDS = ("weights", "optimizer state", "gradients", "activations", "messages", "other")


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


class Memory(TorchDispatchMode):
    """Records each allocation and release while it is entered. A storage is of one of KINDS."""

    def __init__(self):
        super().__init__()
        self.kinds: list[str] = []  # of each storage, by its number
        self.events: list[tuple[int, int]] = []  # (number of a storage, change of its bytes)
        self.live: dict[int, list[int]] = {}  # address of a live storage -> [number, bytes]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and note the storages of its outputs."""
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_of(out):
            self.note(tensor)
        return out

    def __enter__(self) -> "Memory":
        """Watch operators, and `resize_`, by which ZeRO 3 allocates and frees a storage in place.

        `resize_` is a method of storages, which the dispatcher does not show.
        """
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, n_bytes: int):
            plain(storage, n_bytes)
            if storage._cdata in self.live:
                self.resize(storage._cdata, n_bytes)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any):
        """Stop watching."""
        self.patch.stop()
        super().__exit__(*error)

    def note(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, which may be new; None on the meta device."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type == "meta":  # no memory
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.live:
            self.live[address] = [len(self.kinds), 0]
            self.kinds.append(KINDS[-1])
            self.resize(address, storage.nbytes())
            weakref.finalize(storage, self.release, address).atexit = False
        return self.live[address][0]

    def resize(self, address: int, n_bytes: int):
        """Record the new size of a storage."""
        number, before = self.live[address]
        self.events.append((number, n_bytes - before))
        self.live[address][1] = n_bytes

    def release(self, address: int):
        """Record that a storage has been freed."""
        self.resize(address, 0)
        del self.live[address]

    def label(self, kind: str, tensors: Iterable[Tensor | None]):
        """Say what kind these tensors have been since their allocation.

        A tensor that already has an earlier one of KINDS keeps it.
        """
        for tensor in tensors:
            number = None if tensor is None else self.note(tensor)
            if number is not None:
                self.kinds[number] = min(kind, self.kinds[number], key=KINDS.index)

    def label_training(self, model: nn.Module, optimizer: Any):
        """Label the weights, gradients and states that exist now. `optimizer`: a step's."""
        gradients = [param.grad for param in model.parameters()]
        weights = [*model.parameters(), *model.buffers()]
        for unit in getattr(optimizer, "units", ()):  # of ZeRO
            gradients += [unit.local_grad, unit.summed_grad]
            weights += [unit.flat, unit.shard]
        for _, new_sum, pending in getattr(optimizer, "in_flight", ()):
            gradients += [new_sum, *pending.tensors]
        states = [*optimizer.masters.values(), *optimizer.torch_optimizer.state.values()]
        self.label("weights", weights)
        self.label("gradients", gradients)
        self.label("optimizer state", tensors_of(states))

    def held(self, n_events: int | None = None) -> dict[str, int]:
        """Bytes of each kind after the first `n_events` events; by default, now."""
        held = dict.fromkeys(KINDS, 0)
        for number, change in self.events[:n_events]:
            held[self.kinds[number]] += change
        return held

    def peak(self, since: int = 0) -> dict[str, int]:
        """Bytes of each kind at the moment, from event `since` on, when their sum is largest."""
        sums = list(accumulate(change for _, change in self.events))
        return self.held(1 + max(range(since, len(sums)), key=sums.__getitem__))


def human(n_bytes: float) -> str:
    """A number of bytes in the largest unit that it reaches: 1536 -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.2f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.2f} GiB"
