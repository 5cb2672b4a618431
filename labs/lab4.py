"""Lab 4: tensor and sequence parallelism (step04_tp_sp.py)."""

from random import Random
from typing import Any

import torch
from torch import Tensor

from labs.course import Case, Criterion, Lab, Question, Task
from labs.tape import Tape

# --- task 1: the sums and the gathering that f and g are made of -----------------------------------------------------

BLOCK = (dict(mesh=dict(tp=3), b=2, part=5, dim=7), dict(mesh=dict(tp=2), b=3, part=4, dim=5))


def tokens_of(case: Case, rank: int) -> slice:
    """This rank's tokens of a sequence of `part` tokens a rank."""
    return slice(rank * case.part, (rank + 1) * case.part)


def wholes(case: Case) -> Tensor:
    """By rank, [ranks, batch, seq, dim]."""
    return case.draw("x", case.ranks, case.b, case.ranks * case.part, case.dim)


def strided(x: Tensor) -> Tensor:
    """The same numbers in memory of another order."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)


def collectives_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Each of the three, of a tensor that is not contiguous."""
    group, found = mesh["tp"], {}
    x = wholes(case)[group.rank]
    for name, given in (
        ("sum_over_ranks", x),
        ("gather_tokens", x[:, tokens_of(case, group.rank)]),
        ("sum_and_split_tokens", x),
    ):
        given = strided(given)
        with Tape(mesh) as tape:
            found[f"the result of {name}"] = getattr(step, name)(given, group)
        found[f"the bytes that {name} sends"] = tape.sent()
        found[f"the input of {name} after the call"] = given
    return found


def collectives_expected(name: str, what: str) -> Any:
    """`expected` of one function: its "result" (with its input unchanged) or its "bytes"."""

    def expected(rank: int, case: Case) -> dict[str, Any]:
        x, n = wholes(case), case.ranks
        parts = [x[r][:, tokens_of(case, r)] for r in range(n)]
        result = dict(
            sum_over_ranks=x.sum(0),
            gather_tokens=torch.cat(parts, 1),
            sum_and_split_tokens=x.sum(0)[:, tokens_of(case, rank)],
        )[name]
        if what == "bytes":
            half = (n - 1) * x[0].nbytes / n
            return {f"the bytes that {name} sends": dict(tp=half * (1 + (name == "sum_over_ranks")))}
        given = parts[rank] if name == "gather_tokens" else x[rank]
        return {f"the result of {name}": result, f"the input of {name} after the call": given}

    return expected


def collective(says: str, points: int, name: str, what: str = "result") -> Criterion:
    """A criterion of task 1."""
    return Criterion(says, points, collectives_on_rank, collectives_expected(name, what), BLOCK)


COLLECTIVES = Task(
    "three collectives on tokens",
    20,
    ("sum_over_ranks", "gather_tokens", "sum_and_split_tokens"),
    "common/comm.py: all_reduce, all_gather, reduce_scatter, Pending; Korthikanti et al. 2022, figure 5",
    (
        "The collectives of common/comm.py work on contiguous tensors, and all_reduce works in place. Whose tensor is "
        "x? An all-gather puts the ranks' tensors one after another; a reduce-scatter gives rank k the k-th piece.",
        "Gather: a buffer [n, batch, seq/n, dim] has to become [batch, seq, dim]. Dimension 0 belongs just before the "
        "tokens; then both are one dimension. Splitting is the way back.",
        "unflatten, movedim, flatten and contiguous are all you need around the collective. Wait for it before you "
        "look at its result.",
    ),
    (
        collective("sum_over_ranks: the sum of every rank's x; x stays as it is", 2, "sum_over_ranks"),
        collective("gather_tokens: all ranks' tokens in order", 2, "gather_tokens"),
        collective("sum_and_split_tokens: this rank's tokens of the sum", 2, "sum_and_split_tokens"),
        collective("gather_tokens sends (n-1)/n of the whole", 1, "gather_tokens", "bytes"),
        collective("sum_and_split_tokens sends (n-1)/n of the whole", 1, "sum_and_split_tokens", "bytes"),
    ),
    faults=(),
)


def draw_traffic(draw: Random) -> dict[str, Any]:
    """A layout."""
    return dict(tp=draw.choice((2, 4, 8)), b=draw.choice((1, 2, 4)), k=draw.choice((3, 5, 6)),
                s=2048 * draw.randint(1, 3), L=draw.choice((12, 18, 24)), h=512 * draw.randint(2, 6))  # fmt: skip


def layers_bytes(v: dict[str, Any]) -> float:
    """Of the layers, in one micro-batch: f and g of two blocks, each one all-reduce's worth of bf16 in all."""
    return 8 * v["L"] * (v["tp"] - 1) / v["tp"] * v["b"] * v["s"] * v["h"] * 2


QUESTION = Question(
    "--tp {tp} --sp, bf16, {L} layers, dim {h}, sequences of {s} tokens, {k} micro-batches of {b} sequences, nothing\n"
    "recomputed. How many bytes does a rank send over tp in one step for the layers (without embedding and head)?",
    draw_traffic,
    lambda v: v["k"] * layers_bytes(v),
    mistakes=(
        ("this is one micro-batch", layers_bytes),
        ("each part goes to the n-1 others once: (n-1)/n of the whole", lambda v: v["k"] * layers_bytes(v)
         * v["tp"] / (v["tp"] - 1)),
        ("this is forward alone", lambda v: v["k"] * layers_bytes(v) / 2),
    ),
)  # fmt: skip

LAB = Lab(4, "Tensor and sequence parallelism", ("step04_tp_sp",), (COLLECTIVES,), QUESTION)
