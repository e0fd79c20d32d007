"""Train a reconstruction network.

python -m qnmixer.train experiment=demo                                  # minutes on a laptop
python -m qnmixer.train data=dicom data.root=/path/to/dicom              # your own CT
python -m qnmixer.train experiment=paper_aapm data.root=/path/to/aapm    # the paper's setting
python -m qnmixer.train strategy=ddp                                     # all GPUs; also fsdp, pipeline
"""

from pathlib import Path

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config import Config, parse
from qnmixer.config.data import check_data
from qnmixer.config.logger import check_loggers
from qnmixer.config.search_path import search_path_in
from qnmixer.errors import UserError
from qnmixer.processes.ranks import is_rank
from qnmixer.processes.signals import loading
from qnmixer.sweeps.jobs import Job, run_jobs
from qnmixer.sweeps.sweep import sweep
from qnmixer.tracking.resume import resume_overrides
from qnmixer.tracking.run import Run
from qnmixer.training.worker import check_processes, check_srun
from qnmixer.weights import check_weights


def train(cfg: DictConfig) -> float | None:
    """Train one run. Returns its best monitored value, or None if it is the job of a sweep and failed."""
    hydra_config = HydraConfig.get()
    folder, overrides = Path(hydra_config.runtime.output_dir), overrides_of_job(hydra_config)
    if hydra_config.mode == RunMode.MULTIRUN:  # a job that another launcher than ours has started
        return run_jobs([Job(folder, overrides, cfg)], check, at_once=1)[0]
    run = Run(folder, overrides, cfg.resume)
    with run.lock():
        print_begin(run, hydra_config)
        with loading():  # torch and Lightning take seconds
            from qnmixer.parallel.devices import resolve_devices
            from qnmixer.training.fit import fit
            from qnmixer.training.worker import fit_as_rank, fit_in_processes

        try:
            config = resolve_devices(check(cfg))
            check_processes(config)
        except UserError as error:
            run.record_end("failed", error)
            raise
        start = fit_as_rank if is_rank() else fit if config.strategy.name == "single" else fit_in_processes
        return start(config, run)


def print_begin(run: Run, hydra_config: HydraConf) -> None:
    """Print the first line of a run, before PyTorch is loaded: its folder and what it trains."""
    what = "resuming the run" if run.resumes_in_place else "starting a run"
    choices = hydra_config.runtime.choices
    chosen = ", ".join(f"{group}={choices[group]}" for group in ("experiment", "model", "data") if choices.get(group))
    run.console.print(
        f"{what} in {run.folder}: {chosen} (loading PyTorch …)", highlight=False, soft_wrap=True, markup=False
    )


def overrides_of_job(hydra_config: HydraConf) -> list[str]:
    """What the command line said of a run, as its record keeps it: with the user's own folders of configs."""
    return [*search_path_in([*hydra_config.overrides.hydra]), *hydra_config.overrides.task]


def check(cfg: DictConfig) -> Config:
    """Parse and check the config of a run. Raises UserError; needs no torch, so that a typo costs a second."""
    config = parse(cfg)
    check_data(config.data)
    check_loggers(config.logger)
    if config.finetune is not None:
        check_weights("finetune", config.finetune)
    check_processes(config)
    check_srun()
    return config


def main() -> None:
    """The command, also as `qnmixer-train`, whose keys a shell can complete."""
    cli.run(train, check, "train", sweep, resume_overrides)


if __name__ == "__main__":
    main()
