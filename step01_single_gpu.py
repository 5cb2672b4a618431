"""Step 1: one device. A complete trainer, and an account of every byte and FLOP it spends.

                 micro-batch 1        micro-batch 2        micro-batch k
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
    bf16, fp16   2        4        4        8       18   (--grad-dtype same: 16, but 16-bit sums lose small addends;
    fp64         8        8        -       16       32   who keeps 16-bit gradients beside fp32 sums needs 20)

fp16 has too few exponent bits for small gradients: the loss is multiplied by a scale, halved when a gradient overflows
(that step is skipped) and doubled after 1000 good steps.

RECOMPUTATION trades FLOPs for bytes (Chen et al., "Sublinear Memory Cost"; Korthikanti et al., section 4). With
h = dim, k = kv heads x head_dim, f = ffn_dim, a = heads, e = bytes per element, each token of a layer keeps

    none       e (6 h + 2 k + 4 f) + 4 a + 8   x, norm, q, k, v, out (flash attention: no s x s scores, a log-sum-exp
                                               a head), x, norm; gate, silu(gate), up, their product; 1/rms twice
    selective  e (5 h + 2 k + 2 f) + 4 a       x and what matmuls and attention made; norms, RoPE, SiLU are done again
    full       e h                             x alone; the layer's forward is done again: almost +1/3 FLOPs

for its backward pass. (Korthikanti's  s b h (34 + 5 a s / h)  is GPT in 16 bits without flash attention.) On a CPU,
PyTorch composes RMSNorm of simple operators, which keep one more fp32 copy of h per norm, and if x is 16 bits a second
one instead of x.

FLOPs per token, N = weights in matmuls (all but norms and the embedding's look-up), s = sequence length:

    model     6 N + 12 L s h                     forward 2 N + 4 L s h, backward twice that; what MFU counts
    executed  + 2 L s h                          flash attention's backward makes the scores again
              + 2 (N_layers - L f h) + 4 L s h   with full recomputation, which stops before a layer's last matmul, as
                                                 nothing in backward needs its output; what HFU counts

With f = 8h/3, k = h, all of a layer done again and without flash attention's extra, this is Megatron's
96 B s l h^2 (1 + s/6h + V/16lh)  (Narayanan et al. 2021, eq. 3). Both count the masked half of causal attention.

Run it (any machine; no download):    python step01_single_gpu.py
                                      python step01_single_gpu.py --resume runs/step01_single_gpu --generate "def "
You should see the loss fall from 5.5 (= ln 257) to about 2 in two minutes on two CPU cores; guessing by byte
frequency alone gives 3.3.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common import UserError
from common.comm import Mesh
from common.data import TokenData
from common.layout import Layout, assemble, layout_of, materialize, reduction_table
from common.model import PRESETS, Decoder, ModelConfig
from services import checkpoint as checkpoints
from services.checkpoint import Checkpoint, Piece
from services.checks import check_one
from services.devices import choose_device, choose_dtype, peak_flops
from services.evaluation import all_logits, evaluate, generate
from services.flags import main
from services.health import health, require_finite
from services.resume import resume, save
from services.run import Run
from services.tables import table
from theory.flops import flops_per_token
from theory.memory import memory_rows


@dataclass
class Config:
    """Every flag of this step; later steps add theirs."""

    model: str = "tiny"  # preset: debug, tiny, smollm-135m, -360m, -1.7b, llama3.2-1b, llama3-8b, -70b, -405b
    dim: int | None = None  # override the preset's width of the residual stream
    n_layers: int | None = None  # override the number of layers
    n_heads: int | None = None  # override the number of query heads
    n_kv_heads: int | None = None  # override the number of key/value heads
    ffn_dim: int | None = None  # override the width of the MLP
    vocab_size: int | None = None  # override the size of the vocabulary
    seq_len: int | None = None  # override the sequence length, in tokens
    tied: bool | None = None  # override whether embedding and head share one matrix
    dataset: str = ""  # hub id, local folder or file (txt, jsonl, parquet); default: Python's own library sources
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
    device: Literal["auto", "cuda", "cpu"] = "auto"  # where to compute
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed, from step 2 on
    compile: bool = False  # torch.compile each decoder layer
    recompute: Literal["none", "selective", "full"] = "none"  # what the backward pass computes again
    optimizer: Literal["adamw", "sgd", "adafactor"] = "adamw"  # the update rule, from torch.optim
    out: str = ""  # run directory; default: runs/STEP
    save_every: int = 100  # steps between checkpoints (and one at the end); 0: only when interrupted
    save_async: bool = False  # write checkpoints in the background, while training goes on
    resume: str = ""  # run directory or checkpoint to go on from; auto: the newest in --out, if there is one
    stop_after: int = 0  # end after this step of the same schedule, as a pre-empted job would
    skip_spikes: float = 0.0  # skip a step whose loss or gradient norm exceeds K x its running median; 0: never
    timeout: float = 600.0  # seconds without progress until the rank that hangs is named and the job ends
    log_ranks: bool = False  # each rank's loss, gradient norm, memory and seconds in metrics.jsonl
    eval_every: int = 50  # steps between validations; 0: never
    eval_sequences: int = 64  # sequences of the held-out split in a validation
    generate: str = ""  # with --resume: continue this text and exit
    profile_memory: int = 0  # draw memory over time for the first N steps
    peak_tflops: float = 0.0  # the device's dense peak, if the table does not know it

    def presets(self) -> dict[str, ModelConfig]:
        """The shapes that `--model` can name."""
        return PRESETS

    def model_config(self) -> ModelConfig:
        """The preset with its overrides. Raises UserError."""
        presets = self.presets()
        if self.model not in presets:
            raise UserError(f"--model {self.model}: no such preset; choose one of {', '.join(presets)}")
        fields = {f.name for f in dataclasses.fields(presets[self.model])}
        overrides = {k: v for k, v in vars(self).items() if k in fields and v is not None}
        try:
            return dataclasses.replace(presets[self.model], **overrides)
        except ValueError as error:
            raise UserError(str(error)) from error


def apply_recompute(model: Decoder, mode: str):
    """Make every layer keep less for its backward pass; see RECOMPUTATION above. Gradients do not change.

    `torch.utils.checkpoint` keeps a layer's input and runs the layer again in backward. With "selective", a policy
    caches the outputs of the listed operators on the way, so that the second run computes only the cheap ones.
    """
    aten = torch.ops.aten
    kept = [aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
    kept += [aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default]
    kept += [aten._scaled_dot_product_efficient_attention.default, aten._grouped_mm.default]
    options: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False)
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    if mode != "none":
        for layer in model.model.layers.values():
            layer.forward = partial(checkpoint, layer.forward, **options)


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak. `step` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def torch_optimizer(matrices: list[Tensor], vectors: list[Tensor], config: Config) -> torch.optim.Optimizer:
    """The update rule from torch.optim, with weight decay on what belongs to matrices, without on vectors (norms)."""
    groups = [dict(params=matrices, weight_decay=config.weight_decay), dict(params=vectors, weight_decay=0.0)]
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.lr)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


SPIKE_WINDOW = 32  # steps that the running medians of --skip-spikes look back on


class Optimizer:
    """Mixed-precision update: fp32 masters, clipping by the global norm, dynamic loss scaling for fp16.

    `loss_scale`: multiply the loss by it before backward; `step` takes it out again. `skipped`: whether the last step
    was a spike, and so left out.
    """

    recent: tuple[tuple[float, float], ...] = ()  # loss and gradient norm of the last steps
    skipped = False

    def __init__(self, model: Decoder, config: Config, mesh: Mesh | None = None):
        self.config, self.model, self.mesh = config, model, mesh
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.dtype = next(iter(self.params.values())).dtype
        self.mixed = self.dtype.itemsize == 2
        self.masters = {name: p.detach().float() if self.mixed else p for name, p in self.params.items()}
        for param in self.params.values():
            if self.mixed and config.grad_dtype == "fp32":
                param.grad_dtype = torch.float32  # autograd adds each micro-batch's 16-bit gradient to an fp32 sum
        matrices, vectors = ([t for t in self.masters.values() if (t.dim() > 1) == wanted] for wanted in (True, False))
        self.inner = torch_optimizer(matrices, vectors, config)
        self.loss_scale = 2.0**16 if self.dtype == torch.float16 else 1.0
        self.good_steps = 0

    def grad_norm(self) -> float:
        """The L2 norm of the whole gradient of the step, the loss scale taken out."""
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads).item() / self.loss_scale

    def step(self, lr: float, norm: float | None = None, loss: Tensor | float = 0.0) -> float:
        """Clip, update, clear the gradients; returns the norm before clipping.

        If it is not finite, or it or the `loss` is a spike (--skip-spikes), nothing changes. All ranks pass the same.
        """
        norm = self.grad_norm() if norm is None else norm
        self.skipped = math.isfinite(norm) and self.is_spike(float(loss), norm)
        if self.skipped:
            pass
        elif math.isfinite(norm):
            clip = self.config.grad_clip
            self.update(lr, (clip / norm if clip and norm > clip else 1.0) / self.loss_scale)
            self.good_steps += self.dtype == torch.float16
            if self.good_steps and self.good_steps % 1000 == 0:
                self.loss_scale *= 2
        else:
            self.loss_scale, self.good_steps = self.loss_scale / 2, 0
        self.zero_grad()
        return norm

    def is_spike(self, *values: float) -> bool:
        """Whether loss or norm exceeds --skip-spikes times its median over the last steps, of which 8 are needed.

        Spikes enter the medians too: what lasts becomes normal, and training goes on.
        """
        factor, seen = self.config.skip_spikes, list(zip(*self.recent, strict=True))
        spike = (
            factor
            and len(self.recent) >= 8
            and any(value > factor * statistics.median(before) for value, before in zip(values, seen, strict=True))
        )
        if factor:
            self.recent = (*self.recent, values)[-SPIKE_WINDOW:]
        return bool(spike)

    def gradient_parts(self) -> dict[str, Tensor]:
        """The gradients as this rank holds them, by name."""
        return {name: p.grad for name, p in self.params.items() if p.grad is not None}

    def update(self, lr: float, factor: float):
        """Apply the rule to the masters with the gradients times `factor`, and round the result into the weights."""
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        if factor != 1:
            torch._foreach_mul_(grads, factor)
        for group in self.inner.param_groups:
            group["lr"] = lr
        for name, param in self.params.items():
            self.masters[name].grad = None if param.grad is None else param.grad.to(self.masters[name].dtype)
        self.inner.step()
        if self.mixed:
            for name, param in self.params.items():
                param.detach().copy_(self.masters[name])

    def ready(self):
        """Wait until the updated weights are all there (here they are)."""

    def zero_grad(self):
        """Free the gradients."""
        for name, param in self.params.items():
            param.grad = self.masters[name].grad = None

    def tensors(self) -> dict[str, list[Tensor]]:
        """What training holds between two micro-batches, for the memory table."""
        return {
            "parameters": list(self.model.parameters()),
            "gradients": [p.grad for p in self.params.values() if p.grad is not None],
            "masters": list(self.masters.values()) if self.mixed else [],
            "moments": [t for entry in self.inner.state.values() for t in entry.values() if t.dim()],
        }

    def gradients(self) -> dict[str, Tensor]:
        """Every full gradient by global name, for comparing layouts."""
        found = {name: p.grad / self.loss_scale for name, p in self.params.items() if p.grad is not None}
        return {name: self.whole(name, grad) for name, grad in found.items()}

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The full tensor, of which `local` is the part that the layout record of `name` says (here: all of it)."""
        return assemble(local, layout_of(self.model.get_parameter(name)), self.mesh)

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds of every full tensor: what checkpoints are written from, and read into."""
        for name, param in self.model.named_parameters():
            yield Piece("model", name, param.detach(), param.shape, layout_of(param))
        for name, buffer in self.model.named_buffers():
            yield Piece("buffer", name, buffer, buffer.shape, layout_of(buffer))
        for name, master in self.masters.items():
            layout = layout_of(self.params[name])
            if self.mixed:
                yield Piece("master", name, master, master.shape, layout)
            for kind, value in self.inner.state.get(master, {}).items():  # like the weight, or counts of steps
                yield Piece(kind, name, value, value.shape, layout if value.shape == master.shape else Layout())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All pieces as full tensors by kind and name, on every rank (for comparing layouts of small models)."""
        return checkpoints.gather(self.pieces(), self.mesh)

    def load(self, checkpoint: Checkpoint, weights_only: bool):
        """Read this rank's pieces, each from where it is stored. What is not (an imported model) stays as it begins."""
        for piece in self.pieces():
            if piece.kind in ("model", "buffer"):
                checkpoint.fill(piece)
        self.masters_from_weights()
        if not weights_only:
            self.make_state(checkpoint)
            for piece in self.pieces():
                if piece.kind not in ("model", "buffer"):
                    checkpoint.fill(piece)

    def masters_from_weights(self):
        """Begin with masters that are the weights."""
        for name, param in self.params.items() if self.mixed else ():
            self.masters[name].copy_(param.detach())

    def make_state(self, checkpoint: Checkpoint):
        """Make room for the update rule's state that is stored, where torch.optim wants it."""
        order = [id(t) for group in self.inner.param_groups for t in group["params"]]
        numbered = {}
        for name, master in self.masters.items():
            full = layout_of(self.params[name]).full_shape(master.shape)
            entry = {
                kind: master.new_zeros(master.shape if shape == tuple(full) else shape)
                for kind, shape in checkpoint.state_of(name).items()
            }
            if entry:
                numbered[order.index(id(master))] = entry
        self.inner.load_state_dict(dict(state=numbered, param_groups=self.inner.state_dict()["param_groups"]))


class Trained(NamedTuple):
    """What a run leaves in memory."""

    model: Decoder
    optimizer: Optimizer
    history: list[dict]


def train(config: Config, observe=None) -> Trained:
    """The whole run. `observe(step, optimizer)`, if given, sees each step's complete gradients before the update."""
    check_one(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    m = config.model_config()
    data = TokenData(config.dataset, m.seq_len, config.global_batch_size, config.seed, m.vocab_size)

    with torch.device("meta"):
        model = Decoder(m)
    materialize(model, config.seed, device, dtype)
    apply_recompute(model, config.recompute)
    if config.compile:
        for layer in model.model.layers.values():
            layer.forward = torch.compile(layer.forward)
    optimizer = Optimizer(model, config)
    positions = torch.arange(m.seq_len, device=device)
    start = resume(optimizer, config) if config.resume else 0
    if config.generate:
        print(generate(partial(all_logits, model, positions), m.seq_len, config.generate, 400, config.seed))
        return Trained(model, optimizer, [])

    predicted = memory_rows(config, m, model, dtype, device.type == "cpu")
    flops, peak = flops_per_token(m, config.recompute), peak_flops(device, dtype, config.peak_tflops)
    with Run(config, device, flops, peak) as run:
        run.say(f"{config.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}, {device}")
        run.say(table(reduction_table(model, [])))
        run.say(run.memory_table(predicted))
        for step in run.steps(start):
            with run.phase("data"):
                batch = data.batch(step)
                tokens, targets = batch.tokens.to(device), batch.targets.to(device)
            loss = torch.zeros((), device=device, dtype=torch.promote_types(dtype, torch.float32))
            for first in range(0, len(tokens), config.micro_batch_size):
                rows = slice(first, first + config.micro_batch_size)
                with run.phase("forward"):
                    loss_sum = model.lm_head.loss(model(tokens[rows], positions), targets[rows])
                    micro_loss = loss_sum / batch.n_targets
                with run.phase("backward"):
                    (micro_loss * optimizer.loss_scale).backward()
                loss += micro_loss.detach()
            more = health(run, loss, optimizer)
            require_finite(loss, step, run)
            if observe is not None:
                observe(step, optimizer)
            run.measure(optimizer.tensors())
            with run.phase("optimizer"):
                grad_norm = optimizer.step(learning_rate(step, config), loss=loss)
            if optimizer.loss_scale < 1:  # worse than an fp16 overflow, which skips a step and halves the scale
                require_finite(grad_norm, step, run, "gradient norm")
            run.measure(optimizer.tensors())
            more |= dict(skipped=True) if optimizer.skipped else {}
            if config.eval_every and run.due(config.eval_every, step):
                with run.phase("validation"):
                    loss_sum, n_targets = evaluate(model, data, config, positions).tolist()
                    more["validation_loss"] = loss_sum / max(1, n_targets)
            run.log(loss.item(), grad_norm, learning_rate(step, config), tokens.numel(), **more)
            if run.stopping or (config.save_every and run.due(config.save_every, step)):
                save(run, step + 1, optimizer, config)
        run.finish(predicted)
    return Trained(model, optimizer, run.history)


if __name__ == "__main__":
    main(train, Config)
