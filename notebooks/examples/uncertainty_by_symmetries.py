"""Uncertainty by symmetries: mean and spread of the shipped network over the eight turns and flips of a scan.

For those who want a map beside an image that says where not to trust it, without another training. One sinogram gives
eight images. Their mean is a better image. Their spread is larger where errors are larger, but it is not the error: a
factor from one slice makes it an interval, and other slices show what it covers. What all eight images get wrong
alike has no spread. It takes a quarter of a minute on two CPU cores.

    python notebooks/examples/uncertainty_by_symmetries.py FOLDER
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import qnmixer
from qnmixer.models import QNMixer
from qnmixer.physics import FieldNoise, images_by_symmetry, symmetries

# Raise the slices, and take your own: the factor holds for the slices, the scan and the noise that it comes from.
N_CALIBRATION, N_TEST = 1, 1
SYMMETRIES = 8  # or 4, the quarter turns
COVERAGE = 0.95
BINS = 5  # of pixels, by their spread
SEED = 0


class Images(NamedTuple):
    """What one sinogram gives, HU [S, S]."""

    truth: Tensor
    single: Tensor  # the network's image of the scan as it is
    mean: Tensor
    spread: Tensor

    @property
    def body(self) -> Tensor:
        """Pixels that are no air: in air the network is right, and easily so."""
        return self.truth > -500

    @property
    def errors(self) -> Tensor:
        """|mean − truth| of the pixels of the body."""
        return (self.mean - self.truth).abs()[self.body]


def images_of(network: QNMixer, part: str, index: int) -> Images:
    """A phantom, scanned with the noise that the network was trained for, and its eight images."""
    truth = torch.from_numpy(qnmixer.phantom(256, seed=SEED, part=part, index=index)).clamp(-1000, 2000)
    y = FieldNoise()(network.projector((truth[None, None] + 1000) / 3000), keys=[(SEED, index)])
    with torch.no_grad():
        images = images_by_symmetry(network, y, symmetries(network.projector, SYMMETRIES))  # [K, 1, 1, S, S]
    hu = 3000 * images[:, 0, 0] - 1000
    return Images(truth, hu[0], hu.mean(0), hu.std(0))


def of_all(slices: list[Images]) -> tuple[Tensor, Tensor]:
    """The spreads and the errors of all pixels of the bodies, in HU."""
    return torch.cat([images.spread[images.body] for images in slices]), torch.cat([images.errors for images in slices])


def rms(values: Tensor) -> float:
    """The root of the mean square."""
    return float(values.square().mean().sqrt())


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: 1 if the order of the pixels by spread is their order by error, 0 if it says nothing of it."""
    ranks = torch.stack([values.argsort().argsort().double() for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def write_picture(path: Path, images: Images) -> None:
    """The mean, its error, and the spread."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    shown = {
        "mean of 8 images, HU": (images.mean, (-160, 240), "gray"),
        "|error|, HU": ((images.mean - images.truth).abs(), (0, 60), "magma"),
        "spread, HU": (images.spread, (0, 20), "magma"),  # not the scale of the error: the spread is smaller
    }
    for axis, (title, (image, (low, high), colours)) in zip(axes, shown.items(), strict=True):
        drawn = axis.imshow(image.numpy(), cmap=colours, vmin=low, vmax=high)
        axis.set_title(title)
        axis.axis("off")
        figure.colorbar(drawn, ax=axis, shrink=0.8)
    figure.savefig(path, dpi=100)


def main(folder: Path) -> None:
    """Find the factor on some slices, measure its coverage on others, and print a table of spread against error."""
    folder.mkdir(parents=True, exist_ok=True)
    network = qnmixer.load_pretrained()
    assert isinstance(network, QNMixer)
    calibration = [images_of(network, "val", index) for index in range(N_CALIBRATION)]
    tests = [images_of(network, "test", index) for index in range(N_TEST)]

    spread, error = of_all(calibration)
    factor = float((error / spread).quantile(COVERAGE))
    spread, error = of_all(tests)
    covered = float((error <= factor * spread).double().mean())
    single = torch.cat([(images.single - images.truth)[images.body] for images in tests])
    print(f"RMSE in the body: {rms(single):.2f} HU for one image, {rms(error):.2f} HU for the mean of {SYMMETRIES}")
    print(f"rank correlation of spread and error: {rank_correlation(spread, error):.2f}")
    print(f"interval ± {factor:.1f} × spread: {COVERAGE:.0%} of the pixels it comes from, {covered:.1%} of the others")
    print("| pixels by spread | spread, HU | RMSE, HU | in the interval |\n|---|---|---|---|")
    for number, pixels in enumerate(spread.argsort().tensor_split(BINS), start=1):
        inside = float((error[pixels] <= factor * spread[pixels]).double().mean())
        print(f"| {number} of {BINS} | {rms(spread[pixels]):.2f} | {rms(error[pixels]):.2f} | {inside:.1%} |")
    write_picture(folder / "picture.png", tests[0])
    print(f"picture: {folder / 'picture.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/examples/uncertainty_by_symmetries"))
    main(parser.parse_args().folder)
