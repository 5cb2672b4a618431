"""`python -m services.pages DIR`: an index, and a page for each step and each file of common/, from the sources."""

import argparse
import ast
import difflib
import importlib
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from html import escape, unescape
from itertools import pairwise
from pathlib import Path

try:
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
    from pygments.token import STANDARD_TYPES

    from services.pages.attached import all_attached
    from services.pages.names import Names
except ModuleNotFoundError as missing:
    sys.exit(f"error: the pages need {missing.name}: pip install -r requirements-dev.txt")

from services.pages import charts, pictures

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent


def blocks(*lines: str) -> str:
    """Each in a block of its own: what does not fit goes on under its own start."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    return "".join(f'<span style="--in: {n}">{line.rstrip()}\n</span>' for n, line in zip(indents, lines, strict=True))


class Pages:
    """What the template shows. `lines`: by module, the lines of its file in HTML."""

    def __init__(self, files: dict[str, Path]):
        self.names, self.markdown = Names(ROOT, files), MarkdownIt("commonmark", dict(html=False)).enable("table")
        self.trees = {module: ast.parse(path.read_text()) for module, path in files.items()}
        self.lines = {module: self.highlight(module, path.read_text()) for module, path in files.items()}
        self.attached = all_attached(ROOT)
        self.labs = [importlib.import_module(f"labs.{path.stem}").LAB for path in sorted(ROOT.glob("labs/lab[0-9].py"))]

    def highlight(self, module: str, source: str) -> list[str]:
        """A name is a link to what it stands for, and has as id what it defines."""
        lines, column = [""], 0
        for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
            for part in re.findall("\n|.+", text):
                place, html, css = (module, len(lines), column), escape(part, quote=False), STANDARD_TYPES[kind]
                own = f"{module}.html#{part}"  # a class in quotes, as in config: "Config"
                if found := self.names.refs.get(place) or [own] * (part.istitle() and own in self.names.homes):
                    ids = [f'id="{a.partition("#")[2]}"' for a in found if self.names.homes.get(a) == place]
                    html = f'<a {"".join(ids)} href="{found[0]}" data-pages="{" ".join(found)}">{html}</a>'
                lines[-1] += f"<span class={css}>{html}</span>" if css and part.strip() else html.strip("\n")
                column += len(part)
                if part == "\n":
                    lines.append("")
                    column = 0
        return lines

    def prose(self, text: str, module: str) -> str:
        """A docstring or comment, in Markdown. Names that its file knows are links, lines with columns a picture."""

        def link(match: re.Match) -> str:
            found = sorted(address for address in self.names.named[module] if re.search(rf"[#.]{match[1]}$", address))
            return f"[{match[0]}]({found[0]})" if 0 < len(found) < 4 else match[0]

        text = re.sub(r"^(\S(?!.*   ).*\n)(?=\S.*   )", r"\1\n", text, flags=re.M)  # a picture is a paragraph
        text = re.sub(r"^(?=\S.*   )", "    ", text, flags=re.M)
        return self.markdown.render(re.sub(r"`([\w.]+)`", link, text))

    def sections(self, module: str) -> list[dict]:
        """What a file's top level says, one by one, and beside it what the step before says under the same name."""
        steps = [(step, tree) for step, tree in self.trees.items() if "step" <= step < module]
        earlier = {it.name: (step, it) for step, tree in steps for it in tree.body if hasattr(it, "name")}
        found = []
        for before, node in pairwise(self.trees[module].body):
            name, imports = getattr(node, "name", None), isinstance(node, ast.Import | ast.ImportFrom)
            both = dict(old=earlier.get(name), new=(module, node))
            found.append(dict(name=name, imports=imports, parts=self.parts(module, before, node)) | both)
        return found

    def parts(self, module: str, before: ast.stmt, node: ast.stmt) -> list[list[dict]]:
        """What comes after a statement, to the end of the next: of each definition, pieces of code with their prose."""
        inside = [it for it in (node, *getattr(node, "body", ())) if isinstance(it, ast.FunctionDef | ast.ClassDef)]
        starts = {(it.decorator_list or [it])[0].lineno: it for it in inside}
        texts = [it.body[0] for it in inside if ast.get_docstring(it)]
        docs = {n for text in texts for n in range(text.lineno, text.end_lineno + 1)}
        parts, says, ended = [[]], [], True
        menu = getattr(getattr(node, "target", None) or getattr(node, "targets", [None])[0], "id", None)
        for n in range(before.end_lineno + 1, node.end_lineno + 1):
            code, _, comment = self.lines[module][n - 1].partition("<span class=c1>")
            line, it = unescape(comment.removesuffix("</span>")), starts.get(n)
            comment = re.sub("^#( ---)? ?", "", line).rstrip()
            if line and not code.strip():
                says.append(comment)
            elif n not in docs and (parts[0] or code):
                if it and parts[0]:
                    parts.append([])
                if says or comment or ended or it:
                    about = filter(None, ("\n".join(says), it and ast.get_docstring(it), comment))
                    name = (it and (it.name if it is node else f"{node.name}.{it.name}")) or menu
                    parts[-1].append(dict(prose=self.prose("\n\n".join(about), module), name=name, code=""))
                    says, ended = [], bool(comment)
                parts[-1][-1]["code"] += blocks(code)
        return parts

    def beside(self, *both: tuple[str, ast.stmt]) -> list[tuple[str, str, str]]:
        """(what happened, old lines, new lines) of two definitions."""
        old, new = (self.lines[module][node.lineno - 1 : node.end_lineno] for module, node in both)
        plain = [[re.sub("<.*?>", "", line) for line in lines] for lines in (old, new)]
        codes = difflib.SequenceMatcher(None, *plain, autojunk=False).get_opcodes()
        return [(tag, blocks(*old[a:b]), blocks(*new[c:d])) for tag, a, b, c, d in codes]

    def readme(self) -> str:
        """README's title, what each step shards, the course and the house; its links lead to pages."""
        title, *parts = (ROOT / "README.md").read_text().split("\n## ")
        text = "\n## ".join([title.split("\n")[0], *parts[:3]])
        return self.markdown.render(re.sub(r"!\[.*", "", text)).replace('.py"', '.html"')


def main():
    """Read the flags and write the pages."""
    parser = argparse.ArgumentParser("python -m services.pages", description=__doc__)
    parser.add_argument("out", metavar="DIR", type=Path, help="where to write")
    parser.add_argument("--run", type=Path, help="a run's directory, to be shown, too")
    flags = parser.parse_args()
    if flags.run and not (flags.run / "metrics.jsonl").exists():
        sys.exit(f"error: --run {flags.run}: there is no metrics.jsonl; name the directory of a run")
    paths = [*sorted(ROOT.glob("step0*.py")), *sorted(ROOT.glob("common/*.py"))]
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    with ProcessPoolExecutor(1) as pool:
        shown, pages = pool.submit(pictures.all_pictures), Pages(files)  # at the same time
    shown, drawn = shown.result(), dict(run=list(charts.of_run(flags.run))) if flags.run else {}
    rules = {"light": HtmlFormatter(style="default"), "dark": HtmlFormatter(style="github-dark")}
    templates = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True)
    templates.policies["json.dumps_kwargs"] = {}  # rows of a table stay in their order
    every = ["index", *files, *drawn]
    flags.out.mkdir(parents=True, exist_ok=True)
    for here in every:
        values = dict(
            p=pages, here=here, every=every, rules=rules, shown=shown.get(here, ()), charts=drawn.get(here, ())
        )
        (flags.out / f"{here}.html").write_text(templates.get_template("page.html").render(values))
    print(f"{flags.out / 'index.html'}: {sum(path.stat().st_size for path in flags.out.iterdir()):,} bytes in all")


if __name__ == "__main__":
    main()
