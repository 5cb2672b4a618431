"""What four texts about training large models say, line by line: their number, ours, and a verdict.

    python -m theory.claims          prints the page that RESULTS.md shows

S0: notes on OpenAI's "Techniques for training large neural networks". S1: slides on nanotron's Ultra-Scale Playbook.
S2: notes on distributed training. S3: notes on Megatron's PTD-P (Narayanan et al. 2021). S1:289 is line 289 of S1.

Code decides. A row holds if our number is the text's, up to `within`; then `why` names the condition, if there is one.
Else `why` says what we count. Where a text has measured, it is the planner that may be wrong: "measured otherwise".
GB are 1e9 bytes. p: pipeline ranks. m: micro-batches. v: stages on a rank. N: numbers of a model.
"""

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf, log2
from pathlib import Path

import torch

from common.schedules import afab, interleaved, one_f_one_b
from theory.activations import MicroBatch, layer_bytes
from theory.gpus import CONTEXT, NODE, ROOM
from theory.layouts import Layout, Network, illegal
from theory.memory import rank_numbers
from theory.plan import models
from theory.recipes import COURSE
from theory.search import fits, smallest
from theory.seconds import least_bubble, ring
from theory.shapes import flops_per_token, gpt, mlp_weights, total_weights, visited_weights
from theory.traffic import gradient_traffic, tensor_traffic

from theory.sums import A100, EFA, GPT1T, GPT2B, GPT3, H100, L1, L8, L70, L405, MANY  # isort: skip
from theory.sums import activations, all_reduce, as_drawn, boundary, breaks_down, bubble, first_step  # isort: skip
from theory.sums import forward_twice, fullest, in_flight, kept, layer, pcie, planned, ring_blocks, sent  # isort: skip
from theory.sums import speed, start, state, wrong_by  # isort: skip

DAY, YEAR = 86400, 365.25 * 86400  # seconds


@dataclass(frozen=True)
class Claim:
    """A row. `stated` is the text's number, or its least and its most."""

    where: str
    says: str
    stated: float | tuple[float, float]
    finds: Callable[[], float]
    why: str = ""
    within: float = 0.02  # how far, relatively, our number may be from the text's
    measured: bool = False  # somebody ran it

    def verdict(self, value: float) -> str:
        """What our number says of the text's."""
        low, high = self.stated if isinstance(self.stated, tuple) else (self.stated, self.stated)
        if low - abs(low) * self.within - 1e-9 <= value <= high + abs(high) * self.within + 1e-9:
            return "holds if" if self.why else "holds"
        return "measured otherwise" if self.measured else "does not hold"


ALONE = "m >= p is needed: one micro-batch alone passes all stages in turn, whatever v is"
# fmt: off
models()  # by which variants add their schedules
CLAIMS = [
    Claim("S0:183", "GShard has over 600 billion parameters (billions)", (600, inf),
          lambda: 2048 * 18 * mlp_weights(gpt(1024, 36, 16, ffn_dim=8192), 8192) / 1e9),
    Claim("S0:213", "balance loss sum(f p) / N, of N = 8 equally busy experts", 1 / 64,
          lambda: 8 * sum([1 / 8 * 1 / 8] * 8),
          "the loss has N, not 1 / N, before the sum: then balance gives 1 for every N (Switch Transformer)"),
    Claim("S0:286", "recomputation in a pipeline shrinks the bubble (to a part of it)", (0, 0.99),
          lambda: bubble(one_f_one_b, 4, 8, b=3) / bubble(one_f_one_b, 4, 8),
          "backward grows on all ranks alike; only more micro-batches, in the memory it frees, shrink the bubble",
          within=0),
    Claim("S0:292", "bits of FP16's mantissa", 10, lambda: -log2(torch.finfo(torch.float16).eps)),
    Claim("S0:292", "bits of BF16's mantissa", 7, lambda: -log2(torch.finfo(torch.bfloat16).eps)),
    Claim("S0:309", "mixed precision needs half of FP32's 16 bytes a number", 8, lambda: state().total,
          "activations are halved; masters and moments stay in FP32, and nothing is saved, as S1:326 says"),
    Claim("S1:46", "most of a layer's weights are in its MLP", (0.5, 1),
          lambda: mlp_weights(L8, L8.ffn_dim) / visited_weights(L8, False)),
    Claim("S1:141", "DeepSeek's batch (S1:122: 15,360 sequences), million tokens", 60, lambda: 15360 * 4096 / 1e6,
          within=0.05),
    Claim("S1:193", "what CUDA itself takes, GB", (1, 2), lambda: CONTEXT / 1e9),
    Claim("S1:280", "N = h v + L (h^2 / 2 + h / 3) + 2 h, for GPT-3, billions",
          (GPT3.dim * 51200 + 96 * (GPT3.dim**2 / 2 + GPT3.dim / 3) + 2 * GPT3.dim) / 1e9,
          lambda: total_weights(GPT3) / 1e9, "digits were lost: the Playbook has 12 h^2 + 13 h"),
    Claim("S1:289", "twice the width, times as many parameters", 4,
          lambda: total_weights(replace(GPT3, dim=2 * GPT3.dim, ffn_dim=2 * GPT3.ffn_dim)) / total_weights(GPT3)),
    Claim("S1:357", "BF16 computes this many times as fast as FP32", (2, inf), lambda: A100.flops / A100.single),
    Claim("S1:392", "405B parameters, GB", 6480, lambda: 405 * state().total),
    Claim("S1:392", "405B parameters with FP32 sums of gradients, GB", 8100,
          lambda: 405 * (state(recipe=COURSE).total + 2),
          "a BF16 gradient stays beside the sum; the course frees it and has 18 bytes"),
    Claim("S1:427", "bytes a token and channel in a layer, beside the scores: 3 / 4", 0.75,
          lambda: kept(GPT3, recompute="selective"), "digits were lost: 34 (Korthikanti et al. 2022)"),
    Claim("S1:444", "twice the sequence, times the activations", 4,
          lambda: activations(GPT3, 65536) / activations(GPT3, 32768),
          "scores are stored, and the sequence is long; with flash attention it is 2"),
    Claim("S1:466", "8B at 8K: activations outweigh its 128 GB of state, GB", (128, inf), lambda: activations(L8, 8192),
          "scores are stored"),
    Claim("S1:470", "activations of 405B at 16K, GB", (1000, 99999), lambda: activations(L405, 16384),
          "scores are stored"),
    Claim("S1:510", "full recomputation, FLOPs more", (0.3, 0.4),
          lambda: forward_twice(GPT3) / flops_per_token(GPT3)[0] - 1,
          "all layers go forward again; the course stops before a layer's last matrix and needs less"),
    Claim("S1:515", "attention keeps little (part of a layer's activations, GPT-3)", (0, 0.5),
          lambda: 1 - kept(GPT3, recompute="selective") / kept(GPT3),
          "it is the other way round: stored scores are most of a layer, and cheap to do again; S1:533 has it right"),
    Claim("S1:525", "full recomputation leaves so much of GPT-3's activations", 1 / 3,
          lambda: kept(GPT3, recompute="full") / kept(GPT3),
          "2 of 114 bytes, the input of each layer; how much that is of all memory depends on the layout"),
    Claim("S1:525", "full recomputation, times as slow (planner: tp 8, pp 8)", (1.3, 1.4),
          lambda: planned(GPT3, pp=8, tp=8, global_batch_size=64, recompute="full")
          / planned(GPT3, pp=8, tp=8, global_batch_size=64)),
    Claim("S1:533", "selective recomputation saves so much of GPT-3's activations", 0.7,
          lambda: 1 - kept(GPT3, recompute="selective") / kept(GPT3)),
    Claim("S1:533", "selective recomputation, FLOPs more (GPT-3)", 0.027,
          lambda: 4 * GPT3.n_layers * GPT3.seq_len * GPT3.dim / flops_per_token(GPT3)[0],
          "forward of the scores is 4 s h of a layer's 72 h^2 + 12 s h; 2.7% is all 12 s h, their backward, too"),
    Claim("S1:589", "700 FLOPs in 1.1 s at a peak of 1000: HFU", 0.7, lambda: 700 / 1.1 / 1000,
          "the 0.1 s was forgotten"),
    Claim("S1:589", "500 of them needed: MFU", 0.5, lambda: 500 / 1.1 / 1000, "the same; so MFU falls, as S1:598 says"),
    Claim("S1:950", "GPUs, more than 100, at which plain dp loses 5% (planner: 1B, 4M tokens)", 128,
          lambda: breaks_down(1024, zero=0, gpu=EFA, m=L1), "the network is EFA; contention does it, not only hops"),
    Claim("S1:962", "memory at dp 512 over memory at dp 8 (Llama 1B)", 1,
          lambda: fullest(L1, 4096, zero=0, dp=512, global_batch_size=512)
          / fullest(L1, 4096, zero=0, dp=8, global_batch_size=8)),
    Claim("S1:987", "70B at 16K: activations are small beside 1,120 GB of state, GB", (0, 112),
          lambda: activations(L70, 16384, "selective"),
          "a third of it even without stored scores; with them S1:470 is right"),
    Claim("S1:1012", "dp that sums 1,024 sequences by 2 in 4 micro-batches", 12,
          lambda: next(dp for dp in range(1, 1025)
                       if Layout(dp=dp, micro_batch_size=2, global_batch_size=1024).micro_batches == 4),
          "a digit was lost: 128, as the next line has it"),
    Claim("S1:1022", "GPUs from which on a ring's latency stops dp (planner: ZeRO-3, 1B)", 512,
          lambda: breaks_down(m=L1), "each GPU has one sequence of 4,096 tokens, and nothing contends"),
    Claim("S1:1022", "the same (planner: ZeRO-3, 8B on EFA)", 512, lambda: breaks_down(gpu=EFA),
          "contention comes before latency; there tp, pp or larger batches are needed earlier"),
    Claim("S1:1070", "ZeRO-1 saves, times", (4, 8), lambda: state().total / state(1, MANY).total,
          "S1:1257, its own formula, ends at 16 / 4", within=0),
    Claim("S1:1071", "ZeRO-2 saves, times", (8, 16), lambda: state().total / state(2, MANY).total,
          "S1:1481, its own formula, ends at 16 / 2", within=0),
    Claim("S1:1109", "optimizer state over parameters", (2, 4), lambda: state().optimizer / state().weights,
          "2 in FP32, 4 for moments beside BF16, 6 with masters: S1:1164 counts them"),
    Claim("S1:1164", "k: Adam's bytes a number", 12, lambda: state().optimizer),
    Claim("S1:1208", "reduce-scatter is so many times as fast as all-reduce", 2,
          lambda: all_reduce(1, 2e9) / all_reduce(1, 1e9)),
    Claim("S1:1319", "w1 after one step of Adam", -1.5, lambda: first_step(torch.optim.Adam),
          "that is plain SGD; Adam's first step moves each weight by lr, whatever its gradient"),
    Claim("S1:1633", "ZeRO-3 hides less at dp > 512 (planner: 8B; the next power of two)", 1024, lambda: breaks_down(),
          "each GPU has one sequence of 4,096 tokens, and nothing contends"),
    Claim("S1:1661", "ZeRO-3 sends, numbers for each of the model's", 3, lambda: sent(3),
          "a step is one micro-batch: each gathers and reduces anew"),
    Claim("S1:1663", "ZeRO-3 needs so many times less than ZeRO-2", 2, lambda: state(2, 9).total / state(3, 9).total,
          "dp is about 9: it is (dp + 7) / 8"),
    Claim("S1:1675", "ZeRO-1 sends, numbers for each of the model's", 2, lambda: sent(1)),
    Claim("S1:1676", "ZeRO-2 sends, numbers for each of the model's", 2, lambda: sent(2),
          "a step is one micro-batch: each reduces anew"),
    Claim("S1:1744", "ZeRO-3 trains 8B with 80 GB (planner: 8 GPUs, 4K tokens)", (0, H100.memory / 1e9),
          lambda: fullest(L8, 4096, zero=3, dp=8, global_batch_size=8)),
    Claim("S1:1750", "8B: from plain DP to ZeRO-1, GB less (8 GPUs)", 50,
          lambda: 8 * (state().total - state(1, 8).total), "12 bytes x 7 / 8; 50 GB would be two GPUs"),
    Claim("S1:1752", "8B: from ZeRO-2 to ZeRO-3, GB less (8 GPUs)", 30,
          lambda: 8 * (state(2, 8).total - state(3, 8).total), "weights of 8B in BF16 are 16 GB in all"),
    Claim("S1:1828", "W_QKV by rows: error of attention", 0, lambda: wrong_by(columns=False),
          "softmax needs whole scores, so parts would have to be summed before it; S1:1860 has it right"),
    Claim("S1:1860", "W_QKV by columns: error of attention", 0, lambda: wrong_by(columns=True)),
    Claim("S1:1897", "all-gathers of FC1's output", 1, lambda: layer(tensor_traffic, 8, False)["all_gather"],
          "nothing travels between columns and rows, which is why they are paired: S1:1894"),
    Claim("S1:1930", "most tensor parallel ranks for 32 heads", 32,
          lambda: max(tp for tp in (8, 16, 32, 64) if not illegal(L8, Layout(tp=tp)))),
    Claim("S1:2081", "activations with TP 8: b s (h / t)", 1 / 8,
          lambda: kept(GPT3, 2048, "selective", 8, False) / kept(GPT3, 2048, "selective"),
          "what lies between the blocks stays whole, as S1:2004 says: (10 + 24 / t) / 34"),
    Claim("S1:2081", "activations with TP 8 + SP: b (s / t) (h / t)", 1 / 64,
          lambda: kept(GPT3, 2048, tp=8) / kept(GPT3, 2048),
          "each tensor is cut once, by s or by h: 1 / t, as S1:2147 says"),
    Claim("S1:2082", "bytes of all-gathers and reduce-scatters over those of all-reduces", 1,
          lambda: layer(tensor_traffic, 8, True).total() / layer(tensor_traffic, 8, False).total()),
    Claim("S1:2175", "speed with SP over speed without (planner: 70B, tp 8)", (0.9, 0.95),
          lambda: speed(8, 2) / speed(8, 2, False), "as many bytes, and less to read and write between the blocks",
          measured=True),
    Claim("S1:2175", "speed at tp 16 over speed at tp 8 (planner: 70B)", 0.6, lambda: speed(16, 1) / speed(8, 2),
          "on EFA a second node cost more than our hops and cards", 0.05, True),
    Claim("S1:2177", "70B on 8 GPUs with tp 8, GB", (0, H100.memory / 1e9), lambda: 70 / 8 * state().total,
          "weights, gradients and optimizer alone; ZeRO has to cut them over more GPUs"),
    Claim("S1:2179", "SP: times as long sequences in the same memory (tp 8)", (2, inf),
          lambda: kept(GPT3, 2048, "selective", 8, False) / kept(GPT3, 2048, "selective", 8)),
    Claim("S1:2210", "speed at tp 32 over speed at tp 8 (planner: 70B)", (0.4, 0.6), lambda: speed(32, 1) / speed(8, 4),
          measured=True),
    Claim("S1:2334", "a ring sends far less than an all-gather of K and V (part of it)", (0, 0.5),
          lambda: ring_blocks(4) / ring(Network(4, 4), 4),
          "the same bytes; a ring saves memory, and hides what it sends"),
    Claim("S1:2490", "zigzag: most work over least, 4 ranks, 16 tokens", 1,
          lambda: max(work := [sum((2 * n + 1, 2 * n + 2, 15 - 2 * n, 16 - 2 * n)) for n in range(4)]) / min(work)),
    *(Claim(f"S1:{line}", f"GB/s of an all-reduce of 256 MB; nodes: {nodes} (planner: H100 on EFA)", rate,
            lambda nodes=nodes: 2 * ring(Network(8 * nodes, 8), 0.256) / all_reduce(nodes, 256e6, EFA),
            "the network contends: one number, fitted to these" if nodes > 1 else "NCCL on our NVLink", 0.15, True)
      for line, nodes, rate in ((2539, 1, 436), (2540, 4, 160), (2541, 8, 90), (2542, 64, 39))),
    Claim("S1:2565", "pp 8: a rank's part of the weights (GPT-3)", 1 / 8,
          lambda: max(map(sum, rank_numbers(GPT3, "1f1b", 8, 1, 1, 1))) / total_weights(GPT3), within=0.05),
    Claim("S1:2567", "pp 8: activations over those of one GPU", 1, lambda: in_flight(afab, 8, 8) / 8,
          "m = p, or 1F1B: p micro-batches of 1 / p of the layers"),
    Claim("S1:2665", "bubble (p-1) / m, of the work: p = 4, m = 8", 3 / 8, lambda: bubble(afab, 4, 8)),
    Claim("S1:2778", "1F1B keeps p micro-batches: p = 4, m = 32", 4, lambda: in_flight(one_f_one_b, 4, 32)),
    Claim("S1:2823", "1F1B, p = 4: GPU 1 begins B1 in slot", 4, lambda: 1 + start(one_f_one_b, 4, 8, "B", 0, 0),
          "backward comes from the last stage: F1 leaves it in slot 4, and B1 takes 5, 6 and 7 to come home"),
    Claim("S1:2831", "1F1B waits less than AFAB (part of it)", (0, 0.9),
          lambda: bubble(one_f_one_b, 4, 8) / bubble(afab, 4, 8), "just as long, as S1:2837 says; it keeps less"),
    Claim("S1:2838", "1F1B keeps p times less than AFAB: p = 4, m = 32", 4,
          lambda: in_flight(afab, 4, 32) / in_flight(one_f_one_b, 4, 32), "m / p times, as S1:2843 says"),
    Claim("S1:2882", "speed lost with p = 32, m = 31", 0.44, lambda: bubble(one_f_one_b, 32, 31, of_step=True),
          "with m = p - 1 a half is idle, whatever p", measured=True),
    *(Claim(f"S1:{line}", f"bubble, of the work: p = 8, m = {m}, v = {v}", says,
            lambda m=m, v=v: bubble(afab if m == 1 else interleaved, 8, m, v), why, within=0.1)
      for line, m, v, says, why in ((3000, 1, 1, 7.0, ""), (3001, 1, 2, 3.5, ALONE), (3002, 1, 4, 1.75, ALONE),
                                    (3003, 8, 4, 0.22, ""), (3004, 32, 8, 0.03, ""))),
    Claim("S1:3021", "Llama's v = 2: bubble, part of that with v = 1", 1 / 2,
          lambda: bubble(interleaved, 4, 8, 2) / bubble(one_f_one_b, 4, 8)),
    Claim("S1:3022", "the same: activations over 1F1B's", 1,
          lambda: in_flight(interleaved, 4, 8, 2) / in_flight(one_f_one_b, 4, 8),
          "1 + (p-1) / (p v) (Narayanan et al. 2021)"),
    Claim("S1:3125", "ZB-H1: bubble, part of 1F1B's", (0, 0.05),
          lambda: least_bubble(Layout(pp=4, global_batch_size=32, schedule="zb-h1"), 1, 1, 1)
          / bubble(one_f_one_b, 4, 32) / 32 / 3,
          "a third is left; ZB-H2's is zero where ranks do not wait for each other between steps"),
    Claim("S2:7", "Llama 3 8B in BF16, GB", 16, lambda: 2 * total_weights(L8) / 1e9),
    Claim("S2:8", "Llama 3 70B in BF16, GB", 140, lambda: 2 * total_weights(L70) / 1e9),
    Claim("S2:9", "Llama 3 405B in BF16, GB", 810, lambda: 2 * total_weights(L405) / 1e9),
    Claim("S2:9", "A100s that hold them", 10, lambda: ceil(2 * total_weights(L405) / A100.memory)),
    Claim("S2:13", "BF16 training, bytes a number", 16, lambda: state().total),
    Claim("S2:17", "A100s that train 8B (planner)", 2,
          lambda: next(n for n in (1, 2, 4) if fits(smallest(L8, n, 8).held, A100))),
    Claim("S2:85", "7B: optimizer state, GB", 84, lambda: 7 * state().optimizer),
    Claim("S2:86", "7B: all, GB", 112, lambda: 7 * state().total),
    Claim("S2:102", "7B, ZeRO-1 on 8 GPUs: optimizer state, GB", 10.5, lambda: 7 * state(1, 8).optimizer),
    Claim("S2:114", "ZeRO-2 needs so much of ZeRO-1's memory", 0.5, lambda: state(2, MANY).total / state(1, MANY).total,
          "GPUs are many"),
    Claim("S2:133", "ZeRO-3 sends, times DDP's", 3, lambda: sent(3) / gradient_traffic("dp", MANY, 1).total(),
          "three messages, but DDP's all-reduce is already two of them"),
    Claim("S2:134", "ZeRO-3: bytes a number x GPUs", 16, lambda: 8 * state(3, 8).total),
    Claim("S2:148", "PCIe 3.0 x16, both ways, GB/s", 32, lambda: 2 * pcie(8)),
    Claim("S2:152", "8 A100s with CPU offload train, billion parameters", (100, inf),
          lambda: 8 * ROOM * A100.memory / (state().weights + state().gradients) / 1e9,
          "the CPU has 12 bytes a number: 1.2 TB for 100B"),
    Claim("S2:225", "all-reduces a layer", 2, lambda: layer(tensor_traffic, 8, False)["all_reduce"] / (2 * 7 / 8),
          "two in forward, and two more in backward"),
    Claim("S2:279", "AFAB, p = 4: slots between GPU 0's last F and first B", 2,
          lambda: start(afab, 4, 4, "B", 0, 0) - start(afab, 4, 4, "F", 3, 0) - 1, "drawn for two GPUs: it is 2 (p-1)"),
    *(Claim(f"S2:{line}", f"bubble, of the step: p = 4, m = {m}", says, lambda m=m: bubble(afab, 4, m, of_step=True))
      for line, m, says in ((286, 1, 0.75), (287, 8, 0.27), (288, 16, 0.16))),
    Claim("S2:302", "1F1B, p = m = 4: actions that are as drawn, of 32", 32,
          lambda: as_drawn(one_f_one_b, "F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 B0 F3 B1 B2 B3",
          "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")),
    Claim("S2:321", "the same: bubble, of the step, so many times less", 2,
          lambda: bubble(one_f_one_b, 4, 8, of_step=True) / bubble(interleaved, 4, 8, 2, of_step=True),
          "idle time halves, but the step is shorter, too"),
    Claim("S2:337", "message of 4,096 tokens x 8,192 channels in BF16, MiB", 64, lambda: 4096 * L70.dim * 2 / 2**20),
    Claim("S2:376", "ring attention on 4 GPUs: blocks that each sends", 3, lambda: ring_blocks(4)),
    Claim("S2:377", "the same: a layer's activations over those of one GPU", 1 / 4,
          lambda: layer_bytes(MicroBatch(L8, 1, 2048, 2, 4), False)
          / layer_bytes(MicroBatch(L8, 1, 8192, 2, 4), False)),
    Claim("S2:409", "top 2: choices that capacity tokens / experts takes, if balanced", 1,
          lambda: 64 / 8 * 8 / (64 * 2),
          "a token makes k choices, so capacity is k tokens / experts; as it stands it is for top 1"),
    Claim("S2:437", "GPUs of TP 8 x SP 8", 64, lambda: Layout(tp=8, sp=True).world,
          "SP uses the ranks of TP, and EP those of DP x CP: neither multiplies"),
    Claim("S2:443", "8B, ZeRO-2, dp 8 on A100s of 80 GB (planner: 8K tokens), GB", (0, A100.memory / 1e9),
          lambda: fullest(L8, 8192, zero=2, dp=8, global_batch_size=8, recompute="elementwise")),
    Claim("S2:443", "8B, tp 4, dp 2 on the same (planner), GB", (0, A100.memory / 1e9),
          lambda: fullest(L8, 8192, zero=0, tp=4, dp=2, global_batch_size=8, recompute="elementwise")),
    Claim("S2:447", "70B, tp 8, dp 4 on the same (planner), GB", (0, A100.memory / 1e9),
          lambda: fullest(L70, 8192, zero=2, tp=8, dp=4, global_batch_size=4, recompute="full"),
          "ZeRO-2 cuts over dp; without ZeRO 16 bytes x 70B / 8 are 140 GB"),
    Claim("S2:451", "GPUs of 405B with tp 8, pp 8, dp 16", 16 * 8, lambda: Layout(tp=8, pp=8, dp=16).world,
          "16 nodes are dp 2; then 16 bytes x 405B / 64 do not fit without ZeRO"),
    Claim("S2:456", "dp of DeepSeek-V3: 2,048 GPUs, pp 16, ep 64", 2048 / 16 / 64,
          lambda: 2048 / Layout(pp=16, ep=64).world, "EP lies inside DP: the 128 ranks have 2 copies of each expert"),
    Claim("S2:463", "recomputation, FLOPs more (the course, 8B)", 0.3,
          lambda: flops_per_token(L8, True)[1] / flops_per_token(L8)[0] - 1, within=0.05),
    Claim("S2:514", "ring all-reduce on 8 GPUs sends, of the data", 2 * 7 / 8,
          lambda: gradient_traffic("dp", 8, 1).total()),
    Claim("S2:515", "it hardly grows: on 1,024 GPUs over on 8", (1, 1.15),
          lambda: gradient_traffic("dp", MANY, 1).total() / gradient_traffic("dp", 8, 1).total()),
    Claim("S2:549", "PCIe 4.0 x16, one way, GB/s", 32, lambda: pcie(16)),
    Claim("S2:558", "cards of a node together, GB/s (planner: H100)", (100, 400), lambda: NODE * H100.between / 1e9),
    Claim("S2:574", "all-reduce of 10 GB over NVLink, ms (planner: 8 H100)", 22, lambda: all_reduce(1, 10e9) * 1e3,
          "900 GB/s are both ways together; NCCL has reached 360 of 450 one way"),
    Claim("S2:575", "the same over PCIe 4.0, ms", 313, lambda: gradient_traffic("tp", 8, 10).total() / pcie(16) * 1e3,
          "64 GB/s are both ways together"),
    Claim("S2:579", "64 MB at 50 GB/s, ms", 1.28, lambda: boundary(dp=8) * 1e3, within=0.05),
    Claim("S2:663", "7B, 4 x 4,096 tokens: activations of a layer, GB", (10, 99),
          lambda: 4 * activations(L8, 4096) / L8.n_layers, "scores are stored"),
    Claim("S2:672", "7B, ZeRO-3 on 4 GPUs, GB", 28, lambda: 7 * state(3, 4).total),
    Claim("S2:680", "8B forward, GFLOPs a token", 16, lambda: flops_per_token(replace(L8, seq_len=1))[0] / 3 / 1e9,
          "sequences are short", 0.07),
    Claim("S2:683", "8B training at half an A100's peak, tokens/s", 9750,
          lambda: A100.flops / 2 / flops_per_token(L8)[0], "2 N is forward alone; training is 6 N, and attention"),
    Claim("S2:685", "15T tokens at 78,000 a second, hours", 55, lambda: 15e12 / 78000 / 3600,
          "192,000,000 seconds: six years"),
    Claim("S3:4", "1T parameters on 3,072 A100s at 502 PFLOP/s, days (450B tokens)", (0, 92),
          lambda: 450e9 * forward_twice(GPT1T) / 502e15 / DAY),
    Claim("S3:12", "GPT-3 on one GPU, years (300B tokens)", 288, lambda: 300e9 * forward_twice(GPT3) / 46e12 / YEAR,
          "it does 46 TFLOP/s, as a V100 may; an A100 at S3:43's 44% needs a third", 0.05),
    Claim("S3:22", "bubble, in time, with v = 2", 1 / 2,
          lambda: bubble(interleaved, 8, 16, 2) / bubble(one_f_one_b, 8, 16)),
    Claim("S3:25", "tp 8: bytes over a boundary with scatter/gather", 1 / 8,
          lambda: boundary(tp=8) / boundary(tp=8, sp=False)),
    Claim("S3:30", "1T: parameters by the formula, billions",
          12 * 128 * 25600**2 * (1 + 13 / (12 * 25600) + (51200 + 2048) / (12 * 128 * 25600)) / 1e9,
          lambda: total_weights(GPT1T) / 1e9),
    Claim("S3:34", "1T: FLOPs a token by the formula, TFLOP",
          96 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600)) / 1e12,
          lambda: forward_twice(GPT1T) / 1e12),
    Claim("S3:43", "502 PFLOP/s, of the peak", 0.52, lambda: 502e15 / 3072 / A100.flops),
    Claim("S3:43", "1T on 3,072 GPUs, of the peak (planner: tp 8, pp 64, v 2)", 0.52,
          lambda: forward_twice(GPT1T) * 2048 / A100.flops / planned(GPT1T, pp=64, tp=8, dp=6, global_batch_size=3072,
          schedule="interleaved", recompute="full"), within=0.1, measured=True),
    Claim("S3:43", "1.7B on 32 GPUs, of the peak (planner)", 0.44,
          lambda: forward_twice(GPT2B) * 2048 * 16 / A100.flops / planned(GPT2B, dp=32, micro_batch_size=16,
          global_batch_size=512, recompute="full"), within=0.1, measured=True),
    Claim("S3:48", "recomputation: at most so much slower", 0.33,
          lambda: 1 - flops_per_token(GPT3)[0] / forward_twice(GPT3),
          "a third more FLOPs is a third more time, and a quarter less speed"),
]
# fmt: on


def number(x: float) -> str:
    """With three digits."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def stated(claim: Claim) -> str:
    """The text's number, in words."""
    low, high = claim.stated if isinstance(claim.stated, tuple) else (claim.stated, claim.stated)
    if low == high:
        return number(low)
    if low == 0:
        return f"at most {number(high)}"
    return f"{number(low)} or more" if high == inf else f"{number(low)} to {number(high)}"


def page() -> str:
    """All rows in Markdown, each with the expression that it computes, as it stands in this file."""
    source, computed = Path(__file__).read_text(), {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Lambda):
            computed[node.lineno] = " ".join(ast.get_source_segment(source, node.body).split())
    rows, verdicts = [], Counter()
    for claim in CLAIMS:
        value = claim.finds()
        verdict = claim.verdict(value)
        verdicts[verdict] += 1
        verdict += f"{':' * (verdict != 'holds if')} {claim.why}" if claim.why else ""
        ours = f"`{computed[claim.finds.__code__.co_firstlineno]}`"
        cells = claim.where, claim.says, stated(claim), number(value), verdict, ours
        rows.append(f"| {' | '.join(cells)} |")
    counts = f"{verdicts['holds']} hold, {verdicts['holds if']} hold on a condition, {verdicts['does not hold']} do not"
    counts += f"; {verdicts['measured otherwise']} were measured otherwise than we plan"
    top = "| line | what it says | its number | ours | verdict | ours is |", "| --- | --- | ---: | ---: | --- | --- |"
    return "\n".join([f"{len(CLAIMS)} claims: {counts}.", "", *top, *rows])


if __name__ == "__main__":
    print(page())
