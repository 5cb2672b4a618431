"""Finds the fastest of all legal layouts without timing them all: best first, by lower bounds.

A step takes at least the time of its computation and exposed messages, spread evenly over the
pipeline ranks. This is the bound of a mesh.

A heap holds meshes with their bounds, and layouts with their times. We take the smallest entry, and
replace a mesh by its layouts. If the entry is a layout, no remaining bound is below its time, so it
is the best remaining layout.
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from extras.plan.gpus import GIB, ROOM, Gpu
from extras.plan.layouts import RECOMPUTE, Layout, meshes, variants
from extras.plan.memory import Held, held
from extras.plan.seconds import Seconds, rank_works, step_seconds
from extras.plan.shapes import Shape


class Plan(NamedTuple):
    """A layout with its memory and its time."""

    layout: Layout
    held: Held
    seconds: Seconds


def evaluate(m: Shape, x: Layout, gpu: Gpu) -> Plan:
    """The memory and the time of one layout."""
    return Plan(x, held(m, x), step_seconds(m, x, gpu))


def fits(memory: Held, gpu: Gpu) -> bool:
    """Whether this memory fits on a GPU, with some room to spare."""
    return memory.total <= ROOM * gpu.memory


def search(m: Shape, world: int, batch: int, gpu: Gpu) -> Iterator[Plan]:
    """Yield all legal layouts that fit, fastest first."""
    number = count()  # equal times are taken in order
    heap = []
    for mesh in meshes(m, world, batch):
        for kind in RECOMPUTE:
            x = replace(mesh, recompute=kind)
            bound = x.micro_batches * rank_works(m, x, gpu).sum() / x.pp
            heap.append((bound, next(number), x, None))
    heapq.heapify(heap)
    while heap:
        _, _, x, seconds = heapq.heappop(heap)
        if seconds is None:
            for layout in variants(m, x):
                seconds = step_seconds(m, layout, gpu)
                heapq.heappush(heap, (seconds.step, next(number), layout, seconds))
            continue
        memory = held(m, x)
        if fits(memory, gpu):
            yield Plan(x, memory, seconds)


def best_plans(m: Shape, world: int, batch: int, gpu: Gpu) -> Iterator[Plan]:
    """Yield the best layout of each mesh, fastest first. Of those with equal numbers, the first."""
    seen = set()
    for plan in search(m, world, batch, gpu):
        x = plan.layout
        numbers = round(plan.seconds.step, 3), round(plan.held.total / GIB, 1)
        names = {(x.pp, x.dp, x.cp, x.tp, x.ep), numbers}
        if not names & seen:
            yield plan
        seen |= names
