"""The dry run: `train` itself, as one rank of so many, for one step, on tensors without numbers: it is counted.

    python step06_pipeline.py --dry-run 1024 --model llama3-405b --tp 8 --pp 16 --dtype bf16 --gpu h100-80

Each operator adds its calls, FLOPs and bytes. By the roofline it takes max(FLOPs / peak, bytes / bandwidth), if PyTorch
runs it as one kernel, and nothing else holds it up. Collectives are booked by the ledger, and take no time here.
Causal attention counts the half of the scores that its kernels compute.
"""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from common import UserError
from services import pictures, plots
from services.checks import mesh_sizes
from services.devices import GPU_PEAKS
from services.fake_device import Answers, can_fake_cuda, fake_device, fake_ranks, tensors_of
from services.memory import MemoryTimeline
from services.predictions import predict_peak
from services.run import Run, run_directory
from services.tables import human, table
from theory.gpus import GPUS, Gpu

MATMULS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # where the two factors begin
ATTENTION = "_scaled_dot_product_"
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "detach"}
WRITES = {"copy_", "_foreach_copy_", "zero_", "fill_"}  # do not read the tensor that they write
FILLS = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # read nothing
TAKES = {"embedding", "index_select", "index", "gather"}  # read of their inputs what they return
PUTS = {"scatter_", "scatter_add_", "index_add_", "index_put_"}  # of the tensor that they change, as much as they get
PARTS = {"forward": "F", "backward": "BW", "optimizer": "update"}  # of a step, where a pipeline does not say more


class Count(NamedTuple):
    """What operators of one name came to."""

    calls: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Count") -> "Count":
        """Both together."""
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


class About(NamedTuple):
    """What is known of an operator from its schema."""

    kernel: bool  # whether it runs one
    changed: tuple[int, ...]  # arguments that it writes
    causal: int  # which argument says that attention is causal, or -1


@cache
def about(func: Any) -> About:
    """Read an operator's schema. (Fused rules may change gradients, but do so for a GradScaler alone.)"""
    arguments = func._schema.arguments
    written = (a.alias_info is not None and a.alias_info.is_write and a.name != "grads" for a in arguments)
    changed = tuple(i for i, changes in enumerate(written) if changes)
    names, name = [a.name for a in arguments], func.overloadpacket.__name__
    kernel = func.namespace == "aten" and not func.is_view and name not in NO_KERNEL
    return About(kernel, changed, names.index("is_causal") if "is_causal" in names else -1)


def flops_of(name: str, args: tuple, kwargs: dict, causal: int) -> float:
    """FLOPs of matmuls and attention; others are bound by their bytes."""
    if name in MATMULS:
        a, b = args[MATMULS[name] :][:2]
        return 2.0 * a.numel() * b.shape[-1]
    if not name.startswith(ATTENTION):
        return 0.0
    backward = "backward" in name
    q, k, v = args[backward:][:3]  # [batch, heads, seq, dim]
    half = (args[causal] if causal < len(args) else kwargs.get("is_causal", False)) if causal >= 0 else False
    scores = q.numel() // q.shape[-1] * k.shape[-2] * (0.5 if half else 1.0)
    matmuls = (3 * q.shape[-1] + 2 * v.shape[-1]) if backward else q.shape[-1] + v.shape[-1]
    return 2.0 * scores * matmuls  # backward computes the scores again


def size_of(tensor: Tensor) -> int:
    """Bytes that a kernel moves for a tensor: an expanded one's are there once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class Meter(Answers):
    """Counts every operator, by part of the step; and the bytes that live on the device."""

    def __init__(self, device: torch.device, gpu: Gpu, single: float, experts: int, experts_per_token: int):
        """`single`: the peak in FLOP/s of `gpu` in fp32."""
        super().__init__(experts, experts_per_token)
        self.device, self.gpu, self.single = device, gpu, single
        self.seconds, self.part, self.counting = 0.0, "", False
        self.memory = Timeline(lambda: self.seconds)
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)  # (part of the step, operator)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and count it."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.prim.device.default:
            return out
        made = [t for t in tensors_of(out if isinstance(out, list | tuple) else (out,)) if t.device == self.device]
        for tensor in made:
            self.memory.note(tensor, self.memory.birth_category)
        facts, kwargs, name = about(func), kwargs or {}, func.overloadpacket.__name__
        if self.counting and facts.kernel:
            inputs = [t for t in tensors_of((*args, *kwargs.values())) if t.device == self.device]
            written = tensors_of([args[i] for i in facts.changed if i < len(args)])
            if kwargs.get("out") is not None or name in WRITES:
                inputs = inputs[:-1] if "out" in kwargs else inputs[len(written) :]
            flops = flops_of(name, args, kwargs, facts.causal)
            self.kernel(name, [] if name in FILLS else inputs, written or made, flops)
        return out

    def kernel(self, name: str, inputs: list[Tensor], outputs: list[Tensor], flops: float = 0.0):
        """Count a kernel that reads and writes these."""
        if not self.counting or not (inputs or outputs):
            return
        written = sum(map(size_of, outputs))
        read = min(sum(map(size_of, inputs)), written) if name in TAKES else sum(map(size_of, inputs))
        if name in PUTS:
            touched = min(written, inputs[-1].numel() * outputs[0].itemsize)
            read, written = read - written + touched, touched
        half = any(t.dtype.itemsize == 2 for t in inputs or outputs)  # a product of 16 bits may be added to 32
        seconds = max(flops / (self.gpu.flops if half else self.single), (read + written) / self.gpu.hbm)
        name = name.removeprefix(ATTENTION).removeprefix("_")
        self.counts[self.part, name] += Count(1, flops, read + written, seconds)
        self.seconds += seconds

    @contextmanager
    def phase(self, run: Run, name: str, action: Any = None, right: Callable = Run.phase) -> Iterator[None]:
        """Instead of the run's: as it does, and count under the part of the step."""
        self.part = action.kind if action is not None else PARTS.get(name, "rest")
        with right(run, name, action):
            yield
        self.part = "rest"


class Timeline(MemoryTimeline):
    """A timeline that is told of every tensor, in and out of phases."""

    start = 0  # the first event of the step

    @property
    def resize(self) -> Callable:
        """Instead of a storage's own `resize_`."""
        right = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, n_bytes: int):
            right(storage, n_bytes)
            if storage._cdata in self.size:
                self.look(storage)

        return resize_

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is born inside, in forward, is an activation."""
        self.birth_category = {"forward": "activations", "receive": "activations"}.get(name, "other")
        yield
        self.birth_category = "other"

    def peak(self) -> dict[str, int]:
        """Bytes by category when they are most, in the step."""
        _, curves = self.curves()
        sums = [sum(column) for column in zip(*curves.values(), strict=True)]
        at = max(range(self.start, len(sums)), key=sums.__getitem__)
        return {name: curve[at] for name, curve in curves.items()}


@dataclass
class Seen:
    """What one rank came to in a step, and what theory says of it."""

    rank: int
    meter: Meter
    shape: Any = None
    costs: Any = None  # of services/predictions.py
    peak: float | None = None  # predicted
    held: dict[str, int] = field(default_factory=dict)  # bytes by kind
    traffic: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def before(self, run: Any, costs: Any):
        """Instead of the tables before the first step: everything up to here was preparation."""
        pictures.watch(run)
        self.shape, self.costs, meter = run.shape, costs, self.meter
        self.peak = predict_peak(run, costs.memory)
        run.log.memory, run.log.profiled_until = meter.memory, 1
        run.log.forwards = max(2, run.log.forwards)  # no allocator is to be asked
        if getattr(run.config, "compress", "none") != "none":  # a step finds what the one before has not sent
            run.sync.begin()
            run.sync.finish()
        run.mesh.ledger.take()
        run.measure()
        meter.counting, meter.memory.start = True, len(meter.memory.events)

    def log(self, log: Run):
        """Instead of a record: the step is over."""
        taken = log.mesh.ledger.take()
        self.meter.counting, self.held = False, log.measured
        for name, found in (("traffic", self.traffic), ("calls", self.calls)):
            found |= {(dim, operation): n for dim, each in taken[name].items() for operation, n in each.items()}


def run_rank(train: Callable, config: Any, rank: int, world: int, gpu: Gpu, single: float) -> Seen:
    """Train one step as one rank. Raises what `train` raises."""
    m, cuda = config.model_config(), config.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    meter = Meter(device, gpu, single, getattr(m, "experts", 0), getattr(m, "experts_per_token", 0))
    seen = Seen(rank, meter)
    replaced = dict(__enter__=lambda log: log, __exit__=lambda *_: None, steps=lambda log, first: iter([first]))
    replaced |= dict(phase=lambda log, *about: meter.phase(log, *about), finish=lambda *_: None)
    replaced["log"] = lambda log, *_, **__: seen.log(log)
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(Run, name, value))
        stack.enter_context(mock.patch.object(pictures, "before", seen.before))
        stack.enter_context(mock.patch.object(pictures, "after", lambda _: None))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", meter.memory.resize))
        stack.enter_context(fake_ranks(rank, world))
        stack.enter_context(fake_device(meter, cuda, 64 * m.seq_len))
        train(config)
    return seen


def by_operator(seen: Seen) -> list[tuple[str, Count]]:
    """The counts of a rank, all parts of the step together, the slowest operator first."""
    found: dict[str, Count] = defaultdict(Count)
    for (_, name), count in seen.meter.counts.items():
        found[name] += count
    return sorted(found.items(), key=lambda entry: -entry[1].seconds)


def work(seen: Seen) -> dict[str, float]:
    """FLOPs counted: of matmuls, and of attention."""
    found = dict(matmul=0.0, attention=0.0)
    for (_, name), count in seen.meter.counts.items():
        found["attention" if "attention" in name else "matmul"] += count.flops
    return found


def stages_table(seen: list[Seen]) -> str:
    """A line for each rank: memory, traffic and FLOPs beside what theory says, and the seconds of the step's parts."""
    there = {part for one in seen for part, _ in one.meter.counts}
    parts = [part for part in ("F", "B", "W", "BW", "update", "rest") if part in there]
    both = [name for found in ("peak", "held", "sent", "TFLOPs") for name in (found, "predicted")]
    rows = [["rank", *both, *(f"{part} s" for part in parts)]]
    for one in seen:
        sent = sum(n for name, n in one.traffic.items() if name in one.costs.traffic)
        sizes = [sum(one.meter.memory.peak().values()), one.peak, sum(one.held.values())]
        sizes += [sum(one.costs.memory.values()), sent, sum(one.costs.traffic.values())]
        flops = [sum(work(one).values()), sum(one.costs.work.values())]
        spent = [sum(c.seconds for key, c in one.meter.counts.items() if key[0] == part) for part in parts]
        rows.append([f"{one.rank:,}", *map(human, sizes), *(f"{n / 1e12:,.1f}" for n in flops)])
        rows[-1] += [f"{seconds:.3f}" for seconds in spent]
    return table(rows)


def memory_table(one: Seen) -> str:
    """Bytes by kind: the most that was held, what theory says, and what there is when all together are most."""
    peak = one.meter.memory.peak()
    at = peak | dict(moments=peak["optimizer"], masters=None)
    rows = [["memory", "most", "predicted", "at the peak"]]
    rows += [[kind, human(one.held.get(kind, 0)), human(n), human(at[kind])] for kind, n in one.costs.memory.items()]
    rows.append(["temporary", "-", "-", human(peak["other"])])
    sums = sum(one.held.values()), sum(one.costs.memory.values()), sum(peak.values())
    return table([*rows, ["sum", *map(human, sums)]]) + "\n(masters and moments are one at the peak)"


def traffic_table(one: Seen) -> str:
    """Calls and bytes sent, beside what theory says; it leaves the few numbers of the metrics out."""
    rows = [["traffic of a step", "calls", "sent", "predicted"]]
    for name, n in one.traffic.items():
        rows.append([" ".join(name), f"{one.calls[name]:,}", human(n), human(one.costs.traffic.get(name))])
    return table(rows)


def operators_table(one: Seen, most: int = 16) -> str:
    """What each operator takes by the roofline, and what part of the time its FLOPs at the peak would not need."""
    operators, total = by_operator(one), one.meter.seconds
    if len(operators) > most:
        rest = sum((count for _, count in operators[most:]), Count())
        operators[most:] = [(f"{len(operators) - most} others", rest)]
    rows = [["operator", "calls", "FLOPs", "bytes", "bound by", "ms", "of the time", "MFU lost"]]
    for name, (calls, flops, n_bytes, seconds) in operators:
        lost = max(0.0, seconds - flops / one.meter.gpu.flops)
        row = [name, f"{calls:,}", f"{flops:.3g}", human(n_bytes), "bytes" if lost > seconds / 2 else "FLOPs"]
        rows.append([*row, f"{1e3 * seconds:,.2f}", f"{seconds / total:.1%}", f"{lost / total:.2%}"])
    return table(rows)


def report(seen: list[Seen], config: Any, world: int) -> str:
    """All tables: of every rank that was run, and of the fullest."""
    one = max(seen, key=lambda one: sum(one.meter.memory.peak().values()))
    m, meter = one.shape, one.meter
    mesh = " x ".join(f"{name} {size}" for name, size in mesh_sizes(config, world).items()) or "one device"
    head = f"dry run of {config.model} on {world:,} ranks, {mesh}: operators of {config.device}, peak of {config.gpu}"
    if getattr(m, "experts", 0):
        head += "\nevery choice of experts is taken as equally likely: what they get is the mean, rounded"
    stages = stages_table(seen)
    if one.peak is None:
        stages += "\nno peak is predicted for a CPU: its norms, attention and loss make and keep other tensors"
    texts = [head, stages, f"rank {one.rank:,}{', the fullest of these' * (len(seen) > 1)}:"]
    texts += [memory_table(one), *[traffic_table(one)] * bool(one.traffic)]
    found, said = work(one), one.costs.work
    rows = [[kind, f"{found[kind]:.6e}", f"{said[kind]:.6e}"] for kind in said]
    texts += [table([["FLOPs of a step", "counted", "predicted"], *rows]), operators_table(one)]
    model = one.costs.flops[0] * config.global_batch_size * m.seq_len / world / meter.gpu.flops
    at_peak = sum(found.values()) / meter.gpu.flops
    texts.append(
        f"All operators take {meter.seconds:.3f} s; their FLOPs at the peak, {at_peak:.3f}. "
        f"A rank's part of the model's FLOPs\n(attention in full, nothing twice) would take {model:.3f}. "
        f"So MFU is at most {model / meter.seconds:.1%}, before any bubble or message."
    )
    return "\n\n".join(texts)


def refuse(config: Any, world: int):
    """What a dry run cannot do. Raises UserError."""
    refused = dict(resume=config.resume, generate=config.generate, compile=config.compile)
    refused |= {flag: getattr(config, flag, False) for flag in ("check_replicas", "toy")}
    refused["documents"] = config.documents != "off"
    refused["sync torch"] = getattr(config, "sync", "") == "torch"
    refused["offload_optimizer disk"] = getattr(config, "offload_optimizer", "") == "disk"
    refused["backend gloo"] = config.backend == "gloo" and config.device != "cpu"
    if world < 1:
        raise UserError(f"--dry-run {world}: give the number of ranks, at least 1 (--rank goes with it)")
    for flag in (flag for flag, given in refused.items() if given):
        raise UserError(f"--dry-run has no numbers, files or peers: leave --{flag.replace('_', '-')} away")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("--dry-run is one process that plays any rank: start it with python, not with torchrun")
    if not hasattr(config, "sync") and world > 1:
        raise UserError(f"--dry-run {world}: step 1 knows one device; use --dry-run 1, or a later step")
    if not -1 <= config.rank < world:
        raise UserError(f"--rank {config.rank} is not among the {world} ranks of --dry-run: use 0 to {world - 1}")
    if config.gpu not in GPUS:
        raise UserError(f"--gpu {config.gpu}: no such GPU; choose one of {', '.join(GPUS)}")


def dry_run(train: Callable, config: Any):
    """Count a step of one rank of each pipeline stage, or of --rank, and print what it came to beside theory.

    Raises UserError for flags that cannot work.
    """
    world, gpu = config.dry_run, GPUS.get(config.gpu)
    refuse(config, world)
    if config.device != "cpu" and not can_fake_cuda():
        if config.device == "cuda":
            raise UserError("--device cuda: this torch is built for the CPU, and there is no g++; use --device cpu")
        print("no g++ here, so the operators are those of a CPU: bytes kept differ from a GPU's")
        config.device = "cpu"
    single = next(1e12 * fp32 for key, (_, fp32) in GPU_PEAKS.items() if config.gpu.upper().startswith(key))
    device = "cpu" if config.device == "cpu" else "cuda"
    alone = dict(steps=1, save_every=0, eval_every=0, profile_memory=1, log_ranks=False, device=device)
    plain = dataclasses.replace(config, **alone, peak_tflops=gpu.flops / 1e12)
    pp = mesh_sizes(config, world).get("pp", 1)
    ranks = [config.rank] if config.rank >= 0 else [stage * world // pp for stage in range(pp)]
    seen = [run_rank(train, plain, rank, world, gpu, single) for rank in ranks]
    print(report(seen, plain, world))
    fullest = max(seen, key=lambda one: sum(one.meter.memory.peak().values()))
    out = run_directory(config)
    out.mkdir(parents=True, exist_ok=True)
    plots.save_timeline(fullest.meter.memory, out)
    plots.memory_over_time(out)
    print(f"memory over time of rank {fullest.rank}, in seconds of computing: {out}/memory.png")
