"""DiLoCo: the ranks of dp synchronise once in H steps (`--sync diloco --inner-steps H`; Douillard et al. 2023).

Links between some ranks may be slow, as between data centres. So each dp rank trains alone for H *inner steps* on its
share of the batch, with moments of its own. Then all *meet*: they average how far they have moved from w, the weights
after the last meeting. This mean is the gradient of an *outer step*, SGD with Nesterov momentum:

    each of n ranks    w_r = w after H inner steps
    one all-reduce     d = 1/n sum_r (w - w_r)
    each rank          m = mu m + d, then w = w - eta (d + mu m)      in the paper H = 500, eta = 0.7, mu = 0.9

With eta = 1 and mu = 0, weights are averaged (local SGD: Stich 2018). If also H = 1, with plain SGD and no clipping, it
is step 2. If masters have S bytes, a meeting sends 2 (n-1)/n S over dp, on average 1/H of step 2's gradients. A rank
holds 2 S bytes more, w and m. A run saves (all ranks' moments: "exp_avg@1"), or ends after a signal, only at meetings.

The price: H > 1 needs more tokens to reach the same loss. Between meetings there are n models, and the loss and the
validation loss are means over them. The gradient norm is that of gradients which are not summed over dp. In step 2,
each rank clips by its own norm, and rank 0's is recorded; from step 3 on, all clip by the root mean square of the
ranks' norms (`global_norm`). A rank whose norm is not finite ends, and then torchrun ends the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common import UserError
from common.comm import all_reduce
from common.layout import layout_of
from extras.variants import Parts, Progress
from extras.variants.record import SET, Refusal
from step02_ddp import SYNCS, NaiveSync


class DilocoSync(NaiveSync):
    """Sums no gradients over dp. `between` is True between two meetings, when the ranks' weights differ."""

    between = False

    def finish(self):
        """Scale gradients to means over a dp rank's share (1/n of the targets); sum over ranks that split sequences."""
        for param in self.params:
            param.grad.mul_(self.mesh["dp"].size)  # the loss was divided by the number of all targets
            share = {"data": "cp", "expert_data": "sequence"}.get(layout_of(param).data_dim)  # data_dim without dp
            if share and self.mesh[share].size > 1:
                self.sum_up(param.grad, self.mesh[share])

    def step(self, config: Any, optimizer: Any, progress: Progress, update: Callable, lr: float):
        """Wraps `Optimizer.step`: take an inner step; after H of them, meet the other ranks and take the outer step."""
        masters, state, dp = optimizer.masters, optimizer.torch_optimizer.state, self.mesh["dp"]
        if not self.between:
            self.met = {name: master.clone() for name, master in masters.items()}
        update(lr)
        self.between = (progress.step + 1) % config.inner_steps > 0
        if self.between:
            return
        flat = torch.cat([(self.met[name] - master).flatten() for name, master in masters.items()]) / dp.size
        all_reduce(flat, dp).wait()
        for (name, master), d in zip(masters.items(), flat.split([m.numel() for m in masters.values()]), strict=True):
            momentum = state[master].setdefault("outer_momentum", torch.zeros_like(master))  # checkpoints save `state`
            momentum.mul_(config.outer_momentum).add_(d.view_as(master))
            master.copy_(self.met[name] - config.outer_lr * (d.view_as(master) + config.outer_momentum * momentum))
        optimizer.publish()


SYNCS["diloco"] = DilocoSync


@dataclass
class Flags:
    """DiLoCo."""

    inner_steps: int = 10  # with --sync diloco: steps from one meeting of the ranks of dp to the next
    outer_lr: float = 0.7  # with --sync diloco: learning rate of the outer step
    outer_momentum: float = 0.9  # with --sync diloco: Nesterov momentum of the outer step


TRIED = dict(inner_steps=2, outer_lr=1.0, outer_momentum=0.0)
NEEDS = [(flag, "sync", "diloco") for flag in TRIED]
ALONE = dict(sync=("diloco",))
REFUSES = [
    Refusal(ALONE | dict(ep=SET), "tokens visit experts on other ranks of dp in each step; use --ep 1"),
    Refusal(ALONE | dict(dtype=("fp16",)), "each rank would scale its loss by its own factor; use --dtype bf16", None),
]


def check(config: Any, world: int):
    """Raises UserError unless each save and the run's end are at meetings: in between, the ranks' weights differ."""
    for name in ("steps", "stop_after", "save_every") if config.sync == "diloco" else ():
        if getattr(config, name) % config.inner_steps:
            flag = f"--{name.replace('_', '-')} {getattr(config, name)}"
            raise UserError(f"{flag} with --sync diloco: it must be a multiple of --inner-steps {config.inner_steps}")


def attach(config: Any, parts: Parts) -> DilocoSync | None:
    """Let the ranks of dp meet after each H-th update."""
    if config.sync != "diloco":
        return None
    call = partial(parts.sync.step, config, parts.optimizer, parts.progress)
    parts.around(parts.optimizer, "step", call, by=__name__)
    return parts.sync
