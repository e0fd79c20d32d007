"""All that is Lightning's way of training: the module, the Trainer, its callbacks, a run from start to results."""
