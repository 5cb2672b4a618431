"""Values to try of every flag: menus and choices offer theirs, numbers and texts stand in a table here.

PLAIN     where nothing else is said of a flag; each dimension has two ranks, and each rank two micro-batches
NUMBERS   ordinary values, ends of ranges, and such as are refused; of menus: instead of all that they offer
WITH      what else a flag's values, or one of them, need to matter
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

PLAIN = dict(
    model="debug", dim=16, n_heads=4, n_kv_heads=2, ffn_dim=16, vocab_size=259, seq_len=16, n_layers=4, device="cpu"
) | dict(global_batch_size=8, micro_batch_size=2, steps=2, pp=2, cp=2, tp=2, ep=2, experts=4, peak_tflops=1.0)

NUMBERS = dict(
    aux_loss_coeff=[0.0],
    bias_speed=[0.1],
    bucket_mb=[0.0, 0.001],
    capacity_factor=[0.5, 1.5],
    check_replicas=[1],
    chunks=[1, 3],
    cp=[1, 4],
    dataset=["no.txt"],
    dense_layers=[1, 9],
    dim=[30, 32],
    end_token=[5, 9999],
    ep=[1, 4],
    eval_every=[0, 1],
    eval_sequences=[2],
    expert_dim=[8],
    expert_groups=[2, 3],
    experts=[3, 8],
    experts_per_token=[1, 4, 9],
    ffn_dim=[24, 25],
    generate=["def"],
    global_batch_size=[3, 4],
    gpu=["a100-80", "none"],
    grad_clip=[0.0],
    groups_per_token=[1],
    loss_chunk=[16],
    lr=[1.0],
    micro_batch_size=[1, 4],
    model=["tiny", "tiny-moe", "deepseek-v3-like"],  # the others differ in sizes only
    moe_every=[2, 9],
    n_heads=[2, 3],
    n_kv_heads=[1, 4],
    n_layers=[1, 5],
    out=["elsewhere"],
    peak_tflops=[2.0],
    pp=[1, 4],
    pp_split=["cost", "1,3", "2", "x"],
    profile_memory=[2],
    rank=["0", "99", "x"],
    resume=["auto", "nowhere"],
    save_every=[0, 1],
    seed=[1],
    seq_len=[17, 32],
    shared_experts=[1],
    skip_spikes=[0.5, 3.0],
    steps=[1],
    stop_after=[1],
    tied=[True, False],
    timeout=[0.1],
    topk_fraction=[0.5, 2.0],
    tp=[1, 4],
    vocab_size=[257],
    warmup_steps=[0],
    weight_decay=[0.0],
    z_loss=[0.1],
    zb_costs=["1,1,1,0.5", "1", "x,1,1,1"],
    zb_memory=[0.1, 2.0],
    zero_replicas=[2, 3],
)

WITH = dict(
    bias_speed=dict(balance="bias"),
    chunks=dict(schedule="interleaved", n_layers=6),
    groups_per_token=dict(expert_groups=2),
    offload_optimizer=dict(zero=2),
    offload_params=dict(zero=3),
    tied=dict(zero=3),
    topk_fraction=dict(compress="topk"),
    zb_costs=dict(schedule="zb-auto"),
    zb_memory=dict(schedule="zb-auto"),
    zero_replicas=dict(zero=1),
) | {("optimizer", "adafactor"): dict(tp=1, ep=1), ("model", "deepseek-v3-like"): dict(experts=16)}


def every_value(cls: type) -> Iterator[dict[str, Any]]:
    """A flag with a value, and what it needs; all but --dry-run. Raises KeyError for a number that NUMBERS lacks."""
    kinds = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = field.name, kinds[field.name]
        choices = list(field.metadata.get("menu", get_args(kind))) or [not field.default] * (kind is bool)
        for value in NUMBERS.get(name) or choices or NUMBERS[name] if name != "dry_run" else ():
            needed = WITH.get(name, {}) | WITH.get((name, value), {})
            yield {flag: other for flag, other in needed.items() if flag in kinds} | {name: value}
