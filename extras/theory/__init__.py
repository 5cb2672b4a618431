"""The planner, and the formulas that it evaluates: FLOPs, bytes held, bytes sent and seconds from plain sizes."""
