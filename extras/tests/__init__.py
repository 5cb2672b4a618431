"""Tests of the techniques and services. README.md says what is tested where; tests/ at the root
tests the course.

    python -m pytest extras/tests                 the default tests, one by one; README.md has the parallel command
    python -m pytest -m exhaustive extras/tests/FILE     sweeps: every layout, every pair of flags
    python -m pytest extras/tests/test_layouts.py -k equals-step04       `equals` for the rows of step 4

    pools(4).run(function, *args)   runs a function on four ranks, and returns its four results (conftest.py, pool.py)
    equal.record(step, options)     trains, and keeps every loss, norm, gradient and final parameter
    faults.injected(fault)          inside this context, the program has the mistake

Each rank is a process with one thread; ranks communicate over gloo. Models are tiny and, by
default, in fp64. Slow cases of tests are marked `exhaustive`, and a default run leaves them out.
Most such tests also have a default case.
"""
