"""Schema of `debug`: modes that help to find errors in a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qnmixer.engine.config.option import number
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.engine.config.run import Config


@dataclass(kw_only=True)
class DebugConfig:
    """A debug mode."""

    name: str


@dataclass(kw_only=True)
class FewBatchesConfig(DebugConfig):
    """Only the first slices of each split."""

    name: str = "few_batches"
    batches: int = number(at_least=1)


@dataclass(kw_only=True)
class ProfileConfig(DebugConfig):
    """torch's profiler over some optimizer steps."""

    name: str = "profile"
    warm_up: int = number(at_least=1)
    steps: int = number(at_least=1)

    def check(self, run: "Config") -> None:
        """Check that the run is long enough."""
        if -1 < run.trainer.max_steps < self.warm_up + self.steps:
            raise ConfigError(
                f"debug.warm_up={self.warm_up} and debug.steps={self.steps} are more steps than trainer.max_steps="
                f"{run.trainer.max_steps}, so nothing would be profiled: raise trainer.max_steps, or lower the two"
            )
