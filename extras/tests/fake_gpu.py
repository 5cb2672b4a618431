"""Trains on simulated GPUs, so that the branches for CUDA and NCCL run on a CPU build of torch.

Tensors have a device, a dtype and a shape, but no numbers; a process plays one rank (services/dry_run.py). A few lines
of C++ (fake_cuda.cpp) add what such a build lacks for tensors on "cuda". Every step's `train` runs unchanged, for
example as rank 3 of 8 GPUs. `Watch` intercepts each operator and collective. It records where the host waits for the
GPU, whether streams wait for what they read, and in which order collectives are launched. It cannot see kernels, time,
or memory that is freed too early.
"""

import ctypes
import hashlib
import importlib
import os
import shutil
import subprocess
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from common import comm
from extras.services.clocks import Clock
from extras.services.dry_run import NO_KERNEL, levels_of, route, without_numbers
from extras.services.seam import OpenRun, check
from extras.tests.equal import config_of

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("fake_cuda.cpp")


def can_fake_cuda() -> bool:
    """Build fake_cuda.cpp in the user's cache (once), and load it. False: torch is a GPU build, or there is no g++."""
    if torch.version.cuda or torch.version.hip:
        return False  # such a build has hooks of its own
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "llm-training-parallelism"
    home = Path(torch.__file__).parent
    about = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + str(home).encode()).hexdigest()[:16]
    target = folder / f"fake_cuda-{about}.so"
    if not target.exists() and shutil.which("g++"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:  # several processes may build at a time
            command = f"g++ -shared -fPIC -std=c++20 -I{home}/include {SOURCE} -o {place}/shim.so -L{home}/lib"
            command += f" -ltorch_cpu -lc10 -Wl,-rpath,{home}/lib"
            subprocess.run(command.split(), check=True, capture_output=True)
            Path(place, "shim.so").replace(target)
    if target.exists():
        ctypes.CDLL(str(target))
    return target.exists()


class Stream:
    """A CUDA stream, the host, or NCCL: counts its launches, and remembers what it has waited for."""

    def __init__(self):
        self.launched = 0
        self.after: dict[Stream, int] = {}  # by stream: how many of its launches our next one follows

    def now(self) -> dict["Stream", int]:
        """By stream, the number of launches that are complete when all launches of this stream are complete."""
        return self.after | {self: self.launched}

    def catch_up(self, moment: dict["Stream", int]):
        """Wait for the launches of a moment that `now` returned."""
        self.after |= {stream: max(n, self.after.get(stream, 0)) for stream, n in moment.items()}

    def wait_stream(self, other: "Stream"):
        """Wait for everything that another stream has launched so far."""
        self.catch_up(other.now())


class Event:
    """Simulates a CUDA event: `record` stores what a stream has launched, and others wait for it."""

    def __init__(self, watch: "Watch"):
        self.watch, self.at = watch, {}

    def record(self):
        """Remember what the current stream has launched."""
        self.at = self.watch.stream.now()

    def wait(self):
        """Make the current stream wait for the event."""
        self.watch.stream.catch_up(self.at)

    def synchronize(self):
        """Make the host wait for the event."""
        self.watch.wait("an event")
        self.watch.host.catch_up(self.at)


class Call(NamedTuple):
    """A collective or a message; all of its ranks launch an equal one."""

    kind: str
    group: str  # name of the communicator
    ranks: tuple[int, ...]  # of a message: sender and receiver
    what: tuple  # element counts and dtype


def tensors_of(*args: Any) -> list[Tensor]:
    """All tensors among the arguments, also inside lists."""
    return [part for part in tree_iter(args) if isinstance(part, Tensor)]


def place() -> str:
    """The innermost line of the project that is being executed, except for lines of this simulation."""
    unseen = tuple(str(ROOT / part) for part in ("extras/tests", "extras/services/dry_run.py", ".venv"))
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(f"{ROOT}/")]
    frames = [f for f in frames if not f.filename.startswith(unseen)]
    return f"{Path(frames[-1].filename).name}: {frames[-1].line}" if frames else "outside"


def bytes_of(tensor: Tensor) -> tuple[tuple[str, int], tuple[int, int]]:
    """A tensor's storage, and the bytes [start, stop) that it occupies there, gaps included."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    stop = start + (last + 1) * tensor.itemsize * (tensor.numel() > 0)
    return (tensor.device.type, tensor.untyped_storage()._cdata), (start, stop)


class Watch(TorchDispatchMode):
    """Intercepts each operator of a rank, and records what must not happen on a GPU."""

    def __init__(self):
        super().__init__()
        self.found, self.rows = [], 0  # rows that go to experts: told by `route`
        self.inside = False  # from the first forward of a step to the end of its sums
        self.waits: Counter[str] = Counter()  # of the host for the GPU, while `inside`
        self.calls: list[list[Call]] = []  # what is launched together: a collective, or a batch of messages
        # By storage and its bytes [start, stop): the stream that writes them, and the number of its launch.
        self.written: dict[tuple[str, int], dict[tuple[int, int], tuple[Stream, int]]] = {}
        self.early: set[str] = set()  # places that read data before they have waited for it
        self.stream, self.host, self.nccl = Stream(), Stream(), Stream()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Replaces `torch.cuda.stream`."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def wait(self, reason: str):
        """Record that the host waits for the GPU."""
        if self.inside:
            self.waits[f"{reason} in {place()}"] += 1
        self.host.catch_up(self.stream.now())

    def asks(self, right: Callable, tensor: Tensor) -> Any:
        """Call a method, such as `item`, whose result the host must wait for."""
        if tensor.is_cuda:
            self.wait(right.__name__)
        return right(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and record whether it makes the host wait, or reads data too early."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self.collective(func, args)
        if name == "_pin_memory":  # pinned memory is simulated by ordinary memory
            return args[0].clone()
        if name == "_grouped_mm":  # the real one copies the offsets to the host where it has no fast path
            a, b, offs = args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None)
            if torch.cuda.get_device_capability(a.device)[0] not in (9, 10) or a.dtype != torch.bfloat16:
                self.wait(name)
            return a.new_empty((a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(offs), a.shape[0], b.shape[-1]))
        out = None if name == "_fused_sgd_" else func(*args, **kwargs)
        if not func.is_view:
            self.order(func, args, kwargs, out)
        if name in ("_to_copy", "copy_") and isinstance(out, Tensor):
            here = not (kwargs.get("non_blocking") or (*args, False, False)[2] is True)
            if here and {t.device.type for t in tensors_of(args, out)} >= {"cpu", "cuda"}:
                self.wait("copy between host and GPU")
        return out

    def order(self, func: Callable, args: tuple, kwargs: dict, out: Any):
        """Record writes, and reads of data that another stream may not have written yet. NCCL has its own stream."""
        name, schema = func.overloadpacket.__name__, func._schema.arguments
        inputs, made = tensors_of(args, kwargs), tensors_of(out)
        reader = self.stream if any(t.is_cuda for t in (*inputs, *made)) else self.host
        written = [arg for a, arg in zip(schema, args, strict=False) if a.alias_info and a.alias_info.is_write]
        changed = made + tensors_of(written)
        if func.namespace == "c10d":
            self.nccl.catch_up(self.stream.now())
            reader, changed = self.nccl, [] if name == "send" else inputs[:1]
        reader.launched += 1
        for tensor in () if name in NO_KERNEL or name.startswith("new_") or name.endswith("_like") else inputs:
            storage, (start, stop) = bytes_of(tensor)
            for (first, last), (writer, n) in self.written.get(storage, {}).items():
                late = writer not in (reader, self.host) and reader.after.get(writer, 0) < n
                if late and first < stop and start < last:
                    self.early.add(f"{name} in {place()}")
        self.written |= {bytes_of(tensor)[0]: {} for tensor in made if not any(tensor is t for t in inputs)}
        for tensor in changed:
            storage, part = bytes_of(tensor)
            self.written.setdefault(storage, {})[part] = reader, reader.launched
        if func.namespace == "c10d" and any(arg is False for arg in args):  # not asynchronous
            self.stream.catch_up(self.nccl.now())

    def collective(self, func: Callable, args: tuple):
        """Record a call. NCCL needs contiguous CUDA tensors of one dtype; raises AssertionError for others."""
        name, (group,) = func.overloadpacket.__name__, [a for a in args if isinstance(a, torch.ScriptObject)][:1]
        group, tensors = dist.ProcessGroup.unbox(group), tensors_of(args)
        sizes, dtype = [t.numel() for t in tensors], str(tensors[0].dtype)
        for t in tensors:
            assert t.is_cuda, f"{name} gets a tensor on {t.device}"
            assert t.is_contiguous(), f"{name} gets a tensor with strides {t.stride()} of shape {list(t.shape)}"
        assert len({t.dtype for t in tensors}) == 1, f"{name} gets {[t.dtype for t in tensors]}"
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            assert max(sizes) == group.size() * min(sizes), f"{name} over {group.size()} ranks gets {sizes} elements"
        ranks = tuple(dist.get_process_group_ranks(group))
        if name == "alltoall_base_":
            sizes = [tensors[0][:1].numel()]  # uneven: ranks send different numbers of rows
        if name in ("send", "recv_"):
            me, (peer,) = dist.get_rank(), [a for a in args if isinstance(a, int)][:1]
            ends = (me, ranks[peer]) if name == "send" else (ranks[peer], me)
            self.calls[-1].append(Call("message", group.group_name, ends, (*sizes, dtype)))
        else:
            self.calls.append([Call(name.strip("_"), group.group_name, ranks, (*sizes, dtype))])


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
    """Replaces torch's own: flash attention in 16 bits, memory-efficient attention in fp32."""
    aten = torch.ops.aten
    if q.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]


class Watched(OpenRun):
    """A run that writes nothing, and tells the watch when forward begins and when gradients are complete."""

    def __init__(self, config: Any, watch: Watch):
        super().__init__(config)
        self.first, self.watch, self.levels = False, watch, levels_of(config)

    def steps(self, **parts: Any) -> Iterator[int]:
        """Attach the watch last, around all variants."""
        parts = self.open(**parts)
        Clock(parts, host=True).listeners.append(self.hear)
        parts.around(parts.optimizer, "gradients", self.asked, by=__name__)
        route(self.watch, parts.model, self.levels)
        yield from range(self.config.steps)

    def asked(self, gradients: Callable) -> dict[str, Tensor]:
        """Wrap the optimizer's `gradients`: the norm follows, for which the host must wait in any case."""
        self.watch.inside = False
        return gradients()

    def hear(self, phase: str):
        """Called at each phase of a step: start to watch when forward begins."""
        self.watch.inside |= phase == "forward"


@contextmanager
def fake_gpu(watch: Watch, rank: int, world: int, capability: tuple[int, int]) -> Iterator[None]:
    """Inside this context, this process is rank `rank` of `world`, each with a GPU, and tensors have no numbers."""

    def pend(pending: comm.Pending, *given: Any, right: Callable = comm.Pending.__init__, **how: Any):
        right(pending, *given, **how)
        pending.moment = watch.nccl.now() if pending.works else {}

    def arrive(pending: comm.Pending, right: Callable = comm.Pending.wait):
        watch.stream.catch_up(pending.moment)
        right(pending)

    def post(operations: list, right: Callable = dist.batch_isend_irecv) -> Any:
        watch.calls.append([])  # its messages are launched together
        return right(operations)

    def on_host(*args: Any, right: Callable = torch.empty, pin_memory: bool = False, **how: Any) -> Tensor:
        return right(*args, **how)

    def tensor(data: Any, right: Callable = torch.tensor, device: Any = "cpu", **how: Any) -> Tensor:
        if torch.device(device).type == "cuda":
            watch.wait("torch.tensor")
        made = right(data, **how)
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    def set_data(tensor: Tensor, value: Tensor):  # a fake tensor remembers its device
        torch._C.TensorBase.data.__set__(tensor, value)
        tensor.fake_device = value.device

    def set_device(device: torch.device):
        current = _get_current_dispatch_mode_stack()
        for mode in modes[len(current) :]:  # another thread sees GPUs from here on
            mode.__enter__()

    data = property(torch._C.TensorBase.data.__get__, set_data)
    gpu = dict(is_available=lambda: True, device_count=lambda: 8, set_device=set_device)
    gpu |= dict(Stream=Stream, stream=watch.on, current_stream=lambda *_: watch.stream, Event=partial(Event, watch))
    gpu |= dict(get_device_capability=lambda *_: capability, get_device_name=lambda *_: "a GPU that is not there")
    replaced = [(torch.cuda, name, value) for name, value in gpu.items()]
    replaced += [(comm.Pending, "__init__", pend), (comm.Pending, "wait", arrive), (torch, "empty", on_host)]
    replaced += [(dist, "batch_isend_irecv", post), (torch, "tensor", tensor)]
    replaced += [(F, "scaled_dot_product_attention", attention)]
    mode = torch._subclasses.fake_tensor.FakeTensorMode
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mode, "avoid_device_init", True))
        stack.enter_context(mock.patch.object(FakeTensor, "data", data, create=True))
        stack.enter_context(without_numbers(watch, rank, world))
        for name, owner in dict(item=Tensor, tolist=FakeTensor).items():
            asked = getattr(owner, name)
            replaced.append((owner, name, lambda t, right=asked: watch.asks(right, t)))
        for where, name, value in replaced:
            stack.enter_context(mock.patch.object(where, name, value))
        modes = _get_current_dispatch_mode_stack()
        yield


BASE = dict(steps=2, micro_batch_size=1, dtype="bf16", device="cuda", seq_len=16, vocab_size=64)


def see(step: str, options: dict, rank: int = 0, world: int = 8, capability: Any = (9, 0)) -> SimpleNamespace | None:
    """Train as one of `world` ranks with `options` (flags, or fields of the model's shape). None if there is no shim.

    Returns the host's `waits`, the `early` reads, and the `calls` of collectives. Run it in a process of its own, since
    the shim cannot be unloaded.
    """
    if not can_fake_cuda():
        return None
    cuts = prod(options.get(dim, 1) for dim in ("pp", "cp", "tp"))
    config, watch = config_of(step, BASE | dict(global_batch_size=2 * world // cuts) | options), Watch()
    run = Watched(config, watch)
    with fake_gpu(watch, rank, world, capability):
        check(config, world)
        with run:
            importlib.import_module(step).train(config, run)
    return SimpleNamespace(waits=watch.waits, early=watch.early, calls=watch.calls)


def stuck(queues: list[list[list[Call]]]) -> list[str]:
    """Carry out each rank's launches in order, as if each blocked its rank; returns a line for each rank that hangs.

    A call ends when it is in the next launch of all of its ranks; a launch ends when all of its calls have ended.
    """
    left = [deque(map(Counter, queue)) for queue in queues]
    moving = True
    while moving:
        moving = False
        for call in [call for queue in left if queue for call in queue[0]]:
            heads = [left[rank][0] for rank in call.ranks if left[rank]]
            if len(heads) == len(call.ranks) and all(head[call] for head in heads):
                moving = True
                for rank, head in zip(call.ranks, heads, strict=True):
                    head[call] -= 1
                    if not head.total():
                        left[rank].popleft()
    return [f"rank {rank}: {+queue[0]}" for rank, queue in enumerate(left) if queue]
