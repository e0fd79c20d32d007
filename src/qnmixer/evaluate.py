"""Measure a trained network against FBP.

python -m qnmixer.evaluate run=runs/DIR                                  # on its own test split
python -m qnmixer.evaluate run=runs/DIR data=dicom data.root=/path/to/ct # on slices it never saw
python -m qnmixer.evaluate run=runs/DIR evaluation=task                  # noise, resolution, what can be detected
"""

from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qnmixer.engine import cli
from qnmixer.engine.config.commands import EvaluateConfig, check_slices
from qnmixer.engine.config.sections import TaskConfig
from qnmixer.engine.tracking.run import folder_of, run_lock
from qnmixer.errors import say, visible
from qnmixer.files import check_unused
from qnmixer.weights import check_weights


def evaluate(config: EvaluateConfig) -> None:
    """Print the table of one evaluation, and write table, picture and scores per image into a folder."""
    say(visible(f"evaluating {config.run} (loading PyTorch …)"))
    evaluate_run: Callable[[EvaluateConfig, Path, list[str]], object]
    if isinstance(config.evaluation, TaskConfig):
        from qnmixer.extras.task.command import evaluate_run
    else:
        from qnmixer.engine.evaluation.command import evaluate_run
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    with run_lock(folder):
        check_unused("hydra.run.dir", folder)  # two evaluations that start in the same second get the same folder
        evaluate_run(config, folder, list(hydra_config.overrides.task))


def check(cfg: DictConfig) -> EvaluateConfig:
    """Parse and check the config. Raises UserError also if the run or the slices do not exist."""
    config = EvaluateConfig.parse(cfg)
    check_weights("run", config.run)
    check_slices(config.data)
    return config


def into_new_folder(overrides: list[str]) -> list[str]:
    """Return the overrides unchanged. Raises ConfigError if `hydra.run.dir=` names a folder that contains files."""
    if not any(override.startswith("-") for override in overrides):
        folder = folder_of(overrides, "evaluate")
        if folder is not None:
            check_unused("hydra.run.dir", folder)
    return overrides


def main() -> None:
    """Run the command. It is also installed as `qnmixer-evaluate`, so that a shell can complete its keys."""
    cli.run(evaluate, check, "evaluate", complete=into_new_folder)


if __name__ == "__main__":
    main()
