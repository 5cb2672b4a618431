"""State of techniques that is no part of a parameter: the errors that a sync owes, the factor of an
fp16 loss, the masters of DiLoCo's ranks, which differ.

A part of a run (what `train` gives to `run.steps`) that has such state has two methods:

    state()            -> a dict of tensors, saved in this rank's file of a checkpoint
    load_state(state)  restores them

Each rank restores its own. So the layout and the number of ranks must be those of the saved run.
"""

from typing import Any

from common import UserError
from common.checkpoint import files_of, read_file
from common.flags import spelled
from common.run import Run

# What decides which state a rank has
KEEP = ("ranks", "sync", "zero", "tp", "cp", "pp", "schedule", "chunks", "ep")


class StatefulRun(Run):
    """A run that also saves and restores such state."""

    def content(self, done: int) -> dict[str, Any]:
        """As `Run.content`, with the state of the parts that have some."""
        state = {}
        for name, part in self.others.items():
            if hasattr(part, "state"):
                state[name] = part.state()
        return super().content(done) | dict(state=state)

    def restore(self) -> int:
        """As `Run.restore`. Raises UserError if there is state, and it does not fit this run."""
        done = super().restore()
        folder = self.last_checkpoint
        if folder is None:  # the run begins
            return done
        files = files_of(folder)
        saved = read_file(files[self.rank % len(files)])
        before = saved["flags"]
        changed = [name for name in KEEP if before.get(name) != self.flags.get(name)]
        for part, state in saved.get("state", {}).items():
            if part not in self.others:
                raise UserError(f"--resume {folder}: this script has no {part}, whose state it has")
            if changed:
                flag = "the number of ranks" if "ranks" in changed else spelled(changed[0])
                raise UserError(f"--resume {folder}: for the state of {part}, keep {flag}")
            self.others[part].load_state(state)
        return done
