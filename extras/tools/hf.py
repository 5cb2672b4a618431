"""Converts checkpoints to Hugging Face's formats and back: `python -m extras.tools.hf export | import`.

    export DIR OUT     write the weights of a run (or checkpoint) DIR, in the dtype that it computed in, as config.json
                       and model.safetensors into OUT, which AutoModelForCausalLM.from_pretrained(OUT) opens
    import FOLDER OUT  write such a model's config.json and *.safetensors into a new run OUT, as a checkpoint of step 0;
                       --resume OUT starts a run from it, without moments and at the beginning of the data

Both commands hold all weights in host memory. Two architectures compute the same numbers as the course's decoder:

    Llama       no experts. Names and shapes are the same on both sides. SmolLM and SmolLM2 are of this kind
    Mixtral     step 7: softmax over all experts, then top-k; the gates of the chosen experts sum to 1

Mixtral's files have one tensor for each expert; ours have one for all, [experts, out, in]. A model with one expert per
token cannot be exported: step 7 multiplies the expert's output by its probability p, while Mixtral multiplies it by 1.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from common import UserError
from common.model import PRESETS, Decoder, ModelConfig
from extras.services.checkpoint import Saver, find
from extras.services.pieces import Piece
from extras.services.shapes import check_shape, differing
from extras.plan.shapes import Shape, shape_of

SHARD_BYTES = 4 * 2**30  # the most bytes in one file
SIZES = {  # ours -> theirs
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "ffn_dim": "intermediate_size",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
NAMES = {  # the * is the number of an expert
    "mlp.router.": "block_sparse_moe.gate.",
    "mlp.experts.gate_proj.": "block_sparse_moe.experts.*.w1.",
    "mlp.experts.up_proj.": "block_sparse_moe.experts.*.w3.",
    "mlp.experts.down_proj.": "block_sparse_moe.experts.*.w2.",
}
FIXED = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, sliding_window=None)  # the only values supported
OLD = dict(num_key_value_heads=None, tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=1e4)
KINDS = {  # by model_type: the defaults of keys that a config.json lacks
    "llama": FIXED | OLD | dict(num_local_experts=0, num_experts_per_tok=0),
    "mixtral": FIXED | OLD | dict(rms_norm_eps=1e-5, rope_theta=1e6),
}
LLAMA3_ROPE = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def shapes_of(m: Shape) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters by name. Experts' parameters are [experts, out, in]; `m.ffn_dim` is an expert's width."""
    with torch.device("meta"):
        shapes = {name: tuple(param.shape) for name, param in Decoder(m).named_parameters()}
    for name in [name for name in shapes if m.experts and ".mlp." in name]:
        layer, linear = name.split("mlp.")
        shapes[f"{layer}mlp.router.weight"] = (m.experts, m.dim)
        shapes[f"{layer}mlp.experts.{linear}"] = (m.experts, *shapes.pop(name))
    return shapes


def names_of(name: str, experts: int) -> list[str]:
    """The names of one of our parameters in Hugging Face's files: one name, or one for each expert."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return [name.replace("*", str(n)) for n in range(experts)] if "*" in name else [name]


def config_of(m: Shape, dtype: str) -> dict[str, Any]:
    """The config.json of a model. It describes RoPE twice, for version 4 and for version 5 of `transformers`."""
    kind = "mixtral" if m.experts else "llama"
    rope: dict[str, Any] = dict(rope_type="default")
    if m.rope_scaling != 1.0:
        rope = dict(rope_type="llama3", factor=m.rope_scaling, **LLAMA3_ROPE)
    sizes = {theirs: getattr(m, ours) for ours, theirs in SIZES.items() if m.experts or "expert" not in ours}
    return dict(
        **sizes,
        **FIXED,
        architectures=[f"{kind.capitalize()}ForCausalLM"],
        model_type=kind,
        head_dim=m.head_dim,
        rope_theta=m.rope_theta,
        rope_scaling=rope if m.rope_scaling != 1.0 else None,
        rope_parameters=dict(rope_theta=m.rope_theta, **rope),
        bos_token_id=None,
        eos_token_id=256 if m.vocab_size == 257 else None,  # the END of our byte tokens
        pad_token_id=None,
        torch_dtype=dtype,
    )


def export(source: str, out: str) -> str:
    """Write the weights of a run (or checkpoint) into folder `out`; returns a line to print. Raises UserError."""
    found, folder = find(source, Path(source)), Path(out)
    index, held = found.index, found.shapes("master")
    m = shape_of(ModelConfig(**index["model"]), SimpleNamespace(**index["config"]))
    m = replace(m, ffn_dim=m.expert_width)
    if m.experts_per_token == 1:
        raise UserError("the gate of --experts-per-token 1 is p; in Hugging Face's formats it is 1")
    if odd := sorted(held.keys() ^ shapes_of(m).keys()) or sorted(found.shapes("buffer")):
        raise UserError(f"Llama's and Mixtral's formats have no place for {odd[0]}")
    if any(folder.glob("*.safetensors*")):  # files of two saves do not belong in one folder
        raise UserError(f"{folder} has *.safetensors files already; give a new folder")
    dtype, tensors = index["dtype"].removeprefix("torch.").replace("auto", "float32"), {}
    for name in held:
        whole = found.whole("master", name).to(getattr(torch, dtype))
        parts = whole if whole.dim() == 3 else [whole]
        tensors |= {theirs: part.clone() for theirs, part in zip(names_of(name, m.experts), parts, strict=True)}
    config = config_of(m, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD_BYTES)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return f"{found.path} (step {index['step']}, {dtype}) -> {folder}/, {config['architectures'][0]}"


def model_of(config: dict[str, Any]) -> Shape:
    """Read a model's shape from its config.json. Raises UserError if the course's decoder cannot compute this model."""

    def need(name: str, value: Any, *allowed: Any):
        if value not in allowed:
            known = " or ".join(map(str, allowed))
            raise UserError(f"its {name} is {value!s:.80}, this decoder knows only {known}")

    need("model_type", config.get("model_type"), *KINDS)
    theirs = KINDS[config["model_type"]] | config
    for key, value in (FIXED | dict(quantization_config=None)).items():
        need(key, theirs.get(key), value)
    values = {ours: theirs[key] for ours, key in SIZES.items()}
    values["n_kv_heads"] = values["n_kv_heads"] or values["n_heads"]
    if values["experts_per_token"] == 1:
        raise UserError("its one expert a token has the gate 1, this decoder's has p")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default"))
    need("rope_type", scaled, "default", "llama3")
    if scaled == "llama3":
        for key, value in LLAMA3_ROPE.items():
            need(key, rope.get(key), value)
        values["rope_scaling"] = float(rope["factor"])
    m = Shape(**values, rope_theta=float(rope.get("rope_theta", theirs["rope_theta"])))
    need("head_dim", theirs.get("head_dim") or m.head_dim, m.head_dim)
    check_shape(m)
    return m


def weights(folder: Path, m: Shape) -> list[Piece]:
    """Read all weights in `folder`, from model.safetensors or from the files that an index names. Raises UserError."""
    index, files, theirs = folder / "model.safetensors.index.json", {"model.safetensors"}, {}
    if index.exists():
        files = {*json.loads(index.read_text())["weight_map"].values()}
    for name in files:
        theirs |= load_file(folder / name)
    pieces = []
    for name, shape in shapes_of(m).items():
        parts = [theirs.pop(one) for one in names_of(name, m.experts)]
        if any(part.shape != shape[-2:] for part in parts):
            raise UserError(f"{name} {list(parts[0].shape)} does not fit config.json")
        pieces.append(Piece("master", name, torch.stack(parts) if len(shape) == 3 else parts[0], shape))
    known = "lm_head.weight", "rotary_emb.inv_freq"  # a copy of the embedding, and a table
    if odd := [name for name in theirs if not name.endswith(known)]:
        raise UserError(f"this decoder has no place for {odd[0]}")
    return pieces


def import_weights(source: str, out: str) -> str:
    """Write a model as a checkpoint of training step 0 into run directory `out`; returns a line to print."""
    folder, target = Path(source), Path(out)
    if target.exists():
        raise UserError(f"{out} exists already; give a new run directory")
    m = model_of(json.loads((folder / "config.json").read_text()))
    pieces = weights(folder, m)
    preset = min(PRESETS, key=lambda name: len(differing(m, PRESETS[name]).split()))
    flags = f"{preset} {differing(m, PRESETS[preset])}".strip()
    flags += f" --experts {m.experts} --experts-per-token {m.experts_per_token}" * bool(m.experts)
    dtype = next(str(piece.tensor.dtype) for piece in pieces if "embed_tokens" in piece.name)
    config = dict(model=flags, experts=m.experts, experts_per_token=m.experts_per_token)
    about = dict(config=config, dtype=dtype, state={})
    about["model"] = {name: getattr(m, name) for name in ModelConfig.__dataclass_fields__}
    Saver(target).save(0, pieces, about)
    where = f"{folder} ({dtype}) -> {target}/; continue{' in step 7' * bool(m.experts)}"
    return f"{where} with --model {flags} --resume {target}"


def convert(verb: str, source: str, out: str) -> str:
    """Export or import, as `verb` says; returns a line to print. Raises UserError if a file is missing or wrong."""
    try:
        return dict(export=export, **{"import": import_weights})[verb](source, out)
    except UserError as error:
        raise UserError(f"{verb} {source}: {error}") from error
    except KeyError as error:
        raise UserError(f"{verb} {source}: config.json or model.safetensors lacks {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, SafetensorError) as error:
        raise UserError(f"{verb} {source}: a file cannot be read or written ({error})") from error


if __name__ == "__main__":
    try:
        if len(sys.argv) != 4 or sys.argv[1] not in ("export", "import"):
            raise UserError("usage: python -m extras.tools.hf export DIR OUT, or import FOLDER OUT")
        print(convert(*sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
