"""One network for many scans, one for each scan, or one of 48 views with its cures: small networks on real slices.

    python notebooks/studies/many_scans.py OUTPUT SLICES SPLIT

SLICES has PATIENT/slices.npy, [N, 128, 128] in HU; SPLIT is as in any_scan.py. All networks see the same slices in the
same order: 500 steps at 64 × 64, three seeds. The middle slice of each test patient is simulated from its 128 × 128
pixels, with field noise. It goes on where it was stopped. The table is OUTPUT/many_scans.md.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import qnmixer
from any_scan import at_size, middle_slices, psnr, split_in
from qnmixer.evaluation.statistics import Scores, difference, spread
from qnmixer.models import TotalVariation
from qnmixer.physics import FanBeamProjector, FieldNoise
from qnmixer.train import train

SCANS: dict[str, dict[str, Any]] = {
    "24 views": {"n_views": 24},
    "48 views": {},
    "96 views": {"n_views": 96},
    "48 views over 150°": {"angle_span": math.radians(150)},
}
MANY, OWN, CURED = "one for all", "one for each", "of 48 views, cured"
NETWORKS = {scan: [f"geometry.{key}={value}" for key, value in change.items()] for scan, change in SCANS.items()}
NETWORKS[MANY] = ["data.views=[24,32,48,64,96]", "data.arcs=[150,180,240,360]"]
SEEDS = (1, 2, 3)
WEIGHTS = [7.2e-4 * 10 ** (k / 3) for k in range(-2, 4)]
_CAPTION = (
    "PSNR in dB at 64 × 64: means over the test patients, one slice of each, and three seeds. Field noise, simulated "
    "from a 2 times finer grid; truths are scaled as in training. Differences: ± half of the 95 % interval for other "
    "patients / for other seeds (TV has none). TV: 400 iterations, the best of six weights for five other patients. "
    "One for all draws 24 to 96 views and arcs of 150 to 360° for each of as many steps as the others have. Written "
    "by notebooks/studies/many_scans.py."
)


def trained(folder: Path, words: list[str]) -> Path:
    """The folder of a network, which is trained or resumed if it has not come to its end."""
    if not (folder / "trained").exists():
        is_begun = (folder / "checkpoints/last.ckpt").exists()
        train(*([f"resume={folder}"] if is_begun else [*words, f"hydra.run.dir={folder}"]))
        (folder / "trained").touch()
    return folder


@torch.no_grad()
def scores_of(
    scan: str, networks: dict[tuple[str, int], Path], root: Path, split: dict[str, list[str]]
) -> dict[str, Scores]:
    """PSNR in dB of each method at a scan, for the test patients. TV has the best of `WEIGHTS` for the val patients."""
    change = SCANS[scan]
    geometry = qnmixer.load_pretrained(networks["48 views", 1], **change).projector.geometry
    projector = FanBeamProjector(geometry)
    finer = FanBeamProjector(replace(geometry, image_size=128, pixel_size=geometry.field_of_view / 128))
    y, truth = {}, {}
    for stream, (part, patients) in enumerate(split.items()):
        fine = middle_slices(root, patients)
        y[part] = FieldNoise()(finer(fine), [(stream, k) for k in range(len(patients))])
        truth[part] = at_size(fine, 64)

    def tv(part: str, weight: float) -> list[float]:
        return psnr(TotalVariation(projector, 400, weight, gap=0)(y[part]), truth[part])

    def network(name: str, seed: int, **change: Any) -> list[float]:
        return psnr(qnmixer.load_pretrained(networks[name, seed], **change)(y["test"]), truth["test"])

    values = {
        "FBP": {0: psnr(projector.fbp(y["test"]), truth["test"])},
        "TV": {0: tv("test", max(WEIGHTS, key=lambda weight: mean(tv("val", weight))))},
        CURED: {seed: network("48 views", seed, **change) for seed in SEEDS},
        OWN: {seed: network(scan, seed) for seed in SEEDS},
        MANY: {seed: network(MANY, seed, **change) for seed in SEEDS},
    }
    return {
        method: {(seed, 0): dict(zip(split["test"], column, strict=True)) for seed, column in of_seeds.items()}
        for method, of_seeds in values.items()
    }


def table(scores: dict[str, dict[str, Scores]]) -> str:
    """A row for each scan, and the differences that answer the question."""
    rivals = (OWN, CURED, "TV")
    heads = ["scan", *(methods := [*next(iter(scores.values()))]), *(f"{MANY} − {rival}" for rival in rivals)]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for scan, of_method in scores.items():
        cells = [scan, *(f"{spread(of_method[method]).mean:.2f}" for method in methods)]
        for rival in rivals:
            statistic = difference(of_method[MANY], of_method[rival])
            assert statistic is not None
            cells.append(f"{statistic.mean:+.2f} ± {statistic.over_patients:.2f} / {statistic.over_seeds:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["# One network for many scans", "", _CAPTION, "", *lines, ""])


def main() -> None:
    """Train and score what is missing, and write the table."""
    output, root, split_file = map(Path, sys.argv[1:])
    split = split_in(split_file)
    words = [
        "--config-dir=notebooks/studies",
        "experiment=many_scans",
        f"data.root={root}",
        "logger=csv",
        *split_file.read_text().split(),
    ]
    networks = {
        (name, seed): trained(output / f"{name} {seed}".replace(" ", "_"), [*words, f"seed={seed}", *own])
        for seed in SEEDS
        for name, own in NETWORKS.items()
    }
    page = table({scan: scores_of(scan, networks, root, split) for scan in SCANS})
    (output / "many_scans.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
