"""DiLoCo: the ranks of dp synchronise once in H steps. Step 2's loop, changed.

Links between some ranks may be slow, as between data centres. So each rank of dp trains alone for H
*inner steps* on its share of the batch, with moments of its own. Then all take an *outer step*:
they average how far they have moved from w, the weights after the last outer step. This mean is the
gradient of SGD with Nesterov momentum:

    each of n ranks    w_r = w after H inner steps          w = 4, w_0 = 6, w_1 = 10
    one all-reduce     d = 1/n sum_r (w - w_r)              d = (-2 - 6) / 2 = -4
    each rank          m = mu m + d                         mu = 0.9: m = -4 (m was 0)
                       w = w - eta (d + mu m)               eta = 0.7: w = 4 + 0.7 x 7.6 = 9.32

With eta = 1 and mu = 0, weights are averaged (local SGD). If also H = 1, with plain SGD and without
clipping, it is step 2.

THE LAW. If masters have S bytes, an outer step sends 2 (n-1)/n S over dp, on average 1/H of step
2's gradients: for tiny on 4 ranks with H = 10, 4,825,344 bytes once in 10 steps, and the loss in
each. A rank holds 2 S more, w and m. The price: H > 1 needs more tokens to reach the same loss.

Between outer steps there are n models, and each clips by the norm of its own gradient. The loss and
norm of a step are the means of theirs.

Source: Douillard et al. 2023, "DiLoCo", with H = 500, eta = 0.7, mu = 0.9; Stich 2018 (local SGD).

Run it:    torchrun --nproc_per_node=4 -m extras.loops.diloco --inner-steps 10
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import step01_single_gpu as step01
from common import UserError
from common.comm import Group, Mesh, all_reduce
from common.data import Data
from common.device import choose_device
from common.flags import flag
from common.initial import materialize
from common.launch import main
from common.model import IGNORE, Decoder
from common.run import Run
from common.shapes import model_shape
from extras.state import StatefulRun
from step01_single_gpu import (
    Optimizer,
    clip,
    learning_rate,
    set_up_layers,
)
from step02_ddp import join_ranks


class OuterStep:
    """The outer step over dp, and what it must remember: w and the momentum m of each master."""

    def __init__(self, optimizer: Optimizer, config: "Config", dp: Group):
        self.optimizer = optimizer
        self.config = config
        self.dp = dp
        self.weights = {name: master.clone() for name, master in optimizer.masters.items()}
        self.momenta = {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def take(self):
        """Move the masters of all ranks of dp to the same new values."""
        for name, master in self.optimizer.masters.items():
            w = self.weights[name]
            d = (w - master) / self.dp.size
            all_reduce(d, self.dp).wait()
            m = self.momenta[name].mul_(self.config.outer_momentum).add_(d)
            w.sub_(d + self.config.outer_momentum * m, alpha=self.config.outer_lr)
            master.copy_(w)
        self.optimizer.publish()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs: also masters and moments, which differ between ranks of dp."""
        state: dict[str, Tensor] = {}
        for name, master in self.optimizer.masters.items():
            moments = self.optimizer.torch_optimizer.state[master]
            kinds = dict(master=master, w=self.weights[name], m=self.momenta[name], **moments)
            for kind, tensor in kinds.items():
                state[f"{name} {kind}"] = tensor
        return state

    def load_state(self, state: dict[str, Tensor]):
        """Restore them. (Otherwise a checkpoint has one rank's masters and moments for all.)"""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.optimizer.publish()


@dataclass
class Config(step01.Config):
    """DiLoCo."""

    inner_steps: int = flag(10, "steps from one outer step to the next", least=1)
    outer_lr: float = flag(0.7, "learning rate of the outer step")
    outer_momentum: float = flag(0.9, "Nesterov momentum of the outer step")


def train(config: Config, run: Run):
    """The whole run."""
    if config.steps % config.inner_steps:  # new: else the ranks would end with n models
        steps = f"--inner-steps {config.inner_steps}"  # new
        raise UserError(f"--steps {config.steps} must be a multiple of {steps}")  # new
    device, dtype = choose_device(config)
    n_ranks = join_ranks(device)
    mesh = Mesh(dp=n_ranks)
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    set_up_layers(model, config)
    materialize(model, config.seed, device, dtype)  # the same weights on every rank
    optimizer = Optimizer(model, config)
    outer = OuterStep(optimizer, config, mesh["dp"])  # new

    parts = dict(model=model, optimizer=optimizer, outer=outer, data=data, mesh=mesh)  # new
    for step in run.steps(**parts):  # new
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)  # of all ranks
        n_targets = n_targets / mesh["dp"].size  # new: of one rank, on average
        xs = tokens[own].to(device).split(config.micro_batch_size)
        ys = targets[own].to(device).split(config.micro_batch_size)
        loss = 0.0
        # new: no sync, because each rank of dp has its own gradients
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # scale once ...
            micro_loss.backward()  # ... then only sum
            loss = loss + micro_loss.detach() / mesh["dp"].size  # new: the mean of n models
        all_reduce(loss, mesh["dp"]).wait()  # the loss, too

        norm = nn.utils.get_total_norm(optimizer.gradients().values()).item()
        norms = run.ranks.all_gather(norm)  # new: each rank of dp has its own
        mean_norm = sum(norms) / len(norms)  # new
        run.require_finite(step, loss=loss.item(), grad_norm=mean_norm)  # new
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        if (step + 1) % config.inner_steps == 0:  # new
            outer.take()  # new
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=mean_norm, lr=lr)  # new


if __name__ == "__main__":
    main(train, Config, StatefulRun)
