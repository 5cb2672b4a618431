"""Services around a run. No step imports them; extras/__main__.py passes `ServedRun` (run.py) to a step."""
