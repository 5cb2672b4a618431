"""Step 6: pipeline parallelism. Each rank holds a stage, some consecutive layers of the model.

    tokens -> [ embedding, layers 0-1 ] -- x --> [ layers 2-3 ] -- x --> [ layers 4-5, head ]
                  stage 0, rank 0      <-- dx --    stage 1    <-- dx --       stage 2 -> loss

The model here has 6 layers. All ranks of pp read the same sequences: the first stage uses their
tokens, the last one their targets. For each micro-batch, neighbours exchange only x and its
gradient dx, both [batch, seq, dim] (seq is cut by cp and, with SP, by tp). The price is idle time,
the *bubble*: the last ranks wait for the first x at the start, and have nothing to do at the end;
the first ranks wait for dx in between.

TWO SCHEDULES, AFAB (all forward, then all backward) and 1F1B (one forward, one backward), for 4
ranks and 6 micro-batches. A character is a unit of time: 0 is the forward of micro-batch 0, and aa
its backward, twice the work. A dot is idle time:

             AFAB                          1F1B
    rank 0   012345.........aabbccddeeff   0123......aa4bb5cc.dd.ee.ff
    rank 1   .012345......aabbccddeeff..   .012....aa3bb4cc5dd.ee.ff..
    rank 2   ..012345...aabbccddeeff....   ..01..aa2bb3cc4dd5ee.ff....
    rank 3   ...012345aabbccddeeff......   ...0aa1bb2cc3dd4ee5ff......

In 1F1B, rank r of p begins with a *warm-up* of p-1-r forwards (all m, if m is smaller), one for
each later rank that micro-batch 0 still has to pass: on rank 0 above 0 1 2. In the *steady* part it
does one forward and one backward in turn (3 aa, 4 bb, 5 cc). The *cool-down* is the remaining
backwards (dd ee ff).

THE BUBBLE. The pipeline fills while micro-batch 0 passes p-1 stages forward, and drains while the
last micro-batch passes them backward. In both schedules, if all p stages take equally long, each
rank is idle for as long as p-1 forwards and p-1 backwards take: here 9 units, beside 18 of work.
With m micro-batches this is (p-1)/m of the working time, and (p-1)/(m+p-1) of the whole.

1F1B saves memory. From its forward to its backward a micro-batch is *in flight*, and the rank holds
its activations. In AFAB all m are in flight at once; in 1F1B, on rank r, at most p - r. So the
first rank holds up to p micro-batches of 1/p of the layers: pp divides weights, but not the first
rank's activations.

The pictures simplify: messages take time, too, and stages are not quite equal, because the first
has the embedding, the last the head and the loss.

FOUR MICRO-BATCHES ON TWO RANKS, in 1F1B. F0 is the forward of micro-batch 0 through the rank's
stage, B0 its backward. What is sent has two names: rank 0's output y0 is rank 1's input x0, and
rank 1's dx0 is rank 0's dy0:

    rank 0                    messages            rank 1
    F0
    send y0                   y0 ->               receive x0
    F1                                            F0  B0
    send y1, receive dy0      y1 ->   <- dx0      send dx0, receive x1
    B0  F2                                        F1  B1
    send y2, receive dy1      y2 ->   <- dx1      send dx1, receive x2
    B1  F3                                        F2  B2
    send y3, receive dy2      y3 ->   <- dx2      send dx2, receive x3
    B2                                            F3  B3
    receive dy3                       <- dx3      send dx3
    B3

DEADLOCK. In the middle, rank 0 has a y for rank 1, which has a dx for rank 0. If each sends first,
and a send blocks until it is received, both wait for ever. So `send_receive` starts both messages
before it waits for either.

AUTOGRAD's graph covers one stage. The input x of every stage but the first is a leaf (a tensor that
autograd did not compute), whose `.grad` is the dx to send. The simple way keeps x and y from the
forward to the backward:

    x = received.requires_grad_()
    y = compute_output(x)                forward ends here; y is sent
    torch.autograd.backward(y, dy)       backward, when dy has come; now dx is x.grad

Backward needs y's graph, but not its numbers (a layer ends with a sum). So in place of y, `Stage`
keeps get_gradient_edge(y), the end of the graph, where backward begins.

THE LAW, with one stage on each rank and untied embeddings. For each micro-batch the first rank
sends a y over pp, the last a dx, and the others both. Once in a training step every rank also takes
part in an all-reduce of the loss (in bf16 and fp32 4 bytes). For tiny in fp32, pp 4 and 8
micro-batches:

    a y or dx            4 (sequences) x 256 (tokens) x 128 (dim) x 4 bytes = 524,288
    the all-reduce       2 x 3/4 x 4 = 6
    the first rank       8 x 524,288 + 6 = 4,194,310: `sent` over pp in metrics.jsonl

Run it:    torchrun --nproc_per_node=4 step06_pipeline.py --pp 4
You should see step 1's losses (on a GPU, with --dtype fp32 for both):
    python -m common.compare runs/step01_single_gpu runs/step06_pipeline
`python -m common.schedules 4 6 1` (ranks, micro-batches, stages on each rank) draws the two
schedules above. `python -m common.schedules 4 8 2` draws them for 8 micro-batches, and below them
`interleaved`, with 2 stages on each rank, which the second part of this file explains.

PyTorch's own way, in torch.distributed.pipelining:

    stage = PipelineStage(module, rank, p, device)
    schedule = Schedule1F1B(stage, n_microbatches=m, loss_fn=loss, scale_grads=False)
    schedule.step(tokens)            on the first rank
    schedule.step()                  on those between
    schedule.step(target=targets)    on the last

loss(output, targets) is the summed loss, divided by the number of targets in the global batch. By
default, gradients would be divided by m, too: hence scale_grads=False. ScheduleGPipe is AFAB; there
is also ScheduleInterleaved1F1B.

Try this: in `OneForwardOneBackward.execute`, replace `self.group.size - 1 - self.group.rank` by
`self.group.size - self.group.rank`, one more. The losses stay right, but a rank holds one
micro-batch more: tests/test_step06.py::test_ranks_follow_their_lists fails.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

import step05_cp_ring as step05
from common import UserError
from common.comm import Group, Mesh, Pending, all_reduce, exchange
from common.data import Data
from common.device import choose_device
from common.flags import AT_LEAST_2, flag
from common.launch import main
from common.layout import global_norm, note_record
from common.model import IGNORE, Decoder, rope_tables, wide
from common.run import Run
from common.schedules import (
    COSTS,
    Action,
    Instruction,
    add_messages,
    consumer,
    interleaved,
    round_robin,
)
from common.shapes import model_shape
from step01_single_gpu import clip, learning_rate, set_up_layers
from step02_ddp import join_ranks
from step03_zero import make_weights_and_optimizer
from step04_tp_sp import shard_tensors, sum_partial_gradients
from step05_cp_ring import own_tokens, shard_context


class Stage:
    """Consecutive layers, and the graphs of the micro-batches that are in flight.

    A stage need not keep y's numbers, because a layer ends with a sum, x + mlp(...), whose backward
    does not use its result. In the loops below a rank then holds at most two outputs at a time, not
    one for each micro-batch in flight.
    """

    def __init__(self, model: Decoder, layers: range, positions: Tensor, number: int):
        """`layers`: their numbers in the model. `positions`: of this rank's tokens (step 5).
        `number`: the stage's.
        """
        self.model = model
        self.layers = layers
        self.positions = positions
        self.number = number
        self.is_first = layers.start == 0
        self.is_last = layers.stop == model.config.n_layers
        self.graphs: dict[int, tuple] = {}  # micro-batch -> (x, the edge that stands for y)

    def begin(self, tokens: list[Tensor], targets: list[Tensor], n_targets: Tensor):
        """Begin a training step: note the tokens and targets of its micro-batches, int64 [batch,
        seq], and the number of targets in the global batch, and start the `loss` at 0.
        """
        self.tokens = tokens
        self.targets = targets
        self.n_targets = n_targets
        self.loss = torch.zeros((), dtype=wide(dtype_of(self.model)), device=self.positions.device)

    def compute_output(self, x: Tensor, targets: Tensor) -> Tensor:
        """This stage's part of `Decoder.forward`; on the last stage it ends with the summed loss.

        x: tokens int64 [batch, seq], or the previous stage's output [batch, seq, dim] (with SP
        [batch, seq/tp, dim]) -> output, or loss.
        """
        trunk = self.model.model
        if self.is_first:
            x = trunk.embed_tokens(x)
        cos, sin = rope_tables(self.positions, self.model.config, wide(x.dtype))
        for layer in self.layers:
            x = trunk.layers[str(layer)](x, cos, sin)
        if self.is_last:
            return self.model.loss(self.model.lm_head(trunk.norm(x)), targets)
        return x

    def forward(self, i: int, x: Tensor | None) -> Tensor:
        """Forward of micro-batch i. `x` is the previous stage's output, or None on the first stage,
        which reads its tokens. Returns the output, on the last stage the loss, detached: its graph
        stays in `graphs`.
        """
        if self.is_first:
            x = self.tokens[i]
        else:
            x.requires_grad_()  # a leaf: backward leaves dx in x.grad
        with record_function(f"F{i}.{self.number}"):  # a range in a profile
            y = self.compute_output(x, self.targets[i])
        if self.is_last:  # y is the summed loss
            y = y / self.n_targets  # scale once ...
            self.loss += y.detach()
        self.graphs[i] = (x, get_gradient_edge(y))
        return y.detach()

    def backward(self, i: int, dy: Tensor | None) -> Tensor | None:
        """Add to the gradients of the weights; return dx, or None on the first stage.

        `dy`: the output's gradient; on the last stage None, because the output is the loss.
        """
        x, edge = self.graphs.pop(i)
        with record_function(f"B{i}.{self.number}"):
            # ... then only sum: this adds to the gradients. `edge` stands for y
            torch.autograd.backward((edge,), (dy,))
        return x.grad  # None for tokens


class Pipeline:
    """A pipeline with one stage on each rank. A subclass has `execute`, its schedule as a loop.
    Loops communicate by the six methods below, with Megatron-LM's names, which call `send_receive`.
    They wait for each message at once, so no computation hides it. (Messages of `ListPipeline`, at
    the end of this file, travel meanwhile.)
    """

    def __init__(self, config: "Config", model: Decoder, mesh: Mesh, positions: Tensor):
        """Cut the model, on the meta device, down to this rank's layers. `positions`: of this
        rank's tokens.
        """
        self.model = model
        self.group = mesh["pp"]
        self.sp_ranks = config.tp if config.sp else 1  # ranks of tp that divide the tokens of x
        layers = layers_of_stage(self.group.rank, self.group.size, model.config.n_layers)
        self.stage = Stage(model, layers, positions, self.group.rank)
        keep_layers(model, set(layers), mesh)
        first_contact(self.group, positions.device)

    def step(self, tokens: list[Tensor], targets: list[Tensor], n_targets: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches, int64 [batch, seq] -> this rank's term of
        the loss, 0 except on the last stage.
        """
        self.stage.begin(tokens, targets, n_targets)
        self.execute()
        return self.stage.loss

    def execute(self):
        """Run the forwards and backwards of all micro-batches, and send their messages."""
        raise NotImplementedError

    def recv_forward(self, i: int) -> Tensor | None:
        """Receive the x of micro-batch i. Returns None on the first rank, which has tokens."""
        return self.send_receive(self.group.rank - 1, receive_for=i)

    def send_forward(self, y: Tensor):
        """Send y to the next rank. The last rank sends nothing."""
        self.send_receive(self.group.rank + 1, send=y)

    def recv_backward(self, i: int) -> Tensor | None:
        """Receive the dy of micro-batch i. Returns None on the last rank, which has the loss."""
        return self.send_receive(self.group.rank + 1, receive_for=i)

    def send_backward(self, dx: Tensor | None):
        """Send dx to the previous rank. The first rank sends nothing."""
        self.send_receive(self.group.rank - 1, send=dx)

    def send_forward_recv_backward(self, y: Tensor, i: int) -> Tensor | None:
        """Send y and receive the dy of micro-batch i, together."""
        return self.send_receive(self.group.rank + 1, send=y, receive_for=i)

    def send_backward_recv_forward(self, dx: Tensor | None, i: int) -> Tensor | None:
        """Send dx and receive the x of micro-batch i, together."""
        return self.send_receive(self.group.rank - 1, send=dx, receive_for=i)

    def send_receive(
        self, peer: int, send: Tensor | None = None, receive_for: int | None = None
    ) -> Tensor | None:
        """Send a tensor to `peer`, or receive one from it, or both together. Returns None if
        nothing is received. If there is no such rank, do nothing.

        `receive_for`: the micro-batch whose x or dy is to be received. Only the size of its tensor
        is used: messages between two ranks arrive in the order in which they were sent.
        """
        if not 0 <= peer < self.group.size:  # beyond the first or the last rank
            return None
        sends = []
        receives = []
        received = None
        if send is not None:
            sends.append((send, peer))
        if receive_for is not None:
            received = empty_message(self.stage.tokens[receive_for], self.model, self.sp_ranks)
            receives.append((received, peer))
        exchange(sends, receives, self.group).wait()
        return received


class AllForwardAllBackward(Pipeline):
    """AFAB. (In the paper on GPipe, Huang et al. 2019, the backwards come in reverse order.)"""

    def execute(self):
        """All forwards, then all backwards in the same order."""
        m = len(self.stage.tokens)
        for i in range(m):
            x = self.recv_forward(i)
            y = self.stage.forward(i, x)
            self.send_forward(y)
        for i in range(m):
            dy = self.recv_backward(i)
            dx = self.stage.backward(i, dy)
            self.send_backward(dx)


class OneForwardOneBackward(Pipeline):
    """1F1B (PipeDream-flush: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
    Training").
    """

    def execute(self):
        """Warm-up, steady part, cool-down. At most p - rank micro-batches are in flight."""
        m = len(self.stage.tokens)
        warm_up = min(m, self.group.size - 1 - self.group.rank)

        # Warm-up: one forward for each later rank, or all m
        for i in range(warm_up):
            x = self.recv_forward(i)
            y = self.stage.forward(i, x)
            self.send_forward(y)

        if warm_up < m:  # the first input of the steady part
            x = self.recv_forward(warm_up)
        for i in range(warm_up, m):  # steady: one forward, one backward
            y = self.stage.forward(i, x)
            oldest = i - warm_up  # the micro-batch whose backward comes next
            dy = self.send_forward_recv_backward(y, oldest)
            dx = self.stage.backward(oldest, dy)
            if i + 1 < m:  # x: the input of the next forward
                x = self.send_backward_recv_forward(dx, i + 1)
            else:
                self.send_backward(dx)

        for i in range(m - warm_up, m):  # cool-down: the remaining backwards
            dy = self.recv_backward(i)
            dx = self.stage.backward(i, dy)
            self.send_backward(dx)


def first_contact(group: Group, device: torch.device):
    """All-reduce once, so that NCCL connects all ranks of the group. If a group's first call were
    `exchange` (batch_isend_irecv), all its ranks would have to take part, but a schedule's first
    message is between two.
    """
    all_reduce(torch.zeros(1, device=device), group).wait()


def empty_message(tokens: Tensor, model: Decoder, sp_ranks: int) -> Tensor:
    """Memory for the x or dy of a micro-batch with these tokens, int64 [batch, seq]: [batch, seq /
    sp_ranks, dim].
    """
    batch, seq = tokens.shape
    shape = batch, seq // sp_ranks, model.config.dim
    return torch.empty(shape, dtype=dtype_of(model), device=tokens.device)


def layers_of_stage(number: int, n_stages: int, n_layers: int) -> range:
    """The layers of a stage. All stages have equally many, or some have one more. Raises UserError
    if there are fewer layers than stages.
    """
    if n_layers < n_stages:
        advice = "lower --pp; or, with --schedule interleaved, --chunks"
        raise UserError(f"--pp: {n_layers} layers for {n_stages} stages: {advice}")
    return range(n_layers * number // n_stages, n_layers * (number + 1) // n_stages)


def dtype_of(model: Decoder) -> torch.dtype:
    """The dtype of the weights, and of x."""
    return next(model.parameters()).dtype


def keep_layers(model: Decoder, kept: set[int], mesh: Mesh):
    """Keep the layers with these numbers, under their names in the whole model, and delete others.

    A rank with layer 0 also keeps the embedding, a rank with the last layer the final norm and the
    head. Elsewhere these become None. If layer 0 and the last one are on two ranks, both keep a
    tied embedding, and each has a term of its gradient: step 4's `sum_partial_gradients` sums these
    over the group "ends", the first and the last rank of pp. (Skip this: under ZeRO each has a
    shard. Both cut the matrix alike, because it is alone in its unit, so these shards are the same
    elements.)
    """
    trunk = model.model
    n_layers = model.config.n_layers
    tied = model.config.tied
    has_first = 0 in kept
    has_last = n_layers - 1 in kept
    for layer in range(n_layers):
        if layer not in kept:
            del trunk.layers[str(layer)]
    if tied and mesh["pp"].size > 1:
        # Of each row of ranks the first and the last. All ranks must take part in creating groups
        mesh.add_groups("ends", mesh.rows("pp")[:, [0, -1]], queue="gradients")
        if has_first != has_last:
            note_record(trunk.embed_tokens.weight, partial_over="ends")
    needs_embedding = has_first or (tied and has_last)
    if not needs_embedding:
        trunk.embed_tokens = None
    if not has_last:
        trunk.norm = None
        model.lm_head = None


# --schedule -> (config, model, mesh, positions) -> pipeline. The second part adds "interleaved"
SCHEDULES: dict[str, Callable] = {"afab": AllForwardAllBackward, "1f1b": OneForwardOneBackward}


@dataclass
class Config(step05.Config):
    """Pipeline parallelism."""

    pp: int = flag(1, "ranks that divide the layers", least=1)
    schedule: str = flag("1f1b", "order of the work", SCHEDULES)
    chunks: int = flag(
        2,
        "stages on each rank (model chunks)",
        least=2,
        needs={"schedule": ["interleaved"], "pp": AT_LEAST_2},
    )


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    dp = join_ranks(device) // (config.pp * config.cp * config.tp)
    # new: pp. It comes first, so that its ranks are the farthest apart: it usually sends least
    mesh = Mesh(pp=config.pp, dp=dp, cp=config.cp, tp=config.tp)
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)
    positions = shard_context(model, mesh, config).to(device)
    # new: delete the layers of other ranks, before memory is allocated for any
    pipeline = SCHEDULES[config.schedule](config, model, mesh, positions)
    set_up_layers(model, config)
    optimizer, sync = make_weights_and_optimizer(model, config, mesh, device, dtype)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)  # of all ranks
        own_xs, own_ys = own_tokens(tokens, targets, own, positions)
        xs = own_xs.split(config.micro_batch_size)
        ys = own_ys.split(config.micro_batch_size)
        sync.begin(len(xs))
        loss = pipeline.step(xs, ys, n_targets)  # new: forward and backward of all micro-batches
        sync.finish()  # now each gradient is the sum over dp and cp
        # Over tp, and over the two stages that hold a tied matrix
        sum_partial_gradients(model, optimizer.gradients(), mesh)
        all_reduce(loss, mesh["data"]).wait()
        all_reduce(loss, mesh["pp"]).wait()  # new: it is 0 on all but the last stage

        norm = global_norm(model, optimizer.gradients(), mesh, zero=config.zero != "0")
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


# --- The second part, for a second evening: several stages on each rank. As a loop, such a schedule
# would be hard to read. So each rank gets a list of actions, such as F1.2, the forward of
# micro-batch 1 through stage 2. First read common/schedules.py, which makes lists and adds messages
# to them. `ListPipeline`, at the end, runs them.


def make_interleaved(
    config: Config, model: Decoder, mesh: Mesh, positions: Tensor
) -> "ListPipeline":
    """Interleaved 1F1B, with v = `--chunks` stages on each rank (Megatron-LM's model chunks): rank
    r of p has stages r, r + p, r + 2p, ...

    The pipeline still fills and drains over p-1 stages, but each is 1/v as long: the bubble is
    (p-1)/(v m) of the working time. With p = 2, m = 4, v = 2 it is 1/8; with 1F1B it is 1/4. In the
    picture a character is the forward of half of a rank's layers, so a forward of 1F1B takes two.
    In `interleaved` the first 0 1 of rank 0 are stage 0, the second stage 2. (`python -m
    common.schedules 2 4 2` draws these, below AFAB.)

        1F1B           rank 0    0011....aaaa22bbbb33cccc..dddd    6 idle beside 24
                       rank 1    ..00aaaa11bbbb22cccc33dddd....
        interleaved    rank 0    01012.aa3bb2aa3bb.cc.ddccdd       3 idle beside 24
                       rank 1    .010aa1bb2aa3bb2cc3ddccdd..

    With the numbers of stages, rank 0's list begins

        F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 ...

    The price is more messages: for each micro-batch the first rank sends v outputs y and v-1
    gradients dx, the last one v-1 y and v dx, every other rank v of each. It also takes more
    memory: on rank r up to (v-1) p + 2 (p-r) - 1 forwards are in flight, each through 1/v of the
    rank's layers. On rank 0 above these are F0.0 F1.0 F0.2 F1.2 F2.0: 5 halves, as much as 2.5
    micro-batches in all its layers. With 1F1B it has 2.

    Takes what `Pipeline` takes. Raises UserError if p does not divide m, or if there are fewer
    layers than stages. Run it:

        torchrun --nproc_per_node=2 step06_pipeline.py --pp 2 --schedule interleaved
    """
    p = config.pp
    v = config.chunks if p > 1 else 1  # a single rank has a single stage
    m = count_micro_batches(config, mesh["dp"])
    lists = [interleaved(p, m, v, rank) for rank in range(p)]
    rank_of_stage = round_robin(p, v)
    programs = add_messages(lists, rank_of_stage, COSTS)
    return ListPipeline(config, model, mesh, positions, programs, rank_of_stage)


SCHEDULES["interleaved"] = make_interleaved  # now --schedule may be this, too


def count_micro_batches(config: Config, dp: Group) -> int:
    """How many micro-batches a rank has in a training step, before any batch is read."""
    sequences = config.global_batch_size // dp.size
    return math.ceil(sequences / config.micro_batch_size)


class ListPipeline:
    """Runs programs, lists of actions and messages that `add_messages` made, with any number of
    stages on a rank. Messages travel while other actions run.
    """

    def __init__(
        self,
        config: Config,
        model: Decoder,
        mesh: Mesh,
        positions: Tensor,
        programs: list[list[Instruction]],
        rank_of_stage: list[int],
    ):
        """The first four as `Pipeline`. `programs`: each rank's, from `add_messages`.
        `rank_of_stage`: which rank has stage 0, 1, ... Raises UserError if there are fewer layers
        than stages.
        """
        self.model = model
        self.group = mesh["pp"]
        self.sp_ranks = config.tp if config.sp else 1
        self.n_stages = len(rank_of_stage)
        self.program = programs[self.group.rank]
        self.stages: dict[int, Stage] = {}  # this rank's stages by number
        for number, rank in enumerate(rank_of_stage):
            if rank == self.group.rank:
                layers = layers_of_stage(number, self.n_stages, model.config.n_layers)
                self.stages[number] = Stage(model, layers, positions, number)
        kept: set[int] = set()
        for stage in self.stages.values():
            kept.update(stage.layers)
        keep_layers(model, kept, mesh)
        first_contact(self.group, positions.device)

    def step(self, tokens: list[Tensor], targets: list[Tensor], n_targets: Tensor) -> Tensor:
        """As `Pipeline.step`, with several stages."""
        self.tokens = tokens
        for stage in self.stages.values():
            stage.begin(tokens, targets, n_targets)
        self.execute()
        return sum(stage.loss for stage in self.stages.values())

    def execute(self):
        """Run the program. An action waits for its input. A send waits for the previous one to the
        same peer, so that at most one sent tensor for each peer stays in memory.
        """
        # action -> its input, x or dy. If the action is this rank's, the input was received or
        # computed here, and is kept until the action runs. If it is a peer's, the input is an
        # output of this rank, and is kept until it is sent
        inputs: dict[Action, Tensor] = {}
        receiving: dict[Action, Pending] = {}  # the message that fills it
        sending: dict[int, Pending] = {}  # peer -> the last message to it
        for verb, action, peer in self.program:
            if verb == "receive":
                tokens = self.tokens[action.micro_batch]
                inputs[action] = empty_message(tokens, self.model, self.sp_ranks)
                receiving[action] = exchange([], [(inputs[action], peer)], self.group)
            elif verb == "send":  # what `action`, of the peer, will use
                if peer in sending:
                    sending[peer].wait()
                sending[peer] = exchange([(inputs.pop(action), peer)], [], self.group)
            else:
                if action in receiving:
                    receiving.pop(action).wait()
                # None for a forward of the first stage, which has tokens, and for a backward of the
                # last one, which has the loss
                output = self.compute(action, inputs.pop(action, None))
                next_action = consumer(action, self.n_stages)
                if next_action is not None:
                    inputs[next_action] = output  # for this rank, or to be sent
        for pending in sending.values():
            pending.wait()

    def compute(self, action: Action, x_or_dy: Tensor | None) -> Tensor | None:
        """Run an action: a forward with x, or a backward with dy."""
        stage = self.stages[action.stage]
        if action.kind == "F":
            return stage.forward(action.micro_batch, x_or_dy)
        return stage.backward(action.micro_batch, x_or_dy)


if __name__ == "__main__":
    main(train, Config)
