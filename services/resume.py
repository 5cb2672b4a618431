"""What a run saves, and how another one goes on from it."""

import dataclasses
import time
from itertools import chain
from typing import Any

import torch

from common import UserError
from common.comm import Mesh
from common.layout import layout_of
from services.boxes import Piece
from services.checkpoint import Checkpoint, find
from services.health import Spikes
from services.launch import gather_objects
from services.residuals import owed, take_over
from services.run import Run, run_directory
from services.saver import Saver
from services.state import masters_from_weights, pieces, settle


def save(run: Run, step: int, optimizer: Any, spikes: Spikes, sync: Any = None):
    """Write a checkpoint of everything that the next step depends on. Called by every rank, each writes its share.

    The data position is the step itself. `sync`: of the gradients (step 2), whose compression may owe something.
    """
    start, config = time.perf_counter(), run.config
    run.doing = "save"
    run.saver = run.saver or Saver(run.out, run.mesh)
    position = dict(step=step, sequences=step * config.global_batch_size)
    scaling = dict(loss_scale=optimizer.loss_scale, good_steps=optimizer.good_steps, recent=spikes.recent)
    about = dict(config=dataclasses.asdict(config), model=dataclasses.asdict(optimizer.model.config))
    meta = dict(**about, dtype=str(optimizer.dtype), position=position, **scaling)
    rng = torch.get_rng_state()
    of_rank_0 = [Piece("rng", "cpu", rng, rng.shape)] if run.rank == 0 else []
    held = chain(pieces(optimizer), owed(sync, optimizer, run.mesh), of_rank_0)
    run.saver.save(step, held, meta, config.save_async)
    run.clock["save"] += time.perf_counter() - start


def resume(optimizer: Any, spikes: Spikes, config: Any, mesh: Mesh, sync: Any = None) -> int:
    """Take over a checkpoint; returns the number of steps it has done. Raises UserError if it does not fit."""
    found = find(config.resume, run_directory(config), mesh)
    if found is None:
        if config.generate:
            raise UserError(f"--resume auto: there is no checkpoint in {run_directory(config)} to --generate from")
        return 0
    require_fit(found, optimizer, config, mesh)
    if not config.generate and mesh.rank == 0:
        print(f"going on from {found.path}", flush=True)
    load(optimizer, found, weights_only=bool(config.generate))
    if not config.generate and found.shapes("rng"):
        meta = found.meta
        optimizer.loss_scale, optimizer.good_steps = meta["loss_scale"], meta["good_steps"]
        spikes.recent = tuple(map(tuple, meta["recent"]))
        torch.set_rng_state(found.full("rng", "cpu"))
        take_over(sync, optimizer, mesh, found)
    return found.meta["step"]


def load(optimizer: Any, checkpoint: Checkpoint, weights_only: bool):
    """Read this rank's pieces, each from where it is stored. What is not (an imported model) stays as it begins."""
    settle(optimizer)
    for piece in pieces(optimizer):
        if piece.kind in ("model", "buffer"):
            checkpoint.fill(piece)
    masters_from_weights(optimizer)
    for piece in pieces(optimizer) if not weights_only else ():
        if piece.kind not in ("model", "buffer"):
            checkpoint.fill(piece)


def require_fit(found: Checkpoint, optimizer: Any, config: Any, mesh: Mesh):
    """Refuse a checkpoint of another model, precision or rule. Raises UserError, on every rank alike."""
    meta, theirs, ours = found.meta, found.shapes("model"), {}
    held = {n: tuple(layout_of(p).full_shape(p.shape)) for n, p in optimizer.model.named_parameters()}
    for shapes in gather_objects(held, mesh):  # a rank may hold only some layers
        ours |= shapes
    advice = f"use --model {meta['config']['model']} and the overrides it was trained with"
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(f"--resume {found.path}: its {name} does not fit this model; {advice}")
    for key, value in dataclasses.asdict(optimizer.model.config).items():
        if key != "seq_len" and meta["model"].get(key, value) != value:  # only step 7 knows experts
            raise UserError(f"--resume {found.path}: its {key} is {meta['model'][key]}, not {value}; {advice}")
    if config.generate or not found.shapes("rng"):  # weights alone may be read in any precision
        return
    for flag, theirs_was, ours_is in (
        ("optimizer", meta["config"]["optimizer"], config.optimizer),
        ("dtype", meta["dtype"], str(optimizer.dtype)),
    ):
        if theirs_was != ours_is:
            raise UserError(f"--resume {found.path} was written with {flag} {theirs_was}, not {ours_is}: set --{flag}")
