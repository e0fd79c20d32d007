"""All uses of Hydra's private parts. If a new version of Hydra breaks something, look here first.

They are why `hydra-core<1.4` is required. What each waits for in Hydra:

- `flag_parser`: a public list of the flags that Hydra knows. Hydra does not want others to add flags (issue 215 of
  hydra-ecosystem/hydra, closed), and has no public way to read them.
- `run_job`, `run_jobs`: a public function that runs a task with overrides. `hydra.main` reads `sys.argv`, prints errors
  in its own words and exits; `hydra.compose` makes no run folder, and runs no sweep. No public way is known.
"""

import argparse
from collections.abc import Callable
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn
from omegaconf import DictConfig


def flag_parser() -> argparse.ArgumentParser:
    """The parser of Hydra's own flags, such as --cfg."""
    return get_args_parser()


def run_job(config_name: str, job: Callable[[DictConfig], Any], overrides: list[str]) -> JobReturn:
    """Compose a config and run a job with it, in the run folder that the config names. Hydra must be initialized."""
    return _hydra().run(config_name, job, overrides, with_log_configuration=False)


def run_jobs(config_name: str, job: Callable[[DictConfig], Any], overrides: list[str]) -> None:
    """Run a job with each config of a sweep, by the sweeper and the launcher of the config."""
    _hydra().multirun(config_name, job, overrides, with_log_configuration=False)


def _hydra() -> Any:
    """The object that `hydra.initialize_config_dir` makes. Its class is private."""
    return GlobalHydra.instance().hydra
