"""Converts a run's model to Hugging Face's files and back. It needs `transformers` 5.

    python -m extras.tools.hf export runs/step05_cp_ring hf_model
    python -m extras.tools.hf import hf_model runs/from_hf [--seq-len 512]

`export RUN FOLDER` writes the masters of RUN's last checkpoint (or of a checkpoint), which any
number of ranks saved in any layout, as config.json and model.safetensors, or as several such files
and their index if they are large. `AutoModelForCausalLM.from_pretrained(FOLDER)` opens them.

`import FOLDER RUN` writes the weights of such a folder as a checkpoint of step 0 into a new run
directory, which every step can `--resume` in any layout. Training then begins at step 0 with new
moments. The checkpoint records the model's flags, which a resumed run must keep, and no others.
No weight depends on the length of a sequence: `--seq-len` may shorten it.

Two classes of `transformers` compute what our decoder computes:

    LlamaForCausalLM      steps 1 to 6: the same names and shapes. SmolLM is such a model
    MixtralForCausalLM    step 7: softmax over all experts, then top-k,
                          and the scores of a token's experts are divided by their sum

Both commands hold the weights twice in the memory of one process. Both refuse, in one line, a model
for which the class and this course would compute different numbers.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, logging

from common import UserError
from common.checkpoint import pieces_of
from common.flags import Parser, spelled
from common.initial import materialize
from common.model import PRESETS, Decoder, ModelConfig, wide
from common.ranks import Ranks
from common.shapes import model_shape
from common.storage import save_checkpoint
from extras.start import start
from extras.tools.saved import build_model, load_model
from step01_single_gpu import Config, Optimizer

CPU = torch.device("cpu")
SHARD_BYTES = 4 * 2**30  # the most bytes in one file
SIZES = {  # a field of ModelConfig -> its key in config.json
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "seq_len": "max_position_embeddings",
}
EXPERT_SIZES = {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
FIXED = ["hidden_act", "attention_bias", "mlp_bias", "sliding_window", "quantization_config"]
FIXED += ["head_dim", "rope_parameters"]
MIXTRAL = {  # flags of step 7, and the values with which it computes what Mixtral does
    "experts_per_token": range(2, 2**31),  # the score of a single one is p here, and 1 there
    "balance": ["loss", "none"],
}
LLAMA3_ROPE = dict(  # `rope_tables` of common/model.py has these numbers
    low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def hf_config(flags: dict[str, Any]) -> Any:
    """The configuration of the class that computes what a run with these flags does.

    Raises UserError if there is none.
    """
    shape = model_shape(flags["model"])
    kind, sizes = "llama", {key: getattr(shape, field) for field, key in SIZES.items()}
    if "experts" in flags:
        for name, values in MIXTRAL.items():
            if flags.get(name, values[0]) not in values:
                raise UserError(f"{spelled(name)} {flags[name]}: Mixtral does not compute this")
        kind = "mixtral"
        sizes |= {key: flags[name] for name, key in EXPERT_SIZES.items()}
        sizes["intermediate_size"] = flags.get("expert_dim") or shape.ffn_dim
    rope: dict[str, Any] = dict(rope_type="default", rope_theta=shape.rope_theta)
    if shape.rope_scaling != 1.0:
        rope |= dict(rope_type="llama3", factor=shape.rope_scaling, **LLAMA3_ROPE)
    ids = dict(bos_token_id=None, eos_token_id=None)
    return AutoConfig.for_model(kind, rope_parameters=rope, head_dim=shape.head_dim, **sizes, **ids)


def model_text(shape: ModelConfig) -> str:
    """The shortest value of --model that has this shape: a preset, and changes."""
    texts = []
    for name, preset in PRESETS.items():
        changes = sorted(asdict(shape).items() - asdict(preset).items())
        texts.append(",".join([name, *(f"{field}={value}" for field, value in changes)]))
    return min(texts, key=len)


def flags_of(config: Any, seq_len: int) -> dict[str, Any]:
    """The flags of a run that computes what the class with this configuration does.

    `seq_len`: of the run; 0: the longest. Raises UserError if there are no such flags.
    """
    if config.model_type not in ("llama", "mixtral"):
        raise UserError(f"model_type is {config.model_type}: only llama and mixtral are known")
    rope = config.rope_parameters
    values = {field: getattr(config, key) for field, key in SIZES.items()}
    values |= dict(rope_theta=rope["rope_theta"], rope_scaling=rope.get("factor", 1.0))
    if seq_len:
        values["seq_len"] = seq_len
    flags = dict(model=model_text(ModelConfig(**values)))
    if config.model_type == "mixtral":
        flags |= {name: getattr(config, key) for name, key in EXPERT_SIZES.items()}
    own = hf_config(flags)
    for key in FIXED:
        found, value = getattr(config, key, None), getattr(own, key, None)
        if found not in (None, value):
            raise UserError(f"{key} is {found}, and with --model {flags['model']} it is {value}")
    return flags


def pairs(model: Decoder, hf_model: torch.nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors that both models have: yields ours and Hugging Face's, of the same shape."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    for name, param in hf_model.named_parameters():
        if name.endswith("gate_up_proj"):  # one tensor [experts, 2 out, in]
            gate, up = param.detach().chunk(2, dim=1)
            yield params[name.replace("gate_up_proj", "gate_proj.weight")], gate
            yield params[name.replace("gate_up_proj", "up_proj.weight")], up
        else:
            own = name.replace("mlp.gate.", "mlp.router.")
            own = own.replace("experts.down_proj", "experts.down_proj.weight")
            yield params[own], param.detach()


def export_model(run: Path, folder: Path):
    """Write the weights of a run or checkpoint into a folder, in fp32.

    Raises UserError if no class computes what the run does.
    """
    flags, model = load_model(run, CPU)
    hf_model = AutoModelForCausalLM.from_config(hf_config(flags), dtype=torch.float32)
    for own, other in pairs(model, hf_model):
        other.copy_(own)
    hf_model.save_pretrained(folder, max_shard_size=SHARD_BYTES)


def read_model(folder: Path) -> Any:
    """Open a folder with transformers, in the dtype of its files.

    Raises UserError if files are missing or damaged, or do not fit config.json.
    """
    options = dict(dtype="auto", local_files_only=True, output_loading_info=True)
    options |= dict(ignore_mismatched_sizes=True)  # they are among the problems
    wrong = OSError, ValueError, RuntimeError, StrictDataclassError, SafetensorError
    try:
        model, problems = AutoModelForCausalLM.from_pretrained(folder, **options)
    except wrong as error:
        raise UserError(f"transformers cannot open {folder}: {error}") from error
    if any(problems.values()):
        raise UserError(f"the weights do not fit config.json: {problems}")
    return model


def import_model(folder: Path, out: Path, seq_len: int):
    """Write a folder's model as a checkpoint of step 0 into a new run directory. Raises UserError.

    `seq_len`: of the run; 0: the longest.
    """
    hf_model = read_model(folder)
    flags = flags_of(hf_model.config, seq_len)
    model = build_model(flags)
    materialize(model, 0, CPU, wide(hf_model.dtype))
    for own, other in pairs(model, hf_model):
        own.copy_(other)
    content = dict(step=0, flags=flags, fingerprint="", history=[])
    pieces = pieces_of(model, Optimizer(model, Config()))  # no step was taken: no moments
    save_checkpoint(out / "checkpoints/step-00000000", content, pieces, Ranks())
    words = " ".join(f"{spelled(name)} {value}" for name, value in flags.items())
    print(f"resume it with {words} --resume {out}")


def main(argv: list[str]):
    """Run a command line. Raises UserError."""
    parser = Parser(prog="python -m extras.tools.hf", description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("export", "import"))
    parser.add_argument("source", type=Path, help="to export, a run or checkpoint; else a folder")
    parser.add_argument("target", type=Path, help="a new folder, or a new run directory")
    parser.add_argument("--seq-len", type=int, default=0, help="of import: the run's; 0: longest")
    given = parser.parse_args(argv)
    logging.set_verbosity_error()  # its warnings have many lines
    if given.target.exists():
        raise UserError(f"{given.target} exists: give a new folder")
    if given.verb == "export":
        export_model(given.source, given.target)
    else:
        import_model(given.source, given.target, given.seq_len)


if __name__ == "__main__":
    start(main)
