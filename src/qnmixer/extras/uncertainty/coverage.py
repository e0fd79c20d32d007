"""How often a pixel's error is within a multiple of its deviation over the symmetries."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FACTORS = np.geomspace(0.05, 500, 2000)  # multiples of the deviation at which coverage is counted, in steps of 0.5 %
GROUPS = "all pixels", "tenth with the smallest deviation", "tenth with the largest deviation"


def coverages(error: Tensor, deviation: Tensor) -> np.ndarray:
    """The share of the pixels of a slice [N] with |error| ≤ factor · deviation, in HU: float64 [groups, factors].

    Where the deviation is 0, an error of 0 is covered and no other.
    """
    ratio = torch.where(error == 0, 0.0, error.abs() / deviation)
    order, tenth = deviation.argsort(), max(1, len(deviation) // 10)
    groups = ratio, ratio[order[:tenth]], ratio[order[-tenth:]]
    return np.stack([np.searchsorted(np.sort(group.cpu().numpy()), FACTORS, "right") / len(group) for group in groups])


def by_patient(slices: Sequence[np.ndarray], patients: Sequence[int]) -> np.ndarray:
    """The means over the slices of each patient [patients, groups, factors]."""
    parts: dict[int, list[np.ndarray]] = {}
    for patient, curves in zip(patients, slices, strict=True):
        parts.setdefault(patient, []).append(curves)
    return np.stack([np.mean(curves, axis=0) for curves in parts.values()])


def factor_for(level: float, patients: np.ndarray) -> float:
    """The smallest factor that covers this share of the pixels in the mean over patients; infinite if none does."""
    covered = patients[:, 0].mean(0) >= level
    return float(FACTORS[covered.argmax()]) if covered.any() else float("inf")


def covered_by(factor: float, patients: np.ndarray) -> np.ndarray:
    """The share that a factor covers, [patients, groups]."""
    return patients[:, :, min(int(np.searchsorted(FACTORS, factor)), len(FACTORS) - 1)]
