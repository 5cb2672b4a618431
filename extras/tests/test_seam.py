"""The seam: calls nest alike whoever attaches first, and only the seam changes them."""

import ast
from itertools import permutations
from types import SimpleNamespace

import pytest

from common import UserError
from extras.services.seam import plugins
from extras.tests.test_house import FILES, room_of, tree_of
from extras.variants import ORDER, Parts, name_of


class Part:
    """Something with a method."""

    def add(self, text: str) -> str:
        """Its own."""
        return f"own {text}"


def parts() -> Parts:
    """Of nothing."""
    return Parts(None, None, SimpleNamespace(), None)


AROUND = [f"extras.variants.{name}" for name in ("step01.fp16", "step01.skip_spikes", "step07.balance_bias")]
AROUND += ["extras.services.clocks"]


@pytest.mark.parametrize("order", list(permutations(["extras.variants.step03.offload_optimizer", *AROUND])))
def test_calls_nest_alike_whoever_comes_first(order):
    """Inside is the one replacement, then variants in ORDER, then those that look on; other objects are as ever."""
    made, part = parts(), Part()
    for by in order:
        if "offload" in by:
            made.instead(part, "add", lambda text: f"offloaded {text}", by=by)
        else:
            made.around(part, "add", lambda inner, text, by=by: f"{by.split('.')[-1]}({inner(text)})", by=by)
    assert part.add("x") == "clocks(skip_spikes(balance_bias(fp16(offloaded x))))"
    assert Part().add("x") == "own x"


def test_two_replacements_are_refused():
    """In one line; and whoever stands around a call without a place in ORDER is told so."""
    made, part = parts(), Part()
    made.instead(part, "add", str, by="extras.variants.step03.offload_optimizer")
    made.instead(Part(), "add", str, by="extras.variants.step03.offload_params")  # another object's
    with pytest.raises(UserError, match=r"offload_optimizer instead of Part\.add and offload_params instead"):
        made.instead(part, "add", str, by="extras.variants.step03.offload_params")
    with pytest.raises(AssertionError, match="ORDER"):
        made.around(part, "add", str, by="extras.variants.step01.nobody")


METHODS = {
    node.name
    for module in FILES
    if room_of(module) in ("step", "common")
    for owner in ast.walk(tree_of(module))
    if isinstance(owner, ast.ClassDef)
    for node in owner.body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
} | {"loss", "attend", "enter", "leave"}
NUMBERS = "setattr(moe, name, coeff * scale)"  # of fp16 and batch_ramp: coefficients of losses are data
SEAM, GIVES_BACK = "extras.variants", "extras.services.dry_run"  # its `without_numbers`: while tensors have none


def leaves(node: ast.AST) -> list[ast.AST]:
    """What a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [leaf for each in targets for leaf in (each.elts if isinstance(each, ast.Tuple) else [each])]


def rebindings(module: str, tree: ast.Module) -> list[str]:
    """Where a file changes calls, hooks or flags by itself."""
    settles = {id(n) for f in ast.walk(tree) if getattr(f, "name", "") == "settle" for n in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        for leaf in leaves(node):
            owner = leaf.value.id if isinstance(leaf, ast.Attribute) and isinstance(leaf.value, ast.Name) else ""
            name = leaf.attr if isinstance(leaf, ast.Attribute) and id(node) not in settles else ""
            if name and (owner == "config" or (name in METHODS and owner not in ("self", "ctx"))):
                found.append(f"{module}:{node.lineno} sets .{name}")
        text = ast.unparse(node) if isinstance(node, ast.Call | ast.Attribute) else ""
        own = id(node) in settles or text.startswith("setattr(self, ") or module == SEAM or text == NUMBERS
        if text.startswith(("setattr(", "object.__setattr__(")) and not own:
            found.append(f"{module}:{node.lineno} {text}")
        if text.endswith(("._forward_hooks", "._forward_pre_hooks")) or (
            text.startswith("mock.patch") and module != GIVES_BACK
        ):
            found.append(f"{module}:{node.lineno} {text}")
    return found


def test_only_the_seam_changes_calls():
    """No variant or service assigns a method of a step's object, clears hooks or sets flags; ORDER is complete."""
    around = set()
    for module in FILES:  # pages are written by processes of their own, in which nobody's run is
        if room_of(module) in ("variants", "services") and not module.startswith("extras.services.pages"):
            tree = tree_of(module)
            assert not rebindings(module, tree)
            verbs = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
            around |= {module} if "around" in verbs and module != SEAM else set()
    assert {name_of(name) for name in around if room_of(name) == "variants"} == {*ORDER}


@pytest.mark.parametrize(
    "text",
    [
        "linear.forward = other",
        "right, model.loss = model.loss, other",
        "setattr(model, 'loss', other)",
        "object.__setattr__(model, 'forward', other)",
        "block._forward_pre_hooks.clear()",
        "def check(config, world):\n    config.steps = 0",
        "def check(config, world):\n    setattr(config, 'steps', 0)",
        "mock.patch.object(Data, 'batch', other)",
    ],
)
def test_a_rebinding_is_found(text):
    """Each way that there was."""
    assert rebindings("variants.step01.x", ast.parse(text))
    assert not rebindings("variants.step01.x", ast.parse("def settle(config, world):\n    config.steps = 0"))


def test_a_variant_lies_in_the_folder_of_its_chapter():
    """That of SINCE, if it has one. And its own name is unique, as a checkpoint keeps its state by it."""
    for plugin in plugins():
        if room_of(plugin.__name__) == "variants" and hasattr(plugin, "SINCE"):
            assert plugin.SINCE.__module__.startswith(plugin.__name__.split(".")[2]), plugin.__name__
    names = [name_of(plugin.__name__) for plugin in plugins()]
    assert len(names) == len({*names})
