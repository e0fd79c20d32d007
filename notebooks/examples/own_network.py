"""An own network in plain Lightning: L.Trainer and a LightningModule of one's own. No Hydra, no config, no run folder.

For those who have a training script already, and want the scan, the noise and the slices from here. The network is a
learned gradient descent: T times a step along the data term and a small convolutional network. It learns from drawn
phantoms, and is compared with FBP on phantoms that it never saw. It takes a quarter of a minute on two CPU cores.

    python notebooks/examples/own_network.py FOLDER
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from qnmixer.lightning import Batch, Measurement, psnr, slices, to_hu
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, FieldNoise

# Raise these on a GPU, for instance to 256 pixels, 64 views, 12 iterations, 48 channels and 10,000 steps.
SIZE, VIEWS = 64, 16  # pixels a side, views of a full turn
ITERATIONS, CHANNELS = 4, 24
STEPS, BATCH = 75, 4
N_VALIDATION, N_TEST = 16, 32
LEARNING_RATE = 3e-3
SEED = 0
WIDTH = 400.0  # of the image, mm: phantoms are drawn on it


class LearnedDescent(nn.Module):
    """x ← x − λ_t A†(A x − y) + N_t(x, A†(A x − y)), T times, from x = FBP(y)."""

    def __init__(self, projector: FanBeamProjector, n_iterations: int, channels: int) -> None:
        super().__init__()
        self.projector = projector
        # Larger steps than twice this one explode, and the eigenvalues depend on the scan: so λ begins here.
        self.step_sizes = nn.Parameter(torch.full((n_iterations,), projector.safe_step_size()))
        self.corrections = nn.ModuleList(self.correction(channels) for _ in range(n_iterations))

    @staticmethod
    def correction(channels: int) -> nn.Sequential:
        """N_t. Its last layer begins at zero, so training begins with plain gradient descent and not with noise."""
        first, middle = nn.Conv2d(2, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        last = nn.Conv2d(channels, 1, 3, padding=1, bias=False)
        nn.init.zeros_(last.weight)
        return nn.Sequential(first, nn.ReLU(), middle, nn.ReLU(), last)

    def forward(self, y: Tensor) -> Tensor:
        """x_T [B, 1, H, W] from y [B, 1, V, D]."""
        x = self.projector.fbp(y)
        for step_size, correction in zip(self.step_sizes, self.corrections, strict=True):
            # A† is Aᵀ after the ramp filter of FBP. Aᵀ alone blurs, and fine structures would come late.
            gradient = self.projector.filtered_residual(x, y)
            x = x - step_size * gradient + correction(torch.cat([x, gradient], 1))
        return x


class Reconstruction(L.LightningModule):
    """Learns from truths alone: each batch is scanned when it comes."""

    def __init__(
        self, size: int = SIZE, views: int = VIEWS, iterations: int = ITERATIONS, channels: int = CHANNELS
    ) -> None:
        super().__init__()
        self.save_hyperparameters()  # plain numbers only, so that load_from_checkpoint needs nothing but the file
        scan = FanBeamGeometry(
            image_size=size, pixel_size=WIDTH / size, n_views=views, n_detectors=2 * size, detector_pitch=480 / size,
            source_to_axis=541.0, axis_to_detector=408.0,
        )  # fmt: skip
        projector = FanBeamProjector(scan)
        self.network = LearnedDescent(projector, iterations, channels)
        # The noise of a slice depends on its number and the seed: validation has the same noise each time.
        self.measurement = Measurement(projector, FieldNoise(), SEED)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean squared error of a batch."""
        x = self.network(self.measurement(batch, "train"))
        return (x - batch["image"]).square().mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """PSNR of the network."""
        x = self.network(self.measurement(batch, "val"))
        self.log("val/psnr", psnr(x, batch["image"]).mean(), batch_size=len(x))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """PSNR of the network and of FBP, from the same sinograms."""
        y = self.measurement(batch, "test")
        for name, x in {"network": self.network(y), "FBP": self.network.projector.fbp(y)}.items():
            self.log(name, psnr(x, batch["image"]).mean(), batch_size=len(x))

    def configure_optimizers(self) -> Any:
        """Adam, whose rate falls to nearly zero: the last steps then no longer jump."""
        optimizer = torch.optim.Adam(self.parameters(), LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def write_picture(path: Path, module: Reconstruction, batch: Batch) -> None:
    """The truth, FBP and the network side by side, for the first slice of a batch."""
    with torch.no_grad():
        y = module.measurement(batch, "test")
        images = {"truth": batch["image"], "FBP": module.network.projector.fbp(y), "network": module.network(y)}
    figure, axes = plt.subplots(1, len(images), figsize=(9, 3.3), layout="constrained")
    for axis, (title, x) in zip(axes, images.items(), strict=True):
        axis.imshow(to_hu(batch, x)[0, 0].numpy(), cmap="gray", vmin=-500, vmax=700)
        axis.set_title(title)
        axis.axis("off")
    figure.savefig(path, dpi=100)


def main(folder: Path) -> None:
    """Train, load the best checkpoint as somebody else would, and test it."""
    L.seed_everything(SEED)
    parts: dict[str, Any] = {"n_train": BATCH * STEPS, "n_val": N_VALIDATION, "n_test": N_TEST}
    data = slices("phantoms", image_size=SIZE, batch_size=BATCH, num_workers=0, **parts)
    best = ModelCheckpoint(folder, filename="best", monitor="val/psnr", mode="max", enable_version_counter=False)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    # On a GPU: accelerator="gpu". The matrices of the scan move with the module.
    trainer = L.Trainer(
        max_steps=STEPS, val_check_interval=STEPS // 3, accelerator="cpu", devices=1, callbacks=[best], **quiet
    )
    trainer.fit(Reconstruction(), datamodule=data)

    module = Reconstruction.load_from_checkpoint(folder / "best.ckpt", weights_only=True)
    (scores,) = trainer.test(module, datamodule=data, verbose=False)
    write_picture(folder / "picture.png", module.cpu().eval(), next(iter(data.test_dataloader())))
    n_weights = sum(weight.numel() for weight in module.network.parameters())
    print(f"{n_weights:,} weights, {STEPS} steps of {BATCH} slices; mean PSNR of {N_TEST} test slices:")
    print(f"FBP {scores['FBP']:.2f} dB, network {scores['network']:.2f} dB; {folder / 'picture.png'} shows one")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/examples/own_network"))
    main(parser.parse_args().folder)
