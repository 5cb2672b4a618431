"""What a run prints and writes:

    introduction        before the first step; with several ranks, with a table of the parameters
    progress            beside the progress bar
    where_not_finite    in the error that ends a run with inf or nan
    files               config.json, metrics.jsonl and loss.png

The table shows how tp and ep shard each parameter (but not ZeRO's shards). Three rows of step 4,
for tiny in fp32 on two ranks with --tp 2:

         parameter                               whole    on a rank  bytes   sharded          [...]
    1 x  model.embed_tokens.weight               257x128  129x128    66,048  dim 0 over tp 2
    4 x  model.layers.*.input_layernorm.weight   128      128        512                      tp 2
    4 x  model.layers.*.self_attn.q_proj.weight  128x128  64x128     32,768  dim 0 over tp 2

    4 x                 one in each of 4 layers; bytes are those of one
    dim 0 over tp 2     dimension 0 is cut into 2 parts, one for each rank of tp (257 rows become
                        129 and 129: the second rank's last row is padding)
    [...]               here for the heading "gradient summed over". Groups of one rank, such as dp
                        here, are left out
"""

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from common.comm import Mesh
from common.layout import data_group_of, full_shape, record_of
from common.ranks import Ranks

# --- The table of parameters ----------------------------------------------------------------------


class ParamRow(NamedTuple):
    """A row of the table: a parameter's whole shape, and the part that one rank holds.

    A shard is here that of tp or ep, not ZeRO's. With --zero 3 `nbytes` is what a rank holds while
    it uses the parameter.
    """

    whole: tuple[int, ...]  # shape
    shard: tuple[int, ...]  # shape of the part
    nbytes: int  # of the shard
    sharded: str  # for example "dim 0 over tp 2"
    summed: str  # over which ranks its gradient is summed: "dp 4, tp 2"


def param_rows_of(model: nn.Module, mesh: Mesh) -> dict[str, ParamRow]:
    """The rows of the parameters that this rank holds, by name.

    Two columns come from the parameter's record (layout.py):

        shard                       how the parameter was cut: "sharded"
        data_group, partial_over    over which ranks its gradient is summed: "summed"
    """
    rows = {}
    for name, param in model.named_parameters():
        record = record_of(param)
        sharded = ""
        if record.shard is not None:
            group = mesh[record.shard.over]
            sharded = f"dim {record.shard.dim} over {group.name} {group.size}"
        groups = [data_group_of(param, mesh)]
        if record.partial_over is not None:
            groups.append(mesh[record.partial_over])
        summed = [f"{group.name} {group.size}" for group in groups if group.size > 1]
        whole = tuple(full_shape(param))
        shape = tuple(param.shape)
        rows[name] = ParamRow(whole, shape, param.nbytes, sharded, ", ".join(summed))
    return rows


def parameter_table(rows: dict[str, ParamRow]) -> str:
    """The rows as text. Parameters whose names differ only in the layer's number share a row, which
    shows the first of them.
    """
    kinds = defaultdict(list)  # name without the layer's number -> its rows
    for name, row in rows.items():
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(row)
    lines = [("", "parameter", "whole", "on a rank", "bytes", "sharded", "gradient summed over")]
    for name, rows_of_kind in kinds.items():
        row = rows_of_kind[0]
        whole = "x".join(str(size) for size in row.whole)
        part = "x".join(str(size) for size in row.shard)
        count = f"{len(rows_of_kind)} x"
        lines.append((count, name, whole, part, f"{row.nbytes:,}", row.sharded, row.summed))
    # zip(*lines): the columns
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def gather_param_rows(model: nn.Module, mesh: Mesh, ranks: Ranks) -> dict[str, ParamRow]:
    """The row of each parameter of the whole model, by name. With pp a rank holds only some, so
    ranks gather their rows; if several hold a parameter, the first rank's row counts. A collective.
    """
    rows: dict[str, ParamRow] = {}
    for held in ranks.all_gather(param_rows_of(model, mesh)):
        for name, row in held.items():
            rows.setdefault(name, row)
    return rows


# --- Lines of text --------------------------------------------------------------------------------


def introduction(
    device: str, data: str, mesh: Mesh, rows: dict[str, ParamRow], model: nn.Module, optimizer: Any
) -> str:
    """What rank 0 prints before the first step: devices and mesh ("device: 2 x cpu, torch.float32;
    mesh: dp 1 x tp 2"), what the data are, and how many parameters the model has. With several
    ranks also the table of parameters, and how many of them rank 0 computes with (with padding) and
    updates.
    """
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.sizes.items())
    dtype = next(model.parameters()).dtype
    lines = [f"device: {mesh.world} x {device}, {dtype}; mesh: {sizes}", data]
    if mesh.world > 1:
        lines.append(parameter_table(rows))
    total = sum(math.prod(row.whole) for row in rows.values())
    counts = f"parameters: {total:,}"
    if mesh.world > 1:
        own = sum(param.numel() for param in model.parameters())
        updated = sum(master.numel() for master in optimizer.masters.values())
        counts += f"; rank 0 computes with {own:,}, and updates {updated:,} of them"
    lines.append(counts)
    return "\n".join(lines)


def progress(row: dict[str, Any]) -> str:
    """The text beside the progress bar, from a row of metrics.jsonl: loss and tokens per second; on
    a GPU also peak memory and, if its peak FLOP/s is known, MFU.
    """
    shown = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tok/s"
    if "mfu" in row:
        shown += f"  MFU {row['mfu']:.1%}"
    if "peak_memory" in row:
        shown += f"  {row['peak_memory'] / 2**30:.1f} GiB"
    return shown


def where_not_finite(gradients: dict[str, Tensor], ranks: Ranks) -> str:
    """The name of a gradient with inf or nan, for up to four ranks; or "none", if all are finite. A
    collective. `gradients`: this rank's, by name.
    """
    bad = ""
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            # Names are in the order of forward. The last bad one stays, because backward reached it
            # first. (After the sums, all ranks of dp have it; with pp look at the last stage)
            bad = name
    found = []
    for rank, name in enumerate(ranks.all_gather(bad)):
        if name:
            found.append(f"{name} on rank {rank}")
    return ", ".join(found[:4]) or "none"


# --- config.json, metrics.jsonl and loss.png, which rank 0 writes ---------------------------------


def create_files(out: Path, flags: dict[str, Any], history: list[dict]):
    """Create the directory, config.json, and metrics.jsonl with the rows of the steps before
    --resume, if any. Raises OSError, which `Ranks.attempt` makes a UserError on all ranks.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(flags, indent=1))
    rows = "".join(json.dumps(row) + "\n" for row in history)
    (out / "metrics.jsonl").write_text(rows)


def append_row(out: Path, row: dict[str, Any]):
    """Add a row to metrics.jsonl. Raises OSError on rank 0 alone: torchrun ends the others."""
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def draw_loss(out: Path, history: list[dict]):
    """Draw the loss over the steps into loss.png."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    marker = "o" if len(history) == 1 else ""  # a line needs two points
    axes.plot([row["step"] for row in history], [row["loss"] for row in history], marker=marker)
    figure.savefig(out / "loss.png", dpi=120)
