"""Pictures of slices by several methods, with a magnified part and their error maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from textwrap import fill

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.nn.functional import avg_pool2d, max_pool2d, pad

from qnmixer.files import atomic_file

DISPLAY_WINDOW = (-1000.0, 700.0)  # HU; lung, soft tissue and bone are all visible
ERROR_LIMIT = 200.0  # HU, the upper end of the error maps
_MAGNIFICATION = 4
_FRAME = "tab:orange"


@dataclass
class MethodImages:
    """The images of one method on a slice."""

    name: str  # the heading over the images
    iterates: list[Tensor]  # x_0 … x_T, or a single image; each [H, W] in HU; a picture shows the last one
    caption: str = ""  # of the last image, as "34.13 dB"


@dataclass
class SliceImages:
    """One slice, [H, W] in HU, by several methods in display order. All images have one shape."""

    name: str
    truth: Tensor | None  # None if nobody knows it: the last image then chooses the part to magnify
    methods: list[MethodImages]
    window: Sequence[float]  # [low, high] in HU, of soft tissue; a picture shows a part of the slice in it

    @property
    def reference(self) -> Tensor:
        """The truth, or else the last image."""
        return self.methods[-1].iterates[-1] if self.truth is None else self.truth

    def region(self) -> tuple[slice, slice]:
        """Rows and columns of the part to magnify: where the truth has most detail inside the window.

        It has a quarter of each side. Detail is the sum of the steps between neighbouring pixels, in HU, where all
        pixels around both are inside the window. So organs, vessels and fat count. Steps to air and bone, and the
        pixels that these blur, do not: they outweigh all others, and are seen without magnification. The truth alone
        chooses, so that no method is shown at its best or at its worst. Without detail it is the middle of the slice.
        """
        low, high = self.window
        height, width = (max(1, n // _MAGNIFICATION) for n in self.reference.shape)
        outside = (self.reference <= low) | (self.reference >= high)
        inside = max_pool2d(outside[None].float(), 3, stride=1, padding=1)[0] == 0
        detail = torch.zeros_like(self.reference)
        for axis, size in enumerate(self.reference.shape):
            both = inside.narrow(axis, 1, size - 1) & inside.narrow(axis, 0, size - 1)
            detail.narrow(axis, 0, size - 1).add_(self.reference.diff(dim=axis).abs().where(both, 0))
        sums = avg_pool2d(detail[None], (height, width), stride=1)[0]
        if sums.any():
            row, column = divmod(int(sums.argmax()), sums.shape[1])
        else:
            row, column = (n // 2 for n in sums.shape)
        return slice(row, row + height), slice(column, column + width)


def draw_slices(path: Path, slices: Sequence[SliceImages]) -> None:
    """Draw each slice as three strips: the truth and each method, a magnified part, the absolute errors. Writes a PNG.

    Slices without a truth have two strips: the methods, and a magnified part of each. A frame in each image marks the
    part. `SliceImages.region` chooses it.
    """
    has_truth = all(slice_.truth is not None for slice_ in slices)
    n_columns = has_truth + max(len(slice_.methods) for slice_ in slices)
    headings, space, bar, right = 0.5, 0.06, 0.1, 0.65
    # Inches, of an image. A page shows a picture in about 850 pixels: with four columns that is 97 pixels an inch.
    size = min(2.0, max(1.3, 15 / n_columns))
    strip, block = n_columns * size, headings + (2 + has_truth) * (size + space)
    width, height = strip + space + bar + right, block * len(slices)
    figure = Figure(figsize=(width, height))
    # In inches, and one for all: those of each strip and each bar would take longer to draw than what is in them.
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()

    def draw(images: list[Tensor], y: float, limits: Sequence[float], look: str, label: str, *ticks: float) -> float:
        """Images side by side, as one image, and the bar of their values. Returns the side of a pixel."""
        array = torch.cat([pad(image, (0, gap), value=nan) for image in images], dim=1)[:, :-gap]
        (rows, columns), (low, high), edge, top = array.shape, limits, strip + space + bar, y + size
        pixel = min(strip / columns, size / rows)
        spans = (0, pixel * columns, top - pixel * rows, top), (edge - bar, edge, y, top)
        for values, span in zip((array, torch.linspace(high, low, 256)[:, None]), spans, strict=True):
            axes.imshow(values.numpy(), look, vmin=low, vmax=high, interpolation="nearest", aspect="auto", extent=span)
        axes.add_patch(Rectangle((edge - bar, y), bar, size, fill=False, linewidth=0.8))
        for tick in ticks:
            at = y + size * (tick - low) / (high - low)
            axes.plot((edge, edge + 0.05), (at, at), "black", linewidth=0.8)
            axes.text(edge + 0.1, at, f"{tick:g}".replace("-", "−"), fontsize=8, va="center_baseline")
        axes.text(width - 0.15, y + size / 2, label, fontsize=8, rotation=90, ha="center", va="center")
        return pixel

    for k, slice_ in enumerate(slices):
        rows, columns = slice_.region()
        side = slice_.reference.shape[1]
        gap, y = max(1, side // 32), height - k * block - headings - size
        truths = [] if slice_.truth is None else [slice_.truth]
        images = [*truths, *(method.iterates[-1] for method in slice_.methods)]
        pixel = draw(images, y, DISPLAY_WINDOW, "gray", "HU", -500, 0, 500)
        (low, high), below = slice_.window, y - space - size
        draw([_magnified(image, rows, columns) for image in images], below, (low, high), "gray", "HU", low, high)
        for truth in truths:
            errors = [truth * nan, *((image - truth).abs() for image in images[1:])]
            lowest = below - space - size
            draw(errors, lowest, (0.0, ERROR_LIMIT), "inferno", "|error|, HU", *range(0, int(ERROR_LIMIT), 50))
            part = f"the framed part, {low:g} to {high:g} HU, where the truth has most detail in this window"
            note = fill(f"Middle row: {part}.".replace("-", "−"), int(13 * size))
            axes.text(0.1, lowest + size - 0.1, note, fontsize=8, va="top")
        titles = [f"truth\n{slice_.name}"] * len(truths)
        titles += [f"{fill(of.name, 26)}\n{of.caption}" for of in slice_.methods]
        for n, title in enumerate(titles):
            left, top = pixel * n * (side + gap), y + size
            axes.text(left + pixel * side / 2, top + 0.04, title, ha="center", fontsize=9)
            corner = left + pixel * columns.start, top - pixel * rows.stop
            sides = pixel * (columns.stop - columns.start), pixel * (rows.stop - rows.start)
            axes.add_patch(Rectangle(corner, *sides, fill=False, edgecolor=_FRAME, linewidth=1))
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure as PNG, completely or not at all.

    Not by pyplot: it keeps each figure until it is closed, and may choose a backend that needs a screen.
    """
    FigureCanvasAgg(figure)
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=dpi, format="png")


def _magnified(image: Tensor, rows: slice, columns: slice) -> Tensor:
    """A region of an image, each pixel as a square of pixels, on a grid of the image's shape."""
    part = image[rows, columns].repeat_interleave(_MAGNIFICATION, 0).repeat_interleave(_MAGNIFICATION, 1)
    (height, width), (full_height, full_width) = part.shape, image.shape
    return pad(part, (0, full_width - width, 0, full_height - height), value=nan)
