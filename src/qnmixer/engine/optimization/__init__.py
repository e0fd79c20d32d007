"""Losses, optimizers and learning-rate schedules of training, and the metrics of images."""
