"""Tests extras/tools/hf.py: a model goes to Hugging Face's files and back, and computes the same.

The expected numbers come from `transformers`, which builds, saves and opens its own models.
"""

import importlib
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import step07_moe_ep as step07
from common import UserError
from common.data import Data
from common.model import wide
from extras.tools import hf
from extras.tools.saved import load_model
from tests.equal import Watch, close

FP64 = torch.float64
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(intermediate_size=24, vocab_size=257, max_position_embeddings=48)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192, rope_theta=5e5)
TIED = dict(model_type="llama", tie_word_embeddings=True, rms_norm_eps=1e-3)
SCALED = dict(model_type="llama", rope_parameters=LLAMA3, vocab_size=300, num_key_value_heads=4)
MIXTRAL = dict(model_type="mixtral", num_local_experts=4, rms_norm_eps=1e-4)


def published(folder: Path, kind: dict, dtype: torch.dtype) -> torch.nn.Module:
    """A model with large random weights, which transformers saves in several files, and then
    computes in wide(dtype), also where it would cast to fp32."""
    config = AutoConfig.for_model(**SIZES | dict(initializer_range=0.5) | kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    for param in model.parameters():
        if param.dim() == 1:  # norms, which start at one
            torch.nn.init.normal_(param, 1.0, 0.3)
    model.save_pretrained(folder, max_shard_size=20_000)
    return model.to(wide(dtype))


def logits_of(folder: Path, kind: dict, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    """The logits of a published model, [batch, seq, vocab]."""
    real = wide(dtype)
    fp32 = mock.patch.multiple(torch, float=real, float32=real)
    with fp32, mock.patch.object(Tensor, "float", lambda tensor: tensor.to(real)), torch.no_grad():
        return published(folder, kind, dtype)(tokens).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [TIED, SCALED, MIXTRAL])
def test_there_and_back(tmp_path, kind, dtype, monkeypatch):
    """An imported model has the logits that transformers computes; its export is the same model."""
    tokens = torch.arange(2 * 48).view(2, 48) * 5 % 257
    expected = logits_of(tmp_path / "hf", kind, dtype, tokens)
    hf.main(["import", f"{tmp_path}/hf", f"{tmp_path}/run"])
    _, model = load_model(tmp_path / "run", torch.device("cpu"), wide(dtype))
    seen = []
    model.lm_head.register_forward_hook(lambda *call: seen.append(call[-1]))
    model(tokens, tokens)
    close(seen[0], expected, "logits", bound=1e-10 if dtype is FP64 else 1e-5)

    monkeypatch.setattr(hf, "SHARD_BYTES", 20_000)
    hf.main(["export", f"{tmp_path}/run", f"{tmp_path}/back"])
    assert (tmp_path / "back/model.safetensors.index.json").exists()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(after) is type(before)
    assert after.config.rope_parameters == before.config.rope_parameters
    assert after.state_dict().keys() == before.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor), name


def trained(step: str, flags: dict) -> list[float]:
    """Runs on every rank: train with a step's own `train`; returns the losses."""
    module = importlib.import_module(step)
    with Watch(module.Config(**flags)) as run:
        module.train(run.config, run)
    return [row["loss"] for row in run.history]


@pytest.mark.parametrize(
    "kind, text, step, flags",
    [
        (TIED, "tied=True,norm_eps=1e-3", "step04_tp_sp", dict(tp=2, zero="2", optimizer="sgd")),
        (MIXTRAL, "rope_theta=1e6,norm_eps=1e-4", "step07_moe_ep", dict(ep=2, experts=4)),
    ],
)
def test_two_ranks_train_an_imported_model(pools, tmp_path, kind, text, step, flags):
    """Training begins at step 0: the first loss is transformers'. --model may shorten seq_len."""
    path = tmp_path / "some.txt"
    path.write_text("All happy families are alike. " * 99)
    text = f"debug,dim=32,ffn_dim=24,seq_len=16,{text}"
    flags |= dict(model=text, dataset=str(path), global_batch_size=4, micro_batch_size=2, steps=2)
    flags |= dict(resume=f"{tmp_path}/run", out=f"{tmp_path}/out", device="cpu", dtype="fp64")
    tokens, targets = Data(str(path), hf.model_shape(text), 4, 0).batch(0)
    logits = logits_of(tmp_path / "hf", kind, FP64, tokens)
    hf.main(["import", f"{tmp_path}/hf", f"{tmp_path}/run", "--model", text])
    losses = pools(2).run(trained, step, flags)[0]
    assert len(losses) == 2
    close(losses[0], cross_entropy(logits.flatten(0, 1), targets.flatten()), "the first loss")


def test_a_published_shape_is_our_preset():
    """Llama 3.2's config.json, as the hub has it, gives our preset and its longer sequence."""
    sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64)
    sizes |= dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072)
    sizes |= dict(vocab_size=128256, tie_word_embeddings=True, rms_norm_eps=1e-05)
    rope = dict(rope_theta=500000.0, rope_scaling=LLAMA3 | dict(factor=32.0))
    config = AutoConfig.for_model("llama", **sizes, **rope)
    assert hf.flags_of(config, "") == dict(model="llama3.2-1b,seq_len=131072")
    assert hf.flags_of(config, "llama3.2-1b") == dict(model="llama3.2-1b")
    with pytest.raises(UserError, match="hidden_size is 2048, and with --model llama3-8b it is 4"):
        hf.flags_of(config, "llama3-8b")


@pytest.mark.parametrize(
    "change, problem",
    [
        (dict(model_type="qwen3"), "model_type is qwen3: only llama and mixtral"),
        (TIED | dict(attention_bias=True), "attention_bias is True"),
        (TIED | dict(head_dim=16), "head_dim is 16, and .* it is 8"),
        (TIED | dict(rope_parameters=LLAMA3 | dict(rope_type="yarn")), "rope_parameters is .*yarn"),
        (TIED | dict(rope_parameters=LLAMA3 | dict(low_freq_factor=2.0)), "low_freq_factor': 2.0"),
        (TIED | dict(num_key_value_heads=3), "n_kv_heads 3 must divide n_heads 4"),
        (MIXTRAL | dict(sliding_window=4096), "sliding_window is 4096"),
        (MIXTRAL | dict(num_experts_per_tok=1), "--experts-per-token 1: Mixtral does not"),
    ],
)
def test_a_model_that_our_decoder_does_not_compute_is_refused(change, problem):
    """Most of these would load, and then compute other numbers than their class does."""
    with pytest.raises(UserError, match=problem):
        hf.flags_of(AutoConfig.for_model(**SIZES | change), "")


@pytest.mark.parametrize(
    "flag, value", [("balance", "bias"), ("experts_per_token", 1), ("moe_every", 2)]
)
def test_a_run_that_mixtral_does_not_compute_is_not_exported(flag, value):
    """Mixtral would choose other experts, or weigh them otherwise."""
    with pytest.raises(UserError, match=f"{value}: Mixtral does not compute this"):
        hf.hf_config(vars(step07.Config()) | {flag: value})


def require_refused(folder: Path, problem: str):
    """Assert that a folder cannot be imported, because of this problem, and that no run is left."""
    run = folder.parent / "run"
    with pytest.raises(UserError, match=problem):
        hf.main(["import", str(folder), str(run)])
    assert not run.exists()


def test_damaged_folders_are_refused(tmp_path):
    """A tensor too few, too many or of another shape, or a file that is cut or missing."""
    folder = tmp_path / "hf"
    published(folder, TIED, torch.float32)
    path = min(folder.glob("*.safetensors"))
    content = path.read_bytes()
    tensors = load_file(path)
    first = min(tensors)
    changes = dict(mismatched={first: torch.ones(3)}, unexpected=dict(more=torch.ones(3)))
    for problem, change in changes.items():
        save_file(tensors | change, path, {"format": "pt"})
        require_refused(folder, f"{problem}_keys.*{min(change)}")
    save_file(dict(more=torch.ones(3)), path, {"format": "pt"})
    require_refused(folder, f"missing_keys.*{first}")
    path.write_bytes(content[:-1])
    require_refused(folder, "transformers cannot open")
    path.unlink()
    require_refused(folder, "transformers cannot open")
    with pytest.raises(UserError, match="exists: give a new folder"):
        hf.main(["export", str(folder), str(tmp_path)])
