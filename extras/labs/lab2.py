"""Lab 2: data parallelism (step02_ddp.py)."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.comm import Group, Mesh
from common.layout import note_layout
from common.model import Decoder
from extras.labs.course import FOUND, Case, Lab, Question, Row, Task, as_ours, at_most, demands
from extras.labs.probes import Small, apart, decoder, fill, gradients, under_way
from extras.labs.suite import suite
from extras.labs.tape import Tape


class Naive(Case):
    """Task 1: drawn gradients, summed over dp, over all four ranks, by a rank alone; and a parameter that is frozen."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        mesh.join("data", "dp", "cp")
        mesh.enter("alone", np.arange(4)[:, None])
        groups = dict(expert="data", alone="alone")
        model = nn.Module()
        for i, name in enumerate(("a", "b", "c", "expert", "alone", "frozen")):
            param = nn.Parameter(torch.full((i + 2, 3), 0.5, dtype=torch.float64), requires_grad=name != "frozen")
            note_layout(param, data_dim=groups.get(name, "dp"))
            model.register_parameter(name, param)
        sync = step.NaiveSync(model, SimpleNamespace(bucket_mb=1.0), mesh)
        sync.begin(1)
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.grad = self.draw(f"{name} {mesh.rank}", *param.shape)
        with Tape(mesh) as tape:
            sync.finish()
        yield from as_ours(gradients(model))
        yield "parameters that have changed", [n for n, p in model.named_parameters() if not torch.all(p == 0.5)], []
        yield "left: sums that nobody has waited for", tape.left(), []
        yield "bytes sent", tape.sent(), FOUND


ONE_BY_ONE = Task(
    ("NaiveSync.finish", "NaiveSync.sum_up"),
    demands(Naive, (dict(mesh=dict(dp=2, cp=2)),),
            ("each gradient is the sum over the ranks of its own group; nothing else changes", 3, "gradient", "have"),
            ("every sum is complete at the end; an all-reduce's bytes", 1, "left", "bytes")),
)  # fmt: skip


class Ring(Case):
    """Task 2: the sum of a tensor of some shape, over ranks 1, 2 and 3 of four."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        group, sync = apart(mesh), step.RingSync.__new__(step.RingSync)
        if group.size == 1:
            yield "the sum, the bytes, the operations of others", 0, 0
            return
        x = self.draw(f"x {group.rank}", *self.shape)
        x = (x * 20).round().bfloat16() if self.narrow else x  # whole numbers have exact sums
        with Tape(mesh) as tape:
            sync.sum_up(x, group)
        yield "the sum", x.double(), FOUND
        yield "bytes sent", tape.sent(), FOUND
        yield "operations beside messages", sorted({event.what for event in tape.starts()} - {"send", "recv"}), []
        yield "operations that nobody has waited for", tape.left(), []


EVEN, UNEVEN, NARROW = (
    tuple(dict(mesh=dict(dp=4), shape=shape, narrow=narrow) for shape in shapes)
    for shapes, narrow in ((((3, 4),), False), (((5, 2), (10, 4), (2, 1)), False), (((4, 5),), True))
)
RING = Task(
    ("RingSync.sum_up",),
    (*demands(Ring, EVEN, ("the sum, where the ranks divide the length", 2, "the sum")),
     *demands(Ring, UNEVEN, ("the sum of other shapes, some with empty pieces", 2, "the sum")),
     *demands(Ring, NARROW, ("the sum in bf16", 1, "the sum")),
     *demands(Ring, EVEN + UNEVEN,
              ("by messages alone, with the bytes of the pieces that pass", 2, "bytes", "operations"))),
)  # fmt: skip

SIZES = (9, 4, 7, 20, 5, 3, 8, 12, 6)  # elements; 20 are more than a list's 16; 5 and 3 are of another group


def wide_params(*sizes: int) -> list[nn.Parameter]:
    """fp32 parameters with fp64 gradients, some of another group."""
    params = [nn.Parameter(torch.zeros(size, 1)) for size in sizes]
    for i, param in enumerate(params):
        param.grad_dtype = torch.float64
        note_layout(param, data_dim="expert_data" if i in (4, 5) else "dp")
    return params


class Lists(Case):
    """Task 3: fill_buckets; then three parameters that fill a bucket to the last byte, and a fourth."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        params = wide_params(*SIZES)
        numbers = {id(param): i for i, param in enumerate(params)}
        groups = {name: Group(name, 0, 1, None) for name in ("dp", "expert_data")}
        found, full = (step.fill_buckets(some, groups, 16 * 8) for some in (params, wide_params(4, 7, 5, 1)))
        by_number = [[numbers[id(param)] for param in bucket.params] for bucket in found]
        yield "the buckets, by number", by_number, FOUND
        yield "the buckets' groups", [bucket.group.name for bucket in found], FOUND
        yield "exactly full", [len(bucket.params) for bucket in full], FOUND


class Bucket(Case):
    """A bucket of three parameters."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        params, group = wide_params(9, 4, 7), Group("dp", 0, 1, None)
        bucket = step.Bucket(params, group)
        yield from as_ours({"the buffer at first": bucket.flat, "its dtype": str(bucket.flat.dtype)})
        yield "the views begin at", [(v.data_ptr() - bucket.flat.data_ptr()) // 8 for v in bucket.views], FOUND
        yield "the views' shapes", [list(view.shape) for view in bucket.views], FOUND
        yield "its group and parameters", bucket.group is group and bucket.params == params, True


BUCKETS = Task(
    ("Bucket.__init__", "fill_buckets"),
    (*demands(Lists, ({},),
              ("buckets of at most the limit, each of one group, in order", 2, "buckets"),
              ("a bucket may be exactly full", 1, "full")),
     *demands(Bucket, ({},), ("the buffer, its dtype, and views one after another", 2))),
)  # fmt: skip


class Overlap(Small):
    """Task 4: two steps of real backward passes; collectives, waits and matmuls in their order."""

    def model(self) -> Decoder:
        """With `unused` the head has a parameter that rank 0 alone uses."""
        model = decoder()
        if self.unused:
            model.lm_head.register_parameter("spare", nn.Parameter(torch.zeros(5).double()))
        fill(model, self.seed)
        if "cp" in self.mesh:  # these ranks have the same tokens; gradients of a layer are summed over them
            for param in model.model.layers["1"].mlp.parameters():
                note_layout(param, data_dim="cp")
            model.model.layers["0"].mlp.up_proj.weight.requires_grad_(False)
        return model

    def loss(self, model: Decoder, rank: int, turn: int, micro: int) -> Tensor:
        loss = super().loss(model, rank, turn, micro)  # first, so that autograd comes to it last
        return loss + (micro + 1) * model.lm_head.spare.sum() if self.unused and rank == 0 else loss

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model = self.model()
        sync = step.BucketSync(model, SimpleNamespace(bucket_mb=self.limit / 2**20), mesh)
        kept = 0
        for turn in (1, 2):
            with Tape(mesh) as whole:
                *before, last = self.backwards(model, sync, mesh, turn)
                with Tape(mesh) as after:
                    sync.finish()
            kept = under_way() - kept
            yield from as_ours(gradients(model, f"step {turn}: the gradient of"))
            yield f"step {turn}: sums that nobody has waited for at the end of finish()", whole.left(), []
            started = [event.sent for event in last.starts()]
            yield f"step {turn}: sums started before the last backward", sum(len(tape.starts()) for tape in before), 0
            yield f"step {turn}: sums started in the last backward (bytes of each)", started, FOUND
            yield f"step {turn}: sums started in finish()", len(after.starts()), 0
            yield f"step {turn}: waits in the last backward", last.waits(), 0
            if turn == 2:
                yield "step 2: sums started in step 1 that are still kept", kept, at_most(0)
            yield f"step {turn}: matmuls run while a sum is under way", last.hidden() > 0, True

    def explain(self, rank: int, key: str, found: Any, expected: Any) -> str:
        if not found and ("started in the last backward" in key or "matmuls" in key):
            return "was a hook registered for every parameter, and does it know its own bucket (a lambda binds late)?"
        return ""


OVERLAP = (
    dict(mesh=dict(dp=3), limit=5000, micro=2, unused=False),
    dict(mesh=dict(dp=2, cp=2), limit=2000, micro=3, unused=False),
)
UNUSED = (dict(mesh=dict(dp=2), limit=2000, micro=2, unused=True),)
HOOKS = Task(
    ("BucketSync.__init__", "BucketSync.begin", "BucketSync.mark_ready", "BucketSync.send", "BucketSync.finish"),
    (*demands(
         Overlap, OVERLAP,
         ("the sums of all ranks and micro-batches, of the group that a record names", 3, "gradient", "nobody"),
         ("each bucket is sent once, in order, during the last backward and not before", 3, "sums started"),
         ("nothing is waited for in backward, and matmuls run meanwhile", 2, "waits", "matmuls"),
     ),
     *demands(Overlap, UNUSED,
              ("a parameter that one rank alone uses: the order of sums is the same on all", 2, "gradient"))),
)  # fmt: skip

LOOP = Task(
    ("train",),
    (suite(3, "naive", "naive, uneven", "bucket", "ring", says="--sync naive, bucket and ring train as one device"),
     suite(1, "step 2", "step 2, bf16",
           says="three steps, each with its learning rate; grad_clip 0; each layer runs again; 16 bits"),
     suite(1, "step 2, frozen", "step 2, overlap", "step 2, saved",
           says="what does not train stays; a variant attaches; a checkpoint holds it all")),
)  # fmt: skip

QUESTION = Question(
    dict(n=(3, 6, 12, 24, 48), P=range(50, 901), k=range(2, 10)),
    lambda n, P, k, times=2, sums=lambda k: 1, stays=1: times * 4e6 * P * sums(k) * (n - stays) / n,
    {"gradients travel once a step": dict(sums=lambda k: k),
     "this is a reduce-scatter; an all-reduce is that and an all-gather": dict(times=1),
     "one of the n pieces stays": dict(stays=0)},
)  # fmt: skip

LAB = Lab(2, ("step02_ddp",), (ONE_BY_ONE, RING, BUCKETS, HOOKS, LOOP), QUESTION, flags="--sync ring")
