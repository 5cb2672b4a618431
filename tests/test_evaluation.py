"""Weights go to Hugging Face and come back: what it computes is what we do (services/hub.py)."""

import json
import re
from pathlib import Path

import pytest
import torch

import step07_moe_ep as step07
from common import UserError
from common.layout import materialize
from common.model import Decoder, ModelConfig
from common.trainer import parse
from services import evaluation, hub
from services.checkpoint import Checkpoint, find
from services.seam import compose
from tests.equal import SMALL, difference
from tests.rows import EXPERTS
from tests.test_checkpoint import train_on_rank
from tests.test_variants import Largest

OPTIONS = dict(steps=2, eval_every=2, eval_sequences=5, micro_batch_size=2, save_every=2)
MOE = EXPERTS | dict(aux_loss_coeff=0.0)


def test_logits_never_exist_as_a_whole(tmp_path, monkeypatch):
    """A validation's are those of a chunk, as a training step's; generation needs those of one token."""
    monkeypatch.setattr(evaluation.generate, "__defaults__", (3, 0))
    out = str(tmp_path / "run")
    for options, tokens in (
        (dict(out=out, loss_chunk=5), 5),
        (dict(out=str(tmp_path / "none"), resume=out, generate="x"), 1),
    ):
        with Largest() as largest:
            train_on_rank("step01_single_gpu", OPTIONS | options)
        assert largest.numel == tokens * SMALL["vocab_size"]


# --- Hugging Face

TOKENS = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(0))


def logits_of(found: Checkpoint) -> torch.Tensor:
    """The logits of our plain decoder with the weights of a checkpoint."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**found.index["model"]))
    materialize(model, 0, torch.device("cpu"), torch.float64)
    for name, param in model.named_parameters():
        param.data = found.whole("master", name).double()
    model.loss = lambda logits, _: logits
    with torch.no_grad():
        return model(TOKENS, TOKENS)


def there_and_back(tmp_path: Path, kind: str) -> tuple[Checkpoint, torch.nn.Module, str]:
    """Export a run's weights and import them again, which keeps all bits: (checkpoint, their model, where they are)."""
    transformers = pytest.importorskip("transformers")
    run, folder, again = (str(tmp_path / name) for name in ("run", "hf", "again"))
    hub.main(["export", run, folder])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == kind
    hub.main(["import", folder, again])
    found, imported = (find(where, tmp_path) for where in (run, again))
    for name in found.index["tensors"]["master"]:
        assert torch.equal(imported.whole("master", name), found.whole("master", name)), name
    return found, theirs, again


@pytest.mark.parametrize(
    "base", [dict(dtype="fp32", rope_scaling=8.0), dict(dtype="fp32", tied=True, n_kv_heads=4)], ids=str
)
def test_llama_computes_the_same(tmp_path, base, capsys, monkeypatch):
    """Exported: the same logits to what fp32 holds. Imported again: the same bits, and a run starts from them."""
    monkeypatch.setattr(hub, "SHARD_BYTES", 20_000)
    options = OPTIONS | base | dict(eval_every=0, eval_sequences=64)
    train_on_rank("step01_single_gpu", options | dict(out=str(tmp_path / "run")))
    found, theirs, again = there_and_back(tmp_path, "LlamaForCausalLM")
    with torch.no_grad():
        assert difference(theirs(TOKENS).logits, logits_of(found)) < 1e-5
    assert "go on with --model" in capsys.readouterr().out
    train_on_rank("step01_single_gpu", options | dict(out=str(tmp_path / "on"), resume=again))


def test_mixtral_there_and_back(pools, tmp_path, capsys):
    """From four ranks to Mixtral's files and back: the same bits, and the run's validation loss."""
    options = OPTIONS | MOE | dict(dtype="fp32", ep=2, tp=2, micro_batch_size=1, eval_sequences=8)
    history = pools(4).run(train_on_rank, "step07_moe_ep", options | dict(out=str(tmp_path / "run")))[0]
    found, theirs, again = there_and_back(tmp_path, "MixtralForCausalLM")
    data = evaluation.Data("", ModelConfig(**found.index["model"]), 24, 0)
    tokens, targets = evaluation.held_out(data, 8, 1)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    assert difference(loss, history[-1]["validation_loss"]) < 1e-5
    flags = re.search(r"go on in step 7 with (.*)", capsys.readouterr().out).group(1).split()
    config = parse(compose(step07), flags)
    assert config.experts == 4 and config.experts_per_token == 2 and config.resume == again


def test_what_cannot_be_converted_is_one_line(tmp_path):
    """Another architecture, a size left out, another scaling of RoPE."""
    m = ModelConfig(32, 3, 4, 2, 48, 259, 16)
    good = hub.config_of(m, hub.Moe(), "float32")
    assert hub.model_of(good, "x") == (m, hub.Moe())
    for change, says in [
        (dict(model_type="qwen3"), "its model_type is qwen3"),
        (dict(attention_bias=True), "its attention_bias is True"),
        (dict(rope_parameters=dict(rope_type="yarn")), "its rope_type is yarn"),
        (dict(head_dim=16), "its head_dim is 16"),
    ]:
        with pytest.raises(UserError, match=says):
            hub.model_of(good | change, "x")
    del good["hidden_size"]
    with pytest.raises(UserError, match="does not say hidden_size"):
        hub.model_of(good, "x")
    (tmp_path / "config.json").write_text(json.dumps(good | dict(hidden_size=32)))
    with pytest.raises(UserError, match=r"no \*.safetensors file there has lm_head"):
        hub.import_weights(str(tmp_path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
