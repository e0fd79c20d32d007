"""What a run adds to Lightning's loop: steps, callbacks, checkpoints, the terminal."""
