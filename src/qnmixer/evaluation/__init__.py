"""Methods against each other, slice by slice: a run against FBP, and all runs of a sweep."""
