"""Autograd on sizes: which tensors are alive together, told by Python's own reference counts.

A `Bytes` is a storage: it counts from its making until nobody holds it. What a forward function is written like here,
with the same local variables as the program's, holds its tensors as long as the program does. The engine follows
PyTorch's: nodes run backward in the reverse order of their making; what a node saved goes away after it has run; of two
gradients of one tensor a sum is made; a weight's gradient is cast to the dtype that it is added up in.
"""

from collections.abc import Callable, Sequence


class Memory:
    """Bytes alive, and the most since the beginning."""

    def __init__(self):
        self.live = self.peak = 0


class Bytes:
    """A storage of `n` bytes."""

    __slots__ = ("memory", "n")

    def __init__(self, memory: Memory, n: float):
        self.memory, self.n = memory, n
        memory.live += n
        memory.peak = max(memory.peak, memory.live)

    def __del__(self):
        self.memory.live -= self.n


class Tensor:
    """A storage (or a view of it), and the node that made it: its gradient goes to output `index` of `node`."""

    __slots__ = ("bytes", "index", "node")

    def __init__(self, storage: Bytes, node: "Node | None" = None, index: int = 0):
        self.bytes, self.node, self.index = storage, node, index


Edge = tuple["Node", int] | None  # where a gradient goes


class Node:
    """`back`: gradients of the outputs -> (of the inputs; of the weights, by name). It holds what was saved.

    `early`: gradients of weights are cast while all this is alive, as they do not pass another node before.
    """

    __slots__ = ("again", "back", "early", "edges", "grads")

    def __init__(self, edges: list[Edge], back: Callable | None, outputs: int, early: bool):
        self.edges, self.back, self.early = edges, back, early
        self.again: Callable[[], Tensor] | None = None
        self.grads: list[Bytes | None] = [None] * outputs


class Tape:
    """The nodes of one forward. `arrived(name, [gradient])`: a weight's gradient is there, to be kept or let go."""

    def __init__(self, memory: Memory, cast: float, arrived: Callable[[str, list[Bytes]], None]):
        """`cast`: how many times larger a weight's gradient gets by the cast."""
        self.memory, self.cast, self.arrived = memory, cast, arrived
        self.nodes: list[Node] = []
        self.keeps = True  # whether nodes are kept for backward
        self.second = False  # a forward is done again
        self.cache: list[Bytes] | None = None  # what selective recomputation keeps
        self.waits: dict[str, int] = {}  # uses of a weight whose gradients have not come
        self.sums: dict[str, Bytes] = {}

    def new(self, n: float) -> Bytes:
        """A new storage."""
        return Bytes(self.memory, n)

    def node(self, inputs: Sequence, outputs: Sequence, back: Callable, weights: Sequence = (), early=False) -> list:
        """A node, and its outputs. An input without gradient is None, or has no node."""
        if not self.keeps:
            return [Tensor(storage) for storage in outputs]
        edges = [(t.node, t.index) if t is not None and t.node else None for t in inputs]
        node = Node(edges, back, len(outputs), early)
        self.nodes.append(node)
        for name in weights:
            self.waits[name] = self.waits.get(name, 0) + 1
        return [Tensor(storage, node, i) for i, storage in enumerate(outputs)]

    def made(self, n: float) -> Bytes:
        """What a matmul or attention makes: with selective recomputation it is kept, and not made again."""
        if self.cache is None:
            return self.new(n)
        if self.second:
            return self.cache.pop(0)
        self.cache.append(self.new(n))
        return self.cache[-1]

    def checkpoint(self, x: Tensor, function: Callable[[Tensor], Tensor], selective: bool, tail: float) -> Tensor:
        """`function` of x, of which backward does the forward again, up to what its last node keeps.

        `tail`: bytes of the gradient that has come as far as to that node then.
        """
        cache: list[Bytes] | None = [] if selective else None
        edge = (x.node, x.index)
        self.keeps, self.cache = False, cache
        out = function(Tensor(x.bytes))
        self.keeps, self.cache = True, None
        storage = x.bytes
        node = self.node([], [out.bytes], lambda: None)[0].node

        def again(storage=storage, cache=cache) -> Tensor:
            x, _tail = Tensor(storage, *edge), self.new(tail)
            (x,) = self.node([x], [x.bytes], lambda dy, cache=cache: ([dy], []))
            self.cache, self.second = cache, True
            out = function(x)
            self.cache, self.second = None, False
            return out

        node.again = again
        return Tensor(out.bytes, node)

    def leaf(self, storage: Bytes, keep: Callable[[Bytes], None]) -> Tensor:
        """A tensor that needs a gradient, which `keep` gets."""
        return self.node([], [storage], lambda grad: (keep(grad), ([], []))[1])[0]

    def widen(self, grad: Bytes) -> Bytes:
        """The gradient in the dtype that it is added up in."""
        return grad if self.cast == 1 else self.new(grad.n * self.cast)

    def accumulate(self, found: list[tuple[str, Bytes]]):
        """The first of these gradients of weights is added up; that of a weight used twice, once both are there."""
        name, grad = found.pop(0)
        self.waits[name] -= 1
        if name in self.sums:
            grad = self.new(grad.n)
            del self.sums[name]
        if self.waits[name]:
            self.sums[name] = grad
        else:
            held = [grad]
            del grad
            self.arrived(name, held)

    def backward(self, edge: Node, grad: Bytes):
        """Run all nodes, from the last one on; `grad`: of what `edge` made."""
        edge.grads[0] = grad
        del grad, edge
        while self.nodes:
            self.run(self.nodes.pop())

    def run(self, node: Node):
        """Run one node, and hand its gradients on."""
        grads, node.grads = node.grads, []
        if node.again is not None:
            out = node.again()
            node.again = None
            out.node.grads[out.index] = grads[0]
            return
        if all(grad is None for grad in grads):
            return
        found, weights = node.back(*grads)
        grads = None  # they were handed to the node, and are gone before casts; what it saved goes after those
        if node.early:
            self.widen_all(weights)
        node.back = None
        for edge, grad in zip(node.edges, found, strict=True):
            if edge is not None and grad is not None:
                there, index = edge
                before = there.grads[index]
                there.grads[index] = grad if before is None else self.new(grad.n)
                before = None
        grad = found = None
        if not node.early:
            self.widen_all(weights)
        while weights:
            self.accumulate(weights)

    def widen_all(self, weights: list[tuple[str, Bytes]]):
        """Cast gradients of weights, one after another."""
        for i, (name, grad) in enumerate(weights):
            weights[i] = name, self.widen(grad)
            del grad
