"""Tests the web pages of the course: names and links lead to definitions, and pictures obey the chapters' laws."""

import json
import re
import sys
from itertools import chain, pairwise
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("markdown_it")
pytest.importorskip("pygments")
pytest.importorskip("jedi")

from extras.pages import __main__ as site

ROOT = Path(__file__).parents[2]
FILES = {path.stem: path for path in sorted(ROOT.glob("step0*.py"))}
FILES |= {f"common.{path.stem}".removesuffix(".__init__"): path for path in sorted((ROOT / "common").glob("*.py"))}
PICTURED = [step for step in list(FILES)[:7] if step != "step04_tp_sp"]
LARGEST = 4_000_000  # characters of all pages together


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write all pages; returns their texts by file name."""
    folder = tmp_path_factory.mktemp("pages")
    argv = mock.patch.object(sys, "argv", ["pages", str(folder)])
    with argv:
        site.main()
    assert (folder / "schedules.gif").exists()
    return {path.name: path.read_text() for path in folder.glob("*.html")}


HAS = [  # page, a regular expression that its text contains
    ("index", r'<img class=moving src="schedules.gif"[^>]*>\s*<p><a href="step01_single_gpu.html">Begin with step 1'),
    ("index", r"Seven scripts in plain PyTorch"),
    *((step, r'<h2 id="picture-') for step in PICTURED),
    *((here, f'class=next><a href="{following}.html"') for here, following in pairwise(FILES)),
    ("step01_single_gpu", r'href="common.model.html#Decoder.forward"[^>]*>model</a></span><span class=p>\(</span>'),
    ("step05_cp_ring", r"\(3 \* 10 \+ 1 \* 2\) / 4 = 8"),  # * in a docstring is a product, not emphasis
]


def test_pages_have_what_they_must(pages):
    """The index, each step and each file of common have a page, which matches its patterns in HAS and loads no http."""
    assert sorted(pages) == sorted(f"{page}.html" for page in ("index", *FILES))
    assert sum(map(len, pages.values())) < LARGEST
    assert not [page for page, text in pages.items() if 'src="http' in text]
    assert not [(page, what) for page, what in HAS if not re.search(what, pages[f"{page}.html"])]


def test_every_link_leads_somewhere(pages):
    """Each link leads to an existing page and, if it names a definition, to that definition on the page."""
    for name, text in pages.items():
        for links in re.findall('(?:href|data-pages)="?([^">]+[.]html[^">]*)', text):
            for link in links.split(" "):
                page, _, part = link.partition("#")
                assert page in pages and (not part or f'id="{part}"' in pages[page]), (name, link)


def test_pictures_obey_the_chapters_laws(pages):
    """The data of the pictures obeys the laws that the steps state."""
    text = "".join(pages[f"{step}.html"] for step in list(FILES)[:7])
    recorded = map(json.loads, re.findall("application/json>(.*?)</script>", text, re.DOTALL))
    step, buckets, zero, ring, schedules, routing = recorded

    for choice, frame in step.items():  # 16 bytes a parameter in fp32, 18 in bf16
        n_bytes, own = (16, 4) if choice.startswith("fp32") else (18, 2)
        at = next(n for n, (says, _) in enumerate(frame["states"]) if says.startswith("`step`"))
        state = {kind: row[at] for kind, row in frame["curve"].items() if kind not in ("activations", "other")}
        assert sum(state.values()) == n_bytes * state["parameters"] / own
    most = {name: max(frame["curve"]["activations"]) for name, frame in step.items()}
    assert most["fp32/full"] < most["fp32/none"] / 2

    sums = [{cell[0] for cell in row[1:]} for row in buckets[""]["states"][-1][1].values()]
    assert all(len(of_ranks) == 1 and "under way" not in of_ranks for of_ranks in sums), "all ranks have one sum"

    kinds = ("parameters", "gradients", "masters", "moments")  # bytes a parameter: 2 + 12/4, in stage 3 (2 + 12)/4
    whole = {stage: sum(frame["curve"][kind][-1] for kind in kinds) for stage, frame in zero.items()}
    n_params = zero["1"]["curve"]["parameters"][0] / 2
    assert whole == {"1": 5 * n_params, "2": 5 * n_params, "3": 3.5 * n_params}

    for mode, frame in ring.items():  # with zigzag all ranks have the same work in each hop
        assert sorted((box[0], box[1]) for box in frame["boxes"]) == [(q, k) for q in range(16) for k in range(q + 1)]
        work = [[sum(box[3:5] == [rank, hop] for box in frame["boxes"]) for rank in range(4)] for hop in range(4)]
        assert all(len(set(row)) == 1 for row in work) == (mode == "zigzag"), mode

    assert f"idle for {3 / 11:.1%}" in schedules["1f1b/4/8"]["text"], "the bubble is (p - 1) / (m + p - 1)"
    assert "rank: 4 3 2 1." in schedules["1f1b/4/8"]["text"] and "rank: 8 8 8 8." in schedules["afab/4/8"]["text"]

    for frame in routing.values():  # no row is lost, and outputs return in the rows' order
        rows = {name: [[chip[0] for chip in cell] for cell in row] for name, row in frame["states"][-1][1].items()}
        assert rows["home"] == rows["sorted"] and sorted(chain(*rows["there"])) == sorted(chain(*rows["sorted"]))
