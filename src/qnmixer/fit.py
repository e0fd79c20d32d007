"""One training run, step by step: seed, module, data, callbacks, loggers, trainer, fit, test.

`train` calls it, in this process or in one for each device. Change the order here; each step is in the engine.
"""

import lightning as L

from qnmixer.engine.checkpoints import find_checkpoint
from qnmixer.engine.config.run import Config
from qnmixer.engine.tracking.loggers import build_loggers, log_checkpoint
from qnmixer.engine.tracking.run import Run
from qnmixer.engine.training import steps
from qnmixer.engine.training.steps import build_trainer
from qnmixer.engine.training.terminal import print_end


def fit(config: Config, run: Run) -> float:
    """Train a network, evaluate its best checkpoint, and return the best monitored value.

    Every rank calls it. All files go into the run folder. Rank 0 prints and writes. Raises UserError for errors that
    the user can fix, and Stopped after a stop signal.
    """
    with steps.session(config, run):  # results.json, stop signals, the end of the loggers
        L.seed_everything(config.seed, workers=True, verbose=False)
        module = steps.prepared_module(config)  # network, loss, optimizer, schedule; memory mode; finetune
        checkpoint = steps.resume_checkpoint(config, run)  # None for a new run
        callbacks = steps.all_callbacks(config, run)
        data = steps.build_data(config, run, checkpoint)
        loggers = build_loggers(config, run.folder, run.overrides, run.resumed_at)
        trainer = build_trainer(config, run.folder, callbacks, loggers)

        steps.train(config, run, trainer, module, data, checkpoint)
        best = steps.validate_last_steps(config, run, trainer, module, data)
        if config.test_after_training:
            steps.evaluate_best(config, run, trainer, module, data)
        log_checkpoint(loggers, find_checkpoint(run.folder))  # where a logger asks for it
    print_end(run)
    return best
