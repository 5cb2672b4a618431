"""Variants, beyond equality: what is skipped, late, or never there; what hides behind what; where it lives."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from common import comm
from common.comm import Mesh
from common.model import attend
from services.seam import plugins
from step05_cp_ring import CONTEXT
from tests import equal
from tests.rows import COMPILED
from variants import skip_spikes, zero_toy
from variants.block_overlap import EnterLinears, start_gather, start_keep, start_scatter, start_total
from variants.compress import Chain, Compression
from variants.compress_activations import Bits
from variants.documents import MicroBatch, segments
from variants.narrow import BLOCK

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
            seen.append((moved, freed, math.log2(self.parts.kept["variants.fp16"].scale)))

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


@pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather"])
def test_visits_each_pair_within_a_document_once(mode):
    """sum L (L+1) / 2 pairs, no matter how the sequence is cut; and they are the right ones."""
    n, seq = 3, 36
    tokens = torch.randint(0, 5, (2, seq), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(tokens, END, lambda rank: CONTEXT[mode].positions(seq, rank, n))
    seen = torch.zeros(2, seq, seq)
    for rank in range(n):
        batch.found.clear()
        for source in range(n):
            mine, theirs = (CONTEXT[mode].positions(seq, r, n).repeat(2) for r in (rank, source))
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
    batch = MicroBatch(tokens, END, lambda rank: torch.arange(8))
    q, k, v = torch.randn(3, 2, 8, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = (x.flatten(0, 1)[None].split(batch.lengths, 1) for x in (q, k, v))
    ours = torch.cat([attend(*document) for document in zip(*parts, strict=True)], 1).view(q.shape)
    same = batch.numbers[:, :, None] == batch.numbers[:, None, :]
    mask = (same & torch.ones(8, 8, dtype=torch.bool).tril())[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    assert (ours - right).abs().max() < 1e-14
    assert [run[3] for run in segments(batch.numbers[0], torch.arange(8))] == [0, 1, 2]


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
    return [zero_toy.toy(stage, mesh, torch.device("cpu")) for stage in range(4)]


def test_prints_the_example(pools):
    """Rank 0's lines stand in the docstring."""
    first, second = pools(2).run(lines)
    assert all(line in zero_toy.__doc__ for line in first), first
    assert second[3] == "stage 3, rank 1: weights 3 4, gradient 25 25 -> own 0.5 1.5, all -1.5 -0.5 0.5 1.5"
