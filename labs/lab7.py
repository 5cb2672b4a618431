"""Lab 7: experts (step07_moe_ep.py)."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group
from common.model import IGNORE, Decoder, ModelConfig, summed_cross_entropy
from labs import training
from labs.course import Case, Lab, Most, Question, Task, demands
from labs.probes import decoder, members, partial_over, record, refused, there_and_back
from labs.training import trains

FP32 = 1e-6  # fractions of counts may be in 32 bits
KINDS = ("gate_proj", "up_proj", "down_proj")
ALONE = Group("cp", 0, 1, None)


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


def balance(p: Tensor, scores: Tensor) -> Tensor:
    """experts * sum_e f_e P_e."""
    return p.shape[1] * ((scores > 0).double().sum(0) / (scores > 0).sum() * p.mean(0)).sum()


class PlainMoE(nn.Module):
    """A layer by its definition, whole; `loss` is the sum over sequences of their balance losses."""

    def __init__(self, dim: int, width: int, experts: int, k: int):
        super().__init__()
        self.router, self.experts, self.k = nn.Linear(dim, experts, bias=False), nn.Module(), k
        for kind, shape in zip(KINDS, ((width, dim), (width, dim), (dim, width)), strict=True):
            setattr(self.experts, kind, nn.Module())
            getattr(self.experts, kind).weight = nn.Parameter(torch.empty(experts, *shape))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> the same shape."""
        chosen = [choose(sequence, self.router.weight, self.k) for sequence in x]
        self.loss, weights = sum(balance(p, scores) for p, scores in chosen), leaves_of(self.experts)
        return torch.stack([mixture(s, scores, weights) for s, (_, scores) in zip(x, chosen, strict=True)])


# --- task 1: experts side by side ------------------------------------------------------------------------------------


def one_by_one(function: Any, rows: Tensor, counts: Any, *weights: Tensor) -> Tensor:
    """function(rows of an expert, its weights), for one expert after another."""
    parts = enumerate(rows.split([int(n) for n in counts]))
    return torch.cat([function(part, *(weight[e] for weight in weights)) for e, part in parts])


class Side(Case):
    """Four experts, with their gradients."""

    names = tuple(f"experts: {part}" for part in ("y", "dx", *KINDS))

    def setup(self):
        n = sum(self.counts)
        self.x, self.dy, self.weights = self.draw("x", n, 5), self.draw("dy", n, 5), weights_of(self, 4, 5, 7)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        experts = step.Experts(4, 5, 7)
        leaves = [self.x, *put(experts, self.weights)]
        return there_and_back(self.names, lambda x, *_: experts(x, torch.tensor(self.counts)), leaves, self.dy)

    def expected(self, rank: int) -> dict[str, Any]:
        leaves = [self.x, *self.weights]
        return there_and_back(self.names, lambda x, *w: one_by_one(mlp, x, self.counts, *w), leaves, self.dy)


class Linear(Side):
    """ExpertLinear alone."""

    names = ("linear y", "linear dx", "linear dW")

    def setup(self):
        super().setup()
        self.dy = F.pad(self.dy, (0, 2), value=2.0)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        linear = step.ExpertLinear(4, 5, 7)
        linear.weight = nn.Parameter(self.weights[0])
        leaves = [self.x, linear.weight]
        return there_and_back(self.names, lambda x, _: linear(x, list(self.counts)), leaves, self.dy)

    def expected(self, rank: int) -> dict[str, Any]:
        leaves = [self.x, self.weights[0]]
        return there_and_back(self.names, lambda x, w: one_by_one(F.linear, x, self.counts, w), leaves, self.dy)


SOME, NONE = ((dict(counts=counts),) for counts in ((3, 0, 6, 1), (0, 0, 0, 0)))
EXPERTS = Task(
    ("ExpertLinear.forward", "Experts.forward"),
    (*demands(Linear, SOME, ("ExpertLinear: each part with its own matrix", 2)),
     *demands(Side, SOME, ("Experts: the three layers, and the gradients", 2)),
     *demands(Side, NONE, ("no rows: gradients are zero", 1))),
)  # fmt: skip

# --- task 2: the layer -----------------------------------------------------------------------------------------------


class Layer(Case):
    """A MoE layer on two sequences [2, seq, 5]: output and gradients, without a balance loss."""

    names, seq = ("y", "dx", "router", *KINDS), 9

    def setup(self):
        self.x, self.router = self.draw("x", 2, self.seq, 5), self.draw("router", 7, 5)
        self.x[..., 0] = 1 + self.x[..., 0].abs()  # so the last expert's logits are low, and nobody visits it
        self.router[6] = torch.tensor([-30.0, 0, 0, 0, 0])

    def layer(self, step: Any, sharers: Group = ALONE) -> nn.Module:
        """In fp64, with the drawn weights."""
        flags = dict(experts=7, experts_per_token=self.k, balance_weight=0.0, micro_batch_size=1, global_batch_size=1)
        moe = step.MoE(5, 8, SimpleNamespace(tp=1, **flags), sharers).double()
        moe.router.weight = nn.Parameter(self.router.clone())
        put(moe.experts, weights_of(self, 7, 5, 8))
        return moe

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        return self.by(self.layer(step))

    def expected(self, rank: int) -> dict[str, Any]:
        moe = PlainMoE(5, 8, 7, self.k)
        moe.router.weight = nn.Parameter(self.router)
        put(moe.experts, weights_of(self, 7, 5, 8))
        return self.by(moe)

    def by(self, moe: nn.Module) -> dict[str, Any]:
        """Either."""
        leaves = [self.x, moe.router.weight, *leaves_of(moe.experts)]
        return there_and_back(self.names, lambda x, *_: moe(x), leaves, self.draw("dy", *self.x.shape))


class Narrow(Layer):
    """In bf16: which rows each expert is given."""

    seq = 4000  # of these tokens, about 12 are sent elsewhere by logits in 16 bits

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        moe, seen = self.layer(step).bfloat16(), []

        def experts(rows: Tensor, counts: Tensor) -> Tensor:
            seen.append(torch.stack([part.double().sum(0) for part in rows.split(counts.tolist())]))
            return rows

        moe.experts.forward = experts
        y = moe(self.x.bfloat16())
        return {"the sum of each expert's rows": seen[0] if len(seen) == 1 else None, "output's dtype": str(y.dtype)}

    def expected(self, rank: int) -> dict[str, Any]:
        x = self.x.bfloat16().double().flatten(0, 1)
        scores = choose(x, self.router.bfloat16().double(), self.k)[1]
        return {"the sum of each expert's rows": (scores > 0).double().T @ x, "output's dtype": "torch.bfloat16"}


LAYER = Task(
    ("MoE.forward",),
    (*demands(Layer, (dict(k=3),), ("three experts a token: output and all gradients", 4)),
     *demands(Layer, (dict(k=1),), ("one expert a token: its score is p", 2)),
     *demands(Narrow, (dict(k=3),), ("16 bits: the router still chooses in 32", 1))),
    faults=("gates_not_differentiated", "scores_not_normalised", "rows_of_other_tokens"),
)  # fmt: skip

# --- task 3: the balance loss ----------------------------------------------------------------------------------------


class Added(Case):
    """AddLoss alone, with 64 and with 16 bits; the loss has 32 at least."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for dtype in (torch.float64, torch.bfloat16):
            x, dy = (self.draw(name, 2, 3).to(dtype) for name in ("x", "dy"))
            loss = torch.ones((), dtype=torch.promote_types(dtype, torch.float32))
            names = [f"{dtype}: {name}" for name in ("y", "dx", "d loss")]
            found |= there_and_back(names, lambda *given: step.AddLoss.apply(*given, 0.375), (x, loss), dy)
        return found

    def expected(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for dtype in (torch.float64, torch.bfloat16):
            found |= {f"{dtype}: y": self.draw("x", 2, 3).to(dtype), f"{dtype}: dx": self.draw("dy", 2, 3).to(dtype)}
            found[f"{dtype}: d loss"] = torch.tensor(0.375)
        return found


class Balance(Layer):
    """Each rank's part of the balance loss of a micro-batch, and its gradient; the counts that were given, after it."""

    seq = 12

    def chosen(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """p of a rank's tokens, its counts, and everyone's."""
        p, scores = choose(self.x.flatten(0, 1), self.router, self.k)
        own = torch.arange(len(p)).chunk(self.ranks)[rank]
        return p[own], (scores[own] > 0).sum(0), (scores > 0).sum(0)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        p, counts, _ = self.chosen(mesh["cp"].rank)
        leaf, before = p.clone().requires_grad_(), counts.clone()
        part = self.layer(step, mesh["cp"]).balance_loss(leaf, counts)
        part.backward()
        return {"this rank's part": part, "its gradient": leaf.grad, "the counts that were given": counts - before}

    def expected(self, rank: int) -> dict[str, Any]:
        p, _, counts = self.chosen(rank)
        slope = (7 * counts / counts.sum() / 24).expand(p.shape)
        zero = torch.zeros(7)
        return {"this rank's part": (slope * p).sum(), "its gradient": slope, "the counts that were given": zero}


BALANCE = Task(
    ("AddLoss.forward", "AddLoss.backward", "MoE.balance_loss"),
    (*demands(Added, ({},), ("AddLoss: x goes through, the loss gets its weight", 2)),
     *demands(Balance, (dict(mesh=dict(cp=1), k=3),), ("balance_loss and its gradient, on one rank", 2), bound=FP32),
     *demands(Balance, (dict(mesh=dict(cp=3), k=2),), ("shared by three ranks: the parts of one loss", 2), bound=FP32)),
    faults=("balance_not_added", "balanced_by_own_tokens"),
)  # fmt: skip

# --- task 4: there and back ------------------------------------------------------------------------------------------

SENT = ((2, 0, 4), (1, 3, 0), (0, 5, 6))  # by rank: rows for each rank
COUNTS = (  # by rank: rows for each expert; nobody visits the last rank's, and one rank has a single row
    (2, 1, 0, 3, 1, 0, 0, 0),
    (0, 2, 2, 0, 0, 4, 0, 0),
    (1, 0, 0, 0, 0, 0, 0, 0),
    (3, 0, 1, 2, 0, 1, 0, 0),
)
DIM = 5


class Travel(Case):
    """AllToAll, of rows that are not contiguous."""

    def rows(self, rank: int) -> Tensor:
        """What a rank sends."""
        return self.draw(f"x {rank}", DIM, sum(SENT[rank])).T

    def back(self, rank: int) -> Tensor:
        """The gradient of what arrives there."""
        return self.draw(f"dy {rank}", sum(row[rank] for row in SENT), DIM)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        r, names = mesh["ep"].rank, ("what arrived", "the gradient of the rows")
        way = list(SENT[r]), [row[r] for row in SENT], mesh["ep"]
        return there_and_back(names, lambda x: step.AllToAll.apply(x, *way), [self.rows(r)], self.back(r))

    def expected(self, rank: int) -> dict[str, Any]:
        there = [self.rows(r).split(SENT[r])[rank] for r in range(3)]
        home = [self.back(r).split([row[r] for row in SENT])[rank] for r in range(3)]
        found = {"what arrived": torch.cat(there), "the gradient of the rows": torch.cat(home)}
        return found | {"the inputs stay": True}


class Visit(Case):
    """Rows visit experts that are one matrix each."""

    names = ("output", "gradient of x", "gradient of this rank's experts")

    def setup(self):
        self.matrices = self.draw("experts", 8, DIM, DIM)
        self.xs, self.dys = ([self.draw(f"{x} {r}", sum(COUNTS[r]), DIM) for r in range(4)] for x in ("x", "dy"))

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        r, calls = mesh["ep"].rank, []

        def visit(x: Tensor, matrices: Tensor) -> Tensor:
            def experts(rows: Tensor, counts: Tensor) -> Tensor:
                calls.append(counts.tolist())
                return one_by_one(F.linear, rows, counts, matrices)

            return step.visit_experts(experts, mesh["ep"], x, torch.tensor(COUNTS[r]))

        leaves = [self.xs[r], self.matrices[2 * r : 2 * r + 2]]
        return there_and_back(self.names, visit, leaves, self.dys[r], mesh) | {"calls: rows by expert": calls}

    def expected(self, rank: int) -> dict[str, Any]:
        """All experts in one place. The tape books a collective with (n-1)/n of its larger tensor."""

        def visit(matrices: Tensor, *xs: Tensor) -> Tensor:
            return torch.cat([one_by_one(F.linear, x, c, matrices) for x, c in zip(xs, COUNTS, strict=True)])

        own, sizes = slice(2 * rank, 2 * rank + 2), [len(x) for x in self.xs]
        whole = there_and_back(("y", "dw", *range(4)), visit, [self.matrices, *self.xs], torch.cat(self.dys))
        here = torch.tensor(COUNTS)[:, own].sum(0)
        rows = 2 * 3 / 4 * max(sizes[rank], int(here.sum())) * DIM * 8
        found = dict(zip(self.names, (whole["y"].split(sizes)[rank], whole[rank], whole["dw"][own]), strict=True))
        found |= {"calls: rows by expert": [here.tolist()], "bytes backward": dict(ep=Most(rows))}
        return found | {"bytes forward": dict(ep=Most(rows + 3 / 4 * 8 * 8))}


TRAVEL = Task(
    ("AllToAll.forward", "AllToAll.backward", "visit_experts"),
    (*demands(Travel, (dict(mesh=dict(ep=3)),), ("AllToAll: rows arrive, and gradients go back", 3)),
     *demands(Visit, (dict(mesh=dict(ep=4)),),
              ("visit_experts: each row comes home from its expert", 3, "output"),
              ("visit_experts: so do gradients, of rows and experts", 2, "gradient"),
              ("experts are called once, with the rows of all ranks", 1, "calls"),
              ("rows go to the ranks that they visit, and to no other", 1, "bytes"))),
    faults=("returned_in_another_order", "not_sorted_by_expert", "experts_averaged"),
)  # fmt: skip

# --- task 5: dealing experts -----------------------------------------------------------------------------------------

FLAGS = dict(experts=6, experts_per_token=2, moe_every=2, dense_layers=1, micro_batch_size=1, global_batch_size=8)


class Deal(Case):
    """Which layers have experts, their shapes and records; the groups."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        model, found = decoder(n_layers=5, seq_len=8), {}
        config = step.Config(**FLAGS, ep=self.ep, expert_dim=self.width, cp=self.mesh["cp"], tp=self.mesh["tp"])
        step.shard_experts(model, mesh, config)
        for number, layer in model.model.layers.items():
            found[f"layer {number} has experts"] = hasattr(layer.mlp, "router")
            for name, param in layer.mlp.named_parameters() if hasattr(layer.mlp, "router") else ():
                found |= record(f"layer {number}'s {name}", param)
        return found | {f"the ranks of {name}": members(mesh, name) for name in ("data", "ep", "expert_data")}

    def expected(self, rank: int) -> dict[str, Any]:
        """Layers 2 and 4; experts cut over ep; neighbours of dp x cp are an ep group."""
        dp, cp, tp = self.mesh.values()
        data = torch.arange(4).view(dp * cp, tp).T[rank % tp]  # the ranks that have other tokens
        place = data.tolist().index(rank)
        first, own = place - place % self.ep, place % self.ep
        found: dict[str, Any] = {f"layer {i} has experts": i in (2, 4) for i in range(5)}
        found |= {"the ranks of data": data, "the ranks of ep": data[first : first + self.ep]}
        found["the ranks of expert_data"] = data[own :: self.ep]
        share, width = 6 // self.ep, self.width or 12
        cuts = [[0, "ep", own * share, (own + 1) * share, 6]] if self.ep > 1 else []
        shapes = {f"experts.{kind}": [share, width, 16] for kind in KINDS[:2]}
        shapes |= {"experts.down_proj": [share, 16, width], "router": [6, 16]}
        for name, shape in ((f"layer {i}'s {name}.weight", shape) for i in (2, 4) for name, shape in shapes.items()):
            router = "router" in name
            found |= {f"the shape of {name}": shape, f"the cuts of {name}": [] if router else cuts}
            found[f"data_group of {name}"] = "data" if router else "expert_data"
            found[partial_over(name)] = ["tp"] if router else []
        return found


class Refused(Case):
    """What flags that cannot work end with, on 4 ranks of dp with 6 experts."""

    flags = (dict(ep=4), dict(ep=3), dict(experts=1), dict(micro_batch_size=3))

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        def error(flags: dict[str, int]) -> str:
            return refused(step.shard_experts, decoder(n_layers=5, seq_len=8), mesh, step.Config(**FLAGS | flags))

        return {str(flags): error(flags) for flags in self.flags}

    def expected(self, rank: int) -> dict[str, Any]:
        return {str(flags): "UserError" for flags in self.flags}


WEIGHT = 0.6  # of the balance loss


class Trained(training.Trained):
    """Beside a decoder whose MLPs are PlainMoE. Its loss has their losses' gradient, but not their value."""

    def model(self, config: ModelConfig) -> Decoder:
        model = super().model(config)
        layers = model.model.layers.values()
        for layer in layers:
            layer.mlp = PlainMoE(config.dim, config.ffn_dim, 4, 2)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            more = sum(layer.mlp.loss for layer in layers) * WEIGHT / len(targets) * (targets != IGNORE).sum()
            return summed_cross_entropy(logits, targets) + more - more.detach()

        model.loss = loss
        return model


MESHES = tuple(
    dict(mesh=dict(dp=dp, cp=cp, tp=tp), ep=ep, width=width)
    for dp, cp, tp, ep, width in ((2, 2, 1, 2, 20), (4, 1, 1, 2, 0), (2, 1, 2, 2, 20), (1, 4, 1, 1, 20))
)
DEALING = Task(
    ("shard_experts",),
    (*demands(Deal, MESHES,
              ("the right layers, shapes, cuts and records", 2, "layer"),
              ("the groups data, ep and expert_data", 2, "the ranks")),
     *demands(Refused, (dict(mesh=dict(dp=4, cp=1, tp=1)),), ("flags that cannot work are a UserError", 1)),
     trains(4, (4, dict(ep=2, zero=1)), (4, dict(cp=2, tp=2, ep=2)), kind=Trained, bound=FP32,
            flags=dict(experts=4, balance_weight=WEIGHT))),
    faults=("experts_summed_over_all_data", "router_not_summed_over_tp"),
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

LAB = Lab(7, ("step07_moe_ep",), (EXPERTS, LAYER, BALANCE, TRAVEL, DEALING), QUESTION)
