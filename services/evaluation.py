"""Validation and generation: what a run does with a model besides training it.

Both look at the model through one function, `look(tokens, batch, end)`: it sends tokens int64 [rows, seq], `batch` rows
at a time, through the model as it is laid over the ranks, and returns the sum of `end(i, hidden)` over the
micro-batches i. A rank without the last stage of a pipeline returns 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.comm import Mesh, all_reduce, sum_over
from common.data import TokenData
from common.model import IGNORE, Decoder
from services.readers import decode

Look = Callable[[Tensor, int, Callable[[int, Tensor], Tensor]], Tensor]


@torch.no_grad()
def look_through(model: Decoder, positions: Tensor, tokens: Tensor, batch: int, end: Callable) -> Tensor:
    """The `look` of a model that is not cut into stages; `positions` int64 [seq] of the tokens."""
    return sum(end(i, model(rows, positions)).double() for i, rows in enumerate(tokens.split(batch)))


def held_out(data: TokenData, sequences: int, micro_batch_size: int, rank=0, ranks=1) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 [rows, seq], of one of `ranks` shares of the held-out sequences.

    The last micro-batches are filled up with sequences that do not count, so that all ranks do equally many.
    """
    tokens, targets = data.validation(sequences)
    missing = -len(tokens) % (ranks * micro_batch_size)
    tokens = torch.cat((tokens, tokens[:1].expand(missing, -1)))[rank::ranks]
    targets = torch.cat((targets, targets[:1].new_full((missing, targets.shape[1]), IGNORE)))[rank::ranks]
    return tokens, targets


def validate(run: Any) -> float:
    """Mean loss over all targets of the held-out sequences. `run`: a Trainer in its steps."""
    config, mesh, size = run.config, run.mesh, run.config.micro_batch_size
    place = (mesh["dp"].rank, mesh["dp"].size) if mesh.sizes else (0, 1)
    tokens, targets = held_out(run.data, config.eval_sequences, size, *place)
    if run.documents is not None:
        run.documents.begin(tokens)
    tokens, targets = (x[:, run.positions].to(run.device) for x in (tokens, targets))
    rows = targets.split(size)
    loss = run.look(tokens, size, lambda i, hidden: run.model.lm_head.loss(hidden, rows[i]))
    count = (targets != IGNORE).sum()
    for dim in run.dims_to_sum():
        (loss,) = sum_over(mesh[dim], loss)
        if dim != "pp":  # all stages have the same targets
            (count,) = sum_over(mesh[dim], count)
    return float(loss) / max(1, int(count))


def whole_logits(look: Look, model: Decoder, positions: Tensor, mesh: Mesh, tokens: Tensor) -> Tensor:
    """int64 [1, seq] -> logits [1, seq, vocab] on every rank: each puts those of its `positions` in their places."""
    here = tokens.to(positions.device)[:, positions]
    found = look(here, 1, lambda _, hidden: model.lm_head(hidden).float())
    logits = torch.zeros(1, tokens.shape[1], model.config.vocab_size, device=positions.device)
    logits[:, positions] = found.float() if found.dim() else 0.0
    for dim in ("cp", "pp"):
        if dim in mesh.groups:
            all_reduce(logits, mesh[dim], "(logits)").wait()
    return logits


def generate(
    look: Look, model: Decoder, positions: Tensor, mesh: Mesh, prompt: str, n_tokens: int = 400, seed: int = 0
) -> str:
    """Continue `prompt` (bytes) by `n_tokens` sampled at temperature 0.8, by a full forward pass for each.

    A text shorter than the sequence is filled up behind, where causal attention does not look.
    """
    logits_of, seq_len = partial(whole_logits, look, model, positions, mesh), model.config.seq_len
    tokens, generator = list(prompt.encode()), torch.Generator().manual_seed(seed)
    for _ in range(n_tokens):
        window = tokens[-seq_len:]
        logits = logits_of(torch.tensor([window + [0] * (seq_len - len(window))]))
        probabilities = (logits[0, len(window) - 1].cpu() / 0.8).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return decode(tokens)
