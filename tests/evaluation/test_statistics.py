import math

import pytest

from qnmixer.evaluation.statistics import Statistic, difference, spread


def test_mean_over_seeds_of_means_over_patients() -> None:
    found = spread({(1, 1): {"a": 30.0, "b": 34.0}, (2, 2): {"a": 31.0, "b": 37.0}})
    assert found.mean == 33.0
    assert found.over_seeds == pytest.approx(math.sqrt(2))  # of 32 and 34
    assert found.over_patients == pytest.approx(5 / math.sqrt(2))  # of 30.5 and 35.5
    assert (found.n_seeds, found.n_patients) == (2, 2)
    alone = spread({(7, 7): {"a": 30.0}})
    assert (alone.mean, alone.over_seeds, alone.over_patients) == (30.0, None, None)


def test_a_difference_is_paired_by_patient_and_by_seed() -> None:
    one, other = {(1, 1): {"a": 30.0, "b": 40.0, "c": 50.0}}, {(1, 1): {"c": 49.0, "b": 38.0, "a": 27.0}}
    found = difference(one, other)  # 3, 2, 1, whatever their order: deviation 1, error 1/√3, two degrees of freedom
    assert (found.mean, found.over_seeds, found.n_patients, found.n_seeds) == (2.0, None, 3, 1)
    assert found.over_patients == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)
    assert difference({(1, 1): {"a": 3.0}}, {(1, 1): {"a": 1.0}}) == Statistic(2.0, None, None, 1, 1)
    assert difference(one, {(1, 1): {"d": 1.0}}) is None
    # Both networks of a seed are better by the same: only what differs within a seed is left.
    one = {(seed, 1): {"a": 30.0 + seed, "b": 32.0 + seed + gain} for seed, gain in ((1, 0.0), (2, 0.1), (3, 0.2))}
    other = {(seed, 1): {"a": 29.0 + seed, "b": 31.0 + seed} for seed in (1, 2, 3)}
    found = difference(one, other)  # by seed 1, 1.05, 1.1; by patient 1, 1.1
    assert found.over_seeds == pytest.approx(4.30265 * 0.05 / math.sqrt(3), rel=1e-4)
    assert found.over_patients == pytest.approx(12.7062 * 0.05, rel=1e-4)
    found = difference(one, {(1, 1): other[1, 1]})  # a method that learns nothing needs one seed only
    assert found.n_seeds == 3
