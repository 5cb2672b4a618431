"""What variants attach, and to what, as their sources say: so a page says it beside what they change."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from extras.variants.__main__ import entries

# The classes of what `attach` calls by these names, and how each verb of `Parts` is read aloud.
OF = dict(optimizer="Optimizer Zero1", zero="Zero1", sync="NaiveSync BucketSync Zero1 Zero2", unit="Unit ShardedUnit")
OF |= dict(model="Decoder", layer="DecoderLayer", self_attn="Attention", pipeline="Pipeline", data="Data", run="Run")
HOW = {"parts.around": "stands around this", "parts.instead": "takes this place"}


def changes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(how, "Class.method" or menu) of calls of `parts.around` and `parts.instead`, for each class that it may be."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (how := HOW.get(ast.unparse(node.func))):
            owner, method = ast.unparse(node.args[0]).split(".")[-1], getattr(node.args[1], "value", "")
            yield how, owner
            for cls in OF.get(owner, "").split() if method else ():
                yield how, f"{cls}.{method}"


def summary(tree: ast.Module) -> tuple[str, str]:
    """The flag that a file's docstring names first, and its first words, without it."""
    doc = re.sub(r"\s+", " ", ast.get_docstring(tree))
    flag = (re.findall("`(--[^`]*)`", doc) or re.findall(r"--[\w-]+", doc) or [""])[0]
    return flag, re.split(r" \(|[:.] |, ", doc.removeprefix(f"`{flag}`: "), maxsplit=1)[0]


def all_attached(root: Path) -> dict[str, list[tuple[str, str, str]]]:
    """By what is changed, "Optimizer.step" or the menu "SYNCS": (flag, file, how, and what the file is about).

    Menus are those of steps and common; one that a variant has for others is left out.
    """
    by_name: dict[str, set] = defaultdict(set)
    course = "".join(path.read_text() for path in [*root.glob("step0*.py"), *root.glob("common/*.py")])
    for path in sorted(root.glob("extras/variants/step0*/*.py")):
        tree = ast.parse(path.read_text())
        flag, about = summary(tree)
        added = [(f"makes the entry {key!r}", menu) for menu, key in entries(tree)]
        for how, name in (*added, *changes(tree)):
            if re.search(rf"^(class )?{name.split('.')[0]}\b", course, re.M):
                by_name[name].add((flag, path.relative_to(root).as_posix(), f"{how} ({about})"))
    return {name: sorted(of) for name, of in by_name.items()}
