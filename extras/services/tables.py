"""Tables of a run: the messages that a rank sends, and how every parameter is sharded and its gradient reduced."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from common.comm import Group, Mesh
from common.layout import Shard, layout_of
from common.model import Decoder
from extras.services.ranks import gather_objects
from extras.plan.tables import table


def human(n_bytes: float) -> str:
    """Format a number of bytes: 1536 -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:,.2f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.2f} GiB"


class Ledger:
    """Counts this rank's calls of common/comm.py, and the bytes that they send, since the last `take`."""

    def __init__(self):
        self.bytes: dict[str, Counter] = defaultdict(Counter)  # by dimension and operation
        self.calls: dict[str, Counter] = defaultdict(Counter)

    def book(self, operation: str, group: Group, tensor: Tensor, share: float):
        """Count one operation: this rank sends `share` times the bytes of `tensor`. Can serve as `comm.observer`."""
        self.bytes[group.name][operation] += round(share * tensor.nbytes)
        self.calls[group.name][operation] += 1

    def take(self) -> dict[str, Any]:
        """Return the counts as metrics, `traffic` {dim: {operation: bytes}} and `calls`, and reset them."""
        taken = dict(traffic=dict(self.bytes), calls=dict(self.calls))
        self.__init__()
        return taken


def traffic_table(taken: dict[str, Any]) -> str:
    """A table of a step's calls and bytes; `taken`: what `Ledger.take` has returned."""
    rows = [["traffic of a step", "calls", "sent"]]
    for dim, operations in taken["traffic"].items():
        for operation, sent in operations.items():
            rows.append([f"{dim} {operation}", f"{taken['calls'][dim][operation]:,}", human(sent)])
    return table(rows)


def full_shape(shape: Iterable[int], shards: tuple[Shard, ...]) -> list[int]:
    """The shape of a whole tensor, computed from the `shape` of a rank's part and the `shards` that cut it out."""
    shape = list(shape)
    for shard in reversed(shards):
        shape[shard.dim] = shard.full
    return shape


def reduction_table(model: Decoder, mesh: Mesh) -> str:
    """A table of each parameter's full shape and, for each mesh dimension, Shard(d), Partial or Replicate.

    Shard(d): dimension d of the parameter is cut. Partial: the gradient is summed over the ranks of the mesh dimension.
    The pp column says how many ranks of pp hold the parameter. Other groups that shard a parameter or sum its gradient,
    such as ep, have columns, too. A star for a number: a row for all layers that have the parameter. A collective.
    """
    rows, dims = {}, [*mesh.groups]
    for name, param in model.named_parameters():
        record = layout_of(param)
        summed = {*record.partial_over, *(("dp", "cp") if record.data_dim == "data" else (record.data_dim,))}
        cuts = {shard.over: f"Shard({shard.dim})" for shard in record.shards}
        cells = [cuts.get(dim, "Partial" if dim in summed else "Replicate") for dim in dims]
        rows[name] = [str(full_shape(param.shape, record.shards)), *cells]
    everyone, merged, stages = gather_objects(rows), {}, mesh.sizes.get("pp", 0)
    holders = Counter(name for rows in everyone for name in rows)
    for name, row in (entry for rows in everyone for entry in rows.items()):
        if stages:
            row[1 + dims.index("pp")] = f"on {holders[name] * stages // mesh.world} of {stages}"
        merged.setdefault(re.sub(r"\.\d+\.", ".*.", name), row)
    lines = [["parameter", "full shape", *dims], *([name, *row] for name, row in merged.items())]
    shown = [cells for cells in zip(*lines, strict=True) if cells[0] in mesh.sizes or {*cells[1:]} != {"Replicate"}]
    return table([*map(list, zip(*shown, strict=True))])
