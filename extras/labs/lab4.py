"""Lab 4: tensor and sequence parallelism (step04_tp_sp.py)."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, Mesh
from common.layout import note_layout
from common.model import IGNORE, Decoder
from extras.labs.course import FOUND, Case, Lab, Question, Row, Task, as_ours, at_most, demands
from extras.labs.probes import Small, decoder, fill, record, refused, there_and_back
from extras.labs.suite import suite
from extras.labs.tape import Tape
from extras.theory.shapes import Shape
from extras.theory.traffic import Passes, gradient_traffic, tensor_traffic


class Tokens(Case):
    """Task 1: whole sequences of `part` tokens a rank, [batch, seq, dim]: each rank has its own."""

    def own(self, rank: int) -> Tensor:
        """A rank's."""
        return self.draw(f"x {rank}", self.b, self.ranks * self.part, self.dim)

    def here(self, rank: int) -> slice:
        """A rank's tokens."""
        return slice(rank * self.part, (rank + 1) * self.part)


def strided(x: Tensor) -> Tensor:
    """The same numbers in memory of another order."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)


class Collective(Tokens):
    """One of the three, of tensors that are contiguous (`dense`) or not."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        x = self.own(mesh.rank)
        x = x[:, self.here(mesh.rank)] if self.name == "gather_tokens" else x
        given = x.clone(memory_format=torch.contiguous_format) if self.dense else strided(x)
        with Tape(mesh) as tape:
            found = getattr(step, self.name)(given, mesh["tp"])
        yield from as_ours({"the result": found, "bytes sent": tape.sent(), "the input after the call": given})


def blocks(name: str) -> tuple[dict[str, Any], ...]:
    """Cases of one function."""
    return (dict(mesh=dict(tp=3), b=2, part=5, dim=7, dense=False, name=name),
            dict(mesh=dict(tp=2), b=3, part=4, dim=5, dense=True, name=name))  # fmt: skip


COLLECTIVES = Task(
    ("sum_over_ranks", "gather_tokens", "sum_and_shard_tokens"),
    (*demands(Collective, blocks("sum_over_ranks"),
              ("sum_over_ranks: the sum of every rank's x; x stays as it is", 2, "the ")),
     *demands(Collective, blocks("gather_tokens"),
              ("gather_tokens: all ranks' tokens in order", 2, "the "),
              ("gather_tokens sends (n-1)/n of the whole", 1, "bytes")),
     *demands(Collective, blocks("sum_and_shard_tokens"),
              ("sum_and_shard_tokens: this rank's tokens of the sum", 2, "the "),
              ("sum_and_shard_tokens sends (n-1)/n of the whole", 1, "bytes"))),
)  # fmt: skip


class Pair(Tokens):
    """Task 2: f or g forward and backward. The gradient of f's output differs by rank; that of g's does not."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        group, here, f = mesh["tp"], self.here(mesh.rank), self.name == "f"
        x, dy = self.own(mesh.rank), self.draw(f"dy {mesh.rank * f}", *self.own(0).shape)
        if self.sp:
            x, dy = (x[:, here], dy) if f else (x, dy[:, here])
        block, names = step.enter_block if f else step.leave_block, ("the output", "the gradient of the input")
        yield from as_ours(there_and_back(names, lambda x: block(x, group, self.sp), [strided(x)], dy, mesh))


(F_PLAIN, F_SP), (G_PLAIN, G_SP) = (
    [(dict(mesh=dict(tp=3), b=2, part=5, dim=7, sp=sp, name=name),) for sp in (False, True)] for name in "fg"
)
PAIR = Task(
    ("Conjugate.forward", "Conjugate.backward", "enter_block", "leave_block"),
    (*demands(Pair, F_PLAIN, ("f without SP: values and gradients", 2, "the ")),
     *demands(Pair, G_PLAIN, ("g without SP: values and gradients", 2, "the ")),
     *demands(Pair, F_SP, ("f with SP", 2, "the ")),
     *demands(Pair, G_SP, ("g with SP", 2, "the ")),
     *demands(Pair, F_PLAIN + F_SP, ("f sends one all-reduce backward, or (SP) half of it each way", 1, "bytes")),
     *demands(Pair, G_PLAIN + G_SP, ("g sends one all-reduce forward, or (SP) half of it each way", 1, "bytes"))),
)  # fmt: skip


class Words(Case):
    """Task 3: a vocabulary of which each rank holds a part. The last one has padding, or nothing else."""

    def setup(self):
        self.length, shape = -(-self.vocab // self.ranks), (self.b, self.s)
        more = self.ids("tokens", self.vocab, self.b * self.s - self.vocab)
        self.tokens = torch.cat((torch.arange(self.vocab), more)).view(shape)
        self.targets = self.ids("targets", self.vocab, *shape)
        self.targets[0, 1], self.targets[-1, -1], self.targets[1, 0] = IGNORE, self.vocab - 1, 0

    def own(self, rank: int) -> range:
        """The ids of a rank."""
        return range(min(rank * self.length, self.vocab), min((rank + 1) * self.length, self.vocab))

    def part(self, whole: Tensor, rank: int, padding: float) -> Tensor:
        """A rank's part of the last dimension, with padding."""
        ids = self.own(rank)
        return F.pad(whole[..., ids.start : ids.stop], (0, self.length - len(ids)), value=padding).clone()


class Embedding(Words):
    """The embedding of a part of the table, and its gradient."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        table, dy = self.draw("table", self.dim, self.vocab), self.draw("dy", *self.tokens.shape, self.dim)
        ids = self.own(mesh.rank)
        layer = step.VocabParallelEmbedding(nn.Parameter(self.part(table, mesh.rank, 0.0).T.clone()), ids)
        given, names = self.tokens.clone(), ("the embedding", "gradient")
        found = there_and_back(names, lambda _: layer(given), [layer.weight], dy)
        yield "the embedding", found["the embedding"], FOUND
        yield "the gradient of its weight", found["gradient"][: len(ids)], FOUND
        yield "tokens stay", torch.equal(given, self.tokens), True

    def explain(self, rank: int, key: str, found: Any, expected: Any) -> str:
        if key != "the embedding" or getattr(found, "shape", None) != expected.shape:
            return ""
        wrong = ((found - expected).abs().amax(-1) > 1e-9).nonzero()[0]
        token = int(self.tokens[tuple(wrong)])
        owner, kind = token // self.length, "its row" if token in self.own(rank) else "zero"
        ids = f"ids {self.own(owner).start} to {self.own(owner).stop - 1}"
        return f"token {token} belongs to rank {owner}, which has {ids}: here it has to be {kind}"


class Loss(Words):
    """A seventh of the loss of a part of the logits, behind which the padding has numbers that must not count."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        names, seventh = ("the loss", "the gradient of the logits"), torch.tensor(1 / 7).double()
        targets = self.targets.clone()
        logits = self.draw("logits", *targets.shape, self.vocab) * self.size

        def part(logits: Tensor) -> Tensor:
            return step.VocabParallelCrossEntropy.apply(logits, targets, self.own(mesh.rank), mesh["tp"])

        found = there_and_back(names, part, [self.part(logits, mesh.rank, 3.0)], seventh, mesh)
        yield "bytes forward", found.pop("bytes forward"), dict(tp=at_most(2.5 * (self.ranks - 1) * targets.nbytes))
        yield from as_ours(found)
        yield "targets stay", torch.equal(targets, self.targets), True


WORDS = (
    dict(mesh=dict(tp=3), b=2, s=7, dim=5, vocab=10, size=1.0),
    dict(mesh=dict(tp=4), b=3, s=5, dim=6, vocab=9, size=1.0),
)
LARGE = (dict(mesh=dict(tp=3), b=2, s=7, dim=5, vocab=10, size=900.0),)  # e^900 is infinite
VOCABULARY = Task(
    ("VocabParallelEmbedding.forward", "VocabParallelCrossEntropy.forward"),
    (*demands(Embedding, WORDS, ("the embedding: rows of the tokens in `ids`, zero for others; and its gradient", 2)),
     *demands(Loss, WORDS,
              ("the loss, whole on every rank", 2, "the loss", "stay"),
              ("its gradient", 3, "gradient"),
              ("two numbers a token travel, and nothing in backward", 1, "bytes")),
     *demands(Loss, LARGE, ("large logits do not overflow", 1, "the loss", "gradient"))),
)  # fmt: skip


class Records(Small):
    """Task 4: records and shapes of a cut model in which no two sizes are the same."""

    def cut(self, step: Any, mesh: Mesh) -> Decoder:
        """The model."""
        model = decoder(tied=self.tied)
        step.shard_tensors(model, mesh, self.sp)
        return model

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for name, param in self.cut(step, mesh).named_parameters():
            yield from record(name, param)


class Model(Records):
    """The cut model's loss, and what it sends."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model = self.cut(step, mesh)
        fill(model, self.seed)
        with Tape(mesh) as tape:
            loss = self.loss(model)
            loss.backward()
        yield from as_ours({"the loss": loss, "bytes of a micro-batch": tape.sent()})


class Cut(Case):
    """`cut` along both dimensions, of a parameter that is cut already; and in a group of one. What must not work."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for dim in (0, 1):
            weight = nn.Parameter(torch.empty(10, 7, device="meta"), requires_grad=dim == 0)
            for ranks, name in ((3, "tp"), (2, "ep")):
                weight = step.shard_param(weight, dim, Group(name, 1, ranks, None))
            yield from record(f"the part along {dim}", weight)
            yield f"the part along {dim} is trained", weight.requires_grad, FOUND
            yield f"the part along {dim} has memory", weight.device.type != "meta", FOUND
        yield "a group of one changes it", step.shard_param(weight, 0, Group("tp", 0, 1, None)) is not weight, False
        weight, heads = nn.Parameter(torch.empty(12, 8, device="meta")), SimpleNamespace(n_kv_heads=2)
        error = refused(step.shard_heads, weight, {"tp": Group("tp", 0, 3, None)}, heads)
        yield "three ranks and two key/value heads", error, "UserError"


CUT = tuple(dict(mesh=dict(dp=1, tp=2), sp=sp, tied=tied) for sp in (True, False) for tied in (False, True))
CUTS = Task(
    ("shard_param", "shard_heads", "shard_tensors"),
    (*demands(Cut, ({},), ("shard_param: the shard, its record, a group of one; shard_heads refuses", 2)),
     *demands(Records, CUT,
              ("every matrix is cut along the right dimension, a tied one once", 3, "shape", "cuts of"),
              ("norms are partial over tp with SP, and nothing else is", 2, "partial_over")),
     *demands(Model, CUT,
              ("the loss is that of one device", 2, "the loss"),
              ("one f for q, k, v and one for gate, up", 2, "bytes"))),
)  # fmt: skip

PARTIAL = {"norm": ("tp",), "router": ("tp", "cp"), "matrix": (), "other": ("cp",), "norm2": ("tp",)}


class Sums(Case):
    """Task 5: gradients of five parameters with different records."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, gradients = nn.Module(), {}
        for name, over in PARTIAL.items():
            param = nn.Parameter(torch.zeros(len(name), 3, dtype=torch.float64))
            note_layout(param, partial_over=over)
            model.register_parameter(name, param)
            gradients[name] = self.draw(f"{name} {mesh.rank}", len(name), 3)
        held = {f"the gradient of {name}": value for name, value in gradients.items()}
        with Tape(mesh) as tape:
            step.sum_partial_gradients(model, gradients, mesh)
        yield from as_ours(held)
        yield "collectives", len(tape.starts()), FOUND


LAST = Task(
    ("sum_partial_gradients",),
    (*demands(Sums, (dict(mesh=dict(dp=1, cp=2, tp=2)),),
              ("sums over the groups that a record names, in place", 2, "gradient"),
              ("one all-reduce a group", 1, "collectives")),
     suite(4, "tp", "tp, no sp", "step 4, overlap", says="--tp 2 trains as one device, also without SP; a variant"),
     suite(2, "tp, tied", "step 4, no sp", "step 4", "step 4, bf16", "step 4, saved",
           says="so it does with a tied matrix, in three steps, with ZeRO")),
)  # fmt: skip


def bends(L: int, h: int, s: int, b: int, k: int, wide: int = 4, each: bool = False, ways: int = 2) -> float:
    """Bytes over tp of a step's layers in bf16, over those of the sum of their gradients, on two ranks."""
    work = Passes(Shape(h, L, 1, 1, 1, 1, s), b * s, k * L, 0, 0, 0, e=2, wide=4, recompute=False)
    layers, gradients = tensor_traffic(work, 2, sp=True), gradient_traffic("dp", 2, 12 * L * h**2 * wide)
    return layers.total() * ways / 2 / gradients.total() / (k // 2 if each else 1)


QUESTION = Question(
    dict(L=(12, 18, 24), h=range(1024, 3073, 512), s=(2048, 4096, 6144), b=(1, 2, 4), k=(16, 24, 32)),
    bends,
    {"this is one micro-batch over tp": dict(k=1), "this is forward alone": dict(ways=1),
     "gradients are added up, and sent, in fp32": dict(wide=2),
     "gradients are summed over dp once a step, not once a micro-batch": dict(each=True)},
)  # fmt: skip

TASKS = COLLECTIVES, PAIR, VOCABULARY, CUTS, LAST
LAB = Lab(4, ("step04_tp_sp",), TASKS, QUESTION, flags="--tp 2 --no-sp")
