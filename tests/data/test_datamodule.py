from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from PIL import Image

from qnmixer.data.config import DataConfig, DeepLesionData, DicomData, NumpyData, PhantomData
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.sampler import EpochSampler
from qnmixer.errors import ConfigError, DataError


def phantoms(**options: Any) -> SliceDataModule:
    chosen = {"image_size": 16, "num_workers": 0, "n_train": 6, "n_val": 3, "n_test": 2} | options
    return SliceDataModule(PhantomData(**chosen))


def test_workers_change_nothing() -> None:
    alone, helped = (phantoms(num_workers=n, batch_size=4, augment=True) for n in (0, 2))
    for a, b in zip(alone.train_dataloader(), helped.train_dataloader(), strict=True):
        assert torch.equal(a["image"], b["image"])
        assert torch.equal(a["sample"], b["sample"])
        assert a["name"] == b["name"]


def test_a_batch_is_what_the_network_needs() -> None:
    batch = next(iter(phantoms(batch_size=2).val_dataloader()))
    assert batch["image"].shape == (2, 1, 16, 16)
    assert batch["image"].dtype == batch["hu_scale"].dtype == torch.float32
    assert 0 <= batch["image"].min() <= batch["image"].max() <= 1
    assert batch["sample"].dtype == torch.int64
    assert batch["name"] == ["val-phantom-00000", "val-phantom-00001"]


def test_epochs_bring_new_phantoms_to_training_only() -> None:
    module = phantoms()
    loader: Any
    for loader, fixed in ((module.train_dataloader(), False), (module.val_dataloader(), True)):
        seen = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            seen.append(torch.cat([batch["image"] for batch in loader]))
        assert torch.equal(seen[0], seen[1]) == fixed


class Watcher(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[int] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen += batch["sample"].tolist()
        return self.weight.sum()

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated += batch["sample"].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_advances_the_epoch(tmp_path: Path) -> None:
    watcher = Watcher()
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(watcher, datamodule=phantoms(batch_size=4))
    assert sorted(watcher.seen) == list(range(12))
    assert sorted(watcher.seen[:6]) == list(range(6))
    assert watcher.validated == [0, 1, 2, 0, 1, 2]


def test_sampler_shares_out_without_repeats() -> None:
    def numbers(epoch: int, **options: Any) -> list[int]:
        sampler = EpochSampler(10, seed=3, **options)
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
        return list(sampler)

    assert sorted(numbers(2, shuffle=True)) == list(range(20, 30))
    assert numbers(2, shuffle=True) == numbers(2, shuffle=True)
    assert [n - 10 for n in numbers(1, shuffle=True)] != numbers(0, shuffle=True)
    assert numbers(5, shuffle=False, fixed=True) == list(range(10))
    ranks = [numbers(1, shuffle=True, num_replicas=4, rank=rank) for rank in range(4)]
    assert sorted(chain(*ranks)) == list(range(10, 20))
    even = [numbers(1, shuffle=True, num_replicas=4, rank=rank, even=True) for rank in range(4)]
    assert [len(part) for part in even] == [2, 2, 2, 2]
    assert len(set(chain(*even))) == 8


def test_dicom_folder_end_to_end(make_ct: Any, body_hu: Any, tmp_path: Path) -> None:
    for p, patient in enumerate(("L333", "L310", "L067", "L096")):
        for i in range(2):
            make_ct(
                tmp_path / "aapm" / patient / "full_3mm" / f"{i}.IMA", body_hu(seed=p), PatientID="",
                SeriesInstanceUID=f"1.2.{p}", ImagePositionPatient=[0, 0, i],
            )  # fmt: skip
    (tmp_path / "aapm" / "readme.txt").write_text("hello")
    config = DicomData(
        root=str(tmp_path / "aapm"), split="aapm", image_size=24, num_workers=2, cache_dir=str(tmp_path / "cache")
    )
    module = SliceDataModule(config)
    with pytest.warns(UserWarning, match="skipped 1 of its files.*readme"):
        text = module.describe()
    assert "train 4 slices of 2 patients, val 2 slices of 1 patient, test 2 slices of 1 patient" in text
    batch = next(iter(module.test_dataloader()))
    assert batch["name"] == ["L310/full_3mm/0.IMA"]
    hu = batch["hu_offset"] + batch["hu_scale"] * batch["image"]
    assert hu[0, 0, 12, 5] == pytest.approx(41, abs=0.01)


def test_deeplesion_folder(body_hu: Any, tmp_path: Path) -> None:
    for patient in ("000001", "000002", "000003"):
        folder = tmp_path / "Images_png" / f"{patient}_01_02"
        folder.mkdir(parents=True)
        Image.fromarray((body_hu() + 32768).astype(np.uint16)).save(folder / "103.png")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "Images_png" / "000001_01_02" / "104.png")
    config = DeepLesionData(root=str(tmp_path), image_size=40, num_workers=0, cache_dir=str(tmp_path / "cache"))
    module = SliceDataModule(config)
    with pytest.warns(UserWarning, match="1 not a 16-bit grey PNG"):
        assert "test 1 slices of 1 patient" in module.describe()
    batch = next(iter(module.train_dataloader()))
    hu = (batch["hu_offset"] + batch["hu_scale"] * batch["image"])[0, 0]
    np.testing.assert_allclose(hu, np.clip(body_hu(), -1000, 2000), atol=1e-3)


def test_all_slices_for_test_and_nothing_to_train_on(body_hu: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.stack([body_hu()] * 3))
    config = NumpyData(
        root=str(tmp_path), split="all", image_size=16, num_workers=0, scaling="minmax", cache_dir=str(tmp_path / "c")
    )
    module = SliceDataModule(config)
    batch = next(iter(module.test_dataloader()))
    assert batch["image"].min() == 0
    assert batch["image"].max() == 1
    assert len(module.test_dataloader()) == 3
    with pytest.raises(DataError, match="no slices for train"):
        module.train_dataloader()


def test_values_without_air_are_doubted(body_hu: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.clip(body_hu(), 0, None))
    config = NumpyData(root=str(tmp_path), split="all", image_size=16, num_workers=0, cache_dir=str(tmp_path / "c"))
    with pytest.warns(UserWarning, match="really in HU"):
        SliceDataModule(config).setup()


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (PhantomData(batch_size=0), r"data\.batch_size"),
        (PhantomData(image_size=1), r"data\.image_size"),
        (PhantomData(n_val=0), r"data\.n_val"),
        (PhantomData(anatomy_share=2), r"data\.anatomy_share"),
        (PhantomData(scaling="max"), r"data\.scaling"),
        (PhantomData(hu_max=-1000), r"data\.hu_max"),
        (DicomData(), r"data\.root"),
    ],
)
def test_settings_that_make_no_sense(config: DataConfig, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        SliceDataModule(config).setup()


def test_real_folder(real_ct: Path, tmp_path: Path) -> None:
    config = DicomData(root=str(real_ct / "dicom"), image_size=64, num_workers=0, cache_dir=str(tmp_path))
    module = SliceDataModule(config)
    assert "train 20 slices of 1 patient, val 1 slices of 1 patient, test 1" in module.describe()
    for batch in module.train_dataloader():
        assert batch["image"].max() > 0.4
