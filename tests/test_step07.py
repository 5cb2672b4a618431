"""Chapter 7, experts: what each function of step07_moe_ep.py must do. tests/__init__.py explains
the helpers.

Step 1 has no experts. So this file implements the layer once more, directly by its definition
(`Plain`), and uses it in step 1's model and loop (`train`, below). All layouts, and step 7 in one
process, must train to the same numbers.
"""

from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import step01_single_gpu as step01
import step07_moe_ep as step
from common import UserError
from common.comm import Group, Mesh
from common.data import Data
from common.layout import layout_of
from common.model import IGNORE, Decoder, ModelConfig
from common.trainer import Run
from step04_tp_sp import shard_tensors
from step05_cp_ring import CONTEXT, shard_context
from tests.equal import BASE, SHAPE, STEP1, Watch, close, decoder, draw, equals_step1
from tests.equal import train as train_with
from tests.tape import Tape

ranks, task, cases = pytest.mark.ranks, pytest.mark.task, pytest.mark.parametrize
S7, Config = "step07_moe_ep", step.Config


# --- The layer by its definition, and step 1 with it ----------------------------------------------------------------


def mlp(x: Tensor, experts: nn.Module, e: int) -> Tensor:
    """The output of expert e for x."""
    gate, up, down = (linear.weight[e] for linear in experts.children())
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


class Plain(nn.Module):
    """An MoE layer: every expert computes every token; unchosen experts have score 0. `loss`: the
    auxiliary loss.
    """

    def __init__(self, dim: int, width: int, config: Config):
        super().__init__()
        self.k, self.n = config.experts_per_token, config.experts
        # Weights
        self.router, self.experts = (
            nn.Linear(dim, self.n, bias=False),
            step.Experts(self.n, dim, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, dim], a whole micro-batch -> the output, of the same shape. Sets `loss`."""
        p = (x @ self.router.weight.T).softmax(-1)
        chosen = (p >= p.sort(descending=True)[0][..., self.k - 1, None]).to(p.dtype)
        scores = p * chosen / (1 if self.k == 1 else (p * chosen).sum(-1, keepdim=True))
        self.loss = self.n * (chosen.mean((0, 1)) / self.k * p.mean((0, 1))).sum()
        return sum(scores[..., e, None] * mlp(x, self.experts, e) for e in range(self.n))


def train(config: Config, run: Run):
    """Step 1's `train`, where `Plain` layers replace MLPs and add their auxiliary loss, averaged
    over micro-batches.
    """
    seen, plain = [], Data.batch

    def batch(data: Data, number: int) -> tuple[Tensor, Tensor]:
        seen.append(plain(data, number))
        return seen[-1]

    def with_experts(shape: ModelConfig) -> Decoder:
        model, n_micro_batches = Decoder(shape), config.global_batch_size / config.micro_batch_size
        layers = list(model.model.layers.values())[
            config.dense_layers + config.moe_every - 1 :: config.moe_every
        ]
        for layer in layers:
            layer.mlp = Plain(shape.dim, shape.ffn_dim, config)

        def add(_model: Decoder, _given: tuple, loss: Tensor) -> Tensor:
            n_targets = int((seen[-1][1] != IGNORE).sum())  # step 1's `train` divides by it
            more = (
                config.aux_loss_coeff
                / n_micro_batches
                * n_targets
                * sum(layer.mlp.loss for layer in layers)
            )
            return loss + more - more.detach()  # the shown loss excludes it

        model.register_forward_hook(add)
        return model

    with (
        mock.patch.object(step01, "Decoder", with_experts),
        mock.patch.object(Data, "batch", batch),
    ):
        step01.train(config, run)


# --- Experts side by side, and the layer ----------------------------------------------------------------------------


def config(**flags) -> Config:
    """Flags for five experts, a strong auxiliary loss and 12 micro-batches."""
    return Config(**BASE | dict(experts=5, aux_loss_coeff=0.3) | flags)


def filled(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Fill the parameters with values that follow from their names and shapes."""
    for name, param in module.named_parameters():
        param.data = (draw(name, 0, *param.shape) * 0.5).to(dtype)
    return module


def layer(dim: int = 6, width: int = 10, dtype: torch.dtype = torch.float64, **flags) -> step.MoE:
    """An MoE layer in a group of one rank."""
    alone = dict(sequence=Group("sequence", 0, 1, None))
    return filled(step.LossBalancedMoE(dim, width, config(**flags), alone), dtype)


def grads(y: Tensor, dy: Tensor, x: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """The gradients of x and of all weights, zero where a weight was not used."""
    names, leaves = ["x", *dict(module.named_parameters())], [x, *module.parameters()]
    return dict(zip(names, torch.autograd.grad(y, leaves, dy, materialize_grads=True), strict=True))


@task("experts", 5)
@cases("counts", [[3, 0, 5], [0, 0, 4], [2, 1, 1], [0, 0, 0]])
def test_experts(counts):
    """Rows, sorted by expert, go through their experts. An expert without rows has a gradient of
    zero, not None.
    """
    experts, given = filled(step.Experts(3, 6, 10)), torch.tensor(counts)
    x, dy = (draw(name, 0, sum(counts), 6).requires_grad_(name == "x") for name in ("x", "dy"))
    y = experts(x, given)
    expected = torch.cat([mlp(rows, experts, e) for e, rows in enumerate(x.split(counts))])
    close(y, expected, "the outputs")
    y.backward(dy)
    found = dict(x=x.grad) | {name: param.grad for name, param in experts.named_parameters()}
    for name, value in grads(expected, dy, x, experts).items():
        close(found[name], value, f"the gradient of {name}")
    close(given.tolist(), counts, "the counts after the call")


# Few: expert 4 gets no token; alike: equal tokens
WAYS = {"many": (2, 7, 6), "few": (1, 1, 6), "alike": (1, 1, 6)}


@task("layer", 6)
@cases("k", [1, 2, 4])
@cases("way", WAYS)
def test_a_layer_is_its_definition(way, k):
    """Output and gradients are those of `Plain`, with the auxiliary loss times coefficient / 12 (12
    micro-batches).
    """
    ours, theirs = layer(experts_per_token=k), filled(Plain(6, 10, config(experts_per_token=k)))
    given = -draw("x", 0, *WAYS[way]).repeat(*((2, 7, 1) if way == "alike" else (1, 1, 1)))
    x, dy = given.clone().requires_grad_(), draw("dy", 0, *given.shape)
    y, expected = ours(x), theirs(x)
    close(y, expected, "the output")
    close(x, given, "the input after the call")
    found, total = grads(y, dy, x, ours), (expected * dy).sum() + 0.3 / 12 * theirs.loss
    for name, value in grads(total, torch.ones_like(total), x, theirs).items():
        close(found[name], value, f"the gradient of {name}")


@task("balance", 1)
def test_aux_loss_by_hand():
    """aux_loss is E sum_e f_e P_e, to 1e-10 in fp64, for 7 tokens that choose two experts each."""
    p, counts = draw("p", 0, 7, 5).softmax(-1), torch.tensor([3, 4, 0, 5, 2])
    expected = 5 * sum(
        n / 14 * share for n, share in zip(counts.tolist(), p.mean(0).tolist(), strict=True)
    )
    close(layer().aux_loss(p, counts), expected, "the auxiliary loss")


@task("layer", 3)
def test_a_layer_is_mixtrals():
    """Output and gradients equal those of Mixtral in transformers. Mixtral's auxiliary loss is
    top_k times ours.
    """
    from transformers.models.mixtral import modeling_mixtral as hf

    sizes = dict(hidden_size=6, intermediate_size=10, num_experts_per_tok=2, num_local_experts=5)
    ours, theirs = layer(), hf.MixtralSparseMoeBlock(hf.MixtralConfig(**sizes)).double()

    def renamed(router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
        return {
            "gate.weight": router,
            "experts.gate_up_proj": torch.cat((gate, up), 1),
            "experts.down_proj": down,
        }

    theirs.load_state_dict(renamed(*ours.state_dict().values()))
    x, dy = draw("x", 0, 2, 8, 6).requires_grad_(), draw("dy", 0, 2, 8, 6)
    dx, *found = grads(y := ours(x), dy, x, ours).values()
    with mock.patch.object(Tensor, "float", Tensor.double):  # transformers routes in fp32
        total = (theirs(x) * dy).sum() + 0.3 / 12 / 2 * hf.load_balancing_loss_func(
            (theirs.gate(x)[0],), 5, 2
        )
        close(y, theirs(x), "the output")
    found = dict(x=dx) | renamed(*found)
    for name, value in grads(total, torch.ones_like(total), x, theirs).items():
        close(found[name], value, f"the gradient of {name}")


@task("layer", 3)
def test_a_layer_of_bf16_routes_in_fp32():
    """Routing is in fp32: in bf16, ties among 64 scores would select other experts. Results are
    rounded once.
    """
    ours, x = layer(32, 8, torch.bfloat16, experts=64), draw("x", 0, 4, 64, 32).bfloat16()
    p = (x.flatten(0, 1).float() @ ours.router.weight.float().T).softmax(-1)
    best = p.sort(descending=True)[1][:, :2]
    scores = p.gather(1, best) / p.gather(1, best).sum(1, keepdim=True)
    # [tokens, experts, dim], bf16
    outs = torch.stack([mlp(x.flatten(0, 1), ours.experts, e) for e in range(64)], 1)
    expected = (outs[torch.arange(256)[:, None], best] * scores[..., None]).sum(1)
    y, dy = ours(x), draw("dy", 0, 256, 32).bfloat16()
    close(y.dtype, torch.bfloat16, "dtype of the output")
    # Rounded scores would be 1e-3 off
    close(y, expected.bfloat16().view_as(y), "the output", bound=5e-4)
    f = F.one_hot(best.flatten(), 64).sum(0) / best.numel()
    total = (expected * dy.float()).sum() + 0.3 / 12 * 64 * (f * p.mean(0)).sum()
    found, expected = (
        torch.autograd.grad(z, ours.router.weight, d)[0]
        for z, d in ((y, dy.view_as(y)), (total, None))
    )
    close(found, expected, "the gradient of the router", bound=5e-4)


@task("layer", 2)
def test_equal_scores():
    """With equal scores, a token visits K different experts, each with weight 1/K. A second call
    repeats the output.
    """
    ours, x = layer(), draw("x", 0, 2, 8, 6)
    ours.router.weight.data.zero_()
    y, outs = ours(x), [mlp(x, ours.experts, e) for e in range(5)]
    pairs = torch.stack([(outs[a] + outs[b]) / 2 for a in range(5) for b in range(a)])
    close(
        (pairs - y).abs().amax(-1).amin(0),
        torch.zeros(2, 8).double(),
        "distance to the nearest pair of experts",
    )
    close(ours(x), y, "the output of a second call")


# --- The load-balancing auxiliary loss ------------------------------------------------------------------------------


@ranks(4)
@task("balance", 6)
def test_aux_loss():
    """After one all-reduce of counts, the terms of four ranks sum to the auxiliary loss of all
    their 32 tokens.
    """
    mesh = Mesh(cp=2, tp=2)
    mesh.join("sequence", "cp", "tp", urgent=False)
    p = (draw("p", 0, 32, 5) * 2).softmax(-1).requires_grad_()
    chosen, here = F.one_hot(p.topk(2)[1], 5).sum(1), slice(8 * mesh.rank, 8 * mesh.rank + 8)
    expected = 5 * (chosen.double().mean(0) / 2 * p.mean(0)).sum()
    own, counts = p.detach()[here].clone().requires_grad_(), chosen[here].sum(0)
    with Tape() as tape:
        term = step.LossBalancedMoE(6, 10, config(), mesh).aux_loss(own, counts)
    close(counts.tolist(), chosen[here].sum(0).tolist(), "the given counts after the call")
    dist.all_reduce(total := term.detach().clone())
    close(total, expected, "the sum of all ranks' terms", 4)
    (found,), (expected,) = torch.autograd.grad(term, own), torch.autograd.grad(expected, p)
    close(found, expected[here], "the gradient of this rank's p", 4)
    close(
        (tape.started, tape.left),
        ([("allreduce", 3 * 40 // 2)], []),
        "calls with bytes; those never waited for",
    )


@task("balance", 2)
@cases("dtype", [torch.float64, torch.bfloat16])
def test_add_loss(dtype):
    """The output is x. In backward, the gradient of x is dy, and that of the loss is `coeff`,
    whatever dy is.
    """
    x, dy = (draw(name, 0, 2, 3, dtype=dtype).requires_grad_(name == "x") for name in ("x", "dy"))
    loss = torch.tensor(2.0, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    (y := step.AddLoss.apply(x, loss, 0.3)).backward(dy)
    close(torch.stack((y, x.grad)), torch.stack((x, dy)), "the output, and the gradient of x")
    close(loss.grad, torch.tensor(0.3, dtype=loss.dtype), "the gradient of the loss")


@task("balance", 2)
def test_bias_is_added_to_the_choice_alone():
    """With biases 9 for experts 1 and 3, each token visits these two, with the scores of its p."""
    alone = dict(stage=Group("stage", 0, 1, None))
    moe = step.BiasBalancedMoE(6, 10, config(balance="bias", bias_rate=0.5), alone).double()
    moe.bias[[1, 3]] = 9.0
    p = draw("p", 0, 7, 5).softmax(-1)
    ids = moe.choose(p)
    close(ids.sort().values.tolist(), [[1, 3]] * 7, "the chosen experts")
    expected = p.gather(1, ids) / p.gather(1, ids).sum(1, keepdim=True)
    close(moe.score(p, ids), expected, "the scores")


@task("balance", 2)
def test_bias_moves_by_the_rate_towards_the_mean_load():
    """Loads 6, 1, 3, 2, 3 (mean 3): biases -0.5, 0.5, 0, 0.5, 0; the loads start anew."""
    alone = dict(stage=Group("stage", 0, 1, None))
    moe = step.BiasBalancedMoE(6, 10, config(balance="bias", bias_rate=0.5), alone)
    moe.balance(torch.zeros(1), torch.zeros(1), torch.tensor([4, 1, 0, 1, 3]))
    moe.balance(torch.zeros(1), torch.zeros(1), torch.tensor([2, 0, 3, 1, 0]))
    moe.end_step()
    close(moe.bias.tolist(), [-0.5, 0.5, 0.0, 0.5, 0.0], "the biases")
    close(moe.load_E.tolist(), [0.0] * 5, "the loads")


def counts_of_two_forwards(keep: list) -> tuple[list, list]:
    """Rows of each expert in the forward and in its recomputation, which breaks ties differently."""
    mesh = Mesh(pp=1, dp=1, cp=1, tp=1)
    settings = config(recompute="full", experts_per_token=1, experts=5, global_batch_size=2)
    model = decoder(lambda model: step.shard_experts(model, mesh, settings), n_layers=1)
    moe = model.model.layers["0"].mlp
    moe.router.weight.data.zero_()  # all p are equal
    step.set_up_layers(model, settings, keep)
    seen = []
    plain = moe.probabilities

    def nudged(x: Tensor) -> Tensor:
        nudge = torch.zeros(5, dtype=x.dtype)
        nudge[len(seen)] = 1e-6  # rounding that prefers expert 0, then expert 1
        return plain(x) + nudge

    def recorded(rows: Tensor, counts: Tensor) -> Tensor:
        seen.append(counts.tolist())
        return step.Experts.forward(moe.experts, rows, counts)

    moe.probabilities = nudged
    moe.experts.forward = recorded
    model(torch.zeros(2, 6).long(), torch.zeros(2, 6).long()).backward()
    return seen[0], seen[1]


def test_recomputation_keeps_the_chosen_experts():
    """A forward that runs again and breaks a tie differently would send other numbers of rows."""
    close(counts_of_two_forwards([torch.ops.aten.topk.default]), ([12, 0, 0, 0, 0],) * 2, "kept")
    with pytest.raises(Exception):  # noqa: B017 (PyTorch's, about shapes that differ)
        assert counts_of_two_forwards([])[0] == counts_of_two_forwards([])[1]


# --- Dispatch and combine -------------------------------------------------------------------------------------------


# Rows that each of three ranks sends to each expert; every rank holds two of the six experts.
ROUTES = {
    "uneven": [[2, 0, 1, 3, 0, 1], [1, 2, 2, 0, 3, 0], [1, 4, 0, 2, 0, 1]],
    "nothing to send": [[2, 0, 1, 3, 0, 1], [0, 0, 0, 0, 0, 0], [1, 4, 0, 2, 0, 0]],
    "all to one expert": [[0, 0, 5, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 7, 0, 0, 0]],
}


def apart(way: str) -> tuple[Group, Tensor, list[Tensor]]:
    """Return this rank's group ({0} or {1, 2, 3}), row counts [sender, receiver, its expert], and
    each rank's rows.
    """
    mesh = Mesh(dp=4)
    for row in ([0], [1, 2, 3]):
        mesh.add_groups("ep", np.array([row]), urgent=False)
    n = mesh["ep"].size
    routes = torch.tensor(ROUTES[way])[:n, : 2 * n].view(n, n, 2)
    return (
        mesh["ep"],
        routes,
        [draw("x", r, int(routes[r].sum()), 5).requires_grad_() for r in range(n)],
    )


@ranks(4)
@task("dispatch", 6)
@cases("way", ROUTES)
def test_dispatch_and_combine(way):
    """Rows go to their experts' ranks, where they are sorted by expert; outputs return to the
    places of their rows.
    """
    group, routes, rows = apart(way)
    n, rank, stay = group.size, group.rank, int(routes[group.rank, group.rank].sum())
    blocks = [rows[r].detach().split(routes[r].flatten().tolist()) for r in range(n)]
    here, there = (
        rows[rank].detach(),
        torch.cat([blocks[r][2 * rank + e] for e in range(2) for r in range(n)]),
    )
    for function, given, expected in (step.dispatch, here, there), (step.combine, there, here):
        for x in given.clone(), given.T.contiguous().T:
            with Tape() as tape:
                found = function(
                    x, group, leaving_Ge=routes[rank].clone(), arriving_Ge=routes[:, rank].clone()
                )
            close(found, expected, f"the output of {function.__name__}", n)
            close(x, given, "the input after the call")
            sent = [("alltoallbase", 40 * (len(given) - stay))] if n > 1 else []
            close(
                (tape.started, tape.left),
                (sent, []),
                "calls with bytes, and calls never waited for",
            )


@ranks(4)
@task("dispatch", 8)
@cases("way", ROUTES)
def test_visit_experts(way):
    """Outputs are as if this rank held all experts; gradients of experts are sums over the rows of
    all ranks.
    """
    group, routes, rows = apart(way)
    n, rank = group.size, group.rank
    here, there = int(routes[rank].sum()), int(routes[:, rank].sum())
    whole, ours, outs = filled(step.Experts(2 * n, 5, 4)), step.Experts(2, 5, 4), []
    for mine, full in zip(ours.parameters(), whole.parameters(), strict=True):
        mine.data = full.data[2 * rank : 2 * rank + 2].clone()
    for some, route in zip(rows, routes, strict=True):
        outs.append(
            torch.cat(
                [mlp(x, whole, e) for e, x in enumerate(some.split(route.flatten().tolist()))]
            )
        )
    sum((out * draw("dy", r, *out.shape)).sum() for r, out in enumerate(outs)).backward()
    x, counts = rows[rank].detach().clone().requires_grad_(), routes[rank].flatten()
    with Tape() as tape:
        close(y := step.visit_experts(ours, group, x, counts), outs[rank], "the outputs", n)
        calls = len(tape.started)
        y.backward(draw("dy", rank, *y.shape))
    close(x.grad, rows[rank].grad, "the gradient of the rows", n)
    for (name, param), full in zip(ours.named_parameters(), whole.parameters(), strict=True):
        close(param.grad, full.grad[2 * rank : 2 * rank + 2], f"the gradient of {name}", n)
    close(counts.tolist(), routes[rank].flatten().tolist(), "the counts after the call")
    out, back = (40 * (rows - int(routes[rank, rank].sum())) for rows in (here, there))
    sent = [2 * (n - 1) * 8, out, back, out, back] if n > 1 else []
    close(
        ([size for _, size in tape.started], calls),
        (sent, 3 * (n > 1)),
        "bytes: counts, rows, outputs; backward",
    )
    close(tape.left, [], "collectives that were never waited for")


# --- Which rank has which experts -----------------------------------------------------------------------------------


def sharded(
    sizes: dict[str, int], sp: bool = True, seq_len: int = 16, **flags
) -> tuple[Mesh, nn.ModuleDict]:
    """The mesh, and five layers on the meta device, sharded as `train` shards them."""
    mesh = Mesh(**dict(pp=1, dp=1, cp=1, tp=1) | sizes)
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SHAPE | dict(n_layers=5, seq_len=seq_len)))
    shard_tensors(model, mesh, sp)
    shard_context(model, mesh, CONTEXT["zigzag"], sp)
    step.shard_experts(model, mesh, config(**dict(experts=8, sp=sp, pp=mesh["pp"].size) | flags))
    return mesh, model.model.layers


GROUPS = [
    (dict(dp=2, tp=2), 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),  # the ranks of tp share the experts
    (dict(pp=2, cp=2), 2, [[0, 1], [2, 3]], [[0], [1], [2], [3]]),  # an ep group is within a stage
    (dict(dp=4), 1, [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
    (dict(cp=2, tp=2), 4, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
]


@ranks(4)
@task("groups", 4)
@cases("sizes, ep, groups, columns", GROUPS)
def test_groups(sizes, ep, groups, columns):
    """Ranks of ep hold different experts, and ranks of expert_data the same ones. Records name the
    right groups.
    """
    mesh, layers = sharded(sizes, ep=ep)
    length = mesh["cp"].size * mesh["tp"].size
    rows = dict(
        ep=groups, expert_data=columns, sequence=[range(r, r + length) for r in range(0, 4, length)]
    )
    for name in rows:
        row, group = next(list(row) for row in rows[name] if mesh.rank in row), mesh[name]
        found = dist.get_process_group_ranks(group.handle) if group.size > 1 else [mesh.rank]
        close(
            (found, group.rank),
            (row, row.index(mesh.rank)),
            f"the ranks of {name}, and this one's number",
        )
    here, n = mesh["ep"].rank, 8 // ep
    for name, param in layers["1"].mlp.named_parameters():
        record, router = layout_of(param), "router" in name
        found = [(s.dim, s.over, s.start, s.stop, s.full) for s in record.shards]
        close(
            found,
            [] if router or ep == 1 else [(0, "ep", here * n, here * n + n, 8)],
            f"shards of {name}",
        )
        expected = (8, "data", ("tp",)) if router else (n, "expert_data", ())
        close(
            (len(param), record.data_dim, record.partial_over),
            expected,
            f"{name}: length, data_dim, partial_over",
        )


@ranks(4)
@task("groups", 2)
@cases(
    "flags, some",
    [({}, "01234"), (dict(moe_every=2), "13"), (dict(moe_every=2, dense_layers=2), "3")],
)
def test_which_layers_have_experts(flags, some):
    """--moe-every starts to count after the --dense-layers. Layers without experts keep an MLP,
    sharded over tp.
    """
    _, layers = sharded(dict(dp=2, tp=2), ep=2, expert_dim=20, **flags)
    for i, one in layers.items():
        linear, shape = (
            (one.mlp.experts.gate_proj, (4, 20, 32)) if i in some else (one.mlp.gate_proj, (24, 32))
        )
        close(tuple(linear.weight.shape), shape, f"layer {i}: the shape of gate_proj")


MISTAKES = [
    (dict(ep=3, experts=6), "--ep 3"),  # does not divide 4 ranks
    (dict(ep=4, experts=6), "--experts 6"),
    (dict(experts=3, experts_per_token=4), "--experts-per-token 4"),
    (dict(dense_layers=4, moe_every=2), "--dense-layers 4"),  # of 5 layers
    (dict(micro_batch_size=4), "--micro-batch-size"),  # does not divide 6 sequences
    (dict(sp=False, seq_len=15), "--no-sp"),
]


@ranks(4)
@task("groups", 3)
@cases("flags, said", MISTAKES)
def test_a_mistake_is_one_line(flags, said):
    """Every rank raises a UserError of one line before anything is sent."""
    with Tape() as tape, pytest.raises(UserError, match=said) as error:
        sharded(dict(dp=2, tp=2), **flags)
    close((str(error.value).count("\n"), tape.started), (0, []), "further lines, and collectives")


# --- The loop -------------------------------------------------------------------------------------------------------


def bytes_of(flags: dict) -> tuple[dict, int]:
    """The bytes that a rank sends in a step, by dimension, and how many of its rows go to other
    ranks' experts.
    """
    away, plain = [], step.DISPATCH["alltoall"]

    def spy(experts, group, rows, counts):
        away.append(len(rows) - int(counts.view(group.size, -1)[group.rank].sum()))
        return plain(experts, group, rows, counts)

    train_with(S7, dict(steps=1))  # creates the preset "test"
    flags = BASE | dict(model="test", steps=1, ep=2, experts=4) | flags
    with Watch(Config(**flags)) as run, mock.patch.dict(step.DISPATCH, alltoall=spy):
        step.train(run.config, run)
    return run.history[0]["sent"], sum(away)


@cases("flags, again", [({}, 1), (dict(recompute="full"), 2), (dict(experts_per_token=4), 1)])
def test_law_of_bytes(pools, flags, again):
    """Over ep, ranks send counts, rows, outputs and gradients. Recomputation sends again what the
    forward sends.
    """
    found, passes = pools(4).run(bytes_of, flags), 3 * 3  # layers, micro-batches
    rest = (
        sum(p.numel() for name, p in decoder(**SHAPE).named_parameters() if "mlp" not in name)
        + 3 * 4 * 32
    )
    for sent, rows in found:
        experts = 3 * 2 * 3 * 32 * 48 * 8  # 3 layers, 2 experts of 3 matrices on a rank, 8 bytes
        close(
            (sent["expert_data"], sent["data"]),
            (experts, 1.5 * 8 * (rest + 2)),
            "bytes of gradients, loss and norm",
        )
        if flags.get("experts_per_token") == 4:
            close(
                rows,
                passes * 16 * 4 // 2,
                "rows, if all experts are equally busy: (ep-1)/ep T K a layer",
            )
    rows = sum(rows for _, rows in found)  # rows that leave one rank arrive at another
    expected = (2 * rows + 2 * rows // again) * 32 * 8 + again * passes * 4 * 8 * 4 // 2
    close(sum(sent["ep"] for sent, _ in found), expected, "bytes over ep, of all ranks")


EXPERTS = dict(experts=4, aux_loss_coeff=0.3)
TWO, UNEVEN = (
    EXPERTS | dict(micro_batch_size=2),
    EXPERTS | dict(tied=True, n_layers=4, moe_every=2, dense_layers=1),
)
ALL = TWO | dict(steps=5)
LAYOUTS = [
    (1, EXPERTS | dict(experts_per_token=1, micro_batch_size=4), {}),
    (4, ALL, dict(tp=2, ep=2, zero="1")),  # dp is 2, and the ranks of tp share the experts
    (4, TWO, dict(tp=2, ep=4, sp=False, sync="naive")),
    (4, EXPERTS, dict(ep=2, zero="3", recompute="full")),
    (4, EXPERTS, dict(cp=2, ep=4, zero="2")),
    (4, UNEVEN, dict(pp=2, cp=2, ep=2, schedule="interleaved")),
    (4, EXPERTS | dict(experts_per_token=1), dict(tp=2, sp=False)),
    (8, TWO, dict(pp=2, cp=2, tp=2, ep=4)),
    (4, TWO, dict(tp=2, ep=4, ep_mode="messages")),
    # And dp is 2
    pytest.param(16, ALL, dict(pp=2, cp=2, tp=2, ep=4, zero="1"), marks=pytest.mark.exhaustive),
]


@task("loop", 5)
@cases("n, base, layout", LAYOUTS)
def test_experts_train_to_step_1s_numbers(pools, n, base, layout):
    """Each layout trains to the numbers of this file's `train`, which is step 1's loop with `Plain`
    layers.
    """
    equals_step1(pools, n, S7, base, beside=__name__, **layout)


BIAS = TWO | dict(balance="bias", bias_rate=0.1, steps=4)
BALANCES = [
    (TWO | dict(balance="none"), dict(tp=2, ep=4)),
    (BIAS, dict(cp=2, ep=2, zero="3", recompute="full")),
    (BIAS, dict(pp=2, tp=2, ep=2, schedule="afab")),
]


@cases("base, layout", BALANCES)
def test_other_balances_train_to_one_processs_numbers(pools, base, layout):
    """--balance none and bias, on four ranks, beside step 7 in one process."""
    equals_step1(pools, 4, S7, base, beside=S7, **layout)


RESUMED = [
    (1, STEP1, {}),
    (2, "step02_ddp", {}),
    (3, "step03_zero", dict(zero="3")),
    (4, "step04_tp_sp", dict(tp=2)),
]
RESUMED += [
    (2, "step05_cp_ring", dict(cp=2)),
    (2, "step06_pipeline", dict(pp=2)),
    (4, S7, dict(pp=2, ep=2, zero="2")),
]


@cases("n, of, layout", RESUMED)
def test_resumed_is_uninterrupted(pools, tmp_path, n, of, layout):
    """In every step a resumed run equals an uninterrupted one, bit for bit, in bf16 with
    masters.
    """
    flags = layout | dict(dtype="bf16", save_every=2)
    whole = pools(n).run(train_with, of, flags | dict(out=f"{tmp_path}/a"))
    saved = f"{tmp_path}/a/checkpoints/step-00000002"
    rests = pools(n).run(train_with, of, flags | dict(out=f"{tmp_path}/b", resume=saved))
    for rest, (losses, norms, gradients, weights) in zip(rests, whole, strict=True):
        close(rest[:2], (losses[2:], norms[2:]), "losses and norms of step 3")
        for found, expected in zip(rest[2][0] + rest[3], gradients[2] + weights, strict=True):
            close(
                (found[0], found[3].tobytes()),
                (expected[0], expected[3].tobytes()),
                "gradients and weights of step 3",
            )


def every_legal_layout() -> list[tuple[str, dict, bool]]:
    """All legal layouts of 8 ranks, as rows (step, flags, tied). ZeRO's stage, --no-sp and `tied`
    alternate.
    """
    steps, rows = (
        ("step02_ddp", "step03_zero", "step04_tp_sp", "step05_cp_ring", "step06_pipeline", S7),
        [],
    )
    for number, (pp, cp, tp, ep) in product(range(6), product([1, 2, 4, 8], repeat=4)):
        i, sizes = len(rows), dict(tp=tp, cp=cp, pp=pp, ep=ep)  # in the order of steps 4 to 7
        known = list(sizes)[: max(0, number - 1)]
        if (
            8 % (pp * cp * tp)
            or tp > 4
            or 8 // pp % ep
            or any(sizes[name] > 1 for name in sizes.keys() - known)
        ):
            continue
        layout = {name: sizes[name] for name in known} | (
            dict(zero=str((i + 2) % 4)) if number else {}
        )
        rows.append((steps[number], layout | (dict(sp=i % 3 > 0) if tp > 1 else {}), i % 2 == 0))
    return rows


@pytest.mark.exhaustive
@cases("of, layout, tied", every_legal_layout(), ids=str)
def test_every_legal_layout(pools, of, layout, tied):
    """Every legal layout of 8 ranks trains to step 1's numbers."""
    base = dict(global_batch_size=32, micro_batch_size=4, n_kv_heads=4, n_layers=8, tied=tied)
    if of == S7:
        equals_step1(
            pools, 8, S7, base | dict(experts=8, aux_loss_coeff=0.3), beside=__name__, **layout
        )
    else:
        equals_step1(pools, 8, of, base, **layout)
