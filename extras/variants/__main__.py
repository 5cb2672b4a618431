"""The table of all techniques, from what their files say: `python -m extras.variants > extras/variants/README.md`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
HEAD = """# Techniques

Each file changes a step from outside, where a flag asks for it. It lies with the first step that has the flag, and its
docstring says where its lines would stand in the course. `__init__.py` has the rules. Libraries, which only other files
import, are left out. The files say all of this: `python -m extras.variants > extras/variants/README.md`.

| technique | flags | source | step |
| --- | --- | --- | --- |"""
FLAG_OF = {  # a menu of the course: the flag that takes its entries
    menu: name
    for path in HERE.parents[1].glob("step0*.py")
    for name, menu in re.findall(r"(\w+): \w+ = among\((\w+),", path.read_text())
}
WORK = r"[A-Z][\w-]+(?: and [A-Z]\w+| et al\.),? (?:19|20)\d\d(?:, \"[^\"]+\")?|DeepSeek-V3|DeepEP|Megatron-LM"


def entries(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(menu, key) of what a file adds to menus: SYNCS["tree"] = ..."""
    for target in (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets):
        if isinstance(target, ast.Subscript):
            yield ast.unparse(target.value), ast.literal_eval(target.slice)


def flags(tree: ast.Module, doc: str) -> list[str]:
    """The values that a file adds to the steps' flags, and its own flags; without these, what its docstring names."""
    found = [f"{FLAG_OF[menu]} {key}" for menu, key in entries(tree) if menu in FLAG_OF]
    owners = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Flags"]
    found += [part.target.id for owner in owners for part in owner.body if isinstance(part, ast.AnnAssign)]
    return ["--" + flag.replace("_", "-") for flag in found] or re.findall(r"--[\w-]+", doc)[:1]


def row(path: Path) -> str:
    """A file's line of the table: its docstring's first sentence without brackets, and the works that it names."""
    tree = ast.parse(path.read_text())
    first, *_ = paragraphs = [" ".join(part.split()) for part in ast.get_docstring(tree).split("\n\n")]
    if first.startswith("A library"):
        return ""
    about = re.split(r"\.(?: |$)", re.sub(r" \([^()]*\)|^`--[^`]*`: ", "", first))[0]
    asked = ", ".join(f"`{flag}`" for flag in flags(tree, first))
    works = "; ".join(dict.fromkeys(re.findall(WORK, " ".join(paragraphs))))
    technique = f"[{about}]({path.relative_to(HERE).as_posix()})"
    return f"| {technique} | {asked} | {works} | {int(path.parent.name[4:])} |"


def table() -> str:
    """README.md beside this file."""
    return "\n".join([HEAD, *filter(None, map(row, sorted(HERE.glob("step0*/*.py"))))])


if __name__ == "__main__":
    print(table())
