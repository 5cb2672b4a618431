"""Measurements: `python -m tests.bench` lists them."""
