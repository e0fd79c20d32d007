"""Put slices or measured sinograms through a trained network.

python -m qnmixer.reconstruct run=runs/DIR input=/path/to/dicom output=out        # simulates the sparse views
python -m qnmixer.reconstruct run=runs/DIR input=scan.npy output=out kind=sinograms
"""

from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config.commands import ReconstructConfig, parse_reconstruct
from qnmixer.files import check_no_nifti, check_there
from qnmixer.weights import check_weights


def reconstruct(cfg: DictConfig) -> None:
    """Write the reconstruction of every slice or sinogram of `input` into `output`."""
    print(f"reconstructing {cfg.input} by {cfg.run} (loading PyTorch …)", flush=True)
    from qnmixer.inference.reconstruct import reconstruct_input

    reconstruct_input(parse_reconstruct(cfg))


def check(cfg: DictConfig) -> ReconstructConfig:
    """The parsed config; raises UserError also for a run or an input that is not there."""
    config = parse_reconstruct(cfg)
    check_weights("run", config.run)
    check_there("input", config.input, "a file or folder of DICOM, .npy or 16-bit PNG")
    check_no_nifti("input", config.input)
    return config


def main() -> None:
    """The command, also as `qnmixer-reconstruct`, whose keys a shell can complete."""
    cli.run(reconstruct, check, "reconstruct")


if __name__ == "__main__":
    main()
