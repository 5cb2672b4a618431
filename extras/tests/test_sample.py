"""Tests extras/tools/sample.py: one process reads what eight ranks saved, and continues a text."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from common import UserError
from common.checkpoint import folder_name, pieces_of, save
from common.data import Data
from common.layout import materialize
from common.model import Decoder
from common.ranks import Ranks
from extras.tools import sample, tokens
from extras.tools.saved import build_model, load_model
from step01_single_gpu import Config, Optimizer
from tests.equal import Watch, close

CPU = torch.device("cpu")
SHAPE = "debug,dim=32,n_layers=4,ffn_dim=48,seq_len=16"


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> str:
    """A text of about 250 windows of 16 bytes."""
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(200)))
    return str(path)


def trained(step: str, flags: dict[str, Any]) -> Decoder:
    """Train with a step's own `train`; returns the model."""
    module = importlib.import_module(step)
    config = module.Config(model=SHAPE, device="cpu", dtype="fp64", steps=2, **flags)
    with Watch(config) as run:
        module.train(config, run)
    return run.model


def save_trained(*arguments: Any):
    """Runs on every rank: `trained`, without an answer."""
    trained(*arguments)


@pytest.mark.parametrize(
    "step, layout, flags",
    [
        ("step06_pipeline", dict(pp=2, cp=2, zero="3"), {}),
        ("step07_moe_ep", dict(pp=2, tp=2, ep=2, zero="2"), dict(balance="bias", bias_rate=0.1)),
    ],
)
def test_what_eight_ranks_saved(pools, tmp_path, text_file, capsys, step, layout, flags):
    """The held-out loss is that of the model of one process that trained without any layout."""
    flags |= dict(dataset=text_file, global_batch_size=4, micro_batch_size=1)
    alone = trained(step, flags)
    pools(8).run(save_trained, step, flags | layout | dict(out=f"{tmp_path}/run", save_every=2))
    held_out = Data(text_file, alone.config, 1, 0).held_out(5)
    expected = alone(*held_out).item() / held_out[1].numel()
    _, model = load_model(tmp_path / "run", CPU, torch.float64)
    close(sample.held_out_loss(model, *held_out), expected, "the held-out loss")
    sample.main([f"{tmp_path}/run", "3 times", "--tokens", "2", "--sequences", "5"])
    first, _, text = capsys.readouterr().out.partition("\n\n")
    assert f"{expected:.4f} nats per token of 5 held-out sequences" in first
    assert text.startswith("3 times")


def save_model(run: Path, **flags: Any) -> Decoder:
    """Save a model with large random weights as the checkpoint of a run."""
    model = build_model(dict(model=SHAPE) | flags)
    materialize(model, 0, CPU, torch.float32)
    for param in model.parameters():
        torch.nn.init.normal_(param, 0.0, 0.3)
    content = dict(step=1, flags=dict(model=SHAPE) | flags, fingerprint="", history=[], state={})
    pieces = pieces_of(model, Optimizer(model, Config()))
    save(run / "checkpoints" / folder_name(1), content, pieces, Ranks())
    return model


def test_each_token_is_drawn_from_the_models_logits(tmp_path):
    """With temperature 0 it is the largest logit's; else its frequency is softmax(logits / T)."""
    model = save_model(tmp_path, model=f"{SHAPE},vocab_size=300")
    seen = []
    model.lm_head.register_forward_hook(lambda *call: seen.append(call[-1]))
    prompt = list(b"six times seven is more than 16 bytes")
    found = sample.continued(model, prompt, 257, 0, sample.Config(tokens=5, temperature=0.0))
    assert found[: len(prompt)] == prompt
    for n in range(len(prompt), len(prompt) + 5):
        window = torch.tensor([found[n - 16 : n]])
        model(window, window)
        assert found[n] == seen[-1][0, -1, :257].argmax()
    short = sample.Config(tokens=5, temperature=0.5)
    texts = [sample.continued(model, [1, 2], 257, length, short) for length in (0, 16)]
    assert texts[0] == texts[1]  # padding changes nothing

    counts = torch.zeros(6)
    for seed in range(1000):
        draw = sample.Config(tokens=1, temperature=2.0, seed=seed)
        counts[sample.continued(model, [1, 2], 6, 0, draw)[-1]] += 1
    model(torch.tensor([[1, 2]]), torch.tensor([[1, 2]]))
    probabilities = (seen[-1][0, -1, :6] / 2.0).softmax(-1)
    assert (counts / 1000 - probabilities).abs().sum() < 0.1


def test_a_tokenizer_beside_the_data(tmp_path, text_file, capsys):
    """A run on a .bin gets the tokenizer beside it; without one, the text has no ids."""
    out = f"{tmp_path}/ids"
    tokens.run(tokens.Config(dataset=text_file, train=280, out=out))
    save_model(tmp_path / "run", model=f"{SHAPE},vocab_size=280", dataset=f"{out}.bin")
    sample.main([f"{tmp_path}/run", "3 times é", "--tokens", "9"])
    text = capsys.readouterr().out.partition("held-out sequences\n\n")[2]
    assert text.startswith("3 times é") and len(text) > len("3 times é\n")
    Path(f"{out}.tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"ids.tokenizer.json: cannot be read"):
        sample.main([f"{tmp_path}/run", "3"])


def test_what_cannot_be_continued_is_one_line(tmp_path, text_file):
    """A text without known ids, a run that is not there, or one without data."""
    save_model(tmp_path / "imported")
    save_model(tmp_path / "small", model=f"{SHAPE},vocab_size=100")
    for words, problem in [
        (["imported", "a"], "imported, and has no data yet: give --dataset"),
        (["small", "cat", "--dataset", text_file], r"its ids \[99, 97, 116\] must be below 100"),
        (["imported", "", "--dataset", text_file], r"its ids \[\] must"),
        (["nowhere", "a"], "no checkpoint is there"),
        (["imported", "a", "--temperature", "-1"], "--temperature is -1.0: it must be at least 0"),
    ]:
        with pytest.raises(UserError, match=problem):
            sample.main([f"{tmp_path}/{words[0]}", *words[1:]])
