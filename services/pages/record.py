"""Four ranks run the course's own code on a small model and say what they saw: the numbers that the pictures show.

`recorded()` forks them; they meet in gloo. A recorder returns lists and dicts; pictures.py makes pictures of them.
"""

import inspect
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
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
from services.memory import CATEGORIES, MemoryTimeline, held_tensors
from services.tables import bytes_of
from variants import Parts

RANKS = 4
SMALL = ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=32, vocab_size=257, seq_len=16)
BLOCK = ModelConfig(
    dim=4, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=4, vocab_size=8, seq_len=4
)  # numbers fit a page
FLAGS = dict(model="picture", micro_batch_size=1, steps=1, warmup_steps=0, device="cpu", dtype="fp32")


class Watch(Run):
    """A run that writes nothing. `attach(parts)` is called once the step has built, `saw(...)` at every operation."""

    def __init__(self, config: Any, attach: Callable[[SimpleNamespace], None], saw: Callable = lambda *_: None):
        super().__init__(config)
        self.first, self.attach, self.saw = False, attach, saw

    def steps(self, **parts: Any):
        """As `Run.steps`."""
        self.attach(SimpleNamespace(**parts))
        yield from super().steps(**parts)

    def count(self, operation: str, group: Group, tensor: Tensor, share: float):
        """As `Run.count`."""
        self.saw(operation, tensor)
        super().count(operation, group, tensor, share)


def after(owner: Any, name: str, tell: Callable[[], None]):
    """Let a method of an object be followed by `tell`."""
    plain = getattr(owner, name)

    def followed(*args: Any) -> Any:
        result = plain(*args)
        tell()
        return result

    setattr(owner, name, followed)


def watch_modules(model: Decoder, tell: Callable[[str, str], None]):
    """`tell(name, "forward" or "backward")` when a module has its input, or the gradient of its output."""
    trunk = model.model
    modules = {"E": trunk.embed_tokens, **trunk.layers, "H": model.lm_head}
    for name, module in modules.items():

        def begin_backward(_module: nn.Module, _inputs: tuple, output: Tensor, name: str = name):
            if output.requires_grad:
                output.register_hook(lambda _gradient: tell(name, "backward"))

        module.register_forward_pre_hook(lambda *_, name=name: tell(name, "forward"))
        module.register_forward_hook(begin_backward)


def short(name: str) -> str:
    """A parameter's name, for a box: "1.q", "E", "H", "norm"."""
    for long, brief in (
        ("model.", ""),
        (".weight", ""),
        ("layers.", ""),
        ("self_attn.", ""),
        ("mlp.", ""),
        ("_proj", ""),
    ):
        name = name.replace(long, brief)
    for long, brief in (
        ("embed_tokens", "E"),
        ("lm_head", "H"),
        ("input_layer", ""),
        ("post_attention_layer", "post "),
    ):
        name = name.replace(long, brief)
    return name


def numbers(tensor: Tensor) -> list:
    """As lists, rounded to four digits behind the point."""
    return torch.round(tensor.detach().double(), decimals=4).tolist()


def accumulation(dtype: str, recompute: str) -> dict:
    """Chapter 1, one step of three micro-batches: what happened, and bytes by kind then; loss terms; the loss."""
    moments, losses, timeline, at = [], [], MemoryTimeline(), dict(n=0)
    config = step01.Config(**FLAGS | dict(global_batch_size=3, dtype=dtype, recompute=recompute))

    def tell(what: str, direction: str):
        at["n"] += (what, direction) == ("E", "forward")
        parts = at["parts"]
        for kind, tensors in held_tensors(parts).items():
            timeline.label({"masters": "optimizer", "moments": "optimizer"}.get(kind, kind), tensors)
        grads = [param.grad for param in parts.model.parameters() if param.grad is not None]
        held = {name: timeline.total[name] for name in CATEGORIES}
        norm = nn.utils.get_total_norm(grads).item()
        moments.append(dict(what=what, direction=direction, n=at["n"], held=held, norm=norm))

    def end_forward(_model: Decoder, _inputs: tuple, loss: Tensor):
        timeline.phase("backward")
        losses.append(loss.item())

    def attach(parts: SimpleNamespace):
        at["parts"], model = Parts(run, **vars(parts)), parts.model
        model.register_forward_pre_hook(lambda *_: timeline.phase("forward"))
        model.register_forward_hook(end_forward)
        watch_modules(model, tell)
        model.model.embed_tokens.weight.register_post_accumulate_grad_hook(lambda _: tell("all", "done"))
        after(parts.optimizer, "step", lambda: tell("AdamW", "done"))
        after(parts.optimizer, "zero_grad", lambda: tell("zero_grad", "done"))

    run = Watch(config, attach)
    with timeline:
        step01.train(config, run)
    (row,) = run.history
    terms = [loss / config.global_batch_size / SMALL.seq_len for loss in losses]
    return dict(moments=moments, terms=terms, loss=row["loss"])


def collectives(mesh: Mesh) -> dict[str, tuple]:
    """Chapter 2: of each collective this rank's numbers, in and out, and the bytes that it counts."""
    group, sent = mesh["dp"], []
    n, r = group.size, group.rank
    base, one = torch.arange(1.0, n + 1) * 10**r, torch.tensor([(r + 1) * 10.0**r])
    inputs = dict(all_reduce=base, all_gather=one, reduce_scatter=base, all_to_all=base, exchange=one)
    found = {}
    with mock.patch.object(
        comm, "observer", lambda _operation, _group, tensor, share: sent.append(share * tensor.nbytes)
    ):
        for name, tensor in inputs.items():
            output = torch.zeros(n if name in ("all_gather", "all_to_all") else 1)
            if name == "all_reduce":
                output = tensor.clone()
                comm.all_reduce(output, group).wait()
            elif name == "exchange":
                comm.exchange([(tensor, (r + 1) % n)], [(output, (r - 1) % n)], group).wait()
            else:
                getattr(comm, name)(output, tensor, group).wait()
            found[name] = tensor.tolist(), output.tolist(), sent.pop()
    return found


def ring_reduce(mesh: Mesh) -> list[dict]:
    """Chapter 2: `RingSync.sum_up` of four numbers: what this rank has before each round, and sends; then the sums."""
    group, rounds = mesh["dp"], []
    gradient = torch.arange(1.0, group.size + 1) * 10**group.rank

    def exchange(sends: list, receives: list, group: Group) -> comm.Pending:
        shard = sends[0][0].storage_offset()
        rounds.append(dict(has=gradient.tolist(), sends=shard, to=sends[0][1]))
        return comm.exchange(sends, receives, group)

    with mock.patch.object(step02, "exchange", exchange):
        step02.RingSync(nn.Module(), None, mesh).sum_up(gradient, group)
    return [*rounds, dict(has=gradient.tolist(), sends=None, to=None)]


def buckets(mesh: Mesh) -> dict:
    """Chapter 2: names and bytes by bucket; after each gradient which are there, and the sum of a bucket's numbers."""
    config, moments, at = step02.Config(**FLAGS | dict(global_batch_size=RANKS, bucket_mb=8 / 1024)), [], {}

    def tell(says: str, ready: str | None = None):
        at["ready"] += [ready] if ready else []
        sync, has = at["parts"].sync, []
        for i, bucket in enumerate(sync.buckets):
            flying = i < len(sync.pending) and not at["summed"]
            has.append("under way" if flying else bucket.flat.sum().item())
        moments.append(dict(says=says, ready=list(at["ready"]), sent=len(sync.pending), has=has))

    def attach(parts: SimpleNamespace):
        at.update(parts=parts, ready=[], summed=False)
        for name, param in parts.model.named_parameters():  # after the sync's own hook, which may send
            said = f"The gradient of {short(name)} is here.", short(name)
            param.register_post_accumulate_grad_hook(lambda _, said=said: tell(*said))

        def finished():
            at["summed"] = True
            tell("`finish` has waited for every sum: all ranks have the same numbers.")

        after(parts.sync, "finish", finished)

    step02.train(config, Watch(config, attach))
    names = {id(param): short(name) for name, param in at["parts"].model.named_parameters()}
    lists = [[names[id(param)] for param in bucket.params] for bucket in at["parts"].sync.buckets]
    return dict(buckets=lists, bytes=[b.flat.nbytes for b in at["parts"].sync.buckets], moments=moments)


def zero(stage: int) -> list[dict]:
    """Chapter 3, the second step of `--zero stage`: after each event, what this rank holds, and bytes by kind.

    `held`, by unit and kind, has a letter for each of the four shards: o held, w on its way, - not here. Kinds:
    weights; the gradient of this rank's tokens; its sum over ranks; what the optimizer needs (masters and moments).
    """
    config = step03.Config(**FLAGS | dict(global_batch_size=RANKS, steps=2, zero=stage, dtype="bf16"))
    moments, at, names = [], dict(summed=False), ("E", "0", "1", "H")

    def letters(there: Any, own: bool = False, way: bool = False) -> str:
        """`own`: of this rank's shard alone, if at all; `way`: the others are still to come."""
        mine = [rank == dist.get_rank() for rank in range(RANKS)]
        return "".join("-" if there is None or (own and not m) else "w" if way and not m else "o" for m in mine)

    def held(unit: Any, sync: Any) -> list[str]:
        if stage == 0:
            gradient = [letters(at["parts"].model.lm_head.weight.grad)]
            sums = gradient[::-1] if at["summed"] else [letters(None)]
            return ["oooo", letters(None) if at["summed"] else gradient[0], sums[0], "oooo"]
        here = unit.flat.untyped_storage().nbytes() > 0
        coming = stage == 3 and here and not (unit.gathered and not unit.gathering.works)
        sums = unit.grad_shard if unit.grad_shard is not None else unit.reduced_shard
        gradient = letters(unit.gradient)
        if stage >= 2 and sync.in_flight is not None and sync.in_flight[0] is unit:
            gradient = gradient.replace("o", "w")
        return [letters(1, own=not here, way=coming), gradient, letters(sums, own=True), letters(1, own=True)]

    def tell(says: str):
        if len(at["run"].history) < 1:  # in the first step the optimizer has no moments yet
            return
        parts = at["parts"]
        units = dict(zip(names, parts.units or [None] * 4, strict=True))
        now = {kind: bytes_of(tensors) for kind, tensors in held_tensors(parts).items()}
        now["optimizer"] = now.pop("masters") + now.pop("moments")
        here = {name: held(unit, parts.sync) for name, unit in units.items()}
        if not (moments and "freed" in says and here == moments[-1]["held"]):  # else there was nothing to free
            moments.append(dict(says=says, held=here, bytes=now))

    def saw(operation: str, tensor: Tensor):
        units = zip(names, at["parts"].units, strict=False)
        found = [name for name, unit in units if tensor is unit.flat or tensor is unit.gradient]
        if found or (stage == 0 and operation == "all_reduce" and tensor.dim()):
            tell(f"{operation.replace('_', '-').capitalize()} of {found[0] if found else 'a bucket'} starts.")

    def attach(parts: SimpleNamespace):
        at["parts"] = Parts(at["run"], **vars(parts))
        watch_modules(parts.model, lambda name, direction: tell(f"{name} computes {direction}."))
        for name, unit in zip(names, parts.optimizer.units if stage == 3 else (), strict=False):
            after(unit, "free", lambda name=name: tell(f"{name} is freed: of its weights each rank keeps its shard."))
        after(parts.sync, "finish", lambda: (at.update(summed=True), tell("`finish` returns: each sum is complete.")))
        after(parts.optimizer, "step", lambda: tell("The update is done."))
        after(parts.optimizer, "zero_grad", lambda: (at.update(summed=False), tell("The gradients are dropped.")))

    at["run"] = Watch(config, attach, saw)
    step03.train(config, at["run"])
    return moments


def watch_block(model: Decoder, seen: dict[str, Tensor]):
    """Keep in `seen` what passes through the only layer, by name, and after "d" its gradient."""
    layer = model.model.layers["0"]

    def keep(name: str, tensor: Tensor):
        seen[name] = tensor.detach().clone()
        tensor.register_hook(lambda gradient: seen.update({"d " + name: gradient.detach().clone()}))

    def output(module: nn.Module, name: str):
        module.register_forward_hook(lambda _module, _inputs, out: keep(name, out))

    def given(module: nn.Module, name: str):
        module.register_forward_pre_hook(lambda _module, inputs: keep(name, inputs[0]))

    attention, mlp = layer.self_attn, layer.mlp
    for block, norm, inner, last, of in (
        (
            attention,
            layer.input_layernorm,
            dict(q=attention.q_proj, k=attention.k_proj, v=attention.v_proj),
            attention.o_proj,
            "a",
        ),
        (mlp, layer.post_attention_layernorm, dict(gate=mlp.gate_proj, up=mlp.up_proj), mlp.down_proj, "m"),
    ):
        given(norm, f"{of} x")
        output(norm, f"{of} norm(x)")
        given(block, f"{of} f(norm(x))")  # registered after f: it is given what f returns
        for name, linear in inner.items():
            output(linear, f"{of} {name}")
        given(last, f"{of} {'heads' if of == 'a' else 'silu(gate) up'}")
        output(last, f"{of} {'o_proj' if of == 'a' else 'down_proj'}")
        output(block, f"{of} g")  # registered after g


def block(mesh: Mesh | None, sp: bool) -> dict[str, list]:
    """Chapter 4: the numbers of a layer's tensors, and their gradients, on this rank; on one device without a mesh.

    The course's own initial matrices, 40 times as large: so numbers of a page's precision tell something.
    """
    with torch.device("meta"):
        model = Decoder(BLOCK)
    if mesh is not None:
        step04.shard_tensors(model, mesh, sp)
    materialize(model, 0, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(40 if param.dim() == 2 else 1)
    seen: dict[str, Tensor] = {}
    watch_block(model, seen)
    tokens = torch.arange(BLOCK.seq_len)[None]
    model(tokens, tokens + 1).backward()
    return {name: tensor.squeeze(0).tolist() for name, tensor in seen.items()}


def ring_work(mesh: Mesh, mode: str) -> list[dict]:
    """Chapter 5: by hop, whose keys are here, and how many pairs of a query and a key `ring_attention` computes."""
    positions, attention = step05.CONTEXT[mode]
    group, hops = mesh["dp"], []
    seq_len, (part, gradients) = 4 * group.size, step05.FORMULAS
    mine = positions(seq_len, group.rank, group.size)

    def counted(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        hops[-1]["pairs"] += len(q[0, 0]) * (len(q[0, 0]) + 1) // 2 if causal else len(q[0, 0]) * len(k[0, 0])
        hops[-1]["keys"] |= {int(number) for number in v[0, 0, :, 0]}  # the values are the positions
        return part(q, k, v, causal)

    def visible(rank: int, source: int, length: int) -> list:
        hops.append(dict(source=source, here=positions(seq_len, source, group.size).tolist(), pairs=0, keys=set()))
        return inspect.signature(attention).parameters["visible"].default(rank, source, length)

    x = mine[None, :, None, None].double()
    attention(x, x, x, group, visible=visible, kernel=(counted, gradients))
    return [hop | dict(keys=sorted(hop["keys"]), queries=mine.tolist()) for hop in hops]


def routing(mesh: Mesh, ep: int) -> dict[str, list]:
    """Chapter 7: a layer with 4 experts, 2 tokens a rank, 2 choices a token. (expert, token) of each row, by stage.

    A token is known by its numbers: those that travel are looked up among those of all ranks.
    """
    config = step07.Config(**FLAGS | dict(experts=4, experts_per_token=2, ep=ep, global_batch_size=1))
    mesh.join("sequence", "dp")
    grid = mesh.ranks.reshape(-1, ep)
    mesh.enter("ep", grid)
    layer = step07.MoE(SMALL.dim, SMALL.ffn_dim, config, mesh)
    generator = torch.Generator().manual_seed(2)
    layer.router.weight.data.normal_(0.0, 0.3, generator=generator)
    tokens = torch.randn(2 * mesh.world, SMALL.dim, generator=generator)
    seen: dict[str, Any] = {}

    def who(rows: Tensor) -> list[int]:
        return [int((tokens - row).abs().sum(-1).argmin()) for row in rows]

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        seen["by expert"], seen["counts"] = who(rows), counts.tolist()
        return rows

    def transpose_blocks(rows: Tensor, sizes: Tensor) -> Tensor:
        seen.setdefault("received", who(rows))
        seen.setdefault("arriving", sizes.tolist())
        return plain(rows, sizes)

    def visit(rows: Tensor, counts: Tensor) -> Tensor:
        seen["sorted"], seen["per expert"] = who(rows), counts.tolist()
        out = step07.visit_experts(experts, mesh["ep"], rows, counts)
        seen["home"] = who(out)
        return out

    def topk(p: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores, chosen = plain_topk(p, k)
        seen["routed"], seen["scores"] = chosen.tolist(), numbers(scores / scores.sum(-1, keepdim=True))
        return scores, chosen

    plain, plain_topk, layer.experts.forward = step07.transpose_blocks, torch.Tensor.topk, visit
    patches = mock.patch.object(step07, "transpose_blocks", transpose_blocks), mock.patch.object(Tensor, "topk", topk)
    with patches[0], patches[1], torch.no_grad():
        layer(tokens[2 * mesh.rank :][None, :2])
    return seen


def all_of_a_rank(text: Path) -> dict[str, Any]:
    """Everything that this rank saw. Chapter 1 needs one rank alone."""
    PRESETS["picture"], FLAGS["dataset"] = SMALL, str(text)
    mesh, pairs = Mesh(dp=RANKS), Mesh(dp=RANKS // 2, tp=2)
    found = dict(
        collectives=collectives(mesh),
        ring_reduce=ring_reduce(mesh),
        buckets=buckets(mesh),
        zero=[zero(stage) for stage in step03.STAGES],
        block={sp: block(pairs, sp) for sp in (True, False)},
        ring_work={mode: ring_work(mesh, mode) for mode in ring_modes()},
        routing={ep: routing(mesh, ep) for ep in (2, 4)},
    )
    if mesh.rank == 0:
        found["block"][None] = block(None, False)
        choices = product(("fp32", "bf16"), step01.RECOMPUTE)
        found["accumulation"] = {choice: accumulation(*choice) for choice in choices if choice[1] in ("none", "full")}
    return found


def ring_modes() -> list[str]:
    """The modes of chapter 5 in which keys go round the ring."""
    return [mode for mode, made in step05.CONTEXT.items() if "visible" in inspect.signature(made.attention).parameters]


def serve(rank: int, folder: str, text: Path, connection: Connection):
    """What a forked rank does: meet the others through a file, record, send, and leave."""
    torch.set_num_threads(1)
    try:
        where = f"file://{folder}/meet"
        dist.init_process_group("gloo", where, timedelta(minutes=2), world_size=RANKS, rank=rank)
        connection.send((all_of_a_rank(text), ""))
    except Exception:
        connection.send((None, traceback.format_exc()))
    os._exit(0)  # gloo's threads may be busy yet


def recorded() -> list[dict[str, Any]]:
    """By rank, what four ranks saw. Raises RuntimeError with the traceback of one that failed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(Path(step01.__file__).read_text())
        ends = [context.Pipe() for _ in range(RANKS)]
        for rank, (_, theirs) in enumerate(ends):
            context.Process(target=serve, args=(rank, folder, text, theirs), daemon=True).start()
            theirs.close()
        answers = [ours.recv() for ours, _ in ends]
    for rank, (found, error) in enumerate(answers):
        if found is None:
            raise RuntimeError(f"rank {rank} of the pictures' runs failed:\n{error}")
    return [found for found, _ in answers]
