"""Validation and text generation during or after a run, under every layout.

Both call `look`, which runs a forward pass through the whole model, or through one pipeline stage after the other.
Validation computes the model's own `loss`. Generation passes one token to the head and samples from its logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group, all_reduce, exchange
from common.data import END, Data
from common.model import IGNORE
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from step06_pipeline import forward_stage


@dataclass
class Flags:
    """Validation and generation."""

    eval_every: int = 50  # steps between validations (and one at the end); 0: never
    eval_sequences: int = 64  # held-out sequences in each validation
    generate: str = ""  # with --resume: continue this text and exit


NEEDS = [("generate", "resume")]
REFUSES = [Refusal(dict(eval_sequences=SET, eval_every=(0,)), "", needs="--eval-every above 0")]


def group_of(parts: Parts, dim: str) -> Group:
    """The mesh's group along `dim`, or a group of one rank if the mesh has no such dimension."""
    return parts.mesh.groups.get(dim, Group(dim, 0, 1, None))


def positions_of(parts: Parts) -> Tensor:
    """The positions of this rank's tokens, int64 [seq / cp]."""
    return torch.arange(parts.model.config.seq_len) if parts.positions is None else parts.positions


@torch.no_grad()
def look(parts: Parts, tokens: Tensor, targets: Tensor) -> Tensor:
    """Run a forward pass on whole sequences, int64 [batch, seq]; returns the loss, summed over this rank's tokens.

    A rank without the last stage returns 0. A collective: all ranks along tp, cp and pp must call it.
    """
    model, pipeline, here = parts.model, parts.pipeline, positions_of(parts)
    device = next(model.parameters()).device
    for kept in parts.keeps("look"):
        kept.look(tokens)
    positions = here.to(device)
    tokens, targets = (x[:, here.cpu()].to(device) for x in (tokens, targets))
    if pipeline is None:
        return model(tokens, targets, positions)
    places, group, result = pipeline.places, pipeline.group, torch.zeros((), device=device)
    x = tokens
    for stage, following in pairwise([*parts.way, None]):
        place, peer = places[stage], None if following is None else places[following].rank
        if place.rank == group.rank:
            x = forward_stage(model, place, x, targets, positions)
            if following is None:
                result = x
            elif peer != group.rank:
                exchange([(x.contiguous(), peer)], [], group).wait()
        elif peer == group.rank:
            x = pipeline.reference_param.new_empty(len(tokens), tokens.shape[1] // pipeline.sp_ranks, model.config.dim)
            exchange([], [(x, place.rank)], group).wait()
    return result


def held_out(data: Data, sequences: int, multiple: int) -> tuple[Tensor, Tensor]:
    """The first held-out tokens and targets, int64 [rows, seq]; IGNORE rows added so that `multiple` divides rows."""
    n_windows = (len(data.tokens) - 1) // data.shape.seq_len
    tokens, targets = data.read(range(data.n_train, min(n_windows, data.n_train + sequences)))
    missing = -len(tokens) % multiple
    tokens = torch.cat((tokens, tokens[:1].expand(missing, -1)))
    return tokens, torch.cat((targets, targets.new_full((missing, targets.shape[1]), IGNORE)))


def validate(config: Any, parts: Parts) -> float:
    """Compute the mean loss over the held-out targets. A collective, whose messages are hidden from `comm.observer`."""
    observer, comm.observer = comm.observer, None
    size, dp = config.micro_batch_size, group_of(parts, "dp")
    tokens, targets = held_out(parts.data, config.eval_sequences, dp.size * size)
    count = (targets != IGNORE).sum().clamp(min=1).item()
    loss = torch.zeros((), dtype=torch.float64, device=next(parts.model.parameters()).device)
    for x, y in zip(*(t[dp.rank :: dp.size].split(size) for t in (tokens, targets)), strict=True):
        loss += look(parts, x, y)
    for dim in ("dp", "cp", "pp"):
        all_reduce(loss, group_of(parts, dim)).wait()
    comm.observer = observer
    return loss.item() / count


def decode(tokens: list[int]) -> str:
    """Decode byte tokens to text; END becomes a blank line, larger ids are skipped."""
    return b"".join(b"\n\n" if t == END else bytes([t]) for t in tokens if t <= END).decode("utf-8", errors="replace")


def generate(parts: Parts, prompt: str, n_tokens: int = 400, seed: int = 0) -> str:
    """Continue `prompt` by `n_tokens` tokens, sampled at temperature 0.8 with one forward pass each. A collective.

    A text shorter than a sequence is padded at its end; causal attention hides the padding from the text. Afterwards
    the model cannot train: its head sees only one token, and its loss is replaced.
    """
    model, tp, here = parts.model, group_of(parts, "tp"), positions_of(parts)
    seq_len, vocab_size = model.config.seq_len, model.config.vocab_size
    device, tokens, seen = next(model.parameters()).device, list(prompt.encode()), []
    generator, row = torch.Generator().manual_seed(seed), 0

    def keep(_plain: Callable, logits: Tensor, _targets: Tensor) -> Tensor:  # [1, 1, vocab (/tp)]
        seen.append(logits.flatten().float())
        return logits.new_zeros(())

    parts.around(model, "loss", keep, by=__name__)
    if model.lm_head is not None:
        model.lm_head.register_forward_pre_hook(lambda _head, hidden: hidden[0][:, row : row + 1])
    for _ in range(n_tokens):
        window = tokens[-seq_len:]
        last = here == len(window) - 1
        row = int(last.int().argmax())  # index of the last token on this rank; 0 if another rank of cp has it
        padded = torch.tensor([window + [0] * (seq_len - len(window))])
        look(parts, padded, padded)
        logits = torch.zeros(vocab_size + tp.size, device=device)  # tp's shards may be padded
        if seen:
            shard = seen.pop()
            logits[tp.rank * len(shard) :][: len(shard)] = shard * last.any().to(device)
        for dim in ("tp", "cp", "pp"):
            all_reduce(logits, group_of(parts, dim)).wait()
        probabilities = (logits[:vocab_size].cpu() / 0.8).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return decode(tokens)


def metrics(config: Any, parts: Parts, step: int, end: int) -> dict[str, float]:
    """The validation loss for metrics.jsonl, if it is due. `end`: the number of steps after which the run ends."""
    due = config.eval_every and ((step + 1) % config.eval_every == 0 or step + 1 == end)
    return dict(validation_loss=validate(config, parts)) if due else {}


def answer(config: Any, parts: Parts):
    """Continue the text of --generate, and print it on rank 0. A collective."""
    text = generate(parts, config.generate)
    if parts.run.rank == 0:
        print(text, flush=True)
