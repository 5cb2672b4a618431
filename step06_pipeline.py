"""Step 6: pipeline parallelism. The layers are cut into stages, and micro-batches follow one another through them.

    tokens -> [ embedding, layers 0-1 ] -- x --> [ layers 2-4 ] -- x --> [ layers 5-6, norm, head ] -> loss
                  stage 0, pp rank 0    <-- dx --    stage 1    <-- dx --          stage 2

Only x and dx [batch, seq, h] cross a boundary: b s h elements a micro-batch and way, little beside tensor parallelism's
8 L of them. The price is idle time, the *bubble*: the last stage cannot start before the first micro-batch has come
through, the first cannot end before the last gradient is back. What is left of it depends on the order of the work,
the *schedule*, which is data: a list of actions for each rank (common/schedules.py), that can be printed, drawn, timed,
proved free of deadlock, and run.

    F forward    B gradient of the input    W gradient of the weights (BW: both in one go)

    4 ranks, 6 micro-batches; F is shown as the number of its micro-batch, a dot is a moment of idleness

             1f1b             0123......bw4bw5bw.bw.bw.bw    zb-h1    0123...bw4bw5bwbwbwbw
                              .012....bw3bw4bw5bw.bw.bw..             .012..b3bw4bw5bwbwbww
                              ..01..bw2bw3bw4bw5bw.bw....             ..01.b2b3bw4bw5bwbwww
                              ...0bw1bw2bw3bw4bw5bw......             ...0b1b2b3bw4bw5bwwww

    schedule      idle fraction, F = B = W    micro-batches in flight  idea
    afab          (p-1) / (m + p-1)           m                        all forward, then all backward (GPipe)
    1f1b          (p-1) / (m + p-1)           p - rank                 backward as early as possible (PipeDream-flush)
    interleaved   (p-1) / (v m + p-1)         up to v times 1f1b's     v stages a rank: v times the messages (Megatron)
    zb-h1         (p-1) / (3 m + p-1)         p - rank                 only B is urgent, W fills gaps (zero bubble)
    zb-h2         the same; 0 on each rank    2 (p - rank) - 1         twice the warm-up: once at work, no rank waits
    zbv           (p-1) / (6 m + p-1)         p, as 1f1b at worst      two stages a rank in a V: the loss is on rank 0
    dualpipe      (p/2-1) / (3 m + p/2-1)     p + 1                    from both ends at once, two copies of the weights

(from the first start to the last end, for m of 2p or more; tests/test_schedules.py proves them from the lists)

BACKWARD IN TWO PARTS. For y = x W, B computes dx = dy W^T, for which the rank before is waiting; W computes
dW = x^T dy, for which nobody is. Backward of a linear layer, cut over tp or not, here does only the first and puts a
closure for the second into a queue; W runs what is in the queue (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").

AUTOGRAD ends at a boundary. The input of a stage is a leaf; of its output only the *edge* into the graph is kept, and
the tensor itself goes away once it is sent. Backward starts from the edge with the gradient that arrives, and the
leaf's `.grad` is what travels on.

MESSAGES are asynchronous, and derived from the lists of all ranks in one pass (`communicate`). With tensor parallelism
but without sequence parallelism all tp ranks have the same x: each sends 1/tp of it, the receivers gather it.

ZeRO. Its hooks fit one micro-batch after another; here the pipeline says when a chunk's weights are needed and when its
gradients are complete. Stage 1 reduces them once, behind the chunk's last W, in the bubble. Stages 2 and 3 reduce them
after each micro-batch. Stage 3 gathers a chunk when its turn begins and frees it when another chunk's does: with one
chunk a rank, once a step; with more, at each of the turns that the schedule takes.

A tied embedding is on the first and the last stage, and its gradient is the sum of both; dualpipe has everything twice.
The records say so, and the sum is that of step 4, over the pair of ranks: mesh dimension "mirror".

Run it:    torchrun --nproc_per_node=4 step06_pipeline.py --pp 4 --cp 1 --tp 1 --schedule zb-h1
You should see step 1's losses under every schedule; runs/step06_pipeline/timeline.png shows who did what when.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import step05_cp_ring as step05
from common.comm import Mesh, Pending, all_gather, exchange, gather_objects, sum_over, world_size
from common.data import TokenData
from common.layout import global_norm, layout_of, reduction_table, sum_gradients_over, sum_partial_gradients
from common.model import Decoder, rope_tables
from common.schedules import SCHEDULES, Action, Message, Place, Step, communicate, neighbours, paths
from services.checks import check_pp, choose_chunks, mesh_sizes, split_layers
from services.devices import choose_device, choose_dtype, peak_flops
from services.evaluation import evaluate_stages, generate, pipeline_logits
from services.flags import main
from services.health import health, require_finite
from services.launch import open_mesh, require_same_flags
from services.pictures import describe, draw_timeline
from services.replicas import require_same_parameters, require_same_replicas
from services.resume import resume, save
from services.run import Run
from services.tables import table
from step01_single_gpu import Trained, apply_recompute, learning_rate
from step02_ddp import NaiveSync
from step03_zero import ZeroOptimizer, optimizer_and_sync, plan
from step04_tp_sp import ColumnProject, RowLinear, shard_tensors
from step05_cp_ring import shard_context
from theory.flops import flops_per_token, layer_costs
from theory.memory import pp_activation_bytes
from theory.traffic import partial_traffic, predictions, stage_traffic, zero_stage_traffic


@dataclass
class Config(step05.Config):
    """The flags so far and those of pipeline parallelism."""

    pp: int = 0  # ranks that share the layers; 0: 2 if the number of ranks is even, else 1
    schedule: Literal["afab", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe"] = "1f1b"  # order of the work
    chunks: int = 0  # groups of layers on each rank; 0: as many as the schedule wants, 1 or 2
    pp_split: str = ""  # layers of each stage, like 3,3,2; default: balanced by cost, embedding and head counted


# --- whose layers


class Chunk:
    """Some layers in a row, on this rank. `first`: starts from tokens; `last`: ends with the final norm and head."""

    def __init__(self, model: Decoder, layers: range, first: bool, last: bool):
        self.model, self.first, self.last = model, first, last
        self.layers = {str(n): model.model.layers[str(n)] for n in layers}

    def __call__(self, x: Tensor, positions: Tensor, end: Callable[[Tensor], Tensor]) -> Tensor:
        """Tokens int64 [batch, seq] or hidden [batch, seq, dim] -> hidden or, from the last chunk, `end` of it."""
        trunk = self.model.model
        x = trunk.embed_tokens(x) if self.first else x
        cos, sin = rope_tables(positions, self.model.config, x.dtype)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return end(trunk.norm(x)) if self.last else x

    def parameters(self) -> set[nn.Parameter]:
        """All that it computes with."""
        ends = [self.model.model.embed_tokens] * self.first + [self.model.model.norm, self.model.lm_head] * self.last
        return {param for module in [*self.layers.values(), *ends] for param in module.parameters()}


def keep_stage(model: Decoder, mesh: Mesh, ways: list[list[Place]], lengths: list[int]) -> list[Chunk]:
    """Keep the layers of this rank of `mesh["pp"]`, under their global names; returns its chunks.

    `ways` from `paths`, `lengths` of the stages in layers. Adds the pairs "mirror" to the mesh: first and last rank,
    which share a tied embedding, and with dualpipe all ranks i and p-1-i, which hold the same two stages. Records say
    on how many ranks a parameter is, and sum its gradient over the pair where that is two.
    """
    group = mesh["pp"]
    mesh.add_pairs("mirror", of="pp")
    bounds = [0, *accumulate(lengths)]
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    firsts, lasts = ({way[end][0] for way in ways} for end in (0, -1))
    trunk, layers = model.model, model.model.layers
    holders: dict[tuple[nn.Module, str], set[int]] = {(layers, n): set() for n in layers}  # by (owner, name)
    holders |= {(trunk, "embed_tokens"): firsts | lasts if tied else firsts, (trunk, "norm"): lasts}
    holders[model, "lm_head"] = lasts
    kept: dict[int, Chunk] = {}
    for way in ways:
        for stage, (rank, chunk) in enumerate(way):
            numbers = range(bounds[stage], bounds[stage + 1])
            for n in numbers:
                holders[layers, str(n)].add(rank)
            if rank == group.rank:
                kept[chunk] = Chunk(model, numbers, first=stage == 0, last=stage == len(way) - 1)
    for (owner, name), ranks in holders.items():
        params = list(getattr(owner, name).parameters())
        if group.rank not in ranks:
            setattr(owner, name, None)
        elif group.size > 1 and not (tied and name == "lm_head"):
            for param in params:
                param.parallel_layout = replace(layout_of(param), held=(("pp", len(ranks)),))
            if len(ranks) == 2:
                sum_gradients_over(params, "mirror")
    for name in [name for name, layer in layers.items() if layer is None]:
        del layers[name]
    return [kept[chunk] for chunk in sorted(kept)]


# --- backward in two parts


class Later:
    """Weight gradients that wait for their W, as functions in the order in which backward left them."""

    def __init__(self):
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, weights: list[nn.Parameter], gradients: Callable[[], list[Tensor | None]]) -> list[None]:
        """Put the gradients of `weights` off; returns what autograd is told instead of them."""

        def run():
            found = [(weight, grad) for weight, grad in zip(weights, gradients(), strict=True) if grad is not None]
            # Autograd itself adds them to `.grad`, so that gradient dtypes and ZeRO's hooks work as ever.
            torch.autograd.backward([weight for weight, _ in found], [grad for _, grad in found])

        self.waiting.append(run)
        return [None] * len(weights)

    def take(self) -> list[Callable[[], None]]:
        """What backward has left since the last call."""
        taken, self.waiting = self.waiting, []
        return taken


class LinearLater(torch.autograd.Function):
    """x W^T whose backward computes dx = dy W and puts dW = dy^T x off."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, later: Callable) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]; `later`: a `Later` that knows the weight."""
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """dy [..., out] -> dx [..., in]."""
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.later(lambda: [grad.flatten(0, -2).T @ x.flatten(0, -2)])
        return grad @ weight, None, None


class SplitLinear(nn.Module):
    """Replaces a linear layer: its weight gradient waits."""

    def __init__(self, weight: nn.Parameter, later: Later):
        super().__init__()
        self.weight, self.later = weight, later

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return LinearLater.apply(x, self.weight, partial(self.later, [self.weight]))


def split_backward(model: Decoder) -> Later:
    """Let the weight gradients of all linear layers (cut over tp or not) wait in the queue that is returned.

    Norms, embedding and head (whose gradients exist since forward) stay with the input gradients.
    """
    later = Later()
    for layer in model.model.layers.values():
        for block in list(layer.modules()):
            if isinstance(getattr(block, "project", None), ColumnProject):
                block.project.later = later
            for name, linear in list(block.named_children()):
                if isinstance(linear, RowLinear):
                    linear.multiply = lambda x, weight: LinearLater.apply(x, weight, partial(later, [weight]))
                elif isinstance(linear, nn.Linear):
                    setattr(block, name, SplitLinear(linear.weight, later))
    return later


# --- running a schedule


class Pipeline:
    """Executes action lists. Data moves by asynchronous point-to-point messages, in the order that `communicate` found.

    `boundary`: (tokens, dim) of a sequence's hidden states between two stages on this rank. ZeRO, if `sync` is that, is
    told when a chunk's weights are needed and when its gradients are complete.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        ways: list[list[Place]],
        mesh: Mesh,
        sp: bool,
        boundary: tuple[int, int],
        dtype: torch.dtype,
        later: Later | None,
        sync: NaiveSync | ZeroOptimizer,
    ):
        self.chunks, self.ways, self.group, self.later, self.sync = chunks, ways, mesh["pp"], later, sync
        self.before, self.after = neighbours(ways)
        self.tp, self.dtype = mesh["tp"], dtype
        self.slices = 1 if sp else self.tp.size  # without SP all tp ranks have the same: each sends a part
        self.wire = boundary[0], boundary[1] // self.slices
        units = sync.units if isinstance(sync, ZeroOptimizer) else []
        self.units = [[u for u in units if chunk.parameters() & set(u.named.values())] for chunk in chunks]
        self.spans: list[tuple[Action, Any, Any]] = []  # (action, start, end) of the last run with gradients
        self.began: Any = None
        self.met: set[tuple[int, Message]] = set()  # (sequences, message) that both ends have compared shapes of
        sum_over(self.group, 0.0)  # NCCL wants all ranks of a group in its first call

    def run(
        self,
        program: list[Step],
        batch: int,
        first: Callable[[int], Tensor],
        end: Callable[[int, Tensor], Tensor],
        positions: Tensor,
        phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
    ) -> Tensor:
        """Run one rank's program; returns the sum of what `end` gave here (0 if there is no last chunk), detached.

        `batch`: sequences in a micro-batch. `first(i)`: tokens int64 [batch, seq/cp] of micro-batch i. `end(i, hidden)`
        is what the last chunk makes of its hidden states, the scaled loss in training. `phase` as `Run.phase`.
        """
        self.inbox: dict[tuple, tuple[Tensor, Pending | None, list]] = {}  # (F or B, micro-batch, place it goes to)
        self.outbox: dict[tuple, Tensor] = {}
        self.graphs: dict[tuple[int, int], tuple[Tensor, Any]] = {}  # (micro-batch, chunk) -> (input, output's edge)
        self.put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.sending: dict[int, list[tuple[Pending, Tensor]]] = defaultdict(list)  # by rank it goes to
        self.total, self.entered = torch.zeros((), device=self.group.device), None
        if torch.is_grad_enabled():
            self.began, self.spans = self.now(), []
        todo = Counter(step.what.chunk for step in program if step.kind == "run" and "W" in step.what.kind)
        for kind, what in program:
            fresh = kind != "run" and (batch, what) not in self.met  # all steps send the same: compare shapes once
            if fresh:
                self.met.add((batch, what))
            if kind == "send":
                tensor = self.outbox.pop((what.kind, what.micro_batch, what.target))
                pending = exchange([(tensor, what.target[0])], [], self.group, check=fresh)
                self.sending[what.target[0]].append((pending, tensor))
            elif kind == "recv":
                with phase("receive" if what.kind == "F" else "backward"):
                    buffer = torch.empty(batch, *self.wire, dtype=self.dtype, device=self.group.device)
                pending = exchange([], [(buffer, what.source[0])], self.group, check=fresh)
                sent = self.sending.pop(what.source[0], [])
                self.inbox[what.kind, what.micro_batch, what.target] = buffer, pending, sent
            else:
                if what.kind != "W":  # which needs no weights
                    self.enter(what.chunk)
                self.act(what, first, end, positions, phase)
                if "W" in what.kind:
                    todo[what.chunk] -= 1
                    self.complete(what.chunk, todo)
        for pending, _ in chain.from_iterable(self.sending.values()):
            pending.wait()
        return self.total

    def act(self, action: Action, first: Callable, end: Callable, positions: Tensor, phase: Callable):
        """Compute one action, once its input is there."""
        kind, i, chunk = action
        x = None
        if kind != "W" and not (self.chunks[chunk].first if kind == "F" else self.chunks[chunk].last):
            x = self.receive(kind[:1], i, chunk)
        begun = self.now()
        with phase("forward" if kind == "F" else "backward"):
            if kind == "F":
                self.forward(i, chunk, first(i) if x is None else x, end, positions)
            elif kind != "W":
                self.backward(i, chunk, x)
                self.put_off[i, chunk] = self.later.take() if self.later is not None else []
            if "W" in kind:
                for run in self.put_off.pop((i, chunk)):
                    run()
        if torch.is_grad_enabled():
            self.spans.append((action, begun, self.now()))

    def forward(self, i: int, chunk: int, x: Tensor, end: Callable, positions: Tensor):
        """F: keep the input and the *edge* of the output in autograd's graph, not the output, which goes away."""
        if x.is_floating_point():
            x.requires_grad_(torch.is_grad_enabled())
        out = self.chunks[chunk](x, positions, partial(end, i))
        if torch.is_grad_enabled():
            self.graphs[i, chunk] = x, get_gradient_edge(out)
        if self.chunks[chunk].last:
            self.total = self.total + out.detach()
        else:
            self.deliver("F", i, chunk, out.detach())

    def backward(self, i: int, chunk: int, grad: Tensor | None):
        """B or BW: from the output's gradient (None: the loss) to the input's."""
        x, edge = self.graphs.pop((i, chunk))
        torch.autograd.backward((edge,), None if grad is None else (grad,))
        if not self.chunks[chunk].first:
            self.deliver("B", i, chunk, x.grad)

    def deliver(self, kind: str, i: int, chunk: int, tensor: Tensor):
        """Hand a boundary tensor to the next place (F) or the one before (B)."""
        here = (self.group.rank, chunk)
        there = (self.after if kind == "F" else self.before)[here]
        if there[0] == self.group.rank:
            self.inbox[kind, i, there] = tensor, None, []
        else:
            if self.slices > 1:
                tensor = tensor.chunk(self.slices, -1)[self.tp.rank]
            self.outbox[kind, i, there] = tensor.contiguous()

    def receive(self, kind: str, i: int, chunk: int) -> Tensor:
        """Wait for a boundary tensor; without sequence parallelism put its parts from the tp ranks together.

        What was sent to its rank before has been received there by now, and is freed.
        """
        tensor, pending, sent = self.inbox.pop((kind, i, (self.group.rank, chunk)))
        if pending is None:
            return tensor
        for message in (pending, *(message for message, _ in sent)):
            message.wait()
        if self.slices == 1:
            return tensor
        parts = tensor.new_empty(self.slices, *tensor.shape)
        all_gather(parts.view(-1), tensor.view(-1), self.tp, "(boundary)").wait()
        return torch.cat(tuple(parts), -1)

    def enter(self, chunk: int):
        """Have the weights of a chunk. ZeRO's stage 3 gathers them, and frees those of the chunk before."""
        if chunk != self.entered:
            for unit in self.units[self.entered] if self.entered is not None else ():
                if unit.stage == 3 and unit not in self.units[chunk]:
                    unit.free()
            for unit in self.units[chunk]:
                unit.gather()
            for unit in self.units[chunk]:
                unit.ready()
            self.entered = chunk

    def complete(self, chunk: int, todo: Counter):
        """ZeRO's stage 1: start to reduce the gradients of a chunk behind its last weight gradient, in the bubble."""
        if not todo[chunk]:
            unfinished = [unit for c, units in enumerate(self.units) if todo[c] for unit in units]
            for unit in self.units[chunk]:
                if unit.stage == 1 and unit.trained and unit not in unfinished and unit.gradient is not None:
                    self.sync.reduce(unit)

    def now(self) -> Any:
        """A moment: seconds, or an event in a GPU's stream."""
        if self.group.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timeline(self, since: float | None = None) -> list[list]:
        """The actions of the last run with gradients, [kind, micro-batch, chunk, start, end].

        Seconds from its beginning or, on a CPU, from the moment `since`. Waits for a GPU: not for a loop's inside.
        """

        def seconds(moment: Any) -> float:
            if isinstance(moment, float):
                return moment - (self.began if since is None else since)
            moment.synchronize()
            return self.began.elapsed_time(moment) / 1e3

        return [[*action, seconds(start), seconds(end)] for action, start, end in self.spans]


# --- what it costs


# --- looking at the model


def scaled_loss(model: Decoder, targets: tuple[Tensor, ...], scale: float, i: int, hidden: Tensor) -> Tensor:
    """The loss of micro-batch i, a scalar, divided by the targets of the global batch (and times the loss scale)."""
    return model.lm_head.loss(hidden, targets[i]) * scale


def train(config: Config, observe=None) -> Trained:
    """The whole run. `observe(step, optimizer)`, if given, sees each step's complete gradients before the update."""
    world = world_size()
    check_pp(config, world)
    sizes = mesh_sizes(config, world)
    pp, dp, cp, tp = sizes.values()
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    m = config.model_config()
    with open_mesh(sizes, device, config.backend, config.timeout) as mesh:
        require_same_flags(config, mesh)
        mesh.add("data", dp * cp, stride=tp)
        group, d, r = mesh["data"], mesh["dp"].rank, mesh["pp"].rank
        share = slice(d * config.global_batch_size // dp, (d + 1) * config.global_batch_size // dp)
        data = TokenData(config.dataset, m.seq_len, config.global_batch_size, config.seed, m.vocab_size)
        micro_batches = config.global_batch_size // dp // config.micro_batch_size
        v = choose_chunks(config)
        ways = paths(config.schedule, pp, v)
        lists = [SCHEDULES[config.schedule](pp, micro_batches, v, rank) for rank in range(pp)]
        program = communicate(lists, ways)[r]

        with torch.device("meta"):
            model = Decoder(m)
        n_parameters = sum(p.numel() for p in model.parameters())
        lengths = split_layers(config, m, len(ways[0]), layer_costs(m))
        chunks = keep_stage(model, mesh, ways, lengths)
        shard_tensors(model, mesh, config.sp, config.tp_overlap)
        own = shard_context(model, mesh["cp"], config.cp_mode)
        sum_gradients_over(model.parameters(), "dp")
        later = split_backward(model) if any(action.kind == "W" for action in lists[r]) else None
        apply_recompute(model, config.recompute)
        if config.compile:
            for layer in model.model.layers.values():
                layer.forward = torch.compile(layer.forward)
        by_name = plan(model)[0], []  # units without hooks: the pipeline says when they are needed
        optimizer, sync = optimizer_and_sync(model, group, config, device, dtype, mesh, by_name)
        boundary = m.seq_len // cp // (tp if config.sp else 1), m.dim
        pipeline = Pipeline(chunks, ways, mesh, config.sp, boundary, dtype, later, sync)
        positions = own.to(device)
        start = resume(optimizer, config, mesh) if config.resume else 0
        if config.zero == 0:
            require_same_parameters(model, group)
        if config.generate:
            logits_of = partial(pipeline_logits, pipeline, model, positions, mesh)
            text = generate(logits_of, m.seq_len, config.generate, 400, config.seed)
            if mesh.rank == 0:
                print(text)
            return Trained(model, optimizer, [])

        predicted, traffic = predictions(config, m, optimizer, sync, micro_batches)
        predicted["activations"] = pp_activation_bytes(config, m, chunks, lists[r], tp, cp, dtype, device.type == "cpu")
        if config.zero:
            traffic = zero_stage_traffic(optimizer, pipeline, lists[r])
        traffic |= stage_traffic(config, m, pipeline, program, tp, cp, dtype)
        traffic |= partial_traffic(optimizer, mesh, ["tp", "kv", "mirror"])
        flops, peak = flops_per_token(m, config.recompute), world * peak_flops(device, dtype, config.peak_tflops)
        with Run(config, device, flops, peak, mesh) as run:
            run.say(f"{config.model}: {n_parameters:,} parameters, {dtype}, {device}")
            run.say(mesh.picture())
            rows = [row for part in gather_objects(reduction_table(model, list(mesh.sizes)), mesh) for row in part]
            run.say(table(list({row[0]: row for row in rows}.values())))
            run.say(describe(config.schedule, ways, lists, lengths))
            run.say(run.memory_table(predicted))
            run.watch = sum(action.kind == "F" for action in lists[r])
            for step in run.steps(start):
                with run.phase("data"):
                    batch = data.batch(step, share)
                    tokens, targets = (x[:, own].to(device).split(config.micro_batch_size) for x in batch[:2])
                sync.begin()
                run.measure(optimizer.tensors())
                sum_over(mesh["pp"], 0.0)  # the timelines of all ranks begin here
                end = partial(scaled_loss, model, targets, optimizer.loss_scale / batch.n_targets)
                total = pipeline.run(program, config.micro_batch_size, tokens.__getitem__, end, positions, run.phase)
                loss = total / optimizer.loss_scale
                sync.finish()
                sum_partial_gradients(optimizer, mesh, ["tp", "kv", "mirror"])
                more = health(run, loss, optimizer)
                loss, stopping = sum_over(group, loss, run.stopping)
                loss, stopping = sum_over(mesh["pp"], loss, stopping)  # only the last stage has a loss
                (stopping,) = sum_over(mesh["tp"], stopping)  # a signal may reach one rank a step before another
                run.stopping = stopping > 0
                require_finite(loss, step, run)
                if observe is not None:
                    observe(step, optimizer)
                run.measure(optimizer.tensors())
                with run.phase("optimizer"):
                    norm = global_norm(optimizer, mesh, ["tp", "pp"], sliced="data" if config.zero else "")
                    grad_norm = optimizer.step(learning_rate(step, config), norm, loss)
                if optimizer.loss_scale < 1:  # worse than an fp16 overflow, which skips a step and halves the scale
                    require_finite(grad_norm, step, run, "gradient norm")
                run.measure(optimizer.tensors())
                more |= dict(skipped=True) if optimizer.skipped else {}
                if config.eval_every and run.due(config.eval_every, step):
                    with run.phase("validation"):
                        part = evaluate_stages(pipeline, model, data, config, positions, d, dp)
                        loss_sum, n_targets = sum_over(mesh["pp"], *sum_over(group, *part))
                        more["validation_loss"] = loss_sum / max(1, n_targets)
                run.log(loss, grad_norm, learning_rate(step, config), config.global_batch_size * m.seq_len, **more)
                if config.check_replicas and run.due(config.check_replicas, step):
                    require_same_replicas(optimizer, mesh)
                if run.stopping or (config.save_every and run.due(config.save_every, step)):
                    save(run, step + 1, optimizer, config)
            if config.zero == 0:
                require_same_parameters(model, group)
            optimizer.ready()
            run.finish(predicted, traffic)
            draw_timeline(run, config.schedule, pipeline, lists, mesh)
    return Trained(model, optimizer, run.history)


if __name__ == "__main__":
    main(train, Config)
