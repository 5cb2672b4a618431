"""Step 3: ZeRO, the Zero Redundancy Optimizer. Data-parallel ranks shard what step 2 replicates:
optimizer state, gradients, weights.

In step 2 every rank makes the same update. This is waste: AdamW updates each element by itself, so
ranks can divide the elements. With ZeRO (Rajbhandari et al. 2020) each of n ranks updates only 1/n
of the weights, its shards, and needs *state* (masters and moments) only for these. Stage 1, --zero
1, shards the optimizer's state, stage 2 also gradients, and stage 3, also called FSDP (fully
sharded data parallelism), also weights. With --zero 0, as in step 2, nothing is sharded.

WHY IN THIS ORDER? State is sharded first, because it is the largest part, and sharding it adds
almost no traffic. An all-reduce is a reduce-scatter and then an all-gather; stage 1 makes the
update between the two. In bf16 it even sends less than step 2: the second half carries weights of 2
bytes, not gradients of 4.

Gradients are next. A rank then no longer has room to add up whole gradients over micro-batches, so
each micro-batch has reduce-scatters of its own.

Weights are last, because they must be gathered for each use. In stage 3 a rank gathers a layer
before its forward, frees it afterwards, and gathers it again for its backward. While one layer
computes, the next one is gathered.

AN EXAMPLE. Two ranks train four weights, 1 2 3 4, by plain gradient descent with rate 0.1. Each has
one micro-batch. The *local* gradient, that of a rank's own sequences, is 1 2 3 4 on rank 0, and 10
20 30 40 on rank 1. The update needs the *sum* of the two.

    at the update          rank 0 holds             rank 1 holds
    stage 0    weights     1 2 3 4                  1 2 3 4
               gradient    sum 11 22 33 44          sum 11 22 33 44
    stage 1    weights     1 2 3 4                  1 2 3 4
               gradient    local 1 2 3 4            local 10 20 30 40
                           sum 11 22                sum 33 44
    stage 2    weights     1 2 3 4                  1 2 3 4
               gradient    sum 11 22                sum 33 44
    stage 3    weights     1 2                      3 4
               gradient    sum 11 22                sum 33 44

With AdamW a rank also holds state: in stage 0 of all four weights, else of its two. After the
update in stages 1 to 3, rank 0 has the new weights -0.1 -0.2, and rank 1 has -0.3 -0.4. In stages 1
and 2 an all-gather gives all four to both.

UNITS. Parameters are laid out in units: E, the embedding; each layer; and H, the final norm with
the head. One collective sums or gathers one unit. Large units mean few collectives; but stage 3
holds two whole units at a time, so they must not be too large. `Unit` cuts one into shards.

THE LAW. Bytes that a rank holds for each parameter at the update (step 1's table has the bytes of
weight, gradient, master and moments):

                                            bf16                    fp32
    stage   whole on every rank             bytes          n = 8    bytes          n = 8
    0       weights, gradients, state       18             18       16             16
    1       weights, local gradients        6 + 16/n       8        8 + 12/n       9.5
    2       weights                         2 + 16/n       4        4 + 12/n       5.5
    3       nothing                         18/n           2.25     16/n           2

For example, stage 1 in bf16: every rank holds 6 bytes, the weight (2) and the local gradient (4);
and 16 are divided among the ranks, the sum (4), the master (4) and the moments (8). The paper has 4
+ 12/n, 2 + 14/n and 16/n: its gradients have 2 bytes, and in its stage 1 the sum overwrites the
local gradient.

This is at the update. During forward and backward, stages 2 and 3 also hold the whole gradients of
at most two units, stage 3 the whole weights of two units; and in every stage there are the
activations of the rank's own sequences.

WHAT IS SENT. With one micro-batch and many ranks, a rank sends in stages 0, 1 and 2 nearly twice as
many elements as the model has, and in stage 3 nearly three times as many. In detail, let

    n    be the number of ranks
    m    the number of micro-batches that a rank has in a training step
    P    the number of parameters, in stages 1 to 3 with the padding of units
    e    the elements of E and H, with padding

In a training step a rank sends (n-1)/n times this many elements:

    stage 0              2 P                  an all-reduce (step 2)
    stage 1              2 P                  a reduce-scatter, an all-gather
    stage 2              (m+1) P              m reduce-scatters, one all-gather
    stage 3              m (2 P - e) + m P    each micro-batch gathers E and H once, the other units
                                              twice, and reduce-scatters all

With m = 1, stages 1 and 2 send the same, and stage 2 holds less. In bf16 an element of an
all-gather has 2 bytes, one of a reduce-scatter 4; in fp32 both have 4. In every stage there are two
more all-reduces: over dp of the loss, a tensor of 4 bytes also in bf16, and over all ranks of the
squared norm of the gradient, 8 bytes.

For tiny in fp32 on 4 ranks, the table of memory gives 12.9, 8.8, 5.6 and 3.2 MB in stages 0 to 3
(tests/test_step03.py::test_law_of_memory counts those of 1 to 3). A rank has 8 of the 32 sequences,
in micro-batches of 4, so m = 2. In stage 2 it sends 3/4 x 3 x 804,224 elements of 4 bytes, and 2 x
3/4 x 4 bytes for the loss: `sent` over dp in metrics.jsonl is 7,238,022. In stage 3 it is
14,080,518: see `Zero3`.

Run it:    torchrun --nproc_per_node=4 step03_zero.py --zero 3
You should see step 1's losses (on a GPU, with --dtype fp32 for both):
    python -m common.compare runs/step01_single_gpu runs/step03_zero

PyTorch's own way: ZeroRedundancyOptimizer shards state, but is used with DistributedDataParallel,
which all-reduces whole gradients. Stage 3 is

    for layer in layers: fully_shard(layer)      # parameters become DTensors, Shard(0)
    fully_shard(model)                           # the rest, E and H, as one unit
    for module in (*layers, model): module.set_gradient_divide_factor(1.0)      # sum, not average

Over gloo, also call set_force_sum_reduction_for_comms(True) of each. For bf16 as here, leave the
model in fp32, which then serves as masters, and give fully_shard the argument
mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32).

Try this: in `Zero3.after_forward`, do not gather again at the output's gradient (delete the last
`if`, three lines). Backward then meets weights that have no memory: a RuntimeError, "... out of
bounds for storage of size 0".
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import step02_ddp as step02
from common.comm import Group, Mesh, Pending, all_gather, all_reduce, reduce_scatter
from common.data import Data
from common.device import choose_device
from common.flags import flag
from common.initial import materialize
from common.launch import main
from common.layout import data_group_of, global_norm, record_of
from common.model import IGNORE, Decoder, wide
from common.run import Run
from common.shapes import model_shape
from step01_single_gpu import (
    OPTIMIZERS,
    Optimizer,
    clip,
    learning_rate,
    set_up_layers,
    update,
)
from step02_ddp import SYNCS, join_ranks


class Unit:
    """Several parameters in one flat buffer, cut into n equal shards. Rank r updates shard r. The
    buffer is padded with zeros if n does not divide its number of elements.

        unit of layer 0:  [ norm q k v o.. | ..o norm gate.. | ..gate up.. | ..up down ]
                          '--- rank 0 ----' '--- rank 1 ----' '- rank 2 -' '- rank 3 -'

    Shards may begin and end inside a matrix: above, o.. is the first part of o, and ..o its rest.

    Another example, on four ranks: shards have 10 elements, and o, elements 6 to 24 of the buffer,
    lies on three of them. Rank 2's shard is elements 20 to 29. So of o, rank 2 has elements 20 to
    24 of the buffer. They are elements 0 to 4 of its shard (`own_part`), and 14 to 18 of o (`spans`
    of `Zero1`).

    A unit has these tensors:

        flat           [padded]        weights' dtype   the parameters are views of it
        shard          [padded / n]    weights' dtype   this rank's shard of `flat`
        master         [padded / n]    wide             its master
        local_grad     [padded]        wide             of this rank's micro-batches so far (in
                                                        stages 2 and 3, of the current one)
        summed_grad    [padded / n]    wide             this rank's shard of the sum over ranks

    padded: the number of elements, with the padding. wide: fp32, or fp64 if the weights are fp64.
    If the weights are wide, the master is the shard, not a copy. Where the unit holds no gradient,
    as after the update, the attribute is None.
    """

    def __init__(self, named: dict[str, nn.Parameter], group: Group):
        """Copy the parameters of `named` into the buffer; from now on they are views of it."""
        self.named = named
        self.group = group
        self.bounds = {}  # name -> (start, stop) in flat
        total = 0  # elements so far
        for name, param in named.items():
            self.bounds[name] = (total, total + param.numel())
            total += param.numel()
        self.shard_length = math.ceil(total / group.size)
        self.shard_start = group.rank * self.shard_length  # in flat
        self.shard_stop = self.shard_start + self.shard_length
        some_param = next(iter(named.values()))  # all have the same dtype and device
        self.flat = some_param.new_zeros(self.shard_length * group.size)
        for name, param in named.items():
            self.view_in(self.flat, name).copy_(param.detach())
            # The same nn.Parameter gets other memory, so that modules need no change
            param.data = self.view_in(self.flat, name)
        self.shard = self.flat[self.shard_start : self.shard_stop]
        self.master = self.shard.to(wide(some_param.dtype))  # the shard itself, if it is wide
        self.missing = 0  # gradients that are still to come in this training step
        self.local_grad: Tensor | None = None
        self.summed_grad: Tensor | None = None

    def view_in(self, flat: Tensor, name: str) -> Tensor:
        """A view of a parameter's place in a flat buffer, in the parameter's shape."""
        start, stop = self.bounds[name]
        return flat[start:stop].view_as(self.named[name])

    def own_part(self, own_shard: Tensor, name: str) -> Tensor:
        """This rank's part of a parameter, a view [k] of `own_shard`, which is `shard`, `master` or
        `summed_grad`; k may be 0.

        In the second example above, o's bounds are (6, 25). first and end are 6 and 25 on rank 0
        (slicing stops at 10, the end of the shard), 0 and 15 on rank 1, 0 and 5 on rank 2, 0 and 0
        on rank 3.
        """
        start, stop = self.bounds[name]
        first = max(start - self.shard_start, 0)
        end = max(stop - self.shard_start, 0)
        return own_shard[first:end]


def unit_names(model: Decoder) -> list[list[str]]:
    """The names of each unit's parameters."""
    units: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, param in model.named_parameters():
        if name.startswith("model.embed_tokens"):
            module = "embedding"
        elif name.startswith("model.layers"):
            module = "layer " + name.split(".")[2]  # model.layers.0.self_attn ...: layer 0
        else:
            module = "norm and head"
        # Step 7's experts have another group, and so are units of their own
        data_group = record_of(param).data_group
        units[module, data_group].append(name)
    return list(units.values())


class Zero1:
    """ZeRO 1: optimizer state is sharded. One object is the optimizer, with the methods of step
    1's, and the sync of step 2, because the update comes between the two halves of the all-reduce.
    For a model of two layers:

        last micro-batch's backward    | H | layer 1 | layer 0 | E |         | update |
        reduce-scatter                     | H       | layer 1 | layer 0 | E |
        all-gather                                                                    | all units |

    Autograd puts one micro-batch's gradient into `.grad`, in the weight's dtype. The hook
    `add_gradient` adds it to the unit's `local_grad`, which is wide, and sets `.grad` to None. With
    a unit's last gradient of the training step it starts the unit's reduce-scatter. After the
    update the whole local gradients are freed. (Steps 1 and 2 let autograd add up in `.grad`, in
    step 2's `BucketSync` in a view of a buffer. Here `.grad` lives only until the hook has added
    it, so that stages 2 and 3 can free a unit's `local_grad` as soon as it has been summed.)

    A complete unit can be sent at once. All ranks must start their reduce-scatters in one order,
    and they do. On all of them H is complete first, then layer 1, then layer 0: of the operations
    that are ready, autograd runs the one that came last in forward. Layer 1's came after layer 0's,
    so its weight gradients are there before layer 0's backward begins. (Step 2's buckets do not
    rely on this: a complete one waits for those before it.)
    """

    unit_type = Unit  # stage 3 has another

    def __init__(
        self, model: Decoder, config: "Config", mesh: Mesh, device: torch.device, dtype: torch.dtype
    ):
        self.model = model  # only for optional optimizers, as is `mesh`
        self.config = config
        self.mesh = mesh
        self.units: list[Unit] = []
        self.masters: dict[str, Tensor] = {}  # by name, this rank's part, if any
        # (unit, this rank's shard of its new sum, the reduce-scatter that fills it)
        self.in_flight: list[tuple[Unit, Tensor, Pending]] = []
        for names in unit_names(model):
            # Here, and not in `train`, so that stage 3 can free one unit before it draws the next
            materialize(model, config.seed, device, dtype, names)
            named = {name: model.get_parameter(name) for name in names}
            group = data_group_of(named[names[0]], mesh)  # of all parameters of the unit
            unit = self.unit_type(named, group)
            self.units.append(unit)
            for name, param in named.items():
                master = unit.own_part(unit.master, name)
                if len(master):
                    self.masters[name] = master
                param.register_post_accumulate_grad_hook(partial(self.add_gradient, unit, name))
        self.torch_optimizer = OPTIMIZERS[config.optimizer](self)

    def begin(self, n_micro_batches: int):
        """Called before the first micro-batch: each brings one gradient of each parameter."""
        for unit in self.units:
            unit.missing = n_micro_batches * len(unit.named)

    def add_gradient(self, unit: Unit, name: str, param: nn.Parameter):
        """Hook: add the new `param.grad` to the unit's `local_grad`, and start the unit's sum if
        that is due.

        RuntimeError if it comes after the last expected one: it would not be summed.
        """
        unit.missing -= 1
        if unit.missing < 0:
            raise RuntimeError(f"a gradient of {name} came after the last expected one")
        if unit.local_grad is None:
            unit.local_grad = torch.zeros_like(unit.flat, dtype=wide(unit.flat.dtype))
        unit.view_in(unit.local_grad, name).add_(param.grad)
        param.grad = None
        if self.sum_is_due(unit):
            self.start_sum(unit)

    def sum_is_due(self, unit: Unit) -> bool:
        """Whether this was the unit's last gradient of the training step, so that its sum may
        start.
        """
        return unit.missing == 0

    def start_sum(self, unit: Unit):
        """Start the reduce-scatter of a unit's gradients."""
        new_sum = unit.local_grad.new_empty(unit.shard_length)
        pending = reduce_scatter(new_sum, unit.local_grad, unit.group)
        self.in_flight.append((unit, new_sum, pending))

    def complete_sums(self):
        """Wait for all sums in flight, and add each to its unit's `summed_grad`."""
        for unit, new_sum, pending in self.in_flight:
            pending.wait()
            if unit.summed_grad is None:
                unit.summed_grad = new_sum
            else:  # stages 2 and 3, from the second micro-batch on
                unit.summed_grad += new_sum
        self.in_flight = []

    def finish(self):
        """After the last micro-batch: complete every `summed_grad`. RuntimeError if a gradient has
        not come.
        """
        for unit in self.units:
            if unit.missing:
                raise RuntimeError(f"{unit.missing} gradients are missing, of {list(unit.named)}")
        self.complete_sums()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's part of each parameter's gradient, by name: a view of `summed_grad`, so that
        clipping changes it in place. It may be empty.
        """
        parts = {}
        for unit in self.units:
            for name in unit.named:
                parts[name] = unit.own_part(unit.summed_grad, name)
        return parts

    def step(self, lr: float):
        """As step 1's: update the masters, and the weights with the masters."""
        update(self.torch_optimizer, self.masters, self.gradients(), lr)
        self.publish()

    def publish(self):
        """Round the masters into this rank's shards of the weights, and all-gather each unit."""
        gathers = []
        for unit in self.units:
            unit.shard.copy_(unit.master)
            gathers.append(all_gather(unit.flat, unit.shard, unit.group))
        for pending in gathers:
            pending.wait()

    def zero_grad(self):
        """Free the gradients."""
        self.torch_optimizer.zero_grad()  # the masters' `.grad`, views of `summed_grad`
        for unit in self.units:
            unit.local_grad = None
            unit.summed_grad = None

    def spans(self) -> dict[str, tuple[int, int]]:
        """For checkpoints: which elements of each flattened parameter this rank updates; an empty
        span if it updates none.
        """
        spans = {}
        for unit in self.units:
            for name, (start, stop) in unit.bounds.items():
                # The elements of `flat` that are in the parameter and in this rank's shard
                first = max(start, unit.shard_start)
                end = max(first, min(stop, unit.shard_stop))
                spans[name] = (first - start, end - start)
        return spans


class Zero2(Zero1):
    """ZeRO 2: gradients are sharded as well. Each micro-batch's are summed over ranks, and a unit's
    whole gradient is freed after its reduce-scatter, which overlaps the next unit's backward:

        backward          | H | layer 1 | layer 0 | E |
        reduce-scatter        | H       | layer 1 | layer 0 | E |

    H's whole gradient is freed when layer 1's last gradient has come and `start_sum` has waited for
    H's sum; layer 1's when layer 0's has come, and so on. So whole gradients of two units exist at
    a time. The last sum, here E's, is in flight until H's next backward is done, or until `finish`.
    """

    def sum_is_due(self, unit: Unit) -> bool:
        """Whether this was the unit's last gradient of a micro-batch. With 9 parameters and two
        micro-batches, `missing` falls from 18 to 9, and then to 0.
        """
        return unit.missing % len(unit.named) == 0

    def start_sum(self, unit: Unit):
        """Wait for the previous unit's sum, which overlapped this unit's backward; then start this
        unit's.
        """
        self.complete_sums()
        super().start_sum(unit)
        unit.local_grad = None  # its Pending keeps it until the sum is complete


class ShardedUnit(Unit):
    """A unit that keeps only its shard between uses.

    A tensor is a shape and a storage. `resize_(0)` gives back the storage's bytes; the tensor and
    all views of it keep their shapes. After `resize_(nbytes)` and an all-gather into it, they are
    valid again. So parameters, and the weights that autograd has saved for backward, stay views of
    `flat`.

    This can wait: a gather writes into memory that autograd has saved for backward. It does no
    harm: shards change only after backward, so it writes the same values again. But autograd has a
    check for it. Each tensor counts the writes to it, together with its views; if a saved tensor's
    count has changed since forward, backward raises an error. Here the check does not see the
    gather, because a parameter has a count of its own: `param.data = ...` in `Unit` has given it
    memory of `flat`, but not the count of `flat`.
    """

    def __init__(self, named: dict[str, nn.Parameter], group: Group):
        super().__init__(named, group)
        self.shard = self.shard.clone()  # no longer a view of `flat`, which is freed
        # In bf16 a copy, as before; if weights are wide, the new shard itself
        self.master = self.shard.to(self.master.dtype)
        self.gathering: Pending | None = None  # the last all-gather; None: `flat` has no memory
        self.flat.untyped_storage().resize_(0)

    def gather(self):
        """If `flat` has no memory, allocate it and start the all-gather that fills it."""
        if self.gathering is None:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            self.gathering = all_gather(self.flat, self.shard, self.group)

    def free(self):
        """Free the memory of `flat`."""
        if self.gathering is not None:
            self.gathering.wait()
            # On a GPU, kernels that read it may still wait in their stream. Nothing overwrites it
            # early: PyTorch gives its bytes only to work that comes later in this stream, and the
            # next gather waits for this stream, too
            self.flat.untyped_storage().resize_(0)
            self.gathering = None


class Zero3(Zero2):
    """ZeRO 3 (FSDP): weights are sharded, too. Hooks gather a unit before its use, and prefetch the
    next one meanwhile. They surround a *segment*: the modules that use one unit, such as a layer.
    (`add_segment` has the exceptions.)

    Below, a micro-batch goes through E, layers 0 and 1, and H. Messages overlap the computation in
    the same column. If a column has two messages, the reduce-scatter starts first.

                       forward             backward
        reduce-scatter                         H   1   0   E
        all-gather     E   0   1   H       1   0
        compute            E   0   1   H   H   1   0   E
        freed after        E   0   1       H   1   0

    Two units are whole at a time: the one in use, and the next. H is gathered once, because its
    backward follows its forward at once, so that it stays whole between the two; E, because its
    backward needs no weights; the others twice. So each micro-batch gathers 2 P - e elements, where
    e is the size of E and H.

    For tiny on 4 ranks, with m = 2, e is 32,896 + 33,024 = 65,920. A rank sends 3/4 x (2 x (2 x
    804,224 - 65,920) + 2 x 804,224) = 3,520,128 elements: the gathers, and 2 x 804,224 for the
    reduce-scatters. In fp32 that is 14,080,512 bytes, and 6 for the loss.

    With --keep, which is off by default, units stay whole until the update (see `Config`).
    """

    unit_type = ShardedUnit

    def __init__(
        self, model: Decoder, config: "Config", mesh: Mesh, device: torch.device, dtype: torch.dtype
    ):
        super().__init__(model, config, mesh, device, dtype)
        # segments[i]: the units whose weights segment i uses, in the order of forward
        self.segments: list[list[ShardedUnit]] = []
        self.add_segment(model.model.embed_tokens)
        for layer in model.model.layers.values():
            self.add_segment(layer)
        self.add_segment(model.model.norm, model.lm_head)

    def add_segment(self, *modules: nn.Module | None):
        """Hook modules that run one after another, and list the units with their parameters.

        It is a list, because a segment may have two units (step 7: experts are a unit of their own)
        or none (step 6: another rank has them).

        Skip this unless the model is tied: embedding and head share a matrix. It is in E, and H is
        the last norm alone. E is gathered twice, for the embedding and with H, and stays whole to
        the end of backward. So three units are whole at a time, and e counts only the norm.
        Autograd also keeps the head's term of E's gradient, whole, to the end of backward.
        """
        number = len(self.segments)
        params = set()
        if modules[0] is not None:  # None: another rank has them (step 6)
            modules[0].register_forward_pre_hook(partial(self.before_forward, number))
            modules[-1].register_forward_hook(partial(self.after_forward, number))
            for module in modules:
                params.update(module.parameters())
        units = []
        for unit in self.units:
            if not params.isdisjoint(unit.named.values()):
                units.append(unit)
        self.segments.append(units)

    def make_whole(self, units: list[ShardedUnit], upcoming: list[ShardedUnit]):
        """Gather `units`, and start to gather `upcoming`, which are used next. Nothing is done for
        a unit that is whole.
        """
        for unit in units + upcoming:
            unit.gather()
        # Last, so that the gathers of `upcoming` are under way before the computation begins
        for unit in units:
            unit.gathering.wait()

    def before_forward(self, number: int, module: nn.Module, inputs: tuple):
        """Hook: gather this segment's units, and prefetch the next segment's."""
        upcoming = []
        if number + 1 < len(self.segments):
            upcoming = self.segments[number + 1]
        self.make_whole(self.segments[number], upcoming)

    def after_forward(self, number: int, module: nn.Module, inputs: tuple, output: Tensor):
        """Hook: free this segment's units, but not the last segment's, whose backward follows at
        once. Add a hook that gathers them again before the segment's backward.
        """
        is_last = number + 1 == len(self.segments)
        if not is_last:
            for unit in self.segments[number]:
                self.free_after_use(unit)
        # The embedding's backward needs no weights. Under torch.no_grad there is no backward
        if number > 0 and output.requires_grad:
            # Called with the gradient of this output, just before the segment's backward
            output.register_hook(partial(self.before_backward, number))

    def before_backward(self, number: int, gradient: Tensor):
        """Hook: gather this segment's units, and prefetch those of the segment before it."""
        upcoming = []
        if number > 1:  # segment 0, the embedding, needs no weights
            upcoming = self.segments[number - 1]
        self.make_whole(self.segments[number], upcoming)

    def start_sum(self, unit: Unit):
        """With all gradients of the unit there, its backward needs no more weights: start the sum
        as `Zero2` does, and free the weights. For layer 1 above: wait for H's sum, start layer 1's,
        free layer 1's weights.
        """
        super().start_sum(unit)
        self.free_after_use(unit)

    def free_after_use(self, unit: ShardedUnit):
        """Free a unit's weights, unless --keep is on."""
        if not self.config.keep:
            unit.free()

    def publish(self):
        """Round the masters into the shards of the weights, which the next forward gathers."""
        for unit in self.units:
            unit.free()  # what --keep, or a forward without backward, has left whole
            unit.shard.copy_(unit.master)


# --zero -> its class. "0": `make_weights_and_optimizer` uses the classes of steps 1 and 2
ZERO: dict[str, Callable[..., Zero1] | None] = {"0": None, "1": Zero1, "2": Zero2, "3": Zero3}


@dataclass
class Config(step02.Config):
    """ZeRO.

    With --keep, stage 3 gathers a unit once in a training step, in the first micro-batch's forward,
    and frees it only at the update. So all weights are whole at the update: a rank holds 2 + 18/n
    bytes for each parameter in bf16, 4 + 16/n in fp32. And it sends as much as in stage 2, (n-1)/n
    times (m+1) P elements: one all-gather and m reduce-scatters.
    """

    zero: str = flag(
        "1", "sharded: 0 nothing (uses --sync), 1 optimizer state, 2 also gradients, 3 all", ZERO
    )
    keep: bool = flag(False, "gathered weights stay until the update", needs={"zero": ["3"]})


def make_weights_and_optimizer(
    model: Decoder, config: Config, mesh: Mesh, device: torch.device, dtype: torch.dtype
):
    """Initialise the weights. Returns (optimizer, sync): those of steps 1 and 2 for --zero 0, else
    twice the same object.

    Stage 3 draws a unit, shards it and frees it before it draws the next, so that no rank has the
    whole model while weights are drawn. Therefore they are not drawn in `train`.
    """
    if config.zero == "0":
        materialize(model, config.seed, device, dtype)
        optimizer = Optimizer(model, config, mesh)
        return optimizer, SYNCS[config.sync](model, config, mesh)
    zero = ZERO[config.zero](model, config, mesh, device, dtype)
    return zero, zero


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    mesh = Mesh(dp=join_ranks(device))
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    set_up_layers(model, config)
    # new: it also draws the weights
    optimizer, sync = make_weights_and_optimizer(model, config, mesh, device, dtype)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)  # of all ranks
        xs = tokens[own].to(device).split(config.micro_batch_size)
        ys = targets[own].to(device).split(config.micro_batch_size)
        loss = 0.0
        sync.begin(len(xs))
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # scale once ...
            micro_loss.backward()  # ... then only sum: this adds to the rank's gradients
            loss = loss + micro_loss.detach()
        sync.finish()  # now `gradients()` are sums over the ranks; with ZeRO, this rank's parts
        all_reduce(loss, mesh["dp"]).wait()

        # new: with ZeRO a rank has only its shard of the gradient, so squares are summed over ranks
        norm = global_norm(model, optimizer.gradients(), mesh, zero=config.zero != "0")
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
