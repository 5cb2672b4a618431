"""What a run shows, and what no number shows: tables, figures, predictions, when gradients leave, fp16's scale."""

import contextlib
import importlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import step01_single_gpu as step01
from services import launch
from services.ledger import Ledger
from services.run import Run
from services.state import full_gradients
from tests import equivalence
from tests.equivalence import SMALL, job
from tests.fake_cuda import STEPS
from tests.test_step02 import micro_batch_size


def screen_on_rank(number: int, options: dict) -> tuple[str, dict, dict]:
    """Runs on every rank: train; what is printed, bytes sent in the last step, and bytes predicted."""
    module, seen, finish = importlib.import_module(STEPS[number - 1]), {}, Run.finish

    def spy(self, predicted, traffic):
        seen.update(traffic)
        finish(self, predicted, traffic)

    screen = io.StringIO()
    with equivalence.without_instruments(), mock.patch.object(Run, "finish", spy), contextlib.redirect_stdout(screen):
        history = module.train(module.Config(**options)).history
    sent = {(dim, op): n for dim, each in history[-1]["traffic"].items() for op, n in each.items()}
    return screen.getvalue(), {key: n for key, n in sent.items() if "(metrics)" not in key[1]}, seen


def cells(screen: str) -> dict[str, list[str]]:
    """The reduction table: by parameter its row, without the full shape; the header under "parameter"."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in screen.splitlines()]
    start = next(i for i, row in enumerate(rows) if row[:2] == ["parameter", "full shape"])
    table = rows[start : next(i for i in range(start, len(rows)) if len(rows[i]) < 3 and i > start + 1)]
    return {row[0].removeprefix("model.").removesuffix(".weight"): row[2:] for row in table if len(row) > 1}


# --- the reduction table ---------------------------------------------------------------------------------------------


def test_the_readmes_table(pools, tmp_path):
    """The part of the reduction table that README shows is printed, letter by letter."""
    options = dict(tp=2, steps=1, global_batch_size=8, eval_every=0, device="cpu", out=str(tmp_path / "run"))
    printed = pools(4).run(screen_on_rank, 4, options)[0][0]
    text = (Path(__file__).parent.parent / "README.md").read_text()
    shown = next(block for block in text.split("```") if block.startswith("\nparameter "))
    lines = shown.strip().splitlines()
    assert len(lines) == 10 and set(lines[2:]) <= set(printed.splitlines())
    assert lines[0] in printed
    assert printed.splitlines()[0] == "device: 4 ranks on cpu; backend gloo"


@pytest.mark.parametrize("gpus, shown", [((0, 1, 2), 3), ((0, 0, 0), 1)])
def test_the_first_line_says_where_a_job_trains(monkeypatch, gpus, shown):
    """Ranks that share a GPU, and one that has none, are seen at once."""
    seen = [("NVIDIA H100", "node0", gpu) for gpu in gpus] + [("cpu", "node0", None)]
    monkeypatch.setattr(launch, "gather_objects", lambda thing, mesh: seen if isinstance(thing, tuple) else [thing])
    monkeypatch.setattr(launch.dist, "get_backend", lambda: "gloo")
    mesh = SimpleNamespace(device=torch.device("cpu"), world=4, rank=0)
    assert launch.where_ranks_are(mesh) == f"3 ranks on {shown} x NVIDIA H100, 1 rank on cpu; backend gloo"


def test_alone_there_is_no_backend(tmp_path, capsys):
    """Step 1, before anything else."""
    step01.train(step01.Config(**SMALL | dict(steps=1, eval_every=0, save_every=0, out=str(tmp_path / "run"))))
    assert capsys.readouterr().out.splitlines()[0] == "device: 1 rank on cpu; no backend"


WHOLE, PARTIAL = "Replicate", "Partial"
TABLES = {  # step, ranks, flags, and by dimension what a few parameters are along it
    "2": (2, 2, {}, ["dp"], dict(norm=[PARTIAL], lm_head=[PARTIAL])),
    "4-no-sp": (
        4,
        4,
        dict(tp=2, sp=False),
        ["dp", "tp"],
        {
            "norm": [PARTIAL, WHOLE],
            "embed_tokens": [PARTIAL, "Shard(0)"],
            "layers.*.self_attn.o_proj": [PARTIAL, "Shard(1)"],
            "layers.*.self_attn.k_proj": [PARTIAL, "Shard(0)"],
        },
    ),
    "4-copies-of-heads": (
        4,
        4,
        dict(tp=4, zero=0),
        ["dp", "tp", "kv"],
        {
            "layers.*.self_attn.k_proj": [PARTIAL, "Shard(0)", PARTIAL],
            "layers.*.self_attn.q_proj": [PARTIAL, "Shard(0)", WHOLE],
        },
    ),
    "5": (5, 4, dict(cp=2, tp=2), ["dp", "cp", "tp"], {"norm": [PARTIAL, PARTIAL, PARTIAL]}),
    "7": (
        7,
        8,
        dict(pp=2, cp=2, tp=2, ep=2, experts=8, experts_per_token=2),
        ["pp", "dp", "cp", "tp", "ep", "expert_data"],
        {
            "norm": ["on 1", PARTIAL, PARTIAL, PARTIAL, WHOLE, WHOLE],
            "layers.*.self_attn.q_proj": ["on 1", PARTIAL, PARTIAL, "Shard(0)", WHOLE, WHOLE],
            "layers.*.mlp.router": ["on 1", PARTIAL, PARTIAL, PARTIAL, WHOLE, WHOLE],
            "layers.*.mlp.experts.gate_proj": ["on 1", WHOLE, WHOLE, "Shard(1)", "Shard(0)", PARTIAL],
        },
    ),
}


@pytest.mark.picked(0, 2, 4)
@pytest.mark.parametrize("name", TABLES)
def test_the_reduction_table(pools, tmp_path, name):
    """Every layout's table says how a parameter is cut and over which ranks its gradient is summed."""
    number, world, flags, dims, rows = TABLES[name]
    options = SMALL | dict(steps=1, global_batch_size=4, out=str(tmp_path / "run")) | flags
    found = cells(pools(world).run(screen_on_rank, number, options)[0][0])
    assert found["parameter"] == dims
    assert {key: found[key] for key in rows} == rows


# --- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compress, sync", [("none", "naive"), *((c, "bucket") for c in ("none", "bf16", "int8", "topk"))]
)
def test_step_2_predicts_what_it_sends(pools, tmp_path, compress, sync):
    """Byte for byte, whatever compresses the gradients and however they are grouped (the other steps: their tests)."""
    options = SMALL | micro_batch_size(3, 2) | dict(compress=compress, sync=sync, bucket_mb=0.02, dtype="fp32", steps=2)
    for _, sent, predicted in pools(3).run(screen_on_rank, 2, options | dict(out=str(tmp_path / "run"))):
        assert sent == pytest.approx(predicted, rel=1e-12) and sent


# --- what no number shows --------------------------------------------------------------------------------------------


def gradients_leave_on_rank(number: int, options: dict) -> list[tuple[str, str]]:
    """Runs on every rank: train; for each sum of gradients of the last step, operation and phase."""
    module, inside, found = importlib.import_module(STEPS[number - 1]), [""], []
    phase, book = Run.phase, Ledger.book

    @contextlib.contextmanager
    def watched(self, name, action=None):
        inside.append(name)
        with phase(self, name, action):
            yield
        inside.pop()

    def booked(self, group, operation, n_bytes):
        if operation in ("all_reduce", "reduce_scatter") and group.name in ("dp", "data"):
            found.append((operation, inside[-1]))
        book(self, group, operation, n_bytes)

    with (
        equivalence.without_instruments(),
        mock.patch.object(Run, "phase", watched),
        mock.patch.object(Ledger, "book", booked),
    ):
        module.train(module.Config(**options))
    return found


@pytest.mark.picked(0, 2, 3, 6)
@pytest.mark.parametrize(
    "number, flags",
    [
        (2, {}),
        *((number, dict(zero=zero)) for number in (3, 4, 5) for zero in (0, 1)),
    ],
    ids=str,
)
def test_gradients_leave_while_backward_goes_on(pools, tmp_path, number, flags):
    """Complete gradients are sent during the last backward pass, all but the last bucket: else nothing overlaps.

    Without this, all numbers stay right: what is left is sent at the end of the step.
    """
    options = SMALL | micro_batch_size(2, 2) | dict(bucket_mb=0.01, steps=1, out=str(tmp_path / "run")) | flags
    options |= dict(tp=1) if number > 3 else {}
    options |= dict(cp=1) if number > 4 else {}
    operation = "reduce_scatter" if flags.get("zero") else "all_reduce"
    for found in pools(2).run(gradients_leave_on_rank, number, options):
        phases = [where for op, where in found if op == operation]
        assert len(phases) > 3 and phases.count("backward") >= len(phases) - 1, phases


@pytest.mark.numerics
@pytest.mark.picked(0, 2)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_gradients_of_fp16(tmp_path, number):
    """`gradients()` has them times the loss scale; the norm, and what is gathered, are those of fp32."""
    module, found = importlib.import_module(STEPS[number - 1]), {}
    options = SMALL | dict(steps=1, grad_clip=0.0, out=str(tmp_path / "run")) | (dict(zero=2) if number == 3 else {})

    def observe(_, optimizer):
        largest = max(part.abs().max().item() for part in optimizer.gradients().values())
        found[optimizer.loss_scale] = (largest, full_gradients(optimizer, job()))

    norms = []
    for dtype in ("fp32", "fp16"):
        with equivalence.without_instruments():
            trained = module.train(module.Config(**options | dict(dtype=dtype)), observe)
        norms.append(trained.history[0]["grad_norm"])
    assert [*found] == [1, 2**16] and norms[1] == pytest.approx(norms[0], rel=0.01)
    (largest, exact), (scaled, gathered) = found.values()
    assert scaled / 2**16 == pytest.approx(largest, rel=0.02)
    for name, gradient in exact.items():
        assert equivalence.difference(gathered[name], gradient) < 0.02, name
