"""A network of drawn discs, adapted to measured ones by their sinograms alone: module=equivariant, scored by a truth.

    python notebooks/studies/adaptation_measured.py OUTPUT FOLDER RUN

FOLDER is as in htc.py, RUN a run of experiment=htc. The scans of 30° whose disc has no truth are trained on. Parts of
30° of the disc with a truth are scored, before and after: no step has seen them. A second adaptation is trained on such
a part alone, without its truth: what a user can do who has one scan. 61 views are a prime number, so module=split has
no parts. It goes on where it was stopped, and writes OUTPUT/adaptation_measured.md.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from htc import Scan, matthews, otsu, read, turned
from many_scans import trained
from qnmixer.physics import PhysicalNoise
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.reconstruction.cures import Cures
from qnmixer.reconstruction.reconstructor import Reconstructor, on_scan
from without_truth import row

ARC, STEPS = 30, 100
ALPHAS = (1e1, 1e2, 1e3, 1e4, 1e5)
"""Weights of the equivariance, `module.alpha`."""
SPAN = math.radians(round(ARC * 61 / 60, 4))
HU = 900.0
"""Of the discs, as `data=discs` draws them."""
OTHERS, THIS = "other discs", "this scan"
WORDS = (
    "geometry=htc2022 geometry.field_of_view=75.941 geometry.n_detectors=280 geometry.detector_pitch=0.4 "
    f"geometry.n_views=61 geometry.angle_span={SPAN} model=itnet model.n_iterations=3 model.channels=16 "
    "noise=physical noise.photons=1e5 noise.electronic_sigma=0 data=sinograms data.unit=value data.image_size=128 "
    "data.hu_max=1000 data.num_workers=0 data.batch_size=1 data.augment=false data.split=explicit module=equivariant "
    "optimizer=muon optimizer.lr=2e-3 optimizer.adamw_lr=5e-4 trainer.gradient_clip_val=1 monitor=val/residual "
    f"trainer.max_steps={STEPS} trainer.limit_val_batches=0 callbacks=none logger=csv test_after_training=false"
)
_CAPTION = (
    "Matthews' correlation with the truth of disc tb, as in htc.md, of the network before and after {steps} further "
    "steps by module=equivariant. Other discs: trained on the {n} scans of 30° of discs without a truth. This scan: "
    "trained on the very scan that is scored. In brackets: √(mean((A x − y)²/variance)) of all rays, "
    "in units of their noise, which needs no truth. Written by notebooks/studies/adaptation_measured.py."
)


def name_of(scan: Scan) -> str:
    """A file's name for a part of a scan."""
    return f"{scan.name}_{scan.views.removesuffix('°').replace('–', '_')}"


def adapted(folder: Path, run: Path, scans: dict[str, list[Scan]], alpha: float) -> Path:
    """A network that is trained on the scans of one part. Those of validation and test are not read."""
    base = load_run(run, "best")
    for scan in (scan for of_part in scans.values() for scan in of_part):
        (folder / "sinograms").mkdir(parents=True, exist_ok=True)
        sinogram = scan.sinogram(at_arc(base).projector.geometry) * of_acrylic(base)
        np.save(folder / "sinograms" / f"{name_of(scan)}.npy", sinogram[0, 0].numpy())
    parts = [f"data.{part}_patients=[{','.join(map(name_of, of_part))}]" for part, of_part in scans.items()]
    words = [*WORDS.split(), *parts, f"data.root={folder / 'sinograms'}", f"module.alpha={alpha}", f"finetune={run}"]
    network: Path = trained(folder / f"alpha_{alpha:g}", words)
    return network


def at_arc(network: Reconstructor) -> Reconstructor:
    """A network of many arcs at that of this study."""
    config = network.config
    config = config.changed(geometry=config.geometry.changed(angle_span=SPAN))
    return on_scan(network, config, Cures(passes=1, start="fbp")).eval()


def of_acrylic(network: Reconstructor) -> float:
    """The value of the disc's material in an image."""
    config = network.config
    return float((HU + 1000) / (config.data.hu_max + 1000))


@torch.no_grad()
def score(network: Reconstructor, scan: Scan, truth: NDArray[np.bool_]) -> tuple[float, float]:
    """Matthews' correlation, and the fit."""
    y = scan.sinogram(network.projector.geometry) * of_acrylic(network)
    image = network(y)
    pixels = turned(image[0, 0], scan.angles[0]).numpy()
    variance = PhysicalNoise(1e5, electronic_sigma=0).variance(y)
    fit = ((network.projector(image) - y).square() / variance).mean().sqrt()
    return matthews(pixels > otsu(pixels), truth), float(fit)


def main() -> None:
    """Train and score what is missing, and write the table."""
    output, folder, run = (Path(word).resolve() for word in sys.argv[1:])
    scans = [read(path)[0] for path in sorted(folder.glob("*.mat"))]
    truths = {path.stem: np.asarray(Image.open(path)) > 127 for path in (folder / "truth").glob("*.png")}
    known = [scan for scan in scans if scan.name.split("_")[0] in truths]
    others = [scan.part(ARC) for scan in scans if scan not in known]
    lines = [row("views", "trained on", "before", *(f"alpha {alpha:g}" for alpha in ALPHAS))]
    lines.append("|" + "---|" * (3 + len(ALPHAS)))
    parts = [scan.part(ARC, at_end) for scan in known for at_end in (False, True)]
    for scan in parts:
        truth = truths[scan.name.split("_")[0]]
        rest = [part for part in parts if part is not scan]
        of_others = {"train": others, "val": parts[:1], "test": parts[1:2]}
        of_this = {"train": [scan], "val": rest[:1], "test": rest[1:2]}
        before = score(at_arc(load_run(run, "best")), scan, truth)
        for words, folder_name, of_part in ((OTHERS, "others", of_others), (THIS, name_of(scan), of_this)):
            runs = [adapted(output / folder_name, run, of_part, alpha) for alpha in ALPHAS]
            scores = [before, *(score(load_run(trained_run, "last").eval(), scan, truth) for trained_run in runs)]
            lines.append(row(scan.views, words, *(f"{correlation:.3f} ({fit:.2f})" for correlation, fit in scores)))
    caption = _CAPTION.format(steps=STEPS, n=len(others))
    (output / "adaptation_measured.md").write_text(
        "\n".join(["# Adaptation to measured discs", "", caption, "", *lines, ""])
    )


if __name__ == "__main__":
    main()
