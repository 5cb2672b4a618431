"""A few steps of training on ranks, laid beside one device number by number: what every lab has to end in."""

import importlib
import json
from typing import Any

from labs.bench import BOUND, Bench, Run, Wrong, distance, factor, meaning


def trained(step: str, options: str) -> dict[str, Any]:
    """Runs on every rank: train `step`'s module with `options` (JSON); losses, norms, gradients, parameters."""
    from tests import equivalence

    module = importlib.import_module(step)
    config = module.Config(**equivalence.SMALL | json.loads(options) | dict(out="run"))  # in the ranks' own folder
    return vars(equivalence.record(module, config))


PICTURED = dict(steps=10, optimizer="adamw", lr=0.01)  # in place of a lab's own, so that a loss can be seen to fall


def pictured(step: str, options: str) -> dict[str, Any]:
    """Runs on every rank: train as PICTURED; losses, and bytes sent in the last step by "dimension: operation"."""
    from tests import equivalence

    module, flags = importlib.import_module(step), json.loads(options) | PICTURED
    with equivalence.without_instruments():
        history = module.train(module.Config(**equivalence.SMALL | flags | dict(out="run"))).history
    sent = {f"{dim}: {name}": n for dim, part in history[-1]["traffic"].items() for name, n in part.items()}
    return dict(losses=[row["loss"] for row in history], traffic=sent)


def flat(recording: dict[str, Any]) -> dict[str, Any]:
    """A recording in the order in which a first difference is looked for: by step loss, gradients, norm."""
    found = {}
    for i, gradients in enumerate(recording["gradients"]):
        found[f"step {i + 1}: the loss"] = recording["losses"][i]
        found |= {f"step {i + 1}: the gradient of {name}": value for name, value in gradients.items()}
        found[f"step {i + 1}: the gradient norm"] = recording["norms"][i]
    return found | {f"after training: {name}": value for name, value in recording["parameters"].items()}


def losses(step: str, options: str) -> list[float]:
    """Runs on every rank: train; the losses."""
    return trained(step, options)["losses"]


def equal_to_one_device(
    bench: Bench, step: str, size: int, base: dict, layout: dict, against: str = "step01_single_gpu"
):
    """Raises Wrong at the first number of a run with `base` and `layout` that one device has not with `base`.

    `against`: the step that one device runs; step 1 knows no experts.
    """
    one = bench.ranks(1, trained, against, json.dumps(base), project=True).answers[0]
    run = bench.ranks(size, trained, step, json.dumps(base | layout))
    same_recordings(bench, run, one, " ".join(f"{k}={v}" for k, v in layout.items()))


def same_recordings(bench: Bench, run: Run, one: dict[str, Any], flags: str, bound: float = BOUND):
    """Raises Wrong at the first number of any rank's recording that `one` has not; the text begins with `flags`."""
    expected, answers = flat(one), [flat(answer) for answer in run.answers]
    shown = set().union(*answers)
    for key, value in expected.items():
        for rank, answer in enumerate(answers):
            if key in answer and not distance(answer[key], value) <= bound:
                where = (f"{flags}: " if flags else "") + (f"rank {rank}: " if run.size > 1 else "")
                text = f"{where}{key} differs by {distance(answer[key], value):.3g} (relative)"
                raise Wrong(text + kind(bench, run, rank, key, answer[key], value))
        if key not in shown:
            raise Wrong(f"no rank has {key}" if run.size > 1 else f"there is nothing of {key}")


def kind(bench: Bench, run: Run, rank: int, key: str, found: Any, value: Any) -> str:
    """The fault under which the project's own code finds the same number."""
    for name, answers in bench.faulty(run).items():
        theirs = flat(answers[rank]).get(key) if "losses" in answers[rank] else None
        if theirs is not None and distance(found, theirs) < 1e-8 and distance(theirs, value) > BOUND:
            return f" - {name}: {meaning(name)}"
    return bench.words(factor(found, value), run.size)
