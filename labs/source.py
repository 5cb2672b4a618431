"""The source of a lab: a step with holes in it, and a student's functions put among the project's own.

Both come from parsing the project's file. No mark stands in it, so a lab follows its step by itself.
"""

import ast
import difflib

SHIFT = 1_000_000  # added to the line numbers of the project's lines in a student's file, to tell them apart

Definition = ast.FunctionDef | ast.ClassDef


def definitions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """All functions, "name", and methods, "Class.name", of a module."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef):
                found[f"{node.name}.{part.name}"] = part
    return found


def body_lines(node: ast.FunctionDef) -> tuple[int, int]:
    """(first, last) line of a function's body without its docstring, from 1; raises ValueError if it has no other."""
    documented = ast.get_docstring(node) is not None
    if documented and len(node.body) == 1:
        raise ValueError(f"{node.name} has no body to take out")
    first = node.body[0].end_lineno + 1 if documented else node.body[0].lineno
    return first, node.end_lineno


def hollow(text: str, holes: dict[str, str]) -> str:
    """The source `text` in which the body of each function of `holes` only raises; by name: what it says.

    Signature and docstring stay. Raises KeyError if there is no such function.
    """
    lines, found = text.splitlines(), definitions(ast.parse(text))
    for name, message in sorted(holes.items(), key=lambda hole: -found[hole[0]].lineno):
        first, last = body_lines(found[name])
        indent = " " * (found[name].col_offset + 4)
        lines[first - 1 : last] = [f'{indent}raise NotImplementedError("{message}")']
    return "\n".join(lines) + "\n"


def function_text(text: str, name: str) -> list[str]:
    """The lines of one function of a source; none if it is not there."""
    node = definitions(ast.parse(text)).get(name)
    return text.splitlines()[node.lineno - 1 : node.end_lineno] if node else []


def diff(student: str, project: str, names: list[str]) -> str:
    """A unified diff from the student's functions to the project's."""
    parts = []
    for name in names:
        pair = [function_text(text, name) for text in (student, project)]
        parts += difflib.unified_diff(*pair, f"yours: {name}", f"project: {name}", lineterm="", n=2)
    return "\n".join(parts)


def assigned(node: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module gives a value."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def graft(student: str, project: str, keep: set[str]) -> ast.Module:
    """The project's module with the functions `keep` from the student's, who may have added functions and imports.

    So one task is judged alone: a fault elsewhere in the student's file costs nothing here. Lines of the project's are
    moved by SHIFT. Raises SyntaxError if the student's source has none.
    """
    theirs, ours = ast.parse(student), ast.parse(project)
    for node in ours.body:
        ast.increment_lineno(node, SHIFT)
    written = definitions(theirs)
    known = {node.name for node in ours.body if isinstance(node, Definition)}
    constants = {name for node in ours.body if not isinstance(node, Definition) for name in assigned(node)}
    classes = {node.name: node for node in theirs.body if isinstance(node, ast.ClassDef)}
    body: list[ast.stmt] = []
    for node in ours.body:
        if isinstance(node, ast.FunctionDef) and node.name in keep:
            node = written.get(node.name, node)
        elif isinstance(node, ast.ClassDef) and any(name.startswith(f"{node.name}.") for name in keep):
            kept = [name.partition(".")[2] for name in keep if name.startswith(f"{node.name}.")]
            names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            node.body = [
                written.get(f"{node.name}.{part.name}", part) if getattr(part, "name", None) in kept else part
                for part in node.body
            ]
            other = classes[node.name].body if node.name in classes else []
            node.body += [part for part in other if isinstance(part, ast.FunctionDef) and part.name not in names]
        if not isinstance(node, ast.If):  # the guard of a script
            body.append(node)
    own = [
        node
        for node in theirs.body
        if (isinstance(node, ast.Import | ast.ImportFrom))
        or (isinstance(node, Definition) and node.name not in known)
        or (isinstance(node, ast.Assign | ast.AnnAssign) and not assigned(node) & constants)
    ]
    last_import = max(i for i, node in enumerate(body) if isinstance(node, ast.Import | ast.ImportFrom)) + 1
    imports = [node for node in own if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [node for node in own if node not in imports]
    return ast.Module([*body[:last_import], *imports, *body[last_import:], *others], [])


def missing(student: str, project: str) -> list[str]:
    """Functions of the project's that the student's source has no more."""
    return sorted(definitions(ast.parse(project)).keys() - definitions(ast.parse(student)).keys())
