"""Put slices or measured sinograms through a trained network.

python -m qnmixer.reconstruct run=runs/DIR input=/path/to/dicom output=out        # simulates the sparse views
python -m qnmixer.reconstruct run=runs/DIR input=scan.npy output=out kind=sinograms
"""

from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config import parse_reconstruct


def reconstruct(cfg: DictConfig) -> None:
    """Write the reconstruction of every slice or sinogram of `input` into `output`."""
    from qnmixer.training.reconstruction import reconstruct_input

    reconstruct_input(parse_reconstruct(cfg))


if __name__ == "__main__":
    cli.run(reconstruct, parse_reconstruct, "reconstruct")
