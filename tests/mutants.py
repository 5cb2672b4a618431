"""Does a test look at each line? Changes one token at a time, and lets the tests say which change they do not notice.

    python -m tests.mutants --seed 1 --count 20                     any file of the project
    python -m tests.mutants --seed 1 --count 20 step03_zero.py      these files alone

A mutant is the project, as last committed, with one change: another operator or constant, the other branch of an
`if`, a call left out. First come the tests that name its module, those that name it most often before the others, then
the rest of the default run. A mutant that passes them all *lives*: either it changes nothing that matters, or a test
is missing. (DeMillo, Lipton, Sayward 1978, "Hints on test data selection".)
"""

import argparse
import ast
import copy
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
SOURCES = ("step0*.py", "common/*.py", "services/*.py", "theory/*.py")
SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
SWAPS |= {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
SWAPS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}
LIMIT = 1200  # seconds for one run of tests; a mutant that hangs is noticed


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each node of a file that can be changed, with what it becomes."""
    for node in ast.walk(tree):
        new = copy.deepcopy(node)
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            new.op = SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            new.ops[0] = SWAPS[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            new.value = not node.value if isinstance(node.value, bool) else node.value + 1
        elif isinstance(node, ast.If | ast.IfExp):
            node = node.test
            new = ast.UnaryOp(ast.Not(), node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            new = ast.Constant(None)
        else:
            continue
        yield node, ast.fix_missing_locations(new)


def mutated(text: str, node: ast.AST, new: ast.AST) -> str:
    """The file with `new` in the place of `node`. (Columns count bytes.)"""
    lines = text.encode().splitlines(keepends=True)
    start, end = (sum(map(len, lines[: line - 1])) for line in (node.lineno, node.end_lineno))
    source = text.encode()
    code = f"({ast.unparse(new)})".encode()
    return (source[: start + node.col_offset] + code + source[end + node.end_col_offset :]).decode()


def first_failure(clone: Path, files: list[str]) -> str:
    """The first test that fails, "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, cwd=clone, start_new_session=True, **pipes) as run:
        try:
            out, _ = run.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # with its ranks, which wait for one another
            return f"no end within {LIMIT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
    return "" if run.returncode == 0 else failed[1] if failed else f"exit status {run.returncode}"


def nearest(path: Path, tests: dict[str, str]) -> list[str]:
    """The files of `tests` (name -> text) that name a module: those of the step itself first, then by how often."""
    names = {test: len(re.findall(rf"\b{path.stem}\b", text)) for test, text in tests.items()}
    return sorted(filter(names.get, tests), key=lambda test: (path.stem[:6] not in test, -names[test]))


def main():
    """Draw mutants, print each with the test that notices it, or LIVES."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20, help="how many mutants")
    parser.add_argument("--quick", action="store_true", help="only the tests that name the module of the change")
    parser.add_argument("files", nargs="*", help="where to change something; without it anywhere")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "repo"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        paths = [clone / file for file in args.files] or [p for names in SOURCES for p in sorted(clone.glob(names))]
        texts = {path: path.read_text() for path in paths}
        places = [(path, *change) for path, text in texts.items() for change in changes(ast.parse(text))]
        drawn = random.Random(args.seed).sample(places, min(args.count, len(places)))
        tests, alive = {f"tests/{t.name}": t.read_text() for t in sorted((clone / "tests").glob("test_*.py"))}, 0
        for path, node, new in tqdm(drawn, desc="mutants", file=sys.stderr):
            path.write_text(mutated(texts[path], node, new))
            near = nearest(path, tests)
            far = [] if args.quick else [test for test in tests if test not in near]
            noticed = next((found for files in (near, far) if files and (found := first_failure(clone, files))), "")
            alive += not noticed
            was, now = (" ".join(ast.unparse(x).split())[:60] for x in (node, new))
            print(f"{path.relative_to(clone)}:{node.lineno}: {was} -> {now}: {noticed or 'LIVES'}", flush=True)
            path.write_text(texts[path])
    print(f"{len(drawn) - alive} of {len(drawn)} noticed")


if __name__ == "__main__":
    main()
