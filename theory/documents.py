"""Documents packed into sequences, on paper: what is left of attention, and what of it the busiest rank of cp has.

A token looks at the keys before it in its own document (variants/documents.py), so a document of L tokens has
L (L+1) / 2 pairs. cp cuts a sequence by tokens, and all ranks wait for the one with most pairs:

    zigzag, allgather    chunks i and 2 cp - 1 - i of 2 cp: even if the sequence is one document, else not
    ring                 chunk i of cp: the last has up to 2 - 1/cp times the mean
    balanced             even, to 1.1 times the mean (variants/cp_balanced.py)
    ulysses              even: a rank has whole sequences, and a part of the heads

Lengths are drawn: log-normal, as those of texts of the web are, around the mean that is asked for.
"""

import random
from functools import lru_cache
from itertools import accumulate
from math import exp
from operator import add
from typing import NamedTuple

SIGMA = 1.3  # of the logarithm of a length
DRAWN = 16  # micro-batches
EVEN = ("balanced", "ulysses")


class Pairs(NamedTuple):
    """Of a micro-batch's sequences."""

    part: float  # of those that causal attention would have
    busiest: float  # what the busiest rank has, over the mean


def lengths(draw: random.Random, seq_len: int, mean: int) -> list[int]:
    """Of the documents of one sequence; the first and the last are cut, wherever they are. `mean` 0: one document."""
    drawn, left = [], seq_len
    while left and mean:
        length = 1 + int(mean * exp(draw.gauss(0.0, SIGMA) - SIGMA**2 / 2))
        if not drawn:
            length = 1 + draw.randrange(length)
        drawn.append(min(length, left))
        left -= drawn[-1]
    return drawn or [seq_len]


def pairs_by_chunk(documents: list[int], chunks: int) -> list[int]:
    """Pairs whose query is in each of so many chunks of a sequence."""
    size, pairs = sum(documents) // chunks, [0] * chunks
    for stop, length in zip(accumulate(documents), documents, strict=True):
        start = stop - length
        for chunk in range(start // size, -(-stop // size)):
            first, last = (min(max(at - start, 0), length) for at in (chunk * size, (chunk + 1) * size))
            pairs[chunk] += (last * (last + 1) - first * (first + 1)) // 2
    return pairs


@lru_cache(maxsize=4096)
def pairs_of(seq_len: int, mean: int, sequences: int, cp: int, mode: str) -> Pairs:
    """Of micro-batches of so many sequences, whose documents have so many tokens in the mean."""
    draw, most, total, micro_batches = random.Random(0), 0.0, 0, DRAWN if mean else 1
    even, sequences = cp == 1 or mode in EVEN, min(sequences, 8)  # more sequences are as even as eight
    chunks = 1 if even else cp if mode == "ring" else 2 * cp
    for _ in range(micro_batches):
        drawn = [pairs_by_chunk(lengths(draw, seq_len, mean), chunks) for _ in range(sequences)]
        work = [sum(column) for column in zip(*drawn, strict=True)]
        total += sum(work)
        if even:
            most += sum(work) / cp
        else:
            most += max(work if mode == "ring" else map(add, work[:cp], reversed(work[cp:])))
    return Pairs(total / (micro_batches * sequences * seq_len * (seq_len + 1) / 2), most * cp / total)
