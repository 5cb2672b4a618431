"""Tests extras/tools/hf.py: a model goes to Hugging Face's files and back, and computes the same.

The expected numbers come from `transformers`, which builds, saves and opens its own models.
"""

import importlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import step07_moe_ep as step07
from common import UserError
from common.data import Data
from common.shapes import model_shape
from extras.tools import hf, sample
from extras.tools.saved import load_model
from tests.equal import Watch, close

FP32 = torch.float32
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(intermediate_size=24, vocab_size=257, max_position_embeddings=48)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192, rope_theta=5e5)
TIED = dict(model_type="llama", tie_word_embeddings=True, rms_norm_eps=1e-3)
SCALED = dict(model_type="llama", rope_parameters=LLAMA3, vocab_size=300, num_key_value_heads=4)
MIXTRAL = dict(model_type="mixtral", num_local_experts=4, rms_norm_eps=1e-4)


def published(folder: Path, kind: dict, dtype: torch.dtype) -> torch.nn.Module:
    """A model with large random weights, which transformers saves in several files."""
    config = AutoConfig.for_model(**SIZES | dict(initializer_range=0.5) | kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    for param in model.parameters():
        if param.dim() == 1:  # norms, which start at one
            torch.nn.init.normal_(param, 1.0, 0.3)
    model.save_pretrained(folder, max_shard_size=20_000)
    return model.float()


@pytest.mark.parametrize("kind, dtype", [(TIED, FP32), (SCALED, FP32), (MIXTRAL, torch.bfloat16)])
def test_there_and_back(tmp_path, kind, dtype, monkeypatch):
    """An imported model has transformers' logits, and so has what is exported from it."""
    tokens = torch.arange(2 * 48).view(2, 48) * 5 % 257
    expected = published(tmp_path / "hf", kind, dtype)(tokens).logits
    hf.main(["import", f"{tmp_path}/hf", f"{tmp_path}/run"])
    _, model = load_model(tmp_path / "run", torch.device("cpu"))
    model.loss = sample.logits_alone
    close(model(tokens, tokens), expected, "logits", bound=1e-5)

    monkeypatch.setattr(hf, "SHARD_BYTES", 20_000)
    hf.main(["export", f"{tmp_path}/run", f"{tmp_path}/back"])
    assert (tmp_path / "back/model.safetensors.index.json").exists()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    close(after(tokens).logits, expected, "logits", bound=1e-5)


def first_loss(step: str, flags: dict) -> float:
    """Runs on every rank: train two steps with a step's own `train`; returns the first loss."""
    module = importlib.import_module(step)
    run = Watch(module.Config(steps=2, device="cpu", dtype="fp32", **flags))
    module.train(run.config, run)
    assert len(run.history) == 2
    return run.history[0]["loss"]


@pytest.mark.parametrize(
    "kind, step, layout",
    [
        (TIED, "step04_tp_sp", dict(tp=2, zero="2", optimizer="sgd")),
        (MIXTRAL, "step07_moe_ep", dict(ep=2)),
    ],
)
def test_two_ranks_train_an_imported_model(pools, tmp_path, kind, step, layout):
    """Training begins at step 0: the first loss is transformers'. --seq-len may be shorter."""
    path, run = tmp_path / "some.txt", f"{tmp_path}/run"
    path.write_text("All happy families are alike. " * 99)
    model = published(tmp_path / "hf", kind, FP32)
    hf.main(["import", f"{tmp_path}/hf", run, "--seq-len", "16"])
    flags = hf.flags_of(model.config, 16)
    tokens, targets = Data(str(path), model_shape(flags["model"]), 4, 0).batch(0)
    logits = model(tokens).logits
    flags |= dict(dataset=str(path), global_batch_size=4, micro_batch_size=2, resume=run)
    found = pools(2).run(first_loss, step, flags | layout | dict(out=f"{tmp_path}/out"))[0]
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten())
    close(found, expected, "the first loss", bound=1e-5)
    with pytest.raises(UserError, match="was imported, and has no data yet: give --dataset"):
        sample.main([run, "All"])


@pytest.mark.parametrize(
    "change, problem",
    [
        (dict(model_type="qwen3"), "model_type is qwen3: only llama and mixtral"),
        (TIED | dict(attention_bias=True), "attention_bias is True"),
        (SCALED | dict(head_dim=16), "head_dim is 16, and .* it is 8"),
        (
            SCALED | dict(rope_parameters=LLAMA3 | dict(low_freq_factor=2.0)),
            "low_freq_factor': 2.0",
        ),
        (MIXTRAL | dict(sliding_window=4096), "sliding_window is 4096"),
        (MIXTRAL | dict(num_experts_per_tok=1), "--experts-per-token 1: Mixtral does not"),
    ],
)
def test_a_model_that_our_decoder_does_not_compute_is_refused(change, problem):
    """These would load, and then compute other numbers than their class does."""
    with pytest.raises(UserError, match=problem):
        hf.flags_of(AutoConfig.for_model(**SIZES | change), 0)


@pytest.mark.parametrize("flag, value", [("balance", "bias"), ("experts_per_token", 1)])
def test_a_run_that_mixtral_does_not_compute_is_not_exported(flag, value):
    """Mixtral would choose other experts, or weigh them otherwise."""
    with pytest.raises(UserError, match=f"{value}: Mixtral does not compute this"):
        hf.hf_config(vars(step07.Config()) | {flag: value})


def test_a_damaged_folder_is_refused(tmp_path):
    """A tensor of another shape: no run is written. Nor is anything over a folder that exists."""
    folder, run = tmp_path / "hf", tmp_path / "run"
    published(folder, TIED, FP32)
    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path)
    first = min(tensors)
    save_file(tensors | {first: torch.ones(3)}, path, {"format": "pt"})
    with pytest.raises(UserError, match=f"mismatched_keys.*{first}"):
        hf.main(["import", str(folder), str(run)])
    assert not run.exists()
    with pytest.raises(UserError, match="exists: give a new folder"):
        hf.main(["export", str(run), str(folder)])
