"""A dry run: one step of training as one of N ranks, on tensors without data.

    python -m extras.tools.dry_run step06_pipeline.py --ranks 16384 --rank 1024 \\
        --model llama3-405b --tp 8 --pp 16 --global-batch-size 2048 --micro-batch-size 1

It takes the flags of the step and of the techniques, and runs the step's own `train`. Under
`FakeTensorMode` a tensor has a shape, a dtype and a device, but no data. With the process group
"fake", one process can be any rank of any number of ranks, and nothing is sent. Two steps are
trained, because the first one creates the optimizer's state. Of the second one it counts

    memory     of all tensors, by kind: when the gradients are complete, and at the peak
    sent       the bytes that this rank sends, by group and operation (common/comm.py)
    operators  their FLOPs and bytes. By the roofline model an operator takes max(FLOPs / peak,
               bytes / bandwidth) of --gpu. The sum bounds the time of a step from below: messages
               and the bubble of a pipeline are assumed to take no time. (`--json` has them by name)

Of causal attention only half of the scores count, because kernels skip the others. Where a step
reads numbers, they are made up: tokens visit all experts equally often. The operators are
those of a CPU, except RMSNorm, which on a GPU saves less for backward (`GpuNorm`; with --device cpu
it is a CPU's, too). What a technique moves to the host is counted with the rest.
"""

import gc
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import UserError, initial
from common.comm import Mesh
from common.flags import flag, parse
from common.shapes import model_shape
from extras.__main__ import step_of, techniques, with_flags
from extras.plan.gpus import GPUS, Gpu
from extras.plan.shapes import flops_per_token, shape_of
from extras.plan.tables import table
from extras.start import start
from extras.tools.memory import KINDS, Memory, human, tensors_of

# Matmuls, and the place of the first factor among their arguments.
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_grouped_mm": 0}
NO_KERNEL = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_KERNEL |= {"_unsafe_view"}
WRITES = {"copy_", "zero_", "fill_"}  # these do not read the tensor that they change
# These read next to nothing:
FILLS = {"zeros_like", "full_like", "new_zeros", "new_full", "nll_loss_backward"}
# These read as much as they return:
TAKES = {"embedding", "index_select", "index", "gather", "nll_loss_forward"}


def flops_of(name: str, args: tuple, kwargs: dict) -> float:
    """FLOPs of a matmul or of attention; 0 for operators whose time depends on bytes alone."""
    if name in MATMULS:
        first = MATMULS[name]
        a, b = args[first : first + 2]
        return 2.0 * a.numel() * b.shape[-1]
    if not name.startswith("_scaled_dot_product_"):
        return 0.0
    backward = "backward" in name
    q, k, v = args[1:4] if backward else args[:3]  # [batch, heads, seq, dim]
    causal = kwargs.get("is_causal", any(arg is True for arg in args))
    scores = q.numel() // q.shape[-1] * k.shape[-2] * (0.5 if causal else 1.0)
    if backward:  # the scores, once more, dq and dk; dp and dv
        return 2.0 * scores * (3 * q.shape[-1] + 2 * v.shape[-1])
    return 2.0 * scores * (q.shape[-1] + v.shape[-1])


def nbytes(values: Any) -> int:
    """Bytes of the tensors in `values`. Repeated elements of an expanded tensor count once."""
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors_of(values))


def bytes_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Bytes that the kernel of an operator reads and writes."""
    name, schema = func.overloadpacket.__name__, func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    in_place = {
        arg.name for arg in schema if arg.alias_info is not None and arg.alias_info.is_write
    }
    in_place -= {"grads"}  # AdamW's, which only a GradScaler changes
    changed = nbytes([given.pop(name) for name in in_place & given.keys()])
    read = nbytes(given)
    written = changed or nbytes(out)
    if name in FILLS:
        return written
    if name in TAKES:
        return written + min(read, written)
    if name in WRITES or "out" in kwargs:
        return written + read
    return written + read + changed


class Meter(Memory):
    """Counts the FLOPs, bytes and seconds of each operator, and makes up numbers."""

    def __init__(self, gpu: Gpu):
        super().__init__()
        self.gpu = gpu
        self.counting = False
        # By operator: flops, bytes, seconds.
        self.operators: dict[str, Counter] = defaultdict(Counter)
        self.rows = 1  # a layer's choices: of each token K experts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and count it."""
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "device":  # asked most often
            return args[0].fake_device
        if name == "_local_scalar_dense":  # of `item()`
            return 1.0 if args[0].is_floating_point() else self.rows
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self.label("messages", tensors_of(args))
        has_kernel = func.namespace == "aten" and not func.is_view and name not in NO_KERNEL
        if self.counting and has_kernel:
            self.book(name, bytes_of(func, args, kwargs, out), flops_of(name, args, kwargs))
        if name == "topk" and torch._C._current_graph_task_id() < 0:  # in forward: of experts
            self.rows = out[1].numel()
        return out

    def book(self, name: str, n_bytes: int, flops: float = 0.0):
        """Count one kernel, and the seconds that it takes by the roofline model."""
        seconds = max(flops / self.gpu.flops, n_bytes / self.gpu.hbm)
        self.operators[name].update(flops=flops, bytes=n_bytes, seconds=seconds)

    def shares(self, tensor: Tensor) -> list[int]:
        """What `tensor.tolist()` returns. Step 7 asks how many rows are for each expert or rank:
        equally many, of all rows. Raises UserError for numbers that are not counts.
        """
        if tensor.dim() != 1:
            raise UserError("a technique here needs data, which a dry run lacks")
        n = len(tensor)
        return [self.rows * (i + 1) // n - self.rows * i // n for i in range(n)]


class GpuNorm(torch.autograd.Function):
    """RMSNorm on a GPU, one kernel each way. It saves input, weight and a number for each token."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, meter: Meter) -> Tensor:
        """Count the kernel: x [..., dim], weight [dim] -> an output without data, [..., dim]."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.meter = meter
        meter.book("rms_norm", 2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Count the kernel: dy [..., dim] -> the gradients of x and weight, without data."""
        x, weight, _ = ctx.saved_tensors
        ctx.meter.book("rms_norm_backward", 3 * x.nbytes)
        return torch.empty_like(x), torch.empty_like(weight), None


def empty(params: dict[str, Tensor], n_layers: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """As `draw_all` of common/initial.py, but nothing is drawn."""
    for name, param in params.items():
        yield name, torch.empty(initial.full_shape(param))


class CountedRun:
    """The `run` that `train` gets: two steps, of which the second is counted. It writes nothing."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def steps(
        self, model: nn.Module, optimizer: Any, mesh: Mesh | None = None, **parts: Any
    ) -> Iterator[int]:
        """Yield two steps, and start to count between them. Raises UserError. `parts`: not used."""
        if mesh is None and dist.is_initialized():
            raise UserError("--ranks: step 1 knows one device: leave it out, or take a later step")
        self.model, self.optimizer = model, optimizer
        sent = mesh.sent if mesh else Counter()
        yield 0
        gc.collect()  # garbage of the first step would count as memory
        before = Counter(sent)
        self.start = len(self.meter.events)
        self.meter.operators.clear()
        self.meter.counting = True
        yield 1
        self.sent = {" ".join(key): n for key, n in (sent - before).items()}

    def require_finite(self, step: int, **numbers: float):
        """Called when the gradients are complete."""
        self.meter.label_training(self.model, self.optimizer)
        self.held = self.meter.held()

    def record(self, step: int, tokens: int, **numbers: float):
        """Called at the end of a step, in which all ranks together trained on `tokens` tokens."""
        self.tokens, self.meter.counting = tokens, False


@contextmanager
def as_rank(rank: int, ranks: int, meter: Meter, gpu: bool) -> Iterator[None]:
    """Be `rank` of `ranks`, with tensors that have no data. `gpu`: RMSNorm is a GPU's."""

    def save(tensor: Tensor) -> Tensor:
        meter.label("activations", [tensor])
        return tensor

    def rms_norm(x: Tensor, shape: tuple, weight: Tensor, eps: float) -> Tensor:
        return GpuNorm.apply(x, weight, meter)

    def tolist(tensor: Tensor) -> list[int]:
        return meter.shares(tensor)

    with ExitStack() as stack:
        if ranks > 1:
            dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        if gpu:
            stack.enter_context(mock.patch.object(F, "rms_norm", rms_norm))
        # Weights have no data, and the threads that draw would not see the mode below
        stack.enter_context(mock.patch.object(initial, "draw_all", empty))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", tolist))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        stack.enter_context(saved_tensors_hooks(save, lambda tensor: tensor))
        yield


def count_step(train: Callable, config: Any) -> dict[str, Any]:
    """Train as rank `config.rank` of `config.ranks`. Raises what `train` raises. Returns

    held, peak      bytes by kind of memory: when the gradients are complete, and at the peak
    sent            bytes by group and operation
    operators       by name: flops, bytes, seconds
    flops, seconds  sums of these
    mfu             the model's FLOPs over those that the GPU could do in this time: an upper bound
    """
    gpu, as_gpu = GPUS[config.gpu], config.device != "cpu"
    dtype = "bf16" if as_gpu and config.dtype == "auto" else config.dtype
    meter = Meter(gpu)
    run = CountedRun(meter)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("a" * 3 * model_shape(config.model).seq_len)
        config = replace(config, device="cpu", dtype=dtype, dataset=str(text))
        with as_rank(config.rank, config.ranks, meter, as_gpu):
            train(config, run)
    flops, seconds = (
        sum(count[key] for count in meter.operators.values()) for key in ("flops", "seconds")
    )
    needed = flops_per_token(shape_of(run.model.config, config)) * run.tokens / config.ranks
    return dict(
        held=run.held,
        peak=meter.peak(run.start),
        sent=run.sent,
        operators=meter.operators,
        flops=flops,
        seconds=seconds,
        mfu=needed / gpu.flops / seconds,
    )


def tables(counts: dict[str, Any], config: Any) -> str:
    """The result of `count_step` as text."""
    memory = [["memory", "gradients complete", "at the peak"]]
    for kind in KINDS:
        memory.append([kind, human(counts["held"][kind]), human(counts["peak"][kind])])
    memory.append(["sum", *(human(sum(counts[key].values())) for key in ("held", "peak"))])
    texts = [f"{config.model}: rank {config.rank:,} of {config.ranks:,}", table(memory)]
    if counts["sent"]:
        sent = [[key, human(n)] for key, n in counts["sent"].items()]
        texts.append(table([["sent", "bytes"], *sent]))
    texts.append(
        f"{counts['flops'] / 1e12:,.3f} TFLOP. On {config.gpu}, a step takes at least "
        f"{counts['seconds']:.3f} s, so MFU is at most {counts['mfu']:.1%}"
    )
    return "\n\n".join(texts)


def config_type(step: Any) -> type:
    """The flags of a step, of the techniques and of the dry run."""

    @dataclass
    class Config(with_flags(step.Config, techniques())):
        """The dry run."""

        ranks: int = flag(1, "ranks of the run, of which this process is one", least=1)
        rank: int = flag(0, "which of them")
        gpu: str = flag("h100-80", "the GPU whose peak and bandwidth bound the time", GPUS)
        json: bool = flag(False, "print JSON instead of tables")

    return Config


def check(config: Any):
    """Raise UserError for flags with which a dry run is not possible."""
    if config.rank >= config.ranks:
        last = config.ranks - 1
        raise UserError(f"--rank {config.rank}: with --ranks {config.ranks} it is 0 to {last}")
    if getattr(config, "compile", False):
        raise UserError("--compile: a dry run counts PyTorch's own operators: leave it out")
    balance = getattr(config, "balance", "")
    if balance.endswith("+overlap"):
        usual = balance.removesuffix("+overlap")
        raise UserError(f"--balance {balance}: a dry run knows no chunks: use {usual}")


def main(argv: list[str]):
    """Count a step, and print the table or JSON. Raises UserError."""
    step = step_of(argv)
    config = parse(config_type(step), argv[1:])
    check(config)
    gc.freeze()  # imported modules are no garbage; to scan them takes a quarter of the time
    counts = count_step(step.train, config)
    print(json.dumps(counts, indent=1) if config.json else tables(counts, config))


if __name__ == "__main__":
    start(main)
