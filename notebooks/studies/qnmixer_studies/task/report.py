"""The report of an evaluation by task: a table (terminal, Markdown, CSV), and a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import NullFormatter
from torch import Tensor

from qnmixer.evaluation.evaluate import PICTURE
from qnmixer.evaluation.logs import name_in_logs
from qnmixer.evaluation.pictures import save_figure
from qnmixer.evaluation.scores import log_prefix
from qnmixer.files import write_text
from qnmixer.runs.tables import Table, in_digits
from qnmixer.runs.terminal import Console

_FIRST = "photons a ray", "method"
_KEPT, _DETECTED, _BEYOND = "contrast kept, %", "d′", "d′ of the network minus it"
_NOTE = (
    "± is half of a 95 % interval, with images as units (bootstrap; of d′ in closed form; of the difference of "
    "d′ by the jackknife over pairs of the same body and noise). Noise: square root of the "
    "integral of its power spectrum. Edge: frequency at which the task transfer function of a disc's edge is one half; "
    "– where noise or the size of the disc hides it. Such an edge has no curve in the picture, and a curve ends where "
    "its interval reaches zero. Contrast kept and d′: of the inserts, against the same bodies with the same noise. d′ "
    "is that of a channelised Hotelling observer with three difference-of-Gaussians channels."
)
_SHOWN = (-20.0, 100.0)  # HU, narrow
Mark = tuple[float, float, float]  # column, row and radius of a circle on an image, in pixels


@dataclass
class DoseScores:
    """One method at one dose."""

    photons: float  # the dose, counts of an unattenuated ray
    method: str
    scores: dict[str, tuple[float, float]]  # by heading, each with half of its 95 % interval
    spectrum: tuple[Tensor, Tensor]  # frequencies in 1/mm, and the noise power there in HU² mm²
    # By the contrast of an edge in HU: frequencies in 1/mm, the modulation there, and half of its 95 % interval, up to
    # where noise hides it
    transfer: dict[float, tuple[Tensor, Tensor, Tensor]]
    example: Tensor  # the body in an image with inserts, [H, W] in HU


def headings(edge_hu: Sequence[float]) -> list[str]:
    """The scores of a table, in their order."""
    return ["noise, HU", "its mean frequency, 1/mm", *map(edge_heading, edge_hu), _KEPT, _DETECTED, _BEYOND]


def edge_heading(contrast: float) -> str:
    """The heading of the edge of a disc with a contrast in HU."""
    return f"edge of {contrast:g} HU, 1/mm"


def scores_by_name(scores: Sequence[DoseScores]) -> dict[str, float]:
    """The scores as loggers get them: task/PHOTONS/METHOD/SCORE, without METHOD/ for the network, the last method."""
    methods = [result.method for result in scores]
    return {
        f"task/{result.photons:.0f}/{log_prefix(result.method, methods)}{name_in_logs(heading)}": value
        for result in scores
        for heading, (value, _) in result.scores.items()
        if not isnan(value)
    }


def _cell(scores: Mapping[str, tuple[float, float]], name: str) -> str:
    value, half = scores[name]
    reference = scores[_DETECTED if name == _BEYOND else name][0]  # a difference has the digits of what it is of
    return in_digits(None) if isnan(value) else in_digits(value, half, reference)


def _numbers(value: float, half: float) -> tuple[float | None, float | None]:
    return (None, None) if isnan(value) else (value, half)


def write_task(
    folder: Path, title: str, scores: Sequence[DoseScores], truth: Tensor, marks: Sequence[Mark], console: Console
) -> Path:
    """Write table.md, table.csv and the picture, and print the table. Returns the picture."""
    names = [*scores[0].scores]
    rows = [
        [f"{result.photons:,.0f}", result.method, *(_cell(result.scores, name) for name in names)] for result in scores
    ]
    table = Table([*_FIRST, *names], rows, title, _NOTE)
    write_text(folder / "table.md", table.markdown() + "\n")
    numbers = [
        [result.photons, result.method, *(part for name in names for part in _numbers(*result.scores[name]))]
        for result in scores
    ]
    columns = [part for name in names for part in (name, f"± of {name}")]
    write_text(folder / "table.csv", Table([*_FIRST, *columns], numbers).csv())
    figure = task_figure(scores, truth, marks)
    save_figure(figure, folder / PICTURE)
    console.print(table.terminal(words=2))
    console.lines(f"table: {folder / 'table.md'}")
    return folder / PICTURE


def task_figure(scores: Sequence[DoseScores], truth: Tensor, marks: Sequence[Mark]) -> Figure:
    """Truth and images of the middle dose; below them scores of all doses; last a panel for each edge, at that dose.

    An edge without a value in the table has no curve. The panel names its method.
    """
    doses = sorted({result.photons for result in scores})
    dose = doses[len(doses) // 2]
    middle_scores = [result for result in scores if result.photons == dose]
    figure = Figure(figsize=(8.7, 9.4), layout="constrained")  # inches; a page shows it in about 850 pixels
    upper, middle, lower = figure.subfigures(3, 1, squeeze=False, height_ratios=(1.1, 1, 1))[:, 0]
    low, high = (f"{value:g}".replace("-", "−") for value in _SHOWN)
    upper.suptitle(f"images with inserts, {dose:,.0f} photons a ray, {low} to {high} HU", fontsize=10)
    images = {"truth": truth} | {result.method: result.example for result in middle_scores}
    for (name, image), axes in zip(images.items(), upper.subplots(1, len(images), squeeze=False)[0], strict=True):
        axes.imshow(image.numpy(), "gray", vmin=_SHOWN[0], vmax=_SHOWN[1], interpolation="nearest")
        for x, y, radius in marks:  # around the inserts: with few photons they cannot be seen
            axes.add_patch(Circle((x, y), radius, fill=False, color="C1", linewidth=0.8))
        axes.set_title(name, fontsize=10)
        axes.set_axis_off()
    panels = middle.subplots(1, 3)
    for k, result in enumerate(middle_scores):
        points = sorted((point for point in scores if point.method == result.method), key=lambda point: point.photons)
        for name, panel in zip((_DETECTED, _KEPT), panels, strict=False):
            values, halves = zip(*(point.scores[name] for point in points), strict=True)
            beside = [point.photons * 1.05 ** (k - 1) for point in points]
            panel.errorbar(beside, values, halves, marker="o", markersize=5, capsize=3, label=result.method)
        panels[2].semilogy(*result.spectrum)
    for name, panel in zip((_DETECTED, _KEPT), panels, strict=False):
        panel.margins(x=0.1, y=0.15)  # a marker at 100 % is not cut by the edge
        panel.set_ylim(bottom=0)
        panel.set(xscale="log", xlabel=_FIRST[0])
        panel.set_xticks(doses, [f"{photons:,.0f}" for photons in doses])
        panel.set_title(f"inserts: {name}", fontsize=10)
    panels[2].set(xlabel="1/mm")
    panels[2].set_title(f"noise power, HU² mm², at {dose:,.0f}", fontsize=10)
    middle.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(middle_scores), fontsize=9
    )
    edges = lower.subplots(1, len(middle_scores[0].transfer), squeeze=False, sharex=True, sharey=True)[0]
    for contrast, panel in zip(middle_scores[0].transfer, edges, strict=True):
        hidden_methods = []
        for k, result in enumerate(middle_scores):
            if isnan(result.scores[edge_heading(contrast)][0]):
                hidden_methods.append(result.method)
                continue
            frequencies, modulation, half = result.transfer[contrast]
            panel.plot(frequencies, modulation, color=f"C{k}")
            panel.fill_between(frequencies, modulation - half, modulation + half, color=f"C{k}", alpha=0.2, linewidth=0)
        if hidden_methods:
            note = f"hidden: {', '.join(hidden_methods)}"
            panel.text(0.96, 0.95, note, ha="right", va="top", fontsize=9, transform=panel.transAxes)
        panel.set(xlabel="1/mm", ylim=(0, 1.2))
        panel.set_title(f"modulation, edge of {contrast:g} HU".replace("-", "−"), fontsize=10)
    lower.suptitle(f"at {dose:,.0f} photons a ray, with 95 % intervals", fontsize=10)
    for panel in (*panels, *edges):
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=8)
        panel.xaxis.set_minor_formatter(NullFormatter())  # labels of a short logarithmic axis would overlap
    return figure
