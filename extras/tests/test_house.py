"""The rules of the house, on the parsed source: who may import whom, and how much a reader has to open."""

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
    "services": {"step", "common", "variants", "theory", "labs"},
    "theory": {"common"},
    "tests": {"step", "common", "variants", "services", "theory", "labs"},
    "labs": {"common"},
    "extras": {"step", "common", "services"},  # its __main__
    "proof": {"step", "common"},  # tests/ at the root
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
    """ "step", "common", "proof"; below extras/ "variants", "services", ...; or "" for what is not ours."""
    first, *rest = module.split(".")
    if first == "extras":
        return rest[0] if rest and rest[0] in MAY else first
    return {"tests": "proof"}.get(first, "step" if first in STEPS else first if first == "common" else "")


VARIANTS = [name for name in FILES if name.startswith("extras.variants.step0")]


def tree_of(module: str) -> ast.Module:
    """The parsed file."""
    return ast.parse(FILES[module].read_text())


DOORS = {  # imports by string that no rule counts: what stands alone asks whether there is more beside it
    ("extras.theory.plan", "extras.services.seam"),  # schedules of variants
    ("extras.theory.plan", "extras.variants.step07.expert_presets"),  # and models
}
LOADERS = {"extras.services.seam", "extras.services.places", "extras.__main__"}  # of plug-ins, scripts


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


def imported_by(tree: ast.Module) -> set[str]:
    """All modules that a parsed file imports, ours with full names, wherever and however it does so."""
    found = {name for name in by_string(tree) if name in FILES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inner | ({node.module} if len(inner) < len(node.names) else set())
    return found


@lru_cache
def imported(module: str) -> set[str]:
    """Those of a file of ours, with their packages, but for the doors."""
    return {name for name in imported_by(tree_of(module)) if (module, name) not in DOORS}


def closure(module: str) -> set[str]:
    """Our modules that are loaded with one."""
    seen, todo = set(), {module}
    while todo:
        seen |= todo
        todo = {name for one in todo for name in imported(one) if name in FILES} - seen
    return seen


def lines_of(modules: set[str]) -> int:
    """Raw lines."""
    return sum(len(FILES[module].read_text().splitlines()) for module in modules)


def function(module: str, name: str) -> ast.FunctionDef:
    """A top-level function."""
    (found,) = [node for node in tree_of(module).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def text_of_train(step: str) -> list[str]:
    """The lines of `train` without comments and docstring, as `ast` writes them."""
    node = function(step, "train")
    node.body = node.body[1:]
    return ast.unparse(node).splitlines()


@pytest.mark.parametrize("step", STEPS)
def test_a_reader_can_open_everything_that_a_step_loads(step):
    """From common, and from steps up to this one."""
    loaded = closure(step) | {"common"}
    assert {room_of(module) for module in loaded} == {"step", "common"}
    assert all(module <= step for module in loaded if room_of(module) == "step"), "a later step"


def test_a_step_loads_all_of_common():
    """The last one does."""
    course = {module for module in FILES if room_of(module) in ("step", "common")}
    assert course == closure(STEPS[-1]) | {"common"}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_a_docstring_a_mechanism_and_train(step):
    """The docstring has at most 36 lines, `train` at most 45; `train` comes last, and `main` starts it."""
    body = tree_of(step).body
    assert isinstance(body[0], ast.Expr) and body[0].end_lineno <= 36
    assert re.search(rf"^Run it:    .*{step}.py", ast.get_docstring(tree_of(step)), re.M), "no launch line"
    train = function(step, "train")
    assert train is not None and train.end_lineno - train.lineno + 1 <= 45
    assert body[-2].name == "train"
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
    for name in imported(module):
        target = room_of(name)
        assert not target or target == room or target in MAY[room], f"{module} imports {name}"
        assert target != "step" or room != "step" or name < module, f"{module} imports {name}, which is not earlier"
        if room in ("step", "common") and not target:
            assert name.split(".")[0] in OUTSIDE | STANDARD, f"{module} imports {name}"


@pytest.mark.parametrize("room, most", [("course", 2900), ("proof", 3600)])
def test_the_course_and_its_proof_are_small(room, most):
    """Steps and common; tests/. And none of them names what surrounds a run."""
    modules = {module for module in FILES if room_of(module) in (("step", "common") if room == "course" else (room,))}
    assert lines_of(modules) <= most
    for module in modules:
        assert not re.search(r"\bextras\b", FILES[module].read_text()), module


@pytest.mark.parametrize(
    "text, name",
    [
        ('import importlib\ndef f():\n    importlib.import_module("extras.services.run")', "extras.services.run"),
        ('from importlib import import_module\nimport_module("extras.theory.plan").main()', "extras.theory.plan"),
        ('__import__("step07_moe_ep").MoE', "step07_moe_ep"),
        ('import sys\nsys.modules["extras.variants.step07.routing"]', "extras.variants.step07.routing"),
        ('import sys\nsys.modules.get("extras.variants.step07.routing")', "extras.variants.step07.routing"),
    ],
)
def test_an_import_by_string_is_seen(text, name):
    """By the same function as all others, so every rule above and below holds for it."""
    assert name in imported_by(ast.parse(text))
    assert room_of(name) not in MAY["common"] and room_of(name)


def test_only_loaders_import_what_they_do_not_name():
    """Else a string that is made as the program runs would hide an import; and every door is used."""
    for module in FILES:
        if room_of(module) in ("step", "common", "variants", "services", "theory"):
            assert "" not in by_string(tree_of(module)) or module in LOADERS, module
    assert all(name in by_string(tree_of(module)) for module, name in DOORS)


def test_there_is_no_circle():
    """The modules can be put in an order in which each imports earlier ones only, also through theory's doors."""
    rooms = {"", "tests", "labs"}
    doors = {"extras.theory.plan": {name for module, name in DOORS if module == "extras.theory.plan"}}
    waits = {
        name: {other for other in (*imported(name), *doors.get(name, ())) if other in FILES} - {name}
        for name in FILES
        if room_of(name) not in rooms
    }
    while ready := [name for name, needs in waits.items() if not needs & waits.keys()]:
        for name in ready:
            del waits[name]
    assert not waits, f"a circle among {sorted(waits)}"


LINES = "a launch line of what it counts or measures"
NAMED = {  # the variants and flags of theirs that services and theory may name
    "extras.services.cluster": ("ranks_per_node", "a flag of its own"),
    "extras.services.dry_run": ("routing ep_inside capacity_factor", "it says where tokens without numbers go"),
    "extras.theory.report": ("expert_matmul loss_chunk prefetch", LINES),
    "extras.theory.layouts": ("cp_kernel documents", LINES),
    "extras.theory.plan": ("expert_presets", "a door"),
}


def fields_of(module: str, name: str) -> set[str]:
    """Of a dataclass, if the file has it."""
    owners = [node for node in tree_of(module).body if isinstance(node, ast.ClassDef) and node.name == name]
    return {part.target.id for owner in owners for part in owner.body if isinstance(part, ast.AnnAssign)}


@lru_cache
def flags_of_variants() -> set[str]:
    """All of them."""
    return set().union(*(fields_of(name, "Flags") for name in FILES if room_of(name) == "variants"))


def variants_named(tree: ast.Module) -> set[str]:
    """Variants' modules and flags that code names: by import, as an attribute of flags, or in a string."""
    flags = flags_of_variants()
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings may
    found = {name.split(".")[-1] for name in imported_by(tree) if name.startswith("extras.variants.step")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("config", "flags", "x"):
            found |= {node.attr} & flags
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            found |= {ast.unparse(node.args[1]).strip("'")} & flags
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found |= {word.replace("-", "_") for word in re.findall(r"--([a-z-]+)", node.value)} & flags
            found |= {*re.findall(r"variants\.step0\d\.(\w+)", node.value)}
    return found


def test_services_and_theory_know_no_variant():
    """They ask what a file, or what it keeps, says of itself; the planner's choices are fields of its layouts."""
    choices = dict(theory=fields_of("extras.theory.layouts", "Layout"), services=set())
    for module in [name for name in FILES if room_of(name) in choices]:
        allowed = choices[room_of(module)] | {*NAMED.get(module, [""])[0].split()}
        found = variants_named(tree_of(module))
        assert found <= allowed, f"{module} names {found - allowed}"
    for text in (
        "config.zero_keep",
        "getattr(config, 'zero_keep', 0)",
        "print('--zero-keep')",
        "import extras.variants.step01.sgd",
    ):
        assert variants_named(ast.parse(f"x = 0\n{text}")), text
    assert not variants_named(ast.parse('"""--zero-keep."""\nre.compile("x")'))


FORBIDDEN = {  # what only later steps bring
    1: "mesh|pipeline|expert|sharded",
    2: "pipeline|expert|stage",
    3: "pipeline|zigzag",
    4: "pipeline|zigzag",
    5: "pipeline|expert|schedule",
    6: "expert|router",
}


@pytest.mark.parametrize("number", FORBIDDEN)
def test_no_step_serves_a_later_one(number):
    """No name in a step's code speaks of what only a later step brings."""
    tree = tree_of(STEPS[number - 1])
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert not [name for name in names if re.search(FORBIDDEN[number], name, re.IGNORECASE)]


@pytest.mark.parametrize("module", [name for name in FILES if room_of(name) not in ("", "proof", "tests", "labs")])
def test_public_names_have_docstrings(module):
    """Every public function, class and method says what it is, and so does the file."""
    tree = tree_of(module)
    assert ast.get_docstring(tree), "the file"
    public = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (part for owner in public for part in owner.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}:{node.lineno} {node.name}"


@pytest.mark.parametrize("module", VARIANTS)
def test_a_variant_is_one_small_file(module):
    """At most 165 lines; its flags are dataclass fields with a comment each, which is their help."""
    assert lines_of({module}) <= 165
    for node in tree_of(module).body:
        if isinstance(node, ast.ClassDef) and node.name == "Flags":
            for field in (part for part in node.body if isinstance(part, ast.AnnAssign)):
                line = FILES[module].read_text().splitlines()[field.lineno - 1]
                assert "  # " in line, f"{module}: {line.strip()} has no help"


@pytest.mark.parametrize("module", VARIANTS)
def test_variants_have_one_shape(module):
    """A docstring that names the flags, and where it would stand; `Flags` before all code; an entry or a verb.

    A library says so, has none of these, and is imported by variants alone.
    """
    body, doc = tree_of(module).body, ast.get_docstring(tree_of(module))
    names = [getattr(node, "name", "") for node in body]
    stored = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    entries = [node for node in stored if isinstance(node, ast.Subscript)]
    acts = entries or {"prepare", "attach"} & {*names}
    if doc.startswith("A library"):
        users = {room_of(name) for name in FILES if module in imported(name)} - {"tests"}
        assert not acts and "Flags" not in names and users == {"variants"}
        return
    assert acts, "it changes nothing"
    assert "--" in doc, "no flag"
    assert re.search(r"[Ii]n (step \d|common/)", doc), "where would it stand?"
    if "Flags" in names:
        first = next(i for i, node in enumerate(body) if isinstance(node, ast.FunctionDef))
        fields = [part.target.id for part in body[names.index("Flags")].body if isinstance(part, ast.AnnAssign)]
        assert names.index("Flags") < first
        assert not [name for name in fields if "--" + name.replace("_", "-") not in doc], "a flag without a word"


def test_the_table_of_techniques_is_what_their_files_say():
    """`python -m extras.variants` writes README.md anew; each file has a flag, or names one."""
    assert (ROOT / "extras/variants/README.md").read_text() == table() + "\n"
    assert all(re.fullmatch(r"\| \[.+\]\(.+\) \| `--.+` \| .* \| \d \|", line) for line in table().splitlines()[8:])


def test_no_state_in_modules():
    """Nothing is `global`, and only common and services read the environment (step 2: torchrun's)."""
    for module in FILES:
        if room_of(module) in ("step", "common", "variants", "theory"):
            assert not [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Global)], module
            reads = "os.environ" in FILES[module].read_text()
            assert not reads or module in ("common.trainer", "step02_ddp") or room_of(module) == "variants", module


TAGGED_INSIDE = {
    ("common.layout", "materialize"),
    ("common.layout", "ParamLayout"),
}  # they say which of it is for later


def test_common_says_from_which_chapter_on_it_is_read():
    """A docstring of common begins with "From chapter N on" if no step before N names what it defines."""

    def said(module: str, node: ast.AST) -> int:
        texts = (ast.get_docstring(one) or "" for one in (tree_of(module), node))
        return max(int(found[1]) if (found := re.match(r"From chapter (\d) on: ", text)) else 1 for text in texts)

    def names_in(tree: ast.AST) -> set[str]:
        return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}

    modules = [name for name in FILES if room_of(name) == "common"]
    says = {
        (module, node.name): (said(module, node), node)
        for module in modules
        for node in tree_of(module).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for (module, name), (chapter, _) in says.items():
        users = [int(step[4:6]) for step in STEPS if name in names_in(tree_of(step))]
        users += [
            n
            for key, (n, node) in says.items()
            if key not in {(module, name), *TAGGED_INSIDE} and name in names_in(node)
        ]
        assert not users or chapter == min(users), (module, name, chapter, min(users))


PAGES = [path for where in ("*.md", "tests/*.md", "extras/**/*.md") for path in sorted(ROOT.glob(where))]


def test_the_front_page_is_short():
    """README.md has at most 120 lines, RESULTS.md 250; the excerpt of code is step 2's, letter by letter."""
    readme, results = ((ROOT / name).read_text() for name in ("README.md", "RESULTS.md"))
    assert len(readme.splitlines()) <= 120 and len(results.splitlines()) <= 250
    excerpt = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    assert excerpt in re.sub(r"^        ", "", FILES["step02_ddp"].read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    """To a file or folder of the repository, and there to a heading."""
    for target, anchor in re.findall(r"(?<!\w)\[[^]]*\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        titles = re.findall(r"^#+ (.*)", there.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in titles], anchor


def test_reports_of_others_are_rows_of_the_faults():
    """tests/README.md has a line for each report that tests/faults.py links to, with a test that fails there."""
    calls = [node for node in ast.walk(tree_of("tests.faults")) if isinstance(node, ast.Call) and len(node.args) == 5]
    rows = [[ast.literal_eval(word) for word in call.args] for call in calls]
    injected = {(link, test) for *_, test, meaning in rows for link in re.findall(r"https://\S+", meaning)}
    listed = re.findall(r"^\| \[.*?\]\((.*?)\) .* `(.*?)` \|$", (ROOT / "tests/README.md").read_text(), re.MULTILINE)
    assert {*listed} <= injected
    assert sorted(link for link, _ in listed) == sorted({link for link, _ in injected})


def test_the_glossary_names_what_exists():
    """Each name of code and each flag in extras/README.md's glossary stands in a file that runs."""
    table = (ROOT / "extras/README.md").read_text().partition("## Glossary")[2].partition("\n## ")[0]
    course = "\n".join(FILES[name].read_text() for name in FILES if room_of(name) in ("step", "common", "variants"))
    names = {name for line in table.splitlines() for name in re.findall(r"`([\w-]+)", line.split(" | ")[-1])}
    assert not [name for name in names if name.strip("-").replace("-", "_") not in course and name not in course]
