"""Conversion to Hugging Face and back keeps weights and loss; validation and generation never hold all logits."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import step01_single_gpu as step01
import step07_moe_ep as step07
from common import UserError
from common.model import ModelConfig
from common.trainer import parse
from extras.services import evaluation, hub
from extras.services.checkpoint import find
from extras.services.run import ServedRun
from extras.services.seam import compose
from extras.tests.equal import SMALL, difference
from extras.tests.pool import error_of
from extras.tests.test_checkpoint import train_on_rank
from extras.tests.test_variants import logits_of

OPTIONS = dict(steps=2, eval_every=2, eval_sequences=5, micro_batch_size=2, save_every=2)


def test_logits_never_exist_as_a_whole(tmp_path, monkeypatch):
    """With --loss-chunk, validation and training compute logits in chunks; generation computes one token's."""
    monkeypatch.setattr(evaluation.generate, "__defaults__", (3, 0))
    out, none = str(tmp_path / "run"), str(tmp_path / "none")
    for options, tokens in (dict(out=out, loss_chunk=5), 5), (dict(out=none, resume=out, generate="x"), 1):
        with logits_of() as sizes:
            train_on_rank("step01_single_gpu", OPTIONS | options)
        assert max(sizes) == tokens


def their_loss(model: torch.nn.Module, run: str) -> torch.Tensor:
    """The mean loss of `model`, computed by transformers, over eight held-out sequences of the default text."""
    data = evaluation.Data("", ModelConfig(**find(run, Path(run)).index["model"]), 24, 0)
    tokens, targets = evaluation.held_out(data, 8, 1)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())


LLAMA3 = dict(rope_type="llama3", factor=8.0, rope_theta=1e4) | hub.LLAMA3_ROPE
PUBLISHED = [
    ("Llama", dict(rope_theta=1e5, rms_norm_eps=1e-4, tie_word_embeddings=True)),  # like SmolLM2
    ("Llama", dict(rope_parameters=LLAMA3, num_key_value_heads=4)),
    ("Mixtral", dict(rope_theta=1e6, num_local_experts=4)),
]


@pytest.mark.parametrize("kind, more", PUBLISHED)
def test_published_models_there_and_back(tmp_path, kind, more, monkeypatch):
    """An imported model has the loss that transformers computes, and its export has the same weights, bit for bit."""
    transformers = pytest.importorskip("transformers")
    theirs, run, back, out = (str(tmp_path / name) for name in ("hf", "run", "back", "out"))
    sizes = {hub.SIZES[name]: value for name, value in SMALL.items()} | dict(initializer_range=0.5) | more
    torch.manual_seed(0)
    shape = getattr(transformers, f"{kind}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(shape, experts_implementation="eager")
    model.save_pretrained(theirs, max_shard_size=50_000)
    flags = re.search(r"--model.*", hub.convert("import", theirs, run)).group()
    flags += f" --device cpu --dtype fp32 --steps 1 --lr 1e-30 --eval-sequences 8 --peak-tflops 1 --out {out}"
    flags += " --global-batch-size 2 --micro-batch-size 2" + " --aux-loss-coeff 0" * (kind == "Mixtral")
    step = step07 if kind == "Mixtral" else step01
    config = parse(compose(step), flags.split())
    with ServedRun(config) as served:
        step.train(config, served)
    assert difference(their_loss(model, run), served.history[-1]["validation_loss"]) < 1e-5
    monkeypatch.setattr(hub, "SHARD_BYTES", 20_000)
    hub.convert("export", run, back)
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert type(again).__name__ == f"{kind}ForCausalLM" and len(os.listdir(back)) > 3
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert "has *.safetensors files already" in error_of(UserError, hub.convert, "export", run, back)


def test_the_index_says_which_files_count(tmp_path):
    """Files not in the index are not read. A cut file, or a missing or misshapen tensor, gives a one-line error."""
    m, source, out = hub.Shape(8, 1, 1, 1, 8, 9, 4), str(tmp_path), str(tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps(hub.config_of(m, "float32")))
    new, old = ({k: torch.full(shape, x) for k, shape in hub.shapes_of(m).items()} for x in (1.0, 2.0))
    cut = {name: tensor[:1] for name, tensor in new.items()}
    for name, tensors in dict(a=new, b=old, c=dict(x=torch.ones(1)), d=cut, e=new | dict(x=torch.ones(1))).items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "f.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:99])
    says = dict(
        c="lacks 'model.embed", d="[1, 8] does not fit", e="no place for x", f="cannot be read", g="No such file"
    )
    for file, text in (dict(none="No such file") | says | dict(a="")).items():
        index = json.dumps(dict(weight_map=dict.fromkeys(new, f"{file}.safetensors")))
        if file != "none":
            (tmp_path / "model.safetensors.index.json").write_text(index)
        said = error_of(UserError, hub.convert, "import", source, out)
        assert text in said and Path(out).exists() == (file == "a"), (file, said)
    assert all(torch.equal(find(out, tmp_path).whole("master", name), tensor) for name, tensor in new.items())


def test_what_cannot_be_converted_is_one_line():
    """An architecture, a RoPE scaling or another setting that this decoder does not have gives a one-line error."""
    m = hub.Shape(32, 3, 4, 2, 48, 259, 16, experts_per_token=0)
    good = hub.config_of(m, "float32")
    assert hub.model_of(good) == m
    for change, says in [
        (dict(model_type="qwen3"), "its model_type is qwen3, this decoder knows only llama or mixtral"),
        (dict(model_type="mixtral", sliding_window=4096), "its sliding_window is 4096"),
        (dict(attention_bias=True), "its attention_bias is True"),
        (dict(quantization_config=dict(quant_method="awq")), "its quantization_config is {'quant_method': 'awq'}"),
        (dict(rope_parameters=dict(rope_type="yarn")), "its rope_type is yarn, this decoder knows only default or"),
        (dict(head_dim=16), "its head_dim is 16"),
        (dict(num_local_experts=4, num_experts_per_tok=1), "its one expert a token has the gate 1"),
    ]:
        assert says in error_of(UserError, hub.model_of, good | change), change
