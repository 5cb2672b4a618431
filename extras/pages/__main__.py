"""Builds web pages for all course steps and files of common/, and an index: `python -m extras.pages
DIR`.
"""

import argparse
import ast
import re
import sys
from difflib import ndiff
from html import escape
from itertools import pairwise
from pathlib import Path

try:
    from jinja2 import Environment, FileSystemLoader
    from markdown_it import MarkdownIt
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
except ModuleNotFoundError as missing:
    sys.exit(f"error: the pages need {missing.name}: pip install -r requirements-dev.txt")

from extras.pages.pictures import all_pictures

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
TWINS = {  # step -> the function of bench/peers.py that does the same with PyTorch's own
    "step02_ddp": "build_ddp",
    "step03_zero": "build_fsdp",
    "step04_tp_sp": "build_dtensor",
    "step06_pipeline": "build_pipelining",
}


def course() -> dict[str, Path]:
    """The files of the course by module, in the order of reading."""
    files = {path.stem: path for path in sorted(ROOT.glob("step0*.py"))}
    for path in sorted(ROOT.glob("common/*.py")):
        files[f"common.{path.stem}".removesuffix(".__init__")] = path
    return files


def lines_of(source: str) -> list[str]:
    """The lines of a source in HTML."""
    lexer = PythonLexer(stripnl=False)
    return highlight(source, lexer, HtmlFormatter(nowrap=True)).split("\n")


class Pages:
    """Renders the source files for the template. `lines`: for each module, the lines of its file in
    HTML.
    """

    def __init__(self, files: dict[str, Path]):
        self.markdown = MarkdownIt("commonmark", dict(html=False)).enable("table")
        self.texts = {module: path.read_text() for module, path in files.items()}
        self.trees = {module: ast.parse(text) for module, text in self.texts.items()}
        self.lines = {module: lines_of(text) for module, text in self.texts.items()}
        table = re.findall(r"\((step\w+)\.py\) \| (\d+) \|", (ROOT / "README.md").read_text())
        self.minutes = dict(table)

    def prose(self, text: str) -> str:
        """Render a docstring's Markdown. Lines with three spaces in a row become a figure."""
        # A figure is a paragraph
        text = re.sub(r"^(\S(?!.*   ).*\n)(?=\S.*   )", r"\1\n", text, flags=re.M)
        text = re.sub(r"^(?=\S.*   )", "    ", text, flags=re.M)
        return self.markdown.render(text)

    def sections(self, module: str) -> list[dict]:
        """Make a section of each top-level statement of a file, except its docstring."""
        sections = []
        for before, node in pairwise(self.trees[module].body):
            imports = isinstance(node, ast.Import | ast.ImportFrom)
            parts = self.parts(module, before, node)
            sections.append(dict(name=getattr(node, "name", None), imports=imports, parts=parts))
        return sections

    def parts(self, module: str, before: ast.stmt, node: ast.stmt) -> list[dict]:
        """Split the lines after `before` to the end of `node` at each definition inside, into
        docstrings and code.
        """
        inside = [it for it in getattr(node, "body", ()) if isinstance(it, DEFINITIONS)]
        starts = [before.end_lineno + 1]
        starts += [(it.decorator_list or [it])[0].lineno for it in inside]
        ends = [*starts[1:], node.end_lineno + 1]
        parts = []
        for it, start, end in zip([node, *inside], starts, ends, strict=True):
            code = self.lines[module][start - 1 : end - 1]
            words = ast.get_docstring(it) if isinstance(it, DEFINITIONS) else ""
            if words:
                del code[it.body[0].lineno - start : it.body[0].end_lineno - start + 1]
            parts.append(dict(prose=self.prose(words or ""), code="\n".join(code).strip("\n")))
        return parts

    def change_of_train(self, module: str, earlier: str) -> str:
        """How a step's `train` differs from that of the step before, without comments: its lines in
        HTML, of the class added or removed if only one of the two has them.
        """
        sources = []
        for name in (earlier, module):
            text = ast.get_source_segment(self.texts[name], self.trees[name].body[-2])
            lines = [re.sub(r" *# .*", "", line) for line in text.splitlines()]
            sources.append([line for line in lines if line])
        lines = []
        for line in ndiff(*sources):
            if line[0] != "?":
                kind = {"+": "added", "-": "removed", " ": "same"}[line[0]]
                lines.append(f"<span class={kind}>{escape(line, quote=False)}\n</span>")
        return "".join(lines)

    def twin(self, module: str) -> str:
        """The function of bench/peers.py that builds the step with PyTorch's own parallelism, in
        HTML; "" if there is none.
        """
        if module not in TWINS:
            return ""
        source = (HERE.parent / "bench/peers.py").read_text()
        nodes = {getattr(node, "name", ""): node for node in ast.parse(source).body}
        return "\n".join(lines_of(ast.get_source_segment(source, nodes[TWINS[module]])))

    def readme(self) -> str:
        """README's title, first paragraph and first three sections. Of its links, those to steps
        stay, and lead to their pages.
        """
        title, *parts = (ROOT / "README.md").read_text().split("\n## ")
        text = "\n## ".join(["\n\n".join(title.split("\n\n")[:2]), *parts[:3]])
        html = self.markdown.render(text).replace('.py"', '.html"')
        return re.sub(r'<a href="(?!step).*?">(.*?)</a>', r"\1", html)


def main():
    """Read the flags and write the pages."""
    parser = argparse.ArgumentParser("python -m extras.pages", description=__doc__)
    parser.add_argument("out", metavar="DIR", type=Path, help="where to write")
    out = parser.parse_args().out
    files = course()
    pictures, pages = all_pictures(), Pages(files)
    rules = {"light": HtmlFormatter(style="default"), "dark": HtmlFormatter(style="github-dark")}
    templates = Environment(loader=FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True)
    templates.policies["json.dumps_kwargs"] = {}  # rows of a table stay in their order
    every = ["index", *files]
    out.mkdir(parents=True, exist_ok=True)
    for here in every:
        values = dict(p=pages, here=here, every=every, rules=rules, shown=pictures.get(here))
        (out / f"{here}.html").write_text(templates.get_template("page.html").render(values))
    print(
        f"{out / 'index.html'}: {sum(path.stat().st_size for path in out.iterdir()):,} bytes in all"
    )


if __name__ == "__main__":
    main()
