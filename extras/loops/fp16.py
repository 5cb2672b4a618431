"""fp16 with dynamic loss scaling: step 6's loop, changed.

fp16 has 5 exponent bits (bf16 has 8). A gradient below 3e-8 becomes zero, and one above 65504 inf.
So the loss is multiplied by a factor before backward, and the finished gradients are divided by it:

    gradient          2e-9                                        becomes 0
    factor 65536      2e-9 x 65536 = 1.3e-4  ->  / 65536          2e-9

If a gradient overflows, the norm is not finite: then the update is skipped, and the factor halved.
After 2000 good steps in a row it is doubled. All ranks have the same global norm, so they skip
together, and their factors stay equal.

THE LAW. A skipped step costs a step's time. From a factor 2^k times too large, k steps are skipped:
a first factor of 65536 for gradients up to 64 skips 6 steps. Bytes are those of bf16.

With --dtype fp64 the losses are step 1's to the last digits: factors are powers of two, so that the
multiplications round nothing.

Source: Micikevicius et al. 2017, "Mixed Precision Training", section 3.2; torch.amp.GradScaler.

Run it:    torchrun --nproc_per_node=4 -m extras.loops.fp16 --pp 2 --tp 2
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import step06_pipeline as step06
from common.comm import Mesh, all_reduce
from common.data import Data
from common.device import DTYPES, choose_device
from common.flags import flag
from common.launch import main
from common.layout import global_norm
from common.model import IGNORE, Decoder
from common.run import Run
from common.shapes import model_shape
from extras.state import StatefulRun
from step01_single_gpu import clip, learning_rate, set_up_layers
from step02_ddp import join_ranks
from step03_zero import make_weights_and_optimizer
from step04_tp_sp import shard_tensors, sum_partial_gradients
from step05_cp_ring import own_tokens, shard_context
from step06_pipeline import SCHEDULES

DTYPES["fp16"] = torch.float16


class LossScale:
    """The factor by which the loss is multiplied."""

    def __init__(self, factor: float, growth_steps: int):
        self.factor = factor
        self.growth_steps = growth_steps
        self.good_steps = 0

    def update(self, norm: float) -> bool:
        """Choose the next step's factor by this step's norm; returns whether the norm is finite."""
        if not math.isfinite(norm):
            self.factor /= 2
            self.good_steps = 0
            return False
        self.good_steps += 1
        if self.good_steps % self.growth_steps == 0:
            self.factor *= 2
        return True

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs."""
        numbers = dict(factor=self.factor, good_steps=self.good_steps)
        return {name: torch.tensor(number) for name, number in numbers.items()}

    def load_state(self, state: dict[str, Tensor]):
        """Restore the factor and the number of good steps in a row."""
        self.factor = state["factor"].item()
        self.good_steps = state["good_steps"].item()


@dataclass
class Config(step06.Config):
    """fp16."""

    dtype: str = flag("fp16", "of weights and computation", DTYPES)
    loss_scale: float = flag(65536.0, "the first factor of the loss, a power of two")
    growth_steps: int = flag(2000, "good steps in a row after which the factor is doubled", least=1)


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    dp = join_ranks(device) // (config.pp * config.cp * config.tp)
    mesh = Mesh(pp=config.pp, dp=dp, cp=config.cp, tp=config.tp)
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)
    positions = shard_context(model, mesh, config).to(device)
    pipeline = SCHEDULES[config.schedule](config, model, mesh, positions)
    set_up_layers(model, config)
    optimizer, sync = make_weights_and_optimizer(model, config, mesh, device, dtype)
    loss_scale = LossScale(config.loss_scale, config.growth_steps)  # new

    parts = dict(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh)  # new
    for step in run.steps(**parts, loss_scale=loss_scale):  # new: it has state, which is saved
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)  # of all ranks
        own_xs, own_ys = own_tokens(tokens, targets, own, positions)
        xs = own_xs.split(config.micro_batch_size)
        ys = own_ys.split(config.micro_batch_size)
        sync.begin(len(xs))
        factor = loss_scale.factor  # new
        loss = pipeline.step(xs, ys, n_targets / factor) / factor  # new
        sync.finish()  # sums over ranks
        sum_partial_gradients(model, optimizer.gradients(), mesh)
        all_reduce(loss, mesh["data"]).wait()
        all_reduce(loss, mesh["pp"]).wait()  # all but the last stage have 0

        for gradient in optimizer.gradients().values():  # new
            gradient.mul_(1 / factor)  # new
        norm = global_norm(model, optimizer.gradients(), mesh, zero=config.zero != "0")
        finite = loss_scale.update(norm)  # new
        run.require_finite(step, loss=loss.item())  # new: the norm may be inf
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        if finite:  # new: else nothing is updated
            optimizer.step(lr)  # new
        optimizer.zero_grad()
        numbers = dict(grad_norm=norm if finite else None, lr=lr, loss_scale=factor)  # new
        run.record(step, tokens.numel(), loss=loss.item(), **numbers)  # new


if __name__ == "__main__":
    main(train, Config, StatefulRun)
