"""python tests/untouched.py TEXT.txt: which functions, methods, menu entries of the course are other ones in the end.

It takes each step as a rank of eight (step 1: of one) whose messages go nowhere, with default flags but for the layout;
imports and attaches everything; and writes, as JSON, what has changed, and what changes by each mistake of `mistake`.
"""

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path[0] = os.getcwd()
STEPS = sorted(path.stem for path in Path().glob("step0*.py"))
LOOKS_ON = {"common.comm.observer", "common.comm.waiting"}  # anybody may set these
FLAGS = dict(model="debug", device="cpu", dtype="fp32", steps=1, global_batch_size=32, micro_batch_size=1)
LAYOUT = dict(pp=2, cp=2, tp=2, ep=2)


def course() -> dict[str, Any]:
    """What modules of steps and common have, by name; of their classes each member, of their menus each entry."""
    found = {}
    for module in [m for name, m in sys.modules.items() if name in STEPS or name.split(".")[0] == "common"]:
        for name, thing in vars(module).items():
            where = f"{module.__name__}.{name}"
            if name.startswith("__") or where in LOOKS_ON:
                continue
            own = isinstance(thing, type) and thing.__module__ == module.__name__
            members = vars(thing) if own else thing if isinstance(thing, dict) else {}
            found |= {where: thing} | {f"{where}.{key}": member for key, member in members.items()}
    return found


def calls(parts: dict[str, Any]) -> dict[tuple[int, str], Any]:
    """What objects of a run have beside their class's methods: functions, and hooks of modules."""
    objects = [*parts.values(), *parts["model"].modules(), parts["optimizer"].torch_optimizer]
    objects += [*getattr(parts["optimizer"], "units", ()), *getattr(parts.get("sync"), "buckets", ())]
    found = {}
    for thing in {id(thing): thing for thing in objects if hasattr(thing, "__dict__")}.values():
        for name, value in vars(thing).items():
            if callable(value) and not isinstance(value, type):
                found[id(thing), f"{type(thing).__name__}.{name}"] = value
            if name in ("_forward_hooks", "_forward_pre_hooks"):
                found |= {(id(thing), f"{type(thing).__name__}{name}[{key}]"): hook for key, hook in value.items()}
    return found


def changed(before: dict, after: dict, more: set = frozenset()) -> list[str]:
    """Names of what is another one, or gone; and of the `more` that has come."""
    others = [name for name, thing in before.items() if after.get(name) is not thing] + [*more]
    return sorted({name if isinstance(name, str) else name[1] for name in others})


def innermost(made: Any, looker: Any) -> Any:
    """What is called in the end, behind those who look on."""
    call = getattr(looker.owner, looker.name)
    lookers = [getattr(c.call, "func", c.call) for c in made.attached if not c.asked]
    while isinstance(call, partial) and call.func in lookers:
        call = call.args[-1]
    return call


def attach(step: ModuleType, plain: dict, mistake: str, text: str) -> list[str]:
    """Build a step, attach everything, and look."""
    from services.clocks import Clock
    from services.screen import ExpertLoad
    from services.seam import OpenRun, check, compose

    config = compose(step)(**FLAGS, **{k: v for k, v in LAYOUT.items() if hasattr(step.Config, k)}, dataset=text)
    world = dist.get_world_size() if dist.is_initialized() else 1
    check(config, world)
    seen = []

    class Look(OpenRun):
        """A run that ends before its first step."""

        def steps(self, **parts: Any):
            before = calls(parts)
            made = self.open(**parts)
            if mistake == "a method of an object":
                made.optimizer.step = lambda lr, step=made.optimizer.step: step(lr)
            Clock(made)
            if hasattr(config, "experts"):
                ExpertLoad(config, made)
            if mistake == "a flag nobody gave":
                made.around(made.optimizer, "step", lambda step, lr: step(lr), by="variants.fp16")
            if mistake == "a hook":
                made.model.model.layers["0"].self_attn._forward_pre_hooks.clear()
            after = calls(parts)
            told = {}  # methods that only lookers stand around
            for c in made.attached:
                own = before.get((id(c.owner), f"{type(c.owner).__name__}.{c.name}"), getattr(type(c.owner), c.name))
                if innermost(made, c) in (own, getattr(own, "__get__", lambda _: None)(c.owner)):
                    told[id(c.owner), f"{type(c.owner).__name__}.{c.name}"] = c
            new = {what for what in after.keys() - before.keys() - told.keys() if "hooks[" not in what[1]}
            kept = {what: thing for what, thing in before.items() if what not in told}
            seen.extend(changed(kept, after, new))
            return iter(())

    run = Look(config)
    run.first = False
    with run:
        step.train(config, run)
    return [*changed(plain, course()), *seen]


def main(text: str):
    """All steps without a mistake, then mistakes."""
    modules = [importlib.import_module(name) for name in STEPS]
    plain = course()
    importlib.import_module("services.run")
    found = {"": attach(modules[0], plain, "", text)}
    os.environ |= dict(RANK="0", WORLD_SIZE="8")
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    make = dist.new_group
    dist.new_group = lambda row: make(row) if 0 in row else None  # as the dry run does
    found[""] += [name for step in modules[1:] for name in attach(step, plain, "", text)]
    for mistake in ("a method of an object", "a flag nobody gave", "a hook"):
        found[mistake] = attach(modules[6], plain, mistake, text)
    for owner, name, what in (modules[1].BucketSync, "send", "a method"), (modules[0], "learning_rate", "a function"):
        right = getattr(owner, name)
        setattr(owner, name, lambda *_: None)
        found[what] = changed(plain, course())
        setattr(owner, name, right)
    menu = modules[2].STAGES
    menu[1] = partial(menu[1])
    found["an entry"] = changed(plain, course())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
