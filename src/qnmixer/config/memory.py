"""Schema of `memory`: where the graph of the iterations is stored until the backward pass."""

from dataclasses import dataclass

from qnmixer.config.option import number


@dataclass(kw_only=True)
class MemoryConfig:
    """Where the graph of the iterations is stored until the backward pass; `name` is the mode."""

    name: str


@dataclass(kw_only=True)
class RecomputeConfig(MemoryConfig):
    """The graph is computed again in the backward pass."""

    name: str = "recompute"
    segment: int = number(at_least=1)
