"""Statistics of a method over seeds and patients, and of the difference between two methods.

The unit is the patient, because the slices of one patient look alike: slices as units make an interval several times
too narrow. Phantoms, and slices whose patient is not known, are each a patient of their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from qnmixer.evaluation.scores import deviation

Seeds = tuple[int, int]  # the seeds of the weights and of the data

Scores = Mapping[Seeds, Mapping[str, float]]
"""seeds → patient → mean score of the patient's slices. The patients of two seeds may differ."""


@dataclass(frozen=True)
class Statistic:
    """A mean over seeds and patients, and how far it goes over each (None: only one value).

    Of a method that is a standard deviation. Of a difference it is half of the 95 % interval.
    """

    mean: float
    over_seeds: float | None  # of the seeds' values, each a mean over patients
    over_patients: float | None  # of the patients' values, each a mean over seeds
    n_seeds: int
    n_patients: int


def spread(scores: Scores) -> Statistic:
    """Mean and standard deviations of one method."""
    seeds, patients = [mean(of_seed.values()) for of_seed in scores.values()], [*_patient_means(scores).values()]
    return Statistic(mean(seeds), deviation(seeds), deviation(patients), len(seeds), len(patients))


def difference(method: Scores, rival: Scores) -> Statistic | None:
    """`method` minus `rival`, paired by patient and by seed; None if they have no patient in common.

    The interval over patients says what other patients would give with these networks. The interval over seeds says
    what other trainings would give on these patients. A method with one seed is compared with every seed of the other.
    """
    method_means, rival_means = _patient_means(method), _patient_means(rival)
    of_patients = [method_means[patient] - rival_means[patient] for patient in method_means if patient in rival_means]
    if not of_patients:
        return None
    of_seeds = [
        mean(method_scores[patient] - rival_scores[patient] for patient in method_scores if patient in rival_scores)
        for method_scores, rival_scores in _paired(method, rival)
        if method_scores.keys() & rival_scores.keys()
    ]
    return Statistic(mean(of_patients), half_width(of_seeds), half_width(of_patients), len(of_seeds), len(of_patients))


def _paired(method: Scores, rival: Scores) -> list[tuple[Mapping[str, float], Mapping[str, float]]]:
    """The scores of both by seed."""
    if len(method) == 1 or len(rival) == 1:
        return [(method_scores, rival_scores) for method_scores in method.values() for rival_scores in rival.values()]
    return [(method[seeds], rival[seeds]) for seeds in method if seeds in rival]


def _patient_means(scores: Scores) -> dict[str, float]:
    """The mean over seeds of each patient."""
    values: dict[str, list[float]] = {}
    for of_seed in scores.values():
        for patient, score in of_seed.items():
            values.setdefault(patient, []).append(score)
    return {patient: mean(patient_scores) for patient, patient_scores in values.items()}


def half_width(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % interval of a mean: t·s/√n with n − 1 degrees of freedom. None for a single value."""
    n, s = len(values), deviation(values)
    return None if s is None else student_quantile(n - 1) * s / math.sqrt(n)


def student_quantile(freedom: int) -> float:
    """The t for which |T| ≤ t has a probability of 95 % in Student's distribution.

    With t = √ν tan θ the density becomes cos^(ν−1) θ, which is summed here: right to 4 digits. (SciPy has it, but is no
    dependency.)
    """
    edges = np.linspace(0.0, np.pi / 2, 20_001)
    middles = (edges[1:] + edges[:-1]) / 2
    below = np.cumsum(np.cos(middles) ** (freedom - 1))
    theta = np.interp(0.95, np.concatenate([[0.0], below / below[-1]]), edges)
    return float(math.sqrt(freedom) * np.tan(theta))
