"""Step 6: pipeline parallelism. Each rank holds a stage, a run of layers, and micro-batches pass through the stages.

    tokens -> [ embedding, layers 0-1 ] -- x --> [ layers 2-3 ] -- x --> [ layers 4-5, norm, head ] -> loss
                  stage 0, rank 0      <-- dx --    stage 1    <-- dx --         stage 2

Neighbours exchange only x and its gradient dx, [batch, seq, dim] each. The price is idle time: later ranks wait for the
first x and end first, earlier ranks wait for dx. Two schedules, AFAB and 1F1B, for 4 ranks and 6 micro-batches:

             all forward, all backward     one forward, one backward
    rank 0   012345.........aabbccddeeff   0123......aa4bb5cc.dd.ee.ff   0   forward of micro-batch 0, then 1, 2, ...
    rank 1   .012345......aabbccddeeff..   .012....aa3bb4cc5dd.ee.ff..   aa  its backward, twice the work; then b, ...
    rank 2   ..012345...aabbccddeeff....   ..01..aa2bb3cc4dd5ee.ff....   .   idle
    rank 3   ...012345aabbccddeeff......   ...0aa1bb2cc3dd4ee5ff......

THE BUBBLE. If p stages are equally slow, each rank is idle for (p-1) / (m + p-1) of a step of m micro-batches (here 9
of 27), in both. 1F1B saves memory: rank r holds activations of at most p - r micro-batches, in AFAB those of all m.

DEADLOCK. In mid-1F1B, rank r has an output y for rank r+1, which has a dx for rank r. If each sends first, and a send
blocks until it is received, both wait for ever. So `send_receive` posts the send and the receive together.

AUTOGRAD's graph covers one stage. The stage's input is a leaf, whose `.grad` is the dx to send. Of the output we keep
only the graph node (`get_gradient_edge`), where backward can start. So the output's memory is freed after it is sent
(here: when the next forward returns, or the step ends). Megatron calls this deallocate_pipeline_outputs.

Run it:    torchrun --nproc_per_node=4 step06_pipeline.py --pp 4
You should see step 1's losses, and rank 0's `sent` over pp: one x a micro-batch (and 18 bytes for loss and norm).
`python -m common.schedules 4 6 1` draws these two (and 1F1B once more, as `interleaved`).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import step05_cp_ring as step05
from common import UserError
from common.comm import Group, Mesh, Pending, all_reduce, exchange
from common.data import Data
from common.flags import flag
from common.layout import global_norm, layout_of, note_layout
from common.model import IGNORE, Decoder, model_shape, rope_tables, wide
from common.schedules import COSTS, Action, add_messages, consumer, interleaved, round_robin
from common.trainer import Run, choose_device, main
from step01_single_gpu import apply_recompute, learning_rate, scale
from step02_ddp import join_ranks
from step03_zero import make_optimizer
from step04_tp_sp import shard_tensors, sum_partial_gradients
from step05_cp_ring import CONTEXT, shard_context

TIED = "model.embed_tokens.weight"  # the name of a tied embedding and head, on the first stage and on the last


def dtype_of(model: Decoder) -> torch.dtype:
    """The dtype of the weights, and of x."""
    return next(model.parameters()).dtype


def first_contact(group: Group, device: torch.device):
    """NCCL: a group's first operation must involve all its ranks, and a message has only two. So all-reduce first."""
    all_reduce(torch.zeros(1, device=device), group).wait()


def keep_stages(model: Decoder, stages: list[range]):
    """Keep the modules of these stages, under their names in the whole model; delete others, or set them to None.

    A stage is a run of layers. The one with layer 0 also has the embedding; the one with the last, norm and head.
    If these two are on two ranks, both keep a tied embedding, and its record says stage_copies=2.
    """
    trunk, n_layers = model.model, model.config.n_layers
    has_first, has_last = (any(n in layers for layers in stages) for n in (0, n_layers - 1))
    for n in range(n_layers):
        if not any(n in layers for layers in stages):
            del trunk.layers[str(n)]
    if not has_last:
        trunk.norm = model.lm_head = None
    if not has_first and not (has_last and model.config.tied):
        trunk.embed_tokens = None
    elif model.config.tied and has_first != has_last:
        note_layout(trunk.embed_tokens.weight, stage_copies=2)  # two copies: global_norm counts them as one


def sum_tied(model: Decoder, gradients: dict[str, Tensor], group: Group):
    """Sum a tied matrix's gradient in place: if rank 0 and the last rank hold it, these exchange their terms."""
    if TIED in gradients and layout_of(model.get_parameter(TIED)).stage_copies == 2:
        other, theirs = group.size - 1 - group.rank, torch.empty_like(gradients[TIED])
        if theirs.numel():  # under ZeRO this rank's shard may contain none of the matrix
            exchange([(gradients[TIED], other)], [(theirs, other)], group).wait()
        gradients[TIED] += theirs


class Stage:
    """A run of layers, and the graphs of the micro-batches that are in flight."""

    def __init__(self, model: Decoder, layers: range, positions: Tensor):
        self.model, self.layers, self.positions = model, layers, positions
        self.first, self.last = layers.start == 0, layers.stop == model.config.n_layers
        self.graphs: dict[int, tuple] = {}  # micro-batch -> (input, edge of the output)

    def begin(self, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor):
        """A new step: tokens and targets of its micro-batches, int64 [batch, seq]."""
        self.xs, self.ys, self.n_targets = xs, ys, n_targets
        self.loss = torch.zeros((), dtype=wide(dtype_of(self.model)), device=self.positions.device)

    def run(self, x: Tensor, targets: Tensor) -> Tensor:
        """This stage's part of `Decoder.forward`; on the last stage it ends with the summed loss.

        x: tokens int64 [batch, seq], or the previous stage's output [batch, seq (/tp with SP), dim] -> output, or loss.
        """
        trunk = self.model.model
        x = trunk.embed_tokens(x) if self.first else x
        cos, sin = rope_tables(self.positions, self.model.config, wide(x.dtype))
        for n in self.layers:
            x = trunk.layers[str(n)](x, cos, sin)
        return self.model.loss(self.model.lm_head(trunk.norm(x)), targets) if self.last else x

    def forward(self, i: int, x: Tensor | None) -> Tensor:
        """Run x of micro-batch i (None: its tokens) -> output, detached. Adds to `loss` and `graphs`."""
        x = self.xs[i] if x is None else x.requires_grad_()
        y = self.run(x, self.ys[i])
        if self.last:
            y = y / self.n_targets  # scale once ...
            self.loss += y.detach()
        self.graphs[i] = x, get_gradient_edge(y)
        return y.detach()

    def backward(self, i: int, dy: Tensor | None) -> Tensor | None:
        """Add to the gradients of the weights; return dx (None: x is tokens). dy None: the output is the loss."""
        x, edge = self.graphs.pop(i)
        torch.autograd.backward((edge,), None if dy is None else (dy,))  # ... then only sum; `edge` stands for y
        return x.grad

    def run_action(self, kind: str, i: int, x: Tensor | None) -> Tensor | None:
        """Do one action of a list: kind "F" is `forward`, "B" is `backward`."""
        if kind == "F":
            return self.forward(i, x)
        return self.backward(i, x)


class Pipeline:
    """AFAB (all forward, all backward), with one stage on each rank. Subclasses replace `execute`."""

    stage_type: type[Stage] = Stage

    def __init__(self, config: "Config", model: Decoder, mesh: Mesh, positions: Tensor):
        """Cut the model, on the meta device, down to this rank's layers. `positions`: of this rank's tokens."""
        self.model, self.group, n_layers = model, mesh["pp"], model.config.n_layers
        if n_layers < self.group.size:
            raise UserError(f"--pp {self.group.size}: {n_layers} layers for {self.group.size} stages: lower --pp")
        self.sp_ranks = config.tp if config.sp else 1  # ranks that share a stage's x
        bounds = [n_layers * rank // self.group.size for rank in (self.group.rank, self.group.rank + 1)]
        self.stage = self.stage_type(model, range(*bounds), positions)
        keep_stages(model, [self.stage.layers])
        first_contact(self.group, positions.device)

    def step(self, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches, int64 [batch, seq] -> the loss, 0 except on the last stage."""
        self.xs = xs
        self.stage.begin(xs, ys, n_targets)
        self.execute()
        return self.stage.loss

    def buffer(self, i: int) -> Tensor:
        """An empty tensor to receive the x or dy of micro-batch i."""
        batch, seq = self.xs[i].shape
        shape = batch, seq // self.sp_ranks, self.model.config.dim
        return torch.empty(shape, dtype=dtype_of(self.model), device=self.xs[i].device)

    def send_receive(self, peer: int, send: Tensor | None = None, receive_of: int | None = None) -> Tensor | None:
        """Send `send` and receive micro-batch `receive_of`'s tensor, together. If `peer` is no rank, return None."""
        if not 0 <= peer < self.group.size:
            return None
        received = None if receive_of is None else self.buffer(receive_of)
        sends = [] if send is None else [(send, peer)]
        receives = [] if receive_of is None else [(received, peer)]
        exchange(sends, receives, self.group).wait()
        return received

    def recv_forward(self, i: int) -> Tensor | None:
        """Receive the x of micro-batch i. On the first rank, return None: it has the tokens."""
        return self.send_receive(self.group.rank - 1, receive_of=i)

    def send_forward(self, y: Tensor, dy_of: int | None = None) -> Tensor | None:
        """Send y and, together, receive the dy of micro-batch `dy_of`, if given. On the last rank, do nothing."""
        return self.send_receive(self.group.rank + 1, send=y, receive_of=dy_of)

    def recv_backward(self, i: int) -> Tensor | None:
        """Receive the dy of micro-batch i. On the last rank, return None: it has the loss."""
        return self.send_receive(self.group.rank + 1, receive_of=i)

    def send_backward(self, dx: Tensor | None, x_of: int | None = None) -> Tensor | None:
        """Send dx and, together, receive the x of micro-batch `x_of`, if given. On the first rank, do nothing."""
        return self.send_receive(self.group.rank - 1, send=dx, receive_of=x_of)

    def execute(self):
        """AFAB: all forwards, then all backwards in the same order (GPipe, Huang et al. 2019: in reverse order)."""
        m = len(self.xs)
        for i in range(m):
            x = self.recv_forward(i)
            y = self.stage.forward(i, x)
            self.send_forward(y)
        for i in range(m):
            dy = self.recv_backward(i)
            dx = self.stage.backward(i, dy)
            self.send_backward(dx)


class OneForwardOneBackward(Pipeline):
    """1F1B (PipeDream-flush, Narayanan et al. 2021)."""

    def execute(self):
        """At most p - rank micro-batches are in flight. When steady, y is sent while dy arrives, dx while x arrives."""
        m = len(self.xs)
        warm_up = min(m, self.group.size - 1 - self.group.rank)

        for i in range(warm_up):  # warm-up: forward, until the first micro-batch is on the last rank
            x = self.recv_forward(i)
            y = self.stage.forward(i, x)
            self.send_forward(y)

        x = self.recv_forward(warm_up) if warm_up < m else None  # a later x is received while a dx is sent
        for i in range(warm_up, m):  # steady: one forward, one backward
            y = self.stage.forward(i, x)
            dy = self.send_forward(y, dy_of=i - warm_up)
            dx = self.stage.backward(i - warm_up, dy)
            x = self.send_backward(dx, x_of=i + 1 if i + 1 < m else None)

        for i in range(m - warm_up, m):  # cool-down: the remaining backwards
            dy = self.recv_backward(i)
            dx = self.stage.backward(i, dy)
            self.send_backward(dx)


# --- For a second evening, until `Config`: a schedule is a list of actions for each rank, and one class runs any lists.
#
# INTERLEAVED. With v shorter stages on each rank (r, r+p, ... on rank r), the bubble is (p-1) / (v m + p-1). The price
# is more messages and memory. `python -m common.schedules 4 8 2` draws it. --pp 2 --schedule interleaved runs it.
#
# The left lists below deadlock: rank 0's B0 needs rank 1's B0, which comes after its F1, which needs rank 0's F1,
# which comes after B0. `simulate` raises ValueError. On the right the lists are good, but the messages are in the wrong
# order: rank 0 sends F1's output while rank 1 sends B0's. If a send blocks until it is received, both wait for ever.
#
#     rank 0    F0 B0 F1 B1        F0, send, F1, send, receive, B0, ...
#     rank 1    F1 B1 F0 B0        receive, F0, B0, send, receive, F1, ...


class Schedule(NamedTuple):
    """How to make a rank's list, how many stages a rank has, and which; how long actions take, and who does them."""

    actions: Callable[[int, int, int, int], list[Action]]  # (p, m, v, rank)
    v: int = 1
    ranks: Callable[[int, int], list[int]] = round_robin  # (p, v) -> the rank of each stage
    costs: dict[str, int] = COSTS
    stage: type[Stage] = Stage


class ListPipeline(Pipeline):
    """Run any lists of actions, with any number of stages on a rank."""

    def __init__(self, schedule: Callable[[Any], Schedule], config: Any, model: Decoder, mesh: Mesh, positions: Tensor):
        """`schedule`: made from the flags. Raises UserError."""
        how = schedule(config)
        p = config.pp
        n_layers = model.config.n_layers
        v = how.v if p > 1 else 1  # a single rank has a single stage
        self.n_stages = p * v
        if n_layers < self.n_stages:
            raise UserError(f"--pp {p}: {n_layers} layers for {self.n_stages} stages: lower --pp or --chunks")
        m = math.ceil(config.global_batch_size // mesh["dp"].size / config.micro_batch_size)
        lists = [how.actions(p, m, v, rank) for rank in range(p)]
        ranks = how.ranks(p, v)
        self.model = model
        self.group = mesh["pp"]
        self.sp_ranks = config.tp if config.sp else 1
        self.stages: dict[int, Stage] = {}  # this rank's stages by number
        for number, rank in enumerate(ranks):
            if rank == self.group.rank:
                layers = range(n_layers * number // self.n_stages, n_layers * (number + 1) // self.n_stages)
                self.stages[number] = how.stage(model, layers, positions)
        self.program = add_messages(lists, ranks, how.costs)[self.group.rank]
        keep_stages(model, [stage.layers for stage in self.stages.values()])
        first_contact(self.group, positions.device)

    def step(self, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        """As `Pipeline.step`, with several stages."""
        self.xs = xs
        for stage in self.stages.values():
            stage.begin(xs, ys, n_targets)
        self.execute()
        return sum(stage.loss for stage in self.stages.values())

    def execute(self):
        """Run the program. An action waits for its input, and a send for the previous send to the same peer."""
        inputs: dict[Action, tuple[Tensor, Pending]] = {}  # action -> its input, and the message that brings it
        sending: dict[int, tuple] = defaultdict(lambda: (None, Pending()))  # peer -> the last tensor sent, its message
        for verb, action, peer in self.program:
            if verb == "compute":
                received, pending = inputs.pop(action, (None, Pending()))
                pending.wait()
                output = self.stages[action.stage].run_action(action.kind, action.micro_batch, received)
                next_action = consumer(action, self.n_stages)
                if next_action is not None:
                    inputs[next_action] = output, Pending()
            elif verb == "send":
                sending[peer][1].wait()
                tensor, _ = inputs.pop(action)
                # Keep the tensor until its send is done: gloo and NCCL read its memory after `exchange` returns.
                sending[peer] = tensor, exchange([(tensor, peer)], [], self.group)
            else:
                buffer = self.buffer(action.micro_batch)
                inputs[action] = buffer, exchange([], [(buffer, peer)], self.group)
        for _, pending in sending.values():
            pending.wait()


# name of a schedule -> what makes its pipeline: (config, model, mesh, positions) -> an object with `step`
SCHEDULES: dict[str, Callable[..., Pipeline]] = {
    "afab": Pipeline,
    "1f1b": OneForwardOneBackward,
    "interleaved": partial(ListPipeline, lambda config: Schedule(interleaved, v=config.chunks)),
}


@dataclass
class Config(step05.Config):
    """Pipeline parallelism."""

    pp: int = flag(1, "ranks that share the layers")
    schedule: str = flag("1f1b", "order of the work", SCHEDULES)
    chunks: int = flag(2, "stages on each rank with --schedule interleaved", needs={"schedule": ["interleaved"]})


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    taken = config.pp * config.cp * config.tp  # dp is what is left
    mesh = Mesh(pp=config.pp, dp=join_ranks(device) // taken, cp=config.cp, tp=config.tp)
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")  # step 2: these sequences are mine
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp, config.tp_overlap)  # step 4: these rows and columns are mine
    here = shard_context(model, mesh, CONTEXT[config.cp_mode], config.sp).to(device)  # step 5: these tokens are mine
    pipeline = SCHEDULES[config.schedule](config, model, mesh, here)  # these layers are mine
    apply_recompute(model, config.recompute)
    optimizer, sync = make_optimizer(model, config, mesh, device, dtype)  # step 3: this shard is mine (--zero)

    parts = dict(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh, positions=here, pipeline=pipeline)
    for step in run.steps(**parts):
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)  # of all ranks
        xs, ys = (x[mine][:, here].split(config.micro_batch_size) for x in (tokens, targets))
        sync.begin(len(xs))
        loss = pipeline.step(xs, ys, n_targets)  # forward and backward of all micro-batches
        sync.finish()  # sums over ranks
        sum_partial_gradients(model, optimizer.gradients(), mesh)  # over tp: of norms that saw a shard of the tokens
        sum_tied(model, optimizer.gradients(), mesh["pp"])  # over pp: of a tied matrix
        all_reduce(loss, mesh["data"]).wait()
        all_reduce(loss, mesh["pp"]).wait()  # all but the last stage have 0

        norm = global_norm(model, optimizer.gradients(), mesh, sharded=optimizer.sharded)
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip_coef = min(1.0, config.grad_clip / norm) if config.grad_clip and norm else 1.0
        scale(optimizer.gradients(), clip_coef)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
