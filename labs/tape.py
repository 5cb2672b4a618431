"""What a function did, in order: matmuls, collectives, waits. It sees torch's own operations, so any style of call.

A collective is booked with the bytes that this rank sends of it, as common/comm.py counts them, by mesh dimension.
"""

from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.comm import Mesh

COMPUTE = ("mm", "bmm", "addmm", "baddbmm", "attention")


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
        self.names = {g.handle.group_name: g.name for g in mesh.groups.values() if g.handle is not None}

    def __enter__(self) -> "Tape":
        real = dist.Work.wait

        def wait(work: Any, *args: Any) -> Any:
            number = next((i for i, other in enumerate(self.works) if other is work), -1)
            self.events.append(Event("wait", number))
            if number >= 0:
                self.works[number] = None
            return real(work, *args)

        self.patch = mock.patch.object(dist.Work, "wait", wait)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        space, _, name = function.name().partition("::")
        name = name.split(".")[0]
        if space == "c10d":
            self.book(name.strip("_"), args)
        elif any(word in name for word in COMPUTE):
            self.events.append(Event("compute", name))
        result = function(*args, **kwargs or {})
        if space == "c10d":
            work = result[-1] if isinstance(result, tuple) else result
            self.works.append(dist.Work.unbox(work) if isinstance(work, torch.ScriptObject) else None)
        return result

    def book(self, name: str, args: tuple):
        """A collective begins."""
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        n, whole = group.size(), max((x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)), default=0)
        share = dict(allreduce=2 * (n - 1) / n, allgather=n - 1, reduce_scatter=n - 1, send=1.0, recv=0.0)
        sent = share.get(name, (n - 1) / n) * whole
        if name == "alltoall_base" and len(args) > 4 and args[4]:  # parts of different lengths
            sent = args[1].nbytes * (1 - args[4][group.rank()] / max(1, sum(args[4])))
        peer = args[2] if name in ("send", "recv") else -1
        self.events.append(Event("start", name, sent, self.names.get(group.group_name, "other"), peer))

    def sent(self) -> dict[str, float]:
        """Bytes that this rank has sent, by mesh dimension; dimensions with none are left out."""
        total: Counter[str] = Counter()
        for event in self.events:
            total[event.dim] += event.sent
        return {dim: round(amount, 6) for dim, amount in total.items() if amount}

    def starts(self) -> list[Event]:
        """The collectives and messages that were started."""
        return [event for event in self.events if event.kind == "start"]

    def waits(self) -> int:
        """How often something was waited for."""
        return sum(event.kind == "wait" for event in self.events)

    def hidden(self) -> int:
        """How many matmuls ran while something was under way."""
        under_way = count = 0
        for kind, *_ in self.events:
            under_way = max(0, under_way + (kind == "start") - (kind == "wait"))
            count += kind == "compute" and under_way > 0
        return count
