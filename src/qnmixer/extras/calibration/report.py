"""Run `qnmixer.calibrate`: measure variances, fit the dose, and say which overrides simulate it."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from qnmixer.evaluation.pictures import save_figure
from qnmixer.extras.calibration.calibrate_config import CalibrateConfig
from qnmixer.extras.calibration.dose import Dose, Interval, Variances, fit_dose
from qnmixer.extras.calibration.variances import of_repeats, of_series
from qnmixer.files import atomic_file, write_text
from qnmixer.runs.tables import Table
from qnmixer.runs.terminal import Console


def calibrate_input(config: CalibrateConfig) -> Dose:
    """Fit the dose of an input, and write table and plot into its output. Raises DataError for unusable files."""
    path, output = Path(config.input), Path(config.output)
    variances = of_repeats(path, config) if config.of_scans else of_series(path, config)
    dose = fit_dose(variances, config.electronic_sigma)
    overrides = f"noise=physical noise.photons={dose.photons:.4g} noise.electronic_sigma={dose.electronic_sigma:.4g}"
    if not config.of_scans:
        overrides += f" noise.water_attenuation={config.water_attenuation:g}"
    if dose.profile is not None:
        with atomic_file(output / "profile.npy") as stream:
            np.save(stream, dose.profile)
        overrides += f" noise.profile={output / 'profile.npy'}"
    if dose.crosstalk:
        overrides += f" noise.crosstalk={dose.crosstalk:.2g}"
    at_least = "at least " * (dose.photons_interval is None and not dose.electronic_sigma)
    rows = [
        ["I₀, counts of an unattenuated ray", f"{at_least}{dose.photons:.4g}", _words(dose.photons_interval)],
        [
            "σ, electronic noise in counts (dark offset subtracted)",
            f"{dose.electronic_sigma:.4g}",
            _words(dose.sigma_interval),
        ],
    ]
    if dose.profile is not None:
        share = f"1 to {dose.profile.min():.3g}"
        rows.append(["profile, counts of a bin as a share of the brightest", share, "in profile.npy"])
    if dose.crosstalk:
        rows.append(["crosstalk, share of a bin's counts to each neighbour", f"{dose.crosstalk:.2g}", _words(None)])
    table, lines = Table(["", "value", "interval of 95 %"], rows), [*dose.remarks, overrides]
    write_text(output / "calibration.md", "\n\n".join([table.markdown(), *lines]) + "\n")
    _draw(output / "variance.png", variances, dose)
    console = Console()
    console.print(table.terminal())
    console.lines(*lines, f"plot: {output / 'variance.png'}")
    return dose


def _words(interval: Interval | None) -> str:
    return "none" if interval is None else "{:.4g} to {:.4g}".format(*interval)


def _draw(path: Path, variances: Variances, dose: Dose) -> None:
    """Draw the variance of −log(N/I₀) against attenuation, as if all bins were the brightest.

    That of a region is the mean of the rays through it.
    """
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    of_ray = variances.electronic / variances.counting  # e^a

    def expected(of_ray: np.ndarray) -> np.ndarray:
        return of_ray / dose.photons + (dose.electronic_sigma * of_ray / dose.photons) ** 2

    axes.semilogy(np.log(of_ray), expected(of_ray) * variances.measured / dose.fitted, ".", label="measured")
    curve = np.geomspace(of_ray.min(), of_ray.max(), 100)
    label = f"I₀ {dose.photons:.3g}, σ {dose.electronic_sigma:.3g}"
    axes.semilogy(np.log(curve), expected(curve), label=label)
    axes.set(xlabel="attenuation −log(N/I₀)", ylabel="variance of a ray")
    axes.legend()
    save_figure(figure, path, dpi=130)
