"""Metrics of images."""
