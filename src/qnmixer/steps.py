"""The steps of a training run, for a `fit` of your own: `qnmixer.fit` shows their order.

A `fit` is a function (config, run) → best value of config.monitor. The key `fit` names it: fit=my_ct.fit.fit. Every
process of a run calls it. Each step raises UserError for what the user can fix.

A program that has no run takes the parts alone: `config_of`, then `build_module`, `evaluate` or a `Planner`.
"""

import qnmixer.needs_train  # noqa: F401

from qnmixer.evaluation.evaluate import evaluate
from qnmixer.evaluation.scores import by_patient
from qnmixer.evaluation.statistics import difference, spread
from qnmixer.measurement.build import build_network
from qnmixer.memory.plan import Planner
from qnmixer.module.build import build_module
from qnmixer.module.parts import build_optimizer, learning_rate_factor
from qnmixer.runs.loggers import build_loggers
from qnmixer.runs.run import Run
from qnmixer.settings.compose import compose
from qnmixer.settings.override import override
from qnmixer.settings.run import Config, parse
from qnmixer.training.steps import (
    all_callbacks,
    build_data,
    build_trainer,
    evaluate_best,
    prepared_module,
    resume_checkpoint,
    session,
    training,
    validate_last_steps,
)
from qnmixer.training.terminal import print_end

__all__ = [
    "Config",
    "Planner",
    "Run",
    "all_callbacks",
    "build_data",
    "build_loggers",
    "build_module",
    "build_network",
    "build_optimizer",
    "build_trainer",
    "by_patient",
    "config_of",
    "difference",
    "evaluate",
    "evaluate_best",
    "learning_rate_factor",
    "override",
    "prepared_module",
    "print_end",
    "resume_checkpoint",
    "session",
    "spread",
    "training",
    "validate_last_steps",
]


def config_of(*overrides: str) -> Config:
    """The checked config of a run with these overrides, as on the command line. Raises ConfigError."""
    return parse(compose("train", [*overrides]))
