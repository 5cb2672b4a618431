"""Tests the planner: published runs, numbers of GPUs, mistakes, and one report without repetitions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.model import PRESETS, Decoder
from extras.bench import plan as bench
from extras.plan.__main__ import main
from extras.plan.gpus import GPUS
from extras.plan.layouts import illegal, meshes
from extras.plan.memory import total_weights
from extras.plan.search import evaluate
from extras.plan.shapes import Experts, named_shape

ROOT = Path(__file__).parents[2]


def printed(capsys, *words: str) -> tuple[int, str, str]:
    """Run the planner: (status, output, errors)."""
    status = main(list(words))
    found = capsys.readouterr()
    return status, found.out, found.err


@pytest.mark.parametrize("gpus", [1, 2, 3, 7, 12, 13, 24, 127])
def test_any_number_of_gpus_has_a_plan(capsys, gpus):
    """The default batch divides by the GPUs, so primes find a layout, too; no line is printed
    twice.
    """
    status, out, err = printed(capsys, "--model", "llama3.2-1b", "--gpus", str(gpus))
    assert status == 0, err
    lines = [line.strip() for line in out.splitlines() if len(line.strip()) > 40]
    assert len(lines) == len(set(lines))


def test_a_folder_as_json_is_refused_before_the_search(capsys, tmp_path):
    """One line that names --json, status 2, no report."""
    status, out, err = printed(capsys, "--model", "debug", "--gpus", "4", "--json", str(tmp_path))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and "--json" in err


@pytest.mark.parametrize(
    "words, named", [("--gpus 0", "--gpus"), ("--gpu h1", "--gpu"), ("--model x", "--model")]
)
def test_a_mistake_is_one_line(capsys, words, named):
    """A wrong flag: status 2, and one line that names it."""
    status, _, err = printed(capsys, *words.split())
    assert status == 2 and err.count("\n") == 1 and named in err


def test_json_has_the_layouts(capsys, tmp_path):
    """Each layout with its bytes and seconds."""
    path = tmp_path / "plan.json"
    printed(capsys, "--model", "debug", "--gpus", "4", "--json", str(path))
    entries = json.loads(path.read_text())
    assert entries and {"layout", "bytes", "seconds"} == set(entries[0])


def test_days_of_a_token_budget(capsys):
    """450e9 tokens on 3,072 A100s with a trillion weights: the source's formula gives 84 days."""
    words = [
        "--model",
        "gpt3-1t",
        "--gpus",
        "3072",
        "--gpu",
        "a100-80",
        "--tokens",
        "450e9",
        "--global-batch-size",
        "3072",
    ]
    layout = "--tp 8 --pp 64 --schedule interleaved --chunks 2 --recompute full --zero 0"
    status, out, err = printed(capsys, *words, "--layout", layout)
    assert status == 0, err
    days = [word for line in out.splitlines() if "days" in line for word in line.split()]
    numbers = [float(word) for word in days if word.replace(".", "").isdigit()]
    assert any(60 < number < 100 for number in numbers), out


@pytest.mark.parametrize("name", ["smollm-135m", "llama3.2-1b", "llama3-8b"])
def test_weights_are_those_of_the_model(name):
    """The planner's count equals the parameters of the course's decoder."""
    import torch

    with torch.device("meta"):
        expected = sum(param.numel() for param in Decoder(PRESETS[name]).parameters())
    assert total_weights(named_shape(name, Experts())) == expected


def mean_error(cases: list[bench.Case]) -> float:
    """The mean relative error of the predicted step times."""
    sizes = []
    for case in cases:
        sizes.append(abs(bench.error(case, bench.predict(case), bench.time_figure(case))))
    return sum(sizes) / len(sizes)


def test_vtrains_56_runs_are_predicted_to_6_percent():
    """Published step times, to which nothing is fitted."""
    cases = bench.read_vtrain(bench.Config().vtrain)
    assert len(cases) == 56 and mean_error(cases) < 0.063


def test_megatrons_nine_rows_are_predicted_to_3_percent():
    """The tables of 2021 (ids S) and 2022 (ids K)."""
    cases = [case for case in bench.read_rows(bench.Config().rows) if case.id[0] in "SK"]
    assert len(cases) == 9 and mean_error(cases) < 0.031


def test_every_listed_mesh_is_legal():
    """For tiny on 8 GPUs: each mesh passes the rules, and takes time and memory."""
    m = named_shape("tiny", Experts())
    found = list(meshes(m, 8, 64))
    assert len(found) > 5
    for mesh in found[:20]:
        assert illegal(m, mesh) == ""
        plan = evaluate(m, mesh, GPUS["h100-80"])
        assert sum(plan.memory) > 0 and sum(plan.seconds) > 0


def test_it_imports_no_run():
    """The planner loads neither the steps nor the trainer."""
    code = (
        "import sys, extras.plan.__main__; print([m for m in sys.modules if m.startswith('step0')])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr
