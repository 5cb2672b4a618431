"""Real training runs on CUDA tensors that are not there: the branches for CUDA and NCCL, on a CPU build of torch.

The tensors and ranks are those of services/fake_device.py: `train` of every step runs as it is, in a second or two, as
rank 3 of 8 GPUs, say. `Watch` sees every operator and every collective on its way, and whether streams and the
host wait for what they read. What is not seen: kernels, time, memory that is given away too early.

python -c "from tests.fake_cuda import main; main('cases.json', 'results.jsonl')"
"""

import importlib
import json
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
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
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import comm, layout, model, moe, trainer
from services import pictures
from services import run as run_module
from services.dry_run import NO_KERNEL, about
from services.fake_device import (
    Answers,
    Event,
    Stream,
    can_fake_cuda,
    fake_device,
    fake_ranks,
    fused_attention,
    tensors_of,
)
from services.ledger import Ledger

ROOT = Path(__file__).parents[1]
STEPS = ["step01_single_gpu", "step02_ddp", "step03_zero", "step04_tp_sp", "step05_cp_ring", "step06_pipeline"]
STEPS += ["step07_moe_ep"]
WORLD = 8
MICRO_BATCH_PHASES = ("forward", "receive", "backward")
SDPA = "scaled_dot_product_attention"


def place() -> str:
    """The innermost line of the project outside tests that is being executed."""
    frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT)]
    unseen = (str(ROOT / "tests"), str(ROOT / "services/fake_device.py"))
    frames = [f for f in frames if not f.filename.startswith(unseen) and "site-packages" not in f.filename]
    return (
        f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}" if frames else "outside the project"
    )


def extent(tensor: Tensor) -> tuple[int, int]:
    """From which byte of its storage to which a tensor lies, gaps among them."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return start, start + (last + 1) * tensor.itemsize * (tensor.numel() > 0)


def place_of(tensor: Tensor) -> tuple[str, int]:
    """Its kind of device, and its storage there. (Readers of data make tensors unseen, where others have been.)"""
    return tensor.device.type, tensor.untyped_storage()._cdata


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


class Watch(Answers):
    """Sees each operator of a rank: notes where the host waits for the GPU, answers it, and records collectives."""

    def __init__(self, rank: int, experts: int = 0, experts_per_token: int = 0):
        super().__init__(experts, experts_per_token)
        self.rank, self.inside = rank, False  # inside: from the first micro-batch of a step to the end of its sums
        self.waits: Counter[str] = Counter()
        self.calls: list[Call] = []
        self.batch: list[tuple] | None = None  # the messages of the batch that is being posted
        self.dims: dict[str, str] = {}  # name of a communicator -> mesh dimension
        self.moe_forwards = 0  # inside
        self.unordered: set[str] = set()  # where floating-point numbers are added up on the GPU in any order
        self.heads: set[tuple[int, int]] = set()  # of q and of k, in calls of fused attention
        # By storage and its bytes [start, stop), who will have written them: a stream's n-th launch.
        self.written: dict[tuple[str, int], dict[tuple[int, int], tuple[Stream, int]]] = {}
        self.early: set[str] = set()  # where something is read that its reader has not waited for
        self.first, self.nccl, self.beside = (
            self.stream,
            Stream(),
            0,
        )  # beside: launches on other streams than the first
        self.measured: dict[str, int] = {}  # bytes by kind, of the memory table
        self.predicted: dict[str, int | None] = {}

    def wait(self, reason: str, asked: Tensor | None = None):
        """Note that the host waits for the GPU here, if this is inside the micro-batches and `asked` is on the GPU."""
        if self.inside and (asked is None or asked.is_cuda):
            self.waits[f"{reason} in {place()}"] += 1
        self.host.catch_up(self.stream.now())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, or make its answer up."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.collective(func, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is not torch.ops.prim.device.default and not func.is_view:
            self.order(func, args, kwargs, out)
        if func is torch.ops.prim.device.default or name in self.answers:
            return out
        self.sums(name, args)
        if name in ("_to_copy", "copy_") or name.startswith("index"):
            self.copies(name, args, kwargs, out)
        return out

    def order(self, func: Callable, args: tuple, kwargs: dict, out: Any):
        """Note who reads what another stream has not written yet, and who writes what. NCCL has a stream of its own."""
        inputs, made = tensors_of((*args, *kwargs.values())), tensors_of(out if isinstance(out, tuple) else (out,))
        reader = self.stream if any(t.is_cuda for t in (*inputs, *made)) else self.host
        changed = made + tensors_of([args[i] for i in about(func).changed if i < len(args)])
        if func.namespace == "c10d":
            self.nccl.catch_up(self.stream.now())
            reader, changed = self.nccl, [] if func.overloadpacket.__name__ == "send" else inputs[:1]
        reader.launched += 1
        self.beside += reader is not self.host and self.stream is not self.first
        name = func.overloadpacket.__name__
        for tensor in () if name in NO_KERNEL or name.startswith("new_") or name.endswith("_like") else inputs:
            start, stop = extent(tensor)
            for (first, last), (writer, n) in self.written.get(place_of(tensor), {}).items():
                late = writer not in (reader, self.host) and reader.after.get(writer, 0) < n
                if late and first < stop and start < last:
                    self.early.add(f"{name} in {place()}")
        self.written |= {place_of(tensor): {} for tensor in made if not any(tensor is t for t in inputs)}
        for tensor in changed:
            parts = self.written.setdefault(place_of(tensor), {})
            parts[extent(tensor)] = reader, reader.launched

    def sums(self, name: str, args: tuple):
        """Note where whole rows are added by atomics. (Along another dimension, the places here are different ones.)"""
        adds = name in ("index_add", "index_add_", "scatter_add", "scatter_add_")
        if adds and args[0].is_cuda and args[0].is_floating_point() and args[1] == 0:
            self.unordered.add(f"{name} in {place()}")

    def attention(self, q: Tensor, k: Tensor, *more, right: Callable = fused_attention, **options):
        """Note the heads that PyTorch's attention is given."""
        self.heads.add((q.shape[1], k.shape[1]))
        return right(q, k, *more, **options)

    def finish(self, log: Any, predicted: dict, traffic: Any = None):
        """Instead of the run's: keep the memory table."""
        self.measured, self.predicted = log.measured, predicted

    def fused_sgd(self, func: Callable, *args, **options):
        """PyTorch has no fake kernel for it."""
        require(len({(t.device, t.dtype) for t in tensors_of(args)}) == 1, "fused SGD gets tensors of several kinds")

    def grouped_mm(self, func: Callable, a: Tensor, b: Tensor, *more, **options) -> Tensor:
        """Look at the dtypes. (In others than bf16 the real kernel loops over the experts, and waits.)"""
        require(a.dtype == b.dtype and a.dtype.itemsize < 8, f"a grouped matmul gets {a.dtype} and {b.dtype}")
        return super().grouped_mm(func, a, b, *more, **options)

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

    def pend(pending: comm.Pending, *arguments, right: Callable = comm.Pending.__init__):
        right(pending, *arguments)
        pending.moment = watch.nccl.now()

    def arrive(pending: comm.Pending, right: Callable = comm.Pending.wait) -> Any:
        watch.stream.catch_up(pending.moment)
        return right(pending)

    def moe_forward(layer: moe.MoE, x: Tensor, right: Callable = moe.MoE.forward) -> Tensor:
        watch.moe_forwards += watch.inside
        return right(layer, x)

    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        replaced = [(trainer, "Trainer", Observed), (comm.Mesh, "join", join), (moe.MoE, "forward", moe_forward)]
        replaced += [(comm.Pending, "__init__", pend), (comm.Pending, "wait", arrive)]
        replaced += [(dist, "batch_isend_irecv", partial(watch.post, dist.batch_isend_irecv))]
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
    module, world = importlib.import_module(STEPS[step - 1]), 1 if step == 1 else WORLD
    config = module.Config(**options)
    m = config.model_config()
    watch = Watch(rank, getattr(m, "experts", 0), getattr(m, "experts_per_token", 0))
    broken = FAULTS[fault](module, watch) if fault else nullcontext()
    places = [fake_ranks(rank, world), fake_device(watch, True, 400 * m.seq_len), surroundings(watch, memory)]
    with ExitStack() as stack:
        for place in (*places, broken, redirect_stdout(None)):
            stack.enter_context(place)
        module.train(config)
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


def host_does_not_wait(module: Any, watch: Watch) -> Any:
    """A fault: the host updates with a gradient that is still coming."""
    return mock.patch.object(Event, "synchronize", lambda event: None)


def copies_do_not_wait(module: Any, watch: Watch) -> Any:
    """A fault: gradients leave for the host before they are summed."""
    return mock.patch.object(Stream, "wait_stream", lambda stream, other: None)


def weights_not_waited_for(module: Any, watch: Watch) -> Any:
    """A fault: modules compute with weights that are still coming."""
    return mock.patch.object(module.Unit, "ready", lambda unit: None)


FAULTS = [reversed_on_ranks_0_and_5, item_in_a_micro_batch, table_on_the_host, message_on_the_host]
FAULTS = {f.__name__: f for f in (*FAULTS, host_does_not_wait, copies_do_not_wait, weights_not_waited_for)}


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
    found |= dict(early=sorted(set().union(*(w.early for w in seen))), beside=[watch.beside for watch in seen])
    found |= dict(measured=seen[0].measured, predicted=seen[0].predicted)
    return found | (dict(stuck=stuck([watch.calls for watch in seen])) if kind == "order" else {})


def main(cases: str, results: str):
    """Run the cases of one file, {name: arguments of `run_case`}, and append what each came to to another, by line."""
    assert can_fake_cuda()
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
