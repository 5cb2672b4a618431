"""What a reader visits to follow one training step: the names that a step's `train` leads to.

The rule: begin with the names that `train` uses, and read what each of them stands for in its turn; a method is visited
when its name is used and its class was visited. Functions, classes and methods of ours count; what Python or PyTorch
calls by itself (`__init__`, forward, backward) is a part of its class. A name counts, but only its signature is read,
if it lies in services, theory or common/trainer.py, or in the old files like them: common/run.py, checkpoint.py,
hub.py, memory.py, plots.py, watchdog.py.

python -m tests.path               by step: names in the step's own file, names elsewhere, and in how many modules
python -m tests.path 4             the names of step 4
python -m tests.path --root DIR    the same for another checkout, with or without a step
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("common", "services", "theory")
CLOSED = {f"common.{name}" for name in ("trainer", "run", "checkpoint", "hub", "memory", "plots", "watchdog")}
Name = tuple[str, str]  # (module, name of a function, class or Class.method)


class Tree:
    """The parsed modules of a checkout: what each defines, and what its imports stand for."""

    def __init__(self, root: Path):
        self.found: dict[Name, ast.AST] = {}
        self.imports: dict[Name, Name] = {}  # (importer, its name for it) -> (module, name there or "" for the module)
        for path in [*root.glob("step0*.py"), *(path for room in ROOMS for path in root.glob(f"{room}/*.py"))]:
            module, tree = ".".join(path.relative_to(root).with_suffix("").parts), ast.parse(path.read_text())
            for node in ast.walk(tree):
                for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                    there = (node.module, alias.name) if isinstance(node, ast.ImportFrom) else (alias.name, "")
                    self.imports[module, alias.asname or alias.name] = there
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.found[module, node.name] = node
                for part in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(part, ast.FunctionDef) and not is_special(part):
                        self.found[module, f"{node.name}.{part.name}"] = part

    def lookup(self, module: str, name: str) -> Name | None:
        """What a name in a module stands for, if it is a function or class of ours."""
        while (module, name) in self.imports:
            module, name = self.imports[module, name]
        return (module, name) if (module, name) in self.found else None

    def uses(self, module: str, name: str) -> tuple[set[Name], set[str]]:
        """(functions and classes of ours, words after a dot) that a definition uses."""
        closed, names, dotted = module in CLOSED or module.startswith(ROOMS[1:]), set(), set()
        for node in (node for part in parts(self.found[module, name], closed) for node in ast.walk(part)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                names.add(self.lookup(module, node.id))
            elif isinstance(node, ast.Attribute):
                dotted.add(node.attr)
                owner = self.imports.get((module, node.value.id)) if isinstance(node.value, ast.Name) else None
                names.add(self.lookup(".".join(filter(None, owner)), node.attr) if owner else None)
        return names - {None}, dotted


def is_special(method: ast.FunctionDef) -> bool:
    """Whether Python or PyTorch calls a method by itself."""
    return method.name.startswith("__") or method.name in ("forward", "backward")


def parts(node: ast.AST, closed: bool) -> Iterator[ast.AST]:
    """What is read of a definition: a function's signature, a class' bases and, unless it is closed, what is inside."""
    signature = node.bases if isinstance(node, ast.ClassDef) else [node.args, node.returns or node.args]
    constants = (n.value for part in signature for n in ast.walk(part) if isinstance(n, ast.Constant))
    quoted = [text for text in constants if isinstance(text, str) and text.isidentifier()]  # "Trainer"
    yield from [*signature, *map(ast.parse, quoted)]
    for part in () if closed else node.body:
        if not isinstance(node, ast.ClassDef) or not isinstance(part, ast.FunctionDef):
            yield part
        elif is_special(part):
            yield from parts(part, closed)


def visited(tree: Tree, step: int) -> set[Name]:
    """The names that the `train` of a step leads to."""
    (start,) = [key for key in tree.found if key[0].startswith(f"step{step:02d}") and key[1] == "train"]
    seen, done, dotted = {start}, set(), set()
    while todo := seen - done:
        for key in todo:
            used, words = tree.uses(*key)
            seen, dotted = seen | used, dotted | words
        done |= todo
        for module, name in tree.found:
            owner, _, method = name.partition(".")
            if (module, owner) in seen and method in dotted:
                seen.add((module, name))
    return seen - {start}


def main(argv: list[str]):
    """Print the counts of all steps, or the names of one."""
    root = Path(argv[argv.index("--root") + 1]) if "--root" in argv else Path(__file__).parents[1]
    tree, steps = Tree(root), [int(word) for word in argv if word.isdigit()]
    for step in steps or range(1, 8):
        modules = defaultdict(list)
        for module, name in sorted(visited(tree, step)):
            modules[module].append(name)
        own = sum(len(names) for module, names in modules.items() if module.startswith(f"step{step:02d}"))
        elsewhere = sum(map(len, modules.values())) - own
        print(f"step {step}: {own} names in its own file; {elsewhere} elsewhere, in {len(modules) - 1} modules")
        for module in modules if steps else ():
            print(f"\n{module}\n    " + "\n    ".join(modules[module]))


if __name__ == "__main__":
    main(sys.argv[1:])
