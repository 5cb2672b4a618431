"""Text tables, bytes for a person to read, and the table that shows how every parameter is cut."""

import re
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from common.comm import Mesh
from common.layout import Shard, layout_of
from common.model import Decoder
from extras.services.launch import gather_objects
from extras.theory.tables import table


def human(n_bytes: float) -> str:
    """Bytes for a person to read."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:,.2f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.2f} GiB"


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes held by the distinct storages behind these tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def full_shape(shape: Iterable[int], shards: tuple[Shard, ...]) -> list[int]:
    """The shape of the whole tensor, from that of a rank's part and its cuts."""
    shape = list(shape)
    for shard in reversed(shards):
        shape[shard.dim] = shard.full
    return shape


def reduction_rows(model: Decoder, dims: list[str]) -> dict[str, list[str]]:
    """By name of a parameter: its full shape, and by dimension Shard(its own dimension), Partial or Replicate.

    Partial: its gradient is a sum over these ranks. Of layers only one is shown, with a star for its number.
    """
    rows = {}
    for name, param in model.named_parameters():
        record = layout_of(param)
        summed = {*record.partial_over, *(("dp", "cp") if record.data_dim == "data" else (record.data_dim,))}
        cells = []
        for dim in dims:
            cuts = [f"Shard({shard.dim})" for shard in record.shards if shard.over == dim]
            cells.append(", ".join(cuts) or ("Partial" if dim in summed else "Replicate"))
        rows.setdefault(re.sub(r"\.\d+\.", ".*.", name), [str(full_shape(param.shape, record.shards)), *cells])
    return rows


def reduction_table(model: Decoder, mesh: Mesh) -> str:
    """The table of all ranks' parameters: along the mesh's dimensions, and other groups that records name, such as ep.

    Along pp it says on how many of the ranks a parameter is. A collective.
    """
    dims, names = [*mesh.groups], [name for name, _ in model.named_parameters()]
    everyone = gather_objects((mesh["pp"].rank if "pp" in dims else 0, reduction_rows(model, dims), names))
    stages = {rank: (rows, names) for rank, rows, names in everyone}  # ranks of a stage have the same names
    holders = Counter(name for _, names in stages.values() for name in names)
    merged: dict[str, list[str]] = {}
    for rows, names in (stages[rank] for rank in sorted(stages)):
        for name in names:
            kind = re.sub(r"\.\d+\.", ".*.", name)
            row = merged.setdefault(kind, list(rows[kind]))
            if "pp" in dims:
                row[1 + dims.index("pp")] = f"on {holders[name]} of {len(stages)}"
    lines = [["parameter", "full shape", *dims], *([name, *row] for name, row in merged.items())]
    shown = [cells for cells in zip(*lines, strict=True) if cells[0] in mesh.sizes or {*cells[1:]} != {"Replicate"}]
    return table([*map(list, zip(*shown, strict=True))])
