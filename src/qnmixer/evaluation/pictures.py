"""Pictures of slices by several methods, with their error maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from textwrap import fill

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import pad

from qnmixer.files import atomic_file

DISPLAY_WINDOW = (-1000.0, 700.0)  # HU; lung, soft tissue and bone are all visible
ERROR_LIMIT = 200.0  # HU, the upper end of the error maps


@dataclass
class MethodImages:
    """The images of one method on a slice.

    Args:
        name: the heading over the images.
        iterates: x_0 … x_T, or a single image; each [H, W] in HU. A picture shows the last one.
        caption: of the last image, as "34.13 dB".
    """

    name: str
    iterates: list[Tensor]
    caption: str = ""


@dataclass
class SliceImages:
    """One slice, [H, W] in HU, by several methods in display order. All images have the truth's shape."""

    name: str
    truth: Tensor
    methods: list[MethodImages]


def draw_slices(path: Path, slices: Sequence[SliceImages]) -> None:
    """Draw each slice as a strip: the truth and each method, above a strip of their absolute errors. Writes a PNG."""
    n_columns = 1 + max(len(slice_.methods) for slice_ in slices)
    size = min(2.2, max(1.3, 15 / n_columns))  # inches, of an image
    headings, space, bar, right = 0.5, 0.06, 0.1, 0.75
    strip, block = n_columns * size, headings + 2 * (size + space)
    width, height = strip + space + bar + right, block * len(slices)
    figure = Figure(figsize=(width, height))

    def draw(images: list[Tensor], y: float, limits: tuple[float, float], look: str, label: str, *ticks: int) -> Axes:
        """Images side by side, as one image: many separate drawings would take seconds. And the bar of their values."""
        axes, bar_axes = (
            figure.add_axes((x / width, y / height, span / width, size / height))
            for x, span in ((0, strip), (strip + space, bar))
        )
        array = torch.cat([pad(image, (0, gap), value=nan) for image in images], dim=1)[:, :-gap]
        strip_image = axes.imshow(array.numpy(), cmap=look, vmin=limits[0], vmax=limits[1], interpolation="nearest")
        axes.set_axis_off()
        figure.colorbar(strip_image, cax=bar_axes, label=label, ticks=ticks)
        return axes

    for k, slice_ in enumerate(slices):
        gap, y = max(1, slice_.truth.shape[1] // 32), height - k * block - headings - size
        images = [method.iterates[-1] for method in slice_.methods]
        axes = draw([slice_.truth, *images], y, DISPLAY_WINDOW, "gray", "HU", -500, 0, 500)
        errors = [slice_.truth * nan, *((image - slice_.truth).abs() for image in images)]
        draw(errors, y - space - size, (0.0, ERROR_LIMIT), "inferno", "|error|, HU", 0, 100)
        for n, title in enumerate(
            [f"truth\n{slice_.name}", *(f"{fill(method.name, 26)}\n{method.caption}" for method in slice_.methods)]
        ):
            middle = n * (slice_.truth.shape[1] + gap) + slice_.truth.shape[1] / 2
            axes.annotate(title, (middle, -0.5), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    # Not pyplot: it keeps each figure until it is closed, and may choose a backend that needs a screen.
    FigureCanvasAgg(figure)
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=130, format="png")
