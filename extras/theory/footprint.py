"""The bytes that the fullest rank holds at the highest point of a step, under the ways of one software.

The course's own trainer has its own functions, those of theory/memory.py. What a layer of GPT
keeps under Megatron is Korthikanti et al. 2022, section 4.
"""

from typing import NamedTuple

from extras.theory.activations import Kept, kept_along
from extras.theory.gpus import COMMUNICATOR, CONTEXT
from extras.theory.layouts import Layout, communicators, network
from extras.theory.memory import Held, rank_bytes, rank_numbers
from extras.theory.pipelines import lists_of, rank_places
from extras.theory.shapes import Shape


class Recipe(NamedTuple):
    """What one software decides: which bytes it keeps, what it hides behind computation. Bytes are those of a weight.

    The course's trainer is `COURSE`; others are those whose published runs the planner is compared with.
    """

    name: str
    flash: bool = False  # attention in one kernel: scores never reach memory, half of them are not computed
    gradient: float = 2  # bytes of a gradient that micro-batches add up in, and that travels
    stops: bool = False  # recomputation stops before a layer's last matmul, as torch.utils.checkpoint does
    overlap_dp: bool = False  # sums gradients during backward
    overlap_tp: bool = False  # with SP gathers a block's input again in backward, behind its weight gradients
    scatter: bool = True  # tp ranks send a slice each over a pipeline boundary, also without SP
    library: float = 1.0  # the part of `Gpu.matmul` that the libraries of its time reached


COURSE = Recipe("course", flash=True, gradient=4, stops=True, overlap_dp=True, scatter=False)


def gpt_layer_bytes(m: Shape, x: Layout, recompute: str) -> float:
    """sbh (34 + 5 as/h) / t with SP, sbh (10 + 24/t + 5 as/ht) without; selective drops the scores, 5 as/h."""
    sbh = x.micro_batch_size * m.seq_len // x.cp * m.dim
    if recompute == "full":
        return 2 * sbh / (x.tp if x.sp else 1)
    scores = 5 * m.n_heads * m.seq_len / m.dim * (recompute == "none")
    return sbh * ((34 if x.sp else 10 * x.tp + 24) + scores) / x.tp


def gpt_rank_bytes(m: Shape, x: Layout, recipe: Recipe, rank: int) -> Held:
    """What a pipeline rank of Megatron's holds: weights in 16 bits, masters and moments of 12 bytes, logits of 6."""
    way = x.schedule, x.pp, x.chunks
    shared, own = rank_numbers(m, *way, x.tp, x.ep)[rank]
    places, n = rank_places(m, *way)[rank], min(x.micro_batches, 4 * x.pp)
    kept = {s: Kept(len(place.layers) * gpt_layer_bytes(m, x, x.recompute)) for s, place in places.items()}
    data = network(x, "shard").ranks
    state = [(shared + own) * size / (data if x.zero >= stage else 1) for stage, size in ((3, 2), (2, 2), (1, 12))]
    state[1] *= recipe.gradient / 2
    last = any(place.after is None for place in places.values())
    logits = last * 6 * x.micro_batch_size * m.seq_len // x.cp * m.vocab_size / x.tp
    again = gpt_layer_bytes(m, x, "none") if x.recompute == "full" else 0.0
    activations = max(kept_along(lists_of(*way, n - n % x.pp or n)[rank], kept))
    return Held(*state, activations, logits + again + CONTEXT)


def outside(m: Shape, x: Layout) -> float:
    """Bytes that no tensor has, and PyTorch's allocator does not know: of CUDA, and of each communicator."""
    return CONTEXT + communicators(m, x) * COMMUNICATOR


def held(m: Shape, x: Layout, recipe: Recipe) -> Held:
    """What the fullest rank of a layout holds: of up to eight pipeline ranks, else of five of them."""
    ranks = range(x.pp) if x.pp <= 8 else (0, 1, x.pp // 2, x.pp - 2, x.pp - 1)
    if recipe.name != "course":
        return max((gpt_rank_bytes(m, x, recipe, rank) for rank in ranks), key=sum)
    most = max((rank_bytes(m, x, rank) for rank in ranks), key=sum)
    return most._replace(moment=most.moment + outside(m, x))
