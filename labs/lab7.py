"""Lab 7: experts (step07_moe_ep.py)."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group
from common.model import IGNORE, Decoder, ModelConfig, summed_cross_entropy
from labs import training
from labs.course import Case, Lab, Most, Question, Task, demands
from labs.probes import decoder, members, record, refused, there_and_back
from labs.tape import Tape
from labs.training import trains

FP32 = 1e-6  # fractions of counts may be in 32 bits
KINDS = ("gate_proj", "up_proj", "down_proj")
ALONE = Group("cp", 0, 1, None)


def weights_of(case: Case, experts: int, dim: int, width: int) -> list[Tensor]:
    """gate, up [experts, width, dim] and down [experts, dim, width], as leaves."""
    shapes = dict(zip(KINDS, ((width, dim), (width, dim), (dim, width)), strict=True))
    return [(case.draw(kind, experts, *shape) / 2).requires_grad_() for kind, shape in shapes.items()]


def put(experts: nn.Module, weights: list[Tensor]):
    """Give experts these weights."""
    for kind, weight in zip(KINDS, weights, strict=True):
        getattr(experts, kind).weight = nn.Parameter(weight.detach())


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


# --- task 1: experts side by side ------------------------------------------------------------------------------------


class Side(Case):
    """Four experts, with their gradients."""

    names = tuple(f"experts: {part}" for part in ("y", "dx", *KINDS))

    def inputs(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """x and dy [rows, 5], weights."""
        n = sum(self.counts)
        return self.draw("x", n, 5).requires_grad_(), self.draw("dy", n, 5), weights_of(self, 4, 5, 7)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        (x, dy, weights), experts = self.inputs(), step.Experts(4, 5, 7)
        put(experts, weights)
        return there_and_back(self.names, experts(x, torch.tensor(self.counts)), [x, *leaves_of(experts)], dy)

    def expected(self, rank: int) -> dict[str, Any]:
        x, dy, weights = self.inputs()
        y = torch.cat([mlp(part, *(w[e] for w in weights)) for e, part in enumerate(x.split(self.counts))])
        return there_and_back(self.names, y, [x, *weights], dy)


class Linear(Side):
    """ExpertLinear alone."""

    names = ("linear y", "linear dx", "linear dW")

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        (x, dy, (weight, *_)), linear = self.inputs(), step.ExpertLinear(4, 5, 7)
        linear.weight = nn.Parameter(weight.detach())
        return there_and_back(
            self.names, linear(x, list(self.counts)), (x, linear.weight), F.pad(dy, (0, 2), value=2.0)
        )

    def expected(self, rank: int) -> dict[str, Any]:
        x, dy, (weight, *_) = self.inputs()
        y = torch.cat([part @ w.T for part, w in zip(x.split(self.counts), weight, strict=True)])
        return there_and_back(self.names, y, (x, weight), F.pad(dy, (0, 2), value=2.0))


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
        moe, x = self.layer(step), self.x.requires_grad_()
        leaves = [x, moe.router.weight, *leaves_of(moe.experts)]
        return there_and_back(self.names, moe(x), leaves, self.draw("dy", *x.shape))

    def expected(self, rank: int) -> dict[str, Any]:
        weights = weights_of(self, 7, 5, 8)
        x, router = self.x.clone().requires_grad_(), self.router.clone().requires_grad_()
        flat = x.flatten(0, 1)
        y = mixture(flat, choose(flat, router, self.k)[1], weights).view(x.shape)
        return there_and_back(self.names, y, [x, router, *weights], self.draw("dy", *x.shape))


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
            x = self.draw("x", 2, 3).to(dtype).requires_grad_()
            loss = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
            names = [f"{dtype}: {name}" for name in ("y", "dx", "d loss")]
            y = step.AddLoss.apply(x, loss, 0.375)
            found |= there_and_back(names, y, (x, loss), self.draw("dy", 2, 3).to(dtype))
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
        x = self.rows(r).requires_grad_()
        y = step.AllToAll.apply(x, list(SENT[r]), [row[r] for row in SENT], mesh["ep"])
        return there_and_back(names, y, (x,), self.back(r)) | {"the rows afterwards": x.detach()}

    def expected(self, rank: int) -> dict[str, Any]:
        there = [self.rows(r).split(SENT[r])[rank] for r in range(3)]
        home = [self.back(r).split([row[r] for row in SENT])[rank] for r in range(3)]
        found = {"what arrived": torch.cat(there), "the gradient of the rows": torch.cat(home)}
        return found | {"the rows afterwards": self.rows(rank)}


class Visit(Case):
    """Rows visit experts that are one matrix each."""

    def inputs(self, rank: int) -> tuple[Tensor, Tensor]:
        """Rows, and the gradients of what comes home."""
        n = sum(COUNTS[rank])
        return self.draw(f"x {rank}", n, DIM).requires_grad_(), self.draw(f"dy {rank}", n, DIM)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        r, calls = mesh["ep"].rank, []
        matrices = self.draw("experts", 8, DIM, DIM)[2 * r : 2 * r + 2].clone().requires_grad_()

        def experts(rows: Tensor, counts: Tensor) -> Tensor:
            calls.append(counts.tolist())
            return torch.cat([part @ w.T for part, w in zip(rows.split(counts.tolist()), matrices, strict=True)])

        x, dy = self.inputs(r)
        with Tape(mesh) as there:
            y = step.visit_experts(experts, mesh["ep"], x, torch.tensor(COUNTS[r]))
        with Tape(mesh) as back:
            found = there_and_back(("output", "gradient of x", "gradient of this rank's experts"), y, (x, matrices), dy)
        found |= {"calls: rows by expert": calls, "bytes forward": there.sent().get("ep", 0.0)}
        return found | {"bytes backward": back.sent().get("ep", 0.0)}

    def expected(self, rank: int) -> dict[str, Any]:
        """All experts in one place. The tape books a collective with (n-1)/n of its larger tensor."""
        own, matrices = slice(2 * rank, 2 * rank + 2), self.draw("experts", 8, DIM, DIM).requires_grad_()
        xs, dys = zip(*(self.inputs(r) for r in range(4)), strict=True)
        pairs = zip(xs, COUNTS, strict=True)
        ys = [torch.cat([p @ w.T for p, w in zip(x.split(c), matrices, strict=True)]) for x, c in pairs]
        *dxs, dw = torch.autograd.grad(ys, (*xs, matrices), dys)
        here = torch.tensor(COUNTS)[:, own].sum(0)
        rows = 2 * 3 / 4 * max(sum(COUNTS[rank]), int(here.sum())) * DIM * 8
        found = {"output": ys[rank], "gradient of x": dxs[rank], "gradient of this rank's experts": dw[own]}
        found |= {"calls: rows by expert": [here.tolist()], "bytes backward": Most(rows)}
        return found | {"bytes forward": Most(rows + 3 / 4 * 8 * 8)}


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


def five_layers() -> Decoder:
    """On the meta device."""
    return decoder(dim=16, n_layers=5, n_heads=4, n_kv_heads=2, ffn_dim=24, vocab_size=31, seq_len=8)


class Deal(Case):
    """Which layers have experts, their shapes and records; the groups."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        model, found = five_layers(), {}
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
        share, width = 6 // self.ep, self.width or 24
        cuts = [[0, "ep", own * share, (own + 1) * share, 6]] if self.ep > 1 else []
        shapes = {f"experts.{kind}": [share, width, 16] for kind in KINDS[:2]}
        shapes |= {"experts.down_proj": [share, 16, width], "router": [6, 16]}
        for name, shape in ((f"layer {i}'s {name}.weight", shape) for i in (2, 4) for name, shape in shapes.items()):
            router = "router" in name
            found |= {f"the shape of {name}": shape, f"the cuts of {name}": [] if router else cuts}
            found[f"data_group of {name}"] = "data" if router else "expert_data"
            found[f"{name} is partial over"] = ["tp"] if router else []
        return found


class Refused(Case):
    """What flags that cannot work end with, on 4 ranks of dp with 6 experts."""

    flags = (dict(ep=4), dict(ep=3), dict(experts=1), dict(micro_batch_size=3))

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        def error(flags: dict[str, int]) -> str:
            return refused(step.shard_experts, five_layers(), mesh, step.Config(**FLAGS | flags))

        return {str(flags): error(flags) for flags in self.flags}

    def expected(self, rank: int) -> dict[str, Any]:
        return {str(flags): "UserError" for flags in self.flags}


class PlainMoE(nn.Module):
    """A layer by its definition, whole; `loss` is the sum over sequences of their balance losses."""

    def __init__(self, dim: int, width: int, experts: int):
        super().__init__()
        self.router, self.experts = nn.Linear(dim, experts, bias=False), nn.Module()
        for kind, shape in zip(KINDS, ((width, dim), (width, dim), (dim, width)), strict=True):
            setattr(self.experts, kind, nn.Module())
            getattr(self.experts, kind).weight = nn.Parameter(torch.empty(experts, *shape))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> the same shape."""
        chosen = [choose(sequence, self.router.weight, 2) for sequence in x]
        self.loss, weights = sum(balance(p, scores) for p, scores in chosen), leaves_of(self.experts)
        return torch.stack([mixture(s, scores, weights) for s, (_, scores) in zip(x, chosen, strict=True)])


WEIGHT = 0.6  # of the balance loss


def with_experts(config: ModelConfig) -> Decoder:
    """A decoder whose MLPs are PlainMoE. Its loss has their losses' gradient, but not their value."""
    model = Decoder(config)
    layers = model.model.layers.values()
    for layer in layers:
        layer.mlp = PlainMoE(config.dim, config.ffn_dim, 4)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        more = sum(layer.mlp.loss for layer in layers) * WEIGHT / len(targets) * (targets != IGNORE).sum()
        return summed_cross_entropy(logits, targets) + more - more.detach()

    model.loss = loss
    return model


class Trained(training.Trained):
    """Of the whole file."""

    def expected(self, rank: int) -> dict[str, Any]:
        with mock.patch.object(training, "Decoder", with_experts):
            return super().expected(rank)


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
