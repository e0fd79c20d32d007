"""Evaluate a network slice by slice, beside FBP and total variation."""
