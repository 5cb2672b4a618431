"""Step 7, experts: step07_moe_ep.py. The last tests are about all steps.

Step 1 has no experts. So this file implements the layer once more, by its definition (`Plain`), and
puts it into step 1's model (`train`, below). All layouts must train to the same numbers.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import step01_single_gpu as step01
import step07_moe_ep as step
from common import UserError
from common.comm import Group, Mesh
from common.layout import ParamRecord, Shard, record_of
from common.model import PRESETS, Decoder, ModelConfig
from common.run import Run
from step04_tp_sp import shard_tensors
from tests.equal import BASE, SHAPE, STEP1, Trained, close, decoder, draw, equals_step1, run_of
from tests.equal import train as train_with
from tests.tape import Live, Tape

ranks = pytest.mark.ranks
task = pytest.mark.task
cases = pytest.mark.parametrize
S7 = "step07_moe_ep"
Config = step.Config
FP64, BF16 = torch.float64, torch.bfloat16
TINY = {name: getattr(PRESETS["tiny"], name) for name in SHAPE}


# --- The layer by its definition, and step 1 with it ----------------------------------------------


def mlp(x: Tensor, experts: nn.Module, e: int) -> Tensor:
    """The output of expert e for x."""
    gate = x @ experts.gate_proj.weight[e].T
    up = x @ experts.up_proj.weight[e].T
    return (F.silu(gate) * up) @ experts.down_proj.weight[e].T


class Plain(nn.Module):
    """An MoE layer in which every expert computes every token; an unchosen expert has score 0."""

    def __init__(self, dim: int, width: int, config: Config):
        super().__init__()
        self.top_k = config.experts_per_token
        # These two only hold the weights, under the names that step 7 gives them
        self.router = nn.Linear(dim, config.experts, bias=False)
        self.experts = step.Experts(config.experts, dim, width)
        # The auxiliary loss is averaged over a step's micro-batches
        self.coeff = config.aux_loss_coeff * config.micro_batch_size / config.global_batch_size

    def forward(self, x: Tensor) -> Tensor:
        """A whole micro-batch x [batch, seq, dim] -> the output; adds the auxiliary loss's gradient
        at once.
        """
        precise = torch.promote_types(x.dtype, torch.float32)
        p = (x.to(precise) @ self.router.weight.to(precise).T).softmax(-1)
        n_experts = p.shape[-1]
        chosen = F.one_hot(p.topk(self.top_k).indices, n_experts).sum(-2).to(precise)
        f = chosen.mean((0, 1)) / self.top_k
        aux_loss = n_experts * (f * p.mean((0, 1))).sum()
        (self.coeff * aux_loss).backward(retain_graph=True)
        scores = p * chosen
        if self.top_k > 1:
            scores = scores / scores.sum(-1, keepdim=True)
        out = 0.0
        for e in range(n_experts):
            out = out + scores[..., e, None] * mlp(x, self.experts, e)
        return out.to(x.dtype)


def train(config: Config, run: Run):
    """Step 1's `train`, in which `Plain` layers replace MLPs."""

    def with_experts(shape: ModelConfig) -> Decoder:
        model = Decoder(shape)
        width = config.expert_dim or shape.ffn_dim
        for block in model.model.layers.values():
            block.mlp = Plain(shape.dim, width, config)
        return model

    with mock.patch.object(step01, "Decoder", with_experts):
        step01.train(config, run)


# --- Experts side by side, and the layer ----------------------------------------------------------


def config(**flags: Any) -> Config:
    """Flags for five experts, a strong auxiliary loss and 12 micro-batches."""
    return Config(**BASE | dict(experts=5, aux_loss_coeff=0.3) | flags)


def filled(module: nn.Module) -> nn.Module:
    """Fill the parameters with fp64 values that follow from their names and shapes."""
    for name, param in module.named_parameters():
        param.data = draw(name, 0, *param.shape) * 0.5
    return module


def layer(dim: int = 6, width: int = 10, **flags: Any) -> step.MoE:
    """An MoE layer in fp64, in groups of one rank."""
    names = ("dp", "tp", "data", "ep", "micro_batch")
    alone = {name: Group(name, 0, 1, None) for name in names}
    flags = config(**flags)
    return filled(step.BALANCE[flags.balance](dim, width, flags, alone))


def results(function: Callable, module: nn.Module, x: Tensor, rank: int = 0) -> dict[str, Tensor]:
    """y = function(x), dx, and by name the gradients of the module's weights; dy is drawn."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.backward(draw("dy", rank, *x.shape, dtype=x.dtype))
    gradients = {name: param.grad for name, param in module.named_parameters()}
    return dict(y=y.detach(), dx=leaf.grad) | gradients


def side_by_side(rows: Tensor, experts: nn.Module, counts: list[int]) -> Tensor:
    """Each expert's rows through its MLP: what `Experts.forward` must return."""
    parts = rows.split(counts)
    return torch.cat([mlp(part, experts, e) for e, part in enumerate(parts)])


@task("experts", 5)
@cases("dtype, bound", [(FP64, 1e-10), (BF16, 2e-2)])
@cases("counts", [[3, 0, 5], [0, 0, 0]])
def test_experts_compute_their_own_rows_alone(counts, dtype, bound):
    """Outputs and gradients are those of a loop over experts in fp64; without rows an expert's
    gradient is zero, not None. No product of other rows (FLOPs), no copy of a weight (bytes).
    """
    x = draw("x", 0, sum(counts), 16, dtype=dtype).requires_grad_()
    experts = filled(step.Experts(3, 16, 24)).to(dtype)
    with FlopCounterMode(display=False) as counter, Live() as live:
        y = experts(x, torch.tensor(counts))  # noqa: F841 (held: `live` counts it)
        # Of each row, gate, up, silu(gate), their product and the output; 256: where rows end. A
        # copy of one expert's matrix would be 768 or more
        assert live.bytes <= sum(counts) * (4 * 24 + 16) * x.element_size() + 256, live.bytes
    if dtype == FP64:  # (a grouped_mm is not counted)
        close(counter.get_total_flops(), 3 * 2 * sum(counts) * 16 * 24, "FLOPs of the products")
    found = results(partial(experts, counts=torch.tensor(counts)), experts, x)
    plain = filled(step.Experts(3, 16, 24)).to(dtype).double()
    expected = results(partial(side_by_side, experts=plain, counts=counts), plain, x.double())
    for name, value in expected.items():
        close(found[name], value, f"the output or gradient {name}", bound=bound)


INPUTS = {
    "many": draw("x", 0, 2, 7, 6),
    "one": -draw("x", 0, 1, 1, 6),  # the last expert gets no token
    "equal": -draw("x", 0, 1, 1, 6).expand(2, 7, 6),
}


@task("layer", 8)
@cases("k", [1, 2, 4])
@cases("tokens", INPUTS)
def test_a_layer_is_its_definition(tokens, k):
    """Output and gradients are those of `Plain`, with the auxiliary loss."""
    moe = layer(experts_per_token=k)
    plain = filled(Plain(6, 10, config(experts_per_token=k)))
    found = results(moe, moe, INPUTS[tokens])
    for name, value in results(plain, plain, INPUTS[tokens]).items():
        close(found[name], value, f"the output or gradient {name}")


@task("layer", 3)
def test_a_layer_of_bf16_routes_in_fp32():
    """In bf16, ties among 64 scores would select other experts. Results are rounded once."""
    x = draw("x", 0, 4, 64, 32, dtype=BF16)
    moe = layer(32, 12, experts=64).bfloat16()
    found = results(moe, moe, x)
    plain = filled(Plain(32, 12, config(experts=64))).bfloat16()
    plain.router.float()  # the gradient is not rounded
    expected = results(plain, plain, x)
    close(found["y"].dtype, BF16, "the dtype of the output")
    # Rounded scores would be 1e-3 off
    close(found["y"], expected["y"], "the output", bound=5e-4)
    gradient = expected["router.weight"].to(BF16)
    close(found["router.weight"], gradient, "the gradient of the router", bound=5e-4)


# --- Balance --------------------------------------------------------------------------------------


@task("balance", 1)
def test_aux_loss_of_the_figure():
    """Step 7's docstring: f = 2/8 2/8 3/8 1/8 and P = 0.25 0.25 0.4 0.1 give 1.15."""
    p = torch.tensor([0.25, 0.25, 0.4, 0.1], dtype=FP64).expand(4, 4)
    loss = layer(experts=4).aux_loss(p, torch.tensor([2, 2, 3, 1]))
    close(loss, 1.15, "the auxiliary loss")


@ranks(4)
@task("balance", 6)
def test_aux_loss():
    """After one all-reduce of counts, four ranks' terms sum to the loss of their 32 tokens."""
    mesh = Mesh(cp=2, tp=2)
    mesh.add_groups_along("micro_batch", "cp", "tp", queue="gradients")
    moe = layer()
    moe.micro_batch_group = mesh["micro_batch"]
    p = (draw("p", 0, 4, 8, 5) * 2).softmax(-1).requires_grad_()  # [ranks, tokens, experts]
    chosen = F.one_hot(p.topk(2).indices, 5).sum(2)
    expected = 5 * (chosen.double().mean((0, 1)) / 2 * p.mean((0, 1))).sum()
    expected.backward()
    own_p = p.detach()[mesh.rank].clone().requires_grad_()
    counts = chosen[mesh.rank].sum(0)
    with Tape() as tape:
        term = moe.aux_loss(own_p, counts)
    term.backward()
    close(counts, chosen[mesh.rank].sum(0), "the counts after the call")
    total = term.detach().clone()
    dist.all_reduce(total)
    close(total, expected, "the sum of all ranks' terms", 4)
    close(own_p.grad, p.grad[mesh.rank], "the gradient of this rank's p", 4)
    # 2 (n-1)/n times 5 numbers of int64
    close(tape.started, [("allreduce", 2 * 3 * 5 * 8 // 4)], "calls, with bytes")
    close(tape.left, [], "calls that were never waited for")


@task("balance", 2)
def test_add_gradient_of_loss():
    """The output is x, and dx is dy. The gradient of the loss is 1, whatever dy is. Backward needs
    no memory of x.
    """
    x = draw("x", 0, 2, 3, dtype=BF16).requires_grad_()
    dy = draw("dy", 0, 2, 3, dtype=BF16)
    loss = torch.tensor(2.0, requires_grad=True)
    with Live() as live:
        y = step.AddGradientOfLoss.apply(x * 1, loss) + 0
    close(live.bytes, y.nbytes, "bytes alive after forward: y's, without those of x * 1")
    y.backward(dy)
    close(y, x, "the output")
    close(x.grad, dy, "the gradient of x")
    close(loss.grad, torch.tensor(1.0), "the gradient of the loss")


@task("balance", 1)
@cases("balance", step.BALANCE)
def test_after_backward_only_gradients_are_held(balance):
    """Neither activations nor probabilities stay in memory."""
    moe = layer(balance=balance)
    with Live() as live:
        moe(INPUTS["many"]).sum().backward()
        gradients = sum(param.grad.nbytes for param in moe.parameters())
        close(live.bytes, gradients, "bytes")


@task("balance", 2)
def test_bias_is_added_to_the_choice_alone():
    """With the bias 0.2, expert 3 (p = 0.1) is chosen beside expert 0 (p = 0.4). Their scores are
    0.4 and 0.1, divided by the sum 0.5.
    """
    moe = layer(balance="bias")
    moe.bias[3] = 0.2
    p = torch.tensor([[0.4, 0.25, 0.2, 0.1, 0.05]])
    before = p.clone()
    ids = moe.choose(p)
    close(p, before, "p after the call")
    close(ids.tolist(), [[0, 3]], "choices")
    close(moe.score(p, ids), torch.tensor([[0.8, 0.2]]), "the scores", bound=1e-6)


@task("balance", 2)
def test_bias_rises_below_the_mean_load_and_falls_above_it():
    """Loads 6, 1, 3, 2, 4 (mean 3.2): biases -0.5, 0.5, 0.5, 0.5, -0.5; the loads start anew."""
    moe = layer(balance="bias", bias_rate=0.5)
    unused = torch.zeros(1)
    for counts in ([4, 1, 0, 1, 3], [2, 0, 3, 1, 1]):
        moe.balance(unused, unused, torch.tensor(counts))
    moe.end_step()
    moe.end_step()  # no loads since
    close(moe.bias.tolist(), [-0.5, 0.5, 0.5, 0.5, -0.5], "the biases")


@ranks(1)
def test_recomputation_keeps_the_chosen_experts():
    """`train` recomputes a layer with the same choice, even if other experts have the largest p."""
    seen = []

    class Fickle(step.MoE):
        """Expert 0 has the largest p, and when the layer is recomputed expert 1."""

        def probabilities(self, x_TD: Tensor) -> Tensor:
            return super().probabilities(x_TD) + F.one_hot(torch.tensor(len(seen)), 8)

        def outputs_of_choices(self, x_TD: Tensor, ids_TK: Tensor, counts_E: Tensor) -> Tensor:
            seen.append(counts_E.tolist())
            return super().outputs_of_choices(x_TD, ids_TK, counts_E)

    options = dict(
        n_layers=1,
        steps=1,
        global_batch_size=1,
        experts_per_token=1,
        balance="none",
        recompute="full",
    )
    with mock.patch.dict(step.BALANCE, none=Fickle):
        run_of(S7, options)
    rows = [16, 0, 0, 0, 0, 0, 0, 0]
    close(seen, [rows, rows], "rows of each expert, in forward and recomputation")


# --- Dispatch and combine -------------------------------------------------------------------------


# Rows that each of three ranks sends to each expert; every rank holds two of the six experts.
ROUTES = {
    "uneven": [
        [2, 0, 1, 3, 0, 1],
        [1, 2, 2, 0, 3, 0],
        [1, 4, 0, 2, 0, 1],
    ],
    "all to one expert": [
        [0, 0, 5, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],  # a rank with nothing to send
        [0, 0, 7, 0, 0, 0],
    ],
}


def group_and_routes(name: str) -> tuple[Group, Tensor]:
    """This rank's group, [0] or [1, 2, 3], and its part of ROUTES: int64 [sender, expert]."""
    mesh = Mesh(dp=4)
    for row in ([0], [1, 2, 3]):
        mesh.add_groups("ep", np.array([row]), queue="gradients")
    n = mesh["ep"].size
    return mesh["ep"], torch.tensor(ROUTES[name])[:n, : 2 * n]


def named_rows(routes: Tensor, senders: Iterable, experts: Iterable) -> Tensor:
    """Rows (sender, expert, number), sorted by expert, then by sender."""
    rows = []
    for expert in experts:
        for sender in senders:
            for number in range(int(routes[sender, expert])):
                rows.append((sender, expert, number))
    return torch.tensor(rows, dtype=FP64).view(-1, 3)


@ranks(4)
@task("dispatch", 6)
@cases("name", ROUTES)
def test_dispatch_and_combine(name):
    """Rows get to their experts' ranks, sorted by expert; outputs return to their rows' places."""
    group, routes = group_and_routes(name)
    experts = [2 * group.rank, 2 * group.rank + 1]
    sent = named_rows(routes, [group.rank], range(2 * group.size))
    received = named_rows(routes, range(group.size), experts)
    leaving = routes[group.rank].view(-1, 2)
    arriving = routes[:, experts]
    for function, given, expected, table in (
        (step.dispatch, sent, received, leaving),
        (step.combine, received, sent, arriving),
    ):
        with Tape() as tape:
            found = function(given.T.contiguous().T, group, leaving, arriving)  # not contiguous
        close(found, expected, f"the output of {function.__name__}", group.size)
        rows = table.sum() - table[group.rank].sum()  # for other ranks, of three fp64 each
        close(tape.sent, int(rows) * 3 * 8, f"bytes that {function.__name__} sends")


def on_one_device(routes: Tensor, experts: nn.Module) -> list[dict[str, Tensor]]:
    """The `results` of each sender if it holds all experts, whose gradients are summed up."""
    found = []
    for sender, counts in enumerate(routes.tolist()):
        function = partial(side_by_side, experts=experts, counts=counts)
        x = draw("x", sender, sum(counts), 5)
        found.append(results(function, experts, x, sender))
    return found


@ranks(4)
@task("dispatch", 8)
@cases("name", ROUTES)
def test_experts_on_several_ranks(name):
    """As if this rank held all experts, whose gradients are sums over the rows of all ranks."""
    group, routes = group_and_routes(name)
    whole = filled(step.Experts(2 * group.size, 5, 4))
    expected = on_one_device(routes, whole)[group.rank]
    held = slice(2 * group.rank, 2 * group.rank + 2)
    expected |= {name: param.grad[held] for name, param in whole.named_parameters()}
    moe = step.MoE(5, 4, config(experts=2 * group.size), {"ep": group})
    moe.experts = step.Experts(2, 5, 4).double()
    moe.experts.load_state_dict({name: value[held] for name, value in whole.state_dict().items()})

    counts = routes[group.rank]
    x = draw("x", group.rank, sum(counts.tolist()), 5)
    with Tape() as tape:
        found = results(partial(moe.run_experts, counts_E=counts), moe.experts, x, group.rank)
    close(tape.left, [], "calls that were never waited for")
    for name, value in expected.items():
        close(found[name], value, f"the output or gradient {name}")
    y = moe.bfloat16().run_experts(x.bfloat16(), counts)
    assert y.dtype == BF16, "outputs of bf16 rows return in another dtype"


# --- Which rank has which experts -----------------------------------------------------------------


def sharded(sizes: dict, shape: dict, **flags: Any) -> tuple[Mesh, nn.ModuleDict]:
    """The mesh, and the layers of a model on the meta device, sharded over tp and ep."""
    mesh = Mesh(**dict(pp=1, dp=1, cp=1, tp=1) | sizes)
    settings = config(**dict(experts=8, pp=mesh["pp"].size) | flags)

    def shard(model: Decoder):
        shard_tensors(model, mesh, settings.sp)
        step.shard_experts(model, mesh, settings)

    model = decoder(shard, None, **shape)
    return mesh, model.model.layers


@ranks(4)
@task("groups", 2)
def test_groups():
    """A rank has 4 of 8 experts, summed over expert_data; its router is summed over data and tp."""
    mesh, layers = sharded(dict(dp=2, tp=2), TINY, ep=2)
    queues = [mesh[name].handle for name in ("ep", "micro_batch", "expert_data")]
    expected = [mesh["tp"].handle] * 2 + [mesh["dp"].handle]
    close(queues, expected, "queues: twice of activations, then of gradients")
    moe = layers["1"].mlp
    router = ParamRecord(data_group="data", partial_over="tp")
    close(record_of(moe.router.weight), router, "the record of the router")
    close(moe.router.weight.is_meta, True, "the layer is on meta")
    start = mesh.rank % 2 * 4
    shard = Shard(0, "ep", start, start + 4, 8)
    record = ParamRecord(shard=shard, data_group="expert_data")
    for name, param in moe.experts.named_parameters():
        close((len(param), record_of(param)), (4, record), f"{name}: length and record")
    held = sum(param.numel() for param in moe.experts.parameters())
    close(held, 540_672, "weights of experts in a layer: the law's number")


MISTAKES = [
    (dict(ep=3, experts=6), "--ep 3 must divide dp x cp x tp, which is 4"),
    (dict(ep=4, experts=6), "--ep 4 must divide --experts 6"),
    (dict(experts=3, experts_per_token=4), "--experts-per-token 4"),
    (dict(micro_batch_size=4), "--micro-batch-size"),  # does not divide 3 sequences
    (dict(tp=2, sp=False), "--no-sp"),
]


@ranks(8)
@task("groups", 3)
@cases("flags, flag", MISTAKES)
def test_a_mistake_is_one_line(flags, flag):
    """Every rank raises a UserError of one line before anything is sent."""
    with Tape() as tape, pytest.raises(UserError, match=flag) as error:
        sharded(dict(pp=2, dp=4), dict(seq_len=16), **flags)
    close((str(error.value).count("\n"), tape.started), (0, []), "further lines, and collectives")


# --- The loop -------------------------------------------------------------------------------------


EXPERTS = dict(experts=4, aux_loss_coeff=0.3)
TWO = EXPERTS | dict(micro_batch_size=2)
FOUR = EXPERTS | dict(micro_batch_size=4)
OTHER_WIDTH = EXPERTS | dict(micro_batch_size=3, tied=True, n_layers=4, expert_dim=20)
LAYOUTS = [
    (4, TWO, dict(tp=2, ep=2, zero="1")),  # dp is 2, and the ranks of tp share the experts
    (4, TWO, dict(tp=2, ep=4, sync="naive")),
    (4, EXPERTS, dict(ep=2, zero="3", recompute="full")),
    (4, TWO, dict(cp=2, ep=4, zero="2")),
    (4, OTHER_WIDTH, dict(pp=2, cp=2, ep=2, schedule="interleaved")),
    (4, TWO | dict(experts_per_token=1), dict(tp=2)),
    (8, FOUR, dict(pp=2, cp=2, tp=2, ep=4)),
    # And dp is 2
    pytest.param(16, TWO, dict(pp=2, cp=2, tp=2, ep=4, zero="1"), marks=pytest.mark.exhaustive),
]


@task("loop", 5)
@cases("n, base, layout", LAYOUTS)
def test_experts_train_to_step_1s_numbers(pools, n, base, layout):
    """Each layout trains to the numbers of step 1's loop with `Plain` layers."""
    equals_step1(pools, n, S7, base, beside=__name__, **layout)


BIAS = FOUR | dict(balance="bias", bias_rate=0.1, steps=4)


def test_training_moves_the_biases():
    """In three steps each bias moves by a multiple of the rate, at most by three rates."""
    run = run_of(S7, BIAS | dict(steps=3))
    biases = [buffer for name, buffer in run.model.named_buffers() if name.endswith("bias")]
    moves = torch.stack(biases) / 0.1  # [layers, experts]
    close(moves, moves.round(), "moves of each bias", bound=1e-6)
    most = round(moves.abs().max().item())
    assert 1 <= most <= 3, f"a bias has moved by {most} rates in three steps"


BALANCES = [
    dict(cp=2, ep=2, zero="3", recompute="full"),  # with dp 2, micro-batches of 4 and 2
    dict(pp=2, tp=2, ep=2, schedule="afab"),
]


@cases("layout", BALANCES)
def test_balance_by_bias_trains_to_one_processs_numbers(pools, layout):
    """--balance bias, on four ranks, beside step 7 in one process."""
    equals_step1(pools, 4, S7, BIAS, beside=S7, **layout)


# --- All steps ------------------------------------------------------------------------------------


RESUMED = [
    (1, STEP1, {}),
    (3, "step03_zero", dict(zero="3")),
    (4, S7, dict(pp=2, ep=2, zero="2")),
]


def loss_and_weights(result: Trained) -> tuple:
    """A rank's last loss, and a hash of the bits of each weight after the last step."""
    return result.losses[-1], [(name, hash(x.tobytes())) for name, _, x in result.weights]


@cases("n, name, layout", RESUMED)
def test_resumed_is_uninterrupted(pools, tmp_path, n, name, layout):
    """A resumed run equals an uninterrupted one, bit for bit, in bf16 with masters."""
    flags = layout | dict(dtype="bf16", save_every=2, micro_batch_size=2)
    whole = pools(n).run(train_with, name, flags | dict(out=f"{tmp_path}/a"))
    saved = f"{tmp_path}/a/checkpoints/step-00000002"
    resumed = pools(n).run(train_with, name, flags | dict(out=f"{tmp_path}/b", resume=saved))
    for rank in range(n):
        close(len(resumed[rank].losses), 1, f"rank {rank}: the steps after step 2")
        expected = loss_and_weights(whole[rank])
        close(loss_and_weights(resumed[rank]), expected, f"rank {rank}: loss and weights")


# The laws of step 7 with two experts. Each token visits both, so that all are equally busy.
# In a layer, for a micro-batch:
BUSY = dict(cp=4, ep=2, experts=2)
FORWARD = 262_144 + 8  # over ep: rows, and counts, 1/2 x 8 x 2 experts
BACKWARD = 262_144
TP = dict(tp=2, ep=2, experts=2, global_batch_size=8)
S = 524_288
OVER_TP = (
    (4 * 4 * S + 4 * S) // 2  # 4 layers of 4 S; head and embedding
    + 8_192  # the loss
    + 4_608  # 9 norms
    + 4 * 2 * 128 * 4  # 4 routers of 2 experts
)
OVER_TP_RECOMPUTED = OVER_TP + 4 * 2 * S // 2  # 6 S in a layer
COUNTS = 4 * 2 * 8  # over tp, with --balance bias: of 2 experts in 4 layers
SENT = [
    # step, flags, and what rank 0 sends in a training step with one micro-batch. Steps 4 and 6, and
    # step 5 without recomputation: the docstrings' worked numbers
    ("step04_tp_sp", dict(tp=2, global_batch_size=8), dict(tp=9_437_184 + 8_192 + 4_608)),
    ("step05_cp_ring", dict(cp=4), dict(cp=4 * 1_310_720)),  # of 4 layers
    # Once more (n-1) B, 3 x 131,072
    ("step05_cp_ring", dict(cp=4, recompute="full"), dict(cp=4 * (1_310_720 + 393_216))),
    ("step06_pipeline", dict(pp=4), dict(pp=524_288 + 6)),
    # micro_batch: in each layer 2 x 3/4 x 8 bytes x 2 experts
    (S7, BUSY, dict(ep=4 * (FORWARD + BACKWARD), micro_batch=4 * 24)),
    (S7, BUSY | dict(dtype="bf16"), dict(ep=4 * (8 + (FORWARD - 8 + BACKWARD) // 2))),
    (S7, BUSY | dict(recompute="full"), dict(ep=4 * (2 * FORWARD + BACKWARD), micro_batch=4 * 48)),
    (S7, TP, dict(tp=OVER_TP)),
    (S7, TP | dict(recompute="full", balance="bias"), dict(tp=OVER_TP_RECOMPUTED + COUNTS)),
]
ONE_STEP = TINY | dict(dtype="fp32", steps=1, global_batch_size=4, micro_batch_size=4)


def sent_in_a_step(name: str, flags: dict) -> dict[str, int]:
    """What this rank sends by group in a training step of tiny, in fp32, as the run counts it."""
    return run_of(name, ONE_STEP | flags).history[0]["sent"]


@cases("name, flags, expected", SENT)
def test_sent_follows_the_laws_of_steps_4_to_7(pools, name, flags, expected):
    """On four ranks, with the docstrings' sizes: tiny, 4 sequences in a micro-batch."""
    found = pools(4).run(sent_in_a_step, name, flags)[0]
    close({dim: found[dim] for dim in expected}, expected, "bytes")


DIMENSIONS = {  # of each step's flags
    "step02_ddp": [],
    "step03_zero": [],
    "step04_tp_sp": ["tp"],
    "step05_cp_ring": ["cp", "tp"],
    "step06_pipeline": ["pp", "cp", "tp"],
    S7: ["pp", "cp", "tp", "ep"],
}


@cases("name", [STEP1, *DIMENSIONS])
def test_recompute_is_applied_to_the_model(monkeypatch, name):
    """`train` of each script calls the entry that --recompute selects."""
    models = []

    def note(model: Decoder, **options: Any):
        models.append(type(model))

    monkeypatch.setitem(step01.RECOMPUTE, "full", note)
    run_of(name, dict(recompute="full", steps=1, global_batch_size=1))
    close(models, [Decoder], "models")


def is_legal(pp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1) -> bool:
    """Whether 8 ranks can have this layout, in a model of 4 heads."""
    return tp <= 4 and 8 % (pp * cp * tp) == 0 and 8 // pp % ep == 0


def every_legal_layout() -> list[tuple[str, dict, bool]]:
    """Rows (step, flags, tied). ZeRO's stage, --no-sp and `tied` vary from row to row."""
    rows = []
    for name, dimensions in DIMENSIONS.items():
        for sizes in product([1, 2, 4, 8], repeat=len(dimensions)):
            layout = dict(zip(dimensions, sizes, strict=True))
            if not is_legal(**layout):
                continue
            i = len(rows)
            if name != "step02_ddp":
                layout["zero"] = str((i + 2) % 4)
            if layout.get("tp", 1) > 1 and name != S7:
                layout["sp"] = i % 3 > 0
            rows.append((name, layout, i // 4 % 2 == 0))
    return rows


@pytest.mark.exhaustive
@cases("name, layout, tied", every_legal_layout(), ids=str)
def test_every_legal_layout(pools, name, layout, tied):
    """Every pp x dp x cp x tp x ep of 8 ranks trains to step 1's numbers, in steps 2 to 7 (from
    step 3 on each with one of ZeRO's stages, 0 to 3; step 7 to those of `train` above, with plain
    experts).
    """
    base = dict(
        global_batch_size=32,
        micro_batch_size=4,
        n_kv_heads=4,
        n_layers=8,
        tied=tied,
    )
    if name == S7:
        base |= dict(experts=8, aux_loss_coeff=0.3)
    beside = __name__ if name == S7 else STEP1
    equals_step1(pools, 8, name, base, beside=beside, **layout)
