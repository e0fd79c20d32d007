"""How often a pixel's error is within a multiple of its deviation over the symmetries, by patient."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qnmixer.evaluation.statistics import half_width
from qnmixer.reconstruction.uncertainty import N_GROUPS

TISSUES = {"lung": (-950.0, -500.0), "fat": (-150.0, -30.0), "soft tissue": (0.0, 100.0), "bone": (200.0, 3000.0)}
"""HU of the truth."""


class Pixels(NamedTuple):
    """The pixels of a patient's slices, each an array [N]."""

    ratio: np.ndarray  # |error| / deviation
    group: np.ndarray  # tenth by the rank of the deviation
    hu: np.ndarray  # of the truth


def by_patient(slices: Sequence[Pixels], patients: Sequence[int | None]) -> list[Pixels]:
    """The pixels of the slices of each patient. A slice of nobody is a patient of its own."""
    parts: dict[object, list[Pixels]] = {}
    for number, (pixels, patient) in enumerate(zip(slices, patients, strict=True)):
        parts.setdefault(("slice", number) if patient is None else patient, []).append(pixels)
    return [Pixels(*map(np.concatenate, zip(*part, strict=True))) for part in parts.values()]


def factors_for(level: float, patients: Sequence[Pixels]) -> list[float]:
    """For each tenth the smallest factor that covers this share of its pixels, in the mean over patients."""
    factors = []
    for group in range(N_GROUPS):
        ratios = [pixels.ratio[pixels.group == group] for pixels in patients]
        weights = np.concatenate([np.full(len(part), 1 / max(1, len(part))) for part in ratios])
        values = np.concatenate(ratios)
        order = values.argsort()
        covered = weights[order].cumsum()
        place = np.searchsorted(covered, level * covered[-1] * (1 - 1e-12)) if len(values) else 0
        factors.append(float(values[order][place]) if len(values) else float("nan"))
    return factors


def coverage(factors: Sequence[float], patients: Sequence[Pixels]) -> dict[str, list[float]]:
    """The covered share of the pixels of each patient, by heading: all, each tenth, and each tissue that it has."""
    shares: dict[str, list[float]] = {}
    for pixels in patients:
        is_covered = pixels.ratio <= np.asarray(factors)[pixels.group]
        parts = {"all pixels": np.ones(len(is_covered), bool)}
        parts |= {f"tenth {group + 1}": pixels.group == group for group in range(N_GROUPS)}
        parts |= {tissue: (low <= pixels.hu) & (pixels.hu <= high) for tissue, (low, high) in TISSUES.items()}
        for heading, part in parts.items():
            shares.setdefault(heading, [])
            if part.any():
                shares[heading].append(float(is_covered[part].mean()))
    return shares


def half_widths_of_factors(level: float, patients: Sequence[Pixels]) -> list[float | None]:
    """Half of the 95 % interval of each factor over patients, by the jackknife; None with fewer than two."""
    n = len(patients)
    if n < 2:
        return [None] * N_GROUPS
    whole = np.array(factors_for(level, patients))
    without = [np.array(factors_for(level, [*patients[:k], *patients[k + 1 :]])) for k in range(n)]
    pseudo = np.stack([n * whole - (n - 1) * part for part in without])
    return [half_width(column) for column in pseudo.T.tolist()]
