"""All uses of Hydra's private parts. If a new version of Hydra breaks something, look here first.

They are why `hydra-core<1.4` is required. What each waits for in Hydra:

- `flag_parser`: a public list of the flags that Hydra knows. Hydra does not want others to add flags (issue 215 of
  hydra-ecosystem/hydra, closed), and has no public way to read them.
- `hydra_object`: a public function that runs a task with overrides. `hydra.main` reads `sys.argv`, prints errors in its
  own words and exits; `hydra.compose` makes no run folder, and runs no sweep. No public way is known.
- `run_composed`: one that runs a task with a config that is there. Hydra composes it from the overrides, which takes as
  long as it took the first time.
"""

import argparse
from collections.abc import Callable
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig


def flag_parser() -> argparse.ArgumentParser:
    """The parser of Hydra's own flags, such as --cfg."""
    return get_args_parser()


def hydra_object() -> Any:
    """The object that `hydra.initialize_config_dir` made: its `run` runs one job, `multirun` those of a sweep."""
    return GlobalHydra.instance().hydra


def run_composed(config: DictConfig, config_name: str, job: Callable[[DictConfig], object]) -> Any:
    """Run a job as Hydra does, with a config of `hydra.compose` that has Hydra's own part. Returns what `run` does."""
    hydra = hydra_object()
    hydra.compose_config = lambda **_: config
    return hydra.run(config_name, job, [], with_log_configuration=False)
