"""A program without its numbers: tensors that have a device, a dtype and a shape, ranks that are alone, GPUs not there.

`FakeTensorMode` gives every tensor all but its numbers. The process group "fake" lets one process be any rank of any
world, and sends nothing. So `train` of every step runs as it is, as rank 3 of 16,384 GPUs, say. A few lines of C++
(fake_cuda.cpp) add what a CPU build of torch lacks for tensors on "cuda".

A number that the program asks for is made up: 0.0 and False. Whole numbers count tokens on their way to experts: they
are the mean over the data, if every set of `experts_per_token` experts is equally likely, rounded.
"""

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from common import comm, layout
from services import readers

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
SHAPED = ("stack", "cat", "select", "slice", "sum", "amax", "view", "permute", "transpose", "_unsafe_view", "clone")
SHAPED += ("squeeze", "unsqueeze", "expand", "empty_like", "new_empty", "detach", "reshape")  # means go through these

IN_PLACE = {"add_", "addmm_", "sub_", "mul_", "div_", "exp_", "copy_", "zero_", "fill_", "scatter_add_", "masked_fill_"}


def build_shim() -> Path | None:
    """The shared library of fake_cuda.cpp in the user's cache, built if it is not there; None without g++."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "llm-training-parallelism"
    home = Path(torch.__file__).parent
    about = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + str(home).encode()).hexdigest()[:16]
    target = folder / f"fake_cuda-{about}.so"
    if target.exists() or shutil.which("g++") is None:
        return target if target.exists() else None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:  # several processes may build at a time
        command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", str(SOURCE), "-o", f"{place}/shim.so"]
        command += [f"-L{home}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home}/lib"]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        Path(place, "shim.so").replace(target)
    return target


def can_fake_cuda() -> bool:
    """Whether this torch traces tensors on "cuda": a build for GPUs does, a CPU build with the shim, loaded here."""
    if torch.version.cuda or torch.version.hip:
        return True
    shim = build_shim()
    if shim is not None:
        ctypes.CDLL(str(shim))
    return shim is not None


class Fake(FakeTensorMode):
    """Fake tensors, on devices that need no start."""

    avoid_device_init = True


def unknown(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers (a small constant of the host keeps them)."""
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def tensors_of(args: Iterable) -> list[Tensor]:
    """The tensors among an operator's arguments, and in lists among them."""
    flat = (part for arg in args for part in (arg if isinstance(arg, list | tuple) else (arg,)))
    return [part for part in flat if isinstance(part, Tensor)]


def means_of(arg: Any) -> Any:
    """An argument of an operator, with means instead of tensors."""
    if isinstance(arg, list | tuple):
        return type(arg)(means_of(part) for part in arg)
    return arg.mean_value if isinstance(arg, Tensor) else arg


class Made(NamedTuple):
    """What an operator made: a tensor of its own or, with an `offset`, a view of its first argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None


class Known:
    """What operators make of which shapes. Fake tensors find out each time; here the first time is enough."""

    def __init__(self):
        self.made: dict[tuple, Made | None] = {}  # None: the first argument, written

    def key(self, func: Callable, args: tuple, kwargs: dict) -> tuple | None:
        """An operator with its arguments, as far as they decide what it makes; None if that is not enough."""
        try:
            return func, self.shapes(args), self.shapes(kwargs.items()) if kwargs else None
        except ValueError:
            return None

    def shapes(self, args: Iterable) -> tuple:
        """Arguments with shapes instead of tensors. Raises ValueError if one has numbers."""
        found = []
        for arg in args:
            if isinstance(arg, FakeTensor) and arg.constant is None:
                found.append((arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device))
            elif isinstance(arg, Tensor):
                raise ValueError
            else:
                found.append(self.shapes(arg) if isinstance(arg, list | tuple) else (type(arg), arg))
        return tuple(found)

    def learn(self, key: tuple, func: Callable, args: tuple, out: Any):
        """Note what was made, if it is one tensor, and a new one, a view of the first argument, or that itself."""
        returns, name = func._schema.returns, func.overloadpacket.__name__
        if not isinstance(out, FakeTensor) or out.constant is not None or func.namespace != "aten" or len(returns) > 1:
            return
        if name in IN_PLACE:
            self.made[key] = None
        elif func.is_view or name == "_unsafe_view" or not any(a.alias_info for a in func._schema.arguments):
            shares = isinstance(args[0], Tensor) and args[0].untyped_storage()._cdata == out.untyped_storage()._cdata
            offset = out.storage_offset() if shares else None
            self.made[key] = Made(out.shape, out.stride(), out.dtype, out.fake_device, offset)

    def make(self, made: Made | None, args: tuple, mode: FakeTensorMode) -> Tensor:
        """The same again."""
        if made is None:
            return args[0]
        shape, stride, dtype, device, offset = made
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if offset is not None:
                tensor.set_(args[0].untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, tensor, device)


class Stream:
    """A CUDA stream (or the host) of a device that takes no time: what it was told, and what it has waited for."""

    def __init__(self):
        self.launched = 0
        self.after: dict[Stream, int] = {}  # how many launches of other streams come before its next one

    def now(self) -> dict["Stream", int]:
        """What will be done when all that was launched here is."""
        return self.after | {self: self.launched}

    def catch_up(self, moment: dict["Stream", int]):
        """Wait for a moment of some stream."""
        self.after |= {stream: max(n, self.after.get(stream, 0)) for stream, n in moment.items()}

    def wait_stream(self, other: "Stream"):
        """Wait for what another stream was told so far."""
        self.catch_up(other.now())


class Answers(TorchDispatchMode):
    """Runs every operator, and answers where the program asks for numbers. `wait` is told where that is."""

    def __init__(self, experts: int = 0, experts_per_token: int = 0):
        super().__init__()
        self.known, self.mode = Known(), Fake(allow_non_fake_inputs=True)
        self.stream, self.host = Stream(), Stream()  # the stream of what comes next; what the host has waited for
        self.experts, self.chosen = max(1, experts), experts_per_token
        self.answers = dict(_local_scalar_dense=self.item, nonzero=self.nonzero, bincount=self.bincount)
        self.answers |= dict(_pin_memory=self.pin_memory, _fused_sgd_=self.fused_sgd, _grouped_mm=self.grouped_mm)
        self.answers |= dict(nonzero_static=self.nonzero_static)

    def wait(self, reason: str, asked: Tensor | None = None):
        """The host waits for the device here."""

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Instead of `torch.cuda.stream`."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def kernel(self, name: str, inputs: list[Tensor], outputs: list[Tensor]):
        """A kernel of a GPU has run, which torch's operators on fake tensors do not show as one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, or make its answer up."""
        if func is torch.ops.prim.device.default:
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in self.answers and any(t.is_cuda or unknown(t) for t in tensors_of(args)):
            return self.answers[name](func, *args, **kwargs)
        faked = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # else ranks are counted
        key = self.known.key(func, args, kwargs) if faked else None
        if key in self.known.made:
            out = self.known.make(self.known.made[key], args, self.mode)
        else:
            out = func(*args, **kwargs)
            if key is not None:
                self.known.learn(key, func, args, out)
        if isinstance(out, Tensor) and out.dtype in (torch.bool, torch.int64, torch.int32):
            self.follow(name, func, args, out)
        elif func.namespace == "c10d":
            self.travel(tensors_of(args))
        return out

    def density(self, visits: Tensor) -> float:
        """The mean of a table [.., experts] of which tokens go where, unless more is known of it."""
        return getattr(visits, "share", self.chosen / self.experts)

    def follow(self, name: str, func: Callable, args: tuple, out: Tensor):
        """Note the mean of a result: of tables of choices, of their sums, and of what is made of these."""
        tensors = tensors_of(args)
        if out.dtype == torch.bool:
            if name == "any" and len(args) > 1:  # of the experts of a rank: 1 - (the others have all choices)
                n = tensors[0].numel() // max(1, out.numel())
                others = math.comb(self.experts - min(n, self.experts), self.chosen)
                out.share = 1 - others / math.comb(self.experts, self.chosen)
            elif len(tensors) == 1 and hasattr(tensors[0], "share"):
                out.share = tensors[0].share
        elif name == "sum" and tensors[0].dtype == torch.bool:
            with unset_fake_temporarily():
                n, total = max(1, out.numel()), getattr(tensors[0], "total", None)
                each = [round(self.density(tensors[0]) * tensors[0].numel() / n)] * n
                if total is not None:  # known: the parts add up to it
                    each = [total * (i + 1) // n - total * i // n for i in range(n)]
                out.mean_value = torch.tensor(each[: out.numel()]).view(out.shape)
        elif name == "copy_" and all(hasattr(t, "mean_value") for t in tensors):
            with unset_fake_temporarily():
                tensors[0].mean_value.copy_(tensors[1].mean_value)
        elif name in SHAPED and tensors and all(hasattr(t, "mean_value") for t in tensors):
            with unset_fake_temporarily():
                if name in ("empty_like", "new_empty"):
                    out.mean_value = torch.zeros(out.shape, dtype=torch.int64)
                else:
                    options = {} if name != "sum" or len(args) < 3 else dict(keepdim=args[2])
                    out.mean_value = func(*(means_of(arg) for arg in args[: 2 if options else None]), **options)

    def travel(self, tensors: list[Tensor]):
        """A collective has moved counts: all ranks have the same means."""
        if len(tensors) == 2 and all(hasattr(t, "mean_value") for t in tensors):
            with unset_fake_temporarily():
                output, tensor = (t.mean_value for t in tensors)
                output.view(-1, tensor.numel()).copy_(tensor.reshape(1, -1))

    def item(self, func: Callable, tensor: Tensor) -> float | bool | int:
        """A number that the host asks for."""
        if not unknown(tensor):
            return func(tensor)
        self.wait("item", tensor)
        if tensor.dtype.is_floating_point:
            return 0.0
        return False if tensor.dtype == torch.bool else self.numbers(tensor)[0]

    def numbers(self, tensor: Tensor) -> list[int]:
        """The means of whole numbers."""
        return tensor.mean_value.flatten().tolist() if hasattr(tensor, "mean_value") else [0] * tensor.numel()

    def tolist(self, tensor: Tensor, right: Callable) -> Any:
        """Instead of a fake tensor's own."""
        if not unknown(tensor):
            return right(tensor)
        self.wait("tolist", tensor)
        numbers: list = self.numbers(tensor) if not tensor.dtype.is_floating_point else [0.0] * tensor.numel()
        for size in reversed(tensor.shape[1:]):
            numbers = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        return numbers if tensor.dim() else numbers[0]

    def nonzero(self, func: Callable, tensor: Tensor) -> Tensor:
        """As many places as are expected."""
        self.wait("nonzero", tensor)
        return self.nonzero_static(func, tensor, size=round(tensor.numel() * self.density(tensor)))

    def nonzero_static(self, func: Callable, tensor: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
        """The program knows how many."""
        tensor.total = size
        return torch.empty(size, tensor.dim(), dtype=torch.int64, device=tensor.device)

    def bincount(self, func: Callable, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """The kernel looks at the largest number first."""
        self.wait("bincount", tensor)
        return tensor.new_zeros(minlength, dtype=torch.int64)

    def pin_memory(self, func: Callable, tensor: Tensor, device: Any = None) -> Tensor:
        """Memory of the host is as good as another."""
        return tensor.clone()

    def fused_sgd(self, func: Callable, *args, **options):
        """PyTorch has no fake kernel for it."""

    def grouped_mm(self, func: Callable, a: Tensor, b: Tensor, offs: Tensor | None = None, *_, **__) -> Tensor:
        """PyTorch's fake kernel knows bf16 alone."""
        shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(offs), a.shape[0], b.shape[-1])
        return a.new_empty(shape)


class FusedNorm(torch.autograd.Function):
    """RMSNorm as CUDA's kernel computes it: one pass that keeps x and a number for each row."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, answers: Answers) -> Tensor:
        """x [..., dim] -> as x."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        root = x.new_empty(*x.shape[:-1], 1, dtype=torch.promote_types(x.dtype, torch.float32))
        answers.kernel("rms_norm", [x, weight], [out, root])
        ctx.save_for_backward(x, weight, root)
        ctx.answers = answers
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Gradients of x and of the weight."""
        x, weight, root = ctx.saved_tensors
        grads = torch.empty_like(x), torch.empty_like(weight)
        ctx.answers.kernel("rms_norm_backward", [grad, x, weight, root], list(grads))
        return *grads, None


class FusedSilu(torch.autograd.Function):
    """SiLU whose backward is one kernel; on fake tensors PyTorch takes it apart, with seven tensors in between."""

    @staticmethod
    def forward(ctx, x: Tensor, answers: Answers) -> Tensor:
        """As x."""
        ctx.save_for_backward(x)
        ctx.answers = answers
        return torch.ops.aten.silu(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient of x."""
        (x,), out = ctx.saved_tensors, torch.empty_like(grad)
        ctx.answers.kernel("silu_backward", [grad, x], [out])
        return out, None


def fused_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
    """PyTorch's attention as CUDA's kernels compute it: flash in 16 bits, memory-efficient in fp32."""
    aten = torch.ops.aten
    if q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]


class Event:
    """A CUDA event, of a device that takes no time."""

    def __init__(self, answers: Answers, enable_timing: bool = False):
        self.answers, self.at = answers, {}

    def record(self, stream: Any = None):
        """Take the current stream's moment."""
        self.at = self.answers.stream.now()

    def wait(self, stream: Any = None):
        """The current stream waits."""
        self.answers.stream.catch_up(self.at)

    def synchronize(self):
        """The host waits."""
        self.answers.wait("an event")
        self.answers.host.catch_up(self.at)

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds."""
        return 1.0


class Blank:
    """A data set of zeros: as what services/readers.py opens, and as a stream of its tokens."""

    column_names = ()

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1, int64."""
        return np.zeros(stop - start, np.int64)


def with_numbers(function: Callable) -> Callable:
    """A function whose tensors have numbers: it counts ranks, on the host."""

    def wrapped(*args, **options):
        with unset_fake_temporarily():
            return function(*args, **options)

    return wrapped


@contextmanager
def fake_ranks(rank: int, world: int) -> Iterator[None]:
    """Be rank `rank` of `world`, alone: no message leaves, and what others have to say is what this rank says."""
    right = dist.new_group

    def new_group(ranks: list[int], **options):  # of the groups of a mesh, make those that this rank is in
        return right(ranks, **options) if rank in ranks else None

    def all_gather_object(everyone: list, thing: Any, group: Any = None):
        everyone[:] = [thing] * len(everyone)

    if world > 1:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        replaced = dict(new_group=new_group, all_gather_object=all_gather_object)
        with mock.patch.multiple(dist, **replaced):
            yield
    finally:
        if world > 1:
            dist.destroy_process_group()


@contextmanager
def fake_device(answers: Answers, cuda: bool, tokens: int, gpus: int = 8) -> Iterator[None]:
    """All tensors made inside are fake, the data have `tokens` zeros and, if `cuda`, there are `gpus` GPUs."""

    def tensor(data: Any, right: Callable = torch.tensor, **options) -> Tensor:
        """Numbers of the host on the GPU: a copy that the host waits for."""
        if torch.device(options.pop("device", None) or "cpu").type == "cpu":
            return right(data, **options)
        answers.wait("torch.tensor")
        there = right(data, **options)
        return torch.empty(there.shape, dtype=there.dtype, device="cuda:0")

    def rms_norm(x: Tensor, _shape: Any, weight: Tensor, _eps: float, right: Callable = F.rms_norm) -> Tensor:
        return FusedNorm.apply(x, weight, answers) if x.is_cuda else right(x, _shape, weight, _eps)

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, right: Callable = Tensor.softmax) -> Tensor:
        """One kernel, also where the result is wider."""
        if dtype is None or not x.is_cuda:
            return right(x, dim, dtype)
        out = torch.empty_like(x, dtype=dtype)
        answers.kernel("softmax", [x], [out])
        return out

    def draw_parameter(name: str, shape: torch.Size, layers: int, seed: int, dtype: torch.dtype, rows: range) -> Tensor:
        return torch.empty(shape, dtype=dtype)  # threads would draw numbers: the mode is not theirs

    right = FakeTensor.tolist
    replaced = [(comm.Mesh, name, with_numbers(getattr(comm.Mesh, name))) for name in ("__init__", "add", "add_pairs")]
    replaced += [(FakeTensor, "tolist", lambda t: answers.tolist(t, right)), (torch, "tensor", tensor)]
    replaced += [(FakeTensor, "data_ptr", lambda t: t.untyped_storage()._cdata)]
    replaced += [(layout, "draw_parameter", draw_parameter), (torch, "set_num_threads", lambda n: None)]
    replaced += [(readers, "load_columns", lambda _: (Blank(tokens), 0)), (readers, "Stream", lambda data, _: data)]
    replaced += [(F, "silu", lambda x: FusedSilu.apply(x, answers))]
    replaced += [(kind, "reset_parameters", lambda _: None) for kind in (nn.Linear, nn.Embedding, nn.RMSNorm)]
    gpu = dict(is_available=lambda: True, device_count=lambda: gpus, set_device=lambda device: None)
    gpu |= dict(memory_allocated=lambda *_: 0, max_memory_allocated=lambda *_: 0, Event=partial(Event, answers))
    gpu |= dict(
        Stream=Stream, stream=answers.on, current_stream=lambda *_: answers.stream, check_error=lambda code: None
    )
    gpu |= dict(cudart=lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0))
    gpu |= dict(get_device_capability=lambda *_: (9, 0), get_device_name=lambda *_: "NVIDIA H100")
    gpu |= dict(is_bf16_supported=lambda **_: True, synchronize=lambda *_: answers.wait("synchronize"))
    if cuda:
        replaced += [(torch.cuda, name, value) for name, value in gpu.items()]
        replaced += [
            (F, "rms_norm", rms_norm),
            (FakeTensor, "softmax", softmax),
            (F, "scaled_dot_product_attention", fused_attention),
        ]
    with ExitStack() as stack:
        for where, name, value in replaced:
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(answers.mode)
        stack.enter_context(answers)
        yield
