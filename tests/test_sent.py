"""Laws of traffic: what a rank sends in a step, by mesh dimension, to the byte.

n ranks; L layers; m micro-batches of a rank, of b = 1 sequence; s tokens; h values a token, 8 bytes each (fp64).
"""

import pytest

from tests import equal
from tests.equal import BASE, SMALL

L, S, H = SMALL["n_layers"], SMALL["seq_len"], SMALL["dim"]
KV = H // SMALL["n_heads"] * SMALL["n_kv_heads"]  # values of k, or of v, of a token
SCALES = 4  # bytes, for each 256 values of a token: int8


def over_cp(mode: str, n: int) -> int:
    """Docstrings of step 5 and of the modes; and once a step the norm, a number of 8 bytes."""
    m, norm = BASE["global_batch_size"], 2 * (n - 1) * 8 // n
    b = 2 * KV * S // n * 8  # k and v; their gradients are as wide in fp64
    q = H * S // n * 8
    if mode == "ulysses":
        b = b * max(1, n // SMALL["n_kv_heads"])
        return L * m * 2 * (n - 1) * (2 * q + b) // n + norm
    back = (n - 1) * b if mode == "allgather" else (n - 1) * b + n * b
    return L * m * ((n - 1) * b + back) + norm


def over_tp(n: int, blocks: int, again: int = 0) -> int:
    """8 collectives a layer of `blocks` bytes a token (`again`: more), 2 of embedding and 2 of head, 2 numbers for the
    loss. Once a step: norms' gradients, and the norm.
    """
    m, whole = BASE["global_batch_size"], H * 8
    tokens = L * (8 + again) * blocks + 4 * whole
    once = ((2 * L + 1) * H + 1) * 8 * 2
    return (m * S * tokens + once) * (n - 1) // n + m * 2 * (n - 1) * S * 8


def sent(step: str, options: dict) -> dict:
    """Runs on every rank."""
    return equal.record(step, options | dict(steps=1, grad_clip=0.0)).sent[0]


LAWS = {
    **{
        f"cp-{mode}": (2, "step05_cp_ring", dict(cp=2, cp_mode=mode), "cp", over_cp(mode, 2))
        for mode in ("zigzag", "ring")
    },
    "cp-allgather": (4, "step05_cp_ring", dict(cp=4, cp_mode="allgather"), "cp", over_cp("allgather", 4)),
    "cp-ulysses": (4, "step05_cp_ring", dict(cp=4, cp_mode="ulysses"), "cp", over_cp("ulysses", 4)),
    "tp": (2, "step04_tp_sp", dict(tp=2), "tp", over_tp(2, H * 8)),
    "tp-overlap": (2, "step04_tp_sp", dict(tp=2, tp_overlap=True), "tp", over_tp(2, H * 8, again=2)),
    "tp-int8-overlap": (
        2,
        "step04_tp_sp",
        dict(tp=2, compress_activations="int8", tp_overlap=True),
        "tp",
        over_tp(2, H + SCALES, 2),
    ),
    "tp-int8": (2, "step04_tp_sp", dict(tp=2, compress_activations="int8"), "tp", over_tp(2, H + SCALES)),
}


@pytest.mark.parametrize("law", LAWS)
def test_sends_what_the_docstring_says(pools, law):
    """On every rank."""
    ranks, step, layout, dim, expected = LAWS[law]
    for found in pools(ranks).run(sent, step, layout):
        assert found[dim] == expected, found
