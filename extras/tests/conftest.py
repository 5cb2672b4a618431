"""Pytest hooks and the fixtures that all tests share: pools of ranks, and the reference numbers of one process."""

import gc
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import pytest

# The order in which files start; others follow. Only one pool of ranks computes at a time (pool.py), so files that
# need ranks alternate with files that do not. Most long files come first.
ORDER = ["layouts", "cluster", "launch", "labs", "dry_run", "pages", "plan", "faults", "screen", "gpu"]
ORDER += ["pairs", "house", "evaluation", "schedules", "flags", "seam", "laws", "checkpoint"]


def pytest_xdist_auto_num_workers(config):
    """With -n auto, start three workers for the whole folder, and none for single files."""
    return 3 if Path(__file__).parent in map(Path.absolute, map(Path, config.args)) else 0


def pytest_collection_modifyitems(items):
    """Sort tests by `ORDER`. Raises UsageError for the course's tests: techniques add values to the course's flags."""
    if others := {item.path.parent.name for item in items if Path(__file__).parent not in item.path.parents}:
        raise pytest.UsageError(f"extras/tests and {', '.join(sorted(others))} need a pytest each: give one of them")
    place = {f"test_{name}": at for at, name in enumerate(ORDER)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    gc.freeze()  # imported modules are not garbage, and scanning them takes a quarter of a dry run's time
    gc.set_threshold(100_000)


def pytest_addoption(parser):
    """Add --device. With `cuda`, the layouts of test_layouts.py train on this machine's GPUs, over NCCL."""
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="device on which layouts train")


@pytest.fixture(scope="session")
def pools(pytestconfig):
    """`pools(4)` returns a pool of four ranks, and `pools(4, "name")` another one. All are killed after the session."""
    from extras.tests.pool import Pool

    made, device = {}, pytestconfig.getoption("--device")
    yield lambda world, kind="": made.setdefault((world, kind), Pool(world, device))
    for pool in made.values():
        pool.stop()


@pytest.fixture(scope="session")
def reference(pools):
    """`reference(row)` returns the numbers of one process that trains with `row.base`. Each base trains only once."""
    from extras.tests import equal

    made = {}

    def make(row):
        step = equal.one_process(row)
        key = json.dumps([step, row.base], sort_keys=True)
        if key not in made:
            (made[key],) = pools(1).run(equal.record, step, row.base)
        return made[key]

    return make
