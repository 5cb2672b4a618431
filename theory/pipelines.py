"""Pipelines on paper: which stages a rank has, and what it does in which order."""

from functools import lru_cache

from common.schedules import Action, Place
from theory.layouts import Layout, balance, schedule_of, stages
from theory.shapes import Shape


@lru_cache(maxsize=4096)
def rank_places(m: Shape, schedule: str, pp: int, chunks: int) -> tuple[dict[int, Place], ...]:
    """By pipeline rank its stages: number and place."""
    found = schedule_of(Layout(pp=pp, schedule=schedule, chunks=chunks))
    places = balance(m, found.places(m.n_layers, pp, stages(found, pp)))
    return tuple({s: place for s, place in enumerate(places) if place.rank == rank} for rank in range(pp))


def ends_of(places: dict[int, Place]) -> tuple[bool, bool]:
    """Whether a rank has the embedding, and the head."""
    return tuple(any(getattr(place, end) is None for place in places.values()) for end in ("before", "after"))


@lru_cache(maxsize=4096)
def ways_of(schedule: str, pp: int, chunks: int) -> int:
    """Ways that micro-batches take through the ranks. If there are two, two ranks hold the same weights."""
    found = schedule_of(Layout(pp, schedule=schedule, chunks=chunks))
    return sum(place.before is None for place in found.places(pp * max(2, chunks), pp, stages(found, pp)))


@lru_cache(maxsize=4096)
def lists_of(schedule: str, pp: int, chunks: int, n: int) -> list[list[Action]]:
    """The lists of all ranks for n micro-batches."""
    found = schedule_of(Layout(pp=pp, schedule=schedule, chunks=chunks))
    return [found.actions(pp, n, stages(found, pp), rank) for rank in range(pp)]
