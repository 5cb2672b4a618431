"""The web pages of the course: names link to definitions, figures are correct, and a real browser shows them."""

import ast
import inspect
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("jinja2")
pytest.importorskip("markdown_it")
pytest.importorskip("pygments")
pytest.importorskip("jedi")

import step06_pipeline as step06
from common import UserError
from common.schedules import SCHEDULES, consumer, simulate
from extras.services.pages import __main__ as site
from extras.services.pages.names import Names
from extras.services.pages.record import kind_of
from extras.services.seam import compose, plugins

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted(ROOT.glob("step0*.py"))}
FILES |= {f"common.{path.stem}".removesuffix(".__init__"): path for path in sorted((ROOT / "common").glob("*.py"))}
PAGES = ["index", "run", *FILES]
LARGEST = 4_000_000  # bytes of all pages together

BOXES = """
const f = document.forms[0], span = (b, n) => +b.style.getPropertyValue(n).replace('span', '')
const set = (field, value) => { field.value = value; field.dispatchEvent(new Event('input', {bubbles: true})) }
const [schedule, ranks, batches, costs] = arguments
set(f.schedule, schedule), set(f.ranks, ranks), set(f.micro_batches, batches)
for (const [name, cost] of Object.entries(costs)) set(f.elements[name], cost)
return [document.querySelector('.picture > p').textContent, [...document.querySelectorAll('.stage label')].map(
  b => [span(b, 'grid-row-start') - 1, span(b, 'grid-column-start') - 2, span(b, 'grid-column-end'),
        'FBW'[b.style.getPropertyValue('--colour')], +b.textContent])]"""
SHOWN = """return [document.querySelector('h1').textContent, [...document.querySelectorAll('.code')].filter(
  e => e.checkVisibility()).map(e => e.textContent).join('')]"""
PANEL = "return document.querySelector('aside:popover-open iframe')?.src.split('/').at(-1)"


def test_types_tell_which_method_is_meant(tmp_path):
    """An attribute links to the class of its object, to each class of a menu, or to nothing if it is not ours."""
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
    """The names in the steps and in common/, with their definitions."""
    return Names(ROOT, FILES)


@pytest.mark.parametrize("module", FILES)
def test_every_function_and_class_that_is_named_is_a_link(module):
    """The imported module says which function or class a name stands for."""
    names, loaded = all_names(), import_module(module)
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        value = getattr(loaded, node.id, None) if isinstance(node, ast.Name) else None
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ in FILES:
            found = names.refs.get((module, node.lineno, node.col_offset))
            right = found == [f"{value.__module__}.html#{value.__qualname__}"]
            local = not found and (isinstance(node.ctx, ast.Store) or value.__qualname__.islower())
            assert right or local, node.lineno


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write all pages, with a run's; returns their folder."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "metrics.jsonl").touch()
    shutil.copy(ROOT / "extras/services/pages/schedules.gif", folder / "timeline.png")  # a browser shows it alike
    words = ["python -m extras.services.pages", str(folder / "out"), "--run", str(folder)]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(site, "Names", lambda *_: all_names()),  # to find them all takes seconds
        mock.patch.object(site, "ProcessPoolExecutor", ThreadPoolExecutor),
    ):
        site.main()
    return folder / "out"


HAS = [  # page, what stands on it
    ("index", r'<img class=moving src="schedules.gif"[^>]*>\s*<p><a href="step01_single_gpu.html">Begin with step 1'),
    ("index", r"Seven scripts in plain PyTorch"),
    *(("index", rf'<a href="{step}.html#picture-[^"]*">Step {step[5]}: ') for step in list(FILES)[:7]),
    ("run", r'<figcaption>timeline</figcaption><img src="data:image/png;base64,'),
    *((here, f'class=next><a href="{following}.html"') for here, following in pairwise(FILES)),
    ("step01_single_gpu", r'href="common.model.html#Decoder.forward"[^>]*>model</a></span><span class=p>\(</span>'),
    ("step05_cp_ring", r"\(3 \* 10 \+ 1 \* 2\) / 4 = 8"),  # a product in a docstring stays one
    ("step05_cp_ring", "<p>Which pairs <code>rank</code> computes"),  # a parameter is no link to a namesake
    ("step05_cp_ring", r"# source's first chunk precedes both of ours; its second one follows both</span>\n"),
]


def test_pages_have_what_they_must(pages):
    """Each step and file of common has a page; all are small, load nothing from a network, and match HAS."""
    texts = {path.stem: path.read_text() for path in pages.glob("*.html")}
    assert sorted(texts) == sorted(PAGES)
    assert sum(path.stat().st_size for path in pages.iterdir()) < LARGEST
    assert not [
        page for page, text in texts.items() if 'src="http' in text or re.search(r"<em>[^<]*\d[^<]*</em>", text)
    ]
    assert not [(page, what) for page, what in HAS if not re.search(what, texts[page])]


def test_every_link_leads_somewhere(pages):
    """Each link leads to a page, and to a definition on it."""
    texts = {path.name: path.read_text() for path in pages.glob("*.html")}
    for name, text in texts.items():
        for links in re.findall('(?:href|data-pages)="?([^">]+[.]html[^">]*)', text):
            for link in links.split(" "):
                page, _, part = link.partition("#")
                assert page in texts and (not part or f'id="{part}"' in texts[page]), (name, link)


def frames_of(pages: Path, page: str, title: str) -> dict[str, dict]:
    """Read the frames of a figure from its page."""
    text = (pages / f"{page}.html").read_text()
    found = dict(re.findall(r"<h2[^>]*>([^<]*)</h2>.*?application/json>(.*?)</script>", text, re.DOTALL))
    return json.loads(found[title])


def rows_of(frame: dict, state: int = -1) -> dict[str, list]:
    """The rows of a figure's table in one state: name -> cells."""
    return {name: [frame["cells"][n] for n in row] for name, row in frame["states"][state][1].items()}


def test_chapter_1_a_parameter_has_16_or_18_bytes(pages):
    """Memory after AdamW follows the docstring's law; the terms add up to the loss; recomputation saves memory."""
    frames = frames_of(pages, "step01_single_gpu", "A step, and what memory holds")
    for choice, frame in frames.items():
        n_bytes, own = (16, 4) if choice.startswith("fp32") else (18, 2)
        at = next(n for n, (says, _) in enumerate(frame["states"]) if says.startswith("`step`"))
        state = {kind: row[at] for kind, row in frame["curve"].items() if kind not in ("activations", "other")}
        assert sum(state.values()) == n_bytes * state["parameters"] / own
        terms = [float(cell[0]) for cell in rows_of(frame, at)["its loss / n_targets"]]
        assert sum(terms) == pytest.approx(float(re.search(r"terms: ([\d.]+\d)", frame["text"])[1]), abs=3e-4)
        assert sum(says == "Backward of embedding." for says, _ in frame["states"]) == 3
        cells = [cell for way in ("forward", "backward") for cell in rows_of(frame)[way]]
        assert {chip[2] for cell in cells for chip in cell} == {""}, "in the end all micro-batches have passed"
    most = {name: max(frame["curve"]["activations"]) for name, frame in frames.items()}
    assert most["fp32/full"] < most["fp32/none"] / 2


def test_chapter_2_buckets_leave_in_order(pages):
    """A bucket leaves when it and all before it are complete; in the end all ranks have one sum."""
    frame = frames_of(pages, "step02_ddp", "Buckets fill and are sent during backward")[""]
    for state, (says, _) in enumerate(frame["states"]):
        rows = list(rows_of(frame, state).values())
        full = [all(chip[2] != "gone" for chip in row[0]) for row in rows]
        left = [row[1] == ["under way"] for row in rows]
        assert left == [all(full[: n + 1]) for n in range(len(full))] or says.startswith("`finish`"), says
    assert says.startswith("`finish`") and all(
        len({cell[0] for cell in row[1:]}) == 1 for row in rows_of(frame).values()
    )
    names = [chip[0] for row in rows_of(frame).values() for chip in row[0]]
    assert names[0] == "lm_head" and names[-1] == "embed_tokens" and len(names) == 21


def test_chapter_3_ranks_hold_what_the_table_says(pages):
    """Bytes a parameter at rest: weights 2, masters and moments 12, sharded by stage. Stage 3 has two whole units.

    In stage 0 the buckets of gradients stay: 4 more.
    """
    frames = frames_of(pages, "step03_zero", "Who holds which shard of what")
    kinds = ("parameters", "gradients", "masters", "moments")
    whole = {stage: sum(frame["curve"][kind][-1] for kind in kinds) for stage, frame in frames.items()}
    n_params = frames["0"]["curve"]["parameters"][0] / 2
    assert whole == {"0": 18 * n_params, "1": 5 * n_params, "2": 5 * n_params, "3": 3.5 * n_params}
    for state in range(len(frames["3"]["states"])):
        rows = rows_of(frames["3"], state)
        there = [all(chip[2] != "gone" for chip in row[0]) for name, row in rows.items() if name.endswith(": weights")]
        assert len(there) == 4 and sum(there) <= 2, "two units are whole at a time"
        own = [row[rank][rank][2] for name, row in rows.items() if name.endswith(": optimizer") for rank in range(4)]
        assert own == [""] * 16


def test_chapter_4_tensors_are_what_the_table_says(pages):
    """The figure finds whole, shard and partial from the numbers; here they are compared with step 4's docstring."""
    frames = frames_of(pages, "step04_tp_sp", "A block on two ranks")
    for sp, between in (("yes", "shard: tokens"), ("no", "whole")):
        said = [chip[0] for row in ("forward", "backward") for chip in rows_of(frames[f"attention/{sp}"])[row][0]]
        kinds = dict(text.split(": ", 1) for text in said)
        assert kinds["x"] == kinds["norm(x)"] == kinds["g"] == kinds["d x"] == between
        assert kinds["f(norm(x))"] == kinds["d o_proj"] == "whole"
        assert kinds["o_proj"] == kinds["d f(norm(x))"] == "partial"
        assert all(kinds[name] == "shard: columns" for name in ("q", "k", "v", "heads", "d q", "d k", "d v", "d heads"))
    full = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    for wrong in ([full[:1], full[1:] + 1], [full, full.flip(0)]):  # neither whole nor shards nor terms of a sum
        with pytest.raises(RuntimeError):
            kind_of(wrong, full)


def test_chapter_5_every_pair_is_computed_once(pages):
    """16 tokens have 136 pairs; with zigzag all ranks have the same work in each hop, in order they do not."""
    frames = frames_of(pages, "step05_cp_ring", "Queries and keys, hop by hop")
    assert {"zigzag", "ring"} <= frames.keys()
    for mode, frame in frames.items():
        pairs = [(query, key) for query, key, *_ in frame["boxes"]]
        assert sorted(pairs) == [(query, key) for query in range(16) for key in range(query + 1)]
        assert len({(box[0], box[3]) for box in frame["boxes"]}) == 16, "a query stays on its rank"
        work = [[sum(box[3:5] == [rank, hop] for box in frame["boxes"]) for rank in range(4)] for hop in range(4)]
        assert all(len(set(row)) == 1 for row in work) == (mode == "zigzag"), mode
        said = [list(map(int, re.findall(r"ank \d: (\d+) pairs", says))) for says in frame["moments"]]
        assert said == work and f"the time of {sum(map(max, work))}," in frame["text"], mode


def test_chapter_7_tokens_come_home(pages):
    """Each rank gets rows for its own experts, sorted by expert. No row is lost; outputs return in the rows' order."""
    for frame in frames_of(pages, "step07_moe_ep", "Tokens travel to experts and back").values():
        rows = {name: [[c[0] for c in cell if c != "|"] for cell in row] for name, row in rows_of(frame).items()}
        assert rows["home"] == rows["sorted"] and sorted(chain(*rows["there"])) == sorted(chain(*rows["sorted"]))
        for (here,), there in zip(rows_of(frame)["experts here"], rows["there"], strict=True):
            assert {row.split(":")[0] for row in there} <= {*here.split(", ")}
            assert [row[:2] for row in there] == sorted(row[:2] for row in there)


def test_chapter_7_the_mesh_says_what_travels(pages):
    """For README's first command: the groups of each rank, and what the dry run counts in them."""
    frame = frames_of(pages, "step07_moe_ep", "The mesh: choose a rank")["2/1/2/2/2"]
    assert len(frame["boxes"]) == 8
    for n, box in enumerate(frame["boxes"]):
        groups = dict(re.findall(r"^(\w+) (\[.*?\]): ", box[5], re.M))
        assert groups.keys() == {"pp", "cp", "tp", "data", "ep", "expert_data", "sequence"}
        assert all(n in json.loads(ranks) for ranks in groups.values())
        assert {other for other, _ in box[6]} == set(chain(*map(json.loads, groups.values()))) - {n}
        assert re.search(r"^ep .*all-to-all", box[5], re.M) and re.search(r"^cp .*send", box[5], re.M)


def test_a_missing_run_is_one_line(tmp_path):
    """A folder that has no run gives an error of one line."""
    command = [sys.executable, "-m", "extras.services.pages", tmp_path, "--run", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and done.stderr.startswith("error: --run") and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
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


def show(browser, pages: Path, page: str, width: int = 1280):
    """Open a page in a window of this width. Wait until its script has run, since `get` may return earlier."""
    from selenium.webdriver.support.wait import WebDriverWait

    size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    address = (pages / f"{page}.html").as_uri()
    browser.get(address)
    whole = "return document.readyState == 'complete' && location.href == arguments[0]"
    WebDriverWait(browser, 60, 0.05).until(lambda it: it.execute_script(whole, address))


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.exhaustive] * (p not in ("index", "step06_pipeline"))) for p in PAGES]
)
def test_a_page_in_a_browser(browser, pages, page):
    """A page has no errors and fits the window, also with its new lines shown, and in a definition's panel."""
    for width in (390, 1280):
        browser.get_log("browser")
        show(browser, pages, page, width)
        for script in (
            "",
            "document.querySelector('#new')?.click()",
            "document.querySelector('a[data-pages]')?.click()",
        ):
            browser.execute_script(script)
            if frames := browser.find_elements("css selector", "iframe"):
                browser.switch_to.frame(frames[0])
            sizes = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
            needs, has = browser.execute_script(sizes)
            assert needs <= has, (page, width, script)
        assert browser.get_log("browser") == [], page


def test_the_player_shows_the_schedules_times(browser, pages):
    """For random choices and costs, each box, and what it waits for, is as `simulate` says.

    One micro-batch takes p (F + B) + 2 (p - 1) messages.
    """
    plugins()
    show(browser, pages, "step06_pipeline")
    draw = random.Random(0)
    for name in draw.sample([*SCHEDULES], 6):
        config, costs = compose(step06)(model="llama3-8b", schedule=name, pp=4), dict(F=draw.randint(1, 3), B=4)
        (places, lists), split = step06.plan(config, 8), SCHEDULES[name](config).costs.get("W")
        costs |= dict(W=5) if split else {}
        spans = simulate(lists, places, costs)
        _, shown = browser.execute_script(BOXES, name, "4", "8", costs)
        assert sorted(shown) == sorted([r, start, end - start, a.kind, a.micro_batch] for end, r, start, a in spans)
        n, (end, _, start, a) = draw.choice([(n, span) for n, span in enumerate(spans) if span[2]])
        browser.execute_script(f"document.querySelectorAll('.stage label')[{n}].click()")
        note = browser.find_element("css selector", "output").text.split("\n", 1)[1]
        before = [(s, t, b) for t, _, s, b in spans if consumer(b, places) == a]
        waits = "".join(f"\nwaits for {b.kind} {b.micro_batch}, stage {b.stage}: time {s} to {t}" for s, t, b in before)
        assert note == f"{a.kind} {a.micro_batch}, stage {a.stage}: time {start} to {end}{waits}"
    text, _ = browser.execute_script(BOXES, "1f1b", "4", "1", dict(F=2, B=3, message=5))
    assert f"of {4 * (2 + 3) + 2 * 3 * 5} units" in text


def test_the_keyboard_suffices(browser, pages):
    """Keys lead from a name to its definition, deeper, back and out; they choose, and step through a picture."""
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
    title, code = browser.execute_script(SHOWN)
    assert title == "common.UserError" and code.strip() == inspect.getsource(UserError).split("\n")[0]
    browser.switch_to.default_content()
    assert press(Keys.ESCAPE) == link and not browser.execute_script(PANEL)
