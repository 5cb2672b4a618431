"""Text tables, bytes for a person to read, and the table that shows how every parameter is cut."""

import re
from collections import Counter
from collections.abc import Iterable

from common.comm import Mesh
from common.layout import Shard, layout_of
from common.model import Decoder
from extras.services.ranks import gather_objects
from extras.theory.tables import table


def human(n_bytes: float) -> str:
    """Bytes for a person to read."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:,.2f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.2f} GiB"


def full_shape(shape: Iterable[int], shards: tuple[Shard, ...]) -> list[int]:
    """The shape of the whole tensor, from that of a rank's part and its cuts."""
    shape = list(shape)
    for shard in reversed(shards):
        shape[shard.dim] = shard.full
    return shape


def reduction_rows(model: Decoder, dims: list[str]) -> dict[str, list[str]]:
    """By name of a parameter: its full shape, and by dimension Shard(its own dimension), Partial or Replicate.

    Partial: its gradient is a sum over these ranks.
    """
    rows = {}
    for name, param in model.named_parameters():
        record = layout_of(param)
        summed = {*record.partial_over, *(("dp", "cp") if record.data_dim == "data" else (record.data_dim,))}
        cuts = {shard.over: f"Shard({shard.dim})" for shard in record.shards}
        cells = [cuts.get(dim, "Partial" if dim in summed else "Replicate") for dim in dims]
        rows[name] = [str(full_shape(param.shape, record.shards)), *cells]
    return rows


def reduction_table(model: Decoder, mesh: Mesh) -> str:
    """The table of all ranks' parameters: along the mesh's dimensions, and other groups that records name, such as ep.

    Layers share a row, with a star for their number. Along pp it says how many of the ranks have a parameter. A
    collective.
    """
    dims = [*mesh.groups]
    stages = dict(gather_objects((mesh["pp"].rank if "pp" in dims else 0, reduction_rows(model, dims))))
    holders = Counter(name for rows in stages.values() for name in rows)
    merged: dict[str, list[str]] = {}
    for name, row in (entry for rank in sorted(stages) for entry in stages[rank].items()):
        if "pp" in dims:
            row[1 + dims.index("pp")] = f"on {holders[name]} of {len(stages)}"
        merged.setdefault(re.sub(r"\.\d+\.", ".*.", name), row)
    lines = [["parameter", "full shape", *dims], *([name, *row] for name, row in merged.items())]
    shown = [cells for cells in zip(*lines, strict=True) if cells[0] in mesh.sizes or {*cells[1:]} != {"Replicate"}]
    return table([*map(list, zip(*shown, strict=True))])
