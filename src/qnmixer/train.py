"""Train a reconstruction network.

python -m qnmixer.train experiment=demo                                  # minutes on a laptop
python -m qnmixer.train data=dicom data.root=/path/to/dicom              # your own CT
python -m qnmixer.train experiment=paper_aapm data.root=/path/to/aapm    # the paper's setting
python -m qnmixer.train strategy=ddp                                     # all GPUs; also fsdp, pipeline
"""

from pathlib import Path

from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config import parse
from qnmixer.ranks import is_rank


def train(cfg: DictConfig) -> float:
    """Train one run and return its best monitored value (the objective of a sweep)."""
    from hydra.core.hydra_config import HydraConfig

    from qnmixer.parallel.strategies import on_this_machine
    from qnmixer.training.fit import fit
    from qnmixer.training.worker import fit_in_processes

    hydra_config = HydraConfig.get()
    config = on_this_machine(parse(cfg))
    run = fit if config.strategy.name == "single" or is_rank() else fit_in_processes
    return run(config, Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task))


if __name__ == "__main__":
    cli.run(train, parse, "train")
