"""Counts the calls and bytes that this rank sends, by mesh dimension and operation, as a `comm.observer`."""

from collections import Counter, defaultdict
from typing import Any

from torch import Tensor

from common.comm import Group
from extras.services.tables import human, table


class Ledger:
    """Counts of calls and bytes since the last `take`."""

    def __init__(self):
        self.bytes: dict[str, Counter] = defaultdict(Counter)  # by dimension and operation
        self.calls: dict[str, Counter] = defaultdict(Counter)

    def book(self, operation: str, group: Group, tensor: Tensor, share: float):
        """Count one message; `comm.observer` may be this method."""
        self.bytes[group.name][operation] += round(share * tensor.nbytes)
        self.calls[group.name][operation] += 1

    def take(self) -> dict[str, Any]:
        """Return the counts as metrics, `traffic` {dim: {operation: bytes}} and `calls`, and reset them."""
        taken = dict(traffic=dict(self.bytes), calls=dict(self.calls))
        self.__init__()
        return taken


def traffic_table(taken: dict[str, Any]) -> str:
    """A table of a step's calls and bytes; `taken`: what `Ledger.take` has returned."""
    rows = [["traffic of a step", "calls", "sent"]]
    for dim, operations in taken["traffic"].items():
        for operation, sent in operations.items():
            rows.append([f"{dim} {operation}", f"{taken['calls'][dim][operation]:,}", human(sent)])
    return table(rows)
