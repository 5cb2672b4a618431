"""Tests of the techniques and services. README.md says what is tested where; tests/ at the root tests the course.

    python -m pytest extras/tests                 the default run, in one process; README.md has the parallel one
    python -m pytest -m exhaustive extras/tests/FILE     sweeps: every layout, every pair of flags
    python -m pytest extras/tests/test_layouts.py -k "step04 and tp=2"          one row

    pools(4).run(function, *args)   runs a function on four ranks, and returns its four results (conftest.py, pool.py)
    equal.record(step, options)     trains, and keeps every loss, norm, gradient and final parameter
    faults.injected(fault)          inside this context, the program has the mistake

Each rank is a process with one thread; ranks communicate over gloo. Models are tiny and, by default, in fp64. Slow
tests are marked `exhaustive`; of most, one case also runs by default.
"""
