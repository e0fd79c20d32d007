"""Measure a trained network against FBP.

python -m qnmixer.evaluate run=runs/DIR                                  # on its own test split
python -m qnmixer.evaluate run=runs/DIR data=dicom data.root=/path/to/ct # on slices it never saw
"""

from pathlib import Path

from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config.commands import EvaluateConfig, parse_evaluate
from qnmixer.config.data import DataConfig, check_data
from qnmixer.weights import check_weights


def evaluate(cfg: DictConfig) -> None:
    """Print the table of one evaluation and leave it, with picture and figures per image, in a folder."""
    print(f"evaluating {cfg.run} (loading PyTorch …)", flush=True)
    from hydra.core.hydra_config import HydraConfig

    from qnmixer.evaluation.evaluate import evaluate_run

    hydra_config = HydraConfig.get()
    evaluate_run(parse_evaluate(cfg), Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task))


def check(cfg: DictConfig) -> EvaluateConfig:
    """The parsed config; raises UserError also for a run or slices that are not there."""
    config = parse_evaluate(cfg)
    check_weights("run", config.run)
    if isinstance(config.data, DataConfig):
        check_data(config.data)
    return config


def main() -> None:
    """The command, also as `qnmixer-evaluate`, whose keys a shell can complete."""
    cli.run(evaluate, check, "evaluate")


if __name__ == "__main__":
    main()
