"""Mistakes in techniques, services and common/, each with the test that must notice it. More are in tests/faults.py.

`injected` replaces a text in the source of a function or class, and compiles the source. It raises KeyError if the text
is not there. extras/tests/test_faults.py tries each mistake.
"""

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

from extras.tests.rows import DROP, EXPERTS, MASK, MEETS, MUON, SGD, TIED, UNCLIPPED, WINDOW, Row


class Fault(NamedTuple):
    """One mistake: in the source of `owner`, the text `old` becomes `new`."""

    module: str
    owner: str  # function, or class
    old: str
    new: str
    meaning: str


def noticed_by(judge: Row | tuple, module: str, *faults: tuple[str, ...]) -> list[tuple[Row | tuple, Fault]]:
    """Pair faults of a module with the judge that must notice them. In `module`, "/" stands for "extras.variants.".

    A judge is a Row, or a test (file, name, parameters...), or ("resumed", ranks, layout). This last one resumes a
    checkpoint of one process under the layout, and compares the numbers with those of an uninterrupted run.
    """
    return [(judge, Fault(module.replace("/", "extras.variants."), *fault)) for fault in faults]


RUNS_AHEAD = "test_the_host_runs_ahead_and_nothing_is_read_early"
BF16 = dict(dtype="bf16")  # for a row of one process, whose reference is the same run without the fault


# fmt: off
FAULTS: list[tuple[Row | tuple, Fault]] = [
    *noticed_by(Row(1, "step01_single_gpu", dict(fused_gradients=True), SGD), "/step01.fused_gradients",
        ("add_product", "total.addmm_(dy.T, x)", "dy.T @ x", "only the last micro-batch counts")),
    *noticed_by(("resumed", 1, {}), "extras.services.pieces",
        ("take", "optimizer.torch_optimizer.state[master.tensor][kind] = value", "pass",
         "a resumed AdamW begins anew")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2, tp_overlap=True), SGD), "/step04.block_overlap",
        ("EnterLinears", "dx.flatten(0, -2).addmm_(grad.flatten(0, -2), weight)", "pass",
         "dx lacks the terms of k and v, and of up")),
    *noticed_by(Row(1, "step01_single_gpu", {}, BF16 | dict(loss_chunk=3)), "/step01.chunked_loss",
        ("ChunkedLoss", "torch.zeros_like(weight, dtype=wide(weight.dtype))", "torch.zeros_like(weight)",
         "small addends vanish")),
    *noticed_by(("test_variants", "test_what_is_lost_is_owed", "topk", True), "/step02.compress",
        ("Compression", " + self.owed.get(key, 0.0)", "", "no error feedback: what a step has lost is never sent")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2, compress_activations="int8"), SGD, bound=0.03), "/step02.compress",
        ("dequantise", "view(torch.float32)", "view(torch.float32).roll(1, 0)", "values get the scales of other rows")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ring"), SGD), "/step05.ring",
        ("ordered_visible", "if source <= rank", "if source == rank", "a rank sees its own keys only")),
    *noticed_by(Row(4, "step05_cp_ring", dict(cp=4, cp_mode="usp"), SGD), "/step05.ulysses",
        ("turn_second", "x[:, :, 1].flip(2)", "x[:, :, 1]",
         "after the swap, tokens of second chunks are not in order of position")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2), SGD | MASK), "/step01.documents",
        ("MicroBatch", "if document == other and", "if source == rank and document == other and",
         "documents end at the border of a rank")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2), SGD | DROP), "/step01.dropout",
        ("Dropout", "shards[self.mesh.rank % len(shards)]", "shards[0]", "all ranks of tp drop as the first one does")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, recompute="full"), SGD | DROP), "extras.variants",
        ("Progress", 'for act in ("forward", "backward")', 'for act in ("forward",)',
         "a layer that is recomputed drops as the last forward does")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, schedule="gpipe"), SGD | DROP), "/step06.gpipe",
        ("ForwardTwice", "self.progress.act(plain, i", "plain(i", "R drops as the last F does")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, schedule="dualpipe"), SGD | TIED), "/step06.dualpipe",
        ("attach", '(*layout_of(param).partial_over, "mirror")', "layout_of(param).partial_over",
         "each copy learns from its own half of the micro-batches")),
    *noticed_by(("test_laws", "test_messages_of_experts_are_hidden"), "/step07.ep_overlap",
        ("Start", "exchange.start(rows)", "exchange.start(rows), exchange.pending.wait()",
         "right numbers, but nothing overlaps")),
    *noticed_by(Row(4, "step07_moe_ep", dict(ep=4, ep_mode="nodes"), EXPERTS | SGD), "/step07.expert_rows",
        ("over_nodes", ".swapaxes(1, 2)", "", "rows arrive at ranks without their experts")),
    *noticed_by(Row(4, "step04_tp_sp", dict(tp=4), SGD), "/step04.few_kv_heads",
        ("copy_heads", "note_layout(part,", "dict(",
         "ranks with the same key/value head each keep their own queries' share of its gradient")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2), MUON), "/step01.muon",
        ("Muon", "for shard in shards:", "for shard in ():", "each shard is made orthogonal by itself")),
    *noticed_by(Row(2, "step03_zero", dict(zero=1, offload_optimizer="cpu"), SGD), "/step03.offload",
        ("Update", "zero.publish()", "pass", "the host updates masters, and the weights stay as they are")),
    *noticed_by(Row(2, "step07_moe_ep", dict(cp=2), EXPERTS | SGD | dict(capacity_factor=0.6)), "/step07.routing",
        ("RoutedMoE", "self.group).flatten().argsort()", "self.group).flatten()",
         "the choices of cp ranks are not in order of the tokens")),
    *noticed_by(("test_schedules", "test_law", "rounds"), "/step06.rounds",
        ("rounds", "m // max(size, p)", "-(-m // max(size, p))", "a last round of few waits")),
    *noticed_by(("test_variants", "test_never_flushed_is_a_descent_by_weights_of_several_ages"), "/step06.pipedream",
        ("Stashed", "hold(self.model, self.stash[i])  #", "hold(self.model, self.stash[max(self.stash)])  #",
         "backward uses other weights than forward")),
    *noticed_by(Row(4, "step05_cp_ring", MEETS | dict(cp=2), UNCLIPPED, does=("meets",)), "/step02.diloco",
        ("DilocoSync", 'param.grad.mul_(self.mesh["dp"].size)', "pass", "a mean over all ranks' targets")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ring"), SGD | WINDOW), "/step01.window",
        ("return_halo", "ours[:, :, -halo:] += received", "pass",
         "what later ranks have found for our keys is lost")),
    *noticed_by(Row(2, "step03_zero", dict(zero=3, zero_keep=True), SGD), "/step03.zero_keep",
        ("publish", "ShardedUnit.free(unit)", "pass", "weights of the first step for ever")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "loss scale"), "/step01.fp16",
        ("LossScaling", "not math.isfinite(grad_norm)", "False", "no update is skipped")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "biases"), "/step07.routing",
        ("update", "moe.load.mean() - moe.load", "moe.load - moe.load.mean()", "overloaded experts get more tokens")),
    *noticed_by(("resumed", 3, dict(zero=1)), "extras.services.pieces",
        ("masters", "first = max(0, units[name].first - units[name].span[name][0]) if units else 0", "first = 0",
         "a slice is read from the beginning of its parameter")),
    *noticed_by(("resumed", 3, dict(zero=1)), "extras.services.evaluation",
        ("validate", 'for dim in ("dp", "cp", "pp"):', "for dim in ():",
         "the validation loss is that of one rank's tokens")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "plain"), "common.model",
        ("summed_cross_entropy", "return F", "logits.sum().item(); return F", "the host reads a sum")),
    *noticed_by(("test_gpu", "test_all_ranks_launch_in_an_order_that_ends"), "common.layout",
        ("global_norm", "for dim in mesh.sizes:", "for dim in list(mesh.sizes)[:: -1 if mesh.rank in (0, 3) else 1]:",
         "ranks 0 and 3 sum the norm over tp before pp: all four wait")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "offloaded"), "/step03.offload",
        ("Update", "            wait()", "            0", "the update does not wait for its gradient")),
    *noticed_by(("test_variants", "test_a_router_chooses_once", "elementwise"), "/step01.elementwise",
        ("attach", "CHOICE", "[]", "recomputation chooses again")),
]

PATCHES = {  # changes that are no mistakes: both runs of a comparison have them (`patch` in rows.py, test_pairs.py)
    "frozen": Fault("common.layout", "materialize", "param.requires_grad)",
        'param.requires_grad and not name.endswith(("1.mlp.up_proj.weight", "0.input_layernorm.weight")))',
        "a matrix and a norm do not train"),
    "not_rounded": Fault("extras.variants.step04.compress_activations", "Bits", "KINDS[mode], dtype, dim",
        "torch.float64, dtype, dim", "what is called bf16 or int8 has 64 bits, and no scales"),
    "all_sent": Fault("extras.variants.step02.compress", "Compression", "}[config.compress]",
        "} and (Tensor.clone, lambda message, *_: message)", "whatever --compress says, all 64 bits are sent"),
    "wide": Fault("common.trainer", "choose_device", "DTYPES[", 'DTYPES["fp64"] or DTYPES[',
        "whatever --dtype says, it is 64 bits"),
    "graphs_without_code": Fault("extras.variants.step01.compiled", "attach", "torch.compile(",
        'torch.compiler.reset() or partial(torch.compile, backend="aot_eager")(', "graphs are only traced"),
}
# fmt: on


def functions_of(thing: Any) -> dict[str, FunctionType]:
    """The methods of a class by name, or a function under the name "", all without their decorators."""
    members = vars(thing).items() if inspect.isclass(thing) else [("", thing)]
    plain = {name: inspect.unwrap(getattr(member, "__func__", member)) for name, member in members}
    return {name: member for name, member in plain.items() if isinstance(member, FunctionType)}


@contextmanager
def injected(fault: str | Fault) -> Iterator[None]:
    """Inside this context, `fault` is applied to the program: a Fault, a name in PATCHES, or "" for no change.

    It replaces the code objects of functions, so code that has already imported a function gets the mistake, too.
    """
    if not fault:
        yield
        return
    fault, made = fault if isinstance(fault, Fault) else PATCHES[fault], {}
    owner = getattr(importlib.import_module(fault.module), fault.owner)
    source = textwrap.dedent(inspect.getsource(owner))
    if fault.old not in source:
        raise KeyError(f"{fault.old!r} is not in {fault.module}.{fault.owner}")
    exec(compile(source.replace(fault.old, fault.new), "<fault>", "exec"), vars(sys.modules[fault.module]), made)
    right, wrong = functions_of(owner), functions_of(made[fault.owner])
    codes = {key: function.__code__ for key, function in right.items()}
    try:
        for key, function in right.items():
            function.__code__ = wrong[key].__code__
        yield
    finally:
        for key, function in right.items():
            function.__code__ = codes[key]


def with_fault(fault: str | Fault, function: Callable, *args: Any) -> Any:
    """Runs on every rank: call a function while the program has this mistake."""
    with injected(fault):
        return function(*args)
