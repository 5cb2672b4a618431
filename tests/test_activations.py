"""--compress-activations: lossy by design, and how much; equal to one device where nothing is rounded, or the same is.

A value is off by at most 1/254 of the largest of its block, in each message. Bytes and calls are those of the law.
"""

import re
import tempfile

import pytest
import torch
from torch import Tensor

import step04_tp_sp as step04
import step07_moe_ep as step07
from common import UserError
from common.comm import exchange
from services.activations import Narrow, narrow
from services.checks import check_tp
from services.launch import open_mesh
from tests import equivalence, faults, test_step04, test_step06, test_step07_5d
from tests.equivalence import SMALL, check, label
from tests.pool import RankError
from tests.test_step07_5d import MODEL

CPU = torch.device("cpu")
BASE = dict(optimizer="sgd", n_layers=4, global_batch_size=8, micro_batch_size=2, steps=2)
INT8 = dict(compress_activations="int8")
PP = dict(pp=2, cp=1, tp=2)


# --- a message -------------------------------------------------------------------------------------------------------


def numbers(rank: int, *shape: int) -> Tensor:
    """fp64, of very different sizes along the last dimension and from token to token; some tokens are zero."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * torch.logspace(-4, 2, shape[-1])
    return x * torch.randint(3, (*shape[:-1], 1), generator=generator)


def largest(x: Tensor) -> Tensor:
    """For each value the largest of its block: of 256 along the last dimension, or of what is left."""
    return torch.cat([b.abs().amax(-1, keepdim=True).expand_as(b) for b in x.split(256, -1)], -1)


@pytest.mark.numerics
@pytest.mark.parametrize("dim", [3, 256, 300])
def test_a_message_is_as_long_and_as_exact_as_the_law_says(dim):
    """int8: a byte a value and 4 for a block, off by at most 1/254 of its largest value; bf16: by 2^-8 of itself."""
    x = numbers(0, 2, 5, dim)
    for mode, n_bytes, off in (("int8", dim + 4 * -(-dim // 256), largest(x) / 254), ("bf16", 2 * dim, x.abs() / 256)):
        codec = Narrow(None, mode, dim)
        message = codec.pack(x)
        assert message.nbytes == 10 * n_bytes and message.shape[:2] == (2, 5)
        assert (codec.empty(x).shape, codec.empty(x).dtype) == (message.shape, message.dtype)
        assert ((codec.unpack(message, dim) - x).abs() <= off * (1 + 1e-5)).all()
        assert torch.equal(codec.pack(x), message), "not the same again"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_stays_so(dtype):
    """An overflow of fp16 is to be seen by who looks for it; values near the smallest keep their sign."""
    codec = Narrow(None, "int8", 4)
    for bad in (float("inf"), float("nan")):
        x = torch.tensor([[1.0, bad, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0]], dtype=dtype)
        assert codec.unpack(codec.pack(x), 4).isfinite().all(-1).tolist() == [False, True]
    small = torch.tensor([[1.0, -1.0, 0.9, 0.0]]).mul(1e-5).to(dtype)
    assert torch.equal(codec.unpack(codec.pack(small), 4).sign(), small.sign().float())


def collectives_on_rank(dim: int, fault: str = "") -> str:
    """Runs on every rank: the three collectives over tokens in int8; what is further off than the law allows, or ""."""
    world = torch.distributed.get_world_size()
    with open_mesh({"tp": world}, CPU, "gloo") as mesh, faults.applied(fault):
        narrow(mesh, step04.Config(**INT8), dim)
        group, own = mesh["narrow tp"] if "narrow tp" in mesh.groups else None, slice(3 * mesh.rank, 3 * mesh.rank + 3)
        inputs = [numbers(r, 2, 3 * world, dim) for r in range(world)]
        total, off = sum(inputs), sum(largest(x) / 254 for x in inputs)
        mine, wrong = inputs[mesh.rank].clone(), []
        again = off + largest(total.abs() + off) / 254  # an all-reduce rounds parts, and their sum
        cases = dict(
            gather_tokens=(mine[:, own], torch.cat([x[:, 3 * r : 3 * r + 3] for r, x in enumerate(inputs)], 1), None),
            scatter_tokens=(mine, total[:, own], off[:, own]),
            sum_tokens=(mine[:, :-1], total[:, :-1], again[:, :-1]),  # tokens that no n divides
        )
        for name, (x, expected, bound) in cases.items():
            found = getattr(step04, name)(x, group).wait()
            bound = largest(expected) / 254 if bound is None else bound
            if ((found - expected).abs() > bound * (1 + 1e-5)).any():
                wrong.append(f"{name}: off by more than 1/254 of a block's largest value")
            if torch.equal(found, expected):
                wrong.append(f"{name}: nothing was rounded")
            everyone = [torch.empty_like(found) for _ in range(world)]
            torch.distributed.all_gather(everyone, found.contiguous())
            if name != "scatter_tokens" and not all(torch.equal(found, theirs) for theirs in everyone):
                wrong.append(f"{name}: not the same on every rank")
        assert torch.equal(mine, inputs[mesh.rank]), "an input was modified in place"
        return "; ".join(wrong)


@pytest.mark.picked(1)
@pytest.mark.parametrize("world, dim", [(2, 300), (4, 3)])
def test_collectives_are_as_exact_as_the_law_says(pools, world, dim):
    """And ranks that are to go on with the same numbers do, bit for bit."""
    assert pools(world).run(collectives_on_rank, dim) == [""] * world


def test_scales_of_another_rank_are_noticed(pools):
    """What is gathered is then off by more."""
    for found in pools(2).run(collectives_on_rank, 300, "scales_of_another_rank"):
        assert "gather_tokens: off by more than 1/254" in found


def messages_on_rank(sends: tuple[int, ...], receives: tuple[int, ...]) -> None:
    """Runs on two ranks: rank 0 sends a tensor in int8, rank 1 expects one of a shape of its own."""
    with open_mesh({"pp": 2}, CPU, "gloo") as mesh:
        narrow(mesh, step04.Config(**INT8), 32)
        x, buffer = numbers(0, *sends), torch.empty(receives, dtype=torch.float64)
        post = ([(x, 1)], []) if mesh.rank == 0 else ([], [(buffer, 0)])
        exchange(*post, mesh["narrow pp"]).wait()
        if mesh.rank:
            assert ((buffer - x).abs() <= largest(x) / 254 * (1 + 1e-5)).all() and not torch.equal(buffer, x)


def test_a_message_of_another_shape_is_refused(pools):
    """The first time, both ends compare batch, tokens and width, also if the number of bytes is the same."""
    pools(2).run(messages_on_rank, (2, 8, 32), (2, 8, 32))
    with pytest.raises(RankError, match=r"expects \[4, 4, 36\] torch.int8 from rank 0, which sent \[2, 8, 36\]"):
        pools(2).run(messages_on_rank, (2, 8, 32), (4, 4, 32))


# --- a run -----------------------------------------------------------------------------------------------------------

WHOLE = [
    ("step04_tp_sp", 2, dict(tp=2), dict(recompute="full")),
    ("step04_tp_sp", 4, dict(tp=4, sp=False), dict(seq_len=15, micro_batch_size=1)),
    ("step06_pipeline", 4, PP | dict(schedule="zb-h1", zero=0), dict(optimizer="adamw")),
    ("step06_pipeline", 4, PP | dict(schedule="interleaved", sp=False), {}),
]


@pytest.mark.picked(2)
@pytest.mark.parametrize("step, world, layout, base", WHOLE, ids=str)
def test_equals_one_device_if_nothing_is_rounded(pools, step, world, layout, base):
    """The same messages, with every byte of the values in them: only rounding is lossy."""
    check(pools(world), step, BASE | base, INT8 | layout, fault="activations_not_rounded")


def test_five_dimensions_equal_one_process_if_nothing_is_rounded(pools):
    """Experts, their gates and the numbers of rows among the rest, which is exact."""
    layout = dict(pp=2, cp=2, tp=2, ep=2, schedule="1f1b")
    more = dict(against=step07, fault="activations_not_rounded")
    check(pools(8), "step07_moe_ep", MODEL | dict(n_layers=4, optimizer="sgd", steps=1), INT8 | layout, **more)


SAME = [
    ("step04_tp_sp", dict(tp=2), "rounding_like_tp"),
    ("step04_tp_sp", dict(tp=2, tp_overlap=False), "rounding_like_tp"),
    ("step04_tp_sp", dict(tp=2, sp=False), "rounding_like_tp_without_sp"),
    ("step06_pipeline", PP | dict(schedule="1f1b"), "rounding_like_tp_and_two_stages"),
    ("step06_pipeline", PP | dict(schedule="zb-h1"), "rounding_like_tp_and_two_stages"),
    ("step06_pipeline", PP | dict(schedule="interleaved"), "rounding_like_tp_and_four_stages"),
]


def against(pool, step: str, layout: dict, reference: str, bound: float, steps: int = 2, fault: str = "") -> list:
    """The worst difference to one device under `reference`, a name of tests/faults.py, or a complaint, by rank."""
    options = SMALL | BASE | dict(steps=steps)
    file = str(equivalence.reference(options, reference))
    with tempfile.TemporaryDirectory() as out:
        ours = options | INT8 | layout | dict(out=out)
        return pool.run(found_on_rank, step, ours, file, bound, fault)


def found_on_rank(step: str, options: dict, file: str, bound: float, fault: str) -> float | str:
    """Runs on every rank: the worst difference, or what the comparison complains of."""
    try:
        return equivalence.on_rank(step, options, file, bound, [fault])
    except AssertionError as complaint:
        return str(complaint)


@pytest.mark.picked(0, 4)
@pytest.mark.parametrize("step, layout, reference", SAME, ids=str)
def test_equals_one_device_that_rounds_the_same(pools, step, layout, reference):
    """Losses, gradients and parameters to 1e-10: each x and dx is rounded once where it travels, and nowhere else.

    So what is gathered again, for overlap or in W, is what forward had; every schedule finds the same.
    """
    assert max(against(pools(4), step, layout, reference, 1e-10)) < 1e-10


@pytest.mark.parametrize("fault", ["scales_of_another_rank", "gradients_sent_whole", "gathered_again_whole"])
def test_faults_are_noticed(pools, fault):
    """By the comparison with one device that rounds the same."""
    found = against(pools(4), "step04_tp_sp", dict(tp=2), "rounding_like_tp", 1e-10, fault=fault)
    what = "the loss" if fault == "scales_of_another_rank" else "the gradient of"
    assert all(re.search(f"step 1: {what}.* differs by", str(text)) for text in found), found


@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_training_stays_near(pools, mode):
    """After a step with tp 2 and pp 2, losses, gradients and parameters are within 5% (norm-wise) of one device's.

    A message in int8 is off by at most sqrt(32)/254 = 2.2% of a token's norm, for its 32 values' largest is at most
    their norm; by about 0.5%, if they are about as large. A gradient has some twenty messages behind it.
    """
    found = against(pools(4), "step06_pipeline", PP | dict(compress_activations=mode), "", bound=0.05, steps=1)
    assert 1e-4 < max(found) <= 0.05


@pytest.mark.exhaustive
def test_ten_steps_end_near(pools, tmp_path):
    """AdamW in fp32: the loss is within 0.01 nats of that without the flag, and not equal to it."""
    options = SMALL | BASE | PP | dict(optimizer="adamw", dtype="fp32", lr=0.01, steps=10)
    runs = [options | dict(compress_activations=mode, out=str(tmp_path / mode)) for mode in ("none", "int8")]
    losses = [pools(4).run(test_step06.column_on_rank, run)[0][-1] for run in runs]
    assert 0 < abs(losses[1] - losses[0]) < 0.01, losses


@pytest.mark.parametrize("layout", [dict(tp=2), dict(tp=1)], ids=label)
def test_without_the_flag_a_run_is_what_it_was(pools, tmp_path, layout):
    """Bit for bit, and without ranks to send to also with it."""
    options, mode = SMALL | BASE | layout, "int8" if layout["tp"] == 1 else "none"
    runs = [options | dict(out=str(tmp_path / "a")), options | dict(out=str(tmp_path / "b"), compress_activations=mode)]
    expected, found = (pools(2).run(test_step04.losses_on_rank, run, "grad_norm") for run in runs)
    assert found == expected


# --- bytes -----------------------------------------------------------------------------------------------------------


def row(config: step04.Config) -> int:
    """Bytes of a token in a message."""
    dim = config.model_config().dim
    return 2 * dim if config.compress_activations == "bf16" else dim + 4 * -(-dim // 256)


def law(config: step04.Config, world: int) -> tuple[dict, dict]:
    """Calls and bytes over tp in one step, by operation: the layers' in short rows, embedding and head in fp64."""
    m, n, batch = config.model_config(), config.tp, config.micro_batch_size
    k, layers, redone = config.global_batch_size // (world // n) // batch, m.n_layers, config.recompute != "none"
    tokens = batch * m.seq_len
    whole, numbers = (n - 1) / n * tokens * m.dim * 8, 2 * (n - 1) * tokens * 8
    gathers, sums = (4 + 2 * config.tp_overlap + 2 * redone) * layers, (4 + redone) * layers
    if config.sp:
        short = (n - 1) / n * tokens * row(config)
        calls = dict(all_gather=gathers + 3, all_to_all=sums, reduce_scatter=2)
        sent = dict(all_gather=gathers * short + 2 * whole + numbers, all_to_all=sums * short, reduce_scatter=2 * whole)
    else:
        short = (n - 1) * -(-tokens // n) * row(config)
        calls = dict(all_to_all=sums, all_gather=sums + 1, all_reduce=2)
        sent = dict(all_to_all=sums * short, all_gather=sums * short + numbers, all_reduce=4 * whole)
    return tuple({name: k * n for name, n in found.items()} for found in (calls, sent))


def without_metrics(sent: dict) -> dict:
    """What theory speaks of."""
    return {name: n for name, n in sent.items() if name[-1].split("(")[-1] not in ("metrics)", "state)", "check)")}


TP_LAWS = [
    dict(tp=4, dim=320, **INT8),  # 256 + 64 values: two scales
    dict(tp=2, sp=False, seq_len=15, micro_batch_size=1, **INT8),
    dict(tp=2, recompute="full", tp_overlap=False, **INT8),
    dict(tp=2, compress_activations="bf16"),
    dict(tp=4, sp=False, recompute="selective", **INT8),
]


@pytest.mark.picked(0)
@pytest.mark.parametrize("flags", TP_LAWS, ids=label)
def test_bytes_over_tp(pools, tmp_path, flags):
    """Calls and bytes of a step on every rank, by operation; and those that the run predicts."""
    options = SMALL | BASE | dict(zero=0, steps=1, out=str(tmp_path / "run")) | flags
    calls, expected = law(step04.Config(**options), 4)
    for counted, sent, predicted in pools(4).run(test_step04.traffic_on_rank, options):
        found = without_metrics({("tp", name): n for name, n in sent["tp"].items()})
        assert found == pytest.approx({key: n for key, n in predicted.items() if key[0] == "tp"}, rel=1e-12)
        found = {name: n for (_, name), n in found.items() if "(" not in name}
        assert found == pytest.approx(expected, rel=1e-12)
        assert {name: counted["tp"][name] for name in calls} == calls


def test_gradients_sent_whole_are_noticed_by_their_bytes(pools, tmp_path):
    """There are reduce-scatters where all-to-alls should be."""
    options = SMALL | BASE | dict(tp=2, zero=0, steps=1, out=str(tmp_path / "run")) | INT8
    _, expected = law(step04.Config(**options), 2)
    (sent, *_) = pools(2).run(bytes_on_rank, options, "gradients_sent_whole")
    assert sent["all_to_all"] == expected["all_to_all"] / 2 and sent["reduce_scatter"] > 2 * expected["reduce_scatter"]


def bytes_on_rank(options: dict, fault: str) -> dict:
    """Runs on every rank: train; bytes over tp by operation."""
    with faults.applied(fault), equivalence.without_instruments():
        return step04.train(step04.Config(**options)).history[-1]["traffic"]["tp"]


@pytest.mark.picked(1, 2)
@pytest.mark.parametrize(
    "layout",
    [dict(schedule="1f1b"), dict(schedule="interleaved", sp=False), dict(schedule="zb-h1")],
    ids=label,
)
def test_bytes_over_a_boundary(pools, tmp_path, layout):
    """x and dx of every micro-batch, a row a token; with two stages on a rank three messages, not one. All predicted.

    Without SP each of the two tp ranks sends half of a row, with a scale of its own.
    """
    options = SMALL | BASE | PP | INT8 | layout | dict(out=str(tmp_path / "run"))
    rows = 2 * 16 * 20 if "sp" in layout else 2 * 8 * 36
    times = options["global_batch_size"] // 2 * (3 if layout["schedule"] == "interleaved" else 1)
    for sent, predicted, _ in pools(4).run(test_step06.costs_on_rank, options):
        assert sent["pp", "send"] == times * rows
        assert without_metrics(sent) == pytest.approx({name: n for name, n in predicted.items() if n}, rel=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more", [dict(shared_experts=1), dict(sp=False), dict(shared_experts=0, recompute="full")], ids=label
)
def test_bytes_in_five_dimensions(pools, tmp_path, more):
    """Byte by byte on every rank, with experts in the place of some MLPs; all of them chosen."""
    layout = dict(pp=2, cp=2, tp=2, ep=2, zero=1, schedule="1f1b", out=str(tmp_path / "run")) | more
    options = SMALL | MODEL | dict(experts_per_token=8, n_layers=4, steps=1, global_batch_size=4) | INT8 | layout
    for _, sent, predicted in pools(8).run(test_step07_5d.run_on_rank, options):
        predicted = {name: n for name, n in predicted.items() if n}
        assert without_metrics(sent) == pytest.approx(predicted, rel=1e-12)
        assert (("tp", "all_to_all") in sent and ("tp", "all_reduce (partial)") in sent) or not options.get("sp", True)


def test_sixteen_bits_are_not_made_of_sixteen():
    """One line that names the flags."""
    flags = SMALL | dict(tp=2, dtype="bf16", compress_activations="bf16")
    with pytest.raises(UserError, match=r"--compress-activations bf16 .* use int8, or --dtype fp32"):
        check_tp(step04.Config(**flags), 2)
    check_tp(step04.Config(**flags | dict(dtype="fp32")), 2)
    check_tp(step04.Config(**flags | INT8), 2)
