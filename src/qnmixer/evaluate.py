"""Measure a trained network against FBP.

python -m qnmixer.evaluate run=runs/DIR                                  # on its own test split
python -m qnmixer.evaluate run=runs/DIR data=dicom data.root=/path/to/ct # on slices it never saw
python -m qnmixer.evaluate run=runs/DIR evaluation=task                  # noise, resolution, what can be detected
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from qnmixer.engine.cli import command
from qnmixer.engine.evaluation.config import EvaluateConfig, TaskConfig, UncertaintyConfig, check_slices
from qnmixer.engine.tracking import run as tracking
from qnmixer.errors import say, visible
from qnmixer.weights import check_weights


def evaluate(config: EvaluateConfig) -> None:
    """Print the table of one evaluation, and write table, picture and scores per image into a folder."""
    say(visible(f"evaluating {config.run} (loading PyTorch …)"))
    evaluate_run: Callable[[EvaluateConfig, Path, list[str]], object]
    if isinstance(config.evaluation, TaskConfig):
        from qnmixer.extras.task.command import evaluate_run
    elif isinstance(config.evaluation, UncertaintyConfig):
        from qnmixer.extras.uncertainty.command import evaluate_run
    else:
        from qnmixer.engine.evaluation.command import evaluate_run
    with tracking.new_folder() as (folder, overrides):
        evaluate_run(config, folder, overrides)


def check(cfg: DictConfig) -> EvaluateConfig:
    """Parse and check the config. Raises UserError also if the run or the slices do not exist."""
    config = EvaluateConfig.parse(cfg)
    check_weights("run", config.run)
    check_slices(config.data)
    return config


into_new_folder = partial(tracking.into_new_folder, "evaluate")


def main() -> None:
    """Run the command. It is also installed as `qnmixer-evaluate`, so that a shell can complete its keys."""
    command.run(evaluate, check, EvaluateConfig, complete=into_new_folder)


if __name__ == "__main__":
    main()
