"""Find the dose of a measurement: the counts I₀ and the electronic σ of noise=physical, from measured noise.

python -m qnmixer.calibrate input=repeats.npy output=dose  # [repeats, views, bins], −log of transmission
python -m qnmixer.calibrate input=counts.npy air=air.npy unit=counts output=dose
python -m qnmixer.calibrate input=/path/to/dicom region=[0,0,20] geometry=siemens_force output=dose
"""

from pathlib import Path

import qnmixer.needs_train  # noqa: F401

from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.errors import say, visible
from qnmixer.files import check_there, check_unused
from qnmixer.installed import extras, require

with extras():
    from qnmixer.extras.calibration.calibrate_config import CalibrateConfig


def calibrate(config: CalibrateConfig) -> None:
    """Print I₀ and σ with intervals, and write them and a plot into `output`."""
    say(visible(f"calibrating by {config.input} (loading PyTorch …)"))
    from qnmixer.extras.calibration.report import calibrate_input

    Path(config.output).mkdir(parents=True, exist_ok=True)
    calibrate_input(config)


def check(cfg: DictConfig) -> CalibrateConfig:
    """Parse and check the config. Raises UserError also if an input is missing, or if the output is in use."""
    require("dicom", "qnmixer.calibrate")
    config = CalibrateConfig.parse(cfg)
    check_there("input", config.input, "a .npy of repeated scans, or a folder with a DICOM series")
    if config.air is not None:
        check_there("air", config.air, "a .npy of the air scan in counts")
    check_unused("output", Path(config.output))
    return config


def main() -> None:
    """Run the command. It is also installed as `qnmixer-calibrate`, so that a shell can complete its keys."""
    command.run(calibrate, check, CalibrateConfig)


if __name__ == "__main__":
    main()
