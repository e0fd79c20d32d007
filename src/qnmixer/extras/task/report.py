"""The report of an evaluation by task: a table (terminal, Markdown, CSV), and a figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from qnmixer.evaluation.evaluate import PICTURE
from qnmixer.evaluation.logs import name_in_logs
from qnmixer.evaluation.scores import log_prefix
from qnmixer.files import atomic_file, write_text
from qnmixer.runs.terminal import Console, csv_table, in_digits, markdown_table, terminal_table

_FIRST = "photons a ray", "method"
_KEPT, _DETECTED = "contrast kept, %", "d′"
_NOTE = (
    "± is half of a 95 % interval, with images as units (bootstrap, of d′ in closed form). Noise: square root of the "
    "integral of its power spectrum. Edge: frequency at which the task transfer function of a disc's edge is one half; "
    "– where noise or the size of the disc hides it. Contrast kept and d′: of the inserts, against the same bodies "
    "with the same noise. d′ is that of a channelised Hotelling observer with three difference-of-Gaussians channels."
)
_SHOWN: dict[str, Any] = {"vmin": -20.0, "vmax": 100.0, "cmap": "gray", "interpolation": "nearest"}  # HU, narrow


@dataclass
class DoseScores:
    """One method at one dose.

    Args:
        photons: the dose, counts of an unattenuated ray.
        method: its name.
        scores: by heading, each with half of its 95 % interval.
        spectrum: frequencies in 1/mm, and the noise power there in HU² mm².
        transfer: by the contrast of an edge in HU: frequencies in 1/mm, and the modulation there.
        example: an image with inserts, [H, W] in HU.
    """

    photons: float
    method: str
    scores: dict[str, tuple[float, float]]
    spectrum: tuple[Tensor, Tensor]
    transfer: dict[float, tuple[Tensor, Tensor]]
    example: Tensor


def headings(edge_hu: Sequence[float]) -> list[str]:
    """The scores of a table, in their order."""
    return ["noise, HU", "its mean frequency, 1/mm", *map(edge_heading, edge_hu), _KEPT, _DETECTED]


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


def _cell(value: float, half: float) -> str:
    return in_digits(None) if isnan(value) else in_digits(value, half)


def _numbers(value: float, half: float) -> tuple[float | None, float | None]:
    return (None, None) if isnan(value) else (value, half)


def write_task(folder: Path, title: str, scores: Sequence[DoseScores], console: Console) -> Path:
    """Write table.md, table.csv and the picture, and print the table. Returns the picture."""
    names = [*scores[0].scores]
    rows = [
        [f"{result.photons:,.0f}", result.method, *(_cell(*result.scores[name]) for name in names)] for result in scores
    ]
    write_text(folder / "table.md", f"**{title}**\n\n{markdown_table([*_FIRST, *names], rows)}\n\n{_NOTE}\n")
    numbers = [
        [result.photons, result.method, *(part for name in names for part in _numbers(*result.scores[name]))]
        for result in scores
    ]
    columns = [part for name in names for part in (name, f"± of {name}")]
    write_text(folder / "table.csv", csv_table([[*_FIRST, *columns], *numbers]))
    _draw(folder / PICTURE, scores)
    console.print(terminal_table([*_FIRST, *names], rows, words=2, title=title, caption=_NOTE))
    return folder / PICTURE


def _draw(path: Path, scores: Sequence[DoseScores]) -> None:
    """Above the images of the middle dose, below the scores of all doses, and the curves of the middle dose."""
    doses = sorted({result.photons for result in scores})
    dose = doses[len(doses) // 2]
    shown = [result for result in scores if result.photons == dose]
    figure = Figure(figsize=(13, 7), layout="constrained")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.15))[:, 0]
    upper.suptitle(f"with inserts, {dose:,.0f} photons a ray, {_SHOWN['vmin']} to {_SHOWN['vmax']} HU")
    panels = lower.subplots(1, 4)
    for k, (result, axes) in enumerate(zip(shown, upper.subplots(1, len(shown), squeeze=False)[0], strict=True)):
        axes.imshow(result.example.numpy(), **_SHOWN)
        axes.set_title(result.method)
        axes.set_axis_off()
        points = sorted((point for point in scores if point.method == result.method), key=lambda point: point.photons)
        for name, panel in zip((_DETECTED, _KEPT), panels, strict=False):
            values, halves = zip(*(point.scores[name] for point in points), strict=True)
            beside = [point.photons * 1.05 ** (k - 1) for point in points]
            panel.errorbar(beside, values, halves, marker="o", capsize=3, label=result.method)
            panel.margins(y=0.1)
            panel.set(xscale="log", ylim=(0, None), xlabel=_FIRST[0], title=f"{name} of the inserts")
        panels[2].loglog(*result.spectrum, label=result.method)
        for (contrast, curve), style in zip(result.transfer.items(), ("-", "--", ":"), strict=False):
            label = f"{contrast:g} HU" if k == len(shown) - 1 else None  # the colours are those of the other panels
            hidden = isnan(result.scores[edge_heading(contrast)][0])
            panels[3].plot(*([], []) if hidden else curve, style, color=f"C{k}", label=label)
    for panel in panels[:2]:
        panel.set_xticks(doses, [f"{photons:,.0f}" for photons in doses])
    panels[2].set(xlabel="1/mm", title=f"noise power, HU² mm², at {dose:,.0f}")
    panels[3].set(xlabel="1/mm", ylim=(0, 1.5), title=f"modulation of edges at {dose:,.0f}")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
        panel.xaxis.set_minor_formatter(NullFormatter())  # labels of a short logarithmic axis would overlap
    FigureCanvasAgg(figure)
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=110, format="png")
