"""Tests of techniques, tools, planner, labs and pages; README.md says what is tested where.

Each rank is a process with one thread; ranks communicate over gloo. Models are tiny and, by
default, in fp64. Slow cases are marked `exhaustive`, and a default run leaves them out.
"""
