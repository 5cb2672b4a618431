"""What a function did, in order: matmuls, collectives, waits. It sees torch's own operations, so any style of call.

A collective is booked with the bytes that this rank sends of it, as common/comm.py counts them, by mesh dimension.
Functional ones (torch.distributed._functional_collectives) count alike: `wait_tensor` is their wait.
"""

import weakref
from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.comm import Mesh
from common.model import Decoder

COMPUTE = ("mm", "bmm", "addmm", "baddbmm", "attention")
NAMES = dict(all_reduce="allreduce", all_to_all_single="alltoall_base")  # what functional collectives are called here


class Event(NamedTuple):
    """Something that happened."""

    kind: str  # "start", "wait", "compute", or "mark", which a case puts among the events
    what: Any  # the operation; of a wait, the number of the start (-1: it was before the tape); what was marked
    sent: float = 0.0  # bytes
    dim: str = ""
    peer: int = -1  # of a message, its rank in the group


class Tape(TorchDispatchMode):
    """Inside `with Tape(mesh) as tape:` everything is recorded, in backward too."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.events: list[Event] = []
        self.works: list[Any] = []  # of all starts; None when it has been waited for, or it would hold memory
        self.mesh = mesh

    def __enter__(self) -> "Tape":
        real = dist.Work.wait

        def wait(work: Any, *args: Any) -> Any:
            self.waited(next((i for i, other in enumerate(self.works) if other is work), -1))
            return real(work, *args)

        self.patch = mock.patch.object(dist.Work, "wait", wait)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator; note what it waits for before, and what it starts after."""
        space, _, name = function.name().partition("::")
        name = name.split(".")[0].strip("_")
        if space == "_c10d_functional" and name == "wait_tensor":
            self.waited_for(args[0])
        if AsyncCollectiveTensor in types:  # its first use waits
            for x in tree_leaves(args):
                if isinstance(x, AsyncCollectiveTensor):
                    self.waited_for(x.elem)
        if space == "aten" and any(word in name for word in COMPUTE):
            self.events.append(Event("compute", name))
        result = function(*args, **kwargs or {})
        if space == "_c10d_functional" and len(args) > 1:
            self.started_functional(name, args, result)
        elif space == "c10d":
            self.started(name, args, result)
        return result

    def waited_for(self, result: Tensor):
        """A functional collective's result: known by its place in memory."""
        place = result.untyped_storage()._cdata
        self.waited(next((i for i, work in enumerate(self.works) if type(work) is int and work == place), -1))

    def started_functional(self, name: str, args: tuple, result: Tensor):
        """Of `torch.distributed._functional_collectives`: arguments end with the group, often after its splits."""
        splits, group = args[-2:]
        group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        self.book(NAMES.get(name, name), (*args, result), group, splits if isinstance(splits, list) else ())
        self.works.append(result.untyped_storage()._cdata)

    def started(self, name: str, args: tuple, result: Any):
        """Of torch.distributed: the group is among the arguments, splits are the fifth; a handle is returned."""
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        self.book(name, args, group, args[4] if len(args) > 4 else ())
        work = result[-1] if isinstance(result, tuple) else result
        self.works.append(dist.Work.unbox(work) if isinstance(work, torch.ScriptObject) else None)

    def waited(self, number: int):
        """Something has been waited for."""
        self.events.append(Event("wait", number))
        if number >= 0:
            self.works[number] = None

    def book(self, name: str, args: tuple, group: dist.ProcessGroup, splits: Any):
        """A collective begins. `splits`: in an all-to-all, how many rows go to each rank, if not alike."""
        n, sizes = group.size(), [x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)]
        share = dict(allreduce=2 * (n - 1) / n, allgather=n - 1, reduce_scatter=n - 1, send=1.0, recv=0.0)
        sent = share.get(name, (n - 1) / n) * max(sizes, default=0)
        if name == "alltoall_base" and splits:
            given = sizes[isinstance(args[1], Tensor)]  # torch's own has the output first
            sent = given * (1 - splits[group.rank()] / max(1, sum(splits)))
        peer = args[2] if name in ("send", "recv") else -1
        names = {g.handle.group_name: g.name for g in self.mesh.groups.values() if g.handle is not None}
        self.events.append(Event("start", name, sent, names.get(group.group_name, "other"), peer))

    def sent(self, since: int = 0) -> dict[str, float]:
        """Bytes that this rank has sent, by mesh dimension; dimensions with none are left out."""
        total: Counter[str] = Counter()
        for event in self.events[since:]:
            total[event.dim] += event.sent
        return {dim: round(amount, 6) for dim, amount in total.items() if amount}

    def starts(self) -> list[Event]:
        """The collectives and messages that were started."""
        return [event for event in self.events if event.kind == "start"]

    def waits(self) -> int:
        """How often something was waited for."""
        return sum(event.kind == "wait" for event in self.events)

    def left(self) -> list[str]:
        """What has been started and not been waited for."""
        return [event.what for event, work in zip(self.starts(), self.works, strict=True) if work is not None]

    def hidden(self, word: str = "") -> int:
        """How many matmuls ran while something was under way: of the operations with this word in their names."""
        under_way, started, count = set(), 0, 0
        for kind, what, *_ in self.events:
            if kind == "start":
                under_way |= {started} if word in what else set()
                started += 1
            elif kind == "wait":
                under_way -= {what}
            count += kind == "compute" and bool(under_way)
        return count


class Graphs:
    """How many graphs of a model's layers are alive, and how often each layer has run."""

    def __init__(self, model: Decoder):
        self.alive, self.most, self.runs = weakref.WeakSet(), 0, Counter()
        for number, layer in model.model.layers.items():
            layer.mlp.register_forward_pre_hook(lambda *_, number=number: self.runs.update([number]))
            layer.mlp.register_forward_hook(self.ran)

    def ran(self, _mlp: Any, _inputs: tuple, y: Tensor):
        """A layer has."""
        if y.grad_fn is not None:
            y.grad_fn.metadata["token"] = token = torch.nn.Module()  # it lives as long as the graph
            self.alive.add(token)
            self.most = max(self.most, len(self.alive))
