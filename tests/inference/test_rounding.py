"""The effect of the rounding of a GPU's matrix units on images of the shipped network, emulated on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import qnmixer
from qnmixer.engine.data.phantoms import phantom
from qnmixer.models import UnrolledNetwork

HU = 3000.0  # of 1


def to_tf32(x: Tensor) -> Tensor:
    """The nearest float32 with 10 bits after the point, ties to even."""
    bits = x.contiguous().view(torch.int32)
    return (bits + 0xFFF + ((bits >> 13) & 1) & ~0x1FFF).view(torch.float32)


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "tf32": to_tf32,
    "fp16": lambda x: x.half().float(),
    "bf16": lambda x: x.bfloat16().float(),
}


class Rounding(TorchFunctionMode):
    """Rounds the factors of every convolution and product, and sums in float32, as matrix units do."""

    def __init__(self, to_format: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.to_format = to_format
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.conv2d, F.linear, torch.matmul, torch.bmm, torch.baddbmm, torch.einsum):
            self.count += 1
            args, factors = tree_map_only(Tensor, self.to_format, (args, kwargs))
            kwargs = factors | {name: kwargs[name] for name in kwargs if name == "out"}  # no factor: the result's place
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def shipped() -> tuple[UnrolledNetwork[Any], Tensor, Tensor]:
    """The network, a sinogram, and its image in float32."""
    network = qnmixer.load_pretrained()
    hu = torch.from_numpy(phantom(256, seed=0, part="test", index=0))
    with torch.no_grad():
        y = network.projector((hu[None, None].clamp(-1000, 2000) + 1000) / HU)  # type: ignore[operator]  # a module
        return network, y, network(y)


def test_tf32_is_the_nearest_of_its_format() -> None:
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-12, 3e38])
    assert to_tf32(x).tolist() == [1.0, 1 + 2**-10, 1.0, 1 + 2**-9, -1.0, to_tf32(x)[5].item()]


@pytest.mark.parametrize(("name", "mean", "most"), [("tf32", 0.3, 2.0), ("fp16", 0.3, 2.0), ("bf16", 3.0, 20.0)])
def test_rounding_changes_images_by_so_many_hu(
    shipped: tuple[UnrolledNetwork[Any], Tensor, Tensor], name: str, mean: float, most: float
) -> None:
    """Measured: TF32 and fp16 0.2 HU in the mean and just over 1 at most, so that torch's default for convolutions
    would break the 1 HU that `reconstruct` promises; bf16 eight times that.
    """
    network, y, exact = shipped
    with torch.no_grad(), Rounding(FORMATS[name]) as rounding:
        changed = HU * (network(y) - exact).abs()
    assert rounding.count > 100
    assert mean / 10 < float(changed.mean()) < mean
    assert float(changed.max()) < most
