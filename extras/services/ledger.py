"""What this rank sends: calls and bytes by mesh dimension and operation, as `comm.observer` sees them."""

from collections import Counter, defaultdict
from typing import Any

from torch import Tensor

from common.comm import Group
from extras.services.tables import human, table


class Ledger:
    """Entries since the last `take`."""

    def __init__(self):
        self.bytes: dict[str, Counter] = defaultdict(Counter)  # by dimension and operation
        self.calls: dict[str, Counter] = defaultdict(Counter)

    def book(self, operation: str, group: Group, tensor: Tensor, share: float):
        """An observer."""
        self.bytes[group.name][operation] += round(share * tensor.nbytes)
        self.calls[group.name][operation] += 1

    def take(self) -> dict[str, Any]:
        """The entries as metrics, `traffic` {dim: {operation: bytes}} and `calls`; then start anew."""
        taken = dict(traffic=dict(self.bytes), calls=dict(self.calls))
        self.__init__()
        return taken


def traffic_table(taken: dict[str, Any]) -> str:
    """Calls and bytes of a step, as `Ledger.take` has them."""
    rows = [["traffic of a step", "calls", "sent"]]
    for dim, operations in taken["traffic"].items():
        for operation, sent in operations.items():
            rows.append([f"{dim} {operation}", f"{taken['calls'][dim][operation]:,}", human(sent)])
    return table(rows)
