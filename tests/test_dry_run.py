"""The dry run: what theory says of drawn layouts, and what real ranks measure, beside what it counts.

The cases on fake GPUs are run by one process, which loads the shim of services/fake_device.py.
"""

import json
import time
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch

import step01_single_gpu
import step07_moe_ep
from common import UserError
from services import flags
from services.dry_run import Meter, Seen, dry_run, refuse
from services.fake_device import build_shim
from services.ledger import Ledger
from services.memory import MemoryTimeline
from services.run import Run
from tests import dry_cases, faults
from tests.dry_cases import compared, draw, run
from tests.fake_cuda import STEPS
from tests.jobs import Forked, as_flags, forked
from theory.gpus import GPUS

SHORT = dict(compress_activations="int8", schedule="zb-h1", recompute="full", dtype="bf16", global_batch_size=16)
SHORT |= dict(model="mixtral-8x7b", seq_len=1024, n_layers=4, pp=2, cp=2, tp=4, ep=2, zero=1)
CASES = {f"seed-{seed}": draw(seed) for seed in range(200)}
CASES["compressed"] = dict(step=7, world=64, rank=37, options=SHORT)
NARROW = dict(model="llama3-8b", vocab_size=32000, seq_len=2048, n_layers=4, tp=4, micro_batch_size=2, zero=1)
NARROW |= dict(dtype="bf16", compress_activations="int8", global_batch_size=64)
CASES["compressed-all-reduce"] = dict(step=6, world=16, rank=3, options=NARROW | dict(sp=False, pp=2, cp=1))
CASES["compressed-fp32"] = dict(
    step=4, world=8, rank=3, options=NARROW | dict(dtype="fp32", compress_activations="bf16", n_layers=3)
)
FUSED = dict(fuse_gradients=True, dtype="bf16", global_batch_size=64)
CASES["fused"] = dict(step=1, world=1, rank=0, options=FUSED | dict(model="llama3.2-1b", n_layers=3, seq_len=1024))
LATER = dict(
    model="llama3-8b", n_layers=4, seq_len=2048, pp=2, cp=1, tp=2, micro_batch_size=2, recompute="full", zero=1
)
CASES["fused-stages"] = dict(step=6, world=32, rank=31, options=FUSED | LATER)
LATER = dict(model="mixtral-8x7b", n_layers=2, seq_len=2048, pp=1, cp=2, tp=1, ep=4, zero=0, sync="bucket")
CASES["fused-experts"] = dict(step=7, world=16, rank=3, options=FUSED | LATER)
REAL = {  # layouts of 2 to 16 ranks, to be run by gloo
    "ddp-2": (2, 2, dict(sync="bucket")),
    "zero1-4": (3, 4, dict(zero=1)),
    "zero2-2": (3, 2, dict(zero=2, dtype="bf16")),
    "zero3-4": (3, 4, dict(zero=3)),
    "tp-4": (4, 4, dict(tp=2, zero=1)),
    "no-sp-2": (4, 2, dict(tp=2, sp=False, zero=0)),
    "cp-4": (5, 4, dict(cp=2, tp=2, zero=1)),
    "ulysses-2": (5, 2, dict(cp=2, tp=1, cp_mode="ulysses", dtype="bf16")),
    "pp-4": (6, 4, dict(pp=2, cp=1, tp=2, schedule="zb-h1", zero=1)),
    "zbv-2": (6, 2, dict(pp=2, cp=1, tp=1, schedule="zbv", zero=3, n_layers=4)),
    "all-8": (6, 8, dict(pp=2, cp=2, tp=2, schedule="1f1b", zero=2)),
    "all-16": (6, 16, dict(pp=2, cp=2, tp=2, schedule="interleaved", zero=1, n_layers=4)),
}
SMALL = dict(model="debug", n_heads=8, seq_len=64, micro_batch_size=1, global_batch_size=16, eval_every=0, save_every=0)


@pytest.fixture(scope="module")
def counted(request, tmp_path_factory) -> dict[str, dict]:
    """What the dry runs of all selected cases came to, by name."""
    folder = tmp_path_factory.mktemp("dry")
    if not (torch.version.cuda or torch.version.hip) and build_shim() is None:
        pytest.skip("no g++ to build services/fake_cuda.cpp with")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["case"] for item in here if "case" in item.callspec.params]
    cases, lines = folder / "cases.json", folder / "results.jsonl"
    cases.write_text(json.dumps({name: CASES[name] for name in names}))
    job = Forked(dry_cases.main, str(cases), str(lines))
    text, _ = job.communicate()
    assert job.wait(60) == 0, text
    return {row["name"]: row for row in map(json.loads, lines.read_text().splitlines())}


def differences(found: dict) -> list[str]:
    """Where counted and predicted differ: traffic by a byte, FLOPs by 0.1%, bytes held and at the peak by 2%."""
    assert "error" not in found, found["error"]
    wrong = [f"sent {k}: {n} {p}" for k, (n, p) in found["sent"].items() if p is None or abs(n - p) > 0.5 + 1e-9 * n]
    wrong += [f"FLOPs {k}: {n} {p}" for k, (n, p) in found["work"].items() if n != pytest.approx(p, rel=1e-3)]
    held = found["held"] | dict(all=[sum(both) for both in zip(*found["held"].values(), strict=True)])
    held |= dict(peak=found["peak"]) if found["peak"][1] is not None else {}
    return wrong + [f"held {k}: {n} {p}" for k, (n, p) in held.items() if n != pytest.approx(p, rel=0.02)]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("case", [name for name in CASES if "fused" not in name])
def test_theory_counts_what_the_program_does(counted, case):
    """On up to 16,384 ranks: traffic byte for byte, FLOPs, the most bytes of each kind, and of all at a moment."""
    assert differences(counted[case]) == [], CASES[case]


@pytest.mark.picked(1)
@pytest.mark.parametrize("case", [name for name in CASES if "fused" in name])
def test_theory_knows_fused_gradients(counted, case):
    """With --fuse-gradients: the head, alone, cut and on a last stage; the embedding; experts."""
    assert differences(counted[case]) == [], CASES[case]


def test_a_wrong_prediction_is_noticed():
    """One gather too few, a forgotten matmul, 3% too many bytes: each is named."""
    right = dict(sent={"tp all_gather": (4096.0, 4096.0)}, work=dict(matmul=(1e12, 1e12)))
    right |= dict(held=dict(a=(1000, 1010)), peak=(2000, 2010))
    assert differences(right) == []
    for kind, key, pair in (("sent", "tp all_gather", (4096.0, 4032.0)), ("work", "matmul", (1e12, 0.99e12))):
        assert [line.split(":")[0][-len(key) :] for line in differences(right | {kind: {key: pair}})] == [key]
    assert len(differences(right | dict(held=dict(a=(1000, 1030))))) == 2  # and so is their sum
    assert [line.split(":")[0] for line in differences(right | dict(peak=(2000, 2060)))] == ["held peak"]


def measured_on_rank(step: int, options: dict, expected: dict[int, int]) -> tuple[dict, dict]:
    """Runs on every rank: bytes sent in the last of two real steps by gloo, and bytes held by kind.

    `expected`: bytes of activations, by rank.
    """
    import importlib
    from unittest import mock

    from torch.distributed import get_rank

    found, module = {}, importlib.import_module(STEPS[step - 1])
    config = module.Config(**SMALL | options, steps=2, device="cpu", profile_memory=2)

    def finish(log: Run, *_):
        sent = log.history[-1]["traffic"]
        found.update(sent=sent, held=dict(log.measured))

    live = MemoryTimeline.live

    def live_a_moment_later(self, kind):
        most, deadline = 1.02 * expected.get(get_rank(), 0), time.monotonic() + 20
        while most and live(self, kind) > most and time.monotonic() < deadline:
            time.sleep(0.01)  # gloo's threads let go of the tensors of finished collectives
        return live(self, kind)

    later = mock.patch.object(MemoryTimeline, "live", live_a_moment_later)
    with later, mock.patch.object(Run, "finish", finish), redirect_stdout(None):
        module.train(config)
    return found["sent"], found["held"]


@pytest.mark.picked(3)
@pytest.mark.parametrize("name", REAL)
def test_real_ranks_measure_what_the_dry_run_says(pools, name, tmp_path):
    """Of gloo's ranks, the first and the last: traffic exactly, bytes held by each kind within 2%."""
    step, world, options = REAL[name]
    both = {rank: run(step, world, rank, SMALL | options, device="cpu") for rank in (0, world - 1)}
    expected = {rank: seen.held["activations"] for rank, seen in both.items()}
    real = pools(world).run(measured_on_rank, step, options | dict(out=str(tmp_path / "run")), expected)
    for rank, seen in both.items():
        sent, held = real[rank]
        flat = {(dim, operation): n for dim, each in sent.items() for operation, n in each.items()}
        assert {k: n for k, n in seen.traffic.items() if "metrics" not in k[1]} == {
            k: n for k, n in flat.items() if "metrics" not in k[1]
        }, rank
        assert held == {kind: pytest.approx(n, rel=0.02, abs=64) for kind, n in seen.held.items()}, rank


@pytest.mark.picked(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zeros_update_takes_as_few_operators_for_many_layers(stage):
    """Norm, clip, rule and rounding take lists of all slices: with 6 layers the same operators as with 2."""
    found = []
    for n_layers in (2, 6):
        with faults.applied("units_updated_together"):
            seen = run(3, 4, 0, SMALL | dict(zero=stage, n_layers=n_layers, dtype="bf16"), device="cpu")
        found.append({name: count.calls for (part, name), count in seen.meter.counts.items() if part == "update"})
    assert found[0] == found[1]
    assert found[0]["fused_adamw_"] == 2  # with weight decay and without
    assert sum(found[0].values()) < 16


def test_a_world_as_large_as_a_sequence():
    """Ranks are counted with numbers, also where as many positions were made without: all groups are whole."""
    seen = run(5, 64, 5, SMALL | dict(cp=2, tp=2, seq_len=64), device="cpu")
    assert seen.traffic["data", "all_gather"] == seen.costs.traffic["data", "all_gather"] > 0


BAD = [
    ("--resume runs/x", "--resume"),
    ("--offload-optimizer disk", "--offload-optimizer disk"),
    ("--generate a --resume x", "--resume"),
    ("--toy", "--toy"),
    ("--sync torch --zero 0", "--sync torch"),
    ("--compile", "--compile"),
    ("--rank 8", "--rank 8"),
    ("--gpu abacus", "--gpu abacus"),
    ("--tp 3", "--tp 3"),
    ("--dry-run -1", "--dry-run -1"),
]


@pytest.mark.parametrize("words, named", BAD)
def test_what_it_cannot_do_is_refused(words, named):
    """With a message that names the flag, before anything is traced."""
    config = flags.parse(step07_moe_ep.Config, ["--dry-run", "8", "--device", "cpu", *words.split()])
    with pytest.raises(UserError, match=named) as error:
        dry_run(step07_moe_ep.train, config)
    assert "\n" not in str(error.value)


def test_one_rank_is_enough():
    """Step 1 has no other: nothing is refused."""
    refuse(step01_single_gpu.Config(), 1)


def test_rank_alone_is_refused():
    """--rank without --dry-run would train."""
    with pytest.raises(UserError, match="--rank"):
        dry_run(step07_moe_ep.train, replace(step07_moe_ep.Config(), rank=3))


def test_the_command_prints_every_table(tmp_path):
    """As a user: a line for each stage, memory, traffic, FLOPs and operators beside theory; a picture; status 0."""
    options = dict(dry_run=16, model="tiny-moe", pp=2, global_batch_size=16, device="cpu", out=tmp_path / "o")
    job = forked("step07_moe_ep", *as_flags(options))
    out, _ = job.communicate()
    assert job.wait(60) == 0, out
    for words in ("equally likely", "predicted", "ep all_to_all", "FLOPs of a step", "MFU is at most", "bound by"):
        assert words in out, out
    assert (tmp_path / "o/memory.png").exists()


def test_bad_input_is_one_line(capsys):
    """On stderr, with a status that is not 0."""
    with pytest.raises(SystemExit) as left:
        flags.main(step07_moe_ep.train, step07_moe_ep.Config, ["--dry-run", "8", "--resume", "x"])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == "" and len(err.splitlines()) == 1 and "--resume" in err


def test_an_operator_takes_the_longer_of_its_flops_and_bytes():
    """By hand: a matmul at the peak, the same in fp32, and a sum bound by memory; views take no time."""
    gpu = GPUS["h100-80"]._replace(flops=1e12, hbm=1e9)
    meter = Meter(torch.device("cpu"), gpu, 1e11, 0, 0)
    meter.counting, meter.part = True, "F"
    a = torch.ones(512, 512, dtype=torch.bfloat16)
    with meter:
        (a @ a.T).float() @ a.float()
    n = 512**2
    seconds = [count.seconds for count in meter.counts.values()]
    assert [name for _, name in meter.counts] == ["mm", "to_copy"]
    assert seconds[0] == pytest.approx(max(2 * 512**3 / 1e12, 6 * n / 1e9) + max(2 * 512**3 / 1e11, 12 * n / 1e9))
    assert seconds[1] == pytest.approx(2 * 6 * n / 1e9)


def test_operators_count_what_they_touch():
    """Of 3 rows put among 100, the rows; of zeros, what is written; of a fused update, no change of the gradient."""
    meter = Meter(torch.device("cpu"), GPUS["h100-80"], 1e11, 0, 0)
    meter.counting, meter.part = True, "F"
    table, rows, place = torch.ones(100, 8), torch.ones(3, 8), torch.arange(3)
    state = [[torch.ones(8)] for _ in range(4)]
    with meter:
        table.index_put_((place,), rows, accumulate=True)
        torch.zeros_like(table, dtype=torch.float64)
        torch._fused_adamw_(
            *state, [], [torch.ones(())], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip
    moved = {name: count.bytes for (_, name), count in meter.counts.items()}
    assert moved["index_put_"] == 3 * rows.nbytes + place.nbytes and moved["zeros_like"] == 2 * table.nbytes
    assert moved["fused_adamw_"] == (4 + 3) * 8 * 4 + 4  # and its count of steps


def test_compared_takes_the_bookkeeping_out():
    """Numbers that ranks sum for metrics are not theory's; what theory predicts and nobody sends is shown."""
    meter = Meter(torch.device("cpu"), GPUS["h100-80"], 1e11, 0, 0)
    costs = type("Costs", (), dict(traffic={("tp", "x"): 3.0}, memory={}, work=dict(matmul=0.0, attention=0.0)))
    meter.memory.events.append(None)
    meter.memory.peak = dict
    seen = Seen(0, meter, None, costs, {}, {("dp", "all_reduce (metrics)"): 8.0}, {})
    assert compared(seen)["sent"] == {"tp x": (0.0, 3.0)} and isinstance(Ledger().take(), dict) and dry_cases.MOST
