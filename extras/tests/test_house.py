"""The repository's rules, checked on its files: which folder may import which, lengths of files, links of pages."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from extras.variants.__main__ import table

ROOT = Path(__file__).parents[2]
STEPS = sorted(path.stem for path in ROOT.glob("step0*.py"))
OUTSIDE = {"torch", "tqdm", "matplotlib", "datasets", "numpy"} | sys.stdlib_module_names
OUTSIDE |= {"pyarrow", "huggingface_hub"}  # parts of `datasets`: its tables, and its client of the hub
MAY = {  # part of the repository (`room_of`) -> the other parts that it may import
    "step": {"common"},
    "common": set(),
    "variants": {"step", "common"},
    "services": {"step", "common", "variants", "theory"},
    "theory": {"common"},
    "tests": {"step", "common", "variants", "services", "theory", "labs", "proof"},
    "labs": {"common"},
    "extras": {"step", "common", "services"},  # its __main__
    "proof": {"step", "common"},  # tests/ at the root
}
# The planner (extras.plan.plan) may also import these modules, because it plans runs with techniques.
DOORS = {"step07_moe_ep", "extras.services.seam", "extras.variants.step07.expert_presets"}


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
    """The part of the repository, a key of MAY, to which a module belongs; "" for a module that is not ours."""
    first, *rest = module.split(".")
    if first == "extras":
        return rest[0] if rest and rest[0] in MAY else first
    return {"tests": "proof"}.get(first, "step" if first in STEPS else first if first == "common" else "")


def tree_of(module: str) -> ast.Module:
    """Parse the file of a module."""
    return ast.parse(FILES[module].read_text())


def imported(module: str) -> set[str]:
    """All modules that a file imports, ours with full names."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inner | ({node.module} if len(inner) < len(node.names) else set())
    return found


def lines_of(module: str) -> list[str]:
    """The lines of a file."""
    return FILES[module].read_text().splitlines()


@pytest.mark.parametrize("module", [name for name in FILES if room_of(name) in MAY])
def test_imports_point_one_way(module):
    """Of ours, a module imports its own part and what MAY lists (plan.py: also DOORS); a step, only earlier steps."""
    room = room_of(module)
    for name in imported(module) - (DOORS if module == "extras.plan.plan" else set()):
        target = room_of(name)
        assert not target or target == room or target in MAY[room], f"{module} imports {name}"
        assert target != "step" or room != "step" or name < module, f"{module} imports {name}, which is not earlier"
        if room in ("step", "common") and not target:
            assert name.split(".")[0] in OUTSIDE, f"{module} imports {name}"
    assert room not in ("step", "common", "proof") or not re.search(r"\bextras\b", FILES[module].read_text())


def test_imports_form_no_circle():
    """No modules import one another in a circle. If some did, the error would list them."""
    TopologicalSorter({module: imported(module) - {module} for module in FILES}).prepare()


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_a_docstring_a_mechanism_and_train(step):
    """A step's docstring has at most 36 lines, and `train` at most 45. `train` comes last, and `main` starts it."""
    doc, *_, train, start = tree_of(step).body
    assert isinstance(doc, ast.Expr) and doc.end_lineno <= 36
    assert train.name == "train" and train.end_lineno - train.lineno + 1 <= 45
    assert ast.unparse(start) == "if __name__ == '__main__':\n    main(train, Config)"


@pytest.mark.parametrize("rooms, most", [(("step", "common"), 2900), (("proof",), 3600), (tuple(MAY), 21_000)])
def test_python_is_limited(rooms, most):
    """Limit the lines of the course, of its tests, and of all Python: each limit may only be lowered."""
    assert sum(len(lines_of(module)) for module in FILES if room_of(module) in rooms) <= most


@pytest.mark.parametrize("module", [name for name in FILES if name.startswith("extras.variants.step0")])
def test_a_technique_is_one_small_file(module):
    """A technique's file has at most 165 lines."""
    assert len(lines_of(module)) <= 165


def test_the_table_of_techniques_is_what_their_files_say():
    """extras/variants/README.md is what `python -m extras.variants` prints."""
    assert (ROOT / "extras/variants/README.md").read_text() == table() + "\n"


@pytest.mark.parametrize("page", [p for at in ("*.md", "tests/*.md", "extras/**/*.md") for p in sorted(ROOT.glob(at))])
def test_links_of_a_page_lead_somewhere(page):
    """Each link leads to a file or folder, and to a heading if it names one. README.md and RESULTS.md are short."""
    most = {"README.md": 120, "RESULTS.md": 250}.get(str(page.relative_to(ROOT)), 999)
    assert len(page.read_text().splitlines()) <= most
    for target, anchor in re.findall(r"(?<!\w)\[[^]]*\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        titles = re.findall(r"^#+ (.*)", there.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in titles], anchor
