"""A library: rows of tokens visit experts, are weighed by their gates, and are summed up again."""

from typing import Any

import torch
from torch import Tensor

from common.model import wide


def add_rows(rows: Tensor, place: Tensor, n: int) -> Tensor:
    """Sums [n, dim] of rows [any number, dim], each added at its `place` (int64), in fp32 or wider, in a fixed order.

    Else ranks that compute the same could choose other experts. On a GPU only `index_put_` sorts by place.
    """
    sums, rows = rows.new_zeros(n, rows.shape[1], dtype=wide(rows.dtype)), rows.to(wide(rows.dtype))
    return sums.index_put((place,), rows, accumulate=True) if rows.is_cuda else sums.index_add(0, place, rows)


def places(mask: Tensor, n: int) -> tuple[Tensor, ...]:
    """Where bool [a, b] is true, `n` times, in order: row and column, int64 [n]. Knowing n, the CPU need not wait."""
    return torch.nonzero_static(mask, size=n).unbind(1)


def visit_local(experts: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    """tokens [n, dim], gates [n, experts] (0: it does not go there) -> the weighted sums [n, dim], wide."""
    visits = (gates != 0).T
    counts = visits.sum(1).cpu()  # for which alone the CPU waits
    expert, token = places(visits, sum(counts.tolist()))  # sorted by expert
    return add_rows(experts(tokens[token], counts) * gates[token, expert][:, None], token, len(tokens))
