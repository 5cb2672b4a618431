"""Lab 2: data parallelism (step02_ddp.py)."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group, Mesh
from common.layout import note_layout
from common.model import Decoder
from labs.course import Case, Lab, Question, Row, Task, demands, rows
from labs.probes import Small, decoder, fill, gradients
from labs.suite import suite
from labs.tape import Tape


class Naive(Case):
    """Task 1: drawn gradients: three summed over dp, one over all four ranks; and one parameter that is not trained."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        mesh.join("data", "dp", "cp")
        model, place, wanted = nn.Module(), (mesh["dp"].rank, mesh["cp"].rank), {}
        for i, name in enumerate(("a", "b", "c", "expert", "frozen")):
            param = nn.Parameter(torch.full((i + 2, 3), 0.5, dtype=torch.float64), requires_grad=name != "frozen")
            note_layout(param, data_dim="data" if name == "expert" else "dp")
            model.register_parameter(name, param)
        sync = step.NaiveSync(model, SimpleNamespace(bucket_mb=1.0), mesh)
        sync.begin(1)
        for name, param in model.named_parameters():
            if param.requires_grad:
                parts = self.draw(name, 2, 2, *param.shape)  # [dp, cp, ...]
                param.grad = parts[place].clone()
                wanted[f"the gradient of {name}"] = parts.sum((0, 1)) if name == "expert" else parts.sum(0)[place[1]]
        with Tape(mesh) as tape:
            sync.finish()
        yield from rows(gradients(model), wanted)
        yield "parameters that have changed", [n for n, p in model.named_parameters() if not torch.all(p == 0.5)], []
        yield "what is left under way", len(tape.starts()) - tape.waits(), 0
        yield "bytes sent", tape.sent(), dict(dp=8 * (2 + 3 + 4) * 3, data=1.5 * 8 * 5 * 3)


ONE_BY_ONE = Task(
    ("NaiveSync.finish", "NaiveSync.sum_up"),
    demands(Naive, (dict(mesh=dict(dp=2, cp=2)),),
            ("each gradient is the sum over the ranks of its own group; nothing else changes", 3, "gradient", "have"),
            ("every sum is complete at the end; an all-reduce's bytes", 1, "left", "bytes")),
    faults=("weights_instead_of_gradients", "averaged"),
)  # fmt: skip


class Ring(Case):
    """Task 2: the sum of a tensor of some shape."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        group, sync, n = mesh["dp"], step.RingSync.__new__(step.RingSync), self.ranks
        parts = self.draw("x", n, *self.shape)
        parts = (parts * 20).round().bfloat16() if self.narrow else parts  # whole numbers have exact sums
        x = parts[group.rank].clone()
        with Tape(mesh) as tape:
            sync.sum_up(x, group)
        yield "the sum", x.double(), parts.double().sum(0)
        sizes = [piece.nbytes for piece in parts[0].flatten().tensor_split(n)]
        sent = 2 * sum(sizes) - sizes[(group.rank + 1) % n] - sizes[(group.rank + 2) % n]  # these once, others twice
        yield "bytes sent", tape.sent(), dict(dp=sent) if sent else {}
        yield "operations beside messages", sorted({event.what for event in tape.starts()} - {"send", "recv"}), []


EVEN = (dict(mesh=dict(dp=3), shape=(3, 4), narrow=False),)
UNEVEN = tuple(dict(mesh=dict(dp=4), shape=shape, narrow=False) for shape in ((7, 3), (3,), (2, 1)))
NARROW = (dict(mesh=dict(dp=3), shape=(4, 5), narrow=True),)
RING = Task(
    ("RingSync.sum_up",),
    (*demands(Ring, EVEN, ("the sum, where the ranks divide the length", 2, "the sum")),
     *demands(Ring, UNEVEN, ("the sum of other shapes, some with empty pieces", 2, "the sum")),
     *demands(Ring, NARROW, ("the sum in bf16", 1, "the sum")),
     *demands(Ring, EVEN + UNEVEN,
              ("by messages alone, with the bytes of the pieces that pass", 2, "bytes", "operations"))),
    faults=("ring_one_round_short", "ring_adds_for_ever"),
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
        yield "the buckets, by number", by_number, [[0, 1], [2], [3], [4, 5], [6], [7], [8]]
        yield "the buckets' groups", [bucket.group.name for bucket in found], ["dp"] * 3 + ["expert_data"] + ["dp"] * 3
        yield "exactly full", [len(bucket.params) for bucket in full], [3, 1]


class Bucket(Case):
    """A bucket of three parameters."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        params, group = wide_params(9, 4, 7), Group("dp", 0, 1, None)
        bucket = step.Bucket(params, group)
        yield "the buffer at first", bucket.flat, torch.zeros(20).double()
        yield "its dtype", str(bucket.flat.dtype), "torch.float64"
        yield "the views begin at", [(v.data_ptr() - bucket.flat.data_ptr()) // 8 for v in bucket.views], [0, 9, 13]
        yield "the views' shapes", [list(view.shape) for view in bucket.views], [[9, 1], [4, 1], [7, 1]]
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
        return model

    def loss(self, model: Decoder, rank: int, turn: int, micro: int) -> Tensor:
        loss = super().loss(model, rank, turn, micro)  # first, so that autograd comes to it last
        return loss + (micro + 1) * model.lm_head.spare.sum() if self.unused and rank == 0 else loss

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, buckets = self.model(), [0.0]  # bytes that a rank sends of each
        for size in (8 * param.numel() for param in reversed(list(model.parameters()))):
            if buckets[-1] and buckets[-1] + size > self.limit:
                buckets.append(0.0)
            buckets[-1] += size
        sent = [2 * (self.ranks - 1) / self.ranks * size for size in buckets]
        sync = step.BucketSync(model, SimpleNamespace(bucket_mb=self.limit / 2**20), mesh)
        for turn in (1, 2):
            *before, last = self.backwards(model, sync, mesh, turn)
            with Tape(mesh) as after:
                sync.finish()
            says = f"step {turn}: the gradient of"
            yield from rows(gradients(model, says), self.one_device(turn, says))
            started = [event.sent for event in last.starts()]
            yield f"step {turn}: sums started before the last backward", sum(len(tape.starts()) for tape in before), 0
            yield f"step {turn}: sums started in the last backward (bytes of each)", started, sent
            yield f"step {turn}: sums started in finish()", len(after.starts()), 0
            yield f"step {turn}: waits in the last backward", last.waits(), 0
            yield f"step {turn}: matmuls run while a sum is under way", last.hidden() > 0, True

    def explain(self, rank: int, key: str, found: Any, expected: Any) -> str:
        if not found and ("started in the last backward" in key or "matmuls" in key):
            return "was a hook registered for every parameter, and does it know its own bucket (a lambda binds late)?"
        return ""


OVERLAP = (
    dict(mesh=dict(dp=3), limit=5000, micro=2, unused=False),
    dict(mesh=dict(dp=2), limit=2000, micro=3, unused=False),
)
UNUSED = (dict(mesh=dict(dp=2), limit=2000, micro=2, unused=True),)
HOOKS = Task(
    ("BucketSync.__init__", "BucketSync.begin", "BucketSync.mark_ready", "BucketSync.send", "BucketSync.finish"),
    (*demands(
         Overlap, OVERLAP,
         ("the sums of all ranks and micro-batches, in two steps", 3, "gradient"),
         ("each bucket is sent once, in order, during the last backward and not before", 3, "sums started"),
         ("nothing is waited for in backward, and matmuls run meanwhile", 2, "waits", "matmuls"),
     ),
     *demands(Overlap, UNUSED,
              ("a parameter that one rank alone uses: the order of sums is the same on all", 2, "gradient"))),
    faults=("not_summed", "last_bucket_forgotten", "summed_twice", "sent_after_the_first_micro_batch",
            "buckets_not_emptied"),
)  # fmt: skip

LOOP = Task(
    ("train",),
    (suite(3, "naive", "naive, uneven", "bucket", "ring", says="--sync naive, bucket and ring train as one device"),
     suite(1, "step 2", says="three steps, each with its learning rate; grad_clip 0; each layer runs again"),
     suite(1, "step 2, frozen", "step 2, overlap", says="what does not train stays; a variant attaches")),
    faults=("loss_of_the_own_rank", "same_sequences_everywhere", "mean_of_ranks_means"),
)  # fmt: skip

QUESTION = Question(
    dict(n=(3, 6, 12, 24, 48), P=range(50, 901), k=range(2, 10)),
    lambda n, P, k, times=2, sums=lambda k: 1, stays=1: times * 4e6 * P * sums(k) * (n - stays) / n,
    {"gradients travel once a step": dict(sums=lambda k: k),
     "this is a reduce-scatter; an all-reduce is that and an all-gather": dict(times=1),
     "one of the n pieces stays": dict(stays=0)},
)  # fmt: skip

LAB = Lab(2, ("step02_ddp",), (ONE_BY_ONE, RING, BUCKETS, HOOKS, LOOP), QUESTION, flags="--sync ring")
