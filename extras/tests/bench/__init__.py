"""Measurements: `python -m extras.tests.bench` lists them."""
