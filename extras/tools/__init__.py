"""Tools: scripts that read what runs leave behind, or run a step on tensors without data."""
