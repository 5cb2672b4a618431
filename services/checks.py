"""Every mistake in the flags is one line that names the flag and the fix, before anything starts.

Each step checks its own dimension and, first, those of the steps before it.
"""

from math import inf, prod
from typing import Any

from common import UserError
from common.model import ModelConfig
from common.moe import MoEConfig
from common.schedules import SCHEDULES, Costs, Plan, chunks_per_rank, place_stages
from services.devices import choose_device, choose_dtype
from theory.bubble import makespan
from theory.flops import balanced_layers, moe_layers, times_of_parts
from theory.zb_auto import zb_auto


def check(config: Any, world: int):
    """Refuse what cannot work: before anything is built, on every rank alike. Raises UserError naming the flag."""
    checks = dict(ep=check_ep, pp=check_pp, cp=check_cp, tp=check_tp, zero=check_zero, sync=check_dp)
    check_step = next((checks[flag] for flag in checks if hasattr(config, flag)), lambda *_: check_one(config))
    check_step(config, world)
    if hasattr(config, "zero"):
        check_zero_replicas(config, world)


def check_one(config: Any):
    """The flags of one device."""
    config.model_config()
    least = dict(steps=1, global_batch_size=1, micro_batch_size=1, eval_sequences=1)
    for name in ("lr", "warmup_steps", "weight_decay", "grad_clip", "seed", "save_every", "stop_after", "eval_every"):
        least[name] = 0
    for name, bound in least.items():
        if not getattr(config, name) >= bound:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be at least {bound}")
    if config.global_batch_size % config.micro_batch_size:
        raise UserError(
            f"--global-batch-size {config.global_batch_size} is not a multiple of --micro-batch-size "
            f"{config.micro_batch_size}: change one of them"
        )
    if not (config.skip_spikes == 0 or config.skip_spikes > 1):
        raise UserError(f"--skip-spikes {config.skip_spikes:g}: half of all steps exceed the median; use 3, say, or 0")
    if not config.timeout > 0:
        raise UserError(f"--timeout {config.timeout:g}: it must be more than 0 seconds")
    if config.generate and not config.resume:
        raise UserError("--generate needs --resume with the run directory to take the weights from")
    if config.documents != "off" and not 0 <= config.end_token < config.model_config().vocab_size:
        raise UserError(
            f"--end-token {config.end_token} is not among the --vocab-size {config.model_config().vocab_size} tokens: "
            "give the one that ends a document in this data"
        )
    if config.compile and config.profile_memory:
        raise UserError("--profile-memory cannot look inside --compile: leave one of them away")
    if config.compile and config.fuse_gradients:
        raise UserError("--fuse-gradients adds to .grad inside backward, --compile cannot: leave one of them away")


def check_dp(config: Any, dp: int):
    """The flags of data parallelism, over `dp` ranks."""
    check_one(config)
    if config.global_batch_size % (config.micro_batch_size * dp):
        raise UserError(
            f"--global-batch-size {config.global_batch_size} cannot be dealt to {dp} ranks in micro-batches of "
            f"{config.micro_batch_size}: use a multiple of {config.micro_batch_size * dp}, or set --micro-batch-size"
        )
    if config.compress != "none" and config.sync != "bucket":
        raise UserError(f"--compress {config.compress} works on buckets: use it with --sync bucket")
    if config.compress != "none" and config.dtype == "fp16":
        raise UserError("--compress would carry an fp16 overflow on for ever: use --dtype bf16 or fp32")
    if config.sync == "torch" and choose_dtype(config.dtype, choose_device(config.device)).itemsize == 2:
        raise UserError("--sync torch adds gradients up in 16 bits: use --dtype fp32, or another --sync")
    if config.sync == "torch" and config.fuse_gradients:
        raise UserError("--sync torch wants autograd's gradients: leave --fuse-gradients away, or use another --sync")
    if config.check_replicas < 0:
        raise UserError(f"--check-replicas is {config.check_replicas}: it must be at least 0")
    if config.bucket_mb <= 0 or not 0 < config.topk_fraction <= 1:
        raise UserError("--bucket-mb must be positive, and --topk-fraction between 0 and 1")


def check_zero(config: Any, dp: int):
    """The flags of ZeRO, over `dp` ranks."""
    check_dp(config, dp)
    offloads = config.offload_optimizer != "none"
    if config.zero == 0 and offloads:
        raise UserError(f"--offload-optimizer {config.offload_optimizer} moves slices: use it with --zero 1, 2 or 3")
    if config.zero != 3 and config.offload_params != "none":
        raise UserError("--offload-params cpu needs parameters in slices: use it with --zero 3")
    if config.zero > 1 and config.fuse_gradients:
        raise UserError(f"--fuse-gradients: --zero {config.zero} has no sum in .grad to add to; use --zero 0 or 1")
    if config.zero and config.optimizer == "adafactor":
        raise UserError("--optimizer adafactor looks at whole rows and columns, slices have none: use it with --zero 0")
    if config.zero and (config.sync != "bucket" or config.compress != "none"):
        raise UserError(
            f"--zero {config.zero} reduces gradients itself: leave --sync and --compress at their defaults, "
            "or use them with --zero 0"
        )


def check_zero_replicas(config: Any, world: int):
    """--zero-replicas, among `world` ranks whose other flags are right."""
    sizes, count = mesh_sizes(config, world), config.zero_replicas
    data = sizes["dp"] * sizes.get("cp", 1)
    ep = choose_ep(config, config.model_config(), data) if hasattr(config, "ep") else 1
    if count < 1 or data // ep % count:
        legal = [n for n in range(1, data + 1) if data // ep % n == 0]
        experts = f" / ep = {data} / {ep}" if ep > 1 else ""
        raise UserError(
            f"--zero-replicas {count} does not divide dp x cp{experts} = {data // ep} ranks, over which ZeRO cuts "
            f"{'experts' if ep > 1 else 'everything'}: use one of {legal}"
        )
    if count > 1 and config.zero == 0:
        raise UserError(f"--zero-replicas {count} are of slices: use it with --zero 1, 2 or 3")


def check_tp(config: Any, world: int):
    """The flags of tensor parallelism, among `world` ranks."""
    tp, m = choose_tp(config, world), config.model_config()
    if config.toy:
        raise UserError("--toy belongs to step 3: run step03_zero.py --toy")
    narrow = config.compress_activations == "bf16"
    if narrow and choose_dtype(config.dtype, choose_device(config.device)).itemsize == 2:
        raise UserError("--compress-activations bf16 makes 16 bits of 16: use int8, or --dtype fp32")
    if tp < 1 or world % tp:
        legal = [n for n in range(1, world + 1) if world % n == 0]
        raise UserError(f"--tp {tp} does not divide the {world} ranks that were started: use one of {legal}")
    check_zero(config, world // tp)
    if tp == 1:
        return
    if m.n_heads % tp or m.ffn_dim % tp:
        both = [n for n in range(1, tp + 1) if m.n_heads % n == 0 and m.ffn_dim % n == 0]
        raise UserError(f"--tp {tp} must divide --n-heads {m.n_heads} and --ffn-dim {m.ffn_dim}: use one of {both}")
    if m.n_kv_heads % tp and tp % m.n_kv_heads:
        legal = [n for n in range(1, m.n_heads + 1) if m.n_heads % n == 0 and (n % tp == 0 or tp % n == 0)]
        raise UserError(f"--tp {tp} and --n-kv-heads {m.n_kv_heads}: one must divide the other, as do {legal} kv heads")
    if config.sp and m.seq_len % tp:
        raise UserError(f"--seq-len {m.seq_len} cannot be split over --tp {tp}: change one, or use --no-sp")
    if config.optimizer == "adafactor":
        raise UserError("--optimizer adafactor looks at whole rows and columns: use it with --tp 1")


def check_cp(config: Any, world: int):
    """The flags of context parallelism, among `world` ranks."""
    cp, m = choose_cp(config, world), config.model_config()
    if cp < 1 or world % cp:
        legal = [n for n in range(1, world + 1) if world % n == 0]
        raise UserError(f"--cp {cp} does not divide the {world} ranks that were started: use one of {legal}")
    if config.tp and world % (cp * config.tp):
        raise UserError(f"--cp {cp} x --tp {config.tp} does not divide the {world} ranks that were started: change one")
    check_tp(config, world // cp)
    if cp == 1:
        return
    tp = choose_tp(config, world // cp)
    chunks = 2 * cp if config.cp_mode in ("zigzag", "allgather") else cp
    if m.seq_len % chunks:
        raise UserError(
            f"--seq-len {m.seq_len} cannot be cut into the {chunks} chunks of --cp {cp} --cp-mode {config.cp_mode}: "
            f"use a multiple of {chunks}"
        )
    if config.sp and tp > 1 and m.seq_len // cp % tp:
        raise UserError(
            f"the {m.seq_len // cp} tokens of a --cp {cp} rank cannot be split over --tp {tp}: "
            f"use --no-sp, or --seq-len a multiple of {cp * tp}"
        )
    heads, kv_heads = m.n_heads // tp, max(1, m.n_kv_heads // tp)
    legal = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if config.cp_mode == "ulysses" and cp not in legal:
        raise UserError(
            f"--cp-mode ulysses gives each of --cp {cp} ranks whole heads, but there are {heads} query and {kv_heads} "
            f"key/value heads (after --tp): use --cp among {legal}, or another --cp-mode"
        )


def check_pp(config: Any, world: int):
    """The flags of pipelines, among `world` ranks."""
    pp, m, v = choose_pp(config, world), config.model_config(), choose_chunks(config)
    if pp < 1 or world % pp:
        legal = [n for n in range(1, world + 1) if world % n == 0]
        raise UserError(f"--pp {pp} does not divide the {world} ranks that were started: use one of {legal}")
    sizes = dict(pp=pp, cp=max(1, config.cp), tp=max(1, config.tp))
    if world % prod(sizes.values()):
        rest = {dim: prod(sizes.values()) // size for dim, size in sizes.items()}
        legal = {dim: [n for n in range(1, world + 1) if world % (n * rest[dim]) == 0] for dim in sizes}
        choices = ", or ".join(f"--{dim} among {numbers}" for dim, numbers in legal.items() if numbers)
        raise UserError(
            f"{' x '.join(f'--{dim} {size}' for dim, size in sizes.items())} = {prod(sizes.values())} does not divide "
            f"the {world} ranks that were started: use {choices or 'smaller ones'}"
        )
    check_cp(config, world // pp)
    if config.sync == "torch":
        raise UserError("--sync torch wraps the whole model, of which a stage is a part: use another --sync")
    dp = mesh_sizes(config, world)["dp"]
    if reason := refuse(config.schedule, pp, config.global_batch_size // dp // config.micro_batch_size, v):
        raise UserError(reason)
    if config.fuse_gradients and config.schedule not in ("afab", "1f1b", "interleaved"):
        raise UserError(
            f"--schedule {config.schedule} puts weight gradients off: leave --fuse-gradients away, or use 1f1b"
        )
    if not config.zb_memory * pp >= 1:
        raise UserError(
            f"--zb-memory {config.zb_memory:g} of --pp {pp} is not one micro-batch: use at least {1 / pp:g}"
        )
    choose_zb_costs(config, m)
    stages = len(place_stages(config.schedule, pp, v)[0])
    if m.n_layers < stages:
        raise UserError(
            f"--n-layers {m.n_layers} cannot be cut into {stages} stages (--pp {pp} x {stages // pp} chunks): "
            "use more layers, or a smaller --pp or --chunks"
        )
    split_layers(config, m, stages)


def check_ep(config: Any, world: int):
    """The flags of experts, among `world` ranks."""
    check_pp(config, world)
    m = config.model_config()
    _, dp, cp, tp = mesh_sizes(config, world).values()
    data = dp * cp
    ep = choose_ep(config, m, data)
    for name in ("capacity_factor", "balance_weight", "bias_speed", "z_loss"):
        if not getattr(config, name) >= 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be at least 0")
    if ep < 1 or data % ep:
        legal = [n for n in range(1, data + 1) if data % n == 0 and max(1, m.experts) % n == 0]
        raise UserError(
            f"--ep {ep} does not divide dp x cp = {dp} x {cp} = {data} ranks, among which it lives: use one of {legal}"
        )
    if ep > 1 and not moe_layers(m):
        raise UserError(f"--ep {ep} needs experts: set --experts, or use --ep 1")
    if ep > 1 and m.experts % ep:
        legal = [n for n in range(1, data + 1) if data % n == 0 and m.experts % n == 0]
        raise UserError(f"--experts {m.experts} cannot be dealt to --ep {ep} ranks: use --ep among {legal}")
    if moe_layers(m) and m.expert_width % tp:
        raise UserError(f"--tp {tp} must divide the width of an expert, {m.expert_width}: change it or --expert-dim")
    if ep > 1 and config.optimizer == "adafactor":
        raise UserError("--optimizer adafactor looks at all experts at once: use it with --ep 1")


def choose_tp(config: Any, world: int) -> int:
    """`--tp`, or what 0 stands for."""
    return config.tp or (2 if world % 2 == 0 else 1)


def choose_cp(config: Any, world: int) -> int:
    """`--cp`, or what 0 stands for."""
    return config.cp or (2 if world % (2 * max(1, config.tp)) == 0 else 1)


def choose_pp(config: Any, world: int) -> int:
    """`--pp`, or what 0 stands for."""
    return config.pp or (2 if world % 2 == 0 else 1)


def mesh_sizes(config: Any, world: int) -> dict[str, int]:
    """Ranks along each dimension of a step's mesh, slowest first; {} for step 1."""
    if not hasattr(config, "sync"):
        return {}
    pp = choose_pp(config, world) if hasattr(config, "pp") else 1
    cp = choose_cp(config, world // pp) if hasattr(config, "cp") else 1
    tp = choose_tp(config, world // pp // cp) if hasattr(config, "tp") else 1
    sizes = dict(pp=pp, dp=world // pp // cp // tp, cp=cp, tp=tp)
    return {dim: size for dim, size in sizes.items() if dim == "dp" or hasattr(config, dim)}


def choose_chunks(config: Any) -> int:
    """`--chunks`, or what 0 stands for."""
    return config.chunks or chunks_per_rank(config.schedule) or 2


def split_layers(config: Any, m: ModelConfig, n: int) -> list[int]:
    """How many layers each of `n` stages has: `--pp-split`, or balanced by cost. Raises UserError."""
    if config.pp_split:
        try:
            lengths = [int(part) for part in config.pp_split.split(",")]
        except ValueError:
            lengths = []
        if len(lengths) != n or sum(lengths) != m.n_layers or min(lengths) < 1:
            raise UserError(
                f"--pp-split {config.pp_split}: give {n} numbers of layers from 1 on, like 2,2,1, "
                f"that add up to --n-layers {m.n_layers}"
            )
        return lengths
    return balanced_layers(m, n)


def choose_zb_costs(config: Any, m: ModelConfig) -> Costs:
    """`--zb-costs`, or FLOPs of a layer and 5% of F's for a message: only ratios count. Raises UserError."""
    f, b, w = times_of_parts(m, config.recompute)
    try:
        costs = Costs(*map(float, config.zb_costs.split(","))) if config.zb_costs else Costs(f, b, w, 0.05 * f)
    except (TypeError, ValueError):
        costs = Costs(0, 0, 0, 0)
    if not (min(costs[:3]) > 0 and costs.comm >= 0 and sum(costs) < inf):
        raise UserError(
            f"--zb-costs {config.zb_costs}: give the times of F, B and W, above 0, and of a message, "
            "like 18.5,18.1,9.3,0.6"
        )
    return costs


def choose_ep(config: Any, m: MoEConfig, data: int) -> int:
    """`--ep`, or what 0 stands for, among `data` = dp x cp ranks."""
    return config.ep or (2 if moe_layers(m) and data % 2 == 0 and m.experts % 2 == 0 else 1)


def refuse(schedule: str, p: int, m: int, v: int) -> str:
    """Why a schedule cannot run m micro-batches on p ranks with v stages each; empty if it can."""
    wanted = chunks_per_rank(schedule)
    if v != wanted and wanted:
        return f"--schedule {schedule} has {wanted} stage{'s' * (wanted > 1)} on each rank: use --chunks {wanted}"
    if v < 1:
        return f"--chunks {v} gives a rank no stage: use at least 1"
    if m < 1:
        return f"--schedule {schedule} has nothing to do with {m} micro-batches: use at least 1"
    if schedule == "dualpipe" and p % 2:
        return f"--schedule dualpipe starts micro-batches at both ends of an even number of ranks: change --pp {p}"
    return ""


def plan_pipeline(config: Any, m: ModelConfig, sizes: dict[str, int]) -> Plan:
    """What the flags of pipeline parallelism mean for these ranks (`mesh_sizes`) and this model."""
    pp, v = sizes["pp"], choose_chunks(config)
    micro_batches = config.global_batch_size // sizes["dp"] // config.micro_batch_size
    placements = place_stages(config.schedule, pp, v)
    if config.schedule == "zb-auto":  # all ranks meet at the end of a step, for the norm: so for the least makespan
        lists = zb_auto(pp, micro_batches, choose_zb_costs(config, m), config.zb_memory * pp, measure=makespan)
    else:
        lists = [SCHEDULES[config.schedule](pp, micro_batches, v, rank) for rank in range(pp)]
    return Plan(placements, split_layers(config, m, len(placements[0])), lists)
