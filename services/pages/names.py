"""Which name stands for what, as Pyrefly, a type checker, reports it for Glean, an index of code.

A name in full is that of its module and, after a dot, what it is called there: common.comm.Group.share.
"""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

CHECK = "check --skip-interpreter-query --threads=1 --untyped-def-behavior=check-and-infer-return-type --search-path=."
CHECK += " --replace-imports-with-any=torch --replace-imports-with-any=torch.*"
GIVEN = re.compile(rb"(?<=\bself\.)\w+\b(?=[^=\n(]*=[^=])")  # what a method gives to `self`, which is in no report


class Definition(NamedTuple):
    """Lines `start` to `end` of a file, from 1, define `name`, for example Group.share."""

    module: str
    name: str
    start: int
    end: int


def report(root: Path, paths: list[Path]) -> dict[str, list]:
    """What Pyrefly finds in files, by kind of fact. Torch is unknown."""
    facts = defaultdict(list)
    with TemporaryDirectory() as out:
        command = [sys.executable, "-m", "pyrefly", *CHECK.split(), f"--report-glean={out}", *paths]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        for path in Path(out).glob("*.json"):
            for part in json.loads(path.read_text(), object_hook=lambda fact: fact.get("key", fact)):
                if "predicate" in part:
                    facts[part["predicate"].split(".")[1]] += part["facts"]
    if not facts:
        sys.exit(f"error: the pages need pyrefly (pip install -r requirements-dev.txt), which says: {done.stderr}")
    return facts


class Names:
    """All definitions, by name in full. A place is (module, line, column), in characters.

    `homes`: by place the name that is defined there. `refs`: by place what a name stands for. `users`: who names it.
    `known`: by module all that it defines or names.
    """

    def __init__(self, root: Path, files: dict[str, Path]):
        self.sources = {module: path.read_bytes() for module, path in files.items()}
        self.defs: dict[str, Definition] = {}
        self.homes: dict[tuple[str, int, int], str] = {}
        self.refs, self.users, self.known = defaultdict(set), defaultdict(set), defaultdict(set)
        for module, source in self.sources.items():
            self.defs[module] = Definition(module, "", 1, ast.parse(source).body[0].end_lineno)
        modules, classes = {str(path.relative_to(root)): module for module, path in files.items()}, []
        facts = report(root, list(files.values()))
        for fact in facts["DefinitionLocation"]:
            ((kind, found),) = fact["definition"].items()
            if kind != "module" and "<locals>" not in found["declaration"]["name"]:
                spot = modules[fact["file"]], found["declaration"]["name"], *fact["span"].values()
                self.define(*spot)
                classes += [spot] if kind == "cls" else []
        self.classes = {name.rpartition(".")[2] for _, name, _, _ in classes}
        owners = {}  # the innermost definition that a line belongs to
        for name, spot in sorted(self.defs.items(), key=lambda item: item[1].start - item[1].end):
            owners |= {(spot.module, line): name for line in range(spot.start, spot.end + 1)}
        for module, owner, length, start in classes:
            for given in GIVEN.finditer(self.sources[module], start, start + length):
                name = f"{owner}.{given[0].decode()}"
                self.define(module, name, len(given[0]), given.start())
                self.refs[self.place(module, given.start())] = {name}
        for fact in facts["XRefsViaNameByFile"]:
            module = modules[fact["file"]]
            lines = self.sources[module].split(b"\n")
            for xref in fact["xrefs"]:
                place = self.place(module, xref["source"]["start"])
                found = self.find(xref["target"])
                self.refs[place] |= found
                if not lines[place[1] - 1].lstrip().startswith((b"from ", b"import ")):
                    user = owners.get(place[:2], module)
                    for name in found - {user}:
                        self.users[name].add(user)
        for module in self.sources:
            self.link_calls(module)
        for place, names in self.refs.items():
            self.known[place[0]] |= names

    def link_calls(self, module: str):
        """Where `model = Decoder(...)` stands before, `model(...)` stands for Decoder.forward."""
        made: dict[str, set[str]] = {}
        for n, line in enumerate(self.sources[module].decode().split("\n"), 1):
            for call in re.finditer(r"(?<![.\w])(\w+)\(", line):
                if found := made.get(call[1]):
                    self.refs[module, n, call.start()] = found
            if new := re.match(r" +(\w+) = ([A-Z]\w+)\(", line):
                kinds = self.refs[module, n, new.start(2)]
                made[new[1]] = {f"{kind}.forward" for kind in kinds} & self.defs.keys()

    def place(self, module: str, start: int) -> tuple[str, int, int]:
        """Of a byte of a file."""
        *before, line = self.sources[module][:start].decode().split("\n")
        return module, len(before) + 1, len(line)

    def define(self, module: str, name: str, length: int, start: int):
        """Note a definition of so many bytes, in which the name stands; the first place counts."""
        if name not in self.defs:
            home = re.compile(rf"\b{name.rpartition('.')[2]}\b".encode()).search(self.sources[module], start)
            lines = [self.place(module, byte)[1] for byte in (start, start + length)]
            self.defs[name] = Definition(module, name.removeprefix(f"{module}."), *lines)
            self.homes[self.place(module, home.start())] = name
            self.refs[self.place(module, home.start())] = {name}

    def find(self, target: str) -> set[str]:
        """The definition that a target stands for, or none.

        What a class has from a base, Pyrefly calls "module of the base.class.name": it is the only one of this name in
        a class of that module.
        """
        if target in self.defs:
            return {target}
        owner, _, name = target.rpartition(".")
        home, _, kind = owner.rpartition(".")
        found = [i for i, spot in self.defs.items() if spot.module == home and spot.name.endswith(f".{name}")]
        return set(found) if kind in self.classes and len(found) == 1 else set()
