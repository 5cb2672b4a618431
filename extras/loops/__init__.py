"""Techniques that change the loop: a script each, with a `train` of its own."""
