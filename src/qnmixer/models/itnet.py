"""ItNet (Genzel, Gühring, Macdonald & März, ICML 2022): U-Nets with data consistency; won AAPM's challenge of 2021."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from qnmixer.models.data_term import data_gradient, safe_step_size
from qnmixer.models.fbpconvnet import UNet
from qnmixer.models.unrolled import Channels, Iterations, Projector, UnrolledNetwork

_GROUPS = 32
"""Of channels in a norm."""


class ItNetState(NamedTuple):
    """The image, and features that one U-Net hands to the next."""

    x: Tensor  # [B, 1, H, W]
    memory: Tensor  # [B, n_memory, H, W]


class ItNet(UnrolledNetwork[ItNetState]):
    """x₀ = FBP(y); (u, s_{t+1}) = (x_t, 0) + U(x_t, s_t); x_{t+1} = u − λ_t A†(A u − y); s₀ = 0.

    All iterations share one U-Net U, and the data step comes last, as in the paper and the authors' public code
    (`IterativeNet`, `DCLsqFPB`). U has weights of its own in each iteration only after their last fine-tuning, which
    also added a fifth iteration. That, a start from a trained U-Net and the mean of ten networks won the challenge;
    they are not here. Transposed 2×2 convolutions of stride 2, without norm and ReLU, lead up (`GroupUNet`).

    Ours: A† is filtered back-projection by the exact transpose, because FBP∘A has no safe step on some grids. λ_t
    starts at a safe step: the authors' 1.12, 1.36, 1.43 and 0.08 come from earlier runs on their scan. The last
    convolution of U starts at zero. It has no bias before a norm. Where a group is one channel its gradient would be
    zero but for rounding, which AdamW would follow.

    Args:
        projector: A, Aᵀ and FBP of the scan.
        n_iterations: T (paper: 4).
        channels: C, features of U at full resolution, doubled at each level down (paper: 32).
        depth: levels down, at each of which the image is halved (paper: 4).
        n_memory: channels of s, the features that one iteration hands to the next (authors' code: 5).
    """

    title = "ItNet"

    @classmethod
    def divisors(cls, arguments: Mapping[str, Any]) -> dict[str, int]:
        """2 to the power of the number of levels: each level halves the image."""
        return {"depth": 2 ** arguments["depth"]}

    def __init__(
        self,
        projector: Projector,
        n_iterations: Iterations = 4,
        channels: Annotated[int, Ge(4), Le(1024)] = 32,
        depth: Annotated[int, Ge(1), Le(10)] = 4,
        n_memory: Channels = 5,
    ) -> None:
        super().__init__(n_iterations)
        self.projector = projector
        self.n_memory = n_memory
        self.unet = UNet(1 + n_memory, channels, depth, _GROUPS, _enlarge, n_first=2)
        self.step_sizes = nn.ParameterList(
            torch.full((1,), safe_step_size(projector, "fbp")) for _ in range(n_iterations)
        )

    def start(self, y: Tensor) -> ItNetState:
        """x₀ = FBP(y), and no memory."""
        x = self.projector.fbp(y)
        return ItNetState(x, torch.zeros_like(x).repeat(1, self.n_memory, 1, 1))

    def step(self, t: int, y: Tensor, state: ItNetState) -> ItNetState:
        """U, then a step against the data gradient at what U has made of x_t."""
        change = self.unet(torch.cat(state, dim=1))
        u = state.x + change[:, :1]
        return ItNetState(u - self.step_sizes[t] * data_gradient(self.projector, "fbp", u, y), change[:, 1:])

    def blocks(self) -> list[nn.Module]:
        """The levels of U."""
        return self.unet.levels()

    def hidden_weights(self) -> list[nn.Parameter]:
        """All kernels, but for the last."""
        return self.unet.hidden_weights()


def _enlarge(width: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(2 * width, width, 2, stride=2)
