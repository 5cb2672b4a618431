"""Between checkpoints and Hugging Face's formats: `python -m extras.services.hub export | import`.

    export DIR OUT     the weights of a run (or checkpoint) DIR as config.json and model.safetensors, which
                       AutoModelForCausalLM.from_pretrained(OUT) opens; in the dtype that the run computed in
    import FOLDER OUT  config.json and *.safetensors of such a model as a checkpoint of step 0: start with it by
                       --resume OUT. There are no moments yet, and the data begins at the beginning

Three of their architectures compute what this decoder computes, number for number:

    Llama       no experts. Names and shapes are the same on both sides. SmolLM and SmolLM2 are of this kind
    Mistral     the same, where it has no sliding window; it is exported as Llama
    Mixtral     step 7: softmax over all experts, top-k, the gates of the chosen sum to 1

Mixtral's files have one tensor for each expert; ours has one for all, [experts, out, in]. A token that visits one
expert (its gate is p, not 1) has no place in Mixtral's format.
"""

import dataclasses
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import UserError
from common.model import PRESETS, Decoder, ModelConfig
from extras.services.boxes import Piece
from extras.services.checkpoint import Saver, find
from extras.services.shapes import check_shape, differing

SHARD_BYTES = 4 * 2**30  # no more is held in memory at once
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
}
EXPERT_SIZES = {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
EXPERT_NAMES = {  # the * is the number of an expert
    "mlp.router.": "block_sparse_moe.gate.",
    "mlp.experts.gate_proj.": "block_sparse_moe.experts.*.w1.",
    "mlp.experts.up_proj.": "block_sparse_moe.experts.*.w3.",
    "mlp.experts.down_proj.": "block_sparse_moe.experts.*.w2.",
}


class Format(NamedTuple):
    """One of their architectures."""

    architecture: str
    without: dict[str, Any]  # what the format could have, and the value that says that this model has not
    defaults: dict[str, Any]  # of keys that an old config.json may lack


OLD = dict(rms_norm_eps=1e-6, rope_theta=1e4)
FORMATS = {
    "llama": Format("LlamaForCausalLM", dict(attention_bias=False, mlp_bias=False), OLD),
    "mistral": Format("MistralForCausalLM", dict(sliding_window=None), OLD | dict(sliding_window=4096)),
    "mixtral": Format("MixtralForCausalLM", dict(sliding_window=None), dict(rms_norm_eps=1e-5, rope_theta=1e6)),
}
LLAMA3_ROPE = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


class Moe(NamedTuple):
    """Experts: none, or step 7's."""

    experts: int = 0
    experts_per_token: int = 0


def shapes_of(m: ModelConfig, experts: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by name. With `experts`, ffn_dim is their width."""
    with torch.device("meta"):
        shapes = {name: tuple(param.shape) for name, param in Decoder(m).named_parameters()}
    for name in [name for name in shapes if experts and ".mlp." in name]:
        layer, linear = name.split("mlp.")
        shapes[f"{layer}mlp.router.weight"] = (experts, m.dim)
        shapes[f"{layer}mlp.experts.{linear}"] = (experts, *shapes.pop(name))
    return shapes


class Theirs(NamedTuple):
    """A tensor of their files: ours that has it, and where in ours it is."""

    name: str
    whole_shape: tuple[int, ...]
    at: Any  # the number of an expert; or ..., for all of it

    @property
    def empty(self) -> Tensor:
        """One of its shape, without numbers."""
        return torch.empty(self.whole_shape, device="meta")[self.at].clone()


def theirs_of(m: ModelConfig, experts: int) -> dict[str, Theirs]:
    """All tensors of their files, by the names that they have there."""
    tensors = {}
    for name, shape in shapes_of(m, experts).items():
        theirs = name
        for ours, word in EXPERT_NAMES.items():
            theirs = theirs.replace(ours, word)
        for at in range(experts) if "*" in theirs else [...]:
            tensors[theirs.replace("*", str(at))] = Theirs(name, shape, at)
    return tensors


def config_of(m: ModelConfig, moe: Moe, dtype: str) -> dict[str, Any]:
    """config.json of a model; RoPE in the words of transformers 4 and of 5."""
    kind = "mixtral" if moe.experts else "llama"
    rope: dict[str, Any] = dict(rope_type="default")
    if m.rope_scaling != 1.0:
        rope = dict(rope_type="llama3", factor=m.rope_scaling, **LLAMA3_ROPE)
    sizes = {theirs: getattr(m, ours) for ours, theirs in SIZES.items()}
    sizes |= {theirs: getattr(moe, ours) for ours, theirs in EXPERT_SIZES.items() if moe.experts}
    return sizes | dict(
        **FORMATS[kind].without,
        architectures=[FORMATS[kind].architecture],
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


def export(source: str, out: str) -> str:
    """Write the folder `out` from a run directory or checkpoint; returns what to say. Raises UserError."""
    saved, folder = find(source, Path(source)), Path(out)
    index, m = saved.index, ModelConfig(**saved.index["model"])
    held = saved.shapes("master")
    routers = [shape[0] for name, shape in held.items() if name.endswith("router.weight")]
    moe = Moe(routers[0], index["config"]["experts_per_token"]) if routers else Moe()
    if routers:
        m = dataclasses.replace(m, ffn_dim=index["config"].get("expert_dim") or m.ffn_dim)
    if moe.experts_per_token == 1:
        raise UserError(f"export {source}: the gate of --experts-per-token 1 is p; in Hugging Face's formats it is 1")
    buffers = saved.shapes("buffer")
    if odd := sorted(name for name, _ in held.items() ^ shapes_of(m, moe.experts).items()) or sorted(buffers):
        raise UserError(f"export {source}: Llama's and Mixtral's formats have no place for {odd[0]}")
    said = index["dtype"].removeprefix("torch.").replace("auto", "float32")
    dtype, wanted = getattr(torch, said), theirs_of(m, moe.experts)
    empty = {theirs: one.empty.to(dtype) for theirs, one in wanted.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=SHARD_BYTES)
    whole = lru_cache(1)(lambda name: saved.whole("master", name).to(dtype))  # experts of one tensor come in turn
    if any(folder.glob("*.safetensors*")):  # files of two saves do not belong in one folder
        raise UserError(f"export: {out} has *.safetensors files already; give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, names in split.filename_to_tensors.items():
            tensors = {theirs: whole(wanted[theirs].name)[wanted[theirs].at].clone() for theirs in names}
            save_file(tensors, folder / file, {"format": "pt"})
        if split.is_sharded:
            summary = dict(metadata=split.metadata, weight_map=split.tensor_to_filename)
            (folder / "model.safetensors.index.json").write_text(json.dumps(summary, indent=1) + "\n")
        config = config_of(m, moe, said)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        raise UserError(f"export: {out} cannot be written ({error})") from error
    return f"{saved.path} (step {index['step']}, {said}) -> {folder}/, {config['architectures'][0]}"


def model_of(theirs: dict[str, Any], source: str) -> tuple[ModelConfig, Moe]:
    """config.json -> the shape of a decoder, and its experts. Raises UserError for what ours does not have."""

    def need(name: str, value: Any, *allowed: Any):
        if value not in allowed:
            known = " or ".join(map(str, allowed))
            raise UserError(f"import {source}: its {name} is {value!s:.80}, this decoder knows only {known}")

    kind = theirs.get("model_type")
    if kind not in FORMATS:
        known = f"{', '.join(FORMATS)}, without biases and without norms of queries and keys"
        raise UserError(f"import {source}: its model_type is {kind}, this decoder knows {known}")
    style, names = FORMATS[kind], SIZES | (EXPERT_SIZES if kind == "mixtral" else {})
    defaults = dict(num_key_value_heads=None, tie_word_embeddings=False) | style.defaults
    need("hidden_act", theirs.get("hidden_act", "silu"), "silu")
    need("quantization_config", theirs.get("quantization_config"), None)
    for key, value in style.without.items():
        need(key, theirs.get(key, defaults.get(key, value)), value)
    if missing := [key for key in names.values() if key not in theirs and key not in defaults]:
        raise UserError(f"import {source}: config.json does not say {', '.join(missing)}")
    values = {ours: theirs.get(key, defaults.get(key)) for ours, key in names.items()}
    values["n_kv_heads"] = values["n_kv_heads"] or values["n_heads"]
    moe = Moe(*(values.pop(name, 0) for name in EXPERT_SIZES))
    if moe.experts_per_token == 1:
        raise UserError(f"import {source}: its one expert a token has the gate 1, this decoder's has p")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default"))
    need("rope_type", scaled, "default", "llama3")
    if scaled == "llama3":
        for key, value in LLAMA3_ROPE.items():
            need(key, rope.get(key), value)
        values["rope_scaling"] = float(rope["factor"])
    values["rope_theta"] = float(rope.get("rope_theta", theirs.get("rope_theta", defaults["rope_theta"])))
    m = ModelConfig(**values)
    need("head_dim", theirs.get("head_dim") or m.head_dim, m.head_dim)
    check_shape(m)
    return m, moe


def flags_for(m: ModelConfig, moe: Moe) -> str:
    """The command-line flags of the nearest preset, and those that make it this shape."""
    preset = min(PRESETS, key=lambda name: len(differing(m, PRESETS[name]).split()))
    experts = [f"--experts {moe.experts} --experts-per-token {moe.experts_per_token}"] if moe.experts else []
    return " ".join(filter(None, [f"--model {preset}", differing(m, PRESETS[preset]), *experts]))


def files_of(folder: Path) -> dict[str, str]:
    """The file of each tensor: as the index says, else of all files that are there. Raises UserError if two have it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    for path in [single] if single.exists() else () if index.exists() else sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                if files.setdefault(name, path.name) != path.name:
                    raise UserError(f"import {folder}: {files[name]} and {path.name} both have {name}: keep one save")
    return files


def weights(folder: Path, m: ModelConfig, moe: Moe) -> list[Piece]:
    """Our tensors, from a folder's safetensors files. Raises UserError if one of theirs is missing or odd."""
    wanted, files, tensors = theirs_of(m, moe.experts), files_of(folder), {}
    if missing := sorted(wanted.keys() - files.keys()):
        raise UserError(f"import {folder}: no *.safetensors file there has {missing[0]} (.bin files are not read)")
    opened = lru_cache(lambda file: safe_open(folder / file, "pt"))
    for theirs, file in files.items():
        if theirs not in wanted and theirs.endswith(("lm_head.weight", "rotary_emb.inv_freq")):
            continue  # a copy of the embedding, or a table
        tensor, known = opened(file).get_tensor(theirs), wanted.get(theirs)
        if known is None or tensor.shape != known.empty.shape:
            raise UserError(f"import {folder}: {theirs} {list(tensor.shape)} does not fit config.json")
        whole = tensors.setdefault(known.name, tensor.new_empty(known.whole_shape))
        whole[known.at] = tensor
    return [Piece("master", name, whole, tuple(whole.shape)) for name, whole in tensors.items()]


def import_weights(source: str, out: str) -> str:
    """Write a checkpoint of step 0 into run directory `out`; returns how to go on. Raises UserError."""
    folder, target = Path(source), Path(out)
    if target.exists():
        raise UserError(f"import: {out} exists already; give a new run directory")
    try:
        m, moe = model_of(json.loads((folder / "config.json").read_text()), source)
        flags = flags_for(m, moe)
        pieces = weights(folder, m, moe)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ArithmeticError, SafetensorError) as error:
        raise UserError(f"import {source}: its config.json or *.safetensors cannot be read ({error})") from error
    dtype = next(str(piece.tensor.dtype) for piece in pieces if "embed_tokens" in piece.name)
    config = dict(model=flags.removeprefix("--model "), imported=str(folder), experts_per_token=moe.experts_per_token)
    Saver(target).save(0, pieces, dict(config=config, model=dataclasses.asdict(m), dtype=dtype, state={}))
    return f"{folder} ({dtype}) -> {target}/; go on{' in step 7' * bool(moe.experts)} with {flags} --resume {target}"


def main(argv: list[str]):
    """The command line."""
    verbs = {"export": export, "import": import_weights}
    try:
        if len(argv) != 3 or argv[0] not in verbs:
            raise UserError("usage: python -m extras.services.hub export DIR OUT, or import FOLDER OUT")
        print(verbs[argv[0]](*argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
