"""A run in this process that resumes from a checkpoint: same samples, same weights; or it is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from qnmixer.engine.build import build_module
from qnmixer.engine.checkpoints.reading import resumable
from qnmixer.engine.config import Config
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.tracking.loggers import build_loggers
from qnmixer.engine.training.callbacks import build_callbacks
from qnmixer.engine.training.trainer import build_trainer
from qnmixer.errors import CheckpointError

# Seven samples, two a batch: four batches an epoch, the last of one sample; two steps an epoch with accumulation 3.
RUN = (
    "data.n_train=7",
    "trainer.max_steps=9",
    "trainer.val_every_n_steps=100",
    "noise=field",
    "schedule=step",
    "callbacks=none",
)


class Watch(Callback):
    """The samples of each step, and a checkpoint after some, by the step at which it was made."""

    def __init__(self, folder: Path, save_at: tuple[int, ...], validations: bool) -> None:
        self.folder, self.save_at, self.validations = folder, save_at, validations
        self.samples: dict[int, list[int]] = {}
        self.validated: list[int] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.samples.setdefault(trainer.global_step, []).extend(batch["sample"].tolist())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self.validations:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validated.append(trainer.global_step)
        if self.validations:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        path = self.folder / f"{trainer.global_step}.ckpt"
        if trainer.global_step in self.save_at and not path.exists():
            trainer.save_checkpoint(path)


def train(
    config: Config,
    folder: Path,
    *,
    resume: Path | None = None,
    save_at: tuple[int, ...] = (),
    validations: bool = False,
) -> tuple[Watch, dict[str, torch.Tensor]]:
    L.seed_everything(0, verbose=False)
    module, watch = build_module(config), Watch(folder, save_at, validations)
    trainer = build_trainer(
        config, folder, [watch, *build_callbacks(config.callbacks)], build_loggers(config, folder, [])
    )
    trainer.fit(module, datamodule=SliceDataModule(config.data), ckpt_path=resume, weights_only=True)
    return watch, {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("how", "places"),
    [
        ("", (1, 3, 4)),
        pytest.param("trainer.accumulate_grad_batches=3 data.num_workers=1", (1, 2, 5), marks=pytest.mark.long),
        ("trainer.max_epochs=4 trainer.max_steps=-1", (4, 6)),
        ("trainer.accumulate_grad_batches=3 trainer.val_every_n_steps=3", (3, 6)),
    ],
)
def test_a_resumed_run_equals_an_undisturbed_one(
    tiny_config: Callable[..., Config], tmp_path: Path, how: str, places: tuple[int, ...]
) -> None:
    """In the middle of an epoch, at its end, just after a validation: same samples, same weights to the last bit."""
    config = tiny_config(*RUN, *how.split())
    validations = config.trainer.val_every_n_steps == 3
    whole, expected = train(config, tmp_path, save_at=places, validations=validations)
    for place in places:
        resumed, weights = train(config, tmp_path / "resumed", resume=tmp_path / f"{place}.ckpt")
        later = {step: samples for step, samples in whole.samples.items() if step >= place}
        assert resumed.samples == later
        assert [step for step in whole.validated if step > place] == resumed.validated
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_another_way_to_the_same_batch(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    """Two batches of two instead of one of four, from the middle of an epoch."""
    whole, together = tiny_config(*RUN, "data.batch_size=4"), "trainer.accumulate_grad_batches=2"
    _, expected = train(whole, tmp_path, save_at=(3,))
    parts = tiny_config(*RUN, "data.batch_size=2", together)
    assert resumable(parts, tmp_path / "3.ckpt") == tmp_path / "3.ckpt"
    _, weights = train(parts, tmp_path / "resumed", resume=tmp_path / "3.ckpt")
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-7)


REFUSED: list[tuple[list[str], list[str]]] = [
    (["data.batch_size=4"], ["2 slices per optimizer step", "4", "data.batch_size"]),
    (["model.channels=8"], ["model.channels=4, not 8", "finetune="]),
    (["optimizer=sgd"], ["optimizer=adamw, not sgd", "finetune="]),
    (["optimizer.lr=0.1"], ["optimizer.lr=", "not 0.1", "finetune="]),
    (["seed=1"], ["data.seed=42, not 1", "finetune="]),
    (["seed=1", "data.seed=42"], ["with seed=42, not 1"]),  # noise and weights would be those of another run
    (["data.image_size=32"], ["data.image_size=16, not 32"]),
    (["geometry.n_views=9"], ["geometry.n_views=8, not 9"]),
]


def test_a_run_that_cannot_resume_is_refused(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    train(tiny_config(*RUN, "trainer.max_steps=1"), tmp_path, save_at=(1,))
    for overrides, words in REFUSED:
        with pytest.raises(CheckpointError) as error:
            resumable(tiny_config(*RUN, *overrides), tmp_path / "1.ckpt")
        for word in words:
            assert word in str(error.value)
