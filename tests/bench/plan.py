"""The planner beside published runs: predicted memory and step time, mean and worst error, rank correlation, regret.

    python -m tests.bench plan
    python -m tests.bench plan --rows FILE --vtrain FILE --json predictions.json

The files in tests/bench/published are those of its README.md; any others of the same columns do. A row names a run, not
its software: the letter of its id does (`RECIPE`), and the software's ways are in theory/recipes.py. What a row does
not say is filled in by rules that hold for all rows of a letter (`layout_of`).
"""

import csv
import json
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from common import UserError
from services.flags import main as run_main
from services.tables import table
from theory.footprint import held
from theory.gpus import GIB, GPUS, Gpu
from theory.layouts import Layout
from theory.recipes import RECIPES, Recipe
from theory.seconds import step_seconds
from theory.shapes import Latent, Shape, gpt, head_widths, model_flops, total_weights

HERE = Path(__file__).parent / "published"
RECIPE = dict(S="megatron-2021", K="megatron-2022", V="nanotron", N="nanotron", T="torchtitan", L="llama3")
RECIPE |= dict(A="automodel", X="simumax")
CHIPS = {"A100-80": "a100-80", "H100": "h100-80", "H100-80": "h100-80", "H100-96-500W": "h100-96-500w", "B200": "b200"}
FIGURES = ("step_s", "tflops_gpu", "mfu_pct", "tok_s_gpu", "mem_gib")
DEEPSEEK_V3 = dict(ffn_dim=18432, vocab_size=129280, experts=256, experts_per_token=8, expert_dim=2048)
DEEPSEEK_V3 |= dict(shared_experts=1, latent=Latent())
MIXTRAL = dict(ffn_dim=14336, vocab_size=32000, experts=8, experts_per_token=2)
VTRAIN = ("global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length")
VTRAIN += ("tensor parallelism", "data parallelism", "pipeline parallelism")
LEFT_OUT = """left out                                              the prediction is then
stragglers, other jobs on the network, stalled data   too fast
attention that is cut unevenly, imbalance of experts  too fast, too small
hosts that issue kernels slower than they run         too fast
clocks that fall when all units work                  too fast
the allocator's fragments (but torchtitan's 5%)       too small
kernels that hide a message behind a matmul's tiles   too slow
caches that save a pass over memory                   too slow"""


@dataclass
class Config:
    """Flags of this benchmark."""

    rows: str = str(HERE / "rows.csv")  # runs, one a line; the columns of published/rows.csv
    vtrain: str = str(HERE / "vtrain_multi_node.csv")  # step times, the columns of published/vtrain_multi_node.csv
    json: str = ""  # write all predictions to this file


class Case(NamedTuple):
    """One published run."""

    id: str
    shape: Shape
    layout: Layout
    gpu: Gpu
    recipe: Recipe
    published: dict[str, float]


def given(row: dict[str, str], name: str) -> str:
    """A column's text, stripped; "" if it is missing, empty or not a number ("nan")."""
    text = (row.get(name) or "").strip()
    return "" if text.lower() == "nan" else text


def real(row: dict[str, str], name: str) -> float:
    """A column's number. Raises UserError if it has none, or none above 0."""
    try:
        found = float(given(row, name))
    except ValueError:
        raise UserError(f"{row}: {name} must be a number") from None
    if not 0 <= found < float("inf"):
        raise UserError(f"{row}: {name} must not be negative or infinite")
    return found


def number(row: dict[str, str], name: str, default: int) -> int:
    """A column, or what it is if empty."""
    return int(real(row, name)) if given(row, name) else default


def shape_of(row: dict[str, str]) -> Shape:
    """The model of a row; sizes that it does not give are those of the model that it names."""
    heads = number(row, "heads", 1)
    dim, layers, seq = number(row, "hidden", 0), number(row, "layers", 0), number(row, "seq", 4096)
    if not dim or not layers:
        raise UserError(f"row {row['id']}: hidden and layers must be given")
    if row["id"][0] in "SK":
        return gpt(dim, layers, heads, number(row, "vocab", 51200), seq, number(row, "ffn", 0))
    more: dict[str, Any] = {}
    if "deepseek-v3" in row["model"].lower():  # the whole model has three dense layers; a few layers of it have one
        more = DEEPSEEK_V3 | dict(dense_layers=3 if layers > 8 else 1)
    elif "mixtral" in row["model"].lower():
        more = MIXTRAL
    sizes = dict(ffn_dim=number(row, "ffn", more.get("ffn_dim", 4 * dim)))
    sizes |= dict(vocab_size=number(row, "vocab", more.get("vocab_size", 128256)))
    m = Shape(
        dim,
        layers,
        heads,
        number(row, "kv", heads),
        **sizes | {k: v for k, v in more.items() if k not in sizes},
        seq_len=seq,
    )
    named = re.search(r"-([\d.]+)B\b", row["model"])
    tied = replace(m, tied=True)
    if row["id"][0] in "VN" and named:  # nanotron's names count weights, and a tied matrix once
        size = float(named[1]) * 1e9
        m = min((m, tied), key=lambda shape: abs(total_weights(shape) - size))
    return m


def layout_of(row: dict[str, str]) -> Layout:
    """The layout of a row. Not given: Llama 3 has one layer a chunk; torchtitan has pp micro-batches, two chunks."""
    letter = row["id"][0]
    pp, tp, cp = (number(row, dim, 1) for dim in ("pp", "tp", "cp"))
    dp = number(row, "dp", number(row, "n", pp * tp * cp) // (pp * tp * cp))
    chunks = number(row, "vp", 0)
    if not chunks:
        named = 2 if "interleaved" in row["model"].lower() else 1
        chunks = -(-number(row, "layers", 1) // pp) if letter == "L" else named
    gbs = number(row, "gbs", dp)
    mbs = number(row, "mbs", max(1, gbs // dp // pp) if letter == "T" and pp > 1 else 1)
    recompute = {"sel+SP": "selective", "sel": "selective", "full": "full"}.get(row["recompute"], "none")
    return Layout(
        pp, dp, cp, tp, number(row, "ep", 1), number(row, "zero", 1), mbs, gbs,
        "interleaved" if chunks > 1 and pp > 1 else "1f1b", chunks if pp > 1 else 1, recompute,
        sp=letter not in "SK" or row["recompute"] == "sel+SP", cp_mode="allgather",
    )  # fmt: skip


def lines_of(path: str) -> list[str]:
    """A text file's lines. Raises UserError if it is not there."""
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file; give one to --rows or --vtrain")
    return Path(path).read_text().splitlines()


def read_rows(path: str) -> list[Case]:
    """The runs of a file. Raises UserError for a letter or GPU that nobody knows."""
    cases = []
    for row in csv.DictReader(lines_of(path)):
        row |= {name: given(row, name) for name in (*row, "id", "gpu", "model", "recompute", "prec")}
        if row["id"][:1] not in RECIPE or row["gpu"] not in CHIPS:
            raise UserError(f"row {row['id']} on {row['gpu']}: known are ids {''.join(RECIPE)} and {', '.join(CHIPS)}")
        recipe = RECIPES[RECIPE[row["id"][0]]]._replace(fp8=row["prec"] == "fp8")
        recipe = recipe._replace(fused=recipe.fused or "compile" in row["model"])
        published = {name: real(row, name) for name in FIGURES if given(row, name)}
        m, layout, gpu = shape_of(row), layout_of(row), GPUS[CHIPS[row["gpu"]]]
        if not row["recompute"] and held(m, layout, recipe).total > gpu.memory:
            layout = replace(layout, recompute="full")  # not stated, and without it the run does not fit
        cases.append(Case(row["id"], m, layout, gpu, recipe, published))
    return cases


def read_vtrain(path: str) -> list[Case]:
    """The lines of a file; the id is the line's number, the header not counted, from 1 on."""
    cases, lines = [], lines_of(path)
    names = next(csv.reader(lines), [])
    for line, cells in enumerate(csv.reader(lines)):
        row = dict(zip(names, cells, strict=False))
        if line and any(given(row, name) for name in row):
            gbs, mbs, dim, heads, layers, seq, tp, dp, pp = (int(real(row, name)) for name in VTRAIN)
            m = gpt(dim, layers, heads, 50257, seq)
            layout = Layout(pp, dp, 1, tp, 1, 0, mbs, gbs, recompute="full", sp=False)
            took = "iteration time (ms)"
            published = dict(step_s=real(row, took) / 1e3) if given(row, took) else {}
            cases.append(Case(str(line), m, layout, GPUS["a100-80-half"], RECIPES["vtrain"], published))
    return cases


def counted_flops(case: Case) -> float:
    """FLOPs of a token as the source of a row counts them: S all that is done, L and A half of attention's square."""
    m, letter = case.shape, case.id[0]
    if letter == "S":  # 96 B s l h^2 (1 + s / 6h + V / 16 l h), Narayanan et al., section 5.1
        return 96 * m.n_layers * m.dim**2 * (1 + m.seq_len / 6 / m.dim + m.vocab_size / 16 / m.n_layers / m.dim)
    half = 3 * m.n_layers * m.seq_len * sum(head_widths(m))
    return model_flops(m) - half * (letter in "LA")


def predict(case: Case) -> dict[str, float]:
    """The five figures."""
    seconds = step_seconds(case.shape, case.layout, case.gpu, case.recipe).step
    tokens = case.layout.gbs * case.shape.seq_len / case.layout.world / seconds
    rate = counted_flops(case) * tokens
    memory = held(case.shape, case.layout, case.recipe).total
    return dict(zip(FIGURES, (seconds, rate / 1e12, 100 * rate / case.gpu.flops, tokens, memory / GIB), strict=True))


def error(case: Case, predicted: dict[str, float], name: str) -> float:
    """Predicted over published, less 1; of a rate, that of the time behind it."""
    ratio = predicted[name] / case.published[name]
    return (ratio if name in ("step_s", "mem_gib") else 1 / ratio) - 1


def time_figure(case: Case) -> str:
    """The figure by which a row's time is judged: the first that it has."""
    return next((name for name in FIGURES[:4] if name in case.published), "")


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of ranks; equal values share the mean of theirs."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(x < value for x in values) + (sum(x == value for x in values) - 1) / 2 for value in values]

    one, two = ranks(a), ranks(b)
    middle = (len(a) - 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(one, two, strict=True))
    sizes = [sum((x - middle) ** 2 for x in values) for values in (one, two)]
    return both / (sizes[0] * sizes[1]) ** 0.5 if all(sizes) else 1.0


def groups_of(cases: list[Case]) -> dict[str, list[int]]:
    """Indices of the lines with the same model, GPUs and batch."""
    found = defaultdict(list)
    for index, case in enumerate(cases):
        size = f"{total_weights(case.shape) / 1e9:.1f}e9"
        found[f"{size} weights, {case.layout.world} GPUs, batch {case.layout.gbs}"].append(index)
    return dict(found)


def choice(published: list[float], predicted: list[float]) -> tuple[float, float]:
    """Spearman, and the regret: how much longer the layout with the least predicted time took than the best."""
    picked = min(range(len(predicted)), key=predicted.__getitem__)
    return spearman(published, predicted), published[picked] / min(published) - 1


def summary(name: str, errors: list[float]) -> list[str]:
    """A line of the table of errors."""
    mean = sum(map(abs, errors)) / len(errors)
    worst, bias = max(errors, key=abs), sum(errors) / len(errors)
    return [name, str(len(errors)), f"{mean:.1%}", f"{worst:+.1%}", f"{bias:+.1%}"]


def bench(config: Config):
    """Print both tables, the errors, and what is left out."""
    cases, lines = read_rows(config.rows), read_vtrain(config.vtrain)
    found = [predict(case) for case in cases + lines]
    rows = [["id", "figure", "published", "predicted", "time", "memory, GiB", "predicted", "error"]]
    memory, times = defaultdict(list), defaultdict(list)
    for case, predicted in zip(cases, found, strict=False):
        name, letter = time_figure(case), case.id[0]
        time = ["", "", "", ""]
        if name:
            times[letter].append(error(case, predicted, name))
            time = [name, f"{case.published[name]:.4g}", f"{predicted[name]:.4g}", f"{times[letter][-1]:+.1%}"]
        bytes_ = ["", f"{predicted['mem_gib']:.1f}", ""]
        if "mem_gib" in case.published:
            memory[letter].append(error(case, predicted, "mem_gib"))
            bytes_ = [f"{case.published['mem_gib']:.1f}", bytes_[1], f"{memory[letter][-1]:+.1%}"]
        rows.append([case.id, *time, *bytes_])
    print(f"{table(rows)}\n\n(time: error of the step's time, also where the source gives a rate)\n")
    rows = [["line", "weights", "GPUs", "pp", "dp", "tp", "micro-batch", "seconds", "predicted", "error"]]
    timed = [(case, predicted["step_s"]) for case, predicted in zip(lines, found[len(cases) :], strict=True)]
    timed = [(case, predicted) for case, predicted in timed if case.published]
    for case, predicted in timed:
        x, size = case.layout, f"{total_weights(case.shape) / 1e9:.1f}e9"
        layout = [str(n) for n in (x.world, x.pp, x.dp, x.tp, x.mbs)]
        took = case.published["step_s"]
        rows.append([case.id, size, *layout, f"{took:.2f}", f"{predicted:.2f}", f"{predicted / took - 1:+.1%}"])
    print(f"{table(rows)}\n")
    took, seconds = [case.published["step_s"] for case, _ in timed], [predicted for _, predicted in timed]
    errors = [["errors of", "runs", "mean", "worst", "bias"]]
    for name, letters in (("X N T", "XNT"), *((x, x) for x in memory)):
        if some := [e for letter in letters for e in memory[letter]]:
            errors.append(summary(f"memory, {name}", some))
    for name, letters in (("S K L", "SKL"), *((x, x) for x in times)):
        if some := [e for letter in letters for e in times[letter]]:
            errors.append(summary(f"time, {name}", some))
    if timed:
        errors.append(summary("time, vTrain", [b / a - 1 for a, b in zip(took, seconds, strict=True)]))
    print(f"{table(errors)}\n")
    rows = [["vTrain group", "layouts", "mean error", "Spearman", "regret"]]
    for name, indices in groups_of([case for case, _ in timed]).items():
        one, two = [took[i] for i in indices], [seconds[i] for i in indices]
        mean = sum(abs(b / a - 1) for a, b in zip(one, two, strict=True)) / len(one)
        correlation, regret = choice(one, two)
        rows.append([name, str(len(one)), f"{mean:.1%}", f"{correlation:.3f}", f"{regret:.1%}"])
    print(f"{table(rows)}\n\n{LEFT_OUT}")
    if config.json:
        entries = []
        for case, predicted in zip(cases + lines, found, strict=True):
            entries.append(dict(id=case.id, published=case.published, predicted=predicted))
        for entry in entries[len(cases) :]:
            entry["id"], entry["predicted"] = int(entry["id"]), dict(step_s=entry["predicted"]["step_s"])
        Path(config.json).write_text(json.dumps(entries, indent=1) + "\n")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
