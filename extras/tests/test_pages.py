"""Tests the web pages of the course: what they must show, where links lead, and that a browser
draws them.
"""

import re
import shutil
import subprocess
import sys
from itertools import pairwise
from unittest import mock

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("markdown_it")
pytest.importorskip("pygments")

from extras.pages import __main__ as site

FILES = [*site.course()]
STEPS = FILES[:7]
LARGEST = 4_000_000  # bytes of all files together


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write all pages, which are small; returns their folder."""
    folder = tmp_path_factory.mktemp("pages")
    with mock.patch.object(sys, "argv", ["pages", str(folder)]):
        site.main()
    assert sum(path.stat().st_size for path in folder.iterdir()) < LARGEST
    return folder


@pytest.fixture(scope="module")
def pages(written):
    """The texts of all pages by file name."""
    return {path.name: path.read_text() for path in written.glob("*.html")}


HAS = [  # page, a regular expression that its text contains
    ("index", r'<a href="step01_single_gpu.html">Begin with step 1'),
    ("index", r"Seven scripts in plain PyTorch"),
    *((here, r'<h2 id="picture-') for here in ("index", *STEPS)),
    *((here, f'class=next><a href="{following}.html"') for here, following in pairwise(FILES)),
    ("step02_ddp", r"<span class=added>\+ +mesh = Mesh\(dp=n_ranks\)\n"),
    ("step02_ddp", r"<span class=same> +micro_loss.backward\(\)\n"),
    ("step03_zero", r"<p class=minutes>55 minutes</p>"),
    ("step03_zero", r"(?s)<section id=pytorchs-own>.*fully_shard"),
    ("step04_tp_sp", r'"before g": \[\["partial \[1, 16, 16\]"\]'),  # with SP, too
    ("step05_cp_ring", r"\(3 \* 10 \+ 1 \* 2\) / 4 = 8"),  # a product in a docstring, no emphasis
    ("step07_moe_ep", r'"received": \[\[\["e0:t0", 0, ""\]'),
    # The laws of steps 5 and 6: 16 x 17 / 2 pairs; 3 of 11 units idle
    ("step05_cp_ring", r"136 pairs in all, 34 a rank if shared evenly; they take the time of 34,"),
    ("step05_cp_ring", r"136 pairs in all, 34 a rank if shared evenly; they take the time of 58,"),
    ("step06_pipeline", r"idle for 27.3% of 66.0 units of time. [^.]*, by rank: 4 3 2 1\."),
    ("step06_pipeline", r"idle for 27.3% of 66.0 units of time. [^.]*, by rank: 8 8 8 8\."),
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
            if page:
                assert page in pages or page == "data:,", (name, page)
            else:
                assert f'id="{part}"' in text, (name, part)


# Boxes, a table with bars, and a table without
DRAWN = ["index", "step01_single_gpu", "step02_ddp"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("page", DRAWN)
def test_a_browser_draws_the_page(written, page, tmp_path):
    """Scripts run without an error on the console, and the picture has been drawn."""
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
    drawn = done.stdout.partition('class="stage')[2].partition("</form>")[0]
    assert "<table>" in drawn or "<label" in drawn
