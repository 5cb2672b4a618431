"""Compares the planner with published runs: their step times, and the choice among their layouts.

    python -m extras.bench plan
    python -m extras.bench plan --rows FILE --vtrain FILE --json predictions.json

published/README.md describes the files. The first letter of a row's id is the row's source. The
planner has recipes for the trainers of sources S and K (both Megatron) and for vTrain's. All other
rows are predicted for the course's trainer with balanced stages, so their errors also contain how
two trainers differ. Memory is always predicted for the course's trainer.
"""

import csv
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import UserError
from common.flags import flag, parse
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
HERE = Path(__file__).parent / "published"
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
NAMED = {  # sizes that the rows of these models lack
    "deepseek-v3": dict(
        ffn_dim=18432,
        vocab_size=129280,
        experts=256,
        experts_per_token=8,
        expert_dim=2048,
        shared_experts=1,
        dense_layers=1,
    ),
    "mixtral": dict(ffn_dim=14336, vocab_size=32000, experts=8, experts_per_token=2),
}
LEFT_OUT = """\
Left out, so the prediction is too fast: stragglers, stalled data, slow hosts, falling clocks;
too small: the allocator's fragments;
too slow: kernels that hide a message behind a matmul's tiles, caches."""


@dataclass
class Config:
    """The files of published runs, and the file into which predictions are written."""

    rows: str = flag(str(HERE / "rows.csv"), "runs, in the columns of published/rows.csv")
    vtrain: str = flag(
        str(HERE / "vtrain_multi_node.csv"),
        "runs, in the columns of published/vtrain_multi_node.csv",
    )
    json: str = flag("", "write all predictions to this file")


class Case(NamedTuple):
    """One published run."""

    id: str
    shape: Shape
    layout: Layout
    gpu: Gpu
    recipe: Recipe
    published: dict[str, float]


def rows_of(path: str) -> list[dict[str, str]]:
    """Read the lines of a CSV file that are not empty: column -> cell. Raises UserError.

    A cell `line` is added: the number of the line, which is 1 just below the header. A cell "nan"
    becomes "".
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file; give one to --rows or --vtrain")
    rows = []
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file, restval="")
        for row in reader:
            cells = {name: cell.strip() for name, cell in row.items() if name}
            cells = {name: "" if cell.lower() == "nan" else cell for name, cell in cells.items()}
            if any(cells.values()):
                rows.append(cells | dict(line=str(reader.line_num - 1)))
    return rows


def number(row: dict[str, str], name: str, default: float | str = "") -> float:
    """The number in a cell, or `default` if empty. Raises UserError unless finite and >= 0."""
    try:
        value = float(row.get(name) or default)
    except ValueError:
        raise UserError(f"{row}: {name} must be a number") from None
    if not 0 <= value < float("inf"):
        raise UserError(f"{row}: {name} must not be negative or infinite")
    return value


def shape_of_row(row: dict[str, str]) -> Shape:
    """The shape of a row's model; NAMED or defaults fill gaps. Raises UserError without sizes."""
    dim = int(number(row, "hidden", 0))
    n_layers = int(number(row, "layers", 0))
    n_heads = int(number(row, "heads", 1))
    seq_len = int(number(row, "seq", 4096))
    if not dim or not n_layers:
        raise UserError(f"row {row['id']}: hidden and layers must be given")
    if row["id"][0] in RECIPES:
        vocab = int(number(row, "vocab", 51200))
        return gpt(dim, n_layers, n_heads, vocab, seq_len)
    sizes = dict(ffn_dim=4 * dim, vocab_size=128256)
    for name, known in NAMED.items():
        if name in row.get("model", "").lower():
            sizes |= known
    for column, name in ("ffn", "ffn_dim"), ("vocab", "vocab_size"):
        if row.get(column):
            sizes[name] = int(number(row, column))
    kv_heads = int(number(row, "kv", n_heads))
    return Shape(dim, n_layers, n_heads, kv_heads, seq_len=seq_len, **sizes)


def layout_of_row(row: dict[str, str]) -> Layout:
    """The layout of a row. SP is on, but in Megatron rows only if `recompute` says sel+SP."""
    recompute = row.get("recompute", "")
    names = ("pp", "cp", "tp", "ep", "zero", "mbs", "vp")
    pp, cp, tp, ep, zero, size, chunks = (int(number(row, name, 1)) for name in names)
    dp = int(number(row, "dp", number(row, "n", pp * tp * cp) // (pp * tp * cp)))
    batch = int(number(row, "gbs", dp))
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
        recompute={"sel+SP": "selective", "sel": "selective", "full": "full"}.get(
            recompute, "none"
        ),
        sp=row["id"][0] not in RECIPES or recompute == "sel+SP",
        dp=dp,
    )


def read_rows(path: str) -> list[Case]:
    """The runs of a file. Raises UserError for an unknown GPU."""
    cases = []
    for row in rows_of(path):
        name = row.get("id", "")
        chip = row.get("gpu", "")
        if not name or chip not in CHIPS:
            raise UserError(f"row {name} on {chip}: known are {', '.join(CHIPS)}")
        published = {figure: number(row, figure) for figure in FIGURES if row.get(figure)}
        m = shape_of_row(row)
        layout = layout_of_row(row)
        gpu = GPUS[CHIPS[chip]]
        if not row.get("recompute") and held(m, layout).total > gpu.memory:
            layout = replace(layout, recompute="full")  # not said, but else the run does not fit
        cases.append(Case(name, m, layout, gpu, RECIPES.get(name[0], OTHERS), published))
    return cases


def read_vtrain(path: str) -> list[Case]:
    """The runs of a file such as vTrain's. A run's id is the number of its line."""
    cases = []
    for row in rows_of(path):
        layout = Layout(
            pp=int(number(row, "pipeline parallelism")),
            tp=int(number(row, "tensor parallelism")),
            dp=int(number(row, "data parallelism")),
            zero=0,
            micro_batch_size=int(number(row, "micro batch")),
            global_batch_size=int(number(row, "global batch")),
            recompute="full",
            sp=False,
        )
        names = ("hidden size", "# layers", "attention heads")
        dim, n_layers, n_heads = (int(number(row, name)) for name in names)
        m = gpt(dim, n_layers, n_heads, 50257, int(number(row, "sequence length")))
        published = {}
        if row.get("iteration time (ms)"):
            published["step_s"] = number(row, "iteration time (ms)") / 1e3
        cases.append(Case(row["line"], m, layout, GPUS["a100-80-half"], VTRAIN, published))
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
    """The published figure by which the time of a run is judged; "" if there is none."""
    return next((name for name in TIMES if name in case.published), "")


def choice(published: list[float], predicted: list[float]) -> tuple[float, float]:
    """Spearman's correlation of published and predicted times, and the regret.

    Regret: how much longer the layout with the least predicted time took than the fastest one.
    """
    ranks = []
    for times in (published, predicted):
        ranks.append([sum(x < time for x in times) + times.count(time) / 2 for time in times])
    picked = published[predicted.index(min(predicted))]
    regret = picked / min(published) - 1
    if any(len(set(row)) == 1 for row in ranks):
        return 1.0, regret
    return float(np.corrcoef(ranks)[0, 1]), regret


def groups_of(cases: list[Case]) -> dict[str, list[Case]]:
    """Runs with a published time, grouped by model, number of GPUs and batch."""
    groups = defaultdict(list)
    for case in cases:
        if case.published:
            weights = f"{total_weights(case.shape) / 1e9:.1f}e9 weights"
            x = case.layout
            groups[f"{weights}, {x.world} GPUs, batch {x.global_batch_size}"].append(case)
    return groups


def runs_table(predictions: list[tuple[Case, dict[str, float]]]) -> str:
    """A line for each run."""
    header = "id|as if by|figure|published|predicted|time|memory, GiB|error"
    rows = [header.split("|")]
    for case, predicted in predictions:
        row = [case.id, case.recipe.name, "", "", "", "", f"{predicted['mem_gib']:.1f}", ""]
        name = time_figure(case)
        if name:
            row[2:5] = name, f"{case.published[name]:.4g}", f"{predicted[name]:.4g}"
            row[5] = f"{error(case, predicted, name):+.1%}"
        if "mem_gib" in case.published:
            row[7] = f"{error(case, predicted, 'mem_gib'):+.1%}"
        rows.append(row)
    return table(rows)


def errors_table(predictions: list[tuple[Case, dict[str, float]]]) -> str:
    """The errors of the times, by source."""
    errors = defaultdict(list)
    for case, predicted in predictions:
        name = time_figure(case)
        if name:
            errors[KINDS.get(case.recipe.name, "time, other software")].append(
                error(case, predicted, name)
            )
    both = errors.get("time, S", []) + errors.get("time, K", [])
    if both:
        errors["time, S and K"] = both
    rows = [["errors of", "runs", "mean", "worst", "bias"]]
    for name, values in errors.items():
        mean = np.mean(np.abs(values))
        worst = max(values, key=abs)
        bias = np.mean(values)
        rows.append([name, str(len(values)), f"{mean:.1%}", f"{worst:+.1%}", f"{bias:+.1%}"])
    return table(rows)


def choices_table(cases: list[Case]) -> str:
    """How well the planner chooses among the layouts of each group."""
    rows = [["vTrain group", "layouts", "mean error", "Spearman", "regret"]]
    for name, group in groups_of(cases).items():
        published = [case.published["step_s"] for case in group]
        predicted = [predict(case)["step_s"] for case in group]
        mean = np.mean(np.abs(np.array(predicted) / np.array(published) - 1))
        correlation, regret = choice(published, predicted)
        rows.append([name, str(len(group)), f"{mean:.1%}", f"{correlation:.3f}", f"{regret:.1%}"])
    return table(rows)


def write_json(path: str, predictions: list[tuple[Case, dict[str, float]]]):
    """Write all predictions. A run of vTrain has a number as its id, and only a step time."""
    entries = []
    for case, predicted in predictions:
        entry = dict(id=case.id, published=case.published, predicted=predicted)
        if case.recipe is VTRAIN:
            entry |= dict(id=int(case.id), predicted=dict(step_s=predicted["step_s"]))
        entries.append(entry)
    Path(path).write_text(json.dumps(entries, indent=1) + "\n")


def main(_name: str, argv: list[str]):
    """Print a line for each run, the errors, the choices, and what is not modelled."""
    config = parse(Config, argv)
    lines = read_vtrain(config.vtrain)
    predictions = [(case, predict(case)) for case in read_rows(config.rows) + lines]
    print(f"{runs_table(predictions)}\n")
    print("(time: error of the step's time, also where the source gives a rate)\n")
    print(errors_table(predictions), choices_table(lines), LEFT_OUT, sep="\n\n")
    if config.json:
        write_json(config.json, predictions)
