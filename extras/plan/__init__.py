"""The planner, and its formulas for FLOPs, memory and seconds: they need only sizes, no run."""
