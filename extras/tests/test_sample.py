"""Tests extras/tools/sample.py: one process reads what eight ranks saved, and continues a text."""

import importlib
from typing import Any

import pytest
import torch

from common import UserError
from common.data import Data
from common.model import Decoder
from extras.tools import sample, tokens
from extras.tools.saved import load_model, whole_parameters
from tests.equal import Watch, close, decoder, together, train

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
    with Watch(module.Config(**options | flags)) as run:
        module.train(run.config, run)
    return run.model


def train_and_save(*arguments: Any):
    """Runs on every rank: `trained`, without an answer."""
    trained(*arguments)


def test_one_process_reads_what_eight_ranks_saved(pools, tmp_path, text_file, capsys):
    """The held-out loss is that of a model that one process trained, experts' biases included."""
    step, run = "step07_moe_ep", tmp_path / "run"
    flags = dict(balance="bias", bias_rate=0.1, dataset=text_file, dtype="fp64")
    layout = dict(pp=2, tp=2, ep=2, zero="2", save_every=2, out=str(run))
    pools(8).run(train_and_save, step, flags | layout)
    alone = trained(step, flags)
    held_out = Data(text_file, alone.config, 1, 0).held_out(5)
    expected = alone(*held_out).item() / (5 * 16)
    _, model = load_model(run, torch.device("cpu"), torch.float64)
    close(sample.held_out_loss(model, *held_out), expected, "the held-out loss")
    sample.main([str(run), "3 times", "--tokens", "2", "--sequences", "5"])
    first, text = capsys.readouterr().out.split("\n\n", 1)
    assert first == f"{run}: {expected:.4f} nats per token of 5 held-out sequences"
    assert text.startswith("3 times")


def with_large_weights() -> tuple[Decoder, list]:
    """A model with seq_len 6 and 13 token ids, and a list that gets its logits."""
    model = decoder()
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param, float(param.dim() == 1), 1.0, generator)
    seen = []
    model.lm_head.register_forward_hook(lambda *call: seen.append(call[-1]))
    return model, seen


def test_temperature_0_takes_the_largest_logit():
    """It is the largest of the known ids' logits, given the last 6 tokens."""
    model, seen = with_large_weights()
    greedy = sample.Config(tokens=20, temperature=0.0)
    ids = sample.continued(model, [1, 2], 9, 0, greedy)
    assert len(ids) == 22
    for n in range(2, 22):
        window = torch.tensor([ids[max(0, n - 6) : n]])
        model(window, window)
        assert ids[n] == seen[-1][0, -1, :9].argmax()
    assert sample.continued(model, [1, 2], 9, 6, greedy) == ids  # padded to 6 tokens


def test_frequencies_are_softmax_of_logits_over_temperature():
    """1,000 draws among 4 ids have the frequencies of the definition."""
    model, seen = with_large_weights()
    counts = torch.zeros(4)
    for seed in range(1000):
        draw = sample.Config(tokens=1, temperature=3.0, seed=seed)
        counts[sample.continued(model, [1, 2], 4, 0, draw)[2]] += 1
    model(torch.tensor([[1, 2]]), torch.tensor([[1, 2]]))
    expected = (seen[-1][0, -1, :4] / 3.0).softmax(-1)
    assert (counts / 1000 - expected).abs().max() < 0.04  # 2.5 standard deviations, if p = 1/2


def test_text_becomes_tokens_as_the_runs_data_did(tmp_path, text_file, capsys):
    """A run on a .bin takes the tokenizer beside it. What has no ids there is one line."""
    for n in 280, 300:
        tokens.run(tokens.Config(dataset=text_file, train=n, out=f"{tmp_path}/{n}"))
    run, more = f"{tmp_path}/run", ["--dataset", f"{tmp_path}/300.bin"]
    flags = dict(model=f"{SHAPE},vocab_size=280", dataset=f"{tmp_path}/280.bin", out=run)
    trained("step01_single_gpu", flags | dict(save_every=1))
    sample.main([run, "3 é", "--tokens", "9"])
    text = capsys.readouterr().out.partition("held-out sequences\n\n")[2]
    assert text.startswith("3 é") and len(text) > len("3 é\n")
    (tmp_path / "280.tokenizer.json").unlink()
    for words, problem in [
        ([run, "3"], "280.tokenizer.json: cannot be read"),
        ([run, "", *more], r"its ids \[\] must be below 280"),
        ([run, "9 times 9 is 81\n", *more], r"its ids .*2[89]\d.* must be below 280"),
        ([run, "3", "--temperature", "-1"], "--temperature is -1.0: it must be at least 0"),
        ([str(tmp_path), "3"], "no checkpoint is there"),
    ]:
        with pytest.raises(UserError, match=problem):
            sample.main(words)


BIAS = dict(steps=4, save_every=2, n_layers=4, experts=4, balance="bias", bias_rate=0.3)
BIAS |= dict(pp=2, tp=2, ep=2, zero="3")


def test_whole_parameters_of_several_ranks(pools, tmp_path):
    """They are the masters that the ranks updated, put together, and buffers, by their names."""
    ranks = pools(4).run(train, "step07_moe_ep", BIAS | dict(out=f"{tmp_path}"))
    flags, named = whole_parameters(tmp_path)
    found = dict(named)
    close(flags["balance"], "bias", "a flag of the run")
    for name, value in together([piece for rank in ranks for piece in rank[3]]).items():
        close(found.pop(name), value, name)
    biases = [f"model.layers.{n}.mlp.bias" for n in range(4)]
    close(sorted(found), biases, "buffers")
    steps_of_rate = torch.stack([found[name] for name in biases]) / 0.3
    close(steps_of_rate, steps_of_rate.round(), "biases, in steps of the rate")
    assert steps_of_rate.abs().max() > 0.9, "no bias has moved"
