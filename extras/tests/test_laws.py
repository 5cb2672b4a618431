"""What the docstrings of techniques promise in numbers: bytes and calls by dimension. (Of the steps: tests/.)"""

import importlib
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import step01_single_gpu as step01
import step02_ddp as step02
import step03_zero as step03
import step05_cp_ring as step05
import step07_moe_ep as step07
from common import UserError
from common.comm import Group, Pending, all_to_all, exchange
from common.model import Attention
from extras.services.dry_run import run_rank
from extras.tests import bounds, equal
from extras.variants import Parts
from extras.variants.step01 import fused_gradients
from extras.variants.step02 import hierarchical_sync, tree_sync
from extras.variants.step03 import zero_overlap
from extras.variants.step05 import flash, kernels, ring
from extras.variants.step07 import ep_overlap

L, D, FFN, VOCAB, SEQ, HEADS, KV = (
    equal.SMALL[name] for name in ("n_layers", "dim", "ffn_dim", "vocab_size", "seq_len", "n_heads", "n_kv_heads")
)
B = 8  # bytes of an element in fp64
LAYER = 2 * D * D + 2 * D * D * KV // HEADS + 3 * D * FFN + 2 * D
END = VOCAB * D  # the embedding, and the head
P = L * LAYER + 2 * END + D
A = SEQ * D * B  # an activation of a micro-batch of one sequence
SCALAR = B  # the loss, and the square of the norm, are summed too
M = 6  # micro-batches in all
LAWS = dict(global_batch_size=M, steps=2)
INT8 = dict(compress_activations="int8")


def measure(step: str, options: dict) -> tuple[dict, dict]:
    """Runs on every rank: (bytes that it sends in the second step by dimension, calls a step by dimension)."""
    calls, count = Counter(), equal.Watch.count

    def counted(run, operation: str, group: Group, tensor, share: float):
        calls[group.name, operation] += 1
        count(run, operation, group, tensor, share)

    with mock.patch.object(equal.Watch, "count", counted):
        first, second = equal.record(step, LAWS | options).sent
    assert first == second or "experts" in options, "steps differ"
    return second, {key: n / 2 for key, n in calls.items()}


def check(found: dict, expected: dict[str, float]):
    """All dimensions, to the byte."""
    assert {key: value for key, value in found.items() if value} == expected


def reduced(n: int, size: float) -> float:
    """Bytes that a rank sends in an all-reduce of `size` bytes."""
    return 2 * (n - 1) / n * size


def test_a_server_is_the_bottleneck(pools):
    """Rank 0 sends (n-1) S, a message a parameter and rank; any other rank S. The loss is all-reduced as ever."""
    n, params = 3, 9 * L + 3
    for rank, (sent, calls) in enumerate(pools(n).run(measure, "step02_ddp", dict(sync="server"))):
        times = 1 if rank else n - 1
        check(sent, dict(dp=times * P * B + round(reduced(n, SCALAR))))
        assert calls["dp", "send"] == times * params


def counted(step: str, ranks: int, **options: Any) -> SimpleNamespace:
    """What rank 0 sends in a step, by dimension and operation, and holds: by the dry run, in fp32."""
    config = equal.config_of(step, dict(dtype="fp32", global_batch_size=ranks, dry_run=ranks) | options)
    seen = run_rank(importlib.import_module(step).train, config, 0)
    return SimpleNamespace(sent=seen.taken["traffic"], held=seen.held)


@pytest.mark.parametrize("zero", [1, 3])
def test_replicas_of_zero(zero):
    """Over replicas 2 (R-1)/R P R/n elements, once a step; over the n/R ranks of a shard what n ranks of step 3 send.

    There (n/R - 1) / (n/R) of it.
    """
    n, r = 4, 2
    ours = counted("step03_zero", n, zero=zero, zero_replicas=r).sent
    assert ours["replicas"]["all_reduce"] == reduced(r, 4 * P * r / n)
    theirs = counted("step03_zero", n // r, zero=zero).sent["dp"]
    assert all(ours["shard"][name] == theirs[name] for name in ("all_gather", "reduce_scatter"))


def test_activations_in_fewer_bits():
    """D + 4 bytes a token instead of 4 D: over pp; and over tp, where two messages replace an all-reduce."""
    more, share = dict(compress_activations="int8"), (D + 4) / 4 / D
    plain, ours = (counted("step06_pipeline", 2, pp=2, n_layers=2, **flags).sent["pp"] for flags in ({}, more))
    assert ours["send"] == share * plain["send"]
    plain, ours = (counted("step04_tp_sp", 2, tp=2, sp=False, **flags).sent["tp"] for flags in ({}, more))
    halves = (plain["all_reduce"] - ours["all_reduce"]) / 2  # of blocks: the ends stay exact
    assert ours["all_to_all"] == ours["all_gather"] - plain["all_gather"] == share * halves > 0


def test_muon_gathers_its_updates():
    """Over dp (n-1)/n of each unit with hidden matrices, over tp of these matrices, once a step; 2 bytes a number."""
    for step, flags, dim, numbers in (
        ("step03_zero", dict(zero=1), "dp", L * LAYER),
        ("step04_tp_sp", dict(tp=2, zero=0), "tp", L * (LAYER - 2 * D)),
    ):
        ours, theirs = (counted(step, 2, **flags, optimizer=rule).sent[dim] for rule in ("muon", "adamw"))
        assert ours["all_gather"] - theirs["all_gather"] == numbers * 2 / 2


def test_what_update_rules_keep():
    """Adafactor n + m numbers of n m (of a norm all), Muon one of each of its own, AdamW two, SGD none."""
    kv, matrices = D * KV // HEADS, L * (LAYER - 2 * D)
    sides = L * (4 * D + 2 * (D + kv) + 3 * (D + FFN)) + 2 * (VOCAB + D)
    expected = dict(adafactor=sides + (2 * L + 1) * D, muon=2 * P - matrices, adamw=2 * P, sgd=0)
    for rule, numbers in expected.items():
        assert counted("step01_single_gpu", 1, optimizer=rule).held["moments"] == 4 * numbers, rule


def sent_by_link(node: int, options: dict) -> tuple[list[int], list[int]]:
    """Runs on every rank: messages, and bytes, that it sends in a step inside its node of so many ranks, and out of it.

    Only of what is summed by hand, as `exchange` is given it.
    """
    messages, sent, rank = [0, 0], [0, 0], dist.get_rank()

    def spy(sends, receives, group):
        for tensor, peer in sends:
            out = dist.get_process_group_ranks(group.handle)[peer] // node != rank // node
            messages[out] += 1
            sent[out] += tensor.nbytes
        return exchange(sends, receives, group)

    with ExitStack() as stack:
        for module in (step02, hierarchical_sync, tree_sync):
            stack.enter_context(mock.patch.object(module, "exchange", spy))
        equal.record("step02_ddp", LAWS | options | dict(steps=1))
    return messages, sent


@pytest.mark.parametrize("n, node", [(4, 2), pytest.param(6, 3, marks=pytest.mark.exhaustive)])
def test_two_levels(pools, n, node):
    """2 (N-1)/N S inside a node and 2 (K-1)/K S/N between, in 2 (N-1) and 2 (K-1) messages a gradient.

    The ring: 2 (n-1) messages, all of them out of the node for its last rank. Bytes are rounded by each gradient.
    """
    nodes, params = n // node, 9 * L + 3
    two = dict(sync="hierarchical", ranks_per_node=node)
    found = pools(n).run(sent_by_link, node, two | dict(global_batch_size=n))
    totals = [sum(sent[link] for _, sent in found) for link in (0, 1)]
    assert totals == [2 * (node - 1) * nodes * P * B, 2 * (nodes - 1) * P * B], "together, to the byte"
    for messages, sent in found:
        assert messages == [2 * (node - 1) * params, 2 * (nodes - 1) * params]
        assert sent == pytest.approx([reduced(node, P * B), reduced(nodes, P * B / node)], abs=2 * B * n * params)
    for rank, (messages, _) in enumerate(pools(n).run(sent_by_link, node, dict(sync="ring", global_batch_size=n))):
        assert messages == [0, 2 * (n - 1) * params][:: 1 if rank % node == node - 1 else -1]


@pytest.mark.parametrize("n", [3, 4])
def test_tree(pools, n):
    """Each but rank 0 sends up, and down to each that sends to it: 2 (n-1) S together."""
    found = pools(n).run(sent_by_link, 1, dict(sync="tree", global_batch_size=n))
    below = {3: [2, 0, 0], 4: [2, 0, 1, 0]}[n]
    assert [sent[1] for _, sent in found] == [((r > 0) + below[r]) * P * B for r in range(n)]
    assert sum(sent[1] for _, sent in found) == 2 * (n - 1) * P * B


@pytest.mark.parametrize("pp, schedule", [(1, "1f1b"), (2, "afab"), (2, "zb-h1")])
def test_weights_are_kept_for_a_step(pools, pp, schedule):
    """(m+1) P, in one all-gather a unit and m reduce-scatters, also where micro-batches pass a stage in any order."""
    n, m, options = 2, 3 * pp, dict(pp=pp, zero=3, zero_keep=True, n_layers=2)
    options |= dict(schedule=schedule, global_batch_size=2 * m)
    for sent, calls in pools(n * pp).run(measure, "step06_pipeline", options):
        units = 2 // pp + (2 if pp == 1 else 1)
        assert calls["data", "all_gather"] == units and calls["data", "reduce_scatter"] == m * units
        if pp == 1:
            assert sent["data"] == (n - 1) * (m + 1) * (2 * LAYER + 2 * END + D) * B // n + round(reduced(n, SCALAR))


def test_small_units_are_kept_for_a_step(pools):
    """Layers are below the threshold: (m+1) P of them, an all-gather each. E and H are not: 2 m P of them, m each."""
    n, m = 2, 3
    options = dict(zero=3, zero_keep=True, zero_keep_mb=0.06, global_batch_size=n * m)
    assert LAYER * B < 0.06 * 2**20 < END * B
    for sent, calls in pools(n).run(measure, "step03_zero", options):
        elements = (m + 1) * L * LAYER + 2 * m * (2 * END + D)
        assert sent["dp"] == (n - 1) * elements * B // n + 2 * round(reduced(n, SCALAR))
        assert calls["dp", "all_gather"] == L + 2 * m and calls["dp", "reduce_scatter"] == m * (L + 2)


def sums_in_backward(options: dict) -> tuple[int, int]:
    """Runs on every rank: how many reduce-scatters started before `finish` was called in the last step, and in all."""
    found, count, plain = [0, 0], equal.Watch.count, step03.Zero1.begin

    def counted(run, operation: str, *rest):
        found[1] += operation == "reduce_scatter"
        count(run, operation, *rest)

    def began(zero, *args):
        found[:] = [0, 0]
        plain(zero, *args)

    def finished(self):
        found[0] = found[1]
        right(self)

    right = zero_overlap.Early.finish if "zero_overlap" in options else step03.Zero1.finish
    owner = zero_overlap.Early if "zero_overlap" in options else step03.Zero1
    with (
        mock.patch.object(equal.Watch, "count", counted),
        mock.patch.object(step03.Zero1, "begin", began),
        mock.patch.object(owner, "finish", finished),
    ):
        equal.record("step03_zero", LAWS | options)
    return found[0], found[1]


def test_sums_start_in_backward(pools):
    """All of the L + 2 units, where step 3 starts none; bytes and calls are its own."""
    assert pools(2).run(sums_in_backward, dict(zero=1)) == [(0, L + 2)] * 2
    for more in {}, dict(fused_gradients=True):  # whoever adds, hooks are called once
        assert pools(2).run(sums_in_backward, dict(zero=1, zero_overlap=True) | more) == [(L + 2, L + 2)] * 2
    ours, theirs = (pools(2).run(measure, "step03_zero", dict(zero=1) | more) for more in (dict(zero_overlap=True), {}))
    assert ours == theirs


@pytest.mark.parametrize("flags", [dict(tp_overlap=True), INT8, INT8 | dict(tp_overlap=True)], ids=str)
def test_tensor_parallel(pools, flags):
    """(n-1)/n of 8 activations a layer and 4 at the ends; two numbers a token.

    With overlap the input of a block is gathered once more in backward. int8: a byte a value, 4 more for each 256.
    """
    n, act, loss = 2, A, 2 * SEQ * B
    gathers, scatters = (4 + 2 * flags.get("tp_overlap", False)) * L, 4 * L
    block = SEQ * (D + 4) if "compress_activations" in flags else act
    expected = M * ((n - 1) * ((gathers + scatters) * block + 4 * act) // n + loss)
    expected += round(reduced(n, (2 * L + 1) * D * B)) + round(reduced(n, SCALAR))
    for sent, calls in pools(n).run(measure, "step04_tp_sp", dict(tp=n) | flags):
        check(sent, dict(tp=expected))
        if block == act:
            assert calls["tp", "all_gather"] == M * (gathers + 3)
            assert calls["tp", "reduce_scatter"] == M * (scatters + 2)


@pytest.mark.parametrize(
    "n, mode, flags",
    [
        (2, "zigzag", dict(cp_kernel="flash")),
        *((n, mode, {}) for n, mode in ((2, "ring"), (4, "allgather"), (4, "ulysses"))),
    ],
)
def test_context_parallel(pools, n, mode, flags):
    """(n-1) B forward, (n-1) B + n G backward in a layer and micro-batch; k and v travel with their own heads.

    Gathered: (n-1) G backward. Ulysses: (n-1)/n of q, k, v and the output, each way; n ranks share few k and v.
    """
    seq = 12 * n
    q, kv = (heads * seq // n * (D // HEADS) * B for heads in (HEADS, 2 * KV))
    hops = 2 * (n - 1) + (n if mode != "allgather" else 0)
    size = 2 * (n - 1) * (2 * q + kv * max(1, n // KV)) // n if mode == "ulysses" else hops * kv
    for sent, calls in pools(n).run(measure, "step05_cp_ring", dict(cp=n, cp_mode=mode, seq_len=seq) | flags):
        assert set(sent) == {"cp", "data"}
        assert sent["cp"] == M * L * size + round(reduced(n, SCALAR))
        assert abs(sent["data"] - reduced(n, P * B + SCALAR)) < 100  # a bucket's bytes are rounded
        if mode in ("zigzag", "ring"):
            assert calls["cp", "send"] == M * L * hops


@pytest.mark.parametrize(
    "n, swap, kv_heads", [(4, 2, 2), (4, 2, 1), (4, 4, 2), pytest.param(6, 2, 4, marks=pytest.mark.exhaustive)]
)
def test_ulysses_and_ring_crossed(pools, n, swap, kv_heads):
    """(U-1)/U of q, k, v and the output each way over U ranks; a ring of n / U, with U times fewer hops than of n."""
    ring, shape = n // swap, dict(seq_len=12 * n, n_kv_heads=kv_heads)
    q, kv = (heads * 12 * (D // HEADS) * B for heads in (HEADS, 2 * kv_heads * max(1, swap // kv_heads)))
    hops = 2 * (ring - 1) + ring if ring > 1 else 0
    for sent, calls in pools(n).run(measure, "step05_cp_ring", dict(cp=n, cp_mode="usp", ulysses=swap) | shape):
        assert sent["ulysses"] == M * L * 2 * (swap - 1) * (2 * q + kv) // swap
        assert sent.get("ring", 0) == M * L * hops * kv
        assert calls.get(("ring", "send"), 0) == M * L * hops
        assert calls["ulysses", "all_to_all"] == M * L * 2 * 4


@pytest.mark.parametrize("n, window, seq", [(2, 5, 16), (2, 5, 48), (4, 7, 16)])
def test_window(pools, n, window, seq):
    """W-1 tokens' k and v from the ranks before, and as many gradients back, however long the sequence is."""
    token, own = 2 * KV * (D // HEADS) * B, seq // n
    options = dict(cp=n, cp_mode="ring", window=window, seq_len=seq)
    for rank, (sent, _) in enumerate(pools(n).run(measure, "step05_cp_ring", options)):
        there = min(window - 1, (n - 1 - rank) * own) + min(window - 1, rank * own)  # forward, and back
        assert sent["cp"] == M * L * there * token + round(reduced(n, SCALAR))


@pytest.mark.parametrize("tied", [False, True])
def test_matmuls_add_up_gradients(tied):
    """Gone are, of each matrix, a cast in each micro-batch and an addition in all but the first; and three sums of dx.

    Matrices: seven in a layer, and the head, unless it is tied. The matmuls' FLOPs stay what they are.
    """
    seen, m = [], 2  # micro-batches
    for fused in (False, True):
        options = dict(dtype="bf16", global_batch_size=m, tied=tied, fused_gradients=fused, dry_run=1)
        seen.append(run_rank(step01.train, equal.config_of("step01_single_gpu", options), 0).meter.count)
    gone = {name: seen[0][name]["calls"] - seen[1][name]["calls"] for name in ("_to_copy", "add", "add_")}
    matrices = 7 * L + (not tied)
    assert gone == dict(_to_copy=matrices * m, add=3 * L * m, add_=matrices * (m - 1))
    flops = [sum(one[name]["flops"] for name in ("mm", "addmm", "addmm_")) for one in seen]
    assert flops[0] == flops[1] > 0


def mm_on_cpu(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """In the place of CUDA's matmul with a wider output."""
    assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
    return a.to(out_dtype) @ b.to(out_dtype)


def addmm_on_cpu(
    total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta=1, alpha=1, out: Tensor
) -> Tensor:
    """In the place of the one that adds."""
    assert out.data_ptr() == total.data_ptr() and (beta, alpha) == (1, 1)
    return out.add_(mm_on_cpu(a, b, out_dtype))


def test_matmuls_add_16_bits_to_32():
    """By the operators that CUDA has, in their schemas: the sum is fp32's. A CPU has none, and rounds each product."""
    torch.manual_seed(0)
    batches = [torch.randn(2, 64, 8).bfloat16() for _ in range(3)]
    right = sum(dy.double().T @ x.double() for dy, x in batches)

    def off() -> float:
        weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        weight.grad_dtype, fused = torch.float32, fused_gradients.adds_to_wide(weight)
        for dy, x in batches:
            fused_gradients.add_product(weight, dy, x, fused)
        assert weight.grad.dtype == torch.float32
        return equal.difference(weight.grad, right)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", mm_on_cpu, "CPU")
        library.impl("addmm.dtype_out", addmm_on_cpu, "CPU")
        assert off() < 1e-6
    assert 1e-4 < off() < 1e-2


def by_formulas(dtype: torch.dtype = torch.float64) -> list[float]:
    """How far the formulas for parts of the keys are from the fused kernels of --cp-kernel flash."""
    torch.manual_seed(0)
    q, do = torch.randn(2, 2, 4, 6, 8, dtype=dtype)
    k, v = torch.randn(2, 2, 2, 6, 8, dtype=dtype)
    found = []
    for causal in (True, False):
        lse = step05.part_attention(q, k, v, causal)[1] + 0.5  # other keys are elsewhere
        both = []
        for attention, gradients in (kernels.FORMULAS, flash.FLASH):
            o = attention(q, k, v, causal)
            both.append([*o, *gradients(do, q, k, v, o[0].to(dtype), lse, causal)])
        found += [equal.difference(a, b) for a, b in zip(*both, strict=True)]
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_formulas_are_the_kernels(dtype):
    """Attention to a part of the keys, its log-sum-exp, and this part's share of all gradients."""
    assert max(by_formulas(dtype)) < max(bounds.FP64, 2 * bounds.attention(dtype))


def cudnn_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    wants_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """In the place of cuDNN's forward: a CPU's kernel, in the shapes of torch 2.9 and later."""
    assert (
        all(x.is_contiguous() for x in (q, k, v)) and wants_lse and (bias, dropout, mask, scale) == (None, 0, 0, None)
    )
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    seed = torch.zeros((), dtype=torch.int64)
    return o, lse[..., None], None, None, q.shape[2], k.shape[2], seed, seed.clone(), None


def cudnn_backward_on_cpu(*given: Any, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """In the place of cuDNN's backward."""
    do, q, k, v, o, lse, seed, offset, *nothing, max_q, max_k, dropout, causal = given
    assert all(x.is_contiguous() for x in (do, q, k, v, o, lse)) and lse.shape == (*q.shape[:3], 1)
    assert seed.dtype == offset.dtype == torch.int64 and nothing == [None] * 3
    assert (max_q, max_k, dropout, scale) == (q.shape[2], k.shape[2], 0.0, None)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(do, q, k, v, o, lse.squeeze(-1), 0.0, causal)


def by_cudnn(dtype: torch.dtype = torch.float64) -> list[float]:
    """How far the formulas are from what cuDNN is asked for, by PyTorch's schemas; a CPU's kernel answers."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention", cudnn_on_cpu, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward_on_cpu, "CPU")
        with mock.patch.object(flash, "FLASH", flash.CUDNN):
            return by_formulas(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_formulas_are_what_cudnn_is_asked_for(dtype):
    """In the shapes, strides and order that its operators want."""
    assert max(by_cudnn(dtype)) < max(bounds.FP64, 2 * bounds.attention(dtype))


def test_gpus_that_have_the_kernel():
    """16 bits, head_dim a multiple of 8: flash to 256 from Ampere on, cuDNN to 128 on 9.x and 10.x; any length."""

    def has(dtype: torch.dtype = torch.bfloat16, size: int = 64, gpu: tuple = (8, 0), kernel: str = "flash") -> bool:
        with mock.patch("torch.cuda.get_device_capability", lambda _: gpu):
            return flash.fits(SimpleNamespace(is_cuda=True, dtype=dtype, shape=(0, size), device=0), kernel)

    assert has() and not any((has(torch.float32), has(size=60), has(size=264), has(gpu=(7, 5))))
    known = [gpu for gpu in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)) if has(gpu=gpu, kernel="cudnn")]
    assert known == [(9, 0), (10, 0), (10, 3)]
    assert has(size=128, gpu=(9, 0), kernel="cudnn") and not has(size=136, gpu=(9, 0), kernel="cudnn")


@pytest.mark.parametrize(
    "where, gpu, kernel, chosen",
    [
        *(("cuda", (9, 0), "cudnn", flash.CUDNN), ("cuda", (9, 0), "flash", flash.FLASH)),
        *(("cuda", (8, 0), "cudnn", None), ("cpu", (0, 0), "cudnn", flash.FLASH)),
    ],
)
def test_the_kernel_of_the_ring(where, gpu, kernel, chosen):
    """What is asked for, where it is known; else a line. A CPU has one."""
    sample = SimpleNamespace(is_cuda=where == "cuda", dtype=torch.bfloat16, shape=(0, 64), device=0)
    weight, given = SimpleNamespace(new_empty=lambda *_: sample), []
    layers = {"0": SimpleNamespace(self_attn=SimpleNamespace(attend=lambda *_, kernel: given.append(kernel)))}
    trunk = SimpleNamespace(layers=layers)
    model = SimpleNamespace(config=SimpleNamespace(head_dim=64), model=trunk, parameters=lambda: iter([weight]))
    parts = Parts(SimpleNamespace(config=step05.Config()), model)
    with mock.patch("torch.cuda.get_device_capability", lambda _: gpu):
        if chosen is None:
            with pytest.raises(
                UserError, match=r"^--cp-kernel cudnn: on a GPU it needs --dtype bf16, a GPU that is Hop"
            ):
                flash.attach(SimpleNamespace(cp_kernel=kernel), parts)
            return
        flash.attach(SimpleNamespace(cp_kernel=kernel), parts)
    layers["0"].self_attn.attend(None)
    assert given == [chosen]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_plain_ring_is_uneven(n):
    """Rank r computes 2r+1 times the pairs of the first one."""
    length = 12

    def work(rank: int) -> float:
        parts = [part for source in range(n) for part in ring.ordered_visible(rank, source, length)]
        pairs = [(len(range(length)[queries]) * len(range(length)[keys]), causal) for queries, keys, causal in parts]
        return sum(count / (2 if causal else 1) for count, causal in pairs)

    assert [work(rank) for rank in range(n)] == [length**2 * (r + 0.5) for r in range(n)]


@pytest.mark.parametrize("schedule, n_layers", [("1f1b", L), ("zbv", 4)])
def test_boundaries_in_parts(pools, schedule, n_layers):
    """pp's bytes / tp, and (tp-1)/tp of an activation over tp for each that comes from another rank: x or dx.

    In a V of two ranks the two middle stages are on one rank: nothing is sent or gathered between them.
    """
    options, tp = dict(pp=2, tp=2, sp=False, schedule=schedule, n_layers=n_layers), 2
    boundaries = M * (1 if schedule == "1f1b" else 2)  # one way
    whole, parted = (
        [sent for sent, _ in pools(4).run(measure, "step06_pipeline", options | dict(pp_scatter=flag))]
        for flag in (False, True)
    )
    for before, after in zip(whole, parted, strict=True):
        scalars = round(reduced(2, SCALAR)) + round(reduced(2, SCALAR))
        assert before["pp"] - scalars == boundaries * A == tp * (after["pp"] - scalars)
        assert after["tp"] - before["tp"] == boundaries * A * (tp - 1) // tp


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mode", ["rows", "allgather"])
def test_ways_to_experts(pools, mode, tp):
    """Bytes that a rank of two sends over ep if each token visits all four experts; forward, and again backward.

    They are divided by tp, as its ranks route different tokens.
    """
    row, gates = D * B, 4 * B  # of a token
    once = {
        "rows": SEQ * (row + gates // 2) + SEQ * row,
        "allgather": SEQ * (2 * row + gates),
    }[mode]
    counts = dict(rows=8, allgather=0)[mode]
    options = dict(tp=tp, ep=2, ep_mode=mode, experts=4, experts_per_token=4)
    for sent, _ in pools(2 * tp).run(measure, "step07_moe_ep", options):
        assert sent["ep"] == M // 2 * L * (2 * once / tp + counts)


def test_dispatch_in_two_levels(pools):
    """Each token visits all eight experts on two nodes of two ranks: it crosses once, and there goes to both ranks.

    `rows` sends it to each of the other node's ranks, so twice as much crosses.
    """
    ep, inside, experts, m = 4, 2, 8, 2
    nodes, row, gate = ep // inside, D * B, B
    options = dict(ep=ep, ep_mode="nodes", experts=experts, experts_per_token=experts, global_batch_size=m * ep)
    between = (nodes - 1) * SEQ * (row + experts // nodes * gate) + (nodes - 1) * SEQ * row
    fans_out = (inside - 1) * nodes * SEQ * (row + experts // ep * gate) + (inside - 1) * nodes * SEQ * row
    for sent, _ in pools(ep).run(measure, "step07_moe_ep", options):
        assert sent["ep between"] == m * L * (2 * between + 8 * (nodes - 1))
        assert sent["ep inside"] == m * L * (2 * fans_out + 8 * (inside - 1))


def test_groups_bound_the_nodes(pools):
    """A token whose experts are of one group of two, each in a node, crosses at most once, whatever it visits there."""
    ep, experts, m = 4, 8, 2
    options = dict(ep=ep, ep_mode="nodes", experts=experts, experts_per_token=3, expert_groups=2, groups_per_token=1)
    found = pools(ep).run(measure, "step07_moe_ep", options | dict(global_batch_size=m * ep))
    counts = ep * m * L * 8
    crossed = (sum(sent["ep between"] for sent, _ in found) - counts) / (2 * (2 * D * B + experts // 2 * B))
    assert crossed == int(crossed) and 0 < crossed <= ep * m * L * SEQ


def order_of_turns(options: dict) -> list[list[tuple[str, str]]]:
    """Runs on every rank: of each pair in the last step, what its forward (F) and its backward (B) do, in order.

    Attention and experts are noted where they begin, in backward where the gradient of their output is there.
    """
    pairs, turns, both = [], [], ep_overlap.Turns.both

    def note(what: str, who: int | None = None):
        if turns and turns[0].left:
            pairs[-1].append(("FB"[turns[0].turn if who is None else who], what))

    def noting(function, what: str):
        def noted(*args, **kwargs):
            note(what)
            output = function(*args, **kwargs)
            output.register_hook(lambda _: note(what))
            return output

        return noted

    def ending(i: int, function):
        result = function()
        note("ends", i)
        return result

    def paired_up(self, *functions):
        turns[:] = [self]
        pairs.append([])
        return both(self, *(lambda i=i, function=function: ending(i, function) for i, function in enumerate(functions)))

    def started(output, tensor, *rest):
        pending = all_to_all(output, tensor, *rest)
        if tensor.is_floating_point():  # rows, not their counts
            note("starts")
            pending.wait = lambda: note("waits") or Pending.wait(pending)
        return pending

    with ExitStack() as stack:
        for owner, name, new in (
            (ep_overlap.Turns, "both", paired_up),
            (ep_overlap, "all_to_all", started),
            (Attention, "forward", noting(Attention.forward, "attention")),
            (step07.Experts, "forward", noting(step07.Experts.forward, "experts")),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        equal.record("step07_moe_ep", LAWS | options)
    return pairs[len(pairs) // 2 :]


OVERLAP = dict(pp=2, ep=2, schedule="ahead", experts=4, n_layers=8, global_batch_size=8, zero=0)


@pytest.mark.parametrize(
    "schedule, n_layers", [("ahead", 8), ("dualpipe", 4), pytest.param("zbv", 8, marks=pytest.mark.exhaustive)]
)
def test_a_message_of_experts_is_hidden(pools, schedule, n_layers):
    """Between start and wait of each all-to-all lies the other micro-batch's computation, as long as that goes on.

    But for the first of the forward: backward needs no matrices until its own first one. Four in each of two layers.
    """
    options, hidden = OVERLAP | dict(schedule=schedule, n_layers=n_layers), 0
    for pairs in pools(4).run(order_of_turns, options | dict(ep_overlap=True)):
        assert pairs
        for events in pairs:
            assert events.count(("F", "starts")) == events.count(("B", "starts")) == 2 * 2
            for at, (who, what) in enumerate(events):
                other = "FB"[who == "F"]
                if what == "starts" and (other, "ends") not in events[:at]:
                    between = {word for whose, word in events[at : events.index((who, "waits"), at)] if whose == other}
                    first = who == "F" and (who, what) not in events[:at]
                    assert between & {"attention", "experts", "ends"} or (first and between), events
                    hidden += 1
    assert hidden >= 4 * 6, "two or more pairs a step have six or more hidden messages each"
    plain, ours = (pools(4).run(measure, "step07_moe_ep", options | dict(ep_overlap=flag)) for flag in (False, True))
    assert [sent for sent, _ in plain] == [sent for sent, _ in ours]
