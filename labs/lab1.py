"""Lab 1: one device (step01_single_gpu.py)."""

import math
import weakref
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from common.layout import materialize
from common.model import Decoder, ModelConfig
from labs import training
from labs.course import Case, Criterion, Lab, Most, Question, Task, demands
from labs.training import trains

# --- task 1: the learning rate ---------------------------------------------------------------------------------------

SCHEDULES = (dict(warmup=5, steps=23), dict(warmup=0, steps=7), dict(warmup=4, steps=4))


def peak_of(case: Case) -> float:
    """The learning rate's peak."""
    return 0.001 * (1 + case.seed % 90)


def rates_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """The rates of all steps."""
    config = step.Config(lr=peak_of(case), warmup_steps=case.warmup, steps=case.steps)
    return {f"the rate of step {i}": step.learning_rate(i, config) for i in range(case.steps)}


def rates_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    found, peak = {}, peak_of(case)
    for i in range(case.steps):
        part = (i - case.warmup) / max(1, case.steps - case.warmup)
        cosine = peak / 10 + (peak - peak / 10) * (1 + math.cos(math.pi * part)) / 2
        found[f"the rate of step {i}"] = peak * (i + 1) / case.warmup if i < case.warmup else cosine
    return found


RATE = Task(
    "the learning rate", 10, ("learning_rate",),
    "the docstring of the function; warmup_steps in Config",
    ("Steps count from 0. In which step is the peak reached? What is the rate of step 0?",
     "After the warm-up, progress goes from 0 at step warmup_steps towards 1 at step `steps`.",
     "A cosine from 1 to -1 becomes one from 1 to 0.1: 0.1 + 0.45 (1 + cos)."),
    (Criterion("warm-up, then the cosine, with and without warm-up", 3, rates_on_rank, rates_expected, SCHEDULES),),
    faults=("warm_up_from_zero",),
)  # fmt: skip

# --- task 2: AdamW ---------------------------------------------------------------------------------------------------

SHAPES = {"layers.0.q_proj.weight": (6, 5), "layers.0.input_layernorm.weight": (5,), "model.norm.weight": (5,)}
SHAPES |= {"lm_head.weight": (7, 5)}


def adamw_by_hand(start: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """The update rule of Loshchilov and Hutter, written out."""
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        w = w * (1 - lr * decay)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    return w


def adamw_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Three updates of drawn tensors."""
    masters = {name: case.draw(name, *shape) for name, shape in SHAPES.items()}
    rule = step.adamw(masters, step.Config(weight_decay=0.3))
    for i in range(3):
        for name, tensor in masters.items():
            tensor.grad = case.draw(f"{name} {i}", *tensor.shape)
        for group in rule.param_groups:
            group["lr"] = 0.1 / (i + 1)
        rule.step()
    return masters | {"tensors in the rule's groups": sum(len(group["params"]) for group in rule.param_groups)}


def adamw_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    found = {"tensors in the rule's groups": len(SHAPES)}
    for name, shape in SHAPES.items():
        gradients = [case.draw(f"{name} {i}", *shape) for i in range(3)]
        decay = 0.3 * (len(shape) > 1)
        found[name] = adamw_by_hand(case.draw(name, *shape), gradients, [0.1, 0.05, 0.1 / 3], decay)
    return found


RULE = Task(
    "AdamW, and what decays", 10, ("decay_groups", "adamw"),
    "torch.optim.AdamW in PyTorch's documentation, parameter groups; Loshchilov and Hutter 2019",
    ("torch.optim takes a list of dicts, each with `params` and what differs for them.",
     "Names of norms end in norm.weight. Their decay is 0, that of matrices config.weight_decay.",
     "The moments' coefficients are 0.9 and 0.95, not PyTorch's defaults."),
    (Criterion(
         "matrices decay, with betas 0.9 and 0.95", 2, adamw_on_rank, adamw_expected, ({},), keys=("proj", "lm_head")
     ),
     Criterion("norms do not decay", 1, adamw_on_rank, adamw_expected, ({},), keys=("norm", "groups")),),
    faults=("norms_decay",),
)  # fmt: skip

# --- task 3: masters -------------------------------------------------------------------------------------------------

DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}
WIDE, NARROW = (dict(dtype="fp64", lr=0.1),), (dict(dtype="bf16", lr=1e-5),)


def small(case: Case) -> nn.Module:
    """A norm, a matrix, and one that is not trained."""
    model = nn.Module()
    model.norm, model.proj, model.frozen = nn.RMSNorm(5), nn.Linear(5, 6, bias=False), nn.Linear(5, 6, bias=False)
    for name, param in model.named_parameters():
        param.data = (case.draw(name, *param.shape) * 0.02).to(DTYPES[case.dtype])
    model.frozen.weight.requires_grad_(False)
    return model


def give(model: nn.Module, case: Case, step: int, micro_batches: int) -> list[str]:
    """Backward passes whose gradients are drawn; the dtypes that gradients then have."""
    for i in range(micro_batches):
        for name, param in model.named_parameters():
            if param.requires_grad:
                (param * case.draw(f"{name} {step} {i}", *param.shape).to(param.dtype)).sum().backward()
    return sorted({str(param.grad.dtype) for param in model.parameters() if param.requires_grad})


def update_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Updates of a small model: two in fp64, 40 small ones in bf16."""
    model, narrow = small(case), case.dtype == "bf16"
    optimizer, found = step.Optimizer(model, step.Config(weight_decay=0.0)), {}
    places = [param.data_ptr() for param in model.parameters()]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for i in range(40 if narrow else 2):
        found["the dtype of gradients"] = give(model, case, i % 2, 3)
        if i == 0:
            found |= {f"gradients()[{name}]": g.clone() for name, g in optimizer.gradients().items()}
            found["names in gradients()"] = sorted(optimizer.gradients())
        optimizer.step(
            case.lr if narrow else case.lr / (i + 1), 0.5 if narrow else 0.5**i
        )  # AdamW hides a common factor
        found["gradients left after step()"] = sum(param.grad is not None for param in model.parameters())
    for name, param in model.named_parameters():
        found[f"{name} after the updates"] = param.detach()
        found[f"the dtype of {name}"] = str(param.dtype)
        found[f"how far {name} has moved"] = param.detach().double() - before[name].double()
    found["the parameters are where they were"] = places == [param.data_ptr() for param in model.parameters()]
    return found


def update_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand, in fp64."""
    model, narrow = small(case), case.dtype == "bf16"
    wide = "torch.float32" if narrow else "torch.float64"
    found = {"the dtype of gradients": [wide], "names in gradients()": ["norm.weight", "proj.weight"]}
    found |= {"gradients left after step()": 0, "the parameters are where they were": True}
    for name, param in model.named_parameters():
        found[f"the dtype of {name}"], start = str(param.dtype), param.detach().double()
        gradients, end = [], start
        if param.requires_grad:
            parts = [[case.draw(f"{name} {s} {i}", *param.shape).to(param.dtype).double() for i in range(3)]
                     for s in range(2)]  # fmt: skip
            gradients = [sum(three) for three in parts] * (20 if narrow else 1)
            rates = [case.lr] * 40 if narrow else [case.lr, case.lr / 2]
            scaled = [g * (0.5 if narrow else 0.5**i) for i, g in enumerate(gradients)]
            end = adamw_by_hand(start, scaled, rates, 0.0)
            found[f"gradients()[{name}]"] = gradients[0] if not narrow else gradients[0].float()
        found[f"{name} after the updates"] = end
        found[f"how far {name} has moved"] = end - start
    return found


MASTERS = Task(
    "the update on masters", 25, ("Optimizer.__init__", "Optimizer.gradients", "Optimizer.step"),
    "the docstring of the step, PRECISION; of the class; `grad_dtype` of a tensor; wide in common/model.py",
    ("self.params are what computes, self.masters what is updated. In fp32 and fp64, `.to(...)` of a detached "
     "parameter is the parameter's own memory. Where does torch.optim look for gradients?",
     "Three micro-batches in bf16 add up to the wrong sum unless autograd adds in fp32: param.grad_dtype says so. "
     "Parameters that are not trained have no gradient.",
     "step: masters[name].grad = param.grad times the factor, `lr` into every group of self.rule, self.rule.step(), "
     "copy the masters into the parameters, and set both gradients to None."),
    (Criterion("fp64: two updates, each with its learning rate and its factor", 3, update_on_rank,
               update_expected, WIDE, keys=("after the updates", "where they were")),
     Criterion("bf16: 40 small updates add up in masters", 3, update_on_rank,
               update_expected, NARROW, keys=("moved", "the dtype of norm", "the dtype of proj"), bound=0.2),
     Criterion("gradients by name, of what is trained; step() frees them", 2, update_on_rank,
               update_expected, WIDE, keys=("gradients()[", "names in", "left after")),
     Criterion("in bf16, gradients add up in fp32", 2, update_on_rank,
               update_expected, NARROW, keys=("gradients()[", "dtype of gradients"), bound=1e-6),),
    faults=("not_clipped", "gradients_kept", "sums_in_16_bits", "gradients_cast_back", "masters_rounded"),
)  # fmt: skip

# --- task 4: recomputation -------------------------------------------------------------------------------------------

DEEP = (dict(layers=3, b=2, s=6),)


def decoder_of(case: Case) -> Decoder:
    """A small one in fp64."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(16, case.layers, 4, 2, 12, vocab_size=13, seq_len=case.s))
    materialize(model, case.seed % 1000, torch.device("cpu"), torch.float64)
    return model


def recomputed_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Forward and backward: how often a layer has run, what it keeps in between, gradients."""
    model, runs, kept = decoder_of(case), [0] * case.layers, []
    step.recompute_layers(model)
    for i, layer in enumerate(model.model.layers.values()):

        def note(module: nn.Module, inputs: tuple, output: Tensor, i: int = i):
            runs[i] += 1
            kept.append(StorageWeakRef(output.untyped_storage()))

        layer.mlp.gate_proj.register_forward_hook(note)
    tokens = case.ids("tokens", 13, case.b, case.s)
    loss = model(tokens, tokens.flip(0))
    found = {"activations inside of layers that are kept": sum(not ref.expired() for ref in kept)}
    found["the loss"], found["runs of each layer in forward"] = loss.detach(), list(runs)
    loss.backward()
    found["runs of each layer, backward included"] = list(runs)
    return found | {f"the gradient of {name}": param.grad for name, param in model.named_parameters()}


def recomputed_expected(rank: int, case: Case) -> dict[str, Any]:
    """Without recomputation."""
    model, tokens = decoder_of(case), case.ids("tokens", 13, case.b, case.s)
    loss = model(tokens, tokens.flip(0))
    loss.backward()
    found = {"the loss": loss.detach(), "activations inside of layers that are kept": 0}
    found |= {"runs of each layer in forward": [1] * case.layers}
    found |= {"runs of each layer, backward included": [2] * case.layers}
    found |= {f"the gradient of {name}": param.grad for name, param in model.named_parameters()}
    return found


RECOMPUTE = Task(
    "recomputation", 15, ("recompute_layers",),
    "the docstring of the step, RECOMPUTATION; torch.utils.checkpoint in PyTorch's documentation",
    ("A layer's forward can be replaced: layer.forward = something that takes the same arguments.",
     "checkpoint(f, *args, use_reentrant=False) calls f and keeps only args.",
     "In a loop over the layers, what you bind must be this layer's forward as it is now: functools.partial."),
    (*demands(
         recomputed_on_rank, recomputed_expected, DEEP,
         ("loss and gradients do not change", 2, "the loss", "the gradient"),
         ("a layer keeps nothing of what it computes inside", 2, "activations"),
         ("each layer runs once in forward, and once more in backward", 2, "runs"),
     ),),
)  # fmt: skip

# --- task 5: the loop ------------------------------------------------------------------------------------------------


class Token:
    """Lives as long as the graph of a micro-batch."""


class Pass(torch.autograd.Function):
    """The identity, which leaves a token in the graph."""

    @staticmethod
    def forward(ctx, x: Tensor, alive: weakref.WeakSet) -> Tensor:
        """x, unchanged."""
        ctx.token = Token()
        alive.add(ctx.token)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient, unchanged."""
        return grad, None


def loop_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Train: how large micro-batches are, how many graphs are there at the end of a step, what is recorded."""
    alive, graphs, sizes = weakref.WeakSet(), [], []

    class Probe(training.Watch):
        """Looks into the run."""

        def steps(self, **parts: Any):
            """Before the first step, put itself into the model's loss."""
            model, loss = parts["model"], parts["model"].loss
            model.loss = lambda logits, targets: (sizes.append(len(logits)), Pass.apply(loss(logits, targets), alive))[
                1
            ]
            yield from super().steps(**parts)

        def record(self, step: int, tokens: int, **numbers: float):
            """At the end of a step."""
            graphs.append(len(alive))
            super().record(step, tokens, **numbers)

    config = step.Config(**training.flags_of(case))
    with training.tokens(case), Probe(config) as run:
        step.train(config, run)
    found = {"graphs of micro-batches at the end of a step": max(graphs), "sequences of each micro-batch": sizes}
    for name in ("tokens", "lr"):
        found[f"recorded as `{name}`"] = [row[name] for row in run.history]
    found["types of the recorded loss and grad_norm"] = [
        type(run.history[0][name]).__name__ for name in ("loss", "grad_norm")
    ]
    return found


def loop_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    flags = training.flags_of(case)
    found = {"graphs of micro-batches at the end of a step": Most(1)}
    found["sequences of each micro-batch"] = [5, 5, 2] * 2
    found |= {"recorded as `tokens`": [12 * 16] * 2, "recorded as `lr`": [flags["lr"] / 2, flags["lr"]]}
    found["types of the recorded loss and grad_norm"] = ["float", "float"]
    return found


UNEVEN = (dict(flags=dict(micro_batch_size=5)),)
LOOP = Task(
    "the loop", 25, ("train",),
    "the docstring of common/trainer.py; SCALE ONCE in the docstring of the step; Data.batch; materialize",
    ("The model is built under torch.device('meta'), and materialize gives it memory and values. RECOMPUTE, "
     "Optimizer and run.steps(model=..., optimizer=..., data=...) come next, in this order.",
     "n_targets counts the targets of the whole batch that are not IGNORE. Each micro-batch's summed loss is "
     "divided by it, before backward; then gradients just add up.",
     "Add up micro_loss.detach(), or every graph stays. The norm is that of all gradients together; the factor is "
     "min(1, grad_clip / norm), or 1 if grad_clip is 0. At the end optimizer.step and run.record."),
    (trains(4, (1, {}), says="losses, norms and weights of two steps, with unevenly many targets"),
     trains(1, (1, {}), flags=dict(micro_batch_size=5), says="a last micro-batch that is smaller"),
     trains(1, (1, {}), flags=dict(grad_clip=0.0), says="grad_clip 0: no clipping"),
     trains(1, (1, {}), flags=dict(grad_clip=1e6), says="a norm below grad_clip: nothing is scaled up"),
     trains(1, (1, dict(recompute="full")), says="--recompute full changes nothing"),
     *demands(
         loop_on_rank, loop_expected, UNEVEN,
         ("no graph but the last is left at the end of a step", 2, "graphs"),
         ("micro-batches, tokens and learning rate are as the flags say", 1, "sequences", "recorded", "types"),
     ),),
    faults=("gradient_times_micro_batches", "last_micro_batch_logged", "mean_of_means", "all_tokens_counted"),
)  # fmt: skip

# --- the question ----------------------------------------------------------------------------------------------------


def draw_model(draw: Random) -> dict[str, Any]:
    """A shape, spelled out."""
    heads = draw.choice((8, 16, 24))
    return dict(L=draw.randint(10, 40), h=128 * heads, a=heads, g=draw.choice((2, 4, 8)), f=256 * draw.randint(10, 40),
                V=1000 * draw.randint(32, 128))  # fmt: skip


def parameters(v: dict[str, Any]) -> int:
    """All of them: matrices of layers, norms, embedding and head."""
    layer = 2 * v["h"] ** 2 + 2 * v["h"] * v["g"] * 128 + 3 * v["h"] * v["f"] + 2 * v["h"]
    return v["L"] * layer + 2 * v["V"] * v["h"] + v["h"]


QUESTION = Question(
    "{L} layers, dim {h}, {a} heads, {g} key/value heads, ffn_dim {f}, vocabulary {V}, head not tied, AdamW, bf16.\n"
    "How many bytes are weights, gradients, masters and moments together?",
    draw_model,
    lambda v: 18 * parameters(v),
    mistakes=(
        ("gradients have 4 bytes", lambda v: 16 * parameters(v)),
        ("the embedding is one matrix and the head another", lambda v: 18 * (parameters(v) - v["V"] * v["h"])),
    ),
)

LAB = Lab(1, "One device", ("step01_single_gpu",), (RATE, RULE, MASTERS, RECOMPUTE, LOOP), QUESTION, ranks=1)
