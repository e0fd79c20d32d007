"""Losses. Each gives one number for each image, [B], from images and truths [B, 1, H, W].

A typed argument is a checked key of the config: loss.epsilon=0.01.
"""

from torch import Tensor


def charbonnier(image: Tensor, truth: Tensor, epsilon: float = 1e-3) -> Tensor:
    """Mean of √((x − truth)² + ε²) − ε: squared for errors below ε, absolute above."""
    return (((image - truth).square() + epsilon**2).sqrt() - epsilon).mean((1, 2, 3))


def edges(image: Tensor, truth: Tensor, weight: float = 0.5, epsilon: float = 1e-3) -> Tensor:
    """The same, and `weight` times the mean absolute error of the differences between neighbouring pixels."""
    error = image - truth
    slopes = error.diff(dim=-1).abs().mean((1, 2, 3)) + error.diff(dim=-2).abs().mean((1, 2, 3))
    return charbonnier(image, truth, epsilon) + weight * slopes
