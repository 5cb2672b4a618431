"""Which name stands for what: the sources are read as an interpreter would, with types in place of values.

A value is ("def", id), a function, class or module itself, or ("obj", id), an object of a class; an id is
"module:Class.name", or "module:". An expression has a set of values, as a menu's entry may be any of them. A list, dict
or tuple of objects counts as these objects: no name of ours is looked up in the list itself.
"""

import ast
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SAME = {"partial", "sorted", "reversed", "list", "tuple", "deque", "ModuleDict", "zip", "enumerate", "next"}
TAKE = {"values", "items", "pop", "get", "popleft"}
Values = set[tuple[str, str]]


class Definition(NamedTuple):
    """Lines `start` to `end` of a file, from 1, define `name`, for example Group.share."""

    module: str
    name: str
    start: int
    end: int


class Names:
    """All definitions; `refs`, from (module, line, column) to ids; `users`, from an id to those who name it."""

    def __init__(self, files: dict[str, Path]):
        self.lines = {module: path.read_text().split("\n") for module, path in files.items()}
        self.trees = {module: ast.parse("\n".join(lines)) for module, lines in self.lines.items()}
        self.defs = {f"{m}:": Definition(m, "", 1, tree.body[0].end_lineno) for m, tree in self.trees.items()}
        self.globals: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.types: dict[str, Values] = defaultdict(set)  # of an attribute or constant; what a function returns
        self.bases: dict[str, list[str]] = {}  # of each class
        self.functions: set[str] = set()
        self.refs: dict[tuple[str, int, int], list[str]] = {}
        self.users: dict[str, set[str]] = defaultdict(set)
        for _ in range(2):  # what is learnt of one function helps to read another
            for module, tree in self.trees.items():
                self.module, self.owner, self.scopes = module, f"{module}:", []
                self.see(tree)

    def define(self, id_: str, node: ast.AST):
        """Note where an id is defined; the first place counts. The name there shows who else names it."""
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        self.defs.setdefault(id_, Definition(self.module, id_.split(":")[1], start, node.end_lineno))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.refs[self.module, node.lineno, node.col_offset + (6 if isinstance(node, ast.ClassDef) else 4)] = [id_]

    def refer(self, line: int, column: int, ids: set[str]):
        """The name here stands for these."""
        here = self.module, line, len(self.lines[self.module][line - 1].encode()[:column].decode())  # ast counts bytes
        if ids:
            self.refs[here] = sorted({*ids, *self.refs.get(here, ())})
        for id_ in ids - {self.owner} if not isinstance(self.statement, ast.Import | ast.ImportFrom) else ():
            self.users[id_].add(self.owner)

    def mro(self, id_: str) -> list[str]:
        """A class and its bases."""
        return [id_, *(up for base in self.bases.get(id_, ()) for up in self.mro(base))]

    def members(self, values: Values, name: str) -> set[str]:
        """The ids of an attribute."""
        modules = [what[:-1] for _, what in values if what.endswith(":")]
        ways = ([way for c in self.mro(what) if (way := f"{c}.{name}") in self.defs] for _, what in values)
        return {way[0] for way in ways if way}.union(*(self.globals[module][name] for module in modules))

    def read(self, ids: set[str]) -> Values:
        """The values of what has these definitions."""
        plain = {i for i in ids if i in self.bases or i in self.functions or i.endswith(":")}
        return {("def", i) for i in plain}.union(*(self.types[i] for i in ids - plain))

    def all(self, nodes: list[ast.AST]) -> Values:
        """The values of any of these."""
        return set().union(*map(self.see, nodes))

    def annotation(self, node: ast.AST | None) -> Values:
        """The objects of our classes that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            ids = self.globals[self.module][node.value]
            self.refer(node.lineno, node.col_offset + 1, ids)
            return {("obj", i) for i in ids}
        values = self.all([part for part in ast.walk(node or ast.Pass()) if isinstance(part, ast.Name | ast.Attribute)])
        text, classes = ast.unparse(node) if node else "", {i for _, i in values if i in self.bases}
        return set() if "Callable" in text else {("def" if "type[" in text else "obj", i) for i in classes}

    def bind(self, target: ast.AST | None, values: Values):
        """Assign."""
        match target:
            case ast.Name(id=name) if self.scopes:
                self.scopes[-1][name] = self.scopes[-1].get(name, set()) | values
            case ast.Name(id=name):
                id_ = self.owner + "." * (not self.owner.endswith(":")) + name
                self.define(id_, self.statement)
                self.refs[self.module, target.lineno, target.col_offset] = [id_]
                self.types[id_] |= values
                if self.owner.endswith(":"):
                    self.globals[self.module][name] = {id_}
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self.bind(part, values)
            case ast.Attribute(value=base, attr=name):
                for obj in (value for value in self.see(base) if value[0] == "obj"):
                    (id_,) = self.members({obj}, name) or {f"{obj[1]}.{name}"}
                    self.define(id_, self.statement)
                    self.types[id_] |= values
                self.see(target)
            case _:
                self.see(target)

    def call(self, node: ast.Call) -> Values:
        """What a call returns. A module's call is its `forward`."""
        called, given = self.see(node.func), [self.see(arg) for arg in (*node.args, *(k.value for k in node.keywords))]
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name == "super" and "." in self.owner:
            return {("obj", base) for base in self.bases[self.owner.rpartition(".")[0]]}
        if not called and name in SAME:
            return set().union(*given[: None if name == "zip" else 1])
        if not called:
            return self.see(node.func.value) if name in TAKE else set()
        forward = self.members({value for value in called if value[0] == "obj"}, "forward")
        self.refer(node.func.end_lineno, node.func.end_col_offset - len(name), forward)
        made = {("obj", i) for kind, i in called if i in self.bases and (kind == "def" or not forward)}
        return made.union(*(self.types[i] for i in (*(i for kind, i in called if kind == "def"), *forward)))

    def function(self, node: ast.FunctionDef | ast.Lambda, id_: str, of: str = "") -> Values:
        """Read a function, `of` a class if it is a method; what it returns."""
        known, marks, parts = node.args, getattr(node, "decorator_list", []), list(ast.walk(node))
        local = {a.arg: self.annotation(a.annotation) for a in parts if isinstance(a, ast.arg)}
        if of and "staticmethod" not in map(ast.unparse, marks):
            local[known.args[0].arg] = {("obj", of)}
        for part in parts:
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                local.setdefault(part.id, set())
        self.all([*known.defaults, *known.kw_defaults, *marks])
        told, before, local["return"] = self.annotation(getattr(node, "returns", None)), self.owner, set()
        self.owner, self.scopes = id_, [*self.scopes, local]
        found = self.all(node.body if isinstance(node.body, list) else [node.body])
        self.owner, self.scopes = before, self.scopes[:-1]
        return told or local["return"] | found

    def see(self, node: ast.AST | None) -> Values:
        """Read a statement, or an expression, whose values it returns."""
        if isinstance(node, ast.stmt):
            self.statement = node
        match node:
            case ast.Name(id=name):
                for scope in (scope for scope in reversed(self.scopes) if name in scope):
                    return scope[name]
                self.refer(node.lineno, node.col_offset, self.globals[self.module][name])
                return self.read(self.globals[self.module][name])
            case ast.Attribute(value=base, attr=name):
                found = self.members(self.see(base), name)
                self.refer(node.end_lineno, node.end_col_offset - len(name), found)
                return self.read(found)
            case ast.Call():
                return self.call(node)
            case ast.Subscript(value=base, slice=index):
                values, _ = self.see(base), self.see(index)
                return values.union(*(self.types[i] for i in self.members(values, "__getitem__")))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self.scopes.append({})
                for loop in node.generators:
                    self.bind(loop.target, self.see(loop.iter))
                    self.all(loop.ifs)
                values = self.all([part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)])
                self.scopes.pop()
                return values
            case ast.Lambda():
                return self.function(node, self.owner)
            case ast.FunctionDef(name=name) if self.scopes:
                self.scopes[-1][name] = self.function(node, self.owner)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                owner, inside = self.owner, not self.owner.endswith(":")
                id_ = owner + "." * inside + name
                self.define(id_, node)
                if not inside:
                    self.globals[self.module][name] = {id_}
                if isinstance(node, ast.FunctionDef):
                    self.functions |= set() if "property" in map(ast.unparse, node.decorator_list) else {id_}
                    self.types[id_] |= self.function(node, id_, owner if inside else "")
                else:
                    self.bases[id_] = [i for _, i in self.all(node.bases) if i in self.bases]
                    self.owner = id_
                    self.all([*node.decorator_list, *node.body])
                    self.owner = owner
            case ast.Assign(targets=targets, value=value):
                values = self.see(value)
                for target in targets:
                    self.bind(target, values)
            case ast.AnnAssign(target=target, annotation=said, value=value):
                self.bind(target, self.annotation(said) | self.see(value))
            case ast.For(target=target, iter=value) | ast.withitem(optional_vars=target, context_expr=value):
                self.bind(target, self.see(value))
                self.all([*getattr(node, "body", ()), *getattr(node, "orelse", ())])
            case ast.Return(value=value):
                self.scopes[-1]["return"] |= self.see(value)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                source = getattr(node, "module", None) or ""
                self.refer(node.lineno, node.col_offset + 6 + source.rfind("."), {f"{source}:"} & self.defs.keys())
                for alias in names:
                    ids = {f"{source}.{alias.name}:".lstrip("."), f"{alias.name}:" * (not source)} & self.defs.keys()
                    ids |= self.globals[source][alias.name]
                    self.globals[self.module][alias.asname or alias.name] |= ids
                    self.refer(alias.lineno, alias.col_offset, ids)
            case ast.AST():
                values = self.all(list(ast.iter_child_nodes(node)))
                return values if isinstance(node, ast.expr) else set()
        return set()
