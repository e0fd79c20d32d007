"""Schema of `memory`: store, recompute or offload the graph of the iterations."""

from dataclasses import dataclass

from qnmixer.config.option import number


@dataclass(kw_only=True)
class MemoryConfig:
    """What happens to the graph of the iterations until the backward pass; `name` is the mode."""

    name: str


@dataclass(kw_only=True)
class RecomputeConfig(MemoryConfig):
    """The graph is computed again in the backward pass."""

    name: str = "recompute"
    segment: int = number(at_least=1)
