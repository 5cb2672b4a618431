"""Validation and generation: what a run does with a model besides training it, in every layout.

Both look at the model through `look(parts, tokens, targets)`: forward only, whole or stage after stage. Validation has
the model's own `loss`, also in chunks. Generation gives the head one token, and keeps its logits.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group, all_gather, all_reduce, exchange
from common.data import END, Data
from common.model import IGNORE
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from step06_pipeline import forward_stage


@dataclass
class Flags:
    """Validation and generation."""

    eval_every: int = 50  # steps between validations (and one at the end); 0: never
    eval_sequences: int = 64  # sequences of the held-out split in a validation
    generate: str = ""  # with --resume: continue this text and exit


NEEDS = [("generate", "resume")]
REFUSES = [Refusal(dict(eval_sequences=SET, eval_every=(0,)), "", needs="--eval-every above 0")]


def group_of(parts: Parts, dim: str) -> Group:
    """A group of the mesh; of one, in a step that does not know this dimension."""
    return parts.mesh[dim] if dim in parts.mesh.groups else Group(dim, 0, 1, None)


def positions_of(parts: Parts) -> Tensor:
    """int64 [seq / cp]: the positions of this rank's tokens."""
    return torch.arange(parts.model.config.seq_len) if parts.positions is None else parts.positions


@torch.no_grad()
def look(parts: Parts, tokens: Tensor, targets: Tensor) -> Tensor:
    """One micro-batch of whole sequences, int64 [batch, seq], forward: what `model.loss` returns at the end.

    On a rank without the last stage: 0. A collective of tp, cp and pp.
    """
    model, pipeline, here = parts.model, parts.pipeline, positions_of(parts)
    device = next(model.parameters()).device
    positions = next((kept.look(tokens) for kept in parts.keeps("look")), here.to(device))
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
    """Tokens and targets, int64 [rows, seq], of the first held-out sequences; rows that do not count fill them up."""
    n_windows = (len(data.tokens) - 1) // data.shape.seq_len
    tokens, targets = data.read(range(data.n_train, min(n_windows, data.n_train + sequences)))
    missing = -len(tokens) % multiple
    tokens = torch.cat((tokens, tokens[:1].expand(missing, -1)))
    return tokens, torch.cat((targets, targets.new_full((missing, targets.shape[1]), IGNORE)))


def validate(config: Any, parts: Parts) -> float:
    """Mean loss over all targets of the held-out sequences. A collective; its traffic is not shown."""
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


class Logits:
    """Around the model's loss: in the place of a loss, what the head has said of one token, if somebody asks."""

    def __init__(self, parts: Parts):
        self.parts, self.asked, self.seen = parts, False, None
        parts.around(parts.model, "loss", self.loss, by=__name__)

    def loss(self, plain: Callable, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [1, 1, vocab (/tp)] are kept."""
        if not self.asked:
            return plain(logits, targets)
        self.seen = logits.flatten().float()
        return logits.new_zeros(())

    def after(self, tokens: Tensor, place: int) -> Tensor:
        """int64 [1, seq] -> the logits [vocab] of what follows the token at `place`, on every rank. A collective."""
        parts, self.asked, self.seen = self.parts, True, None
        model, there, tp = parts.model, positions_of(parts) == place, group_of(parts, "tp")
        row = int(there.int().argmax())  # of this rank's tokens; any, if another rank of cp has this one
        hook = None
        if model.lm_head is not None:
            hook = model.lm_head.register_forward_pre_hook(lambda _head, hidden: hidden[0][:, row : row + 1])
        try:
            look(parts, tokens, tokens)
        finally:
            self.asked = False
            if hook is not None:
                hook.remove()
        whole = torch.zeros(model.config.vocab_size, device=next(model.parameters()).device)
        if self.seen is not None:
            columns = self.seen.new_empty(tp.size * len(self.seen))
            all_gather(columns, self.seen, tp).wait()
            whole += columns[: len(whole)] * there.any().to(whole.device)  # without the padding of an uneven cut
        for dim in ("cp", "pp"):
            all_reduce(whole, group_of(parts, dim)).wait()
        return whole


def decode(tokens: list[int]) -> str:
    """Byte tokens -> text; END becomes a blank line, ids that are no byte are skipped."""
    return b"".join(b"\n\n" if t == END else bytes([t]) for t in tokens if t <= END).decode("utf-8", errors="replace")


def generate(parts: Parts, prompt: str, n_tokens: int = 400, seed: int = 0) -> str:
    """Continue `prompt` (bytes) by `n_tokens` sampled at temperature 0.8, by a full forward pass for each.

    A text shorter than the sequence is filled up behind, where causal attention does not look.
    """
    seq_len, tokens = parts.model.config.seq_len, list(prompt.encode())
    generator, head = torch.Generator().manual_seed(seed), Logits(parts)
    for _ in range(n_tokens):
        window = tokens[-seq_len:]
        logits = head.after(torch.tensor([window + [0] * (seq_len - len(window))]), len(window) - 1)
        probabilities = (logits.cpu() / 0.8).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return decode(tokens)


def metrics(config: Any, parts: Parts, step: int, end: int) -> dict[str, float]:
    """For metrics.jsonl, when it is time: the validation loss. `end`: how many steps the run will have done."""
    due = config.eval_every and ((step + 1) % config.eval_every == 0 or step + 1 == end)
    return dict(validation_loss=validate(config, parts)) if due else {}


def answer(config: Any, parts: Parts):
    """What --generate prints, on rank 0."""
    text = generate(parts, config.generate)
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, flush=True)
