"""Tokens/s of a GPU from 8 to 16,384 GPUs, as planned, with the layout chosen at each size; plan_sizes.png.

    python -m tests.bench plan_sizes --out tests/bench/figures

Batches grow with the GPUs: 4M tokens up to 1,024 GPUs, 16M up to 16,384 (Llama 3, section 3.4.1), but a sequence a GPU
at least for the model of 8e9 weights. A size at which no layout fits has no point.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm import tqdm

from common import UserError
from services.flags import main as run_main
from services.tables import table
from theory.gpus import GPUS
from theory.search import rates, search
from theory.shapes import MODELS

SIZES = (8, 32, 128, 512, 2048, 8192, 16384)


@dataclass
class Config:
    """Flags of this benchmark."""

    models: str = "llama3-8b,llama3-70b,llama3-405b,deepseek-v3-like"  # presets, separated by commas
    gpu: str = "h100-80"  # of theory/gpus.py
    seq_len: int = 8192  # tokens of a sequence
    out: str = "tests/bench/figures"  # folder of the picture


def bench(config: Config):
    """Plan all sizes, print the layouts, draw."""
    if config.gpu not in GPUS or not set(config.models.split(",")) <= MODELS.keys():
        raise UserError(f"--gpu must be among {', '.join(GPUS)}, --models among {', '.join(MODELS)}")
    gpu, rows = GPUS[config.gpu], [["model", "GPUs", "batch", "tokens/s of a GPU", "MFU", "layout"]]
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in config.models.split(","):
        m, points = replace(MODELS[name], seq_len=config.seq_len), []
        for gpus in tqdm(SIZES, desc=name, disable=None):
            batch = max((4 if gpus <= 1024 else 16) * 2**20 // config.seq_len, gpus if name == "llama3-8b" else 1)
            best = search(m, gpus, batch, gpu, count=1).best
            if not best:
                rows.append([name, str(gpus), str(batch), "-", "-", "fits nowhere"])
                continue
            (found,), x = best, best[0].layout
            got = rates(m, found, gpu)
            points.append((gpus, got["tokens"]))
            layout = f"pp {x.pp} dp {x.dp} cp {x.cp} tp {x.tp} ep {x.ep} b {x.mbs} ZeRO {x.zero} {x.schedule}"
            layout += f" {x.chunks}, recompute {x.recompute}"
            rows.append([name, str(gpus), str(batch), f"{got['tokens']:.0f}", f"{got['mfu']:.1%}", layout])
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s of a GPU", title=f"planned, {config.gpu}")
    axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    Path(config.out).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(config.out, "plan_sizes.png"), dpi=100)
    print(f"{table(rows)}\n\nsee {Path(config.out, 'plan_sizes.png')}")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
