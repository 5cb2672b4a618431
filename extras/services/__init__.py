"""Services around a run, of which no step knows; extras/__main__.py starts a step with the run of run.py."""
