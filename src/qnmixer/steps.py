"""The steps of a training run, for a `fit` of your own: `qnmixer.fit` shows their order.

A `fit` is a function (config, run) → best value of config.monitor. The key `fit` names it: fit=my_ct.fit.fit. Every
process of a run calls it. Each step raises UserError for what the user can fix.
"""

from qnmixer.engine.config.run import Config
from qnmixer.engine.tracking.loggers import build_loggers
from qnmixer.engine.tracking.run import Run
from qnmixer.engine.training.steps import (
    all_callbacks,
    build_data,
    build_trainer,
    evaluate_best,
    prepared_module,
    resume_checkpoint,
    session,
    train,
    validate_last_steps,
)
from qnmixer.engine.training.terminal import print_end

__all__ = [
    "Config",
    "Run",
    "all_callbacks",
    "build_data",
    "build_loggers",
    "build_trainer",
    "evaluate_best",
    "prepared_module",
    "print_end",
    "resume_checkpoint",
    "session",
    "train",
    "validate_last_steps",
]
