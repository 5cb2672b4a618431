"""Lab 4: tensor and sequence parallelism (step04_tp_sp.py)."""

from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import UserError
from common.comm import Group
from common.layout import Layout, layout_of, materialize
from common.model import IGNORE, Decoder, ModelConfig
from labs.course import Case, Criterion, Lab, Most, Question, Task, demands
from labs.tape import Tape
from labs.training import trains

# --- task 1: the sums and the gathering that f and g are made of -----------------------------------------------------


def blocks(name: str) -> tuple[dict[str, Any], ...]:
    """Cases of one function, of tensors that are contiguous (`dense`) or not."""
    return (dict(mesh=dict(tp=3), b=2, part=5, dim=7, dense=False, name=name),
            dict(mesh=dict(tp=2), b=3, part=4, dim=5, dense=True, name=name))  # fmt: skip


def tokens_of(case: Case, rank: int) -> slice:
    """This rank's tokens of a sequence of `part` tokens a rank."""
    return slice(rank * case.part, (rank + 1) * case.part)


def wholes(case: Case) -> Tensor:
    """By rank, [ranks, batch, seq, dim]."""
    return case.draw("x", case.ranks, case.b, case.ranks * case.part, case.dim)


def strided(x: Tensor) -> Tensor:
    """The same numbers in memory of another order."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)


def collective_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """One of the three."""
    group = mesh["tp"]
    x = wholes(case)[group.rank]
    given = x[:, tokens_of(case, group.rank)] if case.name == "gather_tokens" else x
    given = given.clone(memory_format=torch.contiguous_format) if case.dense else strided(given)
    with Tape(mesh) as tape:
        result = getattr(step, case.name)(given, group)
    return {"the result": result, "bytes sent": tape.sent(), "the input after the call": given}


def collective_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    x, n = wholes(case), case.ranks
    parts, half = [x[r][:, tokens_of(case, r)] for r in range(n)], (n - 1) * x[0].nbytes / n
    given, result, sent = dict(
        sum_over_ranks=(x[rank], x.sum(0), 2 * half),
        gather_tokens=(parts[rank], torch.cat(parts, 1), half),
        sum_and_split_tokens=(x[rank], x.sum(0)[:, tokens_of(case, rank)], half),
    )[case.name]
    return {"the result": result, "bytes sent": dict(tp=sent), "the input after the call": given}


COLLECTIVES = Task(
    "three collectives on tokens", 20, ("sum_over_ranks", "gather_tokens", "sum_and_split_tokens"),
    "common/comm.py: all_reduce, all_gather, reduce_scatter, Pending; Korthikanti et al. 2022, figure 5",
    ("The collectives of common/comm.py work on contiguous tensors, and all_reduce works in place. Whose tensor is "
     "x? An all-gather puts the ranks' tensors one after another; a reduce-scatter gives rank k the k-th piece.",
     "Gather: a buffer [n, batch, seq/n, dim] has to become [batch, seq, dim]. Dimension 0 belongs just before the "
     "tokens; then both are one dimension. Splitting is the way back.",
     "unflatten, movedim, flatten and contiguous are all you need around the collective. Wait for it before you "
     "look at its result."),
    (*demands(collective_on_rank, collective_expected, blocks("sum_over_ranks"),
              ("sum_over_ranks: the sum of every rank's x; x stays as it is", 2, "the ")),
     *demands(collective_on_rank, collective_expected, blocks("gather_tokens"),
              ("gather_tokens: all ranks' tokens in order", 2, "the "),
              ("gather_tokens sends (n-1)/n of the whole", 1, "bytes")),
     *demands(collective_on_rank, collective_expected, blocks("sum_and_split_tokens"),
              ("sum_and_split_tokens: this rank's tokens of the sum", 2, "the "),
              ("sum_and_split_tokens sends (n-1)/n of the whole", 1, "bytes"))),
    faults=(),
)  # fmt: skip


# --- task 2: f and g -------------------------------------------------------------------------------------------------

(F_PLAIN, F_SP), (G_PLAIN, G_SP) = (
    [(dict(mesh=dict(tp=3), b=2, part=5, dim=7, sp=sp, name=name),) for sp in (False, True)] for name in "fg"
)


def pair_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """f or g forward and backward. The gradient of f's output differs by rank, that of g's is the whole output's."""
    group, here, f = mesh["tp"], tokens_of(case, mesh["tp"].rank), case.name == "f"
    x, dy = wholes(case), case.draw("dy", *wholes(case).shape)
    own = strided(x[group.rank][:, here] if case.sp and f else x[group.rank]).requires_grad_()
    grad = (dy[group.rank] if f else dy[0][:, here] if case.sp else dy[0]).clone()
    given = own.detach().clone(), grad.clone()
    with Tape(mesh) as tape:
        y = (step.enter_block if f else step.leave_block)(own, group, case.sp)
    with Tape(mesh) as back:
        y.backward(grad)
    found = {"the output": y, "the gradient of the input": own.grad}
    found |= {"bytes sent forward": tape.sent(), "bytes sent backward": back.sent()}
    return found | {KEPT: torch.equal(own.detach(), given[0]) and torch.equal(grad, given[1])}


def pair_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand: the transpose of a copy is a sum, of a gather a reduce-scatter."""
    x, n, here, f = wholes(case), case.ranks, tokens_of(case, rank), case.name == "f"
    dy, half = case.draw("dy", *x.shape), (n - 1) * x[0].nbytes / n
    output, gradient = (x[rank], dy.sum(0)) if f else (x.sum(0), dy[0])
    forward, backward = ({}, dict(tp=2 * half)) if f else (dict(tp=2 * half), {})
    if case.sp:
        forward = backward = dict(tp=half)
        gathered = torch.cat([x[r][:, tokens_of(case, r)] for r in range(n)], 1)
        output, gradient = (gathered, gradient[:, here]) if f else (output[:, here], gradient)
    found = {"the output": output, "the gradient of the input": gradient, KEPT: True}
    return found | {"bytes sent forward": forward, "bytes sent backward": backward}


KEPT = "the input and the gradient that it is given stay as they are"
PAIR = Task(
    "f and g", 15, ("Conjugate.forward", "Conjugate.backward", "enter_block", "leave_block"),
    "the docstring of the step, both tables of f and g; Shoeybi et al. 2019, section 3",
    ("Write down for two ranks which of x, y, dx, dy are the same numbers on both, and which are parts of a sum. "
     "Where y is the same on all ranks, so is dy, and each rank already has all of it.",
     "The transpose of a copy to n ranks is a sum over n ranks, and the other way round. The transpose of a gather "
     "is a reduce-scatter.",
     "Conjugate.forward keeps on ctx what backward needs, and calls one of the four functions above it; backward "
     "calls the other, and returns None for the three arguments that have no gradient."),
    (*demands(pair_on_rank, pair_expected, F_PLAIN, ("f without SP: values and gradients", 2, "the ")),
     *demands(pair_on_rank, pair_expected, G_PLAIN, ("g without SP: values and gradients", 2, "the ")),
     *demands(pair_on_rank, pair_expected, F_SP, ("f with SP", 2, "the ")),
     *demands(pair_on_rank, pair_expected, G_SP, ("g with SP", 2, "the ")),
     *demands(pair_on_rank, pair_expected, F_PLAIN + F_SP,
              ("f sends one all-reduce backward, or (SP) half of it each way", 1, "bytes")),
     *demands(pair_on_rank, pair_expected, G_PLAIN + G_SP,
              ("g sends one all-reduce forward, or (SP) half of it each way", 1, "bytes"))),
    faults=("g_sums_in_backward_too", "f_does_not_sum_in_backward", "g_does_not_sum", "tokens_cut_but_not_summed"),
)  # fmt: skip

# --- task 3: the vocabulary ------------------------------------------------------------------------------------------

WORDS = (  # a last rank with padding; a last rank with nothing else
    dict(mesh=dict(tp=3), b=2, s=7, dim=5, vocab=10, size=1.0),
    dict(mesh=dict(tp=4), b=3, s=5, dim=6, vocab=9, size=1.0),
)
LARGE = (dict(mesh=dict(tp=3), b=2, s=7, dim=5, vocab=10, size=900.0),)  # e^900 is infinite


def ids_of(case: Case, rank: int) -> range:
    """The tokens of a rank."""
    length = -(-case.vocab // case.ranks)
    return range(min(rank * length, case.vocab), min((rank + 1) * length, case.vocab))


def part_of(case: Case, whole: Tensor, rank: int, padding: float) -> Tensor:
    """A rank's part of the last dimension, with padding."""
    ids, length = ids_of(case, rank), -(-case.vocab // case.ranks)
    return F.pad(whole[..., ids.start : ids.stop], (0, length - len(ids)), value=padding)


def words(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and targets int64 [batch, seq], the table [vocab, dim], logits [batch, seq, vocab]."""
    targets = case.ids("targets", case.vocab, case.b, case.s)
    targets[0, 1], targets[-1, -1], targets[1, 0] = IGNORE, case.vocab - 1, 0
    tokens = torch.cat((torch.arange(case.vocab), case.ids("tokens", case.vocab, case.b * case.s - case.vocab)))
    logits = case.draw("logits", case.b, case.s, case.vocab) * case.size
    return tokens.view(case.b, case.s), targets, case.draw("table", case.vocab, case.dim), logits


def embedding_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """The embedding of a part of the table, and its gradient."""
    rank = mesh["tp"].rank
    tokens, _, table, _ = words(case)
    layer = step.VocabParallelEmbedding(nn.Parameter(part_of(case, table.T, rank, 0.0).T.clone()), ids_of(case, rank))
    given, out = tokens.clone(), layer(tokens)
    out.backward(case.draw("dy", *out.shape))
    gradient = layer.weight.grad[: len(ids_of(case, rank))]
    return {"the embedding": out, "the gradient of its weight": gradient, "tokens stay": torch.equal(given, tokens)}


def embedding_expected(rank: int, case: Case) -> dict[str, Any]:
    """The rows of this rank's tokens, and zero."""
    tokens, _, table, _ = words(case)
    here = (tokens >= ids_of(case, rank).start) & (tokens < ids_of(case, rank).stop)
    table = table.requires_grad_()
    out = F.embedding(tokens, table) * here[..., None]
    out.backward(case.draw("dy", *out.shape))
    ids = ids_of(case, rank)
    gradient = table.grad[ids.start : ids.stop]
    return {"the embedding": out.detach(), "the gradient of its weight": gradient, "tokens stay": True}


def whose_token(case: Case, rank: int, key: str, found: Any, expected: Any) -> str:
    """The first token that is wrong, and who holds it."""
    if key != "the embedding" or getattr(found, "shape", None) != expected.shape:
        return ""
    wrong = ((found - expected).abs().amax(-1) > 1e-9).nonzero()
    token = int(words(case)[0][tuple(wrong[0])])
    owner = token // -(-case.vocab // case.ranks)
    ids = ids_of(case, owner)
    kind = "its row" if owner == rank else "zero"
    return (
        f"token {token} belongs to rank {owner}, which has ids {ids.start} to {ids.stop - 1}: here it has to be {kind}"
    )


def loss_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """The loss of a part of the logits, behind which the padding has numbers that must not count."""
    group = mesh["tp"]
    _, targets, _, logits = words(case)
    own = part_of(case, logits, group.rank, 3.0).clone().requires_grad_()
    given = own.detach().clone(), targets.clone()
    with Tape(mesh) as tape:
        loss = step.vocab_parallel_cross_entropy(own, targets, ids_of(case, group.rank), group)
    with Tape(mesh) as back:
        (loss / 7).backward()
    unchanged = torch.equal(given[0], own.detach()) and torch.equal(given[1], targets)
    found = {"the loss": loss, "the gradient of the logits": own.grad, "logits and targets stay": unchanged}
    return found | {"bytes forward": sum(tape.sent().values()), "bytes backward": sum(back.sent().values())}


def loss_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    _, targets, _, logits = words(case)
    logits = logits.requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (loss / 7).backward()
    found = {"the loss": loss.detach(), "the gradient of the logits": part_of(case, logits.grad, rank, 0.0)}
    found |= {"logits and targets stay": True, "bytes backward": 0}
    found["bytes forward"] = Most(2.5 * (case.ranks - 1) * targets.numel() * 8)
    return found


STAY = "logits and targets stay"
VOCABULARY = Task(
    "vocabulary-parallel embedding and cross entropy", 25,
    ("VocabParallelEmbedding.forward", "vocab_parallel_cross_entropy"),
    "the docstrings of both; summed_cross_entropy in common/model.py",
    ("A token that is not in `ids` gives zero here, and its row on another rank. Which row do you look up for it, "
     "so that nothing is out of range?",
     "The log-sum-exp of log-sum-exps is that of the whole, and it does not overflow. All ranks but one have 0 for "
     "the target's logit. Padding must not count: it stands behind the first len(ids) logits.",
     "Gather the detached two numbers of every rank into [n, 2, batch, seq] and put your own, with their graph, in "
     "their place: then autograd finds softmax - one-hot for your logits. Targets that are IGNORE lose their term."),
    (Criterion(
         "the embedding: rows of the tokens in `ids`, zero for others; and its gradient",
         2,
         embedding_on_rank,
         embedding_expected,
         WORDS,
         explain=whose_token,
     ),
     *demands(
         loss_on_rank, loss_expected, WORDS,
         ("the loss, whole on every rank", 2, "the loss", STAY),
         ("its gradient", 3, "gradient"),
         ("two numbers a token travel, and nothing in backward", 1, "bytes"),
     ),
     *demands(loss_on_rank, loss_expected, LARGE, ("large logits do not overflow", 1, "the loss", "gradient")),),
    faults=("embedding_off_by_one", "target_off_by_one", "padding_in_the_softmax", "softmax_of_own_logits"),
)  # fmt: skip

# --- task 4: cuts ----------------------------------------------------------------------------------------------------

SIZES = dict(b=2, s=6, vocab=13, mesh=dict(dp=1, tp=2))
CUT = tuple(SIZES | dict(sp=sp, tied=tied) for sp in (True, False) for tied in (False, True))
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def shape_of(case: Case) -> ModelConfig:
    """A decoder in which no two sizes are the same."""
    return ModelConfig(16, 3, 4, 2, 12, case.vocab, case.s, tied=case.tied)


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 [batch, seq]."""
    targets = case.ids("targets", case.vocab, case.b, case.s)
    targets[0, 0] = IGNORE
    return case.ids("tokens", case.vocab, case.b, case.s), targets


def whole_model(case: Case) -> Decoder:
    """Before it is cut, without memory."""
    with torch.device("meta"):
        return Decoder(shape_of(case))


def model_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Records and shapes of a cut model; its loss, and what it sends."""
    model, found = whole_model(case), {}
    step.shard_tensors(model, mesh, case.sp)
    for name, param in model.named_parameters():
        record = layout_of(param)
        found[f"the shape of {name}"] = list(param.shape)
        found[f"the cuts of {name}"] = [[s.dim, s.over, s.start, s.stop, s.full] for s in record.splits]
        found[f"{name} is partial over"] = list(record.partial_over)
    found["parameters"] = sorted(name for name, _ in model.named_parameters())
    materialize(model, case.seed % 1000, torch.device("cpu"), torch.float64)
    with Tape(mesh) as tape:
        loss = model(*batch_of(case))
        loss.backward()
    return found | {"the loss": loss, "bytes of a micro-batch": tape.sent()}


def model_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    model, found = whole_model(case), {}
    for name, param in model.named_parameters():
        last, shape = name.split(".")[-2], list(param.shape)
        dim = 1 if last in ROWS else 0 if param.dim() > 1 else None
        found[f"the cuts of {name}"] = []
        if dim is not None:
            full, part = shape[dim], -(-shape[dim] // 2)
            found[f"the cuts of {name}"] = [[dim, "tp", rank * part, (rank + 1) * part, full]]
            shape[dim] = part
        found[f"the shape of {name}"] = shape
        found[f"{name} is partial over"] = ["tp"] if case.sp and param.dim() == 1 else []
    found["parameters"] = sorted(name for name, _ in model.named_parameters())
    materialize(model, case.seed % 1000, torch.device("cpu"), torch.float64)
    found["the loss"] = model(*batch_of(case)).detach()
    activations = (8 * shape_of(case).n_layers + 4) * case.b * case.s * 16 * 8 / 2  # with SP and without
    found["bytes of a micro-batch"] = dict(tp=activations + 2 * case.b * case.s * 8)
    return found


def cut_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """`cut` along both dimensions, of a parameter that is cut already; and in a group of one. What must not work."""
    found: dict[str, Any] = {}
    for dim in (0, 1):
        weight = nn.Parameter(torch.empty(10, 7, device="meta"), requires_grad=dim == 0)
        for ranks, name in ((3, "tp"), (2, "ep")):
            weight = step.cut(weight, dim, Group(name, 1, ranks, None))
        found[f"cut along {dim}"] = [[s.dim, s.over, s.start, s.stop, s.full] for s in layout_of(weight).splits]
        found[f"the shape of the part along {dim}"] = [*weight.shape]
        found[f"the part along {dim} is trained"] = weight.requires_grad
        found[f"the part along {dim} has memory"] = weight.device.type != "meta"
    found["a group of one changes it"] = step.cut(weight, 0, Group("tp", 0, 1, None)) is not weight
    try:
        heads = SimpleNamespace(n_kv_heads=2)
        step.cut_heads(nn.Parameter(torch.empty(12, 8, device="meta")), {"tp": Group("tp", 0, 3, None)}, heads)
        found["three ranks and two key/value heads"] = "no error"
    except UserError:
        found["three ranks and two key/value heads"] = "UserError"
    return found


def cut_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    found = {"a group of one changes it": False, "three ranks and two key/value heads": "UserError"}
    found |= {"cut along 0": [[0, "tp", 4, 8, 10], [0, "ep", 2, 4, 4]], "the shape of the part along 0": [2, 7]}
    found |= {"cut along 1": [[1, "tp", 3, 6, 7], [1, "ep", 2, 4, 3]], "the shape of the part along 1": [10, 2]}
    found |= {f"the part along {dim} is trained": dim == 0 for dim in (0, 1)}
    return found | {f"the part along {dim} has memory": False for dim in (0, 1)}


CUTS = Task(
    "cuts and their records", 30, ("cut", "cut_matrix", "cut_heads", "shard_tensors"),
    "common/layout.py: its docstring, Split, Layout, note_layout; register_forward_pre_hook in PyTorch's documentation",
    ("A weight is [out, in]: the paper's columns are dimension 0. The part is a new parameter on the meta device; "
     "its record is that of the whole, with one more Split. The last part may have padding.",
     "CUTS says which matrix is cut how. A tied matrix is one parameter with two names: cut it once. f runs before "
     "each block and before the head, g after the embedding and after each block.",
     "A forward pre-hook gets (module, inputs) and returns new inputs; a forward hook gets (module, inputs, output) "
     "and returns a new output. With SP a norm has seen this rank's tokens only: note_layout says so."),
    (Criterion("cut: the part, its record, a group of one; cut_heads refuses", 2, cut_on_rank, cut_expected, ({},)),
     *demands(
         model_on_rank, model_expected, CUT,
         ("every matrix is cut along the right dimension, a tied one once", 3, "shape of", "cuts of", "parameters"),
         ("norms are partial over tp with SP, and nothing else is", 2, "is partial over"),
         ("the loss is that of one device", 2, "the loss"),
         ("one f for q, k, v and one for gate, up", 2, "bytes"),
     ),),
    faults=("norm_gradients_not_summed", "rows_for_columns", "tie_dropped"),
)  # fmt: skip

# --- task 5: sums, and the whole file --------------------------------------------------------------------------------

PARTIAL = {"norm": ("tp",), "router": ("tp", "cp"), "matrix": (), "other": ("cp",), "norm2": ("tp",)}
SUMS = (dict(mesh=dict(dp=1, cp=2, tp=2)),)


def sums_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Gradients of five parameters (of one: none of it lies here, as under ZeRO) with different records."""
    model, rank = nn.Module(), 2 * mesh["cp"].rank + mesh["tp"].rank
    gradients = {}
    for i, (name, over) in enumerate(PARTIAL.items()):
        param = nn.Parameter(torch.zeros(i + 2, 3, dtype=torch.float64))
        param.parallel_layout = Layout(partial_over=over)
        model.register_parameter(name, param)
        gradients[name] = case.draw(name, 4, i + 2, 3)[rank].clone()
    held = dict(gradients)
    with Tape(mesh) as tape:
        step.sum_partial_gradients(model, gradients, mesh)
    return {f"the gradient of {name}": value for name, value in held.items()} | {"collectives": tape.starts()}


def sums_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    found = {}
    for i, (name, over) in enumerate(PARTIAL.items()):
        parts = case.draw(name, 4, i + 2, 3).view(2, 2, i + 2, 3)  # [cp, tp, ...]
        for axis, dim in ((0, "cp"), (1, "tp")):
            parts = parts.sum(axis, keepdim=True).expand(2, 2, -1, -1) if dim in over else parts
        found[f"the gradient of {name}"] = parts[rank // 2, rank % 2]
    return found | {"collectives": 2}


LAST = Task(
    "partial gradients, and the whole file", 15, ("sum_partial_gradients",),
    "the docstring of common/layout.py; that of the function",
    ("For every group of the mesh: which gradients are partial over it? Those go into one flat buffer.",
     "torch.cat of the flattened gradients, one all_reduce, split by their sizes, and copy each back in place.",
     "`gradients` has the tensors that the optimizer will read: copy_ into them; do not put new ones in the dict."),
    (*demands(
         sums_on_rank, sums_expected, SUMS,
         ("sums over the groups that a record names, in place", 2, "gradient"),
         ("one all-reduce a group", 1, "collectives"),
     ),
     trains(4, (2, dict(tp=2)), (2, dict(tp=2, sp=False))),
     trains(
         2, (2, dict(tp=2)), (2, dict(tp=2, sp=False)), says="so it does with a tied matrix", shape=dict(tied=True)
     ),),
    faults=("partial_sums_stay", "norm_gradients_not_summed"),
)  # fmt: skip

# --- the question ----------------------------------------------------------------------------------------------------


def draw_traffic(draw: Random) -> dict[str, Any]:
    """A layout."""
    return dict(tp=draw.choice((2, 4, 8)), b=draw.choice((1, 2, 4)), k=draw.choice((3, 5, 6)),
                s=2048 * draw.randint(1, 3), L=draw.choice((12, 18, 24)), h=512 * draw.randint(2, 6))  # fmt: skip


def layers_bytes(v: dict[str, Any]) -> float:
    """Of the layers, in one micro-batch: f and g of two blocks, each one all-reduce's worth of bf16 in all."""
    return 8 * v["L"] * (v["tp"] - 1) / v["tp"] * v["b"] * v["s"] * v["h"] * 2


QUESTION = Question(
    "--tp {tp} --sp, bf16, {L} layers, dim {h}, sequences of {s} tokens, {k} micro-batches of {b} sequences, nothing\n"
    "recomputed. How many bytes does a rank send over tp in one step for the layers (without embedding and head)?",
    draw_traffic,
    lambda v: v["k"] * layers_bytes(v),
    mistakes=(
        ("this is one micro-batch", layers_bytes),
        ("each part goes to the n-1 others once: (n-1)/n of the whole", lambda v: v["k"] * layers_bytes(v)
         * v["tp"] / (v["tp"] - 1)),
        ("this is forward alone", lambda v: v["k"] * layers_bytes(v) / 2),
    ),
)  # fmt: skip

LAB = Lab(
    4,
    "Tensor and sequence parallelism",
    ("step04_tp_sp",),
    (COLLECTIVES, PAIR, VOCABULARY, CUTS, LAST),
    QUESTION,
    flags="--tp 2 --no-sp",
)
