"""Train a reconstruction network.

python -m qnmixer.train experiment=demo                                  # minutes on a laptop
python -m qnmixer.train data=dicom data.root=/path/to/dicom              # your own CT
python -m qnmixer.train experiment=paper_aapm data.root=/path/to/aapm    # the paper's setting
python -m qnmixer.train strategy=ddp                                     # all GPUs; also fsdp, pipeline

From a program: `from qnmixer.train import train`, and `train("experiment=demo")`.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import qnmixer.needs_train  # noqa: F401

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.data.folders import check_data
from qnmixer.errors import ConfigError
from qnmixer.files import private_files
from qnmixer.reconstruction.weights import check_weights
from qnmixer.runs.processes.process import is_rank, loading, stop_signals
from qnmixer.runs.run import Run, resume_overrides
from qnmixer.runs.sweeps import Job, run_jobs, sweep
from qnmixer.settings.compose import search_path_in
from qnmixer.settings.error_lines import explain
from qnmixer.settings.project import project_at, project_here
from qnmixer.settings.run import Config, parse
from qnmixer.training.worker import check_processes, fit_as_rank, fit_in_processes, function_that_trains


@dataclass(frozen=True)
class Trained:
    """What a training run leaves."""

    folder: Path
    """The run folder: `qnmixer.load_pretrained(folder)` loads the network of its best checkpoint."""
    checkpoint: Path | None
    """The best checkpoint, without validation the last; None with trainer.fast_dev_run."""
    monitor: str
    """The metric that decides which checkpoint is best, such as val/psnr."""
    best: float
    """Its best value; NaN without validation."""


def train(*overrides: str) -> Trained:
    """Train one run from a program, in this process or in others, as its strategy needs.

        trained = train("experiment=demo", "trainer.max_steps=100")
        network = qnmixer.load_pretrained(trained.folder)

    Args:
        overrides: as on the command line, in the folder of a project too; also `--config-dir=FOLDER`. Sweeps (-m) work
            on the command line only.

    Raises:
        UserError: as the command does. Its message says what to change.
        Stopped: a KeyboardInterrupt, after Ctrl-C or a stop signal. `train("resume=FOLDER")` resumes the run.
    """
    if flags := [word for word in overrides if word.startswith("-") and "-dir" not in word]:
        raise ConfigError(f"{flags[0]} is no override (KEY=VALUE): for a sweep, use python -m qnmixer.train -m")
    try:
        with private_files():
            words = command.completed([*overrides], Config, resume_overrides)
            trained: Trained = command.run_once(run, check, "train", words)
    except HydraException as error:  # an unknown key
        raise ConfigError(explain(error, "train", [*overrides])) from error
    return trained


def run(config: Config) -> Trained:
    """Train one run: the task that Hydra calls."""
    record = Run(*_place(), config.resume)
    with record.lock(), stop_signals():
        print_begin(record, config)
        with loading():  # Lightning takes seconds
            from qnmixer.parallel.devices import resolve_devices
            from qnmixer.reconstruction.weights import find_checkpoint

        config = resolve_devices(config)
        check_processes(config)
        if is_rank():
            best = fit_as_rank(config, record)
        elif config.strategy.is_parallel:
            best = fit_in_processes(config, record)
        else:
            with loading():  # its callbacks take more seconds; the process that only watches ranks does not load them
                fit = function_that_trains(config)
            best = fit(config, record)
    checkpoint = None if config.trainer.fast_dev_run else find_checkpoint(record.folder)
    return Trained(record.folder, checkpoint, config.monitor, best)


def job(cfg: DictConfig) -> float | None:
    """Train one job of a sweep under another launcher than ours, such as submitit.

    Returns the best monitored value; None after a failure.
    """
    return run_jobs([Job(*_place(), cfg)], check, at_once=1)[0]


def _place() -> tuple[Path, list[str]]:
    """The folder that Hydra made, and the overrides. The record of a run has the user's own config folders too."""
    of_hydra = HydraConfig.get()
    return Path(of_hydra.runtime.output_dir), [*search_path_in([*of_hydra.overrides.hydra]), *of_hydra.overrides.task]


def print_begin(run: Run, config: Config) -> None:
    """Print the first line of a run, before Lightning is loaded: its folder and its settings."""
    action = "starting a run" if run.resume is None else "resuming the run"
    experiment = HydraConfig.get().runtime.choices.get("experiment")
    own = config.datamodule.name  # "default" is not imported here: that would load Lightning first
    source = f"data={config.data.name}" if own == "default" or config.datamodule.is_of_slices else f"datamodule={own}"
    choices = f"experiment={experiment}, " * bool(experiment) + f"model={config.model.name}, {source}"
    run.console.lines(f"{action} in {run.folder}: {choices} (loading Lightning …)")


def check(cfg: DictConfig) -> Config:
    """Parse and check the config of a run. Raises UserError. A typo is answered in two seconds: it loads
    torch, which the classes that the config names need, and nothing else that is large."""
    config = parse(cfg)
    check_data(config.data)
    from qnmixer.measurement.build import build_geometry  # torch

    build_geometry(config)
    if config.finetune is not None:
        check_weights("finetune", config.finetune)
    check_processes(config)
    return config


def main(project: Path | None = None) -> None:
    """Run the command. It is also installed as `qnmixer-train`, so that a shell can complete its keys.

    A project's own command trains the project, from whatever folder it starts, or ends with an error.

    Args:
        project: the folder of a project's options, or of its pyproject.toml. None: the current folder may have one.
    """
    find_project = project_here if project is None else partial(project_at, project)
    command.run(run, check, Config, sweep, resume_overrides, job, find_project)


if __name__ == "__main__":
    main()
