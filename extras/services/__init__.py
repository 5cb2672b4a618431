"""What surrounds a run. Nothing in a step knows that it exists; common/trainer.py's `main` opens the door to run.py."""
