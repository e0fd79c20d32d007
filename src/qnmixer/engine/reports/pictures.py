"""Pictures of slices by several methods, with their error maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad

from qnmixer.files import atomic_file

DISPLAY_WINDOW = (-1000.0, 700.0)  # HU; lung, soft tissue and bone are all visible
ERROR_LIMIT = 200.0  # HU, the upper end of the error maps
_BODY = -500.0  # HU; a pixel above it is not air


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
    """One slice by several methods, in display order.

    Args:
        name: of the slice.
        truth: [H, W] in HU.
        methods: all of the truth's shape.
        psnr: of the last method, in dB; None: not known.
    """

    name: str
    truth: Tensor
    methods: list[MethodImages]
    psnr: float | None = None


def draw_slices(path: Path, slices: Sequence[SliceImages], *, enlarge: bool = False) -> None:
    """Draw each slice as a strip: the truth and each method, above a strip of their absolute errors. Writes a PNG.

    `enlarge`: show a part of each image at twice the size. It lies inside the body, at the largest error of all methods
    except the worst.
    """
    n_columns = 1 + max(len(of.methods) for of in slices)
    size = min(2.2, max(1.3, 15 / n_columns))  # inches, of an image
    headings, gap, bar, right = 0.5, 0.06, 0.1, 0.75
    width, block = n_columns * size + gap + bar + right, headings + 2 * (size + gap)
    height = block * len(slices)
    figure = Figure(figsize=(width, height))

    def place(x: float, y: float, w: float) -> Axes:
        return figure.add_axes((x / width, y / height, w / width, size / height))

    for k, of in enumerate(slices):
        images = [method.iterates[-1] for method in of.methods]
        y, x = height - k * block - headings - size, n_columns * size + gap
        above, below = place(0, y, n_columns * size), place(0, y - gap - size, n_columns * size)
        shown, step = [of.truth, *images], of.truth.shape[1] + _gap(of.truth)
        if enlarge:
            corner = _worst_part(images, of.truth)
            shown = [_enlarged(above, image, corner, n * step) for n, image in enumerate(shown)]
        errors = [of.truth * nan, *((image - of.truth).abs() for image in images)]
        for axes, strip, limits, colours, label, ticks in (
            (above, shown, DISPLAY_WINDOW, "gray", "HU", (-500, 0, 500)),
            (below, errors, (0.0, ERROR_LIMIT), "inferno", "|error|, HU", (0, 100)),
        ):
            # One image for all: many separate drawings would take seconds.
            array = torch.cat([pad(image, (0, _gap(image)), value=nan) for image in strip], dim=1)[:, : -_gap(of.truth)]
            drawn = axes.imshow(array.numpy(), cmap=colours, vmin=limits[0], vmax=limits[1], interpolation="nearest")
            axes.set_axis_off()
            side = place(x, y if axes is above else y - gap - size, bar)
            figure.colorbar(drawn, cax=side, label=label, ticks=ticks)
        titles = [f"truth\n{of.name[:22]}", *(f"{method.name}\n{method.caption}" for method in of.methods)]
        for n, title in enumerate(titles):
            above.annotate(title, ((n + 0.5) * step, -0.5), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    save_figure(figure, path)


def _gap(image: Tensor) -> int:
    return max(1, image.shape[1] // 32)


def _worst_part(images: Sequence[Tensor], truth: Tensor) -> tuple[int, int]:
    """Upper left corner of the part of a slice, a quarter of each side, with the largest error."""
    errors = torch.stack([(image - truth).abs() for image in images]) * (truth > _BODY)
    kept = errors.mean(dim=(1, 2)).argsort()[: max(1, len(images) - 1)]
    size, step = truth.shape[0] // 4, max(1, truth.shape[0] // 32)
    local = avg_pool2d(errors[kept].mean(dim=0)[None], size, step)[0]
    row, column = divmod(int(local.argmax()), local.shape[1])
    return row * step, column * step


def _enlarged(axes: Axes, image: Tensor, corner: tuple[int, int], left: int) -> Tensor:
    """The image with a part of it at twice the size in the farthest corner. Draws a frame around both.

    `left`: the column of the image in its strip.
    """
    (height, width), (row, column), size = image.shape, corner, image.shape[0] // 4
    y, x = (0 if 2 * row + size > height else height - 2 * size), (0 if 2 * column + size > width else width - 2 * size)
    image = image.clone()
    part = image[row : row + size, column : column + size]
    image[y : y + 2 * size, x : x + 2 * size] = interpolate(part[None, None], scale_factor=2)[0, 0]
    for (top, start), side in ((corner, size), ((y, x), 2 * size)):
        frame = Rectangle((left + start - 0.5, top - 0.5), side, side, fill=False, edgecolor="tab:orange", lw=1)
        axes.add_patch(frame)
    return image


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, completely or not at all."""
    FigureCanvasAgg(figure)
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=130, format="png")
