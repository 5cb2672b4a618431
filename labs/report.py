"""A page of HTML about a folder: points, pictures from a run of the student's file, answers."""

import ast
import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from labs import ranks
from labs.folder import note
from labs.grade import Folder, Result, check, text_of
from labs.ranks import Failed, World
from labs.training import PICTURED

STYLE = (
    "body{font:16px sans-serif;max-width:50em;margin:2em auto}td{padding:.2em .8em;vertical-align:top}.no{color:#a00}"
)


def as_image(figure: Any) -> str:
    """A figure as an <img> that holds its own data."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def own_run(folder: Folder) -> tuple[list[dict], list[float]]:
    """(by rank what a run of the student's files shows, one device's losses).

    The run is `picture_run()` of the lab's module if there is one, else that of `WHOLE`.
    """
    modules, lab = {}, folder.lab
    for file, module in lab.files.items():
        modules[module] = ast.parse(folder.sources[module], file), str(folder.path / file)
    size, layout = lab.module.WHOLE
    base = lab.module.RUN
    run = "labs.training:pictured", (lab.step, json.dumps(base | layout))
    if hasattr(lab.module, "picture_run"):
        run = f"{lab.module.__name__}:picture_run", ()
    mine = ranks.run(World(modules, folder.path), size, *run, 120)
    alone = ranks.run(World(), 1, "labs.training:losses", (lab.alone, json.dumps(base | PICTURED)), 120)[0]
    return mine, alone


def pictures(folder: Folder) -> str:
    """Loss beside one device, bytes sent, and what else the lab draws; or why there are none."""
    try:
        runs, alone = own_run(folder)
    except (Failed, SyntaxError) as error:
        return f"<p>Your file does not run yet: {html.escape(str(error))}</p>"
    sent = runs[0]["traffic"]
    wide = 2 if sent else 1
    figure, axes = plt.subplots(1, wide, figsize=(5 * wide, 3.5), squeeze=False, layout="constrained")
    left = axes[0, 0]
    left.plot(range(1, len(alone) + 1), alone, "o-", label="one device", linewidth=4, alpha=0.4)
    left.plot(range(1, len(runs[0]["losses"]) + 1), runs[0]["losses"], "x--", label=f"your file, ranks: {len(runs)}")
    left.set(xlabel="step", ylabel="loss (nats a token)")
    left.legend()
    if sent:
        axes[0, 1].barh(list(sent), [n_bytes / 1e6 for n_bytes in sent.values()])
        axes[0, 1].set(xlabel="MB that rank 0 sends in a step", title="ledger")
    worst = max((abs(a - b) / abs(b) for a, b in zip(runs[0]["losses"], alone, strict=False)), default=0.0)
    text = as_image(figure) + f"<p>Largest relative difference of a loss from one device: {worst:.2g}.</p>"
    for draw in getattr(folder.lab.module, "PICTURES", []):
        try:
            text += as_image(draw(runs))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of what the student's code returned
            text += f"<p>No picture of {draw.__name__}: {html.escape(str(error))}</p>"
    return text


def rows(results: list[Result]) -> str:
    """The table of criteria."""
    lines = []
    for r in results:
        mark, why = ("", "") if not r.text else (' class="no"', f"<br><small>{html.escape(r.text)}</small>")
        name = f"{r.task.number}. {html.escape(r.task.name)}"
        says = html.escape(r.criterion.says)
        lines.append(f"<tr{mark}><td>{name}</td><td>{says}{why}</td><td>{r.earned}/{r.criterion.points}</td></tr>")
    return "\n".join(lines)


def report(folder: Folder) -> Path:
    """Write report.html into the folder; returns its path."""
    results = list(check(folder, folder.lab.tasks))
    earned = sum(r.earned for r in results)
    asked = [
        f"<p>{html.escape(q.ask(folder.student))}<br><b>{html.escape(str(folder.answers.get(q.name, '')))}</b></p>"
        for q in folder.lab.questions
    ]
    progress = html.escape(text_of(folder.path / "progress.txt"))
    title = f"Lab {folder.lab.number}: {html.escape(folder.lab.title)}"
    page = f"""<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>
<h1>{title}</h1><p>id {html.escape(folder.student)}: <b>{earned} of {folder.lab.points} points</b></p>
<table>{rows(results)}</table>
<h2>A run of your file</h2>{pictures(folder)}
<h2>Answers</h2>{"".join(asked)}
<h2>Progress</h2><pre>{progress}</pre>
"""
    target = folder.path / "report.html"
    target.write_text(page)
    note(folder.path, f"report: {earned} of {folder.lab.points} points")
    return target
