"""What techniques do beyond training to equal numbers: skip or delay updates, hide messages, move and free memory."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import count, islice, product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from common import comm
from common.comm import Mesh
from common.model import Decoder, attend
from extras.services.memory import MemoryTimeline
from extras.tests import equal
from extras.tests.faults import Fault, injected
from extras.variants.step01 import dropout, skip_spikes
from extras.variants.step01.documents import MicroBatch
from extras.variants.step01.fp16 import LossScaling
from extras.variants.step01.window import windowed_attention
from extras.variants.step02.compress import Compression
from extras.variants.step03 import toy
from extras.variants.step04.block_overlap import EnterLinears
from extras.variants.step06 import pipedream
from step01_single_gpu import learning_rate
from tests.tape import Tape


def overflow_on_rank(options: dict) -> tuple[list[int], float]:
    """Make the last rank's gradient infinite in step 2 of 3; returns the steps that had an update, and the scale."""
    begun, updated, gradients, update = count(1), [], LossScaling.gradients, LossScaling.update

    def infinite(self, inner):
        first, found = self.scaled, gradients(self, inner)
        if first:
            self.step_begun = next(begun)
            if self.step_begun == 2 and dist.get_rank() == dist.get_world_size() - 1:
                next(iter(found.values())).fill_(torch.inf)
        return found

    def noting(self, inner):
        update(self, lambda: updated.append(self.step_begun) or inner())

    without = mock.patch.object(equal.Watch, "pieces", lambda *_: {})  # gradients with infinity cannot be compared
    with mock.patch.multiple(LossScaling, gradients=infinite, update=noting), without:
        run = equal.watch("step06_pipeline", options)
    return updated, run.parts.kept["fp16"].scale


@pytest.mark.parametrize("layout", [dict(zero=0), dict(zero=2), dict(pp=2, zero=0, grad_clip=0.0)])
def test_an_overflow_on_one_rank_skips_the_update_on_all(pools, layout):
    """The scale is halved on all ranks. The next update is made."""
    found = pools(2).run(overflow_on_rank, dict(optimizer="sgd", steps=3, dtype="fp16") | layout)
    assert found == [([1, 3], 2**15)] * 2


def test_spikes_are_left_out_and_become_normal():
    """A spike is K times the median of at least eight steps; it enters the median, too."""
    spikes = skip_spikes.Spikes(3.0)
    assert not any(spikes.is_spike(1.0, 100.0) for _ in range(7))
    assert not spikes.is_spike(50.0, 1.0)  # seven are not enough
    assert spikes.is_spike(3.1, 100.0) and spikes.is_spike(1.0, 301.0) and not spikes.is_spike(2.9, 299.0)
    assert not [spikes.is_spike(10.0, 100.0) for _ in range(40)][-1]


def with_spikes(spikes: set[int], **flags) -> equal.Watch:
    """Train in one process, where these steps count as spikes."""
    step = count()
    with mock.patch.object(skip_spikes.Spikes, "is_spike", lambda *_: next(step) in spikes):
        return equal.watch("step01_single_gpu", dict(global_batch_size=4, skip_spikes=2.0) | flags)


@pytest.mark.parametrize("rule", ["adamw", "muon", "adafactor"])
def test_a_spike_goes_back_past_what_came_before_it(rule):
    """Copies before steps 1, 3, 6; a spike in step 5: the bits are as if steps 3, 4 and 5 had not been trained."""
    back = with_spikes({5}, steps=8, optimizer=rule, roll_back=3)
    left_out = with_spikes({3, 4, 5}, steps=8, optimizer=rule)
    assert [row.get("back_to") for row in back.history] == [3 if n == 5 else None for n in range(8)]
    assert [n for n, row in enumerate(left_out.history) if row.get("skipped")] == [3, 4, 5]
    assert all(torch.equal(value, left_out.weights[name]) for name, value in back.weights.items())


@contextmanager
def logits_of() -> Iterator[list[int]]:
    """Inside, the list gets the number of tokens of each product with the head's weight."""
    sizes, shape = [], (equal.SMALL["vocab_size"], equal.SMALL["dim"])

    def linear(x, weight, *bias, right=F.linear):
        sizes.extend([x.shape[:-1].numel()] * (weight.shape == shape))
        return right(x, weight, *bias)

    with mock.patch.object(F, "linear", linear):
        yield sizes


@pytest.mark.parametrize("chunk", [0, 40, 64])
def test_logits_of_one_chunk_exist(chunk):
    """Of 64 tokens of a micro-batch, at most `chunk` have logits at a time; with 0, all."""
    with logits_of() as sizes:
        equal.record("step01_single_gpu", dict(steps=1, micro_batch_size=4, global_batch_size=4, loss_chunk=chunk))
    assert max(sizes) == (chunk or 64)


# --- compiled graphs

SEEN = "attach", "torch.compile(", 'partial(torch.compile, backend="eager")('
LAYERS = {  # step, flags
    "ten layers": ("step01_single_gpu", dict(n_layers=10, steps=2)),  # Dynamo gives up after eight graphs
    "buckets": ("step02_ddp", {}),
    "zero 3": ("step03_zero", dict(zero=3, recompute="elementwise")),
    "pipeline, again": ("step06_pipeline", dict(pp=2, recompute="full")),
}


def graphs_of(name: str) -> int:
    """Runs on every rank: the number of graphs with --compile in bf16, where gradients and weights differ in dtype."""
    from torch._dynamo.utils import counters  # takes seconds to import

    torch.compiler.reset()
    counters.clear()
    step, flags = LAYERS[name]
    with injected(Fault("extras.variants.step01.compiled", *SEEN, "")):
        equal.watch(step, dict(compile=True, steps=1, n_layers=2, global_batch_size=4, dtype="bf16") | flags)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n not in ("ten layers", "buckets"))) for n in LAYERS]
)
def test_all_layers_share_one_graph(pools, name):
    """This holds for any number of layers and any gradients' dtype, if the layers send nothing."""
    ranks = LAYERS[name][1].get("pp", 1)
    assert pools(ranks).run(graphs_of, name) == [1] * ranks


# --- overlap


def order() -> tuple[str, list[int]]:
    """Runs on every rank: the events of backward, and the shape of the input that is kept for it."""
    group = Mesh(tp=dist.get_world_size())["tp"]
    x = torch.ones(1, 6 // group.size, 4, requires_grad=True)
    outputs = EnterLinears.apply(x, group, *(torch.ones(5, 4, requires_grad=True) for _ in range(2)))
    kept = list(outputs[0].grad_fn.saved_tensors[0].shape)
    with Tape() as tape:
        sum(output.sum() for output in outputs).backward()
    return ", ".join(tape.events), kept


def test_collectives_hide_behind_matrices(pools):
    """Backward awaits the all-gather only after dx, and the sum of dx only after dW. It keeps s/n tokens."""
    events = "start 0, matmul, matmul, start 1, wait 0, matmul, matmul, wait 1"  # dx of two matrices, then dW of both
    assert pools(2).run(order) == [(events, [1, 3, 4])] * 2


# --- compressed sums

WORDS = {"bf16": 2, "int8": 1.016, "topk": 8 * 0.25}  # bytes sent for each number; 1,000 numbers have four scales
LOST = {"bf16": 0.1, "int8": 0.3, "topk": 20.0}  # at most, after five sums


def sums_on_rank(kind: str, whole: bool) -> tuple[float, float, float]:
    """Five sums of random gradients, fp32 [3000], as a bucket (`whole`) or a unit.

    Returns how much of the true sum is missing, with and without what all ranks owe, and the bytes sent in one sum.
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
        for message in filter(None, pending):  # it grows
            message.wait()
        missing = missing + sum(drawn)[mine] - (key.flat if whole else key.reduced_shard)
    comm.observer = None
    owed = compression.owed[key].clone().view(-1)
    dist.all_reduce(owed)
    return (missing - owed[mine]).abs().max().item(), missing.abs().max().item(), sum(sent) / 5


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_lost_is_owed(pools, kind, whole):
    """The values that arrived plus those that are owed equal the true sum. Most have arrived."""
    for with_debt, without, n_bytes in pools(3).run(sums_on_rank, kind, whole):
        assert with_debt < 1e-4 < without < LOST[kind]
        assert n_bytes == pytest.approx((1 + whole) * 2 / 3 * 3000 * WORDS[kind])


# --- documents and windows


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """torch's attention of [batch, seq, heads, head_dim] with an explicit mask, which no run uses."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def test_whole_sequences_equal_a_mask():
    """Attention to one document after another equals attention with a mask."""
    tokens = torch.tensor([[1, 2, 0, 3, 4, 5, 0, 6], [0, 1, 0, 0, 2, 3, 4, 5]])
    batch = MicroBatch(tokens, 0, torch.arange(8)[None])
    q, k, v = torch.randn(3, 2, 8, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = (x.flatten(0, 1)[None].split(batch.lengths, 1) for x in (q, k, v))
    ours = torch.cat([attend(*document) for document in zip(*parts, strict=True)], 1).view(q.shape)
    same = batch.numbers[:, :, None] == batch.numbers[:, None, :]
    assert (ours - masked(q, k, v, same.tril()[:, None])).abs().max() < 1e-14
    assert batch.lengths == [3, 4, 1, 1, 2, 1, 4]


@pytest.mark.parametrize("window", [2, 5, 16, 40])
def test_a_window_equals_a_mask(window):
    """The output and all gradients are equal."""
    q, k, v = (torch.randn(2, 16, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    apart = torch.arange(16)[:, None] - torch.arange(16)
    right = masked(q, k, v, (apart >= 0) & (apart < window))
    ours, dy = windowed_attention(q, k, v, window), torch.randn(2, 16, 4, 8, dtype=torch.float64)
    found = [ours, *torch.autograd.grad(ours, (q, k, v), dy)]
    for one, other in zip(found, [right, *torch.autograd.grad(right, (q, k, v), dy)], strict=True):
        assert equal.difference(one.detach(), other.detach()) < 1e-13


# --- where optimizer state is kept


def in_files(options: dict) -> list[bool]:
    """Runs on every rank: for each master and moment, whether its memory is in a file without a name."""
    zero, maps = equal.watch("step03_zero", options).parts.optimizer, Path("/proc/self/maps").read_text()
    files = re.findall(r"^(\w+)-(\w+) (?!.*/dev/shm).*\(deleted\)", maps, re.MULTILINE)
    moments = [t for state in zero.torch_optimizer.state.values() for t in state.values() if t.dim()]
    states = [state.data_ptr() for state in (*zero.masters.values(), *moments) if state.numel()]
    return [any(int(start, 16) <= at < int(stop, 16) for start, stop in files) for at in states]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux where memory is")
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_state_is_where_the_flag_says(pools, where):
    """With `disk`, all masters and both moments of AdamW are in files; with `cpu`, none is."""
    for found in pools(2).run(in_files, dict(zero=1, offload_optimizer=where)):
        assert len(found) > 3 and {*found} == {where == "disk"}


def lines() -> list[str]:
    """Runs on every rank: what `toy` says of each stage of ZeRO."""
    return [toy.toy(stage, Mesh(dp=dist.get_world_size()), torch.device("cpu")) for stage in range(4)]


def test_prints_the_example(pools):
    """Rank 0's lines are those of the docstring."""
    first, second = pools(2).run(lines)
    assert all(line in toy.__doc__ for line in first), first
    assert second[3] == "stage 3, rank 1: weights 3 4, gradient 25 25 -> own 0.5 1.5, all -1.5 -0.5 0.5 1.5"


# --- batches that grow


def ramp_on_rank(options: dict) -> tuple[list[int], list[int]]:
    """Runs on every rank: the recorded tokens of each step, and for each call of the decoder the sum of its tokens."""
    calls, forward = [], Decoder.forward

    def called(model, tokens, *rest):
        calls.append(tokens.sum().item())
        return forward(model, tokens, *rest)

    with mock.patch.object(Decoder, "forward", called):
        run = equal.watch("step02_ddp", options)
    return [row["tokens"] for row in run.history], calls


def test_a_ramp_trains_each_sequence_once(pools):
    """4, 4, 8, 12, 12 sequences a step, one after another in the data; no rank computes more than its share of them."""
    sizes, options = [4, 4, 8, 12, 12], dict(batch_ramp="4,3", global_batch_size=12, steps=5)
    data = equal.watch("step01_single_gpu", dict(steps=1)).parts.data
    data.batch_size = 1
    sequences = iter(data.batch(i)[0].sum().item() for i in range(sum(sizes)))
    recorded, calls = zip(*pools(2).run(ramp_on_rank, options), strict=True)
    assert recorded == ([size * equal.SMALL["seq_len"] for size in sizes],) * 2
    assert [len(some) for some in calls] == [sum(sizes) // 2] * 2
    pairs = zip(*calls, strict=True)
    for size in sizes:
        assert sum(map(sum, islice(pairs, size // 2))) == sum(islice(sequences, size))


# --- late gradients


@pytest.mark.parametrize("late", [0, 1, 3])
def test_late_gradients_are_a_delayed_descent(late):
    """w(T) = w(0) - sum of lr(t) g(t - K), to rounding: each gradient is applied K updates after it was computed."""
    options = dict(optimizer="sgd", lr=0.1, weight_decay=0.0, grad_clip=0.0, steps=6, global_batch_size=4)
    seen = equal.record("step01_single_gpu", options | dict(stale=late))
    rates = [learning_rate(step, equal.config_of("step01_single_gpu", options)) for step in range(6)]
    begin = equal.record("step01_single_gpu", options | dict(lr=0.0)).parameters
    for name, end in seen.parameters.items():
        moved = sum(lr * g[name] for lr, g in zip(rates[late:], seen.gradients, strict=False))
        assert equal.difference(end, begin[name] - moved) < 1e-12, name
    plain = equal.record("step01_single_gpu", options)
    assert (seen.losses == plain.losses) == (late == 0)


# --- a pipeline that is never flushed

UNFLUSHED = dict(global_batch_size=2, seq_len=8)


def never_flushed_on_rank(recompute: str) -> tuple:
    """Runs on every rank: the initial weights, what `both` finds without and with flushes, and what is printed."""
    found, plain, text = [], pipedream.both, io.StringIO()

    def both(config, parts):
        found.append({name: param.detach().numpy().copy() for name, param in parts.model.named_parameters()})
        found.extend(plain(config, parts))
        return found[1:]

    ranks = dist.get_world_size()
    with mock.patch.object(pipedream, "both", both), redirect_stdout(text):
        equal.watch("step06_pipeline", UNFLUSHED | dict(pipedream=8, pp=ranks, lr=0.3, recompute=recompute))
    shown = [(s.losses, s.versions, {name: weight.numpy() for name, weight in s.weights.items()}) for s in found[1:]]
    return found[0], *shown, text.getvalue()


def descended(begin: list[dict], late: bool) -> tuple[list[float], dict]:
    """One process: the losses and weights of 8 updates. If `late`, stage s of p uses weights p-1-s updates old."""
    parts = equal.watch("step01_single_gpu", UNFLUSHED | dict(steps=0)).parts
    ages = {name: late * (len(begin) - 1 - s) for s, weights in enumerate(begin) for name in weights}
    history = [{name: torch.from_numpy(weight) for weights in begin for name, weight in weights.items()}]
    losses = []
    for t in range(8):
        met = {name: history[max(0, t - age)][name].clone().requires_grad_() for name, age in ages.items()}
        tokens, targets = parts.data.batch(t)
        loss = functional_call(parts.model, met, (tokens, targets)) / targets.numel()
        slopes = dict(zip(met, torch.autograd.grad(loss, list(met.values())), strict=True))
        history.append({name: weight - 0.3 * slopes[name] for name, weight in history[-1].items()})
        losses.append(loss.item())
    return losses, history[-1]


@pytest.mark.parametrize("ranks, recompute", [(2, "none"), (3, "full")])
def test_never_flushed_is_a_descent_by_weights_of_several_ages(pools, ranks, recompute):
    """Losses and weights are those of the formula in one process; versions are p - s; only the ends idle."""
    begin, late, flushed, printed = zip(*pools(ranks).run(never_flushed_on_rank, recompute), strict=True)
    for shown, versions, lag in (late, [ranks - s for s in range(ranks)], True), (flushed, [1] * ranks, False):
        losses, weights = descended(begin, lag)
        assert all(one[1] == versions and equal.difference(one[0], losses) < 1e-10 for one in shown)
        ours = {name: weight for _, _, part in shown for name, weight in part.items()}
        assert ours.keys() == weights.keys()
        assert max(equal.difference(ours[name], weight) for name, weight in weights.items()) < 1e-10
    assert late[0][0][:1] == flushed[0][0][:1] and equal.difference(late[0][0], flushed[0][0]) > 1e-3
    assert f"a rank: {ranks - 1} of {7 + ranks}, flushed after each {8 * (ranks - 1)} of {8 * ranks}" in printed[0]


# --- what a layer keeps


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_layer_of_gpt_keeps_what_the_paper_says(recompute):
    """s b h (34 + 5 a s / h), and 34 s b h with selective recomputation: from live tensors, in plain torch.

    A layer as Megatron has it: LayerNorm, attention, LayerNorm, GELU; dropout. Statistics of norms are not counted.
    """
    seq, batch, dim, heads = 24, 2, 32, 4
    sizes = [(dim, dim)] * 4 + [(dim, 4 * dim), (4 * dim, dim)]
    modules = nn.ModuleList([*(nn.LayerNorm(dim) for _ in "12"), *(nn.Linear(*size) for size in sizes)]).bfloat16()
    first, second, *qkv_proj, out, up, down = modules
    drop = lambda x: torch.native_dropout(x, 0.1, True)[0]  # noqa: E731

    def core(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(seq, batch * heads, -1).transpose(0, 1) for x in qkv)
        p = drop((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1))
        return (p @ v).transpose(0, 1).flatten(1).view(seq, batch, dim)

    def layer(x: torch.Tensor) -> torch.Tensor:
        qkv = [proj(y) for y in [first(x)] for proj in qkv_proj]
        x = x + drop(out(checkpoint(core, *qkv, use_reentrant=False) if recompute == "selective" else core(*qkv)))
        return x + drop(down(F.gelu(up(second(x)))))

    x = torch.randn(seq, batch, dim, dtype=torch.bfloat16, requires_grad=True)
    statistics = 2 * sum(t.nbytes for t in torch.native_layer_norm(x, [dim], None, None, 1e-5)[1:])
    with MemoryTimeline() as timeline:
        for given in (x, *modules.parameters()):
            timeline.note(given, "other")
        timeline.born = "activations"
        y = layer(x)
        kept = timeline.total["activations"] - y.nbytes + x.nbytes - statistics
    assert kept == seq * batch * dim * (34 + (recompute == "none") * 5 * heads * seq / dim)


# --- dropout


def test_drops_a_share_of_the_numbers():
    """Masks drop a share P, and differ as independent draws do: within five standard deviations."""
    seen = []
    for step, first, place in product((0, 1), (0, 4, 8, 12), (0, 3)):
        sequences = torch.arange(first, first + 4)
        seen.append(dropout.mask(0.2, (7, step), sequences, torch.arange(64)[None], place, 90).double())
    masks = torch.stack(seen).flatten(1) - 0.8
    n, spread = masks.shape[1], (0.2 * 0.8) ** 0.5
    assert masks.mean(1).abs().max() < 5 * spread / n**0.5
    together = (masks @ masks.T / n).fill_diagonal_(0)
    assert together.abs().max() < 5 * spread**2 / n**0.5, "two masks are alike"
