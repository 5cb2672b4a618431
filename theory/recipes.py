"""What the software decides: which bytes it keeps, what it hides behind computation. One record for each software.

The course's own trainer is one of them. The others are those whose published runs the planner is held against
(tests/bench/published); their switches come from their papers, and hold for every run of theirs.
"""

from typing import NamedTuple


class Recipe(NamedTuple):
    """One software. Bytes are those of one weight."""

    name: str
    flash: bool = False  # attention in one kernel: scores never reach memory, half of them are not computed
    gradient: float = 2  # bytes of a gradient that micro-batches add up in, and that travels
    stops: bool = False  # recomputation stops before a layer's last matmul, as torch.utils.checkpoint does
    overlap_dp: bool = False  # sums gradients during backward
    overlap_tp: bool = False  # with SP gathers a block's input again in backward, behind its weight gradients
    scatter: bool = True  # tp ranks send a slice each over a pipeline boundary, also without SP
    library: float = 1.0  # the part of `Gpu.matmul` that the libraries of its time reached


COURSE = Recipe("course", flash=True, gradient=4, stops=True, overlap_dp=True, scatter=False)
RECIPES = {
    "course": COURSE,
    "megatron-2021": Recipe("megatron-2021", library=0.92),  # on CUDA 11.0: S9 took 10% longer than K5 a year later
    "megatron-2022": Recipe("megatron-2022", overlap_tp=True),
    "vtrain": Recipe("vtrain"),
}
