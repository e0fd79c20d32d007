"""Read checkpoints and weights files; export weights with a model card."""
