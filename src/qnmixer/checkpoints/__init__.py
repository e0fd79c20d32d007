"""Checkpoints and weights files: reading them, and the file and card to hand on."""
