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


AROUND = [f"extras.variants.{name}" for name in ("step01.fp16", "step01.skip_spikes", "step07.routing")]
AROUND += ["extras.services.clocks"]


@pytest.mark.parametrize("order", list(permutations(["extras.variants.step03.offload_optimizer", *AROUND])))
def test_calls_nest_alike_whoever_comes_first(order):
    """Innermost is the replacement, then techniques in ORDER, then services; other objects keep their own."""
    made, part = Parts(None, None, SimpleNamespace(), None), Part()
    for by in order:
        if "offload" in by:
            made.instead(part, "add", lambda text: f"offloaded {text}", by=by)
        else:
            made.around(part, "add", lambda inner, text, by=by: f"{by.split('.')[-1]}({inner(text)})", by=by)
    assert part.add("x") == "clocks(skip_spikes(routing(fp16(offloaded x))))"
    assert Part().add("x") == "own x"


def test_two_replacements_are_refused():
    """In one line; and a file that wraps a call without a place in ORDER is told so."""
    made, part = Parts(None, None, SimpleNamespace(), None), Part()
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


def rebindings(tree: ast.Module, patches: bool = False) -> list[str]:
    """Statements of a file that change methods, hooks or flags without the seam."""
    settles = {id(n) for f in ast.walk(tree) if getattr(f, "name", "") == "settle" for n in ast.walk(f)}
    found = []
    for node in [node for node in ast.walk(tree) if id(node) not in settles]:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            owner = node.value.id
            found += [node] * (owner == "config" or (node.attr in METHODS and owner not in ("self", "ctx")))
        text = ast.unparse(node) if isinstance(node, ast.Call | ast.Attribute) else ""
        sets = text.startswith(("setattr(", "object.__setattr__(")) and not text.startswith("setattr(self, ")
        hooks = text.endswith(("._forward_hooks", "._forward_pre_hooks"))
        found += [node] * (sets or hooks or (text.startswith("mock.patch") and not patches))
    return [f"{node.lineno}: {ast.unparse(node)}" for node in found]


def test_only_the_seam_changes_calls():
    """No technique or service assigns a method of a step's object, clears hooks or sets flags; ORDER is complete."""
    around = set()
    for module in FILES:  # pages are written by processes of their own, in which nobody's run is
        if room_of(module) in ("variants", "services") and not module.startswith("extras.services.pages"):
            if module != "extras.variants":  # the dry run patches, while its tensors have no numbers
                assert not rebindings(tree_of(module), patches=module == "extras.services.dry_run"), module
            verbs = [n.attr for n in ast.walk(tree_of(module)) if isinstance(n, ast.Attribute)]
            around |= {module} if "around" in verbs and module != "extras.variants" else set()
    assert {name_of(name) for name in around if room_of(name) == "variants"} == {*ORDER}
    names = [name_of(plugin.__name__) for plugin in plugins()]
    assert len(names) == len({*names}), "a checkpoint keeps a technique's state by its name"


@pytest.mark.parametrize(
    "text",
    [
        "right, model.loss = model.loss, other",
        "setattr(model, 'loss', other)",
        "block._forward_pre_hooks.clear()",
        "def check(config, world):\n    config.steps = 0",
        "mock.patch.object(Data, 'batch', other)",
    ],
)
def test_a_rebinding_is_found(text):
    """Each way to do so; `settle` alone may set flags."""
    assert rebindings(ast.parse(text))
    assert not rebindings(ast.parse("def settle(config, world):\n    config.steps = 0"))
