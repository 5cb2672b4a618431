"""The repository's rules, checked on its files: which folder may import which, sizes, links of
pages.
"""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = sorted(path.stem for path in ROOT.glob("step0*.py"))
# pyarrow and huggingface_hub are parts of `datasets`: its tables, and its client of the hub
OUTSIDE = {"torch", "tqdm", "matplotlib", "datasets", "numpy", "pyarrow", "huggingface_hub"}
OUTSIDE |= sys.stdlib_module_names
COURSE = {"step", "common"}
MAY = {  # room (`room_of`) -> the other rooms that it may import
    "step": {"common"},
    "common": set(),
    "proof": COURSE,  # tests/ at the root
    "techniques": COURSE,
    "loops": COURSE | {"techniques", "extras"},
    "tools": COURSE
    | {"extras", "plan"},  # the dry run takes GPUs and the law of FLOPs from the planner
    "plan": {"common", "extras"},
    "labs": {"common"},
    "pages": COURSE | {"extras", "techniques", "tools", "proof"},  # four ranks of tests/pool.py
    "bench": COURSE | {"extras", "tools", "plan", "proof"},
    "extras": COURSE,  # its __main__
    "tests": COURSE
    | {"proof", "techniques", "loops", "tools", "plan", "labs", "pages", "bench", "extras"},
}
NODES = {  # rooms -> the most syntax nodes
    ("step", "common"): 21_825,
    ("proof",): 26_100,
    tuple(set(MAY) - {"step", "common", "proof"}): 45_000,
}


def module_of(path: Path) -> str:
    """The name under which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
FILES = {
    module_of(path): path
    for folder in ("", *ROOMS)
    for path in sorted((ROOT / folder).glob("**/*.py" if folder else "*.py"))
}


def room_of(module: str) -> str:
    """The room, a key of MAY, to which a module belongs; "" for a module that is not ours."""
    first, *rest = module.split(".")
    if first == "extras":
        return rest[0] if rest and rest[0] in MAY else first
    if first in STEPS:
        return "step"
    return {"tests": "proof", "common": "common"}.get(first, "")


def imported(module: str) -> set[str]:
    """All modules that a file imports, ours with full names."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} | (names & FILES.keys())
    return found


@pytest.mark.parametrize("module", [name for name in FILES if room_of(name) in MAY])
def test_imports_point_one_way(module):
    """Of ours, a module imports its own room and what MAY lists; a step, only earlier steps."""
    room = room_of(module)
    for name in imported(module):
        target = room_of(name)
        if target and target != room:
            assert target in MAY[room], f"{module} imports {name}"
        if target == "step" and room == "step":
            assert name < module, f"{module} imports {name}, which is not earlier"
        if room in COURSE and not target:
            assert name.split(".")[0] in OUTSIDE, f"{module} imports {name}"
    if room in COURSE | {"proof"}:
        assert not re.search(r"\bextras\b", FILES[module].read_text()), "the course names extras"


def test_imports_form_no_circle():
    """No modules import one another in a circle. If some did, the error would list them."""
    TopologicalSorter({module: imported(module) - {module} for module in FILES}).prepare()


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_a_docstring_a_mechanism_and_train(step):
    """`train` comes last, has at most 60 lines, and `main` starts it. (In steps 6 and 7 the part
    for a second evening follows.)
    """
    text = FILES[step].read_text()
    doc, *body, start = ast.parse(text).body
    before, _, second = text.partition("\n# --- The second part, for a second evening: ")
    assert bool(second) == (step in ("step06_pipeline", "step07_moe_ep"))
    train = [part for part in body if part.lineno <= before.count("\n")][-1]
    assert isinstance(doc, ast.Expr)
    assert train.name == "train" and train.end_lineno - train.lineno + 1 <= 60
    assert ast.unparse(start) == "if __name__ == '__main__':\n    main(train, Config)"


SKIPPED = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def nodes_of(tree: ast.AST) -> int:
    """The size of code in syntax nodes, without docstrings, operators and contexts."""
    size = 0
    for node in ast.walk(tree):
        if not isinstance(node, SKIPPED):
            size += 1
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            size -= 2
    return size


@pytest.mark.parametrize("rooms, most", NODES.items())
def test_code_is_limited(rooms, most):
    """Limit the nodes of the course, of its tests, and of extras."""
    size = sum(
        nodes_of(ast.parse(FILES[name].read_text())) for name in FILES if room_of(name) in rooms
    )
    assert size <= most, f"{size} nodes"


@pytest.mark.parametrize("module", [name for name in FILES if room_of(name) in COURSE])
def test_functions_of_the_course_are_short(module):
    """At most 200 nodes, but for `train`."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.FunctionDef) and node.name != "train":
            assert nodes_of(node) <= 200, f"{node.name}: {nodes_of(node)} nodes"


PAGES = [
    path for glob in ("*.md", "tests/*.md", "extras/**/*.md") for path in sorted(ROOT.glob(glob))
]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_a_page_lead_somewhere(page):
    """Each link leads to a file or folder, and to a heading if it names one. README and RESULTS are
    short.
    """
    text = page.read_text()
    most = {"README.md": 120, "RESULTS.md": 250}.get(str(page.relative_to(ROOT)), 999)
    assert len(text.splitlines()) <= most
    for target, anchor in re.findall(r"(?<!\w)\[[^]]*\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", linked.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in anchors, anchor


def test_each_technique_is_in_the_table():
    """A file of techniques/ or loops/ is named by a row of techniques/README.md."""
    table = (ROOT / "extras/techniques/README.md").read_text()
    for folder in ("techniques", "loops"):
        for path in (ROOT / "extras" / folder).glob("[a-z]*.py"):
            assert f"{path.name})" in table, path.name
