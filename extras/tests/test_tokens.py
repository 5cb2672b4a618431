"""extras/tools/tokens.py: text -> token ids -> text.

Expected ids come from transformers, which reads the same tokenizer.json, or from a vocabulary that
is written out here.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from common import UserError
from extras.tools import tokens

TEXTS = [
    "def f(x):\n    return x\n",
    "Grüße 🙂 an alle\r\n\tund\0mehr",
    "",
    "a <|endoftext|> b </s>",
]


@pytest.fixture
def corpus(tmp_path):
    """A file with the documents TEXTS, 20 times."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in 20 * TEXTS))
    return path


def words(*names: str) -> Tokenizer:
    """A tokenizer whose tokens are whole words: the first has id 0, and so on."""
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize("text", [*TEXTS, "\x00\x7fé\u2028 " + chr(0x10FFFF), "  a\n\n\n b"])
@pytest.mark.parametrize("kind", ["trained", "bytes"])
def test_text_comes_back(text, kind):
    """Decoding the ids of any text returns the text, also one with the name of a special token."""
    tokenizer = tokens.train_tokenizer(20 * TEXTS, 300) if kind == "trained" else None
    ids = tokens.encode(tokenizer, text)
    assert tokens.decode(tokenizer, ids) == text
    assert tokenizer is None or tokens.end_of(tokenizer) not in ids


def test_documents_become_ids_with_an_end_after_each(corpus, tmp_path):
    """OUT.bin has each document's ids, as transformers reads the tokenizer, and END after them."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    out = str(tmp_path / "new/small")
    tokens.main(["--dataset", str(corpus), "--out", out, "--train", "300"])
    file = f"{out}.tokenizer.json"
    peer = PreTrainedTokenizerFast(tokenizer_file=file, split_special_tokens=True)
    end = peer.convert_tokens_to_ids("<|endoftext|>")
    expected = [i for text in 20 * TEXTS for i in (*peer.encode(text), end)]
    assert np.fromfile(f"{out}.bin", np.uint16).tolist() == expected
    assert json.loads(Path(f"{out}.bin.json").read_text())["tokens"] == len(expected)


def test_a_document_is_never_cut_nor_begun(tmp_path, monkeypatch):
    """A tokenizer.json may shorten, pad and mark what it encodes: this is switched off."""
    tokenizer = words("<s>", "a", "b", "</s>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    marks = dict(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = processors.TemplateProcessing(**marks)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b a b a")
    monkeypatch.chdir(tmp_path)
    tokens.main(["--dataset", "a.txt", "--out", "a", "--tokenizer", "tokenizer.json"])
    assert np.fromfile("a.bin", np.uint16).tolist() == [1, 2, 1, 2, 1, 3]


def test_an_interrupted_run_leaves_no_ids(tmp_path):
    """OUT.bin appears when it is complete, so a part of the data is not mistaken for the whole."""

    def texts():
        yield from ["a"] * 1000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokens.write_ids(texts(), words("</s>", "a"), 0, str(tmp_path / "a"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.part"]


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--train 300", "--out: give the path"),
        ("--out a", "either --train VOCAB_SIZE or --tokenizer"),
        ("--out a --train 256", "--train 256: the 256 bytes and the end token are 257 tokens"),
        ("--out a --tokenizer words.json", "--tokenizer: it has no end token"),
        ("--out a --tokenizer b.json", "--tokenizer b.json: it is no tokenizer.json"),
        ("--out a --train 300 --dataset trian.txt", "--dataset trian.txt: no such file"),
        ("--out a --train 300 --dataset ids.bin", "--dataset ids.bin: it has token ids already"),
    ],
)
def test_a_mistake_is_named(monkeypatch, corpus, flags, reason):
    """The error names the flag, and nothing is written."""
    monkeypatch.chdir(corpus.parent)
    np.arange(9, dtype=np.uint16).tofile("ids.bin")
    words("a").save("words.json")
    before = sorted(corpus.parent.iterdir())
    arguments = flags if "--dataset" in flags else f"{flags} --dataset corpus.jsonl"
    with pytest.raises(UserError, match=re.escape(reason)):
        tokens.main(arguments.split())
    assert sorted(corpus.parent.iterdir()) == before
