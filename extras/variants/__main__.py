"""Prints the table of techniques from their files: `python -m extras.variants > extras/variants/README.md`."""

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
HEAD = """# Techniques

Each file changes a step from outside if its flag is set, and is in the folder of the first step that can use it. Its
docstring says where its lines would be in the course. `__init__.py` has the rules, and [record.py](record.py) shows how
a file declares the flags that it needs or excludes; a run refuses other combinations in one line. `python -m
extras.variants > extras/variants/README.md` writes this table from the files.

| technique | flags | source | step |
| --- | --- | --- | --- |"""
FLAG_OF = {  # the name of each menu of the course -> the flag whose values are its entries
    menu: name
    for path in HERE.parents[1].glob("step0*.py")
    for name, menu in re.findall(r"(\w+): \w+ = among\((\w+),", path.read_text())
}
WORK = r"[A-Z][\w-]+(?: and [A-Z]\w+| et al\.),? (?:19|20)\d\d(?:, \"[^\"]+\")?|DeepSeek-V3|DeepEP|Megatron-LM"


def flags(module: ModuleType, text: str) -> list[str]:
    """Returns a file's flags: its menu entries (`--sync tree`) and its own flags, or else the first flag in `text`."""
    entries = re.findall(r'(\w+)\["([\w-]+)"\] = ', text)  # SYNCS["tree"] = ...
    found = [f"{FLAG_OF[menu]} {key}" for menu, key in entries if menu in FLAG_OF]
    found += [field.name for field in fields(module.Flags)] if hasattr(module, "Flags") else []
    return ["--" + flag.replace("_", "-") for flag in found] or re.findall(r"--[\w-]+", text)[:1]


def row(path: Path) -> str:
    """Returns a file's row: its first sentence (without parentheses), flags, sources and step."""
    module = import_module(f"extras.variants.{path.parent.name}.{path.stem}")
    doc = " ".join(module.__doc__.split())
    about = re.split(r"\.(?: |$)", re.sub(r" \([^()]*\)|^`--[^`]*`: ", "", doc))[0]
    words = flags(module, path.read_text())
    cells = [f"[{about}]({path.relative_to(HERE).as_posix()})", ", ".join(f"`{word}`" for word in words)]
    works = "; ".join(dict.fromkeys(re.findall(WORK, doc)))
    return " | ".join(["", *cells, works, path.parent.name[4:].lstrip("0"), ""]).strip()


def table() -> str:
    """The text of README.md."""
    return "\n".join([HEAD, *map(row, sorted(HERE.glob("step0*/*.py")))])


if __name__ == "__main__":
    print(table())
