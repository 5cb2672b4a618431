"""Lab 1: one device (step01_single_gpu.py)."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from common.comm import Mesh
from extras.labs.course import FOUND, Case, Lab, Question, Row, Task, as_ours, demands
from extras.labs.probes import Small, gradients
from extras.labs.suite import suite


class Rates(Case):
    """Task 1: the rates of all steps."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        peak = 0.001 * (1 + self.seed % 90)
        config = step.Config(lr=peak, warmup_steps=self.warmup, steps=self.steps)
        for i in range(self.steps):
            part = (i - self.warmup) / max(1, self.steps - self.warmup)
            cosine = peak * (0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2)
            rate = peak * (i + 1) / self.warmup if i < self.warmup else cosine
            yield f"the rate of step {i}", step.learning_rate(i, config), rate


SCHEDULES = (dict(warmup=5, steps=23), dict(warmup=0, steps=7), dict(warmup=4, steps=4))
RATE = Task(
    ("learning_rate",),
    demands(Rates, SCHEDULES, ("warm-up, then the cosine, with and without warm-up", 3)),
)  # fmt: skip

SHAPES = {"layers.0.q_proj.weight": (6, 5), "layers.0.input_layernorm.weight": (5,), "model.norm.weight": (5,)}
SHAPES |= {"lm_head.weight": (7, 5)}


class Rule(Case):
    """Task 2: three updates of drawn tensors."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        masters = {name: self.draw(name, *shape) for name, shape in SHAPES.items()}
        rule = step.adamw(masters, step.Config(weight_decay=0.3))
        for i in range(3):
            for name, shape in SHAPES.items():
                masters[name].grad = self.draw(f"{name} {i}", *shape)
            for group in rule.param_groups:
                group["lr"] = 0.1 / (i + 1)
            rule.step()
        yield from as_ours(masters)
        yield "tensors in the rule's groups", sum(len(group["params"]) for group in rule.param_groups), len(SHAPES)


RULE = Task(
    ("decay_groups", "adamw"),
    demands(Rule, ({},),
            ("matrices decay, with betas 0.9 and 0.95", 2, "proj", "lm_head"),
            ("norms do not decay", 1, "norm", "groups")),
)  # fmt: skip

DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}
WIDE, NARROW = (dict(dtype="fp64", lr=0.1),), (dict(dtype="bf16", lr=1e-5),)


class Update(Case):
    """Task 3: updates of a small model, two in fp64, 40 small ones in bf16, each with gradients of three backwards."""

    def model(self) -> nn.Module:
        """A norm, a matrix, and one that is not trained."""
        model = nn.Module()
        model.norm, model.proj, model.frozen = nn.RMSNorm(5), nn.Linear(5, 6, bias=False), nn.Linear(5, 6, bias=False)
        for name, param in model.named_parameters():
            param.data = (self.draw(name, *param.shape) * 0.02).to(DTYPES[self.dtype])
        model.frozen.weight.requires_grad_(False)
        return model

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, dtype = self.model(), DTYPES[self.dtype]
        before = {name: param.detach().double() for name, param in self.model().named_parameters()}
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        optimizer = step.Optimizer(model, step.Config(weight_decay=0.0))
        places = [param.data_ptr() for param in model.parameters()]
        for turn, lr in enumerate([self.lr] * 40 if self.dtype == "bf16" else [self.lr, self.lr / 2]):
            for name, param in trained.items():
                for i in range(3):
                    (param * self.draw(f"{name} {turn % 2} {i}", *param.shape).to(dtype)).sum().backward()
            if turn == 0:
                found = optimizer.gradients()
                yield "names in gradients()", sorted(found), FOUND
                yield "the dtype of gradients", sorted({str(p.grad.dtype) for p in trained.values()}), FOUND
                yield from as_ours({f"gradients()[{name}]": found[name].clone() for name in trained})
            optimizer.step(lr)
            optimizer.zero_grad()
        held = [*model.parameters(), *optimizer.masters.values()]
        yield "gradients left after zero_grad()", sum(x.grad is not None for x in held), 0
        for name, param in model.named_parameters():
            yield f"{name} after the updates", param, FOUND
            yield f"how far {name} has moved", param.double() - before[name], FOUND
            yield f"the dtype of {name}", str(param.dtype), FOUND
        yield "the parameters are where they were", places == [p.data_ptr() for p in model.parameters()], True


MASTERS = Task(
    ("Optimizer.__init__", "Optimizer.gradients", "Optimizer.step", "Optimizer.zero_grad"),
    (*demands(Update, WIDE,
              ("fp64: two updates, each with its learning rate", 3, "after the updates", "where they"),
              ("gradients by name, of what is trained; zero_grad() frees them", 2, "gradients()[", "names in", "left")),
     *demands(Update, NARROW,
              ("bf16: 40 small updates add up in masters", 3, "moved", "the dtype of norm", "the dtype of proj"),
              bound=0.2),
     *demands(Update, NARROW,
              ("in bf16, gradients add up in fp32", 2, "gradients()[", "dtype of gradients"), bound=1e-6)),
)  # fmt: skip

RUNS, KEPT = "runs of each layer", "activations inside of layers that are kept"


class Recomputed(Small):
    """Task 4: forward and backward; how often a layer has run, what it keeps in between, gradients."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, runs, kept = self.model(), [0] * 3, []
        step.recompute_layers(model)
        for i, layer in enumerate(model.model.layers.values()):

            def note(module: nn.Module, inputs: tuple, output: Tensor, i: int = i):
                runs[i] += 1
                kept.append(StorageWeakRef(output.untyped_storage()))

            layer.mlp.gate_proj.register_forward_hook(note)
        loss = self.loss(model, 0, 1, 0)
        yield "the loss", loss, FOUND
        yield KEPT, sum(not ref.expired() for ref in kept), 0
        yield f"{RUNS} in forward", [*runs], [1] * 3
        loss.backward()
        yield f"{RUNS}, backward included", runs, [2] * 3
        yield from as_ours(gradients(model))


RECOMPUTE = Task(
    ("recompute_layers",),
    demands(Recomputed, ({},),
            ("loss and gradients do not change", 2, "the loss", "the gradient"),
            ("a layer keeps nothing of what it computes inside", 2, KEPT),
            ("each layer runs once in forward, and once more in backward", 2, RUNS)),
)  # fmt: skip


LOOP = Task(
    ("train",),
    (suite(4, "one", "one, uneven", "step 1, uneven",
           says="losses, norms and weights of two steps, also with unevenly many targets"),
     suite(1, "step 1, muon", "step 1, smaller", says="a last micro-batch that is smaller, and another rule"),
     suite(1, "one, small norm", "step 1, small norm", says="a norm below grad_clip: nothing is scaled up"),
     suite(2, "step 1", says="three steps, each with its learning rate; grad_clip 0; each layer runs again"),
     suite(1, "one, again", "step 1, saved", says="--recompute full changes nothing, nor does a checkpoint"),
     suite(2, "step 1, frozen", "step 1, bf16", says="what does not train stays; so do more digits than 16 bits have")),
)  # fmt: skip


def model_bytes(L: int, a: int, g: int, f: int, V: int, each: int = 18, ends: int = 2) -> int:
    """Of all weights: matrices of layers, norms, embedding and head."""
    h = 128 * a
    return each * (L * (2 * h * h + 2 * h * 128 * g + 3 * h * f + 2 * h) + ends * V * h + h)


QUESTION = Question(
    dict(L=range(10, 41), a=(8, 16, 24), g=(2, 4, 8), f=range(2560, 10241, 256), V=range(32000, 129000, 1000)),
    model_bytes,
    {"gradients have 4 bytes": dict(each=16), "the embedding is one matrix and the head another": dict(ends=1)},
)

LAB = Lab(
    1, ("step01_single_gpu",), (RATE, RULE, MASTERS, RECOMPUTE, LOOP), QUESTION, ranks=1, flags="--recompute full"
)
