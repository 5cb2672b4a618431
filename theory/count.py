"""A planned layout as it is launched, and as the dry run counts it: a process that trains on tensors without numbers.

The bound of theory/memory.py may be 20% off; a count is exact, on the kernels of a CPU, whose norms keep more than a
GPU's. One rank of each layout is counted: the one that the bound holds for the fullest.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from common import UserError
from theory.activations import CHUNK
from theory.footprint import outside
from theory.gpus import GIB, Gpu
from theory.layouts import Layout
from theory.memory import rank_bytes
from theory.shapes import Shape

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


def script(m: Shape) -> str:
    """The step that trains this model: the last, if it has experts."""
    return "step07_moe_ep.py" if m.experts else "step06_pipeline.py"


def always(m: Shape) -> str:
    """Flags beside those of a layout."""
    more = " --expert-matmul grouped" * (m.experts > 0) + " --documents mask" * (m.document > 0)
    return f"--pp-split cost --loss-chunk {CHUNK} --prefetch{more}"


def counted_bytes(model: str, m: Shape, x: Layout) -> float:
    """The dry run's peak on the fullest rank, and what is outside of tensors. Raises UserError with what it says."""
    x = replace(x, ep_overlap=False)  # two threads; the bytes are the same
    fullest = max(range(x.pp), key=lambda rank: rank_bytes(m, x, rank).total)
    line = f"--model {model} --seq-len {m.seq_len} {always(m)} {x.flags()} --dtype bf16 --device cpu"
    line += f" --dry-run {x.world} --rank {fullest * x.world // x.pp}"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, script(m), *shlex.split(line)], cwd=root, capture_output=True, text=True)
    peak = re.search(r"^at the peak of ([\d,.]+) (\w+):", done.stdout, re.M)
    if done.returncode or peak is None:
        raise UserError(f"--count: python {script(m)} {line}: {(done.stderr.strip() or 'no peak').splitlines()[-1]}")
    return float(peak[1].replace(",", "")) * UNITS[peak[2]] + outside(m, x)


def verdict(counted: float, bound: float, gpu: Gpu) -> str:
    """A line of the table: both in GiB, and whether the count fits in the memory of a GPU."""
    fits = "fits" if counted <= gpu.memory else f"does not fit: {(counted - gpu.memory) / GIB:.1f} GiB too much"
    return f"counted {counted / GIB:.1f} GiB, bound {bound / GIB:.1f} GiB ({bound / counted:.2f} of it): {fits}"
