"""Reconstruct slices or measured sinograms with a trained network.

python -m qnmixer.reconstruct run=runs/DIR input=/path/to/dicom output=out        # simulates the sparse views
python -m qnmixer.reconstruct run=runs/DIR input=scan.npy output=out kind=sinograms
"""

from pathlib import Path

import qnmixer.needs_train  # noqa: F401

from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.data.folders import check_no_nifti
from qnmixer.errors import ConfigError, say, visible
from qnmixer.files import check_there, check_unused
from qnmixer.installed import require
from qnmixer.reconstruction.reconstruct_config import OF_DATAMODULE, ReconstructConfig
from qnmixer.reconstruction.weights import check_weights


def reconstruct(config: ReconstructConfig) -> None:
    """Write the reconstruction of every slice or sinogram of `input` into `output`."""
    say(visible(f"reconstructing {config.input} by {config.run} (loading PyTorch …)"))
    from qnmixer.reconstruction.reconstruct import reconstruct_input

    Path(config.output).mkdir(parents=True, exist_ok=True)  # one that cannot be made is reported before the work
    reconstruct_input(config)


def check(cfg: DictConfig) -> ReconstructConfig:
    """Parse and check the config. Raises UserError also if the run or input is missing, or if the output is in use."""
    require("dicom", "qnmixer.reconstruct")
    config = ReconstructConfig.parse(cfg)
    check_weights("run", config.run)
    if config.input != OF_DATAMODULE:
        check_there("input", config.input, "a file or folder of DICOM, .npy or 16-bit PNG")
        check_no_nifti("input", config.input)
    input_, output = (Path(path).resolve() for path in (config.input, config.output))
    if input_.is_dir() and output.is_relative_to(input_):  # the next call would read these results as input slices
        raise ConfigError(f"output={config.output} lies in input={config.input}: give a folder outside of it")
    check_unused("output", Path(config.output))
    return config


def main() -> None:
    """Run the command. It is also installed as `qnmixer-reconstruct`, so that a shell can complete its keys."""
    command.run(reconstruct, check, ReconstructConfig)


if __name__ == "__main__":
    main()
