"""`python -m services.pages DIR`: an index, and a page for each step and each file of common/, from the sources."""

import argparse
import ast
import difflib
import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

try:
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt
    from pygments.lexers import PythonLexer
    from pygments.token import Comment, Keyword, Name, Number, String
except ModuleNotFoundError as missing:
    sys.exit(f"error: the pages need {missing.name}: pip install -r requirements-dev.txt")

from services.pages import pictures
from services.pages.names import Names

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
ROOMS = ("", "common", "variants", "services", "theory")
KINDS = {Comment: "c", String: "s", Keyword: "k", Number: "m", Name.Function: "f", Name.Class: "f", Name.Builtin: "b"}
SHOWS = {"step05": ["ring"], "step06": ["schedules"], "step07": ["mesh"]}  # pictures, by the start of a module's name
SHOWS |= {"common.schedules": ["schedules"], "common.comm": ["mesh"], "run": ["run"]}


def badges() -> dict[str, str]:
    """From the id of what a task of a lab asks for to the task, as far as there are labs."""
    found = {}
    for path in sorted((ROOT / "labs").glob("lab[0-9]*.py")):
        lab = importlib.import_module(f"labs.{path.stem}").LAB
        for n, task in enumerate(lab.tasks, 1):
            for hole in task.holes:
                found[hole if ":" in hole else f"{lab.modules[-1]}:{hole}"] = f"labs/{path.name}, task {n}"
    return found


class Pages:
    """What the templates show."""

    def __init__(self):
        paths = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py" if room else "step0*.py"))]
        files = {
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths
        }
        self.names, self.comments, self.badges = Names(ROOT, files), {}, badges()
        self.modules = [module for module in files if module.startswith(("step", "common"))]
        self.number = {id_: n for n, id_ in enumerate(self.names.defs)}
        self.html = {module: self.highlight(module) for module in self.modules}
        self.markdown = MarkdownIt("commonmark", dict(html=False)).enable("table")
        self.markdown.renderer.rules |= dict(code_inline=self.inline, code_block=self.block, fence=self.block)

    def link(self, ids: Iterable[str], text: str) -> str:
        """A name as a link to what it stands for, as far as that is on a page."""
        ids = sorted(id_ for id_ in ids if self.names.defs[id_].module in self.modules)
        href, numbers = ids and ids[0].replace(":", ".html#"), " ".join(str(self.number[id_]) for id_ in ids)
        return f'<a href="{href}" data-d="{numbers}">{text}</a>' if ids else text

    def users(self, id_: str) -> str:
        """Links to all that name something."""
        users = sorted(self.names.users[id_])
        return ", ".join(self.link([user], user.replace(":", ": ").removesuffix(": ")) for user in users)

    def highlight(self, module: str) -> list[str]:
        """A file's lines in HTML."""
        lines, column = [""], 0
        for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens("\n".join(self.names.lines[module])):
            for n, part in enumerate(text.split("\n")):
                if n:
                    column = lines.append("") or 0
                css, html = next((css for name, css in KINDS.items() if kind in name), ""), escape(part, quote=False)
                if css == "c":
                    self.comments[module, len(lines)] = part.strip("#- ")
                if html:
                    html = f"<i class={css}>{html}</i>" if css else html
                    lines[-1] += self.link(self.names.refs.get((module, len(lines), column), ()), html)
                column += len(part)
        return lines

    def inline(self, tokens: list, n: int, _options: dict, env: dict) -> str:
        """A name in a text: what the file defines or names so, or else a function or class anywhere."""
        text, (module, names) = tokens[n].content, (env.get("module", ""), self.names)
        among = names.known[module] if module else ()
        ids = {i for i in among if i.endswith((f":{text}", f".{text}"))}
        if not ids and re.fullmatch(r"[A-Z]\w+|\w+[_.][\w.]+", text):
            ids = {i for i in names.owners.values() if i.endswith((f":{text}", f".{text}"))}
        return f"<code>{self.link(ids, escape(text)) if len(ids) < 4 else escape(text)}</code>"

    def block(self, tokens: list, n: int, *_) -> str:
        """A picture in letters, as it is; CSS makes it fit its `--w` columns."""
        text = tokens[n].content.rstrip()
        return f'<pre class=art tabindex=0 style="--w:{max(map(len, text.split(chr(10))))}">{escape(text)}</pre>'

    def prose(self, text: str, module: str) -> str:
        """A docstring or comment: Markdown, but a paragraph with columns is a picture, even if it is not indented."""
        parts = [
            p if p[:4].isspace() or "   " not in p else re.sub("^", "    ", p, flags=re.M) for p in text.split("\n\n")
        ]
        return self.markdown.render("\n\n".join(parts), dict(module=module))

    def sections(self, module: str) -> list[dict]:
        """A file cut into what its top level defines, and that into pieces of code, each with the prose about it."""
        tree, before = self.names.trees[module], [m for m in self.modules if m < module and "." not in m + module]
        docs, tops, anchors = {}, {}, {}
        skip = set(range(1, tree.body[0].end_lineno + 1))
        for definition in self.names.defs.values():
            if definition.module == module:
                anchors[definition.start] = anchors.get(definition.start, "") + f'<b id="{definition.name}"></b>'
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
                tops |= {first: node.name} if node in tree.body else {}
                if ast.get_docstring(node):
                    docs[first] = ast.get_docstring(node)
                    skip |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            elif node in tree.body:
                tops[node.lineno] = ""
        sections, says, alone = [], [], True
        for n, html in enumerate(self.html[module], 1):
            comment, code = self.comments.get((module, n), ""), html.split("<i class=c>")[0].rstrip()
            if n in skip or (comment and not code):
                says += [comment] * (n not in skip)
                continue
            if n in tops and (not sections or tops[n] or sections[-1]["name"]):
                id_ = f"{module}:{tops[n]}"
                old = next((m for m in reversed(before) if tops[n] and f"{m}:{tops[n]}" in self.names.defs), "")
                same = self.beside(f"{old}:{tops[n]}", id_) if old else []
                sections.append(dict(name=tops[n], old=old, same=same, pieces=[]))
                sections[-1]["badges"] = [self.badges[i] for i in self.badges if i == id_ or i.startswith(f"{id_}.")]
                alone = True
            about = "\n\n".join(filter(None, (" ".join(says), docs.get(n), comment)))
            if code and (about or alone):
                art = max((len(line) for line in about.split("\n") if "   " in line), default=0)
                sections[-1]["pieces"].append(dict(prose=self.prose(about, module), code=[], wide=art > 56))
                says, alone = [], bool(comment)
            if sections:
                sections[-1]["pieces"][-1]["code"].append(anchors.get(n, "") + code)
        return sections

    def beside(self, *ids: str) -> list[tuple[str, str, str]]:
        """(what happened, old lines, new lines) of two functions."""
        spots = [self.names.defs[id_] for id_ in ids]
        texts, html = ([s[d.module][d.start - 1 : d.end] for d in spots] for s in (self.names.lines, self.html))
        blocks = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
        return [(tag, "\n".join(html[0][a:b]), "\n".join(html[1][c:d])) for tag, a, b, c, d in blocks]

    def readme(self) -> str:
        """What README says of the cuts and the course; its links lead to pages, or nowhere."""
        parts = (ROOT / "README.md").read_text().split("\n## ")
        marks = "\n".join(re.findall(r"^\[.*\]: .*$", "\n".join(parts), flags=re.M))
        html = self.markdown.render(
            "\n\n".join([parts[0].split("\n")[0], *(f"## {p}" for p in parts if re.match(".*(cuts|course)", p)), marks])
        )
        html = re.sub(r'href="(step\w+)\.py"', r'href="\1.html"', html)
        return re.sub(r'<a href="(?!step)[^"]*">(.*?)</a>', r"\1", html)

    def docstring(self, module: str) -> str:
        """That of a file."""
        return ast.get_docstring(self.names.trees[module])

    def write(self, out: Path, run: Path | None):
        """All files."""
        data = pictures.all_pictures() | (dict(run=pictures.run(run)) if run else {})
        out.mkdir(parents=True, exist_ok=True)
        for name, made in data.items():
            (out / f"{name}.js").write_text(f"PICTURES.{name} = {json.dumps(made, separators=(',', ':'))}\n")
        spots = [[*d, self.users(id_)] if d.module in self.modules else 0 for id_, d in self.names.defs.items()]
        (out / "names.js").write_text(f"const LINES = {json.dumps(self.html)}, DEFS = {json.dumps(spots)}\n")
        for name in ("page.js", "style.css"):
            shutil.copy(HERE / name, out)
        templates = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True)
        for here in ("index", *self.modules, *(["run"] if run else [])):
            shows = [name for start, names in SHOWS.items() if here.startswith(start) for name in names]
            page = templates.get_template("page.html").render(p=self, here=here, shows=shows, run=run)
            (out / f"{here}.html").write_text(page)


def main():
    """Read the flags and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", metavar="DIR", type=Path, help="where to write")
    parser.add_argument("--run", type=Path, help="a run's directory, to be shown, too")
    flags = parser.parse_args()
    if flags.run and not (flags.run / "metrics.jsonl").exists():
        sys.exit(f"error: --run {flags.run}: there is no metrics.jsonl; name the directory of a run")
    Pages().write(flags.out, flags.run)
    print(f"{flags.out / 'index.html'}: {sum(path.stat().st_size for path in flags.out.iterdir()):,} bytes in all")


if __name__ == "__main__":
    main()
