"""Compares the planner with published runs: their step times, and the choice among their layouts.

    python -m extras.bench plan

published/README.md describes the files. The first letter of a row's id is the row's source. The
planner has recipes for the trainers of sources S and K (both Megatron) and for vTrain's (V). All
other rows are predicted for the course's trainer with balanced stages, so their errors also contain
how two trainers differ. Memory is always predicted for the course's trainer.
"""

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import UserError
from extras.plan.gpus import GIB, GPUS, Gpu
from extras.plan.layouts import Layout
from extras.plan.memory import held, total_weights
from extras.plan.seconds import COURSE, Recipe, step_seconds
from extras.plan.shapes import Shape, flops_per_token, gpt
from extras.plan.tables import table

# By the first letter of a row's id. The switches come from papers, and are the same for all runs of
# one source. CUDA 11.0 was slower: S9 took 10% longer than the same model a year later, K5.
RECIPES = {
    "S": Recipe("megatron-2021", library=0.92),
    "K": Recipe("megatron-2022", overlap_tp=True),
    "V": Recipe("vtrain"),
}
OTHERS = COURSE._replace(name="others", balanced=True)
PUBLISHED = Path(__file__).parent / "published"
CHIPS = {
    "A100-80": "a100-80",
    "A100-80-half": "a100-80-half",
    "H100": "h100-80",
    "H100-80": "h100-80",
    "H100-96-500W": "h100-96-500w",
    "B200": "b200",
}
VTRAIN = {  # column of rows.csv -> of vtrain_multi_node.csv
    "hidden": "hidden size",
    "layers": "# layers",
    "heads": "attention heads",
    "seq": "sequence length",
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "dp": "data parallelism",
    "mbs": "micro batch",
    "gbs": "global batch",
}
DEEPSEEK = dict(  # sizes that the row of DeepSeek-V3 lacks
    ffn_dim=18432,
    vocab_size=129280,
    experts=256,
    experts_per_token=8,
    expert_dim=2048,
    shared_experts=1,
    dense_layers=1,
)
LEFT_OUT = """\
Left out, so the prediction is too fast: stragglers, stalled data, slow hosts, falling clocks;
too small: the allocator's fragments;
too slow: kernels that hide a message behind a matmul's tiles, caches."""


class Case(NamedTuple):
    """One published run."""

    id: str
    shape: Shape
    layout: Layout
    gpu: Gpu
    recipe: Recipe
    seconds: float  # of a step, as published
    memory: float | None  # GiB; None: not given


def rows_of(name: str) -> list[dict[str, str]]:
    """The lines of a file of published/: column -> cell."""
    with (PUBLISHED / name).open(newline="") as file:
        return list(csv.DictReader(file))


def vtrain_rows() -> list[dict[str, str]]:
    """The lines of vtrain_multi_node.csv with the columns of rows.csv. They are counted from V1."""
    rows = []
    for number, given in enumerate(rows_of("vtrain_multi_node.csv"), 1):
        row = {column: given[name] for column, name in VTRAIN.items()}
        row |= dict(id=f"V{number}", vocab="50257", gpu="A100-80-half", recompute="full", zero="0")
        rows.append(row | dict(step_s=float(given["iteration time (ms)"]) / 1e3))
    return rows


def shape_of_row(row: dict[str, str]) -> Shape:
    """The shape of a row's model."""
    names = ("hidden", "layers", "heads", "seq")
    dim, n_layers, n_heads, seq_len = (int(row[name]) for name in names)
    if row["id"][0] in RECIPES:
        return gpt(dim, n_layers, n_heads, int(row["vocab"]), seq_len)
    if row["model"].startswith("DeepSeek"):
        return Shape(dim, n_layers, n_heads, n_heads, seq_len=seq_len, **DEEPSEEK)
    kv_heads, ffn_dim, vocab = (int(row[name]) for name in ("kv", "ffn", "vocab"))
    return Shape(dim, n_layers, n_heads, kv_heads, ffn_dim, vocab, seq_len)


def layout_of_row(row: dict[str, str]) -> Layout:
    """The layout of a row. SP is on, but not in rows of Megatron and vTrain."""
    names = ("pp", "cp", "tp", "ep", "zero", "mbs", "vp", "dp", "gbs")
    pp, cp, tp, ep, zero, size, chunks, dp, batch = (int(row.get(name) or 1) for name in names)
    whole = batch // dp // size % pp == 0  # an interleaved schedule needs this
    return Layout(
        pp=pp,
        cp=cp,
        tp=tp,
        ep=ep,
        zero=zero,
        micro_batch_size=size,
        global_batch_size=batch,
        schedule="interleaved" if chunks > 1 and pp > 1 and whole else "1f1b",
        chunks=chunks,
        recompute={"sel": "selective", "full": "full"}.get(row["recompute"], "none"),
        sp=row["id"][0] not in RECIPES,
        dp=dp,
    )


def published_seconds(row: dict[str, str], m: Shape, x: Layout, gpu: Gpu) -> float:
    """The time of a row's step; it follows from a rate, if the source gives one instead."""
    if row["step_s"]:
        return float(row["step_s"])
    tokens = x.global_batch_size * m.seq_len / x.world  # of a GPU
    flops = counted_flops(row["id"][0], m) * tokens
    if row["tflops_gpu"]:
        return flops / float(row["tflops_gpu"]) / 1e12
    if row["mfu_pct"]:
        return flops / float(row["mfu_pct"]) * 100 / gpu.flops
    return tokens / float(row["tok_s_gpu"])


def read_case(row: dict[str, str]) -> Case:
    """The run of a row."""
    m = shape_of_row(row)
    x = layout_of_row(row)
    gpu = GPUS[CHIPS[row["gpu"]]]
    if not row["recompute"] and held(m, x).total > gpu.memory:
        x = replace(x, recompute="full")  # not said, but else the run does not fit
    recipe = RECIPES.get(row["id"][0], OTHERS)
    seconds = published_seconds(row, m, x, gpu)
    memory = row.get("mem_gib")
    return Case(row["id"], m, x, gpu, recipe, seconds, float(memory) if memory else None)


def read_cases() -> list[Case]:
    """All published runs."""
    return [read_case(row) for row in rows_of("rows.csv") + vtrain_rows()]


def counted_flops(letter: str, m: Shape) -> float:
    """FLOPs of a token, as a source counts them.

    Narayanan adds recomputation: 96 B s l h^2 (1 + s / 6h + V / 16 l h), section 5.1. The others do
    not, and count 12 s l h for attention (Chowdhery et al. 2022, appendix B); Llama 3 and NeMo omit
    masked scores, which is half of it.
    """
    if letter == "S":
        extra = m.seq_len / 6 / m.dim + m.vocab_size / 16 / m.n_layers / m.dim
        return 96 * m.n_layers * m.dim**2 * (1 + extra)
    masked = 6 if letter in "LA" else 12
    return flops_per_token(m) + (masked - 7) * m.n_layers * m.seq_len * m.dim


def predict(case: Case) -> float:
    """The seconds of a step that the planner predicts for a run."""
    return step_seconds(case.shape, case.layout, case.gpu, case.recipe).step


def error(case: Case) -> float:
    """The relative error of the predicted time."""
    return predict(case) / case.seconds - 1


def regret(group: list[Case]) -> float:
    """How much longer the layout with the least predicted time took than the fastest one."""
    return min(group, key=predict).seconds / min(case.seconds for case in group) - 1


def groups_of(cases: list[Case]) -> dict[str, list[Case]]:
    """Runs grouped by trainer, and vTrain's also by model, number of GPUs and batch."""
    groups = defaultdict(list)
    for case in cases:
        groups[case.recipe.name].append(case)
        if case.id[0] == "V":
            x = case.layout
            weights = f"{total_weights(case.shape) / 1e9:.1f}e9 weights"
            groups[f"{weights}, {x.world} GPUs, batch {x.global_batch_size}"].append(case)
    return groups


def runs_table(cases: list[Case]) -> str:
    """A line for each run."""
    rows = [["id", "as if by", "published, s", "predicted", "error", "memory, GiB", "error"]]
    for case in cases:
        memory = held(case.shape, case.layout).total / GIB
        row = [case.id, case.recipe.name, f"{case.seconds:.4g}", f"{predict(case):.4g}"]
        row += [f"{error(case):+.1%}", f"{memory:.1f}"]
        rows.append([*row, f"{memory / case.memory - 1:+.1%}" if case.memory else ""])
    return table(rows)


def groups_table(cases: list[Case]) -> str:
    """The errors of the times by group, and how well the planner chooses among vTrain's layouts."""
    rows = [["runs", "number", "mean error", "worst", "regret"]]
    for name, group in groups_of(cases).items():
        errors = [error(case) for case in group]
        row = [name, str(len(group)), f"{np.mean(np.abs(errors)):.1%}"]
        row.append(f"{max(errors, key=abs):+.1%}")
        rows.append([*row, f"{regret(group):.1%}" if "weights" in name else ""])
    return table(rows)


def main(_name: str, argv: list[str]):
    """Print a line for each run and each group of runs, and what is not modelled."""
    if argv:
        raise UserError(f"{argv[0]}: this measurement has no flags")
    cases = read_cases()
    print(runs_table(cases), groups_table(cases), LEFT_OUT, sep="\n\n")
