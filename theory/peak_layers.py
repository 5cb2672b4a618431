"""A layer, the embedding and the loss, done with sizes alone: which bytes are alive together in forward and backward.

Each function here is a function of the program under the same name, or under the one that its docstring gives. It has
the same local variables, with bytes instead of tensors; theory/tape.py says how long these live. Kernels are those of a
GPU. Numbers for each token that are a few bytes are left out, but for the loss of a small vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from theory.tape import Bytes, Tape, Tensor
from theory.traffic import BLOCK, mean_rows, row_bytes

CHUNK = 4096  # tokens whose logits are there at a time
Weights = dict[str, tuple[int, int]]
Way = tuple[Callable[[Bytes], Bytes], Callable[[Bytes], Bytes]]


class Sizes(NamedTuple):
    """Of one micro-batch on one rank."""

    m: Any  # the model's shape
    batch: int
    tokens: int  # of the rank, between its matrices
    own: int  # those between blocks: tokens / tp with sequence parallelism
    e: int  # bytes of an element
    wide: int  # of one in fp32 or wider
    tp: int
    sp: bool
    overlap: bool
    cp: int
    cp_rank: int
    cp_mode: str
    split: bool  # weight gradients wait for their W
    recompute: str
    ep: int = 1
    travels: bool = False  # tokens go to other ranks (--ep-mode alltoall)
    capacity: float = 0.0  # of an expert, as a multiple of the mean; 0: no limit
    narrow: str = "none"  # --compress-activations
    fused: bool = False  # --fuse-gradients

    @property
    def x(self) -> int:
        """Bytes of [batch, own tokens, dim]."""
        return self.own * self.m.dim * self.e

    @property
    def full(self) -> int:
        """Bytes of [batch, tokens, dim]."""
        return self.tokens * self.m.dim * self.e


def keep(x: Bytes) -> Bytes:
    """The identity, as a collective."""
    return x


class Tokens:
    """Step 4's collectives over tokens. `narrow` (none, bf16, int8): how services/activations.py sends them."""

    def __init__(self, sizes: Sizes, new: Callable[[float], Bytes], narrow: str = "none"):
        self.s, self.new, self.narrow = sizes, new, narrow

    @property
    def enter(self) -> Way:
        """Step 4's f, and its conjugate, g."""
        return (self.gather, self.scatter) if self.s.sp else (keep, self.total)

    def room(self, n: float, dim: int) -> Bytes:
        """A message that says `n` bytes of rows of `dim`; nothing besides these, if it is not narrow."""
        return self.new(0 if self.narrow == "none" else n / dim / self.s.e * row_bytes(self.narrow, dim, self.s.e))

    def pack(self, n: float, dim: int) -> Bytes:
        """The same, filled."""
        wide = 4 * (self.narrow == "int8") * n / dim / self.s.e * -(-dim // BLOCK) * BLOCK
        _values, _units, _rounded = self.new(wide), self.new(wide), self.new(wide)
        return self.room(n, dim)

    def unpack(self, n: float):
        """What a message says, in fp32; for int8 its values and their blocks besides."""
        self.new(n / self.s.e * dict(none=0, bf16=4, int8=6)[self.narrow])

    def gather(self, x: Bytes) -> Bytes:
        """[.., tokens/n, dim] of every rank -> [.., tokens, dim]; the parts lie in order if there is one sequence."""
        parts, message = self.new(x.n * self.s.tp), self.pack(x.n, self.s.m.dim)
        _everyones = self.new(message.n * self.s.tp)
        self.unpack(parts.n)
        return self.new(parts.n) if self.s.batch > 1 else parts

    def scatter(self, x: Bytes) -> Bytes:
        """The reverse, of a sum."""
        parts = self.new(x.n) if self.s.batch > 1 else x
        part, message = self.new(parts.n / self.s.tp), self.pack(parts.n, self.s.m.dim)
        _received = self.new(message.n)
        self.unpack(parts.n)
        return part

    def total(self, x: Bytes) -> Bytes:
        """The sum of every rank's x."""
        total = self.new(x.n)
        if self.narrow != "none":
            self.gather(self.scatter(self.new(x.n)))
        return total


class Layers:
    """The modules of a rank, as functions of one micro-batch; they write on `tape`."""

    def __init__(self, sizes: Sizes, tape: Tape, store: list, room: Callable = lambda name, n: None):
        """`room(name, n)`: have `n` bytes for a weight's gradient (--fuse-gradients)."""
        self.s, self.tape, self.store, self.room = sizes, tape, store, room
        self.new = tape.new
        self.exact, self.tokens = Tokens(sizes, tape.new), Tokens(sizes, tape.new, sizes.narrow)

    def node(self, inputs: list, out: Bytes, back: Callable, weights: Sequence = (), early: bool = False) -> Tensor:
        """A node with one output."""
        return self.tape.node(inputs, [out], back, weights, early)[0]

    def kernel(self, n: float, *inputs: Tensor, saved: tuple = ()) -> Tensor:
        """What makes `n` bytes, and in backward a gradient as large as each input; until then, `saved` is there."""
        sizes = [x.bytes.n for x in inputs]
        return self.node(inputs, self.new(n), lambda dy, saved=saved: ([self.new(size) for size in sizes], []))

    def product(self, *inputs: Tensor) -> Tensor:
        """A kernel that keeps its inputs: SiLU of one, or a product of two."""
        return self.kernel(inputs[0].bytes.n, *inputs, saved=tuple(x.bytes for x in inputs))

    def conjugate(self, x: Tensor, collective: Callable, conjugate: Callable) -> Tensor:
        """One collective in forward, the other in backward: step 4's f, and g with the two swapped."""
        return self.node([x], collective(x.bytes), lambda dy: ([conjugate(dy)], []))

    # --- linear layers

    def matmuls(
        self, x: Tensor, weights: Weights, rows: int, way: Way | None = None, last: bool = False, experts: int = 1
    ) -> list[Tensor]:
        """Linear layers of one input of `rows` rows, of each of so many `experts`; `weights`: [out, in] by name.

        `way`: what is done to x before and to dx after, in one function of our own. Of the `last` of a layer that is
        done again, nobody needs the output. In step 6, weight gradients may wait.
        """
        s, e, saved, (before, after) = self.s, self.s.e, x.bytes, way or (keep, keep)
        again = last and self.tape.second  # stops before a matmul; a function of our own runs, and is dropped

        def gradients() -> list[tuple[str, Bytes]]:
            if s.fused and experts == 1:
                return [self.added(name, a * b) for name, (a, b) in weights.items()]
            made = [(name, self.new(experts * a * b * e)) for name, (a, b) in weights.items()]
            return [self.added(name, experts * a * b) for name, (a, b) in weights.items()] if s.fused else made

        def waiting(saved: Bytes, _grads: tuple) -> list[tuple[str, Bytes]]:
            _full = before(saved)
            return gradients()

        def back(*grads: Bytes, saved=saved):
            n = rows * next(iter(weights.values()))[1] * e
            if s.split:
                self.store.append(partial(waiting, saved, grads))
                return [after(self.new(n))], []
            _full = before(saved)
            return [after(self.new(n))], gradients()

        full = before(saved)
        outs = [self.tape.made(rows * n * e) for n, _ in weights.values()] if not again or s.split or s.fused else []
        del full
        outs = [self.new(0)] if again else outs
        return self.tape.node([x], outs, back, list(weights), early=s.split or way is not None)

    def added(self, name: str, n: float) -> tuple[str, Bytes]:
        """What autograd gets of a gradient of `n` numbers that a function of ours adds to its sum."""
        self.room(name, n * self.s.e * self.tape.cast)
        return name, self.new(0)

    def columns(self, x: Tensor, weights: Weights, rows: int) -> list[Tensor]:
        """`project`: several linear layers of one input."""
        if self.s.overlap or (self.s.fused and self.s.tp == 1):
            return self.matmuls(x, weights, rows, self.tokens.enter if self.s.tp > 1 else (keep, keep))
        x = self.conjugate(x, *self.tokens.enter) if self.s.tp > 1 else x
        return [self.matmuls(x, {name: shape}, rows)[0] for name, shape in weights.items()]

    def row(self, x: Tensor, name: str, n_out: int, n_in: int, rows: int, last: bool = False) -> Tensor:
        """A row-parallel layer; of the `last` of a layer, nobody needs the output again."""
        (y,) = self.matmuls(x, {name: (n_out, n_in)}, rows, last=last)
        return self.conjugate(y, *reversed(self.tokens.enter)) if self.s.tp > 1 else y

    # --- a layer

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm in one kernel."""
        s, saved, root = self.s, x.bytes, self.new(self.s.own * self.s.wide)
        out = self.new(x.bytes.n)

        def back(dy: Bytes, saved=saved, root=root):
            return [self.new(saved.n)], [(name, self.new(s.m.dim * s.e))]

        return self.node([x], out, back, [name], early=True)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """A sum, whose gradient is that of both."""
        return self.node([a, b], self.new(min(a.bytes.n, b.bytes.n)), lambda dy: ([dy, dy], []))

    def rope(self, x: Tensor) -> Tensor:
        """apply_rope: five kernels, two of them with fp32 results; or services/fused_gradients.py's."""
        s, n = self.s, x.bytes.n
        w = n * s.wide / s.e
        if s.fused:
            return self.node([x], self.rotated(n, w), lambda dy: ([self.rotated(n, w)], []))
        second, first = self.tape.node([x], [x.bytes] * 2, lambda *_: ([self.new(n)], []))
        wide = lambda dy: self.narrow(self.new(w), n)  # noqa: E731
        a = self.node([x], self.new(w), lambda dy: ([wide(dy)], []))
        turned = self.node([second], self.new(n / 2), lambda dy: ([self.new(n / 2)], []))
        turned = self.node([turned, first], self.new(n), lambda dy: ([dy, dy], []))
        del first, second
        out = self.node([a, turned], self.new(w), lambda dy: ([dy, wide(dy)], []))
        del a, turned
        return self.cast(out, n)

    def rotated(self, n: float, wide: float) -> Bytes:
        """A rotation, half after half."""
        out = self.new(n)
        for _ in range(2):
            self.new(wide / 2)
        return out

    def narrow(self, grad: Bytes, n: float) -> Bytes:
        """A gradient cast to the dtype of its tensor."""
        return grad if grad.n == n else self.new(n)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention in one kernel (`attend`)."""
        s = self.s
        if s.e > 2 and q.bytes.n > k.bytes.n:
            k, v = (self.kernel(q.bytes.n, x) for x in (k, v))  # heads repeated
        lse, out = self.tape.made(q.bytes.n / s.e / s.m.head_dim * s.wide), self.tape.made(q.bytes.n)
        saved = q.bytes, k.bytes, v.bytes, out, lse
        return self.node([q, k, v], out, lambda dy, saved=saved: ([self.new(x.n) for x in saved[:3]], []))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The core, or step 5's in its place."""
        s = self.s
        if s.cp == 1:
            return self.core(q, k, v)
        if s.cp_mode == "ulysses":
            kv_heads = max(1, s.m.n_kv_heads // s.tp)
            if s.cp > kv_heads:
                k, v = (self.kernel(x.bytes.n * (s.cp // kv_heads), x) for x in (k, v))  # heads repeated
            q, k, v = (self.swap(x, True) for x in (q, k, v))
            out = self.core(q, k, v)
            return self.swap(out, False)
        return self.ring(q, k, v)

    def swapped(self, x: Bytes, to_heads: bool) -> Bytes:
        """Ulysses' all-to-all."""
        _parts = self.new(x.n) if to_heads or self.s.batch > 1 else x
        swapped = self.new(x.n)
        return self.new(x.n) if not to_heads or self.s.batch > 1 else swapped

    def swap(self, x: Tensor, to_heads: bool) -> Tensor:
        """The same for autograd."""
        return self.node([x], self.swapped(x.bytes, to_heads), lambda dy: ([self.swapped(dy, not to_heads)], []))

    def parts(self) -> list[tuple[float, float]]:
        """What a cp rank computes: by part of the keys, (share of its queries, share of the part's keys)."""
        s, hops = self.s, range(self.s.cp)
        order = hops if s.cp_mode == "allgather" else [(s.cp_rank - hop) % s.cp for hop in hops]
        before, after = ((1, 1), (0, 0)) if s.cp_mode == "ring" else ((1, 0.5), (0.5, 1))
        return [(1, 1) if part == s.cp_rank else before if part < s.cp_rank else after for part in order]

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Step 5's RingAttention."""
        s = self.s
        saved_q, n, kv = q.bytes, q.bytes.n, 2 * k.bytes.n
        ratio, lse_n = s.wide / s.e, q.bytes.n / s.e / s.m.head_dim * s.wide
        kept = self.new(kv)
        if s.cp_mode == "allgather":
            kept = self.new(kv * s.cp)
        buffers = 0 if s.cp_mode == "allgather" else kv * min(2, s.cp - 1)  # of keys and values that travel
        d_kvs = kv * ratio * (s.cp if s.cp_mode == "allgather" else 2)
        _buffers, out, lse = self.new(buffers), None, None
        for rows, _ in self.parts():
            if rows:
                _block = self.tape.made(n * rows), self.tape.made(lse_n * rows)
                if out is None:
                    out, lse = self.new(n * ratio), self.new(lse_n)
                else:
                    self.new(rows * (lse_n + 2 * n * ratio))  # to merge two: a share, a difference, their product
        out = self.narrow(out, n)

        def back(_dy: Bytes, saved=(saved_q, kept, out, lse)):
            d_q, _d_kvs, d_kv, _buffers = (self.new(size) for size in (n * ratio, d_kvs, kv * ratio, buffers))
            for rows, keys in self.parts():
                self.new(rows and n * rows + kv * keys)
            narrow_q, narrow_kv = self.narrow(d_q, n), self.narrow(d_kv, kv)
            return [narrow_q, narrow_kv, narrow_kv], []

        return self.node([q, k, v], out, back)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """The block."""
        s, m = self.s, self.s.m
        kv = max(1, m.n_kv_heads // s.tp) * m.head_dim
        weights = {
            f"{name}.self_attn.q_proj.weight": (m.dim // s.tp, m.dim),
            f"{name}.self_attn.k_proj.weight": (kv, m.dim),
            f"{name}.self_attn.v_proj.weight": (kv, m.dim),
        }
        projected = self.columns(x, weights, s.tokens)
        q, k, v = projected
        out = self.attend(self.rope(q), self.rope(k), v)
        return self.row(out, f"{name}.self_attn.o_proj.weight", m.dim, m.dim // s.tp, s.tokens)

    def mlp(self, x: Tensor, name: str, width: int, last: bool) -> Tensor:
        """SwiGLU; `width` of this rank."""
        s, m = self.s, self.s.m
        gate, up = self.columns(
            x, {f"{name}.gate_proj.weight": (width, m.dim), f"{name}.up_proj.weight": (width, m.dim)}, s.tokens
        )
        return self.row(self.product(self.product(gate), up), f"{name}.down_proj.weight", m.dim, width, s.tokens, last)

    # --- experts, with rows [n, dim]

    def cast(self, x: Tensor, n: float) -> Tensor:
        """Another dtype; nothing, if it is the same."""
        return x if n == x.bytes.n else self.kernel(n, x)

    def take(self, x: Tensor, rows: int) -> Tensor:
        """TakeRows; backward adds rows up."""
        n, dim = x.bytes.n, self.s.m.dim
        index = self.new(rows * 16)  # its place and its rank, or expert

        def back(_dy: Bytes, index=index):
            _sums, _wide = self.new(n * self.s.wide / self.s.e), self.new(rows * dim * self.s.wide)
            return [self.new(n)], []

        return self.node([x], self.new(rows * dim * self.s.e), back)

    def add_rows(self, rows: Tensor, number: int, tokens: int, last: bool) -> Tensor:
        """`number` rows, added up by token, in fp32 or wider; a layer is not done again beyond its `last` sum."""
        s, dim = self.s, self.s.m.dim
        wide = self.cast(rows, number * dim * s.wide)
        sums = self.kernel(tokens * dim * s.wide, wide)
        del wide, rows
        return sums if s.wide == s.e else self.kernel((not (last and self.tape.second)) * tokens * dim * s.e, sums)

    def experts(self, x: Tensor, gates: Tensor, name: str, tokens: int, choices: int) -> Tensor:
        """The experts of this rank: x [tokens, dim], of which each goes to some -> weighted sums [tokens, dim]."""
        s, m = self.s, self.s.m
        rows, width = self.take(x, choices), m.expert_width // s.tp

        def grouped(x: Tensor, matrix: str, *shape: int) -> Tensor:
            weights = {f"{name}.{matrix}.weight": shape}
            return self.matmuls(x, weights, choices, (keep, keep), experts=m.experts // s.ep)[0]

        gate = self.product(grouped(rows, "gate_proj", width, m.dim))
        hidden = self.product(gate, grouped(rows, "up_proj", width, m.dim))
        del gate
        down = grouped(hidden, "down_proj", m.dim, width)
        chosen, n, w = self.kernel(choices * s.wide, gates), choices * m.dim * s.e, choices * m.dim * s.wide

        def back(dy: Bytes, saved=(down.bytes, chosen.bytes)):
            down, _chosen = self.new(w), self.new(w)
            return [self.narrow(down, n), self.new(choices * s.wide)], []

        weighted = self.node([down, chosen], self.new(w), back)
        del down, chosen
        return self.add_rows(weighted, choices, tokens, last=s.ep == 1 or not s.travels)

    def travel(self, rows: Tensor, gates: Tensor | None, number: int, extra: float) -> Callable[[], list[Tensor]]:
        """A message of `number` rows leaves, with `extra` bytes of gates each; call the result to receive it."""
        s = self.s
        n = number * (s.m.dim * s.e + extra)

        def leave(*parts: Bytes) -> Bytes:
            _leaving = self.new(n)
            return self.new(n)

        def arrive(message: Bytes) -> list[Bytes]:
            return [self.new(number * s.m.dim * s.e), self.new(number * extra)] if extra else [message]

        tie = self.node([rows, gates], leave(), lambda message: (fill(arrive(message)), []))
        fill = lambda parts: [*parts, None][:2]  # noqa: E731

        def finish(tie=tie) -> list[Tensor]:
            arrived = arrive(tie.bytes)
            return self.tape.node([tie], arrived, lambda *grads: ([leave()], []))

        return finish

    def spread(self, x: Tensor, times: float) -> Tensor:
        """Rows gathered; or, if `times` is below 1, added up and scattered."""
        return self.node([x], self.new(x.bytes.n * times), lambda dy: ([self.new(dy.n / times)], []))

    def over_tp(self, x: Tensor, gates: Tensor, name: str, rows: int, choices: int, pads: bool) -> Tensor:
        """The experts, cut over tp; `choices` of all that tp brings together."""
        s = self.s
        if s.tp == 1:
            return self.experts(x, gates, name, rows, choices)
        if not s.sp:
            x, gates = (self.conjugate(t, keep, self.exact.total) for t in (x, gates))
            return self.conjugate(self.experts(x, gates, name, rows, choices), self.exact.total, keep)
        if pads:
            x, gates = (self.conjugate(t, self.exact.total, keep) for t in (x, gates))
        x, gates = (self.spread(t, s.tp) for t in (x, gates))
        return self.spread(self.experts(x, gates, name, rows * s.tp, choices), 1 / s.tp)

    def moe(self, x: Tensor, name: str) -> Tensor:
        """Router, experts, shared experts."""
        s, m = self.s, self.s.m
        k, table = m.experts_per_token, s.own * m.experts * s.wide
        x_wide = self.cast(x, s.own * m.dim * s.wide)
        matrix = self.new(m.experts * m.dim * s.wide) if s.wide != s.e else None

        def back(dy: Bytes, saved=(x_wide.bytes, matrix)):
            _wide, d_x = self.new(m.experts * m.dim * s.wide), self.new(s.own * m.dim * s.wide)
            return [d_x], [(f"{name}.router.weight", self.new(m.experts * m.dim * s.e))]

        logits = self.node([x_wide], self.tape.made(table), back, [f"{name}.router.weight"])
        del x_wide, matrix
        p = self.kernel(table, logits)
        picked = self.kernel(s.own * k * s.wide, p, saved=(p.bytes, self.new(s.own * k * 8)))
        if s.capacity:  # who comes first: a table of all choices, and its running sums
            self.new(2 * s.batch * m.seq_len * k * m.experts * 8)
        small = self.new(s.own * k * s.wide)
        gates = self.node([picked], small, lambda dy, saved=(picked.bytes, small): ([dy], []))
        del small, picked
        zeros = self.new(table)
        gates = self.kernel(table, gates)
        del zeros
        finish = self.send(x, gates, f"{name}.experts")
        del gates
        shared = None
        if m.shared_experts:
            shared = self.mlp(x, f"{name}.shared_experts", m.shared_experts * m.expert_width // s.tp, last=False)
        out = finish()
        return self.add(out, shared) if shared is not None else out

    def send(self, x: Tensor, gates: Tensor, name: str) -> Callable[[], Tensor]:
        """`run_experts`: tokens begin to travel; call the result for what comes home."""
        s, m = self.s, self.s.m
        together = s.tp if s.sp else 1
        if s.ep == 1 or not s.travels:
            n = s.own * s.ep

            def finish() -> Tensor:
                choices = round(n * together * m.experts_per_token / s.ep)
                if s.ep == 1:
                    return self.over_tp(x, gates, name, n, choices, False)
                everyones = (self.spread(t, s.ep) for t in (x, gates))
                return self.spread(self.over_tp(*everyones, name, n, choices, False), 1 / s.ep)

            return finish
        number = s.ep * round(mean_rows(m, s.own, s.ep) / (s.ep - 1))
        extra = m.experts // s.ep * s.wide
        rows = self.take(x, number)
        its_gates = self.kernel(number * extra, gates)
        arrive = self.travel(rows, its_gates, number, extra)
        del rows

        def come() -> Tensor:
            choices = s.own * together * m.experts_per_token
            out = self.over_tp(*arrive(), name, number, choices, True)
            (home,) = self.travel(out, None, number, 0)()
            return self.add_rows(home, number, s.own, last=True)

        return come

    def layer(self, x: Tensor, number: int) -> Tensor:
        """One layer."""
        name, m = f"model.layers.{number}", self.s.m
        x = self.add(x, self.attention(self.norm(x, f"{name}.input_layernorm.weight"), name))
        y = self.norm(x, f"{name}.post_attention_layernorm.weight")
        if hasattr(m, "experts") and m.has_experts(number):
            return self.add(x, self.moe(y, f"{name}.mlp"))
        return self.add(x, self.mlp(y, f"{name}.mlp", m.ffn_dim // self.s.tp, last=True))

    def tail(self, number: int) -> float:
        """Bytes of the gradient of a layer's last output of which something is kept, if it is not the layer's own."""
        s, m = self.s, self.s.m
        if not (hasattr(m, "experts") and m.has_experts(number)):
            return s.sp * s.full
        rows = s.own * (1 if s.ep > 1 and s.travels else s.ep * (s.tp if s.sp else 1))
        return rows * m.dim * s.wide * (rows > s.own or s.wide > s.e)

    # --- the ends

    def embedding(self, tokens: Bytes) -> Tensor:
        """Look-up; over tp, of the rows that are here."""
        s = self.s
        name, rows = "model.embed_tokens.weight", -(-s.m.vocab_size // s.tp)
        saved = self.new(s.tokens * 9) if s.tp > 1 else tokens

        def back(dy: Bytes, saved=saved):
            if s.fused:
                _wide, found = dy if s.wide == s.e else self.new(dy.n * s.wide / s.e), self.added(name, rows * s.m.dim)
                return [], [found]
            return [], [(name, self.new(rows * s.m.dim * s.e))]

        x = self.node([], self.new(s.full), back, [name], early=True)
        return x if s.tp == 1 else self.conjugate(self.kernel(s.full, x), *reversed(self.exact.enter))

    def loss(self, hidden: Tensor, name: str, chunk_tokens: int = CHUNK) -> Tensor:
        """The chunked cross entropy of a part of the vocabulary."""
        s = self.s
        rows = -(-s.m.vocab_size // s.tp)
        before, after = self.exact.enter if s.tp > 1 else (keep, keep)
        full = before(hidden.bytes)
        at_once = s.fused and s.e * self.tape.cast > 2
        grad_hidden, grad_weight = self.new(s.full), self.new(0 if at_once else rows * s.m.dim * s.wide)
        for start in range(0, s.tokens, chunk_tokens):
            n = min(chunk_tokens, s.tokens - start)
            logits = self.new(n * rows * s.e)
            small = self.new(n * 34)
            softmax = self.new(n * rows * s.wide)
            combined = self.new(n * 8 * (s.tp + 2) if s.tp > 1 else n * 8)
            del logits, softmax, small, combined
        if at_once:
            self.room(name, rows * s.m.dim * s.e * self.tape.cast)
        elif s.wide != s.e:
            grad_weight = self.new(rows * s.m.dim * s.e)
        grad_hidden = after(grad_hidden)
        del full

        def back(dy: Bytes, saved=(grad_hidden, grad_weight)):
            return [self.new(saved[0].n)], [(name, self.new(saved[1].n))]

        return self.node([hidden], self.new(4), back, [name], early=True)
