"""Compares the planner with published runs: their step times and memory, and the choice among their layouts.

    python -m extras.bench plan
    python -m extras.bench plan --rows FILE --vtrain FILE --json predictions.json

published/README.md describes the files. The first letter of a row's id is the row's source. The planner has recipes
for the trainers of sources S and K (both Megatron) and for vTrain's. All other rows are predicted for the course's
trainer, so their errors also contain how two trainers differ. Memory is always predicted for the course's trainer.
"""

import csv
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import UserError
from common.trainer import parse
from extras.plan.gpus import GIB, GPUS, Gpu
from extras.plan.layouts import Layout
from extras.plan.memory import held
from extras.plan.seconds import COURSE, Recipe, step_seconds
from extras.plan.shapes import Shape, flops_per_token, gpt, total_weights
from extras.plan.tables import table

# By the first letter of a row's id. The switches come from papers, and are the same for all runs of one source.
RECIPES = {
    "S": Recipe(
        "megatron-2021", library=0.92
    ),  # CUDA 11.0: S9 took 10% longer than the same model a year later, K5
    "K": Recipe("megatron-2022", overlap_tp=True),
}
VTRAIN = Recipe("vtrain")
HERE = Path(__file__).parent / "published"
KINDS = {"megatron-2021": "time, S", "megatron-2022": "time, K", "vtrain": "time, vTrain"}
CHIPS = {
    "A100-80": "a100-80",
    "H100": "h100-80",
    "H100-80": "h100-80",
    "H100-96-500W": "h100-96-500w",
    "B200": "b200",
}
FIGURES = ("step_s", "tflops_gpu", "mfu_pct", "tok_s_gpu", "mem_gib")
NAMED = {  # sizes that the rows of these models lack
    "deepseek-v3": dict(
        ffn_dim=18432, vocab_size=129280, experts=256, experts_per_token=8, expert_dim=2048
    )
    | dict(shared_experts=1, dense_layers=1),
    "mixtral": dict(ffn_dim=14336, vocab_size=32000, experts=8, experts_per_token=2),
}
COLUMNS = (
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
)
COLUMNS += ("tensor parallelism", "data parallelism", "pipeline parallelism")
LEFT_OUT = """Left out, so the prediction is too fast: stragglers, stalled data, slow hosts, falling clocks;
too small: the allocator's fragments; too slow: kernels that hide a message behind a matmul's tiles, caches."""


@dataclass
class Config:
    """The files of published runs, and the file into which predictions are written."""

    rows: str = str(HERE / "rows.csv")  # runs, one a line, in the columns of published/rows.csv
    vtrain: str = str(
        HERE / "vtrain_multi_node.csv"
    )  # step times, in the columns of published/vtrain_multi_node.csv
    json: str = ""  # write all predictions to this file


class Case(NamedTuple):
    """One published run."""

    id: str
    shape: Shape
    layout: Layout
    gpu: Gpu
    recipe: Recipe
    published: dict[str, float]


def rows_of(path: str) -> list[dict[str, str]]:
    """Read the lines of a CSV file that are not empty: column -> cell. Raises UserError if there is no such file.

    A cell `line` is added: the number of the line, which is 1 just below the header. A cell "nan" becomes "".
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file; give one to --rows or --vtrain")
    rows = []
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file, restval="")
        for row in reader:
            cells = {
                name: "" if cell.strip().lower() == "nan" else cell.strip()
                for name, cell in row.items()
                if name
            }
            if any(cells.values()):
                rows.append(cells | dict(line=str(reader.line_num - 1)))
    return rows


def real(row: dict[str, str], name: str, default: float | str = "") -> float:
    """The number in a cell or, if it is empty, `default`. Raises UserError unless this is a finite number >= 0."""
    try:
        found = float(row.get(name) or default)
    except ValueError:
        raise UserError(f"{row}: {name} must be a number") from None
    if not 0 <= found < float("inf"):
        raise UserError(f"{row}: {name} must not be negative or infinite")
    return found


def shape_of(row: dict[str, str]) -> Shape:
    """The shape of a row's model. NAMED or defaults fill gaps. Raises UserError if `hidden` or `layers` is missing."""
    dim, layers, heads, seq = (
        int(real(row, *one)) for one in (("hidden", 0), ("layers", 0), ("heads", 1), ("seq", 4096))
    )
    if not dim or not layers:
        raise UserError(f"row {row['id']}: hidden and layers must be given")
    if row["id"][0] in RECIPES:
        return gpt(
            dim, layers, heads, int(real(row, "vocab", 51200)), seq, int(real(row, "ffn", 0))
        )
    more = dict(ffn_dim=4 * dim, vocab_size=128256)
    more |= next(
        (sizes for name, sizes in NAMED.items() if name in row.get("model", "").lower()), {}
    )
    more |= {
        name: int(real(row, n))
        for n, name in (("ffn", "ffn_dim"), ("vocab", "vocab_size"))
        if row.get(n)
    }
    return Shape(dim, layers, heads, int(real(row, "kv", heads)), seq_len=seq, **more)


def layout_of(row: dict[str, str]) -> Layout:
    """The layout of a row. SP (sequence parallelism) is on, but in Megatron rows only if `recompute` says sel+SP."""
    megatron, recompute = row["id"][0] in RECIPES, row.get("recompute", "")
    names = ("pp", "tp", "cp", "ep", "zero", "mbs", "vp")
    pp, tp, cp, ep, zero, mbs, chunks = (int(real(row, name, 1)) for name in names)
    dp = int(real(row, "dp", real(row, "n", pp * tp * cp) // (pp * tp * cp)))
    gbs = int(real(row, "gbs", dp))
    whole = (
        gbs // dp // mbs % pp == 0
    )  # whether pp divides the micro-batches, as an interleaved schedule needs
    some = (
        "selective" if megatron else "elementwise"
    )  # all others fuse attention, which stores no scores
    kind = {"sel+SP": some, "sel": some, "full": "full"}.get(recompute, "none")
    way = "interleaved" if chunks > 1 and pp > 1 and whole else "1f1b"
    sp = not megatron or recompute == "sel+SP"
    return Layout(pp, cp, tp, ep, zero, mbs, gbs, way, chunks, kind, sp, dp=dp)


def read_rows(path: str) -> list[Case]:
    """The runs of a file. Raises UserError for an unknown GPU."""
    cases = []
    for row in rows_of(path):
        name, chip = row.get("id", ""), row.get("gpu", "")
        if not name or chip not in CHIPS:
            raise UserError(f"row {name} on {chip}: known are {', '.join(CHIPS)}")
        published = {figure: real(row, figure) for figure in FIGURES if row.get(figure)}
        m, layout, gpu = shape_of(row), layout_of(row), GPUS[CHIPS[chip]]
        if not row.get("recompute") and held(m, layout).total > gpu.memory:
            layout = replace(
                layout, recompute="full"
            )  # the source does not say, but without it the run does not fit
        cases.append(Case(name, m, layout, gpu, RECIPES.get(name[0], COURSE), published))
    return cases


def read_vtrain(path: str) -> list[Case]:
    """The runs of a file such as vTrain's. A run's id is the number of its line, not counting the header."""
    cases, took = [], "iteration time (ms)"
    for row in rows_of(path):
        gbs, mbs, dim, heads, layers, seq, tp, dp, pp = (int(real(row, name)) for name in COLUMNS)
        x = Layout(pp, 1, tp, 1, 0, mbs, gbs, recompute="full", sp=False, dp=dp)
        published = dict(step_s=real(row, took) / 1e3) if row.get(took) else {}
        m = gpt(dim, layers, heads, 50257, seq)
        cases.append(Case(row["line"], m, x, GPUS["a100-80-half"], VTRAIN, published))
    return cases


def counted_flops(case: Case) -> float:
    """FLOPs of a token, counted as in its source: Narayanan adds recomputation; Llama 3 and NeMo omit masked scores."""
    m, letter = case.shape, case.id[0]
    if letter == "S":  # 96 B s l h^2 (1 + s / 6h + V / 16 l h), Narayanan et al., section 5.1
        return (
            96
            * m.n_layers
            * m.dim**2
            * (1 + m.seq_len / 6 / m.dim + m.vocab_size / 16 / m.n_layers / m.dim)
        )
    return flops_per_token(m)[0] - 6 * m.n_layers * m.seq_len * m.dim * (letter in "LA")


def predict(case: Case) -> dict[str, float]:
    """The five figures that the planner predicts for a run."""
    seconds = step_seconds(case.shape, case.layout, case.gpu, case.recipe).step
    tokens = case.layout.global_batch_size * case.shape.seq_len / case.layout.world / seconds
    rate = counted_flops(case) * tokens
    found = (
        seconds,
        rate / 1e12,
        100 * rate / case.gpu.flops,
        tokens,
        held(case.shape, case.layout).total / GIB,
    )
    return dict(zip(FIGURES, found, strict=True))


def error(case: Case, predicted: dict[str, float], name: str) -> float:
    """The relative error of a figure. For a rate, such as tokens/s, it is the error of the inverse, a time."""
    ratio = predicted[name] / case.published[name]
    return (ratio if name in ("step_s", "mem_gib") else 1 / ratio) - 1


def time_figure(case: Case) -> str:
    """The name of the published figure by which the time of a run is judged; "" if there is none."""
    return next((name for name in FIGURES[:4] if name in case.published), "")


def choice(published: list[float], predicted: list[float]) -> tuple[float, float]:
    """Spearman's correlation of published and predicted times, and the regret.

    Regret: by what fraction the layout with the least predicted time took longer than the fastest layout.
    """
    ranks = [
        [sum(x < value for x in row) + row.count(value) / 2 for value in row]
        for row in (published, predicted)
    ]
    alike = any(len(set(row)) == 1 for row in ranks)
    picked = published[predicted.index(min(predicted))]
    return 1.0 if alike else float(np.corrcoef(ranks)[0, 1]), picked / min(published) - 1


def groups_of(cases: list[Case]) -> dict[str, list[Case]]:
    """Runs with a published time, grouped by model, number of GPUs and batch."""
    found = defaultdict(list)
    for case in cases:
        if case.published:
            x, size = case.layout, f"{total_weights(case.shape) / 1e9:.1f}e9"
            found[f"{size} weights, {x.world} GPUs, batch {x.global_batch_size}"].append(case)
    return found


def bench(config: Config):
    """Print a line for each run, the errors, the choices among vTrain's layouts, and what is not modelled."""
    cases, lines = read_rows(config.rows), read_vtrain(config.vtrain)
    found, errors = [(case, predict(case)) for case in cases + lines], defaultdict(list)
    rows = [["id", "as if by", "figure", "published", "predicted", "time", "memory, GiB", "error"]]
    for case, predicted in found:
        row = [case.id, case.recipe.name, "", "", "", "", f"{predicted['mem_gib']:.1f}", ""]
        if name := time_figure(case):
            off = error(case, predicted, name)
            row[2:6] = name, f"{case.published[name]:.4g}", f"{predicted[name]:.4g}", f"{off:+.1%}"
            errors[KINDS.get(case.recipe.name, "time, other software")].append(off)
        if "mem_gib" in case.published:
            row[7] = f"{error(case, predicted, 'mem_gib'):+.1%}"
        rows.append(row)
    print(
        f"{table(rows)}\n\n(time: error of the step's time, also where the source gives a rate)\n"
    )
    if both := errors.get("time, S", []) + errors.get("time, K", []):
        errors["time, S and K"] = both
    rows = [["errors of", "runs", "mean", "worst", "bias"]]
    for name, all_ in errors.items():
        mean = np.mean(np.abs(all_))
        rows.append(
            [
                name,
                str(len(all_)),
                f"{mean:.1%}",
                f"{max(all_, key=abs):+.1%}",
                f"{np.mean(all_):+.1%}",
            ]
        )
    print(table(rows), end="\n\n")
    rows = [["vTrain group", "layouts", "mean error", "Spearman", "regret"]]
    for name, group in groups_of(lines).items():
        one, two = (
            [figures(case)["step_s"] for case in group]
            for figures in (lambda case: case.published, predict)
        )
        mean, (correlation, regret) = (
            np.mean([abs(b / a - 1) for a, b in zip(one, two, strict=True)]),
            choice(one, two),
        )
        rows.append([name, str(len(one)), f"{mean:.1%}", f"{correlation:.3f}", f"{regret:.1%}"])
    print(f"{table(rows)}\n\n{LEFT_OUT}")
    if config.json:
        entries = [
            dict(id=case.id, published=case.published, predicted=predicted)
            for case, predicted in found
        ]
        for entry in entries[len(cases) :]:
            entry |= dict(id=int(entry["id"]), predicted=dict(step_s=entry["predicted"]["step_s"]))
        Path(config.json).write_text(json.dumps(entries, indent=1) + "\n")


def main(_name: str, argv: list[str]):
    """The command line."""
    bench(parse(Config, argv))
