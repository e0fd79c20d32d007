"""Run `qnmixer.calibrate`: measure variances, fit the dose, and say which overrides simulate it."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qnmixer.engine.reports.terminal import Console, markdown_table, terminal_table
from qnmixer.extras.calibration.config import CalibrateConfig
from qnmixer.extras.calibration.dose import Dose, Interval, Variances, fit_dose
from qnmixer.extras.calibration.variances import of_repeats, of_series
from qnmixer.files import atomic_file, write_text


def calibrate_input(config: CalibrateConfig) -> Dose:
    """Fit the dose of an input, and write table and plot into its output. Raises DataError for unusable files."""
    path, output = Path(config.input), Path(config.output)
    variances = of_repeats(path, config) if config.of_scans else of_series(path, config)
    dose = fit_dose(variances, config.electronic_sigma)
    overrides = f"noise=physical noise.photons={dose.photons:.4g} noise.electronic_sigma={dose.electronic_sigma:.4g}"
    if not config.of_scans:
        overrides += f" noise.water_attenuation={config.water_attenuation:g}"
    headings = ["", "value", "interval of 95 %"]
    rows = [
        ["I₀, counts of an unattenuated ray", f"{dose.photons:.4g}", _words(dose.photons_interval)],
        ["σ, electronic noise in counts", f"{dose.electronic_sigma:.4g}", _words(dose.sigma_interval)],
    ]
    lines = [overrides]
    if dose.sigma_interval is None and config.electronic_sigma is None:
        way = "give electronic_sigma=, or scans of an object with thin and thick parts"
        lines.append(f"The rays are too much alike, or too few, to show σ apart from I₀. It is taken to be 0: {way}.")
    write_text(output / "calibration.md", "\n\n".join([markdown_table(headings, rows), *lines]) + "\n")
    _draw(output / "variance.png", variances, dose)
    console = Console()
    console.print(terminal_table(headings, rows))
    console.print(*lines, f"plot: {output / 'variance.png'}", sep="\n", soft_wrap=True, highlight=False)
    return dose


def _words(interval: Interval | None) -> str:
    return "not fitted" if interval is None else "{:.4g} to {:.4g}".format(*interval)


def _draw(path: Path, variances: Variances, dose: Dose) -> None:
    """Draw the variance of −log(N/I₀) against attenuation. That of a region is the mean of the rays through it."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    of_ray = variances.electronic / variances.counting  # e^a
    axes.semilogy(np.log(of_ray), variances.measured * of_ray / variances.counting, ".", label="measured")
    curve = np.geomspace(of_ray.min(), of_ray.max(), 100) / dose.photons
    label = f"I₀ {dose.photons:.3g}, σ {dose.electronic_sigma:.3g}"
    axes.semilogy(np.log(curve * dose.photons), curve + (dose.electronic_sigma * curve) ** 2, label=label)
    axes.set(xlabel="attenuation −log(N/I₀)", ylabel="variance of a ray")
    axes.legend()
    FigureCanvasAgg(figure)
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=130, format="png")
