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
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import step05_cp_ring as step05
from common import UserError
from common.comm import Group, Mesh, Pending, all_reduce, exchange
from common.data import Data
from common.layout import global_norm, note_layout
from common.model import IGNORE, PRESETS, Decoder, rope_tables, wide
from common.schedules import COSTS, SCHEDULES, Action, Place, consumer, simulate
from common.trainer import Run, among, choose_device, main
from step01_single_gpu import RECOMPUTE, learning_rate, scale
from step02_ddp import join_ranks
from step03_zero import make_optimizer
from step04_tp_sp import shard_tensors, sum_partial_gradients
from step05_cp_ring import CONTEXT, shard_context


@dataclass
class Config(step05.Config):
    """Pipeline parallelism."""

    pp: int = 1  # ranks that share the layers
    schedule: str = among(SCHEDULES, "1f1b")  # order of the work
    chunks: int = 2  # stages on each rank with --schedule interleaved


TIED = "model.embed_tokens.weight"  # the name of a tied embedding and head, on the first stage and on the last


def keep_stage(model: Decoder, group: Group, places: list[Place]):
    """Keep the modules of this rank's stages, under their names in the whole model; delete others, or set them to None.

    A `Place` has a stage's rank and layers, and the numbers of the stages `before` and `after` it (None at the ends).
    If the first and the last stage are on two ranks, both keep a tied embedding, and its record says stage_copies=2.
    """
    trunk, mine = model.model, [place for place in places if place.rank == group.rank]
    has_first, has_last = any(place.before is None for place in mine), any(place.after is None for place in mine)
    kept = {str(n) for place in mine for n in place.layers}
    for name in [*trunk.layers]:
        if name not in kept:
            del trunk.layers[name]
    if not has_last:
        trunk.norm = model.lm_head = None
    if not has_first and not (has_last and model.config.tied):
        trunk.embed_tokens = None
    elif model.config.tied and places[0].rank != places[-1].rank:
        note_layout(trunk.embed_tokens.weight, stage_copies=2)  # two copies: global_norm counts them as one


def sum_tied(model: Decoder, gradients: dict[str, Tensor], group: Group, places: list[Place]):
    """Sum a tied matrix's gradient in place: if first and last stage are on two ranks, these exchange their terms."""
    first, last = places[0].rank, places[-1].rank
    if model.config.tied and first != last and group.rank in (first, last):
        other, theirs = first + last - group.rank, torch.empty_like(gradients[TIED])
        if theirs.numel():  # under ZeRO this rank's shard may contain none of the matrix
            exchange([(gradients[TIED], other)], [(theirs, other)], group).wait()
        gradients[TIED] += theirs


def forward_stage(model: Decoder, place: Place, x: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
    """One stage's part of `Decoder.forward`; on the last stage it ends with the summed loss.

    x: tokens int64 [batch, seq], or the previous stage's output [batch, seq (/tp with SP), dim] -> output, or loss.
    """
    trunk = model.model
    x = trunk.embed_tokens(x) if place.before is None else x
    cos, sin = rope_tables(positions, model.config, wide(x.dtype))
    for n in place.layers:
        x = trunk.layers[str(n)](x, cos, sin)
    return model.loss(model.lm_head(trunk.norm(x)), targets) if place.after is None else x


class Pipeline:
    """AFAB (all forward, all backward), with one stage on each rank. Subclasses replace `execute`."""

    def __init__(self, model: Decoder, places: list[Place], group: Group, positions: Tensor, sp_ranks: int):
        """`positions` of this rank's tokens. A stage's x has 1/sp_ranks of the tokens (tp with SP, else 1)."""
        self.model, self.places, self.group, self.positions, self.sp_ranks = model, places, group, positions, sp_ranks
        self.reference_param = next(model.parameters())  # its dtype and device are those of x
        self.graphs: dict[tuple[int, int], tuple] = {}  # (micro-batch, stage) -> (input, edge of the output)
        # NCCL: a group's first operation must involve all its ranks, and a message has only two. So all-reduce first.
        all_reduce(torch.zeros(1, device=self.reference_param.device), group).wait()

    def step(self, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches, int64 [batch, seq] -> the loss, 0 except on the last stage."""
        self.xs, self.ys, self.n_targets = xs, ys, n_targets
        self.loss = torch.zeros((), dtype=wide(self.reference_param.dtype), device=self.reference_param.device)
        self.execute()
        return self.loss

    def forward(self, i: int, stage: int, x: Tensor | None) -> Tensor:
        """Run x of micro-batch i (None: its tokens) through a stage -> output, detached. Adds to `loss`, `graphs`."""
        place = self.places[stage]
        x = self.xs[i] if x is None else x.requires_grad_()
        y = forward_stage(self.model, place, x, self.ys[i], self.positions)
        if place.after is None:
            y = y / self.n_targets  # scale once ...
            self.loss += y.detach()
        self.graphs[i, stage] = x, get_gradient_edge(y)
        return y.detach()

    def backward(self, i: int, stage: int, dy: Tensor | None) -> Tensor | None:
        """Add to the gradients of a stage's weights; return dx (None: x is tokens). dy None: the output is the loss."""
        x, edge = self.graphs.pop((i, stage))
        torch.autograd.backward((edge,), None if dy is None else (dy,))  # ... then only sum; `edge` stands for y
        return x.grad

    def buffer(self, i: int) -> Tensor:
        """An empty tensor to receive the x or dy of micro-batch i."""
        batch, seq = self.xs[i].shape
        return self.reference_param.new_empty(batch, seq // self.sp_ranks, self.model.config.dim)

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
        stage, m = self.group.rank, len(self.xs)  # one stage a rank: stage r is on rank r
        for i in range(m):
            x = self.recv_forward(i)
            y = self.forward(i, stage, x)
            self.send_forward(y)
        for i in range(m):
            dy = self.recv_backward(i)
            dx = self.backward(i, stage, dy)
            self.send_backward(dx)


class OneForwardOneBackward(Pipeline):
    """1F1B (PipeDream-flush, Narayanan et al. 2021)."""

    def execute(self):
        """At most p - rank micro-batches are in flight. When steady, y is sent while dy arrives, dx while x arrives."""
        stage, m = self.group.rank, len(self.xs)
        warm_up = min(m, self.group.size - 1 - stage)

        for i in range(warm_up):  # warm-up: forward, until the first micro-batch is on the last rank
            x = self.recv_forward(i)
            y = self.forward(i, stage, x)
            self.send_forward(y)

        x = self.recv_forward(warm_up) if warm_up < m else None  # a later x is received while a dx is sent
        for i in range(warm_up, m):  # steady: one forward, one backward
            y = self.forward(i, stage, x)
            dy = self.send_forward(y, dy_of=i - warm_up)
            dx = self.backward(i - warm_up, stage, dy)
            x = self.send_backward(dx, x_of=i + 1 if i + 1 < m else None)

        for i in range(m - warm_up, m):  # cool-down: the remaining backwards
            dy = self.recv_backward(i)
            dx = self.backward(i, stage, dy)
            self.send_backward(dx)


# --- 6b (until `plan`), for a second evening: a schedule is a list of actions for each rank; one class runs any list
# INTERLEAVED. With v shorter stages on each rank (r, r+p, ... on rank r), the bubble is (p-1) / (v m + p-1). The price
# is more messages and memory. `python -m common.schedules 4 8 2` draws it. --pp 2 --schedule interleaved runs it.
#
# The left lists below deadlock: rank 0's B0 needs rank 1's B0, which comes after its F1, which needs rank 0's F1,
# which comes after B0. `simulate` raises ValueError. On the right the lists are good, but the messages are in the wrong
# order: rank 0 sends F1's output while rank 1 sends B0's. If a send blocks until it is received, both wait for ever.
#
#     rank 0    F0 B0 F1 B1        F0, send, F1, send, receive, B0, ...
#     rank 1    F1 B1 F0 B0        receive, F0, B0, send, receive, F1, ...

ACTS = {"F": "forward", "B": "backward"}  # kind -> the method that does it: (micro-batch, stage, input) -> output


class Instruction(NamedTuple):
    """One line of a rank's program: compute `action`, or receive its input from `peer`, or send the input to `peer`."""

    verb: Literal["compute", "send", "receive"]
    action: Action
    peer: int | None = None


def add_messages(lists: list[list[Action]], places: list[Place], costs: dict = COSTS) -> list[list[Instruction]]:
    """Each rank's program: its list of actions, with the sends and receives that these actions need.

    Go through all actions in the order in which they end in a simulation. Append each to its rank's program. If another
    rank needs the output, append a send to this program, and a receive to that rank's program. Example: rank 1 of 2,
    interleaved, 2 micro-batches (F1.2: forward of micro-batch 1 through stage 2):

        receive F0.1, receive F1.1, compute F0.1, send F0.2, receive F0.3, compute F1.1, send F1.2, receive F1.3, ...

    ("send F0.2" sends the input of F0.2, the output of F0.1.) Even if a send blocks until it is received, there is no
    deadlock: all programs follow one common order, in which a send and its receive are one line. Take the first line
    that has not run. All lines before it have, on every rank. So its rank and its peer have reached it, with its input.
    """
    programs: list[list[Instruction]] = [[] for _ in lists]
    for _, rank, _, action in simulate(lists, places, costs):
        programs[rank].append(Instruction("compute", action))
        needs_it = consumer(action, places)
        if needs_it is not None and (peer := places[needs_it.stage].rank) != rank:
            programs[rank].append(Instruction("send", needs_it, peer))
            programs[peer].append(Instruction("receive", needs_it, rank))
    return programs


class ListPipeline(Pipeline):
    """Run any lists of actions, with any number of stages on a rank."""

    def __init__(self, lists: list[list[Action]], costs: dict[str, int], *same):
        super().__init__(*same)
        self.program = add_messages(lists, self.places, costs)[self.group.rank]

    def execute(self):
        """Run the program. An action waits for its input, and a send for the previous send to the same peer."""
        box: dict[Action, tuple[Tensor, Pending]] = {}  # action -> its input, and the message that brings it
        sent: dict[int, Pending] = defaultdict(Pending)  # peer -> the last send to it
        for verb, action, peer in self.program:
            if verb == "compute":
                received, pending = box.pop(action, (None, Pending()))
                pending.wait()
                output = getattr(self, ACTS[action.kind])(action.micro_batch, action.stage, received)
                if (needs_it := consumer(action, self.places)) is not None:
                    box[needs_it] = output, Pending()
            elif verb == "send":
                sent[peer].wait()
                sent[peer] = exchange([(box.pop(action)[0], peer)], [], self.group)
            else:
                buffer = self.buffer(action.micro_batch)
                box[action] = buffer, exchange([], [(buffer, peer)], self.group)
        for pending in sent.values():
            pending.wait()


def plan(config: Config, m: int) -> tuple[list[Place], list[list[Action]]]:
    """The places of all stages of `--schedule`, and each rank's actions for m micro-batches. Raises UserError."""
    schedule, n_layers = SCHEDULES[config.schedule](config), PRESETS[config.model].n_layers
    v = schedule.v if config.pp > 1 else 1  # a single rank has a single stage
    if n_layers < config.pp * v:
        raise UserError(f"--pp {config.pp}: {n_layers} layers for {config.pp * v} stages: lower --pp or --chunks")
    lists = [schedule.actions(config.pp, m, v, rank) for rank in range(config.pp)]
    return schedule.places(n_layers, config.pp, v), lists


def make_pipeline(config: Config, model: Decoder, mesh: Mesh, positions: Tensor, places: list, lists: list) -> Pipeline:
    """Make a pipeline: AFAB and 1F1B are the loops above, all other schedules run their lists."""
    same = model, places, mesh["pp"], positions, config.tp if config.sp else 1
    loops, costs = {"afab": Pipeline, "1f1b": OneForwardOneBackward}, SCHEDULES[config.schedule](config).costs
    return loops[config.schedule](*same) if config.schedule in loops else ListPipeline(lists, costs, *same)


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    taken = config.pp * config.cp * config.tp  # dp is what is left
    mesh = Mesh(pp=config.pp, dp=join_ranks(device) // taken, cp=config.cp, tp=config.tp)
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")  # step 2: these sequences are mine
    shape = PRESETS[config.model]
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    places, lists = plan(config, m=math.ceil((mine.stop - mine.start) / config.micro_batch_size))  # lists: for 6b alone
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)  # step 4: these rows and columns are mine
    here = shard_context(model, mesh, CONTEXT[config.cp_mode], config.sp).to(device)  # step 5: these tokens are mine
    keep_stage(model, mesh["pp"], places)  # these layers are mine
    RECOMPUTE[config.recompute](model)
    optimizer, sync = make_optimizer(model, config, mesh, device, dtype)  # step 3: this shard is mine (--zero)
    pipeline = make_pipeline(config, model, mesh, here, places, lists)

    parts = dict(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh, positions=here, pipeline=pipeline)
    for step in run.steps(**parts):
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)  # of all ranks
        xs, ys = (x[mine][:, here].split(config.micro_batch_size) for x in (tokens, targets))
        sync.begin(len(xs))
        loss = pipeline.step(xs, ys, n_targets)  # forward and backward of all micro-batches
        sync.finish()  # sums over ranks
        sum_partial_gradients(model, optimizer.gradients(), mesh)  # over tp: of norms that saw a shard of the tokens
        sum_tied(model, optimizer.gradients(), mesh["pp"], places)  # over pp: of a tied matrix
        all_reduce(loss, mesh["data"]).wait()
        all_reduce(loss, mesh["pp"]).wait()  # all but the last stage have 0

        norm = global_norm(model, optimizer.gradients(), mesh, sharded=config.zero > 0)
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip_coef = min(1.0, config.grad_clip / norm) if config.grad_clip and norm else 1.0
        scale(optimizer.gradients(), clip_coef)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
