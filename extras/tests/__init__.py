"""The proof of techniques and services: README.md says what is proved where. (Of the course: tests/.)

    python -m pytest extras/tests                 the default run; without -n: `-n 0`
    python -m pytest -m exhaustive extras/tests/FILE     sweeps: every layout, every pair of flags
    python -m pytest extras/tests/test_layouts.py -k "step04 and tp=2"          one row
    python -m extras.tests.bench                         lists the measurements; no test judges by seconds

    pools(4).run(function, *args)   runs a function on four ranks, and returns its four results (conftest.py, pool.py)
    equal.record(step, options)     trains, and keeps every loss, norm, gradient and final parameter
    equal.compare(ours, theirs, b)  raises if one is further apart than b, norm-wise: which is first, and how far
    bounds.py                       what b is: by dtype and operation, not by what one processor showed
    faults.injected(fault)          inside, the mistake is in the program

A rank is a process of its own with one thread, joined by gloo through a file. Models are tiny, numbers have 64 bits.
A test that is slow is marked `exhaustive`; one case of it stays in the default run.
"""
