"""The proof of techniques and services (of the course: tests/). What is proved where, and how you add to it.

    python -m pytest extras/tests                 the default run; without -n: `-n 0`
    python -m pytest -m exhaustive extras/tests/FILE     sweeps: every layout, every pair of flags, every fault
    python -m pytest extras/tests/test_layouts.py -k "step04 and tp=2"          one row
    python -m extras.tests.bench                         lists the measurements; no test judges by seconds

WHAT IS PROVED
    claim                                                    by                    from a table
    a layout trains to the numbers of one process            test_layouts.py       rows.py: a Row a layout
    any two flags train right together, or are refused       test_pairs.py         record of each technique
    bytes, calls, live memory of a technique are its law     test_laws.py
    schedules are complete, end, idle as the papers say      test_schedules.py
    a rule that is not torch's own is what others mean by it test_rules.py
    launch lines do what their docstrings say                test_launch.py
    what has been saved is read under any layout             test_checkpoint.py
    all of these notice mistakes                             test_faults.py        faults.py: text, and what it becomes
    sizes that do not fit are one line on every rank         test_flags.py
    who may import whom, sizes, one shape for each room      test_house.py

What else is beside the course has a file of its name: test_plan.py (theory/), test_labs.py (labs/), test_pages.py,
test_cluster.py, test_screen.py, test_dry_run.py, test_readers.py, test_evaluation.py (extras/services/).
test_gpu.py runs the code for GPUs on GPUs that are not there (fake_gpu.py).

WHAT A TEST IS BUILT FROM
    pools(4).run(function, *args)   runs a function on four ranks, and returns its four results (pool.py, conftest.py)
    equal.record(step, options)     trains, and keeps every loss, norm, gradient and final parameter
    equal.compare(ours, theirs, b)  raises if one is further apart than b, norm-wise: which is first, and how far
    bounds.py                       what b is: by dtype and operation, not by what one processor showed
    faults.injected(name)           inside, the mistake of this name is in the program

A rank is a process of its own with one thread, joined by gloo through a file. Models are tiny, numbers have 64 bits.

HOW TO ADD
    a technique   its file; a row in rows.py. A rule that nobody else here computes: also a line in test_rules.py, which
                  compares it with what others wrote. Then run test_pairs.py's sweep: the default run has any two flags,
                  not any two values. A row of more than two flags equals one process in a run of test_pairs.py that
                  has them all; by itself in the sweep
    a behaviour   a function in test_layouts.py, and its name in the `does` of some rows
    a law         a test in test_laws.py: from the formula in the docstring to what `comm.observer` is shown, exactly
    a fault       a line in faults.py: module, function, its text, what it becomes, and the row or law that must notice
    a sweep       mark it `exhaustive`; leave one case of it in the default run
"""
