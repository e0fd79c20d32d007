"""The LightningModule: the network, the simulated measurement, and the loss."""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from qnmixer.checkpoints.weights_file import CHECKPOINT_KEY
from qnmixer.config import Config, to_plain
from qnmixer.config.run import batch_of_replica
from qnmixer.config.strategy import FSDPConfig
from qnmixer.optimization.losses import build_loss, weighted
from qnmixer.optimization.metrics import psnr, ssim
from qnmixer.optimization.optimizers import build_optimizer
from qnmixer.optimization.schedules import learning_rate_factor
from qnmixer.parallel.fsdp import gather, shard
from qnmixer.physics import FanBeamProjector
from qnmixer.reconstructor import Batch, Reconstructor
from qnmixer.training.finite_check import FiniteCheck
from qnmixer.training.lightning_private import restore_position
from qnmixer.training.weight_averaging import MEAN_KEY, TRAINED_KEY


class ReconstructionModule(Reconstructor, L.LightningModule):
    """Learns x_T from simulated sinograms of each slice. Their noise depends on (seed, stream, sample) only."""

    def __init__(self, config: Config, projector: FanBeamProjector | None = None) -> None:
        super().__init__(config, projector)
        self.loss = build_loss(config.loss)
        self.means = nn.ModuleDict()
        self._finite = FiniteCheck()
        self._largest_norm: Tensor | float = 0.0
        self._step_loss: Tensor | float = 0.0
        self._norm: Tensor | None = None  # of the gradient of this step, if a callback has asked for it
        self.keeps_output = False  # set for a step whose images are checked
        self.output: Tensor | None = None  # x_T of the last batch of that step, [B, 1, S, S]

    def configure_model(self) -> None:
        """Shard the network for fsdp, in the hook that Lightning has for it."""
        if isinstance(self.config.strategy, FSDPConfig):
            assert self.device_mesh is not None
            shard(self.network, self.device_mesh["data_parallel"], self.config.strategy)

    def setup(self, stage: str) -> None:
        """Build the metrics, which count over processes. A plan does not need them, so they are not built earlier."""
        # Sums over processes, because a mean of means would count fillers of the last batch. NaN must stay NaN.
        self.means.update({name: MeanMetric(nan_strategy="disable") for name in ("loss", "psnr", "ssim")})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        image = self.network(self.measure(batch, "train"))
        loss = self.batch_loss(image, batch["image"], batch["weight"])
        self.check_loss(loss, batch)
        self.log_loss(loss, batch_idx)
        return loss

    def batch_loss(self, image: Tensor, truth: Tensor, weight: Tensor) -> Tensor:
        """Σ weight · loss / batch size. `EpochSampler` explains which mean this is."""
        if self.keeps_output:
            self.output = image.detach()
        return weighted(self.loss, image, truth, weight, batch_of_replica(self.config))

    def check_loss(self, loss: Tensor, batch: Batch) -> None:
        """Raise FloatingPointError, which names step and slices, for a loss that is not finite.

        On a GPU this happens after the backward pass, and before the weights change: see `FiniteCheck`.
        """
        self._finite.raise_if_not()  # with accumulation, the loss of the batch before is still unchecked
        self._finite.ask(loss, f"at step {self.global_step} (slices: {', '.join(batch['name'])})")
        if not loss.is_cuda:  # a CPU has the number already
            self._finite.raise_if_not()

    def log_loss(self, loss: Tensor, batch_idx: int) -> None:
        """Log the loss of an optimizer step, the mean over its samples, after its last batch."""
        n = self.trainer.accumulate_grad_batches
        self._step_loss = loss.detach() / n + (self._step_loss if batch_idx % n else 0.0)
        if (batch_idx + 1) % n == 0:
            self.log("train/loss", self._step_loss, batch_size=1, sync_dist=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss, PSNR and SSIM × 100 of x_T, as means over the images of all processes."""
        image, truth = self.network(self.measure(batch, "val")), batch["image"]
        own_range = self.config.data.own_range
        values = {
            "loss": self.loss(image, truth),
            "psnr": psnr(image, truth, own_range=own_range),
            "ssim": 100 * ssim(image, truth, own_range=own_range),
        }
        for name, value in values.items():
            mean = self.means[name]
            assert isinstance(mean, MeanMetric)
            mean.update(value[batch["weight"] > 0])
            self.log(f"val/{name}", mean, on_step=False, on_epoch=True)

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient of this step, before clipping. It is computed once.

        For callbacks, whose `on_before_optimizer_step` comes before that of the module.
        """
        if self._norm is None:
            # The norm of shards is itself in shards: gather gives that of all ranks.
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self._norm = gather(torch.nn.utils.get_total_norm(gradients))
        return self._norm

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the loss. Log the gradient norm before clipping, its maximum in the run, lr and the mean of λ_t."""
        self._finite.raise_if_not()
        norm, self._norm = self.gradient_norm(), None
        # The scaler skips a step whose gradient overflows. That norm would be the largest for the rest of the run.
        counted = norm.nan_to_num(nan=0.0, posinf=0.0) if self.config.trainer.precision == "16-mixed" else norm
        self._largest_norm = torch.maximum(counted, torch.as_tensor(self._largest_norm, device=norm.device))
        self.log("train/grad_norm", norm)
        self.log("train/grad_norm_max", self._largest_norm)
        # As a tensor in float64: Lightning would round a Python float to float32.
        self.log("train/lr", torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))
        if (self.trainer.global_step + 1) % self.config.trainer.log_every_n_steps:
            return  # no logger would see these values, and each costs small operators on the GPU
        for t, step_size in enumerate(self.network.step_sizes):
            self.log(f"train/lambda_{t}", gather(step_size.detach()).mean())

    def configure_optimizers(self) -> Any:
        """Build the optimizer and its schedule, which changes at every optimizer step."""
        optimizer = build_optimizer(self.config.optimizer, self.network)
        schedule = LambdaLR(optimizer, learning_rate_factor(self.config.schedule, self.n_steps()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def n_steps(self) -> int:
        """Optimizer steps of the whole run. Lightning's count would load the data too early for a resumed run."""
        trainer = self.config.trainer
        if trainer.max_epochs is None:
            return trainer.max_steps
        n_batches = len(self.trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]  # Lightning's, untyped
        by_epochs = trainer.max_epochs * n_batches // trainer.accumulate_grad_batches
        return by_epochs if trainer.max_steps == -1 else min(trainer.max_steps, by_epochs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the config as plain data, so that a checkpoint is complete by itself.

        Raises FloatingPointError if the weights are not finite. The loss of another rank may have caused that.
        """
        if not math.isfinite(norm := float(gather(torch.nn.utils.get_total_norm(list(self.parameters()))))):
            raise FloatingPointError(f"the norm of the weights became {norm} at step {self.global_step}")
        largest_norm = float(self._largest_norm)
        checkpoint[CHECKPOINT_KEY] = {"format": 1, "config": to_plain(self.config), "largest_norm": largest_norm}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resume at the same place in the data, whatever the strategy, and with the weights that were trained."""
        self._largest_norm = checkpoint[CHECKPOINT_KEY]["largest_norm"]
        restore_position(self.trainer, checkpoint)
        # A run may resume without callbacks=ema, which saves the mean as the weights.
        checkpoint[MEAN_KEY], trained = checkpoint["state_dict"], checkpoint.get(TRAINED_KEY, {})
        checkpoint["state_dict"] = checkpoint[MEAN_KEY] | trained
