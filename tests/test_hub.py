"""Models with experts in Hugging Face's formats: the same fp64 logits there and back; what does not fit is refused.

Dense models are in test_checkpoint.py.
"""

import json
import re
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import step07_moe_ep as step07
from common import UserError
from common.model import Decoder
from common.moe import Balance, MoEConfig, add_experts
from services import hub
from services.boxes import Piece
from services.checkpoint import Checkpoint, find
from services.flags import parse
from services.saver import Saver
from tests.equivalence import SMALL, difference, without_instruments
from tests.test_model import rotary_in_fp64

BASE = SMALL | dict(model="tiny-moe", experts=4, expert_dim=12, steps=2, save_every=2, optimizer="adamw")
ALONE = dict(pp=1, cp=1, tp=1, ep=1)
MIXTRAL, ERNIE = "MixtralForCausalLM", "Ernie4_5_MoeForCausalLM"
TOKENS = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(0))


def train_on_rank(options: dict):
    """Runs on every rank: train and save."""
    with without_instruments():
        step07.train(step07.Config(**options))


def ours(found: Checkpoint) -> torch.Tensor:
    """The logits of our decoder with the weights of a checkpoint, in fp64."""
    m = MoEConfig(**found.meta["model"])
    model = Decoder(m)
    add_experts(model, Balance(m, 1, torch.device("cpu")))
    with torch.no_grad():
        for kind, named in (("model", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                stored = name in found.shapes(kind)
                tensor.data = found.full(kind, name).double() if stored else torch.zeros_like(tensor)
        return model.lm_head(model(TOKENS, torch.arange(m.seq_len)))


@contextmanager
def in_fp64():
    """Transformers computes norms and the router in fp32 even in an fp64 model: with this, in fp64."""
    wide = dict(float=torch.float64, float32=torch.float64)
    with mock.patch.multiple(torch, **wide), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def theirs(folder: Path, architecture: str, m: MoEConfig) -> torch.Tensor:
    """What transformers computes from a folder, in fp64 throughout."""
    transformers = pytest.importorskip("transformers")
    options = dict(dtype=torch.float64, experts_implementation="eager")  # PyTorch's grouped matmul has no fp64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert type(model).__name__ == architecture
    rotary_in_fp64(model.model.rotary_emb, m, None)
    stored = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    for name, param in model.named_parameters():
        if param.dtype != torch.float64 and name in stored:  # Ernie keeps its routers in fp32
            param.data = stored[name].double()
    with in_fp64(), torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.picked(0)
@pytest.mark.parametrize(
    "base, layout, architecture",
    [
        (dict(), dict(ep=2, tp=2, zero=3), MIXTRAL),
        (dict(shared_experts=2, dense_layers=1, balance="bias", bias_speed=0.1), {}, ERNIE),
        (dict(n_layers=4, moe_every=2, tied=True, expert_dim=0, experts_per_token=3), {}, ERNIE),
    ],
    ids=["mixtral", "ernie", "ernie-dense-between"],
)
def test_transformers_computes_the_same(pools, tmp_path, capsys, monkeypatch, base, layout, architecture):
    """From any layout: the same fp64 logits; importing it back gives the same bits, and step 7 goes on from there.

    A model of more than SHARD_BYTES is in several files.
    """
    monkeypatch.setattr(hub, "SHARD_BYTES", 200_000)
    options = BASE | ALONE | layout | base | dict(out=str(tmp_path / "run"))
    pools(4).run(train_on_rank, options) if layout else train_on_rank(options)
    found = find(str(tmp_path / "run"), tmp_path)
    hub.main(["export", str(tmp_path / "run"), str(tmp_path / "hf")])
    assert len([*(tmp_path / "hf").glob("model-0000?-of-0000?.safetensors")]) > 1
    assert difference(theirs(tmp_path / "hf", architecture, MoEConfig(**found.meta["model"])), ours(found)) < 1e-10
    hub.main(["import", str(tmp_path / "hf"), str(tmp_path / "again")])
    flags = re.search(r"go on in step 7 with (.*)", capsys.readouterr().out).group(1).split()
    again = find(str(tmp_path / "again"), tmp_path)
    assert parse(step07.Config, flags).model_config() == MoEConfig(**again.meta["model"])
    for kind in ("model", "buffer"):
        stored = again.shapes(kind)
        assert all(torch.equal(again.full(kind, name), found.full(kind, name)) for name in stored), kind
        left_out = found.shapes(kind).keys() - stored.keys()
        assert not any(found.full(kind, name).any() for name in left_out), left_out
    assert torch.equal(ours(again), ours(found))
    changed = {key: value for key, value in again.meta["model"].items() if key in ("ffn_dim", "expert_dim")}
    train_on_rank(options | ALONE | changed | dict(resume=str(tmp_path / "again"), out=str(tmp_path / "on")))


def random_model(kind: str, **more):
    """A model of transformers with weights of its own, large enough that experts matter."""
    transformers = pytest.importorskip("transformers")
    config, model = {
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[kind]
    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=259)
    sizes |= dict(intermediate_size=48, max_position_embeddings=16, initializer_range=0.2, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    return model(config(**sizes | more))


ERNIES = dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=12)
ERNIES |= dict(pad_token_id=None, rope_parameters=dict(rope_type="default", rope_theta=1e4))


@pytest.mark.parametrize(
    "kind, more, architecture",
    [
        ("mixtral", dict(num_local_experts=4, rope_parameters=dict(rope_type="default", rope_theta=1e6)), MIXTRAL),
        ("ernie4_5_moe", ERNIES | dict(moe_layer_start_index=1, moe_num_shared_experts=1), ERNIE),
    ],
)
def test_a_model_of_transformers_is_imported(tmp_path, kind, more, architecture):
    """Saved by transformers itself: the same fp64 logits."""
    random_model(kind, **more).save_pretrained(tmp_path / "hf")
    hub.main(["import", str(tmp_path / "hf"), str(tmp_path / "run")])
    found = find(str(tmp_path / "run"), tmp_path)
    assert difference(theirs(tmp_path / "hf", architecture, MoEConfig(**found.meta["model"])), ours(found)) < 1e-10


def save(folder: Path, biased: bool = False, **shape) -> Path:
    """A checkpoint of a model with experts and random weights, without training."""
    m = MoEConfig(32, 3, 4, 2, 48, vocab_size=259, seq_len=16, **dict(experts=4, expert_dim=12) | shape)
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for (kind, name), size in hub.shapes_of(m).items():
        scale = biased if kind == "buffer" else 0.2
        pieces.append(Piece(kind, name, scale * torch.randn(size, generator=generator), size))
    Saver(folder).save(1, pieces, dict(model=vars(m)))
    return folder


def test_what_ours_need_not_hold_is_passed_over(tmp_path):
    """A file of theirs may have a copy of a tied embedding, RoPE's table, a part that predicts more tokens."""
    hub.export(str(save(tmp_path / "run", tied=True)), str(tmp_path / "hf"))
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    more = ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.mtp.0.weight")
    save_file(load_file(file) | {name: torch.ones(3) for name in more}, file)
    hub.import_weights(str(tmp_path / "hf"), str(tmp_path / "again"))
    before, after = (find(str(tmp_path / name), tmp_path) for name in ("run", "again"))
    assert torch.equal(ours(after), ours(before))


@pytest.mark.parametrize("kind", hub.FORMATS)
def test_what_a_config_leaves_out_is_as_in_transformers(kind):
    """Values of keys that a config.json may lack, and of those that our decoder has not."""
    transformers = pytest.importorskip("transformers")
    style, config = hub.FORMATS[kind], transformers.CONFIG_MAPPING[kind]().to_dict()
    assumed = dict(tie_word_embeddings=False) | style.defaults | style.without
    assert {key: (config | config.get("rope_parameters", {}))[key] for key in assumed} == assumed


@pytest.mark.parametrize("part", ["rows", "names"])
def test_a_wrong_conversion_is_noticed(tmp_path, monkeypatch, part):
    """Rows of q_proj and k_proj left as they are; the two matrices into an expert exchanged."""
    if part == "rows":
        monkeypatch.setattr(hub, "swap_pairs", lambda weight, *_, **__: weight)
    else:
        names = hub.FORMATS["ernie4_5_moe"].names
        swapped = {"experts.gate_proj": "experts.*.up_proj", "experts.up_proj": "experts.*.gate_proj"}
        wrong = hub.FORMATS["ernie4_5_moe"]._replace(names=swapped | names)
        monkeypatch.setitem(hub.FORMATS, "ernie4_5_moe", wrong)
    found = find(str(save(tmp_path / "run", biased=True)), tmp_path)
    hub.export(str(tmp_path / "run"), str(tmp_path / "hf"))
    assert difference(theirs(tmp_path / "hf", ERNIE, MoEConfig(**found.meta["model"])), ours(found)) > 1e-3


@pytest.mark.parametrize(
    "shape, says",
    [
        (dict(experts_per_token=1), "--experts-per-token 1"),
        (dict(expert_groups=2, groups_per_token=1), "--groups-per-token"),
        (dict(dense_layers=1, moe_every=2), "--dense-layers 1 is no multiple of --moe-every 2"),
    ],
)
def test_what_their_formats_have_not_is_refused(tmp_path, shape, says):
    """In one line; nothing is written."""
    with pytest.raises(UserError, match=says) as error:
        hub.export(str(save(tmp_path / "run", **shape)), str(tmp_path / "hf"))
    assert "\n" not in str(error.value) and not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "kind, more, change, says",
    [
        ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12), {}, "qwen3_moe"),
        ("mixtral", dict(num_local_experts=4), dict(sliding_window=8), "its sliding_window is 8"),
        ("mixtral", dict(num_local_experts=4), dict(num_experts_per_tok=1), "has the gate 1, this decoder's has p"),
        ("ernie4_5_moe", ERNIES, dict(use_bias=True), "its use_bias is True"),
        ("ernie4_5_moe", ERNIES, dict(moe_layer_end_index=1), "its moe_layer_end_index is 1"),
        ("ernie4_5_moe", ERNIES, dict(moe_num_experts=3), "does not fit config.json"),
    ],
)
def test_what_ours_has_not_is_refused(tmp_path, kind, more, change, says):
    """Other architectures and options, in one line; no checkpoint is written."""
    random_model(kind, **more).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=says) as error:
        hub.import_weights(str(tmp_path / "hf"), str(tmp_path / "run"))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
