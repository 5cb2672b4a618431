"""Step 3: ZeRO. Data-parallel ranks share out what step 2 held on each of them: optimizer state, gradients, parameters.

In step 2 every rank updates every weight. ZeRO (Rajbhandari et al. 2020) lets rank r update only slice r of n.
Parameters are laid out in *units*: each layer; the embedding; the final norm with the head. A unit is a flat buffer,
padded and cut in n equal slices:

    unit "layers.0":  [ norm  q  k  v  o .. | .. o  norm  gate .. | .. gate  up .. | .. up  down  0 0 ]
                      '----- rank 0 -----''------- rank 1 -------''---- rank 2 ----''---- rank 3 ----'

P: number of parameters. n: ranks. m: micro-batches of a rank. Each rank sends (n-1)/n times the last column in a step:

    stage   held in full                cut in n                       elements sent
    0       weights, gradients, state                                  2 P       all-reduce (step 2)
    1       weights, gradients          masters, moments               2 P       reduce-scatter + all-gather
    2       weights                     masters, moments, gradients    (m+1) P
    3                                   everything                     3 m P     a little less, see below

Stage 1 reduce-scatters gradients once, in the last micro-batch, and all-gathers the updated weights: together these
are an all-reduce. Stage 2 has no room for a full gradient, so it reduce-scatters in every micro-batch. Stage 3 also
gathers a unit's weights before its forward and its backward, and frees them after each. (The head stays: it is last in
forward, first in backward. The embedding's backward needs no weights. A tied matrix is gathered once more, as head.)

    bytes per parameter, 16-bit training          stage 0    1            2              3       (weight+gradient+state)
    --grad-dtype fp32 (default, fp32 sums)        2+4+12     2+4+12/n     2+(4+12)/n     18/n
    --grad-dtype same (16-bit gradients)          2+2+12     2+2+12/n     2+(4+12)/n     18/n    (slices sum in fp32)

WHEN. A reduce-scatter starts as soon as autograd has completed a unit, while the rest of backward runs. Stages 1
and 2 gather updated weights during the next forward: each module waits only for its own. Stage 3 gathers the next unit
while one computes, in both directions.

REPLICAS (`--zero-replicas R`). Links between nodes are slow. So cut over the n/R ranks of a block (a node, say), and
let all R blocks hold the same slices (MiCS, Zhang et al. 2022; hybrid sharding in FSDP, Zhao et al. 2023). The tables
hold with n/R in the place of n. Once a step, a slice's gradient, the sum of a block, is summed over the R replicas:

    n = 4, R = 2     rank 0  rank 1     "shard" {0, 1}, {2, 3}: reduce-scatter and all-gather inside a node
                     rank 2  rank 3     "replicas" {0, 2}, {1, 3}: all-reduce of P R/n elements between nodes

Run it:    torchrun --nproc_per_node=4 step03_zero.py --zero 3
           torchrun --nproc_per_node=2 step03_zero.py --toy    (four weights: who holds what in every stage)
You should see step 1's losses in every stage; each divides more of the memory table by n, but never the activations.
"""

import re
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

import step02_ddp as step02
from common.comm import Group, Mesh, Pending, all_gather, all_reduce, reduce_scatter
from common.layout import global_norm, materialize, note_gradient_sum, replica_group
from common.model import Decoder
from common.trainer import Trained, Trainer, main, start
from step01_single_gpu import Optimizer, update_rule, wrap_layers
from step02_ddp import gradient_sync


@dataclass
class Config(step02.Config):
    """The flags so far and those of ZeRO."""

    zero: Literal[0, 1, 2, 3] = 1  # cut: 0 nothing (step 2), 1 optimizer state, 2 also gradients, 3 also parameters
    zero_replicas: int = 1  # R: cut over dp / R neighbours (those of a node, say), and sum slices' gradients over R
    offload_optimizer: Literal["none", "cpu", "disk"] = "none"  # where masters and moments live, are updated
    offload_params: Literal["none", "cpu"] = "none"  # with --zero 3: where parameter slices live, with masters
    toy: bool = False  # print the four-weight example in every stage, and exit


class Unit:
    """Some parameters in one flat buffer [padded], cut in n slices [padded / n], of which this rank updates one.

    Stages 1 and 2: `flat` is always there, the parameters are views of it, `slice` is a view too. Stage 3: only `slice`
    stays. `gather` fills the storage of `flat` and `free` empties it, so whatever autograd saved of the parameters
    finds its bytes again in backward.
    """

    def __init__(self, named: dict[str, nn.Parameter], group: Group, config: Config, homes: Any):
        """`homes` (services/offload.py): `.slices` moves the weight slice (stage 3), `.states` masters and moments."""
        self.named, self.group, self.stage = named, group, config.zero
        first = next(iter(named.values()))
        self.dtype, self.wide = first.dtype, torch.promote_types(first.dtype, torch.float32)
        ends = accumulate((param.numel() for param in named.values()), initial=0)
        self.place = dict(zip(named, pairwise(ends), strict=True))  # name -> (start, stop) in flat
        self.length = -(-sum(param.numel() for param in named.values()) // group.size)
        self.first = group.rank * self.length
        self.flat = torch.zeros(self.length * group.size, dtype=self.dtype, device=first.device)
        for name, param in named.items():
            view = self.flat[slice(*self.place[name])].view_as(param)
            view.copy_(param.detach())
            param.data = view  # .data: its own version counter, so autograd accepts that the buffer is refilled
            if self.dtype.itemsize == 2 and config.grad_dtype == "fp32":
                param.grad_dtype = torch.float32
        self.grad_dtype = first.grad_dtype
        self.trained = [name for name, param in named.items() if param.requires_grad]
        self.nbytes, self.gathered = self.flat.nbytes, True
        self.pending: Pending | None = None  # the gathering under way
        self.slice = self.flat[self.first : self.first + self.length]
        if self.stage == 3:
            self.slice = homes.slices(self.slice.clone())
            self.free()
        self.master = homes.states(self.slice.to(self.wide))  # the slice itself, if it is wide enough and stays here
        self.pieces = {name: piece for name in self.trained if len(piece := self.cut(self.master, name))}
        self.gradient: Tensor | None = None  # full [padded], of this rank alone: what has not yet been reduced
        self.grad_slice: Tensor | None = None  # [padded / n], summed; in `wide` (stage 1: grad_dtype)
        self.missing = len(self.trained)  # gradients that this micro-batch's backward has yet to complete

    def cut(self, part: Tensor, name: str) -> Tensor:
        """The part of a slice [padded / n] that belongs to a parameter: a view, empty if it lies on other ranks."""
        start, stop = (min(max(at - self.first, 0), self.length) for at in self.place[name])
        return part[start:stop]

    def gather(self):
        """Start to fill the flat buffer from the slices of all ranks, if it is empty (stage 3)."""
        if not self.gathered:
            self.flat.untyped_storage().resize_(self.nbytes)
            self.pending = all_gather(self.flat, self.slice.to(self.flat.device, non_blocking=True), self.group)
            self.gathered = True

    def ready(self):
        """Wait until the parameters are there."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def free(self):
        """Give the flat buffer's memory back (stage 3)."""
        if self.gathered:
            self.ready()
            self.flat.untyped_storage().resize_(0)
            self.gathered = False


class SliceUpdate:
    """The update of this rank's slices of some trained units (on a CPU, one) in one call of the rule: few kernels."""

    def __init__(self, units: list[Unit], config: Config, homes: Any):
        self.units = units
        named = [(piece, unit.named[name]) for unit in self.units for name, piece in unit.pieces.items()]
        self.rule = update_rule([piece for piece, _ in named], config, [param.dim() > 1 for _, param in named])
        for piece, _ in named:  # moments move to their home; the count of steps has no dimensions, and stays
            self.rule.state[piece] |= {k: homes.states(t) for k, t in self.rule.state[piece].items() if t.dim()}

    def step(self, lr: float, factor: float):
        """Update the slices with their gradients times `factor`; stages 1 and 2 start to gather those of all ranks."""
        gradients = [unit.grad_slice.to(unit.master.device, unit.wide) for unit in self.units]
        if factor != 1:
            torch._foreach_mul_(gradients, factor)
        for unit, gradient in zip(self.units, gradients, strict=True):
            for name, piece in unit.pieces.items():
                piece.grad = unit.cut(gradient, name)
        for group in self.rule.param_groups:
            group["lr"] = lr
        self.rule.step()
        self.rule.zero_grad()
        copied = [unit for unit in self.units if unit.master is not unit.slice]
        if copied:
            torch._foreach_copy_([unit.slice for unit in copied], [unit.master for unit in copied], non_blocking=True)
        for unit in self.units:
            if unit.stage < 3:
                unit.pending = all_gather(unit.flat, unit.slice, unit.group)  # in place: the slice is a part of flat


def group_into_units(model: nn.Module, mesh: Mesh) -> list[list[str]]:
    """Names of parameters, by unit: each layer, the embedding, and the final norm with the head.

    A unit is cut over one group: what a module sums over another group is a unit of its own.
    """
    units: dict[tuple[str, str], list[str]] = {}
    for name, param in model.named_parameters():
        module = re.match(r"model\.layers\.\d+|model\.embed_tokens|", name).group()  # "": norm and head
        units.setdefault((module, replica_group(param, mesh).name), []).append(name)
    return list(units.values())


class ZeroOptimizer(Optimizer):
    """ZeRO stages 1 to 3: an optimizer, and a gradient sync with the three methods of step 2's.

    Units are made one by one, and their parameters are drawn then. So in stage 3 the whole model never exists anywhere.
    Collectives start from hooks, so all ranks must use the same parameters in backward. The norm needs all ranks:
    it is `global_norm`, not `grad_norm`. Of its base only `step` is used: it clips, unscales, and calls `update`.
    """

    def __init__(self, model: Decoder, config: Config, mesh: Mesh, dtype: torch.dtype, homes: Any):
        self.config, self.model, self.stage, self.dtype = config, model, config.zero, dtype
        mesh.add_blocks(config.zero_replicas)
        self.replicas, self.units = mesh["replicas"], []
        for names in group_into_units(model, mesh):
            if model.get_parameter(names[0]).is_meta:
                materialize(model, config.seed, mesh.device, dtype, names)
            named = {name: model.get_parameter(name) for name in names}
            group = replica_group(named[names[0]], mesh)  # here mesh.data, all of dp: not the R replicas
            self.units.append(Unit(named, mesh["shard"] if group is mesh.data else group, config, homes))
        trained = [unit for unit in self.units if unit.trained]
        together = [[unit] for unit in trained] if homes.one_by_one else [trained]  # (services/offload.py)
        self.updates = [SliceUpdate(units, config, homes) for units in together]
        self.loss_scale, self.good_steps = 2.0**16 if dtype == torch.float16 else 1.0, 0
        self.in_flight: tuple | None = None  # (unit, sum of its slice, its gradient, Pending, whether it is the last)
        self.follow_modules()
        for unit in self.units:
            for name in unit.trained:
                unit.named[name].register_post_accumulate_grad_hook(partial(self.completed, unit, name))

    def follow_modules(self):
        """Let hooks on the modules say when parameters are needed.

        The head is computed right after the final norm, by `lm_head.loss`: the norm stands for both.
        """
        trunk, head = self.model.model, self.model.lm_head
        self.uses: list[list[Unit]] = []  # by module, in the order of forward: the units that it computes with
        for i, module in enumerate((trunk.embed_tokens, *trunk.layers.values(), trunk.norm)):
            params = {*module.parameters(), *(head.parameters() if module is trunk.norm else ())}
            self.uses.append([unit for unit in self.units if params & set(unit.named.values())])
            module.register_forward_pre_hook(partial(self.before_forward, i))
            module.register_forward_hook(partial(self.after_forward, i))

    def before_forward(self, i: int, *_):
        """Hook: have this module's parameters, and send for the next one's."""
        for unit in self.units if i == 0 else ():  # a micro-batch begins: forget what unused parameters left uncounted
            unit.missing = len(unit.trained)
        self.provide(i, i + 1)

    def after_forward(self, i: int, _module: nn.Module, _inputs: tuple, output: Tensor):
        """Hook: drop the parameters until backward, which begins with the last module."""
        if self.stage == 3:
            if i + 1 < len(self.uses):
                self.drop(i, keep=i + 1)
            if output.requires_grad:
                output.register_hook(partial(self.before_backward, i))

    def before_backward(self, i: int, _gradient: Tensor):
        """Hook on the module's output: the gradient arrives, so the module after it is done, and this one is next."""
        if i + 1 < len(self.uses):
            self.drop(i + 1, keep=i)
        if i > 0:  # the embedding's backward needs no weights
            self.provide(i, max(1, i - 1))

    def provide(self, i: int, then: int):
        """Gather the units of module `i` and start to gather those of module `then`."""
        if self.stage == 3:
            for units in (self.uses[i], *self.uses[then : then + 1]):
                for unit in units:
                    unit.gather()
        for unit in self.uses[i]:
            unit.ready()

    def drop(self, i: int, keep: int):
        """Free the units of module `i` that module `keep` does not use."""
        for unit in self.uses[i]:
            if unit not in self.uses[keep]:
                unit.free()

    def begin(self):
        """Before the first micro-batch: make room for whole gradients (stage 1)."""
        self.last, self.sums = False, {}  # `sums`: unit -> the sum over replicas that is under way
        for unit in self.units:
            if self.stage == 3:
                unit.free()  # a validation leaves the last unit there
            if self.stage == 1 and unit.trained:
                unit.gradient = torch.zeros_like(unit.flat, dtype=unit.grad_dtype)
                for name in unit.trained:
                    unit.named[name].grad = unit.gradient[slice(*unit.place[name])].view_as(unit.named[name])

    def last_micro_batch(self):
        """From now on gradients are complete when autograd has added to them, also in stage 1."""
        self.last = True

    def completed(self, unit: Unit, name: str, param: nn.Parameter):
        """Hook: autograd has added to a gradient. Stages 2 and 3 move it into the unit's `gradient`."""
        if self.stage > 1:
            if unit.gradient is None:
                unit.gradient = torch.zeros(unit.flat.shape, dtype=unit.grad_dtype, device=unit.flat.device)
            unit.gradient[slice(*unit.place[name])].view_as(param).add_(param.grad)
            param.grad = None
        if self.stage > 1 or self.last:
            unit.missing -= 1
            if unit.missing == 0:
                self.reduce(unit)

    def reduce(self, unit: Unit):
        """Start to sum a unit's gradient over the ranks; the one before has had a layer's time, so finish that."""
        self.land()
        total = torch.empty(unit.length, dtype=unit.grad_dtype, device=unit.flat.device)
        pending = reduce_scatter(total, unit.gradient, unit.group)
        self.in_flight = (unit, total, unit.gradient, pending, self.last or self.stage == 1)
        unit.gradient, unit.missing = None, len(unit.trained)

    def land(self):
        """Put the slice that was in flight where it belongs. If it is the last, start to sum it over the replicas."""
        if self.in_flight is not None:
            (unit, total, gradient, pending, last), self.in_flight = self.in_flight, None
            pending.wait()
            if self.stage == 1:
                unit.grad_slice = gradient[unit.first : unit.first + unit.length].copy_(total)
            else:
                unit.grad_slice = total.to(unit.wide) if unit.grad_slice is None else unit.grad_slice.add_(total)
            if last:
                self.sums[unit] = all_reduce(unit.grad_slice, self.replicas)

    def finish(self):
        """After the last backward: reduce what no hook completed (an unused parameter), wait, free the last units."""
        for unit in self.units:
            if unit.gradient is not None:
                self.reduce(unit)
        self.land()
        for unit in self.units:
            if unit.trained and unit.grad_slice is None:  # no gradient reached it
                unit.grad_slice = torch.zeros(unit.length, dtype=unit.wide, device=unit.flat.device)
            if unit.trained and unit not in self.sums:
                self.sums[unit] = all_reduce(unit.grad_slice, self.replicas)
            if self.stage == 3:
                unit.free()
        for pending in self.sums.values():
            pending.wait()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name, as far as they lie in this rank's slices, times the loss scale."""
        return {name: unit.cut(unit.grad_slice, name) for unit in self.units for name in unit.trained}

    def update(self, lr: float, factor: float):
        """Update all slices; weights are gathered in the order in which the next forward pass wants them."""
        for update in self.updates:
            update.step(lr, factor)

    def zero_grad(self):
        """Free the gradients."""
        for unit in self.units:
            unit.gradient = unit.grad_slice = None
        self.model.zero_grad()


def make_optimizer(model: Decoder, config: Config, run: Trainer) -> tuple[Optimizer, Any]:
    """What `--zero` stands for: step 2's optimizer and sync, or one object that is both. Draws the model's weights."""
    if config.zero == 0:
        materialize(model, config.seed, run.device, run.dtype)
        return Optimizer(model, config), gradient_sync(model, config, run)
    optimizer = ZeroOptimizer(model, config, run.mesh, run.dtype, run.homes(model))
    return optimizer, optimizer


def train(config: Config, observe=None) -> Trained:
    """The whole run; `run` (common/trainer.py) is what surrounds it."""
    with start(config, observe) as run:
        mesh = run.mesh
        if config.toy:
            return run.zero_toy(ZeroOptimizer)
        with torch.device("meta"):
            model = Decoder(run.shape)
        note_gradient_sum(model.parameters(), "dp")
        wrap_layers(model, config)
        optimizer, sync = make_optimizer(model, config, run)  # this slice of the update is mine
        share = mesh["dp"].share(config.global_batch_size)  # step 2: these sequences are mine

        for step in run.steps(model, optimizer, sync):
            batch, loss = run.batch(step, share), 0.0
            micro_batches = batch.micro_batches(config.micro_batch_size)
            sync.begin()
            for i, (tokens, targets) in enumerate(micro_batches):
                if i + 1 == len(micro_batches):
                    sync.last_micro_batch()
                with run.phase("forward"):
                    micro_loss = model.lm_head.loss(model(tokens), targets) / batch.n_targets
                with run.phase("backward"):
                    (micro_loss * optimizer.loss_scale).backward()
                loss = loss + micro_loss.detach()
            sync.finish()
            loss = run.global_loss(loss)
            with run.phase("optimizer"):
                norm = global_norm(optimizer, mesh, [], sliced=config.zero > 0)  # []: no dimension but dp yet
                if run.accepts(loss, norm):
                    optimizer.step(run.learning_rate(step), norm)  # clips, and updates
                optimizer.zero_grad()
            run.end_step(loss, norm)
    return run.trained()


if __name__ == "__main__":
    main(train, Config)
