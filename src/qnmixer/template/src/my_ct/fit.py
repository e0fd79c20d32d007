"""One run, step by step. Change the order here.

conf/experiment/mine.yaml names `fit`. Every process of a run calls it.
"""

import lightning as L
from qnmixer import steps
from qnmixer.steps import Config, Run


def fit(config: Config, run: Run) -> float:
    """Train, evaluate the best checkpoint, and return the best value of config.monitor."""
    with steps.session(config, run):  # results.json, stop signals, the end of the loggers
        L.seed_everything(config.seed, workers=True, verbose=False)
        module = steps.prepared_module(config)  # module.py with network, loss and optimizer; memory mode; finetune
        checkpoint = steps.resume_checkpoint(config, run)  # None for a new run
        callbacks = steps.all_callbacks(config, run)  # add your own Lightning callbacks to this list
        data = steps.build_data(config, run, checkpoint)  # a LightningDataModule
        loggers = steps.build_loggers(config, run.folder, run.overrides, run.resumed_at)
        trainer = steps.build_trainer(config, run.folder, callbacks, loggers)  # a Lightning Trainer

        with steps.training(config, run, trainer, module, data):  # memory, steps and seconds; one-line errors
            if config.model.has_weights:  # FBP and total variation have none
                trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        best = steps.validate_last_steps(config, run, trainer, module, data)
        if config.test_after_training:
            steps.evaluate_best(config, run, trainer, module, data)  # table and picture
    steps.print_end(run)
    return best
