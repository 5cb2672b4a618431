"""Lab 7: experts (step07_moe_ep.py)."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, Mesh
from extras.labs.course import FOUND, Case, Lab, Question, Row, Task, as_ours, at_most, demands
from extras.labs.probes import decoder, members, record, refused, there_and_back
from extras.labs.suite import suite

FP32 = 1e-6  # fractions of counts may be in 32 bits
ALONE = Group("sequence", 0, 1, None)


def choose(x: Tensor, router: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """p [tokens, experts], and the scores of the chosen experts in a matrix of that shape, 0 for the others."""
    p = (x @ router.T).softmax(-1)
    best, chosen = p.topk(k)
    return p, torch.zeros_like(p).scatter(-1, chosen, best / best.sum(-1, keepdim=True) if k > 1 else best)


def one_by_one(function: Any, rows: Tensor, counts: Any, *weights: Tensor) -> Tensor:
    """function(rows of an expert, its weights), for one expert after another."""
    parts = enumerate(rows.split([int(n) for n in counts]))
    return torch.cat([function(part, *(weight[e] for weight in weights)) for e, part in parts])


class Passes(Case):
    """Task 1: ExpertLinear, or Experts: of four, with their gradients."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        module, n = self.drawn(getattr(step, self.kind)(4, 5, 7)), sum(self.counts)
        one = self.kind == "ExpertLinear"
        counts, dy = [*self.counts] if one else torch.tensor(self.counts), self.draw("dy", n, 7 if one else 5)
        yield from as_ours(through(module, self.draw("x", n, 5), dy, counts))


def through(module: nn.Module, x: Tensor, dy: Tensor, *more: Any) -> dict[str, Any]:
    """What a module makes of x, and the gradients of x and of its parameters, by name."""
    names, params = zip(*module.named_parameters(), strict=True)
    return there_and_back(("y", "dx", *names), lambda x, *_: module(x, *more), [x, *params], dy)


LINEAR, SOME, NONE = (
    (dict(kind=kind, counts=counts),)
    for kind, counts in (("ExpertLinear", (3, 0, 6, 1)), ("Experts", (3, 0, 6, 1)), ("Experts", (0, 0, 0, 0)))
)
EXPERTS = Task(
    ("ExpertLinear.forward", "Experts.forward"),
    (*demands(Passes, LINEAR, ("ExpertLinear: each part with its own matrix", 2)),
     *demands(Passes, SOME, ("Experts: the three layers, and the gradients", 2)),
     *demands(Passes, NONE, ("no rows: gradients are zero", 1))),
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
        self.drawn(moe).router.weight.data = self.router.clone()
        return moe

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        yield from as_ours(through(self.layer(step), self.x, self.draw("dy", *self.x.shape)))


class Narrow(Layer):
    """In bf16: which rows each expert is given."""

    seq = 4000  # of these tokens, about 12 are sent elsewhere by logits in 16 bits

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        moe, seen = self.layer(step).bfloat16(), []

        def experts(given: Tensor, counts: Tensor) -> Tensor:
            seen.append(torch.stack([part.double().sum(0) for part in given.split(counts.tolist())]))
            return given

        moe.experts.forward = experts
        y = moe(self.x.bfloat16())
        yield "the sums of each expert's rows", seen, FOUND
        yield "output's dtype", str(y.dtype), FOUND


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
            yield from as_ours(there_and_back(names, lambda *given: step.AddLoss.apply(*given, 0.375), (x, loss), dy))


class Balance(Layer):
    """Each rank's term of a micro-batch's auxiliary loss, and its gradient; the counts that were given, after it."""

    seq = 12

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        p, scores = choose(self.x.flatten(0, 1), self.router, self.k)
        own = torch.arange(len(p)).chunk(self.ranks)[mesh.rank]
        leaf, counts = p[own].requires_grad_(), (scores[own] > 0).sum(0)
        term = self.layer(step, mesh["cp"]).aux_loss(leaf, counts)
        term.backward()
        yield from as_ours({"this rank's term": term, "its gradient": leaf.grad, "the counts that were given": counts})


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
        yield "the blocks", step.transpose_blocks(self.draw("rows", 10, DIM), sizes), FOUND


class Travel(Case):
    """Rows that are not contiguous go to the ranks of their experts, and others home."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        r, leaving = mesh.rank, torch.tensor(COUNTS).view(4, 4, 2)  # [from, to, expert there]
        way = mesh["ep"], leaving[r], leaving[:, r]
        here = int(way[2].sum())
        for function, n, says in ((step.dispatch, sum(COUNTS[r]), "arrives"), (step.combine, here, "comes home")):
            x = self.draw(f"{says} {r}", DIM, n).T
            given = x.clone()
            yield f"what {says}", function(given, *way), FOUND
            yield f"what {says}: the input stays", torch.equal(given, x), True


class Visit(Case):
    """Rows visit experts that are one matrix each."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        r, calls, matrices = mesh.rank, [], self.draw("experts", 8, DIM, DIM)
        own, n = slice(2 * r, 2 * r + 2), sum(COUNTS[r])
        x, dy = (self.draw(f"{name} {r}", n, DIM) for name in ("x", "dy"))

        def visit(x: Tensor, weights: Tensor) -> Tensor:
            def experts(given: Tensor, counts: Tensor) -> Tensor:
                calls.append(counts.tolist())
                return one_by_one(F.linear, given, counts, weights)

            return step.visit_experts(experts, mesh["ep"], x, torch.tensor(COUNTS[r]))

        names = ("output", "gradient of x", "gradient of this rank's experts")
        found = there_and_back(names, visit, [x, matrices[own]], dy, mesh)
        yield from as_ours({name: found[name] for name in names} | {"calls: rows by expert": calls})
        here = torch.tensor(COUNTS)[:, own].sum(0)
        most = 2 * 3 / 4 * max(n, int(here.sum())) * DIM * 8  # the tape books (n-1)/n of the larger tensor
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
        model, (_, cp, tp) = decoder(n_layers=5, seq_len=8), self.mesh.values()
        step.shard_experts(model, mesh, step.Config(**FLAGS, ep=self.ep, expert_dim=self.width, cp=cp, tp=tp))
        for name in ("sequence", "ep", "expert_data"):
            yield f"the ranks of {name}", members(mesh, name), FOUND
        for number, layer in model.model.layers.items():
            yield f"layer {number} has experts", hasattr(layer.mlp, "router"), FOUND
            for name, param in layer.mlp.named_parameters():
                yield from record(f"layer {number}'s {name}", param)


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
