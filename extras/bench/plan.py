"""Compares the planner with published runs: their step times, and the choice among their layouts.

    python -m extras.bench plan

published/README.md describes the files. The first letter of a row's id is the row's source. The
planner has recipes for the trainers of sources S and K (both Megatron) and for vTrain's. All other
rows are predicted for the course's trainer with balanced stages, so their errors also contain how
two trainers differ. Memory is always predicted for the course's trainer.
"""

import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.flags import parse
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
}
VTRAIN = Recipe("vtrain")
OTHERS = COURSE._replace(name="others", balanced=True)
PUBLISHED = Path(__file__).parent / "published"
KINDS = {"megatron-2021": "time, S", "megatron-2022": "time, K", "vtrain": "time, vTrain"}
CHIPS = {
    "A100-80": "a100-80",
    "H100": "h100-80",
    "H100-80": "h100-80",
    "H100-96-500W": "h100-96-500w",
    "B200": "b200",
}
TIMES = ("step_s", "tflops_gpu", "mfu_pct", "tok_s_gpu")  # a run has one of these
FIGURES = (*TIMES, "mem_gib")
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


@dataclass
class Config:
    """This measurement has no flags."""


class Case(NamedTuple):
    """One published run."""

    id: str
    shape: Shape
    layout: Layout
    gpu: Gpu
    recipe: Recipe
    published: dict[str, float]


def rows_of(name: str) -> list[dict[str, str]]:
    """The lines of a file of published/: column -> cell."""
    with (PUBLISHED / name).open(newline="") as file:
        return list(csv.DictReader(file))


def shape_of_row(row: dict[str, str]) -> Shape:
    """The shape of a row's model."""
    dim, n_layers, n_heads, seq_len = (
        int(row[name]) for name in ("hidden", "layers", "heads", "seq")
    )
    if row["id"][0] in RECIPES:
        return gpt(dim, n_layers, n_heads, int(row["vocab"]), seq_len)
    if row["model"].startswith("DeepSeek"):
        return Shape(dim, n_layers, n_heads, n_heads, seq_len=seq_len, **DEEPSEEK)
    kv_heads, ffn_dim, vocab = (int(row[name]) for name in ("kv", "ffn", "vocab"))
    return Shape(dim, n_layers, n_heads, kv_heads, ffn_dim, vocab, seq_len)


def layout_of_row(row: dict[str, str]) -> Layout:
    """The layout of a row. SP is on, but not in Megatron's rows."""
    names = ("pp", "cp", "tp", "ep", "zero", "mbs", "vp")
    pp, cp, tp, ep, zero, size, chunks = (int(row[name] or 1) for name in names)
    dp = int(row["dp"])
    batch = int(row["gbs"])
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


def read_rows() -> list[Case]:
    """The runs of rows.csv."""
    cases = []
    for row in rows_of("rows.csv"):
        published = {figure: float(row[figure]) for figure in FIGURES if row[figure]}
        m = shape_of_row(row)
        layout = layout_of_row(row)
        gpu = GPUS[CHIPS[row["gpu"]]]
        if not row["recompute"] and held(m, layout).total > gpu.memory:
            layout = replace(layout, recompute="full")  # not said, but else the run does not fit
        recipe = RECIPES.get(row["id"][0], OTHERS)
        cases.append(Case(row["id"], m, layout, gpu, recipe, published))
    return cases


def read_vtrain() -> list[Case]:
    """The runs of vtrain_multi_node.csv. A run's id is the number of its line below the header."""
    cases = []
    for line, row in enumerate(rows_of("vtrain_multi_node.csv"), 1):
        layout = Layout(
            pp=int(row["pipeline parallelism"]),
            tp=int(row["tensor parallelism"]),
            dp=int(row["data parallelism"]),
            zero=0,
            micro_batch_size=int(row["micro batch"]),
            global_batch_size=int(row["global batch"]),
            recompute="full",
            sp=False,
        )
        names = ("hidden size", "# layers", "attention heads")
        dim, n_layers, n_heads = (int(row[name]) for name in names)
        m = gpt(dim, n_layers, n_heads, 50257, int(row["sequence length"]))
        published = dict(step_s=float(row["iteration time (ms)"]) / 1e3)
        cases.append(Case(str(line), m, layout, GPUS["a100-80-half"], VTRAIN, published))
    return cases


def counted_flops(case: Case) -> float:
    """FLOPs of a token, as its source counts them.

    Narayanan adds recomputation: 96 B s l h^2 (1 + s / 6h + V / 16 l h), section 5.1. The others do
    not, and count 12 s l h for attention (Chowdhery et al. 2022, appendix B); Llama 3 and NeMo omit
    masked scores, which is half of it.
    """
    m = case.shape
    letter = case.id[0]
    if letter == "S":
        extra = m.seq_len / 6 / m.dim + m.vocab_size / 16 / m.n_layers / m.dim
        return 96 * m.n_layers * m.dim**2 * (1 + extra)
    masked = 6 if letter in "LA" else 12
    return flops_per_token(m) + (masked - 7) * m.n_layers * m.seq_len * m.dim


def predict(case: Case) -> dict[str, float]:
    """The five figures that the planner predicts for a run."""
    seconds = step_seconds(case.shape, case.layout, case.gpu, case.recipe).step
    tokens = case.layout.global_batch_size * case.shape.seq_len / case.layout.world / seconds
    rate = counted_flops(case) * tokens
    return dict(
        step_s=seconds,
        tflops_gpu=rate / 1e12,
        mfu_pct=100 * rate / case.gpu.flops,
        tok_s_gpu=tokens,
        mem_gib=held(case.shape, case.layout).total / GIB,
    )


def error(case: Case, predicted: dict[str, float], name: str) -> float:
    """The relative error of a figure. For a rate, it is the error of the inverse, a time."""
    ratio = predicted[name] / case.published[name]
    return (ratio if name in ("step_s", "mem_gib") else 1 / ratio) - 1


def time_figure(case: Case) -> str:
    """The published figure by which the time of a run is judged."""
    return next(name for name in TIMES if name in case.published)


def regret(published: list[float], predicted: list[float]) -> float:
    """How much longer the layout with the least predicted time took than the fastest one."""
    return published[predicted.index(min(predicted))] / min(published) - 1


def groups_of(cases: list[Case]) -> dict[str, list[Case]]:
    """Runs grouped by model, number of GPUs and batch."""
    groups = defaultdict(list)
    for case in cases:
        weights = f"{total_weights(case.shape) / 1e9:.1f}e9 weights"
        x = case.layout
        groups[f"{weights}, {x.world} GPUs, batch {x.global_batch_size}"].append(case)
    return groups


def runs_table(predictions: list[tuple[Case, dict[str, float]]]) -> str:
    """A line for each run."""
    header = "id|as if by|figure|published|predicted|time|memory, GiB|error"
    rows = [header.split("|")]
    for case, predicted in predictions:
        name = time_figure(case)
        row = [case.id, case.recipe.name, name]
        row += [f"{case.published[name]:.4g}", f"{predicted[name]:.4g}"]
        row += [f"{error(case, predicted, name):+.1%}", f"{predicted['mem_gib']:.1f}"]
        known = "mem_gib" in case.published
        rows.append([*row, f"{error(case, predicted, 'mem_gib'):+.1%}" if known else ""])
    return table(rows)


def errors_table(predictions: list[tuple[Case, dict[str, float]]]) -> str:
    """The errors of the times, by source."""
    errors = defaultdict(list)
    for case, predicted in predictions:
        kind = KINDS.get(case.recipe.name, "time, other software")
        errors[kind].append(error(case, predicted, time_figure(case)))
    errors["time, S and K"] = errors["time, S"] + errors["time, K"]
    rows = [["errors of", "runs", "mean", "worst", "bias"]]
    for name, values in errors.items():
        mean = np.mean(np.abs(values))
        worst = max(values, key=abs)
        bias = np.mean(values)
        rows.append([name, str(len(values)), f"{mean:.1%}", f"{worst:+.1%}", f"{bias:+.1%}"])
    return table(rows)


def choices_table(cases: list[Case]) -> str:
    """How well the planner chooses among the layouts of each group."""
    rows = [["vTrain group", "layouts", "mean error", "regret"]]
    for name, group in groups_of(cases).items():
        published = [case.published["step_s"] for case in group]
        predicted = [predict(case)["step_s"] for case in group]
        mean = np.mean(np.abs(np.array(predicted) / np.array(published) - 1))
        slower = regret(published, predicted)
        rows.append([name, str(len(group)), f"{mean:.1%}", f"{slower:.1%}"])
    return table(rows)


def main(_name: str, argv: list[str]):
    """Print a line for each run, the errors, the choices, and what is not modelled."""
    parse(Config, argv)
    lines = read_vtrain()
    predictions = [(case, predict(case)) for case in read_rows() + lines]
    print(f"{runs_table(predictions)}\n")
    print("(time: error of the step's time, also where the source gives a rate)\n")
    print(errors_table(predictions), choices_table(lines), LEFT_OUT, sep="\n\n")
