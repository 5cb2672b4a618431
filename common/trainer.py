"""What surrounds a training loop, as a few verbs. The code below this docstring is not needed to follow the chapters.

    with start(config, observe) as run:             checks the flags, joins the ranks as a mesh, opens the data
        run.mesh, run.device, run.dtype, run.shape  where the model lives and which shape it has
        for step in run.steps(model, optimizer):    resumes if asked to; prints before and after what the run costs
            batch = run.batch(step, share)          the rows `share` of the global batch, on this rank's device
            with run.phase("forward"): ...          counts seconds and bytes under this name
            loss = run.global_loss(loss)            adds up losses over dp (pp); ends the run if the sum is not finite
            if run.accepts(loss, norm): ...         whether this step is no spike (--skip-spikes)
            run.learning_rate(step)                 warm-up, then a cosine
            run.end_step(loss, norm)                validates, logs, compares replicas, saves, each when it is due
    return run.trained()                            (model, optimizer, history of metrics)

`observe(step, optimizer)`, if given, sees each step's complete gradients before the update. `run.steps` also takes the
gradient sync (step 2), this rank's positions (step 5) and the pipeline (step 6). services/variants.py has `accepts`,
`learning_rate`, for steps 6 and 7 `plan_pipeline`, `make_balance`, `note_experts`, and variants: `torch_ddp` is
PyTorch's own data parallelism, `homes` says where ZeRO keeps its slices, and `all_reduce` may compress.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.comm import Mesh, all_reduce, sum_over
from common.data import Batch
from common.model import Decoder
from services import activations, evaluation, pictures, resume
from services.checks import check, choose_ep, mesh_sizes
from services.compression import CompressedSum
from services.devices import choose_device, choose_dtype
from services.flags import RunFlags as RunFlags
from services.flags import main as main
from services.health import Spikes, health, require_finite
from services.launch import open_mesh, require_same_flags, world_size
from services.predictions import predict
from services.readers import open_tokens
from services.run import Run
from services.state import settle
from services.variants import Variants


class Trained(NamedTuple):
    """What a run leaves in memory."""

    model: Decoder
    optimizer: Any
    history: list[dict]


@contextmanager
def start(config: Any, observe: Callable | None = None) -> Iterator["Trainer"]:
    """The frame of a run. Raises UserError, on every rank, for flags that cannot work. Leaves the ranks at its end."""
    check(config, world_size())
    device, sizes = choose_device(config.device), mesh_sizes(config, world_size())
    with open_mesh(sizes, device, config.backend, config.timeout) as mesh, ExitStack() as stack:
        require_same_flags(config, mesh)
        yield Trainer(config, mesh, observe, stack)


class Trainer(Variants):
    """The verbs above."""

    def __init__(self, config: Any, mesh: Mesh, observe: Callable | None, stack: ExitStack):
        self.config, self.mesh, self.observe, self.stack = config, mesh, observe, stack
        self.device, self.dtype = mesh.device, choose_dtype(config.dtype, mesh.device)
        self.shape = m = config.model_config()
        self.data = open_tokens(config.dataset, m.seq_len, config.global_batch_size, config.seed, m.vocab_size)
        activations.narrow(mesh, config, m.dim)
        self.positions = torch.arange(m.seq_len)  # of this rank's tokens in a sequence
        self.all_reduce = all_reduce if getattr(config, "compress", "none") == "none" else CompressedSum(config)
        self.ep = choose_ep(config, m, mesh["dp"].size * mesh["cp"].size) if hasattr(config, "ep") else 1
        self.spikes = Spikes(config.skip_spikes)
        self.model, self.optimizer, self.log = None, None, None  # `steps` is given them, and opens the log
        self.more: dict[str, Any] = {}  # what else this step's record says

    def steps(
        self, model: Decoder, optimizer: Any, sync: Any = None, positions: Tensor | None = None, pipeline: Any = None
    ) -> Iterator[int]:
        """Yield the numbers of the steps to run, from 0 or from where --resume goes on; none with --generate.

        `sync`: what sums the gradients, if it is not the optimizer. `positions` int64 [seq]: which tokens of a sequence
        this rank has, if not all. `pipeline`: what runs the model, if it is cut into stages.
        """
        self.model, self.optimizer, self.sync, self.pipeline, config = model, optimizer, sync, pipeline, self.config
        self.vary(model, optimizer)
        self.positions = self.positions if positions is None else positions.cpu()
        here = self.positions.to(self.device)
        self.look = partial(evaluation.look_through, model, here) if pipeline is None else pipeline.look
        first = resume.resume(optimizer, self.spikes, config, self.mesh, sync) if config.resume else 0
        self.require_same_parameters()
        if config.generate:
            self.print_text(here)
            return
        self.follow_documents()
        costs = predict(self, sync)
        self.log = self.stack.enter_context(Run(config, self.device, costs.flops, costs.peak, self.mesh))
        pictures.before(self, costs)
        yield from self.log.steps(first)
        self.require_same_parameters()
        settle(optimizer)
        self.log.finish(costs.memory, costs.traffic)
        pictures.after(self)

    def batch(self, step: int, share: slice = slice(None)) -> Batch:
        """The rows `share` of the global batch of a step, this rank's tokens of them, on its device."""
        with self.phase("data"):
            batch = self.data.batch(step, share)
            tokens, targets = (x[:, self.positions].to(self.device) for x in (batch.tokens, batch.targets))
            self.note_batch(batch)
            return Batch(tokens, targets, batch.n_targets)

    def phase(self, name: str, action: Any = None) -> Any:
        """A context: its seconds and, in profiled steps, bytes are booked under `name`. `action`: a pipeline's."""
        return self.log.phase(name, action)

    def global_loss(self, loss: Tensor) -> float:
        """The mean loss of the global batch, given each rank's share of it. Raises UserError if it is not finite.

        The ranks also agree here on whether a signal has asked them to stop.
        """
        self.more |= health(self.log, loss, self.optimizer)
        total, stopping = loss, self.log.stopping
        for dim in self.dims_to_sum():
            total, stopping = sum_over(self.mesh[dim], total, stopping)
        if "tp" in self.mesh.groups:  # a signal may reach one rank a step before another
            (stopping,) = sum_over(self.mesh["tp"], stopping)
        if self.mesh.world > 1:  # alone, a rank may decide until its step is logged
            self.log.stopping = stopping > 0
        require_finite(total, self.log.step, self.log)
        if self.observe is not None:
            self.observe(self.log.step, self.optimizer)
        self.measure()
        return float(total)

    def end_step(self, loss: float, norm: float):
        """After the update: measure, validate, log, compare replicas, save, each when it is due."""
        config, log, step = self.config, self.log, self.log.step
        if self.optimizer.loss_scale < 1:  # `step` halves it if the norm is not finite: from 1 in bf16, fp32, fp64
            require_finite(norm, step, log, "gradient norm")
        self.measure()
        if config.eval_every and log.due(config.eval_every, step):
            with self.phase("validation"):
                self.more["validation_loss"] = evaluation.validate(self)
        log.log(loss, norm, self.learning_rate(step), config.global_batch_size * self.shape.seq_len, **self.more)
        self.more = {}
        self.check_replicas(step)
        if log.stopping or (config.save_every and log.due(config.save_every, step)):
            resume.save(log, step + 1, self.optimizer, self.spikes, self.sync)

    def trained(self) -> Trained:
        """What is left after the last step."""
        return Trained(self.model, self.optimizer, self.log.history if self.log is not None else [])
