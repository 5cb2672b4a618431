"""Records the numbers that the pictures show: four ranks run the course's own code on a small model.

`recorded()` forks four ranks, which use gloo. A recording is one rank's part of a table, in all states of the table:
dict(text, states=[(text, {row: [cell]})], curve={kind: a number for each state}); `curve` may be missing. A cell is a
list of texts and chips. A chip (a box) is [label, colour, style]; style: "" (here), "gone" (absent), "way" (under way).
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # before the fork: else an optimizer's first step imports it on each rank
import torch.distributed as dist
from torch import Tensor, nn

import step01_single_gpu as step01
import step02_ddp as step02
import step03_zero as step03
import step07_moe_ep as step07
from common.comm import Mesh
from common.model import PRESETS, ModelConfig
from common.trainer import Run
from extras.services.clocks import Clock
from extras.services.memory import KINDS, MemoryTimeline, MemoryWatch
from extras.variants import Parts

RANKS = 4
SMALL = ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=32, vocab_size=257, seq_len=16)
FLAGS = dict(model="picture", micro_batch_size=1, steps=1, warmup_steps=0, device="cpu", dtype="fp32")
FLAGS |= dict(dataset=str(Path(step01.__file__).with_name("requirements-lock.txt")))  # some text
UNITS = {"E": "embedding", "0": "layer 0", "1": "layer 1", "H": "head with norm"}
WAYS = ("forward", "backward")


def brief(name: str) -> str:
    """Shorten a parameter's name so that it fits into a small box: "0.q_proj"."""
    return re.sub(r"model\.(layers\.)?|(self_attn|mlp)\.|_layernorm|\.weight", "", name)


class Film:
    """Runs a course step's `train` on the small model, and records `rows(film)` as a state after each event.

    Events: a unit starts its forward or backward; autograd has added to a parameter's gradient; a collective starts; a
    unit's weights are freed; a method of the sync or the optimizer has returned. `passed` lists the starts of units as
    (unit, direction), and the names of methods that have returned. `here`: the parameters whose gradients have arrived.
    """

    def __init__(self, step: ModuleType, rows: Callable[["Film"], dict], **flags: Any):
        self.rows, self.config = rows, step.Config(**FLAGS | flags)
        self.states: list[tuple[str, dict]] = []
        self.curve: dict[str, list[int]] = defaultdict(list)  # by kind: bytes in each state
        self.passed: list[Any] = []
        self.here: set[nn.Parameter] = set()
        self.run = run = Run(self.config)
        run.first, steps = False, run.steps
        run.steps = lambda **parts: (self.attach(Parts(run, **parts)), steps(**parts))[1]
        run.count = lambda operation, *_: self.tell(f"{operation.replace('_', '-').capitalize()} starts.")
        with MemoryTimeline() as self.memory:
            step.train(self.config, run)

    def attach(self, parts: Parts):
        """Add hooks to the parts that the course step has built. These hooks run after those of the step itself."""
        self.parts, model = parts, parts.model
        self.watch = MemoryWatch(parts, self.memory, Clock(parts, host=True))
        units = zip(UNITS, (model.model.embed_tokens, *model.model.layers.values(), model.lm_head), strict=True)
        for unit, module in units:
            module.register_forward_pre_hook(lambda *_, unit=unit: self.reach(unit, "forward"))
            module.register_full_backward_pre_hook(lambda *_, unit=unit: self.reach(unit, "backward"))
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(partial(self.arrive, name))
        methods = [(parts.sync, "finish")] * (parts.sync is not None)
        for owner, method in (*methods, (parts.optimizer, "step"), (parts.optimizer, "zero_grad")):
            parts.around(owner, method, partial(self.follow, f"`{method}` returns.", method), by=__name__)
        for name, unit in zip(UNITS.values(), parts.units, strict=False):
            if hasattr(unit, "free"):
                parts.around(unit, "free", partial(self.follow, f"{name.capitalize()} is freed.", None), by=__name__)

    def reach(self, unit: str, way: str):
        """Hook: a unit starts its forward or its backward."""
        self.tell(f"{way.capitalize()} of {UNITS[unit]}.", (unit, way))

    def arrive(self, name: str, param: nn.Parameter):
        """Hook: autograd has added to a parameter's gradient."""
        self.here.add(param)
        self.tell(f"The gradient of {brief(name)} is here.")

    def follow(self, says: str, event: str | None, call: Callable, *args: Any):
        """Wrap a method: call it, then record `event`, which `says` describes."""
        call(*args)
        self.tell(says, event)

    def tell(self, says: str, event: Any = None):
        """Record an event, which `says` describes, and the state after it."""
        self.passed += [event] if event else []
        if rows := self.rows(self):
            self.watch.measure()  # labels all tensors in the timeline
            self.states.append((says, rows))
            for kind in KINDS:
                self.curve[kind].append(self.memory.total[kind])


def accumulation(dtype: str, recompute: str) -> dict:
    """Chapter 1: record a step of three micro-batches, and the bytes in memory by kind."""

    def rows(film: Film) -> dict:
        def style(i: int, *event: str) -> str:
            n = film.passed.count(event)
            return "gone" if n < i else "way" if n == i and film.passed[-1] == event else ""

        return {way: [[[u, k, style(i, u, way)] for u in UNITS] for i in (1, 2, 3)] for k, way in enumerate(WAYS)}

    film = Film(step01, rows, global_batch_size=3, dtype=dtype, recompute=recompute)
    text = "E embedding, 0 and 1 layers, H norm and head. Bars: bytes in memory, moment by moment."
    return dict(text=text, states=film.states, curve=film.curve)


def buckets() -> dict:
    """Chapter 2: record how buckets fill and are sent during backward. Rank 0 also shows its gradients."""

    def rows(film: Film) -> dict:
        sync, of = film.parts.sync, {}
        names = {param: brief(name) for name, param in film.parts.model.named_parameters()}
        for i, bucket in enumerate(sync.buckets):
            flying = i < len(sync.pending) and "finish" not in film.passed
            styles = ["gone" if param not in film.here else "way" if flying else "" for param in bucket.params]
            gradients = [[names[param], i, style] for param, style in zip(bucket.params, styles, strict=True)]
            number = ["under way" if flying else f"{bucket.flat.sum():.4f}"] if film.here & {*bucket.params} else []
            of[f"bucket {i}, {bucket.flat.nbytes:,} bytes"] = [gradients] * (dist.get_rank() == 0) + [number]
        return of

    film = Film(step02, rows, global_batch_size=RANKS, bucket_mb=8 / 1024)
    text = "Left: rank 0's gradients, in the order of backward. Right: the sum of all numbers of a bucket's buffer."
    return dict(text=text, states=film.states)


def zero(stage: int) -> dict:
    """Chapter 3: record the second step of `--zero stage`; the first step creates the moments. Each box is a shard."""

    def shards(own: str, others: str) -> list:
        return [[[str(r), r, own if r == dist.get_rank() else others] for r in range(RANKS)]]

    here, mine, gone, way = (shards(*styles) for styles in (("", ""), ("", "gone"), ["gone"] * 2, ["way"] * 2))

    def held(parts: Parts, unit: step03.Unit) -> dict[str, list]:
        weights, gradient = here, gone if unit.gradient is None else here
        if stage == 3 and not (unit.gathered and not unit.gathering.works):
            weights = way if unit.gathered else mine
        if stage >= 2 and parts.sync.in_flight is not None and parts.sync.in_flight[0] is unit:
            gradient = way
        summed = gone if unit.reduced_shard is None and unit.grad_shard is None else mine
        return dict(weights=weights, gradient=gradient, summed=summed, optimizer=mine)

    def rows(film: Film) -> dict:
        of: dict[str, list] = {}
        for name, unit in zip(UNITS.values(), film.parts.units if film.run.history else (), strict=False):
            of |= {f"{name}: {kind}": cells for kind, cells in held(film.parts, unit).items()}
        return of

    film = Film(step03, rows, global_batch_size=RANKS, steps=2, zero=stage, dtype="bf16")
    text = "A box is a shard, with the number of the rank that updates it. Empty: not here. Dashed: under way."
    text += " Gradient: of the rank's own tokens; summed: over all ranks. Weights are bf16; the optimizer has masters"
    text += " and two moments. Bars: bytes on rank 0, moment by moment."
    return dict(text=text, states=film.states, curve=film.curve)


ROUTES = {
    "sorted": "Sorted: a row for each choice of a token, in the order of the experts.",
    "there": "There: the all-to-all has brought the rows to the experts' ranks, where they are sorted by expert.",
    "home": "Home: the outputs are back, in the order in which the rows left.",
}


def routing(mesh: Mesh, ep: int) -> dict:
    """Chapter 7: record a layer of 4 experts that return their input. A rank has 2 tokens; a token chooses 2 experts.

    A row is a token's vector. Its first element is the token's number, which identifies the row after it has been sent.
    """
    config = step07.Config(**FLAGS | dict(experts=4, experts_per_token=2, ep=ep, global_batch_size=1))
    mesh.join("sequence", "dp")
    mesh.enter("ep", mesh.ranks.reshape(-1, ep))
    layer, generator = step07.MoE(SMALL.dim, SMALL.ffn_dim, config, mesh), torch.Generator().manual_seed(2)
    layer.router.weight.data.normal_(0.0, 0.3, generator=generator)[:, 0] = 0
    tokens = torch.randn(2 * mesh.world, SMALL.dim, generator=generator)
    tokens[:, 0] = torch.arange(len(tokens))
    rows, here = {}, range(mesh["ep"].rank * 4 // ep, (mesh["ep"].rank + 1) * 4 // ep)  # our experts

    def show(name: str, of: Tensor, counts: Tensor, experts: range):
        """Record a box for each row in `of`, labelled with the row's expert and token; returns `of` unchanged."""
        parts = zip(experts, of[:, 0].int().split(counts.tolist()), strict=True)
        rows[name] = [[f"e{expert}:t{token}", token // 2, ""] for expert, part in parts for token in part.tolist()]
        return of

    def visit(of: Tensor, counts: Tensor) -> Tensor:
        show("sorted", of, counts, range(4))
        there = partial(show, "there", experts=here)
        return show("home", step07.visit_experts(there, mesh["ep"], of, counts), counts, range(4))

    layer.experts.forward = visit
    with torch.no_grad():
        layer(tokens[2 * mesh.rank :][None, :2])
    known = {"experts here": [[", ".join(f"e{expert}" for expert in here)]]}
    shown = [{name: [rows[name]] if n <= k else [[]] for n, name in enumerate(ROUTES)} for k in range(len(ROUTES))]
    text = f"4 experts, {4 // ep} on a rank; groups of {ep} ranks. The colour is that of the rank whose token it is."
    return dict(text=text, states=[(said, known | of) for said, of in zip(ROUTES.values(), shown, strict=True)])


def seen_by(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    """Make all recordings of a rank, by picture and by frame ("fp32/none"). Only rank 0 makes those of chapter 1."""
    torch.set_num_threads(1)
    PRESETS["picture"], where = SMALL, f"file://{folder}/meet"
    dist.init_process_group("gloo", where, timedelta(minutes=2), world_size=RANKS, rank=rank)
    try:
        mesh = Mesh(dp=RANKS)
        one = product(("fp32", "bf16"), ("none", "full")) if rank == 0 else ()
        return dict(
            step={"/".join(choice): accumulation(*choice) for choice in one},
            buckets={"": buckets()},
            zero={str(stage): zero(stage) for stage in (1, 2, 3)},
            routing={str(ep): routing(mesh, ep) for ep in (2, 4)},
        )
    finally:
        dist.destroy_process_group()  # also after an error: then no rank waits for this one


def recorded() -> list[dict[str, dict[str, Any]]]:
    """Make the recordings of four ranks. Raises the first error of a rank."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, get_context("fork")) as pool:
        ranks = [pool.submit(seen_by, rank, folder) for rank in range(RANKS)]
        for rank in as_completed(ranks):
            rank.result()  # raises the first error; others fail because this rank has left
        return [rank.result() for rank in ranks]
