"""Measurements behind the tables of RESULTS.md; `python -m tests.bench` lists them."""
