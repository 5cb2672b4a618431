"""What surrounds a run: ranks that differ, what each rank sees."""

from unittest import mock

import pytest
import torch

from common.data import Data
from common.model import ModelConfig
from services import replicas
from tests.equal import SMALL, difference
from tests.test_checkpoint import STEPS, train_on_rank


def stray_on_rank(options: dict, rank: int, kind: str) -> str:
    """Runs on every rank: in the second step a number that others hold too flips its last bit on one rank."""
    right = replicas.check_replicas

    def strayed(config, parts, step):
        if step == 1 and torch.distributed.get_rank() == rank:
            piece = next(piece for piece in replicas.held(parts) if piece.kind == kind and "o_proj" in piece.name)
            piece.tensor.view(-1)[:1].mul_(1 + 2**-52)
        right(config, parts, step)

    with mock.patch.object(replicas, "check_replicas", strayed):
        try:
            train_on_rank("step04_tp_sp", options)
        except RuntimeError as error:
            return str(error)
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
