"""Lab 2: data parallelism (step02_ddp.py)."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group
from common.layout import Layout
from common.model import Decoder
from labs.course import Case, Lab, Question, Task, demands
from labs.probes import decoder, fill, gradients
from labs.tape import Tape
from labs.training import trains

# --- task 1: one by one ----------------------------------------------------------------------------------------------


class Naive(Case):
    """NaiveSync on drawn gradients."""

    def model(self) -> nn.Module:
        """Three parameters summed over dp, one over all four ranks, one that is not trained."""
        model = nn.Module()
        for i, name in enumerate(("a", "b", "c", "expert", "frozen")):
            param = nn.Parameter(torch.full((i + 2, 3), 0.5, dtype=torch.float64), requires_grad=name != "frozen")
            param.parallel_layout = Layout(data_group="data" if name == "expert" else "dp")
            model.register_parameter(name, param)
        return model

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        mesh.join("data", "dp", "cp")
        model = self.model()
        sync = step.NaiveSync(model, SimpleNamespace(bucket_mb=1.0), mesh)
        sync.begin(1)
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.grad = self.draw(name, 2, 2, *param.shape)[mesh["dp"].rank, mesh["cp"].rank].clone()
        with Tape(mesh) as tape:
            sync.finish()
        found = {"parameters that have changed": [n for n, p in model.named_parameters() if not torch.all(p == 0.5)]}
        found |= {"what is left under way": len(tape.starts()) - tape.waits(), "bytes sent": tape.sent()}
        return found | gradients(model)

    def expected(self, rank: int) -> dict[str, Any]:
        named = dict(self.model().named_parameters())
        small = 8 * sum(named[name].numel() for name in "abc")
        found = {"parameters that have changed": [], "what is left under way": 0}
        found |= {"bytes sent": dict(dp=small, data=1.5 * 8 * named["expert"].numel())}
        for name in ("a", "b", "c", "expert"):
            parts = self.draw(name, 2, 2, *named[name].shape)  # [dp, cp, ...]
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
    """The sum of tensors of these shapes."""

    def inputs(self, shape: tuple) -> Tensor:
        """By rank; in bf16 whole numbers, whose sums are exact."""
        x = self.draw(f"x{shape}", self.ranks, *shape)
        return ((x * 20).round() if self.dtype == "bfloat16" else x).to(getattr(torch, self.dtype))

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        group, found, sync = mesh["dp"], {}, step.RingSync.__new__(step.RingSync)
        for shape in self.shapes:
            x = self.inputs(shape)[group.rank].clone()
            with Tape(mesh) as tape:
                sync.sum_up(x, group)
            found |= {f"the sum of {list(shape)}": x.double(), f"bytes sent for {list(shape)}": tape.sent()}
            others = {event.what for event in tape.starts()} - {"send", "recv"}
            found[f"operations for {list(shape)}, beside messages"] = sorted(others)
        return found

    def expected(self, rank: int) -> dict[str, Any]:
        n, found = self.ranks, {}
        for shape in self.shapes:
            parts = self.inputs(shape)
            sizes = [piece.nbytes for piece in parts[0].flatten().tensor_split(n)]
            sent = 2 * sum(sizes) - sizes[(rank + 1) % n] - sizes[(rank + 2) % n]  # those two once, the others twice
            found[f"the sum of {list(shape)}"] = parts.double().sum(0)
            found[f"bytes sent for {list(shape)}"] = dict(dp=sent) if sent else {}
            found[f"operations for {list(shape)}, beside messages"] = []
        return found


EVEN = (dict(mesh=dict(dp=3), shapes=((3, 4),), dtype="float64"),)
UNEVEN = (dict(mesh=dict(dp=4), shapes=((7, 3), (3,), (2, 1)), dtype="float64"),)
NARROW = (dict(mesh=dict(dp=3), shapes=((4, 5),), dtype="bfloat16"),)
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
        param.parallel_layout = Layout(data_group="expert_data" if i in (4, 6) else "dp")
    return params


class Lists(Case):
    """group_params; then three parameters that fill a list to the last byte, and a fourth."""

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        params = wide_params(*SIZES)
        numbers = {id(param): i for i, param in enumerate(params)}
        found = {
            "the lists, by number": sorted([numbers[id(p)] for p in some] for some in step.group_params(params, 16 * 8))
        }
        return found | {"exactly full": [len(some) for some in step.group_params(wide_params(4, 7, 5, 1), 16 * 8)]}

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


class Overlap(Case):
    """Two steps of real backward passes; collectives, waits and matmuls in their order."""

    def model(self) -> Decoder:
        """A small one in fp64; with `unused` the head has a parameter that rank 0 alone uses."""
        model = decoder(dim=8, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=12, vocab_size=11, seq_len=4)
        if self.unused:
            model.lm_head.register_parameter("spare", nn.Parameter(torch.zeros(5).double()))
        fill(model, self.seed)
        return model

    def loss(self, model: Decoder, rank: int, turn: int, micro: int) -> Tensor:
        """The loss of drawn tokens."""
        tokens = self.ids(f"tokens {rank} {turn} {micro}", 11, 2, 4)
        loss = model(tokens, tokens.flip(1))  # first, so that autograd comes to it last
        return loss + (micro + 1) * model.lm_head.spare.sum() if self.unused and rank == 0 else loss

    def found(self, step: Any, mesh: Any) -> dict[str, Any]:
        model, found = self.model(), {}
        sync = step.BucketSync(model, SimpleNamespace(bucket_mb=self.limit / 2**20), mesh)
        for turn in (1, 2):
            sync.begin(self.micro)
            tapes = [Tape(mesh) for _ in range(self.micro)]
            for i, tape in enumerate(tapes):
                loss = self.loss(model, mesh["dp"].rank, turn, i)
                with tape:
                    loss.backward()
            with Tape(mesh) as after:
                sync.finish()
            *before, last = tapes
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
        sent = [2 * (self.ranks - 1) / self.ranks * size for size in buckets]
        for turn in (1, 2):
            model = self.model()
            sum(self.loss(model, r, turn, i) for r in range(self.ranks) for i in range(self.micro)).backward()
            found |= gradients(model, f"step {turn}: the gradient of")
            found[f"step {turn}: sums started before the last backward"] = 0
            found[f"step {turn}: sums started in the last backward, bytes"] = sent
            found |= {f"step {turn}: sums started in finish()": 0, f"step {turn}: waits in the last backward": 0}
            found[f"step {turn}: matmuls run while a sum is under way"] = True
        return found


OVERLAP = (
    dict(mesh=dict(dp=3), limit=3000, micro=2, unused=False),
    dict(mesh=dict(dp=2), limit=900, micro=3, unused=False),
)
UNUSED = (dict(mesh=dict(dp=2), limit=900, micro=2, unused=True),)
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
