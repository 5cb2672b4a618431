"""The index of what a plain run has saved: `python -m extras.services.places CHECKPOINT`.

A dry run of each rank builds what the rank had, and says where its shards lie. It is a process of its own, as it plays
all ranks in turn. Afterwards any layout reads the checkpoint.
"""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.trainer import DTYPES
from extras.services.boxes import HELD, pieces
from extras.services.checkpoint import FORMAT, checksum, file_name, index_checksum
from extras.services.dry_run import Meter, without_numbers
from extras.services.seam import OpenRun, compose
from extras.theory.gpus import GPUS


class Built(OpenRun):
    """A run of no steps: it builds."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Note what lies where."""
        self.first, parts = False, self.open(**parts)
        self.places = {piece.name: piece.place() for piece in pieces(parts) if piece.kind in HELD}
        self.model = dataclasses.asdict(parts.model.config)
        yield from ()


def index_of(folder: Path) -> dict[str, Any]:
    """index.json of a checkpoint that a plain run has saved."""
    saved = torch.load(folder / file_name(0), mmap=True, map_location="cpu")
    flags, world = dict(saved["flags"]), saved["flags"]["nproc_per_node"]
    del flags["nproc_per_node"]
    steps = [importlib.import_module(path.stem) for path in Path(__file__).parents[2].glob("step0*.py")]
    step = next(step for step in steps if flags.keys() == step.Config.__dataclass_fields__.keys())
    config, places = compose(step)(**flags | dict(device="cpu")), []
    for rank in range(world):
        meter, run = Meter(GPUS["h100-80"]), Built(config)
        with without_numbers(meter, rank, world), run:
            step.train(config, run)
        places.append(run.places)
    about = dict(config=dataclasses.asdict(config), model=run.model, state={}, places=places)
    about["dtype"] = str(DTYPES[flags["dtype"]] or "auto")
    files = {file_name(rank): checksum(folder / file_name(rank)) for rank in range(world)}
    return dict(format=FORMAT, step=saved["step"], files=files, **about)


def main(folder: Path):
    """Write it, complete before it gets its name."""
    index, partial = index_of(folder), folder / ".index.json"
    partial.write_text(json.dumps(index | dict(sha256=index_checksum(index))))
    partial.rename(folder / "index.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
