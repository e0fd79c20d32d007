"""A network small enough to be trained in a moment."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from qnmixer.config import Config, parse
from qnmixer.config.compose import compose
from qnmixer.training.module import ReconstructionModule

TINY = [
    "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40",
    "model.n_iterations=2", "model.channels=4", "model.n_mixer_layers=1",
    "data.n_train=8", "data.n_val=3", "data.n_test=4", "data.num_workers=0", "data.batch_size=2",
    "trainer.max_steps=4", "trainer.val_every_n_steps=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu",
    "logger=csv",
]  # fmt: skip

TinyConfig = Callable[..., Config]


def _config(*overrides: str) -> Config:
    return parse(compose("train", [*TINY, *overrides]))


@pytest.fixture
def tiny_config() -> TinyConfig:
    """tiny_config(*overrides): a checked config of the smallest network."""
    return _config


@pytest.fixture
def other_config() -> TinyConfig:
    """other_config("model=…"): the same for another network, with no word of QN-Mixer's mixer."""

    def config(*overrides: str) -> Config:
        words = [word for word in TINY if not word.startswith("model.n_mixer")]
        return parse(compose("train", [*words, *overrides]))

    return config


@pytest.fixture
def tiny_module() -> Callable[..., ReconstructionModule]:
    """tiny_module(*overrides): its module, with the same weights every time."""

    def build(*overrides: Any) -> ReconstructionModule:
        L.seed_everything(0, verbose=False)
        return ReconstructionModule(_config(*overrides))

    return build


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests share the cores with each other."""
    torch.set_num_threads(1)
