"""Memory of a training step: the modes that save it, the plan, measurements, and leaks."""
