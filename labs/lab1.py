"""Lab 1: one device (step01_single_gpu.py)."""

import math
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from labs import training
from labs.course import Case, Lab, Most, Question, Task, demands
from labs.probes import Small, adamw, gradients, update
from labs.training import trains

# --- task 1: the learning rate ---------------------------------------------------------------------------------------


def learning_rate(step: int, config: Any) -> float:
    """By the formulas."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    part = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2)


class Rates(Case):
    """The rates of all steps."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        return self.by(step.learning_rate, step.Config)

    def expected(self, rank: int) -> dict[str, Any]:
        return self.by(learning_rate, SimpleNamespace)

    def by(self, rule: Any, kind: Any) -> dict[str, Any]:
        """Either."""
        config = kind(lr=0.001 * (1 + self.seed % 90), warmup_steps=self.warmup, steps=self.steps)
        return {f"the rate of step {i}": rule(i, config) for i in range(self.steps)}


SCHEDULES = (dict(warmup=5, steps=23), dict(warmup=0, steps=7), dict(warmup=4, steps=4))
RATE = Task(
    ("learning_rate",),
    demands(Rates, SCHEDULES, ("warm-up, then the cosine, with and without warm-up", 3)),
    faults=("warm_up_from_zero",),
)  # fmt: skip

# --- task 2: AdamW ---------------------------------------------------------------------------------------------------

SHAPES = {"layers.0.q_proj.weight": (6, 5), "layers.0.input_layernorm.weight": (5,), "model.norm.weight": (5,)}
SHAPES |= {"lm_head.weight": (7, 5)}


class Rule(Case):
    """Three updates of drawn tensors."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        return self.by(lambda masters: step.adamw(masters, step.Config(weight_decay=0.3)))

    def expected(self, rank: int) -> dict[str, Any]:
        return self.by(lambda masters: adamw(masters.values(), 0.3))

    def by(self, rule_of: Any) -> dict[str, Any]:
        """Either."""
        masters = {name: self.draw(name, *shape) for name, shape in SHAPES.items()}
        rule = rule_of(masters)
        for i in range(3):
            for name, tensor in masters.items():
                tensor.grad = self.draw(f"{name} {i}", *tensor.shape)
            update(rule, 0.1 / (i + 1))
        return masters | {"tensors in the rule's groups": sum(len(group["params"]) for group in rule.param_groups)}


RULE = Task(
    ("decay_groups", "adamw"),
    demands(Rule, ({},),
            ("matrices decay, with betas 0.9 and 0.95", 2, "proj", "lm_head"),
            ("norms do not decay", 1, "norm", "groups")),
    faults=("norms_decay",),
)  # fmt: skip

# --- task 3: masters -------------------------------------------------------------------------------------------------

DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}
WIDE, NARROW = (dict(dtype="fp64", lr=0.1),), (dict(dtype="bf16", lr=1e-5),)


class Update(Case):
    """Updates of a small model: two in fp64, 40 small ones in bf16. Each step has the gradients of three backwards."""

    def model(self) -> nn.Module:
        """A norm, a matrix, and one that is not trained."""
        model = nn.Module()
        model.norm, model.proj, model.frozen = nn.RMSNorm(5), nn.Linear(5, 6, bias=False), nn.Linear(5, 6, bias=False)
        for name, param in model.named_parameters():
            param.data = (self.draw(name, *param.shape) * 0.02).to(DTYPES[self.dtype])
        model.frozen.weight.requires_grad_(False)
        return model

    def plan(self) -> list[tuple[float, float]]:
        """By update: learning rate and factor. They differ in fp64, as AdamW hides a common factor."""
        return [(self.lr, 0.5)] * 40 if self.dtype == "bf16" else [(self.lr, 1.0), (self.lr / 2, 0.5)]

    def part(self, name: str, param: Tensor, turn: int, i: int) -> Tensor:
        """The gradient of a backward."""
        return self.draw(f"{name} {turn % 2} {i}", *param.shape).to(param.dtype)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        model = self.model()
        optimizer, found = step.Optimizer(model, step.Config(weight_decay=0.0)), {}
        places = [param.data_ptr() for param in model.parameters()]
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        for turn, (lr, factor) in enumerate(self.plan()):
            trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
            for i in range(3):
                for name, param in trained:
                    (param * self.part(name, param, turn, i)).sum().backward()
            found["the dtype of gradients"] = sorted({str(param.grad.dtype) for _, param in trained})
            if turn == 0:
                found |= {f"gradients()[{name}]": g.clone() for name, g in optimizer.gradients().items()}
                found["names in gradients()"] = sorted(optimizer.gradients())
            optimizer.step(lr, factor)
            found["gradients left after step()"] = sum(param.grad is not None for param in model.parameters())
        for name, param in model.named_parameters():
            found[f"{name} after the updates"] = param.detach()
            found[f"the dtype of {name}"] = str(param.dtype)
            found[f"how far {name} has moved"] = param.detach().double() - before[name].double()
        return found | {"the parameters are where they were": places == [p.data_ptr() for p in model.parameters()]}

    def expected(self, rank: int) -> dict[str, Any]:
        wide = torch.promote_types(DTYPES[self.dtype], torch.float32)
        found = {"the dtype of gradients": [str(wide)], "names in gradients()": ["norm.weight", "proj.weight"]}
        found |= {"gradients left after step()": 0, "the parameters are where they were": True}
        for name, param in self.model().named_parameters():
            start = end = param.detach().double()
            if param.requires_grad:
                sums = [sum(self.part(name, param, s, i).double() for i in range(3)) for s in range(2)]
                end = start.clone()
                rule = adamw([end], 0.0)
                for turn, (lr, factor) in enumerate(self.plan()):
                    end.grad = sums[turn % 2] * factor
                    update(rule, lr)
                found[f"gradients()[{name}]"] = sums[0].to(wide)
            found |= {f"{name} after the updates": end, f"how far {name} has moved": end - start}
            found[f"the dtype of {name}"] = str(param.dtype)
        return found


MASTERS = Task(
    ("Optimizer.__init__", "Optimizer.gradients", "Optimizer.step"),
    (*demands(Update, WIDE,
              ("fp64: two updates, each with its learning rate and its factor", 3, "after the updates", "where they"),
              ("gradients by name, of what is trained; step() frees them", 2, "gradients()[", "names in", "left")),
     *demands(Update, NARROW,
              ("bf16: 40 small updates add up in masters", 3, "moved", "the dtype of norm", "the dtype of proj"),
              bound=0.2),
     *demands(Update, NARROW,
              ("in bf16, gradients add up in fp32", 2, "gradients()[", "dtype of gradients"), bound=1e-6)),
    faults=("not_clipped", "gradients_kept", "sums_in_16_bits", "gradients_cast_back", "masters_rounded"),
)  # fmt: skip

# --- task 4: recomputation -------------------------------------------------------------------------------------------

RUNS, KEPT = "runs of each layer", "activations inside of layers that are kept"


class Recomputed(Small):
    """Forward and backward: how often a layer has run, what it keeps in between, gradients."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        model, runs, kept = self.model(), [0] * 3, []
        step.recompute_layers(model)
        for i, layer in enumerate(model.model.layers.values()):

            def note(module: nn.Module, inputs: tuple, output: Tensor, i: int = i):
                runs[i] += 1
                kept.append(StorageWeakRef(output.untyped_storage()))

            layer.mlp.gate_proj.register_forward_hook(note)
        loss = self.loss(model, 0, 1, 0)
        found = {KEPT: sum(not ref.expired() for ref in kept), "the loss": loss.detach(), f"{RUNS} in forward": [*runs]}
        loss.backward()
        return found | {f"{RUNS}, backward included": runs} | gradients(model)

    def expected(self, rank: int) -> dict[str, Any]:
        model = self.model()
        loss = self.loss(model, 0, 1, 0)
        loss.backward()
        found = {KEPT: 0, f"{RUNS} in forward": [1] * 3, f"{RUNS}, backward included": [2] * 3}
        return found | {"the loss": loss.detach()} | gradients(model)


RECOMPUTE = Task(
    ("recompute_layers",),
    demands(Recomputed, ({},),
            ("loss and gradients do not change", 2, "the loss", "the gradient"),
            ("a layer keeps nothing of what it computes inside", 2, KEPT),
            ("each layer runs once in forward, and once more in backward", 2, RUNS)),
)  # fmt: skip

# --- task 5: the loop ------------------------------------------------------------------------------------------------


class Loop(training.Trained):
    """Train: how large micro-batches are, how many graphs are there at the end of a step, what is recorded."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        alive, graphs, sizes = weakref.WeakSet(), [], []

        class Probe(training.Watch):
            """Looks into the run."""

            def steps(self, **parts: Any):
                """Before the first step, put itself into the model's loss."""
                model, real = parts["model"], parts["model"].loss

                def loss(logits: Tensor, targets: Tensor) -> Tensor:
                    found, token = real(logits, targets), nn.Module()
                    found.grad_fn.metadata["token"] = token  # lives as long as the graph
                    alive.add(token), sizes.append(len(logits))
                    return found

                model.loss = loss
                yield from super().steps(**parts)

            def record(self, step: int, tokens: int, **numbers: float):
                """At the end of a step."""
                graphs.append(len(alive))
                super().record(step, tokens, **numbers)

        run = self.run(step, Probe)
        found = {"graphs of micro-batches at the end of a step": max(graphs), "sequences of each micro-batch": sizes}
        found |= {f"recorded as `{name}`": [row[name] for row in run.history] for name in ("tokens", "lr")}
        types = [type(run.history[0][name]).__name__ for name in ("loss", "grad_norm")]
        return found | {"types of the recorded loss and grad_norm": types}

    def expected(self, rank: int) -> dict[str, Any]:
        lr = training.FLAGS["lr"]
        found = {"graphs of micro-batches at the end of a step": Most(1)}
        found |= {"sequences of each micro-batch": [5, 5, 2] * 2, "recorded as `tokens`": [12 * 16] * 2}
        return found | {"recorded as `lr`": [lr / 2, lr], "types of the recorded loss and grad_norm": ["float"] * 2}


UNEVEN = (dict(flags=dict(micro_batch_size=5)),)
LOOP = Task(
    ("train",),
    (trains(4, (1, {}), says="losses, norms and weights of two steps, with unevenly many targets"),
     trains(1, (1, {}), flags=dict(micro_batch_size=5), says="a last micro-batch that is smaller"),
     trains(1, (1, {}), flags=dict(grad_clip=0.0), says="grad_clip 0: no clipping"),
     trains(1, (1, {}), flags=dict(grad_clip=1e6), says="a norm below grad_clip: nothing is scaled up"),
     trains(1, (1, dict(recompute="full")), says="--recompute full changes nothing"),
     *demands(Loop, UNEVEN,
              ("no graph but the last is left at the end of a step", 2, "graphs"),
              ("micro-batches, tokens and learning rate are as the flags say", 1, "sequences", "recorded", "types"))),
    faults=("gradient_times_micro_batches", "last_micro_batch_logged", "mean_of_means", "all_tokens_counted"),
)  # fmt: skip

# --- the question ----------------------------------------------------------------------------------------------------


def model_bytes(L: int, a: int, g: int, f: int, V: int, each: int = 18, ends: int = 2) -> int:
    """Of all weights: matrices of layers, norms, embedding and head."""
    h = 128 * a
    return each * (L * (2 * h * h + 2 * h * 128 * g + 3 * h * f + 2 * h) + ends * V * h + h)


QUESTION = Question(
    dict(L=range(10, 41), a=(8, 16, 24), g=(2, 4, 8), f=range(2560, 10241, 256), V=range(32000, 129000, 1000)),
    model_bytes,
    {"gradients have 4 bytes": dict(each=16), "the embedding is one matrix and the head another": dict(ends=1)},
)

LAB = Lab(1, ("step01_single_gpu",), (RATE, RULE, MASTERS, RECOMPUTE, LOOP), QUESTION, ranks=1)
