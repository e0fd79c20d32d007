"""A network under other conditions than those of its training, beside FBP and total variation: one table, one plot."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from lightning.pytorch.loggers import Logger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.config.run import Config, section
from qnmixer.engine.evaluation.command import on_test
from qnmixer.engine.evaluation.evaluate import evaluate, evaluated_name
from qnmixer.engine.evaluation.logs import log_scores, name_in_logs
from qnmixer.engine.evaluation.scores import Evaluation, log_prefix
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.reconstructor import Reconstructor, build_measurement
from qnmixer.engine.reports.terminal import NOTHING, Console, csv_table, in_digits, markdown_table, terminal_table
from qnmixer.engine.tracking.loggers import scoring_loggers
from qnmixer.engine.tracking.run import Run
from qnmixer.errors import ConfigError, UserError, first_line, say
from qnmixer.extras.robustness.config import RobustnessConfig
from qnmixer.files import atomic_file, write_text
from qnmixer.pretrained import digest_of_weights

PLOT = "robustness.png"
_KNOWN = (
    "The reconstruction knows the views and the field of view. It does not know that the detector or the source is off."
)
Scores = dict[str, tuple[float, float]]
"""PSNR in dB and SSIM × 100 by method."""


@dataclass(frozen=True, eq=False)  # a config has no hash
class Condition:
    """What differs from training.

    Attributes:
        axis: the quantity, with its unit.
        value: of that quantity.
        scanner: config of the scan and the noise that are simulated.
        is_known: whether the reconstruction uses the scanner's geometry. Else it uses that of training.
    """

    axis: str
    value: float | str
    scanner: Config
    is_known: bool = True

    @property
    def name(self) -> str:
        """Its name in tables and logs."""
        return f"{self.axis} {self.value:g}" if isinstance(self.value, float) else f"{self.axis} {self.value}"


class OffScanReconstructor(Reconstructor):
    """A network that reconstructs the sinograms of another scan as if they were of its own."""

    def __init__(self, module: Reconstructor, scanner: Config) -> None:
        super().__init__(module.config.changed(noise=scanner.noise), module.projector)
        self.load_state_dict(module.state_dict())
        self.off_scan = build_measurement(scanner)

    def measure(self, batch: Batch, stream: str) -> Tensor:
        """The noisy sinogram y [B, 1, V, D] of the other scan."""
        return self.off_scan(batch, stream)


def conditions(config: RobustnessConfig, trained: Config) -> Iterator[Condition]:
    """All conditions of a config, first that of training. Raises ConfigError for a value that is out of bounds."""
    geometry = trained.geometry

    def scan(**keys: float) -> Config:
        return trained.changed(geometry=geometry.changed(**keys))

    yield Condition("noise", "as trained" if config.noise is None else config.noise.name, trained)
    for option in config.noises:
        yield Condition("noise", option, trained.changed(noise=section("noise", option)))
    for photons in config.photons:
        noise = section("noise", "physical", photons=photons)
        yield Condition("dose, photons a ray", photons, trained.changed(noise=noise))
    for more in config.views:
        yield Condition("views", float(geometry.n_views + more), scan(n_views=geometry.n_views + more))
    for factor in config.field_of_view:
        width = round(factor * geometry.field_of_view, 6)
        yield Condition("field of view, mm", width, scan(field_of_view=width))
    for bins in config.detector_offset:
        off = scan(detector_offset=geometry.detector_offset + bins)
        yield Condition("detector off by, bins", bins, off, is_known=False)
    for distance in config.source_distance if geometry.beam != "parallel" else ():
        off = scan(source_to_axis=geometry.source_to_axis + distance)
        yield Condition("source off by, mm", distance, off, is_known=False)


def nominal(trained: Config) -> dict[str, float]:
    """The value of training on each axis that has one."""
    geometry = trained.geometry
    return {
        "views": float(geometry.n_views),
        "field of view, mm": geometry.field_of_view,
        "detector off by, bins": 0.0,
        "source off by, mm": 0.0,
    }


def measure_robustness(config: RobustnessConfig, folder: Path, overrides: list[str]) -> dict[Condition, Scores]:
    """Evaluate a run under every condition, and write table.md, table.csv, robustness.png and results.json.

    A condition that the network does not take has no scores; a line says why.

    Raises CheckpointError, ConfigError or DataError.
    """
    console = Console()
    module, slices, _ = on_test(config, config.run, overrides)
    if slices.measured:
        name = evaluated_name(module.config)
        raise ConfigError(f"{name} has measured sinograms: give slices, as data=phantoms or data=dicom")
    device = choose_device(config.accelerator)
    planned = [*conditions(config, module.config)]  # wrong ones end the command before it works for minutes
    results: dict[Condition, Scores] = {}
    refusals: list[str] = []
    with (
        Run(folder, overrides).recording() as record,
        scoring_loggers(module.config, config.logger, device.type, folder, overrides) as loggers,
    ):
        for condition in planned:
            say(condition.name)
            try:
                scanned = _scanned(module, condition)
            except (UserError, RuntimeError) as error:  # torch's, for weights of another shape
                refusals.append(f"{condition.name}: the network does not take it ({first_line(error)})")
                results[condition] = {}
                continue
            geometry = scanned.projector.geometry
            data = slices.with_scan(geometry, config.n_slices)
            evaluation = evaluate(scanned, data, config.split, config.evaluation, device)
            results[condition] = scores_of(evaluation)
            write_text(folder / "table.csv", csv_table(lines(results)))  # what is measured stays, if the rest fails
        headings, rows = table(results)
        slices_named = f"Slices of {evaluated_name(module.config)}: {evaluation.n_images}"
        caption = f"{slices_named}. PSNR in dB / SSIM × 100. {_KNOWN}"
        write_text(folder / "table.md", "\n\n".join([markdown_table(headings, rows), caption, *refusals]) + "\n")
        draw(folder / PLOT, results, nominal(module.config))
        log(loggers, results, folder)
        record["evaluated"] = {"weights": digest_of_weights(module.state_dict())}
    console.print(terminal_table(headings, rows, caption=caption))
    console.print(*refusals, f"plot: {folder / PLOT}", sep="\n", soft_wrap=True, highlight=False)
    return results


def _scanned(module: Reconstructor, condition: Condition) -> Reconstructor:
    """The network with the sinograms of a condition. Raises an error if it does not take them."""
    if not condition.is_known:
        return OffScanReconstructor(module, condition.scanner)
    is_same = condition.scanner.geometry == module.config.geometry
    scanned = Reconstructor(condition.scanner, module.projector if is_same else None)
    scanned.load_state_dict(module.state_dict())
    return scanned


def scores_of(evaluation: Evaluation) -> Scores:
    """The mean PSNR and SSIM of each method."""
    methods = evaluation.methods
    return {name: (mean(evaluation.values(name, "psnr")), mean(evaluation.values(name, "ssim"))) for name in methods}


def _methods(results: Mapping[Condition, Scores]) -> list[str]:
    return list(dict.fromkeys(name for scores in results.values() for name in scores))


def table(results: Mapping[Condition, Scores]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows for people, a row for each condition."""
    methods = _methods(results)
    rows = []
    for condition, scores in results.items():
        pairs = [scores.get(name) for name in methods]
        cells = [NOTHING if pair is None else " / ".join(map(in_digits, pair)) for pair in pairs]
        rows.append([condition.name, *cells])
    return ["condition", *methods], rows


def lines(results: Mapping[Condition, Scores]) -> list[list[Any]]:
    """Headings and rows of table.csv, a row for each condition and method."""
    rows = [
        [condition.axis, condition.value, name, *pair]
        for condition, scores in results.items()
        for name, pair in scores.items()
    ]
    return [["condition", "value", "method", "psnr", "ssim"], *rows]


def draw(path: Path, results: Mapping[Condition, Scores], trained: Mapping[str, float]) -> None:
    """Draw PSNR against each condition. The value of training is in each panel that has one."""
    axes_names = list(dict.fromkeys(condition.axis for condition in results))
    reference = next(iter(results.values()))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    panels = figure.subplots(2, -(-len(axes_names) // 2), sharey=True, squeeze=False).flat
    for axis, panel in zip(axes_names, panels, strict=False):
        points = [
            (condition.value, scores) for condition, scores in results.items() if condition.axis == axis and scores
        ]
        points += [(trained[axis], reference)] if axis in trained else []
        points.sort(key=lambda point: point[0] if isinstance(point[0], float) else 0.0)
        values: list[Any] = [value for value, _ in points]
        is_number = all(isinstance(value, float) for value in values)
        places = values if is_number else [*range(len(values))]
        for name in _methods(results):
            panel.plot(places, [scores[name][0] for _, scores in points], "o-" if is_number else "o", label=name)
        panel.set_xscale("log" if axis.startswith("dose") else "linear")
        panel.set_xticks(places, [f"{value:g}" if is_number else value for value in values])
        panel.minorticks_off()
        panel.set_xlabel(axis)
        panel.grid(alpha=0.3)
    for panel in panels:  # those that are left over
        panel.set_axis_off()
    figure.supylabel("PSNR, dB")
    figure.axes[0].legend(fontsize=8)
    FigureCanvasAgg(figure)
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=130, format="png")


def log(loggers: Sequence[Logger], results: Mapping[Condition, Scores], folder: Path) -> None:
    """Log all scores. W&B also gets the table and the plot."""
    methods = _methods(results)
    values: dict[str, float] = {}
    for condition, scores in results.items():
        for name, pair in scores.items():
            prefix = f"robustness/{name_in_logs(condition.name)}/{log_prefix(name, methods)}"
            values |= {f"{prefix}{metric}": value for metric, value in zip(("psnr", "ssim"), pair, strict=True)}
    log_scores(loggers, values, ("robustness/plot", folder / PLOT), [folder / "table.csv"], folder)
