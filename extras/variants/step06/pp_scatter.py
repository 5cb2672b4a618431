"""Boundaries of a pipeline without SP: each tp rank sends a part (`--pp-scatter`; Narayanan et al. 2021, 4.1).

Without sequence parallelism all tp ranks of a stage have the same x, and would send the same bytes tp times. Here rank
t sends the t-th part of the tokens; the receivers gather the parts over tp, inside a node:

    stage 0, rank t    x whole  ->  x_t ------->  x_t  ->  all-gather over tp  ->  x whole    stage 1, rank t

Law: over pp a rank sends S / tp instead of S bytes at a boundary, and over tp (tp-1)/tp S more for each message that it
receives. This pays where links between nodes are slower than tp's. Between two stages of one rank x stays whole. In
step 6, `forward` and `backward` would begin and end with this, and `buffer` would have room for a part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

import step06_pipeline as step06
from extras.variants import Parts
from step04_tp_sp import gather_tokens

SINCE = step06.Config


@dataclass
class Flags:
    """Boundaries of a pipeline."""

    pp_scatter: bool = False  # without SP: tp ranks send a part each over a pipeline boundary, and gather on arrival


NEEDS = [("pp_scatter", "pp"), ("pp_scatter", "tp"), ("pp_scatter", "sp", False)]  # with SP, ranks have parts anyway


def attach(config: Any, parts: Parts):
    """Send a part of each message of the pipeline."""
    if not config.pp_scatter:
        return
    pipeline, tp = parts.pipeline, parts.mesh["tp"]

    def leaves(stage: int | None) -> bool:
        return stage is not None and pipeline.places[stage].rank != pipeline.group.rank

    def act(run: Callable, i: int, stage: int, message: Tensor | None, comes: str, goes: str) -> Tensor | None:
        """Forward or backward of a stage: [batch, seq/tp, dim], if it comes from another rank, and so it goes."""
        place = pipeline.places[stage]
        output = run(i, stage, gather_tokens(message, tp) if leaves(getattr(place, comes)) else message)
        return output.chunk(tp.size, 1)[tp.rank].contiguous() if leaves(getattr(place, goes)) else output

    def buffer(room: Callable, i: int) -> Tensor:
        """Room for a part."""
        batch, seq, dim = (whole := room(i)).shape
        return whole.new_empty(batch, seq // tp.size, dim)

    parts.around(pipeline, "buffer", buffer, by=__name__)
    parts.around(pipeline, "forward", partial(act, comes="before", goes="after"), by=__name__)
    parts.around(pipeline, "backward", partial(act, comes="after", goes="before"), by=__name__)
