"""Measure a trained network against FBP.

python -m qnmixer.evaluate run=runs/DIR                                  # on its own test split
python -m qnmixer.evaluate run=runs/DIR data=dicom data.root=/path/to/ct # on slices it never saw
python -m qnmixer.evaluate run=runs/DIR evaluation=task                  # noise, resolution, what can be detected
"""

from functools import partial
from typing import TYPE_CHECKING

import qnmixer.needs_train  # noqa: F401

from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.errors import say, visible
from qnmixer.evaluation.evaluate_config import EvaluateConfig, check_slices
from qnmixer.installed import extras
from qnmixer.reconstruction.weights import check_weights
from qnmixer.runs.run import into_new_folder, new_folder

if TYPE_CHECKING:
    from qnmixer.extras.task.task_config import EvaluateTaskConfig
    from qnmixer.extras.uncertainty.uncertainty_config import EvaluateUncertaintyConfig

    AnyConfig = EvaluateConfig | EvaluateTaskConfig | EvaluateUncertaintyConfig


def evaluate(config: "AnyConfig") -> None:
    """Print the table of one evaluation, and write table, picture and scores per image into a folder."""
    say(visible(f"evaluating {config.run} (loading PyTorch …)"))
    with new_folder() as (folder, overrides):
        if isinstance(config, EvaluateConfig):
            from qnmixer.evaluation.evaluate_run import evaluate_run

            evaluate_run(config, folder, overrides)
            return

        from qnmixer.extras.task.task_config import EvaluateTaskConfig

        if isinstance(config, EvaluateTaskConfig):
            from qnmixer.extras.task.evaluate_task import evaluate_task

            evaluate_task(config, folder, overrides)
        else:
            from qnmixer.extras.uncertainty.evaluate_uncertainty import evaluate_uncertainty

            evaluate_uncertainty(config, folder, overrides)


def check(cfg: DictConfig) -> "AnyConfig":
    """Parse and check the config. Raises UserError also if the run or the slices do not exist."""
    config = _parsed(cfg)
    check_weights("run", config.run)
    check_slices(config.data)
    return config


def _parsed(cfg: DictConfig) -> "AnyConfig":
    """The config by the class that has the keys of its evaluation."""
    if "photons" in cfg.evaluation:
        with extras():
            from qnmixer.extras.task.task_config import EvaluateTaskConfig
        return EvaluateTaskConfig.parse(cfg)
    if "levels" in cfg.evaluation:
        with extras():
            from qnmixer.extras.uncertainty.uncertainty_config import EvaluateUncertaintyConfig
        return EvaluateUncertaintyConfig.parse(cfg)
    return EvaluateConfig.parse(cfg)


def main() -> None:
    """Run the command. It is also installed as `qnmixer-evaluate`, so that a shell can complete its keys."""
    command.run(evaluate, check, EvaluateConfig, complete=partial(into_new_folder, "evaluate"))


if __name__ == "__main__":
    main()
