"""Step 6: pipeline parallelism. The layers are cut into stages, and micro-batches follow one another through them.

    tokens -> [ embedding, layers 0-1 ] -- x --> [ layers 2-4 ] -- x --> [ layers 5-6, norm, head ] -> loss
                  stage 0, pp rank 0    <-- dx --    stage 1    <-- dx --          stage 2

Only x and dx [batch, seq, h] cross a boundary: 2 b s h elements a micro-batch, about 1/(4 L) of what tensor parallelism
sends for L layers. The price is idle time, the *bubble*: at first the last stage has no input yet, at the
end the first waits for gradients. Its size depends on the order of the work, the *schedule*. A schedule is data: a list
of actions for each rank (common/schedules.py). It can be printed, drawn, timed, proved free of deadlock, and run.

    F forward    B gradient of the input    W gradient of the layers' matrices (BW: both in one go)
    p ranks, m micro-batches, v chunks (stages) on a rank

    4 ranks, 6 micro-batches; F is shown as the number of its micro-batch, b and w are B and W, a dot is idle time

             1f1b             0123......bw4bw5bw.bw.bw.bw    zb-h1    0123...bw4bw5bwbwbwbw
                              .012....bw3bw4bw5bw.bw.bw..             .012..b3bw4bw5bwbwbww
                              ..01..bw2bw3bw4bw5bw.bw....             ..01.b2b3bw4bw5bwbwww
                              ...0bw1bw2bw3bw4bw5bw......             ...0b1b2b3bw4bw5bwwww

    schedule      bubble, F = B = W           micro-batches in flight  idea
    afab          (p-1) / (m + p-1)           m                        all forward, then all backward (GPipe)
    1f1b          (p-1) / (m + p-1)           p - rank                 backward as early as possible (PipeDream-flush)
    interleaved   (p-1) / (v m + p-1)         (v-1) p + 2 (p-rank) - 1 v stages a rank: v times the messages (Megatron)
    zb-h1         (p-1) / (3 m + p-1)         p - rank                 only B is urgent, W fills gaps (zero bubble)
    zb-h2         as zb-h1                    2 (p - rank) - 1         twice the warm-up: once at work, no rank waits
    zb-auto       zb-h1's or less, memory 1   within --zb-memory       searched for given times (theory/zb_auto.py)
    zbv           (p-1) / (6 m + p-1)         2 p, of half the layers  two stages a rank in a V: the loss is on rank 0
    dualpipe      (p/2-1) / (3 m + p/2-1)     p + 1                    from both ends at once, two copies of the weights

(Bubble: idle share of the time from any rank's first start to any rank's last end; m >= 2p, dualpipe m even. In flight:
F to end of B, in stages of L/(v p) layers, dualpipe L/p; interleaved: if p divides m. Until W: zb-h1 p, zb-h2 2p - 1.)

A PROGRAM is one rank's list with its messages. recv and send post a message and go on; run waits for what it needs.
Rank 1 of 3, 1f1b, 3 micro-batches (F1, BW1: of micro-batch 1; B1: the dx that BW1 makes):

    recv F0  recv F1  run F0  send F0  recv F2  run F1  send F1  recv B0  run BW0  send B0
    recv B1  run F2  send F2  run BW1  send B1  recv B2  run BW2  send B2

BACKWARD IN TWO PARTS. For y = x W, B computes dx = dy W^T, for which the rank before waits. The action W computes
dW = x^T dy, for which nobody waits: backward puts a closure for it into a store (Qi et al. 2023, "Zero Bubble").

AUTOGRAD ends at a boundary. The input of a stage is a leaf. Of its output only the *edge* into the graph is kept.
Backward starts from this edge with the gradient that arrives, and the leaf's `.grad` is what travels on.

ZeRO's hooks fit one micro-batch after another. Here the pipeline says when it needs a chunk's weights and when a chunk
is done. With --zero 1 gradients are reduced once, after the chunk's last W; with --zero 2 and 3 once a micro-batch.
--zero 3 gathers a chunk when its turn begins, frees it when another's begins: with one chunk, it stays for the step.

A tied embedding is on two stages, and its gradient is the sum of both. dualpipe has every stage twice. The records say
so, and `sum_partial_gradients` sums them over the pair of ranks, the mesh dimension "mirror".

Run it:    torchrun --nproc_per_node=4 step06_pipeline.py --pp 4 --cp 1 --tp 1 --schedule zb-h1
You should see step 1's losses (interleaved, zbv: both with --n-layers 8); timeline.png shows who did what when.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import step05_cp_ring as step05
from common.comm import Group, Mesh, Pending, all_gather, exchange, sum_over
from common.layout import global_norm, layout_of, note_gradient_sum, sum_partial_gradients
from common.model import Decoder, rope_tables
from common.schedules import Action, Output, Place, Plan, communicate, needs, neighbours
from common.trainer import Trained, Trainer, main, start
from step01_single_gpu import wrap_layers
from step03_zero import Unit, ZeroOptimizer, make_optimizer
from step04_tp_sp import RowParallelLinear, input_gradient, keep_tokens, shard_tensors
from step05_cp_ring import shard_context


@dataclass
class Config(step05.Config):
    """The flags so far and those of pipeline parallelism."""

    pp: int = 0  # ranks that share the layers; 0: 2 if the number of ranks is even, else 1
    schedule: Literal["afab", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-auto", "zbv", "dualpipe"] = "1f1b"  # order
    zb_memory: float = 1.0  # zb-auto: activations that a rank may hold at most, in units of 1f1b's (--pp micro-batches)
    zb_costs: str = ""  # zb-auto: times of F, B, W and a message, like 18.5,18.1,9.3,0.6; default: by FLOPs
    chunks: int = 0  # groups of layers on each rank; 0: as many as the schedule wants, 1 or 2
    pp_split: str = ""  # layers of each stage, like 3,3,2; default: balanced by cost, embedding and head counted


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


def keep_stage(model: Decoder, mesh: Mesh, plan: Plan) -> list[Chunk]:
    """Keep the layers of this rank of `mesh["pp"]`, under their global names; returns its chunks.

    Adds "mirror" to the mesh, the pairs i, p-1-i. With dualpipe both have the same two stages; else only the ends share
    a tied embedding (zbv: none). Records say how many ranks hold a parameter; two sum its gradient.
    """
    rank, trunk = mesh["pp"].rank, model.model
    mesh.add_pairs("mirror", of="pp")
    tied, bounds = model.lm_head.weight is trunk.embed_tokens.weight, [0, *accumulate(plan.lengths)]
    holders: dict[tuple[nn.Module, str], set[int]] = defaultdict(set)  # (owner, name of its child) -> ranks
    chunks: dict[int, Chunk] = {}
    for placement in plan.placements:
        for stage, place in enumerate(placement):
            layers, first, last = range(*bounds[stage : stage + 2]), stage == 0, stage == len(placement) - 1
            parts = [(trunk.layers, str(n)) for n in layers] + [(trunk, "norm"), (model, "lm_head")] * last
            for part in parts + [(trunk, "embed_tokens")] * (first or (last and tied)):
                holders[part].add(place.rank)
            if place.rank == rank:
                chunks[place.chunk] = Chunk(model, layers, first, last)
    for (owner, name), ranks in holders.items():
        params = list(getattr(owner, name).parameters())
        if rank not in ranks:
            owner._modules.pop(name) if owner is trunk.layers else setattr(owner, name, None)
        elif mesh["pp"].size > 1 and not (tied and name == "lm_head"):  # if tied, it is embed_tokens' weight
            for param in params:
                param.parallel_layout = replace(layout_of(param), held=(("pp", len(ranks)),))
            if len(ranks) == 2:
                note_gradient_sum(params, "mirror")
    return [chunks[number] for number in sorted(chunks)]


class WeightGradStore:
    """Weight gradients that wait for their W: closures in the order in which backward left them."""

    def __init__(self):
        self.waiting: list[Callable[[], None]] = []

    def put(self, weights: list[nn.Parameter], gradients: Callable[[], list[Tensor]]):
        """Put off what `gradients` finds. Autograd will add it to `.grad`, so dtypes and hooks work as ever."""
        if weights:
            self.waiting.append(lambda: torch.autograd.backward(weights, gradients()))

    def pop(self) -> list[Callable[[], None]]:
        """What backward has left since the last call."""
        popped, self.waiting = self.waiting, []
        return popped


class SplitFunction(torch.autograd.Function):
    """Linear layers of one input whose backward computes dx and puts dW off. What tp gathers is gathered again in W."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, gather: Callable, reduce: Callable, store: Any, *weights: Tensor):
        """As step 4's ColumnParallelLinear: x [batch, seq, in], weights [out, in] -> [batch, seq, out] for each."""
        ctx.arguments = group, gather, reduce, store, weights  # leaves: W fills their .grad; saved ones may be copies
        ctx.save_for_backward(x)
        full = gather(x, group).wait()
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """dy of each -> dx."""
        (group, gather, reduce, store, weights), x = ctx.arguments, ctx.saved_tensors[0].detach()  # W keeps no graph
        trained = [(weight, grad) for weight, grad in zip(weights, grads, strict=True) if weight.requires_grad]

        def weight_gradients() -> list[Tensor]:
            full = gather(x, group).wait().flatten(0, -2)
            return [grad.flatten(0, -2).T @ full for _, grad in trained]

        store.put([weight for weight, _ in trained], weight_gradients)
        dx = reduce(input_gradient(grads, weights), group).wait() if ctx.needs_input_grad[0] else None
        return dx, *[None] * (4 + len(weights))


def split_project(project: Any, store: WeightGradStore, x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Instead of step 4's `project`: the weight gradients wait."""
    weights = [linear.weight for linear in linears]
    return list(SplitFunction.apply(x, project.group, project.gather, project.reduce, store, *weights))


def split_linear(linear: nn.Module, store: WeightGradStore, x: Tensor) -> Tensor:
    """Instead of the forward of a linear layer, plain or row-parallel: its weight gradient waits."""
    (y,) = SplitFunction.apply(x, None, keep_tokens, keep_tokens, store, linear.weight)
    return linear.add(y) if isinstance(linear, RowParallelLinear) else y


def split_backward(model: Decoder, plan: Plan) -> WeightGradStore | None:
    """Let the weight gradients of all linear layers but the head wait in a store, if the plan has W apart from B."""
    if all(action.kind != "W" for row in plan.lists for action in row):
        return None
    store = WeightGradStore()
    for layer in model.model.layers.values():
        for block in layer.modules():
            project = getattr(block, "project", None)
            if getattr(project, "overlap", False):  # step 4's ColumnParallel; else its linears, below
                block.project = torch.compiler.disable(partial(split_project, project, store))
            if isinstance(block, nn.Linear | RowParallelLinear):
                block.forward = torch.compiler.disable(partial(split_linear, block, store))
    return store


class PipelineZero(ZeroOptimizer):
    """Step 3's ZeRO, told by the pipeline which chunk it needs and which is done, instead of by hooks on modules."""

    def follow_modules(self):
        """No hooks: `serve` says which chunks there are."""

    def serve(self, chunks: list[Chunk], actions: list[Action]):
        """Learn which units each chunk has, and how many weight gradients it finds in a step."""
        params = [chunk.parameters() for chunk in chunks]
        self.chunk_units = [[unit for unit in self.units if found & set(unit.named.values())] for found in params]
        self.weight_gradients = Counter(action.chunk for action in actions if "W" in action.kind)
        self.entered: list[Unit] = []  # the units of the chunk whose turn it is

    def begin(self):
        """As in step 3; no chunk has its turn, and all its W are still to come."""
        super().begin()
        self.left, self.entered = self.weight_gradients.copy(), []

    def need(self, chunk: int):
        """Have the weights of a chunk. --zero 3 gathers them, and frees those of the chunk before."""
        units = self.chunk_units[chunk]
        for unit in self.entered:
            if self.stage == 3 and unit not in units:
                unit.free()
        for unit in units:
            unit.gather()  # nothing, where the weights are there already
        for unit in units:
            unit.ready()
        self.entered = units

    def completed(self, unit: Unit, name: str, param: nn.Parameter):
        """As in step 3, unless backward has put this gradient off."""
        if param.grad is not None:
            super().completed(unit, name, param)

    def done(self, chunk: int):
        """A weight gradient of a chunk was found. After its last, --zero 1 reduces (tied: after both chunks' last)."""
        self.left[chunk] -= 1
        if self.stage == 1 and not self.left[chunk]:
            unfinished = [unit for c, units in enumerate(self.chunk_units) if self.left[c] for unit in units]
            for unit in self.chunk_units[chunk]:
                if unit.gradient is not None and unit not in unfinished:
                    self.reduce(unit)


class Pipeline:
    """Runs programs: posts sends and receives, and acts. Messages are keyed by the output that they carry."""

    def __init__(
        self, model: Decoder, chunks: list[Chunk], plan: Plan, positions: Tensor, store: Any, config: Any, run: Trainer
    ):
        """`positions` int64 [seq]: which tokens of a sequence are here. Makes `optimizer` and `sync` as step 3."""
        self.model, self.chunks, self.positions, self.store, mesh = model, chunks, positions, store, run.mesh
        (self.placements, self.lengths, self.lists), self.tp, self.dtype = plan, mesh["tp"], run.dtype
        self.group = mesh.groups.get("narrow pp", mesh["pp"])  # narrow: --compress-activations
        self.before, self.after = neighbours(self.placements)
        self.actions = self.lists[self.group.rank]
        self.program = communicate(self.lists, self.placements)[self.group.rank]
        self.slices = 1 if config.sp else self.tp.size  # without SP all tp ranks have the same x: each sends a part
        self.wire = len(positions) // (self.tp.size if config.sp else 1), model.config.dim // self.slices  # [seq, dim]
        if config.zero:
            self.zero = self.optimizer = self.sync = PipelineZero(model, config, mesh, run.dtype, run.homes(model))
            self.zero.serve(chunks, self.actions)
        else:
            self.zero, (self.optimizer, self.sync) = None, make_optimizer(model, config, run)
        self.inbox: dict[Output, tuple[Tensor, list[Pending]]] = {}  # what to wait for before a tensor may be used
        self.outputs: dict[Output, Tensor] = {}  # of this rank, for the next stage (F) or the one before (B)
        self.sent: dict[int, list[Pending]] = defaultdict(list)  # by rank, what may still be under way
        self.graphs: dict[tuple[int, int], tuple[Tensor, Any]] = {}  # (micro-batch, chunk) -> (input, output's edge)
        self.put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}  # (micro-batch, chunk) -> weight gradients
        self.compare = True  # in the first run, with gloo, both ends compare the shapes of their messages
        sum_over(mesh["pp"], 0.0)  # NCCL wants all ranks of a group in its first call

    def run(
        self, micro_batches: Sequence[Tensor], end: Callable, program: list, phase: Callable | None = None
    ) -> Tensor:
        """Run a program; returns the sum of what `end` gave on this rank, detached (0 without the last stage).

        `micro_batches`: tokens int64 [batch, seq] each. `end(i, hidden)`: what the last chunk makes of its hidden
        states; in training the loss of micro-batch i. `phase`: in training the Trainer's.
        """
        self.micro_batches, self.end, self.phase = micro_batches, end, phase or (lambda *_: nullcontext())
        self.total = torch.zeros((), device=self.group.device)
        verbs = {"run": self.act, "send": self.send, "recv": self.receive}
        for step in program:
            verbs[step.kind](step.what, step.peer)
        while self.sent:
            for pending in self.sent.popitem()[1]:
                pending.wait()
        self.compare = False
        return self.total

    def send(self, output: Output, peer: int):
        """Post a send."""
        tensor = self.outputs.pop(output).chunk(self.slices, -1)[self.tp.rank if self.slices > 1 else 0].contiguous()
        self.sent[peer].append(exchange([(tensor, peer)], [], self.group, check=self.compare))

    def receive(self, output: Output, peer: int):
        """Post a receive. `fetch` waits for it, and for all sent to `peer` before, which had to come first."""
        with self.phase("receive" if output[0] == "F" else "backward"):
            shape = len(self.micro_batches[0]), *self.wire
            buffer = torch.empty(shape, dtype=self.dtype, device=self.group.device)  # its bytes count in this phase
        pending = exchange([], [(buffer, peer)], self.group, check=self.compare)
        self.inbox[output] = buffer, [pending, *self.sent.pop(peer, [])]

    def fetch(self, output: Output) -> Tensor:
        """The output of another stage, waited for if it comes from another rank, put together from its parts."""
        if output in self.outputs:
            return self.outputs.pop(output)
        tensor, messages = self.inbox.pop(output)
        for pending in messages:
            pending.wait()
        if self.slices > 1:
            parts = tensor.new_empty(self.slices, *tensor.shape)
            all_gather(parts.view(-1), tensor.view(-1), self.tp, "(boundary)").wait()
            tensor = torch.cat(tuple(parts), -1)
        return tensor

    def act(self, action: Action, _peer: None):
        """Compute one action, once its input is there."""
        kind, i, chunk = action
        here = Place(self.group.rank, chunk)
        if kind != "W" and self.zero is not None:
            self.zero.need(chunk)
        others = [output for output in needs(action, here.rank, self.before, self.after) if output[2] != here]
        x = self.fetch(others[0]) if others else None  # from the stage before (F) or after (B, BW)
        with self.phase("forward" if kind == "F" else "backward", action):
            if kind == "F":
                self.forward(i, chunk, self.micro_batches[i] if x is None else x)
            elif kind != "W":
                self.backward(i, chunk, x)
            for weight_gradient in self.put_off.pop((i, chunk)) if "W" in kind else ():
                weight_gradient()
        if "W" in kind and self.zero is not None:
            self.zero.done(chunk)

    def forward(self, i: int, chunk: int, x: Tensor):
        """F: keep the input and the *edge* of the output in autograd's graph, not the output, which goes away."""
        if x.is_floating_point():
            x.requires_grad_(torch.is_grad_enabled())
        out = self.chunks[chunk](x, self.positions, lambda hidden: self.end(i, hidden))
        if torch.is_grad_enabled():
            self.graphs[i, chunk] = x, get_gradient_edge(out)
        if self.chunks[chunk].last:
            self.total = self.total + out.detach()
        else:
            self.outputs["F", i, Place(self.group.rank, chunk)] = out.detach()

    def backward(self, i: int, chunk: int, grad: Tensor | None):
        """B or BW: from the output's gradient (None: the loss) to the input's."""
        x, edge = self.graphs.pop((i, chunk))
        torch.autograd.backward((edge,), None if grad is None else (grad,))
        self.put_off[i, chunk] = self.store.pop() if self.store is not None else []
        if not self.chunks[chunk].first:
            self.outputs["B", i, Place(self.group.rank, chunk)] = x.grad

    def step(self, tokens: Sequence[Tensor], targets: Sequence[Tensor], scale: float, phase: Callable | None) -> Tensor:
        """Forward and backward of all micro-batches, int64 [batch, seq] each; the sum of losses times `scale`."""
        end = lambda i, hidden: self.model.lm_head.loss(hidden, targets[i]) * scale  # noqa: E731
        return self.run(tokens, end, self.program, phase)

    @torch.no_grad()
    def look(self, tokens: Tensor, batch: int, end: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Forward only, to validate or generate: tokens int64 [rows, seq], `batch` rows at a time; the sum of `end`."""
        micro_batches, placement = tokens.split(batch), self.placements[0]
        lists: list[list[Action]] = [[] for _ in self.lists]
        for rank, chunk in placement:
            lists[rank] += [Action("F", i, chunk) for i in range(len(micro_batches))]
        return self.run(micro_batches, end, communicate(lists, [placement])[self.group.rank])


def train(config: Config, observe=None) -> Trained:
    """The whole run; `run` (common/trainer.py) is what surrounds it."""
    with start(config, observe) as run:
        mesh, plan = run.mesh, run.plan_pipeline()  # layers balanced by cost: services/checks.py
        with torch.device("meta"):
            model = Decoder(run.shape)
        chunks = keep_stage(model, mesh, plan)  # these layers are mine
        shard_tensors(model, mesh, config.sp, config.tp_overlap)  # step 4: these rows and columns are mine
        positions = shard_context(model, mesh, config.cp_mode)  # step 5: these tokens are mine
        note_gradient_sum(model.parameters(), "dp")
        store = split_backward(model, plan)
        wrap_layers(model, config)
        pipeline = Pipeline(model, chunks, plan, positions, store, config, run)
        optimizer, sync = pipeline.optimizer, pipeline.sync  # step 3: this slice of the update is mine
        share = mesh["dp"].share(config.global_batch_size)  # step 2: these sequences are mine

        for step in run.steps(model, optimizer, sync, positions, pipeline):
            batch = run.batch(step, share)
            tokens, targets = zip(*batch.micro_batches(config.micro_batch_size), strict=True)
            sync.begin()  # without last_micro_batch: --zero 0 sums all in finish
            loss = pipeline.step(tokens, targets, optimizer.loss_scale / batch.n_targets, run.phase)
            sync.finish()
            sum_partial_gradients(optimizer, mesh, ["tp", "kv", "mirror"])
            loss = run.global_loss(loss / optimizer.loss_scale)
            with run.phase("optimizer"):
                norm = global_norm(optimizer, mesh, ["tp", "pp"], sliced=config.zero > 0)
                if run.accepts(loss, norm):
                    optimizer.step(run.learning_rate(step), norm)  # clips, and updates
                optimizer.zero_grad()
            run.end_step(loss, norm)
    return run.trained()


if __name__ == "__main__":
    main(train, Config)
