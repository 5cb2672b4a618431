"""Measurements: `python -m extras.bench` lists them."""
