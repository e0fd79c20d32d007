"""Train a reconstruction network.

python -m qnmixer.train experiment=demo                                  # minutes on a laptop
python -m qnmixer.train data=dicom data.root=/path/to/dicom              # your own CT
python -m qnmixer.train experiment=paper_aapm data.root=/path/to/aapm    # the paper's setting
python -m qnmixer.train strategy=ddp                                     # all GPUs; also fsdp, pipeline
"""

import os
from contextlib import nullcontext
from pathlib import Path

from hydra.conf import HydraConf
from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config import Config, parse
from qnmixer.config.data import check_data
from qnmixer.config.logger import check_loggers
from qnmixer.config.search_path import search_path_in
from qnmixer.errors import ConfigError, UserError
from qnmixer.processes.ranks import by_srun, is_rank, loading, rank, world_size
from qnmixer.sweeps.jobs import Job, run_jobs
from qnmixer.sweeps.sweep import sweep
from qnmixer.tracking.resume import continued
from qnmixer.tracking.run_folder import clean, held
from qnmixer.weights import check_weights


def train(cfg: DictConfig) -> float | None:
    """Train one run and return its best monitored value; as the job of a sweep, None where it failed."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra_config = HydraConfig.get()
    folder, overrides = Path(hydra_config.runtime.output_dir), overrides_of_job(hydra_config)
    if hydra_config.mode == RunMode.MULTIRUN:  # brought here by another launcher than ours, which needs no task
        return run_jobs([Job(folder, overrides, cfg)], check, at_once=1)[0]
    with loading():
        from qnmixer.parallel.devices import on_this_machine
        from qnmixer.tracking.results import amend
        from qnmixer.training.fit import fit
        from qnmixer.training.worker import fit_as_rank, fit_in_processes

    with held(folder) if rank() == 0 else nullcontext():
        if rank() == 0:
            clean(folder)
        try:
            config = on_this_machine(check(cfg))
            check_processes(config)
        except UserError as error:
            amend(folder, overrides, status="failed", error=f"{type(error).__name__}: {error}")
            raise
        run = fit_as_rank if is_rank() else fit if config.strategy.name == "single" else fit_in_processes
        return run(config, folder, overrides)


def overrides_of_job(hydra_config: HydraConf) -> list[str]:
    """What the command line said of a run, as its record keeps it: with the user's own folders of configs."""
    return [*search_path_in([*hydra_config.overrides.hydra]), *hydra_config.overrides.task]


def check(cfg: DictConfig) -> Config:
    """The parsed config of a run. Raises ConfigError for a bad one, and for one at odds with how this was started."""
    config = parse(cfg)
    check_data(config.data)
    check_loggers(config.logger)
    if config.finetune is not None:
        check_weights("finetune", config.finetune)
    check_processes(config)
    check_srun()
    return config


def check_processes(config: Config) -> None:
    """Raise ConfigError where there are not as many processes as the config says, as far as it does."""
    trainer, n = config.trainer, world_size()
    if not is_rank():
        if trainer.num_nodes > 1:
            raise ConfigError(
                f"trainer.num_nodes={trainer.num_nodes}, but nothing has been started on other nodes: "
                "conf/trainer/torchrun.yaml and slurm.yaml say how, or leave it at 1"
            )
    elif config.strategy.name == "single" and n > 1:
        raise ConfigError(f"strategy=single, but {n} processes were started: choose strategy=ddp, fsdp or pipeline")
    elif trainer.devices is not None and trainer.devices * trainer.num_nodes != n:
        raise ConfigError(
            f"trainer.devices={trainer.devices} × trainer.num_nodes={trainer.num_nodes} is not the number of processes "
            f"that were started, {n}: change them, or the command that started this one"
        )


def check_srun() -> None:
    """Raise ConfigError for what Lightning would not take for a SLURM job of several processes."""
    if not by_srun():
        return
    if "SLURM_NTASKS_PER_NODE" not in os.environ:
        raise ConfigError("SLURM was told --ntasks only: give --ntasks-per-node=GPUS_OF_A_NODE instead")
    if (name := os.environ.get("SLURM_JOB_NAME")) in ("bash", "interactive"):
        raise ConfigError(
            f"Lightning takes a job named {name} for a single process: put SLURM_JOB_NAME=train before srun"
        )


def main() -> None:
    """The command, also as `qnmixer-train`, whose keys a shell can complete."""
    cli.run(train, check, "train", sweep, continued)


if __name__ == "__main__":
    main()
