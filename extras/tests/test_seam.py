"""The wrappers of a method nest in the same order, whichever file attaches first."""

from itertools import permutations
from types import SimpleNamespace

import pytest

from common import UserError
from extras.services.seam import plugins
from extras.variants import ORDER, Parts, name_of


class Part:
    """An object whose method is wrapped."""

    def add(self, text: str) -> str:
        """The method of the class."""
        return f"own {text}"


AROUND = [f"extras.variants.{name}" for name in ("step01.fp16", "step01.prefetch", "step07.routing")]
AROUND += ["extras.services.clocks"]


@pytest.mark.parametrize("order", list(permutations(["extras.variants.step03.offload_optimizer", *AROUND])))
def test_calls_nest_alike_whoever_comes_first(order):
    """The replacement is innermost, then techniques in ORDER, then services. Other objects keep their method."""
    made, part = Parts(None, None, SimpleNamespace(), None), Part()
    for by in order:
        if "offload" in by:
            made.instead(part, "add", lambda text: f"offloaded {text}", by=by)
        else:
            made.around(part, "add", lambda inner, text, by=by: f"{by.split('.')[-1]}({inner(text)})", by=by)
    assert part.add("x") == "clocks(prefetch(routing(fp16(offloaded x))))"
    assert Part().add("x") == "own x"


def test_two_replacements_are_refused():
    """Only one file may replace a method of an object. A technique's file that wraps a method must be in ORDER."""
    made, part = Parts(None, None, SimpleNamespace(), None), Part()
    made.instead(part, "add", str, by="extras.variants.step03.offload_optimizer")
    made.instead(Part(), "add", str, by="extras.variants.step03.offload_params")  # of another object: allowed
    with pytest.raises(UserError, match=r"offload_optimizer instead of Part\.add and offload_params instead"):
        made.instead(part, "add", str, by="extras.variants.step03.offload_params")
    with pytest.raises(AssertionError, match="ORDER"):
        made.around(part, "add", str, by="extras.variants.step01.nobody")


def test_a_name_is_of_one_file():
    """Checkpoints store the state of a technique under the name of its file, so these names must differ."""
    names = [name_of(plugin.__name__) for plugin in plugins()]
    assert len(names) == len({*names}) and {*ORDER} <= {*names}
