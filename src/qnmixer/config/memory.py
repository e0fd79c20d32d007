"""Schema of `memory`: where the graph of the iterations stays until backward."""

from dataclasses import dataclass

from qnmixer.config.option import number


@dataclass(kw_only=True)
class MemoryConfig:
    """Where the graph of the iterations stays until backward; `name` is the mode."""

    name: str


@dataclass(kw_only=True)
class RecomputeConfig(MemoryConfig):
    """The graph is computed again in backward."""

    name: str = "recompute"
    segment: int = number(at_least=1)
