"""Write a page: tables, and a viewer for slices by method. `write_evaluation` writes that of an evaluation."""

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from qnmixer.engine.config.run import Config
from qnmixer.engine.evaluation.scores import Evaluation
from qnmixer.engine.reports.pictures import DISPLAY_WINDOW, ERROR_LIMIT, SliceImages
from qnmixer.engine.reports.terminal import NOTHING, Table
from qnmixer.engine.tracking.loggers import device_name, without_folders
from qnmixer.engine.tracking.records import git_commit, versions
from qnmixer.engine.tracking.run import name_of_run
from qnmixer.files import write_text

NOT_A_NUMBER = -32768  # the int16 that stands for a pixel that is not finite
_NUMERIC = re.compile(r"[+−±-]? ?\d[\d,.]*(e[+-]?\d+)?(?!\w)")  # also "± 1.2" and "3 s", but not a commit hash
_THUMBNAIL = 64  # pixels


def write_page(
    path: Path,
    title: str,
    tables: list[Table],
    slices: list[SliceImages],
    provenance: Mapping[str, str],
    *,
    subtitle: str = "",
    order: str = "",
    opened: int = 0,
) -> None:
    """Write tables, slices and their provenance as one HTML file, completely or not at all.

    Pixels are rounded to whole HU. Pixels that are not finite are shown in magenta. All text is escaped. Paths in it
    lose their folders.

    Args:
        path: the file.
        title: of the page.
        tables: the first stands above the slices, the others below.
        slices: for the viewer; without slices the page has no viewer. Thumbnails show the last method.
        provenance: lines at the foot, as {"commit": …, "hardware": …}.
        subtitle: stands below the title.
        order: how the slices are sorted, for the heading of their thumbnails.
        opened: index of the slice that is shown first.
    """
    first, *others = [_table(table) for table in tables] or [""]
    style, script = _part("page.css"), _part("page.js")
    parts = {
        "title": _text(title),
        "subtitle": _text(subtitle),
        "window_title": _text(f"{title}: {subtitle}" if subtitle else title),
        "order": _text(f", {order}" if order else ""),
        "style_hash": _csp_hash(style),
        "script_hash": _csp_hash(script),
        "style": style,
        "first_table": first,
        "other_tables": "\n".join(others),
        "provenance": "\n".join(
            f"<div><dt>{_text(name)}</dt><dd>{_text(text)}</dd></div>" for name, text in provenance.items()
        ),
        "script": script,
        **_viewer(slices, opened),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _part("page.html"))
    write_text(path, page.encode(errors="replace").decode())  # file names may hold bytes that are not UTF-8


def write_evaluation(
    path: Path, evaluation: Evaluation, title: str, config: Config, device: torch.device, run: Path
) -> None:
    """Write the page of an evaluation: its table, the slices that were kept, the worst first, and its config.

    `config`, `device` and `run`: what was measured, where, and with whose weights.
    """
    method, n_images, n_kept = evaluation.methods[-1], evaluation.n_images, len(evaluation.slices)
    size, (low, high) = config.data.image_size, config.evaluation.window
    lines = [f"Warning: {line}." for line in evaluation.warnings()]
    lines += [f"{evaluation.gain()}. The window is {low:g} to {high:g} HU.".replace(" -", " −")]
    order = f"worst first by PSNR of {method}"
    if n_kept < n_images:
        order += f": {n_kept} of {n_images}, the worst and those of the picture; images.csv has all"
    drawn = [k for k, number in enumerate(evaluation.slices) if number in evaluation.pictured]
    write_page(
        path,
        f"{method}, run {name_of_run(run)}",
        [Table(f"Mean ± standard deviation over {n_images} slices", *evaluation.table(), " ".join(lines))],
        [*evaluation.slices.values()],
        {
            "commit": git_commit() or "none",
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
            "hardware": device_name(device.type),
        },
        subtitle=f"{title}, {size} × {size} pixels",
        order=order,
        opened=drawn[len(drawn) // 2] if drawn else 0,
    )


def _viewer(slices: Sequence[SliceImages], opened: int) -> dict[str, str]:
    """The data for the page's script: settings with a description of each slice, all pixels, and the thumbnails."""
    packed = [_pack(slice_) for slice_ in slices]
    inferno = matplotlib.colormaps["inferno"](range(256), bytes=True)[:, :3]
    settings = {
        "slices": [description for description, _ in packed],
        "opened": opened,
        "window": DISPLAY_WINDOW,
        "errorLimit": ERROR_LIMIT,
        "errorColours": inferno.tolist(),
        "notANumber": NOT_A_NUMBER,
    }
    return {
        "settings": json.dumps(settings).replace("<", "\\u003c"),  # a name with "</script>" must not end the element
        "pixels": "\n".join(
            f'<script type="text/plain" id="pixels-{n}">{pixels}</script>' for n, (_, pixels) in enumerate(packed)
        ),
        "thumbnails": _base64(b"".join(_thumbnail(slice_).tobytes() for slice_ in slices)),
    }


def _part(name: str) -> str:
    return files("qnmixer.extras.page").joinpath(name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    """Escape a text and cut the folders out of its paths."""
    return html.escape(without_folders(text))


def _base64(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def _csp_hash(text: str) -> str:
    """The hash by which the page's security policy allows its own style and script, and nothing else: no requests."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _pack(slice_: SliceImages) -> tuple[dict[str, Any], str]:
    """A slice as a description, which names images by number, and the images [N, H, W] as base64 text.

    An image that occurs twice is stored once, such as the FBP from which several methods start. Each image except the
    first is stored as the difference from the one before, which compresses best.
    """
    height, width = slice_.truth.shape
    stored: dict[bytes, int] = {}

    def numbers(images: Sequence[Tensor]) -> list[int]:
        return [stored.setdefault(_int16(image), len(stored)) for image in images]

    description = {
        "name": without_folders(slice_.name),
        "height": height,
        "width": width,
        "psnr": None if slice_.psnr is None else f"{slice_.psnr:.1f}",
        "thumbnail": _thumbnail(slice_).shape,
        "truth": numbers([slice_.truth])[0],
        "methods": [
            {"name": without_folders(m.name), "caption": m.caption, "iterates": numbers(m.iterates)}
            for m in slice_.methods
        ],
    }
    pixels = np.frombuffer(b"".join(stored), "<i2").reshape(-1, height, width)
    differences = np.diff(pixels, axis=0, prepend=np.zeros_like(pixels[:1]))  # int16 wraps around, and back in the sum
    return description, _base64(differences.tobytes())


def _thumbnail(slice_: SliceImages) -> npt.NDArray[np.uint8]:
    """The image of the last method in the display window, [h, w]: at most 64 pixels on the longer side."""
    image = slice_.methods[-1].iterates[-1].detach().to("cpu", torch.float32).nan_to_num(0.0)
    factor = min(1.0, _THUMBNAIL / max(image.shape))
    height, width = (max(1, round(n * factor)) for n in image.shape)
    small = adaptive_avg_pool2d(image[None, None], (height, width))[0, 0]
    low, high = DISPLAY_WINDOW
    return ((small - low) / (high - low) * 255).clamp(0, 255).round().to(torch.uint8).numpy()


def _int16(image: Tensor) -> bytes:
    """Whole HU as little-endian int16."""
    hu = image.detach().to("cpu", torch.float32)
    whole = hu.round().clamp(NOT_A_NUMBER + 1, 32767).where(hu.isfinite(), torch.tensor(float(NOT_A_NUMBER)))
    return whole.numpy().astype("<i2").tobytes()


def _table(table: Table) -> str:
    columns = list(zip(*table.rows, strict=True))
    there = [[cell for cell in column if cell != NOTHING] for column in columns]
    numeric = [sum(bool(_NUMERIC.match(cell)) for cell in cells) > len(cells) / 2 for cells in there]

    def cell(k: int, text: str, tag: str, more: str = "") -> str:
        right = ' class="number"' if numeric and numeric[k] else ""
        return f"<{tag}{more}{right}>{_text(text)}</{tag}>"

    head = "".join(cell(k, text, "th", ' scope="col"') for k, text in enumerate(table.headings))
    rows = [
        cell(0, row[0], "th", ' scope="row"') + "".join(cell(k, text, "td") for k, text in enumerate(row) if k)
        for row in table.rows
    ]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    return (
        f'<section class="table"><h2>{_text(table.title)}</h2><div class="wide" tabindex="0">\n'
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>{note}</section>"
    )
