"""Bytes alive while gradients are summed and weights updated: ZeRO, compressed buckets, Muon, done with sizes alone.

As in theory/peak_layers.py, functions have the names and the local variables of the program's.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from theory.tape import Bytes, Memory
from theory.traffic import BLOCK


class Sync:
    """Buffers that are there all the time, to which autograd adds: nothing else happens. The others do more.

    `begin(last)`: a micro-batch, perhaps the last. `arrived(name, held)`: a weight has its gradient of a micro-batch,
    which `held` holds. `room(name, n)`: have `n` bytes for its sum. `finish()`: the last backward is over.
    `gather(units)`, `free(units)`: ZeRO's stage 3.
    """

    stage = 0  # of ZeRO

    def __init__(self, memory: Memory):
        self.memory = memory

    def new(self, n: float) -> Bytes:
        """A storage of `n` bytes."""
        return Bytes(self.memory, n)

    def nothing(self, *_: Any):
        """What happens here."""

    begin = arrived = room = finish = gather = free = nothing


class FirstKept(Sync):
    """--sync naive: a step's first gradient of a weight is kept as it comes."""

    def __init__(self, memory: Memory):
        super().__init__(memory)
        self.kept: dict[str, Bytes] = {}

    def arrived(self, name: str, held: list[Bytes]):
        """Later ones are added."""
        self.kept.setdefault(name, *held)

    def room(self, name: str, n: float):
        """`total` of services/fused_gradients.py."""
        if name not in self.kept:
            self.kept[name] = self.new(n)


class Bucket(NamedTuple):
    """One of step 2's buckets: its weights by name, elements, and over how many ranks (at least 2) it is summed."""

    names: tuple[str, ...]
    length: int
    ranks: int


class Compressed(Sync):
    """--compress, from a run's second step on: what was not sent in the one before is there."""

    def __init__(self, memory: Memory, buckets: list[Bucket], e: int, mode: str, fraction: float):
        """`e`: bytes of a gradient's element; `fraction` that topk sends."""
        super().__init__(memory)
        self.buckets, self.mode, self.fraction, self.armed = buckets, mode, fraction, False
        self.e = e if mode == "topk" else max(4, e)  # of what is lost, and so of its sum with a gradient
        self.lost = [self.new(self.padded(bucket) * self.e) for bucket in buckets]
        self.missing = [len(bucket.names) for bucket in buckets]
        self.bucket = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
        self.sums: list[Iterator] = []

    def padded(self, bucket: Bucket) -> int:
        """Elements of a bucket, as they are sent."""
        block = 1 if self.mode == "topk" else bucket.ranks * BLOCK
        return -(-bucket.length // block) * block

    def begin(self, last: bool):
        """Sums begin in the last micro-batch."""
        self.armed = last

    def arrived(self, name: str, held: list[Bytes]):
        """A bucket is sent when it and all before it are complete."""
        held.clear()
        if name in self.bucket:
            self.missing[self.bucket[name]] -= self.armed
        while len(self.sums) < len(self.buckets) and not self.missing[len(self.sums)]:
            self.send()

    def send(self):
        """The next bucket's sum begins, and that of the one before goes on to its next message."""
        i = len(self.sums)
        for before in self.sums[-1:]:
            next(before, None)
        messages = self.topk_sum if self.mode == "topk" else self.narrow_sum
        self.sums.append(messages(i, self.buckets[i]))
        next(self.sums[-1], None)

    def finish(self):
        """Send what is left, and wait for all of it."""
        while len(self.sums) < len(self.buckets):
            self.send()
        for messages in self.sums:
            list(messages)

    def narrow(self, n: int) -> Bytes:
        """`n` elements in 16 bits, or in 8 with their scales."""
        if self.mode == "bf16":
            return self.new(2 * n)
        _units, _rounded = self.new(n * self.e), self.new(n * self.e)
        return self.new(n * (1 + 4 / BLOCK))

    def narrow_sum(self, i: int, bucket: Bucket) -> Iterator:
        """A message is sent at each yield; what lives until then are the local variables."""
        n, wide = self.padded(bucket), 4 * self.padded(bucket)
        _owed, _values, _ours = self.lost[i], self.new(bucket.length * self.e), self.new(n * self.e)
        sent = self.narrow(n)
        widened = self.new(wide)
        lost = self.new(n * self.e)
        del widened
        _received = self.new(sent.n)
        del _values, _ours
        yield
        del sent
        widened = self.new(wide)
        _total = self.new(wide / bucket.ranks)
        del widened
        _narrowed = self.narrow(n // bucket.ranks)
        self.new(2 * wide / bucket.ranks)  # what is lost of the sum
        yield
        self.lost[i] = lost
        _widened, _sum = self.new(wide), self.new(bucket.length * self.e if self.e > 4 else 0)

    def topk_sum(self, i: int, bucket: Bucket) -> Iterator:
        """Numbers and places of every rank, 8 bytes each."""
        n, count = bucket.length * self.e, max(1, int(self.fraction * bucket.length))
        _owed, _values = self.lost[i], self.new(n)
        _places, _sizes = self.new(8 * count), self.new(n)
        del _sizes
        _message, _everyone = self.new(8 * count), self.new(8 * count * bucket.ranks)
        yield
        self.lost[i], _total = self.new(n), self.new(n)


class Unit(NamedTuple):
    """One of ZeRO's units: its weights by name; bytes of them all, of their gradient, and of a slice of that."""

    names: tuple[str, ...]
    weights: float
    gradient: float
    part: float  # of the gradient, as it is reduced
    sum: float  # of the gradient, as it is added up over micro-batches (stages 2 and 3)


class Zero(Sync):
    """What ZeRO holds besides its slices: weights gathered (stage 3), and gradients that are still whole."""

    def __init__(self, memory: Memory, stage: int, units: list[Unit]):
        super().__init__(memory)
        self.stage, self.units, self.armed = stage, units, stage > 1
        self.unit = {name: i for i, unit in enumerate(units) for name in unit.names}
        self.weights: dict[int, Bytes] = {}
        self.gradient = {i: self.new(unit.gradient) for i, unit in enumerate(units) if stage == 1}
        self.reduced: dict[int, Bytes] = {}  # slices; in stage 1 the gradients of which they are views
        self.missing = [len(unit.names) for unit in units]
        self.in_flight: tuple[int, Bytes, Bytes] | None = None

    def gather(self, units: Iterable[int]):
        """Stage 3: have the weights of these."""
        for i in units if self.stage == 3 else ():
            if i not in self.weights:
                self.weights[i] = self.new(self.units[i].weights)

    def free(self, units: Iterable[int]):
        """Stage 3: have these no more."""
        for i in units if self.stage == 3 else ():
            self.weights.pop(i, None)

    def begin(self, last: bool):
        """Stage 1 reduces in the last micro-batch, the others in each."""
        self.missing = [len(unit.names) for unit in self.units]
        self.armed = self.stage > 1 or last

    def arrived(self, name: str, held: list[Bytes]):
        """`completed`."""
        i = self.unit[name]
        if i not in self.gradient:
            self.gradient[i] = self.new(self.units[i].gradient)
        held.clear()
        if self.armed:
            self.missing[i] -= 1
            if not self.missing[i]:
                self.reduce(i)

    def reduce(self, i: int):
        """The sum of a unit's gradient begins; that of the one before has landed."""
        self.land()
        self.in_flight = i, self.new(self.units[i].part), self.gradient.pop(i)
        self.missing[i] = len(self.units[i].names)

    def land(self):
        """The first sum of a step becomes the slice, in the dtype to add up in; later ones are added to it."""
        if self.in_flight is not None:
            i, total, gradient = self.in_flight
            if self.stage == 1:
                self.reduced[i] = gradient
            elif i not in self.reduced:
                self.reduced[i] = total if total.n == self.units[i].sum else self.new(self.units[i].sum)
            self.in_flight = None

    def finish(self):
        """After the last backward."""
        for i in list(self.gradient):
            self.reduce(i)
        self.land()
        self.free(range(len(self.units)))


class Matrices(NamedTuple):
    """Of a parameter, as it lies on a rank, the matrices of which Muon updates a part there (services/muon.py)."""

    count: int
    rows: int
    columns: int
    own: int  # elements that are updated
    cuts: list[tuple[str, int, int, int]]  # (mesh dimension, ranks, copies of each part, dimension that it cuts)


class MuonUnit(NamedTuple):
    """What Muon updates at a time. With ZeRO it is gathered over the `ranks` of `dim`, in slices of `length`."""

    dim: str
    ranks: int
    length: int
    matrices: list[Matrices]


def orthogonal_part(new: Callable[[float], Bytes], matrices: Matrices, e: int) -> Bytes:
    """This rank's part of matrices that are gathered and made orthogonal."""
    count, shape = matrices.count, {-2: matrices.rows, -1: matrices.columns}
    part, _x = count * matrices.rows * matrices.columns * e, None
    n = part
    for _, ranks, copies, dim in matrices.cuts:
        parts = new(n * ranks)
        n, shape[dim] = n * ranks // copies, shape[dim] * ranks // copies
        _x = new(n)
        del parts
    found, _gram = new(n), None
    for _ in range(2):  # five, of which the second is as the others
        _gram = new(count * min(shape.values()) ** 2 * e)
        square = new(_gram.n)
        found = new(n)
        del square
    tall, across = shape[-2] > shape[-1], any(dim == -1 or count > 1 for *_, dim in matrices.cuts)
    return new(part) if tall or across else found  # a copy, if the part does not lie in one piece


def muon_step(new: Callable[[float], Bytes], unit: MuonUnit, e: int, wide: int):
    """The update; `e`: bytes of an element of what is made orthogonal, `wide`: of a momentum (0: it is on the host)."""
    _updates = new(wide * sum(matrices.own for matrices in unit.matrices))
    own = new(unit.length * e)
    _whole = new(unit.length * unit.ranks * e) if unit.dim else own
    del own
    for matrices in unit.matrices:
        _part = orthogonal_part(new, matrices, e)
        new(matrices.own * wide)
