"""What surrounds a run, as a user starts it: a lost rank, ranks that differ, what each rank sees."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.data import Data
from common.model import PRESETS, ModelConfig
from services.certify import children
from services.checkpoint import Checkpoint, newest
from services.replicas import held
from tests.equal import SMALL, difference
from tests.test_checkpoint import STEPS, train_on_rank

ROOT = Path(__file__).parents[1]


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(pools, tmp_path):
    """torchrun starts the job anew, it goes on from its last checkpoint, and ends as if nothing had happened."""
    (tmp_path / "text.txt").write_text(Path(__file__).read_text() * 20)
    flags = dict(steps=12, save_every=4, eval_every=0, dtype="fp64", device="cpu", zero=3, dim=32, micro_batch_size=1)
    flags |= dict(global_batch_size=4, dataset=tmp_path / "text.txt")
    out, other = tmp_path / "killed", str(tmp_path / "whole")
    asked = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    command = f"-m torch.distributed.run --nproc_per_node=2 --max-restarts=1 step03_zero.py --model debug {asked}"
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    command = [sys.executable, *command.split(), "--resume", "auto", "--out", str(out)]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    deadline, metrics = time.monotonic() + 200, out / "metrics.jsonl"
    while job.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 5):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    os.kill(children(job.pid)[-1], signal.SIGKILL)
    assert job.wait(200) == 0, (tmp_path / "log").read_text()
    assert "going on from" in (tmp_path / "log").read_text()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    whole = (
        vars(PRESETS["debug"]) | flags | dict(out=other, n_kv_heads=2, warmup_steps=20, dataset=str(flags["dataset"]))
    )
    whole |= dict(lr=3e-3, grad_clip=1.0)
    whole = {name: value for name, value in whole.items() if name not in ("rope_theta", "rope_scaling", "norm_eps")}
    expected = pools(2).run(train_on_rank, "step03_zero", whole)[0]
    assert difference([row["loss"] for row in rows], [row["loss"] for row in expected]) == 0
    found, same = Checkpoint(newest(out)), Checkpoint(newest(Path(other)))
    for kind, tensors in same.index["tensors"].items():
        assert all(torch.equal(found.whole(kind, name), same.whole(kind, name)) for name in tensors), kind


def stray_on_rank(options: dict, rank: int, kind: str) -> str:
    """Runs on every rank: in the second step a number that others hold too flips its last bit on one rank."""
    from services import run as services_run

    right = services_run.replicas.check_replicas

    def strayed(config, parts, step):
        if step == 1 and torch.distributed.get_rank() == rank:
            piece = next(piece for piece in held(parts) if piece.kind == kind and "o_proj" in piece.name)
            piece.tensor.view(-1)[:1].mul_(1 + 2**-52)
        right(config, parts, step)

    services_run.replicas.check_replicas = strayed
    try:
        train_on_rank("step04_tp_sp", options)
    except RuntimeError as error:
        return str(error)
    finally:
        services_run.replicas.check_replicas = right
    return ""


@pytest.mark.parametrize("zero, kind", [(0, "master"), (0, "exp_avg"), (1, "weight")])
def test_a_replica_that_strays_is_named(pools, tmp_path, zero, kind):
    """One bit on one rank, found in the same step, on all ranks; and nothing is found where nothing strays."""
    options = dict(tp=2, zero=zero, check_replicas=1, save_every=0, out=str(tmp_path / "run"))
    for text in pools(4).run(stray_on_rank, options, 3, kind):
        assert text.startswith("step 2: ") and "is not the same on ranks" in text and f"{kind} of" in text
    pools(4).run(train_on_rank, "step04_tp_sp", options)


def slow_on_rank(*args) -> list[dict]:
    """Runs on every rank: rank 1 takes its time for each batch."""
    right = Data.batch

    def slow(data: Data, step: int):
        time.sleep(0.3 * int(os.environ["RANK"]))
        return right(data, step)

    with mock.patch.object(Data, "batch", slow):
        return train_on_rank(*args)


def test_each_rank_is_in_the_metrics(pools, tmp_path):
    """The mean of the ranks' losses, each of as many tokens, is the loss; replicas have one gradient norm.

    Others wait for a slow rank. The part of the pairs of tokens that attention looks at is that of a mask.
    """
    options = dict(log_ranks=True, save_every=0, eval_every=2, out=str(tmp_path / "run"), zero=0)
    rows = pools(2).run(slow_on_rank, "step03_zero", options | dict(documents="mask", end_token=32))[0]
    waited = [sum(row["ranks"][rank]["waited_seconds"] for row in rows) for rank in range(2)]
    assert waited[0] > 0.25 * len(rows) and waited[0] > waited[1]
    data = Data("", ModelConfig(**SMALL), STEPS["global_batch_size"], 0)
    for row in rows:
        assert row["waited_seconds"].keys() == {"dp"}
        assert row["waited_seconds"]["dp"] == row["ranks"][0]["waited_seconds"]
        ends = (data.batch(row["step"] - 1)[0][:3] == 32).long()
        numbers = ends.cumsum(1) - ends
        seen = (numbers[:, :, None] == numbers[:, None]).tril().sum().item()
        assert row["attention_pairs"] == pytest.approx(seen / (3 * 136))
        ranks = row["ranks"]
        assert difference(sum(rank["loss"] for rank in ranks) / 2, row["loss"]) < 1e-10
        assert ranks[0]["grad_norm"] == ranks[1]["grad_norm"]
        assert difference(ranks[0]["grad_norm"], row["grad_norm"]) < 1e-10
        assert all(rank["seconds"] > 0 and rank["peak_memory_bytes"] > 2**20 for rank in ranks)
