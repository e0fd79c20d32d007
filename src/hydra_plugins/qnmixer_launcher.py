"""The Hydra launcher of this repository. Hydra looks for plugins here, in a folder without an __init__.py."""

import logging
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class ProcessLauncher(Launcher):
    """Runs each job of a sweep in new processes and in its own folder; several at once if there are enough devices.

    A failed job returns None to the sweeper, and the other jobs run. `qnmixer.runs.sweeps` reports failed jobs.

    Args:
        jobs_at_once: the most jobs at a time. None: as many as there are GPUs for; on a CPU one at a time. More than
            there are GPUs: jobs share them.
    """

    def __init__(self, jobs_at_once: int | None) -> None:
        self.jobs_at_once = jobs_at_once

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the context. The sweeper calls this. Each job finds its task by itself."""
        self.context, self.config = hydra_context, config
        logging.getLogger("optuna").setLevel(logging.WARNING)  # it prints on stderr what the jobs' lines say already

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run these jobs and wait for all of them."""
        from qnmixer.errors import ConfigError
        from qnmixer.runs.sweeps import (  # imported here, because Hydra loads this file for every command
            Job,
            place_jobs,
            run_jobs,
        )
        from qnmixer.settings.compose import search_path_in, with_one_limit
        from qnmixer.train import check

        if self.jobs_at_once is not None and (not isinstance(self.jobs_at_once, int) or self.jobs_at_once < 1):
            raise ConfigError(f"hydra.launcher.jobs_at_once={self.jobs_at_once} must be at least 1")
        where = search_path_in([*self.config.hydra.overrides.hydra])
        limited = [with_one_limit([*overrides]) for overrides in job_overrides]
        folders = place_jobs(Path(self.config.hydra.sweep.dir), [[*where, *its] for its in limited])
        jobs = []
        for folder, its in zip(folders, limited, strict=True):
            config = self.context.config_loader.load_sweep_config(self.config, its)
            config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            jobs.append(Job(folder, [*where, *its], config))
        objectives = run_jobs(jobs, check, self.jobs_at_once)
        returns = [JobReturn(overrides=job.overrides, cfg=job.config, status=JobStatus.COMPLETED) for job in jobs]
        for job_return, objective in zip(returns, objectives, strict=True):
            job_return.return_value = objective
        return returns
