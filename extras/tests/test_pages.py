"""Tests the web pages of the course: links lead to sections, and the pictures of attention and of
schedules obey the steps' laws.
"""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("markdown_it")
pytest.importorskip("pygments")

from extras.pages import __main__ as site

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted(ROOT.glob("step0*.py"))}
FILES |= {
    f"common.{path.stem}".removesuffix(".__init__"): path
    for path in sorted((ROOT / "common").glob("*.py"))
}
PICTURED = list(FILES)[:7]
LARGEST = 4_000_000  # bytes of all files together


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write all pages, which are small; returns their folder."""
    folder = tmp_path_factory.mktemp("pages")
    with mock.patch.object(sys, "argv", ["pages", str(folder)]):
        site.main()
    assert (folder / "schedules.gif").exists()
    assert sum(path.stat().st_size for path in folder.iterdir()) < LARGEST
    return folder


@pytest.fixture(scope="module")
def pages(written):
    """The texts of all pages by file name."""
    return {path.name: path.read_text() for path in written.glob("*.html")}


HAS = [  # page, a regular expression that its text contains
    (
        "index",
        r'<img class=moving src="schedules.gif"[^>]*>\s*'
        r'<p><a href="step01_single_gpu.html">Begin with step 1',
    ),
    ("index", r"Seven scripts in plain PyTorch"),
    *((step, r'<h2 id="picture-') for step in PICTURED),
    *((here, f'class=next><a href="{following}.html"') for here, following in pairwise(FILES)),
    (
        "step05_cp_ring",
        r"\(3 \* 10 \+ 1 \* 2\) / 4 = 8",
    ),  # * in a docstring is a product, not emphasis
]


def test_pages_have_what_they_must(pages):
    """The index, each step and each file of common have a page, which matches its patterns in HAS
    and loads no http.
    """
    assert sorted(pages) == sorted(f"{page}.html" for page in ("index", *FILES))
    assert not [page for page, text in pages.items() if 'src="http' in text]
    assert not [(page, what) for page, what in HAS if not re.search(what, pages[f"{page}.html"])]


def test_every_link_leads_somewhere(pages):
    """Each link leads to an existing page, or to a part of its own page."""
    for name, text in pages.items():
        for page, part in re.findall('href="?([^">#]*)(?:#([^">]*))?', text):
            if page.endswith(".html"):
                assert page in pages, (name, page)
            elif not page and part:
                assert f'id="{part}"' in text, (name, part)


@pytest.fixture(scope="module")
def recorded(pages):
    """The data of each step's picture, by step."""
    data = {}
    for step in PICTURED:
        (text,) = re.findall("application/json>(.*?)</script>", pages[f"{step}.html"], re.DOTALL)
        data[step] = json.loads(text)
    return data


@pytest.mark.parametrize("mode", ["zigzag", "ordered"])
def test_each_pair_is_computed_once_and_zigzag_is_even(recorded, mode):
    """16 tokens; with zigzag all ranks have the same work in each hop, in order they have not."""
    boxes = recorded["step05_cp_ring"][mode]["boxes"]
    assert sorted((box[0], box[1]) for box in boxes) == [
        (q, k) for q in range(16) for k in range(q + 1)
    ]
    even = True
    for hop in range(4):
        work = {sum(box[3:5] == [rank, hop] for box in boxes) for rank in range(4)}
        even = even and len(work) == 1
    assert even == (mode == "zigzag")


def test_schedules_have_step_6s_bubble_and_memory(recorded):
    """Four ranks, eight micro-batches: 3 of 11 units idle; 4 3 2 1 graphs in 1F1B, 8 on all in
    AFAB.
    """
    frames = recorded["step06_pipeline"]
    assert f"idle for {3 / 11:.1%}" in frames["1f1b/4/8"]["text"]
    assert "rank: 4 3 2 1." in frames["1f1b/4/8"]["text"]
    assert "rank: 8 8 8 8." in frames["afab/4/8"]["text"]


def test_what_train_changes(pages):
    """The page of step 2 marks the new line that makes the mesh; step 1's has no such part."""
    assert "What <code>train</code> changes" not in pages["step01_single_gpu.html"]
    added = re.findall(r"<span class=added>([^<]*)", pages["step02_ddp.html"])
    assert any("mesh = Mesh(dp=join_ranks(device))" in line for line in added)
    assert not any("micro_loss.backward()" in line for line in added)


def test_minutes_and_pytorchs_own(pages):
    """A step's page shows README's minutes and, where the benchmarks have one, PyTorch's twin."""
    assert "<p class=minutes>45 minutes</p>" in pages["step03_zero.html"]
    assert "fully_shard" in pages["step03_zero.html"].partition("id=pytorchs-own")[2]
    assert "id=pytorchs-own" not in pages["step07_moe_ep.html"]


# A table with bars, a table without, and boxes
DRAWN = ["index", "step01_single_gpu", "step02_ddp", "step06_pipeline"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("page", DRAWN)
def test_a_browser_draws_the_page(written, page, tmp_path):
    """Scripts run without an error on the console, and a step's picture has been drawn."""
    words = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    words += [
        "--enable-logging=stderr",
        "--virtual-time-budget=3000",
        f"--user-data-dir={tmp_path}",
    ]
    words.append((written / f"{page}.html").as_uri())
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert not console, console
    if page != "index":
        drawn = done.stdout.partition('class="stage')[2].partition("</form>")[0]
        assert "<table>" in drawn or "<label" in drawn
