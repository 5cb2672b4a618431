"""Tensor parallelism: step time, calls and bytes of step 4 against PyTorch's DTensor (`parallelize_module`).

    python -m tests.bench step04                                                  two ranks on a CPU
    python -m tests.bench step04 --device cuda --model llama3-8b --dtype bf16     a GPU for each

Both sides cut the same plain model with the same weights, and run forward and backward of the same micro-batch; that
they find the same output and gradient is checked first. Step 4 runs without and with sequence parallelism, DTensor with

    plain              ColwiseParallel and RowwiseParallel alone: every matrix fetches its input for itself
    prepared           and PrepareModuleInput in front of each block, which fetches its input once
    SequenceParallel   the same, with SequenceParallel on the norms

--part layers (default) is the fairest comparison: all decoder layers, where both sides run the same kernels and differ
only in what they communicate, and when. --part model adds embedding, final norm and head, with each side's own loss
over a vocabulary that is cut: ours in chunks, theirs `loss_parallel` over all logits.

The contestants take turns in one process group, forwards in one round and backwards in the next; a ratio compares
neighbours of the same round. Our calls and bytes come from the ledger. Theirs are counted in one more step by a
dispatch mode that sees every functional collective (as CommDebugMode, which counts calls but no bytes) and books what a
ring sends, by the formulas of common/comm.py.
"""

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import step04_tp_sp as step04
from common import UserError
from common.comm import Group, Mesh, sum_over
from common.layout import layout_of, materialize
from common.model import Decoder, rope_tables
from services.boxes import Piece, gather
from services.checks import check_tp
from services.devices import choose_device, choose_dtype
from services.flags import main as run_main
from services.launch import open_mesh
from services.tables import human, table
from tests.equivalence import difference

OURS = {"step 4": False, "step 4, SP": True}  # with sequence parallelism?
PLAIN, PREPARED, SEQUENCE = "DTensor, plain", "DTensor, prepared", "DTensor, SequenceParallel"
NAMES = [*OURS, PLAIN, PREPARED, SEQUENCE]
RATIOS = [(PLAIN, "step 4"), (PREPARED, "step 4"), (SEQUENCE, "step 4, SP")]


@dataclass
class Config:
    """Flags of this benchmark."""

    tp: int = 2  # processes to start, all of one tensor-parallel group
    model: str = "tiny"  # preset of common/model.py
    seq_len: int | None = None  # override the sequence length
    n_layers: int | None = None  # override the number of layers
    vocab_size: int | None = None  # override the size of the vocabulary
    part: Literal["layers", "model"] = "layers"  # what is run: the decoder layers, or the model with its loss
    tp_overlap: bool = True  # step 4's flag of this name
    steps: int = 5  # steps of each contestant in a round
    rounds: int = 10  # rounds to measure, after one to warm up
    micro_batch_size: int = 4  # sequences
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"  # of weights and compute
    device: Literal["auto", "cuda", "cpu"] = "auto"  # where to compute
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl if every rank has a GPU of its own


def step04_config(config: Config, sp: bool) -> step04.Config:
    """Step 4's flags for one contestant."""
    return step04.Config(
        model=config.model,
        seq_len=config.seq_len,
        n_layers=config.n_layers,
        vocab_size=config.vocab_size,
        tp=config.tp,
        sp=sp,
        tp_overlap=config.tp_overlap,
        dtype=config.dtype,
        device=config.device,
        micro_batch_size=config.micro_batch_size,
        global_batch_size=config.micro_batch_size,
    )


def cut_by_dtensor(model: Decoder, mesh: DeviceMesh, how: str):
    """PyTorch's tensor parallelism, in place."""
    sp = how == SEQUENCE
    between = Shard(1) if sp else Replicate()
    plan = {f"{block}_proj": ColwiseParallel() for block in ("self_attn.q", "self_attn.k", "self_attn.v")}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")}
    if how != PLAIN:
        plan["self_attn"] = PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    if sp:
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    for layer in model.model.layers.values():
        parallelize_module(layer, mesh, plan)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends | ({"model.norm": SequenceParallel()} if sp else {}))


class Contestant:
    """A model of its own, cut in one of the five ways; `step()` is forward and backward of one micro-batch."""

    def __init__(self, name: str, config: Config, mesh: Mesh, device_mesh: DeviceMesh):
        self.ours, self.part, device = name in OURS, config.part, mesh.device
        sp, dtype = name in ("step 4, SP", SEQUENCE), choose_dtype(config.dtype, mesh.device)
        self.own_config = step04_config(config, sp)
        m = self.own_config.model_config()
        with torch.device("meta"):
            self.model = Decoder(m)
        if self.ours:
            step04.shard_tensors(self.model, mesh, sp, config.tp_overlap)
        materialize(self.model, 0, device, dtype)
        if not self.ours:
            cut_by_dtensor(self.model, device_mesh, name)
        self.positions = torch.arange(m.seq_len, device=device)
        self.tables = rope_tables(self.positions, m, dtype)
        shape = (config.micro_batch_size, m.seq_len)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(m.vocab_size, shape, generator=generator).to(device)
        hidden = torch.randn(*shape, m.dim, generator=generator).to(device, dtype)
        own = slice(m.seq_len // config.tp * mesh["tp"].rank, m.seq_len // config.tp * (mesh["tp"].rank + 1))
        self.hidden = hidden[:, own if sp else slice(None)].contiguous().requires_grad_()

    def layers(self) -> Tensor:
        """The residual stream through all layers, and back."""
        x = self.hidden
        for layer in self.model.model.layers.values():
            x = layer(x, *self.tables)
        x.backward(torch.ones_like(x))
        return x

    def whole(self) -> Tensor:
        """The loss, and back."""
        hidden = self.model(self.tokens, self.positions)
        if self.ours:
            loss = self.model.lm_head.loss(hidden, self.tokens)
            loss.backward()
            return loss
        logits = self.model.lm_head(hidden)
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten(), reduction="sum")
            loss.backward()
        return loss.to_local()

    def step(self) -> Tensor:
        """One step, from no gradients; returns the part's output."""
        for param in (*self.model.parameters(), self.hidden):
            param.grad = None
        return self.layers() if self.part == "layers" else self.whole()

    def gradient(self, mesh: Mesh) -> Tensor:
        """The full gradient of the first layer's query projection, which everything behind it has a part in."""
        weight = self.model.model.layers["0"].self_attn.q_proj.weight
        if not self.ours:
            return weight.grad.full_tensor()
        piece = Piece("gradient", "q", weight.grad, weight.shape, layout_of(weight))
        return gather([piece], mesh)["gradient"]["q"]


C10D = torch.ops._c10d_functional
SENT = {  # bytes for n ranks, times n / (n - 1)
    C10D.all_reduce.default: lambda x, out: 2 * x.nbytes,
    C10D.reduce_scatter_tensor.default: lambda x, out: x.nbytes,
    C10D.all_gather_into_tensor.default: lambda x, out: out.nbytes,
}


class Traffic(TorchDispatchMode):
    """Calls and bytes, as a ring sends them, of the functional collectives, in which DTensor communicates."""

    def __init__(self, n: int):
        super().__init__()
        self.n, self.calls, self.bytes = n, 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Let DTensor take its operators apart; run the others, and book the collectives among them."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func in SENT:
            self.calls += 1
            self.bytes += (self.n - 1) / self.n * SENT[func](args[0], out)
        return out


def traffic(contestant: Contestant, group: Group) -> tuple[float, float]:
    """Calls and bytes of a step."""
    group.ledger.take()
    with Traffic(group.size) as theirs:
        contestant.step()
    taken = group.ledger.take()
    ours = (sum(taken[key].get("tp", {}).values()) for key in ("calls", "traffic"))
    return tuple(ours) if contestant.ours else (theirs.calls, theirs.bytes)


def seconds(step: Callable[[], Tensor], group: Group, n_steps: int) -> float:
    """Of one step, the mean of `n_steps` and of all ranks."""
    finished = torch.cuda.synchronize if group.device.type == "cuda" else lambda: None
    finished()
    start = time.perf_counter()
    for _ in range(n_steps):
        step()
    finished()
    (total,) = sum_over(group, time.perf_counter() - start)  # also lets the ranks meet
    return total / n_steps / group.size


def require_same_results(contestants: dict[str, Contestant], mesh: Mesh, bound: float):
    """Raise RuntimeError if a contestant's output or gradient is not that of step 4."""
    outputs = {name: contestant.step() for name, contestant in contestants.items()}
    gradients = {name: contestant.gradient(mesh) for name, contestant in contestants.items()}
    like = {PLAIN: "step 4", PREPARED: "step 4", SEQUENCE: "step 4, SP", "step 4, SP": "step 4"}
    for name, other in like.items():
        pairs = [("gradient", gradients[name], gradients[other])]
        if outputs[name].shape == outputs[other].shape:
            pairs.append(("output", outputs[name], outputs[other]))
        for what, a, b in pairs:
            if not difference(a.detach(), b.detach()) < bound:
                raise RuntimeError(f"{what} of {name!r} differs from {other!r} by {difference(a, b):.3g}")


def work(rank: int, config: Config, folder: str):
    """One rank's part; rank 0 prints."""
    os.environ |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(config.tp))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # DTensor's, on the embedding
    device = choose_device(config.device)
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= config.tp
    backend = config.backend if config.backend != "auto" else "nccl" if own_gpu else "gloo"
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, meeting, timedelta(minutes=5), world_size=config.tp, rank=rank)
    with open_mesh({"dp": 1, "tp": config.tp}, device, backend) as mesh:
        device_mesh = dist.init_device_mesh(device.type, (config.tp,))
        contestants = {name: Contestant(name, config, mesh, device_mesh) for name in NAMES}
        require_same_results(contestants, mesh, {"bf16": 0.05, "fp32": 1e-4, "fp64": 1e-10}[config.dtype])
        counted = {name: traffic(contestant, mesh["tp"]) for name, contestant in contestants.items()}
        rounds = []
        for turn in range(config.rounds + 1):
            order = NAMES if turn % 2 else NAMES[::-1]
            rounds.append({name: seconds(contestants[name].step, mesh["tp"], config.steps) for name in order})
    if rank == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread each"
        m = contestants["step 4"].own_config.model_config()
        print(
            f"{config.part} of {config.model} ({m.n_layers} layers), forward and backward of {config.micro_batch_size} "
            f"x {m.seq_len} tokens, {config.dtype}; tp {config.tp} ({backend}) on {where}\n"
        )
        print(summary(rounds[1:], counted), flush=True)  # the first round warmed up
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that still holds a tensor would abort an interpreter that shuts down


def summary(rounds: list[dict[str, float]], counted: dict[str, tuple[float, float]]) -> str:
    """The table and the verdict, from seconds by [round][contestant], and calls and bytes."""
    rows = [["", "calls a step", "sent a step", "step time"]]
    for name in NAMES:
        calls, n_bytes = counted[name]
        rows.append([name, f"{calls:g}", human(n_bytes), f"{1e3 * median(r[name] for r in rounds):.2f} ms"])
    lines = [table(rows), f"medians of {len(rounds)} rounds", ""]
    for theirs, ours in RATIOS:
        ratios = sorted(r[theirs] / r[ours] for r in rounds)
        lines.append(
            f"{theirs} / {ours}: median {median(ratios):.3f}, "
            f"rounds from {ratios[0]:.3f} to {ratios[-1]:.3f} (the aim: at least 1.0)"
        )
    return "\n".join(lines)


def bench(config: Config):
    """Check the flags, start the ranks, wait for them."""
    for name, least in dict(tp=2, steps=1, rounds=1, micro_batch_size=1).items():
        if getattr(config, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be at least {least}")
    check_tp(step04_config(config, sp=True), config.tp)
    m = step04_config(config, sp=True).model_config()
    if m.n_kv_heads % config.tp or m.tied:
        raise UserError(
            f"--model {config.model}, --tp {config.tp}: DTensor needs untied weights, and as many key/value heads as "
            "ranks, or a multiple; choose another --model or --tp"
        )
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(work, (config, folder), nprocs=config.tp)
        except torch.multiprocessing.ProcessRaisedException as error:
            sys.exit(str(error))  # the rank's traceback


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
