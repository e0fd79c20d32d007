"""Schema of `memory`: store, recompute or offload the graph of the iterations."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class MemoryConfig:
    """What happens to the graph of the iterations until the backward pass; `name` is the mode."""

    name: str
