"""What surrounds a run. No step knows that it exists; extras/__main__.py starts a step with run.py around it."""
