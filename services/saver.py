"""Writing checkpoints: every rank its share of the boxes, nothing gathered; complete, or not there at all.

Ranks exchange their lists of boxes (services/boxes.py), never the numbers, and all come to the same plan: what several
hold is written by one of them, in turn. Each streams its boxes into its own file. Rank 0 writes the two indices.

CRASHES. Everything is written under a hidden name and flushed to the disk; meta.json comes last; then the directory is
renamed. One to be removed is renamed back to a hidden name first. So a directory with a final name is complete, and
checksums tell whether it still is what was written. The last two are kept. (Several nodes need a shared folder.)

The format is that of torch.distributed.checkpoint (DCP). Why its own writer is not used: RESULTS.md, Checkpoints.
"""

import hashlib
import json
import os
import pickle
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from common import UserError
from common.comm import Mesh
from services.boxes import Box, Entry, Piece, divide, overlap, part
from services.checkpoint import FORMAT, checksum, file_name, meta_checksum, newest
from services.launch import gather_objects

ALIGNMENT = 64  # bytes: where an archive begins in its file, and the numbers in it
PART = 2**26  # bytes that are flushed to the disk before more are written: so one can see that it goes on
SMALL = 2**16  # bytes: what another thread is not worth waking up for
NUMBERS = b"archive/data/0"  # the name of a tensor's numbers in the archive, which is a zip file


class Stream:
    """A file that torch.save writes to: its SHA-256 is computed by another thread at the same time.

    torch.save would turn an OSError into another error. So the first one is kept, for who closes the file.
    """

    def __init__(self, file: IO[bytes], helper: ThreadPoolExecutor, note: Callable[[int], None]):
        """`note` is told how many more bytes are on the disk."""
        self.file, self.helper, self.digest, self.error = file, helper, hashlib.sha256(), None
        self.note, self.unsynced = note, 0
        self.at, self.small = 0, b""  # bytes put into the file, and what is to follow them
        self.numbers: int | None = None  # where those of the tensor at hand begin

    def write(self, data: Any) -> int:
        """What torch.save calls: many times with a few bytes of a header, once with all numbers."""
        if len(data) > SMALL:
            self.flush()
            self.put(data)
        else:
            self.small += data
        return len(data)

    def flush(self):
        """Put the small pieces into the file. One of them is the header of the numbers, which end it or follow."""
        name = self.small.find(NUMBERS)
        if name >= 0 and self.numbers is None:  # found again in the archive's index
            extra = int.from_bytes(self.small[name - 2 : name], "little")  # the last field before the name
            self.numbers = self.at + name + len(NUMBERS) + extra
        self.put(self.small)
        self.small = b""

    def put(self, data: Any):
        """Write and hash."""
        hashed = self.helper.submit(self.digest.update, data) if len(data) > SMALL else self.digest.update(data)
        try:
            for start in range(0, len(data) if self.error is None else 0, PART):
                self.unsynced += self.file.write(memoryview(data)[start : start + PART])
                if self.unsynced >= PART:
                    self.sync()
        except OSError as error:
            self.error = error
        self.at += len(data)
        if hashed is not None:
            hashed.result()

    def sync(self):
        """Flush what was written to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.note(self.unsynced)
        self.unsynced = 0

    def archive(self, tensor: Tensor) -> tuple[int, int, int]:
        """Write a tensor as an archive; returns where its numbers begin, where it does, and its length: in bytes."""
        self.small, self.numbers = bytes(-self.at % ALIGNMENT), None
        begin = self.at + len(self.small)
        raw = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        torch.save(torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape), self)  # not all that it is a view of
        self.flush()
        if self.numbers is None:
            raise RuntimeError(f"torch.save of PyTorch {torch.__version__} writes no {NUMBERS.decode()}")
        return self.numbers, begin, self.at - begin


def write_boxes(
    path: Path, tensors: Iterable[Tensor], note: Callable[[int], None]
) -> tuple[str, list[tuple[int, int, int]]]:
    """Write tensors one after another, flushed to the disk; returns the SHA-256 of the file, and where they are."""
    with ThreadPoolExecutor(1) as helper, open(path, "wb") as file:
        stream = Stream(file, helper, note)
        places = [stream.archive(tensor) for tensor in tensors]
        if stream.error is not None:
            raise stream.error
        stream.sync()
    return stream.digest.hexdigest(), places


def indices(shares: list[list[Entry]], places: list[list[tuple[int, int, int]]]) -> tuple[dict[str, Any], Any]:
    """Where every box is, from what each rank wrote: for us, and for DCP's tools.

    Ours is {kind: {name: {shape, dtype, boxes: [[rank's file, byte of its numbers, start, size], ...]}}}.
    """
    from torch.distributed.checkpoint import metadata as dcp  # by rank 0 alone, and late: loading it takes a while
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # every .metadata names it: it is here to stay

    ours: dict[str, dict[str, Any]] = defaultdict(dict)
    theirs = dcp.Metadata({}, planner_data={}, storage_data={})
    for rank, (entries, found) in enumerate(zip(shares, places, strict=True)):
        for (kind, name, shape, dtype, box), (numbers, begin, length) in zip(entries, found, strict=True):
            about = ours[kind].setdefault(name, dict(shape=shape, dtype=dtype, boxes=[]))
            about["boxes"].append([rank, numbers, box.start, box.size])
            key, properties = f"{kind}.{name}", dcp.TensorProperties(getattr(torch, dtype))
            tensor = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
            chunk = dcp.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
            theirs.state_dict_metadata.setdefault(key, tensor).chunks.append(chunk)
            theirs.storage_data[dcp.MetadataIndex(key, box.start)] = _StorageInfo(file_name(rank), begin, length)
            theirs.planner_data[key] = kind, name  # so a tool makes {kind: {name: tensor}} of it
    return ours, theirs


def sync_to_disk(path: Path):
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sweep(parent: Path):
    """Delete what bears a hidden name: checkpoints half written, or to be removed."""
    for path in parent.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


class Saver:
    """Writes the checkpoints of a run, together with those of the other ranks; at most one is under way at a time."""

    def __init__(self, run_directory: Path, mesh: Mesh | None = None, keep: int = 2):
        self.out, self.mesh, self.keep = Path(run_directory), mesh, keep
        self.rank, self.world = (0, 1) if mesh is None else (mesh.rank, mesh.world)
        self.parent = self.out / "checkpoints"
        self.busy = False  # a checkpoint has been begun and not yet settled
        self.thread: threading.Thread | None = None
        self.bytes_written = self.files_written = 0  # of all saves; files: of those that training waited for

    def save(self, step: int, pieces: Iterable[Piece], meta: dict[str, Any], background: bool = False):
        """Write a checkpoint of `step` and remove all but the last `keep`. A collective.

        Those of later steps go too: the run went back to an earlier one, and they are not its future. Raises UserError
        on every rank if a disk is full or not writable; what was saved before is then untouched. In the `background`,
        the tensors are copied, and what goes wrong is raised by the next `save` or `settle`.
        """
        self.settle()
        self.step, self.error, self.busy = step, None, True
        self.partial = self.parent / f".step-{step:08d}.partial"
        self.written, self.cancelled = threading.Event(), threading.Event()
        held = [(p, box, view) for p in pieces for box, view in p.boxes()]
        entries = [Entry(p.kind, p.name, p.full_shape, str(view.dtype)[6:], box) for p, box, view in held]
        if self.rank == 0:
            with self.noting_errors():
                sweep(self.parent)
                self.partial.mkdir(parents=True)
        everyone = gather_objects((self.error, entries), self.mesh)  # and nobody writes before the directory is there
        self.give_up([error for error, _ in everyone])
        shares = divide([theirs for _, theirs in everyone])
        self.meta, self.shares = dict(format=FORMAT, step=step) | meta, shares
        views: dict[tuple[str, str], list[tuple[Box, Tensor]]] = defaultdict(list)
        for piece, box, view in held:
            views[piece.kind, piece.name].append((box, view))
        own = [
            next(part(view, box, e.box) for box, view in views[e.kind, e.name] if overlap(box, e.box) == e.box)
            for e in shares[self.rank]
        ]
        if background:
            own = [view.detach().to("cpu", copy=True) for view in own]
            self.thread = threading.Thread(target=self.write_and_commit, args=(own,), daemon=True)
            self.thread.start()
        else:
            self.write(own)
            self.settle()

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """What the operating system reports inside is kept for `give_up`; in a thread, whatever goes wrong."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError) and self.thread is None:
                raise
            self.error = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"

    def write(self, own: list[Tensor]):
        """This rank's file, and beside it its checksum and places, which tell rank 0 that it is complete."""
        with self.noting_errors():
            told = write_boxes(self.partial / file_name(self.rank), own, self.note)
            side = self.partial / f"{self.rank}.new"
            side.write_text(json.dumps(told))
            side.rename(side.with_suffix(".told"))
        self.files_written += self.thread is None
        self.written.set()

    def note(self, n_bytes: int):
        """So many more bytes are on the disk."""
        self.bytes_written += n_bytes

    def write_and_commit(self, own: list[Tensor]):
        """The background thread. It takes part in no collective: ranks may be in different steps."""
        self.write(own)
        if self.rank == 0 and self.error is None:
            self.commit()

    def commit(self):
        """Rank 0: when all files are complete, write the indices, give the directory its name, remove old ones."""
        final = self.parent / f"step-{self.step:08d}"
        sides = [self.partial / f"{rank}.told" for rank in range(self.world)]
        with self.noting_errors():
            while not all(side.exists() for side in sides):
                if self.cancelled.wait(0.01):
                    return
            digests, places = zip(*(json.loads(side.read_text()) for side in sides), strict=True)
            self.meta["tensors"], theirs = indices(self.shares, places)
            (self.partial / ".metadata").write_bytes(pickle.dumps(theirs))
            names = [*map(file_name, range(self.world)), ".metadata"]
            self.meta["files"] = dict(zip(names, [*digests, checksum(self.partial / ".metadata")], strict=True))
            self.meta["sha256"] = meta_checksum(self.meta)
            (self.partial / "meta.json").write_text(json.dumps(self.meta) + "\n")
            for side in sides:
                side.unlink()
            for path in (self.partial / ".metadata", self.partial / "meta.json", self.partial):
                sync_to_disk(path)
            if final.exists():
                final.rename(self.parent / f".{final.name}.old")
            self.partial.rename(final)
            found = sorted(self.parent.glob("step-*"))
            own = found.index(final) + 1
            for old in found[: max(0, own - self.keep)] + found[own:]:
                old.rename(self.parent / f".{old.name}.old")
            sync_to_disk(self.parent)
            sweep(self.parent)

    def join(self):
        """Wait for the background thread of this rank alone (all ranks end alike, but not in step)."""
        if self.thread is not None:
            self.thread.join()

    def settle(self):
        """Wait until the checkpoint under way is complete. A collective. Raises UserError if it failed on any rank."""
        if not self.busy:
            return
        self.written.wait()
        self.give_up(gather_objects(self.error, self.mesh))
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        elif self.rank == 0:
            self.commit()
        self.give_up(gather_objects(self.error, self.mesh))
        self.busy = False

    def give_up(self, errors: list[str | None]):
        """If any rank failed, clean up and say so on all ranks."""
        reasons = [f"rank {rank}: {error}" if self.world > 1 else error for rank, error in enumerate(errors) if error]
        if reasons:
            self.busy = False
            self.cancelled.set()
            self.join()
            self.thread = None
            if self.rank == 0:
                shutil.rmtree(self.partial, ignore_errors=True)
            kept = newest(self.out)
            raise UserError(
                f"--out {self.out}: saving step {self.step} failed ({reasons[0]}); "
                + (f"the checkpoint {kept} is intact" if kept else "there is no earlier checkpoint")
            )
