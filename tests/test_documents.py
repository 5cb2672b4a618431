"""Attention that stops at document borders: each document alone is the oracle; visited blocks; all layouts; faults."""

import re
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor

import step01_single_gpu as step01
import step05_cp_ring as step05
from common import UserError
from common.layout import materialize
from common.model import Decoder
from services import documents
from services.checks import check_one
from services.documents import Documents, MicroBatch, document_numbers, restarted, run_lengths
from services.launch import open_mesh
from services.memory import MemoryTimeline
from services.readers import open_tokens
from tests import bounds, equivalence, faults
from tests.bench.cp_work import pairs
from tests.equivalence import SMALL, check, difference
from theory.memory import memory_rows

CPU = torch.device("cpu")
END = 256
MODES = ["zigzag", "ring", "allgather", "ulysses"]
BASE = dict(optimizer="sgd", n_layers=2, global_batch_size=4, micro_batch_size=2, steps=3)


@pytest.fixture(scope="session")
def document_data(tmp_path_factory) -> str:
    """Documents of 1 to 30 tokens, each with its END: a sequence of 16 tokens holds a part of one, or up to eight."""
    rng, rows = np.random.default_rng(5), []
    for length in rng.choice([0, 1, 3, 5, 8, 13, 29], size=300):
        rows.append(dict(input_ids=[*rng.integers(0, 256, size=length).tolist(), END]))
    path = tmp_path_factory.mktemp("documents") / "data"
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def random_tokens(seed: int, batch: int, seq: int, each: float) -> Tensor:
    """Tokens int64 [batch, seq], of which one in `each` is END."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (batch, seq), generator=generator)
    return tokens.masked_fill(torch.rand(batch, seq, generator=generator) < 1 / each, END)


def may_look(tokens: list[int]) -> Tensor:
    """The definition, one pair after another: bool [seq, seq], whether query i (row) may look at key j."""
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i in range(len(tokens)):
        for j in reversed(range(i + 1)):
            if j < i and tokens[j] == END:
                break
            seen[i, j] = True
    return seen


# --- where documents are ---------------------------------------------------------------------------------------------


def test_an_end_belongs_to_the_document_that_it_ends():
    """Numbers, lengths and places of two sequences, by hand; an END alone is a document, the first may be a rest."""
    tokens = torch.tensor([[7, END, END, 8, 9, END], [1, 2, 3, 4, 5, 6]])
    numbers = document_numbers(tokens, END)
    assert numbers.tolist() == [[0, 0, 1, 2, 2, 2], [0] * 6]
    assert run_lengths(numbers) == [2, 1, 3, 6]
    assert restarted(numbers).tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]


def follower(model: Decoder, kind: str, batch: int) -> Documents:
    """Documents that follow a model on one device."""
    seq = model.config.seq_len
    config = SimpleNamespace(documents=kind, end_token=END, micro_batch_size=batch)
    run = SimpleNamespace(config=config, model=model, shape=model.config, pipeline=None, device=CPU)
    run.positions = torch.arange(seq)
    return Documents(run)


def small_model(**flags) -> Decoder:
    """Its first values, fp64."""
    with torch.device("meta"):
        model = Decoder(step01.Config(**SMALL | flags).model_config())
    materialize(model, 0, CPU, torch.float64)
    return model


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["mask", "reset"])
def test_each_document_is_as_if_it_were_alone(kind):
    """Hidden states and gradients of packed sequences are those of the plain model on every document by itself.

    With mask its tokens keep their positions in the sequence, with reset they have 0, 1, 2, ...
    """
    tokens = random_tokens(1, 3, 24, 5)
    ours, plain = small_model(seq_len=24), small_model(seq_len=24)
    follower(ours, kind, 3).begin(tokens)
    hidden = ours(tokens)
    ours.lm_head.loss(hidden, tokens).backward()
    alone = []
    for row in tokens:
        starts = [0, *(i + 1 for i in range(23) if row[i] == END)]
        for start, end in zip(starts, [*starts[1:], 24], strict=True):
            at = torch.arange(end - start) + (start if kind == "mask" else 0)
            alone.append(plain(row[None, start:end], at))
            plain.lm_head.loss(alone[-1], row[None, start:end]).backward()
    assert len(alone) > 9
    assert difference(hidden.detach().flatten(0, 1), torch.cat(alone, 1)[0].detach()) < bounds.FP64
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert difference(mine.grad, theirs.grad) < bounds.RUN["fp64"]


@pytest.mark.numerics
def test_rope_is_relative():
    """Positions that restart change nothing but rounding."""
    tokens, found = random_tokens(2, 2, 16, 4), []
    for kind in ("mask", "reset"):
        model = small_model()
        follower(model, kind, 2).begin(tokens)
        found.append(model(tokens).detach())
    assert 0 < difference(*found) < bounds.FP64


# --- the law of visited blocks ---------------------------------------------------------------------------------------


def blocks_of(tokens: Tensor, rank: int, n: int, mode: str) -> list[tuple]:
    """(source, sequences, query rows, key rows, causal) of all that one rank of n computes."""
    seq = tokens.shape[1]
    positions = partial(step05.own_positions, seq, n=n, mode=mode)
    here, zigzag = MicroBatch(tokens, END, positions), mode != "ring"
    cuts = {source: here.cut(rank, source, step05.visible(rank, source, seq // n, zigzag)) for source in range(n)}
    return [(source, *block) for source, found in cuts.items() for block in found]


def require_tiles(n: int, mode: str, each: float):
    """Assert the law for random documents of `each` tokens on average. Raises AssertionError."""
    tokens = random_tokens(n, 2, 6 * n, each)
    count = torch.zeros(2, 6 * n, 6 * n, dtype=torch.int64)
    for rank in range(n):
        for source, some, rows, keys, causal in blocks_of(tokens, rank, n, mode):
            own = [step05.own_positions(6 * n, r, n, mode) for r in (rank, source)]
            queries, looked_at = own[0][rows], own[1][keys]
            seen = torch.ones(len(queries), len(looked_at), dtype=torch.int64)
            count[some, queries[:, None], looked_at] += seen.tril() if causal else seen
    expected = torch.stack([may_look(row) for row in tokens.tolist()]).long()
    assert torch.equal(count, expected), "visited blocks"
    lengths = run_lengths(document_numbers(tokens, END))
    assert count.sum() == sum(length * (length + 1) // 2 for length in lengths)


@pytest.mark.parametrize("each", [2, 6, 30, 1e9])
@pytest.mark.parametrize("mode", ["zigzag", "ring"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_visited_blocks_tile_what_may_be_seen(n, mode, each):
    """Laid on the square of queries and keys, the blocks of all ranks cover each pair of one document exactly once."""
    require_tiles(n, mode, each)


@pytest.mark.parametrize("mode", ["zigzag", "ring"])
def test_blocks_are_as_few_as_can_be(mode):
    """A triangle for each document that a rank has a part of; for other ranks' keys at most one rectangle a sequence.

    And none where the last key and the first query, in the order of the sequence, are in different documents.
    """
    n, tokens = 4, random_tokens(3, 3, 48, 9)
    numbers = document_numbers(tokens, END)
    for rank in range(n):
        own = step05.own_positions(48, rank, n, mode)
        found = blocks_of(tokens, rank, n, mode)
        triangles = [block for block in found if block[0] == rank]
        assert len(triangles) == sum(len(set(row[own].tolist())) for row in numbers)
        for source in set(range(n)) - {rank}:
            theirs = step05.own_positions(48, source, n, mode)
            for i, row in enumerate(numbers.tolist()):
                met = {row[q] for q, k in product(own.tolist(), theirs.tolist()) if k < q and row[q] == row[k]}
                assert len(met) == len([b for b in found if b[0] == source and b[1] == slice(i, i + 1)]) <= 1


def asked_on_rank(modes: list[str], tokens: Tensor, fault: str = "") -> list[int]:
    """Runs on every rank: for each mode the query-key pairs x heads that the kernels are asked for, forward."""
    n, seq, heads, found = torch.distributed.get_world_size(), tokens.shape[1], 4, []
    right = step05.block_attention, documents.attend

    def block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        found[-1] += len(q) * q.shape[2] * pairs(q.shape[1], k.shape[1], causal)
        return right[0](q, k, v, causal)

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found[-1] += len(q) * q.shape[2] * pairs(q.shape[1], k.shape[1], True)
        return right[1](q, k, v)

    replaced = mock.patch.object(step05, "block_attention", block), mock.patch.object(documents, "attend", whole)
    with open_mesh({"cp": n}, CPU, "gloo") as mesh, faults.applied(fault), replaced[0], replaced[1]:
        for mode in modes:
            found.append(0)
            core = step05.ContextAttention(mesh["cp"], mode)
            here = MicroBatch(tokens, END, partial(core.positions, seq))
            core.cut = partial(here.cut, mesh.rank)
            core.attend = partial(Documents.attend, SimpleNamespace(now=here))
            core(*(torch.ones(len(tokens), seq // n, h, 2) for h in (heads, 2, 2)))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_kernels_are_asked_for_the_pairs_of_documents(pools, world):
    """All ranks together for  heads x sum L (L+1) / 2  in every mode; Ulysses' ranks all for the same."""
    tokens = random_tokens(4, 2, 8 * world, 7)
    lengths = run_lengths(document_numbers(tokens, END))
    found = pools(world).run(asked_on_rank, MODES, tokens)
    expected = 4 * sum(length * (length + 1) // 2 for length in lengths)
    for mode, counts in zip(MODES, zip(*found, strict=True), strict=True):
        assert sum(counts) == expected, mode
        assert mode != "ulysses" or len(set(counts)) == 1


# --- equal to one device ---------------------------------------------------------------------------------------------


@pytest.mark.picked(5, 8, 10, 15)
@pytest.mark.parametrize(
    "kind, cp, mode", [(kind, cp, mode) for kind, mode, cp in product(("reset", "mask"), MODES, (2, 4))], ids=str
)
def test_equals_one_device(pools, document_data, kind, cp, mode):
    """Every mode on 2 and 4 ranks, two sequences at once, with grouped queries."""
    base = BASE | dict(documents=kind, dataset=document_data)
    check(pools(cp), "step05_cp_ring", base, dict(cp=cp, cp_mode=mode))


@pytest.mark.picked(7)
@pytest.mark.parametrize(
    "step, base, layout",
    [
        ("step02_ddp", dict(documents="reset"), dict(sync="overlap")),
        ("step02_ddp", dict(documents="mask"), dict(sync="torch")),
        ("step04_tp_sp", dict(documents="reset"), dict(tp=2, zero=3)),
        ("step05_cp_ring", dict(documents="mask"), dict(cp=2, tp=2, cp_mode="ulysses")),
        ("step05_cp_ring", dict(documents="reset", recompute="selective"), dict(cp=2, tp=2, zero=3)),
        ("step05_cp_ring", dict(documents="reset", recompute="full"), dict(cp=2, tp=2, cp_mode="allgather")),
        ("step06_pipeline", dict(documents="reset"), dict(pp=4, cp=1, tp=1, schedule="zb-h1")),
        ("step06_pipeline", dict(documents="reset", recompute="full"), dict(pp=2, cp=2, tp=1, schedule="1f1b")),
        ("step06_pipeline", dict(documents="mask"), dict(pp=2, cp=1, tp=2, schedule="interleaved")),
        ("step06_pipeline", dict(documents="reset"), dict(pp=2, cp=2, tp=1, schedule="dualpipe", zero=3)),
    ],
    ids=str,
)
def test_equals_one_device_in_every_dimension(pools, document_data, step, base, layout):
    """Data, tensor and pipeline parallelism, ZeRO, recomputation: a stage that never sees a token knows the borders."""
    more = dict(dataset=document_data, n_layers=4, global_batch_size=8, micro_batch_size=1, steps=2)
    check(pools(4), step, BASE | more | base, layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["mask", "reset"])
def test_equals_one_device_with_experts(pools, document_data, kind):
    """pp 2 x cp 2 x tp 2, 4 experts on 2 ranks, against step 7 in one process."""
    import step07_moe_ep as step07

    base = dict(dataset=document_data, documents=kind, n_layers=4, global_batch_size=8, micro_batch_size=1, steps=2)
    base |= dict(experts=4, experts_per_token=2)
    check(pools(8), "step07_moe_ep", BASE | base, dict(pp=2, cp=2, tp=2, ep=2), against=step07)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_equal_one_device(pools, document_data, tmp_path, mode):
    """--compile breaks its graphs at the attention."""
    base = SMALL | BASE | dict(dataset=document_data, documents="reset", dtype="fp32", lr=0.01)
    file = str(equivalence.reference(base))
    options = base | dict(cp=2, cp_mode=mode, compile=True, out=str(tmp_path / "run"))
    pools(2).run(equivalence.on_rank, "step05_cp_ring", options, file, 1e-5, [""], timeout=600)


def columns_on_rank(options: dict, *keys: str) -> list[list[float]]:
    """Runs on every rank: train; returns columns of the metrics."""
    with equivalence.without_instruments():
        history = step05.train(step05.Config(**options)).history
    return [[row[key] for row in history] for key in keys]


def test_validation_and_the_share_of_pairs(pools, tmp_path, document_data):
    """A validation between the steps gives step 1's loss; the pairs that are left are counted from the definition."""
    options = SMALL | BASE | dict(dataset=document_data, documents="reset", eval_every=1, eval_sequences=3)
    with equivalence.without_instruments():
        run = step01.train(step01.Config(**options, out=str(tmp_path / "one")))
    more = dict(cp=2, out=str(tmp_path / "two"))
    for found in pools(2).run(columns_on_rank, options | more, "validation_loss", "loss", "attention_pairs"):
        for key, column in zip(("validation_loss", "loss", "attention_pairs"), found, strict=True):
            assert column == pytest.approx([row[key] for row in run.history], rel=1e-10)
    data = open_tokens(document_data, 16, 4, 0, 259)
    for step, row in enumerate(run.history):
        seen = [may_look(tokens).sum().item() for tokens in data.batch(step).tokens.tolist()]
        assert row["attention_pairs"] == pytest.approx(sum(seen) / (4 * 136))


# --- what it costs, faults, mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["mask", "reset"])
def test_saved_activations_are_what_theory_says(kind, recompute):
    """Within 3%: the outputs of the documents and their sum, RoPE tables for each sequence."""
    flags = dict(SMALL, seq_len=64, n_layers=2, dtype="fp32", micro_batch_size=4, documents=kind, recompute=recompute)
    config, tokens = step01.Config(**flags), random_tokens(6, 4, 64, 9)
    model = small_model(**flags).float()
    step01.wrap_layers(model, config)
    follower(model, kind, 4).begin(tokens)
    timeline = MemoryTimeline()
    with timeline.phase("forward"):
        loss = model.lm_head.loss(model(tokens), tokens)
    predicted = memory_rows(config, model.config, 0, 0, torch.float32, on_cpu=True)["activations"]
    assert timeline.live("activations") == pytest.approx(predicted, rel=0.03)
    del loss


@pytest.mark.parametrize(
    "fault, step, layout, complaint",
    [
        ("positions_restart_on_rank_0_alone", "step05_cp_ring", dict(cp=2, cp_mode="ring"), "the loss"),
        ("reaching_document_skipped", "step05_cp_ring", dict(cp=2), "the loss"),
        ("documents_of_the_forward_in_backward", "step06_pipeline", dict(pp=2, cp=2, tp=1), "the gradient of"),
    ],
)
def test_faults_are_noticed(pools, tmp_path, document_data, fault, step, layout, complaint):
    """By name of what differs first."""
    options = SMALL | BASE | dict(dataset=document_data, documents="reset", recompute="full", steps=1)
    out, file = dict(out=str(tmp_path / "run")), str(equivalence.reference(options))
    arguments = step, options | layout | out, file, 1e-10, [fault]
    found = pools(layout.get("pp", 1) * layout["cp"]).run(
        equivalence.complaint_on_rank, equivalence.on_rank, *arguments
    )
    assert any(re.search(f"({complaint}).* differs by", text) for text in found), found


def test_a_skipped_block_breaks_the_law():
    """The law of visited blocks sees it without any training."""
    with faults.applied("reaching_document_skipped"), pytest.raises(AssertionError, match="visited blocks"):
        require_tiles(2, "zigzag", 6)


def test_borders_ignored_break_the_law():
    """Attention across borders, too."""
    with faults.applied("borders_ignored"), pytest.raises(AssertionError, match="visited blocks"):
        require_tiles(2, "ring", 6)


def test_bad_flags_are_refused():
    """With the flag and the fix."""
    config = step01.Config(**SMALL | dict(documents="mask", end_token=259))
    with pytest.raises(UserError, match=r"--end-token 259 is not among the --vocab-size 259 tokens: give the one that"):
        check_one(config)
