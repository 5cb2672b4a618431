"""A layer, the embedding and the loss, done with sizes alone: which bytes are alive together in forward and backward.

Each function here is a function of the program under the same name, or under the one that its docstring gives. It has
the same local variables, with bytes instead of tensors; theory/tape.py says how long these live. Kernels are those of a
GPU. Numbers for each token that are a few bytes are left out, but for the loss of a small vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from theory.tape import Bytes, Tape, Tensor
from theory.traffic import mean_rows

CHUNK = 4096  # tokens whose logits are there at a time


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
    fused: bool = False  # --fuse-gradients

    @property
    def x(self) -> int:
        """Bytes of [batch, own tokens, dim]."""
        return self.own * self.m.dim * self.e

    @property
    def full(self) -> int:
        """Bytes of [batch, tokens, dim]."""
        return self.tokens * self.m.dim * self.e


class Layers:
    """The modules of a rank, as functions of one micro-batch; they write on `tape`."""

    def __init__(self, sizes: Sizes, tape: Tape, store: list, room: Callable = lambda name, n: None):
        """`room(name, n)`: have `n` bytes for a weight's gradient (--fuse-gradients)."""
        self.s, self.tape, self.store, self.room = sizes, tape, store, room
        self.new = tape.new

    def kernel(self, n: float, *inputs: Tensor, saved: tuple = ()) -> Tensor:
        """What makes `n` bytes, and in backward a gradient as large as each input; until then, `saved` is there."""
        sizes = [x.bytes.n for x in inputs]
        return self.tape.node(inputs, [self.new(n)], lambda dy, saved=saved: ([self.new(size) for size in sizes], []))[
            0
        ]

    # --- collectives over tokens

    def gather(self, x: Bytes) -> Bytes:
        """[.., tokens/n, dim] of every rank -> [.., tokens, dim]; the parts lie in order if there is one sequence."""
        parts = self.new(x.n * self.s.tp)
        return self.new(parts.n) if self.s.batch > 1 else parts

    def scatter(self, x: Bytes) -> Bytes:
        """The reverse, of a sum."""
        parts = self.new(x.n) if self.s.batch > 1 else x
        return self.new(parts.n / self.s.tp)

    def reduce(self, x: Bytes) -> Bytes:
        """What becomes of an input's gradient, if all tp ranks have a part."""
        return self.scatter(x) if self.s.sp else self.new(x.n)

    def enter(self, x: Tensor) -> Tensor:
        """Step 4's f: `gather` with sequence parallelism, else nothing; and `reduce` in backward."""
        s = self.s
        return self.tape.node([x], [self.gather(x.bytes) if s.sp else x.bytes], lambda dy: ([self.reduce(dy)], []))[0]

    def leave(self, x: Tensor) -> Tensor:
        """Step 4's g: `reduce`; and in backward `gather`, or nothing."""
        s = self.s
        out = self.reduce(x.bytes)
        return self.tape.node([x], [out], lambda dy: ([self.gather(dy) if s.sp else dy], []))[0]

    # --- linear layers

    def outputs(self, rows: int, weights: dict[str, tuple[int, int]]) -> list[Bytes]:
        """What matmuls with `weights`, by name [out, in], make of `rows` rows."""
        return [self.tape.made(rows * n * self.s.e) for n, _ in weights.values()]

    def gradients(self, weights: dict[str, tuple[int, int]]) -> list[tuple[str, Bytes]]:
        """The weights' gradients, as matmuls make them, or nothing where they add them to their sums."""
        if self.s.fused:
            return [self.added(name, a * b) for name, (a, b) in weights.items()]
        return [(name, self.new(a * b * self.s.e)) for name, (a, b) in weights.items()]

    def added(self, name: str, n: float) -> tuple[str, Bytes]:
        """What autograd gets of a gradient of `n` numbers that is in its sum already."""
        self.room(name, n * self.s.e * self.tape.cast)
        return name, self.new(0)

    def linear(self, x: Tensor, name: str, n_out: int, n_in: int, rows: int, last: bool = False) -> Tensor:
        """One matmul, whose backward finds both gradients; or whose weight gradient waits."""
        weights, e, saved = {name: (n_out, n_in)}, self.s.e, x.bytes
        outs = self.outputs(rows, weights) if not last or not self.tape.second or self.s.split or self.s.fused else []
        if last and self.tape.second:  # a second forward stops before this; a function of our own runs, and is dropped
            outs = [self.new(0)]
        if self.s.split:
            return self.tape.node([x], outs, self.split_back(saved, weights, rows, None), [name], early=True)[0]

        def back(dy: Bytes, saved=saved):
            return [self.new(rows * n_in * e) if x.node else None], self.gradients(weights)

        return self.tape.node([x], outs, back, [name])[0]

    def split_back(self, saved: Bytes, weights: dict, rows: int, gather: bool | None) -> Callable:
        """Backward of step 6's SplitFunction; `gather`: over tp, None: no."""
        n_in = next(iter(weights.values()))[1]

        def back(*grads: Bytes):
            def weight_gradients(saved=saved, grads=grads) -> list[tuple[str, Bytes]]:
                _full = self.gather(saved) if gather else saved
                return self.gradients(weights)

            self.store.append(weight_gradients)
            del weight_gradients
            dx = self.new(rows * n_in * self.s.e)
            return [dx if gather is None else self.reduce(dx)], []

        return back

    def columns(self, x: Tensor, weights: dict[str, tuple[int, int]], rows: int) -> list[Tensor]:
        """`project`: several matmuls of one input."""
        s = self.s
        if s.fused and s.tp == 1:
            n_in, saved = next(iter(weights.values()))[1], x.bytes

            def together(*_: Bytes, saved=saved):
                return [self.new(rows * n_in * s.e)], self.gradients(weights)

            return self.tape.node([x], self.outputs(rows, weights), together, list(weights), early=True)
        if s.tp == 1 or not s.overlap:
            x = self.enter(x) if s.tp > 1 else x
            return [self.linear(x, name, n_out, n_in, rows) for name, (n_out, n_in) in weights.items()]
        n_in, saved = next(iter(weights.values()))[1], x.bytes
        _full = self.gather(x.bytes) if s.sp else x.bytes
        outs = self.outputs(rows, weights)
        if s.split:
            back = self.split_back(saved, weights, rows, s.sp)
        else:

            def back(*grads: Bytes, saved=saved):
                parts = self.new(saved.n * s.tp) if s.sp else saved
                dx = self.new(rows * n_in * s.e)
                dx = self.reduce(dx)
                _full = self.new(parts.n) if s.sp and s.batch > 1 else parts
                return [dx], self.gradients(weights)

        return self.tape.node([x], outs, back, list(weights), early=True)

    def row(self, x: Tensor, name: str, n_out: int, n_in: int, rows: int, last: bool = False) -> Tensor:
        """A row-parallel layer; of the `last` of a layer, nobody needs the output again."""
        y = self.linear(x, name, n_out, n_in, rows, last)
        return self.leave(y) if self.s.tp > 1 else y

    # --- a layer

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm in one kernel."""
        s, saved, root = self.s, x.bytes, self.new(self.s.own * self.s.wide)
        out = self.new(x.bytes.n)

        def back(dy: Bytes, saved=saved, root=root):
            return [self.new(saved.n)], [(name, self.new(s.m.dim * s.e))]

        return self.tape.node([x], [out], back, [name], early=True)[0]

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """A sum, whose gradient is that of both."""
        return self.tape.node([a, b], [self.new(min(a.bytes.n, b.bytes.n))], lambda dy: ([dy, dy], []))[0]

    def rope(self, x: Tensor) -> Tensor:
        """apply_rope: five kernels, two of them with fp32 results; or services/fused_gradients.py's."""
        s, n = self.s, x.bytes.n
        w = n * s.wide / s.e
        if s.fused:
            return self.tape.node([x], [self.rotated(n, w)], lambda dy: ([self.rotated(n, w)], []))[0]
        second, first = self.tape.node([x], [x.bytes] * 2, lambda *_: ([self.new(n)], []))
        wide = lambda dy: self.narrow(self.new(w), n)  # noqa: E731
        (a,) = self.tape.node([x], [self.new(w)], lambda dy: ([wide(dy)], []))
        (turned,) = self.tape.node([second], [self.new(n / 2)], lambda dy: ([self.new(n / 2)], []))
        (turned,) = self.tape.node([turned, first], [self.new(n)], lambda dy: ([dy, dy], []))
        del first, second
        (out,) = self.tape.node([a, turned], [self.new(w)], lambda dy: ([dy, wide(dy)], []))
        del a, turned
        if s.wide == s.e:
            return out
        return self.tape.node([out], [self.new(n)], lambda dy: ([self.new(w)], []))[0]

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
        lse = self.tape.made(q.bytes.n / s.e / s.m.head_dim * s.wide)
        out, saved = self.tape.made(q.bytes.n), (q.bytes, k.bytes, v.bytes)

        def back(dy: Bytes, saved=saved, kept=(out, lse)):
            return [self.new(x.n) for x in saved], []

        return self.tape.node([q, k, v], [out], back)[0]

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
        return self.tape.node(
            [x], [self.swapped(x.bytes, to_heads)], lambda dy: ([self.swapped(dy, not to_heads)], [])
        )[0]

    def parts(self) -> list[tuple[float, float]]:
        """What a cp rank computes: by part of the keys, (share of its queries, share of the part's keys)."""
        s = self.s
        hops = range(s.cp)
        order = hops if s.cp_mode == "allgather" else [(s.cp_rank - hop) % s.cp for hop in hops]
        found = []
        for source in order:
            if source == s.cp_rank:
                found.append((1, 1))
            elif s.cp_mode == "ring":
                found.append((1, 1) if source < s.cp_rank else (0, 0))
            else:
                found.append((1, 0.5) if source < s.cp_rank else (0.5, 1))
        return found

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Step 5's RingAttention."""
        s = self.s
        saved_q, n, kv = q.bytes, q.bytes.n, 2 * k.bytes.n
        ratio, lse_n = s.wide / s.e, q.bytes.n / s.e / s.m.head_dim * s.wide

        def merge(rows: float):
            _share, _difference, _product = (self.new(rows * size) for size in (lse_n, n * ratio, n * ratio))

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
                    merge(rows)
        if ratio != 1:
            out = self.new(n)

        def back(_dy: Bytes, saved=(saved_q, kept, out, lse)):
            d_q, _d_kvs, d_kv, _buffers = (self.new(size) for size in (n * ratio, d_kvs, kv * ratio, buffers))
            for rows, keys in self.parts():
                self.new(rows and n * rows + kv * keys)
            if ratio == 1:
                return [d_q, d_kv, d_kv], []
            wide = d_q, d_kv
            d_q, d_kv = self.new(n), self.new(kv)
            del wide
            return [d_q, d_kv, d_kv], []

        return self.tape.node([q, k, v], [out], back)[0]

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

    def silu(self, x: Tensor) -> Tensor:
        """One kernel, there and back."""
        return self.kernel(x.bytes.n, x, saved=(x.bytes,))

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """A product."""
        return self.kernel(a.bytes.n, a, b, saved=(a.bytes, b.bytes))

    def mlp(self, x: Tensor, name: str, width: int, last: bool) -> Tensor:
        """SwiGLU; `width` of this rank."""
        s, m = self.s, self.s.m
        gate, up = self.columns(
            x, {f"{name}.gate_proj.weight": (width, m.dim), f"{name}.up_proj.weight": (width, m.dim)}, s.tokens
        )
        return self.row(self.times(self.silu(gate), up), f"{name}.down_proj.weight", m.dim, width, s.tokens, last)

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

        return self.tape.node([x], [self.new(rows * dim * self.s.e)], back)[0]

    def add_rows(self, rows: Tensor, number: int, tokens: int) -> Tensor:
        """`number` rows, added up by token, in fp32 or wider."""
        s, dim = self.s, self.s.m.dim
        wide = self.cast(rows, number * dim * s.wide)
        sums = self.kernel(tokens * dim * s.wide, wide)
        del wide, rows
        return self.cast(sums, tokens * dim * s.e)

    def grouped(self, x: Tensor, name: str, n_out: int, n_in: int, experts: int, rows: int) -> Tensor:
        """The same linear layer of all experts of a rank."""
        s, saved = self.s, x.bytes
        out = self.tape.made(rows * n_out * s.e)

        def outer() -> list[tuple[str, Bytes]]:
            product = self.new(experts * n_out * n_in * s.e)
            return [self.added(name, experts * n_out * n_in)] if s.fused else [(name, product)]

        def back(dy: Bytes, saved=saved):
            if s.split:
                self.store.append(lambda saved=saved, dy=dy: outer())
                return [self.new(rows * n_in * s.e)], []
            return [self.new(rows * n_in * s.e)], outer()

        return self.tape.node([x], [out], back, [name], early=True)[0]

    def experts(self, x: Tensor, gates: Tensor, name: str, tokens: int, choices: int) -> Tensor:
        """The experts of this rank: x [tokens, dim], of which each goes to some -> weighted sums [tokens, dim]."""
        s, m = self.s, self.s.m
        here, width = m.experts // s.ep, m.expert_width // s.tp
        rows = self.take(x, choices)
        gate = self.silu(self.grouped(rows, f"{name}.gate_proj.weight", width, m.dim, here, choices))
        hidden = self.times(gate, self.grouped(rows, f"{name}.up_proj.weight", width, m.dim, here, choices))
        del gate
        down = self.grouped(hidden, f"{name}.down_proj.weight", m.dim, width, here, choices)
        chosen, n, w = self.kernel(choices * s.wide, gates), choices * m.dim * s.e, choices * m.dim * s.wide

        def back(dy: Bytes, saved=(down.bytes, chosen.bytes)):
            down, _chosen = self.new(w), self.new(w)
            return [self.narrow(down, n), self.new(choices * s.wide)], []

        (weighted,) = self.tape.node([down, chosen], [self.new(w)], back)
        del down, chosen
        return self.add_rows(weighted, choices, tokens)

    def travel(self, rows: Tensor, gates: Tensor | None, number: int, extra: float) -> Callable[[], list[Tensor]]:
        """A message of `number` rows leaves, with `extra` bytes of gates each; call the result to receive it."""
        s = self.s
        n = number * (s.m.dim * s.e + extra)

        def leave(*parts: Bytes) -> Bytes:
            _leaving = self.new(n)
            return self.new(n)

        def arrive(message: Bytes) -> list[Bytes]:
            return [self.new(number * s.m.dim * s.e), self.new(number * extra)] if extra else [message]

        (tie,) = self.tape.node([rows, gates], [leave()], lambda message: (fill(arrive(message)), []))
        fill = lambda parts: [*parts, None][:2]  # noqa: E731

        def finish(tie=tie) -> list[Tensor]:
            arrived = arrive(tie.bytes)
            return self.tape.node([tie], arrived, lambda *grads: ([leave()], []))

        return finish

    def over_tp(self, x: Tensor, gates: Tensor, name: str, rows: int, choices: int, pads: bool) -> Tensor:
        """The experts, cut over tp; `choices` of all that tp brings together."""
        s = self.s
        if s.tp == 1:
            return self.experts(x, gates, name, rows, choices)
        if not s.sp:
            x, gates = (self.tape.node([t], [t.bytes], lambda dy: ([self.new(dy.n)], []))[0] for t in (x, gates))
            out = self.experts(x, gates, name, rows, choices)
            return self.tape.node([out], [self.new(out.bytes.n)], lambda dy: ([dy], []))[0]
        if pads:
            x, gates = (self.tape.node([t], [self.new(t.bytes.n)], lambda dy: ([dy], []))[0] for t in (x, gates))
        x, gates = (self.kernel(t.bytes.n * s.tp, t) for t in (x, gates))  # gathered
        out = self.experts(x, gates, name, rows * s.tp, choices)
        return self.kernel(out.bytes.n / s.tp, out)

    def moe(self, x: Tensor, name: str) -> Tensor:
        """Router, experts, shared experts."""
        s, m = self.s, self.s.m
        k, table = m.experts_per_token, s.own * m.experts * s.wide
        x_wide = self.cast(x, s.own * m.dim * s.wide)
        matrix = self.new(m.experts * m.dim * s.wide) if s.wide != s.e else None

        def back(dy: Bytes, saved=(x_wide.bytes, matrix)):
            _wide, d_x = self.new(m.experts * m.dim * s.wide), self.new(s.own * m.dim * s.wide)
            return [d_x], [(f"{name}.router.weight", self.new(m.experts * m.dim * s.e))]

        (logits,) = self.tape.node([x_wide], [self.tape.made(table)], back, [f"{name}.router.weight"])
        del x_wide, matrix
        p = self.kernel(table, logits)
        picked = self.kernel(s.own * k * s.wide, p, saved=(p.bytes, self.new(s.own * k * 8)))
        if s.capacity:  # who comes first: a table of all choices, and its running sums
            self.new(2 * s.batch * m.seq_len * k * m.experts * 8)
        small = self.new(s.own * k * s.wide)
        (gates,) = self.tape.node([picked], [small], lambda dy, saved=(picked.bytes, small): ([dy], []))
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
                everyones = (self.kernel(t.bytes.n * s.ep, t) for t in (x, gates))
                out = self.over_tp(*everyones, name, n, choices, False)
                return self.kernel(out.bytes.n / s.ep, out)

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
            return self.add_rows(home, number, s.own)

        return come

    def layer(self, x: Tensor, number: int) -> Tensor:
        """One layer."""
        name, m = f"model.layers.{number}", self.s.m
        x = self.add(x, self.attention(self.norm(x, f"{name}.input_layernorm.weight"), name))
        y = self.norm(x, f"{name}.post_attention_layernorm.weight")
        if hasattr(m, "experts") and m.has_experts(number):
            return self.add(x, self.moe(y, f"{name}.mlp"))
        return self.add(x, self.mlp(y, f"{name}.mlp", m.ffn_dim // self.s.tp, last=True))

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

        (x,) = self.tape.node([], [self.new(s.full)], back, [name], early=True)
        if s.tp == 1:
            return x
        (x,) = self.tape.node([x], [self.new(s.full)], lambda dy: ([self.new(dy.n)], []))
        return self.leave(x)

    def loss(self, hidden: Tensor, name: str, chunk_tokens: int = CHUNK) -> Tensor:
        """The chunked cross entropy of a part of the vocabulary."""
        s = self.s
        rows = -(-s.m.vocab_size // s.tp)
        full = self.gather(hidden.bytes) if s.tp > 1 and s.sp else hidden.bytes
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
        del full
        if s.tp > 1:
            grad_hidden = self.reduce(grad_hidden)

        def back(dy: Bytes, saved=(grad_hidden, grad_weight)):
            return [self.new(saved[0].n)], [(name, self.new(saved[1].n))]

        return self.tape.node([hidden], [self.new(4)], back, [name], early=True)[0]
