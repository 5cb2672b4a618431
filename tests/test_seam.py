"""The seam: calls nest alike whoever attaches first, and with default flags every line of a step runs as it stands."""

import ast
from itertools import permutations
from types import SimpleNamespace

import pytest

from common import UserError
from tests import equal
from tests.test_house import FILES, room_of
from variants import ORDER, Parts


class Part:
    """Something with a method."""

    def add(self, text: str) -> str:
        """Its own."""
        return f"own {text}"


def parts() -> Parts:
    """Of nothing."""
    return Parts(None, None, SimpleNamespace(), None)


AROUND = ["variants.fp16", "variants.skip_spikes", "variants.balance_bias", "services.clocks"]


@pytest.mark.parametrize("order", list(permutations(["variants.offload_optimizer", *AROUND])))
def test_calls_nest_alike_whoever_comes_first(order):
    """Inside is the one replacement, then variants in ORDER, then those that look on; other objects are as ever."""
    made, part = parts(), Part()
    for by in order:
        if "offload" in by:
            made.instead(part, "add", lambda text: f"offloaded {text}", by=by)
        else:
            made.around(part, "add", lambda inner, text, by=by: f"{by.split('.')[1]}({inner(text)})", by=by)
    assert part.add("x") == "clocks(skip_spikes(balance_bias(fp16(offloaded x))))"
    assert Part().add("x") == "own x"


def test_two_replacements_are_refused():
    """In one line; and whoever stands around a call without a place in ORDER is told so."""
    made, part = parts(), Part()
    made.instead(part, "add", str, by="variants.offload_optimizer")
    made.instead(Part(), "add", str, by="variants.offload_params")  # another object's
    with pytest.raises(UserError, match=r"offload_optimizer instead of Part\.add and offload_params instead"):
        made.instead(part, "add", str, by="variants.offload_params")
    with pytest.raises(AssertionError, match="ORDER"):
        made.around(part, "add", str, by="variants.nobody")


@pytest.mark.parametrize("step", sorted(module for module in FILES if room_of(module) == "step"))
def test_with_default_flags_no_variant_changes_a_call(step):
    """Those who look on may."""
    experts = dict(experts=4) if step.startswith("step07") else {}
    changes = equal.watch(step, experts | dict(steps=1, global_batch_size=4)).parts.attached
    assert not [str(change) for change in changes if change.by.startswith("variants.")]


def test_only_the_seam_changes_calls():
    """No variant or service assigns a method to an object of another class; no name of ORDER is too much."""
    allowed = {("variants.block_overlap", "forward"), ("services.evaluation", "loss")}  # given back after a look
    allowed |= {("variants.selective", "forward"), ("variants.zero_toy", "steps")}  # which builds; a flag
    methods = {
        node.name
        for module in FILES
        if room_of(module) in ("step", "common")
        for owner in ast.walk(ast.parse(FILES[module].read_text()))
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    } | {"loss", "attend"}
    around = set()
    for module in FILES:
        if room_of(module) not in ("variants", "services"):
            continue
        for node in ast.walk(ast.parse(FILES[module].read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in (leaf for each in targets for leaf in (each.elts if isinstance(each, ast.Tuple) else [each])):
                if isinstance(target, ast.Attribute) and target.attr in methods:
                    own = isinstance(target.value, ast.Name) and target.value.id in ("self", "ctx")
                    assert own or (module, target.attr) in allowed, f"{module}:{node.lineno} sets .{target.attr}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "around":
                around |= {module}
    assert {name.partition("variants.")[2] for name in around if room_of(name) == "variants"} - {""} == {*ORDER}
