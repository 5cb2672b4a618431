"""Code around the course: further techniques, services for a run, theory and labs. The course
imports none of it.
"""
