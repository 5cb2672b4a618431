"""Trains on simulated GPUs, so that the code for CUDA and NCCL runs on a CPU build of torch.

Tensors have a device, a dtype and a shape, but no numbers; one process plays one rank, as in services/dry_run.py. A few
lines of C++ (fake_cuda.cpp) add what a CPU build lacks for tensors on "cuda". Every step's `train` runs unchanged, for
example as rank 3 of 8 GPUs. `Watch` intercepts each operator and collective. It records where the host waits for the
GPU, whether streams wait for the data that they read, and in which order collectives are launched. It cannot see
kernels, time, or memory that is freed too early.
"""

import ctypes
import importlib
import shutil
import subprocess
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, partialmethod
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from common import comm
from extras.tools.dry_run import NO_KERNEL, levels_of, route, without_numbers
from extras.services.seam import OpenRun, check
from extras.tests.equal import config_of
from extras.tests.pool import ROOT

SOURCES = tuple(str(ROOT / part) for part in ("step0", "common", "extras/variants"))
BASE = dict(steps=2, micro_batch_size=1, dtype="bf16", device="cuda", seq_len=16, vocab_size=64)


@cache
def can_fake_cuda() -> bool:
    """Build fake_cuda.cpp, and load it into this process. Returns False for a GPU build of torch, or without g++."""
    if torch.version.cuda or torch.version.hip or not shutil.which("g++"):
        return False
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        command = f"g++ -shared -fPIC -std=c++20 -I{home}/include {Path(__file__).with_name('fake_cuda.cpp')}"
        command += f" -o {folder}/shim.so -L{home}/lib -ltorch_cpu -lc10 -Wl,-rpath,{home}/lib"
        subprocess.run(command.split(), check=True, capture_output=True)
        ctypes.CDLL(f"{folder}/shim.so")
    return True


class Stream:
    """A CUDA or NCCL stream, or the host. Its next launch runs after the first `done[s]` launches of each stream s."""

    def __init__(self):
        self.done: Counter[Stream] = Counter()

    def wait_stream(self, other: "Stream | Event"):
        """Wait for everything that another stream has launched, or waited for, so far."""
        self.done |= other.done


class Event:
    """A CUDA event. `wait` (current stream) and `synchronize` (host) wait for what `record`'s stream had launched."""

    def __init__(self, watch: "Watch"):
        self.record = lambda: setattr(self, "done", watch.stream.done.copy())
        self.wait = lambda: watch.stream.wait_stream(self)
        self.synchronize = lambda: watch.wait("an event", self)


class Call(NamedTuple):
    """A collective or a message. All ranks that take part in it launch an equal `Call`."""

    kind: str
    group: str  # name of the communicator
    ranks: tuple[int, ...]  # of a message: sender and receiver
    sizes: tuple[int, ...]  # element counts


def tensors_of(*args: Any) -> list[Tensor]:
    """All tensors among the arguments, also inside lists."""
    return [part for part in tree_iter(args) if isinstance(part, Tensor)]


def place() -> str:
    """The innermost line of the course or of a technique on the call stack; "backward" if there is none."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(SOURCES)]
    return f"{Path(frames[-1].filename).name}: {frames[-1].line}" if frames else "backward"


class Watch(TorchDispatchMode):
    """Intercepts each operator of a rank; records waits of the host, reads that are too early, and communication."""

    def __init__(self):
        super().__init__()
        self.found, self.rows = [], 0  # numbers of rows for experts, set by `route`
        self.inside = False  # from a step's first forward until its gradients are summed
        self.waits: Counter[str] = Counter()  # how often the host waits for the GPU while `inside`, by place
        self.calls: list[list[Call]] = []  # a list for each launch: one collective, or a batch of messages
        self.written: dict[int, Counter[Stream]] = {}  # storage -> stream -> its last launch that wrote there
        self.early: set[str] = set()  # places that read data before they have waited for it
        self.stream, self.host, self.nccl = Stream(), Stream(), Stream()

    def wait(self, reason: str, other: Stream | Event | None = None):
        """Record that the host waits for the GPU: for an event, or for the current stream."""
        if self.inside:
            self.waits[f"{reason} in {place()}"] += 1
        self.host.wait_stream(other or self.stream)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and record whether it makes the host wait, or reads data too early."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self.launch(func, args)
        if name == "_pin_memory":  # pinned memory is simulated by ordinary memory
            return args[0].clone()
        out = func(*args, **kwargs)
        if not func.is_view:
            self.order(func, args, kwargs, out)
        if name in ("_to_copy", "copy_") and isinstance(out, Tensor):
            here = not (kwargs.get("non_blocking") or (*args, False, False)[2] is True)
            if here and {t.device.type for t in tensors_of(args, out)} >= {"cpu", "cuda"}:
                self.wait("copy between host and GPU")
        return out

    def order(self, func: Callable, args: tuple, kwargs: dict, out: Any):
        """Record what an operator writes, and whether it reads data that another stream may not have written yet."""
        name, schema = func.overloadpacket.__name__, func._schema.arguments
        inputs, made = tensors_of(args, kwargs), tensors_of(out)
        reader = self.stream if any(t.is_cuda for t in (*inputs, *made)) else self.host
        written = [arg for a, arg in zip(schema, args, strict=False) if a.alias_info and a.alias_info.is_write]
        changed = made + tensors_of(written)
        if func.namespace == "c10d":
            self.nccl.wait_stream(self.stream)
            reader, changed = self.nccl, [] if name == "send" else inputs[:1]
        reader.done[reader] += 1
        address = lambda tensor: tensor.untyped_storage()._cdata  # noqa: E731
        for tensor in () if name in NO_KERNEL or name.startswith("new_") or name.endswith("_like") else inputs:
            for writer, n in self.written.get(address(tensor), {}).items():
                if writer is not self.host and reader.done[writer] < n:
                    self.early.add(f"{name} in {place()}")
        for tensor in made:
            if not any(tensor is given for given in inputs):  # new, perhaps at the address of a freed one
                self.written[address(tensor)] = Counter()
        for tensor in changed:
            self.written.setdefault(address(tensor), Counter())[reader] = reader.done[reader]
        if func.namespace == "c10d" and any(arg is False for arg in args):  # not asynchronous
            self.stream.wait_stream(self.nccl)

    def launch(self, func: Callable, args: tuple):
        """Record a collective or message. NCCL needs contiguous CUDA tensors: raises AssertionError for others."""
        name, tensors = func.overloadpacket.__name__.strip("_"), tensors_of(args)
        for t in tensors:
            assert t.is_cuda and t.is_contiguous(), f"{name} gets a tensor on {t.device} with strides {t.stride()}"
        group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
        ranks, sizes = tuple(dist.get_process_group_ranks(group)), tuple(t.numel() for t in tensors)
        if name == "alltoall_base":
            sizes = ()  # uneven: ranks send different numbers of rows
        if name in ("send", "recv"):
            ends = dist.get_rank(), ranks[next(a for a in args if isinstance(a, int))]
            self.calls[-1].append(Call("message", group.group_name, ends[:: 1 if name == "send" else -1], sizes))
        else:
            self.calls.append([Call(name, group.group_name, ranks, sizes)])


class Watched(OpenRun):
    """A run that writes nothing. `watch.inside` is set from a step's first forward until `gradients` is called."""

    def __init__(self, config: Any, watch: Watch):
        super().__init__(config)
        self.first, self.watch, self.levels = False, watch, levels_of(config)

    def steps(self, **parts: Any) -> Iterator[int]:
        """Attach the watch last, so that it wraps all techniques."""
        parts = self.open(**parts)
        route(self.watch, parts.model, self.levels)
        for module in parts.model.modules():
            module.register_forward_pre_hook(lambda *_: setattr(self.watch, "inside", True))
        parts.around(parts.optimizer, "gradients", self.finish, by=__name__)
        yield from range(self.config.steps)

    def finish(self, gradients: Callable) -> dict[str, Tensor]:
        """Wraps `gradients`, and stops recording waits, because the host must now wait for the norm of gradients."""
        self.watch.inside = False
        return gradients()


@contextmanager
def fake_gpu(watch: Watch, rank: int, world: int) -> Iterator[None]:
    """Inside this context, this process acts as `rank` of `world` ranks with an H100 each; tensors have no numbers."""

    def pend(pending: comm.Pending, *given: Any, right: Callable = comm.Pending.__init__, **how: Any):
        right(pending, *given, **how)
        pending.done = watch.nccl.done.copy() if pending.works else Counter()

    def arrive(pending: comm.Pending, right: Callable = comm.Pending.wait):
        watch.stream.wait_stream(pending)
        right(pending)

    def post(operations: list, right: Callable = dist.batch_isend_irecv) -> Any:
        watch.calls.append([])  # its messages are launched together
        return right(operations)

    def asked(tensor: Tensor, right: Callable) -> Any:  # `item` or `tolist`, whose result the host must wait for
        if tensor.is_cuda:
            watch.wait(right.__name__)
        return right(tensor)

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]  # a GPU's 16-bit kernel

    def empty(*args: Any, right: Callable = torch.empty, pin_memory: bool = False, **how: Any) -> Tensor:
        return right(*args, **how)

    def tensor(data: Any, right: Callable = torch.tensor, **how: Any) -> Tensor:  # torch.tensor is no operator
        made = right(data, **how)
        return empty(made.shape, dtype=made.dtype)

    def set_data(tensor: Tensor, value: Tensor):  # a fake tensor remembers its device
        torch._C.TensorBase.data.__set__(tensor, value)
        tensor.fake_device = value.device

    gpu = dict(is_available=lambda: True, device_count=lambda: 8, set_device=lambda _: None)
    gpu |= dict(Stream=Stream, stream=partial(mock.patch.object, watch, "stream"), Event=partial(Event, watch))
    gpu |= dict(current_stream=lambda *_: watch.stream, get_device_capability=lambda *_: (9, 0))
    replaced = [(torch.cuda, name, value) for name, value in gpu.items()]
    replaced += [(comm.Pending, "__init__", pend), (comm.Pending, "wait", arrive), (torch, "empty", empty)]
    replaced += [(dist, "batch_isend_irecv", post), (torch, "tensor", tensor)]
    replaced += [(F, "scaled_dot_product_attention", attention), (FakeTensorMode, "avoid_device_init", True)]
    data = property(torch._C.TensorBase.data.__get__, set_data)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensor, "data", data, create=True))
        stack.enter_context(without_numbers(watch, rank, world))
        for owner, name in ((Tensor, "item"), (FakeTensor, "tolist")):
            replaced.append((owner, name, partialmethod(asked, getattr(owner, name))))
        for which in replaced:
            stack.enter_context(mock.patch.object(*which))
        yield


def see(step: str, options: dict, rank: int = 0, world: int = 8) -> SimpleNamespace | None:
    """Train as one of `world` ranks with `options` (flags, or fields of the model's shape); returns what was recorded.

    Call it in a process of its own, since fake_cuda.cpp cannot be unloaded. Returns None if `can_fake_cuda()` is False.
    """
    if not can_fake_cuda():
        return None
    cuts = prod(options.get(dim, 1) for dim in ("pp", "cp", "tp"))
    config, watch = config_of(step, BASE | dict(global_batch_size=2 * world // cuts) | options), Watch()
    run = Watched(config, watch)
    with fake_gpu(watch, rank, world):
        check(config, world)
        with run:
            importlib.import_module(step).train(config, run)
    return SimpleNamespace(waits=watch.waits, early=watch.early, calls=watch.calls)


def stuck(queues: list[list[list[Call]]]) -> list[str]:
    """Simulate ranks that wait for each launch before the next one; returns a line for each rank that hangs.

    A call ends when all of its ranks have launched it. A launch ends when all of its calls have ended.
    """
    left = [deque(map(Counter, queue)) for queue in queues]
    while True:
        heads = [queue[0] if queue else Counter() for queue in left]
        calls = (call for head in heads for call in +head if all(heads[rank][call] for rank in call.ranks))
        if not (call := next(calls, None)):
            break
        for rank in call.ranks:
            heads[rank][call] -= 1
            if not heads[rank].total():
                left[rank].popleft()
    return [f"rank {rank}: {+queue[0]}" for rank, queue in enumerate(left) if queue]
