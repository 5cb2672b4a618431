"""Lab 7: what is demanded of experts, and of dealing them to ranks. Functions `..._on_rank` run on the ranks."""

import json
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import step03_zero as step03
import step06_pipeline as step06
import step07_moe_ep as step07
from common import moe
from common.comm import Mesh
from common.layout import layout_of
from common.model import Decoder
from common.moe import MoEConfig
from labs import training
from labs.bench import BOUND, IN_FP32, Bench, numbers
from services.ledger import Ledger
from tests.equivalence import SMALL, without_instruments

CPU = torch.device("cpu")
EXPERTS = dict(experts=8, experts_per_token=2, expert_dim=12, balance_weight=0.5, z_loss=0.1)
RUN = EXPERTS | dict(n_layers=2, optimizer="sgd", global_batch_size=4, micro_batch_size=2, steps=2, pp=1, cp=1, tp=1)
WHOLE = (2, dict(ep=2))
ALONE = "step07_moe_ep"  # step 1 knows no experts
KEYS = ("gate", "up", "down")


def shape(dim: int, experts: int, k: int, **more: Any) -> MoEConfig:
    """A decoder's shape with experts, of which only the layer with experts counts here."""
    m = dict(n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=8, vocab_size=30, seq_len=8, expert_dim=8)
    return MoEConfig(dim=dim, experts=experts, experts_per_token=k, **m | more)


def sent(mesh: Mesh, dim: str) -> float:
    """Bytes this rank has sent over a dimension since the last call."""
    return float(sum(mesh.ledger.take()["traffic"].get(dim, {}).values()))


def some_gates(seed: int, name: str, tokens: int, experts: int) -> Tensor:
    """Gates of a third of all pairs of a token and an expert; the first token goes nowhere, expert 1 gets nobody."""
    visited = numbers(seed, f"{name} visits", tokens, experts) > 0.4
    visited[0], visited[:, 1] = False, False
    return (0.1 + numbers(seed, name, tokens, experts).abs()) * visited


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert: SwiGLU of x [tokens, dim]."""
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture(x: Tensor, gates: Tensor, weights: list[Tensor]) -> Tensor:
    """All experts on all tokens, weighted: x [tokens, dim], gates [tokens, experts], weights [experts, out, in]."""
    return sum(gates[:, e, None] * mlp(x, *(w[e] for w in weights)) for e in range(gates.shape[1]))


def expert_weights(seed: int, experts: int, dim: int, width: int) -> list[Tensor]:
    """gate, up [experts, width, dim] and down [experts, dim, width]."""
    shapes = dict(gate=(width, dim), up=(width, dim), down=(dim, width))
    return [numbers(seed, f"{name} of the experts", experts, *size) / 2 for name, size in shapes.items()]


# --- task 1: the router ----------------------------------------------------------------------------------------------

CHOICES = ((2, 1, 0), (3, 4, 2), (4, 4, 2), (2, 2, 1))  # experts of a token, groups, groups of a token


def router_on_rank(seed: int, tokens: int, dim: int, experts: int) -> dict:
    """Logits, choices with and without groups, counts, capacity."""
    router = moe.Router(shape(dim, experts, 2))
    x, router.weight = numbers(seed, "x", tokens, dim), nn.Parameter(numbers(seed, "w", experts, dim))
    found: dict[str, Any] = {"router logits": router(x)}
    router.weight = nn.Parameter(router.weight.bfloat16())
    logits = router(x.bfloat16())
    found |= {"bf16: dtype of router logits": str(logits.dtype), "bf16: router logits": logits}
    scores = numbers(seed, "scores", tokens, experts)
    for k, groups, most in CHOICES:
        chosen = moe.select(scores, shape(dim, experts, k, expert_groups=groups, groups_per_token=most))
        found[f"choices of {k} experts from {most or groups} of {groups} groups, sorted"] = chosen.sort().values
    chosen = scores.topk(3).indices
    for dtype in (torch.int64, torch.int32):
        counts = moe.count(chosen.to(dtype), experts + 2)
        found |= {f"counts of {dtype} choices": counts, f"dtype of counts of {dtype} choices": str(counts.dtype)}
    both = torch.stack((chosen, chosen.flip(0)))
    for capacity in (1, 2, tokens):
        found[f"kept with capacity {capacity}"] = moe.within_capacity(both, experts, capacity).long()
    return found


def router_case(bench: Bench) -> tuple[int, ...]:
    """(seed, tokens, dim, experts) of task 1."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.randint(5, 9), draw.randint(3, 8), draw.choice((8, 12))


def router_logits(bench: Bench):
    """Logits in fp32 at least."""
    case = router_case(bench)
    seed, tokens, dim, experts = case
    x, w = numbers(seed, "x", tokens, dim), numbers(seed, "w", experts, dim)
    run = bench.ranks(1, router_on_rank, *case)
    bench.same(run, lambda r: {"router logits": x @ w.T, "bf16: dtype of router logits": "torch.float32"})
    bench.same(run, lambda r: {"bf16: router logits": x.bfloat16().double() @ w.bfloat16().double().T}, IN_FP32)


def best_of(row: list[float], k: int, groups: int, most: int) -> list[int]:
    """The chosen experts of one token, written out."""
    size = len(row) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    each = max(1, k // most) if most else 1
    worth = [sum(sorted((row[e] for e in group), reverse=True)[:each]) for group in members]
    allowed = sorted(range(groups), key=lambda g: -worth[g])[: most or groups]
    return sorted(sorted((e for g in allowed for e in members[g]), key=lambda e: -row[e])[:k])


def choices(bench: Bench):
    """Top-k, within the best groups."""
    case = router_case(bench)
    scores, expected = numbers(case[0], "scores", case[1], case[3]), {}
    for k, groups, most in CHOICES:
        right = torch.tensor([best_of(row, k, groups, most) for row in scores.tolist()])
        expected[f"choices of {k} experts from {most or groups} of {groups} groups, sorted"] = right
    bench.same(bench.ranks(1, router_on_rank, *case), lambda r: expected)


def counts_and_capacity(bench: Bench):
    """How many choices an expert has, and which of them come first."""
    case = router_case(bench)
    seed, tokens, _, experts = case
    chosen, expected = numbers(seed, "scores", tokens, experts).topk(3).indices, {}
    for dtype in (torch.int64, torch.int32):
        expected[f"counts of {dtype} choices"] = chosen.flatten().bincount(minlength=experts + 2)
        expected[f"dtype of counts of {dtype} choices"] = "torch.int64"
    both = torch.stack((chosen, chosen.flip(0)))
    for capacity in (1, 2, tokens):
        taken, kept = [0] * experts, []
        for e in both.flatten().tolist():
            taken[e] += 1
            kept.append(int(taken[e] <= capacity))
        expected[f"kept with capacity {capacity}"] = torch.tensor(kept).view(both.shape)
    bench.same(bench.ranks(1, router_on_rank, *case), lambda r: expected)


# --- task 2: experts -------------------------------------------------------------------------------------------------


def rows_of(seed: int, experts: int) -> Tensor:
    """How many rows each expert has, int64 [experts]; expert 1 none."""
    counts = 1 + numbers(seed, "rows", experts).abs().mul(2).long()
    counts[1] = 0
    return counts


def grouped_on_rank(seed: int, experts: int, n_in: int, n_out: int) -> dict:
    """The grouped matmuls and their backward, also with dW put off; and rows that are taken twice."""
    counts, found = rows_of(seed, experts), {}
    n = int(counts.sum())
    for dtype in (torch.float64, torch.float32):
        a, b = (numbers(seed, name, n, size).to(dtype) for name, size in (("a", n_in), ("b", n_out)))
        w = numbers(seed, "w", experts, n_in, n_out).to(dtype)
        found[f"{dtype}: grouped_matmul"] = moe.grouped_matmul(a, w, counts)
        found[f"{dtype}: grouped_outer"] = moe.grouped_outer(b, a, counts)
    x, grad = numbers(seed, "a", n, n_in).requires_grad_(), numbers(seed, "b", n, n_out)
    weight = nn.Parameter(numbers(seed, "w", experts, n_in, n_out).mT.contiguous())
    moe.GroupedLinear.apply(x, weight, counts).backward(grad)
    found |= {"GroupedLinear: dx": x.grad, "GroupedLinear: dW": weight.grad}
    store = step06.WeightGradStore()
    x, weight = x.detach().clone().requires_grad_(), nn.Parameter(weight.detach().clone())
    step07.SplitExpertFunction.apply(x, weight, counts, store).backward(grad)
    waiting = store.pop()
    found |= {"dW put off: dx": x.grad, "dW put off: what waits": len(waiting)}
    found["dW put off: there is a dW before W"] = weight.grad is not None
    for closure in waiting:
        closure()
    found["dW put off: dW after W"] = weight.grad
    x, place = numbers(seed, "x", 5, n_in).requires_grad_(), torch.tensor([3, 0, 3, 1, 3])
    moe.TakeRows.apply(x, place).backward(numbers(seed, "dy", 5, n_in))
    return found | {"TakeRows: dx": x.grad}


def grouped_case(bench: Bench) -> tuple[int, ...]:
    """(seed, experts, in, out) of task 2; in fp32 rows have a multiple of 16 bytes, as the kernel wants."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.choice((4, 6)), 4 * draw.randint(1, 3), 4 * draw.randint(1, 3)


def by_expert(counts: Tensor) -> list[slice]:
    """Each expert's rows."""
    ends = counts.cumsum(0).tolist()
    return [slice(end - n, end) for end, n in zip(ends, counts.tolist(), strict=True)]


def grouped_values(bench: Bench):
    """Against a loop over experts."""
    case = grouped_case(bench)
    seed, experts, n_in, n_out = case
    counts = rows_of(seed, experts)
    n, parts = int(counts.sum()), by_expert(counts)
    a, b, w = numbers(seed, "a", n, n_in), numbers(seed, "b", n, n_out), numbers(seed, "w", experts, n_in, n_out)
    matmul = torch.cat([a[part] @ w[e] for e, part in enumerate(parts)])
    outer = torch.stack([b[part].T @ a[part] for part in parts])
    run = bench.ranks(1, grouped_on_rank, *case)
    for dtype, bound in ((torch.float64, BOUND), (torch.float32, IN_FP32)):
        expected = {f"{dtype}: grouped_matmul": matmul, f"{dtype}: grouped_outer": outer}
        bench.same(run, lambda r, values=expected: values, bound)


def grouped_gradients(bench: Bench):
    """Backward, at once and with dW put off."""
    case = grouped_case(bench)
    seed, experts, n_in, n_out = case
    counts = rows_of(seed, experts)
    n, parts = int(counts.sum()), by_expert(counts)
    a, b, w = numbers(seed, "a", n, n_in), numbers(seed, "b", n, n_out), numbers(seed, "w", experts, n_in, n_out)
    dx = torch.cat([b[part] @ w[e].T for e, part in enumerate(parts)])
    dw = torch.stack([b[part].T @ a[part] for part in parts])
    taken = torch.zeros(5, n_in, dtype=torch.float64)
    taken.index_add_(0, torch.tensor([3, 0, 3, 1, 3]), numbers(seed, "dy", 5, n_in))
    expected = {"GroupedLinear: dx": dx, "GroupedLinear: dW": dw, "TakeRows: dx": taken}
    expected |= {"dW put off: dx": dx, "dW put off: what waits": 1, "dW put off: there is a dW before W": False}
    bench.same(bench.ranks(1, grouped_on_rank, *case), lambda r: expected | {"dW put off: dW after W": dw})


def experts_on_rank(seed: int, tokens: int, experts: int, dim: int, width: int) -> dict:
    """Experts.forward and its gradients, with the number of choices given and not given."""
    found = {}
    for given in (False, True):
        layer, mode = moe.Experts(shape(dim, experts, 2, expert_dim=width)), "n_choices given: " if given else ""
        linears = layer.gate_proj, layer.up_proj, layer.down_proj
        for linear, weight in zip(linears, expert_weights(seed, experts, dim, width), strict=True):
            linear.weight = nn.Parameter(weight)
        x, gates = numbers(seed, "x", tokens, dim).requires_grad_(), some_gates(seed, "gates", tokens, experts)
        gates.requires_grad_()
        out = layer(x, gates, int((gates != 0).sum()) if given else None)
        out.backward(numbers(seed, "dy", tokens, dim))
        found |= {f"{mode}out": out, f"{mode}the gradient of x": x.grad}
        found[f"{mode}the gradient of the gates"] = torch.zeros_like(gates) if gates.grad is None else gates.grad
        for name, linear in zip(KEYS, linears, strict=True):
            found[f"{mode}the gradient of the {name} weights"] = linear.weight.grad
    return found


def experts_case(bench: Bench) -> tuple[int, ...]:
    """(seed, tokens, experts, dim, width) of task 2."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.randint(6, 10), draw.choice((4, 6)), draw.randint(3, 6), draw.randint(3, 6)


def mixture_and_gradients(x: Tensor, gates: Tensor, dy: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """out; gradients of x, of the gates that are not 0, and of the three kinds of weights."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, gates, *weights)]
    out = mixture(leaves[0], leaves[1], leaves[2:])
    dx, dgates, *rest = torch.autograd.grad(out, leaves, dy)
    return out.detach(), dx, dgates * (gates != 0), *rest


def experts_values(bench: Bench, gradients: bool = False):
    """The weighted sum of the experts' outputs."""
    case = experts_case(bench)
    seed, tokens, experts, dim, width = case
    x, dy = (numbers(seed, name, tokens, dim) for name in ("x", "dy"))
    gates, parts = some_gates(seed, "gates", tokens, experts), ("x", "the gates", *(f"the {n} weights" for n in KEYS))
    names = "out", *(f"the gradient of {part}" for part in parts)
    found = dict(
        zip(names, mixture_and_gradients(x, gates, dy, expert_weights(seed, experts, dim, width)), strict=True)
    )
    for mode in ("", "n_choices given: "):
        expected = {f"{mode}{name}": value for name, value in found.items() if (name == "out") != gradients}
        bench.same(bench.ranks(1, experts_on_rank, *case), lambda r, values=expected: values)


def experts_gradients(bench: Bench):
    """Backward."""
    experts_values(bench, gradients=True)


# --- task 3: the layer -----------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[dict, dict]] = {  # flags of the shape, of the balance
    "two experts a token": (dict(k=2), dict(kind="none")),
    "one expert a token": (dict(k=1), dict(kind="none")),
    "shared experts": (dict(k=2, shared_experts=2), dict(kind="none")),
    "balance loss": (dict(k=2), dict(kind="loss", weight=0.7)),
    "z-loss": (dict(k=3), dict(kind="none", z_loss=0.3)),
    "capacity": (dict(k=2), dict(kind="none", capacity_factor=0.6)),
    "capacity and balance loss": (dict(k=3), dict(kind="loss", weight=0.7, capacity_factor=0.5)),
}
SCALE, MICRO_BATCHES = 0.25, 3


def make_layer(name: str, seed: int, seq_len: int, experts: int) -> moe.MoE:
    """A layer in fp64 with weights and biases drawn from the seed."""
    flags, how = LAYERS[name]
    m = shape(6, experts, seq_len=seq_len, expert_dim=5, **flags)
    layer = moe.MoE(m, 0, moe.Balance(m, MICRO_BATCHES, CPU, scale=SCALE, **how)).double()
    for key, param in layer.named_parameters():
        param.data = numbers(seed, key, *param.shape) * 0.6
    layer.router.bias = (numbers(seed, "bias", experts) * 0.1).float()
    return layer


def counts_of_a_step(seed: int, experts: int) -> Tensor:
    """Like `Balance.counted` of two layers; in the first, most experts have just their share."""
    counted = numbers(seed, "counted", 2, experts + 3).abs().mul(100).round()
    counted[0, :experts] = 5.0
    counted[0, 1:3] += torch.tensor([2.0, -2.0])
    return counted


def layer_on_rank(seed: int, b: int, s: int, experts: int) -> dict:
    """Each kind of layer, forward and backward; what was counted; and an evaluation."""
    found: dict[str, Any] = {}
    for name in LAYERS:
        layer, x = make_layer(name, seed, s, experts), numbers(seed, "x", b, s, 6).requires_grad_()
        with torch.no_grad():
            found[f"{name}: out in an evaluation"] = layer(x)
        found[f"{name}: counted in an evaluation"] = layer.balance.counted.clone()
        out = layer(x)
        found |= {f"{name}: out": out, f"{name}: counted before backward": layer.balance.counted.clone()}
        out.backward(numbers(seed, "dy", b, s, 6))
        found |= {f"{name}: the gradient of x": x.grad, f"{name}: counted": layer.balance.counted[0]}
        for key, param in layer.named_parameters():
            found[f"{name}: the gradient of {key}"] = torch.zeros_like(param) if param.grad is None else param.grad
    layers = nn.ModuleList(moe.MoE(shape(6, experts, 2), n, None) for n in range(2))
    counted = counts_of_a_step(seed, experts)
    for kind in ("bias", "loss"):
        for layer in layers:
            layer.router.bias = torch.zeros(experts)
        moe.Balance(layers[0].m, 1, CPU, kind, bias_speed=0.125).adjust(layers, counted)
        found[f"biases after adjust with kind {kind}"] = torch.stack([layer.router.bias for layer in layers])
    return found


def layer_case(bench: Bench) -> tuple[int, ...]:
    """(seed, sequences, tokens, experts) of task 3."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.randint(1, 2), 2 * draw.randint(3, 5), draw.choice((4, 6))


def one_layer(name: str, seed: int, b: int, s: int, experts: int) -> dict[str, Any]:
    """The same layer from its formulas: `layer` has the weights alone."""
    layer, x = make_layer(name, seed, s, experts), numbers(seed, "x", b, s, 6).requires_grad_()
    m, balance, tokens = layer.m, layer.balance, x.flatten(0, 1)
    logits = tokens @ layer.router.weight.T
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    chosen = (p.detach() + layer.router.bias).topk(m.experts_per_token).indices
    mask = torch.zeros_like(p).scatter(1, chosen, 1.0)
    gates = mask * p / (mask * p).sum(1, keepdim=True) if m.experts_per_token > 1 else mask * p
    limit = -(-balance.capacity_factor * chosen.numel() // experts) if balance.capacity_factor else chosen.numel()
    kept = mask * (F.one_hot(chosen, experts).sum(1).cumsum(0) <= limit)
    counts = mask.sum(0).detach()
    loss = experts * (counts / chosen.numel() * p.mean(0)).sum() if balance.kind == "loss" else p.new_zeros(())
    more = balance.weight * loss + balance.z_loss * logits.logsumexp(1).square().mean()
    weights = [getattr(layer.experts, f"{key}_proj").weight for key in KEYS]
    shared = 0
    if layer.shared_experts is not None:
        shared = mlp(tokens, *(getattr(layer.shared_experts, f"{key}_proj").weight for key in KEYS))
    out = (mixture(tokens, gates * kept, weights) + shared).view_as(x)
    everything = (mixture(tokens, gates, weights) + shared).view_as(x)
    params = dict(layer.named_parameters())
    total = (out * numbers(seed, "dy", b, s, 6)).sum() + SCALE * more
    grads = torch.autograd.grad(total, [x, *params.values()])
    entropies = -(p * p.log()).sum()
    tail = [(mask - kept).sum(), entropies, loss / MICRO_BATCHES]
    found = {"out": out.detach(), "out in an evaluation": everything.detach()}
    found["counted"] = torch.cat((counts, torch.stack(tail).detach()))
    return found | dict(zip(("the gradient of x", *(f"the gradient of {key}" for key in params)), grads, strict=True))


def layers(bench: Bench, keys: Any, names: tuple[str, ...]):
    """Some numbers of some kinds of layers are right; `keys`: which numbers."""
    case = layer_case(bench)
    run = bench.ranks(1, layer_on_rank, *case)
    for name in names:
        one = one_layer(name, *case)
        bench.same(run, lambda r, one=one, name=name: {f"{name}: {key}": one[key] for key in one if keys(key)})


PLAIN = ("two experts a token", "one expert a token", "shared experts")
LOSSES = ("balance loss", "z-loss")
CAPACITY = ("capacity", "capacity and balance loss")


def layer_outputs(bench: Bench):
    """Gates, experts, shared experts."""
    layers(bench, lambda key: key == "out", PLAIN + LOSSES)


def layer_gradients(bench: Bench):
    """Of the router too, through the gates."""
    layers(bench, lambda key: "gradient" in key, PLAIN)


def loss_gradients(bench: Bench):
    """Of the two losses; counted once, in backward."""
    case = layer_case(bench)
    layers(bench, lambda key: "gradient" in key or key == "counted", LOSSES)
    run, nothing = bench.ranks(1, layer_on_rank, *case), torch.zeros(2, case[3] + 3)
    bench.same(run, lambda r: {f"{name}: counted before backward": nothing for name in LOSSES})


def capacity(bench: Bench):
    """The first choices are kept; an evaluation drops nothing."""
    layers(bench, lambda key: True, CAPACITY)


def bias(bench: Bench):
    """Up if an expert had less than its share, else down, by a fixed amount."""
    case = layer_case(bench)
    seed, _, _, experts = case
    counted = counts_of_a_step(seed, experts)
    load = counted[:, :-3]
    moved = 0.125 * torch.sign(load.mean(1, keepdim=True) - load)
    expected = {"biases after adjust with kind bias": moved}
    expected["biases after adjust with kind loss"] = torch.zeros_like(moved)
    bench.same(bench.ranks(1, layer_on_rank, *case), lambda r: expected)


def shared_on_rank(name: str, seed: int, b: int, s: int, experts: int) -> dict:
    """A layer whose sequences two ranks share, half each: out, and gradients summed over the ranks."""
    mesh = Mesh({"dp": 1, "cp": 2, "tp": 1}, CPU, Ledger())
    group, layer = mesh["cp"], make_layer(name, seed, s, experts)
    own = slice(group.rank * s // 2, (group.rank + 1) * s // 2)
    layer.local_tokens, layer.gather_choices = own, partial(step07.gather_in_order, group, torch.arange(s))
    x = numbers(seed, "x", b, s, 6)[:, own].clone().requires_grad_()
    out = layer(x)
    out.backward(numbers(seed, "dy", b, s, 6)[:, own].clone())
    found = {"out": out, "the gradient of x": x.grad}
    for key, param in layer.named_parameters():
        dist.all_reduce(param.grad)
        found[f"the gradient of {key}"] = param.grad
    return found


def shared_sequences(bench: Bench):
    """Two ranks share each sequence: the same losses, and the same choices are dropped."""
    case = layer_case(bench)
    s = case[2]
    for name in ("balance loss", "capacity and balance loss"):
        run, one = bench.ranks(2, shared_on_rank, name, *case), one_layer(name, *case)

        def expected(rank: int, one: dict = one) -> dict:
            own = slice(rank * s // 2, (rank + 1) * s // 2)
            local = {key: one[key][:, own] for key in ("out", "the gradient of x")}
            return local | {key: value for key, value in one.items() if "gradient of " in key and key not in local}

        bench.same(run, expected)


# --- task 4: routes and messages -------------------------------------------------------------------------------------

ROUTES = ((4, 1, True), (2, 2, True), (2, 2, False))  # ep, tp, sp


def meshes(ep: int, tp: int) -> tuple[Mesh, Any, Any]:
    """(mesh, ep group, tp group) of all ranks."""
    mesh = Mesh({"dp": dist.get_world_size() // tp, "cp": 1, "tp": tp}, CPU, Ledger())
    mesh.add("ep", ep, stride=tp)
    return mesh, mesh["ep"], mesh["tp"]


def gates_of(seed: int, tokens: int, experts: int, tp: int, sp: bool, rank: int) -> Tensor:
    """What a rank's router says; without SP the tp ranks have the same tokens."""
    return some_gates(seed, f"gates {rank if sp else rank // tp}", tokens, experts)


def routes_on_rank(seed: int, tokens: int, experts: int) -> dict:
    """find_route in three layouts of four ranks, as plain numbers."""
    found = {}
    for ep, tp, sp in ROUTES:
        mesh, ep_group, tp_group = meshes(ep, tp)
        gates = gates_of(seed, tokens, experts, tp, sp, mesh.rank).unflatten(1, (ep, -1))
        mesh.ledger.take()
        route, name = step07.find_route(gates, ep_group, tp_group, sp), f"ep {ep}, tp {tp}, sp {sp}: "
        found[f"{name}target ranks of the rows"] = route.rank
        pairs = zip(route.rank.tolist(), route.token.tolist(), strict=True)
        found[f"{name}rows, as [target rank, token]"] = sorted(pairs)
        found |= {f"{name}rows sent to each rank": [int(n) for n in route.sent]}
        found |= {f"{name}rows received from each rank": [int(n) for n in route.received]}
        found |= {f"{name}the most rows of a tp rank": int(route.most), f"{name}choices": int(route.n_choices)}
        found[f"{name}bytes sent over ep"] = sent(mesh, "ep")
    return found


def route_case(bench: Bench) -> tuple[int, ...]:
    """(seed, tokens of a rank, experts) of task 4."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.randint(4, 8), draw.choice((4, 8))


def route_expected(rank: int, ep: int, tp: int, sp: bool, seed: int, tokens: int, experts: int) -> dict[str, Any]:
    """The route from everyone's gates."""
    visits = [gates_of(seed, tokens, experts, tp, sp, r).unflatten(1, (ep, -1)) != 0 for r in range(4)]
    wanted = [v.any(-1) for v in visits]

    def came(r: int) -> list[int]:
        return [int(wanted[source].sum(0)[r // tp % ep]) for source in line(r)]

    def line(r: int) -> list[int]:
        return [i for i in range(4) if i % tp == r % tp and i // tp // ep == r // tp // ep]

    own = sorted((j, t) for t, j in wanted[rank].nonzero().tolist())
    tp_ranks = [r for r in range(4) if r // tp == rank // tp] if sp else [rank]
    choices = [int(visits[source][:, r // tp % ep].sum()) for r in tp_ranks for source in line(r)]
    return {
        "target ranks of the rows": torch.tensor([j for j, _ in own]),
        "rows, as [target rank, token]": [list(pair) for pair in own],
        "rows sent to each rank": wanted[rank].sum(0).tolist(),
        "rows received from each rank": came(rank),
        "the most rows of a tp rank": max(sum(came(r)) for r in tp_ranks),
        "choices": sum(choices),
        "bytes sent over ep": 16.0 * (ep - 1),
    }


def routes(bench: Bench, keys: tuple[str, ...]):
    """Some of a route's numbers, in all layouts."""
    case = route_case(bench)
    run = bench.ranks(4, routes_on_rank, *case)
    for ep, tp, sp in ROUTES:

        def expected(rank: int, layout: tuple = (ep, tp, sp)) -> dict:
            name, found = "ep {}, tp {}, sp {}: ".format(*layout), route_expected(rank, *layout, *case)
            return {f"{name}{key}": found[key] for key in keys}

        bench.same(run, expected)


def routes_right(bench: Bench):
    """Each row once to each rank that it visits; counts on both ends agree."""
    names = "target ranks of the rows", "rows, as [target rank, token]"
    routes(bench, (*names, "rows sent to each rank", "rows received from each rank", "bytes sent over ep"))


def routes_over_tp(bench: Bench):
    """What the tp ranks have to know of each other."""
    routes(bench, ("the most rows of a tp rank", "choices"))


KINDS = {"fp64": (torch.float64, torch.float64, 3), "bf16": (torch.bfloat16, torch.float32, 2)}
KINDS |= {"fp32": (torch.float32, torch.float32, 1), "without gates": (torch.float64, torch.float64, 0)}


def message_rows(seed: int, kind: str, rank: int, to: list[int], dim: int) -> tuple[Tensor, Tensor]:
    """(rows, gates) that a rank sends."""
    dtype, wide, k = KINDS[kind]
    return numbers(seed, f"rows {rank}", sum(to), dim).to(dtype), numbers(seed, f"gates {rank}", sum(to), k).to(wide)


def rows_between(seed: int, n: int) -> list[list[int]]:
    """Rows from each rank to each; from rank 1 to rank 0 there are none."""
    rows = numbers(seed, "rows", n, n).abs().mul(3).long()
    rows[1, 0] = 0
    return rows.tolist()


def messages_on_rank(seed: int, n: int, dim: int) -> dict:
    """A message there, and its gradients back, for four pairs of dtypes."""
    mesh, group, _ = meshes(n, 1)
    rows, r, found = rows_between(seed, n), group.rank, {}
    came = [row[r] for row in rows]
    for kind in KINDS:
        message, (own, gates) = step07.Message(group, rows[r], came), message_rows(seed, kind, r, rows[r], dim)
        mesh.ledger.take()
        (tie,) = message.leave(own, gates)
        waited = mesh.ledger.wait_seconds.get("ep", 0.0)
        found[f"{kind}: bytes sent"] = sent(mesh, "ep")
        there = message.arrive(tie)
        found |= {f"{kind}: what leave returns has elements": tie.numel(), f"{kind}: leave waits": waited > 0}
        found |= {f"{kind}: rows that arrive": there[0], f"{kind}: gates that arrive": there[1]}
        found[f"{kind}: dtypes"] = [str(x.dtype) for x in there]
        (tie,) = message.leave(*there, back=True)  # as gradients would be
        back = message.arrive(tie)
        found |= {f"{kind}: rows that came back": back[0], f"{kind}: gates that came back": back[1]}
    return found


def message_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, dim) of task 4."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.choice((3, 4)), 4 * draw.randint(1, 3)


def messages_arrive(bench: Bench):
    """Bit by bit, in order, and back."""
    case = message_case(bench)
    seed, n, dim = case
    rows = rows_between(seed, n)
    everyone = {kind: [message_rows(seed, kind, r, rows[r], dim) for r in range(n)] for kind in KINDS}

    def expected(rank: int) -> dict:
        found: dict[str, Any] = {}
        for kind, pairs in everyone.items():
            pieces = [[t.split(rows[source])[rank] for t in pairs[source]] for source in range(n)]
            there = [torch.cat(part) for part in zip(*pieces, strict=True)]
            found |= {f"{kind}: rows that arrive": there[0], f"{kind}: gates that arrive": there[1]}
            found[f"{kind}: dtypes"] = [str(t.dtype) for t in there]
            found |= {f"{kind}: rows that came back": pairs[rank][0], f"{kind}: gates that came back": pairs[rank][1]}
        return found

    bench.same(bench.ranks(n, messages_on_rank, *case), expected, 0.0)


def messages_travel(bench: Bench):
    """One message, under way when `leave` returns, and no byte too many."""
    case = message_case(bench)
    seed, n, dim = case
    rows = rows_between(seed, n)

    def expected(rank: int) -> dict:
        others, found = sum(to for r, to in enumerate(rows[rank]) if r != rank), {}
        for kind, (dtype, wide, k) in KINDS.items():
            found[f"{kind}: bytes sent"] = float(others * (dim * dtype.itemsize + k * wide.itemsize))
            found |= {f"{kind}: what leave returns has elements": 0, f"{kind}: leave waits": False}
        return found

    bench.same(bench.ranks(n, messages_on_rank, *case), expected)


# --- task 5: dispatch and combine ------------------------------------------------------------------------------------


def dealt_on_rank(
    mode: str, ep: int, tp: int, sp: int, seed: int, tokens: int, experts: int, dim: int, width: int
) -> dict:
    """ExpertParallel: outputs, gradients, bytes, and what has happened before the result is asked for."""
    mesh, ep_group, tp_group = meshes(ep, tp)
    local = moe.Experts(shape(dim, experts // ep, 2, expert_dim=width // tp))
    linears = local.gate_proj, local.up_proj, local.down_proj
    for linear, whole, axis in zip(linears, expert_weights(seed, experts, dim, width), (1, 1, 2), strict=True):
        linear.weight = nn.Parameter(whole.chunk(ep)[ep_group.rank].chunk(tp, axis)[tp_group.rank].clone())
    gates = gates_of(seed, tokens, experts, tp, bool(sp), mesh.rank).requires_grad_()
    source = mesh.rank if sp else mesh.rank // tp
    x, arrived, right = numbers(seed, f"x {source}", tokens, dim).requires_grad_(), [], step07.Message.arrive

    def arrive(self: Any, *args: Any) -> Any:
        arrived.append(1)
        return right(self, *args)

    run = step07.ExpertParallel(ep_group, tp_group, bool(sp), mode)
    mesh.ledger.take()
    with mock.patch.object(step07.Message, "arrive", arrive):
        finish = run(local, x, gates)
        early = len(arrived)
        posted = mesh.ledger.calls.get(("ep", "all_to_all"), 0)
        out = finish()
        out.backward(numbers(seed, f"dy {source}", tokens, dim))
    found: dict[str, Any] = {"bytes sent over ep": sent(mesh, "ep"), "out": out, "the gradient of x": x.grad}
    found["the gradient of the gates"] = torch.zeros_like(gates) if gates.grad is None else gates.grad
    found |= {"messages that left before the result was asked for": posted}
    found |= {"messages that arrived before the result was asked for": early}
    for name, linear in zip(KEYS, linears, strict=True):
        found[f"the gradient of the {name} weights"] = linear.weight.grad
    return found


def dealt_case(bench: Bench) -> tuple[int, ...]:
    """(seed, tokens of a rank, experts, dim, width) of task 5."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.randint(4, 8), draw.choice((4, 8)), draw.randint(3, 6), 2 * draw.randint(2, 3)


def dealt(bench: Bench, n: int, mode: str, ep: int, tp: int, sp: bool, keys: Any):
    """Numbers of one layout are those of all experts on one device; `keys`: which numbers."""
    case = dealt_case(bench)
    seed, tokens, experts, dim, width = case
    sources = range(n) if sp else range(n // tp)
    inputs = [[numbers(seed, f"{name} {r}", tokens, dim) for r in sources] for name in ("x", "dy")]
    gates = [some_gates(seed, f"gates {r}", tokens, experts) for r in sources]
    whole = torch.cat(inputs[0]), torch.cat(gates), torch.cat(inputs[1])
    found = mixture_and_gradients(*whole, expert_weights(seed, experts, dim, width))

    def expected(rank: int) -> dict:
        source = rank if sp else rank // tp
        own = slice(source * tokens, (source + 1) * tokens)
        names = "out", "the gradient of x", "the gradient of the gates"
        right = {name: whole[own] for name, whole in zip(names, found, strict=False)}
        for name, grad, axis in zip(KEYS, found[3:], (1, 1, 2), strict=True):
            part = grad.chunk(ep)[rank // tp % ep].chunk(tp, axis)[rank % tp]
            right[f"the gradient of the {name} weights"] = part
        return {key: value for key, value in right.items() if keys(key)}

    bench.same(bench.ranks(n, dealt_on_rank, mode, ep, tp, int(sp), *case), expected)


def dealt_outputs(bench: Bench):
    """Dispatch, experts, combine."""
    dealt(bench, 4, "alltoall", 4, 1, True, lambda key: key == "out")


def dealt_gradients(bench: Bench):
    """Backward, through both journeys."""
    dealt(bench, 4, "alltoall", 4, 1, True, lambda key: key != "out")


def gathered(bench: Bench):
    """--ep-mode allgather, forward and backward."""
    dealt(bench, 3 if dealt_case(bench)[2] % 3 == 0 else 2, "allgather", 2, 1, True, lambda key: True)


def dealt_over_tp(bench: Bench):
    """With experts cut over tp as well, with and without SP."""
    for sp in (True, False):
        dealt(bench, 4, "alltoall", 2, 2, sp, lambda key: True)


def dealt_bytes(bench: Bench):
    """The docstring's bytes, given where the rows went; they travel while shared experts may compute."""
    case = dealt_case(bench)
    seed, tokens, experts, dim, _ = case
    n = 4
    visits = [some_gates(seed, f"gates {r}", tokens, experts).unflatten(1, (n, -1)) != 0 for r in range(n)]
    wanted = [visit.any(-1).sum(0) for visit in visits]

    def expected(rank: int) -> dict:
        away = int(wanted[rank].sum() - wanted[rank][rank])
        came = int(sum(wanted[r][rank] for r in range(n) if r != rank))
        sent_bytes = float((away + came) * (2 * dim + experts // n) * 8 + 16 * (n - 1))
        found = {"messages that left before the result was asked for": 1, "bytes sent over ep": sent_bytes}
        return found | {"messages that arrived before the result was asked for": 0}

    bench.same(bench.ranks(n, dealt_on_rank, "alltoall", n, 1, 1, *case), expected)


# --- task 6: the layout of experts -----------------------------------------------------------------------------------

LAYOUTS = ((2, 1, 2, True), (2, 2, 1, True), (1, 2, 2, True), (1, 2, 2, False))  # dp, cp, tp of four ranks, and sp


def records_on_rank(mode: str, experts: int, seed: int) -> dict:
    """Records, groups, and what each MoE layer was given, with experts on two ranks in four layouts; and counts."""
    found: dict[str, Any] = {}
    for *sizes, sp in LAYOUTS:
        name = "dp {} x cp {} x tp {}, sp {}: ".format(*sizes, sp)
        mesh = Mesh(dict(zip(("pp", "dp", "cp", "tp"), (1, *sizes), strict=True)), CPU, Ledger())
        config = step07.Config(**SMALL | RUN | dict(experts=experts, cp_mode=mode, sp=sp, n_layers=1, seq_len=8))
        m = config.model_config()
        balance = moe.Balance(m, 1, CPU)
        with torch.device("meta"):
            model = Decoder(m)
            moe.add_experts(model, balance)
        step07.shard_experts(model, mesh, config, 2)
        mesh.add("data", sizes[0] * sizes[1], stride=sizes[2])
        for key, param in model.named_parameters():
            if ".mlp." in key:
                record = layout_of(param)
                cuts = [f"dim {c.dim} over {c.over}: {c.start}-{c.stop - 1}" for c in record.splits]
                found[f"{name}how many data ranks sum the gradient of {key}"] = step03.replica_group(param, mesh).size
                found |= {f"{name}the cuts of {key}": "; ".join(cuts), f"{name}the shape of {key}": list(param.shape)}
                others = sorted({*record.partial_over} - {"expert_data"})
                found[f"{name}other dimensions that sum the gradient of {key}"] = others
        for group in ("ep", "expert_data", "sequence"):
            here = torch.zeros(4, dtype=torch.int64).scatter_(0, torch.tensor([mesh.rank]), 1)
            if mesh[group].size > 1:
                dist.all_reduce(here, group=mesh[group].handle)
            found[f"{name}the ranks of {group}, as 0 or 1"] = here
        layer = model.model.layers["0"].mlp
        run, length = layer.run_experts, m.seq_len // mesh["sequence"].size
        groups = f"ep {run.ep.size} tp {run.tp.size}"
        found[f"{name}what runs the experts"] = f"{type(run).__name__} {run.mode} sp {run.sp} {groups}"
        places = torch.arange(m.seq_len)[layer.local_tokens]
        found[f"{name}positions of the layer's tokens"] = places
        everyone = numbers(seed, "choices", 2, m.seq_len, 2).abs().mul(100).long()
        if len(places) == length:
            found[f"{name}all choices, gathered"] = layer.gather_choices(everyone[:, places]).long()
        source = mesh.rank if sp else mesh.rank // sizes[2]
        balance.counted += numbers(seed, f"counted {source}", *balance.counted.shape)
        found[f"{name}counts of all ranks"] = step07.take_counts(balance, mesh, sp)
        found[f"{name}counts after they were taken"] = balance.counted
    return found


def record_case(bench: Bench) -> tuple:
    """(cp mode, experts, seed) of task 6."""
    draw = bench.draws()
    return draw.choice(("zigzag", "ring")), draw.choice((4, 6)), draw.randrange(10**6)


def records(bench: Bench, keys: Any = lambda key: "counts" not in key and "all choices" not in key):
    """Each parameter, group and layer is as in the project."""
    case = record_case(bench)
    right = bench.ranks(4, records_on_rank, *case, project=True).answers
    run = bench.ranks(4, records_on_rank, *case)
    bench.same(run, lambda r: {key: value for key, value in right[r].items() if keys(key)})


def choices_gathered(bench: Bench):
    """All ranks' choices, in the order of the sequence."""
    records(bench, lambda key: "all choices" in key)


def counts_taken(bench: Bench):
    """Summed over the ranks that counted other tokens."""
    records(bench, lambda key: "counts" in key)


def trains(bench: Bench):
    """Two steps with experts on two ranks are one device's: over cp, over tp with SP, and over dp."""
    draw = bench.draws()
    base = RUN | dict(seed=draw.randrange(1000), capacity_factor=draw.choice((0.0, 1.0)))
    layout = dict(cp=1, tp=2, ep=2, zero=draw.choice((0, 1)))
    training.equal_to_one_device(bench, "step07_moe_ep", 4, base, layout, ALONE)


# --- the file as it stands -------------------------------------------------------------------------------------------


def picture_run() -> dict:
    """Runs on every rank: losses, bytes sent in the last step, and loads of experts by kind of balance."""
    found: dict[str, Any] = training.pictured("step07_moe_ep", json.dumps(RUN | WHOLE[1]))
    for kind, more in BALANCES.items():
        options = RUN | WHOLE[1] | dict(steps=30, balance=kind, optimizer="adamw", lr=0.02) | more
        with without_instruments():
            history = step07.train(step07.Config(**SMALL | options | dict(out="run"))).history
        found[f"{kind}: busiest"] = [
            max(len(load) * max(load) for load in row["expert_load"].values()) for row in history
        ]
    return found


BALANCES: dict[str, dict] = {"none": {}, "loss": dict(balance_weight=0.1), "bias": dict(bias_speed=0.01)}


def busiest(runs: list[dict]) -> Any:
    """A figure: the load of the busiest expert over the steps, with each kind of balance."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.5))
    for kind in BALANCES:
        loads = runs[0][f"{kind}: busiest"]
        axis.plot(range(1, len(loads) + 1), loads, label=f"--balance {kind}")
    axis.set(xlabel="step", ylabel="tokens of the busiest expert / mean", title="2 ranks with 4 experts each")
    axis.legend()
    return figure


PICTURES = [busiest]
