"""What a training step holds on each device, by what it is."""

from dataclasses import astuple, dataclass

MIB = 2**20


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device when a training step holds most, by what they are; `host`: moved off it by offloading.

    `strategy`: the copies that a strategy adds (messages, receive buffers, gathered weights); 0 for single.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    operator: float
    strategy: float = 0.0
    host: float = 0.0

    @property
    def peak(self) -> float:
        """All that the device holds."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """What `peak` is the sum of."""
        return {name: value for name, value in vars(self).items() if name != "host"}

    def moved(self, steps: float, towards: "Footprint") -> "Footprint":
        """The footprint that many steps further along the line through this one and another."""
        return Footprint(*(a + steps * (b - a) for a, b in zip(astuple(self), astuple(towards), strict=True)))


@dataclass(frozen=True)
class DevicePlan:
    """What one device does and holds: the iterations of each of its stages, and most micro-batches in flight in it."""

    stages: tuple[range, ...]
    in_flight: int
    footprint: Footprint


@dataclass(frozen=True)
class Prediction:
    """The footprint of a run, on the device that holds most; bytes that each further iteration adds to it there.

    None for the latter: the network's T is fixed. `devices`: all that work on one batch, first stage first; one, unless
    the run is a pipeline.
    """

    footprint: Footprint
    per_iteration: float | None
    devices: tuple[DevicePlan, ...]
