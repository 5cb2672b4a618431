"""Step 3: ZeRO, or FSDP. Data-parallel ranks shard what step 2 replicates: optimizer state, gradients, parameters.

MEMORY. In step 2 every rank holds 18 bytes for each parameter: 2 of its weight (bf16), 4 of its gradient, 4 of its
master, 8 of the moments. With ZeRO (Rajbhandari et al. 2020) rank r of n updates only shard r of the weights: it needs
masters and moments of that shard alone. Stage 2 also shards gradients, stage 3 also weights. Below: a rank's bytes for
each parameter; `elements` times (n-1)/n are sent in a step. P: number of parameters. m: micro-batches of a rank.

    stage   whole on every rank    bytes a parameter   n = 8   elements
    0       all of these           18                  18      2 P         all-reduce (step 2)
    1       weights, gradients     6 + 16/n            8       2 P         reduce-scatter, all-gather
    2       weights                2 + 16/n            4       (m+1) P     m reduce-scatters, one all-gather
    3       nothing                18/n                2.25    m (3 P - e) m times: 2 all-gathers, reduce-scatter

Stage 1 holds whole gradients and a shard of their sums. Stages 2 and 3 also hold the few whole units (below) in use.
e: the parameters that a micro-batch gathers once, not twice: those of units E and H; if tied, only the last norm.

AN EXAMPLE. Four weights 1 2 3 4, two ranks. Rank 0's gradient is 5 5 5 5, rank 1's 20 20 20 20. Plain SGD, rate 0.1:

    stage  rank 0 holds                                    rank 1 holds
    0      weights 1 2 3 4   gradient 25 25 25 25          weights 1 2 3 4   gradient 25 25 25 25
    1      weights 1 2 3 4   gradient 5 5 5 5, sum 25 25   weights 1 2 3 4   gradient 20 20 20 20, sum 25 25
    2      weights 1 2 3 4   shard of sum: 25 25           weights 1 2 3 4   shard of sum: 25 25
    3      weights 1 2       shard of sum: 25 25           weights     3 4   shard of sum: 25 25
    after  weights -1.5 -0.5                               weights 0.5 1.5   (1 and 2 then all-gather; 0 has all)

UNITS. Parameters are laid out in units: the embedding E; each layer; the final norm with the head, H. A unit is a flat
buffer, padded, of n equal shards; rank r updates shard r.

    unit "layers.0":  [ norm  q  k  v  o .. | .. o  norm  gate .. | .. gate  up .. | .. up  down  0 0 ]
                      '----- rank 0 -----''------- rank 1 -------''---- rank 2 ----''---- rank 3 ----'

Run it:    torchrun --nproc_per_node=4 step03_zero.py --zero 3
You should see step 1's losses. `sent`: (n-1)/n x (4 bytes x elements + 24 for loss and norm); gathers in bf16: 2 bytes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

import step02_ddp as step02
from common.comm import Group, Mesh, Pending, all_gather, all_reduce, reduce_scatter
from common.data import Data
from common.flags import flag
from common.layout import global_norm, layout_of, materialize
from common.model import IGNORE, Decoder, model_shape, wide
from common.trainer import Run, choose_device, main
from step01_single_gpu import OPTIMIZERS, Optimizer, apply_recompute, learning_rate, scale
from step02_ddp import SYNCS, join_ranks


class Unit:
    """Several parameters in one flat buffer [padded] of n shards [padded / n]; this rank updates one shard."""

    def __init__(self, named: dict[str, nn.Parameter], group: Group):
        self.named, self.group = named, group
        self.trained = {name: param for name, param in named.items() if param.requires_grad}
        ends = list(accumulate((param.numel() for param in named.values()), initial=0))
        self.span = dict(zip(named, pairwise(ends), strict=True))  # name -> (start, stop) in flat
        self.length = -(-ends[-1] // group.size)  # rounded up
        self.first = group.rank * self.length
        reference_param = next(iter(named.values()))
        self.flat = torch.zeros(self.length * group.size, dtype=reference_param.dtype, device=reference_param.device)
        for name, param in named.items():
            self.view(self.flat, name).copy_(param.detach())
            param.data = self.view(self.flat, name)  # `.data`: autograd does not see later writes to flat
            param.grad_dtype = wide(param.dtype)
        self.shard = self.flat[self.first : self.first + self.length]
        self.master = self.shard.to(wide(reference_param.dtype))  # the shard itself, if it is fp32 or fp64
        self.missing = 0  # from stage 2 on: gradients that this micro-batch's backward has yet to compute
        self.gradient: Tensor | None = None  # [padded], from this rank's tokens: not summed over ranks
        self.reduced_shard: Tensor | None = None  # [padded / n], this rank's shard of `gradient`, summed over the ranks
        self.grad_shard: Tensor | None = None  # [padded / n], `reduced_shard` of all micro-batches, added up

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter's part of a flat buffer, in the parameter's shape: a view, so writing to it changes `flat`."""
        start, stop = self.span[name]
        return flat[start:stop].view_as(self.named[name])

    def view_shard(self, shard: Tensor, name: str) -> Tensor:
        """A parameter's part of this rank's `shard`, as a view [k]; k is 0 if other ranks hold all of the parameter."""
        start, stop = (min(max(at - self.first, 0), self.length) for at in self.span[name])
        return shard[start:stop]

    def make_room(self):
        """Allocate a flat buffer of zeros for this rank's gradients."""
        self.gradient = torch.zeros_like(self.flat, dtype=wide(self.flat.dtype))


def unit_names(model: Decoder) -> list[list[str]]:
    """The names of each unit's parameters. A unit's gradients are summed over one group; in this chapter, always dp."""
    units: dict[tuple[str, str], list[str]] = {}
    for name, param in model.named_parameters():
        found = re.match(r"model\.layers\.\d+|model\.embed_tokens", name)
        module = found.group() if found else "norm and head"
        units.setdefault((module, layout_of(param).data_dim), []).append(name)
    return list(units.values())


class Zero1:
    """ZeRO 1: optimizer state is sharded. One object is the optimizer and also the sync (chapter 2's begin and finish).

    ZeRO is in three methods: `finish` reduce-scatters gradients, `step` updates our shards, `publish` gathers weights.
    The reduce-scatters start after the last backward, so nothing hides them, unlike the sums of chapter 2's buckets.
    """

    sharded = True
    unit_type: type[Unit] = Unit

    def __init__(self, model: Decoder, config: "Config", mesh: Mesh, device: torch.device, dtype: torch.dtype):
        self.units: list[Unit] = []
        for names in unit_names(model):  # one by one: in stage 3 no rank ever holds the whole model
            materialize(model, config.seed, device, dtype, names)
            named = {name: model.get_parameter(name) for name in names}
            group = mesh[layout_of(named[names[0]]).data_dim]  # dp: same weights, other tokens
            self.units.append(self.make_unit(named, group))
        self.masters: dict[str, Tensor] = {}  # by name: this rank's shard of each
        for unit in self.units:
            own = {name: unit.view_shard(unit.master, name) for name in unit.trained}
            self.masters |= {name: master for name, master in own.items() if len(master)}
        self.torch_optimizer = OPTIMIZERS[config.optimizer](
            self.masters, config, optimizer=self, model=model, mesh=mesh
        )

    def make_unit(self, named: dict[str, nn.Parameter], group: Group) -> Unit:
        """Put parameters into a unit."""
        return self.unit_type(named, group)

    def begin(self, n_micro_batches: int):
        """Before the first micro-batch: make each `.grad` a view of a flat buffer, in which autograd accumulates."""
        for unit in self.units:
            unit.make_room()
            for name, param in unit.trained.items():
                param.grad = unit.view(unit.gradient, name)

    def reduce(self, unit: Unit) -> Pending:
        """Start the reduce-scatter of a unit's gradient. This rank's shard of the sum goes to a new `reduced_shard`."""
        unit.reduced_shard = unit.gradient.new_empty(unit.length)
        return reduce_scatter(unit.reduced_shard, unit.gradient, unit.group)

    def finish(self):
        """After the last micro-batch: complete every `grad_shard`."""
        for unit, pending in [(unit, self.reduce(unit)) for unit in self.units]:
            pending.wait()
            unit.grad_shard = unit.reduced_shard

    def gradients(self) -> dict[str, Tensor]:
        """This rank's part of each trained parameter's gradient, by name; the part may be empty."""
        return {name: unit.view_shard(unit.grad_shard, name) for unit in self.units for name in unit.trained}

    def step(self, lr: float):
        """Update this rank's shards of the masters, then `publish` them as weights."""
        gradients = self.gradients()
        for name, master in self.masters.items():
            master.grad = gradients[name]
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        self.torch_optimizer.step()
        self.publish()

    def publish(self):
        """Round the masters into this rank's shards of the weights; all-gather each unit as soon as it is rounded."""
        pendings = []
        for unit in self.units:
            unit.shard.copy_(unit.master)
            pendings.append(all_gather(unit.flat, unit.shard, unit.group))
        for pending in pendings:
            pending.wait()

    def spans(self) -> dict[str, tuple[int, int]]:
        """The elements of each flattened parameter that this rank updates."""
        found = {}
        for unit in self.units:
            for name in unit.trained:
                start = max(unit.first - unit.span[name][0], 0)
                found[name] = (start, start + len(unit.view_shard(unit.master, name)))
        return found

    def zero_grad(self):
        """Free the gradients."""
        self.torch_optimizer.zero_grad()
        for unit in self.units:
            unit.gradient = unit.reduced_shard = unit.grad_shard = None
            for param in unit.trained.values():
                param.grad = None


class Zero2(Zero1):
    """ZeRO 2: gradients are sharded as well. Each trained parameter must get a gradient in every micro-batch.

    A unit's whole gradient is freed after its reduce-scatter, which overlaps the next unit's backward. So whole
    gradients of two units exist at a time. (If the head is tied, there is a third: autograd keeps the head's part of
    the tied gradient.) The last sum, here the embedding's, is awaited in the next backward, or in `finish`.
    """

    def __init__(self, *args):
        super().__init__(*args)
        for unit in self.units:
            for name, param in unit.trained.items():
                param.register_post_accumulate_grad_hook(partial(self.mark_ready, unit, name))

    def begin(self, n_micro_batches: int):
        """Before the first micro-batch, in each unit: zero `grad_shard`; count its trained parameters as `missing`."""
        self.in_flight: tuple[Unit, Pending] | None = None
        for unit in self.units:
            unit.missing = len(unit.trained)
            unit.grad_shard = torch.zeros_like(unit.master, device=unit.flat.device)

    def mark_ready(self, unit: Unit, name: str, param: nn.Parameter):
        """Hook: the gradient of `param` is complete for this micro-batch. Move it into the unit's buffer."""
        if self.in_flight is not None and self.in_flight[0] is unit:  # step 6 only: this rank has one unit
            self.land()
        if unit.gradient is None:
            unit.make_room()
        unit.view(unit.gradient, name).copy_(param.grad)
        param.grad = None
        unit.missing -= 1
        if unit.missing == 0:
            self.send(unit)

    def send(self, unit: Unit):
        """Wait for the previous unit's sum, which overlapped this unit's backward; then start this unit's sum."""
        self.land()
        self.in_flight = unit, self.reduce(unit)

    def land(self):
        """Wait for the sum in flight, add it to its unit's `grad_shard`, and free the whole gradient."""
        if self.in_flight is not None:
            unit, pending = self.in_flight
            pending.wait()
            unit.grad_shard += unit.reduced_shard
            unit.gradient = unit.reduced_shard = self.in_flight = None
            unit.missing = len(unit.trained)  # in the next micro-batch

    def finish(self):
        """After the last micro-batch: wait for the sum in flight, to finish the last unit."""
        self.land()


class ShardedUnit(Unit):
    """A unit that keeps only its shard between uses. Parameters stay views of `flat`, even while it has no memory."""

    def __init__(self, named: dict[str, nn.Parameter], group: Group):
        super().__init__(named, group)
        self.shard = self.shard.clone()
        self.master = self.shard.to(self.master.dtype)
        self.nbytes = self.flat.nbytes
        self.gathered, self.gathering = True, Pending()  # an empty one: nothing to wait for
        self.free()

    def gather(self):
        """If the flat buffer is empty, allocate it and start the all-gather that fills it."""
        if not self.gathered:
            self.flat.untyped_storage().resize_(self.nbytes)
            self.gathering, self.gathered = all_gather(self.flat, self.shard, self.group), True

    def free(self):
        """Free the memory of `flat`. Weights that autograd saved are views of it: the next `gather` refills them."""
        if self.gathered:
            self.gathering.wait()
            self.flat.untyped_storage().resize_(0)
            self.gathered = False


class Zero3(Zero2):
    """ZeRO 3 (FSDP): parameters are sharded, too. Hooks gather a unit before its use and prefetch the next meanwhile.

    A micro-batch through E (embedding), layers 0 and 1, H (norm and head). A column's messages overlap computation:

                       forward             backward
        all-gather     E   0   1   H       1   0
        compute            E   0   1   H   H   1   0   E
        freed after        E   0   1       H   1   0
        reduce-scatter                         H   1   0   E

    H stays whole from its forward to its backward. The backward of E needs no weights. So two units are whole at a
    time. If the head is tied, there is a third: E is gathered again with H, and freed after the backward of E.
    """

    unit_type = ShardedUnit

    def __init__(self, model: Decoder, *args):
        super().__init__(model, *args)
        trunk, head = model.model, model.lm_head
        entries = [[trunk.embed_tokens], *([layer] for layer in trunk.layers.values()), [trunk.norm, head]]
        self.lowest = int(trunk.embed_tokens is not None)  # the first entry whose backward needs weights: not E's
        self.uses: list[list[Unit]] = []  # for each entry, in forward order: the units of its parameters
        for i, modules in enumerate(entry for entry in entries if None not in entry):  # None: on another rank (step 6)
            params = set(nn.ModuleList(modules).parameters())
            self.uses.append([unit for unit in self.units if params & set(unit.named.values())])
            modules[0].register_forward_pre_hook(lambda *_, i=i: self.fetch(i, min(i + 1, len(self.uses) - 1)))
            modules[-1].register_forward_hook(partial(self.after_forward, i))

    def fetch(self, i: int, ahead: int):
        """Gather the units in `uses[i]` and wait for them; prefetch those in `uses[ahead]`, which are needed next."""
        for unit in [*self.uses[i], *self.uses[ahead]]:
            unit.gather()
        for unit in self.uses[i]:
            unit.gathering.wait()

    def after_forward(self, i: int, _module: nn.Module, _inputs: tuple, output: Tensor):
        """Hook after the forward of `uses[i]`: free units not needed next; at `output`'s gradient, gather them."""
        for unit in self.uses[i]:
            if unit not in self.uses[min(i + 1, len(self.uses) - 1)]:  # else the next entry, or H's backward, needs it
                unit.free()
        if output.requires_grad and i >= self.lowest:
            output.register_hook(lambda _gradient: self.fetch(i, max(i - 1, self.lowest)))

    def send(self, unit: Unit):
        """Start the sum as `Zero2` does. The unit's backward is done, so free its weights, unless some are frozen."""
        super().send(unit)
        if len(unit.trained) == len(unit.named):  # frozen weights have no hook: backward may still need them
            unit.free()

    def publish(self):
        """Round the masters into the shards of the weights, which the next forward gathers."""
        for unit in self.units:
            unit.shard.copy_(unit.master)
            unit.free()


ZERO: dict[str, Callable[..., Zero1] | None] = {"0": None, "1": Zero1, "2": Zero2, "3": Zero3}


@dataclass
class Config(step02.Config):
    """ZeRO."""

    zero: str = flag(
        "1", "sharded: 0 nothing (uses --sync), 1 optimizer state, 2 also gradients, 3 all", ZERO
    )


def make_optimizer(model: Decoder, config: Config, mesh: Mesh, device: torch.device, dtype: torch.dtype):
    """Initialise the weights; return optimizer and sync: those of chapters 1 and 2 for --zero 0, else one object."""
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
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")  # step 2: these sequences are mine
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    apply_recompute(model, config.recompute)  # stage 3 has gathered a layer before backward repeats it
    optimizer, sync = make_optimizer(model, config, mesh, device, dtype)  # this shard of the update is mine

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)  # of all ranks
        xs, ys = (x[mine].split(config.micro_batch_size) for x in (tokens, targets))
        loss = 0.0
        sync.begin(len(xs))
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # scale once ...
            micro_loss.backward()  # ... then only sum,
            loss = loss + micro_loss.detach()
        sync.finish()  # also over ranks
        all_reduce(loss, mesh["dp"]).wait()

        norm = global_norm(model, optimizer.gradients(), mesh, sharded=optimizer.sharded)  # over all shards
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip_coef = min(1.0, config.grad_clip / norm) if config.grad_clip and norm else 1.0
        scale(optimizer.gradients(), clip_coef)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
