"""module=split_views: training without truth images, by a split of the measured views."""

from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from qnmixer.engine.batch import Batch
from qnmixer.errors import ConfigError
from qnmixer.losses import ssim_mix
from qnmixer.module import ReconstructionModule
from qnmixer.physics import FanBeamProjector


class SplitViews(ReconstructionModule):
    """Learns from sinograms alone: an image from some views must predict the views that were left out.

    Sparse2Inverse (Gruber, Schwab, Gizewski & Haltmeier 2024): the views are cut into n parts, each every n-th view.
    The network reconstructs x_T from all parts but one, and the loss compares A x_T with y in that one. Noise of
    different views is independent, so the network cannot learn it. As in Noise2Inverse (Hendriksen, Pelt & Batenburg
    2020), but the comparison is of sinograms, not of images, whose streaks would be learned.

    Training reads no truth image. Validation does, for its metrics, and reconstructs from all views (ours: the authors
    average over the n reconstructions). The part that is left out depends on the sample alone (ours), so it is the same
    with every number of devices, and changes from epoch to epoch. `loss` compares sinograms, divided by the width of
    the image in mm: mse (paper), l1, or another mean over pixels.

    Args:
        n_parts: n (authors' code: 4); at most the number of views.
        **parts: as `ReconstructionModule`.

    Raises:
        ConfigError: n_parts is larger than the number of views, or the loss is ssim_mix.
    """

    def __init__(self, n_parts: Annotated[int, Ge(2), Le(10_000)] = 4, **parts: Any) -> None:
        super().__init__(**parts)
        if getattr(self.loss, "func", self.loss) is ssim_mix:
            raise ConfigError("module=split_views compares sinograms, which have no SSIM: use loss=mse or loss=l1")
        self.n_parts = n_parts
        scan = self.network.projector.geometry
        if n_parts > scan.n_views:
            raise ConfigError(f"module.n_parts={n_parts} is more than geometry.n_views={scan.n_views}: give fewer")
        self.views = self.network.projector = ChosenViews(self.network.projector)  # type: ignore[assignment]  # as one

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch, of the views that its images were not reconstructed from."""
        y = self.measure(batch, "train")
        left_out = self.left_out(torch.as_tensor(batch["sample"])).to(y)
        self.views.kept = 1 - left_out
        projected = self.projector(self.network(y * self.views.kept))
        # The mean is over all views, of which those of other parts add nothing.
        share = left_out.mean((1, 2, 3))
        width = self.projector.geometry.field_of_view
        loss = self.loss(left_out * projected / width, left_out * y / width) / share
        return (batch["weight"] * loss).mean()

    def left_out(self, sample: Tensor) -> Tensor:
        """1 for the views that are left out of samples [B], and 0 for all others: [B, 1, V, 1]."""
        part = (sample * 2_654_435_761 >> 16) % self.n_parts  # scattered, or a slice might have one part in all epochs
        views = torch.arange(self.projector.geometry.n_views) % self.n_parts
        return (views == part[:, None].cpu())[:, None, :, None]

    def on_after_backward(self) -> None:
        """Everything but training sees all views. Until here the backward pass may compute iterations again."""
        self.views.kept = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """As `ReconstructionModule`, from all views."""
        self.views.kept = None
        super().validation_step(batch, batch_idx)


class ChosenViews(nn.Module):
    """A, Aᵀ and FBP of a scan whose other views are zero, and count nowhere. Norms are those of the whole scan.

    Attributes:
        kept: 1 for the views of each image, else 0: [B, 1, V, 1]; None for all.
    """

    def __init__(self, projector: FanBeamProjector) -> None:
        super().__init__()
        self.all = projector
        self.kept: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """What does not depend on the views, such as the geometry."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("all"), name)

    def forward(self, x: Tensor) -> Tensor:
        """A x in the kept views [B, 1, V, D], zero in others."""
        return self._only_kept(self.all(x))

    def adjoint(self, y: Tensor) -> Tensor:
        """Aᵀ y of the kept views."""
        return self.all.adjoint(self._only_kept(y))

    def fbp(self, y: Tensor) -> Tensor:
        """FBP from the kept views, with unit gain."""
        return self.all.fbp(self._only_kept(y, unit_gain=True))

    def filtered_adjoint(self, y: Tensor) -> Tensor:
        """A† y of the kept views, with the gain of `fbp`."""
        return self.all.filtered_adjoint(self._only_kept(y, unit_gain=True))

    def filtered_residual(self, x: Tensor, y: Tensor) -> Tensor:
        """A†(A x − y) in the kept views."""
        return self.filtered_adjoint(self.all(x) - y)

    def _only_kept(self, y: Tensor, unit_gain: bool = False) -> Tensor:
        if self.kept is None:
            return y
        return y * (self.kept / self.kept.mean((1, 2, 3), keepdim=True) if unit_gain else self.kept)
