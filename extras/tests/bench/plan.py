"""The planner beside published runs: predicted step time and memory, mean and worst error, rank correlation, regret.

    python -m extras.tests.bench plan
    python -m extras.tests.bench plan --rows FILE --vtrain FILE --json predictions.json

The files in tests/bench/published are those of its README.md; any others of the same columns do. A row names a run, not
its software: the letter of its id does. S and K are Megatron's; the planner knows its ways, and vTrain's (RECIPES). Of
other software it knows none: such a row is predicted as if the course's trainer had run it, and its errors are no
errors of a recipe.
"""

import csv
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from common import UserError
from common.trainer import parse
from extras.theory.footprint import COURSE, Recipe, held
from extras.theory.gpus import GIB, GPUS, Gpu
from extras.theory.layouts import Layout
from extras.theory.seconds import step_seconds
from extras.theory.shapes import Shape, flops_per_token, gpt, total_weights
from extras.theory.tables import table

RECIPES = {  # switches come from papers, and hold for every run of a software
    "course": COURSE,
    "megatron-2021": Recipe("megatron-2021", library=0.92),  # on CUDA 11.0: S9 took 10% longer than K5 a year later
    "megatron-2022": Recipe("megatron-2022", overlap_tp=True),
    "vtrain": Recipe("vtrain"),
}
HERE = Path(__file__).parent / "published"
RECIPE = dict(S="megatron-2021", K="megatron-2022")
KINDS = {"megatron-2021": "time, S", "megatron-2022": "time, K", "vtrain": "time, vTrain"}
CHIPS = {"A100-80": "a100-80", "H100": "h100-80", "H100-80": "h100-80", "H100-96-500W": "h100-96-500w", "B200": "b200"}
FIGURES = ("step_s", "tflops_gpu", "mfu_pct", "tok_s_gpu", "mem_gib")
NAMED = {  # what rows that name a model do not give
    "deepseek-v3": dict(ffn_dim=18432, vocab_size=129280, experts=256, experts_per_token=8, expert_dim=2048)
    | dict(shared_experts=1, dense_layers=1),
    "mixtral": dict(ffn_dim=14336, vocab_size=32000, experts=8, experts_per_token=2),
}
VTRAIN = ("global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length")
VTRAIN += ("tensor parallelism", "data parallelism", "pipeline parallelism")
LEFT_OUT = """Left out, so the prediction is too fast: stragglers, stalled data, slow hosts, falling clocks;
too small: the allocator's fragments; too slow: kernels that hide a message behind a matmul's tiles, caches."""


@dataclass
class Config:
    """What is compared."""

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
    heads, dim = number(row, "heads", 1), number(row, "hidden", 0)
    layers, seq = number(row, "layers", 0), number(row, "seq", 4096)
    if not dim or not layers:
        raise UserError(f"row {row['id']}: hidden and layers must be given")
    if row["id"][0] in RECIPE:
        return gpt(dim, layers, heads, number(row, "vocab", 51200), seq, number(row, "ffn", 0))
    more = next((sizes for name, sizes in NAMED.items() if name in row["model"].lower()), {})
    sizes = dict(ffn_dim=number(row, "ffn", more.get("ffn_dim", 4 * dim)))
    sizes |= dict(vocab_size=number(row, "vocab", more.get("vocab_size", 128256)), seq_len=seq)
    return Shape(dim, layers, heads, number(row, "kv", heads), **more | sizes)


def layout_of(row: dict[str, str]) -> Layout:
    """The layout of a row. ZeRO 1 where it does not say; sequence parallelism but where Megatron's rows have none."""
    pp, tp, cp = (number(row, dim, 1) for dim in ("pp", "tp", "cp"))
    dp = number(row, "dp", number(row, "n", pp * tp * cp) // (pp * tp * cp))
    gbs, chunks = number(row, "gbs", dp), number(row, "vp", 1)
    mbs = number(row, "mbs", 1)
    whole = gbs // dp // mbs % pp == 0  # as an interleaved schedule wants it
    some = "selective" if row["id"][0] in RECIPE else "elementwise"  # all others fuse attention
    recompute = {"sel+SP": some, "sel": some, "full": "full"}.get(row["recompute"], "none")
    x = Layout(pp, cp, tp, number(row, "ep", 1), number(row, "zero", 1), mbs, gbs, dp=dp, recompute=recompute)
    way = "interleaved" if chunks > 1 and pp > 1 and whole else "1f1b"
    return replace(x, schedule=way, chunks=chunks, sp=row["id"][0] not in RECIPE or row["recompute"] == "sel+SP")


def lines_of(path: str) -> list[str]:
    """A text file's lines. Raises UserError if it is not there."""
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file; give one to --rows or --vtrain")
    return Path(path).read_text().splitlines()


def read_rows(path: str) -> list[Case]:
    """The runs of a file. Raises UserError for a GPU that nobody knows."""
    cases = []
    for row in csv.DictReader(lines_of(path)):
        row |= {name: given(row, name) for name in (*row, "id", "gpu", "model", "recompute")}
        if not row["id"] or row["gpu"] not in CHIPS:
            raise UserError(f"row {row['id']} on {row['gpu']}: known are {', '.join(CHIPS)}")
        recipe = RECIPES[RECIPE.get(row["id"][0], "course")]
        published = {name: real(row, name) for name in FIGURES if given(row, name)}
        m, layout, gpu = shape_of(row), layout_of(row), GPUS[CHIPS[row["gpu"]]]
        if not row["recompute"] and held(m, layout, recipe).total > gpu.memory:
            layout = replace(layout, recompute="full")  # not stated, and without it the run does not fit
        cases.append(Case(row["id"], m, layout, gpu, recipe, published))
    return cases


def read_vtrain(path: str) -> list[Case]:
    """The lines of a file; the id is the line's number, the header not counted, from 1 on."""
    cases, lines, took = [], lines_of(path), "iteration time (ms)"
    names = next(csv.reader(lines), [])
    for line, cells in enumerate(csv.reader(lines)):
        row = dict(zip(names, cells, strict=False))
        if line and any(given(row, name) for name in row):
            gbs, mbs, dim, heads, layers, seq, tp, dp, pp = (int(real(row, name)) for name in VTRAIN)
            x = Layout(pp, 1, tp, 1, 0, mbs, gbs, recompute="full", sp=False, dp=dp)
            published = dict(step_s=real(row, took) / 1e3) if given(row, took) else {}
            m = gpt(dim, layers, heads, 50257, seq)
            cases.append(Case(str(line), m, x, GPUS["a100-80-half"], RECIPES["vtrain"], published))
    return cases


def counted_flops(case: Case) -> float:
    """FLOPs of a token as the source of a row counts them: S all that is done, L and A half of attention's square."""
    m, letter = case.shape, case.id[0]
    if letter == "S":  # 96 B s l h^2 (1 + s / 6h + V / 16 l h), Narayanan et al., section 5.1
        return 96 * m.n_layers * m.dim**2 * (1 + m.seq_len / 6 / m.dim + m.vocab_size / 16 / m.n_layers / m.dim)
    return flops_per_token(m)[0] - 6 * m.n_layers * m.seq_len * m.dim * (letter in "LA")


def predict(case: Case) -> dict[str, float]:
    """The five figures."""
    seconds = step_seconds(case.shape, case.layout, case.gpu, case.recipe).step
    tokens = case.layout.global_batch_size * case.shape.seq_len / case.layout.world / seconds
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
        size, x = f"{total_weights(case.shape) / 1e9:.1f}e9", case.layout
        found[f"{size} weights, {x.world} GPUs, batch {x.global_batch_size}"].append(index)
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
    """Print a line for each run, the errors, the choices among vTrain's layouts, and what is left out."""
    cases, lines = read_rows(config.rows), read_vtrain(config.vtrain)
    found = [predict(case) for case in cases + lines]
    rows, errors = [["id", "as if by", "figure", "published", "predicted", "time", "memory, GiB", "error"]], {}
    for case, predicted in zip(cases + lines, found, strict=True):
        name = time_figure(case)
        kind = KINDS.get(case.recipe.name, "time, other software")
        row = [case.id, case.recipe.name, "", "", "", "", f"{predicted['mem_gib']:.1f}", ""]
        if name:
            off = error(case, predicted, name)
            row[2:6] = name, f"{case.published[name]:.4g}", f"{predicted[name]:.4g}", f"{off:+.1%}"
            errors.setdefault(kind, []).append(off)
        if "mem_gib" in case.published:
            row[7] = f"{error(case, predicted, 'mem_gib'):+.1%}"
        rows.append(row)
    print(f"{table(rows)}\n\n(time: error of the step's time, also where the source gives a rate)\n")
    if both := errors.get("time, S", []) + errors.get("time, K", []):
        errors["time, S and K"] = both
    head = ["errors of", "runs", "mean", "worst", "bias"]
    print(table([head, *(summary(name, found) for name, found in errors.items())]), end="\n\n")
    timed = [(case, predicted["step_s"]) for case, predicted in zip(lines, found[len(cases) :], strict=True)]
    timed = [(case, predicted) for case, predicted in timed if case.published]
    rows = [["vTrain group", "layouts", "mean error", "Spearman", "regret"]]
    for name, indices in groups_of([case for case, _ in timed]).items():
        one, two = ([timed[i][0].published["step_s"] for i in indices], [timed[i][1] for i in indices])
        mean = sum(abs(b / a - 1) for a, b in zip(one, two, strict=True)) / len(one)
        correlation, regret = choice(one, two)
        rows.append([name, str(len(one)), f"{mean:.1%}", f"{correlation:.3f}", f"{regret:.1%}"])
    print(f"{table(rows)}\n\n{LEFT_OUT}")
    if config.json:
        entries = [dict(id=c.id, published=c.published, predicted=p) for c, p in zip(cases + lines, found, strict=True)]
        for entry in entries[len(cases) :]:
            entry["id"], entry["predicted"] = int(entry["id"]), dict(step_s=entry["predicted"]["step_s"])
        Path(config.json).write_text(json.dumps(entries, indent=1) + "\n")


def main(_name: str, argv: list[str]):
    """The command line."""
    bench(parse(Config, argv))
