"""Step 3: ZeRO. Replicas stop holding the same n times: optimizer state, gradients, parameters are cut in n.

Data parallelism (step 2) updates every weight on every rank with the same numbers. ZeRO (Rajbhandari et al. 2020) lets
rank r update only slice r. Parameters are laid out in *units* (one per layer, one each for the embedding and the head);
a unit is one flat buffer, padded and cut in n equal slices:

    unit "layers.0":  [ q_proj ........ | k_proj .. v_proj .. | o_proj ... gate ... | ... down_proj ... norms  0 0 ]
                      '---- rank 0 ----''------ rank 1 ------''------ rank 2 ------''---------- rank 3 ----------'

    stage              holds in full              cut in n                        per step and rank sends, x (n-1)/n
    0  (step 2)        weights, gradients, state                                  2 P    all-reduce
    1                  weights, gradients         masters, moments                2 P    reduce-scatter + all-gather
    2                  weights                    masters, moments, gradients     (k+1) P
    3                                             everything                      3k P   (a little less, see below)

for P parameters and k micro-batches, in elements. Stage 1 sends gradients once, after the last micro-batch, and gathers
the updated weights: an all-reduce is these two halves anyway. Stage 2 has nowhere to keep a full gradient, so it
reduce-scatters every micro-batch's. Stage 3 also gathers the weights of a unit before its forward and again before its
backward, and frees them after each. The head is the last unit in forward and the first in backward, so it stays; the
embedding's backward adds into rows and needs no weights: P + P_layers are gathered per micro-batch instead of 2 P (and
a tied matrix, the first unit and the last one used, once more).

    bytes per parameter, 16-bit training          stage 0    1            2              3
    --grad-dtype fp32 (default, fp32 sums)        2+4+12     2+4+12/n     2+(4+12)/n     18/n
    --grad-dtype same (16-bit gradients)          2+2+12     2+2+12/n     2+(4+12)/n     18/n    (slices sum in fp32)

WHEN. Reduce-scatters start as soon as autograd has completed a unit and run under the rest of backward. Stages 1 and 2
gather updated weights under the next forward: each module waits for its own only. Stage 3 prefetches the next unit
while one computes, in both directions.

OFFLOAD (Ren et al. 2021, "ZeRO-Offload"). --offload-optimizer cpu keeps masters and moments in host memory and updates
there; disk keeps them in memory-mapped files of the run directory; --offload-params cpu (stage 3) keeps the weight
slices on the host, and so the update too. Everything streams unit by unit. The files never have a name: they vanish
with the process and are never mistaken for a checkpoint.

THE TOY (`--toy`): W = [1,2,3,4], two ranks with x = 1 and 2, loss (sum(W) x)^2 / 2, so gradients 10 and 40, mean 25;
SGD with lr 0.1 takes 2.5 off every weight: [-1.5, -0.5, 0.5, 1.5]. It prints what each rank holds in every stage (in
stage 1 there is a whole gradient, but only the own half of it is the ranks' sum; the rest is 10 / 2, this rank's part):

    stage 0, rank 0: weights 1 2 3 4, gradient 25 25 25 25 -> own -1.5 -0.5 0.5 1.5, all -1.5 -0.5 0.5 1.5
    stage 1, rank 0: weights 1 2 3 4, gradient 25 25 5 5 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5
    stage 2, rank 0: weights 1 2 3 4, gradient 25 25 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5
    stage 3, rank 0: weights 1 2, gradient 25 25 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5

Run it:    torchrun --nproc_per_node=4 step03_zero.py --zero 3
           torchrun --nproc_per_node=2 step03_zero.py --toy
You should see step 1's losses in every stage, and a memory table that shrinks by n, line by line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

import step02_ddp as step02
from common.comm import Group, Mesh, Pending, all_gather, gather_objects, reduce_scatter, sum_over, world_size
from common.data import TokenData
from common.layout import layout_of, materialize, reduction_table, replica_group, square_norms, sum_gradients_over
from common.model import Decoder
from services.checkpoint import Checkpoint, Piece
from services.checks import check_zero
from services.devices import choose_device, choose_dtype, peak_flops
from services.evaluation import all_logits, evaluate, generate
from services.flags import main
from services.health import health, require_finite
from services.launch import open_mesh, require_same_flags
from services.offload import map_file, require_disk, to_host
from services.replicas import require_same_parameters, require_same_replicas
from services.resume import resume, save
from services.run import Run
from services.tables import table
from step01_single_gpu import Optimizer, Trained, apply_recompute, learning_rate, torch_optimizer
from step02_ddp import NaiveSync, gradient_sync
from theory.flops import flops_per_token
from theory.memory import MOMENTS
from theory.traffic import predictions


@dataclass
class Config(step02.Config):
    """The flags so far and those of ZeRO."""

    zero: Literal[0, 1, 2, 3] = 1  # cut over dp: 1 optimizer state, 2 and gradients, 3 and parameters
    offload_optimizer: Literal["none", "cpu", "disk"] = "none"  # where masters and moments live, and are updated
    offload_params: Literal["none", "cpu"] = "none"  # with --zero 3: where parameter slices live
    toy: bool = False  # print the four-weight example in every stage, and exit


class Unit:
    """Some parameters in one flat buffer [padded], cut in n slices [padded / n], of which this rank owns one.

    Stages 1 and 2: `flat` is always there, the parameters are views of it, `slice` is a view too. Stage 3: `slice` is
    what stays; `flat`'s storage is filled by `gather` and emptied by `free`, so that whatever autograd saved of the
    parameters finds its bytes again in backward.
    """

    def __init__(self, named: dict[str, nn.Parameter], group: Group, config: Config, disk: Path):
        self.named, self.group, self.stage, self.moments = named, group, config.zero, MOMENTS[config.optimizer]
        first = next(iter(named.values()))
        self.dtype, self.wide, device = first.dtype, torch.promote_types(first.dtype, torch.float32), first.device
        self.place: dict[str, tuple[int, int]] = {}
        size = 0
        for name, param in named.items():
            self.place[name] = (size, size + param.numel())
            size += param.numel()
        self.length = -(-size // group.size)
        self.first = group.rank * self.length
        self.flat = torch.zeros(self.length * group.size, dtype=self.dtype, device=device)
        for name, param in named.items():
            view = self.flat[slice(*self.place[name])].view_as(param)
            view.copy_(param.detach())
            param.data = view  # of its own version count: autograd does not mind the buffer being filled again
            if self.dtype.itemsize == 2 and config.grad_dtype == "fp32":
                param.grad_dtype = torch.float32
        self.grad_dtype = first.grad_dtype
        self.trained = [name for name, param in named.items() if param.requires_grad]
        self.slice = self.flat[self.first : self.first + self.length]
        self.nbytes, self.gathered, self.pending = self.flat.nbytes, True, None
        if self.stage == 3:
            host = config.offload_params == "cpu"
            self.slice = to_host(self.slice.clone()) if host else self.slice.clone()
            self.free()
        self.master = self.make_master(config, disk)
        pieces = {name: self.cut(self.master, name) for name in self.trained}
        self.pieces = {name: piece for name, piece in pieces.items() if len(piece)}
        matrices = [piece for name, piece in self.pieces.items() if named[name].dim() > 1]
        vectors = [piece for name, piece in self.pieces.items() if named[name].dim() == 1]
        self.inner = torch_optimizer(matrices, vectors, config) if self.pieces else None
        self.gradient: Tensor | None = None  # full [padded], of this rank alone: what has not yet been reduced
        self.grad_slice: Tensor | None = None  # [padded / n], in fp32 or wider: the step's gradient, summed over ranks
        self.missing = len(self.trained)  # gradients that this micro-batch's backward has yet to complete

    def make_master(self, config: Config, disk: Path) -> Tensor:
        """The slice that the update works on: the parameters' own if that is wide enough and not offloaded."""
        self.on_disk: list[Tensor] = []
        if config.offload_optimizer == "disk":
            rows = 1 + len(self.moments)
            master, *self.on_disk = map_file(disk, rows * self.length, self.wide).view(rows, self.length)
            return master.copy_(self.slice)
        if config.offload_optimizer == "cpu":
            return to_host(self.slice.to(self.wide, copy=True))
        return self.slice if self.slice.dtype == self.wide else self.slice.to(self.wide)

    def cut(self, own: Tensor, name: str) -> Tensor:
        """The part of a slice [padded / n] that belongs to a parameter: a view, empty if it lies on other ranks."""
        start, stop = (min(max(at - self.first, 0), self.length) for at in self.place[name])
        return own[start:stop]

    def gather(self):
        """Start to fill the flat buffer from everyone's slices, if it is not there (stage 3)."""
        if not self.gathered:
            self.flat.untyped_storage().resize_(self.nbytes)
            self.pending = all_gather(self.flat, self.slice.to(self.flat.device, non_blocking=True), self.group)
            self.gathered = True

    def ready(self):
        """Wait for the parameters to be there."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def free(self):
        """Give the flat buffer's memory back (stage 3)."""
        if self.gathered:
            self.ready()
            self.flat.untyped_storage().resize_(0)
            self.gathered = False

    def update(self, lr: float, factor: float):
        """Update the own slice with its gradient times `factor`; stages 1 and 2 start to gather everyone's."""
        if self.inner is not None:
            gradient = self.grad_slice.to(self.master.device, self.wide)
            gradient = gradient * factor if factor != 1 else gradient
            for name, piece in self.pieces.items():
                piece.grad = self.cut(gradient, name)
            for group in self.inner.param_groups:
                group["lr"] = lr
            self.inner.step()
            for piece in self.pieces.values():
                piece.grad = None
            self.moments_to_disk()
            if self.master is not self.slice:
                self.slice.copy_(self.master, non_blocking=True)
        if self.stage < 3:
            self.pending = all_gather(self.flat, self.slice, self.group)  # in place: the slice is a part of flat

    def moments_to_disk(self):
        """After the first update torch.optim's moments are in memory: put them into the file, once."""
        for key, row in zip(self.moments, self.on_disk, strict=False):
            for name, piece in self.pieces.items():
                state, mapped = self.inner.state[piece], self.cut(row, name)
                if state[key].data_ptr() != mapped.data_ptr():
                    state[key] = mapped.copy_(state[key])

    def collect(self, own: Tensor) -> dict[str, Tensor]:
        """Everyone's slices of something, cut into full tensors by parameter name. A collective."""
        own = own.to(self.flat.device)
        flat = own.new_empty(self.length * self.group.size)
        all_gather(flat, own, self.group, "(state)").wait()
        return {name: flat[slice(*self.place[name])].view(param.shape) for name, param in self.named.items()}


class Use(NamedTuple):
    """A module, the numbers of the units it computes with, and whether its backward pass needs them again."""

    module: nn.Module
    units: list[int]
    again: bool


Planned = tuple[list[list[str]], list[Use]]


def plan(model: Decoder) -> Planned:
    """Units as lists of parameter names, and the modules that use them in the order of the forward pass.

    The head is computed by `lm_head.loss` right after the final norm: they are one unit, and the norm stands for both.
    (A stage of a pipeline, step 6, may lack the embedding, or norm and head.)
    """
    trunk, names, uses = model.model, [], []
    if trunk.embed_tokens is not None:
        names.append(["model.embed_tokens.weight"])
        uses.append(Use(trunk.embed_tokens, [0], again=False))
    for number, layer in trunk.layers.items():
        by_replicas: dict[str, list[str]] = {}  # experts have replicas on fewer ranks: a unit of their own
        for name, param in layer.named_parameters():
            by_replicas.setdefault(layout_of(param).replicas, []).append(f"model.layers.{number}.{name}")
        uses.append(Use(layer, list(range(len(names), len(names) + len(by_replicas))), again=True))
        names += by_replicas.values()
    if trunk.norm is not None:
        tied = trunk.embed_tokens is not None and model.lm_head.weight is trunk.embed_tokens.weight
        uses.append(Use(trunk.norm, [0, len(names)] if tied else [len(names)], again=True))
        names.append(["model.norm.weight"] if tied else ["model.norm.weight", "lm_head.weight"])
    return names, uses


class ZeroOptimizer(Optimizer):
    """ZeRO stages 1 to 3 over `group`: an optimizer, and a gradient sync with the four calls of step 2's.

    Its units are made one by one; parameters still on the meta device are drawn then, so that in stage 3 the whole
    model never exists anywhere. Collectives start from hooks, so all ranks must use the same parameters in a backward
    pass, or some would wait for sums that others do not start.
    """

    def __init__(self, model: nn.Module, group: Group, config: Config, planned: Planned, mesh: Mesh | None = None):
        self.config, self.model, self.group, self.stage, self.mesh = config, model, group, config.zero, mesh
        self.forward = model
        names, self.uses = planned
        self.device, dtype = group.device, choose_dtype(config.dtype, group.device)
        disk = Path(config.out or "runs")
        if config.offload_optimizer == "disk":
            counts = [sum(model.get_parameter(name).numel() for name in unit_names) for unit_names in names]
            each = max(4, dtype.itemsize) * (1 + len(MOMENTS[config.optimizer]))
            require_disk(disk, sum(-(-count // group.size) for count in counts) * group.size * each, group)
        self.units: list[Unit] = []
        for unit_names in names:
            if model.get_parameter(unit_names[0]).is_meta:
                materialize(model, config.seed, self.device, dtype, unit_names)
            named = {name: model.get_parameter(name) for name in unit_names}
            self.units.append(Unit(named, replica_group(named[unit_names[0]], group, mesh), config, disk))
        self.dtype, self.mixed = dtype, dtype.itemsize == 2
        self.loss_scale, self.good_steps, self.updates = (2.0**16 if dtype == torch.float16 else 1.0), 0, 0
        self.in_flight: tuple[Unit, Tensor, Tensor, Pending] | None = None
        self.armed = False
        for i, use in enumerate(self.uses):
            use.module.register_forward_pre_hook(partial(self.before_forward, i))
            use.module.register_forward_hook(partial(self.after_forward, i))
        for unit in self.units:
            for name in unit.trained:
                hook = partial(self.completed, unit, name)
                unit.named[name].register_post_accumulate_grad_hook(hook)

    # The way of the parameters: gather, use, free.

    def before_forward(self, i: int, *_):
        """Hook: have this module's parameters, and send for the next one's."""
        for unit in self.units if i == 0 else ():  # a micro-batch begins, whose backward pass may complete a unit
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
        """Hook on the module's output: the gradient arrives, so the module behind it is done, and this one is next."""
        if i + 1 < len(self.uses):
            self.drop(i + 1, keep=i)
        if self.uses[i].again:
            self.provide(i, i - 1 if i > 0 and self.uses[i - 1].again else i)

    def provide(self, i: int, then: int):
        """Gather the units of module `i` and start to gather those of module `then`."""
        wanted = [self.units[u] for u in self.uses[i].units]
        if self.stage == 3:
            for unit in wanted + [self.units[u] for use in self.uses[then : then + 1] for u in use.units]:
                unit.gather()
        for unit in wanted:
            unit.ready()

    def drop(self, i: int, keep: int):
        """Free the units of module `i` that module `keep` does not use."""
        for u in set(self.uses[i].units) - set(self.uses[keep].units):
            self.units[u].free()

    # The way of the gradients: complete, reduce-scatter, add up in the slice.

    def begin(self):
        """Before the first micro-batch: make room for gradients, whole (stage 1) or in slices."""
        self.armed = self.stage > 1
        for unit in self.units:
            if self.stage == 3:
                unit.free()  # a validation leaves the last unit there
            if self.stage == 1 and unit.trained:
                unit.gradient = torch.zeros_like(unit.flat, dtype=unit.grad_dtype)
                for name in unit.trained:
                    unit.named[name].grad = unit.gradient[slice(*unit.place[name])].view_as(unit.named[name])
            elif unit.trained:
                unit.grad_slice = torch.zeros(unit.length, dtype=unit.wide, device=self.device)

    def last_micro_batch(self):
        """From now on gradients are complete when autograd has added to them, also in stage 1."""
        self.armed = True

    def completed(self, unit: Unit, name: str, param: nn.Parameter):
        """Hook: autograd has added to a gradient. Stages 2 and 3 move it into the unit's flat buffer."""
        if self.stage > 1:
            if param.grad is None:  # backward has put it off (step 6)
                return
            if unit.gradient is None:
                unit.gradient = torch.zeros(unit.length * unit.group.size, dtype=unit.grad_dtype, device=self.device)
            unit.gradient[slice(*unit.place[name])].view_as(param).add_(param.grad)
            param.grad = None
        if self.armed:
            unit.missing -= 1
            if unit.missing == 0:
                self.reduce(unit)

    def reduce(self, unit: Unit):
        """Start to sum a unit's gradient over the ranks; the one before has had a layer's time, so finish that."""
        self.land()
        own = torch.empty(unit.length, dtype=unit.grad_dtype, device=self.device)
        self.in_flight = (unit, own, unit.gradient, reduce_scatter(own, unit.gradient, unit.group))
        unit.gradient, unit.missing = None, len(unit.trained)

    def land(self):
        """Put the slice that was in flight where it belongs."""
        if self.in_flight is not None:
            unit, own, gradient, pending = self.in_flight
            pending.wait()
            if self.stage == 1:
                unit.grad_slice = gradient[unit.first : unit.first + unit.length].copy_(own)
            else:
                unit.grad_slice += own
            self.in_flight = None

    def finish(self):
        """After the last backward: reduce what no hook completed (an unused parameter), wait, free the last units."""
        for unit in self.units:
            if unit.gradient is not None:
                self.reduce(unit)
        self.land()
        for unit in self.units if self.stage == 3 else ():
            unit.free()

    # The update, and what the optimizer is asked for besides.

    def grad_norm(self) -> float:
        """The L2 norm of the whole gradient: every element lies in exactly one rank's slice."""
        slices = [unit.grad_slice for unit in self.units if unit.grad_slice is not None]
        (square,) = sum_over(self.group, square_norms(slices).sum())
        return square**0.5 / self.loss_scale

    def update(self, lr: float, factor: float):
        """Update all slices, unit by unit in the order in which the next forward pass wants them."""
        for unit in self.units:
            if unit.trained:
                unit.update(lr, factor)
        self.updates += 1

    def ready(self):
        """Wait for the weights of the last update; before, only the forward pass may use them (stages 1 and 2)."""
        for unit in self.units:
            unit.ready()

    def zero_grad(self):
        """Free the gradients."""
        for unit in self.units:
            unit.gradient = unit.grad_slice = None
            for param in unit.named.values():
                param.grad = None

    def tensors(self) -> dict[str, list[Tensor]]:
        """What this rank holds between two micro-batches, for the memory table (files do not count)."""
        units = self.units
        states = [entry for unit in units if unit.inner and not unit.on_disk for entry in unit.inner.state.values()]
        in_memory = [unit for unit in units if self.config.offload_optimizer != "disk"]
        return {
            "parameters": [t for unit in units for t in (unit.flat, unit.slice)],
            "gradients": [t for unit in units for t in (unit.gradient, unit.grad_slice) if t is not None],
            "masters": [unit.master for unit in in_memory if unit.master is not unit.slice],
            "moments": [t for entry in states for t in entry.values() if t.dim()],
        }

    def gradients(self) -> dict[str, Tensor]:
        """Every full gradient by global name, gathered. A collective."""
        full = {name: g for u in self.units if u.trained for name, g in u.collect(u.grad_slice).items()}
        return {name: self.whole(name, full[name] / self.loss_scale) for u in self.units for name in u.trained}

    def gradient_parts(self) -> dict[str, Tensor]:
        """The pieces of gradients in this rank's slices, by name."""
        return {name: u.cut(u.grad_slice, name) for u in self.units for name in u.trained}

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds of every full tensor: whole weights (stages 1 and 2), and what lies in its slices."""
        for name, buffer in self.model.named_buffers():
            yield Piece("buffer", name, buffer, buffer.shape, layout_of(buffer))
        for unit in self.units:
            unit.ready()
            for name, param in unit.named.items():
                about = param.shape, layout_of(param)
                first = max(0, unit.first - unit.place[name][0])
                if self.stage < 3:
                    yield Piece("model", name, param.detach(), *about)
                else:
                    yield Piece("model", name, unit.cut(unit.slice, name), *about, first)
                if name in unit.trained and self.mixed:
                    yield Piece("master", name, unit.cut(unit.master, name), *about, first)
                if name in unit.trained and self.updates:
                    yield Piece("step", name, torch.tensor(float(self.updates)), ())
                if name in unit.pieces and self.updates:
                    for kind in unit.moments:
                        yield Piece(kind, name, unit.inner.state[unit.pieces[name]][kind], *about, first)

    def masters_from_weights(self):
        """Begin with masters that are the weights."""
        for unit in self.units:
            if unit.master is not unit.slice:
                unit.master.copy_(unit.slice)

    def make_state(self, checkpoint: Checkpoint):
        """Make room for the moments that are stored."""
        steps = {name: checkpoint.full("step", name) for name in checkpoint.shapes("step")}
        self.updates = max(map(int, steps.values()), default=0)
        for unit in self.units if self.updates else ():
            for name, piece in unit.pieces.items():
                state = unit.inner.state[piece]
                state["step"] = steps.get(name, torch.zeros(())).to(piece.device)
                state |= {kind: torch.zeros_like(piece) for kind in unit.moments}
            unit.moments_to_disk()


def optimizer_and_sync(
    model: Decoder,
    group: Group,
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    planned: Planned | None = None,
) -> tuple[Optimizer, NaiveSync | ZeroOptimizer]:
    """What `--zero` stands for: step 2's two objects, or one that is both. Draws the model's weights (from meta)."""
    if config.zero == 0:
        materialize(model, config.seed, device, dtype)
        optimizer = Optimizer(model, config, mesh)
        return optimizer, gradient_sync(model, group, config, mesh)
    optimizer = ZeroOptimizer(model, group, config, planned or plan(model), mesh)
    return optimizer, optimizer


def train(config: Config, observe=None) -> Trained:
    """The whole run. `observe(step, optimizer)`, if given, sees each step's complete gradients before the update."""
    dp = world_size()
    check_zero(config, dp)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    m = config.model_config()
    with open_mesh({"dp": dp}, device, config.backend, config.timeout) as mesh:
        require_same_flags(config, mesh)
        group = mesh["dp"]
        if config.toy:
            lines = [line for stage in range(4) for line in gather_objects(toy(stage, mesh), mesh)]
            if mesh.rank == 0:
                print("\n".join(lines))
            return Trained(model=None, optimizer=None, history=[])
        share = slice(group.rank * config.global_batch_size // dp, (group.rank + 1) * config.global_batch_size // dp)
        data = TokenData(config.dataset, m.seq_len, config.global_batch_size, config.seed, m.vocab_size)

        with torch.device("meta"):
            model = Decoder(m)
        sum_gradients_over(model.parameters(), "dp")
        apply_recompute(model, config.recompute)
        if config.compile:
            for layer in model.model.layers.values():
                layer.forward = torch.compile(layer.forward)
        optimizer, sync = optimizer_and_sync(model, group, config, device, dtype, mesh)
        positions = torch.arange(m.seq_len, device=device)
        start = resume(optimizer, config, mesh) if config.resume else 0
        if config.zero == 0:
            require_same_parameters(model, group)
        if config.generate:
            text = generate(partial(all_logits, model, positions), m.seq_len, config.generate, 400, config.seed)
            if mesh.rank == 0:
                print(text)
            return Trained(model, optimizer, [])

        micro_batches = config.global_batch_size // dp // config.micro_batch_size
        predicted, traffic = predictions(config, m, optimizer, sync, micro_batches)
        flops, peak = flops_per_token(m, config.recompute), dp * peak_flops(device, dtype, config.peak_tflops)
        with Run(config, device, flops, peak, mesh) as run:
            run.say(f"{config.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}, {device}")
            run.say(mesh.picture())
            run.say(table(reduction_table(model, ["dp"])))
            run.say(run.memory_table(predicted))
            for step in run.steps(start):
                with run.phase("data"):
                    batch = data.batch(step, share)
                    tokens, targets = batch.tokens.to(device), batch.targets.to(device)
                loss = torch.zeros((), device=device, dtype=torch.promote_types(dtype, torch.float32))
                sync.begin()
                run.measure(optimizer.tensors())
                for first in range(0, len(tokens), config.micro_batch_size):
                    rows = slice(first, first + config.micro_batch_size)
                    if rows.stop == len(tokens):
                        sync.last_micro_batch()
                    with run.phase("forward"):
                        loss_sum = model.lm_head.loss(sync.forward(tokens[rows], positions), targets[rows])
                        micro_loss = loss_sum / batch.n_targets
                    with run.phase("backward"):
                        (micro_loss * optimizer.loss_scale).backward()
                    loss += micro_loss.detach()
                sync.finish()
                more = health(run, loss, optimizer)
                loss, stopping = sum_over(group, loss, run.stopping)
                run.stopping = stopping > 0
                require_finite(loss, step, run)
                if observe is not None:
                    observe(step, optimizer)
                run.measure(optimizer.tensors())
                with run.phase("optimizer"):
                    grad_norm = optimizer.step(learning_rate(step, config), loss=loss)
                if optimizer.loss_scale < 1:  # worse than an fp16 overflow, which skips a step and halves the scale
                    require_finite(grad_norm, step, run, "gradient norm")
                run.measure(optimizer.tensors())
                more |= dict(skipped=True) if optimizer.skipped else {}
                if config.eval_every and run.due(config.eval_every, step):
                    with run.phase("validation"):
                        part = evaluate(model, data, config, positions, group.rank, dp)
                        loss_sum, n_targets = sum_over(group, *part)
                        more["validation_loss"] = loss_sum / max(1, n_targets)
                run.log(loss, grad_norm, learning_rate(step, config), tokens.numel() * dp, **more)
                if config.check_replicas and run.due(config.check_replicas, step):
                    require_same_replicas(optimizer, mesh)
                if run.stopping or (config.save_every and run.due(config.save_every, step)):
                    save(run, step + 1, optimizer, config)
            if config.zero == 0:
                require_same_parameters(model, group)
            optimizer.ready()
            run.finish(predicted, traffic)
    return Trained(model, optimizer, run.history)


class Toy(nn.Module):
    """Four weights and the loss (sum(W) x)^2 / 2."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))

    def forward(self, x: float) -> Tensor:
        """A scalar."""
        return (self.W.sum() * x) ** 2 / 2


def shown(tensor: Tensor) -> str:
    """Values without the last digits' rounding."""
    return " ".join(f"{x:g}" for x in tensor.tolist())


def toy(stage: int, mesh: Mesh) -> str:
    """One step of the docstring's example; returns what this rank held and did. x is the rank's number plus one."""
    group = mesh["dp"]
    model = Toy().to(group.device)
    config = Config(zero=stage, optimizer="sgd", dtype="fp64", weight_decay=0.0, grad_clip=0.0)
    optimizer = ZeroOptimizer(model, group, config, ([["W"]], [Use(model, [0], again=True)]), mesh) if stage else None
    sync = optimizer or NaiveSync(model, group, config)
    held = shown(optimizer.units[0].slice if stage == 3 else model.W)
    sync.begin()
    sync.last_micro_batch()
    (sync.forward(group.rank + 1.0) / group.size).backward()  # scaled once: then only sums
    sync.finish()
    if optimizer is None:
        gradient, own = shown(model.W.grad), shown(model.W - 0.1 * model.W.grad)
        everyone = own
    else:
        unit = optimizer.units[0]
        gradient = shown(model.W.grad if stage == 1 else unit.grad_slice)
        optimizer.step(lr=0.1)
        own, everyone = shown(unit.slice), shown(optimizer.state()["model"]["W"])
    return f"stage {stage}, rank {group.rank}: weights {held}, gradient {gradient} -> own {own}, all {everyone}"


if __name__ == "__main__":
    main(train, Config)
