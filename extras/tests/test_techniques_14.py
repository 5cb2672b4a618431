"""The techniques of steps 1 to 4: each trains to one process's numbers, and keeps its law.

ROWS is a table of layouts. Each row trains a step with the flags of some techniques; losses, norms,
gradients and weights must equal those of one process, to 1e-10 (tests/equal.py); those of lossy
techniques, to a bound. States of loops, and launch lines of all techniques, are tested here, too.
"""

import importlib
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import step01_single_gpu as step01
import step02_ddp as step02
import step03_zero as step03
import step04_tp_sp as step04
from common import UserError
from common.comm import Mesh
from common.flags import parse
from common.model import PRESETS, Decoder, ModelConfig, summed_cross_entropy
from extras.__main__ import with_flags
from extras.loops import diloco, fp16, pipedream
from extras.state import StatefulRun
from extras.techniques import adafactor, muon, zero_offload
from extras.tests import rows
from extras.tests.rows import TECHNIQUES, Config, check_row
from tests.equal import Watch, close, decoder, draw, run_of
from tests.pool import RankError
from tests.tape import Live, Tape

ranks = pytest.mark.ranks
cases = pytest.mark.parametrize
CPU = torch.device("cpu")


# --- One process's numbers -----------------------------------------------------------------------

STEP2, STEP3, STEP4 = "step02_ddp", "step03_zero", "step04_tp_sp"
STEP5, STEP7 = "step05_cp_ring", "step07_moe_ep"
# SGD shows a wrong scale of gradients, which AdamW hides
SGD = dict(optimizer="sgd", lr=0.5, micro_batch_size=2)
TIED = SGD | dict(tied=True)
MUON = dict(optimizer="muon", micro_batch_size=2)
ROWS = [  # ranks, flags and sizes of both runs, and the layout
    (3, SGD, "step02_ddp --sync tree"),
    (3, SGD, "step02_ddp --sync server"),
    (3, SGD, "step02_ddp --sync topk --topk-fraction 1"),  # nothing is lost
    (2, dict(optimizer="adafactor"), "step03_zero --zero 0"),
    # Muon: matrices on all ranks, parts of ZeRO, padded shards of tp, experts of ep, stages of pp
    (3, MUON, "step03_zero --zero 0"),
    (3, MUON, "step03_zero --zero 2"),
    (4, MUON | dict(ffn_dim=50), "step04_tp_sp --zero 0 --tp 4"),
    (4, MUON | dict(tied=True), "step04_tp_sp --zero 2+offload --tp 2 --recompute full,logits"),
    (4, MUON, "step05_cp_ring --zero 3+replicas --cp 2 --tp 2 --recompute logits"),
    (4, MUON | dict(experts=4), "step07_moe_ep --zero 1 --pp 2 --ep 2 --recompute selective"),
    # ZeRO with replicas of shards, and on the host
    (4, SGD, "step03_zero --zero 1+replicas"),
    (4, SGD, "step03_zero --zero 2+replicas --replicas 4"),
    (3, SGD, "step03_zero --zero 1+offload"),
    (3, TIED, "step03_zero --zero 3+offload-all --recompute full,offload"),
    (4, TIED | dict(experts=4, micro_batch_size=1), "step07_moe_ep --zero 3+replicas --ep 2"),
    # four ranks of tp for two key/value heads
    (4, SGD, "step04_tp_sp --zero 1 --tp 4"),
    # what backward computes again, or fetches
    (2, SGD, "step04_tp_sp --tp 2 --recompute all-but-attention,logits"),
    (2, dict(tied=True), "step03_zero --zero 3 --recompute offload"),
    (4, TIED, "step06_pipeline --zero 2+offload --pp 2 --tp 2 --recompute selective,logits"),
]


@cases("n, base, line", ROWS, ids=str)
def test_a_layout_trains_to_one_process_numbers(pools, n, base, line):
    """Losses, norms, gradients and weights equal those of one process, to 1e-10 in fp64."""
    check_row(pools, n, base, line)


# Lossy ones: bounds of all errors, relative to each tensor's norm
LOSSY = [
    (3, "step02_ddp --sync bf16", 1e-2),
    (3, "step02_ddp --sync int8", 5e-2),
    (3, "step02_ddp --sync topk --topk-fraction 0.95", 0.2),
    (2, "step06_pipeline --pp 2 --schedule 1f1b-int8", 1e-2),
]


@cases("n, line, bound", LOSSY)
def test_a_lossy_technique_stays_near(pools, n, line, bound):
    """Losses, norms, gradients and weights are near one process's, and not equal to them."""
    check_row(pools, n, TIED, line, bound)
    with pytest.raises(AssertionError):
        check_row(pools, n, TIED, line, bound / 1000)


class StatefulWatch(StatefulRun, Watch):
    """`Watch`, with the state of techniques."""


def recorded(step: str, flags: dict[str, Any]) -> Tensor:
    """Runs on every rank: losses and, with fp16, their factors, by step [steps, 2]."""
    history = run_of(step, flags, StatefulWatch).history
    return torch.tensor([[row["loss"], row.get("loss_scale", 1.0)] for row in history])


RESUMED = [  # step, flags, and flags that change
    (rows.__name__, dict(script=STEP2, sync="int8"), {}),
    (rows.__name__, dict(MUON, script=STEP3, zero="2"), {}),
    (
        rows.__name__,
        dict(script=STEP3, zero="1+replicas", replicas=2),
        dict(zero="3+replicas", replicas=1),
    ),
    ("extras.loops.diloco", dict(inner_steps=2), {}),
    ("extras.loops.fp16", dict(growth_steps=2), {}),
]


@cases("step, flags, changed", RESUMED)
def test_a_resumed_run_computes_the_same(pools, tmp_path, step, flags, changed):
    """A run that resumes after 3 of 6 steps has the same losses and factors: no state is lost."""
    flags = flags | dict(steps=6)
    whole = pools(2).run(recorded, step, flags | dict(out=f"{tmp_path}/whole", save_every=3))
    saved = f"{tmp_path}/whole/checkpoints/step-00000003"
    rest = pools(2).run(recorded, step, flags | changed | dict(out=f"{tmp_path}/b", resume=saved))
    for rank, numbers in enumerate(rest):
        close(numbers, whole[rank][3:], f"losses and factors of steps 4 to 6 on rank {rank}")


def test_state_of_a_rank_needs_the_same_ranks(pools, tmp_path):
    """Errors that two ranks owe cannot be restored on one: a line says so."""
    flags = dict(script=STEP2, sync="int8", steps=2, save_every=1)
    pools(2).run(recorded, rows.__name__, flags | dict(out=f"{tmp_path}/a"))
    with pytest.raises(RankError, match="for the state of sync, keep the number of ranks"):
        resumed = flags | dict(out=f"{tmp_path}/b", resume=f"{tmp_path}/a")
        pools(1).run(recorded, rows.__name__, resumed)


# --- Gradient sums (step 2) ----------------------------------------------------------------------


class Sums:
    """One gradient of `length` numbers in fp32, summed over all ranks by a sync class."""

    def __init__(self, sync: str, length: int, **flags: Any):
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.zeros(length))
        self.model.weight.grad_dtype = torch.float32
        config = Config(**flags)
        self.mesh = Mesh(dp=dist.get_world_size())
        self.sync = step02.SYNCS[sync](self.model, config, self.mesh)

    def terms(self, step: int) -> list[Tensor]:
        """The ranks' gradients of a step."""
        length = len(self.model.weight)
        return [draw(f"{step}", r, length, dtype=torch.float32) for r in range(self.mesh.world)]

    def sum(self, step: int) -> Tensor:
        """The sum of a step, as the sync class finds it."""
        self.sync.begin(1)
        (self.model.weight * self.terms(step)[self.mesh.rank]).sum().backward()
        self.sync.finish()
        found = self.model.weight.grad.clone()
        self.model.weight.grad = None
        return found


@ranks(4)
@cases("sync, gradients_sent", [("tree", [2, 1, 2, 1]), ("server", [3, 1, 1, 1])])
def test_law_of_trees(sync, gradients_sent):
    """Each rank but 0 sends the gradient up, and each rank sends it down to all its children."""
    sums = Sums(sync, 10)
    with Tape() as tape:
        found = sums.sum(0)
    close(found, sum(sums.terms(0)), "the sum", 4, 1e-6)
    close(tape.sent, gradients_sent[sums.mesh.rank] * 40, "bytes that this rank sends")
    close(tape.left, [], "messages that were never waited for")


# Kind, bytes of a number that is sent, and the error of five sums' total without what is owed.
MESSAGES = [("bf16", 2, 0.1), ("int8", 1 + 4 / 256, 0.3), ("topk", 0.25 * 8, 10.0)]


@ranks(3)
@cases("sync, nbytes, loss", MESSAGES)
def test_what_is_lost_is_owed(sync, nbytes, loss):
    """The total of five sums, with what all ranks owe, is the true total; the law of bytes."""
    sums = Sums(sync, 3072, topk_fraction=0.25)
    missing = torch.zeros(3072)
    with Tape() as tape:
        for step in range(5):
            missing += sum(sums.terms(step)) - sums.sum(step)
    close(tape.sent, 5 * round(2 * 2 / 3 * 3072 * nbytes), "bytes: 2 (n-1)/n of the messages")
    owed = sums.sync.state()["owed.0"].flatten()
    dist.all_reduce(owed)
    assert (missing - owed).abs().max() < 1e-4 < missing.abs().max() < loss


# --- Updates (step 1) ----------------------------------------------------------------------------


def test_law_of_adafactor():
    """Adafactor keeps n + m numbers of a matrix [n, m], and n of a norm [n], in fp32."""
    model = decoder(dtype=torch.float32, **vars(PRESETS["tiny"]))
    optimizer = step01.Optimizer(model, step01.Config(optimizer="adafactor"))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step(0.1)
    states = optimizer.torch_optimizer.state.values()
    held = sum(x.nbytes for state in states for x in state.values() if x.dim())
    close(held, 4 * sum(sum(param.shape) for param in model.parameters()), "bytes of the state")
    assert f"{held:,} bytes" in adafactor.__doc__


def test_muon_is_torchs():
    """Four updates equal those of torch.optim.Muon, which here does not round to bf16."""
    model = nn.Module()
    model.up_proj = nn.Linear(4, 6, bias=False, dtype=torch.float64)
    model.down_proj = nn.Module()  # three experts, of which each is a matrix
    model.down_proj.weight = nn.Parameter(draw("down", 0, 3, 4, 6))
    up, down = model.parameters()
    matrices = [matrix.detach().clone() for matrix in (up, *down)]
    ours = step01.Optimizer(model, Config(optimizer="muon", weight_decay=0.3))
    torchs = torch.optim.Muon(matrices, weight_decay=0.3, adjust_lr_fn="match_rms_adamw", lr=0.1)
    for turn in range(4):
        up.grad = draw(f"up {turn}", 0, 6, 4)
        down.grad = draw(f"down {turn}", 0, 3, 4, 6)
        for matrix, grad in zip(matrices, (up.grad, *down.grad), strict=True):
            matrix.grad = grad.clone()
        ours.step(0.1)
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            torchs.step()
    for found, matrix in zip((up, *down), matrices, strict=True):
        close(found, matrix, "a matrix")


MATRICES = [(128, 128), (128, 128), (64, 128), (64, 128), *[(128, 352)] * 3]  # of a layer of tiny
S = 4 * sum(2 * r * c for r, c in MATRICES)  # bytes, in bf16
WORK = 4 * sum(5 * (4 * r * r * c + 2 * r**3) for r, c in MATRICES)


def muon_costs(zero: str, tp: int) -> tuple[int, int]:
    """One update of tiny by Muon on all ranks: bytes that this rank sends, and its FLOPs."""
    mesh = Mesh(dp=dist.get_world_size() // tp, tp=tp)
    with torch.device("meta"):
        model = Decoder(PRESETS["tiny"])
    step04.shard_tensors(model, mesh, sp=True)
    config = step04.Config(zero=zero, optimizer="muon")
    optimizer, sync = step03.make_weights_and_optimizer(model, config, mesh, CPU, torch.float32)
    sync.begin(1)
    for param in model.parameters():
        param.sum().backward()
    sync.finish()
    optimizer.publish = mock.Mock()
    with Tape() as tape, FlopCounterMode(display=False) as counter:
        optimizer.step(0.1)
    close(tape.left, [], "messages that were never waited for")
    return tape.sent, counter.get_total_flops()


def written(*numbers: int) -> bool:
    """Whether Muon's docstring has these numbers in a row."""
    return re.search(r"\D+".join(f"{number:,}" for number in numbers), muon.__doc__) is not None


@ranks(4)
def test_law_of_muon_without_zero():
    """The ranks share the work equally. Over dp O is sent, and over tp parts of U and of O."""
    over_dp = 3 * S // 4
    over_tp = 2 * 3 * S // 16
    close(muon_costs("0", 1), (over_dp, WORK // 4), "bytes and FLOPs over dp")
    close(muon_costs("0", 4), (over_tp, WORK // 4), "bytes and FLOPs over tp")
    assert written(over_dp, WORK // 4) and written(over_tp, WORK // 4)


@ranks(4)
def test_law_of_muon_with_zero():
    """Ranks send at most 2 S/n on average, and none has 10 % more work than the mean."""
    everyone = [None] * 4
    dist.all_gather_object(everyone, muon_costs("1", 1))
    sent, work = zip(*everyone, strict=True)
    assert sum(sent) <= 2 * S
    assert sum(work) == WORK and max(work) < 1.1 * WORK / 4
    assert written(min(sent), max(sent), min(work), max(work))


# --- Recomputation (step 1) ----------------------------------------------------------------------

SHAPE = dict(dim=32, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=259, seq_len=16)


def forward(recompute: str, n_layers: int, dtype: torch.dtype = torch.float32) -> tuple:
    """The model's forward on one sequence: the loss, and the bytes that it keeps."""
    model = decoder(dtype=dtype, n_layers=n_layers, **SHAPE)
    step01.set_up_layers(model, Config(recompute=recompute))
    tokens = torch.arange(16)[None]
    with Live() as live:
        loss = model(tokens, tokens)
        return loss, live.bytes


# With h = dim, k = kv heads x head_dim, f = ffn_dim, a = heads: the numbers that a layer keeps of a
# token, in the model's dtype and in fp32, and how many of its 7 matrix products backward repeats.
H, K, F, A = 32, 16, 48, 4
KEPT = [
    ("selective", 5 * H + 2 * K + 2 * F, A, 0),
    ("all-but-attention", 2 * H, A, 6),
    ("offload", 10 * H + 2 * K + 4 * F + 4 * H, A + 4, 0),  # 4 h: norms on a CPU
    ("full,offload", H, 0, 6),
]


@cases("recompute, numbers, statistics, repeated", KEPT)
def test_law_of_recomputation(recompute, numbers, statistics, repeated):
    """What one more layer keeps for backward, and the products that backward repeats."""
    forward(recompute, 1)  # RoPE's tables and such are made in the first
    loss, two = forward(recompute, 2)
    three = forward(recompute, 3)[1]
    close((three - two) // 16, 4 * numbers + 4 * statistics, "bytes of a token")
    with Tape() as tape:
        loss.backward()
    matrices = tape.events.count("matmul")
    close(matrices, 2 * (7 * 2 + 1) + 2 * repeated, "matrix products of backward")


def test_law_of_logits():
    """Logits exist for an eighth of the tokens at a time, in forward and again in backward."""
    shapes = []

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        shapes.append(list(logits.shape))
        return summed_cross_entropy(logits, targets)

    model = decoder(n_layers=1, **SHAPE)
    model.loss = loss_of
    step01.set_up_layers(model, Config(recompute="logits"))
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens).backward()
    close(shapes, [[2, 2, 259]] * 16, "shapes of the logits of 32 tokens")


def test_heads_gradients_add_up_in_fp32():
    """In bf16, the gradients of the head from different chunks are added in fp32."""
    model = decoder(dtype=torch.bfloat16, n_layers=1, **SHAPE)
    step01.set_up_layers(model, Config(recompute="logits"))
    step01.Optimizer(model, step01.Config())
    hidden = draw("hidden", 0, 1, 16, 32, dtype=torch.bfloat16)
    targets = torch.arange(16)[None]
    model.loss(hidden, targets).backward()
    found = model.lm_head.weight.grad
    close(found.dtype, torch.float32, "dtype of the gradient")
    rounded = found.bfloat16().float()
    assert not torch.equal(found, rounded), "it has 8 bits, as if terms were added in bf16"


# --- ZeRO (step 3) -------------------------------------------------------------------------------


def zero_run(zero: str, m: int = 1, **flags: Any) -> tuple:
    """A step of ZeRO with m micro-batches on all ranks, in fp32: the optimizer, and the tape."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SHAPE, n_layers=2))
    mesh = Mesh(dp=dist.get_world_size())
    config = Config(zero=zero, **flags)
    optimizer, sync = step03.make_weights_and_optimizer(model, config, mesh, CPU, torch.float32)
    tokens = torch.arange(16)[None]
    with Tape() as tape:
        sync.begin(m)
        for _ in range(m):
            model(tokens, tokens).backward()
        sync.finish()
        optimizer.step(0.1)
    return optimizer, tape, mesh


@ranks(4)
@cases("stage, shard_elements", [(1, 1 + 1), (2, 2 + 1), (3, 2 * 3)])
def test_law_of_replicas(stage, shard_elements):
    """Over "replicas" 2 (R-1)/R P R/n elements, over "shard" step 3's table for n/R ranks."""
    optimizer, tape, mesh = zero_run(f"{stage}+replicas", m=2, replicas=2)
    sizes = [unit.shard_length * 2 for unit in optimizer.units]  # with padding
    gathered_once = sizes[0] + sizes[-1]  # in stage 3, units E and H
    elements = shard_elements * sum(sizes) - 2 * gathered_once * (stage == 3)
    close(mesh.sent["replicas", "all_reduce"], 4 * sum(sizes) // 2, "bytes over replicas")
    close(tape.sent, 4 * sum(sizes) // 2 + 4 * elements // 2, "bytes over both")
    close(tape.left, [], "messages that were never waited for")


@ranks(2)
@cases("zero", ["1+offload", "2+offload", "3+offload", "3+offload-all"])
def test_what_is_on_the_host(zero):
    """Masters, and gradients in an update, are copies by `to_host`; with -all weights are, too."""

    def to_host(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.on_host = True
        return copy

    with mock.patch.object(zero_offload, "to_host", to_host):
        optimizer, *_ = zero_run(zero)
    for unit in optimizer.units:
        kinds = dict(master=unit.master, gradient=unit.summed_grad, shard=unit.shard)
        found = {kind for kind, tensor in kinds.items() if hasattr(tensor, "on_host")}
        expected = {"master", "gradient"} | ({"shard"} if zero == "3+offload-all" else set())
        close(found, expected, "what is on the host")


# --- Tensor parallelism (step 4) -----------------------------------------------------------------


@ranks(4)
@cases("kv_heads", [1, 2])
def test_law_of_few_heads(kv_heads):
    """The gradient of a rank's head of k_proj is summed over the copies: 2 (c-1)/c of its bytes."""
    mesh = Mesh(dp=1, tp=4)
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SHAPE | dict(n_layers=1, n_kv_heads=kv_heads)))
    step04.shard_tensors(model, mesh, sp=False)
    name = "model.layers.0.self_attn.k_proj.weight"
    gradients = {name: torch.ones(model.get_parameter(name).shape)}
    with Tape() as tape:
        step04.sum_partial_gradients(model, gradients, mesh)
    copies = 4 // kv_heads
    close(tape.sent, 2 * (copies - 1) * 4 * 8 * 32 // copies, "bytes that a rank sends")


# --- Flags ---------------------------------------------------------------------------------------

ONE_HEAD = "--model debug,n_heads=1,n_kv_heads=1"
REFUSED = [
    (STEP2, "--sync topk --topk-fraction 1.5", "--topk-fraction 1.5 must be above 0"),
    (STEP2, "--topk-fraction 0.5", "--topk-fraction has no effect without --sync topk"),
    (STEP3, "--sync tree", "--sync has no effect without --zero 0"),
    (STEP3, "--replicas 2", "--replicas has no effect without --zero 1+replicas or"),
    (STEP3, "--zero 2+replicas --replicas 3", "--replicas 3 must divide the 2 ranks of dp x cp"),
    (STEP3, "--optimizer adafactor", "--optimizer adafactor needs whole matrices: use --zero 0"),
    (STEP4, "--tp 2 --zero 0 --optimizer adafactor", "--optimizer adafactor needs whole"),
    (STEP5, f"--cp 2 --cp-mode ulysses {ONE_HEAD}", "--cp-mode ulysses: --cp 2 must divide"),
    (STEP7, "--balance groups --expert-groups 3", "--expert-groups 3 must divide"),
    (STEP7, "--balance groups --groups-per-token 4", "--expert-groups 4 must divide"),
]


def refusal(step: str, flags: str) -> str:
    """Runs on every rank: the message with which a step refuses flags."""
    module = importlib.import_module(step)
    words = ["--device=cpu", "--model=debug", *flags.split()]
    try:
        run = Watch(parse(with_flags(module.Config, TECHNIQUES), words))
        module.train(run.config, run)
    except UserError as error:
        return str(error)
    return "accepted"


@cases("step, flags, message", REFUSED)
def test_a_mistake_is_one_line(pools, step, flags, message):
    """Flags that cannot work, or would have no effect, are refused on every rank."""
    for found in pools(2).run(refusal, step, flags):
        assert found.startswith(message), found


@cases("technique", [*TECHNIQUES, diloco, fp16, pipedream])
def test_launch_lines(technique):
    """The launch line in each docstring has flags that its script accepts."""
    pattern = r"^Run it: .*? -m (?:extras )?(\S+?)(?:\.py)? (.*)$"
    ((script, flags),) = re.findall(pattern, technique.__doc__, re.MULTILINE)
    module = importlib.import_module(script)
    parse(with_flags(module.Config, TECHNIQUES), flags.split())
