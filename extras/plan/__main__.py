"""Plans a training run: will it fit, how fast will it be, and which layout is the best?

    python -m extras.plan --model llama3-70b --gpus 128 --gpu h100-80 --seq-len 8192
    python -m extras.plan --model llama3-70b --gpus 128 --layout "--tp 8 --pp 4 --zero 1"
    python -m extras.plan --model gpt3-1t --gpus 3072 --gpu a100-80 --tokens 450e9
    python -m extras.plan --model llama3-8b,vocab_size=32000 --experts 8      (Mixtral 8x7B)

It reports the best layouts of ten meshes, or the layout in --layout: their memory and time, and
the laws that decide. Nothing runs: memory.py and seconds.py have formulas. `python -m extras.bench
plan` compares them with published runs. Nodes have 8 GPUs; a single node may have fewer.

The search tries every mesh and micro-batch size, all stages of ZeRO, selective and full
recomputation, 1F1B and its interleaved form. It knows no times for other schedules, nor for what
--cp-mode, --zero, --sync, --recompute and --balance can do besides. (AFAB takes as long as 1F1B,
and needs more memory.)
"""

from dataclasses import dataclass, replace
from itertools import islice

from tqdm import tqdm

from common import UserError
from common.flags import flag, parse
from extras.plan.gpus import GPUS, NODE
from extras.plan.layouts import read_layout
from extras.plan.report import report
from extras.plan.search import Plan, best_plans, evaluate
from extras.plan.shapes import NAMES, Experts, Shape, named_shape
from extras.start import start

WANTED = 10  # meshes in a report


@dataclass(frozen=True)
class Config(Experts):
    """The run to plan."""

    model: str = flag("llama3-8b", f"the shape: {NAMES}; with changes: llama3-8b,n_layers=40")
    gpus: int = flag(8, "number of GPUs: at most 8, or a multiple of 8", least=1)
    gpu: str = flag("h100-80", "kind of GPU", GPUS)
    seq_len: int = flag(0, "tokens of a sequence; 0: the model's own number")
    global_batch_size: int = flag(
        0, "sequences of a step; 0: about 4M tokens, a multiple of --gpus"
    )
    tokens: float = flag(0.0, "tokens to train on: the report says how many days they take")
    layout: str = flag("", 'report this layout instead of the best ones: "--tp 8 --pp 4 ..."')


def shape_and_batch(config: Config) -> tuple[Shape, int]:
    """The model and the global batch size in sequences. Raises UserError."""
    if config.gpus > NODE and config.gpus % NODE:
        raise UserError(f"--gpus {config.gpus}: give a multiple of {NODE}, the GPUs of a node")
    m = named_shape(config.model, config)
    m = replace(m, seq_len=config.seq_len or m.seq_len)
    each = max(1, round(2**22 / m.seq_len / config.gpus))
    return m, config.global_batch_size or config.gpus * each


def plans_of(config: Config, m: Shape, batch: int) -> list[Plan]:
    """Evaluate --layout, or else find the best layouts. Raises UserError if there is none."""
    gpu = GPUS[config.gpu]
    if config.layout:
        try:
            x = read_layout(config.layout, m, config.gpus, batch)
        except UserError as error:
            raise UserError(f"--layout {config.layout!r}: {error}") from None
        return [evaluate(m, x, gpu)]
    best = islice(best_plans(m, config.gpus, batch, gpu), WANTED)
    plans = list(tqdm(best, "meshes", WANTED, disable=None, leave=False))
    if not plans:
        raise UserError(
            f"no legal layout of {config.model} with --seq-len {m.seq_len} and --global-batch-size "
            f"{batch} fits on {config.gpus} {config.gpu}: use more --gpus, or numbers with more "
            'common divisors; --layout "--zero 3 --recompute full" says what this layout needs'
        )
    return plans


def main(argv: list[str]):
    """Run the command. Raises UserError."""
    config = parse(Config, argv)
    m, batch = shape_and_batch(config)
    plans = plans_of(config, m, batch)
    print(report(config.model, m, plans, config.gpu, config.tokens))


if __name__ == "__main__":
    start(main)
