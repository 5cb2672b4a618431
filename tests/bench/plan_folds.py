"""The planner's fitted constants, chosen on one half of the published step times and judged on the other.

    python -m tests.bench plan_folds

For each GPU the constants that no data sheet gives (theory/gpus.py) are chosen anew on every second row, by the least
mean error of the step's time, from a start that knows no row. The other half is then predicted with them.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from services.flags import main as run_main
from services.tables import table
from tests.bench import plan
from tests.bench.plan import Case, choice, error, groups_of, predict, read_rows, read_vtrain, time_figure

START = dict(matmul=0.7, hbm=0.8, within=0.8)  # of a large matmul; of the data sheet's bandwidths
SHEETS = {  # hbm and NVLink, one way, bytes/s
    "A100": (2.0e12, 300e9),
    "H100": (3.35e12, 450e9),
    "H100, 500 W": (2.4e12, 450e9),
    "B200": (8e12, 900e9),
}
NAMES = {"a100-80": "A100", "a100-80-half": "A100", "h100-80": "H100", "h100-96-500w": "H100, 500 W", "b200": "B200"}
FEW = 12  # rows of a half, below which only `matmul` is chosen


@dataclass
class Config:
    """Flags of this benchmark."""

    rows: str = str(Path(plan.HERE, "rows.csv"))  # as in `plan`
    vtrain: str = str(Path(plan.HERE, "vtrain_multi_node.csv"))  # as in `plan`


class Constants(NamedTuple):
    """What is chosen."""

    matmul: float
    hbm: float
    within: float


def with_constants(case: Case, constants: Constants) -> Case:
    """The same run on such a GPU."""
    return case._replace(gpu=case.gpu._replace(**constants._asdict()))


def time_error(case: Case, constants: Constants) -> float:
    """Of the step's time, predicted over published, less 1."""
    case = with_constants(case, constants)
    return error(case, predict(case), time_figure(case))


def mean_error(cases: list[Case], constants: Constants) -> float:
    """The mean size of the errors."""
    return sum(abs(time_error(case, constants)) for case in cases) / len(cases)


def choose(cases: list[Case], sheet: tuple[float, float]) -> Constants:
    """The constants with the least mean error, one after another in ever smaller steps; of few rows only `matmul`."""
    best = Constants(START["matmul"], START["hbm"] * sheet[0], START["within"] * sheet[1])
    least, names = mean_error(cases, best), Constants._fields if len(cases) >= FEW else ("matmul",)
    for step in (0.1, 0.05, 0.02):
        better = True
        while better:
            better = False
            for name in names:
                for factor in (1 + step, 1 / (1 + step)):
                    tried = best._replace(**{name: getattr(best, name) * factor})
                    if tried.matmul <= 1 and tried.hbm <= sheet[0] and (found := mean_error(cases, tried)) < least:
                        best, least, better = tried, found, True
    return best


def bench(config: Config):
    """Print, by GPU and half, the constants, their error on the half that chose them and on the other."""
    by_gpu: dict[str, list[Case]] = defaultdict(list)
    lines = read_vtrain(config.vtrain)
    for case in read_rows(config.rows) + lines:
        if time_figure(case):
            name = next(key for key, gpu in plan.GPUS.items() if gpu == case.gpu)
            by_gpu[NAMES[name]].append(case)
    rows = [["GPU", "chosen on", "rows", "matmul", "hbm, TB/s", "within, GB/s", "error there", "error on the others"]]
    judged: dict[str, float] = {}  # by id
    for name, cases in tqdm(by_gpu.items(), disable=None, leave=False):
        halves = {"odd rows": cases[::2], "even rows": cases[1::2]}
        for (half, mine), others in zip(halves.items(), reversed(halves.values()), strict=True):
            if mine and others:
                found = choose(mine, SHEETS[name])
                judged |= {case.id: predict(with_constants(case, found))["step_s"] for case in others}
                errors = [f"{mean_error(part, found):.1%}" for part in (mine, others)]
                values = [f"{found.matmul:.2f}", f"{found.hbm / 1e12:.2f}", f"{found.within / 1e9:.0f}"]
                rows.append([name, half, str(len(mine)), *values, *errors])
    print(f"{table(rows)}\n")
    rows = [["vTrain group", "lines", "mean error", "Spearman", "regret"]]
    for name, indices in groups_of(lines).items():
        took = [lines[i].published["step_s"] for i in indices]
        predicted = [judged[lines[i].id] for i in indices]
        mean = sum(abs(b / a - 1) for a, b in zip(took, predicted, strict=True)) / len(took)
        correlation, regret = choice(took, predicted)
        rows.append([name, str(len(took)), f"{mean:.1%}", f"{correlation:.3f}", f"{regret:.1%}"])
    print(f"{table(rows)}\n\n(each line predicted with the constants that the other half chose)")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
