"""Train a reconstruction network.

python -m qnmixer.train experiment=demo                                  # minutes on a laptop
python -m qnmixer.train data=dicom data.root=/path/to/dicom              # your own CT
python -m qnmixer.train experiment=paper_aapm data.root=/path/to/aapm    # the paper's setting
"""

from pathlib import Path

from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config import parse


def train(cfg: DictConfig) -> float:
    """Train one run and return its best monitored value (the objective of a sweep)."""
    from hydra.core.hydra_config import HydraConfig

    from qnmixer.training.fit import fit

    hydra_config = HydraConfig.get()
    return fit(parse(cfg), Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task))


if __name__ == "__main__":
    cli.run(train, parse, "train")
