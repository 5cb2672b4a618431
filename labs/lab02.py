"""Lab 2: what is demanded of data parallelism. Functions `..._on_rank` run on the ranks."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import step02_ddp as step02
from common.comm import Mesh, all_reduce
from common.layout import materialize, note_gradient_sum
from common.model import Decoder, ModelConfig
from labs import training
from labs.bench import IN_FP32, Bench, Wrong, numbers
from services import compression
from services.ledger import Ledger

CPU = torch.device("cpu")
RUN = dict(optimizer="sgd", n_layers=1, micro_batch_size=2, global_batch_size=12, steps=2)
WHOLE = (2, dict(sync="bucket", bucket_mb=0.02))


def here() -> tuple[Mesh, Any]:
    """(mesh, group) with all ranks along dp."""
    mesh = Mesh({"dp": dist.get_world_size()}, CPU, Ledger())
    return mesh, mesh["dp"]


def taken(mesh: Mesh, what: str = "traffic") -> dict[str, float]:
    """Bytes sent (or "calls") over dp since the last call, by operation."""
    return {name.strip(): amount for name, amount in mesh.ledger.take()[what].get("dp", {}).items()}


def small_model(mesh: Mesh) -> Decoder:
    """A decoder of one layer in fp64 whose gradients are summed over dp."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(8, 1, 2, 1, 12, vocab_size=11, seq_len=4))
    note_gradient_sum(model.parameters(), "dp")
    materialize(model, 0, CPU, torch.float64)
    return model


# --- task 1: the ring ------------------------------------------------------------------------------------------------


def ring_on_rank(seed: int, n: int, *lengths: int) -> dict:
    """ring_all_reduce of tensors of these lengths."""
    mesh, group = here()
    found = {}
    for length in lengths:
        x = numbers(seed, f"x{length}", n, length)[group.rank].clone()
        step02.ring_all_reduce(x, group)
        record = mesh.ledger.take()
        found[f"the sum of {length} elements"] = x
        found[f"bytes sent for {length} elements"] = dict(record["traffic"]["dp"])
        found[f"messages sent for {length} elements"] = dict(record["calls"]["dp"])
    return found


def ring_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, lengths): one that n divides, one that it does not, one shorter than n."""
    draw = bench.draws()
    seed, n = draw.randrange(10**6), draw.choice((3, 4))
    return seed, n, n * draw.randint(2, 9), n * draw.randint(5, 9) + draw.randint(1, n - 1), n - 1


def ring_sums(bench: Bench, lengths: slice):
    """The sums, of some of the lengths."""
    case = ring_case(bench)
    seed, n, *all_lengths = case
    run = bench.ranks(n, ring_on_rank, *case)
    for length in all_lengths[lengths]:
        total = numbers(seed, f"x{length}", n, length).sum(0)
        bench.same(run, lambda r, length=length, total=total: {f"the sum of {length} elements": total})


def ring_even(bench: Bench):
    """A length that the ranks divide."""
    ring_sums(bench, slice(1))


def ring_uneven(bench: Bench):
    """Other lengths."""
    ring_sums(bench, slice(1, None))


def ring_bytes(bench: Bench):
    """2 (n-1) messages, and the bytes of the pieces that pass."""
    case = ring_case(bench)
    _, n, *lengths = case
    run = bench.ranks(n, ring_on_rank, *case)
    for length in lengths:
        sizes = [len(piece) * 8 for piece in torch.zeros(length).tensor_split(n)]

        def expected(r: int, length: int = length, sizes: list[int] = sizes) -> dict:
            passed = sum(sizes) - sizes[(r + 1) % n] + sum(sizes) - sizes[(r + 2) % n]
            return {
                f"messages sent for {length} elements": {"send": 2 * (n - 1)},
                f"bytes sent for {length} elements": {"send": passed},
            }

        bench.same(run, expected)


# --- task 2: naive ---------------------------------------------------------------------------------------------------


def naive_on_rank(seed: int, n: int, absent: int) -> dict:
    """NaiveSync on drawn gradients; parameter `absent` has none on any rank, its successor none on rank 0."""
    mesh, group = here()
    model = small_model(mesh)
    sync, before = step02.NaiveSync(model, mesh), {}
    sync.begin()
    for i, (name, param) in enumerate(model.named_parameters()):
        before[name] = param.detach().clone()
        if i != absent and not (i == absent + 1 and group.rank == 0):
            param.grad = numbers(seed, name, n, *param.shape)[group.rank].clone()
    sync.last_micro_batch()
    sync.finish()
    found = {
        f"the gradient of {name}": p.grad if p.grad is not None else "None" for name, p in model.named_parameters()
    }
    found["parameters that changed"] = [
        name for name, p in model.named_parameters() if not torch.equal(p, before[name])
    ]
    return found | {"bytes sent": taken(mesh)}


def naive_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, number of the parameter that has no gradient)."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.choice((2, 3)), draw.randint(1, 6)


def shapes() -> dict[str, torch.Size]:
    """Names and shapes of the small model's parameters."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(8, 1, 2, 1, 12, vocab_size=11, seq_len=4))
    return {name: param.shape for name, param in model.named_parameters()}


def naive_sums(bench: Bench):
    """Every gradient is the sum, nothing else changes."""
    case = naive_case(bench)
    seed, n, absent = case
    run, expected = bench.ranks(n, naive_on_rank, *case), {"parameters that changed": []}
    for i, (name, shape) in enumerate(shapes().items()):
        parts = numbers(seed, name, n, *shape)
        total = parts.sum(0) if i not in (absent, absent + 1) else parts[1:].sum(0) if i == absent + 1 else 0 * parts[0]
        expected[f"the gradient of {name}"] = total
    bench.same(run, lambda r: expected)


def naive_bytes(bench: Bench):
    """The law."""
    case = naive_case(bench)
    n, total = case[1], sum(shape.numel() * 8 for shape in shapes().values())
    run = bench.ranks(n, naive_on_rank, *case)
    bench.same(run, lambda r: {"bytes sent": {"all_reduce": 2 * (n - 1) / n * total}})


def trains_with(bench: Bench, layout: dict):
    """Two steps of three micro-batches a rank are one device's."""
    draw = bench.draws()
    base = RUN | dict(seed=draw.randrange(1000), tied=draw.random() < 0.5)
    training.equal_to_one_device(bench, "step02_ddp", 2, base, layout)


def naive_trains(bench: Bench):
    """--sync naive."""
    trains_with(bench, dict(sync="naive"))


# --- task 3: buckets -------------------------------------------------------------------------------------------------


def buckets_on_rank(limit: int, *sizes: int) -> dict:
    """fill_buckets of fp32 parameters with fp64 gradients, of these numbers of elements, in two groups by turns."""
    groups = [here_alone("dp"), here_alone("other")]
    params = [nn.Parameter(torch.zeros(size, 1, dtype=torch.float32)) for size in sizes]
    for param in params:
        param.grad_dtype = torch.float64
    numbered = {id(param): i for i, param in enumerate(params)}
    of = {param: groups[i % 5 == 2] for i, param in enumerate(params)}
    found = step02.fill_buckets(of, limit)
    return {
        "buckets, by number of the parameters": [[numbered[id(p)] for p in bucket.params] for bucket in found],
        "the groups of the buckets": [bucket.group.name for bucket in found],
        "elements of the buffers": [bucket.flat.numel() for bucket in found],
        "dimensions of the buffers": [bucket.flat.dim() for bucket in found],
        "dtypes of the buffers": [str(bucket.flat.dtype) for bucket in found],
        "shapes of the views": [[list(view.shape) for view in bucket.views] for bucket in found],
        "places of the views": [
            [(view.data_ptr() - bucket.flat.data_ptr()) // 8 for view in bucket.views] for bucket in found
        ],
    }


def here_alone(name: str) -> Any:
    """A group of one."""
    return Mesh({name: 1}, CPU, Ledger())[name]


def bucket_case(bench: Bench) -> tuple[int, ...]:
    """(limit in bytes, elements of the parameters); one parameter is larger than a bucket."""
    draw = bench.draws()
    sizes = [draw.randint(1, 30) for _ in range(11)]
    sizes[draw.randint(1, 9)] = 64
    return 8 * draw.randint(35, 60), *sizes


def filled_by_hand(limit: int, sizes: list[int]) -> tuple[list[list[int]], list[str]]:
    """Numbers of the parameters in each bucket, and the groups."""
    buckets: list[list[int]] = []
    names: list[str] = []
    last: dict[str, int] = {}
    for i in reversed(range(len(sizes))):
        name = ("dp", "other")[i % 5 == 2]
        room = limit - 8 * sum(sizes[j] for j in buckets[last[name]]) if name in last else -1
        if 8 * sizes[i] > room:
            last[name] = len(buckets)
            buckets.append([])
            names.append(name)
        buckets[last[name]].append(i)
    return buckets, names


def bucket_contents(bench: Bench):
    """Which parameter is in which bucket."""
    limit, *sizes = bucket_case(bench)
    run, (buckets, names) = bench.ranks(1, buckets_on_rank, limit, *sizes), filled_by_hand(limit, sizes)
    expected = {"buckets, by number of the parameters": buckets, "the groups of the buckets": names}
    bench.same(run, lambda r: expected)


def bucket_views(bench: Bench):
    """Gradients are views, one after another."""
    limit, *sizes = bucket_case(bench)
    run = bench.ranks(1, buckets_on_rank, limit, *sizes)
    buckets = run.answers[0]["buckets, by number of the parameters"]
    places = [[sum(sizes[j] for j in bucket[:k]) for k in range(len(bucket))] for bucket in buckets]
    expected = {
        "dimensions of the buffers": [1] * len(buckets),
        "dtypes of the buffers": ["torch.float64"] * len(buckets),
        "elements of the buffers": [sum(sizes[i] for i in bucket) for bucket in buckets],
        "shapes of the views": [[[sizes[i], 1] for i in bucket] for bucket in buckets],
        "places of the views": places,
    }
    bench.same(run, lambda r: expected)


# --- task 4: overlap -------------------------------------------------------------------------------------------------


def overlap_on_rank(seed: int, n: int, limit: int) -> dict:
    """BucketSync while gradients are completed in an order of each rank's own, and one never is; two steps.

    What is noted: after how many completions each bucket was sent, by its number; sums; calls.
    """
    mesh, group = here()
    model, sent, completed, found = small_model(mesh), [], [0], {}
    params = dict(model.named_parameters())

    def noting(flat: torch.Tensor, over: Any) -> Any:
        number = [bucket.flat.data_ptr() for bucket in sync.buckets].index(flat.data_ptr())
        sent.append([number, completed[0]])
        return all_reduce(flat, over)

    sync = step02.BucketSync(model, mesh, limit, noting)
    home = {id(param): bucket for bucket in sync.buckets for param in bucket.params}
    for step in range(2):
        sync.begin()
        sent.clear()
        for micro_batch in range(2):
            completed[0] = 0
            if micro_batch == 1:
                sync.last_micro_batch()
            for name in order_of(seed, group.rank, step):
                params[name].grad.add_(
                    numbers(seed, f"{name} {step} {micro_batch}", n, *params[name].shape)[group.rank]
                )
                completed[0] += 1
                sync.completed(home[id(params[name])])
            if micro_batch == 0:
                found[f"step {step + 1}: buckets sent before the last micro-batch"] = list(sent)
        found[f"step {step + 1}: buckets sent during backward, and after how many gradients"] = list(sent)
        completed[0] = -1
        sync.finish()
        found[f"step {step + 1}: buckets sent in all, in order"] = [number for number, _ in sent]
        found |= {f"step {step + 1}: the gradient of {name}": param.grad.clone() for name, param in params.items()}
        found[f"step {step + 1}: calls"] = taken(mesh, "calls")
    return found


def order_of(seed: int, rank: int, step: int) -> list[str]:
    """The order in which a rank's gradients are complete; the third parameter's never is."""
    names = list(shapes())
    del names[2]
    return [names[i] for i in numbers(seed, f"order {rank} {step}", len(names)).argsort().tolist()]


def overlap_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, limit of a bucket in bytes)."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.choice((2, 3)), 8 * draw.randint(100, 180)


def overlap_sums(bench: Bench):
    """The sums, of two micro-batches, in both steps; what no gradient reached is zero."""
    case = overlap_case(bench)
    seed, n, _ = case
    run, missing = bench.ranks(n, overlap_on_rank, *case), list(shapes())[2]
    for step in range(2):
        expected = {}
        for name, shape in shapes().items():
            parts = [numbers(seed, f"{name} {step} {i}", n, *shape).sum(0) for i in range(2)]
            expected[f"step {step + 1}: the gradient of {name}"] = sum(parts) * (name != missing)
        bench.same(run, lambda r, expected=expected: expected)


def overlap_order(bench: Bench):
    """Sent when it and all before it are complete; the same order on all ranks; once."""
    case = overlap_case(bench)
    seed, n, limit = case
    run, names = bench.ranks(n, overlap_on_rank, *case), list(shapes())
    sizes = [shape.numel() for shape in shapes().values()]
    buckets = [[names[i] for i in bucket] for bucket in filled_one_group(limit, sizes)]

    def expected(r: int, step: int) -> dict:
        order, sent = order_of(seed, r, step), []
        for number, bucket in enumerate(buckets):
            if names[2] in bucket:
                break
            ready = max(order.index(name) + 1 for earlier in buckets[: number + 1] for name in earlier)
            sent.append([number, ready])
        return {
            f"step {step + 1}: buckets sent before the last micro-batch": [],
            f"step {step + 1}: buckets sent during backward, and after how many gradients": sent,
            f"step {step + 1}: buckets sent in all, in order": list(range(len(buckets))),
            f"step {step + 1}: calls": {"all_reduce": len(buckets)},
        }

    for step in range(2):
        bench.same(run, lambda r, step=step: expected(r, step))


def filled_one_group(limit: int, sizes: list[int]) -> list[list[int]]:
    """As `filled_by_hand`, all in one group."""
    buckets: list[list[int]] = []
    for i in reversed(range(len(sizes))):
        if not buckets or 8 * (sum(sizes[j] for j in buckets[-1]) + sizes[i]) > limit:
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def overlap_trains(bench: Bench):
    """--sync bucket, several buckets."""
    trains_with(bench, dict(sync="bucket", bucket_mb=0.02))


# --- task 5: int8 ----------------------------------------------------------------------------------------------------

INT8 = step02.Config(compress="int8")


def quantised_on_rank(seed: int, blocks: int) -> dict:
    """quantise and dequantise of blocks of very different size, one of them zero."""
    x = values_of(seed, blocks)
    narrow = compression.quantise(x)
    return {"the narrow blocks": narrow, "dtype": str(narrow.dtype), "the blocks back": compression.dequantise(narrow)}


def values_of(seed: int, blocks: int) -> torch.Tensor:
    """fp32 [blocks, 256]; block i has numbers of about 10^-i, the last is zero."""
    scale = torch.logspace(0, 1 - blocks, blocks).view(-1, 1)
    scale[-1] = 0
    return numbers(seed, "values", blocks, 256).float() * scale


def quantise_blocks(bench: Bench):
    """Within half a unit of the block's own scale; four bytes of scale; zero stays zero."""
    draw = bench.draws()
    seed, blocks = draw.randrange(10**6), draw.randint(3, 5)
    found, x = bench.ranks(1, quantised_on_rank, seed, blocks).answers[0], values_of(seed, blocks)
    if found["dtype"] != "torch.int8" or list(found["the narrow blocks"].shape) != [blocks, 260]:
        raise Wrong(
            f"quantise gives {found['dtype']} {list(found['the narrow blocks'].shape)}, not int8 [{blocks}, 260]"
        )
    back = found["the blocks back"]
    if back.shape != x.shape or back.dtype != torch.float32:
        raise Wrong(f"dequantise gives {back.dtype} {list(back.shape)} instead of float32 {list(x.shape)}")
    for i, (ours, theirs) in enumerate(zip(x, back, strict=True)):
        unit, off = ours.abs().max().item() / 127, (ours - theirs).abs().max().item()
        if not off <= 0.5001 * unit:
            raise Wrong(f"block {i}, whose largest value is {127 * unit:.3g}: off by {off:.3g}, more than max/127/2")


def narrow_on_rank(seed: int, n: int, length: int) -> dict:
    """narrow_sum once, and CompressedSum four times, of which the last three bring nothing new."""
    mesh, group = here()
    x = inputs_of(seed, n, length)[group.rank]
    total, lost = compression.summed(compression.narrow_sum(x.clone(), group, INT8))
    found = {"the sum": total, "what was lost": lost, "bytes sent": taken(mesh)}
    total, lost = compression.summed(compression.narrow_sum(x.clone(), group, replace(INT8, compress="bf16")))
    found |= {"the sum in bf16": total, "what was lost in bf16": lost, "bytes sent in bf16": taken(mesh)}
    call, buffers = compression.CompressedSum(INT8), [torch.zeros(length), torch.zeros(length)]
    arrived = torch.zeros(length, dtype=torch.float64)
    for step in range(4):
        for number, buffer in enumerate(buffers):  # two buckets, which must not owe one another anything
            buffer.copy_(x * (1 + number) if step == 0 else torch.zeros(length))
            call(buffer, group).wait()
        arrived += buffers[0]
    return found | {"what has arrived after four steps": arrived}


def inputs_of(seed: int, n: int, length: int) -> torch.Tensor:
    """fp32 [n, length], of sizes over three orders of magnitude."""
    return (numbers(seed, "gradient", n, length) * torch.logspace(-3, 0, length)).float()


def narrow_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, length): not a multiple of anything."""
    draw = bench.draws()
    n = draw.choice((2, 3))
    return draw.randrange(10**6), n, 256 * n * draw.randint(1, 2) + draw.randint(1, 255)


def narrow_sums(bench: Bench):
    """The sum is near, and sum + all that was lost is exact."""
    case = narrow_case(bench)
    seed, n, length = case
    run, exact = bench.ranks(n, narrow_on_rank, *case), inputs_of(seed, n, length).double().sum(0)
    for bits, bound in (("", 0.02), (" in bf16", 0.005)):
        bench.same(run, lambda r, bits=bits: {f"the sum{bits}": exact}, bound=bound)
        lost = sum(answer[f"what was lost{bits}"].double() for answer in run.answers)
        off = ((run.answers[0][f"the sum{bits}"].double() + lost - exact).norm() / exact.norm()).item()
        if not off < IN_FP32:
            text = f"of the sum{bits} and of what all ranks say was lost, something is missing"
            why = "each rank also owes what its own sum lost when it was made narrow"
            raise Wrong(f"{text}: {off:.3g} (relative) - {why}")


def narrow_bytes(bench: Bench):
    """A byte a value and four a block, both ways."""
    case = narrow_case(bench)
    _, n, length = case
    run, blocks = bench.ranks(n, narrow_on_rank, *case), (n - 1) * -(-length // (n * 256))
    for key, size in (("bytes sent", 260), ("bytes sent in bf16", 512)):
        expected = {key: {"all_to_all": blocks * size, "all_gather": blocks * size}}
        bench.same(run, lambda r, expected=expected: expected)


def late_not_lost(bench: Bench):
    """What is owed arrives with the next steps, for each buffer by itself."""
    case = narrow_case(bench)
    seed, n, length = case
    run, exact = bench.ranks(n, narrow_on_rank, *case), inputs_of(seed, n, length).double().sum(0)
    bench.same(run, lambda r: {"what has arrived after four steps": exact}, IN_FP32)
