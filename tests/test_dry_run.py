"""The dry run counts what real ranks send: bytes and calls by dimension and operation, in layouts drawn from a seed."""

import importlib
import random
from dataclasses import fields

import pytest

from common import UserError
from common.model import PRESETS, ModelConfig
from services.dry_run import run_rank
from services.ledger import Ledger
from services.run import attach, check, compose
from tests import equal
from tests.equal import BASE, SMALL

SHAPE = dict(n_layers=4, n_heads=4, n_kv_heads=2)
VALUES = dict(  # flags that change what is sent; of experts, only the form of step 7 runs without numbers
    dtype=("fp32", "fp64", "bf16"),
    recompute=("none", "none", "full", "selective"),
    micro_batch_size=(1, 2),
    global_batch_size=(4, 8),
    optimizer=("adamw", "sgd", "adafactor", "muon"),
    sync=("bucket", "bucket", "naive", "ring", "overlap"),
    compress=("none", "none", "none", "bf16", "int8", "topk"),
    zero=(0, 1, 2, 3),
    zero_replicas=(1, 1, 2),
    offload_optimizer=("none", "none", "cpu"),
    tp=(1, 2, 4),
    sp=(True, True, False),
    tp_overlap=(False, True),
    compress_activations=("none", "none", "none", "int8"),
    cp=(1, 2, 4),
    cp_mode=("zigzag", "ring", "allgather", "ulysses"),
    pp=(1, 2, 4),
    schedule=("1f1b", "afab", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe"),
    ep=(1, 2, 4),
    tied=(False, True),
)
EVEN = dict(experts=4, experts_per_token=4)  # each token visits all experts: the dry run spreads them evenly


def draw(seed: int, most: int = 8) -> tuple[str, int, dict, list]:
    """(step, ranks, options) that the step takes, and what the dry run counts of the first and of the last rank."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(["step02_ddp", "step03_zero", "step04_tp_sp", "step05_cp_ring", *["step06_pipeline"] * 2])
        name = rng.choice([name, name, "step07_moe_ep"])
        step = importlib.import_module(name)
        known = {field.name for field in fields(compose(step))} | {"tied"}
        options = SHAPE | {flag: rng.choice(values) for flag, values in VALUES.items() if flag in known}
        options |= EVEN if "ep" in known else {}
        ranks = rng.choice((1, 2, 4)) * options.get("pp", 1) * options.get("cp", 1) * options.get("tp", 1)
        if ranks > most or ranks == 1:
            continue
        try:
            return name, ranks, options, [counted(name, ranks, options, rank) for rank in (0, ranks - 1)]
        except UserError:
            continue


def config_of(name: str, options: dict, **more):
    """A small model's."""
    PRESETS["test"] = ModelConfig(**SMALL | {key: options[key] for key in equal.SHAPE if key in options})
    flags = {key: value for key, value in (BASE | options | more).items() if key not in equal.SHAPE}
    return compose(importlib.import_module(name))(model="test", **flags)


def counted(name: str, ranks: int, options: dict, rank: int) -> dict:
    """Traffic and calls of a step of one rank, by the dry run. Raises UserError for flags that cannot work."""
    config = config_of(name, options, dry_run=ranks)
    check(config, 1)
    check(config_of(name, options), ranks)
    return run_rank(importlib.import_module(name).train, config, rank, attach).taken


class Booked(equal.Watch):
    """A run whose operations are booked; `taken`: those of the last step."""

    def count(self, operation, group, tensor, share):
        """One more."""
        self.ledger = getattr(self, "ledger", None) or Ledger()
        self.ledger.book(operation, group, tensor, share)
        super().count(operation, group, tensor, share)

    def record(self, step, tokens, **numbers):
        """Of this step."""
        super().record(step, tokens, **numbers)
        Booked.taken = self.ledger.take()


def sent_on_rank(name: str, options: dict) -> dict:
    """Runs on every rank: traffic and calls of the second step."""
    right, equal.Watch = equal.Watch, Booked
    try:
        equal.record(name, options | dict(lr=1e-4))
    finally:
        equal.Watch = right
    return Booked.taken


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n >= 3)) for n in range(200)])
def test_real_ranks_send_what_the_dry_run_counts(pools, seed):
    """The first and the last rank: all bytes, all calls."""
    name, ranks, options, expected = pools(1).run(draw, seed, 4 if seed < 8 else 8)[0]
    first, *_, last = pools(ranks).run(sent_on_rank, name, options)
    assert [first, last] == expected, (name, ranks, options)
