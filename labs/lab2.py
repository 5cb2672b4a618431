"""Lab 2: data parallelism (step02_ddp.py)."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group
from common.layout import note_layout
from common.model import Decoder
from labs.course import Case, Lab, Question, Task, demands
from labs.probes import Small, decoder, fill, gradients
from labs.tape import Tape
from labs.training import trains

# --- task 1: one by one ----------------------------------------------------------------------------------------------


OVER = dict(a="dp", b="dp", c="dp", expert="data", frozen="dp")


class Naive(Case):
    """NaiveSync on drawn gradients: three summed over dp, one over all four ranks; one that is not trained."""

    def parts(self, i: int, name: str) -> Tensor:
        """The gradients by rank, [dp, cp, ...]."""
        return self.draw(name, 2, 2, i + 2, 3)

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        mesh.join("data", "dp", "cp")
        model = nn.Module()
        for i, (name, group) in enumerate(OVER.items()):
            param = nn.Parameter(torch.full((i + 2, 3), 0.5, dtype=torch.float64), requires_grad=name != "frozen")
            note_layout(param, data_group=group)
            model.register_parameter(name, param)
        sync = step.NaiveSync(model, SimpleNamespace(bucket_mb=1.0), mesh)
        sync.begin(1)
        for i, (name, param) in enumerate(model.named_parameters()):
            if param.requires_grad:
                param.grad = self.parts(i, name)[mesh["dp"].rank, mesh["cp"].rank].clone()
        with Tape(mesh) as tape:
            sync.finish()
        found = {"parameters that have changed": [n for n, p in model.named_parameters() if not torch.all(p == 0.5)]}
        found |= {"what is left under way": len(tape.starts()) - tape.waits(), "bytes sent": tape.sent()}
        return found | gradients(model)

    def expected(self, rank: int) -> dict[str, Any]:
        found = {"parameters that have changed": [], "what is left under way": 0}
        found |= {"bytes sent": dict(dp=8 * (2 + 3 + 4) * 3, data=1.5 * 8 * 5 * 3)}
        for i, name in enumerate(("a", "b", "c", "expert")):
            parts = self.parts(i, name)
            found[f"the gradient of {name}"] = parts.sum((0, 1)) if name == "expert" else parts[:, rank % 2].sum(0)
        return found


ONE_BY_ONE = Task(
    ("NaiveSync.finish", "NaiveSync.sum_up"),
    demands(Naive, (dict(mesh=dict(dp=2, cp=2)),),
            ("each gradient is the sum over the ranks of its own group; nothing else changes", 3, "gradient", "have"),
            ("every sum is complete at the end; an all-reduce's bytes", 1, "left", "bytes")),
    faults=("weights_instead_of_gradients", "averaged"),
)  # fmt: skip

# --- task 2: the ring ------------------------------------------------------------------------------------------------


class Ring(Case):
    """The sum of a tensor of some shape."""

    def setup(self):
        """The parts by rank; in bf16 whole numbers, whose sums are exact."""
        x = self.draw("x", self.ranks, *self.shape)
        self.parts = ((x * 20).round() if self.dtype == "bfloat16" else x).to(getattr(torch, self.dtype))

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        group, sync = mesh["dp"], step.RingSync.__new__(step.RingSync)
        x = self.parts[group.rank].clone()
        with Tape(mesh) as tape:
            sync.sum_up(x, group)
        others = {event.what for event in tape.starts()} - {"send", "recv"}
        return {"the sum": x.double(), "bytes sent": tape.sent(), "operations beside messages": sorted(others)}

    def expected(self, rank: int) -> dict[str, Any]:
        n = self.ranks
        sizes = [piece.nbytes for piece in self.parts[0].flatten().tensor_split(n)]
        sent = 2 * sum(sizes) - sizes[(rank + 1) % n] - sizes[(rank + 2) % n]  # those two once, the others twice
        found = {"the sum": self.parts.double().sum(0), "operations beside messages": []}
        return found | {"bytes sent": dict(dp=sent) if sent else {}}


EVEN = (dict(mesh=dict(dp=3), shape=(3, 4), dtype="float64"),)
UNEVEN = tuple(dict(mesh=dict(dp=4), shape=shape, dtype="float64") for shape in ((7, 3), (3,), (2, 1)))
NARROW = (dict(mesh=dict(dp=3), shape=(4, 5), dtype="bfloat16"),)
RING = Task(
    ("RingSync.sum_up",),
    (*demands(Ring, EVEN, ("the sum, where the ranks divide the length", 2, "the sum")),
     *demands(Ring, UNEVEN, ("the sum of other shapes, some with empty pieces", 2, "the sum")),
     *demands(Ring, NARROW, ("the sum in bf16", 1, "the sum")),
     *demands(Ring, EVEN + UNEVEN,
              ("by messages alone, with the bytes of the pieces that pass", 2, "bytes", "operations"))),
    faults=("ring_one_round_short", "ring_adds_for_ever"),
)  # fmt: skip

# --- task 3: buckets -------------------------------------------------------------------------------------------------

SIZES = (9, 4, 7, 20, 5, 3, 8, 12, 6)  # elements; 20 are more than a list's 16; 5 and 8 are of the other group


def wide_params(*sizes: int) -> list[nn.Parameter]:
    """fp32 parameters with fp64 gradients, some of another group."""
    params = [nn.Parameter(torch.zeros(size, 1)) for size in sizes]
    for i, param in enumerate(params):
        param.grad_dtype = torch.float64
        note_layout(param, data_group="expert_data" if i in (4, 6) else "dp")
    return params


class Lists(Case):
    """group_params; then three parameters that fill a list to the last byte, and a fourth."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        params = wide_params(*SIZES)
        numbers = {id(param): i for i, param in enumerate(params)}
        lists, full = (step.group_params(some, 16 * 8) for some in (params, wide_params(4, 7, 5, 1)))
        found = {"the lists, by number": sorted([numbers[id(p)] for p in some] for some in lists)}
        return found | {"exactly full": [len(some) for some in full]}

    def expected(self, rank: int) -> dict[str, Any]:
        return {"the lists, by number": [[0, 1], [2], [3], [4, 6], [5, 7], [8]], "exactly full": [3, 1]}


class Bucket(Case):
    """A bucket of three parameters."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        params, group = wide_params(9, 4, 7), Group("dp", 0, 1, None)
        bucket = step.Bucket(params, group)
        found = {"the buffer at first": bucket.flat.clone(), "its dtype": str(bucket.flat.dtype)}
        found["the views begin at"] = [(v.data_ptr() - bucket.flat.data_ptr()) // 8 for v in bucket.views]
        found["the views' shapes"] = [list(view.shape) for view in bucket.views]
        return found | {"its group and parameters": bucket.group is group and bucket.params == params}

    def expected(self, rank: int) -> dict[str, Any]:
        found = {"the buffer at first": torch.zeros(20).double(), "its dtype": "torch.float64"}
        found |= {"the views begin at": [0, 9, 13], "the views' shapes": [[9, 1], [4, 1], [7, 1]]}
        return found | {"its group and parameters": True}


BUCKETS = Task(
    ("Bucket.__init__", "group_params"),
    (*demands(Lists, ({},),
              ("lists of at most the limit, each of one group, which stays open while others come", 2, "lists"),
              ("a list may be exactly full", 1, "full")),
     *demands(Bucket, ({},), ("the buffer, its dtype, and views one after another", 2))),
)  # fmt: skip

# --- task 4: overlap -------------------------------------------------------------------------------------------------


class Overlap(Small):
    """Two steps of real backward passes; collectives, waits and matmuls in their order."""

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

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        model, found = self.model(), {}
        sync = step.BucketSync(model, SimpleNamespace(bucket_mb=self.limit / 2**20), mesh)
        for turn in (1, 2):
            *before, last = self.backwards(model, sync, mesh, turn)
            with Tape(mesh) as after:
                sync.finish()
            found[f"step {turn}: sums started before the last backward"] = sum(len(tape.starts()) for tape in before)
            found[f"step {turn}: sums started in the last backward, bytes"] = [event.sent for event in last.starts()]
            found[f"step {turn}: sums started in finish()"] = len(after.starts())
            found[f"step {turn}: waits in the last backward"] = last.waits()
            found[f"step {turn}: matmuls run while a sum is under way"] = last.hidden() > 0
            found |= gradients(model, f"step {turn}: the gradient of")
        return found

    def expected(self, rank: int) -> dict[str, Any]:
        found, buckets = {}, [0]
        for param in reversed(list(self.model().parameters())):
            if buckets[-1] and buckets[-1] + 8 * param.numel() > self.limit:
                buckets.append(0)
            buckets[-1] += 8 * param.numel()
        for turn in (1, 2):
            found |= self.one_device(turn)
            found[f"step {turn}: sums started in the last backward, bytes"] = [
                2 * (self.ranks - 1) / self.ranks * size for size in buckets
            ]
            for what in ("sums started before the last backward", "sums started in finish()"):
                found[f"step {turn}: {what}"] = 0
            found[f"step {turn}: waits in the last backward"] = 0
            found[f"step {turn}: matmuls run while a sum is under way"] = True
        return found

    def explain(self, rank: int, key: str, found: Any, expected: Any) -> str:
        if "sums started in the last backward" in key and not found:
            return "was a hook registered for every parameter, and does it know its own bucket (a lambda binds late)?"
        return ""


OVERLAP = (
    dict(mesh=dict(dp=3), limit=5000, micro=2, unused=False),
    dict(mesh=dict(dp=2), limit=2000, micro=3, unused=False),
)
UNUSED = (dict(mesh=dict(dp=2), limit=2000, micro=2, unused=True),)
HOOKS = Task(
    ("BucketSync.__init__", "BucketSync.begin", "BucketSync.added", "BucketSync.send", "BucketSync.finish"),
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

# --- task 5: the whole file ------------------------------------------------------------------------------------------

LOOP = Task(
    ("train",),
    (trains(3, (2, dict(sync="naive")), (3, dict(sync="bucket", bucket_mb=0.01))),
     trains(2, (3, dict(sync="ring")), (2, dict(sync="bucket", bucket_mb=0.01)), flags=dict(micro_batch_size=4),
            says="so it does by the ring, and with micro-batches of 4")),
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
