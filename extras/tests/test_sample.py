"""Tests extras/tools/sample.py: one process reads what eight ranks saved, and continues a text."""

import importlib
from typing import Any

import pytest
import torch

from common import UserError
from common.data import END, Data
from common.model import Decoder
from common.shapes import model_shape
from extras.tools import sample, tokens
from extras.tools.saved import load_model
from tests.equal import Watch, close, decoder

SHAPE = "debug,dim=32,n_layers=4,ffn_dim=48,seq_len=16"


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> str:
    """A text of some 200 windows of 16 bytes."""
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(200)))
    return str(path)


def trained(step: str, flags: dict[str, Any]) -> Decoder:
    """Train with a step's own `train`; returns the model."""
    module = importlib.import_module(step)
    options = dict(model=SHAPE, device="cpu", steps=2, global_batch_size=4, micro_batch_size=1)
    run = Watch(module.Config(**options | flags))
    module.train(run.config, run)
    return run.model


def train_and_save(*arguments: Any):
    """Runs on every rank: `trained`, without an answer."""
    trained(*arguments)


def test_held_out_windows_are_the_last_twentieth(tmp_path):
    """Of 43 windows at most the last two, on whose targets no run trains."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i:04d}" for i in range(43)))
    data = Data(str(path), model_shape("debug,seq_len=4"), 1, 0)
    tokens, targets = sample.held_out(data, 99)
    close(tokens.tolist(), [[*b"0041"], [*b"0042"]], "tokens")
    close(targets.tolist(), [[*b"0410"], [*b"042", END]], "targets")


def test_one_process_reads_what_eight_ranks_saved(pools, tmp_path, text_file, capsys):
    """The held-out loss is that of a model that one process trained, experts' biases included."""
    step = "step07_moe_ep"
    run = tmp_path / "run"
    flags = dict(balance="bias", bias_rate=0.1, dataset=text_file, dtype="fp64")
    layout = dict(pp=2, tp=2, ep=2, zero="2", save_every=2, out=str(run))
    pools(8).run(train_and_save, step, flags | layout)
    alone = trained(step, flags)
    held_out = sample.held_out(Data(text_file, alone.config, 1, 0), 5)
    expected = alone(*held_out).item() / (5 * 16)
    _, model = load_model(run, torch.device("cpu"), torch.float64)
    close(sample.held_out_loss(model, *held_out), expected, "the held-out loss")
    sample.main([str(run), "3 times", "--tokens", "2", "--sequences", "5"])
    first, text = capsys.readouterr().out.split("\n\n", 1)
    assert first == f"{run}: {expected:.4f} nats per token of 5 held-out sequences"
    assert text.startswith("3 times")


def test_temperature_0_takes_the_largest_logit():
    """It is the largest of the known ids' logits, given the last 6 tokens (of 13 ids)."""
    model = decoder()
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param, float(param.dim() == 1), 1.0, generator)
    greedy = sample.Config(tokens=20, temperature=0.0)
    ids = sample.continued(model, [1, 2], 9, 0, greedy)
    assert len(ids) == 22
    for n in range(2, 22):
        window = torch.tensor([ids[max(0, n - 6) : n]])
        assert ids[n] == model(window, window)[0, -1, :9].argmax()  # `continued` took its loss away
    assert sample.continued(model, [1, 2], 9, 6, greedy) == ids  # padded to 6 tokens


def test_text_becomes_tokens_as_the_runs_data_did(tmp_path, text_file, capsys):
    """A run on a .bin takes the tokenizer beside it. What has no ids there is one line."""
    for n in 280, 300:
        tokens.main(f"--dataset {text_file} --train {n} --out {tmp_path}/{n}".split())
    run = f"{tmp_path}/run"
    more = ["--dataset", f"{tmp_path}/300.bin"]
    flags = dict(model=f"{SHAPE},vocab_size=280", dataset=f"{tmp_path}/280.bin", out=run)
    trained("step01_single_gpu", flags | dict(save_every=1))
    sample.main([run, "3 é", "--tokens", "9"])
    text = capsys.readouterr().out.partition("held-out sequences\n\n")[2]
    assert text.startswith("3 é") and len(text) > len("3 é\n")
    (tmp_path / "280.tokenizer.json").unlink()
    for words, problem in [
        ([run, "3"], "280.tokenizer.json: it is no tokenizer.json"),
        ([run, "", *more], r"its ids \[\] must be below 280"),
        ([run, "9 times 9 is 81\n", *more], r"its ids .*2[89]\d.* must be below 280"),
        ([str(tmp_path), "3"], "no checkpoint is there"),
    ]:
        with pytest.raises(UserError, match=problem):
            sample.main(words)
