"""PipeDream (Narayanan et al. 2019): each micro-batch makes an update, and no rank waits for one.

In step 6, m micro-batches share an update, before which the pipeline must drain. Here a rank
updates its stage after each backward, and goes on. So a micro-batch would find newer weights in its
backward than in its forward. Therefore a stage *stashes* the weights of each forward, and backward
uses them again. With 3 ranks (F3:1 is the forward of micro-batch 3 with version 1 of the weights,
the version after 1 update):

    rank 0   F0:0 F1:0 F2:0 B0:0 F3:1 B1:0 F4:2 B2:0 F5:3 B3:1 ...
    rank 1        F0:0 F1:0 B0:0 F2:1 B1:0 F3:2 B2:1 F4:3 ...
    rank 2             F0:0 B0:0 F1:1 B1:1 F2:2 B2:2 F3:3 ...

LAW (section 3.3). Let w_s(t) be the weights of stage s after t updates (for t < 0, after none), and
L_t the loss of micro-batch t. With SGD, update t uses a gradient at weights of p different ages:

    w_s(t+1) = w_s(t) - lr dL_t/dw_s at (w_0(t-p+1), w_1(t-p+2), ..., w_p-1(t))

Rank s stashes the weights of p - s forwards. Let a turn be a forward and a backward. m updates take
m + p-1 turns. If each update waited for the one before, they would take m p. For p = 4, m = 8, that
is 11 turns in place of 32.

One pass of the loop makes an update for each micro-batch of a global batch. Then the pipeline
drains, so that the run can report the mean loss, and save. A micro-batch's loss is divided by the
mean number of target tokens of an update. There is no gradient norm, because the stages update at
different times.

Run it:    torchrun --nproc_per_node=4 -m extras.loops.pipedream --pp 4 --lr 1e-3
You should see a loss that falls faster than step 6's, because there are 8 updates in place of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import step06_pipeline as step06
from common import UserError
from common.comm import Mesh, all_reduce
from common.data import Data
from common.device import choose_device
from common.flags import flag
from common.launch import main
from common.model import IGNORE, Decoder, ModelConfig
from common.run import Run
from common.shapes import model_shape
from step01_single_gpu import learning_rate, set_up_layers
from step02_ddp import join_ranks
from step03_zero import make_weights_and_optimizer
from step04_tp_sp import shard_tensors, sum_partial_gradients
from step05_cp_ring import own_tokens, shard_context
from step06_pipeline import OneForwardOneBackward, Stage


class StashingStage(Stage):
    """A stage in which each micro-batch makes an update, with the weights of its own forward."""

    # Changes the newest weights, given gradients by name
    update: Callable[[dict[str, Tensor]], None]

    def begin(self, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor):
        """A new pass. `n_targets`: of an update."""
        super().begin(xs, ys, n_targets)
        self.newest = dict(self.model.named_parameters())
        self.stash: dict[int, dict[str, nn.Parameter]] = {}  # micro-batch -> weights of its forward

    def use(self, weights: dict[str, nn.Parameter]):
        """Let the model's modules compute with these weights."""
        for name, weight in weights.items():
            module, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(module), attribute, weight)

    def forward(self, i: int, x: Tensor | None) -> Tensor:
        """Run micro-batch i with a copy of the newest weights, which gets gradients of its own."""
        copies = {}
        for name, weight in self.newest.items():
            copies[name] = nn.Parameter(weight.detach().clone())
        self.stash[i] = copies
        self.use(copies)
        return super().forward(i, x)

    def backward(self, i: int, dy: Tensor | None) -> Tensor | None:
        """Run backward with the weights of the forward, and update the newest ones."""
        self.use(self.stash[i])  # recomputation takes the weights from the modules
        dx = super().backward(i, dy)
        self.use(self.newest)
        self.update({name: weight.grad for name, weight in self.stash.pop(i).items()})
        return dx


class PipeDream(OneForwardOneBackward):
    """1F1B with stashed weights."""

    def __init__(self, config: "Config", model: Decoder, mesh: Mesh, positions: Tensor):
        """As `Pipeline`, with a stage that stashes."""
        super().__init__(config, model, mesh, positions)
        self.stage = StashingStage(model, self.stage.layers, positions, self.stage.number)


@dataclass
class Config(step06.Config):
    """PipeDream."""

    schedule: str = flag("pipedream", "order of the work", {"pipedream": PipeDream})
    zero: str = flag("0", "as in step 3; weights must be whole", ("0", "1", "2"))
    grad_clip: float = flag(0.0, "none: the whole gradient has no norm")


def check(config: Config, shape: ModelConfig):
    """Raise UserError for what PipeDream cannot do."""
    if config.grad_clip:
        raise UserError("--grad-clip: PipeDream has no norm of the whole gradient: leave it out")
    if shape.tied and config.pp > 1:
        raise UserError(
            "--model: two stages would update a tied matrix at different times: use tied=False"
        )


def update(
    model: Decoder, optimizer: Any, sync: Any, mesh: Mesh, lr: float, gradients: dict[str, Tensor]
):
    """What step 6's loop does after the last backward, for this rank's stage alone."""
    sync.begin(1)
    for name, param in model.named_parameters():
        torch.autograd.backward((param,), (gradients[name],))  # adds to `.grad`, and calls hooks
    sync.finish()
    sum_partial_gradients(model, optimizer.gradients(), mesh)
    optimizer.step(lr)
    optimizer.zero_grad()


def train(config: Config, run: Run):
    """The whole run: step 6's loop without its norm, clipping and update, and with new lines."""
    device, dtype = choose_device(config)
    dp = join_ranks(device) // (config.pp * config.cp * config.tp)
    mesh = Mesh(pp=config.pp, dp=dp, cp=config.cp, tp=config.tp)
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    check(config, shape)  # new
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)
    positions = shard_context(model, mesh, config).to(device)
    pipeline = PipeDream(config, model, mesh, positions)  # new
    set_up_layers(model, config)
    optimizer, sync = make_weights_and_optimizer(model, config, mesh, device, dtype)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)  # of all ranks
        own_xs, own_ys = own_tokens(tokens, targets, own, positions)
        xs = own_xs.split(config.micro_batch_size)
        ys = own_ys.split(config.micro_batch_size)
        lr = learning_rate(step, config)  # new: earlier, because updates are in the pipeline
        pipeline.stage.update = partial(update, model, optimizer, sync, mesh, lr)  # new
        loss = pipeline.step(xs, ys, n_targets / len(xs)) / len(xs)  # new: the mean of the updates
        all_reduce(loss, mesh["data"]).wait()
        all_reduce(loss, mesh["pp"]).wait()

        run.require_finite(step, loss=loss.item())  # new
        run.record(step, tokens.numel(), loss=loss.item(), lr=lr)  # new


if __name__ == "__main__":
    main(train, Config)
