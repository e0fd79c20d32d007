"""Operators of a training step of QN-Mixer that are not views, and all dispatches of a step of its optimizer.

    python notebooks/benchmarks/count_operators.py [override …]

Up to a batch of about ten a GPU waits for the host, which takes as long for each operator whatever its size. The image
is 16 × 16: no count depends on its size.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qnmixer.memory.modes import apply_memory_mode
from qnmixer.module.build import build_module
from qnmixer.module.parts import build_optimizer
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse

_TINY = ["data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40"]


class OperatorCounter(TorchDispatchMode):
    """Counts what torch dispatches in the block, by name: all of it in `dispatches`, without views in `operators`."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatches: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.dispatches[str(func)] += 1
        is_view = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
        if not is_view and func is not torch.ops.aten._unsafe_view.default:  # this one does not declare what it is
            self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counts_of_a_step(*overrides: str) -> dict[str, int]:
    """Operators of the forward and of the backward pass for one image, and dispatches of the optimizer."""
    config = parse(compose("train", [*_TINY, *overrides]))
    module = build_module(config)
    network = module.network
    apply_memory_mode(network, config.memory)
    optimizer = build_optimizer(config.optimizer, network)
    truth = torch.rand(1, 1, 16, 16)
    with torch.no_grad():
        y = module.projector(truth)
    network(y)  # a scan computes its norms once
    with OperatorCounter() as forward:
        loss = (network(y) - truth).square().mean()
    with OperatorCounter() as backward:
        loss.backward()
    optimizer.step()  # makes its state
    with OperatorCounter() as step:
        optimizer.step()
    return {
        "forward": forward.operators.total(),
        "backward": backward.operators.total(),
        "optimizer": step.dispatches.total(),
    }


def main() -> None:
    """Count and print."""
    counts = counts_of_a_step(*sys.argv[1:])
    print(f"operators that are not views, forward + backward: {counts['forward']:,} + {counts['backward']:,}", end=" ")
    print(f"= {counts['forward'] + counts['backward']:,}")
    print(f"dispatches of an optimizer step: {counts['optimizer']:,}")


if __name__ == "__main__":
    main()
