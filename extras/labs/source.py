"""The source of a lab: a step with holes in it, and a student's file in which some holes are the project's again.

All of it comes from parsing the project's file. No mark stands in it, so a lab follows its step by itself.
"""

import ast
import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

SHIFT = 1_000_000  # added to the line numbers of the project's lines, to tell them from a student's

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """All functions, "name", and methods, "Class.name", of a module."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, Definition):
            found[node.name] = node
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, Definition):
                found[f"{node.name}.{part.name}"] = part
    return found


def code_of(node: ast.FunctionDef) -> list[ast.stmt]:
    """The body without its docstring."""
    return node.body[ast.get_docstring(node) is not None :]


def is_hole(node: ast.FunctionDef) -> bool:
    """Whether it is as `hollow` leaves it."""
    return [ast.unparse(line)[:26] for line in code_of(node)] == ["raise NotImplementedError("]


def hollow(text: str, holes: dict[str, int], lab: int) -> str:
    """The source in which the body of each function of `holes` (name -> task) only raises.

    Signature and docstring stay. Raises KeyError if there is no such function.
    """
    lines, found = text.splitlines(), definitions(ast.parse(text))
    for name, task in sorted(holes.items(), key=lambda hole: -found[hole[0]].lineno):
        node = found[name]
        if not (code := code_of(node)):
            raise KeyError(f"{name} has no body to take out")
        indent = " " * (node.col_offset + 4)
        start = code[0].lineno if len(code) == len(node.body) else node.body[0].end_lineno + 1
        lines[start - 1 : node.end_lineno] = [f'{indent}raise NotImplementedError("lab {lab}, task {task}")']
    return "\n".join(lines) + "\n"


def assemble(student: str, project: str, given: Collection[str]) -> ast.Module:
    """The student's module, in which the holes `given` are the project's, as far as it has them.

    Raises SyntaxError, and what a parser may.
    """
    tree, ours = ast.parse(student), ast.parse(project)
    right = definitions(ours)
    for name in (name for name in given if not is_hole(right[name])):
        owner, _, method = name.rpartition(".")
        home = tree
        if owner:
            classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
            home = classes[-1] if classes else None
        if home is None:  # the student has no such class any more
            tree.body.append(next(node for node in ours.body if getattr(node, "name", "") == owner))
            continue
        places = [i for i, node in enumerate(home.body) if isinstance(node, Definition) and node.name == method]
        node = ast.increment_lineno(copy.deepcopy(right[name]), SHIFT)
        at = places[-1] if places else len(home.body)
        home.body[at : at + 1] = [node]
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    imports = [node for node in ours.body if isinstance(node, ast.Import | ast.ImportFrom)]  # that ours may need
    rest = [node for node in tree.body if node not in future]
    return ast.fix_missing_locations(ast.Module([*future, *imports, *rest], []))


def fingerprint(node: ast.FunctionDef) -> str:
    """The code, without docstring and annotations, its own names by the order in which they come."""
    node = copy.deepcopy(node)
    own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    order: dict[str, str] = {}
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            part.arg, part.annotation = order.setdefault(part.arg, f"v{len(order)}"), None
        elif isinstance(part, ast.Name) and part.id in own:
            part.id = order.setdefault(part.id, f"v{len(order)}")
    return "\n".join(map(ast.unparse, code_of(node)))


REACHES = re.compile(  # what a right solution does not need, and a look at the grader or at the solution does
    r"\b(labs|sys|os|io|inspect|exec|eval|compile|open|importlib|__import__|subprocess|ctypes|gc|runpy|pathlib|globals"
    r"|pickle|tests|socket|signal|variants|services|step0\d_\w+|Path|load|from_?file|memmap|loadtxt|genfromtxt|read_\w+"
    r"|setattr|mock|_getframe|settrace|vars|locals"
    r"|__\w+__(?<!__init__)(?<!__name__)(?<!__main__)(?<!__future__)(?<!__class__))\b"
)


def facts(
    student: dict[str, str], project: dict[str, str], holes: dict[str, dict[str, int]], others: Collection[str] = ()
) -> dict[str, Any]:
    """What a teacher should know of the sources: holes written, those that are the project's, what they reach for.

    By module; `others`: the texts of further files.
    """
    written, same, prints, reaches = 0, 0, [], {word for text in others for word in words_of(text)}
    for module, text in student.items():
        theirs, ours = definitions(ast.parse(text)), definitions(ast.parse(project[module]))
        for name in holes[module]:
            if name in theirs and not is_hole(theirs[name]):
                own = fingerprint(theirs[name])
                written += 1
                if own == fingerprint(ours[name]):
                    same += 1
                else:
                    prints.append(f"{name}: {own}")
        reaches |= set(words_of(text)) - set(words_of(project[module]))
    return dict(written=written, same=same, prints=prints, reaches=sorted(reaches))


def words_of(text: str) -> Iterator[str]:
    """Names that the code of a source (no docstrings or comments) uses, or sets, and that reach outside of it."""
    tree = ast.parse(text)
    names = [alias for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    foreign = {alias.asname or alias.name.split(".")[0] for alias in names}
    for node in ast.walk(tree):
        yield from outside(node, foreign)
        for word in spelled_in(node):
            yield from REACHES.findall(word)


def outside(node: ast.AST, foreign: set[str]) -> Iterator[str]:
    """What code sets of the modules that it imports, asks of the system, or gets by a name that it computes."""
    match node:
        case ast.Attribute(ctx=ast.Store()) if (name := ast.unparse(node)).split(".")[0] in foreign:
            yield name  # torch.x = ...: for the judge, too
        case ast.Attribute(value=ast.Name(id="os" | "sys" as owner), attr=name):
            yield f"{owner}.{name}"
        case ast.Attribute(value=ast.Name(id="torch"), attr="save" | "load" as name):
            yield f"torch.{name}"
        case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "delattr"), args=[_, name, *_]):
            if not isinstance(name, ast.Constant):
                yield f"getattr({ast.unparse(name)[:30]})"


def spelled_in(node: ast.AST) -> list[str]:
    """The names that stand in it, also as a short text."""
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word) | ast.ImportFrom(module=str(word)):
            return [word]
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.Constant(value=str(word)) if len(word) < 40 and word.isidentifier():
            return [word]
    return []
