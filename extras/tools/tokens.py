"""Turns text into token ids, once, for runs that map them into memory.

    python -m extras.tools.tokens --train 4096 --out data/library
    python -m extras.tools.tokens --dataset corpus/ --tokenizer tokenizer.json --out data/corpus

The first line trains a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) with 4,096 tokens
on the source code of Python's library, and so needs no network. The second applies a tokenizer that
exists, in the format of the library `tokenizers`. --dataset takes what the steps take, except token
ids. Each line writes three files; the first one writes

    data/library.bin             the ids of each document, then the id of the end token, in a row:
                                 uint16, or uint32 if the vocabulary has more than 65,536 tokens
    data/library.bin.json        dtype, number of tokens, vocab_size, the end token's id, and the
                                 bytes of the text
    data/library.tokenizer.json  the tokenizer

which a step then trains on:

    python step01_single_gpu.py --dataset data/library.bin --model tiny,vocab_size=4096

You should see about 3.5 bytes a token: a sequence holds that much more text than one of bytes.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from common import UserError
from common.data import END
from common.flags import flag, parse
from common.readers import read_source
from extras.start import start

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # names of end tokens, the usual first
AT_ONCE = 100  # documents that are encoded in parallel


@dataclass
class Config:
    """Flags of the tool."""

    dataset: str = flag(
        "", "a file, folder or data set of the hub with text; see common/readers.py"
    )
    out: str = flag("", "the three files' path and name, without their suffixes")
    tokenizer: str = flag("", "apply the tokenizer of this tokenizer.json")
    train: int = flag(0, "train a tokenizer with so many tokens; 0: use --tokenizer")


def load_tokenizer(path: str) -> Tokenizer:
    """Load a tokenizer.json that encodes every text as plain text, without additions or limits.

    Raises UserError if the file is not there, or not of the format of `tokenizers`.
    """
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library has no class of its own for its errors
        raise UserError(f"--tokenizer {path}: it is no tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # the *text* "</s>" in a document is text
    return tokenizer


def tokenizer_of(dataset: str) -> Tokenizer | None:
    """The tokenizer of a value of --dataset: the one beside a .bin; for text, None, hence bytes."""
    if not dataset.endswith(".bin"):
        return None
    return load_tokenizer(dataset.removesuffix(".bin") + ".tokenizer.json")


def encode(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """Text -> token ids, without an end; bytes if there is no tokenizer."""
    if tokenizer is None:
        return list(text.encode(errors="replace"))
    return tokenizer.encode(text, add_special_tokens=False).ids


def decode(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    """Token ids -> text. Without a tokenizer, ids are bytes, and the end of a document is a blank
    line."""
    if tokenizer is None:
        parts = [b"\n\n" if token == END else bytes([token]) for token in ids if token <= END]
        return b"".join(parts).decode(errors="replace")
    return tokenizer.decode(ids, skip_special_tokens=False)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens: ENDS[0], the 256 bytes, and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[ENDS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so every text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document. Raises UserError if the tokenizer has none."""
    for name in ENDS:
        end = tokenizer.token_to_id(name)
        if end is not None:
            return end
    raise UserError(f"--tokenizer: it has no end token, such as {' or '.join(ENDS)}")


def documents(dataset: str) -> Iterator[str]:
    """The texts of a value of --dataset. Raises UserError if it holds token ids."""
    _, texts = read_source(dataset)
    if isinstance(texts, np.ndarray):
        raise UserError(f"--dataset {dataset}: it has token ids already, and no text")
    for text in texts:
        yield text.encode(errors="replace").decode()  # a lone surrogate is not UTF-8


def write_ids(
    texts: Iterable[str], tokenizer: Tokenizer, end: int, out: str
) -> dict[str, int | str]:
    """Write OUT.bin, OUT.bin.json and OUT.tokenizer.json; return what OUT.bin.json says.

    A document is encoded as a whole. OUT.bin gets its name when it is complete.
    """
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    texts = iter(texts)
    n_tokens = 0
    n_bytes = 0
    with open(f"{out}.part", "wb") as file:
        while batch := list(islice(texts, AT_ONCE)):
            n_bytes += sum(len(text.encode()) for text in batch)
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = np.array([*encoding.ids, end], dtype)
                ids.tofile(file)
                n_tokens += len(ids)
    facts = dict(dtype=dtype, tokens=n_tokens, vocab_size=vocab_size, end=end, bytes=n_bytes)
    tokenizer.save(f"{out}.tokenizer.json")
    Path(f"{out}.bin.json").write_text(json.dumps(facts))
    os.replace(f"{out}.part", f"{out}.bin")
    return facts


def main(argv: list[str]):
    """Do what the flags say, and print what was written. Raises UserError."""
    config = parse(Config, argv)
    out = config.out.removesuffix(".bin")
    if not out:
        raise UserError("--out: give the path and name of the files to write, such as data/library")
    if bool(config.tokenizer) == bool(config.train):
        raise UserError("give either --train VOCAB_SIZE or --tokenizer tokenizer.json")
    if config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer)
    else:
        if config.train < 257:
            raise UserError(
                f"--train {config.train}: the 256 bytes and the end token are 257 tokens already"
            )
        tokenizer = train_tokenizer(documents(config.dataset), config.train)
    end = end_of(tokenizer)
    facts = write_ids(tqdm(documents(config.dataset), unit=" documents"), tokenizer, end, out)
    size = facts["bytes"] / facts["tokens"]
    print(f"{out}.bin: {facts['tokens']:,} tokens of {size:.2f} bytes")
    print(f"train with --dataset {out}.bin --model tiny,vocab_size={facts['vocab_size']}")


if __name__ == "__main__":
    start(main)
