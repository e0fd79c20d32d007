"""Options of a user, one of each group, in a file: see tests/promises/test_own_code.py."""

from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.models import UnrolledNetwork
from qnmixer.module import ReconstructionModule
from qnmixer.physics import KeyedNoise


def huber(image, truth, delta):
    return nn.functional.huber_loss(image, truth, reduction="none", delta=delta).mean((1, 2, 3))


def mae(image, truth):
    return (image - truth).abs().mean((1, 2, 3))


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(mean.lerp(p.grad, 1 - group["beta"])))
                mean.lerp_(p.grad, 0.01)
        return loss


def triangle(step, n_steps, peak=0.5):
    progress = step / n_steps
    return progress / peak if progress < peak else (1 - progress) / (1 - peak)


class Speckle(KeyedNoise):
    def __init__(self, strength):
        self.strength = strength

    def sample(self, p, rng):
        return p * (1 + self.strength * rng.standard_normal(p.shape))


class OfSinograms(ReconstructionModule):
    """A x must be near y: it looks at no truth."""

    def training_step(self, batch, batch_idx):
        y = self.measure(batch, "train")
        return ((self.projector(self.network(y)) - y).square().mean((1, 2, 3)) * batch["weight"]).mean() / 1e4


class MyNetwork(UnrolledNetwork):
    title = "Mine"

    def __init__(self, projector, n_iterations, channels, width=8):
        super().__init__(n_iterations)
        self.projector = projector
        self.denoiser = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, width, 1), nn.ReLU(), nn.Conv2d(width, 1, 1)
        )

    def start(self, y):
        return self.projector.fbp(y)

    def step(self, t, y, x):
        return x - self.denoiser(x)


class MySlices:
    def __init__(self, part, year):
        self.n = {"train": 4, "val": 2, "test": 2}[part]
        self.year = year

    def __len__(self):
        return self.n

    def load(self, index):
        return np.full((20, 30), 10.0 * index + self.year - 2016)


def fit(config, run):
    from qnmixer.fit import fit as ours
    from qnmixer.runs.processes.process import rank

    Path(f"{run.folder}/fitted.{rank()}").write_text(config.fit)
    return ours(config, run)


class Counting(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        Path(f"{self.path}.{trainer.global_rank}").write_text(str(trainer.global_step))


class MyModule(ReconstructionModule):
    """Terms on x_T and on the iterates, and what it logs."""

    def __init__(self, *parts, smooth=0.0, iterates=0.0, mode="", **options):
        super().__init__(*parts, **options)
        self.smooth, self.of_iterates, self.mode = smooth, iterates, mode

    def training_step(self, batch, batch_idx):
        y, truth = self.measure(batch, "train"), batch["image"]
        image = self.network(2 * y if self.mode == "another" else y)
        loss = (batch["weight"] * self.loss(image, truth)).mean()
        roughness = image.diff(dim=-1).square().mean()
        self.log("train/roughness", roughness, sync_dist=True)
        self.log_dict({"train/range": float(image.detach().max() - image.detach().min()), "train/one": 1})
        if self.of_iterates:
            loss = loss + self.of_iterates * sum(self.loss(x, truth).mean() for x in self.network.iterates(y))
        return loss + self.smooth * roughness


class MyData(SliceDataModule):
    """The first slices of each epoch, again and again."""

    def __init__(self, config, *, same, **options):
        super().__init__(config, **options | {"overfit": same})

    def describe(self):
        return f"mine: {super().describe()}"
