"""Between checkpoints and Hugging Face's formats: `python -m services.hub export | import`.

    export DIR OUT     the weights of a run (or checkpoint) DIR as config.json and model.safetensors, which
                       AutoModelForCausalLM.from_pretrained(OUT) opens; in their dtype, tensor by tensor.
    import FOLDER OUT  config.json and *.safetensors of such a model as a checkpoint of step 0: start with it by
                       --resume OUT. There are no moments yet, and the data begins at the beginning.

Three of their architectures compute what this decoder computes, number for number:

    Llama         no experts. Names and shapes are the same on both sides
    Mixtral       every layer has experts, and nothing else: softmax over all experts, top-k, the chosen sum to 1
    Ernie 4.5     the same with what Mixtral has not: shared experts, whose output is added plainly; a bias that chooses
    MoE           but does not weigh (--balance bias); layers without experts before, or between, those with experts

A model with experts is exported as Mixtral if it fits, else as Ernie 4.5 MoE. Files have one tensor for each expert;
ours has one for all, [experts, out, in]. Ernie's RoPE rotates neighbouring components, 2i and 2i+1, ours i and
i + head_dim/2: so the rows of q_proj and k_proj change places.

Not the same, and so not served: Qwen3-MoE and OLMoE normalise queries and keys (an RMSNorm is no identity, whatever its
weight); Qwen2-MoE multiplies shared experts by a sigmoid gate; DeepSeek has latent attention. A token that visits one
expert (gates p, not 1), and groups of experts, have no place in these formats.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import UserError
from common.model import PRESETS, Decoder, ModelConfig
from common.moe import MOE_PRESETS, Balance, MoEConfig, add_experts
from services.boxes import Piece
from services.checkpoint import find
from services.flags import check_shape
from services.saver import Saver

SHARD_BYTES = 4 * 2**30  # no more is held in memory at once
ALL = {  # ours -> theirs, in all formats
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "ffn_dim": "intermediate_size",
}


class Format(NamedTuple):
    """One of their architectures: what its config.json and its files call what is ours."""

    architecture: str
    fields: dict[str, str]  # ours -> theirs, besides ALL
    names: dict[str, str]  # parts of a tensor's name, ours -> theirs; the * is the number of an expert
    without: dict[str, Any]  # what the format could have, and the value that says that this model has not
    defaults: dict[str, Any]  # of keys that an old config.json may lack
    pairs: bool = False  # RoPE rotates components 2i and 2i+1


FORMATS = {
    "llama": Format(
        "LlamaForCausalLM",
        {},
        {},
        dict(attention_bias=False, mlp_bias=False),
        dict(rms_norm_eps=1e-6, rope_theta=1e4),
    ),
    "mixtral": Format(
        "MixtralForCausalLM",
        dict(experts="num_local_experts", experts_per_token="num_experts_per_tok"),
        {
            "mlp.router.": "block_sparse_moe.gate.",
            "mlp.experts.gate_proj.": "block_sparse_moe.experts.*.w1.",
            "mlp.experts.up_proj.": "block_sparse_moe.experts.*.w3.",
            "mlp.experts.down_proj.": "block_sparse_moe.experts.*.w2.",
        },
        dict(sliding_window=None),
        dict(rms_norm_eps=1e-5, rope_theta=1e6),
    ),
    "ernie4_5_moe": Format(
        "Ernie4_5_MoeForCausalLM",
        dict(
            experts="moe_num_experts",
            experts_per_token="moe_k",
            expert_dim="moe_intermediate_size",
            shared_experts="moe_num_shared_experts",
            dense_layers="moe_layer_start_index",
            moe_every="moe_layer_interval",
        ),
        {
            "mlp.router.bias": "mlp.moe_statics.e_score_correction_bias",
            "mlp.router.": "mlp.gate.",
            "mlp.experts.": "mlp.experts.*.",
        },
        dict(use_bias=False, moe_norm_min=1e-12),
        dict(rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True),
        pairs=True,
    ),
}
LLAMA3_ROPE = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def format_of(m: MoEConfig, biased: bool, source: str) -> tuple[str, MoEConfig]:
    """Their model type for a decoder, and its shape in their terms. `biased`: some router has a bias. UserError."""
    moe = [m.has_experts(layer) for layer in range(m.n_layers)]
    if not any(moe):
        return "llama", m
    if m.experts_per_token == 1:
        raise UserError(f"export {source}: the gate of --experts-per-token 1 is p; in Hugging Face's formats it is 1")
    if 0 < m.groups_per_token < m.expert_groups:
        raise UserError(f"export {source}: Hugging Face's formats for this router have no --groups-per-token")
    if all(moe) and not m.shared_experts and not biased:
        return "mixtral", replace(m, ffn_dim=m.expert_width, expert_dim=0)
    if m.dense_layers % m.moe_every:
        raise UserError(f"export {source}: --dense-layers {m.dense_layers} is no multiple of --moe-every {m.moe_every}")
    return "ernie4_5_moe", replace(m, expert_dim=m.expert_width)


def config_of(kind: str, m: MoEConfig, dtype: str) -> dict[str, Any]:
    """config.json of a model of this type and shape; RoPE in the words of transformers 4 and of 5."""
    style = FORMATS[kind]
    rope: dict[str, Any] = dict(rope_type="default")
    if m.rope_scaling != 1.0:
        rope = dict(rope_type="llama3", factor=m.rope_scaling, **LLAMA3_ROPE)
    return {theirs: getattr(m, ours) for ours, theirs in (ALL | style.fields).items()} | dict(
        **style.without,
        architectures=[style.architecture],
        model_type=kind,
        head_dim=m.head_dim,
        hidden_act="silu",
        rope_theta=m.rope_theta,
        rope_scaling=rope if m.rope_scaling != 1.0 else None,
        rope_parameters=dict(rope_theta=m.rope_theta, **rope),
        bos_token_id=None,
        eos_token_id=256 if m.vocab_size == 257 else None,  # the END of our byte tokens
        pad_token_id=None,
        torch_dtype=dtype,
    )


def shapes_of(m: ModelConfig) -> dict[tuple[str, str], tuple[int, ...]]:
    """Shapes of a decoder's parameters and buffers by (kind, name), kinds as in checkpoints."""
    with torch.device("meta"):
        model = Decoder(m)
        if getattr(m, "experts", 0):
            add_experts(model, Balance(m, 1, torch.device("meta")))
    found = {("model", name): tuple(param.shape) for name, param in model.named_parameters()}
    return found | {("buffer", name): tuple(buffer.shape) for name, buffer in model.named_buffers()}


def their_names(name: str, m: MoEConfig, style: Format) -> list[str]:
    """What their files call one of our tensors: one name, or one for each expert."""
    for ours, theirs in style.names.items():
        if ours in name:
            name = name.replace(ours, theirs)
            return [name.replace("*", str(e)) for e in range(m.experts)] if "*" in name else [name]
    return [name]


def swap_pairs(weight: Tensor, name: str, m: ModelConfig, back: bool) -> Tensor:
    """Rows of q_proj and k_proj [heads x head_dim, dim]: component h head_dim/2 + i of a head <-> 2 i + h."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    halves = (m.head_dim // 2, 2) if back else (2, m.head_dim // 2)
    return weight.view(-1, *halves, m.dim).transpose(1, 2).reshape(weight.shape)


def to_theirs(name: str, full: Tensor, m: MoEConfig, style: Format) -> dict[str, Tensor]:
    """One of our tensors as theirs, by name: each in memory of its own."""
    names = their_names(name, m, style)
    full = swap_pairs(full, name, m, back=False) if style.pairs else full
    parts = full if len(names) > 1 else [full[None] if name.endswith("router.bias") else full]
    return {theirs: part.clone() for theirs, part in zip(names, parts, strict=True)}


def export(source: str, out: str) -> str:
    """Write the folder `out` from a run directory or checkpoint; returns what to say. Raises UserError."""
    found, folder = find(source, Path(source)), Path(out)
    known = {field.name for field in dataclasses.fields(MoEConfig)}
    m = MoEConfig(**{key: value for key, value in found.meta["model"].items() if key in known})
    held = {(kind, name): shape for kind in ("model", "buffer") for name, shape in found.shapes(kind).items()}
    if odd := sorted(name for (kind, name), shape in held.items() ^ shapes_of(m).items() if kind == "model"):
        raise UserError(f"export {source}: {odd[0]} does not fit the model that its meta.json describes")
    biases = [name for kind, name in held if kind == "buffer"]
    kind, m = format_of(m, any(found.full("buffer", name).any() for name in biases), source)
    about, style = found.meta["tensors"], FORMATS[kind]
    wanted = [key for key in held if key[0] == "model" or kind == "ernie4_5_moe"]
    shards: list[list[tuple[str, str]]] = [[]]
    size = 0
    for group, name in wanted:
        n_bytes = torch.Size(held[group, name]).numel() * getattr(torch, about[group][name]["dtype"]).itemsize
        if shards[-1] and size + n_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((group, name))
        size += n_bytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else ["model.safetensors"]
    dtype, files_of = about["model"]["model.embed_tokens.weight"]["dtype"], {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, keys in zip(files, shards, strict=True):
            tensors: dict[str, Tensor] = {}
            for group, name in keys:
                tensors |= to_theirs(name, found.full(group, name), m, style)
            save_file(tensors, folder / file, {"format": "pt"})
            files_of |= dict.fromkeys(tensors, file)
        if len(shards) > 1:
            total = sum((folder / file).stat().st_size for file in files)
            summary = dict(metadata=dict(total_size=total), weight_map=files_of)
            (folder / "model.safetensors.index.json").write_text(json.dumps(summary, indent=1) + "\n")
        (folder / "config.json").write_text(json.dumps(config_of(kind, m, dtype), indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        raise UserError(f"export: {out} cannot be written ({error})") from error
    n = sum(torch.Size(shape).numel() for (group, _), shape in held.items() if group == "model")
    return f"{found.path} (step {found.meta['step']}, {n:,} parameters, {dtype}) -> {folder}/, {style.architecture}"


def model_config(theirs: dict[str, Any], source: str) -> ModelConfig:
    """config.json -> the shape of a decoder. Raises UserError for what ours does not have."""

    def need(name: str, found: Any, *allowed: Any):
        if found not in allowed:
            raise UserError(f"import {source}: its {name} is {found}, this decoder knows only {allowed[0]}")

    if theirs.get("model_type") not in FORMATS:
        kinds = ", ".join(FORMATS)
        raise UserError(f"import {source}: its model_type is {theirs.get('model_type')}, this decoder knows {kinds}")
    style = FORMATS[theirs["model_type"]]
    defaults = dict(num_key_value_heads=None, tie_word_embeddings=False) | style.defaults
    need("hidden_act", theirs.get("hidden_act", "silu"), "silu")
    for key, value in style.without.items():
        need(key, theirs.get(key, value), value)
    names = ALL | style.fields
    missing = [key for key in names.values() if key not in theirs and key not in defaults]
    if missing:
        raise UserError(f"import {source}: config.json does not say {', '.join(missing)}")
    values = {ours: theirs.get(key, defaults.get(key)) for ours, key in names.items()}
    values["n_kv_heads"] = values["n_kv_heads"] or values["n_heads"]
    if values.get("experts_per_token") == 1:
        raise UserError(f"import {source}: its one expert a token has the gate 1, this decoder's has p")
    if "dense_layers" in values:  # theirs: layers from here on, if (number + 1) % moe_every == 0
        values["dense_layers"] -= values["dense_layers"] % values["moe_every"]
        need("moe_layer_end_index", theirs.get("moe_layer_end_index", -1), -1, values["n_layers"] - 1)
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default"))
    need("rope_type", scaled, "default", "llama3")
    if scaled == "llama3":
        for key, value in LLAMA3_ROPE.items():
            need(key, rope.get(key), value)
        values["rope_scaling"] = float(rope["factor"])
    values["rope_theta"] = float(rope.get("rope_theta", theirs.get("rope_theta", defaults["rope_theta"])))
    try:
        m = check_shape((MoEConfig if "experts" in values else ModelConfig)(**values))
    except (UserError, TypeError) as error:
        raise UserError(f"import {source}: {error}") from error
    need("head_dim", theirs.get("head_dim") or m.head_dim, m.head_dim)
    return m


def flags_for(m: ModelConfig, source: str) -> tuple[str, str]:
    """The preset nearest to a shape, and the command-line flags that make it that shape. Raises UserError."""
    fixed, presets = ("rope_theta", "rope_scaling", "norm_eps"), MOE_PRESETS if hasattr(m, "experts") else PRESETS
    fitting = {k: p for k, p in presets.items() if all(getattr(p, name) == getattr(m, name) for name in fixed)}
    if not fitting:
        known = sorted({tuple(getattr(p, name) for name in fixed) for p in presets.values()})
        raise UserError(f"import {source}: no preset has its {fixed} {tuple(getattr(m, f) for f in fixed)}: {known} do")
    names = [f.name for f in dataclasses.fields(m) if f.name not in fixed]

    def differing(preset: str) -> list[str]:
        return [name for name in names if getattr(presets[preset], name) != getattr(m, name)]

    preset, flags = min(fitting, key=lambda name: len(differing(name))), []
    for name in differing(preset):
        flag, value = name.replace("_", "-"), getattr(m, name)
        flags.append(f"--{flag} {value}" if not isinstance(value, bool) else f"--{flag}" if value else f"--no-{flag}")
    return preset, " ".join([f"--model {preset}", *flags])


def weights(folder: Path, m: ModelConfig, style: Format) -> Iterator[Piece]:
    """The tensors of a folder's safetensors files, as parts of ours. Raises UserError if one is missing or odd."""
    files = sorted(folder.glob("*.safetensors"))
    wanted = {  # their name -> kind, name and shape of the tensor of ours that has it, and which part of that it is
        theirs: (kind, name, shape, part)
        for (kind, name), shape in shapes_of(m).items()
        if kind == "model" or style is FORMATS["ernie4_5_moe"]
        for part, theirs in enumerate(their_names(name, m, style))
    }
    missing = set(wanted)
    for path in files:
        with safe_open(path, "pt") as file:
            for theirs in file.keys():  # noqa: SIM118  # not a dict
                tied = theirs == "lm_head.weight" and theirs not in wanted
                if tied or theirs.endswith("rotary_emb.inv_freq") or "mtp" in theirs:
                    continue  # a copy of the embedding, a table, or a part that predicts more tokens than the next
                tensor, (kind, name, shape, part) = file.get_tensor(theirs), wanted.get(theirs, ("", "", (), 0))
                expected = shape[1:] if ".mlp.experts." in name else (1, *shape) if kind == "buffer" else shape
                if not name or tuple(tensor.shape) != expected:
                    raise UserError(f"import {folder}: {theirs} {list(tensor.shape)} does not fit config.json")
                missing.discard(theirs)
                tensor = swap_pairs(tensor, name, m, back=True) if style.pairs else tensor
                yield Piece(kind, name, tensor.contiguous(), shape, start=part * tensor.numel())
    if missing:
        raise UserError(f"import {folder}: no *.safetensors file there has {sorted(missing)[0]}")


def import_weights(source: str, out: str) -> str:
    """Write a checkpoint of step 0 into run directory `out`; returns how to go on. Raises UserError."""
    folder, target = Path(source), Path(out)
    if target.exists():
        raise UserError(f"import: {out} exists already; give a new run directory")
    try:
        theirs = json.loads((folder / "config.json").read_text())
        m = model_config(theirs, source)
        preset, flags = flags_for(m, source)
        pieces = list(weights(folder, m, FORMATS[theirs["model_type"]]))
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise UserError(f"import {source}: its config.json or *.safetensors cannot be read ({error})") from error
    config = dict(model=preset, imported=str(folder))
    dtype = next(str(piece.tensor.dtype) for piece in pieces if "embed_tokens" in piece.name)
    Saver(target).save(0, pieces, dict(config=config, model=dataclasses.asdict(m), dtype=dtype))
    n = sum(piece.tensor.numel() for piece in pieces if piece.kind == "model")
    step = " in step 7" * hasattr(m, "experts")
    return f"{folder} ({n:,} parameters, {dtype[6:]}) -> {target}/; go on{step} with {flags} --resume {target}"


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
