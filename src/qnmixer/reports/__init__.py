"""Pages and pictures that a run, an evaluation or a comparison leaves."""
