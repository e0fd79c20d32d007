"""Measured scans by FBP, TV and a run of experiment=measured: python notebooks/studies/measured.py RUN FOLDER

FOLDER has the .mat files of the Helsinki tomography challenge 2022. They have no truth here. So the table says how well
each image explains its sinogram. Which image is nearer to the object, it does not say: smooth images explain less, and
noise can be explained too. The weight of total variation is the best on the run's validation slices.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.evaluation.metrics import psnr
from qnmixer.measurement.faults import misfit
from qnmixer.models import TotalVariation
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.sinograms import measured_scans, sinogram_files
from qnmixer.runs.tables import Table, in_digits
from qnmixer.settings.compose import compose

WEIGHTS = [10 ** (k / 2) for k in range(-8, -2)]
ITERATIONS = 300  # a gap of 1 % would take thousands of them: 30° leave the problem ill-conditioned


@torch.no_grad()
def scores_of(module: Reconstructor) -> dict[str, float]:
    """PSNR in dB of each method, by its heading, on the run's validation slices: means over slices."""
    data = SliceDataModule(module.config.data, geometry=module.projector.geometry)
    batches = [(batch["image"], module.measure(batch, "val")) for batch in data.loader("val")]
    methods: dict[str, Callable[[Tensor], Tensor]] = {"FBP": module.projector.fbp, module.network.title: module}
    methods |= {f"TV, α = {weight:.2g}": TotalVariation(module.projector, ITERATIONS, weight) for weight in WEIGHTS}
    return {
        name: mean(value for x, y in batches for value in psnr(method(y), x).tolist())
        for name, method in methods.items()
    }


@torch.no_grad()
def main(run: str, folder: Path) -> None:
    """Print the table."""
    module = load_run(run, "best").eval()
    scores = scores_of(module)
    tv = max((name for name in scores if name.startswith("TV")), key=scores.__getitem__)
    weight = WEIGHTS[[name for name in scores if name.startswith("TV")].index(tv)]
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        "FBP": module.projector.fbp,
        tv: TotalVariation(module.projector, ITERATIONS, weight),
        module.network.title: module,
    }
    config = ReconstructConfig.parse(compose("reconstruct", [f"run={run}", f"input={folder}", "output=out"]))
    rows = [["validation slices, PSNR in dB", *(in_digits(scores[name]) for name in methods)]]
    for scan in measured_scans(folder, sinogram_files(folder), module, config):
        images = [method(scan.sinogram) for method in methods.values()]
        rows.append([scan.name, *(f"{misfit(module.projector, x, scan.sinogram, scan.missing):.1%}" for x in images)])
    geometry = module.projector.geometry
    span = abs(geometry.angle_span) * 180 / torch.pi
    title = f"Measured scans: {geometry.n_views} views over {span:.0f}°"
    print(f"{Table(['', *methods], rows, title).markdown('# {}')}\n")
    print("Of scans: ‖A x − y‖/‖y‖. There is no truth. A smaller residual is no better image where it explains noise.")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
