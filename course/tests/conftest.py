"""Shared by all tests: pools of ranks."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session")
def pools():
    """`pools(4)` is a pool of four ranks; all are killed at the end of the session."""
    from tests.pool import Pool

    made = {}
    yield lambda world: made.setdefault(world, Pool(world))
    for pool in made.values():
        pool.stop()
