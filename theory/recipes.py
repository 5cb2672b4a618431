"""What the software decides: which bytes it keeps, what it hides behind computation. One record for each software.

The course's own trainer is one of them. The others are those that published the runs of tests/bench/published; their
switches come from their documentation or source, and hold for every run of theirs.
"""

from typing import NamedTuple


class Recipe(NamedTuple):
    """One software. Bytes are those of one weight, or of one logit."""

    name: str
    flash: bool = True  # attention in one kernel: scores never reach memory, half of them are not computed
    fused: bool = True  # fused or compiled elementwise operators
    weight: float = 2  # bytes of a weight that it computes with
    gradient: float = 4  # of a gradient that micro-batches add up in
    temporary: float = 0  # of a gradient that autograd makes before it is added up, all alive at once
    state: float = 12  # of masters and moments
    reduced: float = 4  # bytes of a gradient that travels
    sharded: str = "dp"  # over which ranks ZeRO cuts: "dp" (the course: dp x cp, too)
    selective: str = "attention"  # selective recomputation: "attention" (core), "matmuls" (half of them), "elementwise"
    stops: bool = False  # recomputation stops before a layer's last matmul, as torch.utils.checkpoint does
    keeps: float = 0  # more bytes that a layer keeps, in bytes a channel and token: copies of queries and keys
    products: int = 1  # SwiGLU's products kept, of width ffn: 2 if silu(gate) and silu(gate) * up are both kept
    gathered: bool = False  # with SP, keeps the gathered input of a block
    logits: float = 6  # bytes of a logit alive at the highest point
    reserved: float = 1.0  # reported memory / memory in use: the allocator's slack, where "reserved" is reported
    overlap_dp: bool = True  # sums gradients during the last backward, gathers weights during the first forward
    overlap_tp: bool = False  # hides half of tp's collectives of a backward behind weight gradients
    scatter: bool = False  # tp ranks send a slice each over a pipeline boundary
    split: str = "balanced"  # of layers over stages: "balanced", "even", "reached" (nanotron)
    fp8: bool = False  # the layers' matmuls in 8 bits: twice the peak, and their inputs are cast
    library: float = 1.0  # the part of `Gpu.matmul` that the libraries of its time reached
    resident: bool = False  # ZeRO 3 in a pipeline keeps weights gathered and gradients whole during a step


RECIPES = {
    "course": Recipe("course", selective="elementwise", stops=True, overlap_tp=True, scatter=True, logits=0),
    "megatron-2021": Recipe(  # on CUDA 11.0: the same layout of 530e9 weights took 10% less a year later (S9, K5)
        "megatron-2021", flash=False, gradient=2, reduced=2, overlap_dp=False, scatter=True, split="even", library=0.92
    ),
    "megatron-2022": Recipe(
        "megatron-2022",
        flash=False,
        gradient=2,
        reduced=2,
        overlap_dp=False,
        overlap_tp=True,
        scatter=True,
        split="even",
    ),
    "vtrain": Recipe("vtrain", flash=False, gradient=2, reduced=2, overlap_dp=False, scatter=True, split="even"),
    "nanotron": Recipe(
        "nanotron", fused=False, temporary=2, keeps=2, products=2, gathered=True, logits=10, split="reached"
    ),
    "torchtitan": Recipe(
        "torchtitan", weight=4, gradient=4, state=8, logits=14, selective="matmuls", reserved=1.05, resident=True
    ),
    "llama3": Recipe("llama3", overlap_tp=True, scatter=True, split="ends"),
    "automodel": Recipe("automodel", fused=False),
    "simumax": Recipe("simumax", logits=6, keeps=2, split="even"),
}
