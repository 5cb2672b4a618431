"""What recomputation saves and costs: bytes kept for backward, predicted and measured; FLOPs; tokens/s.

    python -m tests.bench recompute
    python -m tests.bench recompute --model smollm-1.7b --seq-len 2048 --micro-batch-size 4 --dtype bf16     a GPU

Forward and backward passes of one micro-batch, without an optimizer. The modes take turns, so that a change of the
machine's clock meets all of them, and the median counts.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import step01_single_gpu as step01
from common import UserError
from common.layout import materialize
from common.model import Decoder
from services.checks import check_one
from services.devices import choose_device, choose_dtype
from services.flags import main as run_main
from services.memory import storage_bytes_made_by
from services.tables import human, table
from theory.memory import activation_bytes

MODES = ["none", "selective", "full"]


@dataclass
class Config(step01.Config):
    """Step 1's flags, of which those of the model, the micro-batch and the device count."""

    rounds: int = 7  # turns of the three modes, of which the first is not counted


def random_loss(model: Decoder, batch: int) -> Tensor:
    """The summed loss on random tokens [batch, seq]."""
    m, device = model.config, model.lm_head.weight.device
    tokens = torch.randint(m.vocab_size, (batch, m.seq_len), generator=torch.Generator().manual_seed(0)).to(device)
    return model.lm_head.loss(model(tokens), tokens)


def saved_bytes(model: Decoder, batch: int) -> int:
    """Bytes of all storages that a forward pass made and left alive for the backward pass."""
    if not model.lm_head.weight.is_cuda:
        return storage_bytes_made_by(random_loss, model, batch)[0]
    random_loss(model, batch)  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    loss = random_loss(model, batch)  # alive until the next line has been computed
    return torch.cuda.memory_allocated() - before - loss.nbytes


def attention_forward_flops(q, k, v, *args, out_shape=None, **kwargs) -> int:
    """q k^T and p v, masked half included. q [batch, heads, seq, head_dim]."""
    batch, heads, seq, head_dim = q
    return 2 * 2 * batch * heads * seq * seq * head_dim


def attention_backward_flops(grad, q, *args, out_shape=None, **kwargs) -> int:
    """q k^T again, then dv, dp, dq and dk."""
    batch, heads, seq, head_dim = q
    return 5 * 2 * batch * heads * seq * seq * head_dim


def added_product_flops(total, a, b, *args, out_shape=None, **kwargs) -> int:
    """a [n, m] @ b [m, k]."""
    return 2 * a[0] * a[1] * b[1]


def counted_flops(model: Decoder, batch: int) -> float:
    """FLOPs per token in forward and backward, by PyTorch's counter and formulas for what it leaves out on a CPU."""
    aten = torch.ops.aten
    on_cpu = {
        aten.addmm_: added_product_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: attention_forward_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
        random_loss(model, batch).backward()
    return counter.get_total_flops() / (batch * model.config.seq_len)


def seconds(model: Decoder, batch: int) -> float:
    """Time of a forward and a backward pass."""
    start = time.perf_counter()
    random_loss(model, batch).backward()
    if model.lm_head.weight.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def bench(config: Config):
    """Print the table."""
    check_one(config)
    if config.rounds < 2:
        raise UserError(f"--rounds {config.rounds}: the first is not counted, give more")
    device = choose_device(config.device)
    dtype, batch, m = choose_dtype(config.dtype, device), config.micro_batch_size, config.model_config()
    models, rows, times = {}, [], {mode: [] for mode in MODES}
    for mode in MODES:
        with torch.device("meta"):
            models[mode] = Decoder(m)
        materialize(models[mode], config.seed, device, dtype)
        step01.wrap_layers(models[mode], dataclasses.replace(config, recompute=mode, compile=False))
    for _ in range(config.rounds):
        for mode, model in models.items():
            times[mode].append(seconds(model, batch))
    for mode, model in models.items():
        predicted = activation_bytes(m, batch, dtype, mode, device.type == "cpu")
        flops, speed = counted_flops(model, batch), batch * m.seq_len / statistics.median(times[mode][1:])
        rows.append([mode, human(predicted), human(saved_bytes(model, batch)), f"{flops:.4g}", f"{speed:,.0f}"])
    print(f"{config.model}, {batch} x {m.seq_len} tokens, {dtype}, {device}")
    print(table([["recompute", "predicted bytes", "measured bytes", "FLOPs/token", "tokens/s"], *rows]))


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
