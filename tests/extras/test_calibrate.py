"""`qnmixer.calibrate` on scans and series that were simulated with known I₀ and σ."""

import sys
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from notebooks.benchmarks.calibrate_coverage import CORNERS, FAULTS, KINDS, SOUND, calibrated, draw, held

from qnmixer.calibrate import check, main
from qnmixer.commands.command import TRACEBACK
from qnmixer.errors import DataError
from qnmixer.extras.calibration.dose import Dose, Variances, fit_dose
from qnmixer.extras.calibration.report import calibrate_input
from qnmixer.extras.calibration.variances import of_series
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, PhysicalNoise
from qnmixer.settings.compose import compose

from ..data.conftest import make_ct

WATER = 0.0192
N_REPEATS, SIGMA = 40, 20.0
SCAN = FanBeamGeometry(96, 4.0, 24, 160, 4.0, 600.0, 290.0)
SERIES = replace(SCAN, n_views=180)
KEYS = [
    "geometry.field_of_view=384", "geometry.n_views=180", "geometry.n_detectors=160", "geometry.detector_pitch=4",
    "geometry.detector_offset=0", "geometry.source_to_axis=600", "geometry.axis_to_detector=290",
    "geometry.beam=fan_flat",
]  # fmt: skip


def disc(radius: float) -> torch.Tensor:
    """A disc of water, x = 1, in air [1, 1, S, S]; `radius` in mm. Its edge is smooth, so that FBP has no streaks."""
    axis = (torch.arange(SCAN.image_size) - (SCAN.image_size - 1) / 2) * SCAN.pixel_size
    distance = (axis[:, None] ** 2 + axis**2).sqrt()
    return ((radius - distance) / (4 * SCAN.pixel_size) + 0.5).clamp(0, 1)[None, None]


projector = cache(FanBeamProjector)


def repeats(
    photons: float, sigma: float, beam: str = "fan_flat", radius: float = 150.0, n: int = N_REPEATS
) -> np.ndarray:
    """Line integrals [n, V, D] of attenuation with noise."""
    y = projector(replace(SCAN, beam=beam))(disc(radius))
    noise = PhysicalNoise(photons, WATER, sigma)
    return WATER * noise(y.expand(n, -1, -1, -1), [(7, k) for k in range(n)])[:, 0].double().numpy()


def dose_of(words: list[str]) -> Dose:
    """A dose that is written nowhere."""
    dose = calibrated(words)
    assert isinstance(dose, Dose), dose
    return dose


def calibration(*words: str) -> Dose:
    """By the code of the command."""
    config = check(compose("calibrate", [*words]))
    Path(config.output).mkdir(parents=True)
    return calibrate_input(config)


@pytest.mark.parametrize(("beam", "photons"), [("fan_flat", 1e4), ("fan_curved", 3e4), ("parallel", 1e5)])
def test_repeated_scans_give_the_dose_back(beam: str, photons: float, tmp_path: Path) -> None:
    np.save(tmp_path / "scans.npy", repeats(photons, SIGMA, beam))
    dose = dose_of([f"input={tmp_path}/scans.npy"])
    assert dose.photons == pytest.approx(photons, rel=0.05)
    assert dose.electronic_sigma == pytest.approx(SIGMA, rel=0.05)
    assert dose.sigma_interval is not None


def test_starved_rays_do_not_count(tmp_path: Path) -> None:
    np.save(tmp_path / "scans.npy", repeats(1e3, 0.0, radius=180.0))  # one count a ray in the middle
    dose = dose_of([f"input={tmp_path}/scans.npy"])
    assert dose.photons == pytest.approx(1e3, rel=0.05)
    assert dose.electronic_sigma < 3


def test_counts_are_divided_by_those_of_air(tmp_path: Path) -> None:
    gain = np.linspace(2.0, 3.0, SCAN.n_detectors)  # detector units of a photon
    rng = np.random.default_rng(0)
    np.save(tmp_path / "scans.npy", 3e4 * np.exp(-repeats(3e4, SIGMA)) * gain)
    np.save(tmp_path / "air.npy", rng.poisson(3e4, (200, 1, SCAN.n_detectors)) * gain)
    dose = dose_of([f"input={tmp_path}/scans.npy", f"air={tmp_path}/air.npy", "unit=counts"])
    assert (dose.photons, dose.electronic_sigma) == pytest.approx((3e4, SIGMA), rel=0.05)


def test_an_air_scan_shows_counts_and_says_what_it_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    air = np.random.default_rng(0).poisson(2e3, (200, SCAN.n_detectors)) * 5.0
    np.save(tmp_path / "air.npy", air + 5 * 30 * np.random.default_rng(1).standard_normal(air.shape))
    (tmp_path / "air.npy").rename(tmp_path / "air.NPY")
    words = [f"input={tmp_path}/air.NPY", "unit=counts", f"output={tmp_path}"]
    dose = calibration(*words[:2], f"{words[2]}/a")
    assert dose.photons == pytest.approx(2e3 / (1 + 900 / 2e3), rel=0.05)  # all noise taken for that of counts
    assert "give electronic_sigma=" in capsys.readouterr().out
    dose = calibration(*words[:2], f"{words[2]}/b", "electronic_sigma=30")
    assert dose.photons == pytest.approx(2e3, rel=0.05)


def test_the_fit_of_exact_variances_is_exact_and_intervals_hold_the_truth_nineteen_times_of_twenty() -> None:
    counting, rng, n = np.geomspace(3e-3, 1, 40), np.random.default_rng(0), 200
    true = counting / 5e4 + (12 / 5e4) ** 2
    for sigma in (None, 12.0):
        dose = fit_dose(Variances(true, counting, np.ones(40), 0.01), sigma)
        assert (dose.photons, dose.electronic_sigma) == pytest.approx((5e4, 12), rel=1e-6)
    held = np.zeros(2)
    for _ in range(n):
        dose = fit_dose(Variances(true * (1 + 0.05 * rng.standard_normal(40)), counting, np.ones(40), 0.05))
        pairs = ((5e4, dose.photons_interval), (12, dose.sigma_interval))
        held += [low < value < high for value, (low, high) in pairs]
    assert ((held / n > 0.9) & (held / n < 1)).all()


def test_scans_as_scanners_make_them_have_intervals_that_hold_or_a_line() -> None:
    """Three of each kind: bow-tie, drift, equal frames, turned axes, much electronic noise, crosstalk, two repeats."""
    of = {name: held(name, 3) for name in KINDS}
    assert sum(kind.given for kind in of.values()) >= 3 * (len(KINDS) - 3)
    assert sum(kind.photons + kind.n - kind.given for kind in of.values()) >= 0.92 * 3 * len(KINDS)
    assert sum(kind.sigma + kind.n - kind.given for kind in of.values()) >= 0.92 * 3 * len(KINDS)
    assert not of["repeats on the last axis"].given
    (line,) = of["repeats on the last axis"].lines
    assert "[views, bins, repeats]" in line


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_of_many_scans_of_a_kind_nine_in_ten_intervals_hold(name: str) -> None:
    """Of 60 draws, intervals that hold with 0.95 fall below 0.92 one time in six; of 150, one in twenty-five."""
    assert held(name, 150).coverage >= 0.92


@pytest.mark.parametrize("unit", ["counts", "attenuation"])
def test_a_bow_tie_is_found_and_simulates_the_same_noise(unit: str, tmp_path: Path) -> None:
    kind, rng = replace(KINDS["bow-tie, 1 to 0.3"], n=30, unit=unit), np.random.default_rng(0)
    words, photons, _ = draw(kind, rng, tmp_path)
    dose = calibration(*words)
    assert dose.photons == pytest.approx(photons, rel=0.05)
    profile = np.load(tmp_path / "dose" / "profile.npy")
    expected = 0.3 + 0.7 * np.cos(np.pi / 2 * np.linspace(-1, 1, len(profile))) ** 2
    assert np.abs(profile - expected).max() < 0.06
    assert profile.max() == 1


def test_crosstalk_is_measured_and_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, photons, _ = draw(KINDS["crosstalk of 5 %"], np.random.default_rng(1), tmp_path)
    dose = calibration(*words)
    assert dose.photons == pytest.approx(photons, rel=0.05)
    assert dose.crosstalk == pytest.approx(0.05, abs=0.005)
    assert f" noise.crosstalk={dose.crosstalk:.2g}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("scan", "line"), [
    (lambda scans: np.convolve(scans.ravel(), [1 / 3] * 3, "same").reshape(scans.shape), "filtered or interp"),
    (lambda scans: scans * np.where(np.arange(40)[:, None, None] < 20, 1, np.linspace(1, 1.03, 160)), "bins drift"),
    (lambda scans: scans * np.random.default_rng(0).choice([1, 0.05], (1, 24, 1)), "The variances fit no I₀ and σ"),
])  # fmt: skip
def test_what_does_not_fit_is_said_and_has_no_interval(scan: Any, line: str, tmp_path: Path) -> None:
    counts = np.random.default_rng(2).poisson(1e4 * np.exp(-repeats(1e9, 0.0, n=1)), (40, 24, 160)).astype(float)
    np.save(tmp_path / "scans.npy", -np.log(np.maximum(scan(counts), 1) / 1e4))
    dose = dose_of([f"input={tmp_path}/scans.npy"])
    assert dose.photons_interval is None
    assert line in " ".join(dose.remarks)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_moves_the_dose_is_said_and_has_no_interval(name: str, tmp_path: Path) -> None:
    kind, line = FAULTS[name]
    for seed in range(2):
        dose = dose_of(draw(kind, np.random.default_rng(seed), tmp_path)[0])
        assert dose.photons_interval is None
        assert line in " ".join(dose.remarks)


def test_rays_that_never_vary_are_left_out_and_said(tmp_path: Path) -> None:
    of = [held(name, 4, kind) for name, kind in SOUND.items()]
    assert min(kind.given for kind in of) >= 3
    assert sum(kind.photons for kind in of) >= sum(kind.given for kind in of) - 2
    assert sum(kind.sigma for kind in of) >= sum(kind.given for kind in of) - 2
    dose = dose_of(draw(SOUND["a dead view"], np.random.default_rng(0), tmp_path)[0])
    assert "rays never vary" in " ".join(dose.remarks)


def test_one_group_of_rays_shows_no_profile_and_not_both_values(tmp_path: Path) -> None:
    np.save(tmp_path / "scans.npy", -np.log(np.random.default_rng(0).poisson(1e4, (3, 8, 16)) / 1e4))
    dose = dose_of([f"input={tmp_path}/scans.npy", "unit=attenuation"])
    assert (dose.profile, dose.photons_interval) == (None, None)
    assert "too few" in " ".join(dose.remarks)


def test_profiles_with_corners_have_intervals_that_hold() -> None:
    of = [held(name, 4, kind) for name, kind in CORNERS.items()]
    assert sum(kind.given for kind in of) >= 10
    assert sum(kind.given - kind.photons for kind in of) <= 1


def test_frames_of_different_means_are_no_repeats(tmp_path: Path) -> None:
    counts = repeats(1e4, 5.0) + np.log(np.linspace(1, 2, N_REPEATS))[:, None, None]
    np.save(tmp_path / "scans.npy", counts)
    with pytest.raises(DataError, match="means differ by 7"):
        calibration(f"input={tmp_path}/scans.npy", f"output={tmp_path}/dose")


def series_of(dose: Dose, radii: list[float], seed: int) -> np.ndarray:
    """FBP [Z, S, S] in HU of discs, with the noise of a dose."""
    y = torch.cat([projector(SERIES)(disc(radius)) for radius in radii])
    noise = PhysicalNoise(dose.photons, WATER, dose.electronic_sigma)
    x = projector(SERIES).fbp(noise(y, [(seed, k) for k in range(len(radii))]))
    return (1000 * x[:, 0] - 1000).numpy()


def noise_of(images: np.ndarray) -> float:
    """Mean standard deviation in HU of each image within 40 mm of its middle, between neighbours of equal mean."""
    middle = images[:, 38:58, 38:58]
    return float(np.mean(np.std(np.diff(middle, axis=2), axis=(1, 2)) / np.sqrt(2)))


RADII = [float(radius) for radius in np.linspace(70, 140, 16)]


def test_a_series_gives_the_dose_and_simulates_with_the_same_noise(tmp_path: Path) -> None:
    images = series_of(Dose(4e4, 20.0, (0, 0), None), RADII, seed=1)
    for k, image in enumerate(images):
        make_ct(tmp_path / "ct" / f"{k:02d}.dcm", image.round(), PixelSpacing=[4, 4], InstanceNumber=k)
    words = [f"input={tmp_path}/ct", "n_slices=16", "region=[0,0,44]", *KEYS]
    both = calibration(*words, f"output={tmp_path}/both")
    assert both.photons_interval[0] < 4e4 < both.photons_interval[1]
    assert both.sigma_interval[0] < 20 < both.sigma_interval[1]
    counting = calibration(*words, f"output={tmp_path}/counting", "electronic_sigma=20")
    assert counting.photons == pytest.approx(4e4, rel=0.05)
    for seed, dose in enumerate((both, counting), 2):
        assert noise_of(series_of(dose, RADII, seed)) == pytest.approx(noise_of(images), rel=0.05)


def test_the_memory_for_a_series_does_not_grow_with_its_slices(tmp_path: Path) -> None:
    image = series_of(Dose(4e4, 20.0, (0, 0), None), RADII[:1], seed=1)[0].round()
    for k in range(12):
        make_ct(tmp_path / "ct" / f"{k:02d}.dcm", image, PixelSpacing=[4, 4], InstanceNumber=k)
    peaks = []
    for n_slices in (3, 12):
        words = [f"input={tmp_path}/ct", f"n_slices={n_slices}", "region=[0,0,44]", *KEYS, f"output={tmp_path}/none"]
        config = check(compose("calibrate", words))
        tracemalloc.start()
        of_series(tmp_path / "ct", config)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


@pytest.mark.parametrize(("words", "line"), [
    ("input=scans.npy", "output has no value: give one with output=…"),
    ("input=absent.npy output=o", "absent.npy does not exist: give a .npy of repeated scans"),
    ("input=scans.npy output=o region=[0,0,9]", "region is for a series of slices: leave it out"),
    ("input=. output=o", "give a uniform disc in mm from the centre, region=[x,y,radius]"),
    ("input=. output=o region=[0,0,9]", "no usable slice"),
    ("input=. output=o region=[0,0,9] unit=counts", "unit=counts is for scans in .npy"),
    ("input=scans.npy output=o air=scans.npy", "give unit=counts too"),
    ("input=one.npy output=o", "one scan, which shows no noise: give at least two repeats"),
    ("input=same.npy output=o", "no ray whose counts vary"),
    ("input=text.npy output=o", "give a .npy of numbers, [repeats, views, bins]"),
    ("input=scans.npy output=o unit=counts air=narrow.npy", "give counts above 0, [repeats, views, 8 bins"),
    ("input=scans.npy output=.", "output=. "),
])  # fmt: skip
def test_bad_input_is_one_line(
    words: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scans = np.random.default_rng(0).random((3, 4, 8))
    arrays = {"scans": scans, "one": scans[0], "same": np.ones((3, 4, 8)), "narrow": scans[..., :5]}
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    Path("text.npy").write_text("1 2 3")
    monkeypatch.setattr(sys, "argv", ["calibrate", *words.split()])
    monkeypatch.delenv(TRACEBACK, raising=False)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert line in error
