"""Evaluate methods slice by slice: a run against FBP, and all runs of a sweep against each other."""
