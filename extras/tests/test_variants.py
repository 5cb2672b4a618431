"""Variants, beyond equality: what is skipped, late, or never there; what hides behind what; where it lives."""

import io
import math
import random
import re
from contextlib import redirect_stdout
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from common import UserError, comm
from common.comm import Mesh
from common.model import Decoder, attend
from common.schedules import one_f_one_b, round_robin, simulate
from extras.services.memory import MemoryTimeline
from extras.services.seam import check, plugins
from extras.tests import equal
from extras.tests.faults import Fault, injected
from extras.tests.rows import COMPILED
from extras.tests.test_laws import counted
from extras.variants.step01 import batch_ramp, dropout, skip_spikes, stale
from extras.variants.step01.documents import MicroBatch, segments
from extras.variants.step01.window import TURNED, band, windowed_attention
from extras.variants.step02.compress import Chain, Compression
from extras.variants.step02.narrow import BLOCK
from extras.variants.step03 import toy
from extras.variants.step04.block_overlap import EnterLinears, start_gather, start_keep, start_scatter, start_total
from extras.variants.step04.compress_activations import Bits
from extras.variants.step05.balanced import deal
from extras.variants.step06 import pipedream
from step01_single_gpu import learning_rate
from step05_cp_ring import CONTEXT, zigzag_positions

SLOW = dict(optimizer="sgd", lr=0.1, steps=3)


def overflow_on_rank(step: str, options: dict) -> tuple:
    """Train three steps; in the second, one rank's gradient is infinite. After each: moved, gradients freed, scale."""
    seen = []

    class Sabotaged(equal.Watch):
        """Puts infinity where gradients are summed, and looks at the masters."""

        def steps(self, **parts):
            """Before the first step."""
            optimizer = parts["optimizer"]
            self.masters = optimizer.masters
            self.before = {name: master.detach().clone() for name, master in self.masters.items()}
            gradients, mesh = optimizer.gradients, parts["mesh"]

            def infinite():
                found = gradients()
                if len(seen) == 1 and mesh.rank == mesh.world - 1:
                    next(iter(found.values())).fill_(torch.inf)
                return found

            optimizer.gradients = infinite
            yield from super().steps(**parts)

        def gather(self, local):
            """Nothing: infinity cannot be put together."""
            return {}

        def record(self, step, tokens, **numbers):
            """After each step."""
            super().record(step, tokens, **numbers)
            moved = any(not torch.equal(self.before[name], master) for name, master in self.masters.items())
            self.before = {name: master.detach().clone() for name, master in self.masters.items()}
            freed = all(param.grad is None for param in getattr(self.parts.optimizer, "params", {}).values())
            seen.append((moved, freed, math.log2(self.parts.kept["fp16"].scale)))

    equal.record(step, options, Sabotaged)
    return seen


@pytest.mark.parametrize("layout", [dict(zero=0), dict(zero=2), dict(pp=2, zero=0, grad_clip=0.0)])
def test_an_overflow_on_one_rank_skips_the_update_on_all(pools, layout):
    """And halves the scale, on all; the next update is made."""
    options = SLOW | dict(dtype="fp16") | layout
    for seen in pools(2).run(overflow_on_rank, "step06_pipeline", options):
        assert seen == [(True, True, 16.0), (False, True, 15.0), (True, True, 15.0)]


def test_spikes_are_left_out_and_become_normal():
    """A value above K times its median, of which there must be enough; all values enter the median."""
    spikes = skip_spikes.Spikes(3.0)
    assert not any(spikes.is_spike(1.0, 100.0) for _ in range(7))
    assert not spikes.is_spike(50.0, 1.0)  # seven are not enough
    assert spikes.is_spike(3.1, 100.0) and spikes.is_spike(1.0, 301.0) and not spikes.is_spike(2.9, 299.0)
    assert not [spikes.is_spike(10.0, 100.0) for _ in range(40)][-1]


def test_a_spike_moves_nothing(monkeypatch):
    """The update is left out, gradients are freed, and the record says so."""
    monkeypatch.setattr(skip_spikes.Spikes, "is_spike", lambda self, *values: len(seen) == 1)
    seen, plain = [], equal.Watch.record

    def record(run, step, tokens, **numbers):
        plain(run, step, tokens, **numbers)
        masters = run.parts.optimizer.masters.values()
        freed = all(param.grad is None for param in run.parts.model.parameters())
        seen.append((sum(m.sum().item() for m in masters), numbers.get("skipped", 0), freed))

    monkeypatch.setattr(equal.Watch, "record", record)
    equal.record("step01_single_gpu", SLOW | dict(skip_spikes=2.0))
    sums, skipped, freed = zip(*seen, strict=True)
    assert skipped == (0, 1, 0) and all(freed)
    assert sums[0] == sums[1] != sums[2]


@pytest.mark.parametrize("rule", ["adamw", "muon", "adafactor"])
def test_a_spike_goes_back_past_what_came_before_it(monkeypatch, rule):
    """Copies before steps 0, 3, 6; a spike in step 5: to the bit, as if steps 3, 4 and 5 had never been trained."""
    ends = []
    for spikes, flags in ({5}, dict(roll_back=3)), ({3, 4, 5}, {}):
        step = count()
        monkeypatch.setattr(skip_spikes.Spikes, "is_spike", lambda *_, step=step, spikes=spikes: next(step) in spikes)
        options = dict(steps=8, global_batch_size=4, skip_spikes=2.0, optimizer=rule) | flags
        run = equal.watch("step01_single_gpu", options)
        ends.append(run.parameters)
        assert [row.get("back_to") for row in run.history] == [3 if flags and n == 5 else None for n in range(8)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


class Largest(TorchDispatchMode):
    """The size of the largest tensor of logits that an operator has made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run it, and look."""
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            logits = isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (equal.SMALL["vocab_size"],)
            if logits and not function.is_view:  # not the head, transposed
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize("chunk", [0, 40, 64])
def test_logits_of_one_chunk_exist(chunk):
    """Of 64 tokens of a micro-batch, `chunk` have logits at a time; with 0, all."""
    with Largest() as largest:
        equal.record("step01_single_gpu", dict(steps=1, micro_batch_size=4, global_batch_size=4, loss_chunk=chunk))
    assert largest.numel == (chunk or 64) * equal.SMALL["vocab_size"]


def count_graphs(layers: int, steps: int) -> tuple[int, int]:
    """Graphs, and how often a function was compiled, with so many layers."""
    from torch._dynamo.utils import counters  # takes seconds to import

    counters.clear()
    options = SLOW | COMPILED | dict(n_layers=layers, steps=steps, compile=True, global_batch_size=4)
    equal.record("step01_single_gpu", options)
    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


def test_one_graph_serves_all_layers(pools):
    """--compile does not give up after eight layers, as it would if each were compiled anew."""
    assert pools(1).run(count_graphs, 10, 2) == [(1, 1)]


WHOLE, BROKEN = [1], range(2, 200)  # graphs; a few hundred operators are not in one each
LAYERS = {  # ranks, step, flags; how many graphs all layers of a rank have
    "one device": (1, "step01_single_gpu", {}, WHOLE),
    "buckets": (1, "step02_ddp", {}, WHOLE),
    "buckets, again": (1, "step02_ddp", dict(recompute="full"), WHOLE),
    "zero 1": (1, "step03_zero", dict(zero=1), WHOLE),
    "zero 3": (1, "step03_zero", dict(zero=3, recompute="elementwise"), WHOLE),
    "tp": (2, "step04_tp_sp", dict(tp=2), BROKEN),
    "tp, again": (2, "step04_tp_sp", dict(tp=2, zero=1, recompute="full"), BROKEN),
    "ring": (2, "step05_cp_ring", dict(cp=2, recompute="full"), BROKEN),
    "pipeline": (2, "step06_pipeline", dict(pp=2), WHOLE),
    "pipeline, again": (2, "step06_pipeline", dict(pp=2, recompute="full"), WHOLE),
    "experts": (2, "step07_moe_ep", dict(ep=2), BROKEN),
}
SEEN, ASIDE = ("attach", "torch.compile(", 'partial(torch.compile, backend="eager")('), "param.grad = None"


def graphs_of(name: str, dtype: str, aside: str = ASIDE) -> tuple[int, int, list[str]]:
    """Runs on every rank: graphs of a run with --compile, the calls in them, and what the run says of it."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    ranks, step, options, _ = LAYERS[name]
    options = dict(compile=True, steps=1, n_layers=2, global_batch_size=2 * ranks, dtype=dtype) | options
    done = Fault("extras.variants.step01.compiled", "", "", "without_gradients", ASIDE, aside, "")
    with injected(Fault("extras.variants.step01.compiled", "", "", *SEEN, "")), injected(done):
        run = equal.watch(step, options)
    found = counters["stats"]
    return found["unique_graphs"], found["calls_captured"], run.parts.kept["compiled"].notes()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n != "buckets")) for n in LAYERS])
def test_graphs_in_bf16_are_those_in_fp64(pools, name):
    """Where gradients are of another dtype than weights; and a run says which graphs have broken."""
    ranks, *_, most = LAYERS[name]
    for ours, theirs in zip(*(pools(ranks).run(graphs_of, name, dtype) for dtype in ("bf16", "fp64")), strict=True):
        assert ours == theirs and ours[0] in most and ours[1] > ours[0]
        assert len(ours[2]) == (most is BROKEN) and all(f"{ours[0]} graphs" in text for text in ours[2])


def test_a_run_says_that_its_graphs_have_broken(pools):
    """As they do if Dynamo sees fp32 gradients of bf16 weights: more graphs, with fewer operators."""
    ((graphs, calls, notes),) = pools(1).run(graphs_of, "buckets", "bf16", "param.requires_grad")
    assert graphs > 1
    assert notes == [
        f"--compile: the layers are broken into {graphs} graphs with {calls} calls in all, by: "
        f"dtype mismatch between tensor and its gradient (x{graphs})"
    ]


@pytest.mark.parametrize(
    "step, options, wrong",
    [
        (
            "step04_tp_sp",
            dict(tp=2, recompute="elementwise"),
            "--recompute elementwise with --tp 2: .*use --recompute ",
        ),
        ("step07_moe_ep", dict(recompute="full"), "--recompute full: .* router .*use --recompute none"),
    ],
)
def test_what_nothing_would_be_compiled_of_is_refused(step, options, wrong):
    """In a line with both flags."""
    with pytest.raises(UserError, match=f"^--compile {wrong}"):
        check(equal.config_of(step, dict(compile=True) | options), 2)


# --- overlap

B, S, DIM, OUT = 1, 6, 4, 5
STARTS = dict(sp=(start_gather, start_scatter), whole=(start_keep, start_total))
ORDER = dict(
    sp=["all_gather", "dx", "dx", "reduce_scatter", "wait", "dW", "dW", "wait"],
    whole=["dx", "dx", "all_reduce", "dW", "dW", "wait"],
)


class Order(TorchDispatchMode):
    """Notes matrix products by the shape of their results."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm_):
            self.seen.append("dW" if result.shape == (OUT, DIM) else "dx")
        return result


def order(name: str) -> tuple[list[str], list[torch.Size]]:
    """Runs on every rank: what backward does, and the shapes of what it kept of the input."""
    group, starts, seen = Mesh(tp=dist.get_world_size())["tp"], STARTS[name], []
    x = torch.ones(B, S // group.size if name == "sp" else S, DIM, requires_grad=True)
    weights = [torch.ones(OUT, DIM, requires_grad=True) for _ in range(2)]
    outputs = EnterLinears.apply(x, group, *starts, *weights)
    kept, wait = outputs[0].grad_fn.saved_tensors[0].shape, comm.Pending.wait

    def noted(pending):
        if pending.works:
            seen.append("wait")
        wait(pending)

    told = mock.patch.object(comm, "observer", lambda operation, *_: seen.append(operation))
    with told, mock.patch.object(comm.Pending, "wait", noted), Order(seen):
        sum(output.sum() for output in outputs).backward()
    return seen, kept


@pytest.mark.parametrize("name", ORDER)
def test_collectives_hide_behind_matrices(pools, name):
    """The gathering is waited for after dx, the sum of dx after dW; with SP only s/n tokens are kept."""
    for seen, kept in pools(2).run(order, name):
        assert seen == ORDER[name]
        assert kept == (B, S // 2 if name == "sp" else S, DIM)


# --- fewer bits

WORDS = {"bf16": 2, "int8": 1.016, "topk": 8 * 0.25}  # bytes that are sent of a number; 1,000 have four scales
KINDS = ["bf16", "int8", "topk"]


def sums_on_rank(kind: str, whole: bool) -> tuple[float, float, float]:
    """Five sums of random gradients, fp32 [3000], `whole` or cut.

    Returns how much of the true sum is missing, with and without what all ranks owe, and the bytes sent in one sum.
    """
    mesh, sent = Mesh(dp=dist.get_world_size()), []
    group, found, added, length = mesh["dp"], 0.0, 0.0, 3000
    compression = Compression(SimpleNamespace(compress=kind, topk_fraction=0.25), None)
    key = type("Part", (), dict(group=group))()  # a bucket, or a unit
    comm.observer = lambda _operation, _group, tensor, share: sent.append(share * tensor.nbytes)
    for step in range(5):
        drawn = [torch.randn(length, generator=torch.Generator().manual_seed(step * 10 + r)) for r in range(group.size)]
        key.flat = key.gradient = drawn[group.rank].clone()
        Chain((compression.all_reduce if whole else compression.reduce_scatter)(key)).wait()
        part = length // group.size
        mine = slice(0, length) if whole else slice(group.rank * part, group.rank * part + part)
        found = found + (key.flat if whole else key.reduced_shard)
        added = added + sum(drawn)[mine]
    comm.observer = None
    owed = compression.owed[key].clone().view(-1)
    dist.all_reduce(owed)
    return (found + owed[mine] - added).abs().max().item(), (found - added).abs().max().item(), sum(sent) / 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_lost_is_owed(pools, kind, whole):
    """All that has arrived, and all that is owed, make up all that was to be summed; most has arrived."""
    for with_debt, without, n_bytes in pools(3).run(sums_on_rank, kind, whole):
        assert with_debt < 1e-4
        assert 1e-4 < without < {"bf16": 0.1, "int8": 0.3, "topk": 20.0}[kind]
        assert n_bytes == pytest.approx((1 + whole) * 2 / 3 * 3000 * WORDS[kind])


@pytest.mark.parametrize("dim", [8, BLOCK, BLOCK + 44, 10])
@pytest.mark.parametrize("rows", [(3, 5), (1, 1)])
def test_rounds_to_a_part_of_the_largest(dim, rows):
    """int8: at most 1/254 of the largest of a block; zero stays zero."""
    bits, x = Bits("int8", torch.float32, dim), torch.randn(*rows, dim, generator=torch.Generator().manual_seed(0))
    if rows != (1, 1):
        x[0, 0] = 0
    message = bits.pack(x)
    assert message.dtype == torch.int8 and message.shape == (*rows, bits.width)
    off = (bits.unpack(message, torch.float32) - x).abs()
    for some, largest in zip(off.split(BLOCK, -1), x.abs().split(BLOCK, -1), strict=True):
        assert (some.amax(-1) <= largest.amax(-1) / 253).all()


# --- documents

END = 0
plugins()  # fills CONTEXT


@pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather", "balanced"])
def test_visits_each_pair_within_a_document_once(mode):
    """sum L (L+1) / 2 pairs, no matter how the sequence is cut; and they are the right ones."""
    n, seq = 3, 36
    tokens = torch.randint(0, 5, (2, seq), generator=torch.Generator().manual_seed(0))
    fixed = torch.stack([CONTEXT[mode].positions(seq, rank, n) for rank in range(n)])
    batch = MicroBatch(tokens, END, partial(deal, n=n) if mode == "balanced" else lambda _numbers: fixed)
    seen = torch.zeros(2, seq, seq)
    for rank in range(n):
        batch.found.clear()
        for source in range(n):
            mine, theirs = (batch.positions[:, r].flatten() for r in (rank, source))
            for queries, keys, causal in batch.visible(rank, source, 2 * seq // n):
                assert queries.start // (seq // n) == keys.start // (seq // n), "of one sequence"
                block = torch.ones(queries.stop - queries.start, keys.stop - keys.start)
                pairs = torch.zeros(seq, seq)
                pairs[mine[queries][:, None], theirs[keys]] = block.tril() if causal else block
                seen[queries.start // (seq // n)] += pairs
    numbers = batch.numbers
    within = (numbers[:, :, None] == numbers[:, None, :]) & torch.ones(seq, seq, dtype=torch.bool).tril()
    assert torch.equal(seen, within.float())
    assert seen.sum() == sum(length * (length + 1) // 2 for length in batch.lengths)


def test_whole_sequences_equal_a_mask():
    """Document by document is attention with the mask that nobody makes."""
    tokens = torch.tensor([[1, 2, END, 3, 4, 5, END, 6], [END, 1, END, END, 2, 3, 4, 5]])
    batch = MicroBatch(tokens, END, lambda _numbers: torch.arange(8)[None])
    q, k, v = torch.randn(3, 2, 8, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = (x.flatten(0, 1)[None].split(batch.lengths, 1) for x in (q, k, v))
    ours = torch.cat([attend(*document) for document in zip(*parts, strict=True)], 1).view(q.shape)
    same = batch.numbers[:, :, None] == batch.numbers[:, None, :]
    mask = (same & torch.ones(8, 8, dtype=torch.bool).tril())[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    assert (ours - right).abs().max() < 1e-14
    assert [run[3] for run in segments(batch.numbers[0], torch.arange(8))] == [0, 1, 2]


def lengths_of(kind: str, seq: int, rng: random.Random) -> list[int]:
    """Of the documents of a sequence: one long among short ones; lognormal, as texts of the web; any up to 2,000."""
    found = [5 * seq // 8] * (kind == "long")
    while sum(found) < seq:
        drawn = dict(
            long=rng.randint(10, 300), lognormal=int(rng.lognormvariate(6, 1.3)) + 1, uniform=rng.randint(1, 2000)
        )
        found.append(min(drawn[kind], seq - sum(found)))
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("kind", ["long", "lognormal", "uniform"])
def test_documents_are_balanced(kind):
    """In 100 drawn sequences of 8,192 tokens on 4 ranks, and on 8: the busiest has at most 1.1 times the mean of pairs.

    In zigzag's chunks it has more than 1.5 times as much in some of them.
    """
    rng, seq, worst = random.Random(0), 8192, {}
    for trial in range(100):
        n, lengths = (4, 8)[trial % 2], lengths_of(kind, seq, rng)
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        pairs = torch.cat([torch.arange(1, length + 1) for length in lengths])
        ways = dict(balanced=deal(numbers, n), zigzag=torch.stack([zigzag_positions(seq, r, n) for r in range(n)]))
        for name, positions in ways.items():
            assert torch.equal(positions.flatten().sort()[0], torch.arange(seq)), "each token has one rank"
            work = pairs[positions].sum(1).double()
            worst[name] = max(worst.get(name, 0), (work.max() / work.mean()).item())
    assert worst["balanced"] <= 1.1 < 1.5 < worst["zigzag"]


# --- windows


def test_a_band_has_each_pair_within_the_window_once():
    """Of any two runs of positions, in rectangles and triangles of equal sides."""
    rng = random.Random(0)
    for _ in range(300):
        a, c, m, n, window = *rng.choices(range(12), k=2), *rng.choices(range(1, 14), k=2), rng.randrange(2, 10)
        seen = torch.zeros(m, n)
        for queries, keys, shape in band(range(a, a + m), range(c, c + n), window):
            block = torch.ones(queries.stop - queries.start, keys.stop - keys.start)
            assert block.numel() and (shape is False or block.shape[0] == block.shape[1])
            seen[queries, keys] += block.tril() if shape is True else block.triu() if shape == TURNED else block
        apart = torch.arange(a, a + m)[:, None] - torch.arange(c, c + n)
        assert torch.equal(seen, ((apart >= 0) & (apart < window)).float())


@pytest.mark.parametrize("window", [2, 5, 16, 40])
def test_a_window_equals_a_mask(window):
    """Output and gradients are those of torch's attention with the mask that nobody makes here."""
    q, k, v = (torch.randn(2, 16, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    apart = torch.arange(16)[:, None] - torch.arange(16)
    given = (x.transpose(1, 2) for x in (q, k, v))
    mask = (apart >= 0) & (apart < window)
    right = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    ours, dy = windowed_attention(q, k, v, window), torch.randn(2, 16, 4, 8, dtype=torch.float64)
    found = [ours, *torch.autograd.grad(ours, (q, k, v), dy)]
    for one, other in zip(found, [right, *torch.autograd.grad(right, (q, k, v), dy)], strict=True):
        assert equal.difference(one.detach(), other.detach()) < 1e-13


# --- where it lives


def in_files(options: dict) -> list[int]:
    """Runs on every rank: how many masters and moments there are, and how many of them lie in files without a name."""
    zero, lines = equal.watch("step03_zero", options).parts.optimizer, Path("/proc/self/maps").read_text().splitlines()
    files = [re.split("[- ]", line)[:2] for line in lines if "(deleted)" in line and "/dev/shm" not in line]
    states = [
        *zero.masters.values(),
        *(t for state in zero.torch_optimizer.state.values() for t in state.values() if t.dim()),
    ]
    states = [state for state in states if state.numel()]
    found = [any(int(a, 16) <= state.data_ptr() < int(b, 16) for a, b in files) for state in states]
    return [len(found), sum(found)]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux where memory is")
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_state_is_where_the_flag_says(pools, where):
    """After three steps all masters and both moments of AdamW; on the CPU none is in a file."""
    for total, mapped in pools(2).run(in_files, dict(zero=1, offload_optimizer=where)):
        assert total > 3 and mapped == (total if where == "disk" else 0)


def lines() -> list[str]:
    """Runs on every rank."""
    mesh = Mesh(dp=dist.get_world_size())
    return [toy.toy(stage, mesh, torch.device("cpu")) for stage in range(4)]


def test_prints_the_example(pools):
    """Rank 0's lines stand in the docstring."""
    first, second = pools(2).run(lines)
    assert all(line in toy.__doc__ for line in first), first
    assert second[3] == "stage 3, rank 1: weights 3 4, gradient 25 25 -> own 0.5 1.5, all -1.5 -0.5 0.5 1.5"


# --- batches that grow


def ramp_on_rank(batch: int) -> list[tuple]:
    """Runs on every rank: of each step tokens as recorded, the rank's calls of the decoder, and a sum of its tokens."""
    seen, calls, forward = [], [], Decoder.forward

    def called(model, tokens, *rest):
        calls.append(tokens.sum().item())
        return forward(model, tokens, *rest)

    class Looking(equal.Watch):
        """Looks at each record."""

        def record(self, step, tokens, **numbers):
            """After a step."""
            super().record(step, tokens, **numbers)
            seen.append((tokens, len(calls), sum(calls)))
            calls.clear()

    with mock.patch.object(Decoder, "forward", called):
        equal.record("step02_ddp", dict(batch_ramp="4,3", global_batch_size=batch, steps=5), Looking)
    return seen


def test_a_ramp_trains_each_sequence_once(pools):
    """4, 4, 8, 12, 12 sequences a step, one after another in the data; no rank computes more than its share of them."""
    sizes, seq = [4, 4, 8, 12, 12], equal.SMALL["seq_len"]
    assert batch_ramp.sizes(equal.config_of("step02_ddp", dict(batch_ramp="4,3"))) == [4, 4, 8, 12]
    ranks = pools(2).run(ramp_on_rank, 12)
    one = equal.watch("step01_single_gpu", dict(steps=1)).parts.data
    read, first = [], 0
    for size in sizes:
        one.batch_size = 1
        read.append(sum(one.batch(i)[0].sum().item() for i in range(first, first + size)))
        first += size
    assert [[tokens for tokens, *_ in rank] for rank in ranks] == [[size * seq for size in sizes]] * 2
    assert [[calls for _, calls, _ in rank] for rank in ranks] == [[size // 2 for size in sizes]] * 2
    assert [sum(total) for total in zip(*([total for *_, total in rank] for rank in ranks), strict=True)] == read


@pytest.mark.parametrize("ramp, text", [("5", "write"), ("5,2", "divide"), ("12,2", "less"), ("3,2", "multiple")])
def test_a_ramp_that_cannot_be_shared_out(ramp, text):
    """Is refused in one line."""
    with pytest.raises(UserError, match=rf"--batch-ramp {ramp}.*{text}"):
        batch_ramp.check(equal.config_of("step02_ddp", dict(batch_ramp=ramp)), 2)


# --- late


@pytest.mark.parametrize("late", [0, 1, 3])
def test_late_gradients_are_a_delayed_descent(late):
    """w(T) = w(0) - sum of lr(t) g(t - K), to rounding: each gradient of the weights that were there K updates ago."""
    options = dict(optimizer="sgd", lr=0.1, weight_decay=0.0, grad_clip=0.0, steps=6, global_batch_size=4)
    seen = equal.record("step01_single_gpu", options | dict(stale=late))
    rates = [learning_rate(step, equal.config_of("step01_single_gpu", options)) for step in range(6)]
    begin = equal.record("step01_single_gpu", options | dict(lr=0.0)).parameters
    for name, end in seen.parameters.items():
        moved = sum(lr * g[name] for lr, g in zip(rates[late:], seen.gradients, strict=False))
        assert equal.difference(end, begin[name] - moved) < 1e-12, name
    plain = equal.record("step01_single_gpu", options)
    assert (seen.losses == plain.losses) == (late == 0)


def test_late_gradients_are_in_no_checkpoint():
    """So a run with them does not go on."""
    with pytest.raises(UserError, match=r"--stale 2.*--resume"):
        stale.check(equal.config_of("step01_single_gpu", dict(stale=2, resume="auto")), 1)


# --- never flushed

UNFLUSHED = dict(global_batch_size=2, seq_len=8)


def never_flushed_on_rank(more: dict) -> tuple:
    """Runs on every rank: this rank's weights before; what is shown, never flushed and flushed; and what is printed."""
    found, plain, text = [], pipedream.both, io.StringIO()

    def both(config, parts):
        found.append({name: param.detach().numpy().copy() for name, param in parts.model.named_parameters()})
        found.extend(plain(config, parts))
        return found[1:]

    ranks = dist.get_world_size()
    with mock.patch.object(pipedream, "both", both), redirect_stdout(text):
        equal.watch("step06_pipeline", UNFLUSHED | dict(pipedream=8, pp=ranks, lr=0.3) | more)
    shown = [(s.losses, s.versions, {name: weight.numpy() for name, weight in s.weights.items()}) for s in found[1:]]
    return found[0], *shown, text.getvalue()


def late_losses(more: dict) -> tuple:
    """The same without weights."""
    _, late, flushed, _ = never_flushed_on_rank(more)
    return late[:2], flushed[:2]


def descended(begin: list[dict], late: bool) -> tuple[list[float], dict]:
    """One process: 8 updates, each with dF at weights that stage s of p had p-1-s updates ago (or has); losses too."""
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


@pytest.mark.parametrize("ranks, more", [(2, {}), (3, dict(recompute="full"))], ids=str)
def test_never_flushed_is_a_descent_by_weights_of_several_ages(pools, ranks, more):
    """Losses and weights are those of the formula in one process; versions are p - s; only the ends idle."""
    begin, late, flushed, printed = zip(*pools(ranks).run(never_flushed_on_rank, more), strict=True)
    for shown, versions, lag in (late, [ranks - s for s in range(ranks)], True), (flushed, [1] * ranks, False):
        losses, weights = descended(begin, lag)
        assert all(one[1] == versions and equal.difference(one[0], losses) < 1e-10 for one in shown)
        ours = {name: weight for _, _, part in shown for name, weight in part.items()}
        assert ours.keys() == weights.keys()
        assert max(equal.difference(ours[name], weight) for name, weight in weights.items()) < 1e-10
    assert late[0][0][:1] == flushed[0][0][:1] and equal.difference(late[0][0], flushed[0][0]) > 1e-3
    assert f"a rank: {ranks - 1} of {7 + ranks}, flushed after each {8 * (ranks - 1)} of {8 * ranks}" in printed[0]
    lists = [one_f_one_b(ranks, 8, 1, rank) for rank in range(ranks)]
    spans = simulate(lists, round_robin(ranks, ranks, 1), dict(F=1, B=2))
    assert spans[-1][0] == 3 * (8 + ranks - 1)
    for rank in range(ranks):
        mine = [(start, end, action.kind) for end, at, start, action in spans if at == rank]
        kinds = "".join(kind for *_, kind in mine)
        steady = mine[kinds.index("B") : kinds.rindex("F") + 1]
        assert all(before[1] == after[0] for before, after in pairwise(steady))


@pytest.mark.parametrize(
    "flags, text",
    [(dict(pp=2), "all 4 ranks"), (dict(pp=4, tied=True), "two stages"), (dict(pp=4, dry_run=4), "none")],
    ids=["ranks", "tied", "dry run"],
)
def test_never_flushed_refuses(flags, text):
    """In one line."""
    with pytest.raises(UserError, match=rf"--pipedream.*{text}"):
        pipedream.check(equal.config_of("step06_pipeline", dict(pipedream=4) | flags), 4)


# --- scores


def kept_in_a_layer(**options: Any) -> int:
    """Bytes that one layer more keeps of a micro-batch of one sequence until its backward, in fp64: by the dry run."""
    runs = (counted("step01_single_gpu", 1, dtype="fp64", **options, n_layers=n) for n in (1, 2))
    few, more = (run.held["activations"] for run in runs)
    return more - few


class Layer(torch.nn.Module):
    """A layer of GPT as Megatron has it, in plain torch: LayerNorm, attention, LayerNorm, GELU; dropout.

    The core of attention is its scores, softmax, dropout and values.
    """

    def __init__(self, dim: int, heads: int, dtype: torch.dtype, again: bool):
        super().__init__()
        self.heads, self.again = heads, again
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(dim, dtype=dtype) for _ in range(2))
        sizes = dict(q=(dim, dim), k=(dim, dim), v=(dim, dim), o=(dim, dim), up=(dim, 4 * dim), down=(4 * dim, dim))
        self.linears = torch.nn.ModuleDict({name: torch.nn.Linear(*size, dtype=dtype) for name, size in sizes.items()})

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[seq, batch, dim], all three -> the same."""
        q, k, v = (x.view(len(x), -1, x.shape[-1] // self.heads).transpose(0, 1) for x in (q, k, v))
        p = torch.native_dropout((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), 0.1, True)[0]
        return (p @ v).transpose(0, 1).flatten(1).view(q.shape[1], -1, self.heads * q.shape[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[seq, batch, dim] -> the same."""
        linears, y = self.linears, self.norms[0](x)
        qkv = (linears[name](y) for name in "qkv")
        y = checkpoint(self.core, *qkv, use_reentrant=False) if self.again else self.core(*qkv)
        x = x + torch.native_dropout(linears["o"](y), 0.1, True)[0]
        y = linears["down"](torch.nn.functional.gelu(linears["up"](self.norms[1](x))))
        return x + torch.native_dropout(y, 0.1, True)[0]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_layer_of_gpt_keeps_what_the_paper_says(recompute):
    """s b h (34 + 5 a s / h), and 34 s b h if the core is done again, from live tensors; statistics of norms apart."""
    seq, batch, dim, heads = 24, 2, 32, 4
    layer = Layer(dim, heads, torch.bfloat16, again=recompute == "selective")
    x = torch.randn(seq, batch, dim, dtype=torch.bfloat16, requires_grad=True)
    statistics = 2 * sum(t.nbytes for t in torch.native_layer_norm(x, [dim], None, None, 1e-5)[1:])
    with MemoryTimeline() as timeline:
        timeline.note(x, "other")
        for param in layer.parameters():
            timeline.note(param, "other")
        timeline.born = "activations"
        y = layer(x)
        kept = timeline.total["activations"] - y.nbytes + x.nbytes
    assert kept - statistics == seq * batch * dim * (34 + (recompute == "none") * 5 * heads * seq / dim)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_our_layer_keeps_what_the_docstring_says(kv_heads):
    """Fused; scores, which are most of it; the core done again. A CPU's norms keep more."""
    h, f, a, s = (equal.SMALL[name] for name in ("dim", "ffn_dim", "n_heads", "seq_len"))
    e, k = 8, kv_heads * h // a
    numbers = {
        ("fused", "none"): e * (6 * h + 2 * k + 4 * f) + e * a,
        ("scores", "none"): e * (8 * h + 4 * f + a * s),
        ("scores", "selective"): e * (6 * h + 2 * k + 4 * f),
    }
    norms = 2 * e * (1 + h)  # of a token, beside their inputs: a statistic, and on a CPU the normalised input
    for (attention, recompute), bytes_of_a_token in numbers.items():
        found = kept_in_a_layer(attention=attention, recompute=recompute, n_kv_heads=kv_heads)
        assert found == s * (bytes_of_a_token + norms), (attention, recompute)


# --- dropout


def masks(**layout: Any) -> int:
    """Bytes that dropout adds to what waits for backward in a step of one micro-batch of four sequences."""
    flags = layout | dict(global_batch_size=4, micro_batch_size=4)
    runs = (counted("step04_tp_sp", layout["tp"], **flags, dropout=p) for p in (0.0, 0.2))
    without, dropped = (run.held["activations"] for run in runs)
    return dropped - without


@pytest.mark.parametrize("layout, share", [(dict(tp=1), 1), (dict(tp=2), 2), (dict(tp=2, sp=False), 1)])
def test_masks_are_shared_out_with_the_tokens(layout, share):
    """A byte a number, 2 L + 1 times; with SP, 1/tp of it on a rank."""
    whole = (2 * equal.SMALL["n_layers"] + 1) * 4 * equal.SMALL["seq_len"] * equal.SMALL["dim"]
    assert masks(**layout) == whole // share


def test_drops_a_share_of_the_numbers():
    """P of them, everywhere others: within five standard deviations of what independent draws have."""
    seen = []
    for step, first, now, place in product((0, 1), (0, 8), (0, 1), (0, 3)):
        drop = SimpleNamespace(p=0.2, first=first, now=now, size=4, key=(7, step), device=None)
        drop.mesh, drop.here = SimpleNamespace(rank=0), lambda: torch.arange(64)[None]
        seen.append(dropout.Dropout.kept(drop, place, (4, 64, 90)).double())
    masks = torch.stack(seen).flatten(1) - 0.8
    n, spread = masks.shape[1], (0.2 * 0.8) ** 0.5
    assert masks.mean(1).abs().max() < 5 * spread / n**0.5
    together = (masks @ masks.T / n).fill_diagonal_(0)
    assert together.abs().max() < 5 * spread**2 / n**0.5, "two masks are alike"
