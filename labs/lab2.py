"""Lab 2: data parallelism (step02_ddp.py)."""

from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group
from common.layout import Layout, materialize
from common.model import Decoder, ModelConfig
from labs.course import Case, Lab, Question, Task, demands
from labs.tape import Tape
from labs.training import trains

CPU = torch.device("cpu")

# --- task 1: one by one ----------------------------------------------------------------------------------------------

NAIVE = (dict(mesh=dict(dp=2, cp=2)),)


def some_params() -> nn.Module:
    """Three parameters summed over dp, one over all four ranks, one that is not trained."""
    model = nn.Module()
    for i, name in enumerate(("a", "b", "c", "expert", "frozen")):
        param = nn.Parameter(torch.full((i + 2, 3), 0.5, dtype=torch.float64), requires_grad=name != "frozen")
        param.parallel_layout = Layout(data_group="data" if name == "expert" else "dp")
        model.register_parameter(name, param)
    return model


def naive_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """NaiveSync on drawn gradients."""
    mesh.join("data", "dp", "cp")
    model, rank = some_params(), 2 * mesh["dp"].rank + mesh["cp"].rank
    sync = step.NaiveSync(model, SimpleNamespace(bucket_mb=1.0), mesh)
    sync.begin(1)
    for name, param in model.named_parameters():
        if param.requires_grad:
            param.grad = case.draw(name, 4, *param.shape)[rank].clone()
    with Tape(mesh) as tape:
        sync.finish()
    found = {f"the gradient of {name}": p.grad for name, p in model.named_parameters() if p.requires_grad}
    found["parameters that have changed"] = [n for n, p in model.named_parameters() if not torch.all(p == 0.5)]
    return found | {"what is left under way": tape.starts() - sum(e[0] == "wait" for e in tape.events),
                    "bytes sent": tape.sent()}  # fmt: skip


def naive_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    found = {"parameters that have changed": [], "what is left under way": 0}
    sizes = {name: p.numel() for name, p in some_params().named_parameters()}
    for name, param in some_params().named_parameters():
        parts = case.draw(name, 2, 2, *param.shape)  # [dp, cp, ...]
        if param.requires_grad:
            found[f"the gradient of {name}"] = parts.sum((0, 1)) if name == "expert" else parts[:, rank % 2].sum(0)
    small = sizes["a"] + sizes["b"] + sizes["c"]
    return found | {"bytes sent": dict(dp=8 * small, data=8 * 1.5 * sizes["expert"])}


ONE_BY_ONE = Task(
    "one all-reduce a gradient", 15, ("NaiveSync.finish", "NaiveSync.sum_up"),
    "the docstring of the step; of NaiveSync; torch.distributed.all_reduce in PyTorch's documentation",
    ("The record of a parameter (layout_of) names the group over which its gradient is summed; the mesh has it.",
     "dist.all_reduce works in place, and needs to know the group: group.handle. What do you do in a group of one?",
     "The loss was divided by the number of targets of all ranks already: nothing is averaged."),
    demands(
        naive_on_rank, naive_expected, NAIVE,
        ("each gradient is the sum over the ranks of its own group; nothing else changes", 3, "gradient", "changed"),
        ("every sum is complete at the end; an all-reduce's bytes", 1, "left", "bytes"),
    ),
    faults=("weights_instead_of_gradients", "averaged"),
)  # fmt: skip

# --- task 2: the ring ------------------------------------------------------------------------------------------------

EVEN = (dict(mesh=dict(dp=3), shapes=((3, 4),), dtype="float64"),)
UNEVEN = (dict(mesh=dict(dp=4), shapes=((7, 3), (3,), (2, 1)), dtype="float64"),)
NARROW = (dict(mesh=dict(dp=3), shapes=((4, 5),), dtype="bfloat16"),)


def ring_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """The sum of tensors of these shapes."""
    group, found, sync = mesh["dp"], {}, step.RingSync.__new__(step.RingSync)
    for shape in case.shapes:
        x = ring_inputs(case, shape)[group.rank]
        with Tape(mesh) as tape:
            sync.sum_up(x, group)
        starts = [event for event in tape.events if event[0] == "start"]
        found |= {f"the sum of {list(shape)}": x.double(), f"bytes sent for {list(shape)}": tape.sent()}
        found[f"operations for {list(shape)}, beside messages"] = sorted({e[1] for e in starts} - {"send", "recv"})
    return found


def ring_inputs(case: Case, shape: tuple) -> list[Tensor]:
    """By rank; in bf16 whole numbers, whose sums are exact."""
    x = case.draw(f"x{shape}", case.ranks, *shape)
    x = (x * 20).round() if case.dtype == "bfloat16" else x
    return [part.clone() for part in x.to(getattr(torch, case.dtype))]


def ring_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand: all but two pieces are sent twice, those two once."""
    n, found = case.ranks, {}
    for shape in case.shapes:
        parts = ring_inputs(case, shape)
        sizes = [len(piece) * parts[0].itemsize for piece in parts[0].flatten().tensor_split(n)]
        sent = 2 * sum(sizes) - sizes[(rank + 1) % n] - sizes[(rank + 2) % n]
        found[f"the sum of {list(shape)}"] = sum(part.double() for part in parts)
        found[f"bytes sent for {list(shape)}"] = dict(dp=sent) if sent else {}
        found[f"operations for {list(shape)}, beside messages"] = []
    return found


RING = Task(
    "the all-reduce by hand", 25, ("RingSync.sum_up",),
    "the docstring of RingSync; exchange in common/comm.py; Patarasuk and Yuan 2009",
    ("Follow one piece through the table: where is it first, and who adds to it in which round? In the second half "
     "complete pieces go round, and nobody adds any more.",
     "gradient.view(-1).tensor_split(n) are n pieces, as views, also where n does not divide. What arrives needs "
     "room of the same size and dtype.",
     "In round s send piece r-s to the right, receive piece r-s-1 from the left (mod n); for s < n-1 add it, later "
     "replace. The piece that you send must not change before the exchange is complete."),
    (*demands(ring_on_rank, ring_expected, EVEN, ("the sum, where the ranks divide the length", 2, "the sum")),
     *demands(ring_on_rank, ring_expected, UNEVEN, ("the sum of other shapes, some with empty pieces", 2, "sum")),
     *demands(ring_on_rank, ring_expected, NARROW, ("the sum in bf16", 1, "the sum")),
     *demands(ring_on_rank, ring_expected, EVEN + UNEVEN,
              ("by messages alone, with the bytes of the pieces that pass", 2, "bytes", "operations")),),
    faults=("ring_one_round_short", "ring_adds_for_ever"),
)  # fmt: skip

# --- task 3: buckets -------------------------------------------------------------------------------------------------

SIZES = (9, 4, 7, 20, 5, 3, 8, 12, 6)  # elements; 20 are more than a bucket's 16; 5 and 8 are of the other group
FILL = (dict(limit=16 * 8),)


def bucket_params() -> list[nn.Parameter]:
    """fp32 parameters with fp64 gradients, some of another group."""
    params = []
    for i, size in enumerate(SIZES):
        params.append(nn.Parameter(torch.zeros(size, 1)))
        params[-1].grad_dtype = torch.float64
        params[-1].parallel_layout = Layout(data_group="expert_data" if i in (4, 6) else "dp")
    return params


def lists_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """group_params; then three parameters that fill a list to the last byte, and a fourth."""
    params = bucket_params()
    numbers = {id(param): i for i, param in enumerate(params)}
    found = {"the lists": sorted([numbers[id(p)] for p in some] for some in step.group_params(params, case.limit))}
    params = [nn.Parameter(torch.zeros(size)) for size in (4, 7, 5, 1)]
    for param in params:
        param.grad_dtype = torch.float64
    return found | {"exactly full": [len(some) for some in step.group_params(params, case.limit)]}


def lists_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    return {"the lists": [[0, 1], [2], [3], [4, 6], [5, 7], [8]], "exactly full": [3, 1]}


def bucket_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """A bucket of three parameters."""
    params, group = bucket_params()[:3], Group("dp", 0, 1, None)
    bucket = step.Bucket(params, group)
    found = {"the buffer's shape": list(bucket.flat.shape), "its dtype": str(bucket.flat.dtype)}
    found |= {"the buffer at first": bucket.flat.clone(), "the views' shapes": [list(v.shape) for v in bucket.views]}
    found["the views begin at"] = [(v.data_ptr() - bucket.flat.data_ptr()) // 8 for v in bucket.views]
    return found | {"its group and parameters": bucket.group is group and bucket.params == params}


def bucket_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    found = {"the buffer's shape": [20], "its dtype": "torch.float64", "the views begin at": [0, 9, 13]}
    found |= {"the buffer at first": torch.zeros(20).double(), "its group and parameters": True}
    return found | {"the views' shapes": [[9, 1], [4, 1], [7, 1]]}


BUCKETS = Task(
    "buckets", 15, ("Bucket.__init__", "group_params"),
    "the docstrings of both; grad_dtype of a tensor",
    ("Bytes are those of gradients: param.grad_dtype.itemsize, not the parameter's. So is the buffer's dtype.",
     "A view of a part of the buffer has the parameter's shape: split, then view_as.",
     "Keep the lists of each data_group apart, in the order in which the parameters come. A list that is full is "
     "closed; a parameter that is larger than the limit has a list of its own."),
    (*demands(lists_on_rank, lists_expected, FILL,
              ("lists of at most the limit, each of one group", 2, "lists"),
              ("a list may be exactly full", 1, "full")),
     *demands(bucket_on_rank, bucket_expected, FILL, ("the buffer, its dtype, and views one after another", 2))),
)  # fmt: skip

# --- task 4: overlap -------------------------------------------------------------------------------------------------

OVERLAP = (
    dict(mesh=dict(dp=3), limit=3000, micro=2, unused=False),
    dict(mesh=dict(dp=2), limit=900, micro=3, unused=False),
)
UNUSED = (dict(mesh=dict(dp=2), limit=900, micro=2, unused=True),)


def decoder_of(case: Case) -> Decoder:
    """A small one in fp64; with `unused` the head has a parameter that rank 0 alone uses."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(8, 2, 2, 1, 12, vocab_size=11, seq_len=4))
    if case.unused:
        model.lm_head.register_parameter("spare", nn.Parameter(torch.zeros(5)))
    materialize(model, case.seed % 1000, CPU, torch.float64, [n for n, p in model.named_parameters() if p.is_meta])
    return model.double()


def loss_of(model: Decoder, case: Case, rank: int, step: int, micro: int) -> Tensor:
    """The loss of drawn tokens."""
    tokens = case.ids(f"tokens {rank} {step} {micro}", 11, 2, 4)
    spare = (micro + 1) * model.lm_head.spare.sum() if case.unused and rank == 0 else 0
    return model(tokens, tokens.flip(1)) + spare


def overlap_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Two steps of real backward passes; collectives, waits and matmuls in their order."""
    model, group, found = decoder_of(case), mesh["dp"], {}
    sync = step.BucketSync(model, SimpleNamespace(bucket_mb=case.limit / 2**20), mesh)
    for turn in (1, 2):
        sync.begin(case.micro)
        for i in range(case.micro):
            loss = loss_of(model, case, group.rank, turn, i)
            with Tape(mesh) as tape:
                loss.backward()
            last = i + 1 == case.micro
            found[f"step {turn}: sums started in backward of {'the last' if last else 'another'} micro-batch"] = (
                tape.starts()
            )
        found[f"step {turn}: waits in the last backward"] = sum(event[0] == "wait" for event in tape.events)
        found[f"step {turn}: matmuls run while a sum is under way"] = tape.hidden() > 0
        found[f"step {turn}: bytes of each sum"] = [event[2] for event in tape.events if event[0] == "start"]
        with Tape(mesh) as tape:
            sync.finish()
        found[f"step {turn}: sums started in finish()"] = tape.starts()
        found |= {f"step {turn}: the gradient of {n}": p.grad.clone() for n, p in model.named_parameters()}
    return found


def overlap_expected(rank: int, case: Case) -> dict[str, Any]:
    """Gradients of all ranks and micro-batches in one process; buckets by hand."""
    found, buckets = {}, [0]
    for param in reversed(list(decoder_of(case).parameters())):
        if buckets[-1] and buckets[-1] + 8 * param.numel() > case.limit:
            buckets.append(0)
        buckets[-1] += 8 * param.numel()
    for turn in (1, 2):
        model = decoder_of(case)
        sum(loss_of(model, case, r, turn, i) for r in range(case.ranks) for i in range(case.micro)).backward()
        found[f"step {turn}: sums started in backward of another micro-batch"] = 0
        found[f"step {turn}: sums started in backward of the last micro-batch"] = len(buckets)
        found |= {f"step {turn}: sums started in finish()": 0, f"step {turn}: waits in the last backward": 0}
        found[f"step {turn}: matmuls run while a sum is under way"] = True
        found[f"step {turn}: bytes of each sum"] = [2 * (case.ranks - 1) / case.ranks * size for size in buckets]
        for name, param in model.named_parameters():
            found[f"step {turn}: the gradient of {name}"] = (
                torch.zeros_like(param) if param.grad is None else param.grad
            )
    return found


HOOKS = Task(
    "sums under backward", 35,
    ("BucketSync.__init__", "BucketSync.begin", "BucketSync.added", "BucketSync.send", "BucketSync.finish"),
    "the docstring of BucketSync; register_post_accumulate_grad_hook in PyTorch's documentation; Li et al. 2020",
    ("Each hook has to know its own bucket: bind it when you register the hook (partial), not when it runs.",
     "How many additions does a bucket get in a step? Count down from there. When it is complete, it may still have "
     "to wait for those before it, or ranks would start sums in different orders.",
     "begin: empty the buffers, put views into param.grad. send: start, and keep the Pending. finish: send what is "
     "left, and only now wait, for all."),
    (*demands(
         overlap_on_rank, overlap_expected, OVERLAP,
         ("the sums of all ranks and micro-batches, in two steps", 3, "gradient"),
         ("each bucket is sent once, in order, during the last backward and not before", 3, "sums started", "bytes"),
         ("nothing is waited for in backward, and matmuls run meanwhile", 2, "waits", "matmuls"),
     ),
     *demands(overlap_on_rank, overlap_expected, UNUSED,
              ("a parameter that one rank alone uses: the order of sums is the same on all", 2, "gradient")),),
    faults=("not_summed", "last_bucket_forgotten", "summed_twice", "sent_after_the_first_micro_batch",
            "buckets_not_emptied"),
)  # fmt: skip

# --- task 5: the whole file ------------------------------------------------------------------------------------------

LOOP = Task(
    "the loop", 15, ("train",),
    "train of step01_single_gpu.py, and the docstring of the step; Mesh and Group.share in common/comm.py",
    ("What changes against step 1: the mesh, this rank's share of the sequences, the sync, the sum of the loss.",
     "n_targets still counts the whole global batch: every rank reads it all.",
     "sync.begin(number of micro-batches) before the first, sync.finish() after the last; the loss is summed over "
     "dp for the log. The sync is made after the optimizer."),
    (trains(3, (2, dict(sync="naive")), (3, dict(sync="bucket", bucket_mb=0.01))),
     trains(2, (3, dict(sync="ring")), (2, dict(sync="bucket", bucket_mb=0.01)), flags=dict(micro_batch_size=4),
            says="so it does by the ring, and with micro-batches of 4"),),
    faults=("loss_of_the_own_rank", "same_sequences_everywhere", "mean_of_ranks_means"),
)  # fmt: skip

# --- the question ----------------------------------------------------------------------------------------------------


def draw_sum(draw: Random) -> dict[str, Any]:
    """A model and a number of ranks."""
    return dict(n=draw.choice((3, 6, 12, 24, 48)), P=draw.randint(50, 900), k=draw.randint(2, 9))


QUESTION = Question(
    "{P} million parameters, fp32 gradients, {n} ranks, {k} micro-batches a step, --sync bucket.\n"
    "How many bytes does a rank send in a step?",
    draw_sum,
    lambda v: 8e6 * v["P"] * (v["n"] - 1) / v["n"],
    mistakes=(
        ("gradients travel once a step", lambda v: v["k"] * 8e6 * v["P"] * (v["n"] - 1) / v["n"]),
        ("this is a reduce-scatter; an all-reduce is that and an all-gather", lambda v: 4e6 * v["P"]
         * (v["n"] - 1) / v["n"]),
        ("one of the n pieces stays", lambda v: 8e6 * v["P"]),
    ),
)  # fmt: skip

LAB = Lab(
    2, "Data parallelism", ("step02_ddp",), (ONE_BY_ONE, RING, BUCKETS, HOOKS, LOOP), QUESTION, flags="--sync ring"
)
