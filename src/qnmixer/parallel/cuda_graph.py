"""Replay a training pass as two CUDA graphs, forward and backward: the host then starts two things, not thousands.

Nobody has run this on a GPU. `tests/cuda` replays the operators of each network on a CPU in the same way.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from qnmixer.errors import ConfigError, first_line
from qnmixer.models.unrolled import UnrolledNetwork


def replay_training(
    network: UnrolledNetwork[Any], y: Tensor, precision: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Capture forward and backward for sinograms like y [B, 1, V, D]; from now on, training replays them.

    In place: the weights and their names stay. Sinograms of another shape, as in the last batch of an epoch, and
    evaluation run as before. Gradients lie in the same memory at each step, so they must not be accumulated.

    Args:
        network: on the GPU, before its loaders start, as no other thread may use CUDA during the capture.
        y: a sinogram batch; its values do not matter.
        precision: the autocast of the forward pass.

    Raises ConfigError for a network that waits for the GPU, or has an operation that a graph cannot contain.
    """
    as_before, shape = network.forward, y.shape

    def in_precision(y: Tensor) -> Tensor:
        """Run the network in its precision. Autocast around the capture would change the backward pass too."""
        with precision():
            return as_before(y)

    network.forward = in_precision  # type: ignore[method-assign]  # as torch does
    try:
        torch.cuda.make_graphed_callables(network, (y,))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConfigError(
            f"trainer.cuda_graph=true, but {network.title} cannot be captured ({first_line(error)}): leave it out"
        ) from error
    replayed = network.forward

    def forward(y: Tensor) -> Tensor:
        return replayed(y) if y.shape == shape else as_before(y)

    network.forward = forward  # type: ignore[method-assign]  # as torch does
