"""The techniques of steps 5 to 7: one process's numbers, alone and combined; and their laws."""

from collections import Counter
from itertools import accumulate, product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import step07_moe_ep as step07
from common import UserError
from common.comm import Group, Mesh
from common.model import PRESETS, ModelConfig
from common.schedules import draw, simulate
from extras.techniques import compressed_sync, flash_ring, zero_bubble
from extras.techniques._orders import ORDERS
from extras.tests.rows import Config, check_row
from step05_cp_ring import CONTEXT
from tests.equal import BASE, SHAPE, close
from tests.equal import draw as numbers
from tests.tape import Tape

ranks, cases = pytest.mark.ranks, pytest.mark.parametrize


# --- Equality -----------------------------------------------------------------------------------

PLAIN = dict(n_layers=2, micro_batch_size=3)
TIED = PLAIN | dict(tied=True, optimizer="sgd")
DEEP = PLAIN | dict(n_layers=4)  # for several stages
DEEP_TIED = TIED | DEEP
EXPERTS = PLAIN | dict(experts=4, aux_loss_coeff=0.3)
# Its layer has shared experts and groups, and balances by a bias
DEEPSEEK = PLAIN | dict(experts=8, balance="deepseek", bias_rate=0.1)
CAPACITY = EXPERTS | dict(balance="capacity", capacity_factor=0.6)
GROUPS = EXPERTS | dict(balance="groups")
FULL = "--zero 3 --recompute full"
STEP5, STEP6, STEP7 = "step05_cp_ring", "step06_pipeline", "step07_moe_ep"
ROWS = [  # ranks, flags and sizes of both runs, and the layout
    (4, PLAIN, f"{STEP5} --cp 4 --cp-mode allgather --zero 2"),
    (4, TIED, f"{STEP5} --cp 2 --tp 2 --cp-mode allgather {FULL}"),
    # Fewer key/value heads than ranks
    (4, PLAIN, f"{STEP5} --cp 4 --cp-mode ulysses --zero 1"),
    (4, TIED, f"{STEP5} --cp 2 --tp 2 --cp-mode ulysses --no-sp"),
    (4, PLAIN, f"{STEP5} --cp 4 --cp-mode flash"),
    (4, DEEP_TIED, f"{STEP6} --pp 2 --cp 2 --schedule afab --cp-mode ulysses {FULL}"),
    (4, DEEP, f"{STEP6} --pp 4 --schedule zb-h1"),
    (4, DEEP, f"{STEP6} --pp 2 --cp 2 --schedule zb-h1 --cp-mode flash {FULL}"),
    (4, DEEP_TIED, f"{STEP6} --pp 2 --tp 2 --schedule zb-h2 --sync naive"),
    # With --sync bucket, which counts additions
    (4, DEEP_TIED, f"{STEP6} --pp 2 --schedule zbv"),
    (4, DEEP_TIED, f"{STEP6} --pp 2 --schedule zbv {FULL}"),
    (4, DEEP_TIED, f"{STEP6} --pp 2 --cp 2 --schedule dualpipev --zero 2 --cp-mode allgather"),
    (1, DEEP_TIED, f"{STEP6} --schedule zbv"),
    (4, DEEPSEEK, f"{STEP7} --pp 2 --ep 2 --schedule zb-h1 --balance deepseek+overlap {FULL}"),
    (4, DEEPSEEK, f"{STEP7} --cp 2 --tp 2 --ep 4 --zero 1"),
    (4, CAPACITY, f"{STEP7} --cp 2 --tp 2 --ep 2 --zero 2"),
    (4, GROUPS, f"{STEP7} --pp 2 --tp 2"),
]


@cases("n, base, line", ROWS, ids=str)
def test_techniques_train_to_one_processs_numbers(pools, n, base, line):
    """Losses, norms, gradients and weights are those of step 1 or, with experts, of one rank."""
    check_row(pools, n, base, line)


# --- Schedules ----------------------------------------------------------------------------------

SIZES = [(p, m) for p in (2, 3, 4, 6) for m in (1, 2, 3, 5, 7, 8, 12, 19)]
COSTS = list(product((2, 3, 5), repeat=3))
DX_AND_DW = ("zb-h1", "zb-h2", "zbv", "dualpipev")  # B computes dx, and W dW


def idle(name: str, p: int, m: int, *costs: int) -> tuple[int, int]:
    """How long a rank is idle in a step; and once it has begun, until its end (at most)."""
    lists, places = ORDERS[name].lists(p, m)
    spans = simulate(lists, places, dict(zip("FBW", costs, strict=True)))
    longest = 0
    for rank in range(p):
        own = [span for span in spans if span.rank == rank]
        longest = max(longest, own[-1].end - own[0].start)
    work = m * sum(costs) * len(places) // p
    return spans[-1].end - work, longest - work


PICTURES = [("zb-h1", 4, 6), ("zb-h2", 3, 5), ("zbv", 3, 5), ("dualpipev", 2, 4)]


@cases("name, p, m", PICTURES)
def test_the_picture_is_the_schedule(name, p, m):
    """The docstring shows the schedule as `draw` draws it."""
    drawn = draw(*ORDERS[name].lists(p, m), ORDERS[name].costs)
    missing = set(drawn.split()) - set(zero_bubble.__doc__.split())
    close(missing, set(), "lines that the docstring does not have")


@cases("name", DX_AND_DW)
def test_a_list_is_complete(name):
    """In each of its stages a rank does each action once, in order. No rank waits for ever."""
    for p, m in SIZES:
        lists, places = ORDERS[name].lists(p, m)
        simulate(lists, places, dict(F=5, B=2, W=3))  # raises ValueError for a deadlock
        for rank, actions in enumerate(lists):
            kinds = Counter()
            for kind, i, stage in actions:
                assert places[stage] == rank and i < m
                kinds[i, stage] = (kinds[i, stage] or "") + kind
            close(set(kinds.values()), {"FBW"}, f"p={p} m={m}: the order of the actions")
            close(len(kinds), m * places.count(rank), f"p={p} m={m}: micro-batches x stages")


def test_laws_of_time():
    """Idle times are those of the papers, if F, B and W take f, b and w."""
    for (p, m), (f, b, w) in product(SIZES, COSTS):
        sizes = (p, m, f, b, w)
        if m >= p and w <= min(f, b):
            close(idle("zb-h1", *sizes)[0], (p - 1) * (f + b - w), f"zb-h1, {sizes}")
        if m >= 2 * p - 1 and w <= f and 2 * w <= f + b:
            close(idle("zb-h2", *sizes)[1], (p - 1) * (f + b - 2 * w), f"zb-h2, {sizes}")
        if f == b == w:
            if m >= 2 * p - 1:
                close(idle("zbv", *sizes), ((p - 1) * f, 0), f"zbv, {sizes}")
            if m >= 2 * p:
                close(idle("dualpipev", *sizes)[0], (p - 1) * f, f"dualpipev, {sizes}")


def test_laws_of_memory():
    """The most pairs (micro-batch, stage) of which a rank holds the activations."""
    for p, m in SIZES:
        most = {"zb-h1": min(m, p), "zb-h2": min(m, 2 * p - 1)}
        most |= {"zbv": min(2 * m, 2 * p), "dualpipev": min(2 * m, 2 * p + 1)}
        for name, limit in most.items():
            change = {"F": 1, "W": -1}
            lists, _ = ORDERS[name].lists(p, m)
            held = [max(accumulate(change.get(a.kind, 0) for a in actions)) for actions in lists]
            close(max(held), limit, f"{name}, p={p} m={m}")


# --- Messages -----------------------------------------------------------------------------------

# k and v have B = 1024 bytes in bf16 (2 sequences, 4 tokens, 4 heads of 8 numbers), their gradients
# in fp32 G = 2048. q has twice as many heads: Q = 1024.
LAWS = {
    "allgather": (3072, 6144),  # 3 B; 3 G
    "ulysses": (2304, 2304),  # 3/4 (2 Q + B)
    "flash": (3072, 11264),  # 3 B; 3 B + 4 G
}


@ranks(4)
@cases("mode, law", LAWS.items())
def test_law_of_bytes_over_cp(mode, law):
    """A rank of four sends these bytes forward and backward, and waits for all messages."""
    group = Mesh(cp=4)["cp"]
    qkv = []
    for heads in (8, 4, 4):
        x = numbers("x", group.rank, 2, 4, heads, 8, dtype=torch.bfloat16)
        qkv.append(x.requires_grad_())
    with Tape() as tape:
        o = CONTEXT[mode].attention(*qkv, group)
        forward = tape.sent
        o.sum().backward()
    close((forward, tape.sent - forward, tape.left), (*law, []), "bytes")


def test_a_message_of_int8():
    """The docstring's example: a message has dim + 4 bytes for each token."""
    x = torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]])
    message = compressed_sync.to_int8(x)
    close(message.shape[1], 3 + 4, "bytes of a token")
    close(message[:, :3].tolist(), [[32, -127, 64], [0, 0, 0]], "integers")
    close(
        compressed_sync.from_int8(message, x.dtype), message[:, :3] * 2.0 / 127, "numbers", 1, 1e-6
    )


def overlapping(tape: Tape) -> list[int]:
    """The numbers of the collectives that were in flight while a matmul ran."""
    in_flight, found = set(), set()
    for event in tape.events:
        word, _, number = event.partition(" ")
        if word == "matmul":
            found |= in_flight
        else:
            in_flight ^= {int(number)}  # it starts or ends
    return sorted(found)


@ranks(2)
@cases("counts", [[3, 2, 4, 1], [0, 1, 0, 5]])
def test_expert_messages_are_hidden(counts):
    """All exchanges but the first and the last of each pass overlap. Bytes are step 7's."""
    mesh = Mesh(ep=2)
    rows = numbers("rows", mesh.rank, sum(counts), 8).requires_grad_()
    tapes = []
    for balance in ("none", "none+overlap"):
        moe = step07.BALANCE[balance](8, 12, Config(experts=2), mesh).double()
        with Tape() as tape:
            moe.run_experts(rows, torch.tensor(counts)).sum().backward()
        tapes.append(tape)
    usual, tape = tapes
    close((tape.sent, tape.left), (usual.sent, []), "bytes")
    # 0: counts. 1, 2: dispatches. 3, 4: combines. 5 to 8: their gradients, in reverse order.
    close((overlapping(usual), overlapping(tape)), ([], [2, 3, 6, 7]), "hidden exchanges")


# --- Routing ------------------------------------------------------------------------------------


def layer(name: str, **flags) -> step07.MoE:
    """A layer of --balance `name` in groups of one rank, with 8 experts, of which 4 are chosen."""
    PRESETS["test"] = ModelConfig(**SHAPE | dict(dim=8, seq_len=8))
    flags = BASE | dict(model="test", balance=name, experts=8, experts_per_token=4) | flags
    names = ("dp", "cp", "tp", "data", "ep", "micro_batch")
    alone = {group: Group(group, 0, 1, None) for group in names}
    moe = step07.BALANCE[name](8, 10, Config(**flags), alone)
    for key, param in moe.named_parameters():
        param.data = numbers(key, 0, *param.shape)
    return moe


def test_deepseek_is_deepseeks():
    """The output is that of DeepSeek-V3's layer in transformers, whatever the bias (fp32)."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

    ours = layer("deepseek", shared_experts=2).float()
    sizes = dict(hidden_size=8, moe_intermediate_size=10, n_routed_experts=8, n_shared_experts=2)
    sizes |= dict(num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=1.0)
    theirs = hf.DeepseekV3MoE(hf.DeepseekV3Config(**sizes))
    router, gate, up, *others = ours.parameters()
    values = [torch.cat((gate, up), 1), others[0], router, *others[1:]]
    for param, value in zip(theirs.parameters(), values, strict=True):
        param.data = value.data
    theirs.gate.e_score_correction_bias = ours.bias
    x = numbers("x", 0, 2, 8, 8, dtype=torch.float32)
    for scale in (0.0, 0.5):
        ours.bias.copy_(numbers("bias", 0, 8) * scale)
        close(ours(x), theirs(x), f"the output, with a bias of about {scale}", bound=1e-5)


@torch.no_grad()
def test_capacity_by_definition():
    """An expert takes the first ceil(c K T / E) choices. A later one costs no row, and gives 0."""
    moe = layer("capacity", capacity_factor=0.7)
    x_TD = numbers("x", 0, 16, 8)
    load = Counter()
    expected = torch.zeros(16, 8).double()
    for t, x in enumerate(x_TD):
        p = (moe.router.weight @ x).softmax(-1)
        chosen = p.argsort(descending=True)[:4].tolist()
        for e in chosen:
            load[e] += 1
            if load[e] <= 6:  # 0.7 x 4 x 16 / 8 = 5.6
                (y,) = moe.experts(x[None], F.one_hot(torch.tensor(e), 8))
                expected[t] += p[e] / p[chosen].sum() * y
    with mock.patch.object(moe.experts, "forward", wraps=moe.experts.forward) as experts:
        close(moe(x_TD.view(2, 8, 8)), expected.view(2, 8, 8), "the output")
    close(experts.call_args.args[1].tolist(), [min(6, load[e]) for e in range(8)], "rows computed")
    assert max(load.values()) > 6, "nothing was dropped"


# --- Mistakes -----------------------------------------------------------------------------------


REFUSED = [
    (torch.float32, 64, (9, 0), "--dtype bf16"),
    (torch.bfloat16, 64, (7, 5), "Ampere"),
    (torch.bfloat16, 36, (9, 0), "head_dim"),
]


@cases("dtype, head_dim, capability, error", REFUSED)
def test_a_gpu_that_flash_cannot_use(dtype, head_dim, capability, error):
    """On a GPU the check, at the first forward, names what to change."""
    q = SimpleNamespace(is_cuda=True, device=0, dtype=dtype, shape=(1, 1, 1, head_dim))
    gpu = mock.patch("torch.cuda.get_device_capability", return_value=capability)
    with gpu, pytest.raises(UserError, match=error):
        flash_ring.check_kernel(q)
