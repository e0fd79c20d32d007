"""A calibrated uncertainty of each pixel: its deviation over the symmetries of the scan, scaled on known errors.

The deviation is a part of the error only. So it is scaled by a factor for each tenth of the pixels, by the rank of
their deviation. A factor covers the stated share of the errors of the patients that it is chosen on, in the mean over
patients: split conformal prediction within groups (Vovk 2012, "Conditional validity of inductive conformal
predictors"), with the patient as unit. For few patients this is no guarantee for the next one. So the share is
measured on other patients too.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from qnmixer.errors import CheckpointError, first_line
from qnmixer.files import write_text
from qnmixer.physics.units import FloatArray
from qnmixer.reconstruction.pretrained import digest_of_weights
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.weights import PRETRAINED, located

N_GROUPS = 10
_BLUR = 4.0  # pixels, σ: the deviation of eight images is too noisy at a single pixel
_FLOOR = 2.0  # HU: where all images agree by chance, the error is not 0


def smooth_deviation(deviation: Tensor) -> Tensor:
    """√(blur(deviation²) + 2²) of deviations [B, 1, S, S] in HU."""
    radius = math.ceil(3 * _BLUR)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, device=deviation.device) / _BLUR) ** 2)
    kernel = (kernel / kernel.sum()).to(deviation.dtype)
    squares = pad(deviation.square(), [radius] * 4, mode="replicate")
    blurred = conv2d(conv2d(squares, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))
    return (blurred + _FLOOR**2).sqrt()


def groups_of(smooth: Tensor, body: Tensor) -> Tensor:
    """The tenth of each pixel by its deviation, 0 to 9: int64 [S, S]. Its limits are those of the pixels of `body`."""
    values = smooth[body] if body.any() else smooth.flatten()
    shares = torch.linspace(0, 1, N_GROUPS + 1, device=smooth.device)[1:-1]
    return torch.bucketize(smooth, values.sort().values[(shares * (len(values) - 1)).round().long()], right=True)


@dataclass(frozen=True)
class Calibration:
    """What scales a deviation, and where that was measured."""

    factors: dict[str, list[float]]  # by the share that they cover, in percent: one for each tenth
    least_hu: float  # pixels of a reconstruction below it are air, and are not calibrated
    symmetries: int
    patients: int  # on which the factors were chosen
    weights: str  # digest
    geometry: dict[str, Any]
    noise: dict[str, Any]

    def of(self, level: float, image: FloatArray, deviation: FloatArray) -> FloatArray:
        """The half-width in HU that covers this share of the errors, from image and deviation: all [S, S] in HU."""
        smooth = smooth_deviation(torch.from_numpy(deviation)[None, None])[0, 0]
        groups = groups_of(smooth, torch.from_numpy(image) > self.least_hu)
        return (smooth * torch.tensor(self.factors[f"{100 * level:g}"])[groups]).numpy()

    def line(self, level: float, module: Reconstructor, n_symmetries: int, *, measured: bool) -> str:
        """What the share is, and what else the slices had on which it was measured: there it is not known."""
        config, is_same_scan = module.config, module.config.geometry.plain() == self.geometry
        others = {
            "another scan": not is_same_scan,
            "other weights": is_same_scan and digest_of_weights(module.state_dict()) != self.weights,
            f"symmetries={self.symmetries}": n_symmetries != self.symmetries,
            "simulated sinograms": measured,
            "another noise": not measured and config.noise.plain() != self.noise,
        }
        named = ", ".join(name for name, differs in others.items() if differs)
        doubt = f", with {named}: for this input the share is not known" if named else ""
        return f"covers {level:.0%} of the errors, measured on {self.patients} patients{doubt}"

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")


def load_calibration(name: str, level: float) -> Calibration:
    """Read what `save` wrote, or that of the shipped weights for "pretrained".

    Raises CheckpointError for another file, and for a share that was not calibrated.
    """
    path = located(PRETRAINED).with_suffix(".uncertainty.json") if name == PRETRAINED else Path(name)
    try:
        calibration = Calibration(**json.loads(path.read_text(encoding="utf-8")))
        shares = [float(share) / 100 for share in calibration.factors]
    except (OSError, ValueError, TypeError) as error:
        hint = "give the uncertainty.json of qnmixer.evaluate evaluation=uncertainty"
        raise CheckpointError(f"uncertainty={path} is no calibration ({first_line(error)}): {hint}") from error
    if level not in shares:
        raise CheckpointError(f"level={level:g} is not in uncertainty={path}: choose {', '.join(map(str, shares))}")
    return calibration
