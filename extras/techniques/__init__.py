"""Techniques: one file each, an entry in a menu of a step."""
