"""Validation and generation: what a run does with a model besides training it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, Mesh, all_reduce
from common.data import TokenData
from common.model import IGNORE, Decoder
from common.schedules import Action, Place, communicate
from services.readers import decode


def held_out(data: TokenData, config: Any, positions: Tensor, rank=0, ranks=1) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 [rows, seq], of the held-out sequences, or of one of `ranks` shares of them.

    `positions` int64 [seq]: the tokens of each sequence that are looked at. The last micro-batches are filled up with
    sequences that do not count, so that all ranks do equally many.
    """
    tokens, targets = data.validation(config.eval_sequences)
    missing = -len(tokens) % (ranks * config.micro_batch_size)
    tokens = torch.cat((tokens, tokens[:1].expand(missing, -1)))[rank::ranks]
    targets = torch.cat((targets, targets[:1].new_full((missing, targets.shape[1]), IGNORE)))[rank::ranks]
    return tokens[:, positions.cpu()].to(positions.device), targets[:, positions.cpu()].to(positions.device)


@torch.no_grad()
def evaluate(model: Decoder, data: TokenData, config: Any, positions: Tensor, rank=0, ranks=1) -> Tensor:
    """Loss of the held-out sequences, or of one of `ranks` shares of them: fp64 [sum of losses, number of targets]."""
    tokens, targets = held_out(data, config, positions, rank, ranks)
    total = 0.0
    for start in range(0, len(tokens), config.micro_batch_size):
        rows = slice(start, start + config.micro_batch_size)
        total += model.lm_head.loss(model(tokens[rows], positions), targets[rows]).item()
    return torch.tensor([total, (targets != IGNORE).sum()], dtype=torch.float64)


def all_logits(model: Decoder, positions: Tensor, tokens: Tensor) -> Tensor:
    """int64 [1, seq] -> [1, seq, vocab], the model's logits for tokens at `positions` [seq]."""
    return model.lm_head(model(tokens.to(positions.device), positions))


@torch.no_grad()
def generate(logits_of: Callable[[Tensor], Tensor], seq_len: int, prompt: str, n_tokens: int, seed: int) -> str:
    """Continue `prompt` (bytes) by `n_tokens` sampled at temperature 0.8, by a full forward pass for each.

    `logits_of`: int64 [1, seq_len] -> [1, seq_len, vocab]. A shorter text is filled up behind, where causal attention
    does not look.
    """
    tokens, generator = list(prompt.encode()), torch.Generator().manual_seed(seed)
    for _ in range(n_tokens):
        window = tokens[-seq_len:]
        logits = logits_of(torch.tensor([window + [0] * (seq_len - len(window))]))
        probabilities = (logits[0, len(window) - 1].float().cpu() / 0.8).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return decode(tokens)


@torch.no_grad()
def gather_logits(model: Decoder, positions: Tensor, group: Group, tokens: Tensor) -> Tensor:
    """int64 [1, s] -> logits [1, s, vocab]: each rank puts those of its tokens in their places, and all are summed."""
    own = all_logits(model, positions, tokens[:, positions.cpu()])
    logits = own.new_zeros(1, tokens.shape[1], own.shape[-1])
    logits[:, positions] = own
    all_reduce(logits, group, "(logits)").wait()
    return logits


def forward_only(ways: list[list[Place]], count: int, rank: int) -> list[Action]:
    """Forward passes alone, of `count` micro-batches along the first way, one rank's list."""
    chunks = [chunk for holder, chunk in ways[0] if holder == rank]
    return [Action("F", i, chunk) for chunk in chunks for i in range(count)]


def look(pipeline: Any, tokens: Tensor, batch: int, end: Callable[[int, Tensor], Tensor], positions: Tensor) -> Tensor:
    """Send tokens int64 [rows, seq/cp] through the stages, `batch` rows at a time; the sum of `end` over them."""
    group, count = pipeline.group, len(tokens) // batch
    lists = [forward_only(pipeline.ways, count, rank) for rank in range(group.size)]
    program = communicate(lists, pipeline.ways)[group.rank]
    with torch.no_grad():
        return pipeline.run(program, batch, lambda i: tokens[i * batch : (i + 1) * batch], end, positions)


def evaluate_stages(
    pipeline: Any, model: Decoder, data: TokenData, config: Any, positions: Tensor, rank: int, ranks: int
) -> Tensor:
    """Step 1's `evaluate` through all stages: fp64 [sum of losses, number of targets], zeros where there is no loss."""
    tokens, targets = held_out(data, config, positions, rank, ranks)
    rows = targets.split(config.micro_batch_size)
    total = look(
        pipeline, tokens, config.micro_batch_size, lambda i, hidden: model.lm_head.loss(hidden, rows[i]), positions
    )
    here = pipeline.ways[0][-1][0] == pipeline.group.rank
    return torch.tensor([float(total), (targets != IGNORE).sum() * here], dtype=torch.float64)


def pipeline_logits(pipeline: Any, model: Decoder, positions: Tensor, mesh: Mesh, tokens: Tensor) -> Tensor:
    """int64 [1, s] -> logits [1, s, vocab] on every rank: the last stage's, of every cp rank's tokens."""
    own = tokens.to(positions.device)[:, positions]
    found = look(pipeline, own, 1, lambda _, hidden: model.lm_head(hidden).float(), positions)
    logits = torch.zeros(1, tokens.shape[1], model.config.vocab_size, device=positions.device)
    logits[:, positions] = found
    for dim in ("cp", "pp"):
        all_reduce(logits, mesh[dim], "(logits)").wait()
    return logits
