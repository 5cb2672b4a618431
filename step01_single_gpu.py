"""Step 1: one device. A complete trainer: `train`, at the end, shows what a training step does, and in which order.

              micro-batch 1        micro-batch 2        ...
    batch -> forward, backward -> forward, backward -> ... -> clip -> AdamW -> weights
                   gradients add up in fp32 ---------------->         fp32 masters, two moments

SCALE ONCE, THEN ONLY SUM. A micro-batch's loss is the *sum* over its tokens, divided by the number of target tokens in
the *global* batch. Gradients of micro-batches (from chapter 2 on, also of ranks) are then simply added; nothing is
averaged again. (A mean of means is not the mean when micro-batches have different numbers of target tokens.)

PRECISION. bf16 has 8 significant bits: the number after 0.02 is about 0.0201, so 0.02 + 1e-5 rounds back to 0.02, and
the update is lost. So for bf16 weights, gradients add up in fp32, and AdamW updates *masters*, the weights' fp32 copies
(Micikevicius et al. 2017, for fp16). Weight 2, gradient 4, master 4, moments 8: 18 bytes a parameter (in fp32 16).

RECOMPUTATION (--recompute full; activation checkpointing, Chen et al. 2016). For its backward a layer saves, per token,
6 dim + 2 kv_dim + 4 ffn_dim numbers, and n_heads + 2 in fp32 (on a CPU, norms save 2 dim more). With recomputation it
saves only its input, and backward repeats its forward, except down_proj: about a quarter more FLOPs. A token costs 6
FLOPs (2 forward, 4 backward) per matrix weight (not the embedding's) and 7 seq dim (2, 5) per layer's causal attention.

Run it:    python step01_single_gpu.py
You should see the loss fall from 5.6 (a guess among 256 bytes and END costs ln 257 = 5.55) to about 2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from common.data import Data
from common.flags import flag
from common.layout import materialize
from common.model import IGNORE, PRESETS, Decoder, model_shape, wide
from common.trainer import DTYPES, Run, choose_device, main


def decay_groups(masters: dict[str, Tensor], config: "Config") -> list[dict]:
    """Two parameter groups for torch.optim: matrices, which decay, and norms, which do not."""
    matrices = [tensor for name, tensor in masters.items() if not name.endswith("norm.weight")]
    norms = [tensor for name, tensor in masters.items() if name.endswith("norm.weight")]
    return [dict(params=matrices, weight_decay=config.weight_decay), dict(params=norms, weight_decay=0.0)]


def adamw(masters: dict[str, Tensor], config: "Config", **parts: Any) -> torch.optim.Optimizer:
    """AdamW on the masters, given by name, with the betas of Llama, 0.9 and 0.95, in place of PyTorch's defaults.

    `parts`: the run's model, optimizer and mesh. AdamW updates each element alone and does not need them.
    """
    return torch.optim.AdamW(decay_groups(masters, config), betas=(0.9, 0.95), fused=True)


def sgd(masters: dict[str, Tensor], config: "Config", **parts: Any) -> torch.optim.Optimizer:
    """Gradient descent, without state. It shows a wrongly scaled gradient, which Adam's division hides."""
    return torch.optim.SGD(decay_groups(masters, config), fused=True)


def recompute_nothing(model: Decoder, keep: Sequence[Callable] = ()):
    """Keep all that backward needs."""


def recompute_layers(model: Decoder, keep: Sequence[Callable] = ()):
    """Activation (gradient) checkpointing: a layer keeps only its input and runs again in backward; same gradients.

    `keep`: operators such as torch.ops.aten.topk.default whose results are kept and not computed again.
    """
    context = noop_context_fn
    if keep:
        context = partial(create_selective_checkpoint_contexts, list(keep))
    for layer in model.model.layers.values():  # a Decoder has a trunk, `model.model`, and a head, `lm_head`
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=context)


# Menus: each maps the values of a flag to what they select.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "sgd": sgd}
RECOMPUTE: dict[str, Callable[..., None]] = {"none": recompute_nothing, "full": recompute_layers}


def apply_recompute(model: Decoder, names: str, keep: Sequence[Callable] = ()):
    """Apply the entries of RECOMPUTE that --recompute names, joined by commas, in their order."""
    for name in names.split(","):
        RECOMPUTE[name](model, keep=keep)


@dataclass
class Config:
    """Flags of the trainer."""

    model: str = flag("tiny", f"preset of the shape: {', '.join(PRESETS)}; with changes: tiny,n_layers=8,dim=256")
    dataset: str = flag(
        "", ".txt file, or Hugging Face data set with a column \"text\"; default: Python's own sources"
    )
    steps: int = flag(200, "optimizer steps of the whole schedule")
    global_batch_size: int = flag(32, "sequences per optimizer step, all ranks together")
    micro_batch_size: int = flag(4, "sequences per forward and backward")
    optimizer: str = flag("adamw", "the update rule", OPTIMIZERS)
    lr: float = flag(3e-3, "peak learning rate")
    warmup_steps: int = flag(
        20, "steps of linear warm-up, before the cosine to a tenth; 0: none", least=0
    )
    weight_decay: float = flag(0.1, "on matrices, not on norms")
    grad_clip: float = flag(1.0, "largest global gradient norm; 0: no clipping")
    seed: int = flag(0, "of initial weights and data order")
    device: str = flag("auto", "where to compute", ("auto", "cuda", "cpu"))
    dtype: str = flag(
        "auto", "of weights and computation; auto: bf16 on a GPU that has it, else fp32", DTYPES
    )
    recompute: str = flag("none", "what the backward pass computes again", RECOMPUTE, several=True)
    out: str = flag("", "run directory; default: runs/ and the name of the script")
    save_every: int = flag(0, "steps between checkpoints (one more at the end); 0: none")
    resume: str = flag("", "run directory, or a checkpoint in it, to resume")


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak at step `config.steps`. `step` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """The update rule on masters, the fp32 copies of the weights. Weights in fp32 or fp64 are their own masters."""

    sharded = False  # whether ranks of dp update different elements

    def __init__(self, model: Decoder, config: Config, mesh: Any = None):
        """Set `torch_optimizer`, and `params` and `masters`, dicts keyed by name. Gradients get the masters' dtype."""
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.masters = {name: param.detach().to(wide(param.dtype)) for name, param in self.params.items()}
        for param in self.params.values():
            param.grad_dtype = wide(param.dtype)  # fp32 (fp64 for fp64): autograd casts each gradient before adding it
        self.torch_optimizer = OPTIMIZERS[config.optimizer](
            self.masters, config, optimizer=self, model=model, mesh=mesh
        )

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name, not copied: clipping scales them in place. Each is None until a backward."""
        return {name: param.grad for name, param in self.params.items()}

    def step(self, lr: float):
        """Update the masters with the gradients, and the weights with the masters."""
        for name, param in self.params.items():
            self.masters[name].grad = param.grad
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        self.torch_optimizer.step()
        self.publish()

    def publish(self):
        """Round the masters into the weights."""
        for name, param in self.params.items():
            param.detach().copy_(self.masters[name])  # in fp32 both are the same memory

    def spans(self) -> dict[str, tuple[int, int]]:
        """The elements of each flattened parameter that this rank updates: all."""
        return {name: (0, param.numel()) for name, param in self.params.items()}

    def zero_grad(self):
        """Free the gradients, so that the next backward starts anew."""
        for name, param in self.params.items():
            param.grad = self.masters[name].grad = None


def scale(gradients: dict[str, Tensor], factor: float):
    """Multiply gradients in place. (Were the loop in `train`, its variable would keep the last gradient alive.)"""
    if factor != 1.0:  # 1.0: nothing to clip
        for gradient in gradients.values():
            gradient.mul_(factor)


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):  # shapes, no memory
        model = Decoder(shape)
    materialize(model, config.seed, device, dtype)  # allocate and initialise, from seed and names only
    apply_recompute(model, config.recompute)
    optimizer = Optimizer(model, config)

    for step in run.steps(model=model, optimizer=optimizer, data=data):  # yields 0, 1, ...; reads, writes checkpoints
        tokens, targets = (x.to(device) for x in data.batch(step))  # int64 [batch, seq]; target: next token or IGNORE
        n_targets = (targets != IGNORE).sum().clamp(min=1)
        xs, ys = (x.split(config.micro_batch_size) for x in (tokens, targets))
        loss = 0.0
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # a sum over tokens: scale once ...
            micro_loss.backward()  # ... then only sum
            loss = loss + micro_loss.detach()

        norm = torch.nn.utils.get_total_norm(optimizer.gradients().values()).item()
        run.require_finite(step, loss=loss.item(), grad_norm=norm)  # else an error, before the weights become nan
        clip_coef = min(1.0, config.grad_clip / norm) if config.grad_clip and norm else 1.0
        scale(optimizer.gradients(), clip_coef)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)  # read the flags into a Config, and train
