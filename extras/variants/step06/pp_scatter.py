"""Without SP, lets each tp rank send only a part of x to the next stage (`--pp-scatter`; Narayanan et al. 2021, 4.1).

Without sequence parallelism all tp ranks of a stage have the same x, so the same bytes would be sent tp times. Here
rank t sends the t-th part of the tokens, and the receivers gather the parts over tp, inside a node:

    stage 0, rank t    x whole  ->  x_t ------->  x_t  ->  all-gather over tp  ->  x whole    stage 1, rank t

Law: at a boundary a rank sends S / tp bytes over pp instead of S, and (tp-1)/tp S more over tp for each message that it
receives. It is faster if links between nodes are slower than those of tp. Between two stages of one rank x stays whole.
In step 6, `forward` and `backward` would begin and end with this, and `buffer` would have room for a part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from extras.variants import Parts
from step04_tp_sp import gather_tokens


@dataclass
class Flags:
    """Boundaries of a pipeline."""

    pp_scatter: bool = False  # without SP: each tp rank sends a part over a pipeline boundary; receivers gather them


NEEDS = [("pp_scatter", "pp"), ("pp_scatter", "tp"), ("pp_scatter", "sp", False)]  # with SP, ranks have parts already


def attach(config: Any, parts: Parts):
    """Let the pipeline send and receive parts."""
    if not config.pp_scatter:
        return
    pipeline, tp = parts.pipeline, parts.mesh["tp"]

    def elsewhere(stage: int | None) -> bool:
        return stage is not None and pipeline.places[stage].rank != pipeline.group.rank

    def act(run: Callable, i: int, stage: int, message: Tensor | None, comes: str, goes: str) -> Tensor | None:
        """Wraps forward or backward of a stage: gather the part received, [batch, seq/tp, dim], and return a part."""
        place = pipeline.places[stage]
        output = run(i, stage, gather_tokens(message, tp) if elsewhere(getattr(place, comes)) else message)
        return output.chunk(tp.size, 1)[tp.rank].contiguous() if elsewhere(getattr(place, goes)) else output

    def buffer(room: Callable, i: int) -> Tensor:
        """An empty tensor to receive a part."""
        batch, seq, dim = (whole := room(i)).shape
        return whole.new_empty(batch, seq // tp.size, dim)

    parts.around(pipeline, "buffer", buffer, by=__name__)
    parts.around(pipeline, "forward", partial(act, comes="before", goes="after"), by=__name__)
    parts.around(pipeline, "backward", partial(act, comes="after", goes="before"), by=__name__)
