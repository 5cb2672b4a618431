"""Weights go to Hugging Face and come back: what it computes is what we do (extras/services/hub.py)."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import step07_moe_ep as step07
from common import UserError
from common.comm import Mesh
from common.layout import materialize
from common.model import PRESETS, Decoder, ModelConfig
from common.trainer import parse
from extras.services import evaluation, hub, shapes
from extras.services.checkpoint import Checkpoint, find
from extras.services.seam import compose
from extras.tests.equal import SMALL, difference
from extras.tests.pool import error_of
from extras.tests.rows import EXPERTS
from extras.tests.test_checkpoint import train_on_rank
from extras.tests.test_variants import Largest

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


def logits_of(found: Checkpoint, config: object = None) -> torch.Tensor:
    """The logits of our plain decoder, or of step 7's, with the weights of a checkpoint."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**found.index["model"]))
    if config is not None:
        step07.shard_experts(model, Mesh(pp=1, dp=1, cp=1, tp=1), config)
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
    assert "has *.safetensors files already" in error_of(UserError, hub.export, run, folder)
    hub.main(["import", folder, again])
    found, imported = (find(where, tmp_path) for where in (run, again))
    for name in found.shapes("master"):
        assert torch.equal(imported.whole("master", name), found.whole("master", name)), name
    return found, theirs, again


@pytest.mark.parametrize(
    "base", [dict(dtype="fp32", rope_scaling=8.0), dict(dtype="fp32", tied=True, n_kv_heads=4)], ids=str
)
def test_llama_computes_the_same(tmp_path, base, monkeypatch):
    """Exported: the same logits to what fp32 holds. Imported again: the same bits, and a run starts from them."""
    monkeypatch.setattr(hub, "SHARD_BYTES", 20_000)
    options = OPTIONS | base | dict(eval_every=0, eval_sequences=64)
    train_on_rank("step01_single_gpu", options | dict(out=str(tmp_path / "run")))
    found, theirs, again = there_and_back(tmp_path, "LlamaForCausalLM")
    with torch.no_grad():
        assert difference(theirs(TOKENS).logits, logits_of(found)) < 1e-5
    train_on_rank("step01_single_gpu", options | dict(out=str(tmp_path / "on"), resume=again))


def test_mixtral_there_and_back(pools, tmp_path):
    """From four ranks to Mixtral's files and back: the same bits, and the run's validation loss."""
    options = OPTIONS | MOE | dict(dtype="fp32", ep=2, tp=2, micro_batch_size=1, eval_sequences=8)
    history = pools(4).run(train_on_rank, "step07_moe_ep", options | dict(out=str(tmp_path / "run")))[0]
    found, theirs, _ = there_and_back(tmp_path, "MixtralForCausalLM")
    data = evaluation.Data("", ModelConfig(**found.index["model"]), 24, 0)
    tokens, targets = evaluation.held_out(data, 8, 1)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    assert difference(loss, history[-1]["validation_loss"]) < 1e-5


PUBLISHED = {"Llama": dict(rope_theta=1e5, rms_norm_eps=1e-4, tie_word_embeddings=True)}  # as SmolLM2's
PUBLISHED |= {"Mistral": dict(sliding_window=None), "Mixtral": dict(rope_theta=1e6, num_local_experts=4)}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_models_compute_the_same(tmp_path, kind, capsys):
    """RoPE's base and RMSNorm's epsilon are flags: under those that import prints, our logits are theirs."""
    transformers = pytest.importorskip("transformers")
    sizes = {hub.SIZES[name]: value for name, value in SMALL.items()} | dict(initializer_range=0.2) | PUBLISHED[kind]
    shape = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(shape, experts_implementation="eager")
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=50_000)
    hub.main(["import", str(tmp_path / "hf"), str(tmp_path / "run")])
    config = parse(compose(step07), re.search(r"--model.*", capsys.readouterr().out).group().split())
    shapes.settle(config, 1)
    found = find(config.resume, tmp_path)
    assert PRESETS[config.model] == ModelConfig(**found.index["model"])
    with torch.no_grad():
        ours = logits_of(found, config if kind == "Mixtral" else None)
        assert difference(ours, theirs.double()(TOKENS).logits) < 1e-6


def test_the_index_says_which_files_count(tmp_path):
    """Files of an older save are not read; without an index, or if it names what is not there: one line."""
    m, source, out = ModelConfig(8, 1, 1, 1, 8, 9, 4), str(tmp_path), str(tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps(hub.config_of(m, hub.Moe(), "float32")))
    new, old = ({k: torch.full(shape, x) for k, shape in hub.shapes_of(m, 0).items()} for x in (1.0, 2.0))
    for name, tensors in dict(a=new, b=old, c=dict(x=torch.ones(1))).items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    assert "a.safetensors and b.safetensors both have" in error_of(UserError, hub.import_weights, source, out)
    for file, says in dict(c="does not contain tensor", d="No such file", a="").items():
        index = json.dumps(dict(weight_map=dict.fromkeys(new, f"{file}.safetensors")))
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert says in error_of(UserError, hub.import_weights, source, out)
    assert all(torch.equal(find(out, tmp_path).whole("master", name), tensor) for name, tensor in new.items())


def test_what_cannot_be_converted_is_one_line(tmp_path):
    """Another architecture, a size left out, another scaling of RoPE."""
    m = ModelConfig(32, 3, 4, 2, 48, 259, 16)
    good = hub.config_of(m, hub.Moe(), "float32")
    assert hub.model_of(good, "x") == (m, hub.Moe())
    for change, says in [
        (dict(model_type="qwen3"), "its model_type is qwen3.* without norms of queries and keys"),
        (dict(model_type="mistral"), "its sliding_window is 4096"),
        (dict(attention_bias=True), "its attention_bias is True"),
        (dict(quantization_config=dict(quant_method="awq")), "its quantization_config is .*awq"),
        (dict(rope_parameters=dict(rope_type="yarn")), "its rope_type is yarn, .* only default or llama3"),
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
