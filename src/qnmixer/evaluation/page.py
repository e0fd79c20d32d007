"""Write a page: tables, and a viewer for slices by method. `write_page_of` writes that of an evaluation."""

import base64
import hashlib
import html
import json
import re
import zlib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qnmixer.evaluation.pictures import DISPLAY_WINDOW, ERROR_LIMIT, SliceImages
from qnmixer.evaluation.scores import Evaluation
from qnmixer.files import write_text
from qnmixer.runs.loggers import without_folders
from qnmixer.runs.records import git_commit, versions
from qnmixer.runs.tables import Table

NOT_A_NUMBER = -32768  # the int16 that stands for a pixel that is not finite


def write_page(path: Path, title: str, tables: list[Table], slices: list[SliceImages], subtitle: str = "") -> None:
    """Write tables and slices as one HTML file, completely or not at all. Without slices it has no viewer.

    The first table stands above the slices, the others below. Pixels are rounded to whole HU. Pixels that are not
    finite are shown in magenta. All text is escaped. Paths in it lose their folders.
    """
    first_table, *other_tables = [table.html(_text) for table in tables] or [""]
    style, script = _part("page.css"), _part("page.js")
    packed = [_pack(slice_) for slice_ in slices]
    settings = {
        "slices": [description for description, _ in packed],
        "window": DISPLAY_WINDOW,
        "errorLimit": ERROR_LIMIT,
        "errorColours": matplotlib.colormaps["inferno"](range(256), bytes=True)[:, :3].tolist(),
        "notANumber": NOT_A_NUMBER,
    }
    parts = {
        "title": _text(title),
        "subtitle": _text(subtitle),
        "style_hash": _csp_hash(style),
        "script_hash": _csp_hash(script),
        "style": style,
        "script": script,
        "first_table": first_table,
        "other_tables": "\n".join(other_tables),
        "commit": git_commit() or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "settings": json.dumps(settings).replace("<", "\\u003c"),  # a name with "</script>" must not end the element
        "pixels": "\n".join(
            f'<script type="text/plain" id="pixels-{n}">{pixels}</script>' for n, (_, pixels) in enumerate(packed)
        ),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _part("page.html"))
    write_text(path, page)


def write_page_of(path: Path, evaluation: Evaluation) -> None:
    """Write the page of an evaluation: its table, and the slices that were kept, the worst first."""
    method, n_images = evaluation.methods[-1], evaluation.n_images
    lines = [*(f"Warning: {line}" for line in evaluation.warnings()), evaluation.gain()]
    slices = [slice_ for slice_ in evaluation.slices.values() if slice_.truth is not None]  # a viewer shows errors
    if slices:
        line = f"Below are {len(slices)} slices, the worst first by PSNR of {method}; images.csv has the scores of all"
        lines.append(line)
    title = f"Mean ± standard deviation over {n_images} slices"
    table = replace(evaluation.table(), title=title, note=". ".join(lines))
    write_page(path, f"{method}: {evaluation.title}", [table], slices)


def _part(name: str) -> str:
    return files("qnmixer.evaluation").joinpath(name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    """Escape a text and cut the folders out of its paths."""
    return html.escape(without_folders(text))


def _csp_hash(text: str) -> str:
    """The hash by which the page's security policy allows its own style and script, and nothing else: no requests."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _pack(slice_: SliceImages) -> tuple[dict[str, Any], str]:
    """A slice as a description, and its images [N, H, W] as base64 text: the truth, then the iterates of each method.

    Each image except the first is stored as the difference from the one before, which compresses best.
    """
    height, width = slice_.reference.shape
    images = [slice_.reference, *(x for method in slice_.methods for x in method.iterates)]
    description = {
        "name": without_folders(slice_.name),
        "height": height,
        "width": width,
        "methods": [
            {"name": without_folders(method.name), "caption": method.caption, "n": len(method.iterates)}
            for method in slice_.methods
        ],
    }
    pixels = np.stack([_int16(image) for image in images])
    differences = np.diff(pixels, axis=0, prepend=np.zeros_like(pixels[:1]))  # int16 wraps around, and back in the sum
    return description, base64.b64encode(zlib.compress(differences.tobytes())).decode()


def _int16(image: Tensor) -> npt.NDArray[np.int16]:
    """Whole HU as little-endian int16."""
    pixels = image.round().clamp(NOT_A_NUMBER + 1, 32767).where(image.isfinite(), torch.tensor(float(NOT_A_NUMBER)))
    return pixels.numpy().astype("<i2")
