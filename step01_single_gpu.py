"""Step 1: one device. A complete trainer, and an account of every byte and FLOP it spends.

                 micro-batch 1        micro-batch 2        ...
    batch ->  forward, backward -> forward, backward -> ... -> clip -> AdamW -> weights
                    gradients add up in fp32 ---------------->  ^        ^ fp32 masters, two moments

SCALE ONCE, THEN ONLY SUM. A micro-batch's loss is the *sum* over its tokens divided by the number of target tokens in
the *global* batch. Gradients of micro-batches, and in later steps of ranks, are then plainly added; nothing is averaged
again. (A mean of means is not the mean when micro-batches have different numbers of valid tokens.)

PRECISION, without autocast. In bf16 and fp16 the weights that compute are 16 bits, but an update of 1e-5 vanishes in
them (Micikevicius et al., "Mixed Precision Training"): the optimizer keeps fp32 masters and fp32 moments, and gradients
add up in fp32. Bytes per parameter:

               weight  gradient  master  moments   sum
    fp32         4        4        -        8       16
    bf16, fp16   2        4        4        8       18   (--grad-dtype same: 16, but 16-bit sums lose small addends)
    fp64         8        8        -       16       32

fp16 has too few exponent bits for small gradients: the loss is multiplied by a scale, halved when a gradient overflows
(that step is skipped) and doubled after 1000 good steps.

RECOMPUTATION trades FLOPs for bytes (Chen et al., "Sublinear Memory Cost"; Korthikanti et al., section 4). With
h = dim, k = kv heads x head_dim, f = ffn_dim, a = heads, e = bytes per element, each token of a layer keeps

    none       e (6 h + 2 k + 4 f) + 4 a + 8   x, norm, q, k, v, out (flash attention: no s x s scores, a log-sum-exp
                                               a head), x, norm; gate, silu(gate), up, their product; 1/rms twice
    selective  e (5 h + 2 k + 2 f) + 4 a       x and what matmuls and attention made; norms, RoPE, SiLU are done again
    full       e h                             x alone; the layer's forward is done again: almost +1/3 FLOPs

for its backward pass. (Korthikanti's  s b h (34 + 5 a s / h)  is GPT in 16 bits without flash attention.) On a CPU
each RMSNorm keeps one more fp32 copy of its input; with 16 bits two, in place of x. (GPU, not 16 bits: none has k = h.)

FLOPs per token. N: weights in matmuls (all but norms and the embedding's look-up), N_layers: those in the L layers;
s: sequence length; MFU, HFU: model and hardware FLOPs utilization:

    model     6 N + 12 L s h                     forward 2 N + 4 L s h, backward twice that; what MFU counts
    executed  + 2 L s h                          flash attention's backward makes the scores again
              + 2 (N_layers - L f h) + 4 L s h   with full recomputation, which stops before a layer's last matmul, as
                                                 nothing in backward needs its output; what HFU counts

With f = 8h/3, k = h, all of a layer done again, without flash attention's extra and times B s tokens, this is
Megatron's 96 B s l h^2 (1 + s/6h + V/16lh) with l layers and vocabulary V  (Narayanan et al. 2021, eq. 3). Both count
the masked half of causal attention.

Run it (any machine; no download):    python step01_single_gpu.py
                                      python step01_single_gpu.py --resume runs/step01_single_gpu --generate "def "
You should see the loss fall from 5.6 (ln 257: 5.5) to about 2 in two minutes on two cores; byte frequencies give 3.2.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common.layout import materialize
from common.model import Decoder
from common.trainer import RunFlags, Trained, main, start


@dataclass
class Config(RunFlags):
    """The flags of this chapter (RunFlags: overrides of a shape, and what surrounds a run); later steps add theirs."""

    model: str = "tiny"  # preset: debug, tiny, smollm-135m, -360m, -1.7b, llama3.2-1b, llama3-8b, -70b, -405b
    dataset: str = ""  # hub id (or id:config), local folder or file (txt, jsonl, parquet); default: Python's sources
    steps: int = 200  # optimizer steps of the whole schedule
    global_batch_size: int = 32  # sequences per optimizer step, all ranks together
    micro_batch_size: int = 4  # sequences per forward and backward
    lr: float = 3e-3  # peak learning rate
    warmup_steps: int = 20  # steps of linear warm-up, before the cosine to a tenth
    weight_decay: float = 0.1  # on matrices, not on norms
    grad_clip: float = 1.0  # largest global gradient norm; 0: no clipping
    seed: int = 0  # of initial weights and data order
    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"  # of weights and compute; auto: bf16 on GPU
    grad_dtype: Literal["fp32", "same"] = "fp32"  # of gradients in 16-bit training: fp32 sums, or 16 bits as well
    compile: bool = False  # torch.compile each decoder layer
    recompute: Literal["none", "selective", "full"] = "none"  # what the backward pass computes again
    optimizer: Literal["adamw", "sgd", "adafactor", "muon"] = "adamw"  # the update rule (muon: services/muon.py)


def wrap_layers(model: Decoder, config: Config):
    """Make every layer keep less for its backward pass (see RECOMPUTATION above), and compile it, as the flags say.

    `torch.utils.checkpoint` keeps a layer's input and runs the layer again in backward. With "selective", a policy
    caches the outputs of the listed operators, so that the second run has only the cheap ones. Gradients do not change.
    """
    aten = torch.ops.aten
    kept = [aten.mm.default, aten._grouped_mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
    kept += [aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default]
    kept += [aten._scaled_dot_product_efficient_attention.default]
    options: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False)
    if config.recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    compiled = torch.compile if config.compile else lambda forward: forward
    for layer in model.model.layers.values():
        layer.forward = compiled(layer.forward)
        if config.recompute != "none":  # one graph with its checkpoint; if that breaks, only what is inside is compiled
            layer.forward = compiled(partial(checkpoint, layer.forward, **options))


def update_rule(tensors: list[Tensor], config: Config, decays: list[bool]) -> torch.optim.Optimizer:
    """The rule from torch.optim, its state made at once. `decays`: which tensors belong to matrices (weight decay).

    One step with zero gradients and rate 0 makes the state (moments, counts) and changes no weight; then it is zeroed.
    """
    matrices = [t for t, decay in zip(tensors, decays, strict=True) if decay]
    vectors = [t for t, decay in zip(tensors, decays, strict=True) if not decay]
    groups = [dict(params=matrices, weight_decay=config.weight_decay), dict(params=vectors, weight_decay=0.0)]
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)
    rules = dict(adamw=adamw, sgd=partial(torch.optim.SGD, fused=True), adafactor=torch.optim.Adafactor)
    rules["muon"] = adamw  # whose matrices services/muon.py takes over
    rule = rules[config.optimizer](groups, lr=0.0)
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    rule.step()
    for tensor in tensors:
        tensor.grad = None
        for value in rule.state[tensor].values():
            value.zero_()
    return rule


class Optimizer:
    """Mixed-precision update: fp32 masters, clipping by the global norm, dynamic loss scaling for fp16.

    `loss_scale`: multiply the loss by it before backward; `step` takes it out again.
    """

    def __init__(self, model: Decoder, config: Config):
        self.config, self.model = config, model
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.dtype = next(iter(self.params.values())).dtype
        self.mixed = self.dtype.itemsize == 2
        self.masters = {name: p.detach().float() if self.mixed else p for name, p in self.params.items()}
        self.inner = update_rule(list(self.masters.values()), config, [p.dim() > 1 for p in self.params.values()])
        for param in self.params.values():
            if self.mixed and config.grad_dtype == "fp32":
                param.grad_dtype = torch.float32  # autograd adds each micro-batch's 16-bit gradient to an fp32 sum
        self.loss_scale = 2.0**16 if self.dtype == torch.float16 else 1.0
        self.good_steps = 0

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name, times the loss scale."""
        return {name: p.grad for name, p in self.params.items() if p.grad is not None}

    def grad_norm(self) -> float:
        """The L2 norm of the whole gradient, the loss scale taken out."""
        return torch.nn.utils.get_total_norm(self.gradients().values()).item() / self.loss_scale

    def step(self, lr: float, norm: float) -> bool:
        """Clip by `norm`, the gradient's, and update; True. If it is not finite, only the loss scale changes; False."""
        if math.isfinite(norm):
            clip = self.config.grad_clip
            self.update(lr, (clip / norm if clip and norm > clip else 1.0) / self.loss_scale)
            self.good_steps += self.dtype == torch.float16
            if self.good_steps and self.good_steps % 1000 == 0:
                self.loss_scale *= 2
        else:
            self.loss_scale, self.good_steps = self.loss_scale / 2, 0
        return math.isfinite(norm)

    def update(self, lr: float, factor: float):
        """Apply the rule to the masters with the gradients times `factor`, and round the result into the weights."""
        gradients = self.gradients()
        if factor != 1:
            torch._foreach_mul_(list(gradients.values()), factor)
        for group in self.inner.param_groups:
            group["lr"] = lr
        for name, grad in gradients.items():
            self.masters[name].grad = grad.to(self.masters[name].dtype)
        self.inner.step()
        if self.mixed:
            for name, param in self.params.items():
                param.detach().copy_(self.masters[name])

    def zero_grad(self):
        """Free the gradients."""
        for name, param in self.params.items():
            param.grad = self.masters[name].grad = None


def train(config: Config, observe=None) -> Trained:
    """The whole run; `run` (common/trainer.py) is what surrounds it."""
    with start(config, observe) as run:
        with torch.device("meta"):
            model = Decoder(run.shape)
        materialize(model, config.seed, run.device, run.dtype)
        wrap_layers(model, config)
        optimizer = Optimizer(model, config)

        for step in run.steps(model, optimizer):
            batch, loss = run.batch(step), 0.0
            for tokens, targets in batch.micro_batches(config.micro_batch_size):
                with run.phase("forward"):
                    micro_loss = model.lm_head.loss(model(tokens), targets) / batch.n_targets
                with run.phase("backward"):
                    (micro_loss * optimizer.loss_scale).backward()
                loss = loss + micro_loss.detach()
            loss = run.global_loss(loss)
            with run.phase("optimizer"):
                norm = optimizer.grad_norm()
                if run.accepts(loss, norm):
                    optimizer.step(run.learning_rate(step), norm)  # clips, and updates
                optimizer.zero_grad()
            run.end_step(loss, norm)
    return run.trained()


if __name__ == "__main__":
    main(train, Config)
