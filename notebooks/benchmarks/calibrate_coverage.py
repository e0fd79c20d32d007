"""How often the intervals of `qnmixer.calibrate` hold the truth, on scans as scanners make them.

python notebooks/benchmarks/calibrate_coverage.py [N]  # N random scans of each kind, by default 60: a table in Markdown
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from qnmixer.errors import DataError
from qnmixer.extras.calibration.calibrate_config import CalibrateConfig
from qnmixer.extras.calibration.dose import Dose, fit_dose
from qnmixer.extras.calibration.variances import of_repeats
from qnmixer.runs.tables import Table
from qnmixer.settings.compose import compose

VIEWS, BINS = 32, 160


@dataclass(frozen=True)
class Kind:
    """What a scanner does to repeated scans.

    drift: rise of the tube from the first to the last frame; gain: of the detector. stored: how often each frame is
    stored. photons, sigma, thickest: the ranges of I₀, σ and the largest attenuation. fault: changes counts [n, V, D].
    air: I₀ of the air scan as a share of that of the scan.
    """

    n: int = 10
    darkest: float = 1.0
    drift: float = 0.0
    gain: float = 0.0
    stored: int = 1
    turned: bool = False
    crosstalk: float = 0.0
    photons: tuple[float, float] = (1e4, 2e5)
    sigma: tuple[float, float] = (0.0, 20.0)
    thickest: tuple[float, float] = (3.0, 6.0)
    unit: str = "counts"
    profile: Callable[[np.ndarray], np.ndarray] | None = None
    fault: Callable[[np.ndarray], np.ndarray] = np.array
    air: float = 1.0


KINDS = {
    "ideal": Kind(),
    "attenuation": Kind(unit="attenuation"),
    "bow-tie, 1 to 0.3": Kind(darkest=0.3),
    "the same, in attenuation": Kind(darkest=0.3, unit="attenuation"),
    "gain drifts by 1 %": Kind(gain=0.01),
    "gain drifts by 2 %": Kind(gain=0.02),
    "gain drifts by 5 %": Kind(gain=0.05),
    "tube drifts by 5 %": Kind(drift=0.05),
    "frames stored 8 times": Kind(n=5, stored=8),
    "repeats on the last axis": Kind(turned=True, unit="attenuation"),
    "σ dominates": Kind(photons=(1e3, 4e3), sigma=(100.0, 200.0), thickest=(2.0, 4.0), unit="attenuation"),
    "crosstalk of 5 %": Kind(crosstalk=0.05),
    "2 repeats": Kind(n=2),
    "10 repeats, bow-tie, crosstalk": Kind(darkest=0.3, crosstalk=0.05),
}


def put(index: Any, value: Callable[[np.ndarray], Any], **keys: Any) -> Kind:
    """Some counts are others: `value` of all."""

    def fault(counts: np.ndarray) -> np.ndarray:
        counts[index] = value(counts)
        return counts

    return Kind(fault=fault, **keys)


def gained(*shape: int) -> Kind:
    """Doses differ, and the means were corrected for it."""
    gains = np.exp(0.2 * np.random.default_rng(0).standard_normal(shape))
    return Kind(fault=lambda counts: counts.mean(0) + (counts - counts.mean(0)) * gains)


def spiked(counts: np.ndarray) -> np.ndarray:
    return counts + (np.random.default_rng(0).random(counts.shape) < 5e-4) * 0.3 * counts.max()


every = slice(None)
SOUND = {  # faults that leave the intervals right
    "a dead view": put((every, 5), lambda counts: 0, unit="attenuation"),
    "dead bins": put((every, every, [70, 71]), lambda counts: 0),
    "stuck bins": put((every, every, slice(70, 78)), np.mean),
    "a part of a view is dead": put((every, 5, slice(60, 100)), lambda counts: 0, unit="attenuation"),
}
CORNERS = {
    "a corner in the middle": Kind(unit="attenuation", profile=lambda fan: np.exp(-2.2 * np.abs(fan))),
    "a corner beside it": Kind(unit="attenuation", profile=lambda fan: np.exp(-1.5 * np.abs(fan - 0.17))),
    "a plateau": Kind(unit="attenuation", profile=lambda fan: np.exp(-3 * (np.abs(fan) - 0.3).clip(0))),
}
FAULTS = {  # with what is said of them
    "lag of 3 %": (Kind(fault=lambda counts: 0.97 * counts + 0.03 * np.roll(counts, 1, axis=1)), "the detector lags"),
    "views of the view before": (
        put((every, slice(1, None, 8)), lambda counts: counts[:, :-1:8]),
        "views are correlated by 0.1",
    ),
    "views of the frame before": (put((4, slice(16)), lambda counts: counts[3, :16]), "more alike"),
    "frames averaged in pairs": (Kind(n=11, fault=lambda counts: (counts[1:] + counts[:-1]) / 2), "more alike"),
    "moved at half time": (put(slice(5), lambda counts: np.roll(counts[:5], 1, axis=2)), "the object moved"),
    "air of half the current": (Kind(air=0.5), "another tube current"),
    "air of twice the current": (Kind(air=2.0), "another tube current"),
    "saturated": (Kind(fault=lambda counts: np.minimum(counts, np.quantile(counts, 0.98))), "was saturated"),
    "doses of frames": (gained(10, 1, 1), "of their mean noise"),
    "doses of views": (gained(32, 1), "views have noise of another dose"),
    "spikes": (Kind(fault=spiked), "more outliers"),
    "dark offset": (Kind(fault=lambda counts: counts + 500, sigma=(5.0, 10.0)), "dark offset was not subtracted"),
    "dark offset taken off": (Kind(fault=lambda counts: counts - 500), "counts below zero"),
}


def draw(kind: Kind, rng: np.random.Generator, folder: Path) -> tuple[list[str], float, float]:
    """Write a random scan of an ellipse; the words of its calibration, I₀ and σ."""
    photons, sigma = float(np.exp(rng.uniform(*np.log(kind.photons)))), float(rng.uniform(*kind.sigma))
    fan, angles = np.linspace(-1, 1, BINS), np.arange(VIEWS) * 2 * np.pi / VIEWS
    a, b = rng.uniform(0.6, 0.9), rng.uniform(0.4, 0.9)
    widths, middles = np.hypot(a * np.cos(angles), b * np.sin(angles)), 0.05 * np.cos(angles)
    chord = 1 - ((fan - middles[:, None]) / widths[:, None]) ** 2
    attenuation = rng.uniform(*kind.thickest) * np.sqrt(np.clip(chord, 0, None)) * (a * b / widths / a)[:, None]
    profile = kind.darkest + (1 - kind.darkest) * np.cos(np.pi / 2 * fan) ** 2
    if kind.profile is not None:
        profile = kind.profile(fan) / kind.profile(fan).max()
    unattenuated = photons * profile

    def measured(mean: np.ndarray, n: int) -> np.ndarray:
        shape = n, VIEWS, BINS
        tube = 1 + kind.drift * (np.linspace(0, 1, n) - 0.5)[:, None, None]
        counts = rng.poisson(np.broadcast_to(mean * tube, shape)).astype(float)
        if kind.crosstalk:
            wide = np.pad(counts, ((0, 0), (0, 0), (1, 1)), mode="edge")
            counts += kind.crosstalk * (wide[..., :-2] + wide[..., 2:] - 2 * counts)
        counts += sigma * rng.standard_normal(shape)
        return counts * (1 + kind.gain * np.linspace(0, 1, n))[:, None, None]

    scans = np.repeat(kind.fault(measured(unattenuated * np.exp(-attenuation), kind.n)), kind.stored, axis=0)
    words = [f"input={folder}/scans.npy", f"output={folder}/dose", f"unit={kind.unit}"]
    if kind.unit == "counts":
        np.save(folder / "air.npy", kind.air * measured(unattenuated + 0 * attenuation, 20))
        words.append(f"air={folder}/air.npy")
    else:
        scans = -np.log(np.maximum(scans, 1e-9) / unattenuated)
    np.save(folder / "scans.npy", np.moveaxis(scans, 0, -1) if kind.turned else scans)
    return words, photons, sigma


@cache
def _config() -> CalibrateConfig:
    return CalibrateConfig.parse(compose("calibrate", ["input=scans.npy", "output=dose"]))


def calibrated(words: list[str]) -> Dose | str:
    """The dose, or the line that takes its place."""
    config = _config().model_copy(update=dict(word.split("=") for word in words))
    try:
        return fit_dose(of_repeats(Path(config.input), config), config.electronic_sigma)
    except DataError as error:
        return str(error)


@dataclass
class Held:
    """Of n scans: intervals that were given, and those of I₀ and σ that hold the truth; the lines of the others."""

    n: int
    given: int
    photons: int
    sigma: int
    lines: set[str]
    bias: float

    @property
    def coverage(self) -> float:
        """Share of scans whose interval of I₀ holds it, or that get a line."""
        return (self.photons + self.n - self.given) / self.n


def held(name: str, n: int, kind: Kind | None = None) -> Held:
    result, ratios = Held(n, 0, 0, 0, set(), float("nan")), []
    for seed in range(n):
        with tempfile.TemporaryDirectory() as folder:
            rng = np.random.default_rng([seed, *name.encode()])
            words, photons, sigma = draw(kind or KINDS[name], rng, Path(folder))
            dose = calibrated(words)
        if isinstance(dose, str) or dose.photons_interval is None or dose.sigma_interval is None:
            result.lines.add(dose.split("looks", 1)[-1] if isinstance(dose, str) else dose.remarks[-1])
            continue
        result.given += 1
        result.photons += dose.photons_interval[0] <= photons <= dose.photons_interval[1]
        result.sigma += dose.sigma_interval[0] <= sigma <= dose.sigma_interval[1]
        ratios.append(dose.photons / photons)
    result.bias = float(np.mean(ratios)) if ratios else float("nan")
    return result


HEADINGS = ["scans", "with an interval", "I₀ inside", "σ inside", "mean of I₀ / truth", "a line instead"]

if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    rows = []
    for name, kind in {**KINDS, **SOUND, **CORNERS, **{name: kind for name, (kind, _) in FAULTS.items()}}.items():
        of = held(name, count, kind)
        shares = [f"{part / of.given:.2f}" if of.given else "–" for part in (of.photons, of.sigma)]
        rows.append([name, f"{of.given} of {count}", *shares, f"{of.bias:.3f}", "; ".join(sorted(of.lines))])
    print(Table(HEADINGS, rows).markdown())
