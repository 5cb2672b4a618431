"""Records the numbers that the pictures show: four ranks run the course's own code on a small model.

`recorded()` forks the ranks, which use gloo. A recording is a rank's part of a table that changes from state to state:
dict(text, states=[(text, {row: [cell]})], curve={kind: a number for each state} or {}). A cell is a list of
texts and chips. A chip is [label, colour, style]; style: "" here, "gone" not here, "way" under way.
"""

import inspect
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # an optimizer's first step would import it on each rank
import torch.distributed as dist
from torch import Tensor, nn

import step01_single_gpu as step01
import step02_ddp as step02
import step03_zero as step03
import step04_tp_sp as step04
import step07_moe_ep as step07
from common import comm
from common.comm import Mesh
from common.layout import materialize
from common.model import PRESETS, Decoder, ModelConfig
from common.trainer import Run
from extras.services.clocks import Clock
from extras.services.memory import KINDS, MemoryTimeline, MemoryWatch
from extras.variants import Parts

RANKS = 4
SMALL = ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=32, vocab_size=257, seq_len=16)
BLOCK = ModelConfig(dim=4, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=4, vocab_size=8, seq_len=4)  # fits a page
FLAGS = dict(model="picture", micro_batch_size=1, steps=1, warmup_steps=0, device="cpu", dtype="fp32")
FLAGS |= dict(dataset=str(Path(step01.__file__).with_name("requirements-lock.txt")))  # some text
UNITS = {"E": "embedding", "0": "layer 0", "1": "layer 1", "H": "head with norm"}
WAYS = ("forward", "backward")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")


def brief(name: str) -> str:
    """A parameter's name, shortened to fit a chip: "0.q_proj"."""
    return re.sub(r"model\.(layers\.)?|(self_attn|mlp)\.|_layernorm|\.weight", "", name)


def chips(labels: Iterable, colours: Iterable[int], style: str = "") -> list:
    """A chip for each label; a number is shown whole."""
    texts = [label if isinstance(label, str) else f"{label:,.0f}" for label in labels]
    return [[text, colour, style] for text, colour in zip(texts, colours, strict=False)]


class Film:
    """Runs a step's `train` on the small model, and records `rows(film)` as a state after each event.

    Events: a unit has its input, or the gradient of its output; a parameter's gradient is here; a collective starts; a
    unit's weights are freed; a method of the sync or the optimizer has returned. `passed` lists events of units, (name,
    direction), and of methods, by name; `here` has the parameters whose gradients have arrived.
    """

    def __init__(self, step: ModuleType, rows: Callable[["Film"], dict], **flags: Any):
        self.rows, self.config = rows, step.Config(**FLAGS | flags)
        self.states: list[tuple[str, dict]] = []
        self.curve: dict[str, list[int]] = defaultdict(list)  # by kind: bytes in each state
        self.passed: list[Any] = []
        self.here: set[nn.Parameter] = set()
        self.losses: list[float] = []  # of micro-batches, summed over tokens
        self.run = run = Run(self.config)
        run.first, steps = False, run.steps
        run.steps = lambda **parts: (self.attach(Parts(run, **parts)), steps(**parts))[1]
        run.count = lambda operation, *_: self.tell(f"{operation.replace('_', '-').capitalize()} starts.")
        with MemoryTimeline() as self.memory:
            step.train(self.config, run)

    def attach(self, parts: Parts):
        """Add hooks to the parts that the step has built. They run after the step's own hooks."""
        self.parts, model = parts, parts.model
        self.watch = MemoryWatch(parts, self.memory, Clock(parts, host=True))
        model.register_forward_hook(lambda _model, _inputs, loss: self.losses.append(loss.item()))
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
        """Wrap a method: note when it has returned."""
        call(*args)
        self.tell(says, event)

    def tell(self, says: str, event: Any = None):
        """Record an event, and the state after it."""
        self.passed += [event] if event else []
        if rows := self.rows(self):
            self.watch.measure()  # labels all tensors in the timeline
            self.states.append((says, rows))
            for kind in KINDS:
                self.curve[kind].append(self.memory.total[kind])


def accumulation(dtype: str, recompute: str) -> dict:
    """Chapter 1: a step of three micro-batches, and bytes by kind."""

    def rows(film: Film) -> dict:
        def style(i: int, *event: str) -> str:
            n = film.passed.count(event)
            return "gone" if n < i else "way" if n == i and film.passed[-1] == event else ""

        of = {way: [[[u, k, style(i, u, way)] for u in UNITS] for i in (1, 2, 3)] for k, way in enumerate(WAYS)}
        terms = [[f"{loss / 3 / SMALL.seq_len:.4f}"] for loss in film.losses]
        of["its loss / n_targets"] = terms + [[]] * (3 - len(terms))
        optimizer, grad = film.parts.optimizer, film.parts.model.lm_head.weight.grad
        held = dict(gradients=grad is not None, moments=optimizer.torch_optimizer.state)
        of["for the update"] = [[[name, 2, "" if there else "gone"] for name, there in held.items()]]
        return of

    film = Film(step01, rows, global_batch_size=3, dtype=dtype, recompute=recompute)
    text = f"The loss of the step is the sum of the terms: {film.run.history[0]['loss']:.4f}. E embedding, 0 and 1 "
    text += "layers, H norm and head. Bars: bytes in memory, moment by moment."
    return dict(text=text, states=film.states, curve=film.curve)


def collective(mesh: Mesh, name: str) -> dict:
    """Chapter 2: a rank's numbers before and after a collective, and the bytes that it sends."""
    group, sent = mesh["dp"], []
    n, r = group.size, group.rank
    one = name in ("all_gather", "exchange")
    tensor = torch.tensor([(r + 1) * 10.0**r]) if one else torch.arange(1.0, n + 1) * 10**r
    output = tensor.clone() if name == "all_reduce" else torch.zeros(n if name in ("all_gather", "all_to_all") else 1)
    given = (output,) if name == "all_reduce" else (output, tensor)
    if name == "exchange":
        given = [(tensor, (r + 1) % n)], [(output, (r - 1) % n)]
    with mock.patch.object(comm, "observer", lambda _op, _group, x, share: sent.append(share * x.nbytes)):
        getattr(comm, name)(*given, group).wait()
    # A number with one digit and zeros is as a rank had it, and has the rank's colour; a sum has none.
    colours = [len(text) - 1 if not text[1:].strip("0") else -1 for text in (f"{x:.0f}" for x in output.tolist())]
    before, out = chips(tensor.tolist(), [r] * n), chips(output.tolist(), colours)
    doc = inspect.getdoc(getattr(comm, name)).split("\n")[0].replace("`", "")
    states = [(says, {"in": [before], "out": [of]}) for says, of in (("Before.", []), ("After.", out))]
    return dict(text=f"{doc} Numbers are fp32. Each rank sends {sent[0]:.0f} bytes.", states=states)


def buckets() -> dict:
    """Chapter 2: buckets fill and are sent during backward. Rank 0 also shows its gradients."""

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
    """Chapter 3: the second step of `--zero stage`; the first one makes the moments. A chip for each shard."""

    def shards(own: str, others: str) -> list:
        return [[[str(r), r, own if r == dist.get_rank() else others] for r in range(RANKS)]]

    here, mine, gone, way = (shards(*styles) for styles in (("", ""), ("", "gone"), ["gone"] * 2, ["way"] * 2))

    def held(parts: Parts, unit: step03.Unit) -> list:
        weights, gradient = here, gone if unit.gradient is None else here
        if stage == 3 and not (unit.gathered and not unit.gathering.works):
            weights = way if unit.gathered else mine
        if stage >= 2 and parts.sync.in_flight is not None and parts.sync.in_flight[0] is unit:
            gradient = way
        summed = unit.reduced_shard is None and unit.grad_shard is None
        return [weights, gradient, gone if summed else mine, mine]

    def rows(film: Film) -> dict:
        of: dict[str, list] = {}
        if film.run.history:
            there = film.parts.model.lm_head.weight.grad is not None  # of stage 0, which has no units
            done = film.passed.count("finish") == 2
            whole = [here, here if there and not done else gone, here if there and done else gone, here]
            for n, name in enumerate(UNITS.values()):
                kinds = (f"{name}: {kind}" for kind in ("weights", "gradient", "summed", "optimizer"))
                of |= zip(kinds, held(film.parts, film.parts.units[n]) if stage else whole, strict=True)
        return of

    film = Film(step03, rows, global_batch_size=RANKS, steps=2, zero=stage, dtype="bf16")
    text = "A box is a shard, with the number of the rank that updates it. Empty: not here. Dashed: under way."
    text += " Gradient: of the rank's own tokens; summed: over all ranks. Weights are bf16; the optimizer has masters"
    text += " and two moments. Bars: bytes on rank 0, moment by moment."
    return dict(text=text, states=film.states, curve=film.curve)


TENSORS = {  # by block: modules, and what the page calls their input and output
    "attention": {
        "input_layernorm": ("x", "norm(x)"),
        "self_attn": ("f(norm(x))", "g"),
        **{f"self_attn.{name}_proj": ("", name) for name in "qkv"},
        "self_attn.o_proj": ("heads", "o_proj"),
    },
    "MLP": {
        "post_attention_layernorm": ("x", "norm(x)"),
        "mlp": ("f(norm(x))", "g"),
        **{f"mlp.{name}_proj": ("", name) for name in ("gate", "up")},
        "mlp.down_proj": ("silu(gate) up", "down_proj"),
    },
}


def block_tensors(of: str, mesh: Mesh | None, sp: bool) -> dict[str, Tensor]:
    """Chapter 4: by name, what passes through a block, and ("d ...") its gradients; on one device if `mesh` is None.

    Matrices have the course's initial values times 40, so that numbers differ in their first two decimals.
    """
    with torch.device("meta"):
        model = Decoder(BLOCK)
    if mesh is not None:
        step04.shard_tensors(model, mesh, sp)
    materialize(model, 0, torch.device("cpu"), torch.float64)
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(40 if param.dim() == 2 else 1)

    def keep(name: str, tensor: Tensor):
        seen[name] = tensor.detach()[0]
        tensor.register_hook(lambda gradient: seen.update({"d " + name: gradient[0]}))

    for path, (given, made) in TENSORS[of].items():  # these hooks run after f's and g's, and get their results
        module = model.model.layers["0"].get_submodule(path)
        module.register_forward_hook(lambda _, _inputs, out, name=made: keep(name, out))
        if given:
            module.register_forward_pre_hook(lambda _, inputs, name=given: keep(name, inputs[0]))
    tokens = torch.arange(BLOCK.seq_len)[None]
    model(tokens, tokens + 1).backward()
    return seen


def kind_of(ranks: list[Tensor], one: Tensor) -> str:
    """How two ranks' tensors make up that of one device. Raises RuntimeError if they do not."""
    if all(x.shape == one.shape and torch.allclose(x, one) for x in ranks):
        return "whole"
    if ranks[0].shape == one.shape and torch.allclose(sum(ranks), one):
        return "partial"
    for dim, name in enumerate(("tokens", "columns")):
        if ranks[0].shape[1 - dim] == one.shape[1 - dim] and torch.allclose(torch.cat(ranks, dim), one):
            return f"shard: {name}"
    raise RuntimeError("the tensors of the ranks do not make up that of one device")


def block(mesh: Mesh, of: str, sp: bool) -> dict:
    """Chapter 4: a block's tensors on two ranks. The second one also shows those of one device."""
    seen, one = (block_tensors(of, ranks, sp) for ranks in (mesh, None))
    both, r, states = [None, None], mesh["tp"].rank, []
    dist.all_gather_object(both, seen, mesh["tp"].handle)
    kinds = {name: kind_of([rank[name] for rank in both], one[name]) for name in seen}

    def matrix(numbers: Tensor, colour: int, style: str = "") -> list:
        rows = [chips(map("{:.2f}".format, row), [colour] * 4, style) for row in numbers.tolist()]
        return [chip for row in rows for chip in (*row, "\n")]

    for k, (name, kind) in enumerate(kinds.items()):
        mine = matrix(seen[name], -1 if kind == "whole" else r, "way" if kind == "partial" else "")
        line = [[f"{x}: {y}", dict(w=-1, s=2, p=4)[y[0]], "gone" * (n > k)] for n, (x, y) in enumerate(kinds.items())]
        rows = {"numbers": [mine] + [matrix(one[name], -1)] * r}
        for way, is_gradient in zip(WAYS, (False, True), strict=True):
            rows[way] = [[chip for chip in line if chip[0].startswith("d ") == is_gradient]] * (r == 0)
        states.append((f"{name}: {kind} on the two ranks.", rows))
    text = "One sequence of 4 tokens (rows), 4 channels; d: the gradient of. Whole: all ranks have the same. Shard: "
    text += "parts of a tensor. Partial: terms of a sum. Each is found by comparing the numbers with one device's."
    return dict(text=text, states=states)


ROUTES = {
    "router": "Router: the weight of each expert for each token. A token chooses the two highest.",
    "sorted": "Sorted by expert; a bar between the rows for one rank and for the next.",
    "there": "There: the all-to-all has brought the rows, and they are sorted by expert; a bar between experts.",
    "home": "Home: the outputs are back, in the order in which the rows left.",
}


def routing(mesh: Mesh, ep: int) -> dict:
    """Chapter 7: a layer with 4 experts, which change nothing; 2 tokens a rank, 2 choices a token.

    The first number of a row is its token's number, by which it is recognised after it has been sent.
    """
    config = step07.Config(**FLAGS | dict(experts=4, experts_per_token=2, ep=ep, global_batch_size=1))
    mesh.join("sequence", "dp")
    mesh.enter("ep", mesh.ranks.reshape(-1, ep))
    layer, generator = step07.MoE(SMALL.dim, SMALL.ffn_dim, config, mesh), torch.Generator().manual_seed(2)
    layer.router.weight.data.normal_(0.0, 0.3, generator=generator)[:, 0] = 0
    tokens = torch.randn(2 * mesh.world, SMALL.dim, generator=generator)
    tokens[:, 0] = torch.arange(len(tokens))
    rows, here = {}, range(mesh["ep"].rank * 4 // ep, (mesh["ep"].rank + 1) * 4 // ep)  # which experts

    def show(name: str, of: Tensor, counts: Tensor, experts: range, block: int):
        """A chip for each row, with its expert and its token; a bar after `block` experts."""
        rows[name] = []
        for expert, part in zip(experts, of[:, 0].int().split(counts.tolist()), strict=True):
            rows[name] += ["|"] * (expert % block == 0 and expert > experts[0])
            rows[name] += [[f"e{expert}:t{token}", token // 2, ""] for token in part.tolist()]

    def there(of: Tensor, counts: Tensor) -> Tensor:
        show("there", of, counts, here, 1)
        return of

    def visit(of: Tensor, counts: Tensor) -> Tensor:
        show("sorted", of, counts, range(4), 4 // ep)
        out = step07.visit_experts(there, mesh["ep"], of, counts)
        show("home", out, counts, range(4), 4 // ep)
        return out

    layer.experts.forward, own = visit, tokens[2 * mesh.rank :][:2]
    with torch.no_grad():
        weights = layer.route(own)[0].tolist()
        layer(own[None])
    words = [f"t{2 * mesh.rank + n}: " + " ".join(f"{x:.2f}" for x in row) for n, row in enumerate(weights)]
    rows["router"] = [part for word in words for part in ([word, mesh.rank, ""], "\n")]
    known = {"experts here": [[", ".join(f"e{expert}" for expert in here)]]}
    shown = [{name: [rows[name]] if n <= k else [[]] for n, name in enumerate(ROUTES)} for k in range(len(ROUTES))]
    text = f"4 experts, {4 // ep} on a rank; groups of {ep} ranks. The colour is that of the rank whose token it is."
    return dict(text=text, states=[(said, known | of) for said, of in zip(ROUTES.values(), shown, strict=True)])


def seen_by(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    """Make all recordings of a rank, by picture and choice. Chapter 1 needs only rank 0."""
    torch.set_num_threads(1)
    PRESETS["picture"], where = SMALL, f"file://{folder}/meet"
    dist.init_process_group("gloo", where, timedelta(minutes=2), world_size=RANKS, rank=rank)
    try:
        mesh, pairs = Mesh(dp=RANKS), Mesh(dp=RANKS // 2, tp=2)
        one = product(("fp32", "bf16"), ("none", "full")) if rank == 0 else ()
        return dict(
            step={"/".join(choice): accumulation(*choice) for choice in one},
            collective={name: collective(mesh, name) for name in OPERATIONS},
            buckets={"": buckets()},
            zero={str(stage): zero(stage) for stage in step03.STAGES},
            block={f"{of}/{sp}": block(pairs, of, sp == "yes") for of in TENSORS for sp in ("yes", "no")},
            routing={str(ep): routing(mesh, ep) for ep in (2, 4)},
        )
    finally:
        dist.destroy_process_group()  # after an error: no one waits for this rank


def recorded() -> list[dict[str, dict[str, Any]]]:
    """Make the recordings of four ranks. Raises the first error of a rank."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, get_context("fork")) as pool:
        ranks = [pool.submit(seen_by, rank, folder) for rank in range(RANKS)]
        for rank in as_completed(ranks):
            rank.result()  # raises the first error; others fail because this rank has left
        return [rank.result() for rank in ranks]
