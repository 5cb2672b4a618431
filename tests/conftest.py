"""Shared by all tests: pools of ranks, data sets with uneven targets, and what the default run leaves out."""

import os
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import datasets
import numpy as np
import pytest

from tests.pool import Pools


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`pytest.mark.sampled(n)`: the default run takes every n-th case of a test, `-m exhaustive` the others."""
    count = Counter()
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            (every,) = marker.args
            if count[item.parent, item.originalname] % every:
                item.add_marker("exhaustive")
            count[item.parent, item.originalname] += 1


@pytest.fixture(scope="session")
def pools():
    """`pools(4)` is a pool of four ranks; all are killed at the end of the session."""
    pools = Pools()
    yield pools
    pools.stop()


@pytest.fixture(scope="session")
def uneven_data(tmp_path_factory) -> str:
    """A data set of tokens and labels where most targets are masked: many micro-batches have few, some have none."""
    rng = np.random.default_rng(7)
    documents = []
    for length in rng.integers(40, 400, size=120):
        tokens = rng.integers(0, 257, size=length)
        labels = np.where(rng.random(length) < rng.choice([0.0, 0.05, 0.9]), tokens, -100)
        documents.append(dict(input_ids=tokens.tolist(), labels=labels.tolist()))
    path = tmp_path_factory.mktemp("uneven") / "data"
    datasets.Dataset.from_list(documents).save_to_disk(str(path))
    return str(path)
