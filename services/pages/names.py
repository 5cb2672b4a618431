"""Which name stands for what: Pyrefly, a type checker, says it; how far a definition goes, Python's own parser.

An id, of a function, class, constant, attribute or module, is "module:Class.name", or "module:".
"""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

CHECK = "check --skip-interpreter-query --threads=1 --untyped-def-behavior=check-and-infer-return-type --search-path=."
CHECK += " --replace-imports-with-any=torch --replace-imports-with-any=torch.* --report-pysa-format=json"


class Definition(NamedTuple):
    """Lines `start` to `end` of a file, from 1, define `name`, for example Group.share."""

    module: str
    name: str
    start: int
    end: int


def report(root: Path, paths: list[Path]) -> tuple[dict[Path, list], dict[str, dict[str, list]]]:
    """What names of each file stand for, and, by module and place, the classes of each expression. Torch is unknown."""
    targets, types = {}, defaultdict(dict)
    with TemporaryDirectory() as out:
        reports = [f"--report-glean={out}/glean", f"--report-pysa={out}/pysa"]
        command = [sys.executable, "-m", "pyrefly", *CHECK.split(), *reports, *paths]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        for path in Path(out).glob("glean/*.json"):
            for part in json.loads(path.read_text()):
                if part.get("predicate", "").startswith("python.XRefsViaNameByFile"):
                    for fact in part["facts"]:
                        targets[root / fact["key"]["file"]["key"]] = fact["key"]["xrefs"]
        for path in Path(out).glob("pysa/type_of_expressions/*.json"):
            read = json.loads(path.read_text())
            for function in read["functions"].values():
                kinds = [kind.get("class_names", {}).get("classes", []) for kind in function["type_table"]]
                types[read["module_name"]] |= {place: kinds[n] for place, n in function["locations"].items()}
    if not targets:
        sys.exit(f"error: the pages need pyrefly (pip install -r requirements-dev.txt), which says: {done.stderr}")
    return targets, types


class Names:
    """All definitions; `refs`, from (module, line, column) to ids; `users`, from an id to those who name it."""

    def __init__(self, root: Path, files: dict[str, Path]):
        self.lines = {module: path.read_text().split("\n") for module, path in files.items()}
        self.trees = {module: ast.parse("\n".join(lines)) for module, lines in self.lines.items()}
        self.defs: dict[str, Definition] = {}
        self.classes: dict[str, tuple[str, ast.ClassDef]] = {}  # by name with dots: its module and body
        self.owners: dict[tuple[str, int], str] = {}  # the innermost function or class that a line belongs to
        self.refs: dict[tuple[str, int, int], set[str]] = defaultdict(set)
        self.users: dict[str, set[str]] = defaultdict(set)
        self.known: dict[str, set[str]] = defaultdict(set)  # all that a module defines or names
        for module, tree in self.trees.items():
            self.defs[f"{module}:"] = Definition(module, "", 1, tree.body[0].end_lineno)
            self.define(module, tree, f"{module}:")
        self.ids = {id_.replace(":", ".").rstrip("."): id_ for id_ in self.defs}
        targets, self.types = report(root, list(files.values()))
        for module, path in files.items():
            source = path.read_bytes()
            for xref in targets[path]:
                before = source[: xref["source"]["start"]].decode()
                place = module, before.count("\n") + 1, len(before) - before.rfind("\n") - 1
                self.refs[place] |= self.find(xref["target"]["key"])
            for node in ast.walk(self.trees[module]):
                if isinstance(node, ast.Attribute):
                    self.refer(module, node, self.classes_of(module, node.value), node.attr)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):  # of an nn.Module
                    self.refer(module, node.func, self.classes_of(module, node.func, of_objects=True), "forward")
        for (module, line, _), ids in self.refs.items():
            self.known[module] |= ids
            if not self.lines[module][line - 1].lstrip().startswith(("from ", "import ")):
                for id_ in ids:
                    self.users[id_] |= {self.owners.get((module, line), f"{module}:")} - {id_}

    def define(self, module: str, scope: ast.Module | ast.ClassDef, inside: str):
        """Note what a module or class defines, attributes of `self` included; the first place counts."""
        for node in ast.walk(scope):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node in scope.body:
                id_, start = inside + node.name, min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
                self.defs[id_] = Definition(module, id_.split(":")[1], start, node.end_lineno)
                self.owners |= {(module, line): id_ for line in range(start, node.end_lineno + 1)}
                self.refs[module, node.lineno, self.lines[module][node.lineno - 1].index(node.name)] = {id_}
                if isinstance(node, ast.ClassDef):
                    self.classes[id_.replace(":", ".")] = module, node
                    self.define(module, node, f"{id_}.")
            for part in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ():
                match part:
                    case ast.Name(id=name, ctx=ast.Store()) if node in scope.body:
                        self.refs[module, part.lineno, part.col_offset] = {inside + name}
                    case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()) if inside.endswith("."):
                        pass  # Pyrefly says what it stands for
                    case _:
                        continue
                spot = Definition(module, f"{inside}{name}".split(":")[1], node.lineno, node.end_lineno)
                self.defs.setdefault(inside + name, spot)

    def find(self, dotted: str) -> set[str]:
        """The id of a name with dots, which a class may have from its bases; none if it is not ours."""
        owner, _, name = dotted.rpartition(".")
        if dotted in self.ids or owner not in self.classes:
            return {self.ids[dotted]} if dotted in self.ids else set()
        module, body = self.classes[owner]
        return {id_ for base in body.bases for up in self.classes_of(module, base) for id_ in self.find(f"{up}.{name}")}

    def classes_of(self, module: str, node: ast.expr, of_objects: bool = False) -> list[str]:
        """The classes that an expression, or only an object, may be or have, by name with dots."""
        place = f"{node.lineno}:{node.col_offset + 1}-{node.end_lineno}:{node.end_col_offset + 1}"
        found = [kind for kind in self.types[module].get(place, ()) if not (of_objects and kind.get("modifiers"))]
        return [f"{kind['class']['module_name']}.{kind['class']['class_name']}" for kind in found]

    def refer(self, module: str, node: ast.Name | ast.Attribute, classes: list[str], member: str):
        """The last name of an expression stands for this member of these classes."""
        line = self.lines[module][node.end_lineno - 1].encode()[: node.end_col_offset].decode()  # ast counts bytes
        name = node.id if isinstance(node, ast.Name) else node.attr
        self.refs[module, node.end_lineno, len(line) - len(name)] |= {
            i for c in classes for i in self.find(f"{c}.{member}")
        }
