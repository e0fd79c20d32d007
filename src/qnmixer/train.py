"""Train a reconstruction network.

python -m qnmixer.train experiment=demo                                  # minutes on a laptop
python -m qnmixer.train data=dicom data.root=/path/to/dicom              # your own CT
python -m qnmixer.train experiment=paper_aapm data.root=/path/to/aapm    # the paper's setting
python -m qnmixer.train strategy=ddp                                     # all GPUs; also fsdp, pipeline

From a program: `from qnmixer.train import train`, and `train("experiment=demo")`.
"""

from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from qnmixer.engine import cli
from qnmixer.engine.config.compose import CONF, compose_as_given, search_path_in
from qnmixer.engine.config.data import check_data
from qnmixer.engine.config.numbers_as_text import check_texts
from qnmixer.engine.config.run import Config, parse
from qnmixer.engine.config.sections import WandbConfig
from qnmixer.engine.config.words import check_project
from qnmixer.engine.processes.process import is_rank, loading
from qnmixer.engine.sweeps import Job, run_jobs, sweep
from qnmixer.engine.tracking.run import Run, resume_overrides
from qnmixer.engine.training.worker import check_processes, fit_as_rank, fit_in_processes
from qnmixer.errors import ConfigError
from qnmixer.files import private_files
from qnmixer.weights import check_weights

FIT = "qnmixer.fit.fit"
"""The function that trains. Each rank imports it after its own start."""


@dataclass(frozen=True)
class Trained:
    """What a training run leaves."""

    folder: Path
    """The run folder: `qnmixer.load_pretrained(folder)` loads the network of its best checkpoint."""
    checkpoint: Path
    """The best checkpoint; the last one if the run has no validation."""
    monitor: str
    """The metric that decides which checkpoint is best, such as val/psnr."""
    best: float
    """Its best value."""


def train(*overrides: str) -> Trained:
    """Train one run from a program, in this process or in others, as its strategy needs.

        trained = train("experiment=demo", "trainer.max_steps=100")
        network = qnmixer.load_pretrained(trained.folder)

    Args:
        overrides: as on the command line; also `--config-dir=FOLDER`. Sweeps (-m) work on the command line only.

    Raises:
        UserError: as the command does. Its message says what to change.
        Stopped: a KeyboardInterrupt, after Ctrl-C or a stop signal. `train("resume=FOLDER")` resumes the run.
    """
    if flags := [word for word in overrides if word.startswith("-") and "-dir" not in word]:
        raise ConfigError(f"{flags[0]} is no override (KEY=VALUE): for a sweep, use python -m qnmixer.train -m")
    try:
        with private_files():
            words = cli.completed([*overrides], "train", resume_overrides)
        composed = compose_as_given("train", words)
        check_texts(words, composed, check(composed))
    except HydraException as error:  # an unknown key
        raise ConfigError(cli.explain(error, "train")) from error
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name="train"), private_files():
        hydra_of_conf = GlobalHydra.instance().hydra
        assert hydra_of_conf is not None
        done = hydra_of_conf.run("train", run, words, with_log_configuration=False)
    trained: Trained = done.return_value  # raises the error of the run
    return trained


def run(cfg: DictConfig) -> Trained | float | None:
    """Train one run: the task that Hydra calls. Returns the best monitored value for a sweep; None after a failure."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    # The record of a run has the user's own config folders too.
    overrides = [*search_path_in([*hydra_config.overrides.hydra]), *hydra_config.overrides.task]
    if hydra_config.mode == RunMode.MULTIRUN:  # a job of another launcher than ours, such as submitit
        return run_jobs([Job(folder, overrides, cfg)], check, at_once=1)[0]
    record = Run(folder, overrides, cfg.resume)
    with record.lock():
        print_begin(record, hydra_config)
        with loading():  # torch takes seconds
            from qnmixer.engine.checkpoints import find_checkpoint
            from qnmixer.engine.parallel.devices import resolve_devices

        config = resolve_devices(check(cfg))
        check_processes(config)
        if is_rank():
            best = fit_as_rank(config, record, FIT)
        elif config.strategy.name != "single":
            best = fit_in_processes(config, record, FIT)
        else:
            with loading():  # Lightning takes more seconds; the process that only watches ranks does not load it
                from qnmixer.fit import fit
            best = fit(config, record)
    return Trained(folder, find_checkpoint(folder), config.monitor, best)


def print_begin(run: Run, hydra_config: HydraConf) -> None:
    """Print the first line of a run, before PyTorch is loaded: its folder and its settings."""
    what = "starting a run" if run.resume is None else "resuming the run"
    choices = hydra_config.runtime.choices
    chosen = ", ".join(f"{group}={choices[group]}" for group in ("experiment", "model", "data") if choices.get(group))
    run.console.print(f"{what} in {run.folder}: {chosen} (loading PyTorch …)", highlight=False, soft_wrap=True)


def check(cfg: DictConfig) -> Config:
    """Parse and check the config of a run. Raises UserError. A typo is answered in two seconds: it loads
    torch, which the classes that the config names need, and nothing else that is large."""
    config = parse(cfg)
    check_data(config.data)
    if config.finetune is not None:
        check_weights("finetune", config.finetune)
    check_processes(config)
    for logger in config.logger.values():
        if isinstance(logger, WandbConfig) and logger.mode != "disabled":
            check_project(logger.project)
    return config


def main() -> None:
    """Run the command. It is also installed as `qnmixer-train`, so that a shell can complete its keys."""
    cli.run(run, check, "train", sweep, resume_overrides)


if __name__ == "__main__":
    main()
