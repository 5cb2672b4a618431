"""Runs: common/run.py, watch.py, meter.py and compare.py. Read them after step 2."""

import gzip
import json
import math
import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import step04_tp_sp as step04
from common import UserError, compare
from common.comm import Mesh
from common.launch import check_environment, compare_launches, connect_ranks, print_error
from common.meter import flops_per_token, peak_flops
from common.model import PRESETS, Decoder
from common.profiling import make_profiler
from common.report import param_rows_of, parameter_table
from common.run import Run
from common.watch import noting_signals
from tests.equal import STEP1, Watch, close, decoder, run_of
from tests.pool import ROOT, RankError
from tests.script import Script

cases = pytest.mark.parametrize


# --- How a run ends


class Interrupted(Watch):
    """A run of which rank 1 gets a signal in step 2."""

    def require_finite(self, step: int, **numbers: float):
        super().require_finite(step, **numbers)
        if step == 1 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def interrupted(options: dict) -> int:
    """Train step 2 by `Interrupted`; returns the number of steps."""
    return len(run_of("step02_ddp", options, Interrupted).history)


def test_a_signal_to_one_rank_ends_all_after_the_same_step(pools, tmp_path):
    """Rank 1 of 3 gets SIGUSR1 in step 2. A checkpoint is saved then, even with --save-every 0."""
    found = pools(3).run(interrupted, dict(steps=5, save_every=0, out=str(tmp_path)))
    close(found, [2, 2, 2], "steps of each rank")
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    close(names, ["step-00000002"], "checkpoints")


SECOND = [
    # The signals that come one after another, and whether the last one then ends the process
    ([signal.SIGINT, signal.SIGINT], True),
    ([signal.SIGINT, signal.SIGTERM], True),  # torchrun turns a second Ctrl-C into SIGTERM
    ([signal.SIGINT, signal.SIGUSR1], False),
    ([signal.SIGTERM, signal.SIGTERM], False),
    ([signal.SIGTERM, signal.SIGINT], True),
]


@cases("numbers, ends", SECOND)
def test_ctrl_c_after_a_signal_ends_the_process(numbers, ends):
    """The first signal is only noted. Then Ctrl-C has the default handler, which ends the process,
    and after a Ctrl-C SIGTERM has it, too.
    """
    with noting_signals() as signals:
        signal.raise_signal(numbers[0])
        close(signal.getsignal(numbers[1]) == signal.SIG_DFL, ends, "the default handler")
    close(signals, numbers[:1], "the signals that are noted")


SCRIPT = """
import sys, threading, time, step01_single_gpu as step01
from common.launch import main
from common.watch import time_limit

def wait_for_ever():
    time.sleep(1000)

def train(config, run):
    {}

main(train, step01.Config)
"""


TWO_RANKS = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
TWO_RANKS |= dict(MASTER_ADDR="localhost", MASTER_PORT="1")


def test_a_hang_is_explained(tmp_path):
    """After --timeout, the process prints where it waits, and ends with status 1."""
    code = SCRIPT.format("with time_limit(config.timeout, run.out): wait_for_ever()")
    flags = ["--timeout=1", f"--out={tmp_path}"]
    log = tmp_path / "log"
    status, output = Script(code, *flags, log=log, **TWO_RANKS | dict(RANK="3")).end()
    close(status, 1, "status")
    assert "error: rank 3: a step has taken 1 s (--timeout)" in output, output
    assert "in wait_for_ever" in output, output


def test_a_bug_keeps_its_traceback_and_ends_its_rank(tmp_path):
    """Its process ends at once with status 1, although a thread of it never ends: so torchrun can
    end the other ranks. (Here only rank 0 of two is started.)
    """
    code = SCRIPT.format("threading.Thread(target=wait_for_ever).start(); run.no_such_method()")
    status, output = Script(code, log=tmp_path / "log", **TWO_RANKS).end()
    close(status, 1, "status")
    assert "Traceback" in output and "no attribute 'no_such_method'" in output, output


def test_a_users_mistake_is_one_line(tmp_path):
    """With status 2, from the code of a step as well as from the flags."""
    code = SCRIPT.format("raise __import__('common').UserError('--tp: lower it')")
    ended = Script(code, log=tmp_path / "log").end()
    close(tuple(ended), (2, "error: --tp: lower it\n"), "status and text")


def test_a_finished_run_that_is_started_again_is_done(tmp_path, capsys):
    """With --resume auto it trains nothing, says so, and keeps its metrics."""
    flags = dict(steps=2, save_every=1, out=str(tmp_path))
    run_of(STEP1, flags, Run)
    before = (tmp_path / "metrics.jsonl").read_text()
    run_of(STEP1, flags | dict(resume="auto"), Run)
    assert "2 of 2 steps are done" in capsys.readouterr().out
    close((tmp_path / "metrics.jsonl").read_text(), before, "metrics.jsonl")


class Moved(Run):
    """A run whose directory is renamed while it trains."""

    def require_finite(self, step: int, **numbers: float):
        self.out.rename(f"{self.out}-moved")


def test_if_the_run_directory_is_renamed_one_line_names_the_file(tmp_path, capsys):
    """`Moved` renames it in step 1: metrics.jsonl can then not be written."""
    with pytest.raises(OSError) as caught:
        run_of(STEP1, dict(out=f"{tmp_path}/a"), Moved)
    close(print_error(caught.value), 2, "status")
    assert capsys.readouterr().err.endswith(f"directory: '{tmp_path}/a/metrics.jsonl'\n")


# --- What ranks must have in common

OTHERS = [
    (dict(SLURM_NTASKS="2"), "SLURM_NTASKS is 2.* torchrun"),
    (dict(OMPI_COMM_WORLD_SIZE="4"), "OMPI_COMM_WORLD_SIZE is 4.* torchrun"),
    (
        dict(RANK="0"),
        "RANK is set, but not LOCAL_RANK MASTER_ADDR .*: use torchrun, or first unset",
    ),
    (dict(SLURM_NTASKS="2") | TWO_RANKS, ""),
    (dict(SLURM_NTASKS="1"), ""),
    (dict(TORCHELASTIC_MAX_RESTARTS="3") | TWO_RANKS, "--max-restarts 3: set TORCH_DISABLE_SHARE"),
    (dict(TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_USE_AGENT_STORE="False") | TWO_RANKS, ""),
]


@cases("variables, text", OTHERS)
def test_processes_that_would_not_find_one_another_are_refused(variables, text):
    """Launchers that do not set RANK are named; under torchrun they may have started the job."""
    with mock.patch.dict(os.environ, variables, clear=True):
        if not text:
            check_environment()
            return
        with pytest.raises(UserError, match=text):
            check_environment()


def test_ranks_that_do_not_find_one_another_are_told_what_to_check():
    """PyTorch's own error follows."""
    failing = mock.patch.object(dist, "init_process_group", side_effect=RuntimeError("timed out"))
    with failing, pytest.raises(UserError, match=r"timed out .*check MASTER_ADDR.*SOCKET_IFNAME"):
        connect_ranks("gloo")


def test_step_1_on_two_ranks_is_refused():
    """It does not connect its ranks, so two would train the same run twice."""
    text = "--nproc_per_node: this script trains on one device"
    with mock.patch.dict(os.environ, WORLD_SIZE="2"), pytest.raises(UserError, match=text):
        run_of(STEP1, {})


@pytest.mark.ranks(2)
def test_ranks_with_other_cpus_are_named():
    """The error names a rank whose CPU has other instructions than rank 0's: it would draw other
    initial weights, in the last bits.
    """
    kind = ["AVX2", "DEFAULT"][int(os.environ["RANK"])]
    text = "ATEN_CPU_CAPABILITY=default on all nodes: DEFAULT on rank 1"
    cpu = mock.patch.object(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    with cpu, pytest.raises(UserError, match=text):
        compare_launches()


def train_with_this_on_rank_1(flags: dict):
    """Train step 2."""
    run_of("step02_ddp", flags if os.environ["RANK"] == "1" else {})


@cases("name, value", [("dataset", f"{ROOT}/requirements-dev.txt"), ("dtype", "fp32")])
def test_ranks_with_other_data_or_another_dtype_are_named(pools, name, value):
    """Before the first step `Run.set_up` compares tokens (by fingerprint) and dtypes of all ranks:
    they may differ although the commands are equal. One line names the flag, and the rank.
    """
    with pytest.raises(RankError, match=f"--{name}: .* on rank 1, but .* on rank 0"):
        pools(2).run(train_with_this_on_rank_1, {name: value})


class Poisoned(Watch):
    """A run of which rank 1 gets a nan in one gradient."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """The steps of the run."""
        if self.rank == 1:
            parts["model"].lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
        return super().steps(**parts)


def poisoned(options: dict):
    """Train step 4 by `Poisoned`: every rank raises the same line."""
    text = r"the grad norm is nan: lower --lr.* Not finite: lm_head.weight on rank 1\)"
    with pytest.raises(UserError, match=text):
        run_of("step04_tp_sp", options, Poisoned)


def test_a_number_that_is_not_finite_names_where_it_was_found(pools):
    """Rank 1's gradient of lm_head is nan, so the norm is nan on both ranks; both name it."""
    pools(2).run(poisoned, dict(tp=2))


# --- What a run shows


GPUS = [
    ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, 0.0),
    ("NVIDIA A100-SXM4-40GB", torch.float64, 0.0),
]


@cases("name, dtype, expected", GPUS)
def test_peaks_are_those_of_exact_names(name, dtype, expected):
    """A GPU whose name contains another's does not get its peak; an unknown one gets none."""
    close(peak_flops(name, dtype), expected, "peak")


@cases("tied", [False, True])
def test_flops_of_a_token(tied):
    """Those of tiny, which test_step01::test_law_of_flops counts, also if the head is tied."""
    model = decoder(dtype=None, **vars(PRESETS["tiny"]) | dict(tied=tied))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    found = flops_per_token(shapes, model.config, 1)  # 1: an MLP
    close(float(found), 5_538_560.0, "FLOPs of a token")


@pytest.mark.ranks(4)
def test_the_table_says_how_each_parameter_is_sharded():
    """Two layers share a row. 257 rows on two ranks: 129 each, one of which is padding."""
    mesh = Mesh(dp=2, tp=2)
    with torch.device("meta"):
        model = Decoder(PRESETS["debug"])
    step04.shard_tensors(model, mesh, sp=True)
    lines = parameter_table(param_rows_of(model, mesh)).splitlines()
    found = [" ".join(line.split()) for line in lines]
    expected = [
        "parameter whole on a rank bytes sharded gradient summed over",
        "1 x model.embed_tokens.weight 257x64 129x64 33,024 dim 0 over tp 2 dp 2",
        "2 x model.layers.*.input_layernorm.weight 64 64 256 dp 2, tp 2",
        "2 x model.layers.*.self_attn.q_proj.weight 64x64 32x64 8,192 dim 0 over tp 2 dp 2",
        "2 x model.layers.*.mlp.down_proj.weight 64x176 64x88 22,528 dim 1 over tp 2 dp 2",
    ]
    close([line for line in expected if line not in found], [], f"lines that are not in {found}")


def test_a_profile_covers_the_steps_asked_for(tmp_path):
    """--profile 2 traces steps 3 and 4, with the optimizer's step."""
    run_of(STEP1, dict(steps=5, profile=2, out=str(tmp_path)), Run)
    trace = json.loads(gzip.decompress((tmp_path / "trace-0.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    found = sorted({name for name in names if name.startswith("ProfilerStep")})
    close(found, ["ProfilerStep#2", "ProfilerStep#3"], "steps, from 0")
    close(sum(name == "Optimizer.step#AdamW.step" for name in names), 2, "updates")


def test_memory_is_recorded_until_the_trace_is_written(tmp_path):
    """On a GPU: recording each allocation would slow the steps that follow."""
    expected = [
        mock.call._record_memory_history(max_entries=200_000),
        mock.call._dump_snapshot(f"{tmp_path}/memory-0.pickle"),
        mock.call._record_memory_history(enabled=None),
    ]
    replaced = mock.patch.object(torch.cuda, "memory")
    with replaced as memory, make_profiler(n=1, out=tmp_path, rank=0, gpu=True) as profiler:
        for _ in range(3):  # two are skipped, one is traced
            profiler.step()
        close(memory.mock_calls, expected, "calls during the run")


def test_a_profile_of_more_steps_than_there_are_is_refused(tmp_path):
    """Two steps come before the first that is traced."""
    with pytest.raises(UserError, match="--profile 2: it needs 4 steps, and 3 are left"):
        run_of(STEP1, dict(steps=3, profile=2, out=str(tmp_path)), Run)


# --- python -m common.compare

# Rows of two runs' metrics.jsonl
ONE = [dict(step=step, loss=2.0, grad_norm=1.0) for step in range(1, 41)]
OTHER = ONE[:6] + [dict(row, loss=2.00004) for row in ONE[6:]]
for row in OTHER[8:]:
    row["grad_norm"] = 1.0001


@cases(
    "first, bound, text, equal",
    [
        (8, 1e-5, "8 steps; largest difference: 2.0e-05; first above 1e-05 in step 7", False),
        (8, 1e-4, "8 steps; largest difference: 2.0e-05; none above 0.0001", True),
        (40, 5e-5, "40 steps; largest difference: 1.0e-04; first above 5e-05 in step 9", False),
        (6, 1e-5, "6 steps; largest difference: 0.0e+00; none above 1e-05", True),
    ],
)
def test_compare_names_the_first_step_that_differs(capsys, first, bound, text, equal):
    """From step 7 on the relative difference of the losses is 2e-5, and from step 9 on that of the
    norms 1e-4.
    """
    close(compare.compare(ONE, OTHER, first, bound), equal, "whether they are equal")
    out = capsys.readouterr().out
    assert text in out, out


@cases("n_1, n_2, text", [(0, 0, "0 steps with 0"), (40, 9, "20 .* 9"), (9, 40, "9 .* 20")])
def test_compare_refuses_what_it_cannot_judge(n_1, n_2, text):
    """Steps that one of the runs lacks, whichever it is."""
    with pytest.raises(ValueError, match=f"cannot compare {text}: change --first"):
        compare.compare(ONE[:n_1], ONE[:n_2], 20, 1e-3)


def test_compare_finds_a_nan(capsys):
    """nan is above every bound."""
    close(compare.compare(ONE, [dict(ONE[0], loss=math.nan)], 1, 1e-3), False, "within the bound")
    assert "first above 0.001 in step 1" in capsys.readouterr().out


def test_compare_names_flags_that_differ(tmp_path):
    """The seed, the data and the dtype can change what is computed; tp and the directory do not."""
    for name, seed, tp in (("a", 0, 1), ("b", 1, 2)):
        (tmp_path / name).mkdir()
        flags = dict(seed=seed, tp=tp, out=name, dataset=f"{name}.txt", lr=0.1, dtype=f"fp{seed}")
        (tmp_path / name / "config.json").write_text(json.dumps(flags))
    found = compare.other_flags(str(tmp_path / "a"), str(tmp_path / "b"))
    expected = ["--dataset: a.txt and b.txt", "--dtype: fp0 and fp1", "--seed: 0 and 1"]
    close(found, expected, "flags that differ")
