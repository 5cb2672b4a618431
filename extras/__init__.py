"""What is beside the course: further techniques, what surrounds a run, theory, labs. The course knows nothing of it."""
