"""Lab 3: what is demanded of ZeRO: slices, when they travel, and what is left in memory. `..._on_rank` run on ranks."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import step03_zero as step03
from common import layout
from common.comm import Group, Mesh
from common.layout import Layout, Split, materialize, note_gradient_sum
from common.model import Decoder, ModelConfig
from labs import training
from labs.bench import BOUND, IN_FP32, Bench, numbers
from services.ledger import Ledger
from services.offload import Homes
from services.state import held
from services.tables import bytes_of
from tests.equivalence import SMALL, without_instruments

CPU = torch.device("cpu")
RUN = dict(optimizer="adamw", n_layers=2, micro_batch_size=2, global_batch_size=12, steps=3)
WHOLE = (2, dict(zero=3))
SHAPE = ModelConfig(8, 2, 2, 1, 12, vocab_size=11, seq_len=4)


def here() -> tuple[Mesh, Any]:
    """(mesh, group) with all ranks along dp."""
    mesh = Mesh({"dp": dist.get_world_size() if dist.is_initialized() else 1}, CPU, Ledger())
    return mesh, mesh["dp"]


def taken(mesh: Mesh, what: str = "traffic") -> dict[str, float]:
    """Bytes sent (or "calls") over dp since the last call, by operation."""
    return {name.strip(): amount for name, amount in mesh.ledger.take()[what].get("dp", {}).items()}


def config_of(stage: int, **flags: Any) -> step03.Config:
    """A run's flags."""
    return step03.Config(**SMALL | dict(zero=stage) | flags)


# --- task 1: slices --------------------------------------------------------------------------------------------------


def cut_on_rank(n: int, *sizes: int) -> dict:
    """`Unit.cut` on each of n ranks, one after another, of a slice that holds its places in the flat buffer."""
    found = {}
    for rank in range(n):
        group = Group("dp", CPU, Ledger(), rank, n)
        named = {f"p{i}": nn.Parameter(torch.zeros(size, dtype=torch.float64)) for i, size in enumerate(sizes)}
        unit = step03.Unit(named, group, config_of(1, optimizer="sgd"), Homes())
        part = torch.arange(rank * unit.length, (rank + 1) * unit.length)
        pieces = {name: unit.cut(part, name) for name in named}
        found |= {f"rank {rank}'s elements of {name}": piece for name, piece in pieces.items()}
        found[f"pieces on rank {rank} that are copies"] = [
            name for name, p in pieces.items() if len(p) and p.untyped_storage()._cdata != part.untyped_storage()._cdata
        ]
    return found


def cut_case(bench: Bench) -> tuple[int, ...]:
    """(ranks, elements of the parameters): a large one over several ranks, and padding at the end."""
    draw = bench.draws()
    n = draw.randint(3, 5)
    sizes = [draw.randint(1, 6) for _ in range(4)]
    sizes.insert(draw.randint(0, 4), n * draw.randint(4, 6))
    sizes[-1] += sum(sizes) % n == 0
    return n, *sizes


def cut(bench: Bench):
    """Every element of every parameter, on one rank."""
    n, *sizes = case = cut_case(bench)
    run, expected = bench.ranks(1, cut_on_rank, *case), {}
    length = -(-sum(sizes) // n)
    for rank in range(n):
        for i, size in enumerate(sizes):
            start = sum(sizes[:i])
            inside = [at for at in range(start, start + size) if rank * length <= at < (rank + 1) * length]
            expected[f"rank {rank}'s elements of p{i}"] = torch.tensor(inside, dtype=torch.int64)
        expected[f"pieces on rank {rank} that are copies"] = []
    bench.same(run, lambda r: expected)


def units_on_rank(layers: int, tied: bool, special: int) -> dict:
    """The units of a decoder, in one of whose layers the MLP has other replicas, sorted."""
    mesh = Mesh({"dp": 1, "other": 1}, CPU, Ledger())
    with torch.device("meta"):
        model = Decoder(ModelConfig(8, layers, 2, 1, 12, vocab_size=11, seq_len=4, tied=tied))
    for param in model.model.layers[str(special)].mlp.parameters():
        param.parallel_layout = Layout(replicas="other")
    return {"the units": sorted(sorted(unit) for unit in step03.group_into_units(model, mesh))}


def units(bench: Bench):
    """A unit for each layer, one for the embedding, one for norm and head; others apart."""
    draw = bench.draws()
    layers, tied, special = draw.randint(11, 13), draw.random() < 0.5, draw.randint(1, 10)
    block = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    norms, expected = ["input_layernorm", "post_attention_layernorm"], [["model.embed_tokens.weight"]]
    for i in range(layers):
        name = f"model.layers.{i}.{{}}.weight".format
        first = [name(norms[0]), *map(name, block), name(norms[1])]
        expected += [first, [*map(name, mlp)]] if i == special else [[*first, *map(name, mlp)]]
    expected.append(["model.norm.weight"] if tied else ["model.norm.weight", "lm_head.weight"])
    run = bench.ranks(1, units_on_rank, layers, tied, special)
    bench.same(run, lambda r: {"the units": sorted(map(sorted, expected))})


# --- task 2: gather and free -----------------------------------------------------------------------------------------


def gather_on_rank(seed: int, n: int, *sizes: int) -> dict:
    """A unit of stage 3 that is gathered and freed twice, with other slices the second time; and one of stage 1."""
    mesh, group = here()
    named = {f"p{i}": nn.Parameter(numbers(seed, f"p{i}", size)) for i, size in enumerate(sizes)}
    unit = step03.Unit(named, group, config_of(3, optimizer="sgd"), Homes())
    found = {"bytes of `flat` after the beginning": unit.flat.untyped_storage().nbytes()}
    for turn in (1, 2):
        unit.gather()
        found[f"turn {turn}: under way after `gather`"] = unit.pending is not None
        unit.gather()
        unit.ready()
        unit.ready()
        found[f"turn {turn}: bytes sent"] = taken(mesh)
        found[f"turn {turn}: under way after `ready`"] = unit.pending is not None
        found |= {f"turn {turn}: {name}": param.detach().clone() for name, param in named.items()}
        unit.free()
        unit.free()
        found[f"turn {turn}: bytes of `flat` after `free`"] = unit.flat.untyped_storage().nbytes()
        unit.slice.mul_(3)
    unit.gather()
    unit.free()
    found["freed while under way: bytes of `flat`, and whether something is under way"] = [
        unit.flat.untyped_storage().nbytes(),
        unit.pending is not None,
    ]
    taken(mesh)
    whole = step03.Unit(named_again(seed, sizes), group, config_of(1, optimizer="sgd"), Homes())
    whole.gather()
    whole.ready()
    return found | {"sent by `gather` in stage 1": taken(mesh)}


def named_again(seed: int, sizes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    """The same parameters, new."""
    return {f"p{i}": nn.Parameter(numbers(seed, f"p{i}", size)) for i, size in enumerate(sizes)}


def gather_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, elements of the parameters)."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.choice((2, 3)), *(draw.randint(2, 9) for _ in range(3))


def gather_values(bench: Bench):
    """The parameters are there, and are what the slices are now."""
    seed, n, *sizes = case = gather_case(bench)
    run, expected = bench.ranks(n, gather_on_rank, *case), {}
    for turn in (1, 2):
        expected |= {
            f"turn {turn}: p{i}": numbers(seed, f"p{i}", size) * 3 ** (turn - 1) for i, size in enumerate(sizes)
        }
    bench.same(run, lambda r: expected)


def gather_once(bench: Bench):
    """One gathering, started and not waited for; none of what is there."""
    _, n, *sizes = case = gather_case(bench)
    run, expected = bench.ranks(n, gather_on_rank, *case), {"sent by `gather` in stage 1": {}}
    for turn in (1, 2):
        expected[f"turn {turn}: under way after `gather`"] = True
        expected[f"turn {turn}: under way after `ready`"] = False
        expected[f"turn {turn}: bytes sent"] = {"all_gather": (n - 1) * -(-sum(sizes) // n) * 8}
    bench.same(run, lambda r: expected)


def gather_freed(bench: Bench):
    """No byte of `flat` is left."""
    case = gather_case(bench)
    expected: dict[str, Any] = {f"turn {turn}: bytes of `flat` after `free`": 0 for turn in (1, 2)}
    expected["bytes of `flat` after the beginning"] = 0
    expected["freed while under way: bytes of `flat`, and whether something is under way"] = [0, False]
    bench.same(bench.ranks(case[1], gather_on_rank, *case), lambda r: expected)


# --- task 3: the update of a slice -----------------------------------------------------------------------------------


def update_on_rank(seed: int, n: int, rows: int, columns: int, tail: int) -> dict:
    """Three updates of a unit in all stages in fp64, and in stages 1 and 3 in bf16."""
    mesh, group = here()
    found = {}
    for stage, dtype in ((1, "fp64"), (2, "fp64"), (3, "fp64"), (1, "bf16"), (3, "bf16")):
        mode, config = f"stage {stage} in {dtype}: ", config_of(stage, optimizer="adamw")
        named = update_parameters(seed, rows, columns, tail, dtype)
        unit = step03.Unit(named, group, config, Homes())
        update = step03.SliceUpdate([unit], config, Homes())
        for step in range(3):
            flat = torch.cat([numbers(seed, f"g{step} {name}", *p.shape).flatten() for name, p in named.items()])
            padded = torch.zeros(unit.length * n, dtype=torch.float64)
            padded[: len(flat)] = flat
            unit.grad_slice = padded[unit.first : unit.first + unit.length].to(unit.wide)
            update.step(0.1 / (step + 1), 0.5)
            found[f"{mode}under way after the step"] = unit.pending is not None
            unit.ready()
        found[f"{mode}bytes sent in three steps"] = taken(mesh)
        unit.gather()
        unit.ready()
        found |= {f"{mode}{name}": param.detach().double() for name, param in named.items()}
        taken(mesh)
    return found


def update_parameters(seed: int, rows: int, columns: int, tail: int, dtype: str) -> dict[str, nn.Parameter]:
    """A matrix, a norm and a matrix."""
    shapes = {"matrix": (rows, columns), "norm": (columns,), "tail": (1, tail)}
    narrow = {"fp64": torch.float64, "bf16": torch.bfloat16}[dtype]
    return {name: nn.Parameter(numbers(seed, name, *shape).to(narrow)) for name, shape in shapes.items()}


def update_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, rows, columns, elements of the last): the last rank may have little more than padding."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.choice((2, 3)), draw.randint(2, 5), draw.randint(3, 6), draw.randint(1, 3)


def updated_whole(case: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
    """PyTorch's AdamW on whole parameters, in fp64 (bf16: on fp32 masters, then rounded)."""
    seed, _, *sizes = case
    named = update_parameters(seed, *sizes, dtype)
    wide = torch.float64 if dtype == "fp64" else torch.float32
    masters = {name: p.detach().to(wide).requires_grad_() for name, p in named.items()}
    groups = [dict(params=[p], weight_decay=0.1 * (p.dim() > 1)) for p in masters.values()]
    rule = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    for step in range(3):
        for name, master in masters.items():
            master.grad = numbers(seed, f"g{step} {name}", *master.shape).to(wide) * 0.5
        for group in rule.param_groups:
            group["lr"] = 0.1 / (step + 1)
        rule.step()
    return {name: master.detach().to(named[name].dtype).double() for name, master in masters.items()}


def update_values(bench: Bench):
    """All stages, in fp64."""
    case = update_case(bench)
    run, right = bench.ranks(case[1], update_on_rank, *case), updated_whole(case, "fp64")
    for stage in (1, 2, 3):
        expected = {f"stage {stage} in fp64: {name}": value for name, value in right.items()}
        bench.same(run, lambda r, expected=expected: expected)


def update_masters(bench: Bench):
    """In bf16, of fp32 masters."""
    case = update_case(bench)
    run, right = bench.ranks(case[1], update_on_rank, *case), updated_whole(case, "bf16")
    for stage in (1, 3):
        expected = {f"stage {stage} in bf16: {name}": value for name, value in right.items()}
        bench.same(run, lambda r, expected=expected: expected, bound=5e-3)


def update_bytes(bench: Bench):
    """Stages 1 and 2 start one gathering; stage 3 sends nothing."""
    case = update_case(bench)
    _, n, rows, columns, tail = case
    length = -(-(rows * columns + columns + tail) // n)
    run, expected = bench.ranks(n, update_on_rank, *case), {}
    for stage, dtype, e in ((1, "fp64", 8), (2, "fp64", 8), (3, "fp64", 8), (1, "bf16", 2)):
        sent = {"all_gather": 3 * (n - 1) * length * e} if stage < 3 else {}
        expected[f"stage {stage} in {dtype}: bytes sent in three steps"] = sent
        expected[f"stage {stage} in {dtype}: under way after the step"] = stage < 3
    bench.same(run, lambda r: expected)


# --- task 4: gradients that become slices ----------------------------------------------------------------------------


def reduce_on_rank(seed: int, n: int, micro_batches: int) -> dict:
    """Backward passes of two steps in all stages; the last micro-batch does not use the head."""
    mesh, group = here()
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        mode, model = f"stage {stage}: ", small_model(seed)
        optimizer = step03.ZeroOptimizer(model, config_of(stage, optimizer="sgd"), mesh, torch.float64, Homes())
        for step in (1, 2):
            optimizer.begin()
            taken(mesh)
            waiting = []
            for i in range(micro_batches):
                if i + 1 == micro_batches:
                    optimizer.last_micro_batch()
                loss_of(model, seed, n, group.rank, step, i, i + 1 < micro_batches).backward()
                waiting.append(bytes_of([u.gradient for u in optimizer.units] + [p.grad for p in model.parameters()]))
            optimizer.finish()
            sent = taken(mesh)
            found[f"{mode}bytes reduced in step {step}"] = sent.get("reduce_scatter", 0)
            found[f"{mode}operations that sum"] = sorted(sent.keys() - {"all_gather"})
            found[f"{mode}bytes of whole gradients after each micro-batch"] = waiting
            for unit in optimizer.units:
                for name in unit.trained:
                    found[f"{mode}step {step}: the own part of the gradient of {name}"] = unit.cut(
                        unit.grad_slice, name
                    )
            optimizer.zero_grad()
        if stage == 3:
            found["stage 3: bytes of gathered weights after the step"] = sum(
                unit.flat.untyped_storage().nbytes() for unit in optimizer.units
            )
    return found


def small_model(seed: int) -> Decoder:
    """A decoder in fp64 whose gradients are summed over dp."""
    with torch.device("meta"):
        model = Decoder(SHAPE)
    note_gradient_sum(model.parameters(), "dp")
    materialize(model, seed, CPU, torch.float64)
    return model


def loss_of(model: Decoder, seed: int, n: int, rank: int, step: int, micro_batch: int, head: bool) -> Tensor:
    """A loss of drawn tokens, of the head or of the hidden states alone."""
    key = f"{rank} {step} {micro_batch}"
    tokens = numbers(seed, f"tokens {key}", 2, SHAPE.seq_len).abs().mul(1e6).long() % SHAPE.vocab_size
    hidden = model(tokens)
    return model.lm_head.loss(hidden, tokens.flip(0)) if head else (hidden * numbers(seed, key, *hidden.shape)).sum()


def reduce_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, micro-batches)."""
    draw = bench.draws()
    return draw.randrange(1000), draw.choice((2, 3)), draw.choice((2, 3))


def whole_gradients(seed: int, n: int, micro_batches: int) -> dict[int, dict[str, Tensor]]:
    """By step: the sum over all ranks and micro-batches, in one process."""
    found = {}
    for step in (1, 2):
        model = small_model(seed)
        for rank in range(n):
            for i in range(micro_batches):
                loss_of(model, seed, n, rank, step, i, i + 1 < micro_batches).backward()
        found[step] = {name: param.grad for name, param in model.named_parameters()}
    return found


Units = list[tuple[int, dict[str, tuple[int, int]]]]


def units_of(sizes: dict[str, int], n: int) -> Units:
    """By unit: (elements of a slice, by name the places of the parameters in the flat buffer)."""
    layers = {name.split(".")[2] for name in sizes if ".layers." in name}
    kinds = ["model.embed_tokens", *(f"model.layers.{i}." for i in range(len(layers)))]
    names = list(sizes.items())
    found, rest = [], [(name, size) for name, size in names if not name.startswith(tuple(kinds))]
    for unit in [[entry for entry in names if entry[0].startswith(kind)] for kind in kinds] + [rest]:
        ends = [sum(size for _, size in unit[:i]) for i in range(len(unit) + 1)]
        found.append((-(-ends[-1] // n), dict(zip([name for name, _ in unit], pairwise(ends), strict=True))))
    return found


def sizes_of(shape: ModelConfig) -> dict[str, int]:
    """Elements of each parameter of a decoder."""
    with torch.device("meta"):
        return {name: param.numel() for name, param in Decoder(shape).named_parameters()}


def own_parts(gradients: dict[str, Tensor], n: int, rank: int) -> dict[str, Tensor]:
    """What lies in a rank's slices."""
    found = {}
    for length, places in units_of({name: g.numel() for name, g in gradients.items()}, n):
        for name, (start, stop) in places.items():
            inside = slice(max(rank * length - start, 0), max(min((rank + 1) * length, stop) - start, 0))
            found[name] = gradients[name].flatten()[inside]
    return found


def reduce_stage(bench: Bench, *stages: int):
    """The slices of some stages."""
    case = reduce_case(bench)
    run, right = bench.ranks(case[1], reduce_on_rank, *case), whole_gradients(*case)
    for stage in stages:
        for step in (1, 2):

            def expected(r: int, stage: int = stage, step: int = step) -> dict:
                text = f"stage {stage}: step {step}: the own part of the gradient of "
                return {text + name: part for name, part in own_parts(right[step], case[1], r).items()}

            bench.same(run, expected)


def reduce_once(bench: Bench):
    """Stage 1."""
    reduce_stage(bench, 1)


def reduce_often(bench: Bench):
    """Stages 2 and 3."""
    reduce_stage(bench, 2, 3)


def reduce_bytes(bench: Bench):
    """Stage 1 sends each gradient once, 2 and 3 with every micro-batch that has completed it."""
    _, n, m = case = reduce_case(bench)
    lengths = [length for length, _ in units_of(sizes_of(SHAPE), n)]
    run, unit = bench.ranks(n, reduce_on_rank, *case), 8 * (n - 1)
    for stage in (1, 2, 3):
        expected = {f"stage {stage}: operations that sum": ["reduce_scatter"]}
        for step in (1, 2):
            expected[f"stage {stage}: bytes reduced in step {step}"] = unit * sum(lengths) * (1 if stage == 1 else m)
        bench.same(run, lambda r, expected=expected: expected)


def reduce_memory(bench: Bench):
    """Stages 2 and 3 have no whole gradient after a backward pass, but of what it has not completed."""
    _, n, m = case = reduce_case(bench)
    run = bench.ranks(n, reduce_on_rank, *case)
    last = 8 * n * units_of(sizes_of(SHAPE), n)[-1][0]  # norm and head: the head is not used
    for stage in (2, 3):
        expected = {f"stage {stage}: bytes of whole gradients after each micro-batch": [0] * (m - 1) + [last]}
        bench.same(run, lambda r, expected=expected: expected)
    bench.same(run, lambda r: {"stage 3: bytes of gathered weights after the step": 0})


def trains_with(bench: Bench, size: int, *stages: int):
    """Two steps of three micro-batches are one device's."""
    draw = bench.draws()
    base = RUN | dict(seed=draw.randrange(1000), tied=draw.random() < 0.5, optimizer="sgd", n_layers=1, steps=2)
    base |= dict(micro_batch_size=1, global_batch_size=3 * size)
    for stage in stages:
        training.equal_to_one_device(bench, "step03_zero", size, base, dict(zero=stage))


def reduce_trains(bench: Bench):
    """--zero 1 and 2."""
    trains_with(bench, 2, 1, 2)


# --- task 5: stage 3 -------------------------------------------------------------------------------------------------


def stage_3_on_rank(seed: int, n: int, layers: int) -> dict:
    """Two micro-batches in stage 3: which modules' weights are there while each layer computes, bytes and values."""
    mesh, group = here()
    with torch.device("meta"):
        model = Decoder(deep(layers))
    note_gradient_sum(model.parameters(), "dp")
    optimizer = step03.ZeroOptimizer(model, config_of(3, optimizer="sgd"), mesh, torch.float64, Homes())
    there: list[list[int]] = []

    def note(*_: Any):
        there.append([i for i, use in enumerate(optimizer.uses) if all(unit.gathered for unit in use)])

    def note_backward(_module: nn.Module, _inputs: tuple, output: Tensor):
        output.register_hook(note)

    for layer in model.model.layers.values():
        layer.mlp.register_forward_pre_hook(note)
        layer.mlp.register_forward_hook(note_backward)
    found: dict[str, Any] = {}
    optimizer.begin()
    for i in (1, 2):
        if i == 2:
            optimizer.last_micro_batch()
        there.clear()
        taken(mesh)
        tokens = deep_tokens(seed, group.rank, i)
        found[f"micro-batch {i}: the loss"] = loss = model.lm_head.loss(model(tokens), tokens.flip(0))
        found[f"micro-batch {i}, forward: {THERE}"] = [*there]
        there.clear()
        loss.backward()
        found[f"micro-batch {i}, backward: {THERE}"] = [*there]
        found[f"micro-batch {i}: bytes gathered"] = taken(mesh).get("all_gather", 0)
    optimizer.finish()
    return found | {f"the own part of the gradient of {name}": part for name, part in optimizer.gradients().items()}


THERE = "modules whose weights are there (0: the embedding), layer by layer"


def deep(layers: int) -> ModelConfig:
    """The shape of task 5."""
    return ModelConfig(8, layers, 2, 1, 12, vocab_size=11, seq_len=4)


def deep_tokens(seed: int, rank: int, micro_batch: int) -> Tensor:
    """int64 [batch, seq]."""
    return numbers(seed, f"tokens {rank} {micro_batch}", 2, 4).abs().mul(1e6).long() % 11


def stage_3_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, layers)."""
    draw = bench.draws()
    return draw.randrange(1000), draw.choice((2, 3)), draw.randint(3, 5)


def stage_3_values(bench: Bench):
    """Losses, and slices of the gradient: weights were there, and were the right ones."""
    seed, n, layers = case = stage_3_case(bench)
    with torch.device("meta"):
        model = Decoder(deep(layers))
    materialize(model, SMALL.get("seed", 0), CPU, torch.float64)
    losses: dict[tuple[int, int], Tensor] = {}
    for rank in range(n):
        for i in (1, 2):
            tokens = deep_tokens(seed, rank, i)
            losses[rank, i] = model.lm_head.loss(model(tokens), tokens.flip(0))
            losses[rank, i].backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}

    def expected(r: int) -> dict:
        found = {f"micro-batch {i}: the loss": losses[r, i].detach() for i in (1, 2)}
        parts = own_parts(gradients, n, r)
        return found | {f"the own part of the gradient of {name}": part for name, part in parts.items()}

    bench.same(bench.ranks(n, stage_3_on_rank, *case), expected)


def stage_3_memory(bench: Bench):
    """The module at work and its neighbour, no more and no less."""
    _, n, layers = case = stage_3_case(bench)
    forward = [[i, i + 1] for i in range(1, layers + 1)]
    backward = [[i - 1, i] for i in range(layers, 1, -1)] + [[1]]
    expected = {f"micro-batch {i}, {way}: {THERE}": right for i in (1, 2)
                for way, right in (("forward", forward), ("backward", backward))}  # fmt: skip
    bench.same(bench.ranks(n, stage_3_on_rank, *case), lambda r: expected)


def stage_3_bytes(bench: Bench):
    """Layers are gathered twice in a micro-batch, embedding and head once."""
    _, n, layers = case = stage_3_case(bench)
    lengths = [length for length, _ in units_of(sizes_of(deep(layers)), n)]
    sent = 8 * (n - 1) * (lengths[0] + 2 * sum(lengths[1:-1]) + lengths[-1])
    run = bench.ranks(n, stage_3_on_rank, *case)
    bench.same(run, lambda r: {f"micro-batch {i}: bytes gathered": sent for i in (1, 2)})


def stage_3_trains(bench: Bench):
    """--zero 3, also with a tied matrix."""
    trains_with(bench, 2, 3)


# --- task 6: the norm ------------------------------------------------------------------------------------------------


def norm_on_rank(seed: int, dp: int, tp: int, size: int, scale: float) -> dict:
    """global_norm of gradients that are cut over tp, alike on all or on some of its ranks; whole or sliced over dp."""
    mesh = Mesh({"dp": dp, "tp": tp}, CPU, Ledger())
    mesh.add_blocks(1)
    rank, found = mesh["tp"].rank, {}
    model = nn.Module()
    for name, (splits, _) in norm_records(size, rank, tp).items():
        param = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        param.parallel_layout = Layout(splits)
        model.register_parameter(name, param)
    for sliced in (False, True):
        for dtype in (torch.float64, torch.bfloat16):
            gradients = {}
            for name, (_, part) in norm_records(size, rank, tp).items():
                drawn = norm_gradient(seed, name, part, size, scale, dtype)
                gradients[name] = drawn[mesh["dp"].share(len(drawn))] if sliced else drawn
            optimizer = SimpleNamespace(model=model, gradients=lambda own=gradients: own, loss_scale=scale)
            mesh.ledger.take()
            name = f"sliced={sliced}, {dtype}: "
            found[f"{name}the norm"] = layout.global_norm(optimizer, mesh, ["tp"], sliced)
            found[f"{name}calls"] = {dim: sum(n.values()) for dim, n in mesh.ledger.take()["calls"].items()}
    return found


def norm_records(size: int, rank: int, tp: int) -> dict[str, tuple[tuple[Split, ...], int]]:
    """By parameter: its cuts, and which part this rank has. Cut, whole, and (tp 4) cut in two with two copies."""
    copies = tp // 2 if tp > 2 else 1
    parts = {"cut": (tp, 1), "whole": (1, 1), "heads": (tp // copies, copies)}
    found = {}
    for name, (number, times) in parts.items():
        part = rank // times if number > 1 else 0
        split = Split(0, "tp", part * size, (part + 1) * size, number * size, times)
        found[name] = ((split,) if number > 1 else (), part)
    return found


def norm_gradient(seed: int, name: str, part: int, size: int, scale: float, dtype: torch.dtype) -> Tensor:
    """One part of a gradient, times the loss scale."""
    return (numbers(seed, f"{name} {part}", size) * scale).to(dtype)


def norm_case(bench: Bench) -> tuple:
    """(seed, ranks along dp and tp, elements of a part, loss scale): four ranks."""
    draw = bench.draws()
    return draw.randrange(10**6), *draw.choice(((2, 2), (1, 4))), 4 * draw.randint(2, 9), float(draw.choice((8, 256)))


def whole_norm(case: tuple, dtype: torch.dtype) -> float:
    """Each part once."""
    seed, _, tp, size, scale = case
    parts = {(name, part) for rank in range(tp) for name, (_, part) in norm_records(size, rank, tp).items()}
    squares = [norm_gradient(seed, *part, size, scale, dtype).double().square().sum() for part in sorted(parts)]
    return float(sum(squares)) ** 0.5 / scale


def norm(bench: Bench, sliced: bool):
    """In both dtypes."""
    case = norm_case(bench)
    run = bench.ranks(4, norm_on_rank, *case)
    for dtype, bound in ((torch.float64, BOUND), (torch.bfloat16, IN_FP32)):
        right = whole_norm(case, dtype)
        bench.same(run, lambda r, d=dtype, w=right: {f"sliced={sliced}, {d}: the norm": w}, bound)


def norm_whole(bench: Bench):
    """Gradients alike on all ranks of dp."""
    norm(bench, False)


def norm_sliced(bench: Bench):
    """Each rank of dp with its slices."""
    norm(bench, True)


def norm_calls(bench: Bench):
    """One sum over each dimension."""
    case = norm_case(bench)
    expected = {}
    for sliced in (False, True):
        for dtype in (torch.float64, torch.bfloat16):
            expected[f"sliced={sliced}, {dtype}: calls"] = {"tp": 1} | ({"dp": 1} if sliced and case[1] > 1 else {})
    bench.same(bench.ranks(4, norm_on_rank, *case), lambda r: expected)


# --- the file as it stands -------------------------------------------------------------------------------------------


def picture_run() -> dict:
    """Runs on every rank: losses and bytes sent with --zero 3; in every stage, bytes held by kind."""
    memory = {}
    for stage in range(4):
        kinds: dict[str, int] = {}

        def observe(_: int, optimizer: Any, kinds: dict[str, int] = kinds):
            kinds |= {kind: bytes_of(tensors) for kind, tensors in held(optimizer, False).items()}

        with without_instruments():
            step03.train(step03.Config(**SMALL | RUN | dict(zero=stage, dtype="bf16", out=f"stage{stage}")), observe)
        memory[str(stage)] = kinds
    return training.pictured("step03_zero", json.dumps(RUN | WHOLE[1])) | dict(memory=memory)


def memory(runs: list[dict]) -> Any:
    """A figure: what rank 0 holds before the update, by stage."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.5))
    bottom, stages = [0.0] * 4, list(runs[0]["memory"])
    for kind in ("parameters", "gradients", "masters", "moments"):
        sizes = [runs[0]["memory"][stage].get(kind, 0) / 1e3 for stage in stages]
        axis.bar([f"stage {stage}" for stage in stages], sizes, bottom=bottom, label=kind)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    axis.set(ylabel="kB", title=f"what rank 0 of {len(runs)} holds before the update, bf16")
    axis.legend()
    return figure


PICTURES = [memory]
