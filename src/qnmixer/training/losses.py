"""Training losses that torch does not ship."""

from torch import Tensor, nn
from torch.nn import functional as F

from qnmixer.training.metrics import ssim


class SSIMMixLoss(nn.Module):
    """(1 − weight) · L1 + weight · (1 − SSIM), mean over the batch; images [B, 1, H, W] in [0, 1]."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, image: Tensor, truth: Tensor) -> Tensor:
        """The loss, a scalar."""
        return (1 - self.weight) * F.l1_loss(image, truth) + self.weight * (1 - ssim(image, truth).mean())
