"""Chapter 7, experts: what each function of step07_moe_ep.py must do. tests/__init__.py explains the words.

Step 1 has no experts. So this file writes the layer once more, as its definition has it (`Plain`), and puts that into
step 1's model and loop (`train`, below): all layouts, and step 7 in one process, must train to its numbers.
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
from tests.equal import BASE, SHAPE, Watch, close, decoder, draw, equals_step1
from tests.equal import train as train_with
from tests.tape import Tape

ranks, task, cases = pytest.mark.ranks, pytest.mark.task, pytest.mark.parametrize
S7, Config = "step07_moe_ep", step.Config
ALONE = dict(sequence=Group("sequence", 0, 1, None))


# --- The layer by its definition, and step 1 with it ------------------------------------------------------------------


def held(*shape: int) -> nn.Module:
    """A module with a weight."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(*shape))
    return module


class Plain(nn.Module):
    """Every expert sees every token, and what was not chosen counts zero times. `loss`: E sum_e f_e P_e."""

    def __init__(self, dim: int, width: int, config: Config):
        super().__init__()
        self.config, n = config, config.experts
        self.router = held(n, dim)
        sizes = dict(gate_proj=(n, width, dim), up_proj=(n, width, dim), down_proj=(n, dim, width))
        self.experts = nn.ModuleDict({name: held(*size) for name, size in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim], a micro-batch -> [batch, seq, dim]."""
        k, n = self.config.experts_per_token, self.config.experts
        p = (x @ self.router.weight.T).softmax(-1)
        chosen = p >= p.sort(descending=True)[0][..., k - 1, None]
        scores = p * chosen if k == 1 else p * chosen / (p * chosen).sum(-1, keepdim=True)
        self.loss = n * (chosen.flatten(0, 1).to(p.dtype).mean(0) / k * p.flatten(0, 1).mean(0)).sum()
        gate, up, down = (module.weight for module in self.experts.values())
        return sum(scores[..., e, None] * (F.silu(x @ gate[e].T) * (x @ up[e].T)) @ down[e].T for e in range(n))


def train(config: Config, run: Run):
    """Step 1's, with `Plain` in the place of MLPs. To its loss is added the mean of theirs over micro-batches."""

    class Counted(Data):
        def batch(self, number: int) -> tuple[Tensor, Tensor]:
            tokens, targets = super().batch(number)
            WithExperts.n_targets = int((targets != IGNORE).sum())
            return tokens, targets

    class WithExperts(Decoder):
        def __init__(self, shape: ModelConfig):
            super().__init__(shape)
            for i, layer in enumerate(self.model.layers.values()):
                if i >= config.dense_layers and (i - config.dense_layers + 1) % config.moe_every == 0:
                    layer.mlp = Plain(shape.dim, config.expert_dim or shape.ffn_dim, config)

        def forward(self, *given: Tensor) -> Tensor:
            loss, added = super().forward(*given), 0.0
            for module in self.modules():
                added = added + module.loss if isinstance(module, Plain) else added
            added *= config.aux_loss_coeff * config.micro_batch_size / config.global_batch_size * self.n_targets
            return loss + added - added.detach()  # the loss that is shown is without it

    with mock.patch.multiple(step01, Data=Counted, Decoder=WithExperts):
        step01.train(config, run)


# --- Experts side by side ---------------------------------------------------------------------------------------------


def config(**flags) -> Config:
    """Five experts, a strong auxiliary loss."""
    return Config(**BASE | dict(experts=5, aux_loss_coeff=0.3) | flags)


def filled(module: nn.Module, size: float = 0.5, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With values that follow from names."""
    for name, param in module.named_parameters():
        param.data = (draw(name, 0, *param.shape) * size).to(dtype)
    return module


def mlp(x: Tensor, experts: nn.Module, e: int) -> Tensor:
    """What expert e makes of x."""
    gate, up, down = (linear.weight[e] for linear in experts.children())
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def grads(y: Tensor, dy: Tensor, x: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """Those of x and of all weights. Zero, where a weight was not used."""
    names, leaves = ["x", *dict(module.named_parameters())], [x, *module.parameters()]
    return dict(zip(names, torch.autograd.grad(y, leaves, dy, materialize_grads=True), strict=True))


def all_close(found: dict[str, Tensor], expected: dict[str, Tensor], n: int = 1):
    """Gradients by name."""
    for name, value in expected.items():
        close(found[name], value, f"the gradient of {name}", n)


@task("experts", 5)
@cases("counts", [[3, 0, 5], [0, 0, 4], [2, 1, 1], [0, 0, 0]])
def test_experts(counts):
    """Rows sorted by expert, each through its own MLP. Who has no row gets a gradient of zero, not none."""
    experts = filled(step.Experts(3, 6, 10))
    x, dy = (draw(name, 0, sum(counts), 6).requires_grad_(name == "x") for name in ("x", "dy"))
    given = torch.tensor(counts)
    y = experts(x, given)
    expected = torch.cat([mlp(rows, experts, e) for e, rows in enumerate(x.split(counts))])
    close(y, expected, "the outputs")
    expected = grads(expected, dy, x, experts)
    y.backward(dy)
    all_close(dict(x=x.grad) | {name: param.grad for name, param in experts.named_parameters()}, expected)
    close((given.tolist(), [tuple(p.shape) for p in experts.parameters()][2]), (counts, (3, 6, 10)), "counts, a shape")


# --- The layer --------------------------------------------------------------------------------------------------------

WAYS = {
    "many": lambda: draw("x", 0, 2, 8, 6),
    "few": lambda: draw("x", 0, 1, 1, 6),  # most experts are visited by nobody
    "alike": lambda: draw("x", 0, 1, 1, 6).expand(2, 8, 6).contiguous(),  # all go to the same ones
}


@task("layer", 6)
@cases("k", [1, 2, 4])  # f is in fp32, and exact where 2 sequences of 8 tokens have k choices each
@cases("way", WAYS)
def test_a_layer_is_its_definition(way, k):
    """Output, and all gradients: those of the auxiliary loss, of one micro-batch of 12, are a part of them."""
    some = config(experts_per_token=k, micro_batch_size=2, global_batch_size=24)
    ours, theirs = filled(step.MoE(6, 10, some, ALONE)), filled(Plain(6, 10, some))
    x, dy = WAYS[way]().requires_grad_(), draw("dy", 0, *WAYS[way]().shape)
    y, expected = ours(x), theirs(x)
    close(y, expected, "the output")
    close(x, WAYS[way](), "the input after the call")
    found = grads(y, dy, x, ours)
    expected = grads((expected * dy).sum() + 0.3 / 12 * theirs.loss, torch.ones(()).double(), x, theirs)
    all_close(found, expected)


@task("layer", 3)
@cases("k", [1, 2])
def test_a_layer_is_hugging_faces(k):
    """Mixtral's block and loss, which counts a token k times; for one expert a token OLMoE's, whose score is p."""
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.olmoe import modeling_olmoe as olmoe

    sizes = dict(hidden_size=6, intermediate_size=10, num_experts_per_tok=k, num_hidden_layers=1, vocab_size=9)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2)
    if k == 2:
        theirs = mixtral.MixtralSparseMoeBlock(mixtral.MixtralConfig(num_local_experts=5, **sizes))
    else:
        theirs = olmoe.OlmoeSparseMoeBlock(olmoe.OlmoeConfig(num_experts=5, norm_topk_prob=False, **sizes))
    ours = filled(step.MoE(6, 10, config(experts_per_token=k), ALONE))
    weights = {name: param.detach() for name, param in ours.named_parameters()}
    gate_up = torch.cat([weights["experts.gate_proj.weight"], weights["experts.up_proj.weight"]], 1)
    pairs = {"gate.weight": weights["router.weight"], "experts.gate_up_proj": gate_up}
    pairs["experts.down_proj"] = weights["experts.down_proj.weight"]
    theirs.double().load_state_dict({name: value.clone() for name, value in pairs.items()})
    x, dy = draw("x", 0, 2, 8, 6).requires_grad_(), draw("dy", 0, 2, 8, 6)
    found = grads(y := ours(x), dy, x, ours)
    with mock.patch.object(Tensor, "float", Tensor.double):  # they route in fp32
        expected = theirs(x)
        close(y, expected, "the output", bound=1e-6)
        loss = mixtral.load_balancing_loss_func(
            (theirs.gate(x)[0] if k == 2 else x.flatten(0, 1) @ theirs.gate.weight.T,), 5, k
        )
        wanted = grads((expected * dy).sum() + 0.3 / 12 / k * loss, torch.ones(()).double(), x, theirs)
    close(found["x"], wanted["x"], "the gradient of x", bound=1e-6)
    close(found["router.weight"], wanted["gate.weight"], "the gradient of the router", bound=1e-6)
    both = torch.cat([found["experts.gate_proj.weight"], found["experts.up_proj.weight"]], 1)
    close(both, wanted["experts.gate_up_proj"], "the gradient of gate and up", bound=1e-6)


@task("layer", 3)
def test_a_layer_of_bf16_routes_in_fp32():
    """64 scores in 16 bits would tie, and name other experts. The output is that of fp32 arithmetic, rounded once."""
    ours = filled(step.MoE(32, 8, config(experts=64), ALONE), dtype=torch.bfloat16)
    x = draw("x", 0, 4, 64, 32).bfloat16().requires_grad_()
    y = ours(x)
    p = (x.float() @ ours.router.weight.float().T).softmax(-1).flatten(0, 1)
    best = p.sort(descending=True)[1][:, :2]
    scores = p.gather(1, best) / p.gather(1, best).sum(1, keepdim=True)
    rows = x.flatten(0, 1)
    outs = torch.stack([mlp(rows, ours.experts, e) for e in range(64)], 1)  # [tokens, experts, dim], bf16
    expected = (outs[torch.arange(256)[:, None], best] * scores[..., None]).sum(1).bfloat16()
    close(y.dtype, torch.bfloat16, "dtype of the output")
    close(y, expected.view_as(y), "the output", bound=5e-4)  # a rounding of the scores would be 1e-3
    (found,) = torch.autograd.grad(y, ours.router.weight, dy := draw("dy", 0, *y.shape).bfloat16(), retain_graph=True)
    f = F.one_hot(best.flatten(), 64).sum(0) / best.numel()
    loss = (outs[torch.arange(256)[:, None], best] * scores[..., None]).sum(1) * dy.flatten(0, 1).float()
    loss = loss.sum() + 0.3 / 12 * 64 * (f * p.mean(0)).sum()
    close(found, *torch.autograd.grad(loss, ours.router.weight), "the gradient of the router", bound=5e-3)


@task("layer", 2)
def test_equal_scores():
    """All experts score alike: a token visits K different ones with a weight of 1/K, and each time the same ones."""
    ours = filled(step.MoE(6, 10, config(), ALONE))
    ours.router.weight.data.zero_()
    x = draw("x", 0, 2, 8, 6)
    y = ours(x)
    outs = [mlp(x, ours.experts, e) for e in range(5)]
    pairs = torch.stack([(outs[a] + outs[b]) / 2 for a in range(5) for b in range(a)])
    close((pairs - y).abs().amax(-1).amin(0), torch.zeros(2, 8).double(), "distance to the nearest pair of experts")
    close(ours(x), y, "the output of a second call")


# --- The load-balancing auxiliary loss --------------------------------------------------------------------------------


@task("balance", 2)
@cases("dtype", [torch.float64, torch.bfloat16])
def test_add_loss(dtype):
    """x as it is; in backward x gets dy, and the loss `coeff`, whatever dy is."""
    x, dy = (draw(name, 0, 2, 3, dtype=dtype).requires_grad_(name == "x") for name in ("x", "dy"))
    loss = torch.tensor(2.0, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    y = step.AddLoss.apply(x, loss, 0.3)
    close(y, x, "the output")
    y.backward(dy)
    close(x.grad, dy, "the gradient of x")
    close(loss.grad, torch.tensor(0.3, dtype=loss.dtype), "the gradient of the loss")


@ranks(3)
@task("balance", 5)
def test_aux_loss():
    """Three ranks share a micro-batch: their terms add up to the loss of all 24 tokens. One all-reduce of counts."""
    mesh, n, k = Mesh(cp=3, tp=1), 3, 2
    mesh.join("sequence", "cp", "tp")
    ours = step.MoE(6, 10, config(experts_per_token=k), mesh)
    p = (draw("p", 0, 24, 5) * 2).softmax(-1).requires_grad_()
    chosen = F.one_hot(p.topk(k)[1], 5).sum(1)
    expected = 5 * (chosen.double().mean(0) / k * p.mean(0)).sum()
    here = slice(8 * mesh.rank, 8 * mesh.rank + 8)
    own, counts = p.detach()[here].clone().requires_grad_(), chosen[here].sum(0)
    with Tape() as tape:
        term = ours.aux_loss(own, counts)
    close(counts.tolist(), chosen[here].sum(0).tolist(), "the given counts after the call")
    found = [torch.empty_like(term) for _ in range(n)]
    dist.all_gather(found, term.detach())
    close(sum(found), expected.detach(), "the sum of all ranks' terms", n, 1e-7)
    (found,), (expected,) = torch.autograd.grad(term, own), torch.autograd.grad(expected, p)
    close(found, expected[here], "the gradient of this rank's p", n, 1e-7)
    close(([name for name, _ in tape.started], tape.sent, tape.left), (["allreduce"], round(4 / 3 * 40), []), "calls")


# --- Dispatch and combine ---------------------------------------------------------------------------------------------


@task("dispatch", 2)
@cases("sizes", [[[2, 0, 1], [1, 3, 0]], [[0, 0], [0, 4]], [[3], [1]]])
def test_transpose_blocks(sizes):
    """Blocks [i, j], sorted by i, then by j -> by j, then by i; and the way back."""
    rows, sizes = draw("rows", 0, sum(map(sum, sizes)), 4), torch.tensor(sizes)
    blocks = rows.split(sizes.flatten().tolist())
    n, m = sizes.shape
    found = step.transpose_blocks(rows, sizes)
    close(found, torch.cat([blocks[i * m + j] for j in range(m) for i in range(n)]), "the blocks")
    close(step.transpose_blocks(found, sizes.T), rows, "there and back")


# Rows that each of three ranks sends to each expert; a rank has two of six.
ROUTES = {
    "uneven": [[2, 0, 1, 3, 0, 1], [1, 2, 2, 0, 3, 0], [1, 4, 0, 2, 0, 1]],
    "nothing to send": [[2, 0, 1, 3, 0, 1], [0, 0, 0, 0, 0, 0], [1, 4, 0, 2, 0, 0]],
    "all to one expert": [[0, 0, 5, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 7, 0, 0, 0]],
    "all stay": [[2, 1, 0, 0, 0, 0], [0, 0, 3, 1, 0, 0], [0, 0, 0, 0, 0, 2]],
}


def apart(way: str) -> tuple[Group, Tensor]:
    """A group that is not the world: ranks 1 to 3, and rank 0 alone; rows [from, to, expert there]."""
    mesh = Mesh(dp=4)
    for row in ([0], [1, 2, 3]):
        mesh.enter("ep", np.array([row]))
    n = mesh["ep"].size
    return mesh["ep"], torch.tensor(ROUTES[way])[:n, : 2 * n].view(n, n, 2)


def blocks_of(name: str, routes: Tensor) -> list[list[list[Tensor]]]:
    """Rows [from][to][expert there]."""
    n, found = len(routes), []
    for source in range(n):
        rows = draw(name, source, int(routes[source].sum()), 5).split(routes[source].flatten().tolist())
        found.append([rows[2 * to : 2 * to + 2] for to in range(n)])
    return found


def one_way(function, group: Group, given: Tensor, expected: Tensor, routes: Tensor, away: int):
    """A call, of what is contiguous and what is not: what arrives, calls, bytes; the input is left as it was."""
    sizes = dict(leaving_Ge=routes[group.rank], arriving_Ge=routes[:, group.rank])
    for x in given.clone(), given.T.contiguous().T:
        with Tape() as tape:
            found = function(x, group, **{name: size.clone() for name, size in sizes.items()})
        close(found, expected, "what arrives", group.size)
        close(x, given, "the input after the call")
        close(([name for name, _ in tape.started], tape.sent), (["alltoallbase"] * (group.size > 1), 40 * away), "sent")
        close(tape.left, [], "what nobody has waited for")


@ranks(4)
@task("dispatch", 6)
@cases("way", ROUTES)
def test_dispatch_and_combine(way):
    """Rows go to the ranks of their experts, sorted there by expert; outputs come home, to where the rows stood."""
    group, routes = apart(way)
    blocks, n, rank = blocks_of("x", routes), group.size, group.rank
    there = torch.cat([blocks[source][rank][e] for e in range(2) for source in range(n)])
    here = torch.cat([block for row in blocks[rank] for block in row])
    stay = int(routes[rank, rank].sum())
    one_way(step.dispatch, group, here, there, routes, len(here) - stay)
    one_way(step.combine, group, there, here, routes, len(there) - stay)


@ranks(4)
@task("dispatch", 8)
@cases("way", ROUTES)
def test_visit_experts(way):
    """As if this rank had all experts; their gradients are sums over the rows of all ranks."""
    group, routes = apart(way)
    n, rank = group.size, group.rank
    whole, ours = filled(step.Experts(2 * n, 5, 4)), step.Experts(2, 5, 4)
    for mine, all_ in zip(ours.parameters(), whole.parameters(), strict=True):
        mine.data = all_.data[2 * rank : 2 * rank + 2].clone()
    blocks, dys = blocks_of("x", routes), [draw("dy", r, int(routes[r].sum()), 5) for r in range(n)]
    rows = [torch.cat([block for some in blocks[r] for block in some]).requires_grad_() for r in range(n)]
    outs = [[mlp(x, whole, e) for e, x in enumerate(rows[r].split(routes[r].flatten().tolist()))] for r in range(n)]
    x, counts = rows[rank].detach().clone().requires_grad_(), routes[rank].flatten()
    with Tape() as tape:
        y = step.visit_experts(ours, group, x, counts)
        close(y, torch.cat(outs[rank]), "the outputs", n)
        there = len(tape.started)
        y.backward(dys[rank])
    sum((torch.cat(out) * dy).sum() for out, dy in zip(outs, dys, strict=True)).backward()
    close(x.grad, rows[rank].grad, "the gradient of the rows", n)
    for (name, param), all_ in zip(ours.named_parameters(), whole.parameters(), strict=True):
        close(param.grad, all_.grad[2 * rank : 2 * rank + 2], f"the gradient of {name}", n)
    close((x, counts.tolist()), (x, routes[rank].flatten().tolist()), "counts after the call")
    stay = int(routes[rank, rank].sum())
    out, back = 40 * (len(x) - stay), 40 * (int(routes[:, rank].sum()) - stay)
    sent = [2 * (n - 1) * 8, out, back, out, back] if n > 1 else []
    close(([size for _, size in tape.started], there), (sent, 3 * (n > 1)), "counts, there, home; in backward the same")
    close(tape.left, [], "what nobody has waited for")


# --- Who has which experts --------------------------------------------------------------------------------------------


def members(group: Group) -> list[int]:
    """Its ranks in the world."""
    return dist.get_process_group_ranks(group.handle) if group.size > 1 else [dist.get_rank()]


def sharded(mesh: Mesh, n_layers: int = 3, **flags) -> Decoder:
    """A small model on the meta device, as `train` makes it."""
    some = config(**dict(experts=8, **{name: size for name, size in mesh.sizes.items() if name != "dp"}) | flags)
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SHAPE | dict(n_layers=n_layers)))
    shard_tensors(model, mesh, some.sp)
    shard_context(model, mesh, CONTEXT["zigzag"], some.sp)
    step.shard_experts(model, mesh, some)
    return model


@ranks(4)
@task("groups", 4)
@cases(
    "sizes, ep, groups, columns",
    [
        (dict(pp=1, dp=2, cp=1, tp=2), 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),  # the figure
        (dict(pp=2, dp=1, cp=2, tp=1), 2, [[0, 1], [2, 3]], [[0], [1], [2], [3]]),  # not over stages
        (dict(pp=1, dp=4, cp=1, tp=1), 1, [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
        (dict(pp=1, dp=1, cp=2, tp=2), 4, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
    ],
)
def test_groups(sizes, ep, groups, columns):
    """ep: neighbours of a stage, that have all experts; expert_data: ranks with the same ones."""
    mesh = Mesh(**sizes)
    model = sharded(mesh, ep=ep)
    for name, rows in ("ep", groups), ("expert_data", columns):
        row = next(row for row in rows if mesh.rank in row)
        close((members(mesh[name]), mesh[name].rank), (row, row.index(mesh.rank)), f"ranks of {name}, and which")
    length = sizes["cp"] * sizes["tp"]
    start = mesh.rank // length * length
    close(members(mesh["sequence"]), [*range(start, start + length)], "ranks that share a micro-batch")
    shards = [(0, "ep", mesh["ep"].rank * 8 // ep, (mesh["ep"].rank + 1) * 8 // ep, 8)] if ep > 1 else []
    for name, param in model.model.layers["1"].mlp.named_parameters():
        record = layout_of(param)
        found = [(s.dim, s.over, s.start, s.stop, s.full) for s in record.shards]
        expected = [] if "router" in name else shards
        close((found, len(param)), (expected, 8 if "router" in name else 8 // ep), f"{name}: shards, experts here")
        expected = ("data", ("tp",)) if "router" in name else ("expert_data", ())
        close((record.data_dim, record.partial_over), expected, f"{name}: data_dim, partial_over")


@ranks(2)
@task("groups", 2)
@cases("flags, layers", [({}, [0, 1, 2, 3, 4]), (dict(moe_every=2), [1, 3]), (dict(moe_every=2, dense_layers=2), [3])])
def test_which_layers_have_experts(flags, layers):
    """--moe-every counts after --dense-layers. All others keep their MLP, sharded over tp."""
    model = sharded(Mesh(pp=1, dp=1, cp=1, tp=2), n_layers=5, expert_dim=20, ep=2, **flags)
    for i, layer in enumerate(model.model.layers.values()):
        shape = (4, 20, 32) if i in layers else (24, 32)
        close(
            tuple(layer.mlp.gate_proj.weight.shape if i not in layers else layer.mlp.experts.gate_proj.weight.shape),
            shape,
            f"layer {i}: gate_proj",
        )


@ranks(4)
@task("groups", 3)
@cases(
    "flags, said",
    [
        (dict(ep=3, experts=6), "--ep 3"),
        (dict(ep=8), "--ep 8"),
        (dict(ep=4, experts=6), "--experts 6"),
        (dict(experts=3, experts_per_token=4), "--experts-per-token 4"),
        (dict(micro_batch_size=4), "--micro-batch-size"),
    ],
)
def test_a_mistake_is_one_line(flags, said):
    """On every rank, before anything is sent."""
    with Tape() as tape, pytest.raises(UserError, match=said) as error:
        sharded(Mesh(pp=1, dp=2, cp=1, tp=2), **flags)
    close((str(error.value).count("\n"), tape.started), (0, []), "further lines, and collectives")


@ranks(2)
def test_tokens_that_tp_does_not_divide():
    """Without SP each rank of tp routes its shard."""
    mesh = Mesh(pp=1, dp=1, cp=1, tp=2)
    with pytest.raises(UserError, match="--no-sp"), mock.patch.dict(SHAPE, seq_len=15):
        sharded(mesh, sp=False)
    found = step.own_tokens(draw("x", 0, 2, 6, 3), mesh["tp"])
    close(found, draw("x", 0, 2, 6, 3)[:, 3 * mesh.rank : 3 * mesh.rank + 3], "own tokens")


# --- The loop ---------------------------------------------------------------------------------------------------------


def bytes_of(flags: dict) -> tuple[dict, int]:
    """What a rank sends in a step, by dimension, and how many of its rows were for other ranks' experts."""
    away, plain = [], step.DISPATCH["alltoall"]

    def spy(experts, group, rows, counts):
        away.append(len(rows) - int(counts.view(group.size, -1)[group.rank].sum()))
        return plain(experts, group, rows, counts)

    train_with(S7, dict(steps=1))  # makes the preset
    with (
        Watch(Config(**BASE | dict(model="test", steps=1) | flags)) as run,
        mock.patch.dict(step.DISPATCH, alltoall=spy),
    ):
        step.train(run.config, run)
    return run.history[0]["sent"], sum(away)


@cases("recompute", ["none", "full"])
def test_law_of_bytes(pools, recompute):
    """Rows go there and home, forward and backward (and again); counts; an expert's gradient over expert_data alone."""
    found = pools(4).run(bytes_of, dict(ep=2, experts=4, recompute=recompute))
    layers, micro, again = 3, 3, 1 + (recompute == "full")
    expert, model = 3 * 32 * 48 * 8 * layers, decoder(**SHAPE)
    rest = sum(p.numel() * 8 for name, p in model.named_parameters() if "mlp" not in name) + 4 * 32 * 8 * layers
    for sent, _ in found:
        close((sent["expert_data"], sent["data"]), (2 * expert, 1.5 * (rest + 8)), "bytes over expert_data, and data")
    rows = sum(away for _, away in found)  # those that leave one rank come to another
    counts = 4 * layers * micro * again * 8 * 4 // 2
    expected = rows // again * (2 * again + 2) * 32 * 8 + counts
    close(sum(sent["ep"] for sent, _ in found), expected, "bytes over ep, of all ranks")
    if recompute == "none":
        (sent, rows), *_ = pools(4).run(bytes_of, dict(ep=2, experts=4, experts_per_token=4))
        close(rows, layers * micro * 16 * 4 // 2, "rows, if all experts are equally busy: (ep-1)/ep T K a layer")


EXPERTS = dict(experts=4, aux_loss_coeff=0.3)
ALL = EXPERTS | dict(steps=5)
TWO = EXPERTS | dict(micro_batch_size=2)
LAYOUTS = [
    (1, EXPERTS | dict(experts_per_token=1, micro_batch_size=4), {}),
    (1, TWO, {}),
    (4, ALL, dict(tp=2, ep=2, zero=1)),  # dp 2; experts are shared along tp
    (4, TWO, dict(tp=2, ep=4, sp=False)),
    (4, EXPERTS, dict(ep=2, zero=3, recompute="full")),
    (4, EXPERTS, dict(cp=2, ep=4, zero=2)),
    (
        4,
        EXPERTS | dict(tied=True, n_layers=4, moe_every=2, dense_layers=1),
        dict(pp=2, cp=2, ep=2, schedule="interleaved"),
    ),
    (2, EXPERTS | dict(experts_per_token=1), dict(tp=2, sp=False)),
    (8, TWO, dict(pp=2, cp=2, tp=2, ep=4)),
    pytest.param(
        16, ALL | dict(micro_batch_size=2), dict(pp=2, cp=2, tp=2, ep=4, zero=1), marks=pytest.mark.exhaustive
    ),
]


@task("loop", 5)
@cases("n, base, layout", LAYOUTS)
def test_experts_train_to_step_1s_numbers(pools, n, base, layout):
    """Step 1's loop, with the layer by its definition."""
    equals_step1(pools, n, S7, base, beside=__name__, **layout)


@task("loop", 1)
def test_without_experts(pools):
    """All layers are dense: this is step 1 itself."""
    equals_step1(pools, 4, S7, pp=2, tp=2, dense_layers=3)


def legal_layouts(of: str):
    """All products of 8 ranks that a step has flags for, each with every ep; ZeRO's stages and --no-sp in turn."""
    number = int(of[4:6])
    steps = {"dp": 2, "tp": 4, "cp": 5, "pp": 6, "ep": 7}
    for pp, cp, tp, ep in product([1, 2, 4, 8], repeat=4):
        sizes = dict(pp=pp, cp=cp, tp=tp, ep=ep)
        if (
            pp * cp * tp > 8
            or tp == 8
            or 8 // pp % ep
            or any(size > 1 and steps[name] > number for name, size in sizes.items())
        ):
            continue
        yield {name: size for name, size in sizes.items() if steps[name] <= number}
