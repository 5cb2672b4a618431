"""The rules of the house, on the parsed source: who may import whom, how much a reader has to open, links of pages."""

import ast
import difflib
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

from extras.variants.__main__ import table

ROOT = Path(__file__).parents[2]
STEPS = sorted(path.stem for path in ROOT.glob("step0*.py"))
OUTSIDE = {"torch", "tqdm", "matplotlib", "datasets", "numpy"}
STANDARD = {"argparse", "ast", "collections", "contextlib", "dataclasses", "functools", "hashlib", "importlib"}
STANDARD |= {"inspect", "itertools", "json", "math", "os", "pathlib", "re", "sys", "sysconfig", "time", "types"}
STANDARD |= {"typing"}
MAY = {  # room -> the rooms that it may import, beside itself
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
DOORS = {  # the planner's command loads the techniques, for their schedules, models and refusals
    ("extras.theory.plan", "step07_moe_ep"),
    ("extras.theory.plan", "extras.services.seam"),
    ("extras.theory.plan", "extras.variants.step07.expert_presets"),
}
LOADERS = {"extras.services.seam", "extras.services.places", "extras.__main__", "extras.variants.__main__"}


def module_of(path: Path) -> str:
    """The name under which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
FILES = {
    module_of(path): path
    for folder in ("", *ROOMS)
    for path in sorted((ROOT / folder).glob("**/*.py" if folder else "*.py"))
}
VARIANTS = [name for name in FILES if name.startswith("extras.variants.step0")]


def room_of(module: str) -> str:
    """ "step", "common", "proof"; below extras/ "variants", "services", ...; or "" for what is not ours."""
    first, *rest = module.split(".")
    if first == "extras":
        return rest[0] if rest and rest[0] in MAY else first
    return {"tests": "proof"}.get(first, "step" if first in STEPS else first if first == "common" else "")


@lru_cache
def tree_of(module: str) -> ast.Module:
    """The parsed file."""
    return ast.parse(FILES[module].read_text())


def by_string(tree: ast.Module) -> list[str]:
    """Modules that are imported, or taken where Python keeps those, by a string; "" for one that is made as it runs."""
    given = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            call = ast.unparse(node.func)
            imports = call.split(".")[-1] in ("import_module", "__import__", "run_module")
            given += [node.args[0]] if imports or call == "sys.modules.get" else []
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            given += [node.slice]
    return [node.value if isinstance(node, ast.Constant) else "" for node in given]


@lru_cache
def imported(module: str) -> set[str]:
    """All modules that a file imports, ours with full names, wherever and however it does so."""
    found = {name for name in by_string(tree_of(module)) if name in FILES}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inner | ({node.module} if len(inner) < len(node.names) else set())
    return found


def closure(module: str) -> set[str]:
    """Our modules that are loaded with one."""
    seen, todo = set(), {module}
    while todo:
        seen |= todo
        todo = {name for one in todo for name in imported(one) if name in FILES} - seen
    return seen


def lines_of(module: str) -> list[str]:
    """The lines of a file."""
    return FILES[module].read_text().splitlines()


def train_of(step: str) -> ast.FunctionDef:
    """A step's `train`, which is the last function of its file."""
    node = tree_of(step).body[-2]
    assert node.name == "train"
    return node


def text_of_train(step: str) -> list[str]:
    """The lines of `train` without comments and docstring, as `ast` writes them."""
    return [line for node in train_of(step).body[1:] for line in ast.unparse(node).splitlines()]


@pytest.mark.parametrize("step", STEPS)
def test_a_reader_can_open_everything_that_a_step_loads(step):
    """From common, and from steps up to this one; and the last step loads all of common."""
    loaded = closure(step) | {"common"}
    assert {room_of(module) for module in loaded} == {"step", "common"}
    assert all(module <= step for module in loaded if room_of(module) == "step"), "a later step"
    course = {module for module in FILES if room_of(module) in ("step", "common")}
    assert step != STEPS[-1] or loaded == course


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_a_docstring_a_mechanism_and_train(step):
    """The docstring has at most 36 lines, `train` at most 45; `train` comes last, and `main` starts it."""
    body, train = tree_of(step).body, train_of(step)
    assert isinstance(body[0], ast.Expr) and body[0].end_lineno <= 36
    assert train.end_lineno - train.lineno + 1 <= 45
    assert ast.unparse(body[-1]) == "if __name__ == '__main__':\n    main(train, Config)"


@pytest.mark.parametrize("step", STEPS)
def test_the_loop_is_on_the_page(step):
    """Mesh, model, optimizer, batch, loss, norm, clip, update: `train` itself says all of it, in this order."""
    text = "\n".join(text_of_train(step))
    verbs = ["choose_device(config)", "PRESETS[", "Data(", "Decoder(shape)", "RECOMPUTE[", "ptimizer", "run.steps("]
    verbs += ["data.batch(", "n_targets = (targets != IGNORE).sum().clamp(min=1)", "xs, ys", "norm = ", "clip_coef = "]
    verbs += ["learning_rate(", "optimizer.step(", "optimizer.zero_grad(", "run.record("]
    places = [text.find(verb) for verb in verbs]
    assert -1 not in places and places == sorted(places), dict(zip(verbs, places, strict=True))


@pytest.mark.parametrize("step, following", list(pairwise(STEPS)))
def test_neighbours_differ_by_their_lesson(step, following):
    """At most 16 lines of `train` come, and 16 go: what both have stands in both alike, letter by letter."""
    lines = list(difflib.ndiff(text_of_train(step), text_of_train(following)))
    came, went = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    assert came <= 16 and went <= 16, (came, went)


@pytest.mark.parametrize("module", [name for name in FILES if room_of(name) in MAY])
def test_imports_point_one_way(module):
    """Steps import common and earlier steps; variants steps; services both, and theory; theory nothing of them."""
    room = room_of(module)
    for name in imported(module) - {name for owner, name in DOORS if owner == module}:
        target = room_of(name)
        assert not target or target == room or target in MAY[room], f"{module} imports {name}"
        assert target != "step" or room != "step" or name < module, f"{module} imports {name}, which is not earlier"
        if room in ("step", "common") and not target:
            assert name.split(".")[0] in OUTSIDE | STANDARD, f"{module} imports {name}"
    if room in ("step", "common", "variants", "services", "theory"):  # a string that is made would hide an import
        assert "" not in by_string(tree_of(module)) or module in LOADERS


def test_there_is_no_circle():
    """The modules can be put in an order in which each imports earlier ones only, also through theory's doors."""
    waits = {
        name: {other for other in imported(name) if other in FILES} - {name}
        for name in FILES
        if room_of(name) not in {"", "tests", "labs"}
    }
    while ready := [name for name, needs in waits.items() if not needs & waits.keys()]:
        for name in ready:
            del waits[name]
    assert not waits, f"a circle among {sorted(waits)}"
    assert all(name in imported(module) for module, name in DOORS), "a door that nobody uses"


@pytest.mark.parametrize("rooms, most", [(("step", "common"), 2900), (("proof",), 3600)])
def test_the_course_and_its_proof_are_small(rooms, most):
    """Steps and common; tests/. And none of them names what surrounds a run."""
    modules = [module for module in FILES if room_of(module) in rooms]
    assert sum(len(lines_of(module)) for module in modules) <= most
    assert not [module for module in modules if re.search(r"\bextras\b", FILES[module].read_text())]


def test_all_python_is_limited():
    """What is added takes the place of something else: the limit only falls."""
    assert sum(len(lines_of(module)) for module in FILES) < 26_900


@pytest.mark.parametrize("module", [name for name in FILES if room_of(name) not in ("", "proof", "tests", "labs")])
def test_public_names_have_docstrings(module):
    """Every public function, class and method says what it is, and so does the file; and nothing is `global`."""
    tree = tree_of(module)
    assert ast.get_docstring(tree), "the file"
    public = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (part for owner in public for part in owner.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}:{node.lineno} {node.name}"
    assert room_of(module) == "services" or not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("module", VARIANTS)
def test_a_technique_is_one_small_file_of_one_shape(module):
    """At most 165 lines: the mechanism, then its record, which is at most half of the code, then `attach`.

    It is in the folder of the first step that has it. A library says so, and is imported by variants alone.
    """
    body, doc = tree_of(module).body, ast.get_docstring(tree_of(module))
    assert len(lines_of(module)) <= 165
    code = [node for node in body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "name", "") or ast.unparse(getattr(node, "targets", [node])[0]) for node in code]
    if doc.startswith("A library"):
        users = {room_of(name) for name in FILES if module in imported(name)} - {"tests"}
        assert users == {"variants"} and not {"Flags", "prepare", "attach"} & {*names}
        return
    assert "--" in doc, "no flag"
    ends = ["TRIED", "COMPUTED", "BESIDE", "NEEDS", "REFUSES", "settle", "check", "prepare", "attach"]
    found = [name for name in names if name in ends]
    assert found == sorted(found, key=ends.index), "the mechanism comes first"
    record = {"Flags", *ends[:-2]}
    sizes = {name: node.end_lineno - node.lineno + 1 for name, node in zip(names, code, strict=True)}
    assert 2 * sum(size for name, size in sizes.items() if name in record) <= sum(sizes.values())
    for node in (part for owner in code if getattr(owner, "name", "") == "Flags" for part in owner.body[1:]):
        assert "  # " in lines_of(module)[node.lineno - 1], f"{node.target.id} has no help"
    since = [
        node.module for node in body if isinstance(node, ast.ImportFrom) if "Config" in {a.name for a in node.names}
    ]
    since += [a.name for node in body if isinstance(node, ast.Import) for a in node.names if a.asname]
    assert "SINCE" not in names or module.split(".")[2] in {name[:6] for name in since}


def test_the_table_of_techniques_is_what_their_files_say():
    """`python -m extras.variants` writes README.md anew; each file has a flag, or names one."""
    assert (ROOT / "extras/variants/README.md").read_text() == table() + "\n"


@pytest.mark.parametrize("page", [p for at in ("*.md", "tests/*.md", "extras/**/*.md") for p in sorted(ROOT.glob(at))])
def test_links_of_a_page_lead_somewhere(page):
    """To a file or folder of the repository, and there to a heading. And the front pages are short."""
    most = {"README.md": 120, "RESULTS.md": 250}.get(str(page.relative_to(ROOT)), 999)
    assert len(page.read_text().splitlines()) <= most
    for target, anchor in re.findall(r"(?<!\w)\[[^]]*\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        titles = re.findall(r"^#+ (.*)", there.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in titles], anchor
