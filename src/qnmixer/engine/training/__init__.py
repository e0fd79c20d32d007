"""Training with Lightning: the module, the Trainer, its callbacks, and a run from start to results."""
