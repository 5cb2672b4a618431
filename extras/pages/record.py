"""Records the numbers that the pictures show: four ranks run the course's own code on a small
model.

A recording is one rank's part of a table, in all states of the table: dict(text, states=[(text,
{row: [cell]})], curve={kind: a number for each state}); `curve` may be missing. A cell is a list of
texts and chips. A chip (a box) is [label, colour, style]; style: "" (present), "gone" (absent),
"way" (under way).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import step01_single_gpu as step01
import step02_ddp as step02
import step03_zero as step03
import step04_tp_sp as step04
import step07_moe_ep as step07
from common.comm import Mesh
from common.model import MLP, PRESETS, Decoder, ModelConfig
from common.run import Run
from extras.tools.memory import Memory
from tests.pool import Pool

RANKS = 4
SMALL = ModelConfig(
    dim=16, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=32, vocab_size=257, seq_len=16
)
FLAGS = dict(
    model="picture",
    micro_batch_size=1,
    steps=1,
    warmup_steps=0,
    device="cpu",
    dtype="fp32",
    dataset=str(Path(step01.__file__).with_name("requirements-lock.txt")),
)
UNITS = {"E": "embedding", "0": "layer 0", "1": "layer 1", "H": "head with norm"}
WAYS = ("forward", "backward")


def brief(name: str) -> str:
    """Shorten a parameter's name so that it fits into a small box: "0.q_proj"."""
    return re.sub(r"model\.(layers\.)?|(self_attn|mlp)\.|_layernorm|\.weight", "", name)


class Film(Run):
    """Runs a step's `train` on the small model, and records `rows(film)` as a state after each
    event.

    Events: a unit starts its forward or backward; autograd has added to a parameter's gradient;
    gradients are summed; the update is made; gradients are freed. `starts` counts the starts of
    units by (unit, direction). `arrived`: the parameters whose gradients have arrived.
    """

    def __init__(self, step: ModuleType, rows: Callable[["Film"], dict], **flags: Any):
        super().__init__(step.Config(**FLAGS | flags))
        self.is_rank_0 = False  # no files, no screen
        self.rows = rows
        self.states: list[tuple[str, dict]] = []
        self.curve: dict[str, list[int]] = defaultdict(list)  # by kind: bytes in each state
        self.starts: Counter = Counter()
        self.arrived: set[nn.Parameter] = set()
        with Memory() as self.memory:
            step.train(self.config, self)

    def steps(self, **parts: Any) -> Iterator[int]:
        """Add hooks to the model and to torch's optimizer, which run after those of the step
        itself.

        Nothing is restored, saved or compared with other ranks.
        """
        self.model: Decoder = parts["model"]
        self.optimizer = parts["optimizer"]
        self.sync = parts.get("sync")
        layers = self.model.model.layers.values()
        modules = (self.model.model.embed_tokens, *layers, self.model.lm_head)
        for unit, module in zip(UNITS, modules, strict=True):
            module.register_forward_pre_hook(partial(self.start, unit, "forward"))
            module.register_full_backward_pre_hook(partial(self.start, unit, "backward"))
        for name, param in self.model.named_parameters():
            param.register_post_accumulate_grad_hook(partial(self.arrive, name))
        self.optimizer.torch_optimizer.register_step_post_hook(
            lambda *_: self.tell("The update is made.")
        )
        yield from range(self.config.steps)

    def start(self, unit: str, way: str, *_: Any):
        """Hook: a unit starts its forward or its backward."""
        self.starts[unit, way] += 1
        self.tell(f"{way.capitalize()} of {UNITS[unit]}.")

    def arrive(self, name: str, param: nn.Parameter):
        """Hook: autograd has added to a parameter's gradient."""
        self.arrived.add(param)
        self.tell(f"The gradient of {brief(name)} has arrived.")

    def require_finite(self, step: int, **numbers: float):
        """Called when gradients are complete."""
        self.tell("Gradients are complete.")

    def record(self, step: int, tokens: int, **numbers: float):
        """Called at the end of a training step."""
        self.history.append(numbers)
        self.tell("Gradients are freed.")

    def tell(self, text: str):
        """Record an event, which `text` describes, and the state after it."""
        rows = self.rows(self)
        if rows:
            self.states.append((text, rows))
            self.memory.label_training(self.model, self.optimizer)
            for kind, nbytes in self.memory.held().items():
                self.curve[kind].append(nbytes)


def accumulation(dtype: str, recompute: str) -> dict:
    """Step 1: record a training step of three micro-batches, and the bytes in memory by kind."""

    def rows(film: Film) -> dict:
        table = {}
        for colour, way in enumerate(WAYS):
            cells = [[], [], []]  # of the micro-batches
            for i, chips in enumerate(cells):
                for unit in UNITS:
                    has_begun = film.starts[unit, way] > i
                    chips.append([unit, colour, "" if has_begun else "gone"])
            table[way] = cells
        return table

    film = Film(step01, rows, global_batch_size=3, dtype=dtype, recompute=recompute)
    text = "E embedding, 0 and 1 layers, H norm and head. Bars: bytes in memory, moment by moment."
    return dict(text=text, states=film.states, curve=film.curve)


def buckets() -> dict:
    """Step 2: record how buckets fill and are sent during backward. Rank 0 also shows its
    gradients.
    """

    def rows(film: Film) -> dict:
        table = {}
        names = {param: brief(name) for name, param in film.model.named_parameters()}
        for i, bucket in enumerate(film.sync.buckets):
            flying = any(pending.works for pending in film.sync.pending[i : i + 1])
            gradients = []
            for param in bucket.params:
                here = "way" if flying else ""
                gradients.append([names[param], i, here if param in film.arrived else "gone"])
            number = ["under way" if flying else f"{bucket.flat.sum():.4f}"]
            left = [gradients] if dist.get_rank() == 0 else []
            table[f"bucket {i}, {bucket.flat.nbytes:,} bytes"] = [*left, number]
        return table

    film = Film(step02, rows, global_batch_size=RANKS, bucket_mb=8 / 1024)
    text = "Left: rank 0's gradients, in the order of backward. Right: the sum of all numbers of a "
    return dict(text=text + "bucket's buffer.", states=film.states)


def shards(own: str, others: str) -> list:
    """A cell with a box for each rank's shard. `own`, `others`: styles of ours and of the other
    ones.
    """
    boxes = []
    for rank in range(RANKS):
        boxes.append([str(rank), rank, own if rank == dist.get_rank() else others])
    return [boxes]


def held(stage: int, sync: step03.Zero1, unit: step03.Unit) -> dict[str, list]:
    """Which shards of a unit this rank has now: weights, gradient, summed gradient, optimizer."""
    whole = shards("", "")
    own = shards("", "gone")
    gone = shards("gone", "gone")
    under_way = shards("way", "way")
    weights = whole
    if stage == 3 and unit.gathering is None:
        weights = own
    elif stage == 3 and unit.gathering.works:
        weights = under_way
    gradient = gone if unit.local_grad is None else whole
    sending = [each for each, *_ in sync.in_flight]
    if unit in sending:
        gradient = under_way
    summed = gone if unit.summed_grad is None and unit not in sending else own
    return dict(weights=weights, gradient=gradient, summed=summed, optimizer=own)


def zero(stage: int) -> dict:
    """Step 3: record the second training step of `--zero stage`; the first creates the moments."""

    def rows(film: Film) -> dict:
        table: dict[str, list] = {}
        if film.history:
            for name, unit in zip(UNITS.values(), film.optimizer.units, strict=True):
                for kind, cells in held(stage, film.sync, unit).items():
                    table[f"{name}: {kind}"] = cells
        return table

    film = Film(step03, rows, global_batch_size=RANKS, steps=2, zero=str(stage), dtype="bf16")
    text = "A box is a shard, with the number of the rank that updates it. Empty: absent. Dashed: "
    text += "under way. Gradient: of the rank's own tokens; summed: over all ranks. Weights are "
    text += "bf16; the optimizer has masters and two moments. Bars: bytes on rank 0, by moment."
    return dict(text=text, states=film.states, curve=film.curve)


PLACES = {  # step 4: a moment of a block -> what x is there, by --sp
    "between blocks": "x between the blocks, where norms and residual sums are",
    "after f": "after f: all tokens, whole",
    "after the columns": "after q, k and v, or gate and up: this rank's columns",
    "before g": "after o_proj or down_proj, before g: a term of the sum",
    "after g": "after g: the sum",
}
ROUTES = {
    "experts here": "The experts of each rank.",
    "sorted": "Sorted: a row for each choice of a token, in the order of the experts.",
    "received": "Received: the rows are on the experts' ranks, sorted by expert.",
    "returned": "Returned: the outputs are back, in the order in which the rows left.",
}


def one_by_one(texts: dict[str, str], rows: dict[str, list]) -> list[tuple[str, dict]]:
    """States of a table: in each of them, one more row is filled. `texts`: row -> the state's."""
    states = []
    table = {name: [[]] for name in texts}
    for name, text in texts.items():
        table = table | {name: rows[name]}
        states.append((text, table))
    return states


def pass_through(mlp: MLP, x: Tensor) -> dict[str, Tensor]:
    """What is at each of PLACES when x passes through an MLP."""
    seen = {"between blocks": x}

    def columns(module: nn.Module, inputs: tuple, y: Tensor):
        seen["after f"] = inputs[0]
        seen["after the columns"] = y

    def rows(module: nn.Module, inputs: tuple, y: Tensor):
        seen["before g"] = y

    mlp.gate_proj.register_forward_hook(columns)
    mlp.down_proj.register_forward_hook(rows)
    with torch.no_grad():
        seen["after g"] = mlp(x)
    return seen


def block(sp: bool) -> dict:
    """Step 4: record which tokens and channels a rank has at each place of an MLP, forward.

    "Partial" is recorded by comparing a rank's numbers with those of one device.
    """
    mesh = Mesh(dp=1, tp=RANKS)
    with torch.device("meta"):
        model = Decoder(SMALL)
        whole = Decoder(SMALL)
    step04.shard_tensors(model, mesh, sp)
    for each in (model, whole):
        step01.materialize(each, 0, torch.device("cpu"), torch.float64)
    x = torch.randn(1, 16, SMALL.dim, generator=torch.Generator().manual_seed(1)).double()
    expected = pass_through(whole.model.layers["0"].mlp, x)
    own_x = x.chunk(RANKS, 1)[mesh.rank] if sp else x
    found = pass_through(model.model.layers["0"].mlp, own_x)
    rows = {}
    for place, tensor in found.items():
        rows[place] = [[f"{kind_of(tensor, expected[place])} {list(tensor.shape)}"]]
    text = "An MLP of step 4 on four ranks, forward; x is [1, 16, 16], gate and up have 32 "
    text += "columns. Whole: as on one device. Shard: a part of that. Partial: a term, and the "
    text += "ranks' terms sum to it."
    return dict(text=text, states=one_by_one(PLACES, rows))


def kind_of(found: Tensor, expected: Tensor) -> str:
    """Whether a rank's tensor is one device's tensor, a shard of it, or a term of a sum."""
    if found.shape != expected.shape:
        return "shard"
    if torch.allclose(found, expected):
        return "whole"
    total = found.clone()
    dist.all_reduce(total)
    assert torch.allclose(total, expected)
    return "partial"


def router(mesh: Mesh, ep: int) -> step07.MoE:
    """A layer of 4 experts, of which a token chooses 2. It does not look at a token's first
    element.
    """
    flags = FLAGS | dict(experts=4, experts_per_token=2, ep=ep, global_batch_size=1, balance="none")
    mesh.add_groups("ep", mesh.grid.reshape(-1, ep), queue="gradients")
    layer = step07.MoE(SMALL.dim, SMALL.ffn_dim, step07.Config(**flags), mesh)
    weight = layer.router.weight.data
    weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(2))
    weight[:, 0] = 0
    return layer


def chips_of(rows: Tensor, counts: Tensor, experts: range) -> list:
    """A cell with a box for each row of each expert, labelled with the expert and the token."""
    chips = []
    of_row = torch.tensor(experts).repeat_interleave(counts)
    for expert, token in zip(of_row.tolist(), rows[:, 0].int().tolist(), strict=True):
        chips.append([f"e{expert}:t{token}", token // 2, ""])
    return [chips]


def routing(mesh: Mesh, ep: int) -> dict:
    """Step 7: record a layer whose experts return their input. A rank has 2 tokens.

    A row is a token's vector. Its first element is the token's number, which identifies the row
    after it has been sent.
    """
    layer = router(mesh, ep)
    own_experts = range(mesh["ep"].rank * 4 // ep, (mesh["ep"].rank + 1) * 4 // ep)
    cells = {"experts here": [[", ".join(f"e{expert}" for expert in own_experts)]]}
    run_experts = layer.run_experts

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        cells["received"] = chips_of(rows, counts, own_experts)
        return rows

    def run_and_look(rows: Tensor, counts: Tensor) -> Tensor:
        """`MoE.run_experts`, with a look at the rows before and after."""
        cells["sorted"] = chips_of(rows, counts, range(4))
        returned = run_experts(rows, counts)
        cells["returned"] = chips_of(returned, counts, range(4))
        return returned

    layer.experts.forward = experts
    layer.run_experts = run_and_look
    x = torch.randn(RANKS, 2, SMALL.dim, generator=torch.Generator().manual_seed(3))
    x[..., 0] = torch.arange(2 * RANKS).view(RANKS, 2)
    with torch.no_grad():
        layer(x[mesh.rank : mesh.rank + 1])
    text = f"4 experts, {4 // ep} on a rank; groups of {ep} ranks. The colour is that of the rank "
    return dict(text=text + "whose token it is.", states=one_by_one(ROUTES, cells))


def seen() -> dict[str, dict[str, Any]]:
    """Make all recordings of a rank, by picture and frame ("fp32/none"). Step 1's: only rank 0."""
    PRESETS["picture"] = SMALL
    mesh = Mesh(dp=RANKS)
    one = product(("fp32", "bf16"), ("none", "full")) if mesh.rank == 0 else ()
    return dict(
        step={"/".join(choice): accumulation(*choice) for choice in one},
        buckets={"": buckets()},
        zero={str(stage): zero(stage) for stage in (1, 2, 3)},
        block={name: block(name == "sp") for name in ("sp", "no-sp")},
        routing={str(ep): routing(mesh, ep) for ep in (2, 4)},
    )


def recorded() -> list[dict[str, dict[str, Any]]]:
    """The recordings of all ranks."""
    pool = Pool(RANKS)
    try:
        return pool.run(seen, seconds=600.0)
    finally:
        pool.stop()
