"""The course as pages: every name leads to its definition, and a real browser shows them as they should be."""

import ast
import inspect
import io
import json
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
import tokenize
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("markdown_it")
pytest.importorskip("pygments")
pytest.importorskip("jedi")

from extras.labs import TASKS, holes, text_of
from extras.services.memory import CATEGORIES
from extras.services.pages import __main__ as site
from extras.services.pages.names import Names

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted(ROOT.glob("step0*.py"))}
FILES |= {f"common.{path.stem}".removesuffix(".__init__"): path for path in sorted((ROOT / "common").glob("*.py"))}
PAGES = ["index", "run", *FILES]
LARGEST = 4_000_000  # bytes of all pages together
LIGHT, DARK = "light", "dark"

BOXES = """
const f = document.forms[0], span = (b, n) => +b.style.getPropertyValue(n).replace('span', '');
[f.schedule.value, f.ranks.value, f.micro_batches.value] = arguments
f.ranks.dispatchEvent(new Event('input', {bubbles: true}))
return [...document.querySelectorAll('.stage label')].map(
  b => [span(b, 'grid-row-start') - 1, span(b, 'grid-column-start') - 2, span(b, 'grid-column-end'),
        'FBW'[b.style.getPropertyValue('--colour')], +b.textContent])"""
SHOWN = """return [document.querySelector('h1').textContent, [...document.querySelectorAll('.code')].filter(
  e => e.checkVisibility()).map(e => e.textContent).join('')]"""
PANEL = "return document.querySelector('aside:popover-open iframe')?.src.split('/').at(-1)"
EDGES = "const edges = document.querySelector('aside').getBoundingClientRect(); return [edges.top, edges.bottom]"
CONTRASTS = """
const parse = c => (c.match(/[\\d.]+/g) || []).map(Number)
const shine = c => { const [r, g, b] = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
                     return .2126 * r + .7152 * g + .0722 * b }
const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor)
                      if (c.length && c[3] !== 0) return c } return [255, 255, 255] }
const low = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
while (walk.nextNode()) {
  const e = walk.currentNode.parentElement
  if (!walk.currentNode.data.trim() || !e.checkVisibility({visibilityProperty: true}) || e.closest("script")) continue
  const [a, b] = [shine(parse(getComputedStyle(e).color)), shine(behind(e))].sort((x, y) => x - y)
  if ((b + .05) / (a + .05) < 4.5) low.push([e.tagName, e.className, walk.currentNode.data, (b + .05) / (a + .05)])
}
return low"""


def test_types_tell_which_method_is_meant(tmp_path):
    """An attribute leads to the class of its object, to each class of a menu, and nowhere if it is not ours."""
    (tmp_path / "a.py").write_text(
        '"""A."""\nclass A:\n    def go(self): pass\nclass B(A):\n    def go(self): super().go()\nclass C: pass\n'
        "MENU = {1: A, 2: B}\ndef make(k):\n    return MENU[k](), C()\n"
    )
    (tmp_path / "b.py").write_text(
        '"""B."""\nfrom a import C, make\nimport a as other\n\ndef use(c: C, go, k):\n    x, _ = make(k)\n    x.go()\n'
        "    c.go()\n    go()\n    other.B().go()\n    for y in [other.A()]:\n        y.go()\n"
    )
    names = Names(tmp_path, {name: tmp_path / f"{name}.py" for name in "ab"})
    at = {spot[1:]: found for spot, found in names.refs.items() if spot[0] == "b" and found}
    a, b = "a.html#A.go", "a.html#B.go"
    assert at[7, 6] == [a, b] and at[12, 10] == [a] and at[10, 14] == [b]
    assert not {8, 9} & {line for line, _ in at}, "c has no `go`; the parameter `go` is no method"
    assert names.refs["a", 5, 26] == [a] and names.users["a.html#make"] == {"b.html#use"}


@cache
def all_names() -> Names:
    """Of steps and common."""
    return Names(ROOT, FILES)


@pytest.mark.parametrize("module", FILES)
def test_every_function_and_class_that_is_named_is_a_link(module):
    """What a name stands for says the module itself, imported."""
    names, loaded = all_names(), import_module(module)
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        value = getattr(loaded, node.id, None) if isinstance(node, ast.Name) else None
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ in FILES:
            found = names.refs.get((module, node.lineno, node.col_offset))
            right = found == [f"{value.__module__}.html#{value.__qualname__}"]
            local = not found and (isinstance(node.ctx, ast.Store) or value.__qualname__.islower())
            assert right or local, node.lineno


@pytest.mark.parametrize("module", FILES)
def test_what_a_class_gives_to_self_is_a_link(module):
    """Each `self.name` where the class itself has a method of that name, or assigns it."""
    names, tree = all_names(), ast.parse(FILES[module].read_text())
    for kind in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        of_self = [it for it in ast.walk(kind) if isinstance(it, ast.Attribute) and ast.unparse(it.value) == "self"]
        own = {it.name for it in kind.body if isinstance(it, ast.FunctionDef)}
        own |= {it.attr for it in of_self if isinstance(it.ctx, ast.Store)}
        for it in of_self:
            place = module, it.end_lineno, it.end_col_offset - len(it.attr)
            assert it.attr not in own or f"{module}.html#{kind.name}.{it.attr}" in names.refs[place], place


def test_a_model_leads_to_what_was_made_of_it():
    """`model(x, y)` in step 5's train: its forward, and the functions that have sharded it."""
    names, source = all_names(), FILES["step05_cp_ring"].read_text().splitlines()
    (line,) = [n for n, text in enumerate(source, 1) if "model(x, y" in text]
    found = names.refs["step05_cp_ring", line, source[line - 1].index("model(")]
    sharders = ["step04_tp_sp.html#shard_tensors", "step05_cp_ring.html#shard_context"]
    assert found == ["common.model.html#Decoder.forward", *sharders]


def test_what_variants_attach_is_said_at_its_place():
    """Each class and menu that is named is one of the course; an entry that a variant makes is in its menu."""
    from extras.services.pages.attached import all_attached
    from extras.services.seam import plugins

    plugins()
    modules, found = list(map(import_module, FILES)), all_attached(ROOT)
    for name, of in found.items():
        (home, *_) = [vars(module)[name.split(".")[0]] for module in modules if name.split(".")[0] in vars(module)]
        entries = [ast.literal_eval(says.split()[3]) for _, _, says in of if says.startswith("makes the entry ")]
        assert all(entry in home for entry in entries), name
    assert ("--dtype fp16", "extras/variants/step01/fp16.py") in [says[:2] for says in found["Optimizer.step"]]
    assert {"SYNCS", "OPTIMIZERS", "CONTEXT", "SCHEDULES", "Attention.attend", "Data.batch"} <= found.keys()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The folder of the pages, with a run's."""
    folder = tmp_path_factory.mktemp("pages")
    rows = [dict(step=n, loss=5.0 / n, peak_memory_bytes=n, expert_load={"1": [0.25, 0.75]}) for n in (1, 2, 3)]
    rows[-1]["traffic"] = dict(dp=dict(all_reduce=2**20), pp=dict(send=2**18))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = {kind: [0, 0] for kind in CATEGORIES} | dict(parameters=[2**20, 2**20], activations=[0, 3 * 2**20])
    memory = dict(seconds=[0.0, 0.5], bytes=held)
    spans = [[["F", 0, 0, 0.0, 1.0], ["B", 0, 0, 3.0, 5.0]], [["F", 0, 1, 1.0, 2.0], ["B", 0, 1, 2.0, 3.0]]]
    timeline = dict(schedule="1f1b", idle=0.4, simulated_idle=0.5, ranks=spans)
    (folder / "timeline.json").write_text(json.dumps(timeline))
    (folder / "memory.json").write_text(json.dumps(memory))
    words = ["python -m extras.services.pages", str(folder / "out"), "--run", str(folder)]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(site, "Names", lambda *_: all_names()),  # to find them all takes seconds
        mock.patch.object(site, "ProcessPoolExecutor", ThreadPoolExecutor),
    ):
        site.main()
    return folder / "out"


def test_pages_are_small_and_whole(pages):
    """A page for each step and file of common; nothing from a network."""
    assert sorted(path.stem for path in pages.glob("*.html")) == sorted(PAGES)
    assert sum(path.stat().st_size for path in pages.iterdir()) < LARGEST
    assert not [path for path in pages.glob("*.html") if 'src="http' in path.read_text()]


def test_a_run_has_a_chart_of_each_kind(pages):
    """In the page's ink, with its fonts; the loss is where it belongs; peaks are not thinned away."""
    from extras.services.pages.charts import thinned

    drawn = dict(
        re.findall(r"<figcaption>(.*?)</figcaption>(<svg.*?</svg>)", (pages / "run.html").read_text(), re.DOTALL)
    )
    kinds = ["loss", "peak of memory", "memory", "timeline of the last step", "traffic of the last step"]
    assert list(drawn) == [*kinds, "expert load, layer 1"]
    assert all("currentColor" in svg and "var(--sans)" in svg and "#000000" not in svg for svg in drawn.values())
    line = re.search(r'<path d="M ([^"]*)" clip-path', drawn["loss"])[1]
    (x1, y1), (x2, y2), (x3, y3) = [map(float, pair.split()) for pair in line.split("L")]
    assert abs((x2 - x1) - (x3 - x2)) < 1e-3 and abs((y2 - y1) / (y3 - y1) - (5 - 5 / 2) / (5 - 5 / 3)) < 1e-3
    assert "ep: " not in drawn["traffic of the last step"] and "dp: all_reduce" in drawn["traffic of the last step"]
    assert [name for name in CATEGORIES if name in drawn["memory"]] == list(CATEGORIES)
    rows = [n % 7 + 100 * (n == 613) for n in range(1000)]
    assert max(thinned(rows, lambda n: n)) == max(rows) and len(thinned(rows)) <= 201


def frames_of(pages: Path, page: str, title: str) -> dict[str, dict]:
    """The frames of a picture, as they stand on its page."""
    text = (pages / f"{page}.html").read_text()
    found = dict(re.findall(r"<h2[^>]*>([^<]*)</h2>.*?application/json>(.*?)</script>", text, re.DOTALL))
    return json.loads(found[title])


def rows_of(frame: dict, state: int = -1) -> dict[str, list]:
    """The rows of a table in a state: by name, the cells."""
    return {name: [frame["cells"][n] for n in row] for name, row in frame["states"][state][1].items()}


def test_chapter_1_a_parameter_has_16_or_18_bytes(pages):
    """Its docstring's law, of what memory holds after AdamW; the terms add up to the loss; recomputation saves."""
    frames = frames_of(pages, "step01_single_gpu", "A step, and what memory holds")
    for dtype, n_bytes, own in (("fp32", 16, 4), ("bf16", 18, 2)):
        for recompute in ("none", "full"):
            frame = frames[f"{dtype}/{recompute}"]
            at = next(n for n, (says, _) in enumerate(frame["states"]) if says.startswith("AdamW"))
            curve = {kind: row[at] for kind, row in frame["curve"].items()}
            n_params = curve["parameters"] / own
            assert curve["parameters"] + curve["gradients"] + curve["optimizer"] == n_bytes * n_params
            terms = [float(cell[0]) for cell in rows_of(frame, at)["its loss / n_targets"]]
            assert abs(sum(terms) - float(re.search(r"terms: ([\d.]+)", frame["text"])[1][:6])) < 3e-4
    most = {name: max(frame["curve"]["activations"]) for name, frame in frames.items()}
    assert most["fp32/full"] < most["fp32/none"] / 2


def test_chapter_2_collectives_do_what_their_names_say(pages):
    """On the numbers that are shown; the ring ends with the sums, and after round 0 rank r's sum is of r-1 and r."""
    frames = frames_of(pages, "step02_ddp", "Collectives: four ranks' numbers")
    base = [[k * 10**rank for k in range(1, 5)] for rank in range(4)]
    sums, one = [sum(column) for column in zip(*base, strict=True)], [base[rank][rank] for rank in range(4)]
    right = dict(all_reduce=[sums] * 4, all_gather=[one] * 4, reduce_scatter=[[x] for x in sums])
    right |= dict(all_to_all=[*map(list, zip(*base, strict=True))], exchange=[[one[rank - 1]] for rank in range(4)])
    for name, frame in frames.items():
        shown = [[int(chip[0].replace(",", "")) for chip in cell] for cell in rows_of(frame)["out"]]
        assert shown == right[name], name
    ring = frames_of(pages, "step02_ddp", "The ring, message by message")[""]
    assert [[int(chip[0].replace(",", "")) for chip in cell] for cell in rows_of(ring)["has"]] == right["all_reduce"]
    assert len(ring["states"]) == 2 * 3 + 1 and rows_of(ring, 1)["has"][0][3][0] == "4,004", "ranks 3 and 0"


def test_chapter_2_buckets_leave_in_order(pages):
    """A bucket leaves when it and all before it are complete; in the end all ranks have one sum."""
    frame = frames_of(pages, "step02_ddp", "Buckets fill and leave while backward goes on")[""]
    for state in range(len(frame["states"])):
        rows = list(rows_of(frame, state).values())
        full = [all(chip[2] != "gone" for chip in row[0]) for row in rows]
        gone = [row[1] == ["under way"] for row in rows]
        assert state == len(frame["states"]) - 1 or gone == [all(full[: n + 1]) for n in range(len(full))]
    assert all(len({cell[0] for cell in row[1:]}) == 1 for row in rows_of(frame).values())
    names = [chip[0] for row in rows_of(frame).values() for chip in row[0]]
    assert names[0] == "H" and names[-1] == "E" and len(names) == 21


def test_chapter_3_ranks_hold_what_the_table_says(pages):
    """Bytes at rest: weights 2, masters and moments 12 a parameter, sharded by stage; two units whole in stage 3."""
    frames = frames_of(pages, "step03_zero", "Who holds which shard of what")
    whole = {stage: sum(row[-1] for row in frame["curve"].values()) for stage, frame in frames.items()}
    n_params = frames["0"]["curve"]["parameters"][0] / 2
    assert whole == {"0": 14 * n_params, "1": 5 * n_params, "2": 5 * n_params, "3": 3.5 * n_params}
    for state in range(len(frames["3"]["states"])):
        rows = rows_of(frames["3"], state)
        there = [all(chip[2] != "gone" for chip in row[0]) for name, row in rows.items() if name.endswith(": weights")]
        assert len(there) == 4 and sum(there) <= 2, "two units are whole at a time"
        own = [row[rank][rank][2] for name, row in rows.items() if name.endswith(": optimizer") for rank in range(4)]
        assert own == [""] * 16
    says = " ".join(said for said, _ in frames["3"]["states"])
    assert says.count("All-gather") == 6 and says.count("Reduce-scatter") == 4, "the docstring of Zero3"


def test_chapter_4_tensors_are_what_the_table_says(pages):
    """Whole, shard and partial were found from the numbers; here they are compared with step 4's docstring."""
    frames = frames_of(pages, "step04_tp_sp", "A block on two ranks")
    for sp, between in (("yes", "shard: tokens"), ("no", "whole")):
        said = [chip[0] for row in ("forward", "backward") for chip in rows_of(frames[f"attention/{sp}"])[row][0]]
        kinds = dict(text.split(": ", 1) for text in said)
        assert kinds["x"] == kinds["norm(x)"] == kinds["g"] == kinds["d x"] == between
        assert kinds["f(norm(x))"] == kinds["d o_proj"] == "whole"
        assert kinds["o_proj"] == kinds["d f(norm(x))"] == "partial"
        assert all(kinds[name] == "shard: columns" for name in ("q", "k", "v", "heads", "d q", "d k", "d v", "d heads"))


def test_chapter_4_wrong_numbers_are_refused():
    """Tensors that are neither whole nor shards nor terms of a sum make no picture."""
    import torch

    from extras.services.pages.record import kind_of

    full = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert kind_of([full[:1], full[1:]], full) == "shard: tokens"
    assert kind_of([full - 7, torch.full_like(full, 7.0)], full) == "partial"
    for wrong in ([full[:1], full[1:] + 1], [full, full.flip(0)]):
        with pytest.raises(RuntimeError):
            kind_of(wrong, full)


def test_chapter_5_every_pair_is_computed_once(pages):
    """16 tokens have 136 pairs; with zigzag all ranks have the same work in each hop, in order they do not."""
    frames = frames_of(pages, "step05_cp_ring", "Who meets which keys when")
    assert {"zigzag", "ring"} <= frames.keys()
    for mode, frame in frames.items():
        pairs = [(query, key) for query, key, *_ in frame["boxes"]]
        assert sorted(pairs) == [(query, key) for query in range(16) for key in range(query + 1)]
        assert len({(box[0], box[3]) for box in frame["boxes"]}) == 16, "a query stays on its rank"
        work = [[sum(box[3:5] == [rank, hop] for box in frame["boxes"]) for rank in range(4)] for hop in range(4)]
        assert all(len(set(row)) == 1 for row in work) == (mode == "zigzag"), mode
        assert f"the time of {sum(map(max, work))}," in frame["text"]
        said = [list(map(int, re.findall(r"ank \d: (\d+) pairs", says))) for says in frame["moments"]]
        assert said == work, mode


def test_chapter_7_tokens_come_home(pages):
    """Each rank receives rows for its own experts, no row is lost, and home is in the order of sorted."""
    for frame in frames_of(pages, "step07_moe_ep", "Tokens go to experts and come home").values():
        rows = {
            name: [[chip[0] for chip in cell if chip != "|"] for cell in row] for name, row in rows_of(frame).items()
        }
        assert rows["home"] == rows["sorted"]
        assert sorted(chain(*rows["received"])) == sorted(chain(*rows["sorted"]))
        here = [cell[0].split(", ") for cell in rows_of(frame)["experts here"]]
        for of_rank, received, computed in zip(here, rows["received"], rows["by expert"], strict=True):
            assert {row.split(":")[0] for row in received} <= {*of_rank}
            assert sorted(received) == sorted(computed) and [row[:2] for row in computed] == sorted(
                r[:2] for r in computed
            )


def test_chapter_7_the_mesh_says_what_travels(pages):
    """Of the first command's layout: the groups of each rank, and what the dry run counts in them."""
    frame = frames_of(pages, "step07_moe_ep", "The mesh: choose a rank")["2/1/2/2/2"]
    assert len(frame["boxes"]) == 8
    for n, box in enumerate(frame["boxes"]):
        groups = dict(re.findall(r"^(\w+) (\[.*?\]): ", box[5], re.M))
        assert all(n in json.loads(ranks) for ranks in groups.values())
        linked = {other for ranks in groups.values() for other in json.loads(ranks)} - {n}
        assert {other for other, _ in box[6]} == linked and {*groups} == {
            "pp",
            "cp",
            "tp",
            "data",
            "ep",
            "expert_data",
            "sequence",
        }
        assert re.search(r"^ep .*all-to-all", box[5], re.M) and re.search(r"^cp .*send", box[5], re.M)


def test_a_page_reads_as_its_source(pages):
    """Comments stand in their lines; a product in a docstring stays one; a parameter is no link to a namesake."""
    for name in FILES:
        text = (pages / f"{name}.html").read_text()
        assert not re.search(r"<em>[^<]*\d[^<]*</em>", text), name
    assert "(3 * 10 + 1 * 2) / 4 = 8" in (text := (pages / "step05_cp_ring.html").read_text())
    assert "<p>What <code>rank</code> computes" in text
    assert re.search(r"# the past: its first chunk is before both of ours, its second one after both</span>\n", text)


def test_the_index_says_where_to_begin(pages):
    """What the course is, and a link to its first step; each page leads to the next."""
    text = (pages / "index.html").read_text()
    assert "Seven scripts in plain PyTorch" in text and '<a href="step01_single_gpu.html">Begin' in text
    for here, following in pairwise(FILES):
        assert f'class=next><a href="{following}.html"' in (pages / f"{here}.html").read_text()


def test_every_link_leads_somewhere(pages):
    """To a page, and there to a definition."""
    texts = {path.name: path.read_text() for path in pages.iterdir()}
    for name, text in texts.items():
        for links in re.findall('(?:href|data-pages)="?([^">]+[.]html[^">]*)', text):
            for link in links.split(" "):
                page, _, part = link.partition("#")
                assert page in texts and (not part or f'id="{part}"' in texts[page]), (name, link)


def test_each_task_of_a_lab_has_a_badge(pages):
    """With its name, on the page of what it asks for."""
    for lab, tasks in TASKS.items():
        for file, names in holes(lab).items():
            text = (pages / f"{file.removesuffix('.py').replace('/', '.')}.html").read_text()
            for number, (task, (title, *_)) in enumerate(zip(tasks, text_of(lab), strict=True)):
                assert task not in names.values() or f"Lab {lab}, task {number + 1}: {title}<" in text


def test_a_missing_run_is_one_line(tmp_path):
    """As any mistake of a user."""
    command = [sys.executable, "-m", "extras.services.pages", tmp_path, "--run", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and done.stderr.startswith("error: --run") and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def browser():
    """Chromium, headless."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()


def show(browser, pages: Path, page: str, width: int = 1280, scheme: str = LIGHT):
    """Open a page in a window of a width, and wait until its script has run: `get` may return before."""
    from selenium.webdriver.support.wait import WebDriverWait

    size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = dict(features=[dict(name="prefers-color-scheme", value=scheme)])
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    address = (pages / f"{page}.html").as_uri()
    browser.get(address)
    whole = "return document.readyState == 'complete' && location.href == arguments[0]"
    WebDriverWait(browser, 60, 0.05).until(lambda it: it.execute_script(whole, address))


def check_page(browser, pages: Path, page: str, width: int, scheme: str):
    """No error, nothing wider than the window, contrast AA; the same with what is new, and in a definition's panel."""
    browser.get_log("browser")
    show(browser, pages, page, width, scheme)
    for script in ("", "document.querySelector('#new')?.click()", "document.querySelector('a[data-pages]')?.click()"):
        browser.execute_script(script)
        if frames := browser.find_elements("css selector", "iframe"):
            browser.switch_to.frame(frames[0])
        needs, has = browser.execute_script("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
        assert needs <= has, (page, width, script)
        wider = "return [...document.querySelectorAll('main *')].filter(e => e.scrollWidth > e.clientWidth + 1 &&"
        wider += " getComputedStyle(e).overflowX == 'auto').map(e => e.textContent)"
        assert width < 1280 or not browser.execute_script(wider), page
        assert browser.execute_script(CONTRASTS) == [], (page, scheme, script)
    assert browser.get_log("browser") == [], page


def test_a_page_in_a_browser(browser, pages):
    """A sample of the sweep below."""
    check_page(browser, pages, "step06_pipeline", 390, DARK)
    check_page(browser, pages, "index", 1280, LIGHT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES)
def test_all_pages_in_a_browser(browser, pages, page):
    """Two widths, light and dark."""
    for width in (390, 1280):
        for scheme in (LIGHT, DARK):
            check_page(browser, pages, page, width, scheme)


def test_the_contents_follow(browser, pages):
    """Beside the text in a wide window, where what is at its top is marked; folded in a narrow one."""
    show(browser, pages, "step04_tp_sp", 1600)
    browser.execute_script("document.getElementById('shard_tensors').scrollIntoView()")
    time.sleep(0.3)
    marked = "return [...document.querySelectorAll('.contents [aria-current]')].map(link => link.textContent)"
    assert browser.execute_script(marked) == ["shard_tensors"]
    assert not browser.execute_script("return document.querySelector('details.imports').open")
    show(browser, pages, "step04_tp_sp", 390)
    assert not browser.execute_script("return document.querySelector('.contents').open")


def statements(code: str) -> list[list[str]]:
    """The tokens of each, without comments and docstrings."""
    lines = [[]]
    for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(code)).readline):
        if token.type == tokenize.NEWLINE:
            lines += [[]]
        elif token.string.strip() and token.type != tokenize.COMMENT:
            lines[-1].append(token.string)
    return [line for line in lines if line and not (len(line) == 1 and line[0].startswith('"'))]


def hover(browser, pages: Path, n: int, seed: int):
    """Hover over n drawn names: the panel shows the lines that Python itself says define them."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.wait import WebDriverWait

    draw, wait = random.Random(seed), WebDriverWait(browser, 10, 0.05)
    several = max(1, n // 10)
    for module in draw.sample([module for module in FILES if module != "common"], several):
        show(browser, pages, module)
        links = browser.find_elements("css selector", "main > section .part a[data-pages]")  # no folded ones
        texts = browser.execute_script("return arguments[0].map(link => link.textContent)", links)
        named = [text if text != "Config" else "" for text in texts]  # after a dot it is another step's
        values = [getattr(import_module(module), name, None) for name in named]
        known = [(a, v) for a, v in zip(links, values, strict=True) if inspect.isclass(v) or inspect.isfunction(v)]
        for link, value in draw.sample(known, n // several):
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
            ActionChains(browser, duration=0).move_to_element(link).perform()  # not by way of other names
            frame = f"aside:popover-open iframe[height][src$='{value.__module__}.html?{value.__qualname__}']"
            browser.switch_to.frame(wait.until(lambda it, at=frame: it.find_elements("css selector", at))[0])
            title, code = browser.execute_script(SHOWN)
            assert statements(code) == statements(inspect.getsource(value)), title
            browser.switch_to.default_content()
            top, bottom = browser.execute_script(EDGES)
            assert 0 <= top < bottom <= 900, "the panel is in the window"
            browser.execute_script("document.querySelector('aside').hidePopover()")
            ActionChains(browser, duration=0).move_to_element(browser.find_element("css selector", "nav")).perform()


def test_hovering_shows_a_definition(browser, pages):
    """A sample of the next."""
    hover(browser, pages, 5, seed=1)


@pytest.mark.exhaustive
def test_hovering_shows_fifty_definitions(browser, pages):
    """Drawn from five pages."""
    hover(browser, pages, 50, seed=0)


def test_the_player_shows_the_schedules_times(browser, pages):
    """For ten drawn choices: every box, and what it waits for, against `simulate`."""
    import step06_pipeline as step06
    from common.schedules import COSTS, SCHEDULES, consumer, simulate
    from extras.services.seam import compose, plugins

    plugins()
    show(browser, pages, "step06_pipeline")
    draw, done = random.Random(0), 0
    while done < 10:
        name, p, m = draw.choice(list(SCHEDULES)), draw.choice([2, 3, 4, 8]), draw.choice([2, 4, 8])
        try:
            places, lists = step06.plan(compose(step06)(model="llama3-8b", schedule=name, pp=p), m)
        except Exception:
            continue
        done += 1
        split = any(action.kind == "W" for row in lists for action in row)
        spans = simulate(lists, places, dict(F=1, B=1, W=1) if split else COSTS)
        shown = browser.execute_script(BOXES, name, str(p), str(m))
        assert sorted(shown) == sorted([r, start, end - start, a.kind, a.micro_batch] for end, r, start, a in spans)
        n, (end, _, start, a) = draw.choice([(n, span) for n, span in enumerate(spans) if span[2]])
        browser.execute_script(f"document.querySelectorAll('.stage label')[{n}].click()")
        note = browser.find_element("css selector", "output").text.split("\n", 1)[1]
        before = [(s, t, b) for t, _, s, b in spans if consumer(b, places) == a]
        waits = "".join(f"\nwaits for {b.kind} {b.micro_batch}, stage {b.stage}: time {s} to {t}" for s, t, b in before)
        assert note == f"{a.kind} {a.micro_batch}, stage {a.stage}: time {start} to {end}{waits}"


def test_the_player_takes_the_readers_costs(browser, pages):
    """Boxes against `simulate` with other costs; one micro-batch takes p (F + B) + 2 (p - 1) messages."""
    import step06_pipeline as step06
    from common.schedules import simulate
    from extras.services.seam import compose, plugins

    plugins()
    show(browser, pages, "step06_pipeline")
    spend = """for (const [name, cost] of Object.entries(arguments[0])) {
      const field = document.forms[0].elements[name]
      field.value = cost
      field.dispatchEvent(new Event('input', {bubbles: true}))
    } return document.querySelector('.picture > p').textContent"""
    for name, costs in (("1f1b", dict(F=3, B=4)), ("zbv", dict(F=2, B=3, W=5)), ("interleaved", dict(F=2, B=5))):
        browser.execute_script(BOXES, name, "4", "8")
        browser.execute_script(spend, costs)
        script = BOXES[BOXES.index("return [...document") :]
        shown = browser.execute_script(
            "const span = (b, n) => +b.style.getPropertyValue(n).replace('span', '');" + script
        )
        places, lists = step06.plan(compose(step06)(model="llama3-8b", schedule=name, pp=4), 8)
        spans = simulate(lists, places, costs)
        assert sorted(shown) == sorted([r, start, end - start, a.kind, a.micro_batch] for end, r, start, a in spans)
    browser.execute_script(BOXES, "1f1b", "4", "1")
    assert f"of {4 * (2 + 3) + 2 * 3 * 5} units" in browser.execute_script(spend, dict(F=2, B=3, message=5))


def test_the_slider_shows_each_state(browser, pages):
    """Every chip of every state of a table, against the data."""
    show(browser, pages, "step03_zero")
    script = """const moment = document.forms[0].moment
      moment.value = arguments[0]
      moment.dispatchEvent(new Event('input', {bubbles: true}))
      return [document.querySelector('output').textContent, [...document.querySelectorAll('.stage tr')].slice(1).map(
        row => [row.firstChild.textContent, [...row.querySelectorAll('td')].map(cell => [...cell.children].map(
          chip => [chip.textContent, ...['gone', 'way'].filter(name => chip.classList.contains(name))]))])]"""
    frame = frames_of(pages, "step03_zero", "Who holds which shard of what")["3"]
    for n, (says, _) in enumerate(frame["states"]):
        plain = [
            [
                name,
                [
                    [[chip] if isinstance(chip, str) else [chip[0], *filter(None, chip[2:])] for chip in cell]
                    for cell in row
                ],
            ]
            for name, row in rows_of(frame, n).items()
        ]
        assert browser.execute_script(script, n) == [says, plain]


def test_the_mesh_begins_with_rank_0(browser, pages):
    """Its groups and what it sends are shown before anything is chosen."""
    show(browser, pages, "step07_moe_ep")
    says = browser.execute_script("return document.forms[1].querySelector('output').textContent")
    assert says.split("\n")[0].startswith("rank 0: ") and "\ntp [0, 1]: " in says


def test_the_keyboard_suffices(browser, pages):
    """From name to definition, deeper, back and out; choose, move and step through a picture."""
    from selenium.webdriver import ActionChains, Keys

    def press(*keys: str) -> str:
        """Returns what has the focus then."""
        ActionChains(browser).send_keys(*keys).perform()
        time.sleep(0.2)  # frames tell one another
        return browser.execute_script("const e = document.activeElement; return e.dataset.pages || e.name || e.tagName")

    def tab_to(wanted: Callable[[str], bool]) -> str:
        for _ in range(60):
            if wanted(at := press(Keys.TAB)):
                return at
        raise AssertionError("60 tabs do not lead there")

    show(browser, pages, "step05_cp_ring")
    tab_to(lambda at: at == "mode")
    press(Keys.ARROW_DOWN)
    assert browser.execute_script("return document.forms[0].mode.value") != "zigzag"
    tab_to(lambda at: at == "moment")
    said = browser.find_element("css selector", "output").text
    press(Keys.ARROW_LEFT)
    assert browser.find_element("css selector", "output").text != said
    tab_to(lambda at: at == "box")
    press(Keys.ARROW_RIGHT)
    press(Keys.ARROW_LEFT)
    assert browser.find_element("css selector", "output").text.split("\n")[1].startswith("Hop 0, rank 0")
    link = tab_to(lambda at: at.endswith("#Group"))
    assert press(Keys.ENTER) == "IFRAME" and browser.execute_script(PANEL) == "common.comm.html?Group"
    browser.switch_to.frame(0)
    tab_to(lambda at: at.endswith("#UserError"))
    browser.switch_to.default_content()
    assert press(Keys.ENTER) == "IFRAME"
    browser.switch_to.frame(0)
    assert browser.execute_script(SHOWN)[0] == "common.UserError"
    browser.switch_to.default_content()
    assert press(Keys.ESCAPE) == link and not browser.execute_script(PANEL)
