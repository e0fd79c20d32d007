"""The shipped network on other scans than its own: before its cures, with them, and total variation beside it.

    python notebooks/studies/any_scan.py OUTPUT SLICES SPLIT [SCAN …]

SLICES has PATIENT/slices.npy, [N, 512, 512] in HU. SPLIT is a file with data.val_patients=[…] and
data.test_patients=[…]. The middle slice of each patient is simulated from its 512 × 512 pixels, with field noise. SCAN
is a number of views, or an arc as 150°. Total variation has, for each scan, the one of three weights that is best for
the val patients. Each result stays in OUTPUT/rows.csv, and is not computed again; the table is OUTPUT/any_scan.md.
"""

import csv
import math
import re
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

import qnmixer
from qnmixer.models import TotalVariation
from qnmixer.physics import FanBeamProjector, FieldNoise

SCANS = ["16", "24", "32", "48", "64", "96", "128", "150°", "120°"]
BEFORE, CURED = "before", "cured"
FACTORS = {"TV": 1.0, "TV, weight × 0.46": 10 ** (-1 / 3), "TV, weight × 0.22": 10 ** (-2 / 3)}
"""Times 7.2e-4/√V."""
_CAPTION = (
    "PSNR in dB, means over patients, one slice of each, simulated from a 2 times finer grid with field noise. Truths "
    "are scaled as in training. Before: only the step sizes follow the scan. Cured: by default. TV: 400 iterations, "
    "the best of three weights by the val patients. Least: on the patient where it is smallest. Written by "
    "notebooks/studies/any_scan.py."
)
Rows = dict[tuple[str, str, str], float]
"""PSNR in dB by scan, method and patient."""


def split_in(file: Path) -> dict[str, list[str]]:
    """The validation and test patients of a file of overrides."""
    line = file.read_text()
    return {part: re.search(rf"{part}_patients=\[(.*?)\]", line)[1].split(",") for part in ("val", "test")}  # type: ignore[index]


def middle_slices(root: Path, patients: list[str]) -> Tensor:
    """One slice of each patient as attenuation from 0 to 1, [B, 1, 512, 512]."""
    volumes = [np.load(root / patient / "slices.npy", mmap_mode="r") for patient in patients]
    hu = np.stack([volume[len(volume) // 2] for volume in volumes]).astype(np.float32)
    return torch.from_numpy(hu)[:, None].clamp(-1000, 2000) / 3000 + 1 / 3


def at_size(images: Tensor, size: int) -> Tensor:
    """Images in another size, scaled as slices of a folder are: bilinear with antialiasing."""
    return interpolate(images, (size, size), mode="bilinear", antialias=True, align_corners=False)


def change_of(scan: str) -> dict[str, Any]:
    """What differs from the scan of the training."""
    if scan.endswith("°"):
        return {"angle_span": math.radians(float(scan[:-1]))}
    return {} if scan == "64" else {"n_views": int(scan)}


def psnr(images: Tensor, truth: Tensor) -> list[float]:
    """PSNR in dB of each image, with a data range of 1."""
    return (-10 * (images - truth).square().mean((1, 2, 3)).log10()).tolist()


@torch.no_grad()
def measure(scan: str, root: Path, split: dict[str, list[str]], rows: Rows, file: Path) -> None:
    """Add the rows of a scan that are not there yet."""

    def add(method: str, patients: list[str], values: list[float]) -> None:
        with file.open("a", newline="") as stream:
            csv.writer(stream).writerows(
                [scan, method, patient, f"{value:.4f}"] for patient, value in zip(patients, values, strict=True)
            )
        rows.update({(scan, method, patient): value for patient, value in zip(patients, values, strict=True)})

    trained, network = qnmixer.load_pretrained(), qnmixer.load_pretrained(**change_of(scan))
    geometry, numbers = network.projector.geometry, {p: k for k, p in enumerate(chain(*split.values()))}
    finer = FanBeamProjector(replace(geometry, image_size=512, pixel_size=geometry.field_of_view / 512))
    for part, patients in split.items():
        methods = [*FACTORS] if part == "val" else [best_weight(scan, split, rows)]
        if all((scan, method, p) in rows for method in (BEFORE, CURED, *methods) for p in patients):
            continue
        fine = middle_slices(root, patients)
        y, truth = FieldNoise()(finer(fine), [(0, numbers[p]) for p in patients]), at_size(fine, 256)
        if (scan, CURED, patients[0]) not in rows:
            add(CURED, patients, psnr(network(y), truth))
        if (scan, BEFORE, patients[0]) not in rows:
            plain = qnmixer.load_pretrained(passes=1, start="fbp", **change_of(scan))
            ratio = plain.projector.safe_step_size() / trained.projector.safe_step_size()
            for step, at_training in zip(plain.step_sizes, trained.step_sizes, strict=True):
                step.copy_(ratio * at_training)
            add(BEFORE, patients, psnr(plain(y), truth))
        for method in (method for method in methods if (scan, method, patients[0]) not in rows):
            weight = FACTORS[method] * 7.2e-4 / math.sqrt(geometry.n_views)
            tv = TotalVariation(network.projector, 400, weight, gap=0)
            add(method, patients, psnr(tv(y), truth))


def best_weight(scan: str, split: dict[str, list[str]], rows: Rows) -> str:
    """Of the methods TV, the best for the val patients of a scan."""
    means = {method: mean(rows.get((scan, method, p), -math.inf) for p in split["val"]) for method in FACTORS}
    return max(means, key=means.__getitem__)


def table(split: dict[str, list[str]], rows: Rows) -> str:
    """A row for each scan and part: the means over patients, and the smallest difference on a patient."""
    lines = ["# The shipped network on other scans than its own", "", _CAPTION, ""]
    lines += ["| scan | patients | TV | its weight | before | cured | cured − TV, least | cured − before, least |"]
    lines.append("|" + "---|" * 8)
    for scan in dict.fromkeys([*SCANS, *(scan for scan, *_ in rows)]):
        for part, patients in split.items():
            best = best_weight(scan, split, rows)
            if not all((scan, method, p) in rows for method in (best, BEFORE, CURED) for p in patients):
                continue
            tv, before, cured = ([rows[scan, method, p] for p in patients] for method in (best, BEFORE, CURED))
            least = [min(c - r for c, r in zip(cured, rival, strict=True)) for rival in (tv, before)]
            cells = [*(f"{mean(column):.2f}" for column in (tv,)), f"{FACTORS[best]:.2g} × 7.2e-4/√V"]
            cells += [f"{mean(before):.2f}", f"{mean(cured):.2f}", *(f"{value:+.2f}" for value in least)]
            lines.append(f"| {scan} | {part}, {len(patients)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is missing, and write the table."""
    output, root, split_file, *scans = sys.argv[1:]
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    split, file, rows = split_in(Path(split_file)), folder / "rows.csv", Rows()
    if file.exists():
        with file.open(newline="") as stream:
            rows = {(scan, method, patient): float(value) for scan, method, patient, value in csv.reader(stream)}
    for scan in scans or SCANS:
        measure(scan, Path(root), split, rows, file)
        (folder / "any_scan.md").write_text(table(split, rows))
    print(table(split, rows))


if __name__ == "__main__":
    main()
