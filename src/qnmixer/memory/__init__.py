"""What a training step needs of memory: the modes that save it, the plan, what is measured, and leaks."""
