"""A network under other conditions than those of its training, beside FBP and total variation: one table, one plot."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, log10
from pathlib import Path
from statistics import mean
from typing import Any

from lightning.pytorch.loggers import Logger
from matplotlib.figure import Figure

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.own_datamodule import OwnDataModule
from qnmixer.errors import ConfigError, UserError, first_line, say
from qnmixer.evaluation.evaluate import RunData, evaluate, evaluated_name
from qnmixer.evaluation.evaluate_run import first_slices, on_test
from qnmixer.evaluation.logs import log_scores, name_in_logs
from qnmixer.evaluation.pictures import save_figure
from qnmixer.evaluation.scores import Evaluation, by_patient, log_prefix
from qnmixer.evaluation.statistics import difference, half_width
from qnmixer.files import write_text
from qnmixer.models.fbp import FBP
from qnmixer.models.total_variation import TotalVariation
from qnmixer.parallel.devices import choose_device
from qnmixer.reconstruction.pretrained import digest_of_weights
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.runs.loggers import recording_scores
from qnmixer.runs.tables import NOTHING, Table, in_digits
from qnmixer.runs.terminal import Console
from qnmixer_studies.robustness.cliff import search
from qnmixer_studies.robustness.conditions import BEYOND, VIEWS, Condition, Scene, conditions
from qnmixer_studies.robustness.robustness_config import RobustnessConfig

PLOT = "robustness.png"
_LABEL_DISTANCE = 0.08  # parts of a panel's width between two labels of its ticks, at least; each tick stays
_METRICS = "psnr", "ssim"
_KNOWN = "The reconstruction knows the views, the arc and the patient's size, and nothing of the other conditions."
Scores = dict[str, dict[str, dict[str, float]]]
"""PSNR in dB and SSIM × 100 of each patient: method → metric → patient → mean over the patient's slices."""


def chosen_slices(slices: RunData, part: str, first: int | None, scene: Scene | None = None) -> RunData:
    """The first slices of a part, from all patients in turn, with the truth that a condition makes of each batch."""
    chosen = first_slices(slices, part, first)
    if scene is not None:
        move = chosen.transfer_batch_to_device
        chosen.transfer_batch_to_device = lambda *args: scene(move(*args))  # type: ignore[method-assign]
    return chosen


def described(slices: RunData, config: RobustnessConfig) -> str:
    """How many slices, and of how many patients."""
    chosen = chosen_slices(slices, config.split, config.n_slices)
    if isinstance(chosen, SliceDataModule):
        return str(chosen.parts[config.split])
    n = chosen.count(config.split)
    return f"{'all' if n is None else n} slices of its {config.split}_dataloader"


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
    is_own = isinstance(slices, OwnDataModule)  # its batches have no finer grid
    fine_size = slices.config.image_size * (1 if is_own else slices.config.simulation_factor)
    # Wrong values end the command before it works for minutes.
    test_conditions = [*conditions(config, module.config, fine_size)]
    results: dict[Condition, Scores] = {}
    refusals: list[str] = []

    def scores_of_condition(condition: Condition) -> Scores:
        say(condition.name)
        try:
            if condition.needs_scale and module.config.data.scaling != "attenuation":
                raise ConfigError("its slices have no common scale of attenuation")
            scanned = condition.reconstructor(module)
        except (UserError, RuntimeError) as error:  # torch's, for weights of another shape
            refusals.append(f"{condition.name}: the network does not take it ({first_line(error)})")
            results[condition] = {}
            return {}
        data = chosen_slices(slices, config.split, config.n_slices, condition.scene)
        scoring = config.evaluation
        if scoring.tv_weight is not None:  # its best weight follows the views
            ratio = module.config.geometry.n_views / condition.scanner.geometry.n_views
            scoring = scoring.changed(tv_weight=scoring.tv_weight * ratio**0.5)
        evaluation = evaluate(scanned, data, config.split, scoring, device, config.symmetries)
        results[condition] = scores_of(evaluation)
        write_text(folder / "table.csv", numbers(results).csv())  # what is measured stays, if the rest fails
        return results[condition]

    with recording_scores(module.config, config.logger, device.type, folder, overrides) as (record, loggers):
        for condition in test_conditions:
            scores_of_condition(condition)
        edge_lines = _edges(config, module, scores_of_condition)
        results = dict(sorted(results.items(), key=lambda row: row[0].value if row[0].axis == VIEWS else 0))
        note = f"{evaluated_name(module.config)}: {described(slices, config)}. {explanation(results)} {_KNOWN}"
        cells = table(results, note)
        write_text(folder / "table.md", "\n\n".join([cells.markdown(), *edge_lines, *refusals]) + "\n")
        figure = robustness_figure(results, nominal(module))
        save_figure(figure, folder / PLOT)
        log(loggers, results, folder)
        record["evaluated"] = {"weights": digest_of_weights(module.state_dict())}
    console.print(cells.terminal())
    console.lines(*edge_lines, *refusals, f"table: {folder / 'table.md'}", f"plot: {folder / PLOT}")
    return results


def _edges(
    config: RobustnessConfig, module: Reconstructor, scores_of_condition: Callable[[Condition], Scores]
) -> list[str]:
    """Lines that say between which numbers of views the network holds."""
    geometry = module.config.geometry
    if config.views is None:
        return []

    def falls(n_views: int) -> bool:
        scanner = module.config.changed(geometry=geometry.changed(n_views=n_views))
        return has_fallen(scores_of_condition(Condition(VIEWS, float(n_views), scanner)))

    edges = search(falls, geometry.n_views, config.views)
    word = f"Views, trained with {geometry.n_views}: it falls where the mean of another method is higher"
    return [f"{word}. " + ". ".join(f"With {edge}" for edge in edges) + "."]


def has_fallen(scores: Scores) -> bool:
    """Whether the network is below another method, gives no numbers, or was not taken."""
    *rivals, network = (
        (mean(of_method["psnr"].values()) for of_method in scores.values()) if scores else (float("nan"),)
    )
    return not isfinite(network) or any(network < rival for rival in rivals)


def nominal(module: Reconstructor) -> dict[str, float]:
    """The value of training on each axis that has one."""
    geometry = module.config.geometry
    none = dict.fromkeys(("detector off by, bins", "source off by, mm", "motion, mm", "crosstalk", "titanium, mm"), 0.0)
    return none | {
        VIEWS: float(geometry.n_views),
        "patient size, times": 1.0,
        BEYOND: 1.0,
        "arc, degrees": round(abs(geometry.angle_span) * 57.29578, 1),
    }


def scores_of(evaluation: Evaluation) -> Scores:
    """The PSNR and SSIM of each method and patient."""
    return {
        name: {metric: by_patient(evaluation.scores_of(name), metric) for metric in _METRICS}
        for name in evaluation.methods
    }


def _methods(results: Mapping[Condition, Scores]) -> list[str]:
    return list(dict.fromkeys(name for scores in results.values() for name in scores))


def table(results: Mapping[Condition, Scores], note: str = "") -> Table:
    """A row for each condition. Last the network minus total variation, else FBP."""
    methods = _methods(results)
    rival = next((name for name in (TotalVariation.title, FBP.title) if name in methods[:-1]), None)
    rows = []
    for condition, scores in results.items():
        cells = [_cell(scores[name]) if name in scores else NOTHING for name in methods]
        if rival is not None:
            # Of a body beyond the field no image of the field fits the data: total variation there is no fair rival.
            is_fair = scores and not (rival == TotalVariation.title and condition.axis == BEYOND)
            cells.append(_difference(scores[methods[-1]], scores[rival]) if is_fair else NOTHING)
        rows.append([condition.name, *cells])
    return Table(["condition", *methods, *([] if rival is None else [f"{methods[-1]} − {rival}"])], rows, note=note)


def _cell(of_method: Mapping[str, Mapping[str, float]]) -> str:
    psnr, ssim = ([*of_method[metric].values()] for metric in _METRICS)
    return f"{in_digits(mean(psnr), half_width(psnr))} / {in_digits(mean(ssim))}"


def _difference(of_method: Mapping[str, Mapping[str, float]], of_rival: Mapping[str, Mapping[str, float]]) -> str:
    minus = difference({(0, 0): of_method["psnr"]}, {(0, 0): of_rival["psnr"]})
    return NOTHING if minus is None else in_digits(minus.mean, minus.over_patients, reference=10)


def explanation(results: Mapping[Condition, Scores]) -> str:
    """What stands in the cells."""
    scores = next(iter(results.values()))
    n_patients = len(next(iter(scores.values()))["psnr"]) if scores else 0
    unfair = " TV has no pixels for a body beyond the field, where a fair TV has a wider grid: no difference is given."
    has_unfair = any(of.axis == BEYOND and TotalVariation.title in scores for of, scores in results.items())
    return (
        f"PSNR in dB ± half of its 95 % interval for other patients / SSIM × 100: means over {n_patients} patients, "
        "each the mean of its slices; a phantom counts as one." + unfair * has_unfair
    )


def numbers(results: Mapping[Condition, Scores]) -> Table:
    """The table of table.csv, a row for each condition and method."""
    rows: list[list[Any]] = []
    for condition, scores in results.items():
        for name, of_method in scores.items():
            psnr, ssim = ([*of_method[metric].values()] for metric in _METRICS)
            scored = mean(psnr), mean(ssim), half_width(psnr), len(psnr)
            rows.append([condition.axis, condition.value, name, *scored])
    return Table(["condition", "value", "method", "psnr", "ssim", "psnr_half_width", "patients"], rows)


def robustness_figure(results: Mapping[Condition, Scores], trained: Mapping[str, float]) -> Figure:
    """PSNR against each condition, with the value of training; dotted where the axis has none. The legend is above."""
    axes_names = list(dict.fromkeys(condition.axis for condition in results))
    reference = next(iter(results.values()))
    n_columns = min(4, len(axes_names))
    n_rows = -(-len(axes_names) // n_columns)
    figure = Figure(figsize=(2.2 * n_columns, 2.1 * n_rows + 0.4), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, sharey=True, squeeze=False).flat
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
            psnr = [mean(scores[name]["psnr"].values()) for _, scores in points]
            panel.plot(places, psnr, "o-" if is_number else "o", label=name, markersize=4)
        logarithmic = axis.startswith("dose") or axis.endswith("scatter") or axis == VIEWS
        if axis not in trained:  # a lone dot would say nothing
            for n, name in enumerate(_methods(results)):
                level = mean(reference[name]["psnr"].values()) if name in reference else float("nan")
                panel.axhline(level, color=f"C{n}", linestyle=":", linewidth=1)
        panel.set_xscale("log" if logarithmic else "linear")
        labelled_values = labelled(values, trained.get(axis), logarithmic) if is_number else values
        labels = [(f"{value:g}" if is_number else value) if value in labelled_values else "" for value in values]
        panel.set_xticks(places, labels, rotation=45, fontsize=8)
        panel.minorticks_off()
        panel.set_xlabel(axis, fontsize=9)
        panel.grid(alpha=0.3)
    for panel in panels:  # those that are left over
        panel.set_axis_off()
    figure.supylabel("PSNR, dB")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def labelled(places: Sequence[float], trained: float | None, logarithmic: bool) -> list[float]:
    """Of rising places on an axis those whose labels do not touch: the ends, that of training, others in order."""
    at = {place: log10(place) if logarithmic else place for place in places}
    least, labelled_places = _LABEL_DISTANCE * (at[places[-1]] - at[places[0]]), list[float]()
    for place in (places[0], places[-1], *([] if trained is None else [trained]), *places):
        if all(abs(at[place] - at[other]) >= least for other in labelled_places):
            labelled_places.append(place)
    return labelled_places


def log(loggers: Sequence[Logger], results: Mapping[Condition, Scores], folder: Path) -> None:
    """Log all scores. W&B also gets the table and the plot."""
    methods = _methods(results)
    values: dict[str, float] = {}
    for condition, scores in results.items():
        for name, of_method in scores.items():
            prefix = f"robustness/{name_in_logs(condition.name)}/{log_prefix(name, methods)}"
            values |= {f"{prefix}{metric}": mean(of_method[metric].values()) for metric in _METRICS}
    log_scores(loggers, values, ("robustness/plot", folder / PLOT), [folder / "table.csv"], folder)
