"""Writes the index of a plain run's checkpoint: `python -m extras.services.places CHECKPOINT`.

One process acts as each rank in turn, so it must not be a rank of a run. It builds each rank's model and optimizer from
tensors without data, and records which part of a tensor each master is. Then any layout can read the checkpoint.
"""

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from common.trainer import DTYPES
from extras.services.checkpoint import FORMAT, checksum, file_name, write_index
from extras.tools.dry_run import without_numbers
from extras.services.pieces import masters
from extras.services.seam import OpenRun, compose


class Built(OpenRun):
    """A run without steps: it only builds the model and the optimizer."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Record `Piece.place` of each master that this rank updates; yields no step."""
        self.first, parts = False, self.open(**parts)
        self.places = {piece.name: piece.place() for piece in masters(parts)}
        self.model = dataclasses.asdict(parts.model.config)
        yield from ()


def index_of(folder: Path) -> dict[str, Any]:
    """Make the index.json of a checkpoint that a plain run has saved."""
    saved = torch.load(folder / file_name(0), mmap=True, map_location="cpu")
    flags, places = dict(saved["flags"]), []
    world = flags.pop("nproc_per_node")
    steps = [importlib.import_module(path.stem) for path in Path(__file__).parents[2].glob("step0*.py")]
    step = next(step for step in steps if flags.keys() == step.Config.__dataclass_fields__.keys())
    config = compose(step)(**flags | dict(device="cpu"))
    for rank in range(world):
        run = Built(config)
        with without_numbers(nullcontext(), rank, world), run:
            step.train(config, run)
        places.append(run.places)
    about = dict(config=dataclasses.asdict(config), model=run.model, dtype=str(DTYPES[flags["dtype"]] or "auto"))
    files = {file_name(rank): checksum(folder / file_name(rank)) for rank in range(world)}
    return dict(format=FORMAT, step=saved["step"], files=files, state={}, places=places, **about)


if __name__ == "__main__":
    write_index(Path(sys.argv[1]), index_of(Path(sys.argv[1])))
