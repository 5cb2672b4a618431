"""`python -m services.pages DIR`: an index, and a page for each step and each file of common/, from the sources."""

import argparse
import ast
import difflib
import importlib
import json
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from pathlib import Path

try:
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
    from pygments.token import STANDARD_TYPES, Comment
except ModuleNotFoundError as missing:
    sys.exit(f"error: the pages need {missing.name}: pip install -r requirements-dev.txt")

from services.pages import pictures
from services.pages.names import Names

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
SOURCES = ("step0*.py", "common/*.py", "variants/*.py", "services/*.py", "theory/*.py")
SHOWS = {"step05_cp_ring": "ring", "step06_pipeline": "schedules", "common.schedules": "schedules"}
SHOWS |= {"step07_moe_ep": "mesh", "common.comm": "mesh", "run": "run"}  # a page's picture
STYLES = {"light": "default", "dark": "github-dark"}  # of Pygments, for code
PLAIN = ("", "n", "p", "w")  # Pygments' classes of names, punctuation and space, which have no colour


class Pages:
    """What the template shows."""

    def __init__(self):
        paths = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
        files = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
        self.names = Names(ROOT, files)
        self.modules = [module for module in files if module.startswith(("step", "common"))]
        self.trees = {module: ast.parse(source) for module, source in self.names.sources.items()}
        self.docs = {module: ast.get_docstring(tree) for module, tree in self.trees.items()}
        self.number = {name: n for n, name in enumerate(self.names.defs)}
        self.comments: dict[tuple[str, int], str] = {}  # by module and line
        self.html = {module: self.highlight(module) for module in self.modules}
        self.markdown = MarkdownIt("commonmark", dict(html=False)).enable("table")
        self.markdown.renderer.rules |= dict(code_inline=self.inline, code_block=self.block, fence=self.block)

        self.tasks = defaultdict(dict)  # by name of a function or class, and by lab and number
        for path in sorted(ROOT.glob("labs/lab[0-9].py")):
            lab = importlib.import_module(f"labs.{path.stem}").LAB
            for module in lab.modules:
                for hole, n in lab.holes(module).items():
                    self.tasks[f"{module}.{hole.split('.')[0]}"][lab.number, n] = lab.task(n)

    def link(self, names: Iterable[str], html: str, more: str = "") -> str:
        """A link to the definitions of these names, as far as they are on a page."""
        names = sorted(name for name in names if self.names.defs[name].module in self.modules)
        if not names:
            return html
        spot, numbers = self.names.defs[names[0]], " ".join(str(self.number[name]) for name in names)
        return f'<a href="{spot.module}.html#{spot.name}" data-d="{numbers}"{more}>{html}</a>'

    def highlight(self, module: str) -> list[str]:
        """A file's lines in HTML; each name has an anchor where it is defined. Notes the comments."""
        lines, column = [""], 0
        source = self.names.sources[module].decode()
        for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
            for part in re.split("(\n)", text):
                place, css, html = (module, len(lines), column), STANDARD_TYPES[kind], escape(part, quote=False)
                column += len(part)
                if part == "\n":
                    lines.append("")
                    column = 0
                    continue
                if kind in Comment:
                    self.comments[place[:2]] = part.strip("#- ")
                if part and css not in PLAIN:
                    html = f"<span class={css}>{html}</span>"
                home = self.names.homes.get(place)
                anchor = f' id="{self.names.defs[home].name}"' if home else ""
                lines[-1] += self.link(self.names.refs.get(place, ()), html, anchor)
        return lines

    def inline(self, tokens: list, n: int, _options: dict, env: dict) -> str:
        """A name in a text is a link: to what its module defines or names so, or else to what anyone does."""
        text, module = tokens[n].content, env.get("module")
        for among in (self.names.known[module], self.names.defs if re.search(r"^[A-Z]|[_.]", text) else ()):
            found = [name for name in among if name.endswith(f".{text}")]
            if 0 < len(found) < 4:
                return f"<code>{self.link(found, escape(text))}</code>"
        return f"<code>{escape(text)}</code>"

    def block(self, tokens: list, n: int, *_) -> str:
        """A picture in letters, as it is; CSS makes it fit its `--columns`."""
        text = tokens[n].content.rstrip()
        columns = max(len(line) for line in text.split("\n"))
        return f'<pre class=art tabindex=0 style="--columns:{columns}">{escape(text)}</pre>'

    def prose(self, text: str, module: str) -> str:
        """A docstring or comment: Markdown, but a paragraph with columns is a picture, even if it is not indented."""
        parts = text.split("\n\n")
        parts = [re.sub("^", "    ", p, flags=re.M) if "   " in p and not p.startswith("    ") else p for p in parts]
        return self.markdown.render("\n\n".join(parts), dict(module=module))

    def sections(self, module: str) -> Iterable[dict]:
        """What a file's top level says, one by one."""
        head, *body = self.trees[module].body
        earlier = [step for step in self.modules if step.startswith("step") and step < module]
        start = head.end_lineno + 1
        for node in body:
            name = getattr(node, "name", "")
            old = [step for step in earlier if name and f"{step}.{name}" in self.names.defs][-1:]
            same = self.beside(f"{old[0]}.{name}", f"{module}.{name}") if old else []
            apart = not self.html[module][start - 1]
            yield dict(name=name, apart=apart, old=old, same=same, rows=self.rows(module, node, start))
            start = node.end_lineno + 1

    def rows(self, module: str, node: ast.stmt, start: int) -> list[dict]:
        """Pieces of code from line `start` to the end of a statement, each with the prose about it."""
        docs, skip = {}, set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
                docs[min(part.lineno for part in (inner, *inner.decorator_list))] = ast.get_docstring(inner)
                skip |= set(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
        rows, says, ended = [], [], True
        for n in range(start, node.end_lineno + 1):
            comment, code = self.comments.get((module, n), ""), self.html[module][n - 1].split("<span class=c")[0]
            if n in skip or not (rows or comment or code):
                continue
            if comment and not code.strip():
                says.append(comment)
                continue
            about = "\n\n".join(filter(None, (" ".join(says), docs.get(n), comment)))
            if about or ended:
                rows.append(dict(prose=self.prose(about, module), code=[]))
                says, ended = [], bool(comment)
            rows[-1]["code"].append(code.rstrip())
        return rows

    def beside(self, *names: str) -> list[tuple[str, str, str]]:
        """(what happened, old lines, new lines) of two functions."""
        spots = [self.names.defs[name] for name in names]
        old, new = (self.html[spot.module][spot.start - 1 : spot.end] for spot in spots)
        plain = [[re.sub("<.*?>", "", line) for line in lines] for lines in (old, new)]
        blocks = difflib.SequenceMatcher(None, *plain, autojunk=False).get_opcodes()
        return [(tag, "\n".join(old[a:b]), "\n".join(new[c:d])) for tag, a, b, c, d in blocks]

    def readme(self) -> str:
        """README's title, the seven cuts and the course; its links lead to pages."""
        title, *parts = (ROOT / "README.md").read_text().split("\n## ")
        parts = [part for part in parts if part.startswith(("The seven cuts", "The course"))]
        html = self.markdown.render("\n## ".join([title.split("\n")[0], *parts]))
        return html.replace('.py"', '.html"')

    def write(self, out: Path, run: Path | None):
        """All files."""
        shown = pictures.all_pictures() | (dict(run=pictures.run(run)) if run else {})
        out.mkdir(parents=True, exist_ok=True)
        for name, picture in shown.items():
            frames = json.dumps(picture["frames"], separators=(",", ":"))
            (out / f"{name}.js").write_text(f"const FRAMES = {frames}\n")
        spots = []
        for name, spot in self.names.defs.items():
            users = ", ".join(self.link([user], user) for user in sorted(self.names.users[name]))
            spots.append([*spot, users] if spot.module in self.modules else 0)
        (out / "names.js").write_text(f"const LINES = {json.dumps(self.html)}, DEFS = {json.dumps(spots)}\n")
        styles = {scheme: HtmlFormatter(style=style).get_style_defs(".code") for scheme, style in STYLES.items()}
        css = [f"@media (prefers-color-scheme: {scheme}) {{\n{rules}\n}}\n" for scheme, rules in styles.items()]
        (out / "code.css").write_text("".join(css))
        for name in ("page.js", "style.css"):
            shutil.copy(HERE / name, out)
        templates = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True)
        for here in ("index", *self.modules, *(["run"] if run else [])):
            values = dict(here=here, show=SHOWS.get(here), picture=shown.get(SHOWS.get(here)), run=run)
            (out / f"{here}.html").write_text(templates.get_template("page.html").render(p=self, **values))


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
