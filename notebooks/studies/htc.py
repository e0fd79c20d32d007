"""Measured discs with truth, of the Helsinki challenge 2022: FBP, TV, and a network of experiment=htc.

    python notebooks/studies/htc.py FOLDER                # what the scans say of disc, curve and noise
    python notebooks/studies/htc.py FOLDER OUTPUT RUN     # scores, a table and a picture

FOLDER has scans as NAME_90degrees.mat, and the segmentation truth/NAME.png, 512 × 512, of those to be scored. Each scan
and parts of it of 80°, 70°, … are reconstructed, parts from its first view on and up to its last one. FBP and TV have
all views of an arc and 256 × 256 pixels; the network has 61 views and 128 × 128 pixels. An image is turned by the
angle of its first view, enlarged to 512 × 512, cut at Otsu's threshold, and scored by Matthews' correlation with the
truth, as the challenge has it. Scores stay in OUTPUT/rows.csv: without RUN, only those of FBP and TV are added.
"""

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import grid_sample

from qnmixer.data.regrid import regrid_scan
from qnmixer.data.sinograms import read_mat
from qnmixer.models import TotalVariation
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.reconstruction.cures import Cures
from qnmixer.reconstruction.reconstructor import Reconstructor, on_scan
from qnmixer.runs.tables import Table

Floats = NDArray[np.float64]
ARCS = (90, 80, 70, 60, 50, 40, 30)
"""Degrees from the first view to the last."""
WIDTH = 512 * 0.1483223
"""Of the image in mm: a pixel of the truth is as wide as a bin at the axis."""
TV_WEIGHTS = (3e-5, 1e-4, 3e-4, 1e-3)
TV_ITERATIONS = 400
LPD = {90: 0.9944, 80: 0.9934, 70: 0.9899, 60: 0.9916, 50: 0.9903, 40: 0.9885, 30: 0.9993}
"""What github.com/alexdenker/htc2022_LPD prints of its learned primal-dual networks, one for each arc."""
DRAWN = (90, 50, 30)
"""Arcs in the picture."""
NETWORK, FROM_TV = "network", "network, started at TV"
_CAPTION = (
    "Matthews' correlation of Otsu's segmentation with the truth of disc tb (CC BY 4.0), 512 × 512 pixels. One network "
    "has all arcs. It was trained on drawn discs as `experiment=htc` says, in 3,400 steps of 4. No disc of the "
    "challenge was used in training or validation. Who wrote the drawing had seen the truth of this disc: cells with "
    "bars between them are one of the kinds of holes, and this disc has no other. "
    f"TV: {TV_ITERATIONS} iterations, and of the weights {', '.join(map(str, TV_WEIGHTS))} the best for this "
    "very scan, which favours it. FBP and TV have all views, 0.5° apart, the network has 61. Theirs: what "
    "alexdenker/htc2022_LPD prints of learned primal-dual networks, one for each arc, trained in 40,000 steps of 6 on "
    "a GPU, then tuned on the discs of the challenge."
)
_OF_FACTS = (
    "What the scans say of disc, beam hardening and noise, without any truth: the numbers of `data=discs` and `noise` "
    "in `experiment=htc`. The rim of a disc is solid. So rays near it give the attenuation p of known lengths, which "
    "a·p + b·p² fits. All methods get lengths by this curve, two bins in one. At p = 1.5 the curve makes noise 1.25 "
    "times as large, so a photon counts as two thirds. Written by notebooks/studies/htc.py."
)
Rows = dict[tuple[str, str, str], float]
"""Scores by scan, views and method."""


@dataclass
class Scan:
    """Views of a disc, as lengths in mm of acrylic [v, d], with their angles in radians and rays."""

    name: str
    lengths: Floats
    angles: Floats
    rays: FanBeamGeometry

    def part(self, arc: float, at_end: bool = False) -> "Scan":
        """The first or the last views, over an arc in degrees."""
        n = 1 + round(math.radians(arc) / (self.angles[1] - self.angles[0]))
        views = slice(len(self.angles) - n, None) if at_end else slice(n)
        return replace(self, lengths=self.lengths[views], angles=self.angles[views])

    @property
    def views(self) -> str:
        """Degrees of the first and the last view."""
        return "{:g}–{:g}°".format(*np.degrees(self.angles[[0, -1]]).round(3))

    def sinogram(self, geometry: FanBeamGeometry) -> Tensor:
        """Lengths [1, 1, V, D] at the rays of a geometry, from its first angle on."""
        lengths, _ = regrid_scan(self.lengths.astype(np.float32), self.angles, self.rays, geometry, self.name)
        return torch.from_numpy(lengths)[None, None]


@dataclass
class Disc:
    """What a scan says of its disc without any image. Its rim is solid, so its chords are known lengths of acrylic."""

    centre: Floats  # [2], mm from the axis
    radius: float  # mm
    air: float  # attenuation beside the disc
    curve: Floats  # [2], a and b: a chord is a·p + b·p² mm, with p the attenuation above that of air
    photons: float  # counts of a ray in air that have its noise


def read(path: Path) -> tuple[Scan, Disc]:
    """A scan, and its disc. Attenuation grows less than the length, as a beam has many energies: the curve mends it."""
    rays = FanBeamGeometry(512, WIDTH / 512, 2, 560, 0.2, 410.66, 143.08)  # the file has its own bins and distances
    measured, rays, angles = read_mat(path, rays)
    attenuation: Floats = measured.astype(np.float64)
    disc = disc_of(attenuation, angles, rays)
    p = attenuation - disc.air
    return Scan(path.stem, p * (disc.curve[0] + disc.curve[1] * p), angles, rays), disc


def disc_of(attenuation: Floats, angles: Floats, rays: FanBeamGeometry) -> Disc:
    """The disc of a scan [v, d]. Its edges give centre and radius by least squares, and rays near its rim the curve."""
    inside, pitch, far = attenuation > 0.15, rays.detector_pitch, rays.source_to_detector
    first, last = inside.argmax(1) - 0.5, inside.shape[1] - inside[:, ::-1].argmax(1) - 0.5
    left, right = (np.arctan((edge - (rays.n_detectors - 1) / 2) * pitch / far) for edge in (first, last))
    sin, cos, ratio = np.sin(angles), np.cos(angles), np.tan((left + right) / 2)
    # From the source at β the centre is at R − x sin β + y cos β along the central ray, x cos β + y sin β beside it.
    system = np.stack([cos + ratio * sin, sin - ratio * cos], 1)
    x, y = centre = np.linalg.lstsq(system, ratio * rays.source_to_axis)[0]
    depth, aside = rays.source_to_axis - x * sin + y * cos, x * cos + y * sin
    radius = float((np.hypot(depth, aside) * np.sin((right - left) / 2)).mean())
    lines = angles[:, None] - rays.fan_angles()
    distance = rays.ray_distances() - x * np.cos(lines) - y * np.sin(lines)
    chord = 2 * np.sqrt(np.maximum(radius**2 - distance**2, 0))
    in_air, near_rim = np.abs(distance) > radius + 2, (chord > 6) & (np.abs(distance) > radius - _RIM)
    air = float(np.median(attenuation[in_air]))
    p = attenuation[near_rim] - air
    curve = np.linalg.lstsq(np.stack([p, p**2], 1), chord[near_rim])[0]
    # Second differences, 1 −2 1, have 6 times the variance of white noise; 0.6745 is the median of |N(0, 1)|.
    roughness = np.abs(np.diff(attenuation, 2, axis=1))[in_air[:, 1:-1]]
    return Disc(centre, radius, air, curve, 6 * (0.6745 / np.median(roughness)) ** 2)


_RIM = 4.0
"""mm of the disc that have no hole."""


def turned(image: Tensor, angle: float, size: int = 512) -> Tensor:
    """An image [S, S] of the same width in size × size pixels, turned counterclockwise by an angle in radians.

    A scan whose first view is at β is, of the object turned back by β, the scan that starts at 0: the axis of rotation
    is the middle of the image. So a network of one first angle serves all of them, and its image is turned by β.
    """
    axis = (torch.arange(size) + 0.5) * (2 / size) - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")  # y points down, so the sign of the sine is that of turning back
    cos, sin = math.cos(angle), math.sin(angle)
    grid = torch.stack([cos * x - sin * y, sin * x + cos * y], -1)
    return grid_sample(image[None, None], grid[None], "bicubic", align_corners=False)[0, 0]


def otsu(image: Floats) -> float:
    """Otsu's threshold, 1979: of 256 between the extremes, that with the largest variance between its two classes."""
    counts, edges = np.histogram(image, 256)
    below, middles = counts.cumsum(), (edges[:-1] + edges[1:]) / 2
    sums, n = (counts * middles).cumsum(), image.size
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * (n - below) * (sums / below - (sums[-1] - sums) / (n - below)) ** 2
    return float(edges[1 + np.nanargmax(between)])


def matthews(prediction: NDArray[np.bool_], truth: NDArray[np.bool_]) -> float:
    """Matthews' correlation of two segmentations, −1 to 1; 0 if one of them has a single class."""
    tp, fp = (float((prediction & part).sum()) for part in (truth, ~truth))
    fn, tn = (float((~prediction & part).sum()) for part in (truth, ~truth))
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(product) if product else 0.0


def geometry_of(scan: Scan) -> FanBeamGeometry:
    """The rays of a scan for 256 × 256 pixels, two bins in one, from angle 0 on."""
    n = len(scan.angles)
    span = float(n * (scan.angles[1] - scan.angles[0]))
    bins = scan.rays.n_detectors // 2
    return replace(
        scan.rays,
        image_size=256,
        pixel_size=WIDTH / 256,
        n_detectors=bins,
        detector_pitch=0.4,
        angle_span=span,
        n_views=n,
    )


@torch.no_grad()
def classical(scan: Scan, weights: Sequence[float]) -> Iterator[tuple[str, Tensor]]:
    """FBP, and TV with these weights, by name: images [1, 1, 256, 256]."""
    projector = FanBeamProjector(geometry_of(scan))
    y = scan.sinogram(projector.geometry)
    yield "FBP", projector.fbp(y)
    for weight in weights:
        yield name_of(weight), TotalVariation(projector, TV_ITERATIONS, weight, gap=0, noise_weight=0)(y)


@torch.no_grad()
def learned(scan: Scan, trained: Reconstructor) -> Iterator[tuple[str, Tensor]]:
    """The network, also started at TV: images [1, 1, 128, 128]."""
    config, V = trained.config, trained.projector.geometry.n_views
    arc = math.degrees(scan.angles[-1] - scan.angles[0])
    span = math.radians(round(arc * V / (V - 1), 4))  # as data.arcs has it: a scan of the training gets no cures
    config = config.changed(geometry=config.geometry.changed(angle_span=span))
    of_acrylic = (config.data.arguments["hu"] + 1000) / (config.data.hu_max + 1000)
    for name, start in ((NETWORK, "fbp"), (FROM_TV, "tv")):
        module = on_scan(trained, config, Cures(passes=1, start=start)).eval()  # type: ignore[arg-type]
        yield name, module(scan.sinogram(module.projector.geometry) * of_acrylic)


def parts_of(scans: list[Scan]) -> Iterator[tuple[int, Scan]]:
    """Each arc with the scans that are so long, and with parts of the shortest longer ones."""
    arcs = {scan.name: round(math.degrees(scan.angles[-1] - scan.angles[0])) for scan in scans}
    for arc in ARCS:
        longer = [length for length in arcs.values() if length >= arc]
        for scan in (scan for scan in scans if longer and arcs[scan.name] == min(longer)):
            yield arc, scan.part(arc)
            if arcs[scan.name] > arc:
                yield arc, scan.part(arc, at_end=True)


def name_of(weight: float) -> str:
    """Of TV with a weight."""
    return f"TV {weight:g}"


def best_tv(scan: Scan, rows: Rows) -> str:
    """The name of TV with the weight that is best for this very part of the scan."""
    return max(map(name_of, TV_WEIGHTS), key=lambda name: rows[scan.name, scan.views, name])


def table(parts: list[tuple[int, Scan]], rows: Rows) -> str:
    """The scores of all parts."""
    lines = []
    for arc, scan in parts:
        tv = best_tv(scan, rows)
        scores = [rows.get((scan.name, scan.views, method)) for method in ("FBP", tv, NETWORK, FROM_TV)]
        cells = ["–" if score is None else f"{score:.3f}" for score in scores]
        lines.append([f"{arc}°", scan.views, *cells[:2], tv.removeprefix("TV "), *cells[2:], f"{LPD[arc]:.4f}"])
    heads = ["arc", "views", "FBP", "TV", "its weight", NETWORK, FROM_TV, "learned primal-dual, theirs"]
    return Table(heads, lines).markdown()


def draw(path: Path, images: dict[str, list[NDArray[Any]]]) -> None:
    """A picture with a row of images [512, 512] for each arc: the truth, then those of the methods."""
    n = len(next(iter(images.values())))
    figure = Figure(figsize=(2.2 * n, 2.35 * len(images)), layout="constrained")
    axes = figure.subplots(len(images), n, squeeze=False)
    for row, (label, of_methods) in zip(axes, images.items(), strict=True):
        names = ["truth", *(f"{name}, {label}" for name in ("FBP", "TV", NETWORK, FROM_TV))]
        for axis, name, pixels in zip(row, names, of_methods, strict=False):
            axis.imshow(pixels, "gray", vmin=0, vmax=float(np.quantile(pixels.astype(float), 0.99)))
            axis.set_title(name, fontsize=8)
            axis.set_axis_off()
    FigureCanvasAgg(figure).print_png(path)


def facts(scans: list[tuple[Scan, Disc]]) -> str:
    """What the scans say of disc, curve and noise."""
    lines = []
    for scan, disc in scans:
        a, b = disc.curve
        of_disc = [f"{disc.radius:.2f}", f"{np.hypot(*disc.centre):.2f}"]
        lines.append(
            [scan.name, scan.views, *of_disc, f"{1 / a:.4f}", f"{1 / (a + 1.5 * b):.4f}", f"{disc.photons:.2g}"]
        )
    heads = ["radius, mm", "off the axis, mm", "1/mm of thin acrylic", "1/mm of acrylic at p = 1.5", "photons of a bin"]
    return Table(["scan", "views", *heads], lines).markdown()


def main() -> None:
    """Print what the scans say; score what is missing, and write the page."""
    folder, *rest = map(Path, sys.argv[1:])
    scans = [read(path) for path in sorted(folder.glob("*.mat"))]
    print(facts(scans))
    if not rest:
        return
    (output := rest[0]).mkdir(parents=True, exist_ok=True)
    trained = load_run(rest[1], "best").eval() if rest[1:] else None
    file, rows, images = output / "rows.csv", Rows(), dict[str, list[NDArray[Any]]]()
    if file.exists():
        with file.open(newline="") as stream:
            rows = {(name, views, method): float(score) for name, views, method, score in csv.reader(stream)}
    truths = {path.stem: np.asarray(Image.open(path)) > 127 for path in (folder / "truth").glob("*.png")}
    parts = [*parts_of([scan for scan, _ in scans if scan.name.split("_")[0] in truths])]
    for arc, scan in parts:
        truth, is_drawn = truths[scan.name.split("_")[0]], arc in DRAWN and f"{arc}°" not in images
        missing = [weight for weight in TV_WEIGHTS if (scan.name, scan.views, name_of(weight)) not in rows]
        best = [weight for weight in TV_WEIGHTS if not missing and name_of(weight) == best_tv(scan, rows)]
        weights = (TV_WEIGHTS if missing else best) if is_drawn else missing
        methods = chain(classical(scan, weights) if weights else (), learned(scan, trained) if trained else ())
        pixels = {name: turned(image[0, 0], scan.angles[0]).numpy() for name, image in methods}
        rows |= {(scan.name, scan.views, name): matthews(x > otsu(x), truth) for name, x in pixels.items()}
        with file.open("w", newline="") as stream:
            csv.writer(stream).writerows([*key, f"{score:.4f}"] for key, score in rows.items())
        if is_drawn:
            names = ["FBP", best_tv(scan, rows), *(name for name in (NETWORK, FROM_TV) if name in pixels)]
            images[f"{arc}°"] = [truth, *map(pixels.__getitem__, names)]
    draw(output / "htc.png", images)
    scores, picture = table(parts, rows), "![Truth, FBP, TV and network at 90, 50 and 30°](htc.png)"
    title = "# Measured discs of 30 to 90°, with truth"
    (output / "htc.md").write_text("\n\n".join([title, scores, _CAPTION, picture, facts(scans), _OF_FACTS]) + "\n")
    print(scores)


if __name__ == "__main__":
    main()
