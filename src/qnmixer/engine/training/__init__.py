"""Training with Lightning: the Trainer, its callbacks, and the steps of a run from start to results."""
