"""Resolves names to their definitions with Jedi, as editors do. Names of torch are not resolved.

An address is the link to a definition: common.comm.html#Group.share. A name's place is (module,
line, column).
"""

from collections import defaultdict
from pathlib import Path

import jedi


class Names:
    """Links all names. `refs`: a name's place (module, line, column) -> links to its possible
    definitions (addresses).

    `homes`: address -> place of the definition. `named`: module -> the addresses of all definitions
    that it names.
    """

    def __init__(self, root: Path, files: dict[str, Path]):
        self.modules = {path: module for module, path in files.items()}
        self.refs, self.homes, self.named = {}, {}, defaultdict(set)
        jedi.inference.recursion.per_function_execution_limit = (
            100  # with 6, its default, Jedi gives up on mesh["dp"]
        )
        project = jedi.Project(root, sys_path=[str(root)])
        scripts = {
            module: jedi.Script(path=path, project=project)
            for module, path in sorted(files.items())
        }
        names = [
            (m, it)
            for m, script in scripts.items()
            for it in script.get_names(all_scopes=True, references=True)
        ]
        known = {it.name for _, it in names if it.is_definition()}.union(
            *(module.split(".") for module in files)
        )
        # Other names are torch's or Python's
        for module, name in [(m, it) for m, it in names if it.name in known]:
            addresses = {self.address(it) for it in name.goto(follow_imports=True)} - {""}
            # model(x, y)
            if not addresses and name.get_line_code()[name.column :].startswith(f"{name.name}("):
                addresses = {
                    f"{self.address(kind)}.forward" for kind in name.infer()
                } & self.homes.keys()
            for address in addresses:
                # Else it is imported
                if name.is_definition() and address.startswith(f"{module}.html#"):
                    self.homes.setdefault(address, (module, name.line, name.column))
            self.refs[module, name.line, name.column] = sorted(addresses)
            self.named[module] |= addresses

    def address(self, it: jedi.api.classes.Name) -> str:
        """The address of a definition, or "" if the definition is a local variable or outside our
        files.
        """
        module, scope, name = self.modules.get(it.module_path), it.parent(), it.full_name
        if not (module and name) or it.type == "param":
            return ""
        if scope and scope.type == "function" and it.type not in ("function", "class"):
            if not it.get_line_code()[: it.column].endswith("."):
                return ""
            name = f"{scope.parent().full_name}.{it.name}"  # a method assigns it to `self`
        return f"{module}.html#{name.removeprefix(module).lstrip('.')}"
