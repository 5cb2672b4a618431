"""Real training runs on CUDA tensors that are not there: the branches for CUDA and NCCL, on a CPU build of torch.

`FakeTensorMode` gives every tensor a device, a dtype and a shape, but no numbers. The process group "fake" lets one
process be any rank of any world, and sends nothing. So `train` of every step runs as it is, in a second or two, as rank
3 of 8 GPUs, say. `Watch` sees every operator and every collective on its way. What is not seen: kernels, races, time.

A number that the program asks for is made up: 0.0, False and, for an integer, `ROWS`. So all experts are equally busy.

python -c "import ctypes; ctypes.CDLL('shim.so'); from tests.fake_cuda import main; main('cases.json', 'results.jsonl')"
(the shim, built of fake_cuda_shim.cpp, must be there before torch is imported)
"""

import importlib
import json
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from common import comm, layout, model, moe, trainer
from common.data import Batch
from services import pictures
from services import run as run_module
from services.ledger import Ledger

ROOT = Path(__file__).parents[1]
STEPS = ["step01_single_gpu", "step02_ddp", "step03_zero", "step04_tp_sp", "step05_cp_ring", "step06_pipeline"]
STEPS += ["step07_moe_ep"]
ROWS = 16  # the value of an integer that nobody knows: how many tokens each expert, or each rank, gets
WORLD = 8
MICRO_BATCH_PHASES = ("forward", "receive", "backward")
DEVICE = torch.device("cuda", 0)
SDPA = "scaled_dot_product_attention"


def place() -> str:
    """The innermost line of the project outside tests that is being executed."""
    frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT)]
    frames = [f for f in frames if not f.filename.startswith(str(ROOT / "tests")) and "site-packages" not in f.filename]
    return (
        f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}" if frames else "outside the project"
    )


class Call(NamedTuple):
    """A collective, or a batch of point-to-point messages, as one rank launches it."""

    kind: str
    group: str  # name of the communicator, the same on all of its ranks
    dim: str  # what the mesh calls it
    ranks: tuple[int, ...]
    what: tuple  # element counts and dtype; of a batch, (send or recv, peer, elements, dtype) of each message

    def __str__(self) -> str:
        """For messages."""
        return f"{self.kind} of {self.what} over {self.dim} {list(self.ranks)}"


class Watch(TorchDispatchMode):
    """Sees each operator of a rank: notes where the host waits for the GPU, answers it, and records collectives."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank, self.inside = rank, False  # inside: from the first micro-batch of a step to the end of its sums
        self.waits: Counter[str] = Counter()
        self.calls: list[Call] = []
        self.batch: list[tuple] | None = None  # the messages of the batch that is being posted
        self.dims: dict[str, str] = {}  # name of a communicator -> mesh dimension
        self.moe_forwards = 0  # inside
        self.unordered: set[str] = set()  # where floating-point numbers are added up on the GPU in any order
        self.heads: set[tuple[int, int]] = set()  # of q and of k, in calls of fused attention
        self.measured: dict[str, int] = {}  # bytes by kind, of the memory table
        self.predicted: dict[str, int | None] = {}
        self.answers = dict(_local_scalar_dense=self.item, nonzero=self.nonzero, bincount=self.bincount)
        self.answers |= dict(_pin_memory=self.pin_memory, _fused_sgd_=self.fused_sgd, _grouped_mm=self.grouped_mm)

    def wait(self, reason: str, asked: Tensor | None = None):
        """Note that the host waits for the GPU here, if this is inside the micro-batches and `asked` is on the GPU."""
        if self.inside and (asked is None or asked.is_cuda):
            self.waits[f"{reason} in {place()}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, or make its answer up."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.collective(func, args)
        elif name in self.answers and any(t.is_cuda or unknown(t) for t in tensors_of(args)):
            return self.answers[name](func, *args, **kwargs)
        out = func(*args, **kwargs)
        self.sums(name, args)
        if name in ("_to_copy", "copy_") or name.startswith("index"):
            self.copies(name, args, kwargs, out)
        if isinstance(out, Tensor) and out.dtype in (torch.int64, torch.int32):
            track(name, tensors_of(args), out)
        return out

    def sums(self, name: str, args: tuple):
        """Note where whole rows are added by atomics. (Along another dimension, the places here are different ones.)"""
        adds = name in ("index_add", "index_add_", "scatter_add", "scatter_add_")
        if adds and args[0].is_cuda and args[0].is_floating_point() and args[1] == 0:
            self.unordered.add(f"{name} in {place()}")

    def attention(self, q: Tensor, k: Tensor, *more, right: Callable = F.scaled_dot_product_attention, **options):
        """Note the heads that PyTorch's attention is given."""
        self.heads.add((q.shape[1], k.shape[1]))
        return right(q, k, *more, **options)

    def finish(self, log: Any, predicted: dict, traffic: Any = None):
        """Instead of the run's: keep the memory table."""
        self.measured, self.predicted = log.measured, predicted

    def item(self, func: Callable, tensor: Tensor) -> float | bool | int:
        """A number that the host asks for."""
        if not unknown(tensor):
            return func(tensor)
        self.wait("item", tensor)
        return made_up(tensor)

    def nonzero(self, func: Callable, tensor: Tensor) -> Tensor:
        """ROWS places in each row."""
        self.wait("nonzero", tensor)
        return tensor.new_zeros(ROWS * len(tensor), tensor.dim(), dtype=torch.int64)

    def bincount(self, func: Callable, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """The kernel looks at the largest number first."""
        self.wait("bincount", tensor)
        return tensor.new_zeros(minlength, dtype=torch.int64)

    def pin_memory(self, func: Callable, tensor: Tensor, device: Any = None) -> Tensor:
        """Memory of the host is as good as another."""
        return tensor.clone()

    def fused_sgd(self, func: Callable, *args, **options):
        """PyTorch has no fake kernel for it."""
        require(len({(t.device, t.dtype) for t in tensors_of(args)}) == 1, "fused SGD gets tensors of several kinds")

    def grouped_mm(self, func: Callable, a: Tensor, b: Tensor, *more, **options) -> Tensor:
        """PyTorch's fake kernel knows bf16 alone. (In other dtypes the real one loops over the experts, and waits.)"""
        require(a.dtype == b.dtype and a.dtype.itemsize < 8, f"a grouped matmul gets {a.dtype} and {b.dtype}")
        return func(a.bfloat16(), b.bfloat16(), *more, **options).to(a.dtype)

    def copies(self, name: str, args: tuple, kwargs: dict, out: Tensor):
        """Note a copy between host and GPU that the host waits for, and indices on the host for a tensor on the GPU."""
        if {t.device.type for t in (*tensors_of(args), out)} >= {"cpu", "cuda"}:
            if name.startswith("index"):
                self.wait("index on the host")
            elif not (kwargs.get("non_blocking") or (*args, False, False)[2] is True):
                self.wait("copy between host and GPU")

    def collective(self, func: Callable, args: tuple):
        """Record a call after looking at what it is given: NCCL takes whole contiguous CUDA tensors of one dtype."""
        name, (group,) = func.overloadpacket.__name__, [a for a in args if isinstance(a, torch.ScriptObject)][:1]
        group = dist.ProcessGroup.unbox(group)
        tensors = tensors_of(args)
        sizes, n = [t.numel() for t in tensors], group.size()
        for t in tensors:
            require(t.is_cuda, f"{name} gets a tensor on {t.device}")
            require(t.is_contiguous(), f"{name} gets a tensor with strides {t.stride()} of shape {list(t.shape)}")
        require(len({t.dtype for t in tensors}) == 1, f"{name} gets {[t.dtype for t in tensors]}")
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            small, large = sorted(sizes)
            require(large == n * small, f"{name} over {n} ranks gets {sizes} elements")
        dtype, ranks = str(tensors[0].dtype), tuple(dist.get_process_group_ranks(group))
        about = group.group_name, self.dims.get(group.group_name, "?"), ranks
        if name == "alltoall_base_":
            for t, parts in zip(tensors, [a for a in args if isinstance(a, list)][:2], strict=True):
                require(not parts or sum(parts) == len(t), f"{name}: {parts} rows of a tensor with {len(t)}")
            sizes = [tensors[0][:1].numel()]  # uneven: ranks send different numbers of rows
        if name in ("send", "recv_"):
            (peer,) = [a for a in args if isinstance(a, int)][:1]
            self.batch.append((name.strip("_"), ranks[peer], *sizes, dtype))
        else:
            self.calls.append(Call(name.strip("_"), *about, (*sizes, dtype)))

    def post(self, right: Callable, operations: list) -> Any:
        """Instead of `batch_isend_irecv`: the messages of one batch are one call."""
        self.batch, group = [], operations[0].group
        works = right(operations)
        about = group.group_name, self.dims.get(group.group_name, "?"), tuple(dist.get_process_group_ranks(group))
        self.calls.append(Call("messages", *about, tuple(self.batch)))
        return works


def require(right: bool, message: str):
    """Raise if something is not as NCCL wants it."""
    if not right:
        raise AssertionError(message)


def unknown(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers (a small constant of the host keeps them)."""
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def made_up(tensor: Tensor) -> float | bool | int:
    """What an element of a tensor without numbers is said to be."""
    if tensor.dtype.is_floating_point:
        return 0.0
    return False if tensor.dtype == torch.bool else getattr(tensor, "each", ROWS)


def tensors_of(args: Iterable) -> list[Tensor]:
    """The tensors among an operator's arguments, and in lists among them."""
    flat = (part for arg in args for part in (arg if isinstance(arg, list | tuple) else (arg,)))
    return [part for part in flat if isinstance(part, Tensor)]


def track(name: str, tensors: list[Tensor], out: Tensor):
    """Let a sum of made-up integers be their sum, their maximum that of a rank with all tokens, a row all of them."""
    if name == "cat":
        out.row = [number for t in tensors for number in [getattr(t, "each", ROWS)] * t.numel()]
    each = max((getattr(t, "each", ROWS) for t in tensors if t.dtype == out.dtype), default=ROWS)
    if name == "sum" and tensors[0].dtype == out.dtype:
        each *= tensors[0].numel() // max(1, out.numel())
    out.each = WORLD * each if name in ("max", "amax") else each


class Fake(FakeTensorMode):
    """Fake tensors, on devices that need no start."""

    avoid_device_init = True


class Event:
    """A CUDA event, of a device that takes no time."""

    def __init__(self, watch: Watch, enable_timing: bool = False):
        self.watch = watch

    def record(self, stream: Any = None):
        """Nothing is under way."""

    def synchronize(self):
        """The host waits."""
        self.watch.wait("an event")

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds."""
        return 1.0


class Tokens:
    """Batches without numbers: as TokenData of common/data.py."""

    def __init__(self, seq_len: int, batch_size: int):
        self.seq_len, self.batch_size = seq_len, batch_size

    def rows(self, n: int) -> tuple[Tensor, Tensor]:
        """tokens and targets, int64 [n, seq], on the host."""
        return torch.zeros(n, self.seq_len, dtype=torch.int64), torch.zeros(n, self.seq_len, dtype=torch.int64)

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """Some rows of a global batch."""
        return Batch(*self.rows(len(range(self.batch_size)[rows])), self.batch_size * self.seq_len)

    def validation(self, n_sequences: int) -> tuple[Tensor, Tensor]:
        """The held-out sequences."""
        return self.rows(n_sequences)


def really(function: Callable) -> Callable:
    """A function whose tensors have numbers: it counts ranks, on the host."""

    def wrapped(*args, **options):
        with unset_fake_temporarily():
            return function(*args, **options)

    return wrapped


@contextmanager
def surroundings(watch: Watch, memory: bool) -> Iterator[None]:
    """What a run finds on a machine with GPUs, and a frame that leaves files, pictures and watchdogs alone.

    `memory`: whether the frame watches what pipelines keep for backward.
    """
    started = trainer.Trainer

    class Observed(started):
        """Tells the watch when micro-batches begin and when their sums are done."""

        def phase(self, name: str, action: Any = None) -> Any:
            watch.inside = watch.inside or name in MICRO_BATCH_PHASES
            return super().phase(name, action)

        def global_loss(self, loss: Tensor) -> float:
            watch.inside = False
            return super().global_loss(loss)

    def join(mesh: comm.Mesh, *arguments, right: Callable = comm.Mesh.join, **options):
        right(mesh, *arguments, **options)
        watch.dims = {g.handle.group_name: name for name, g in mesh.groups.items() if g.handle is not None}

    def moe_forward(layer: moe.MoE, x: Tensor, right: Callable = moe.MoE.forward) -> Tensor:
        watch.moe_forwards += watch.inside
        return right(layer, x)

    def tolist(tensor: Tensor, right: Callable = FakeTensor.tolist) -> list:
        if not unknown(tensor):
            return right(tensor)
        watch.wait("tolist", tensor)
        numbers = getattr(tensor, "row", [made_up(tensor)] * tensor.numel())
        for size in reversed(tensor.shape[1:]):
            numbers = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        return numbers if tensor.dim() else numbers[0]

    def all_gather_object(everyone: list, thing: Any, group: Any = None):
        everyone[:] = [thing] * len(everyone)

    def tensor(data: Any, right: Callable = torch.tensor, **options) -> Tensor:
        """Numbers of the host on the GPU: a copy that the host waits for."""
        if torch.device(options.pop("device", None) or "cpu").type == "cpu":
            return right(data, **options)
        watch.wait("torch.tensor")
        there = right(data, **options)
        return torch.empty(there.shape, dtype=there.dtype, device=DEVICE)

    gpu = dict(is_available=lambda: True, device_count=lambda: WORLD, set_device=lambda device: None)
    gpu |= dict(memory_allocated=lambda *_: 0, max_memory_allocated=lambda *_: 0, Event=partial(Event, watch))
    gpu |= dict(get_device_capability=lambda *_: (9, 0), get_device_name=lambda *_: "NVIDIA H100")
    gpu |= dict(is_bf16_supported=lambda **_: True, synchronize=lambda *_: watch.wait("synchronize"))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for name, value in gpu.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        replaced = [(trainer, "Trainer", Observed), (comm.Mesh, "join", join), (moe.MoE, "forward", moe_forward)]
        replaced += [(comm.Mesh, name, really(getattr(comm.Mesh, name))) for name in ("__init__", "add", "add_pairs")]
        replaced += [(FakeTensor, "tolist", tolist), (dist, "all_gather_object", all_gather_object)]
        replaced += [(torch, "tensor", tensor), (FakeTensor, "data_ptr", lambda t: t.untyped_storage()._cdata)]
        replaced += [(dist, "batch_isend_irecv", partial(watch.post, dist.batch_isend_irecv))]
        replaced += [(trainer, "open_tokens", lambda _, seq_len, size, *__: Tokens(seq_len, size))]
        before = lambda run, costs: pictures.watch(run) if memory else None  # noqa: E731
        replaced += [(trainer, "pictures", mock.MagicMock(before=before)), (F, SDPA, watch.attention)]
        replaced += [(trainer.Run, "finish", lambda *args: watch.finish(*args))]
        replaced += [(run_module, "Watchdog", mock.MagicMock()), (run_module, "shared_store", dist.HashStore)]
        replaced += [(run_module, "run_directory", lambda _: Path(folder))]
        for where, name, value in replaced:
            stack.enter_context(mock.patch.object(where, name, value))
        yield


def one_rank(step: int, options: dict, rank: int, fault: str = "", memory: bool = False) -> Watch:
    """Train as rank `rank` of 8 (step 1: alone) under `options` of the step's Config; what was seen on the way."""
    module, watch, world = importlib.import_module(STEPS[step - 1]), Watch(rank), 1 if step == 1 else WORLD
    config = module.Config(**options)
    if world > 1:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        broken = FAULTS[fault](module, watch) if fault else nullcontext()
        with surroundings(watch, memory), broken, Fake(allow_non_fake_inputs=True), watch, redirect_stdout(None):
            module.train(config)
    finally:
        if world > 1:
            dist.destroy_process_group()
    return watch


def stuck(queues: list[list[Call]]) -> list[str]:
    """Carry out each rank's calls in their order, as if each blocked its rank; what those wait for that never end.

    A collective ends when it is next on all of its ranks; a batch of messages, when each has met its counterpart in a
    batch that is next on the peer.
    """
    at, met = [0] * len(queues), [set() for _ in queues]  # calls done; messages of the next batch that have arrived

    def head(rank: int) -> Call | None:
        return queues[rank][at[rank]] if at[rank] < len(queues[rank]) else None

    def advance(rank: int) -> bool:
        call = head(rank)
        if call.kind != "messages":
            if any(head(other) != call for other in call.ranks):
                return False
            for other in call.ranks:
                at[other] += 1
            return True
        before = len(met[rank])
        for i, (kind, peer, *what) in enumerate(call.what):
            there = head(peer)
            if i in met[rank] or there is None or there[:4] != call[:4]:
                continue
            for j, (other_kind, back, *others) in enumerate(there.what):
                if j not in met[peer] and (back, others) == (rank, what) and {kind, other_kind} == {"send", "recv"}:
                    met[rank].add(i)
                    met[peer].add(j)
                    break
        if len(met[rank]) == len(call.what):
            at[rank], met[rank] = at[rank] + 1, set()
            return True
        return len(met[rank]) > before

    while any([head(rank) is not None and advance(rank) for rank in range(len(queues))]):
        pass
    return [f"rank {rank}, call {at[rank]}: {head(rank)}" for rank in range(len(queues)) if head(rank) is not None]


def reversed_on_ranks_0_and_5(module: Any, watch: Watch) -> Any:
    """A fault: two ranks sum the squares of the gradient's norm over pp before tp, all others over tp before pp."""
    right = module.global_norm

    def global_norm(optimizer: Any, mesh: Any, dims: list[str], sliced: bool) -> float:
        return right(optimizer, mesh, dims[::-1] if watch.rank in (0, 5) else dims, sliced)

    return mock.patch.object(module, "global_norm", global_norm)


def item_in_a_micro_batch(module: Any, watch: Watch) -> Any:
    """A fault: someone looks at the loss of each micro-batch."""
    right = model.Head.loss

    def loss(*args) -> Tensor:
        return right(*args) * (1.0 + right(*args).item())

    return mock.patch.object(model.Head, "loss", loss)


def table_on_the_host(module: Any, watch: Watch) -> Any:
    """A fault: the tables of RoPE stay on the host."""
    right = model.rope_tables
    return mock.patch.object(model, "rope_tables", lambda positions, *more: right(positions.cpu(), *more))


def message_on_the_host(module: Any, watch: Watch) -> Any:
    """A fault: NCCL is given the host's memory."""
    right = module.sum_partial_gradients

    def sum_partial_gradients(optimizer: Any, mesh: Any, dims: list[str]):
        right(optimizer, mesh, dims)
        comm.all_reduce(torch.zeros(4), mesh["tp"]).wait()

    return mock.patch.object(module, "sum_partial_gradients", sum_partial_gradients)


FAULTS = {
    f.__name__: f for f in (reversed_on_ranks_0_and_5, item_in_a_micro_batch, table_on_the_host, message_on_the_host)
}


def count_graphs(options: dict) -> dict:
    """How many graphs `--compile` makes of the layers of step 7 under `options`, on the CPU, with numbers."""
    step07 = importlib.import_module(STEPS[6])
    config, made = step07.Config(compile=True, **options), []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    sizes, shape = dict(pp=1, dp=1, cp=config.cp, tp=config.tp), config.model_config()
    if config.cp * config.tp > 1:
        dist.init_process_group("fake", rank=0, world_size=config.cp * config.tp, store=FakeStore())
    try:
        mesh = comm.Mesh(sizes, torch.device("cpu"), Ledger())
        with torch.device("meta"):
            decoder = model.Decoder(shape)
            moe.add_experts(decoder, moe.Balance(shape, 1, mesh.device))
        step07.shard_experts(decoder, mesh, config, ep=1)
        step07.shard_tensors(decoder, mesh, config.sp, config.tp_overlap)
        positions = step07.shard_context(decoder, mesh, config.cp_mode)
        layout.materialize(decoder, 0, mesh.device, torch.float32)
        with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
            step07.wrap_layers(decoder, config)
        decoder(torch.zeros(1, len(positions), dtype=torch.int64), positions).sum().backward()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return dict(graphs=len(made), given_up=dict(counters["recompile_limit"]))


def run_case(kind: str, **case) -> dict:
    """What one case came to. `kind` path: one rank; order: all ranks, and whether they end; graphs: `count_graphs`."""
    if kind == "graphs":
        return count_graphs(**case)
    ranks = range(WORLD) if kind == "order" else [case.pop("rank")]
    seen = [one_rank(rank=rank, **case) for rank in ranks]
    found = dict(waits=sum((watch.waits for watch in seen), Counter()), calls=[len(watch.calls) for watch in seen])
    found["moe_forwards"] = sum(watch.moe_forwards for watch in seen)
    found |= dict(unordered=sorted(set().union(*(w.unordered for w in seen))), heads=sorted(seen[0].heads))
    found |= dict(measured=seen[0].measured, predicted=seen[0].predicted)
    return found | (dict(stuck=stuck([watch.calls for watch in seen])) if kind == "order" else {})


def main(cases: str, results: str):
    """Run the cases of one file, {name: arguments of `run_case`}, and append what each came to to another, by line."""
    torch.set_num_threads(1)
    parent = os.getppid()
    for name, case in json.loads(Path(cases).read_text()).items():
        if os.getppid() != parent:  # nobody reads the results any more
            return
        started = time.process_time()
        try:
            found = run_case(**case)
        except Exception:
            found = dict(error=traceback.format_exc())
        found = dict(name=name, seconds=time.process_time() - started) | found
        with open(results, "a") as file:
            file.write(json.dumps(found) + "\n")
