"""The most bytes that a rank holds at any moment of a step, temporaries among them: the step, done with sizes alone.

The bytes by kind of theory/memory.py are what a rank holds for long. Above them is what lives for a moment: a gradient
before it is added up, a layer computed again, the loss of a chunk, what ZeRO gathers. Which of these is the largest,
and what else lives at that moment, depends on the layout. So the step is done as the program does it, one action after
another. theory/peak_layers.py has the modules, theory/peak_gradients.py the sums of gradients and the update.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from common.schedules import Action, Output, Place, Placement, Step, needs, neighbours
from theory.peak_gradients import MuonUnit, Sync, muon_step
from theory.peak_layers import Layers, Sizes, Tokens
from theory.tape import Bytes, Tape, Tensor


class Chunk(NamedTuple):
    """Some layers in a row, and what a pipeline's first and last stage have besides."""

    layers: list[int]
    first: bool
    last: bool


class Rank:
    """One rank, and what it holds while it does a step."""

    def __init__(self, sizes: Sizes, held: float, cast: float, tied: bool, sync: Sync):
        """`held`: bytes that stay, less those of `sync`. `cast`: by which a gradient grows to be added up."""
        self.sizes, self.cast, self.tied, self.sync, self.memory = sizes, cast, tied, sync, sync.memory
        self.new, self.arrived = sync.new, sync.arrived
        self.held = self.new(held)
        self.put_off: list[Callable[[], list]] = []

    def forward(
        self, x: Bytes, chunk: Chunk, keep: Callable | None, after: Callable = lambda i, x, tape: x
    ) -> tuple[Tape, Tensor]:
        """A chunk's forward from `x`: tokens, or hidden states whose gradient goes to `keep`.

        `after(i, x, tape)`: a hook on the output of module i.
        """
        s, tape = self.sizes, Tape(self.memory, self.cast, self.arrived)
        layers = Layers(s, tape, self.put_off, self.sync.room)
        tape.node([], [self.new(0)], partial(no_gradient, self.new(2 * s.tokens // s.batch * s.m.head_dim * s.wide)))
        hidden = tape.leaf(x, keep) if keep else layers.embedding(x)
        hidden = after(0, hidden, tape)
        for at, number in enumerate(chunk.layers, 1):
            layer = partial(layers.layer, number=number)
            if s.recompute != "none":
                hidden = tape.checkpoint(hidden, layer, s.recompute == "selective", layers.tail(number))
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
        sync, last = self.sync, len(uses) - 1

        def drop(i: int, keep: int):
            sync.free(unit for unit in uses[i] if unit not in uses[keep])

        def before_backward(i: int, grad: Bytes) -> tuple[list[Bytes], list]:
            if i < last:
                drop(i + 1, keep=i)
            if i > 0:
                sync.gather(uses[i] + uses[max(1, i - 1)])
            return [grad], []

        def after_forward(i: int, x: Tensor, tape: Tape) -> Tensor:
            if sync.stage < 3:
                return x
            if i < last:
                drop(i, keep=i + 1)
                sync.gather(unit for units in uses[i + 1 : i + 3] for unit in units)
            return tape.node([x], [x.bytes], partial(before_backward, i))[0]

        tokens = self.new(self.sizes.tokens * 16 * count)
        for i in range(count):
            sync.begin(i + 1 == count)
            sync.gather(unit for units in uses[:2] for unit in units)
            tape, loss = self.forward(tokens, Chunk(layers, True, True), None, after_forward)
            tape.backward(loss.node, loss.bytes)
        sync.finish()

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
        s, sync, (before, after) = self.sizes, self.sync, neighbours(placements)
        actions = [step.what for step in program if step.kind == "run"]
        left = Counter(action.chunk for action in actions if "W" in action.kind)
        tokens = self.new(s.tokens * 16 * len({action.micro_batch for action in actions}))
        outputs: dict[Output, Bytes] = {}
        inbox: dict[Output, tuple] = {}
        sent: dict[int, list[tuple[Bytes, Bytes]]] = defaultdict(list)
        wire = Tokens(s, self.new, s.narrow)
        graphs: dict[tuple[int, int], tuple] = {}
        waiting: dict[tuple[int, int], list] = {}
        entered: list[int] = []

        def fetch(output: Output) -> Bytes:
            if output in outputs:
                return outputs.pop(output)
            tensor, *_messages = inbox.pop(output)
            wire.unpack(tensor.n)
            del _messages
            if slices > 1:
                parts = self.new(tensor.n * slices)
                tensor = self.new(parts.n)
            return tensor

        def act(action: Action):
            nonlocal entered
            kind, i, c = action
            if kind != "W":
                sync.free(unit for unit in entered if unit not in units[c])
                sync.gather(units[c])
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
                if sync.stage == 1 and not left[c]:
                    unfinished = {unit for other, found in enumerate(units) if left[other] for unit in found}
                    for unit in units[c]:
                        if unit in sync.gradient and unit not in unfinished:
                            sync.reduce(unit)

        for kind, what, peer in program:
            if kind == "send":
                tensor = outputs.pop(what)
                tensor = self.new(s.x / slices) if slices > 1 else tensor
                sent[peer].append((tensor, wire.pack(tensor.n, s.m.dim // slices)))
                del tensor
            elif kind == "recv":
                buffer = self.new(s.x / slices)
                inbox[what] = buffer, wire.room(buffer.n, s.m.dim // slices), sent.pop(peer, [])
                del buffer
            else:
                act(what)
        sync.finish()

    def weight_gradients(self, waiting: list[Callable[[], list]]):
        """W: what backward has put off. All that it needs is held until the last is done."""
        tape = Tape(self.memory, self.cast, self.arrived)
        for gradients in waiting:
            found = gradients()
            wide = [(name, tape.widen(grad)) for name, grad in found]
            while wide:
                name, grad = wide.pop(0)
                held = [self.new(grad.n) if self.sync.stage > 1 else grad]  # a copy, as somebody else holds it
                self.arrived(name, held)
                del grad, held
            del found

    def update(self, summed: float, groups: list[tuple[float, MuonUnit | None]], e: int, wide: int):
        """After the last backward: `summed` bytes of gradients are put side by side, to be summed over tp, say.

        `groups`: what is updated together: bytes of copies, and what Muon does, with elements of `e` and `wide` bytes.
        """
        self.new(summed)
        for copies, muon in groups:
            _copies = self.new(copies)
            if muon is not None:
                muon_step(self.new, muon, e, wide)
            del _copies


def no_gradient(_saved: Bytes, *_grads: Bytes) -> tuple[list, list]:
    """Backward of what has no inputs with gradients."""
    return [], []
