"""What a rank keeps for its backward pass, for tp 1, 2, 4, 8, with and without sequence parallelism; tp_memory.png.

    python -m tests.bench tp_memory                            figure in tests/bench/figures, one process on a CPU
    python -m tests.bench tp_memory --model smollm-1.7b --seq-len 512 --micro-batch-size 1 --n-layers 2 --dtype bf16

Every flag of step04_tp_sp.py that shapes the model and the micro-batch is understood. No ranks are started: rank 0 runs
its share of one forward pass, among peers that PyTorch's `fake` process group only pretends to have. What it receives
is noise, which changes no number of bytes. (The tests compare prediction and measurement on real ranks, all of them.)
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import step04_tp_sp as step04
from common.layout import materialize
from common.model import Decoder
from services import plots
from services.checks import check_tp
from services.devices import choose_dtype
from services.flags import main as run_main
from services.launch import open_mesh
from services.memory import storage_bytes_made_by
from services.tables import human, table
from step01_single_gpu import wrap_layers
from theory.memory import tp_activation_bytes

CPU = torch.device("cpu")
SIZES = (1, 2, 4, 8)
MODES = {
    "--no-sp": dict(sp=False),
    "--sp --no-tp-overlap": dict(sp=True, tp_overlap=False),
    "--sp (default)": dict(sp=True),
}


@dataclass
class Config(step04.Config):
    """Step 4's flags, of which those of the model, the micro-batch and recomputation count."""

    device: str = "cpu"  # where to compute
    out: str = "tests/bench/figures"  # folder for the figure and its numbers


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    """The summed loss of tokens int64 [batch, seq] as their own targets."""
    return model.lm_head.loss(model(tokens, torch.arange(tokens.shape[1])), tokens)


def saved_bytes(config: Config) -> tuple[int, int]:
    """Bytes that a forward pass leaves on rank 0 for the backward pass, (predicted, measured)."""
    m, dtype = config.model_config(), choose_dtype(config.dtype, CPU)
    dist.init_process_group("fake", rank=0, world_size=config.tp)
    with open_mesh({"dp": 1, "tp": config.tp}, CPU, "gloo") as mesh:
        with torch.device("meta"):
            model = Decoder(m)
        step04.shard_tensors(model, mesh, config.sp, config.tp_overlap)
        materialize(model, config.seed, CPU, dtype)
        wrap_layers(model, config)
        tokens = torch.zeros(config.micro_batch_size, m.seq_len, dtype=torch.int64)
        measured, _ = storage_bytes_made_by(loss_of, model, tokens)
    dist.destroy_process_group()
    return tp_activation_bytes(config, m, config.tp, dtype, on_cpu=True), measured


def bench(config: Config):
    """Count for each size and mode, draw the figure, print the table."""
    variants = {
        (label, tp): dataclasses.replace(config, tp=tp, global_batch_size=config.micro_batch_size, **mode)
        for label, mode in MODES.items()
        for tp in SIZES
    }
    for (_, tp), variant in variants.items():
        check_tp(variant, tp)
    found = {key: saved_bytes(variant) for key, variant in variants.items()}
    one, rows = found["--no-sp", 1][1], [["", "tp", "predicted", "measured", "of tp 1"]]
    for (label, tp), (predicted, measured) in found.items():
        rows.append([label, str(tp), human(predicted), human(measured), f"{measured / one:.3f}"])
    m, dtype = config.model_config(), choose_dtype(config.dtype, CPU)
    shape = f"{config.model}, {config.micro_batch_size} x {m.seq_len} tokens, {dtype}, --recompute {config.recompute}"
    Path(config.out).mkdir(parents=True, exist_ok=True)
    file, figure = Path(config.out, "tp_memory.json"), Path(config.out, "tp_memory.png")
    bars = {
        label: dict(zip(("predicted", "measured"), zip(*(found[label, tp] for tp in SIZES), strict=True), strict=True))
        for label in MODES
    }
    title = f"kept for backward by a rank\n{shape}"
    file.write_text(json.dumps(dict(title=title, groups=[f"tp {tp}" for tp in SIZES], bars=bars), indent=1) + "\n")
    plots.predicted_and_measured(file, figure)
    print(f"{shape}: bytes that a forward pass leaves on a rank for backward\n\n{table(rows)}\n\nsee {figure}")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
