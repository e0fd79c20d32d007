"""What `debug` may say: a look at a run that is not as it should be."""

from dataclasses import dataclass

from qnmixer.config.option import number


@dataclass(kw_only=True)
class DebugConfig:
    """A look at a run that is not as it should be."""

    name: str


@dataclass(kw_only=True)
class FewBatchesConfig(DebugConfig):
    """The first slices of each part only."""

    batches: int = number(at_least=1)


@dataclass(kw_only=True)
class ProfileConfig(DebugConfig):
    """torch's profiler over some optimizer steps."""

    warm_up: int = number(at_least=1)
    steps: int = number(at_least=1)
