"""Lab 7: experts (step07_moe_ep.py)."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, Mesh
from labs.course import Case, Lab, Question, Row, Task, at_most, demands, rows
from labs.probes import decoder, members, record, refused, there_and_back
from labs.suite import suite

FP32 = 1e-6  # fractions of counts may be in 32 bits
KINDS = ("gate_proj", "up_proj", "down_proj")
ALONE = Group("sequence", 0, 1, None)


def weights_of(case: Case, experts: int, dim: int, width: int) -> list[Tensor]:
    """gate, up [experts, width, dim] and down [experts, dim, width]."""
    shapes = dict(zip(KINDS, ((width, dim), (width, dim), (dim, width)), strict=True))
    return [case.draw(kind, experts, *shape) / 2 for kind, shape in shapes.items()]


def put(experts: nn.Module, weights: list[Tensor]) -> list[Tensor]:
    """Give experts these weights; returns the parameters."""
    for kind, weight in zip(KINDS, weights, strict=True):
        getattr(experts, kind).weight = nn.Parameter(weight)
    return leaves_of(experts)


def leaves_of(experts: nn.Module) -> list[Tensor]:
    """Their weights."""
    return [getattr(experts, kind).weight for kind in KINDS]


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert."""
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def choose(x: Tensor, router: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """p [tokens, experts], and the scores of the chosen experts in a matrix of that shape, 0 for the others."""
    p = (x @ router.T).softmax(-1)
    best, chosen = p.topk(k)
    return p, torch.zeros_like(p).scatter(-1, chosen, best / best.sum(-1, keepdim=True) if k > 1 else best)


def mixture(x: Tensor, scores: Tensor, weights: list[Tensor]) -> Tensor:
    """All experts on all tokens, weighted."""
    return sum(scores[:, e, None] * mlp(x, *(w[e] for w in weights)) for e in range(scores.shape[1]))


def aux_loss(p: Tensor, scores: Tensor) -> Tensor:
    """experts * sum_e f_e P_e."""
    return p.shape[1] * ((scores > 0).double().sum(0) / (scores > 0).sum() * p.mean(0)).sum()


class PlainMoE(nn.Module):
    """A layer by its definition, whole; `loss` is the sum over sequences of their auxiliary losses."""

    def __init__(self, dim: int, width: int, experts: int, k: int):
        super().__init__()
        self.router, self.experts, self.k = nn.Linear(dim, experts, bias=False), nn.Module(), k
        for kind, shape in zip(KINDS, ((width, dim), (width, dim), (dim, width)), strict=True):
            setattr(self.experts, kind, nn.Module())
            getattr(self.experts, kind).weight = nn.Parameter(torch.empty(experts, *shape))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> the same shape."""
        chosen = [choose(sequence, self.router.weight, self.k) for sequence in x]
        self.loss, weights = sum(aux_loss(p, scores) for p, scores in chosen), leaves_of(self.experts)
        return torch.stack([mixture(s, scores, weights) for s, (_, scores) in zip(x, chosen, strict=True)])


def one_by_one(function: Any, rows: Tensor, counts: Any, *weights: Tensor) -> Tensor:
    """function(rows of an expert, its weights), for one expert after another."""
    parts = enumerate(rows.split([int(n) for n in counts]))
    return torch.cat([function(part, *(weight[e] for weight in weights)) for e, part in parts])


class Side(Case):
    """Task 1: four experts, with their gradients."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        n, experts, counts = sum(self.counts), step.Experts(4, 5, 7), torch.tensor(self.counts)
        x, dy, weights = self.draw("x", n, 5), self.draw("dy", n, 5), weights_of(self, 4, 5, 7)
        names = [f"experts: {part}" for part in ("y", "dx", *KINDS)]
        found = there_and_back(names, lambda x, *_: experts(x, counts), [x, *put(experts, weights)], dy)
        yield from rows(found, there_and_back(names, lambda x, *w: one_by_one(mlp, x, counts, *w), [x, *weights], dy))


class Linear(Case):
    """ExpertLinear alone."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        n, linear, names = sum(self.counts), step.ExpertLinear(4, 5, 7), ("linear y", "linear dx", "linear dW")
        x, dy, weight = self.draw("x", n, 5), self.draw("dy", n, 7), self.draw("weight", 4, 7, 5)
        linear.weight = nn.Parameter(weight)
        found = there_and_back(names, lambda x, _: linear(x, list(self.counts)), [x, linear.weight], dy)
        wanted = there_and_back(names, lambda x, w: one_by_one(F.linear, x, self.counts, w), [x, weight], dy)
        yield from rows(found, wanted)


SOME, NONE = ((dict(counts=counts),) for counts in ((3, 0, 6, 1), (0, 0, 0, 0)))
EXPERTS = Task(
    ("ExpertLinear.forward", "Experts.forward"),
    (*demands(Linear, SOME, ("ExpertLinear: each part with its own matrix", 2)),
     *demands(Side, SOME, ("Experts: the three layers, and the gradients", 2)),
     *demands(Side, NONE, ("no rows: gradients are zero", 1))),
)  # fmt: skip


class Layer(Case):
    """Task 2: a MoE layer on two sequences [2, seq, 5]: output and gradients, without an auxiliary loss."""

    seq = 9

    def setup(self):
        self.x, self.router = self.draw("x", 2, self.seq, 5), self.draw("router", 7, 5)
        self.x[..., 0] = 1 + self.x[..., 0].abs()  # so the last expert's logits are low, and nobody visits it
        self.router[6] = torch.tensor([-30.0, 0, 0, 0, 0])

    def layer(self, step: Any, group: Group = ALONE) -> nn.Module:
        """In fp64, with the drawn weights."""
        flags = dict(experts=7, experts_per_token=self.k, aux_loss_coeff=0.0, micro_batch_size=1, global_batch_size=1)
        moe = step.MoE(5, 8, SimpleNamespace(**flags), dict(sequence=group)).double()
        moe.router.weight = nn.Parameter(self.router.clone())
        put(moe.experts, weights_of(self, 7, 5, 8))
        return moe

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        plain = PlainMoE(5, 8, 7, self.k)
        plain.router.weight = nn.Parameter(self.router)
        put(plain.experts, weights_of(self, 7, 5, 8))
        yield from rows(*(self.passes(moe) for moe in (self.layer(step), plain)))

    def passes(self, moe: nn.Module) -> dict[str, Any]:
        """Output and gradients."""
        leaves, dy = [self.x, moe.router.weight, *leaves_of(moe.experts)], self.draw("dy", *self.x.shape)
        return there_and_back(("y", "dx", "router", *KINDS), lambda x, *_: moe(x), leaves, dy)


class Narrow(Layer):
    """In bf16: which rows each expert is given."""

    seq = 4000  # of these tokens, about 12 are sent elsewhere by logits in 16 bits

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        moe, seen = self.layer(step).bfloat16(), []

        def experts(given: Tensor, counts: Tensor) -> Tensor:
            seen.append(torch.stack([part.double().sum(0) for part in given.split(counts.tolist())]))
            return given

        moe.experts.forward = experts
        y, x = moe(self.x.bfloat16()), self.x.bfloat16().double().flatten(0, 1)
        scores = choose(x, self.router.bfloat16().double(), self.k)[1]
        yield "the sums of each expert's rows", seen, [(scores > 0).double().T @ x]
        yield "output's dtype", str(y.dtype), "torch.bfloat16"


LAYER = Task(
    ("MoE.forward",),
    (*demands(Layer, (dict(k=3),), ("three experts a token: output and all gradients", 4)),
     *demands(Layer, (dict(k=1),), ("one expert a token: its score is p", 2)),
     *demands(Narrow, (dict(k=3),), ("16 bits: the router still chooses in 32", 1))),
)  # fmt: skip


class Added(Case):
    """Task 3: AddLoss alone, with 64 and with 16 bits; the loss has 32 at least."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for dtype in (torch.float64, torch.bfloat16):
            x, dy = (self.draw(name, 2, 3).to(dtype) for name in ("x", "dy"))
            loss = torch.ones((), dtype=torch.promote_types(dtype, torch.float32))
            names = [f"{dtype}: {name}" for name in ("y", "dx", "d loss")]
            found = there_and_back(names, lambda *given: step.AddLoss.apply(*given, 0.375), (x, loss), dy)
            yield from rows(found, dict(zip(names, (x, dy, torch.tensor(0.375)), strict=True)))


class Balance(Layer):
    """Each rank's term of a micro-batch's auxiliary loss, and its gradient; the counts that were given, after it."""

    seq = 12

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        p, scores = choose(self.x.flatten(0, 1), self.router, self.k)
        own, everyone = torch.arange(len(p)).chunk(self.ranks)[mesh.rank], (scores > 0).sum(0)
        leaf, counts = p[own].requires_grad_(), (scores[own] > 0).sum(0)
        before, slope = counts.clone(), (7 * everyone / everyone.sum() / len(p)).expand(len(own), 7)
        term = self.layer(step, mesh["cp"]).aux_loss(leaf, counts)
        term.backward()
        yield "this rank's term", term, (slope * p[own]).sum()
        yield "its gradient", leaf.grad, slope
        yield "the counts that were given", counts, before


BALANCE = Task(
    ("AddLoss.forward", "AddLoss.backward", "MoE.aux_loss"),
    (*demands(Added, ({},), ("AddLoss: x goes through, the loss gets its coefficient", 2)),
     *demands(Balance, (dict(mesh=dict(cp=1), k=3),), ("aux_loss and its gradient, on one rank", 2), bound=FP32),
     *demands(Balance, (dict(mesh=dict(cp=3), k=2),), ("shared by three ranks: the terms of one loss", 2), bound=FP32)),
)  # fmt: skip

COUNTS = (  # by rank: rows for each expert; nobody visits the last rank's, and one rank has a single row
    (2, 1, 0, 3, 1, 0, 0, 0),
    (0, 2, 2, 0, 0, 4, 0, 0),
    (1, 0, 0, 0, 0, 0, 0, 0),
    (3, 0, 1, 2, 0, 1, 0, 0),
)
DIM = 5


class Blocks(Case):
    """Task 4: blocks of rows, of which some are empty, in another order."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        sizes = torch.tensor([[2, 0, 1], [3, 4, 0]])
        rows = self.draw("rows", 10, DIM)
        (a, b, c), (d, e, f) = (part.split(line.tolist()) for part, line in zip(rows.split([3, 7]), sizes, strict=True))
        yield "the blocks", step.transpose_blocks(rows.clone(), sizes), torch.cat((a, d, b, e, c, f))


class Travel(Case):
    """Rows that are not contiguous go to the ranks of their experts, and others home."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        r, leaving = mesh.rank, torch.tensor(COUNTS).view(4, 4, 2)  # [from, to, expert there]
        way = mesh["ep"], leaving[r], leaving[:, r]
        xs = [self.draw(f"x {rank}", DIM, sum(COUNTS[rank])).T for rank in range(4)]
        parts = [x.split(list(counts)) for x, counts in zip(xs, COUNTS, strict=True)]
        arrived = torch.cat([parts[rank][e] for e in (2 * r, 2 * r + 1) for rank in range(4)])
        given = xs[r].clone()
        yield "what arrives", step.dispatch(given, *way), arrived
        yield "what arrives: the input stays", torch.equal(given, xs[r]), True
        given = arrived.T.contiguous().T
        yield "what comes home", step.combine(given, *way), xs[r]
        yield "what comes home: the input stays", torch.equal(given, arrived), True


class Visit(Case):
    """Rows visit experts that are one matrix each."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        r, calls, matrices = mesh.rank, [], self.draw("experts", 8, DIM, DIM)
        xs, dys = ([self.draw(f"{x} {rank}", sum(COUNTS[rank]), DIM) for rank in range(4)] for x in ("x", "dy"))
        own, sizes = slice(2 * r, 2 * r + 2), [len(x) for x in xs]

        def visit(x: Tensor, weights: Tensor) -> Tensor:
            def experts(given: Tensor, counts: Tensor) -> Tensor:
                calls.append(counts.tolist())
                return one_by_one(F.linear, given, counts, weights)

            return step.visit_experts(experts, mesh["ep"], x, torch.tensor(COUNTS[r]))

        def at_home(matrices: Tensor, *xs: Tensor) -> Tensor:
            return torch.cat([one_by_one(F.linear, x, c, matrices) for x, c in zip(xs, COUNTS, strict=True)])

        found = there_and_back(("y", "dx", "dw"), visit, [xs[r], matrices[own]], dys[r], mesh)
        whole = there_and_back(("y", "dw", *range(4)), at_home, [matrices, *xs], torch.cat(dys))
        yield "output", found["y"], whole["y"].split(sizes)[r]
        yield "gradient of x", found["dx"], whole[r]
        yield "gradient of this rank's experts", found["dw"], whole["dw"][own]
        here = torch.tensor(COUNTS)[:, own].sum(0)
        yield "calls: rows by expert", calls, [here.tolist()]
        most = 2 * 3 / 4 * max(sizes[r], int(here.sum())) * DIM * 8  # the tape books (n-1)/n of the larger tensor
        yield "bytes forward", found["bytes forward"], dict(ep=at_most(most + 3 / 4 * 8 * 8))
        yield "bytes backward", found["bytes backward"], dict(ep=at_most(most))


TRAVEL = Task(
    ("transpose_blocks", "dispatch", "combine", "visit_experts"),
    (*demands(Blocks, ({},), ("transpose_blocks: each block, in the other order", 1)),
     *demands(Travel, (dict(mesh=dict(ep=4)),),
              ("dispatch: rows arrive, sorted by expert", 1, "what arrives"),
              ("combine: rows come home", 1, "what comes home")),
     *demands(Visit, (dict(mesh=dict(ep=4)),),
              ("visit_experts: each row comes home from its expert", 3, "output"),
              ("visit_experts: so do gradients, of rows and experts", 2, "gradient"),
              ("experts are called once, with the rows of all ranks", 1, "calls"),
              ("rows go to the ranks that they visit, and to no other", 1, "bytes"))),
)  # fmt: skip

FLAGS = dict(experts=6, experts_per_token=2, moe_every=2, dense_layers=1, micro_batch_size=1, global_batch_size=8)


class Deal(Case):
    """Task 5: which layers have experts (2 and 4), shapes and records; the groups: ep has neighbours of all 4 ranks."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, (dp, cp, tp) = decoder(n_layers=5, seq_len=8), self.mesh.values()
        step.shard_experts(model, mesh, step.Config(**FLAGS, ep=self.ep, expert_dim=self.width, cp=cp, tp=tp))
        ranks, own = torch.arange(4), mesh.rank % self.ep
        yield "the ranks of sequence", members(mesh, "sequence"), ranks.view(dp, cp * tp)[mesh.rank // (cp * tp)]
        yield "the ranks of ep", members(mesh, "ep"), ranks[mesh.rank - own :][: self.ep]
        yield "the ranks of expert_data", members(mesh, "expert_data"), ranks[own :: self.ep]
        share, width = 6 // self.ep, self.width or 12
        cuts = [[0, "ep", own * share, (own + 1) * share, 6]] if self.ep > 1 else []
        for number, layer in model.model.layers.items():
            experts = hasattr(layer.mlp, "router")
            yield f"layer {number} has experts", experts, number in "24"
            for name, param in layer.mlp.named_parameters() if experts else ():
                shape = [share, 16, width] if "down" in name else [share, width, 16]
                wanted = ([6, 16], [], ["tp"], "data") if "router" in name else (shape, cuts, [], "expert_data")
                yield from record(f"layer {number}'s {name}", param, *wanted)


class Refused(Case):
    """What flags that cannot work end with, on 4 ranks of dp with 6 experts."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for flags in (dict(ep=4), dict(ep=3), dict(experts=1), dict(micro_batch_size=3)):
            model, config = decoder(n_layers=5, seq_len=8), step.Config(**FLAGS | flags)
            yield str(flags), refused(step.shard_experts, model, mesh, config), "UserError"


MESHES = tuple(
    dict(mesh=dict(dp=dp, cp=cp, tp=tp), ep=ep, width=width)
    for dp, cp, tp, ep, width in ((2, 2, 1, 2, 20), (4, 1, 1, 2, 0), (1, 2, 2, 2, 20), (1, 4, 1, 1, 20))
)
DEALING = Task(
    ("shard_experts",),
    (*demands(Deal, MESHES,
              ("the right layers, shapes, cuts and records", 2, "layer"),
              ("the groups sequence, ep and expert_data", 2, "the ranks")),
     *demands(Refused, (dict(mesh=dict(dp=4, cp=1, tp=1)),), ("flags that cannot work are a UserError", 1)),
     suite(4, "moe", "moe, cp", "moe, tp", "moe, tp, no sp", "ep", "ep of 4", "step 7", "step 7, pp", "step 7, rows",
           "step 7, bf16", "step 7, saved",
           says="the file trains as one device: cp, tp, ep, ZeRO, a pipeline, three steps, a variant")),
)  # fmt: skip


def bytes_over_ep(
    ep: int, E: int, top: int, h: int, L: int, b: int, s: int, k: int, ways: int = 4, away: float = 0.0
) -> float:
    """Of a step in bf16: rows there and home, forward and backward, and counts of 8 bytes."""
    part = (ep - 1) / ep
    return k * L * (ways * (away or part) * b * s * top * h * 2 + part * 8 * ep * E)


QUESTION = Question(
    dict(ep=(4, 8), E=(2, 4, 8), top=(3, 5), h=range(1024, 4097, 512), L=(12, 24, 32), b=(1, 2),
         s=range(2048, 8193, 1024), k=(4, 6, 7)),
    bytes_over_ep,
    {"this is forward alone": dict(ways=2), "this is one micro-batch": dict(k=1),
     "a token sends a row for each of its experts": dict(top=1),
     "1/ep of the rows stay where they are": dict(away=1.0)},
)  # fmt: skip

LAB = Lab(7, ("step07_moe_ep",), (EXPERTS, LAYER, BALANCE, TRAVEL, DEALING), QUESTION, flags="--ep 2")
