"""Shared by all tests: pools of ranks, data sets with uneven targets, and what the default run leaves out."""

import os
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import pytest  # what imports torch is imported where it is needed: the process that deals out tests does without

from tests.slowest import pytest_terminal_summary as pytest_terminal_summary


def pytest_xdist_auto_num_workers(config):
    """Three processes share the files if all tests are to be run: many tests use one core, or wait."""
    return 3 if config.args == [str(config.rootpath)] or config.args == config.getini("testpaths") else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What the default run takes of a test's cases; `-m exhaustive` has the others.

    `pytest.mark.sampled(n)`: every n-th; `pytest.mark.picked(2, 5)`: those with these numbers, from 0.
    """
    count = Counter()
    for item in items:
        sampled, picked = item.get_closest_marker("sampled"), item.get_closest_marker("picked")
        number = count[item.parent, item.originalname]
        if (sampled and number % sampled.args[0]) or (picked and number not in picked.args):
            item.add_marker("exhaustive")
        count[item.parent, item.originalname] += 1


@pytest.fixture(scope="session", autouse=True)
def only_what_a_test_looks_at():
    """Opening the 674 files of the default text takes longer than a tiny run on it, and so do a run's figures."""
    from tests.pool import leave_figures_out, open_data_once

    open_data_once()
    leave_figures_out()


@pytest.fixture(autouse=True)
def one_more_step_in_sweeps(request, monkeypatch):
    """Two steps show what one update leaves to the next; -m exhaustive compares three."""
    if request.node.get_closest_marker("exhaustive"):
        monkeypatch.setattr("tests.equivalence.STEPS", 3)


@pytest.fixture(scope="session")
def pools():
    """`pools(4)` is a pool of four ranks; all are killed at the end of the session."""
    from tests.pool import Pools

    pools = Pools()
    yield pools
    pools.stop()


@pytest.fixture(scope="session")
def uneven_data(tmp_path_factory) -> str:
    """A data set of tokens and labels where most targets are masked: many micro-batches have few, some have none."""
    import datasets
    import numpy as np

    rng = np.random.default_rng(7)
    documents = []
    for length in rng.integers(40, 400, size=120):
        tokens = rng.integers(0, 257, size=length)
        labels = np.where(rng.random(length) < rng.choice([0.0, 0.05, 0.9]), tokens, -100)
        documents.append(dict(input_ids=tokens.tolist(), labels=labels.tolist()))
    path = tmp_path_factory.mktemp("uneven") / "data"
    datasets.Dataset.from_list(documents).save_to_disk(str(path))
    return str(path)
