"""The memory of a training step on each device, by kind."""

from dataclasses import dataclass

MIB = 2**20
WORKSPACE = 32 * MIB
"""What torch holds for each handle of cuBLAS from an H100 on; 8.1 MiB on older GPUs."""


def on_a_gpu(n_bytes: float, workspace: float = WORKSPACE) -> float:
    """The peak that torch's allocator shows on a GPU, if tensors take `n_bytes`.

    The threads of the forward and of the backward pass have a handle of cuBLAS each. The 3 % are fitted: six settings
    on one H100 came within 3 % of the result. The likely cause is that the allocator rounds sizes up.
    """
    return 1.03 * n_bytes + 2 * workspace


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device at the peak of a training step, by kind. `host`: bytes that offloading moved to the host.

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
        """The sum of all kinds on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The kinds whose sum is `peak`."""
        return {name: value for name, value in vars(self).items() if name != "host"}


@dataclass(frozen=True)
class DevicePlan:
    """The plan of one device: the iterations of its stages, its footprint, and its most micro-batches in flight."""

    stages: tuple[range, ...]
    in_flight: int
    footprint: Footprint
