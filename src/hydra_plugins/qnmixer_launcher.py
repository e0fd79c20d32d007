"""The Hydra launcher of this repository; here, without an __init__.py beside it, is where Hydra looks for plugins."""

import logging
from collections.abc import Sequence

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class ProcessLauncher(Launcher):
    """Runs each job of a sweep in fresh processes, in a folder of its own, several at once where devices allow.

    A job that fails gives the sweeper None, and the others go on: `qnmixer.tracking.sweeps` says at the end which did.

    Args:
        jobs_at_once: at most so many; None: as many as there are GPUs for, and one at a time on a CPU.
    """

    def __init__(self, jobs_at_once: int | None) -> None:
        self.jobs_at_once = jobs_at_once

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by the sweeper; a job finds its task by itself."""
        self.context, self.config = hydra_context, config
        logging.getLogger("optuna").setLevel(logging.WARNING)  # it tells on stderr what the lines of the jobs do

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run these jobs, and wait for all of them."""
        from pathlib import Path

        from qnmixer.tracking.jobs import Job, run_jobs

        jobs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            config.hydra.job.num = number
            folder = Path(self.config.hydra.sweep.dir) / config.hydra.sweep.subdir
            jobs.append(Job(folder, list(overrides), config))
        objectives = run_jobs(jobs, self.jobs_at_once)
        return [
            JobReturn(overrides=job.overrides, cfg=job.config, status=JobStatus.COMPLETED, _return_value=objective)
            for job, objective in zip(jobs, objectives, strict=True)
        ]
