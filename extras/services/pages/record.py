"""Four ranks run the course's own code on a small model and say what they saw: the numbers that the pictures show.

`recorded()` forks them; they meet in gloo. A recorder returns a rank's column of a table that changes from state to
state: dict(text, states=[(what it says, {row: [cell]})], curve={kind: a number for each state} or {}). A cell is a list
of texts and chips. A chip is [label, colour, style]; style: "" here, "gone" not here, "way" under way.
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
import step05_cp_ring as step05
import step07_moe_ep as step07
from common import comm
from common.comm import Group, Mesh
from common.layout import materialize
from common.model import PRESETS, Decoder, ModelConfig
from common.trainer import Run
from extras.services.memory import CATEGORIES, MemoryTimeline, held_tensors
from extras.services.tables import bytes_of
from extras.variants import Parts

RANKS = 4
SMALL = ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=32, vocab_size=257, seq_len=16)
BLOCK = ModelConfig(dim=4, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=4, vocab_size=8, seq_len=4)  # fits a page
FLAGS = dict(model="picture", micro_batch_size=1, steps=1, warmup_steps=0, device="cpu", dtype="fp32")
UNITS = {"E": "embedding", "0": "layer 0", "1": "layer 1", "H": "head with norm"}
WAYS = ("forward", "backward")
BRIEF = {r"model\.|\.weight|layers\.|self_attn\.|mlp\.|_proj|input_layer": "", "post_attention_layer": "post "}
BRIEF |= {"embed_tokens": "E", "lm_head": "H"}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")


def watched(config: Any, attach: Callable[[Parts], None]) -> Run:
    """A run that writes nothing. `attach(parts)` is called once the step has built."""
    run = Run(config)
    run.first, plain = False, run.steps
    run.steps = lambda **parts: (attach(Parts(run, **parts)), plain(**parts))[1]
    return run


def after(owner: Any, name: str, tell: Callable[[], Any]):
    """Let a method of an object be followed by `tell`."""
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args: (plain(*args), tell())[0])


def watch_modules(model: Decoder, tell: Callable[[str, str], None]):
    """`tell(name, "forward" or "backward")` when a unit has its input, or the gradient of its output."""
    modules = model.model.embed_tokens, *model.model.layers.values(), model.lm_head
    for name, module in zip(UNITS, modules, strict=True):

        def begin_backward(_module: nn.Module, _inputs: tuple, output: Tensor, name: str = name):
            if output.requires_grad:
                output.register_hook(lambda _gradient: tell(name, "backward"))

        module.register_forward_pre_hook(lambda *_, name=name: tell(name, "forward"))
        module.register_forward_hook(begin_backward)


def chips(labels: Iterable, colours: Iterable[int], style: str = "") -> list:
    """A chip for each label; a number is shown whole."""
    texts = [label if isinstance(label, str) else f"{label:,.0f}" for label in labels]
    return [[text, colour, style] for text, colour in zip(texts, colours, strict=False)]


def accumulation(dtype: str, recompute: str) -> dict:
    """Chapter 1: a step of three micro-batches, and bytes by kind."""
    states, terms, timeline, curve, happened = [], [], MemoryTimeline(), defaultdict(list), []
    config = step01.Config(**FLAGS | dict(global_batch_size=3, dtype=dtype, recompute=recompute))

    def tell(parts: Parts, name: str, direction: str, says: str = ""):
        n = sum(event[1:] == ("forward", "E") for event in happened) + ((name, direction) == ("E", "forward"))
        happened.append((n, direction, name))
        for kind, tensors in held_tensors(parts).items():
            timeline.label({"masters": "optimizer", "moments": "optimizer"}.get(kind, kind), tensors)
        for kind in CATEGORIES:
            curve[kind].append(timeline.total[kind])

        def style(event: tuple) -> str:
            return "way" if event == happened[-1] else "" if event in happened else "gone"

        of = {way: [[[u, k, style((i, way, u))] for u in UNITS] for i in (1, 2, 3)] for k, way in enumerate(WAYS)}
        of["its loss / n_targets"] = [[f"{term:.4f}"] for term in terms] + [[]] * (3 - len(terms))
        grads = [param.grad for param in parts.model.parameters() if param.grad is not None]
        norm = nn.utils.get_total_norm(grads).item()
        says = says.format(n=n) or f"Micro-batch {n}: {direction} of {UNITS[name]}."
        states.append((f"{says} Norm of the gradients that are here: {norm:.4f}.", of))

    def end_forward(_model: Decoder, _inputs: tuple, loss: Tensor):
        timeline.phase("backward")
        terms.append(loss.item() / config.global_batch_size / SMALL.seq_len)

    def attach(parts: Parts):
        parts.model.register_forward_pre_hook(lambda *_: timeline.phase("forward"))
        parts.model.register_forward_hook(end_forward)
        watch_modules(parts.model, partial(tell, parts))
        done = partial(tell, parts, "", "done")
        first = parts.model.model.embed_tokens.weight
        first.register_post_accumulate_grad_hook(lambda _: done("Micro-batch {n} is done."))
        after(parts.optimizer, "step", lambda: done("AdamW has updated the masters."))
        after(parts.optimizer, "zero_grad", lambda: done("The gradients are dropped."))

    run = watched(config, attach)
    with timeline:
        step01.train(config, run)
    text = f"The loss of the step is the sum of the terms: {run.history[0]['loss']:.4f}. E embedding, 0 and 1 layers, "
    return dict(text=text + "H norm and head. Bars: bytes in memory, moment by moment.", states=states, curve=curve)


def collective(mesh: Mesh, name: str) -> dict:
    """Chapter 2: a rank's numbers, in and out, and the bytes that it counts."""
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


def ring_reduce(mesh: Mesh) -> dict:
    """Chapter 2: `RingSync.sum_up` of four numbers."""
    group, states = mesh["dp"], []
    gradient = torch.arange(1.0, group.size + 1) * 10**group.rank

    def tell(says: str, sends: list):
        states.append((says, dict(has=[chips(gradient.tolist(), range(RANKS))], sends=[sends])))

    def exchange(sends: list, receives: list, group: Group) -> comm.Pending:
        shard, to = sends[0][0].storage_offset(), sends[0][1]
        part = "reduce-scatter" if len(states) < RANKS - 1 else "all-gather"
        says = f"Round {len(states)}, {part}: each rank sends a shard to its right neighbour."
        tell(says, [*chips([gradient[shard].item()], [shard], "way"), f"to rank {to}"])
        return comm.exchange(sends, receives, group)

    with mock.patch.object(step02, "exchange", exchange):
        step02.RingSync(nn.Module(), None, mesh).sum_up(gradient, group)
    tell("Every rank has all sums.", [])
    text = "Rank r begins with 1 2 3 4 times 10^r: the digits of a number show which ranks are in the sum."
    return dict(text=text, states=states)


class SeenBuckets:
    """A step of `--sync bucket`: what is in each bucket, whenever a gradient comes, and at the end."""

    def __init__(self):
        self.states: list[tuple[str, dict]] = []
        self.names: dict[nn.Parameter, str] = {}
        self.here: set[nn.Parameter] = set()  # whose gradients have come
        self.summed = False
        config = step02.Config(**FLAGS | dict(global_batch_size=RANKS, bucket_mb=8 / 1024))
        step02.train(config, watched(config, self.attach))

    def attach(self, parts: Parts):
        """Tell of each gradient, after the sync's own hook, which may send; and of the end."""
        self.sync = parts.sync
        for name, param in parts.model.named_parameters():
            for long, brief in BRIEF.items():
                name = re.sub(long, brief, name)
            self.names[param] = name
            param.register_post_accumulate_grad_hook(self.arrived)
        after(parts.sync, "finish", self.finished)

    def arrived(self, param: nn.Parameter):
        """A hook of autograd's."""
        self.here.add(param)
        self.tell(f"The gradient of {self.names[param]} is here.")

    def finished(self):
        """All buckets are emptied into their gradients."""
        self.summed = True
        self.tell("`finish` has waited for every sum: all ranks have the same numbers.")

    def tell(self, says: str):
        """A state. Rank 0 also says which gradients are there."""
        of = {}
        for i, bucket in enumerate(self.sync.buckets):
            flying = i < len(self.sync.pending) and not self.summed
            styles = ["gone" if param not in self.here else "way" if flying else "" for param in bucket.params]
            row = [[self.names[param], i, style] for param, style in zip(bucket.params, styles, strict=True)]
            number = ["under way" if flying else f"{bucket.flat.sum():.4f}"] if self.here & {*bucket.params} else []
            of[f"bucket {i}, {bucket.flat.nbytes:,} bytes"] = [row] * (dist.get_rank() == 0) + [number]
        self.states.append((f"{says} Sums that have started: {len(self.sync.pending)}.", of))


def buckets() -> dict:
    """Chapter 2: buckets fill and leave while backward goes on."""
    text = "Left: rank 0's gradients, in the order of backward. Right: the sum of all numbers of a bucket's buffer."
    return dict(text=text, states=SeenBuckets().states)


class SeenZero:
    """The second step of `--zero stage`: what this rank holds of each unit, whenever that changes."""

    def __init__(self, stage: int):
        self.stage, self.rank, self.summed = stage, dist.get_rank(), False
        self.states: list[tuple[str, dict]] = []
        self.curve: dict[str, list[int]] = defaultdict(list)
        config = step03.Config(**FLAGS | dict(global_batch_size=RANKS, steps=2, zero=stage, dtype="bf16"))
        self.run = watched(config, self.attach)
        step03.train(config, self.run)

    def attach(self, parts: Parts):
        """Tell of each module's turn, of each sum and gathering, and of what is freed."""
        self.parts, self.named = parts, dict(zip(UNITS.values(), parts.units, strict=False))
        self.run.count = self.saw
        watch_modules(parts.model, lambda name, direction: self.tell(f"{direction} of {UNITS[name]}."))
        for name, unit in self.named.items() if self.stage == 3 else ():
            after(unit, "free", lambda name=name: self.tell(f"{name} is freed: each rank keeps its shard."))
        after(parts.sync, "finish", lambda: self.tell("`finish` returns: each sum is complete.", summed=True))
        after(parts.optimizer, "step", lambda: self.tell("The update is done."))
        after(parts.optimizer, "zero_grad", lambda: self.tell("The gradients are dropped.", summed=False))

    def saw(self, operation: str, _group: Group, tensor: Tensor, _share: float):
        """An observer: a collective of a unit's weights or gradient starts, or of a bucket."""
        whose = [name for name, unit in self.named.items() if tensor is unit.flat or tensor is unit.gradient]
        if whose or (self.stage == 0 and operation == "all_reduce" and tensor.dim()):
            self.tell(f"{operation.replace('_', '-')} of {whose[0] if whose else 'a bucket'} starts.")

    def tell(self, says: str, summed: bool | None = None):
        """A state, if something has changed by it. `summed`: whether gradients are sums from now on."""
        self.summed = self.summed if summed is None else summed
        if not self.run.history:  # in the first step the optimizer has no moments yet
            return
        of: dict[str, list] = {}
        for name in UNITS.values():
            kinds = (f"{name}: {kind}" for kind in ("weights", "gradient", "summed", "optimizer"))
            of |= dict(zip(kinds, self.held(self.named.get(name)), strict=True))
        if self.states and "freed" in says and of == self.states[-1][1]:
            return  # there was nothing to free
        self.states.append((says[0].upper() + says[1:], of))
        now = {kind: bytes_of(tensors) for kind, tensors in held_tensors(self.parts).items()}
        now["optimizer"] = now.pop("masters") + now.pop("moments")
        for kind, n_bytes in now.items():
            self.curve[kind].append(n_bytes)

    def shards(self, own: str, others: str) -> list:
        """A chip for each shard: the style of this rank's, and of the others'."""
        return [[[str(r), r, own if r == self.rank else others] for r in range(RANKS)]]

    def held(self, unit: step03.Unit | None) -> list:
        """Weights, the gradient of this rank's tokens, its sum, masters and moments. No unit: stage 0 has none."""
        here, mine, gone = self.shards("", ""), self.shards("", "gone"), self.shards("gone", "gone")
        if unit is None:
            there = gone if self.parts.model.lm_head.weight.grad is None else here
            return [here, gone, there, here] if self.summed else [here, there, gone, here]
        weights = here if unit.flat.untyped_storage().nbytes() else mine
        if weights is here and self.stage == 3 and (not unit.gathered or unit.gathering.works):
            weights = self.shards("", "way")
        gradient = gone if unit.gradient is None else here
        if self.stage >= 2 and self.parts.sync.in_flight is not None and self.parts.sync.in_flight[0] is unit:
            gradient = self.shards("way", "way")
        total = unit.grad_shard if unit.grad_shard is not None else unit.reduced_shard
        return [weights, gradient, gone if total is None else mine, mine]


def zero(stage: int) -> dict:
    """Chapter 3: a step of ZeRO, a chip for each shard."""
    seen = SeenZero(stage)
    text = "A box is a shard, with the number of the rank that updates it. Empty: not here. Dashed: under way."
    text += " Gradient: of the rank's own tokens; summed: over all ranks. Weights are bf16; the optimizer has masters"
    text += " and two moments. Bars: bytes on rank 0, moment by moment."
    return dict(text=text, states=seen.states, curve=seen.curve)


BLOCKS = {"attention": ("input_layernorm", "self_attn"), "MLP": ("post_attention_layernorm", "mlp")}
GIVEN = {"input_layernorm": "x", "self_attn": "f(norm(x))", "o_proj": "heads"}
GIVEN |= {"post_attention_layernorm": "x", "mlp": "f(norm(x))", "down_proj": "silu(gate) up"}
RETURNED = {"input_layernorm": "norm(x)", "post_attention_layernorm": "norm(x)", "self_attn": "g", "mlp": "g"}
RETURNED |= {f"{name}_proj": name for name in ("q", "k", "v", "gate", "up")}


def block_tensors(of: str, group: Group | None, mesh: Mesh, sp: bool) -> dict[str, Tensor]:
    """Chapter 4: by name, what passes through a block, and ("d ...") its gradients; on one device if `group` is None.

    The course's own initial matrices, 40 times as large: so two digits behind the point tell something.
    """
    with torch.device("meta"):
        model = Decoder(BLOCK)
    if group is not None:
        step04.shard_tensors(model, mesh, sp)
    materialize(model, 0, torch.device("cpu"), torch.float64)
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(40 if param.dim() == 2 else 1)

    def keep(name: str, tensor: Tensor):
        seen[name] = tensor.detach()[0]
        tensor.register_hook(lambda gradient: seen.update({"d " + name: gradient[0]}))

    for path, module in model.model.layers["0"].named_modules():
        if path.split(".")[0] in BLOCKS[of]:  # our hooks come after those of f and g: they see what these return
            own = path.split(".")[-1]
            if own in GIVEN:
                module.register_forward_pre_hook(lambda _, inputs, own=own: keep(GIVEN[own], inputs[0]))
            module.register_forward_hook(lambda _, _inputs, out, own=own: keep(RETURNED.get(own, own), out))
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


WHY = {  # what f and g have done: (with SP, without), in forward and in backward
    "f(norm(x))": ("f has gathered the tokens.", "f does nothing in forward."),
    "g": ("g has summed the terms, and sharded the tokens.", "g has summed the terms."),
    "d norm(x)": ("f's backward has summed the terms, and sharded the tokens.", "f's backward has summed the terms."),
    "d o_proj": ("g's backward has gathered the tokens.", "g's backward does nothing."),
}
WHY["d down_proj"] = WHY["d o_proj"]


def block(mesh: Mesh, of: str, sp: bool) -> dict:
    """Chapter 4: a block's tensors on two ranks. The second one also shows those of one device."""
    seen, one = (block_tensors(of, group, mesh, sp) for group in (mesh["tp"], None))
    both, r, states = [None, None], mesh["tp"].rank, []
    dist.all_gather_object(both, seen, mesh["tp"].handle)
    kinds = {name: kind_of([rank[name] for rank in both], one[name]) for name in seen}

    def matrix(numbers: Tensor, colour: int, style: str = "") -> list:
        rows = [chips(map("{:.2f}".format, row), [colour] * 4, style) for row in numbers.tolist()]
        return [chip for row in rows for chip in (*row, "\n")]

    for k, (name, kind) in enumerate(kinds.items()):
        mine = matrix(seen[name], -1 if kind == "whole" else r, "way" if kind == "partial" else "")
        line = [[f"{x}: {y}", dict(w=-1, s=2, p=4)[y[0]], "gone" * (n > k)] for n, (x, y) in enumerate(kinds.items())]
        ways = [chip for chip in line if chip[0][:2] != "d "], [chip for chip in line if chip[0][:2] == "d "]
        rows = {"numbers": [mine] + [matrix(one[name], -1)] * r}
        rows |= {way: [row] * (r == 0) for way, row in zip(WAYS, ways, strict=True)}
        states.append((f"{name}: {kind} on the two ranks. {WHY.get(name, ('', ''))[not sp]}", rows))
    text = (
        "One sequence of 4 tokens (rows), 4 channels; d: the gradient of. Whole: all ranks have the same. Shard: parts"
    )
    text += " of a tensor. Partial: terms of a sum. Each is found by comparing the numbers with those of one device."
    return dict(text=text, states=states)


def ring_modes() -> list[str]:
    """The modes in which keys go round one ring, called as chapter 5's is."""
    known = {mode: inspect.signature(made.attention).parameters for mode, made in step05.CONTEXT.items()}
    needed = {mode: [name for name, it in of.items() if it.default is it.empty] for mode, of in known.items()}
    return [mode for mode, of in known.items() if "visible" in of and needed[mode] == ["q", "k", "v", "group"]]


def ring_pairs(mesh: Mesh, mode: str) -> list[tuple[int, list[tuple[int, int]]]]:
    """Chapter 5: by hop, whose keys are here, and the pairs of a query and a key that the mode's attention computes."""
    positions, attention = step05.CONTEXT[mode]
    plain, part, hops = inspect.signature(attention).parameters["visible"].default, step05.part_attention, []

    def visible(rank: int, source: int, length: int) -> list:
        hops.append((source, []))
        return plain(rank, source, length)

    def counted(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        queries, keys = (enumerate(x.flatten().int().tolist()) for x in (q, v))  # the numbers are the positions
        hops[-1][1].extend((query, key) for (i, query), (j, key) in product(queries, keys) if i >= j or not causal)
        return part(q, k, v, causal)

    x = positions(4 * RANKS, mesh.rank, RANKS).double()[None, :, None, None]
    with mock.patch.object(step05, "part_attention", counted):
        attention(x, x, x, mesh["dp"], visible=visible)
    return hops


def routing(mesh: Mesh, ep: int) -> dict:
    """Chapter 7: a layer with 4 experts, 2 tokens a rank, 2 choices a token.

    A token is known by its numbers: rows that travel are looked up among the tokens of all ranks.
    """
    config = step07.Config(**FLAGS | dict(experts=4, experts_per_token=2, ep=ep, global_batch_size=1))
    mesh.join("sequence", "dp")
    mesh.enter("ep", mesh.ranks.reshape(-1, ep))
    layer, generator = step07.MoE(SMALL.dim, SMALL.ffn_dim, config, mesh), torch.Generator().manual_seed(2)
    layer.router.weight.data.normal_(0.0, 0.3, generator=generator)
    tokens = torch.randn(2 * mesh.world, SMALL.dim, generator=generator)
    rows, first = {}, mesh["ep"].rank * 4 // ep

    def show(name: str, of: Tensor, counts: Tensor, start: int = 0):
        """A chip for each row, with its expert and its token; a bar between blocks. `counts`: [blocks, experts]."""
        places, made = iter([int((tokens - row).abs().sum(-1).argmin()) for row in of]), []
        for block in counts.tolist():
            chosen = [expert for expert, count in enumerate(block, start) for _ in range(count)]
            made += ["|", *([f"e{e}:t{token}", token // 2, ""] for e, token in zip(chosen, places, strict=False))]
        rows.setdefault(name, made[1:])  # what is received first; outputs on their way home pass there, too

    def experts(of: Tensor, counts: Tensor) -> Tensor:
        show("by expert", of, counts.diag(), first)
        return of

    def transpose_blocks(of: Tensor, sizes: Tensor) -> Tensor:
        show("received", of, sizes, first)
        return plain(of, sizes)

    def visit(of: Tensor, counts: Tensor) -> Tensor:
        by_rank = torch.block_diag(*counts.view(ep, 1, -1))
        show("sorted", of, by_rank)
        out = step07.visit_experts(experts, mesh["ep"], of, counts)
        show("home", out, by_rank)
        return out

    def topk(p: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores, chosen = plain_topk(p, k)
        for token, (of, share) in enumerate(zip(chosen.tolist(), scores / scores.sum(-1, keepdim=True), strict=True)):
            said = ", ".join(f"e{expert} {score:.2f}" for expert, score in zip(of, share.tolist(), strict=True))
            rows.setdefault("routed", []).extend([[f"t{2 * mesh.rank + token}: {said}", mesh.rank, ""], "\n"])
        return scores, chosen

    plain, plain_topk, layer.experts.forward = step07.transpose_blocks, Tensor.topk, visit
    patches = mock.patch.object(step07, "transpose_blocks", transpose_blocks), mock.patch.object(Tensor, "topk", topk)
    with patches[0], patches[1], torch.no_grad():
        layer(tokens[2 * mesh.rank :][None, :2])
    says = {
        "routed": "Routed: each token's two experts, with the weights of their outputs.",
        "sorted": "Sorted by expert; a bar between what is for one rank and for the next.",
        "received": "Received: what the all-to-all has brought; a bar between senders.",
        "by expert": "By expert: what one expert computes stands together; a bar between experts.",
        "home": "Home: the outputs are back, in the order in which the rows left.",
    }
    known = {"experts here": [[", ".join(f"e{first + k}" for k in range(4 // ep))]]}
    shown = [{name: [rows[name]] if n <= k else [[]] for n, name in enumerate(says)} for k in range(len(says))]
    text = f"4 experts, {4 // ep} on a rank; groups of {ep} ranks. The colour is that of the rank whose token it is."
    return dict(text=text, states=[(said, known | of) for said, of in zip(says.values(), shown, strict=True)])


def seen_by(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    """Everything that a rank saw, by picture and choice. Chapter 1 needs one rank alone."""
    torch.set_num_threads(1)
    PRESETS["picture"], FLAGS["dataset"] = SMALL, f"{folder}/text.txt"
    where = f"file://{folder}/meet"
    dist.init_process_group("gloo", where, timedelta(minutes=2), world_size=RANKS, rank=rank)
    try:
        mesh, pairs = Mesh(dp=RANKS), Mesh(dp=RANKS // 2, tp=2)
        one = product(("fp32", "bf16"), ("none", "full")) if rank == 0 else ()
        return dict(
            step={"/".join(choice): accumulation(*choice) for choice in one},
            collective={name: collective(mesh, name) for name in OPERATIONS},
            ring_reduce={"": ring_reduce(mesh)},
            buckets={"": buckets()},
            zero={str(stage): zero(stage) for stage in step03.STAGES},
            block={f"{of}/{sp}": block(pairs, of, sp == "yes") for of in BLOCKS for sp in ("yes", "no")},
            ring={mode: ring_pairs(mesh, mode) for mode in ring_modes()},
            routing={str(ep): routing(mesh, ep) for ep in (2, 4)},
        )
    finally:
        dist.destroy_process_group()  # after an error: no one waits for this rank


def recorded() -> list[dict[str, dict[str, Any]]]:
    """What each of four ranks saw. Raises what one of them has raised."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, get_context("fork")) as pool:
        Path(folder, "text.txt").write_text(Path(step01.__file__).read_text())
        ranks = [pool.submit(seen_by, rank, folder) for rank in range(RANKS)]
        for rank in as_completed(ranks):
            rank.result()  # raises what came first: the others fail because this rank has left
        return [rank.result() for rank in ranks]
