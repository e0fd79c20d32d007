"""Pages and pictures of runs, evaluations and comparisons."""
