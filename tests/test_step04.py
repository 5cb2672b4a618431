"""Tensor and sequence parallelism: equal to one device however it is cut; traffic, memory; faults are noticed.

Every equivalence is in fp64 to 1e-10 against step01, on every rank: losses, norms, gathered gradients and parameters.
"""

import os
import re
import signal
import tempfile
import time
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest import mock

import datasets
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import step01_single_gpu as step01
import step03_zero as step03
import step04_tp_sp as step04
from common import UserError, trainer
from common.comm import Group, Mesh, sum_over
from common.layout import layout_of, materialize, note_gradient_sum
from common.model import IGNORE, Decoder, Head, rope_tables
from services.boxes import Piece, gather
from services.checks import check_tp
from services.devices import choose_dtype
from services.evaluation import generate, look_through
from services.launch import open_mesh
from services.memory import MemoryTimeline
from services.tables import bytes_of
from tests import bounds, equivalence, faults
from tests.equivalence import SMALL, check, label
from theory.memory import tp_activation_bytes

STEP = "step04_tp_sp"
CPU = torch.device("cpu")
BASE = dict(optimizer="sgd", n_layers=2, global_batch_size=4, micro_batch_size=2)  # 259 tokens: no tp divides them
THIRDS = dict(dim=36, n_heads=6, n_kv_heads=3, seq_len=12)
EIGHTHS = dict(n_heads=8)
MODES = [dict(sp=sp, tp_overlap=overlap) for sp in (True, False) for overlap in (True, False)]


# --- equal to one device ---------------------------------------------------------------------------------------------


@pytest.mark.picked(0, 6, 9)
@pytest.mark.parametrize("mode", MODES, ids=label)
@pytest.mark.parametrize("tp, shape", [(2, {}), (3, THIRDS), (4, {})], ids=["tp2", "tp3", "tp4-kv2"])
def test_equals_one_device(pools, tp, shape, mode):
    """With and without sequence parallelism and overlap; with tp 4, two ranks share each key/value head."""
    check(pools(tp), STEP, BASE | shape, dict(tp=tp) | mode)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [dict(tp=8), dict(tp=8, sp=False), dict(tp=4, zero=3), dict(tp=2)], ids=label)
def test_equals_one_device_on_eight_ranks(pools, layout):
    """A head for each rank, four ranks to a key/value head; and tp inside dp."""
    check(pools(8), STEP, BASE | EIGHTHS | dict(micro_batch_size=1), layout)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_equals_one_device_with_zero_and_uneven_targets(pools, uneven_data, zero, sp):
    """dp 2 x tp 2 in every stage of ZeRO, micro-batches with few or no targets, AdamW."""
    base = dict(optimizer="adamw", dataset=uneven_data, global_batch_size=8, micro_batch_size=1)
    check(pools(4), STEP, BASE | base, dict(tp=2, zero=zero, sp=sp))


@pytest.mark.picked(2, 5, 9, 11)
@pytest.mark.parametrize(
    "base, layout",
    [
        (dict(optimizer="adamw"), dict(tp=4, zero=0)),
        (dict(tied=True), dict(tp=4)),
        (dict(tied=True), dict(tp=2, zero=3, sp=False)),
        (dict(tied=True, optimizer="adamw"), dict(tp=2, zero=0)),
        (dict(n_kv_heads=4, vocab_size=260), dict(tp=4)),
        (dict(n_kv_heads=1), dict(tp=4, zero=0)),
        (dict(n_kv_heads=1, optimizer="adamw"), dict(tp=2, zero=2, sp=False)),
        (dict(recompute="full"), dict(tp=4)),
        (dict(recompute="full"), dict(tp=2, zero=3, tp_overlap=False)),
        (dict(recompute="selective", tied=True), dict(tp=2, zero=0)),
        (dict(recompute="selective"), dict(tp=4, sp=False)),
        (dict(micro_batch_size=4, grad_clip=0.0), dict(tp=4)),
    ],
    ids=label,
)
def test_equals_one_device_for_every_kind_of_model(pools, base, layout):
    """AdamW, tied weights, more and fewer key/value heads, a vocabulary that divides, recomputation, no clipping."""
    check(pools(4), STEP, BASE | base, layout)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [dict(tp=4, zero=0), dict(tp=2, zero=3), dict(tp=4, sp=False)], ids=label)
def test_equals_one_device_with_frozen_parameters(pools, layout):
    """A matrix behind a shared gather and a norm that do not train get no gradient and stay."""
    check(pools(4), STEP, BASE, layout, "frozen")


@pytest.fixture(scope="session")
def tiny_vocabulary(tmp_path_factory) -> str:
    """A data set of five tokens: cut over four ranks in parts of two, the last of which is only padding."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(5, (4000,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("five") / "data"
    datasets.Dataset.from_list([dict(input_ids=tokens)]).save_to_disk(str(path))
    return str(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("base", [dict(tied=True), dict(optimizer="adamw", weight_decay=0.5)], ids=label)
def test_equals_one_device_where_a_rank_has_only_padding(pools, tiny_vocabulary, base):
    """Five tokens over four ranks: parts of 2, 2, 1 and 0 rows."""
    check(pools(4), STEP, BASE | dict(dataset=tiny_vocabulary, vocab_size=5) | base, dict(tp=4))


@pytest.mark.picked(1)
@pytest.mark.parametrize("tp", [2, 4])
def test_fp32_drifts_by_rounding_only(pools, tp):
    """fp32 gradients, losses and parameters stay within 1e-5 of one device."""
    check(pools(tp), STEP, BASE | dict(dtype="fp32", lr=0.01), dict(tp=tp))


def losses_on_rank(options: dict, key: str = "loss") -> list[float]:
    """Runs on every rank: train; returns one column of the metrics."""
    return metrics_on_rank(options, key)[0]


def metrics_on_rank(options: dict, *keys: str) -> list[list[float]]:
    """Runs on every rank: train; returns columns of the metrics."""
    with equivalence.without_instruments():
        history = step04.train(step04.Config(**options)).history
    return [[row[key] for row in history if key in row] for key in keys]


@pytest.mark.numerics
def test_bf16_stays_near(pools, tmp_path):
    """bf16 is within `bounds.DRIFT` nats of one device's bf16 run over 20 steps, on both ranks alike."""
    options = SMALL | BASE | dict(optimizer="adamw", dtype="bf16", lr=0.01, steps=20)
    expected = step01.train(step01.Config(**options, out=str(tmp_path / "one"))).history
    losses = pools(2).run(losses_on_rank, options | dict(tp=2, out=str(tmp_path / "two")))
    assert losses[0] == losses[1]
    assert max(abs(a - row["loss"]) for a, row in zip(losses[0], expected, strict=True)) < bounds.DRIFT


def test_validation_is_one_devices(pools, tmp_path, uneven_data):
    """Validation during training gives step01's numbers, and leaves training as it is."""
    options = SMALL | BASE | dict(eval_every=1, eval_sequences=6, dataset=uneven_data)
    expected = step01.train(step01.Config(**options, out=str(tmp_path / "one"))).history
    for zero in (0, 3):
        layout = dict(tp=2, zero=zero, out=str(tmp_path / "four"))
        for found in pools(4).run(metrics_on_rank, options | layout, "validation_loss", "loss"):
            for key, column in zip(("validation_loss", "loss"), found, strict=True):
                assert column == pytest.approx([row[key] for row in expected], rel=1e-10)


@pytest.mark.picked(1)
@pytest.mark.parametrize("base", [{}, dict(optimizer="adamw", tied=True)], ids=label)
def test_resumes_under_other_layouts(pools, tmp_path, base):
    """Steps 1-2 with tp 2, 3-4 on one device, 5-6 with tp 4 (two copies of each kv head, padded vocabulary)."""
    options = SMALL | BASE | base | dict(steps=6, save_every=100)
    whole = step01.train(step01.Config(**options, out=str(tmp_path / "whole"))).history
    a, b, c = (str(tmp_path / name) for name in "abc")
    losses = pools(2).run(losses_on_rank, options | dict(tp=2, zero=1, stop_after=2, out=a))[0]
    rows = step01.train(step01.Config(**options | dict(resume=a, stop_after=4, out=b))).history
    losses += [row["loss"] for row in rows]
    losses += pools(4).run(losses_on_rank, options | dict(tp=4, zero=0, resume=b, out=c))[0]
    assert losses == pytest.approx([row["loss"] for row in whole], rel=1e-10)


def test_one_process_equals_step01(tmp_path):
    """tp 1 on one process is step01, bit for bit (without clipping: the norm is summed in another order)."""
    options = SMALL | dict(grad_clip=0.0, micro_batch_size=6)
    runs = [
        step01.train(step01.Config(**options, out=str(tmp_path / "one"))),
        step04.train(step04.Config(**options, zero=0, out=str(tmp_path / "four"))),
    ]
    rows = [[row["loss"] for row in run.history] for run in runs]
    assert rows[0] == rows[1]
    for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.picked(1)
@pytest.mark.parametrize("layout", [dict(tp=4, zero=0), dict(tp=2, zero=2)], ids=label)
def test_loss_and_norm_are_the_same_on_every_rank(pools, tmp_path, uneven_data, layout):
    """Bit for bit."""
    options = SMALL | BASE | dict(dataset=uneven_data, out=str(tmp_path / "run")) | layout
    assert len(set(map(str, pools(4).run(metrics_on_rank, options, "loss", "grad_norm")))) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("cut", [dict(tp=1), *(dict(tp=tp) | mode for tp in (2, 4, 8) for mode in MODES)], ids=label)
def test_every_layout_of_eight_ranks_equals_one_device(pools, cut, zero, tied, kv_heads):
    """The full product."""
    base = BASE | EIGHTHS | dict(n_kv_heads=kv_heads, tied=tied, global_batch_size=8, micro_batch_size=1)
    check(pools(8), STEP, base, dict(zero=zero) | cut)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", MODES, ids=label)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_recomputation_equals_one_device(pools, zero, mode, recompute, optimizer):
    """Recomputation runs collectives again in backward, under every stage of ZeRO."""
    check(pools(4), STEP, BASE | dict(recompute=recompute, optimizer=optimizer), dict(tp=2, zero=zero) | mode)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mode", MODES, ids=label)
def test_compiled_layers_equal_one_device(pools, mode, recompute):
    """torch.compile breaks its graphs at the collectives and changes nothing but rounding."""
    base = dict(dtype="fp32", lr=0.01, recompute=recompute)
    options = SMALL | BASE | base | dict(tp=2, compile=True) | mode
    file = str(equivalence.reference(SMALL | BASE | base))
    with tempfile.TemporaryDirectory() as out:
        pools(2).run(equivalence.on_rank, STEP, options | dict(out=out), file, 1e-5, [""], timeout=600)


# --- the operators ---------------------------------------------------------------------------------------------------

ONE, EACH = "one value, known to every rank", "a value of each rank's own"
OPERATORS = {  # name: which function, with sequence parallelism or not; what goes in, what comes out
    "copy": (step04.enter_block, False, ONE, EACH),
    "sum": (step04.leave_block, False, EACH, ONE),
    "gather": (step04.enter_block, True, EACH, EACH),
    "scatter": (step04.leave_block, True, EACH, EACH),
}


def values(kind: str, shape: tuple[int, ...], rank: int, seed: int) -> Tensor:
    """Random numbers in fp64, not contiguous, the same on all ranks if `kind` is ONE."""
    generator = torch.Generator().manual_seed(1000 * seed + (rank if kind == EACH else 0))
    return torch.randn(shape[::-1], generator=generator, dtype=torch.float64).permute(2, 1, 0)


def definition(name: str, inputs: list[Tensor], rank: int) -> Tensor:
    """What `rank` must get from the inputs of all ranks, [..., tokens, dim] each."""
    own = Group("tp", CPU, None, rank, len(inputs)).share(inputs[0].shape[-2])
    return {
        "copy": lambda: inputs[rank],
        "sum": lambda: torch.stack(inputs).sum(0),
        "gather": lambda: torch.cat(inputs, dim=-2),
        "scatter": lambda: torch.stack(inputs).sum(0)[..., own, :],
    }[name]()


ADJOINT = {"copy": "sum", "gather": "scatter"}
ADJOINT |= {b: a for a, b in ADJOINT.items()}


CLOSE = dict(rtol=bounds.FP64, atol=bounds.FP64)  # of numbers of about 1


def operator_on_rank(name: str) -> None:
    """Runs on every rank: one operator, forward and backward, against its definition; and <f(x), y> = <x, f^T(y)>."""
    world = torch.distributed.get_world_size()
    operator, sp, kind_in, kind_out = OPERATORS[name]
    tokens = 8 // world if name == "gather" else 8
    with open_mesh({"tp": world}, CPU, "gloo") as mesh:
        group, rank = mesh["tp"], mesh.rank
        inputs = [values(kind_in, (2, tokens, 3), r, seed=1) for r in range(world)]
        tokens_out = definition(name, inputs, rank).shape[1]
        cotangents = [values(kind_out, (2, tokens_out, 3), r, seed=2) for r in range(world)]
        x, y = inputs[rank].clone().requires_grad_(), cotangents[rank].clone()
        out = operator(x, group, sp)
        out.backward(y)
        torch.testing.assert_close(out, definition(name, inputs, rank), **CLOSE)
        torch.testing.assert_close(x.grad, definition(ADJOINT[name], cotangents, rank), **CLOSE)
        assert torch.equal(x, inputs[rank]) and torch.equal(y, cotangents[rank]), "an input was modified in place"

        def inner(a: Tensor, b: Tensor, kind: str) -> float:
            product = (a * b).sum().item()
            return sum(sum_over(group, product)) if kind == EACH else product

        assert abs(inner(out, y, kind_out) - inner(x, x.grad, kind_in)) < bounds.FP64 * out.norm() * y.norm()


@pytest.mark.numerics
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_their_conjugates(pools, name, world):
    """Each pair is adjoint, so nothing is multiplied by n: where a value is one for all ranks it counts once."""
    pools(world).run(operator_on_rank, name)


def collectives_on_rank() -> None:
    """Runs on every rank: each collective over tokens, started before it is waited for, on any leading dimensions."""
    world = torch.distributed.get_world_size()
    names = dict(keep_tokens="copy", sum_tokens="sum", gather_tokens="gather", scatter_tokens="scatter")
    with open_mesh({"tp": world}, CPU, "gloo") as mesh:
        for shape in ((8, 3), (2, 8, 3), (2, 2, 8, 3)):
            draw = [torch.Generator().manual_seed(r) for r in range(world)]
            inputs = [torch.randn(shape, generator=g, dtype=torch.float64) for g in draw]
            mine = inputs[mesh.rank].clone()
            results = {name: getattr(step04, name)(mine, mesh["tp"]) for name in names}
            for name, result in reversed(results.items()):
                torch.testing.assert_close(result.wait(), definition(names[name], inputs, mesh.rank), **CLOSE)
            assert torch.equal(mine, inputs[mesh.rank]), "an input was modified in place"


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_over_tokens(pools, world):
    """Several at a time, and of one, two or no dimensions before the tokens."""
    pools(world).run(collectives_on_rank)


def columns_on_rank(sp: bool, frozen: bool) -> None:
    """Runs on every rank: ColumnParallelLinear against one full matmul per weight."""
    world = torch.distributed.get_world_size()
    with open_mesh({"tp": world}, CPU, "gloo") as mesh:
        group, rank = mesh["tp"], mesh.rank
        full = values(ONE, (2, 4 * world, 3), 0, seed=1).requires_grad_()
        matrices = [values(ONE, (1, n * world, 3), 0, seed=n)[0].clone().requires_grad_() for n in (2, 1, 1)]
        matrices[1].requires_grad_(not frozen)
        outputs = [F.linear(full, w) for w in matrices]
        cotangents = [values(ONE, tuple(out.shape), 0, seed=9) for out in outputs]
        torch.autograd.backward(outputs, cotangents)

        tokens = slice(4 * rank, 4 * rank + 4) if sp else slice(None)
        x = full.detach()[:, tokens].clone().requires_grad_()
        before = x.detach().clone()
        own = [w.detach().chunk(world)[rank].clone().requires_grad_(w.requires_grad) for w in matrices]
        pair = (step04.gather_tokens, step04.scatter_tokens) if sp else (step04.keep_tokens, step04.sum_tokens)
        found = step04.ColumnParallelLinear.apply(x, group, *pair, *own)
        torch.autograd.backward(found, [c.chunk(world, dim=-1)[rank] for c in cotangents])
        for mine, out in zip(found, outputs, strict=True):
            torch.testing.assert_close(mine, out.chunk(world, dim=-1)[rank], **CLOSE)
        torch.testing.assert_close(x.grad, full.grad[:, tokens], **CLOSE)
        for mine, w in zip(own, matrices, strict=True):
            assert (mine.grad is None) == (w.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, w.grad.chunk(world)[rank], **CLOSE)
        assert torch.equal(x, before)
        calls = mesh.ledger.take()["calls"]["tp"]
        assert calls == (dict(all_gather=2, reduce_scatter=1) if sp else dict(all_reduce=1))
        constant = step04.ColumnParallelLinear.apply(before, group, *pair, *own)
        torch.autograd.backward(constant, [c.chunk(world, dim=-1)[rank] for c in cotangents])
        assert mesh.ledger.take()["calls"].get("tp", {}) == (dict(all_gather=2) if sp else {})
        for mine, w in zip(own, matrices, strict=True):  # an input that needs no gradient changes none
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, 2 * w.grad.chunk(world)[rank], **CLOSE)


@pytest.mark.numerics
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_column_parallel_linear(pools, sp, frozen):
    """Three matmuls of one input: right in both directions, with one collective each way (and one to gather again)."""
    pools(4).run(columns_on_rank, sp, frozen)


def vocabulary_layer(cls: type, full: Tensor, group: Group, sp: bool) -> torch.nn.Module:
    """VocabParallelEmbedding or VocabParallelHead with this rank's rows of a full matrix [vocab, dim]."""
    with torch.device("meta"):
        weight = step04.cut(torch.nn.Parameter(torch.empty(full.shape, dtype=full.dtype)), 0, group)
    record = layout_of(weight)
    split, own = record.splits[0], torch.nn.Parameter(record.slice(full))
    own.parallel_layout = record
    return cls(own, range(min(split.start, split.full), min(split.stop, split.full)), group, sp)


def vocabulary_on_rank(vocab: int, sp: bool, chunk: int) -> None:
    """Runs on every rank: embedding, loss and logits over a cut vocabulary against the plain ones."""
    world = torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(vocab, 6, generator=generator, dtype=torch.float64)
    tokens, targets = (torch.randint(vocab, (2, 8), generator=generator) for _ in range(2))
    targets[0, :6], targets[1, 3] = IGNORE, vocab - 1
    hidden = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
    with open_mesh({"tp": world}, CPU, "gloo") as mesh:
        group, rank = mesh["tp"], mesh.rank
        mine = slice(8 // world * rank, 8 // world * (rank + 1)) if sp else slice(None)

        def compare_weights(module: torch.nn.Module, gradient: Tensor):
            record = layout_of(module.weight)
            torch.testing.assert_close(module.weight.grad, record.slice(gradient), **CLOSE)
            assert not module.weight.grad[len(module.rows) :].any(), "the padding has a gradient"

        plain = matrix.clone().requires_grad_()
        out = F.embedding(tokens, plain)
        out.backward(hidden)
        layer = vocabulary_layer(step04.VocabParallelEmbedding, matrix, group, sp)
        found = layer(tokens)
        assert torch.equal(found, out[:, mine])
        found.backward(hidden[:, mine].clone())
        compare_weights(layer, plain.grad)

        head = Head(6, vocab, bias=False, dtype=torch.float64)
        head.weight = torch.nn.Parameter(matrix.clone())
        x = hidden.clone().requires_grad_()
        loss = head.loss(x, targets)
        (loss / 7).backward()
        layer = vocabulary_layer(step04.VocabParallelHead, matrix, group, sp)
        own = hidden[:, mine].clone().requires_grad_()
        found = layer.loss(own, targets, chunk)
        (found / 7).backward()
        torch.testing.assert_close(found, loss, **CLOSE)
        torch.testing.assert_close(own.grad, x.grad[:, mine], **CLOSE)
        compare_weights(layer, head.weight.grad)
        with torch.no_grad():
            torch.testing.assert_close(layer.loss(own, targets, chunk), loss, **CLOSE)
            logits = layer(own)
            assert logits.shape == (2, 8, vocab)
            torch.testing.assert_close(logits, head(hidden), **CLOSE)
            far_down = vocabulary_layer(step04.VocabParallelHead, torch.full_like(matrix, -9.0), group, sp)
            assert far_down(torch.ones_like(own)).max() < -50, "the padding's logit of 0 wins"


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("vocab, chunk", [(13, 3), (9, 1024), (5, 1), (16, 16)])
def test_vocabulary_parallel_layers(pools, vocab, chunk, sp):
    """Padding of three rows, a rank with only padding, almost no rows, none; chunks that divide and that do not."""
    pools(4).run(vocabulary_on_rank, vocab, sp, chunk)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator and look at what it returns."""
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def largest_on_rank(sp: bool) -> int:
    """Runs on every rank: loss and backward of 64 tokens, 64 words, chunks of 8; the largest tensor made."""
    world = torch.distributed.get_world_size()
    with open_mesh({"tp": world}, CPU, "gloo") as mesh:
        head = vocabulary_layer(step04.VocabParallelHead, torch.ones(64, 4), mesh["tp"], sp)
        hidden = torch.ones(1, 64 // world if sp else 64, 4, requires_grad=True)
        with Largest() as largest:
            head.loss(hidden, torch.zeros(1, 64, dtype=torch.int64), 8).backward()
        return largest.numel


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_no_rank_ever_holds_the_logits(pools, sp):
    """Not [64 tokens, 64 words], and not [64, 64 / tp]: only a chunk of them, or the hidden states, all [256]."""
    assert pools(2).run(largest_on_rank, sp) == [8 * 32, 8 * 32]


def padding_on_rank(options: dict) -> list[float]:
    """Runs on every rank: train; returns the largest entries of weight and moments in the vocabulary's padding."""
    optimizer = step04.train(step04.Config(**options)).optimizer
    found = []
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        split = layout_of(optimizer.params[name]).splits[0]
        extra = slice(max(0, split.full - split.start), None)
        held = [optimizer.params[name].detach(), *optimizer.inner.state[optimizer.masters[name]].values()]
        found += [t[extra].abs().max().item() for t in held if t.dim() and t[extra].numel()]
    return found


@pytest.mark.picked(1)
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_padding_stays_exactly_zero(pools, tmp_path, tiny_vocabulary, dtype):
    """Weights and moments of rows beyond the vocabulary, after four steps of AdamW with weight decay."""
    base = dict(optimizer="adamw", weight_decay=0.5, dataset=tiny_vocabulary, vocab_size=5, dtype=dtype)
    options = SMALL | BASE | base | dict(tp=4, zero=0, out=str(tmp_path / "run"))
    found = pools(4).run(padding_on_rank, options)
    assert [len(entries) for entries in found] == [0, 0, 6, 6] and not any(map(any, found))


# --- laws ------------------------------------------------------------------------------------------------------------


def build(config: step04.Config, mesh: Mesh) -> Decoder:
    """The model of `step04.train`, cut and materialised."""
    with torch.device("meta"):
        model = Decoder(config.model_config())
    step04.shard_tensors(model, mesh, config.sp, config.tp_overlap)
    note_gradient_sum(model.parameters(), "dp")
    step03.materialize(model, config.seed, CPU, choose_dtype(config.dtype, CPU))
    step01.wrap_layers(model, config)
    return model


def initial_values_on_rank(options: dict, fault: str = "") -> None:
    """Runs on every rank: parts concatenated are step01's initial parameters, and each part is the record's slice."""
    config = step04.Config(**options)
    world = torch.distributed.get_world_size()
    with torch.device("meta"):
        plain = Decoder(config.model_config())
    materialize(plain, config.seed, CPU, choose_dtype(config.dtype, CPU))
    expected = dict(plain.named_parameters())
    with open_mesh({"dp": world // config.tp, "tp": config.tp}, CPU, "gloo") as mesh, faults.applied(fault):
        found = dict(build(config, mesh).named_parameters())
        assert found.keys() == expected.keys()
        parts = [Piece("model", name, part.detach(), part.shape, layout_of(part)) for name, part in found.items()]
        whole = gather(parts, mesh)["model"]
        for name, part in found.items():
            assert torch.equal(whole[name], expected[name]), f"{name} differs"
            assert torch.equal(part, layout_of(part).slice(expected[name])), f"{name} differs from its slice"


@pytest.mark.parametrize(
    "options",
    [
        dict(tp=4),
        dict(tp=2, tied=True, dtype="bf16"),
        dict(tp=4, n_kv_heads=1, dtype="fp32"),
        dict(tp=4, n_kv_heads=4, vocab_size=5, sp=False),
    ],
    ids=label,
)
def test_parts_concatenated_are_the_initial_parameters(pools, options):
    """Bit for bit, every parameter: no layout draws other numbers."""
    pools(4).run(initial_values_on_rank, SMALL | options)


def layer_calls_on_rank(mode: dict, fault: str) -> tuple[dict, dict]:
    """Runs on every rank: the collectives of one decoder layer, forward and backward."""
    world = torch.distributed.get_world_size()
    config = step04.Config(**SMALL | dict(tp=world) | mode)
    m = config.model_config()
    with open_mesh({"dp": 1, "tp": world}, CPU, "gloo") as mesh, faults.applied(fault):
        layer = build(config, mesh).model.layers["0"]
        tokens = m.seq_len // world if config.sp else m.seq_len
        x = torch.randn(1, tokens, m.dim, dtype=torch.float64, requires_grad=True)
        mesh.ledger.take()
        out = layer(x, *rope_tables(torch.arange(m.seq_len), m, x.dtype))
        forward = mesh.ledger.take()["calls"]["tp"]
        out.backward(torch.ones_like(out))
        return forward, mesh.ledger.take()["calls"]["tp"]


def expected_layer_calls(mode: dict) -> tuple[dict, dict]:
    """Two in each direction, whole or in halves; and two to gather again."""
    if not mode["sp"]:
        return dict(all_reduce=2), dict(all_reduce=2)
    again = 2 if mode["tp_overlap"] else 0
    return dict(all_gather=2, reduce_scatter=2), dict(all_gather=2 + again, reduce_scatter=2)


@pytest.mark.parametrize("mode", MODES, ids=label)
def test_collectives_of_a_layer(pools, mode):
    """Never one a matrix."""
    assert pools(2).run(layer_calls_on_rank, mode, "") == [expected_layer_calls(mode)] * 2


def traffic_on_rank(options: dict) -> tuple[dict, dict, dict]:
    """Runs on every rank: train; calls and bytes of the last step, and the bytes over tp that the run predicts."""
    predicted, predict = {}, trainer.predict

    def watched(run, sync):
        costs = predict(run, sync)
        predicted.update({key: n_bytes for key, n_bytes in costs.traffic.items() if key[0] in ("tp", "kv")})
        return costs

    with mock.patch.object(trainer, "predict", watched):
        last = step04.train(step04.Config(**options)).history[-1]
    return last["calls"], last["traffic"], predicted


def table_of_bytes(config: step04.Config, world: int) -> tuple[dict, dict]:
    """The docstring's table for one step: calls and bytes by (dimension, operation)."""
    m, n, batch = config.model_config(), config.tp, config.micro_batch_size
    k = config.global_batch_size // (world // n) // batch
    e, wide = {"bf16": (2, 4), "fp64": (8, 8)}[config.dtype]
    unit = (n - 1) / n * batch * m.seq_len * m.dim * e
    numbers = 2 * (n - 1) * batch * m.seq_len * wide
    again = config.recompute != "none"
    if config.sp:
        gathers = (4 + 2 * config.tp_overlap + 2 * again) * m.n_layers + 2
        scatters = (4 + again) * m.n_layers + 2
        calls = {("tp", "all_gather"): k * (gathers + 1), ("tp", "reduce_scatter"): k * scatters}
        sent = {("tp", "all_gather"): k * (gathers * unit + numbers), ("tp", "reduce_scatter"): k * scatters * unit}
        norms = (2 * m.n_layers + 1) * m.dim * wide
        calls["tp", "all_reduce (partial)"], sent["tp", "all_reduce (partial)"] = 1, 2 * (n - 1) / n * norms
    else:
        sums = (4 + again) * m.n_layers + 2
        calls = {("tp", "all_reduce"): k * sums, ("tp", "all_gather"): k}
        sent = {("tp", "all_reduce"): k * 2 * sums * unit, ("tp", "all_gather"): k * numbers}
    copies = n // m.n_kv_heads
    if copies > 1:
        heads = m.n_layers * 2 * m.head_dim * m.dim * wide
        calls["kv", "all_reduce (partial)"], sent["kv", "all_reduce (partial)"] = 1, 2 * (copies - 1) / copies * heads
    return calls, sent


@pytest.mark.picked(3, 6, 9, 12)
@pytest.mark.parametrize(
    "flags",
    [
        *(dict(tp=2) | mode for mode in MODES),
        *(dict(tp=4) | mode for mode in MODES),
        dict(tp=2, tied=True, dtype="bf16"),
        dict(tp=2, zero=3),
        dict(tp=4, tied=True, sp=False, n_kv_heads=1),
        dict(tp=2, recompute="full"),
        dict(tp=2, recompute="full", tp_overlap=False),
        dict(tp=2, recompute="selective", sp=False),
    ],
    ids=label,
)
def test_traffic_is_what_theory_says(pools, tmp_path, flags):
    """Calls and bytes of a step on every rank, by operation, equal the docstring's table and the prediction."""
    options = SMALL | BASE | dict(zero=0, global_batch_size=8, steps=2, out=str(tmp_path / "run")) | flags
    expected_calls, expected = table_of_bytes(step04.Config(**options), 4)
    for calls, sent, predicted in pools(4).run(traffic_on_rank, options):
        found = {(dim, op): n for dim in ("tp", "kv") for op, n in sent.get(dim, {}).items()}
        found = {key: n for key, n in found.items() if key[1].split("(")[-1] not in ("metrics)", "state)")}
        assert found == pytest.approx(predicted, rel=1e-12)
        if options["zero"]:  # the slices of what is summed at the end differ from rank to rank, some are empty
            expected = {key: found.get(key, n) if "(" in key[1] else n for key, n in expected.items() if key in found}
        assert found == pytest.approx(expected, rel=1e-12)
        assert {key: calls[key[0]][key[1]] for key in found} == {key: expected_calls[key] for key in found}


def test_sequence_parallelism_sends_the_same_bytes():
    """A reduce-scatter and an all-gather are an all-reduce: the totals differ by what is gathered again, and norms."""
    for flags in (dict(tp=2), dict(tp=4), dict(tp=4, tied=True, dtype="bf16")):
        totals = []
        for mode in (dict(sp=False), dict(tp_overlap=False), {}):
            config = step04.Config(**SMALL | BASE | flags | mode)
            _, sent = table_of_bytes(config, 4)
            totals.append(sum(n for (_, operation), n in sent.items() if "(" not in operation))
        m, n = config.model_config(), config.tp
        k = config.global_batch_size // (4 // n) // config.micro_batch_size
        e = 2 if config.dtype == "bf16" else 8
        unit = (n - 1) / n * config.micro_batch_size * m.seq_len * m.dim * e
        assert totals == pytest.approx([totals[0], totals[0], totals[0] + 2 * k * m.n_layers * unit])


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    """The summed loss of predicting each token from itself."""
    return model.lm_head.loss(model(tokens, torch.arange(tokens.shape[1])), tokens)


def saved_on_rank(tp: int, options: dict, variants: list[dict]) -> list[tuple[int, int]]:
    """Runs on every rank: for each variant, bytes that a forward pass leaves for backward, predicted and measured."""
    found = []
    with open_mesh({"dp": torch.distributed.get_world_size() // tp, "tp": tp}, CPU, "gloo") as mesh:
        for variant in variants:
            config = step04.Config(**options | variant)
            m, dtype = config.model_config(), choose_dtype(config.dtype, CPU)
            tokens = torch.arange(config.micro_batch_size * m.seq_len).view(-1, m.seq_len) % m.vocab_size
            model, timeline = build(config, mesh), MemoryTimeline()
            with timeline.phase("forward"):
                loss = loss_of(model, tokens)
            predicted, deadline = tp_activation_bytes(config, m, tp, dtype, on_cpu=True), time.monotonic() + 30
            while timeline.live("activations") > 1.05 * predicted and time.monotonic() < deadline:
                time.sleep(0.01)  # gloo's threads may hold a message's tensors for a moment
            found.append((predicted, timeline.live("activations")))
            del loss
    return found


@pytest.mark.picked(1)
@pytest.mark.parametrize("tp", [1, 2, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_saved_activations_are_what_theory_says(pools, tp):
    """Within 5% on every rank, with and without SP, overlap and recomputation, in fp32 and bf16."""
    kinds = product(("none", "selective", "full"), ("fp32", "bf16") if tp < 8 else ("bf16",))
    variants = [mode | dict(recompute=recompute, dtype=dtype) for recompute, dtype in kinds for mode in MODES]
    options = dict(model="debug", n_heads=8, micro_batch_size=2, device="cpu")
    for found in pools(max(2, tp)).run(saved_on_rank, tp, options, variants):
        for variant, (predicted, measured) in zip(variants, found, strict=True):
            assert measured == pytest.approx(predicted, rel=0.05), variant


def test_saved_activations_divide_by_tp(pools):
    """With SP and overlap everything in a layer does; without SP, norms and residual stream stay."""
    options = dict(model="debug", n_heads=8, n_kv_heads=8, micro_batch_size=2, device="cpu", dtype="fp32")
    variants = [dict(sp=sp, n_layers=n) for sp in (True, False) for n in (2, 1)]

    def bytes_of_a_layer(tp: int) -> list[int]:
        two_sp, one_sp, two, one = (n_bytes for _, n_bytes in pools(4).run(saved_on_rank, tp, options, variants)[0])
        return [two_sp - one_sp, two - one]

    whole, also_whole = bytes_of_a_layer(1)
    split, not_all_split = bytes_of_a_layer(4)
    assert whole == also_whole and split == pytest.approx(whole / 4, rel=1e-3) and not_all_split > 1.5 * split


def held_on_rank(options: dict) -> dict[str, int]:
    """Runs on every rank: bytes of parameters, gradients, masters and moments, without the norms."""
    found: dict[str, int] = {}

    def observe(_, optimizer):
        found["gradients"] = bytes_of(p.grad for p in optimizer.params.values() if p.dim() > 1)

    optimizer = step04.train(step04.Config(**options), observe).optimizer
    matrices = {name: p for name, p in optimizer.params.items() if p.dim() > 1}
    masters = [optimizer.masters[name] for name in matrices]
    moments = [t for master in masters for t in optimizer.inner.state[master].values() if t.dim()]
    return found | dict(parameters=bytes_of(matrices.values()), masters=bytes_of(masters), moments=bytes_of(moments))


def test_parameters_gradients_and_moments_divide_by_tp(pools, tmp_path):
    """Exactly, where heads and vocabulary divide; only the norms are held by every rank."""
    options = SMALL | BASE | dict(optimizer="adamw", n_kv_heads=4, vocab_size=260, dtype="bf16", sync="naive", zero=0)
    m = step04.Config(**options).model_config()
    with torch.device("meta"):
        n = sum(p.numel() for p in Decoder(m).parameters() if p.dim() > 1)
    expected = dict(parameters=2 * n, gradients=4 * n, masters=4 * n, moments=8 * n)
    for tp in (2, 4):
        found = pools(4).run(held_on_rank, options | dict(tp=tp, out=str(tmp_path / "run")))
        assert found == [{kind: n_bytes / tp for kind, n_bytes in expected.items()}] * 4


# --- faults ----------------------------------------------------------------------------------------------------------

PLAIN = dict(sp=False, tp_overlap=False, zero=0)


@pytest.mark.picked(0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 12)
@pytest.mark.parametrize(
    "fault, tp, layout, optimizers, complaint",
    [
        ("same_shard_on_every_rank", 2, dict(zero=0), ["sgd"], "the loss"),
        ("scaled_by_local_fan_in", 2, dict(zero=0), ["sgd", "adamw"], "the loss"),
        ("heads_of_rank_0", 2, dict(zero=0), ["sgd"], "the loss"),
        ("norm_gradients_not_summed", 2, {}, ["sgd", "adamw"], "layernorm.weight"),
        ("norm_gradients_not_summed", 4, dict(tp=2, zero=3), ["sgd"], "layernorm.weight"),
        ("kv_gradients_not_summed", 4, {}, ["sgd", "adamw"], "[kv]_proj.weight"),
        ("replicas_counted_in_the_norm", 2, {}, ["sgd", "adamw"], "the gradient norm"),
        ("replicas_counted_in_the_norm", 4, dict(sp=False), ["sgd"], "the gradient norm"),
        ("g_sums_in_backward_too", 2, PLAIN, ["sgd", "adamw"], "the gradient of"),
        ("f_does_not_sum_in_backward", 2, PLAIN, ["sgd", "adamw"], "the gradient of"),
        ("embedding_off_by_one", 2, {}, ["sgd"], "the loss"),
        ("target_off_by_one", 2, {}, ["sgd"], "the loss"),
        ("padding_in_the_softmax", 2, {}, ["sgd"], "the loss"),
    ],
)
def test_faults_are_noticed(pools, tmp_path, fault, tp, layout, optimizers, complaint):
    """What peers got wrong makes the comparison with one device fail, whatever the optimizer hides."""
    for optimizer in optimizers:
        options = SMALL | BASE | dict(optimizer=optimizer, steps=2)
        ours = options | dict(tp=tp) | layout | dict(out=str(tmp_path / "run"))
        file = str(equivalence.reference(options))
        found = pools(tp).run(equivalence.complaint_on_rank, equivalence.on_rank, STEP, ours, file, 1e-10, [fault])
        assert any(re.search(f"{complaint}.* differs by", text) for text in found), found


@pytest.mark.parametrize("fault", ["same_shard_on_every_rank", "scaled_by_local_fan_in", "heads_of_rank_0"])
def test_faults_of_initialisation_are_noticed(pools, fault):
    """The comparison of initial values sees them, too."""
    found = pools(2).run(equivalence.complaint_on_rank, initial_values_on_rank, SMALL | dict(tp=2), fault)
    assert any("differs" in text for text in found)


@pytest.mark.parametrize("mode", MODES, ids=label)
def test_a_collective_for_each_matrix_is_noticed(pools, mode):
    """Fault 11 trains to the right numbers: only the count of calls sees it."""
    check(pools(2), STEP, BASE | dict(steps=2), dict(tp=2) | mode, fault="one_collective_a_matrix")
    forward, backward = pools(2).run(layer_calls_on_rank, mode, "one_collective_a_matrix")[0]
    assert (forward, backward) != expected_layer_calls(mode)
    assert (backward["all_reduce"] if not mode["sp"] else forward["all_gather"]) == 5


# --- the trainer around it -------------------------------------------------------------------------------------------


def text_of(model: Decoder, mesh: Mesh | SimpleNamespace) -> str:
    """Ten bytes that the model says after "def "."""
    positions = torch.arange(model.config.seq_len)
    return generate(partial(look_through, model, positions), model, positions, mesh, "def ", 10, 0)


def text_on_rank(options: dict) -> str:
    """Runs on every rank: sample from a cut model that has not been trained, so that every token is likely."""
    config, world = step04.Config(**options), torch.distributed.get_world_size()
    with open_mesh({"dp": world // config.tp, "tp": config.tp}, CPU, "gloo") as mesh:
        return text_of(build(config, mesh), mesh)


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_generates_step01s_text(pools, sp):
    """Sampling from a vocabulary that is cut and padded (259 as 4 x 65) gives the same text on every rank."""
    with torch.device("meta"):
        model = Decoder(step01.Config(**SMALL).model_config())
    materialize(model, 0, CPU, torch.float64)
    expected = text_of(model, SimpleNamespace(groups={}))
    assert pools(4).run(text_on_rank, SMALL | dict(tp=4, sp=sp)) == [expected] * 4


def interrupted_on_rank(options: dict) -> int:
    """Runs on every rank: train; one rank is told to stop in step 2. Returns the number of steps done."""

    def observe(step, _):
        if step == 1 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return len(step04.train(step04.Config(**options), observe).history)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_signal_to_one_rank_stops_all(pools, tmp_path, tp):
    """All ranks, of every dimension, agree on the last step, and save together."""
    options = SMALL | BASE | dict(steps=6, tp=tp, out=str(tmp_path / "run"))
    done = pools(4).run(interrupted_on_rank, options)
    assert len(set(done)) == 1 and done[0] < 6
    assert (tmp_path / "run" / "checkpoints" / f"step-{done[0]:08d}" / "meta.json").exists()


@pytest.mark.parametrize(
    "flags, world, message",
    [
        (dict(tp=4), 2, r"--tp 4 does not divide the 2 ranks that were started: use one of \[1, 2\]"),
        (dict(tp=3), 4, r"--tp 3 does not divide the 4 ranks that were started: use one of \[1, 2, 4\]"),
        (dict(tp=-1), 2, r"--tp -1 does not divide the 2 ranks that were started: use one of \[1, 2\]"),
        (dict(tp=8), 8, r"--tp 8 must divide --n-heads 4 and --ffn-dim 48: use one of \[1, 2, 4\]"),
        (dict(tp=4, ffn_dim=46), 4, r"--tp 4 must divide --n-heads 4 and --ffn-dim 46: use one of \[1, 2\]"),
        (dict(tp=2, dim=36, n_heads=6, n_kv_heads=3), 2, r"--tp 2 and --n-kv-heads 3: .* as do \[1, 2, 6\] kv heads"),
        (dict(tp=2, seq_len=15), 2, r"--seq-len 15 cannot be split over --tp 2: change one, or use --no-sp"),
        (dict(tp=2, optimizer="adafactor", zero=0), 2, r"--optimizer adafactor .* use it with --tp 1"),
        (dict(n_heads=1, n_kv_heads=1), 2, r"--tp 2 must divide --n-heads 1 .* use one of \[1\]"),
        (dict(tp=2, global_batch_size=5), 4, r"--global-batch-size 5 cannot be dealt to 2 ranks"),
    ],
)
def test_bad_flags_are_refused(flags, world, message):
    """With the flag and the legal values, before any process group."""
    with pytest.raises(UserError, match=message):
        check_tp(step04.Config(**SMALL | flags), world)


def test_an_odd_sequence_is_fine_without_sequence_parallelism(pools):
    """What the message about --seq-len proposes."""
    check(pools(2), STEP, BASE | dict(seq_len=15), dict(tp=2, sp=False))
