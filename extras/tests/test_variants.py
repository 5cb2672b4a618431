"""Tests what a comparison with one process cannot show, such as the number of graphs, or which messages overlap."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call

import step07_moe_ep as step07
from common import comm
from common.comm import Mesh
from common.model import attend
from extras.tests import equal
from extras.tests.faults import Fault, injected
from extras.variants.step01 import dropout
from extras.variants.step01.documents import MicroBatch
from extras.variants.step01.window import windowed_attention
from extras.variants.step02.compress import Compression
from extras.variants.step04.block_overlap import EnterLinears
from extras.variants.step06 import pipedream
from step01_single_gpu import Optimizer, learning_rate, scale
from tests.tape import Tape


@contextmanager
def logits_of() -> Iterator[list[int]]:
    """Inside this context, the list collects the number of tokens in each multiplication by the head's weight."""
    sizes, shape = [], (equal.SMALL["vocab_size"], equal.SMALL["dim"])

    def linear(x, weight, *bias, right=F.linear):
        sizes.extend([x.shape[:-1].numel()] * (weight.shape == shape))
        return right(x, weight, *bias)

    with mock.patch.object(F, "linear", linear):
        yield sizes


@pytest.mark.parametrize("chunk", [0, 40, 64])
def test_logits_of_one_chunk_exist(chunk):
    """At most `chunk` tokens have logits at the same time, or all 64 tokens of a micro-batch if `chunk` is 0."""
    with logits_of() as sizes:
        equal.record("step01_single_gpu", dict(steps=1, micro_batch_size=4, global_batch_size=4, loss_chunk=chunk))
    assert max(sizes) == (chunk or 64)


# --- compiled graphs


def graphs_of(step: str, flags: dict) -> int:
    """Runs on every rank: train with --compile in bf16; returns the number of compiled graphs."""
    from torch._dynamo.utils import counters  # takes seconds to import

    torch.compiler.reset()
    counters.clear()
    eager = 'partial(torch.compile, backend="eager")('
    with injected(Fault("extras.variants.step01.compiled", "attach", "torch.compile(", eager, "")):
        equal.watch(step, dict(compile=True, steps=1, global_batch_size=4, dtype="bf16") | flags)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("step, layers", [("step01_single_gpu", 10), ("step02_ddp", 2)])
def test_all_layers_share_one_graph(pools, step, layers):
    """All layers of a model share one graph. (Dynamo would give up after eight graphs.)"""
    assert pools(1).run(graphs_of, step, dict(n_layers=layers)) == [1]


# --- recomputation


@pytest.mark.parametrize("mode", ["full", "elementwise"])
def test_a_router_chooses_once(mode):
    """Recomputation chooses the same experts as forward, even if the router's scores differ, as they may on a GPU."""
    right, chosen, draws = F.one_hot, [], torch.Generator()  # recomputation would restore torch's own generator
    step07.shaky = lambda: torch.rand(4, generator=draws)
    shaky = Fault("step07_moe_ep", "MoE", ".softmax(-1)", ".softmax(-1) * shaky()", "")
    with injected(shaky), mock.patch.object(F, "one_hot", lambda x, n: chosen.append(x.tolist()) or right(x, n)):
        equal.record("step07_moe_ep", dict(experts=4, recompute=mode, steps=1, expert_matmul="grouped"))
    for i in range(0, len(chosen), 6):  # three layers forward, and again in backward
        assert chosen[i : i + 6] == chosen[i : i + 6][::-1]


# --- overlap


def order() -> tuple[str, list[int]]:
    """Runs on every rank: returns the messages and matmuls of backward, in order, and the shape of the saved input."""
    group = Mesh(tp=dist.get_world_size())["tp"]
    x = torch.ones(1, 6 // group.size, 4, requires_grad=True)
    outputs = EnterLinears.apply(x, group, *(torch.ones(5, 4, requires_grad=True) for _ in range(2)))
    kept = list(outputs[0].grad_fn.saved_tensors[0].shape)
    with Tape() as tape:
        sum(output.sum() for output in outputs).backward()
    return ", ".join(tape.events), kept


def test_collectives_hide_behind_matrices(pools):
    """Backward computes dx during the all-gather, and dW during the reduce-scatter. A rank saves only its tokens."""
    events = "start 0, matmul, matmul, start 1, wait 0, matmul, matmul, wait 1"  # dx of two matrices, then dW of both
    assert pools(2).run(order) == [(events, [1, 3, 4])] * 2


# --- compressed sums

WORDS = {"bf16": 2, "int8": 1.016, "topk": 8 * 0.25}  # bytes for each number; int8: 1,000 numbers have four fp32 scales
LOST = {"bf16": 0.1, "int8": 0.3, "topk": 10.0}  # bound of the error of five sums' total, without `owed`


def sums_on_rank(kind: str, whole: bool) -> tuple[float, float, float]:
    """Runs on every rank: sum random gradients, fp32 [3000], five times, as a bucket (`whole`) or as a unit of ZeRO.

    Returns the largest error of the total, with and without the unsent rest (`owed`), and the bytes of a sum.
    """
    group, sent, length = Mesh(dp=dist.get_world_size())["dp"], [], 3000
    compression = Compression(SimpleNamespace(compress=kind, topk_fraction=0.25), SimpleNamespace(pending=[]))
    key, missing = type("Part", (), dict(group=group))(), 0.0
    mine = slice(0, length) if whole else group.share(length, "")
    comm.observer = lambda _operation, _group, tensor, share: sent.append(share * tensor.nbytes)
    for step in range(5):
        drawn = [torch.randn(length, generator=torch.Generator().manual_seed(step * 10 + r)) for r in range(group.size)]
        key.flat = key.gradient = drawn[group.rank].clone()
        pending = compression.sync.pending
        pending.append(compression.send(None, key) if whole else compression.reduce(None, key))
        for message in filter(None, pending):  # the first message of a bucket appends a second
            message.wait()
        missing = missing + sum(drawn)[mine] - (key.flat if whole else key.reduced_shard)
    comm.observer = None
    owed = compression.owed[key].clone().view(-1)
    dist.all_reduce(owed)
    return (missing - owed[mine]).abs().max().item(), missing.abs().max().item(), sum(sent) / 5


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_lost_is_owed(pools, kind, whole):
    """The total of the sums, plus what is still owed, is the true total. The bytes sent are those of WORDS."""
    for with_debt, without, n_bytes in pools(3).run(sums_on_rank, kind, whole):
        assert with_debt < 1e-4 < without < LOST[kind]
        assert n_bytes == pytest.approx((1 + whole) * 2 / 3 * 3000 * WORDS[kind])


# --- documents and windows


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention with an explicit mask: q, k, v [batch, seq, heads, head_dim] -> like q."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def test_whole_sequences_equal_a_mask():
    """Attention in each document separately equals attention over whole sequences with a mask between documents."""
    tokens = torch.tensor([[1, 2, 0, 3, 4, 5, 0, 6], [0, 1, 0, 0, 2, 3, 4, 5]])
    batch = MicroBatch(tokens, 0, torch.arange(8)[None])
    assert batch.lengths == [3, 4, 1, 1, 2, 1, 4]
    q, k, v = torch.randn(3, 2, 8, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = (x.flatten(0, 1)[None].split(batch.lengths, 1) for x in (q, k, v))
    ours = torch.cat([attend(*document) for document in zip(*parts, strict=True)], 1).view(q.shape)
    same = batch.numbers[:, :, None] == batch.numbers[:, None, :]
    assert (ours - masked(q, k, v, same.tril()[:, None])).abs().max() < 1e-14


@pytest.mark.parametrize("window", [2, 5, 16, 40])
def test_a_window_equals_a_mask(window):
    """Windowed attention has the output and the gradients of attention with an explicit mask."""
    q, k, v = (torch.randn(2, 16, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    apart = torch.arange(16)[:, None] - torch.arange(16)
    right = masked(q, k, v, (apart >= 0) & (apart < window))
    ours, dy = windowed_attention(q, k, v, window), torch.randn(2, 16, 4, 8, dtype=torch.float64)
    found = [ours, *torch.autograd.grad(ours, (q, k, v), dy)]
    for one, other in zip(found, [right, *torch.autograd.grad(right, (q, k, v), dy)], strict=True):
        assert equal.difference(one.detach(), other.detach()) < 1e-13


# --- DiLoCo (rows.py tests meetings after every step, and resumed runs)

MEETING = dict(steps=6, global_batch_size=4, lr=0.02, save_every=0)


def two_models() -> tuple[list[float], dict[str, torch.Tensor]]:
    """DiLoCo in one process: each of two models gets its half of a batch; an outer step follows every third step."""
    config = equal.config_of("step01_single_gpu", MEETING)
    parts = equal.watch("step01_single_gpu", MEETING | dict(steps=0)).parts
    shared, models = parts.model, [deepcopy(parts.model) for _ in range(2)]
    inner = [Optimizer(model, config) for model in models]
    outer, losses = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True), []
    for step in range(6):
        tokens, targets = parts.data.batch(step)
        losses.append(0.0)
        for model, optimizer, x, y in zip(models, inner, tokens.chunk(2), targets.chunk(2), strict=True):
            loss = model(x, y) / y.numel()
            loss.backward()
            losses[-1] += loss.item() / 2
            norm = torch.nn.utils.get_total_norm(optimizer.gradients().values()).item()
            scale(optimizer.gradients(), min(1.0, config.grad_clip / norm))
            optimizer.step(learning_rate(step, config))
            optimizer.zero_grad()
        if step % 3 == 2:
            for param, *copies in zip(*(model.parameters() for model in (shared, *models)), strict=True):
                param.grad = param.detach() - (copies[0].detach() + copies[1].detach()) / 2
            outer.step()
            for model in models:
                model.load_state_dict(shared.state_dict())
    return losses, {name: param.detach() for name, param in shared.named_parameters()}


def test_ranks_that_meet_are_two_models(pools):
    """DiLoCo on two ranks gives the losses and weights of `two_models`, to 1e-10."""
    losses, weights = two_models()
    for seen in pools(2).run(equal.record, "step02_ddp", MEETING | dict(sync="diloco", inner_steps=3), equal.Apart):
        assert equal.difference(seen.losses, losses) < 1e-10
        assert max(equal.difference(seen.parameters[name], weight) for name, weight in weights.items()) < 1e-10


# --- a pipeline that is never flushed

UNFLUSHED = dict(global_batch_size=2, seq_len=8)


def never_flushed_on_rank() -> tuple:
    """Runs on every rank: returns the initial weights, and the results (`Shown`) without and with flushes."""
    found, plain, flags = [], pipedream.both, dict(pipedream=8, pp=dist.get_world_size(), lr=0.3, recompute="full")

    def both(config, parts):
        found.append({name: param.detach().clone() for name, param in parts.model.named_parameters()})
        found.extend(plain(config, parts))
        return found[1:]

    with mock.patch.object(pipedream, "both", both):
        equal.watch("step06_pipeline", UNFLUSHED | flags)
    return tuple(found)


def descended(begin: list[dict], late: bool) -> tuple[list[float], dict]:
    """Make 8 updates in one process -> losses, weights. If `late`, stage s of p uses weights of p-1-s updates ago."""
    parts = equal.watch("step01_single_gpu", UNFLUSHED | dict(steps=0)).parts
    ages = {name: late * (len(begin) - 1 - s) for s, weights in enumerate(begin) for name in weights}
    history = [{name: weight for weights in begin for name, weight in weights.items()}]
    losses = []
    for t in range(8):
        met = {name: history[max(0, t - age)][name].clone().requires_grad_() for name, age in ages.items()}
        tokens, targets = parts.data.batch(t)
        loss = functional_call(parts.model, met, (tokens, targets)) / targets.numel()
        slopes = dict(zip(met, torch.autograd.grad(loss, list(met.values())), strict=True))
        history.append({name: weight - 0.3 * slopes[name] for name, weight in history[-1].items()})
        losses.append(loss.item())
    return losses, history[-1]


def test_never_flushed_is_a_descent_by_weights_of_several_ages(pools):
    """Losses and weights are those of `descended`. Without flushes, stage s of p keeps p - s weight versions."""
    ranks = 3
    begin, late, flushed = zip(*pools(ranks).run(never_flushed_on_rank), strict=True)
    for shown, versions, lag in (late, [ranks - s for s in range(ranks)], True), (flushed, [1] * ranks, False):
        losses, weights = descended(begin, lag)
        assert all(one[1] == versions and equal.difference(one[0], losses) < 1e-10 for one in shown)
        ours = {name: weight for _, _, part in shown for name, weight in part.items()}
        assert ours.keys() == weights.keys()
        assert max(equal.difference(ours[name], weight) for name, weight in weights.items()) < 1e-10
    assert late[0][0][:1] == flushed[0][0][:1] and equal.difference(late[0][0], flushed[0][0]) > 1e-3


# --- dropout


def test_drops_a_share_of_the_numbers():
    """Each mask drops the requested share of numbers, and no two masks are correlated (to five standard deviations)."""
    seen = []
    for step, first, place in product((0, 1), (0, 4, 8, 12), (0, 3)):
        seeds = [(7, step, sequence, place) for sequence in range(first, first + 4)]
        masks = [dropout.mask(0.2, seed, torch.arange(64), (64, 90)).double() for seed in seeds]
        seen.append(torch.stack(masks))
    masks = torch.stack(seen).flatten(1) - 0.8
    n, spread = masks.shape[1], (0.2 * 0.8) ** 0.5
    assert masks.mean(1).abs().max() < 5 * spread / n**0.5
    together = (masks @ masks.T / n).fill_diagonal_(0)
    assert together.abs().max() < 5 * spread**2 / n**0.5, "two masks are alike"
