"""The planner, and its formulas for FLOPs, memory, traffic and seconds, which need only sizes, no run."""
