"""Text tables, and bytes for a person to read."""

import re
import typing

from torch import Tensor, nn

from common.layout import layout_of


def table(rows: list[list[str]]) -> str:
    """Rows of cells, the first a header, as an aligned text table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def human(n_bytes: float | None) -> str:
    """Bytes for a person to read."""
    if n_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024 or unit == "GiB":
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:,.2f} {unit}"
        n_bytes /= 1024


def bytes_of(tensors: typing.Iterable[Tensor]) -> int:
    """Bytes held by the distinct storages behind these tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def reduction_table(model: nn.Module, mesh_dims: list[str]) -> list[list[str]]:
    """Rows for the table: kind of parameter x mesh dimension -> Shard(tensor dim), Partial (its gradient is
    a sum over these ranks), Replicate, or on how many of the dimension's ranks it is."""
    rows: dict[str, list[str]] = {}
    for name, param in model.named_parameters():
        layout = layout_of(param)
        cells = []
        for dim in mesh_dims:
            cuts = [f"Shard({split.dim})" for split in layout.splits if split.over == dim]
            cuts += [f"on {count}" for name, count in layout.held if name == dim]
            cells.append(", ".join(cuts) or ("Partial" if dim in layout.partial_over else "Replicate"))
        rows.setdefault(re.sub(r"\.\d+\.", ".*.", name), [str(list(layout.full_shape(param.shape))), *cells])
    return [["parameter", "full shape", *mesh_dims], *([name, *cells] for name, cells in rows.items())]
