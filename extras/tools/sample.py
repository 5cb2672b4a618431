"""Prints a run's loss on held-out data, and how its model continues a text, in one process:
python -m extras.tools.sample RUN TEXT [flags].

    python -m extras.tools.sample runs/step07_moe_ep "def main" --tokens 100 --temperature 0.8

RUN is a run directory or one of its checkpoints, which any number of ranks saved in any layout. The
text becomes tokens as the run's data did: bytes, or those of the tokenizer beside a .bin. Each new
token is drawn from softmax(logits / temperature); 0 takes the most probable one.

There is no KV cache: each new token costs a forward of all tokens before it, seq_len at most (and
always, if there are experts). For n tokens after a text of p, these are n p + n (n-1) / 2 tokens.
With a cache they would be p + n - 1, and it would hold 2 n_layers n_kv_heads head_dim numbers for
each. For 100 tokens after 8: 5,750, or 107.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common import UserError
from common.data import END, Data
from common.flags import flag, parse
from common.model import Decoder
from extras.start import start
from extras.tools.saved import load_model
from extras.tools.tokens import decode, encode, tokenizer_of


@dataclass
class Config:
    """Flags of the tool."""

    tokens: int = flag(100, "how many tokens to draw")
    temperature: float = flag(0.8, "divides the logits; 0: take the most probable token")
    seed: int = flag(0, "of the draws")
    sequences: int = flag(64, "how many held-out sequences to take the loss of", least=1)
    dataset: str = flag("", "whose tokens to use; default: the run's")


def held_out(data: Data, n: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the first n held-out windows (or all, if fewer), int64 [n, seq]."""
    return data.read(range(data.n_train, min(data.n_train + n, data.n_windows)))


@torch.no_grad()
def held_out_loss(model: Decoder, tokens: Tensor, targets: Tensor) -> float:
    """The mean loss in nats of tokens and targets, int64 [n, seq]."""
    total = 0.0
    for x, y in zip(tokens.split(4), targets.split(4), strict=True):
        total += model(x, y).item()
    return total / targets.numel()


def logits_alone(logits: Tensor, targets: Tensor) -> Tensor:
    """Takes the place of the model's loss: `forward` then returns the logits."""
    return logits


@torch.no_grad()
def continued(model: Decoder, ids: list[int], known: int, length: int, config: Config) -> list[int]:
    """Token ids and those that follow them, all below `known`: the tokenizer's, or bytes.

    The model gets the last seq_len ids at most, and `length` ids at least: causal attention hides
    from a text the padding behind it. Afterwards it returns logits in place of a loss.
    """
    model.loss = logits_alone
    ids = list(ids)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.tokens):
        window = ids[-model.config.seq_len :]
        padding = [0] * (length - len(window))
        tokens = torch.tensor([window + padding], device=device)
        logits = model(tokens, tokens)[0, len(window) - 1, :known].double().cpu()
        token = logits.argmax()
        if config.temperature:
            probabilities = (logits / config.temperature).softmax(-1)
            token = torch.multinomial(probabilities, 1, generator=generator)
        ids.append(int(token))
    return ids


def main(argv: list[str]):
    """Run a command line. Raises UserError."""
    config = parse(Config, argv[2:] if len(argv) > 1 else ["--help"])
    run, text = argv[:2]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags, model = load_model(Path(run), device)
    shape = model.config
    dataset = config.dataset or flags.get("dataset")
    if dataset is None:
        raise UserError(f"{run} was imported, and has no data yet: give --dataset")
    tokenizer = tokenizer_of(dataset)
    ids = encode(tokenizer, text)
    if not ids or max(ids) >= shape.vocab_size:
        raise UserError(f"text {text!r}: its ids {ids} must be below {shape.vocab_size}")
    tokens, targets = held_out(Data(dataset, shape, 1, 0), config.sequences)
    loss = held_out_loss(model, tokens.to(device), targets.to(device))
    print(f"{run}: {loss:.4f} nats per token of {len(tokens)} held-out sequences\n")
    known = tokenizer.get_vocab_size() if tokenizer else END + 1
    # A technique may count the tokens of whole sequences to choose experts.
    length = shape.seq_len if "experts" in flags else 0
    print(decode(tokenizer, continued(model, ids, known, length, config)))


if __name__ == "__main__":
    start(main)
