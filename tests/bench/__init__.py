"""Measurements behind the README's tables; `python -m tests.bench` lists them."""
