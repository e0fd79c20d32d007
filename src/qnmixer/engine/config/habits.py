"""Keys and options that people know from other templates and older Lightning, and what to use here."""

from qnmixer.engine.config.overrides import key_of

_KEYS = {
    "ckpt_path": "resume=RUN_FOLDER continues a run, finetune=RUN_FOLDER starts a new run from its weights",
    "train": "this command always trains: leave it out",
    "test": "use test_after_training=true or false",
    "task_name": "use logger.wandb.run_name=…, or hydra.run.dir=runs/NAME",
    "lr": "use optimizer.lr=…",
    "learning_rate": "use optimizer.lr=…",
    "optimizer.learning_rate": "use optimizer.lr=…",
    "model.lr": "use optimizer.lr=…",
    "model.optimizer.lr": "use optimizer.lr=…",
    "epochs": "use trainer.max_epochs=…",
    "max_epochs": "use trainer.max_epochs=…",
    "scheduler": "use schedule=cosine, step or constant",
    "model.compile": "use compile=true",
    "trainer.gpus": "use trainer.devices=…, and strategy=ddp above 1",
    "trainer.resume_from_checkpoint": "use resume=RUN_FOLDER",
    "trainer.check_val_every_n_epochs": "use trainer.val_every_n_steps=…, null for the end of each epoch",
    "paths.data_dir": "use data.root=…",
    "data.data_dir": "use data.root=…",
    "logger.wandb.name": "use logger.wandb.run_name=…",
    "logger.wandb.offline": "use logger.wandb.mode=offline or online",
    "logger.wandb.log_model": "use logger.wandb.log_checkpoint=true",
}
_OPTIONS = {
    "trainer.devices=auto": "leave it out: strategy=ddp, fsdp and pipeline take all GPUs",
    "trainer.devices=-1": "leave it out: strategy=ddp, fsdp and pipeline take all GPUs",
    "trainer.gradient_clip_val=0": "use trainer.gradient_clip_val=null",
    "trainer=cpu": "use trainer.accelerator=cpu",
    "trainer=gpu": "it is the default where there is a GPU; trainer.accelerator=gpu asks for one",
    "trainer=mps": "Apple's GPUs are not supported: use trainer.accelerator=cpu",
    "trainer=ddp": "use strategy=ddp, and trainer.devices=… for the number of devices",
    "trainer=ddp_sim": "use strategy=ddp trainer.accelerator=cpu trainer.devices=2",
    "trainer=fsdp": "use strategy=fsdp",
    "debug=default": "use debug=few_batches",
    "debug=fdr": "use debug=few_batches",
    "debug=limit": "use debug=few_batches",
    "debug=profiler": "use debug=profile",
    "logger=many_loggers": "use logger=[wandb,tensorboard]; metrics.csv is always written",
    "logger=comet": "use logger=custom logger._target_=lightning.pytorch.loggers.CometLogger",
    "logger=neptune": "use logger=custom logger._target_=lightning.pytorch.loggers.NeptuneLogger",
    "logger=null": "use logger=csv; metrics.csv is always written",
    "callbacks=model_checkpoint": "best.ckpt and last.ckpt are always written: monitor=… chooses which one is best",
    "callbacks=rich_progress_bar": "a terminal always shows one: leave it out",
    "callbacks=model_summary": "use +callbacks.summary._target_=lightning.pytorch.callbacks.RichModelSummary",
}


def habit(overrides: list[str]) -> str | None:
    """The message for the first override that is such a key or option; None if no override is."""
    for override in overrides:
        given = override.lstrip("+~")
        if fix := _KEYS.get(key_of(override)) or _OPTIONS.get(given):
            return f"{given if given in _OPTIONS else key_of(override)} is not known here: {fix}"
    return None
