"""Measure a trained network against FBP.

python -m qnmixer.evaluate run=runs/DIR                                  # on its own test split
python -m qnmixer.evaluate run=runs/DIR data=dicom data.root=/path/to/ct # on slices it never saw
python -m qnmixer.evaluate run=runs/DIR evaluation=task                  # noise, resolution, what can be detected
"""

from functools import partial
from importlib import import_module

import qnmixer.needs_train  # noqa: F401

from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.errors import ConfigError, say, visible
from qnmixer.evaluation.evaluate_config import EvaluateConfig, RunEvaluationConfig, check_slices
from qnmixer.installed import extras
from qnmixer.reconstruction.weights import check_weights
from qnmixer.runs.run import into_new_folder, new_folder


def evaluate(config: RunEvaluationConfig) -> None:
    """Print the table of one evaluation, and write table, picture and scores per image into a folder."""
    say(visible(f"evaluating {config.run} (loading PyTorch …)"))
    module, _, name = config.evaluator.rpartition(".")
    with new_folder() as (folder, overrides):
        getattr(import_module(module), name)(config, folder, overrides)


def check(cfg: DictConfig) -> RunEvaluationConfig:
    """Parse and check the config. Raises UserError also if the run or the slices do not exist."""
    config = _parsed(cfg)
    check_weights("run", config.run)
    check_slices(config.data)
    return config


def _parsed(cfg: DictConfig) -> RunEvaluationConfig:
    """The config by the class that has the keys of its evaluation."""
    if not {"photons", "levels"}.isdisjoint(cfg.evaluation) and cfg.n_slices is not None:
        raise ConfigError(f"n_slices={cfg.n_slices} is for evaluation=default: leave it out")
    if "photons" in cfg.evaluation:
        with extras():
            from qnmixer_studies.task.task_config import EvaluateTaskConfig
        return EvaluateTaskConfig.parse(cfg)
    if "levels" in cfg.evaluation:
        with extras():
            from qnmixer_studies.uncertainty.uncertainty_config import EvaluateUncertaintyConfig
        return EvaluateUncertaintyConfig.parse(cfg)
    return EvaluateConfig.parse(cfg)


def main() -> None:
    """Run the command. It is also installed as `qnmixer-evaluate`, so that a shell can complete its keys."""
    command.run(evaluate, check, EvaluateConfig, complete=partial(into_new_folder, "evaluate"))


if __name__ == "__main__":
    main()
