"""What a function did, in order: matmuls, collectives, waits. It sees torch's own operations, so any style of call.

A collective is booked with the bytes that this rank sends of it, as common/comm.py counts them, by mesh dimension.
"""

from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.comm import Mesh

COMPUTE = ("mm", "bmm", "addmm", "baddbmm", "attention")


class Tape(TorchDispatchMode):
    """Inside `with Tape(mesh) as tape:` everything is recorded, in backward too.

    `events`: (kind, what, bytes, dimension); kind is "start", "wait", "compute" or, by `mark`, "mark".
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.events: list[tuple[str, str, float, str]] = []
        self.names = {g.handle.group_name: g.name for g in mesh.groups.values() if g.handle is not None}

    def __enter__(self) -> "Tape":
        real, events = dist.Work.wait, self.events

        def wait(work: Any, *args: Any) -> Any:
            events.append(("wait", "", 0, ""))
            return real(work, *args)

        self.patch = mock.patch.object(dist.Work, "wait", wait)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        space, _, name = function.name().partition("::")
        if space == "c10d":
            self.book(name, args)
        elif any(word in name.split(".")[0] for word in COMPUTE):
            self.events.append(("compute", name, 0, ""))
        return function(*args, **kwargs or {})

    def book(self, name: str, args: tuple):
        """A collective begins."""
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        n, whole, name = (
            group.size(),
            max((t.nbytes for t in tensors_of(args)), default=0),
            name.split(".")[0].strip("_"),
        )
        share = dict(allreduce=2 * (n - 1) / n, allgather=n - 1, reduce_scatter=n - 1, send=1.0, recv=0.0)
        sent = share.get(name, (n - 1) / n) * whole
        if name == "alltoall_base" and len(args) > 4 and args[4]:  # parts of different lengths
            sent = args[1].nbytes * (1 - args[4][group.rank()] / max(1, sum(args[4])))
        self.events.append(("start", name, sent, self.names.get(group.group_name, "other")))

    def mark(self, text: str):
        """Put a mark among the events."""
        self.events.append(("mark", text, 0, ""))

    def sent(self) -> dict[str, float]:
        """Bytes that this rank has sent, by mesh dimension; dimensions with none are left out."""
        total: Counter[str] = Counter()
        for _, _, amount, dim in self.events:
            total[dim] += amount
        return {dim: round(amount, 6) for dim, amount in total.items() if amount}

    def starts(self, *names: str) -> int:
        """How many collectives (with one of these names) were started."""
        return sum(kind == "start" and (not names or what in names) for kind, what, _, _ in self.events)

    def hidden(self) -> int:
        """How many matmuls ran while something was under way."""
        under_way = count = 0
        for kind, *_ in self.events:
            under_way = max(0, under_way + (kind == "start") - (kind == "wait"))
            count += kind == "compute" and under_way > 0
        return count


def tensors_of(args: Any) -> list[Tensor]:
    """All tensors among arguments."""
    if isinstance(args, Tensor):
        return [args]
    return [t for arg in args for t in tensors_of(arg)] if isinstance(args, list | tuple) else []
