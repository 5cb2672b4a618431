"""The rules of the house, checked on the parsed source: what a step is, who may import whom, how long a room may be."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.diff import ROOT, changed, path_of, train_of

STEPS = range(1, 8)
MOST_LINES = {
    **{"README.md": 200, "step01_single_gpu.py": 260, "step02_ddp.py": 260, "step03_zero.py": 380},
    **{"step04_tp_sp.py": 360, "step05_cp_ring.py": 360, "step06_pipeline.py": 430, "step07_moe_ep.py": 330},
}
ROOMS = ("common", "theory", "services")


def lines_of(path: Path) -> int:
    """Raw lines of a file."""
    return len(path.read_text().splitlines())


def room_of(module: str) -> str:
    """ "step04", "common", "theory", "services", "tests", or "" for what is not ours."""
    first = module.split(".")[0]
    return first[:6] if re.match(r"step0[1-7]_", first) else first if first in (*ROOMS, "tests") else ""


def imports_of(path: Path) -> list[tuple[str, list[str], int]]:
    """(module, names, line) of every import of ours in a file, wherever it stands; no names for `import module`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, [], node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", [alias.name for alias in node.names], node.lineno))
    return [entry for entry in found if room_of(entry[0])]


def sources(room: str) -> list[Path]:
    """The files of a room."""
    return sorted((ROOT / room).glob("*.py"))


@pytest.mark.parametrize("name", MOST_LINES)
def test_no_chapter_is_longer_than_an_evening(name):
    """Raw lines of README and of each step."""
    assert lines_of(ROOT / name) <= MOST_LINES[name]


def test_the_ground_floor_is_small():
    """No file of common/ has more than 300 lines, and steps and common together are at most 3,750."""
    long = {path.name: lines_of(path) for path in sources("common") if lines_of(path) > 300}
    assert not long
    path = sum(lines_of(path_of(step)) for step in STEPS) + sum(map(lines_of, sources("common")))
    assert path <= 3750


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_a_docstring_a_mechanism_and_train(step):
    """The docstring comes first; `train` comes last, before the guard, has at most 50 lines, and `main` starts it."""
    body = ast.parse(path_of(step).read_text()).body
    assert isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant), "no docstring"
    assert isinstance(body[-2], ast.FunctionDef) and body[-2].name == "train"
    assert ast.unparse(body[-1]) == "if __name__ == '__main__':\n    main(train, Config)"
    assert len(train_of(step)) <= 50
    (config,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "Config"]
    assert config is next(node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef))


@pytest.mark.parametrize("step", STEPS)
def test_the_loop_is_on_the_page(step):
    """`train` itself loops over the steps and calls for batch, gradients, norm and update, in this order."""
    text = "\n".join(train_of(step))
    verbs = ["start(config", "Decoder(run.shape)", "run.steps(", "run.batch(", "run.global_loss("]
    verbs += ["norm(", "run.accepts(", "optimizer.step(", "run.end_step(", "run.trained()"]
    places = [text.find(verb) for verb in verbs]
    assert -1 not in places and places == sorted(places), dict(zip(verbs, places, strict=True))


@pytest.mark.parametrize("step, other", list(pairwise(STEPS)))
def test_the_diff_of_neighbours_is_the_message(step, other):
    """At most 25 lines of `train` come and 25 go, white space ignored."""
    counts = Counter(line[0] for line in changed(step, other))
    assert counts["+"] <= 25 and counts["-"] <= 25, counts


def test_the_command_of_the_readme_prints_the_diff():
    """python -m tests.diff 3 4 shows the line that cuts the matrices."""
    command = [sys.executable, "-m", "tests.diff", "3", "4"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "+        shard_tensors(model, mesh, config.sp, config.tp_overlap)" in out


@pytest.mark.parametrize("step", STEPS)
def test_a_step_imports_entry_points_only(step):
    """From common, and of earlier steps at most 4 names of one and 12 in all (the chain of Configs is not counted)."""
    names = Counter()
    for module, imported, line in imports_of(path_of(step)):
        room = room_of(module)
        where = f"{path_of(step).name}:{line}"
        assert room == "common" or room.startswith("step"), f"{where} imports {module}"
        if room.startswith("step"):
            assert int(room[4:]) < step, f"{where} imports a later step"
            names[room] += len(imported)
            if not imported:  # `import step03_zero as step03`, for its Config alone
                text = path_of(step).read_text()
                used = set(re.findall(rf"\b{room}\.(\w+)", text)) - {"py"}
                assert used <= {"Config"}, f"{where}: {room}.{used}"
    assert all(count <= 4 for count in names.values()), names
    assert names.total() <= 12, names


ROOM_FILES = [path for room in ROOMS for path in sources(room)]


@pytest.mark.parametrize("path", ROOM_FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_arrows_point_down(path):
    """common imports nothing of ours but, in trainer.py, services and theory; theory shapes alone; services no step."""
    room = path.parent.name
    for module, _, line in imports_of(path):
        target, where = room_of(module), f"{room}/{path.name}:{line} imports {module}"
        assert not target.startswith("step") and target != "tests", where
        if room == "common" and path.name != "trainer.py":
            assert target == "common", where
        if path.name == "model.py":
            raise AssertionError(where)
        if room == "theory":
            assert target == "theory" or module in ("common.model", "common.moe", "common.schedules"), where


def test_there_is_no_circle():
    """The modules of steps, common, services and theory can be put in an order in which each imports earlier ones."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
             for p in [*(path_of(step) for step in STEPS), *(q for room in ROOMS for q in sources(room))]}  # fmt: skip
    waits = {}
    for name, path in files.items():
        waits[name] = set()
        for module, names, _ in imports_of(path):
            inner = {f"{module}.{n}" for n in names} & files.keys()
            waits[name] |= inner or ({module} & files.keys())
        waits[name] -= {name, "common", "services", "theory"}
    while ready := [name for name, needs in waits.items() if not needs & waits.keys()]:
        for name in ready:
            del waits[name]
    assert not waits, f"a circle among {sorted(waits)}"


FORBIDDEN = {
    1: "mesh|pipeline|experts|replica",
    2: "pipeline|expert|stage",
    3: "pipeline|expert",
    4: "pipeline|expert|later|zero.bubble",
    5: "pipeline|expert|zero.bubble",
    6: "expert",
}


@pytest.mark.parametrize("step", FORBIDDEN)
def test_no_step_serves_a_later_one(step):
    """No name and no comment in a step's code speaks of what only a later step brings."""
    text = path_of(step).read_text()
    tree = ast.parse(text)
    body = "\n".join(text.splitlines()[tree.body[0].end_lineno :])
    (config,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config"]
    flags = ast.get_source_segment(text, config)
    found = re.findall(rf".*(?:{FORBIDDEN[step]}).*", body.replace(flags, ""), re.IGNORECASE)
    assert not found


def test_public_names_have_docstrings():
    """Every public function, class and method on the reader's path says what it is."""
    silent = []
    for path in [*(path_of(step) for step in STEPS), *sources("common"), *sources("theory"), *sources("services")]:
        for node in ast.walk(ast.parse(path.read_text())):
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node) and not inside(path, node):
                silent.append(f"{path.name}:{node.lineno} {node.name}")
    assert not silent


def inside(path: Path, node: ast.AST) -> bool:
    """Whether a definition stands inside a function."""
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    return any(f.lineno < node.lineno <= f.end_lineno for f in functions)


def test_no_state_in_modules_and_no_environment_in_models():
    """Nothing on the path is `global`; only services read the environment."""
    for path in [*(path_of(step) for step in STEPS), *sources("common"), *sources("theory")]:
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], path.name
        reads = "os.environ" in path.read_text()
        assert not reads, f"{path.name} reads the environment"


@pytest.mark.parametrize("workers", [1, 0])
def test_a_run_of_tests_names_its_slowest(tmp_path, workers):
    """Wall time and five tests, those of other processes, too; after that pytest's own last line."""
    ordered = "".join(f"def test_{n}():\n    time.sleep({n} / 50)\n\n" for n in range(7))
    (tmp_path / "test_some.py").write_text(f"import time\n\n{ordered}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.slowest", "-c", os.devnull, "-n", str(workers)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows, last = done.stdout.splitlines()[-7:]
    assert re.fullmatch(r"=+ \d+ s of wall time; the slowest of 7 tests =+", head), done.stdout
    assert all(re.fullmatch(r" +\d+\.\d\d s  test_some\.py::test_\d", row) for row in rows)
    assert {row.split()[2] for row in rows} & {"test_some.py::test_6"} and last.startswith("7 passed in ")
