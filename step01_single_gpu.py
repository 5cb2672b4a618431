"""Step 1: one device. A complete trainer: `train` shows what a training step does, in which order.

              micro-batch 1        micro-batch 2        ...
    batch -> forward, backward -> forward, backward -> ... -> clip -> AdamW -> weights
                   gradients add up in fp32 ---------------->

MICRO-BATCHES. The activations of a whole batch may not fit in memory. So forward and backward run
on a few sequences at a time, here 4 of 32. Each backward adds to the gradients. The weights change
once, after the last micro-batch (*gradient accumulation*).

SCALE ONCE, THEN ONLY SUM. A micro-batch's loss is the *sum* over its tokens, divided by the number
of target tokens in the *global* batch. So gradients of micro-batches are simply added, and nothing
is averaged again. A mean of means is wrong when micro-batches have different numbers of target
tokens. If one has a token with the loss 1, and another has three with 3, 3, 3, the mean of all four
is 10 / 4 = 2.5, but the mean of the two means 1 and 3 is 2.

CLIP. If the norm of all gradients together exceeds --grad-clip, all are multiplied by one factor,
which brings it down to this limit. The norm is known only after the last micro-batch.

TINY, the default --model. (Each step has *laws*, formulas of bytes or FLOPs, and their example is
always tiny.) It has 4 layers; dim 128; 8 query heads of head_dim 16, and 4 heads of keys and values
(kv_dim 4 x 16 = 64); ffn_dim 352; a vocabulary of 257 (256 bytes, and END, the token that ends a
document); sequences of 256 tokens; 804,224 parameters. (When we count parameters, we count numbers.
In the code a parameter is a tensor, such as a matrix.)

PRECISION. bf16 has 8 significant bits: the next number above 1 is 1.0078. If an update adds 0.003
(AdamW's updates are about as large as the learning rate, at most --lr) to a weight of 1, the result
is rounded to 1 again; and a large sum of gradients loses its small terms. Therefore gradients of
bf16 weights add up in fp32, and AdamW updates *masters*, fp32 copies of the weights (as
Micikevicius et al. 2017 did for fp16). By default weights are bf16 on a GPU that has it, else fp32
(--dtype). AdamW's *moments* are running averages of the gradient and of its square. Bytes for each
parameter:

    weight   gradient   master   moments     all
       2        4          4       4 + 4     18    here, in bf16; tiny: 804,224 x 18 = 14.5 MB
       4        4          -       4 + 4     16    here, in fp32: a weight is its own master
       2        2          4       4 + 4     16    16-bit gradients, as in the ZeRO paper
       2      2 + 4        4       4 + 4     20    fp32 gradients, kept beside the 16-bit ones

RECOMPUTATION. Of the *activations*, the tensors of forward, autograd saves those that backward
needs. A layer (common/model.py) computes

    h = x + attention(norm(x))
    z = h + down_proj(silu(gate) * up), where gate and up are products with norm(h)

On a GPU in bf16, it saves for each token

    how many numbers        of what                                                  tiny
    4 dim                   inputs and outputs of the two RMSNorms                    512
    2 dim                   queries, and the input of o_proj                          256
    2 kv_dim                keys, values                                              128
    4 ffn_dim               gate, up, silu(gate), silu(gate) * up                   1,408
                                                                             sum    2,304
    and in fp32:
    n_heads + 2             log sum exp(scores) of each head, 1 / rms of each RMSNorm  10

Together they take 2 x 2,304 + 4 x 10 = 4,648 bytes for each token and layer. (The backward of an
RMSNorm needs its input, that of the next matrices its output.) Fused attention (FlashAttention)
never stores the probabilities, [seq, seq] for each head: backward computes them again from log sum
exp(scores). (With --compile, the compiler chooses what is saved.)

On a CPU a run is in fp32 by default, so all these numbers have 4 bytes, 4 x (2,304 + 10). There
each RMSNorm also saves its input divided by the rms, 2 x 128 x 4: together 10,280 bytes for each
token.

With --recompute full (activation checkpointing, Chen et al. 2016) a layer saves only its input, dim
numbers (tiny in bf16: 256 bytes), and backward repeats its forward. So the numbers of the table
exist for one layer at a time. The repetition stops as soon as it has silu(gate) * up, the input of
down_proj: backward does not need down_proj's output, which is only added to h.

Run it:    python step01_single_gpu.py
You should see the loss fall from 5.6 (a guess among 256 bytes and END costs ln 257 = 5.55) to below
2, on two CPU cores in about three minutes.

PyTorch's own way: under torch.autocast(device_type, torch.bfloat16) weights stay fp32, without
masters, and each forward casts the weights of matrix products to bf16. Recomputation here is
PyTorch's own: torch.utils.checkpoint. torch.nn.utils.clip_grad_norm_ computes the norm and clips.

Try this: in `train`, divide not by `n_targets` but by `(y != IGNORE).sum().clamp(min=1) * len(xs)`:
the mean of means. tests/test_step01.py::test_train fails where micro-batches have different numbers
of targets. On the default data they have equally many, and the losses stay the same.

FLOPs OF A TOKEN, of matrix products alone (this section can wait). Each weight of a matrix costs 6:
2 in forward (multiply, add), and 4 in backward (2 for the gradient of the input, 2 for that of the
weight). In causal attention a token attends to about seq/2 tokens on average, so that one matrix
product costs 2 x dim x seq/2 = seq x dim for each token. There are seven such products:

    forward 2     scores S = q k^T / sqrt(d), output o = P v, where P = softmax(S), d = head_dim
    backward 5    S again (as in FlashAttention), dP = do v^T, dv = P^T do, dq = dS k / sqrt(d),
                  dk = dS^T q / sqrt(d)    (do, dP, ... are the gradients of o, P, ...)

Of tiny's 804,224 parameters, the embedding's 257 x 128 are only looked up, and 9 x 128 belong to
nine RMSNorms. This leaves 770,176 weights in matrices:

    6 x 770,176 + 4 layers x 7 x 256 x 128 = 5,538,560 FLOPs

Each layer has 184,320 of these weights, of which down_proj has 352 x 128 = 45,056. Recomputation
repeats the two forward products of attention, and the 2 forward FLOPs of each weight but
down_proj's:

    4 layers x (2 x (184,320 - 45,056) + 2 x 256 x 128) = 1,376,256 FLOPs, a quarter more

(If a GPU's peak is known, the progress bar shows the MFU: the FLOPs needed per second, divided by
the peak. What --recompute repeats does not count.)
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.compiling import compile_model
from common.data import Data
from common.device import choose_device
from common.flags import flag
from common.initial import materialize
from common.launch import main
from common.model import IGNORE, PRESETS, Decoder, wide
from common.run import Run, RunConfig
from common.shapes import model_shape


def accumulate_wide(params: Iterable[nn.Parameter]):
    """Let bf16 parameters have a `.grad` in fp32: autograd casts each gradient before it adds it.

    `grad_dtype`, a recent attribute of PyTorch's tensors, is the dtype of `.grad`, by default the
    parameter's own.
    """
    for param in params:
        param.grad_dtype = wide(param.dtype)


def update(
    torch_optimizer: torch.optim.Optimizer,
    masters: dict[str, Tensor],
    gradients: dict[str, Tensor],
    lr: float,
):
    """Update the masters with the gradients, both by name, at this learning rate. (Step 3 uses
    this, too.)
    """
    for name, master in masters.items():
        master.grad = gradients[name]
    for group in torch_optimizer.param_groups:
        group["lr"] = lr
    torch_optimizer.step()


class Optimizer:
    """Updates the masters: fp32 copies of bf16 weights. fp32 and fp64 weights share their memory
    with their masters.
    """

    def __init__(self, model: Decoder, config: "Config", mesh: Any = None):
        """Make `params` and their `masters`, both by name, and `torch_optimizer`, which updates the
        masters. `self.model` and `mesh` are only for optional optimizers.
        """
        self.model = model
        self.config = config
        self.mesh = mesh
        self.params = dict(model.named_parameters())  # all are trained
        accumulate_wide(self.params.values())
        self.masters: dict[str, Tensor] = {}
        for name, param in self.params.items():
            # bf16: a copy in fp32. fp32: no copy, but a second tensor on the weight's memory, with
            # its own `.grad`, which torch.optim reads
            self.masters[name] = param.detach().to(wide(param.dtype))
        self.torch_optimizer = OPTIMIZERS[config.optimizer](self)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name, not copied: clipping scales them in place."""
        return {name: param.grad for name, param in self.params.items()}

    def step(self, lr: float):
        """Update the masters with the gradients, and the weights with the masters."""
        update(self.torch_optimizer, self.masters, self.gradients(), lr)
        self.publish()

    def publish(self):
        """Round the masters into the weights."""
        for name, param in self.params.items():
            param.detach().copy_(self.masters[name])  # in fp32, a copy to itself

    def zero_grad(self):
        """Drop the gradients, so that the next backward starts anew."""
        for name, param in self.params.items():
            param.grad = None
            self.masters[name].grad = None

    def spans(self) -> dict[str, tuple[int, int]]:
        """For checkpoints: the elements of each flattened parameter that this rank updates, here
        all, as (start, stop).
        """
        return {name: (0, param.numel()) for name, param in self.params.items()}


def decay_groups(masters: dict[str, Tensor], config: "Config") -> list[dict]:
    """Two parameter groups for torch.optim: matrices, which decay, and norms, which do not."""
    matrices = []
    norms = []
    for name, master in masters.items():
        if name.endswith("norm.weight"):
            norms.append(master)
        else:
            matrices.append(master)
    return [
        dict(params=matrices, weight_decay=config.weight_decay),
        dict(params=norms, weight_decay=0.0),
    ]


# Llama's betas, not PyTorch's defaults. fused: on a GPU one kernel updates many tensors
ADAMW = dict(betas=(0.9, 0.95), fused=True)


def adamw(optimizer: Optimizer) -> torch.optim.Optimizer:
    """AdamW on the masters of `optimizer`. `update` sets the learning rate."""
    return torch.optim.AdamW(decay_groups(optimizer.masters, optimizer.config), **ADAMW)


def sgd(optimizer: Optimizer) -> torch.optim.Optimizer:
    """Gradient descent with weight decay, for tests. Without clipping it shows a wrong factor in
    all gradients, which Adam hides, because it divides by the gradient's size.
    """
    return torch.optim.SGD(decay_groups(optimizer.masters, optimizer.config), fused=True)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "sgd": sgd}


def recompute_nothing(model: Decoder, **options: Any):
    """Leave the model as it is: autograd saves all that backward needs."""


def recompute_layers(model: Decoder, **options: Any):
    """Let each layer save only its input, and run its forward again in backward. Gradients stay the
    same. `options`: further arguments of `checkpoint`, which only step 7 has.
    """
    for layer in model.model.layers.values():
        # `layer(x)` looks for `forward` on the object first, so from now on it finds this one
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


RECOMPUTE: dict[str, Callable[..., None]] = {"none": recompute_nothing, "full": recompute_layers}


def set_up_layers(model: Decoder, config: "Config", **options: Any):
    """Compile layers and loss if --compile says so; then do what --recompute says."""
    if config.compile:
        compile_model(model)
    RECOMPUTE[config.recompute](model, **options)


@dataclass
class Config(RunConfig):
    """Flags of the trainer.

    Each is a `flag(default, help, ...)`: see common/flags.py. `RunConfig` has the run's own flags.
    """

    model: str = flag(
        "tiny",
        f"preset of the shape: {', '.join(PRESETS)}; with changes: tiny,n_layers=8,dim=256",
    )
    dataset: str = flag(
        "", "file or folder of text, .bin, or Hugging Face data set; default: Python's own sources"
    )
    steps: int = flag(200, "training steps of the whole schedule", least=1)
    global_batch_size: int = flag(32, "sequences of a training step, all ranks together", least=1)
    micro_batch_size: int = flag(4, "sequences of a forward and backward", least=1)
    optimizer: str = flag("adamw", "the update rule", OPTIMIZERS)
    lr: float = flag(3e-3, "peak learning rate")
    warmup_steps: int = flag(20, "steps of linear warm-up, before the cosine to a tenth")
    weight_decay: float = flag(0.1, "on matrices, not on norms")
    grad_clip: float = flag(1.0, "largest global gradient norm; 0: no clipping")
    seed: int = flag(0, "of initial weights and data order")
    recompute: str = flag("none", "what backward computes again", RECOMPUTE)
    compile: bool = flag(False, "torch.compile each layer, and the loss")


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine from the peak down, which would reach a tenth of it at step
    `steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    lowest = 0.1 * config.lr
    return lowest + (config.lr - lowest) * (1 + math.cos(math.pi * progress)) / 2


def clip(gradients: dict[str, Tensor], norm: float, limit: float):
    """If the norm of all gradients together exceeds `limit`, multiply them, in place, by the factor
    that brings it down to `limit`. `limit` 0: no clipping.
    """
    if limit > 0 and norm > limit:
        for gradient in gradients.values():
            gradient.mul_(limit / norm)


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):  # shapes, no memory
        model = Decoder(shape)
    set_up_layers(model, config)
    # Allocate memory and draw initial weights, the same in every layout
    materialize(model, config.seed, device, dtype)
    optimizer = Optimizer(model, config)

    # Yields 0, 1, ..., or with --resume the steps that are left. `run` saves and restores model and
    # optimizer, and refuses to resume with other data
    for step in run.steps(model=model, optimizer=optimizer, data=data):
        tokens, targets = data.batch(step)  # int64 [batch, seq]; target: the next token
        # Targets that are IGNORE, such as a prompt's tokens in fine-tuning, do not count. `clamp`:
        # a batch without any target must not divide by 0
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)
        xs = tokens.to(device).split(config.micro_batch_size)
        ys = targets.to(device).split(config.micro_batch_size)
        loss = 0.0  # becomes a tensor
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # a sum over tokens: scale once ...
            micro_loss.backward()  # ... then only sum: this adds to the gradients
            loss = loss + micro_loss.detach()

        norm = nn.utils.get_total_norm(optimizer.gradients().values()).item()
        run.require_finite(step, loss=loss.item(), grad_norm=norm)  # nan would spoil all weights
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        # On a GPU `item` waits for all that was launched before, also the update: so the step's
        # seconds are right
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)  # read the flags into a Config, and train
