"""Between checkpoints and Hugging Face's format: `python -m services.hub export | import`.

    export DIR OUT     the weights of a run (or checkpoint) DIR as config.json and model.safetensors, which
                       LlamaForCausalLM.from_pretrained(OUT) opens; in their dtype, tensor by tensor. Dense models only.
    import FOLDER OUT  config.json and *.safetensors of a Llama model as a checkpoint of step 0: start with it by
                       --resume OUT. There are no moments yet, and the data begins at the beginning.

Names and shapes are the same on both sides, so there is nothing to convert but the description of the model.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import UserError
from common.model import PRESETS, Decoder, ModelConfig
from services.boxes import Piece
from services.checkpoint import find
from services.flags import check_shape
from services.saver import Saver

SHARD_BYTES = 4 * 2**30  # no more is held in memory at once
FIELDS = {  # ours -> theirs
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
LLAMA3_ROPE = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def llama_config(m: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM of this shape; RoPE in the words of transformers 4 and of 5."""
    rope: dict[str, Any] = dict(rope_type="default")
    if m.rope_scaling != 1.0:
        rope = dict(rope_type="llama3", factor=m.rope_scaling, **LLAMA3_ROPE)
    return {theirs: getattr(m, ours) for ours, theirs in FIELDS.items()} | dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        head_dim=m.head_dim,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        rope_theta=m.rope_theta,
        rope_scaling=rope if m.rope_scaling != 1.0 else None,
        rope_parameters=dict(rope_theta=m.rope_theta, **rope),
        bos_token_id=None,
        eos_token_id=256 if m.vocab_size == 257 else None,  # the END of our byte tokens
        torch_dtype=dtype,
    )


def dense_shapes(m: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a dense decoder."""
    with torch.device("meta"):
        return {name: tuple(param.shape) for name, param in Decoder(m).named_parameters()}


def export(source: str, out: str) -> str:
    """Write the folder `out` from a run directory or checkpoint; returns what to say. Raises UserError."""
    found, folder = find(source, Path(source)), Path(out)
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    m = ModelConfig(**{key: value for key, value in found.meta["model"].items() if key in known})
    shapes = found.shapes("model")
    if shapes != dense_shapes(m):
        odd = sorted(shapes.keys() ^ dense_shapes(m).keys())[0]
        raise UserError(f"export {source}: only dense models fit LlamaForCausalLM; not {odd} (experts?)")
    dtype = next(iter(found.meta["tensors"]["model"].values()))["dtype"]
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        n_bytes = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        if shards[-1] and size + n_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n_bytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else ["model.safetensors"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, names in zip(files, shards, strict=True):
            save_file({name: found.full("model", name) for name in names}, folder / file, {"format": "pt"})
        if len(shards) > 1:
            weights = {name: file for file, names in zip(files, shards, strict=True) for name in names}
            total = sum((folder / file).stat().st_size for file in files)
            about = dict(metadata=dict(total_size=total), weight_map=weights)
            (folder / "model.safetensors.index.json").write_text(json.dumps(about, indent=1) + "\n")
        (folder / "config.json").write_text(json.dumps(llama_config(m, dtype), indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        raise UserError(f"export: {out} cannot be written ({error})") from error
    n = sum(torch.Size(shape).numel() for shape in shapes.values())
    return f"{found.path} (step {found.meta['step']}, {n:,} parameters, {dtype}) -> {folder}/"


def model_config(theirs: dict[str, Any], source: str) -> ModelConfig:
    """config.json -> the shape of a decoder. Raises UserError for what ours does not have."""

    def need(name: str, found: Any, *allowed: Any):
        if found not in allowed:
            raise UserError(f"import {source}: its {name} is {found}, this decoder knows only {allowed[0]}")

    need("model_type", theirs.get("model_type"), "llama")
    need("hidden_act", theirs.get("hidden_act", "silu"), "silu")
    for bias in ("attention_bias", "mlp_bias"):
        need(bias, theirs.get(bias, False), False)
    missing = [key for key in FIELDS.values() if key not in theirs and key not in DEFAULTS]
    if missing:
        raise UserError(f"import {source}: config.json does not say {', '.join(missing)}")
    values = {ours: theirs.get(key, DEFAULTS.get(key)) for ours, key in FIELDS.items()}
    values["n_kv_heads"] = values["n_kv_heads"] or values["n_heads"]
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    need("rope_type", kind, "default", "llama3")
    if kind == "llama3":
        for key, value in LLAMA3_ROPE.items():
            need(key, rope.get(key), value)
        values["rope_scaling"] = float(rope["factor"])
    values["rope_theta"] = float(rope.get("rope_theta", theirs.get("rope_theta", 10000.0)))
    try:
        m = check_shape(ModelConfig(**values))
    except (UserError, TypeError) as error:
        raise UserError(f"import {source}: {error}") from error
    need("head_dim", theirs.get("head_dim") or m.head_dim, m.head_dim)
    return m


DEFAULTS = dict(num_key_value_heads=None, tie_word_embeddings=False, rms_norm_eps=1e-6)  # those of LlamaConfig


def flags_for(m: ModelConfig, source: str) -> tuple[str, str]:
    """The preset nearest to a shape, and the command-line flags that make it that shape. Raises UserError."""
    fixed = ("rope_theta", "rope_scaling", "norm_eps")
    fitting = {k: p for k, p in PRESETS.items() if all(getattr(p, name) == getattr(m, name) for name in fixed)}
    if not fitting:
        known = sorted({tuple(getattr(p, name) for name in fixed) for p in PRESETS.values()})
        raise UserError(f"import {source}: no preset has its {fixed} {tuple(getattr(m, f) for f in fixed)}: {known} do")
    names = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in fixed]

    def differing(preset: str) -> list[str]:
        return [name for name in names if getattr(PRESETS[preset], name) != getattr(m, name)]

    preset, flags = min(fitting, key=lambda name: len(differing(name))), []
    for name in differing(preset):
        flag, value = name.replace("_", "-"), getattr(m, name)
        flags.append(f"--{flag} {value}" if not isinstance(value, bool) else f"--{flag}" if value else f"--no-{flag}")
    return preset, " ".join([f"--model {preset}", *flags])


def weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder's safetensors files that a decoder has. Raises UserError if one is missing or odd."""
    files = sorted(folder.glob("*.safetensors"))
    missing = set(shapes)
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                if (name == "lm_head.weight" and name not in shapes) or name.endswith("rotary_emb.inv_freq"):
                    continue  # a copy of the embedding, or a table
                tensor = file.get_tensor(name)
                if shapes.get(name) != tuple(tensor.shape):
                    raise UserError(f"import {folder}: {name} {list(tensor.shape)} does not fit config.json")
                missing.discard(name)
                yield name, tensor
    if missing:
        raise UserError(f"import {folder}: no *.safetensors file there has {sorted(missing)[0]}")


def import_weights(source: str, out: str) -> str:
    """Write a checkpoint of step 0 into run directory `out`; returns how to go on. Raises UserError."""
    folder, target = Path(source), Path(out)
    if target.exists():
        raise UserError(f"import: {out} exists already; give a new run directory")
    try:
        m = model_config(json.loads((folder / "config.json").read_text()), source)
        preset, flags = flags_for(m, source)
        pieces = [Piece("model", name, t.contiguous(), tuple(t.shape)) for name, t in weights(folder, dense_shapes(m))]
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise UserError(f"import {source}: its config.json or *.safetensors cannot be read ({error})") from error
    config = dict(model=preset, imported=str(folder))
    dtype = str(pieces[0].tensor.dtype)
    Saver(target).save(0, pieces, dict(config=config, model=dataclasses.asdict(m), dtype=dtype))
    n = sum(piece.tensor.numel() for piece in pieces)
    return f"{folder} ({n:,} parameters, {dtype[6:]}) -> {target}/; go on with {flags} --resume {target}"


def main(argv: list[str]):
    """The command line."""
    verbs = {"export": export, "import": import_weights}
    try:
        if len(argv) != 3 or argv[0] not in verbs:
            raise UserError("usage: python -m services.hub export DIR OUT, or import FOLDER OUT")
        print(verbs[argv[0]](*argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
