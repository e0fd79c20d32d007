"""The report of an evaluation by task: a table (terminal, Markdown, CSV), and a figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from qnmixer.engine.evaluation.evaluate import PICTURE
from qnmixer.engine.reports.terminal import Console, csv_table, in_digits, markdown_table, terminal_table
from qnmixer.extras.task.phantoms import BODY_HU
from qnmixer.files import atomic_file, write_text

_NOISE, _FREQUENCY, _KEPT, _DETECTED = "noise, HU", "its mean frequency, 1/mm", "contrast kept, %", "d′"
_NOTE = (
    "± is half of a 95 % interval (bootstrap over images). Noise: square root of the integral of its power spectrum. "
    "Edge: frequency at which the task transfer function of a disc's edge is one half. Contrast kept and d′: of the "
    "inserts; d′ is that of a channelised Hotelling observer with three difference-of-Gaussians channels."
)
_SHOWN = BODY_HU - 60, BODY_HU + 60
"""HU of the example images: low contrast needs a narrow window."""


@dataclass
class DoseScores:
    """One method at one dose.

    Args:
        photons: the dose.
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

    def plain(self) -> dict[str, Any]:
        """For results.json."""
        return {"photons": self.photons, "method": self.method, "scores": self.scores}


def headings(edge_hu: Sequence[float]) -> list[str]:
    """The scores of a table, in their order."""
    return [_NOISE, _FREQUENCY, *(f"edge of {contrast:g} HU, 1/mm" for contrast in edge_hu), _KEPT, _DETECTED]


def write_task(folder: Path, title: str, scores: Sequence[DoseScores], console: Console) -> Path:
    """Write table.md, table.csv and the picture, and print the table. Returns the picture."""
    names = [*scores[0].scores]
    rows = [[f"{one.photons:,.0f}", one.method, *(in_digits(*one.scores[name]) for name in names)] for one in scores]
    first = ["photons a ray", "method"]
    write_text(folder / "table.md", f"**{title}**\n\n{markdown_table([*first, *names], rows)}\n\n{_NOTE}\n")
    numbers = [[one.photons, one.method, *(part for name in names for part in one.scores[name])] for one in scores]
    columns = [part for name in names for part in (name, f"± of {name}")]
    write_text(folder / "table.csv", csv_table([[*first, *columns], *numbers]))
    _draw(folder / PICTURE, scores)
    console.print(terminal_table([*first, *names], rows, words=2, title=title, caption=_NOTE))
    return folder / PICTURE


def _draw(path: Path, scores: Sequence[DoseScores]) -> None:
    """Above the images of the middle dose and their curves, below the scores of all doses."""
    doses = sorted({one.photons for one in scores})
    shown = [one for one in scores if one.photons == doses[len(doses) // 2]]
    figure = Figure(figsize=(13, 7), layout="constrained")
    upper, lower = figure.subfigures(2, height_ratios=(1, 1.15))
    upper.suptitle(f"images with inserts at {shown[0].photons:,.0f} photons a ray, {_SHOWN[0]:g} to {_SHOWN[1]:g} HU")
    for axes, one in zip(upper.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.imshow(one.example.numpy(), cmap="gray", vmin=_SHOWN[0], vmax=_SHOWN[1], interpolation="nearest")
        axes.set_title(one.method, fontsize=10)
        axes.set_axis_off()
    detected, kept, spectra, edges = lower.subplots(1, 4)
    for k, one in enumerate(shown):
        colour = f"C{k}"
        of_method = sorted((of for of in scores if of.method == one.method), key=lambda of: of.photons)
        for axes, name in ((detected, _DETECTED), (kept, _KEPT)):
            values, halves = zip(*(of.scores[name] for of in of_method), strict=True)
            places = [of.photons * 1.05 ** (k - 1) for of in of_method]  # beside each other
            axes.errorbar(places, values, halves, color=colour, marker="o", capsize=3, label=one.method)
        spectra.loglog(*one.spectrum, color=colour, label=one.method)
        for n, (contrast, curve) in enumerate(one.transfer.items()):
            style = ("-", "--", ":", "-.")[n % 4]
            edges.plot(*curve, color=colour, linestyle=style, label=f"{one.method}, {contrast:g} HU")
    at = f"at {shown[0].photons:,.0f} photons"
    _label(detected, "photons a ray", _DETECTED, "detectability of the inserts")
    _label(kept, "photons a ray", _KEPT, "contrast of the inserts")
    _label(spectra, "1/mm", "HU² mm²", f"noise power {at}")
    _label(edges, "1/mm", "modulation", f"edges {at}")
    for axes in (detected, kept):
        axes.set_xscale("log")
    FigureCanvasAgg(figure)
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=110, format="png")


def _label(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.set_ylim(bottom=None if axes.get_yscale() == "log" else 0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
