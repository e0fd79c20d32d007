"""A measured sinogram in, DICOM out, by the shipped network.

For those who have a scanner and files of counts. The scan is written as a detector gives it: photon counts
[views, bins], and an air scan. Then come −log(counts / air) and `python -m qnmixer.reconstruct`. pydicom reads what it
wrote, and positions and HU are compared with the object that was scanned. It takes a few seconds.

    python notebooks/examples/measured_scan_to_dicom.py FOLDER
"""

import argparse
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import torch

import qnmixer
from qnmixer.physics import FanBeamProjector

WATER = 0.0192  # attenuation of water, 1/mm, at about 70 keV. Your scanner has its own: water must become 0 HU
PHOTONS = 2e5  # counts of an unattenuated ray
FINER = 2  # the object has pixels so many times finer than the image: no scanner measures on the grid of the image
SEED = 0

Array = np.ndarray[Any, Any]


def write_scan(folder: Path) -> Array:
    """Write counts.npy and air.npy as a detector would; returns the object in HU, on the grid of the network.

    Put your own two files in their place, and describe your scanner with `geometry.*`.
    """
    scan = qnmixer.load_pretrained().projector.geometry  # 64 views of 512 bins; a network knows its scan
    fine = replace(scan, image_size=FINER * scan.image_size, pixel_size=scan.pixel_size / FINER)
    hu = qnmixer.phantom(fine.image_size, seed=SEED, part="test", index=3)
    attenuation = WATER * (np.clip(hu, -1000, 2000) + 1000) / 1000  # 1/mm
    line_integrals = FanBeamProjector(fine)(torch.from_numpy(attenuation)[None, None])[0, 0].double().numpy()
    random = np.random.default_rng(SEED)
    np.save(folder / "counts.npy", random.poisson(PHOTONS * np.exp(-line_integrals)))
    np.save(folder / "air.npy", random.poisson(PHOTONS, (200, scan.n_detectors)).mean(0))  # nothing in the beam
    size = scan.image_size
    return hu.reshape(size, FINER, size, FINER).mean((1, 3))


def reconstruct(folder: Path) -> None:
    """Counts to line integrals, then the command: it writes the network's image and FBP's as DICOM and as .npy."""
    counts, air = np.load(folder / "counts.npy"), np.load(folder / "air.npy")
    # A bin behind much bone may count nothing at all, and has no logarithm. A whole view that is lost is a row of NaN.
    np.save(folder / "scan.npy", -np.log(np.maximum(counts, 1) / air))
    command = [sys.executable, "-m", "qnmixer.reconstruct", "run=pretrained", "kind=sinograms", "accelerator=cpu"]
    command += [f"input={folder / 'scan.npy'}", f"output={folder / 'images'}", f"water_attenuation={WATER}"]
    shutil.rmtree(folder / "images", ignore_errors=True)  # of an earlier call: the command overwrites nothing
    subprocess.run([*command, "formats=[dicom,npy]"], check=True)


def read(path: Path) -> tuple[Array, Array]:
    """HU [S, S] of a DICOM file, and the positions [S, S, 3] of its pixels in mm, as any viewer computes them."""
    image = pydicom.dcmread(path)
    hu = image.pixel_array * float(image.RescaleSlope) + float(image.RescaleIntercept)
    to_next_column, to_next_row = np.reshape(np.array(image.ImageOrientationPatient, float), (2, 3))
    between_rows, between_columns = map(float, image.PixelSpacing)
    down = np.arange(hu.shape[0])[:, None, None] * between_rows * to_next_row
    right = np.arange(hu.shape[1])[:, None] * between_columns * to_next_column
    return hu, np.array(image.ImagePositionPatient, float) + down + right


def centre_of_bone(hu: Array, positions: Array) -> Array:
    """The mean position of what is denser than 300 HU, mm."""
    return positions[hu > 300].mean(0)


def main(folder: Path) -> None:
    """Write a scan, reconstruct it, read the files back, and say how far they are from the object."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = write_scan(folder)
    reconstruct(folder)

    hu, positions = read(folder / "images" / "scan.dcm")
    of_fbp, _ = read(folder / "images" / "scan_fbp.dcm")
    rounding = np.abs(hu - np.load(folder / "images" / "scan.npy")).max()
    body = truth > -500
    errors = {name: np.sqrt(np.mean((image - truth)[body] ** 2)) for name, image in (("FBP", of_fbp), ("network", hu))}
    offset = np.linalg.norm(centre_of_bone(hu, positions) - centre_of_bone(truth, positions))
    soft = (truth > -20) & (truth < 80)
    width = np.ptp(positions[0, :, 0]) + np.ptp(positions[0, :2, 0])  # from edge to edge, not from centre to centre
    print(f"scan.dcm: {hu.shape[0]} × {hu.shape[1]} pixels on {width:.1f} mm; {rounding:.2f} HU from the array at most")
    print(f"RMSE in the body: FBP {errors['FBP']:.1f} HU, network {errors['network']:.1f} HU")
    print(f"soft tissue: {truth[soft].mean():.1f} HU in the object, {hu[soft].mean():.1f} HU in the file")
    print(f"centre of bone: {offset:.2f} mm from that of the object")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/examples/measured_scan_to_dicom"))
    main(parser.parse_args().folder)
