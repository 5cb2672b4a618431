"""What surrounds a run and need not be read to understand it."""
