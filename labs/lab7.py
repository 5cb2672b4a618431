"""Lab 7: experts (step07_moe_ep.py)."""

from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, all_reduce
from common.layout import layout_of
from common.model import IGNORE, Decoder, ModelConfig, summed_cross_entropy
from labs import training
from labs.course import Case, Criterion, Lab, Most, Question, Task, demands
from labs.tape import Tape

FP32 = 1e-6  # fractions of counts may be in 32 bits
KINDS = ("gate_proj", "up_proj", "down_proj")
ALONE = Group("cp", 0, 1, None)


def weights_of(case: Case, experts: int, dim: int, width: int) -> list[Tensor]:
    """gate, up [experts, width, dim] and down [experts, dim, width]."""
    shapes = ((width, dim), (width, dim), (dim, width))
    return [case.draw(kind, experts, *shape) / 2 for kind, shape in zip(KINDS, shapes, strict=True)]


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

SIDE = tuple((dict(counts=counts, dim=5, width=7),) for counts in ((3, 0, 6, 1), (0, 0, 0, 0)))
PARTS = tuple(f"experts: {part}" for part in ("y", "dx", *KINDS))


def side_on_rank(step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """Experts, with their gradients."""
    n, experts = sum(case.counts), step.Experts(4, 5, 7)
    x, weights = case.draw("x", n, 5).requires_grad_(), weights_of(case, 4, 5, 7)
    for kind, weight in zip(KINDS, weights, strict=True):
        getattr(experts, kind).weight = nn.Parameter(weight)
    y = experts(x, torch.tensor(case.counts))
    leaves = [x, *(getattr(experts, kind).weight for kind in KINDS)]
    return dict(zip(PARTS, (y, *torch.autograd.grad(y, leaves, case.draw("dy", n, 5))), strict=True))


def linear_on_rank(step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """ExpertLinear alone."""
    n, linear = sum(case.counts), step.ExpertLinear(4, 5, 7)
    x, linear.weight = case.draw("x", n, 5).requires_grad_(), nn.Parameter(weights_of(case, 4, 5, 7)[0])
    y = linear(x, list(case.counts))
    grads = torch.autograd.grad(y, (x, linear.weight), case.draw("dy", n, 7))
    return dict(zip(("linear y", "linear dx", "linear dW"), (y, *grads), strict=True))


def side_expected(_rank: int, case: Case) -> dict[str, Any]:
    """Expert by expert."""
    n, x = sum(case.counts), case.draw("x", sum(case.counts), 5).requires_grad_()
    parts, weights = x.split(case.counts), [w.requires_grad_() for w in weights_of(case, 4, 5, 7)]
    y = torch.cat([part @ w.T for part, w in zip(parts, weights[0], strict=True)])
    one = (y, *grads_of(y, (x, weights[0]), case.draw("dy", n, 7)))
    y = torch.cat([mlp(part, *(w[e] for w in weights)) for e, part in enumerate(parts)])
    three = (y, *grads_of(y, (x, *weights), case.draw("dy", n, 5)))
    return dict(zip(("linear y", "linear dx", "linear dW", *PARTS), one + three, strict=True))


def grads_of(y: Tensor, leaves: Any, dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients; zero for what y does not depend on."""
    return torch.autograd.grad(y, leaves, dy, materialize_grads=True)


EXPERTS = Task(
    "experts side by side", 15, ("ExpertLinear.forward", "Experts.forward"),
    "the docstring of the step, THE LAYER; MLP in common/model.py",
    ("rows.split(counts) are the rows of each expert. Some have none: what is an empty part times a matrix?",
     "y = rows W^T for each part with its own W; torch.cat puts the parts side by side again, in the same order.",
     "Experts.forward is an MLP's: down(silu(gate(x)) * up(x)). counts as a list come from .tolist(), once.",),
    (*demands(linear_on_rank, side_expected, SIDE[0], ("ExpertLinear: each part with its own matrix", 2, "linear")),
     *demands(side_on_rank, side_expected, SIDE[0], ("Experts: the three layers, and the gradients", 2, "experts")),
     *demands(side_on_rank, side_expected, SIDE[1], ("no rows: gradients are zero", 1, "experts")),),
)  # fmt: skip

# --- task 2: the layer -----------------------------------------------------------------------------------------------


def layer_of(step: Any, case: Case, sharers: Group = ALONE, weight: float = 0.0) -> tuple[nn.Module, list[Tensor]]:
    """A MoE layer in fp64, and its four weights. The last expert's logits are so low that nobody visits it."""
    flags = dict(experts=7, experts_per_token=case.k, balance_weight=weight, micro_batch_size=1, global_batch_size=1)
    moe = step.MoE(5, 8, SimpleNamespace(tp=1, **flags), sharers).double()
    moe.router.weight = nn.Parameter(router_of(case))
    for kind, value in zip(KINDS, weights_of(case, 7, 5, 8), strict=True):
        getattr(moe.experts, kind).weight = nn.Parameter(value)
    return moe, [moe.router.weight, *(getattr(moe.experts, kind).weight for kind in KINDS)]


def router_of(case: Case) -> Tensor:
    """[7, 5]."""
    router = case.draw("router", 7, 5)
    router[6] = torch.tensor([-30.0, 0, 0, 0, 0])
    return router


def tokens_of(case: Case, seq: int = 9) -> Tensor:
    """Two sequences, [2, seq, 5]; the first number is positive."""
    x = case.draw("x", 2, seq, 5)
    x[..., 0] = 1 + x[..., 0].abs()
    return x


def layer_on_rank(step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """Output and gradients, without a balance loss."""
    moe, weights = layer_of(step, case)
    x = tokens_of(case).requires_grad_()
    y = moe(x)
    grads = torch.autograd.grad(y, (x, *weights), case.draw("dy", 2, 9, 5))
    return dict(zip(("y", "dx", "router", *KINDS), (y, *grads), strict=True))


def layer_expected(_rank: int, case: Case) -> dict[str, Any]:
    """All experts on all tokens."""
    leaves = [t.requires_grad_() for t in (tokens_of(case), router_of(case), *weights_of(case, 7, 5, 8))]
    x = leaves[0].flatten(0, 1)
    y = mixture(x, choose(x, leaves[1], case.k)[1], leaves[2:]).view(2, 9, 5)
    grads = grads_of(y, leaves, case.draw("dy", 2, 9, 5))
    return dict(zip(("y", "dx", "router", *KINDS), (y, *grads), strict=True))


def narrow_on_rank(step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """In bf16: which rows each expert is given."""
    moe, _ = layer_of(step, case)
    seen = []

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        seen.append(torch.stack([part.double().sum(0) for part in rows.split(counts.tolist())]))
        return rows

    moe = moe.bfloat16()
    moe.experts.forward = experts
    y = moe(tokens_of(case, 150).bfloat16())
    return {"the sum of each expert's rows": seen[0] if len(seen) == 1 else None, "dtype of the output": str(y.dtype)}


def narrow_expected(_rank: int, case: Case) -> dict[str, Any]:
    """By logits in 64 bits."""
    x = tokens_of(case, 150).bfloat16().double().flatten(0, 1)
    scores = choose(x, router_of(case).bfloat16().double(), case.k)[1]
    return {"the sum of each expert's rows": (scores > 0).double().T @ x, "dtype of the output": "torch.bfloat16"}


LAYER = Task(
    "the layer", 30, ("MoE.forward",),
    "the docstring of the step, THE LAYER; MoE.__init__, and balance_loss, which comes in the next task",
    ("tokens [b s, dim]. p = softmax of the router's logits, in wide(x.dtype): small differences decide. p.topk "
     "gives scores and experts [tokens, top_k]. When are scores divided by their sum, and when not?",
     "The experts want rows sorted by expert, and how many each has. argsort of selected_experts.flatten() sorts "
     "all choices; choice c belongs to token c // top_k. bincount with minlength counts also those that nobody "
     "chose.",
     "order.argsort() is the way back. Then unflatten to [tokens, top_k, dim], times the scores, sum over top_k. "
     "End with AddLoss.apply(out, self.balance_loss(p, counts), self.weight).",),
    (Criterion("three experts a token: output and all gradients", 4, layer_on_rank, layer_expected, (dict(k=3),)),
     Criterion("one expert a token: its score is p", 2, layer_on_rank, layer_expected, (dict(k=1),)),
     Criterion("16 bits: the router still chooses in 32", 1, narrow_on_rank, narrow_expected, (dict(k=3),)),),
    ("gates_not_differentiated", "scores_not_normalised", "rows_of_other_tokens"),
)  # fmt: skip

# --- task 3: the balance loss ----------------------------------------------------------------------------------------


def added_on_rank(step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """AddLoss alone, with 64 and with 16 bits; the loss has 32 at least."""
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.bfloat16):
        x = case.draw("x", 2, 3).to(dtype).requires_grad_()
        loss = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
        y = step.AddLoss.apply(x, loss, case.weight)
        grads = torch.autograd.grad(y, (x, loss), case.draw("dy", 2, 3).to(dtype))
        found |= {f"{dtype}: {name}": value for name, value in zip(("y", "dx", "d loss"), (y, *grads), strict=True)}
    return found


def added_expected(_rank: int, case: Case) -> dict[str, Any]:
    """x, dy, the weight."""
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.bfloat16):
        found |= {f"{dtype}: y": case.draw("x", 2, 3).to(dtype), f"{dtype}: dx": case.draw("dy", 2, 3).to(dtype)}
        found[f"{dtype}: d loss"] = torch.tensor(case.weight)
    return found


def sharers_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Each rank's part of the balance loss of a micro-batch, and its gradient; the counts that were given, after it."""
    p, scores = choose(tokens_of(case, 12).flatten(0, 1), router_of(case), case.k)
    n, group = len(p) // case.ranks, mesh["cp"]
    own = slice(group.rank * n, (group.rank + 1) * n)
    moe, _ = layer_of(step, case, group)
    leaf, counts = p[own].clone().requires_grad_(), (scores[own] > 0).sum(0)
    before = counts.clone()
    part = moe.balance_loss(leaf, counts)
    part.backward()
    return {"this rank's part": part, "its gradient": leaf.grad, "the counts that were given": counts - before}


def sharers_expected(rank: int, case: Case) -> dict[str, Any]:
    """The whole loss, cut by tokens."""
    p, scores = choose(tokens_of(case, 12).flatten(0, 1), router_of(case), case.k)
    n = len(p) // case.ranks
    own = slice(rank * n, (rank + 1) * n)
    f = (scores > 0).double().sum(0) / (scores > 0).sum()
    slope = (7 * f / len(p)).expand(n, 7)
    return {
        "this rank's part": (slope * p[own]).sum(),
        "its gradient": slope,
        "the counts that were given": torch.zeros(7),
    }


BALANCE = Task(
    "the balance loss", 20, ("AddLoss.forward", "AddLoss.backward", "MoE.balance_loss"),
    "the docstring of the step from \"Nothing keeps a router\"; how MoE.forward uses both",
    ("AddLoss returns x as it is: x.view_as(x), so that autograd sees another tensor. backward gets the gradient "
     "of x. What is the gradient of the loss, if it stood in the model's loss with a weight? Whatever dy is.",
     "f_e: what share of all choices of the micro-batch fell on e. Ranks that share its sequences add up their "
     "counts first, in a copy: the experts need the given ones.",
     "P_e: a mean over all tokens of the micro-batch. A rank adds up p over its own tokens and divides by the "
     "number of all of them, counts.sum() / top_k. The parts of the ranks add up to the loss.",),
    (Criterion("AddLoss: x goes through, the loss gets its weight", 2, added_on_rank, added_expected,
               (dict(weight=0.375),)),
     Criterion("balance_loss and its gradient, on one rank", 2, sharers_on_rank, sharers_expected,
               (dict(mesh=dict(cp=1), k=3),), bound=FP32),
     Criterion("shared by three ranks: the parts of one loss", 2, sharers_on_rank, sharers_expected,
               (dict(mesh=dict(cp=3), k=2),), bound=FP32),),
    ("balance_not_added", "balanced_by_own_tokens"),
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


def travel_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """AllToAll, of rows that are not contiguous."""
    r = mesh["ep"].rank
    sent, received = list(SENT[r]), [row[r] for row in SENT]
    x = case.draw(f"x {r}", DIM, sum(sent)).T.requires_grad_()
    before = x.detach().clone()
    y = step.AllToAll.apply(x, sent, received, mesh["ep"])
    (dx,) = torch.autograd.grad(y, x, case.draw(f"dy {r}", sum(received), DIM))
    return {"what arrived": y, "the gradient of the rows": dx, "the rows afterwards": x.detach() - before}


def travel_expected(rank: int, case: Case) -> dict[str, Any]:
    """Parts of all ranks."""
    xs = [case.draw(f"x {r}", DIM, sum(SENT[r])).T.split(SENT[r]) for r in range(3)]
    dys = [case.draw(f"dy {r}", sum(row[r] for row in SENT), DIM).split([row[r] for row in SENT]) for r in range(3)]
    found = {"what arrived": torch.cat([x[rank] for x in xs])}
    found["the gradient of the rows"] = torch.cat([dy[rank] for dy in dys])
    return found | {"the rows afterwards": torch.zeros_like(torch.cat(xs[rank]))}


def visit_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Rows visit experts that are one matrix each."""
    r, calls = mesh["ep"].rank, []
    matrices = case.draw("experts", 8, DIM, DIM)[2 * r : 2 * r + 2].clone().requires_grad_()

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        calls.append(counts.tolist())
        return torch.cat([part @ w.T for part, w in zip(rows.split(counts.tolist()), matrices, strict=True)])

    x = case.draw(f"x {r}", sum(COUNTS[r]), DIM).requires_grad_()
    with Tape(mesh) as there:
        y = step.visit_experts(experts, mesh["ep"], x, torch.tensor(COUNTS[r]))
    with Tape(mesh) as back:
        dx, dw = torch.autograd.grad(y, (x, matrices), case.draw(f"dy {r}", *y.shape))
    found = {"output": y, "gradient of x": dx, "gradient of this rank's experts": dw, "calls: rows by expert": calls}
    return found | {"bytes forward": there.sent().get("ep", 0.0), "bytes backward": back.sent().get("ep", 0.0)}


def visit_expected(rank: int, case: Case) -> dict[str, Any]:
    """All experts in one place. The tape books a collective with (n-1)/n of its larger tensor."""
    here, matrices = torch.tensor(COUNTS)[:, 2 * rank : 2 * rank + 2].sum(0), case.draw("experts", 8, DIM, DIM)
    xs = [case.draw(f"x {r}", sum(COUNTS[r]), DIM).requires_grad_() for r in range(4)]
    leaves, pairs = matrices.requires_grad_(), zip(xs, COUNTS, strict=True)
    ys = [torch.cat([p @ w.T for p, w in zip(x.split(c), leaves, strict=True)]) for x, c in pairs]
    *dxs, dw = torch.autograd.grad(ys, (*xs, matrices), [case.draw(f"dy {r}", *y.shape) for r, y in enumerate(ys)])
    rows = 2 * 3 / 4 * max(sum(COUNTS[rank]), int(here.sum())) * DIM * 8
    found = {
        "output": ys[rank],
        "gradient of x": dxs[rank],
        "gradient of this rank's experts": dw[2 * rank : 2 * rank + 2],
    }
    found |= {"calls: rows by expert": [here.tolist()], "bytes forward": Most(rows + 3 / 4 * 8 * 8)}
    return found | {"bytes backward": Most(rows)}


TRAVEL = Task(
    "there and back", 35, ("AllToAll.forward", "AllToAll.backward", "visit_experts"),
    "the docstring of the step, EXPERT PARALLELISM, with its picture; all_to_all in common/comm.py",
    ("AllToAll: room for sum(received) rows, one all_to_all, wait. What goes from a to b in forward: where does its "
     "gradient go in backward, and how many rows are sent then?",
     "visit_experts: counts viewed as [ranks, experts of a rank] say what leaves; an all_to_all of them says what "
     "comes. Their sums over a row are the sizes of the second all_to_all.",
     "What arrives is sorted by the rank it is from, then by expert; experts want it by expert alone. "
     "repeat_interleave writes down each visitor's expert, a stable argsort is the order, its argsort the way back.",),
    (Criterion("AllToAll: rows arrive, and gradients go back", 3, travel_on_rank, travel_expected,
               (dict(mesh=dict(ep=3)),)),
     *demands(
         visit_on_rank, visit_expected, (dict(mesh=dict(ep=4)),),
         ("visit_experts: each row comes home from its expert", 3, "output"),
         ("visit_experts: so do gradients, of rows and experts", 2, "gradient"),
         ("experts are called once, with the rows of all ranks", 1, "calls"),
         ("rows go to the ranks that they visit, and to no other", 1, "bytes"),
     ),),
    ("returned_in_another_order", "not_sorted_by_expert", "experts_averaged"),
)  # fmt: skip

# --- task 5: dealing experts -----------------------------------------------------------------------------------------

FLAGS = dict(experts=6, experts_per_token=2, moe_every=2, dense_layers=1, micro_batch_size=1, global_batch_size=8)
MESHES = (
    dict(mesh=dict(dp=2, cp=2, tp=1), ep=2, expert_dim=20),
    dict(mesh=dict(dp=4, cp=1, tp=1), ep=2, expert_dim=0),
    dict(mesh=dict(dp=2, cp=1, tp=2), ep=2, expert_dim=20),
    dict(mesh=dict(dp=1, cp=4, tp=1), ep=1, expert_dim=20),
)


def five_layers() -> Decoder:
    """On the meta device."""
    with torch.device("meta"):
        return Decoder(ModelConfig(16, 5, 4, 2, 24, vocab_size=31, seq_len=8))


def deal_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Which layers have experts, their shapes and records; the groups."""
    model = five_layers()
    config = step.Config(**FLAGS, ep=case.ep, expert_dim=case.expert_dim, cp=case.mesh["cp"], tp=case.mesh["tp"])
    step.shard_experts(model, mesh, config)
    found: dict[str, Any] = {}
    for number, layer in model.model.layers.items():
        found[f"layer {number} has experts"] = hasattr(layer.mlp, "router")
        for name, param in layer.mlp.named_parameters() if hasattr(layer.mlp, "router") else ():
            record = layout_of(param)
            found[f"layer {number}: shape of {name}"] = list(param.shape)
            found[f"layer {number}: cuts of {name}"] = [[s.over, s.dim, s.start, s.stop, s.full] for s in record.splits]
            found[f"layer {number}: data_group of {name}"] = record.data_group
            found[f"layer {number}: {name} is partial over"] = list(record.partial_over)
    for name in ("data", "ep", "expert_data"):
        here = torch.zeros(mesh.world).index_fill_(0, torch.tensor([mesh.rank]), 1.0)
        all_reduce(here, mesh[name]).wait()
        found[f"the ranks of {name}"] = here.nonzero().flatten()
    return found


def deal_expected(rank: int, case: Case) -> dict[str, Any]:
    """Layers 2 and 4; experts cut over ep; neighbours of dp x cp are an ep group."""
    dp, cp, tp = case.mesh.values()
    data = torch.arange(4).view(dp * cp, tp).T[rank % tp]  # the ranks that have other tokens
    place = data.tolist().index(rank)
    first, own = place // case.ep * case.ep, place % case.ep
    found: dict[str, Any] = {f"layer {i} has experts": i in (2, 4) for i in range(5)}
    found |= {"the ranks of data": data, "the ranks of ep": data[first : first + case.ep]}
    found["the ranks of expert_data"] = data[own :: case.ep]
    share, width = 6 // case.ep, case.expert_dim or 24
    cuts = [["ep", 0, own * share, (own + 1) * share, 6]] if case.ep > 1 else []
    shapes = dict(router=[6, 16]) | {f"experts.{kind}": [share, width, 16] for kind in KINDS[:2]}
    for i in (2, 4):
        for name, shape in (shapes | {"experts.down_proj": [share, 16, width]}).items():
            router, name = name == "router", f"{name}.weight"
            found[f"layer {i}: shape of {name}"] = shape
            found[f"layer {i}: cuts of {name}"] = [] if router else cuts
            found[f"layer {i}: data_group of {name}"] = "data" if router else "expert_data"
            found[f"layer {i}: {name} is partial over"] = ["tp"] if router else []
    return found


WRONG = (dict(ep=4), dict(ep=3), dict(experts=1), dict(micro_batch_size=3))  # on 4 ranks of dp, 6 experts


def refusals_on_rank(step: Any, _case: Case, mesh: Any) -> dict[str, Any]:
    """What the flags of WRONG end with."""
    found = {}
    for flags in WRONG:
        try:
            step.shard_experts(five_layers(), mesh, step.Config(**FLAGS | flags))
            found[str(flags)] = "no error"
        except Exception as error:
            found[str(flags)] = type(error).__name__
    return found


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
        weights = [getattr(self.experts, kind).weight for kind in KINDS]
        chosen = [choose(sequence, self.router.weight, 2) for sequence in x]
        self.loss = sum(balance(p, scores) for p, scores in chosen)
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


def trained(rank: int, case: Case) -> dict[str, Any]:
    """`expected` of the whole file."""
    with mock.patch.object(training, "Decoder", with_experts):
        return training.expected(rank, case)


LAYOUTS = (dict(ep=2, zero=1), dict(cp=2, tp=2, ep=2))
TRAINED = dict(experts=4, balance_weight=WEIGHT)

DEALING = Task(
    "dealing experts, and the whole file", 30, ("shard_experts",),
    "the last picture of the step's docstring; Mesh.join and Mesh.enter in common/comm.py; `cut` in step 4; `train`",
    ('The rows of mesh.join("data", "dp", "cp") are the ranks that have other tokens. ep neighbours of a row '
     "share all experts; ranks with the same place in their ep group hold the same ones, and are expert_data.",
     "Layers from dense_layers + moe_every - 1 on, every moe_every-th, get BALANCE[config.balance](...) on the meta "
     "device. cut(weight, 0, mesh[\"ep\"]) cuts experts. Who sums the router's gradient, and who an expert's?",
     "Router: data_group \"data\", partial_over (\"tp\",), as each tp rank finds a part of the experts' outputs. If "
     'ep > 1, experts.forward becomes partial(DISPATCH[config.ep_mode], experts.forward, mesh["ep"]). Then the '
     "three errors.",),
    (*demands(
         deal_on_rank, deal_expected, MESHES,
         ("the right layers, shapes, cuts and records", 2, "layer"),
         ("the groups data, ep and expert_data", 2, "the ranks"),
     ),
     Criterion("flags that cannot work are a UserError", 1, refusals_on_rank,
               lambda *_: {str(flags): "UserError" for flags in WRONG}, (dict(mesh=dict(dp=4, cp=1, tp=1)),)),
     Criterion("the file trains as one device: --ep 2 --zero 1; --cp 2 --tp 2 --ep 2", 4, training.train_on_rank,
               trained, tuple(dict(mesh=dict(dp=4), layout=layout, flags=TRAINED) for layout in LAYOUTS),
               bound=FP32, whole=True),),
    ("experts_summed_over_all_data", "router_not_summed_over_tp"),
)  # fmt: skip


def draw_bytes(draw: Random) -> dict[str, Any]:
    """A layout."""
    ep = draw.choice((4, 8))
    return dict(ep=ep, E=ep * draw.choice((2, 4, 8)), top=draw.choice((3, 5)), h=512 * draw.randint(2, 8),
                L=draw.choice((12, 24, 32)), b=draw.choice((1, 2)), s=1024 * draw.randint(2, 8),
                k=draw.choice((4, 6, 7)))  # fmt: skip


def bytes_over_ep(v: dict[str, Any], ways: int = 4, top: int = 0, away: float = 0.0) -> float:
    """Of a step in bf16: rows there and home, forward and backward, and counts of 8 bytes."""
    away = away or (v["ep"] - 1) / v["ep"]
    rows = ways * away * v["b"] * v["s"] * (top or v["top"]) * v["h"] * 2
    return v["k"] * v["L"] * (rows + (v["ep"] - 1) / v["ep"] * 8 * v["E"])


QUESTION = Question(
    "--ep {ep}, bf16, {L} layers of {E} experts, --experts-per-token {top}, dim {h}, {k} micro-batches of {b} "
    "sequences\n"
    "of {s} tokens on each rank, nothing recomputed, all experts equally busy. How many bytes does a rank send over "
    "ep\n"
    "in one step, counts included?",
    draw_bytes,
    bytes_over_ep,
    mistakes=(
        ("this is forward alone", lambda v: bytes_over_ep(v, ways=2)),
        ("a token sends a row for each of its experts", lambda v: bytes_over_ep(v, top=1)),
        ("1/ep of the rows stay where they are", lambda v: bytes_over_ep(v, away=1.0)),
        ("this is one micro-batch", lambda v: bytes_over_ep(v) / v["k"]),
    ),
)

LAB = Lab(7, "Experts", ("step07_moe_ep",), (EXPERTS, LAYER, BALANCE, TRAVEL, DEALING), QUESTION)
