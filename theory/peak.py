"""The most bytes that a rank holds at any moment of a step, temporaries among them: the step, done with sizes alone.

The bytes by kind of theory/memory.py are what a rank holds for long. Above them is what lives for a moment: a gradient
before it is added up, a layer computed again, the loss of a chunk, what ZeRO gathers. Which of these is the largest,
and what else lives at that moment, depends on the layout. So the step is done as the program does it, one action after
another. theory/peak_layers.py has the modules.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from common.schedules import Action, Output, Place, Placement, Step, needs, neighbours
from theory.peak_layers import Layers, Sizes
from theory.tape import Bytes, Memory, Tape, Tensor


class Unit(NamedTuple):
    """One of ZeRO's units: its weights by name; bytes of them all, of their gradient, and of a slice of that."""

    names: tuple[str, ...]
    weights: float
    gradient: float
    part: float  # of the gradient, as it is reduced
    sum: float  # of the gradient, as it is added up over micro-batches (stages 2 and 3)


class Zero:
    """What ZeRO holds besides its slices: weights gathered (stage 3), and gradients that are still whole."""

    def __init__(self, memory: Memory, stage: int, units: list[Unit]):
        self.memory, self.stage, self.units = memory, stage, units
        self.unit = {name: i for i, unit in enumerate(units) for name in unit.names}
        self.weights: dict[int, Bytes] = {}
        self.gradient = {i: Bytes(memory, unit.gradient) for i, unit in enumerate(units) if stage == 1}
        self.reduced: dict[int, Bytes] = {}  # slices; in stage 1 the gradients of which they are views
        self.missing = [len(unit.names) for unit in units]
        self.in_flight: tuple[int, Bytes, Bytes] | None = None
        self.armed = stage > 1

    def gather(self, units: Iterable[int]):
        """Stage 3: have the weights of these."""
        for i in units if self.stage == 3 else ():
            if i not in self.weights:
                self.weights[i] = Bytes(self.memory, self.units[i].weights)

    def free(self, units: Iterable[int]):
        """Stage 3: have these no more."""
        for i in units if self.stage == 3 else ():
            self.weights.pop(i, None)

    def arrived(self, name: str, _grad: Bytes):
        """`completed`: a weight has its gradient of a micro-batch."""
        i = self.unit[name]
        if i not in self.gradient:
            self.gradient[i] = Bytes(self.memory, self.units[i].gradient)
        if self.armed:
            self.missing[i] -= 1
            if not self.missing[i]:
                self.reduce(i)

    def reduce(self, i: int):
        """The sum of a unit's gradient begins; that of the one before has landed."""
        self.land()
        self.in_flight = i, Bytes(self.memory, self.units[i].part), self.gradient.pop(i)
        self.missing[i] = len(self.units[i].names)

    def land(self):
        """The first sum of a step becomes the slice, in the dtype to add up in; later ones are added to it."""
        if self.in_flight is not None:
            i, total, gradient = self.in_flight
            if self.stage == 1:
                self.reduced[i] = gradient
            elif i not in self.reduced:
                self.reduced[i] = total if total.n == self.units[i].sum else Bytes(self.memory, self.units[i].sum)
            self.in_flight = None

    def finish(self):
        """After the last backward."""
        for i in list(self.gradient):
            self.reduce(i)
        self.land()
        self.free(range(len(self.units)))


class Chunk(NamedTuple):
    """Some layers in a row, and what a pipeline's first and last stage have besides."""

    layers: list[int]
    first: bool
    last: bool


class Rank:
    """One rank, and what it holds while it does a step."""

    def __init__(self, sizes: Sizes, held: float, cast: float, tied: bool, zero: int, units: list[Unit], keep: bool):
        """`held`: bytes that stay; with ZeRO, less the gradients. `cast`: by which a gradient grows to be added up.

        `keep`: without ZeRO and buckets, a step's first gradient of a weight is kept as it comes.
        """
        self.sizes, self.cast, self.tied, self.keep, self.memory = sizes, cast, tied, keep, Memory()
        self.held = self.new(held)
        self.zero = Zero(self.memory, zero, units)
        self.gradients: dict[str, Bytes] = {}
        self.put_off: list[Callable[[], list]] = []

    def new(self, n: float) -> Bytes:
        """A storage of `n` bytes."""
        return Bytes(self.memory, n)

    def arrived(self, name: str, grad: Bytes):
        """A weight's gradient is there."""
        if self.zero.stage:
            self.zero.arrived(name, grad)
        elif self.keep:
            self.gradients.setdefault(name, grad)

    def room(self, name: str, n: float):
        """`total` of services/fused_gradients.py: `n` bytes for a gradient, if it has no buffer."""
        if self.keep and name not in self.gradients:
            self.gradients[name] = self.new(n)

    def forward(
        self, x: Bytes, chunk: Chunk, keep: Callable | None, after: Callable = lambda i, x, tape: x
    ) -> tuple[Tape, Tensor]:
        """A chunk's forward from `x`: tokens, or hidden states whose gradient goes to `keep`.

        `after(i, x, tape)`: a hook on the output of module i.
        """
        s, tape = self.sizes, Tape(self.memory, self.cast, self.arrived)
        layers = Layers(s, tape, self.put_off, self.room)
        tape.node([], [self.new(0)], partial(no_gradient, self.new(2 * s.tokens // s.batch * s.m.head_dim * s.wide)))
        hidden = tape.leaf(x, keep) if keep else layers.embedding(x)
        hidden = after(0, hidden, tape)
        for at, number in enumerate(chunk.layers, 1):
            layer = partial(layers.layer, number=number)
            if s.recompute != "none":
                hidden = tape.checkpoint(hidden, layer, s.recompute == "selective")
            else:
                hidden = layer(hidden)
            hidden = after(at, hidden, tape)
        if chunk.last:
            hidden = after(len(chunk.layers) + 1, layers.norm(hidden, "model.norm.weight"), tape)
            hidden = layers.loss(hidden, "model.embed_tokens.weight" if self.tied else "lm_head.weight")
        return tape, hidden

    def moment(self, chunk: Chunk) -> float:
        """Bytes above what a chunk's forward leaves for backward, at the highest point of both."""
        tokens, before, grads = self.new(0), self.memory.live, []
        tape, out = self.forward(tokens, chunk, None if chunk.first else grads.append)
        edge = out.node
        del out
        kept = self.memory.live - before
        tape.backward(edge, self.new(4 if chunk.last else self.sizes.x))
        waiting, self.put_off[:] = self.put_off[:], []
        self.weight_gradients(waiting)
        return self.memory.peak - before - kept

    def micro_batches(self, layers: list[int], count: int, uses: list[list[int]]):
        """Steps 1 to 5: one micro-batch after another. `uses`: of each module in turn, its units of ZeRO."""
        zero, last = self.zero, len(uses) - 1

        def drop(i: int, keep: int):
            zero.free(unit for unit in uses[i] if unit not in uses[keep])

        def before_backward(i: int, grad: Bytes) -> tuple[list[Bytes], list]:
            if i < last:
                drop(i + 1, keep=i)
            if i > 0:
                zero.gather(uses[i] + uses[max(1, i - 1)])
            return [grad], []

        def after_forward(i: int, x: Tensor, tape: Tape) -> Tensor:
            if zero.stage < 3:
                return x
            if i < last:
                drop(i, keep=i + 1)
                zero.gather(unit for units in uses[i + 1 : i + 3] for unit in units)
            return tape.node([x], [x.bytes], partial(before_backward, i))[0]

        tokens = self.new(self.sizes.tokens * 16 * count)
        for i in range(count):
            zero.missing = [len(unit.names) for unit in zero.units]
            zero.armed = zero.stage > 1 or i + 1 == count
            zero.gather(unit for units in uses[:2] for unit in units)
            tape, loss = self.forward(tokens, Chunk(layers, True, True), None, after_forward)
            tape.backward(loss.node, loss.bytes)
        zero.finish()

    def pipeline(
        self,
        program: list[Step],
        chunks: list[Chunk],
        slices: int,
        placements: list[Placement],
        rank: int,
        units: list[list[int]],
    ):
        """Step 6's program of a pipeline rank; `units` of each chunk. A message is one of `slices` parts."""
        s, zero, (before, after) = self.sizes, self.zero, neighbours(placements)
        actions = [step.what for step in program if step.kind == "run"]
        left = Counter(action.chunk for action in actions if "W" in action.kind)
        tokens = self.new(s.tokens * 16 * len({action.micro_batch for action in actions}))
        outputs: dict[Output, Bytes] = {}
        inbox: dict[Output, tuple[Bytes, list[Bytes]]] = {}
        sent: dict[int, list[Bytes]] = defaultdict(list)
        graphs: dict[tuple[int, int], tuple] = {}
        waiting: dict[tuple[int, int], list] = {}
        entered: list[int] = []

        def fetch(output: Output) -> Bytes:
            if output in outputs:
                return outputs.pop(output)
            tensor, _messages = inbox.pop(output)
            if slices > 1:
                parts = self.new(tensor.n * slices)
                tensor = self.new(parts.n)
            return tensor

        def act(action: Action):
            nonlocal entered
            kind, i, c = action
            if kind != "W":
                zero.free(unit for unit in entered if unit not in units[c])
                zero.gather(units[c])
                entered = units[c]
            here = Place(rank, c)
            others = [output for output in needs(action, rank, before, after) if output[2] != here]
            x = fetch(others[0]) if others else None
            if kind == "F":
                grad: list[Bytes] = []
                tape, out = self.forward(
                    tokens if x is None else x, chunks[c], None if chunks[c].first else grad.append
                )
                graphs[i, c] = x, grad, tape, out.node
                if not chunks[c].last:
                    outputs["F", i, here] = out.bytes
            elif kind != "W":
                _, grad, tape, edge = graphs.pop((i, c))
                tape.backward(edge, self.new(4) if x is None else x)
                waiting[i, c], self.put_off[:] = self.put_off[:], []
                if grad:
                    outputs["B", i, here] = grad.pop()
            if "W" in kind:
                self.weight_gradients(waiting.pop((i, c)))
                left[c] -= 1
                if zero.stage == 1 and not left[c]:
                    unfinished = {unit for other, found in enumerate(units) if left[other] for unit in found}
                    for unit in units[c]:
                        if unit in zero.gradient and unit not in unfinished:
                            zero.reduce(unit)

        for kind, what, peer in program:
            if kind == "send":
                tensor = outputs.pop(what)
                sent[peer].append(self.new(s.x / slices) if slices > 1 else tensor)
                del tensor
            elif kind == "recv":
                inbox[what] = self.new(s.x / slices), sent.pop(peer, [])
            else:
                act(what)
        zero.finish()

    def weight_gradients(self, waiting: list[Callable[[], list]]):
        """W: what backward has put off. All that it needs is held until the last is done."""
        tape = Tape(self.memory, self.cast, self.arrived)
        for gradients in waiting:
            found = gradients()
            wide = [(name, tape.widen(grad)) for name, grad in found]
            while wide:
                name, grad = wide.pop(0)
                if self.zero.stage > 1:  # autograd keeps a copy of a gradient that somebody else holds
                    grad = self.new(grad.n)
                self.arrived(name, grad)
                del grad
            del found

    def update(self, summed: float, copies: float):
        """After the last backward: `summed` bytes of gradients are put side by side, to be summed over tp, say.

        `copies`: what the update makes for a moment.
        """
        self.new(summed)
        self.new(copies)


def no_gradient(_saved: Bytes, *_grads: Bytes) -> tuple[list, list]:
    """Backward of what has no inputs with gradients."""
    return [], []
