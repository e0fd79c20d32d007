"""Measure a trained network against FBP.

python -m qnmixer.evaluate run=runs/DIR                                  # on its own test split
python -m qnmixer.evaluate run=runs/DIR data=dicom data.root=/path/to/ct # on slices it never saw
"""

from pathlib import Path

from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config import parse_evaluate


def evaluate(cfg: DictConfig) -> None:
    """Print the table of one evaluation and leave it, with picture and figures per image, in a folder."""
    from hydra.core.hydra_config import HydraConfig

    from qnmixer.training.evaluation import evaluate_run

    hydra_config = HydraConfig.get()
    evaluate_run(parse_evaluate(cfg), Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task))


if __name__ == "__main__":
    cli.run(evaluate, parse_evaluate, "evaluate")
