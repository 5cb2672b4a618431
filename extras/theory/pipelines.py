"""Derives from a schedule, for the planner, which stages a pipeline rank has and its list of actions."""

from functools import lru_cache

from common.schedules import Action, Place
from extras.theory.layouts import balance, schedule_of
from extras.theory.shapes import Shape


@lru_cache(maxsize=4096)
def rank_places(m: Shape, schedule: str, pp: int, chunks: int) -> tuple[dict[int, Place], ...]:
    """For each pipeline rank, its stages by number."""
    entry = schedule_of(schedule, chunks)
    places = balance(m, entry.places(m.n_layers, pp, entry.v if pp > 1 else 1))
    return tuple({s: place for s, place in enumerate(places) if place.rank == rank} for rank in range(pp))


def ends_of(places: dict[int, Place]) -> tuple[bool, bool]:
    """Whether a rank has the embedding, and whether it has the head."""
    return tuple(any(getattr(place, end) is None for place in places.values()) for end in ("before", "after"))


@lru_cache(maxsize=4096)
def places_of(schedule: str, pp: int, chunks: int) -> list[Place]:
    """The places of a schedule's stages, for a model with just enough layers."""
    entry = schedule_of(schedule, chunks)
    return entry.places(pp * max(2, chunks), pp, entry.v if pp > 1 else 1)


@lru_cache(maxsize=4096)
def ways_of(schedule: str, pp: int, chunks: int) -> int:
    """How many directions micro-batches take through the ranks. With two, pairs of ranks hold the same weights."""
    return sum(place.before is None for place in places_of(schedule, pp, chunks))


def depth(schedule: str, pp: int, chunks: int) -> int:
    """The number of stages that a micro-batch passes."""
    return len(places_of(schedule, pp, chunks)) // ways_of(schedule, pp, chunks)


@lru_cache(maxsize=4096)
def splits(schedule: str, pp: int, chunks: int) -> bool:
    """Whether a schedule computes the gradients of weights in separate actions, W."""
    return any(action.kind == "W" for action in lists_of(schedule, pp, chunks, 2 * pp)[0])


@lru_cache(maxsize=4096)
def lists_of(schedule: str, pp: int, chunks: int, n: int) -> list[list[Action]]:
    """The lists of actions of all ranks, for n micro-batches."""
    entry = schedule_of(schedule, chunks)
    return [entry.actions(pp, n, entry.v if pp > 1 else 1, rank) for rank in range(pp)]
