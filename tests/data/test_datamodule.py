import os
import random
import re
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from qnmixer.data.datamodule import SliceDataModule, _end_with_parent_only
from qnmixer.data.dataset import EpochSampler, Pick, Scaling, scaling_of
from qnmixer.data.splits import PARTS, RunSplit, SplitRecord
from qnmixer.errors import DataError
from qnmixer.runs.processes.process import SIGNALS
from qnmixer.settings.run import section

from ..own import MySlices
from .conftest import body_hu, make_ct


def phantoms(**options: Any) -> SliceDataModule:
    chosen = {"image_size": 16, "num_workers": 0, "n_train": 6, "n_val": 3, "n_test": 2, "seed": 1} | options
    return SliceDataModule(section("data", "phantoms", **chosen))


def folder(option: str, root: Path, **options: Any) -> SliceDataModule:
    """Slices of files. Their cache is in a folder that is left out."""
    chosen = {"root": str(root), "image_size": 16, "num_workers": 0, "cache_dir": str(root / "cache")} | options
    return SliceDataModule(section("data", option, **chosen))


def test_a_batch_is_what_the_network_needs() -> None:
    """Sample numbers stay on the host, which reads them."""
    module = phantoms(batch_size=2)
    batch = next(iter(module.val_dataloader()))
    assert batch["image"].shape == (2, 1, 16, 16)
    assert batch["image"].dtype == batch["hu_scale"].dtype == torch.float32
    assert 0 <= batch["image"].min() <= batch["image"].max() <= 1
    assert batch["sample"].dtype == torch.int64
    assert batch["name"] == ["val-phantom-00000", "val-phantom-00001"]
    moved = module.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert {name: value.device.type for name, value in moved.items() if name != "name"} == {
        "image": "meta", "hu_offset": "meta", "hu_scale": "meta", "weight": "meta", "sample": "cpu"
    }  # fmt: skip
    assert torch.equal(moved["sample"], batch["sample"])
    assert moved["name"] == batch["name"]


def test_few_training_slices_are_the_same_in_every_epoch() -> None:
    module = phantoms(train_slices=2, simulation_factor=2)
    loader: Any = module.train_dataloader()
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        assert {batch["name"][0] for batch in loader} == {"train-phantom-00000", "train-phantom-00003"}
    assert len(module.dataset("val")) == 3


class Drawing(MySlices):
    """Slices of one value in HU, which is drawn by each global generator."""

    def load(self, index: int) -> np.ndarray:
        return np.full((16, 16), 100 * (np.random.rand() + random.random() + float(torch.rand(()))))  # noqa: NPY002


def drawn(part: str = "train", *, rank: int | None = None, start: tuple[int, int] = (0, 0), **keys: Any) -> list[float]:
    """The values of three epochs, from a start on."""
    keys = {"image_size": 16, "batch_size": 2, "num_workers": 0, "seed": 1} | keys
    module = SliceDataModule(section("data", "custom", _target_=f"{__name__}.Drawing", year=2016, **keys))
    if rank is not None:
        share = {"num_replicas": 2, "rank": rank}
        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(distributed_sampler_kwargs=share))
        trainer.accumulate_grad_batches = 1
        module.trainer = trainer
    module.start_at(*start)
    loader: Any = module.loader(part)
    values = []
    for epoch in range(start[0], 3):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            assert torch.equal(batch.get("fine", batch["image"])[..., :16, :16], batch["image"])
            values += batch["image"][:, 0, 0, 0].tolist()
    return values


def test_what_slices_draw_depends_on_seed_and_sample_only() -> None:
    """With workers it was the same for every seed and process, and after a resume. The fine grid had other numbers."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    values = drawn(simulation_factor=2)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # noqa: NPY002
    assert len({*values}) == 12
    assert drawn(num_workers=2) == values
    assert drawn(start=(1, 1), num_workers=1) == values[6:]
    ranks = [drawn(rank=rank, batch_size=1) for rank in (0, 1)]
    assert [value for pair in zip(*ranks, strict=True) for value in pair] == values
    validation = drawn("val")
    assert validation == validation[:2] * 3
    assert len({*values, *drawn(seed=2), *validation}) == 12 + 12 + 2


def steps(sampler: EpochSampler, accumulate: int = 1) -> list[list[Pick]]:
    """What one process is given for each optimizer step."""
    picks, size = list(sampler), sampler.batch_size * accumulate
    assert len(picks) == len(sampler)
    return [picks[i : i + size] for i in range(0, len(picks), size)]


@pytest.mark.parametrize("length", [1, 22])
@pytest.mark.parametrize(("replicas", "batch", "accumulate"), [(1, 8, 1), (4, 1, 2), (2, 4, 1), (2, 2, 2), (4, 2, 1)])
def test_a_step_has_the_same_samples_in_any_shares(length: int, replicas: int, batch: int, accumulate: int) -> None:
    """In order, none twice, none missing; and weights that make averages over everything the mean over samples."""

    def epoch(n: int, b: int, a: int) -> list[list[list[Pick]]]:
        samplers = [
            EpochSampler(length, shuffle=True, seed=3, batch_size=b, num_replicas=n, rank=r, accumulate=a)
            for r in range(n)
        ]
        for sampler in samplers:
            sampler.set_epoch(2)
        return [list(of) for of in zip(*(steps(sampler, a) for sampler in samplers), strict=True)]

    seen = []
    for alone, shared in zip(epoch(1, 8, 1), epoch(replicas, batch, accumulate), strict=True):
        expected = [pick.n for pick in alone[0]]
        weights = dict[int, float]()  # of each sample in the mean over all processes and batches
        for of_rank in shared:
            for start in range(0, len(of_rank), batch):
                picks = of_rank[start : start + batch]
                share = len(picks) * replicas * accumulate
                weights |= {pick.n: pick.weight / share for pick in picks if pick.weight}
        used = [pick for of_rank in shared for pick in of_rank if pick.weight]
        assert {pick.n for pick in used} == set(expected)
        assert len(used) == len(expected)
        assert list(weights.values()) == pytest.approx([1 / len(expected)] * len(expected))
        seen += expected
    assert sorted(seen) == list(range(2 * length, 3 * length))


def test_fillers_make_processes_and_steps_as_long_as_each_other() -> None:
    """The collectives of one would wait for the others for ever; a filler is nothing new, and counts for nothing."""
    for fill in (False, True):
        shares = [
            list(EpochSampler(10, shuffle=False, batch_size=2, num_replicas=4, rank=r, fill=fill)) for r in range(4)
        ]
        assert [len(share) for share in shares] == ([4, 4, 4, 4] if fill else [4, 3, 3, 3])
        assert {pick.n for share in shares for pick in share if not pick.weight} == {9}
        assert sorted(pick.n for share in shares for pick in share if pick.weight) == list(range(10))
    sampler = EpochSampler(5, shuffle=False, fixed=True, batch_size=3)
    assert list(sampler) == [Pick(n, 1.0) for n in range(5)]  # one process needs none
    sampler = EpochSampler(9, shuffle=False, batch_size=2, accumulate=3)
    assert [pick.weight for pick in sampler] == [1.0] * 6 + [2.0] * 3 + [0.0] * 3


@pytest.mark.parametrize(("batches", "n_steps"), [(None, 4), (2, 1), (6, 3), (100, 4), (0.5, 2), (1.0, 4), (0.01, 1)])
def test_an_epoch_of_some_batches_alone(batches: float | None, n_steps: int) -> None:
    sampler = EpochSampler(14, shuffle=True, batch_size=2, accumulate=2, batches=batches)
    assert len(steps(sampler, 2)) == n_steps
    assert sampler.samples_until(n_steps) == min(14, 4 * n_steps)
    assert sampler.samples_until(2 * n_steps) == 2 * min(14, 4 * n_steps)


def test_order_follows_seed_and_epoch_and_may_begin_in_the_middle() -> None:
    def picks(epoch: int, seed: int = 3, start: int = 0) -> list[Pick]:
        sampler = EpochSampler(10, shuffle=True, batch_size=2, seed=seed)
        sampler.start_at(epoch, start)
        return list(sampler)

    assert picks(2) == picks(2)
    assert picks(0) != picks(0, seed=4)
    assert [pick.n - 10 for pick in picks(1)] != [pick.n for pick in picks(0)]
    assert picks(1, start=3) == picks(1)[6:]
    sampler = EpochSampler(10, shuffle=True, batch_size=2, seed=3)
    sampler.start_at(1, 3)
    sampler.set_epoch(2)
    assert list(sampler) == picks(2)


def test_deeplesion_folder(tmp_path: Path) -> None:
    for patient in ("000001", "000002", "000003"):
        series = tmp_path / "Images_png" / f"{patient}_01_02"
        series.mkdir(parents=True)
        Image.fromarray((body_hu() + 32768).astype(np.uint16)).save(series / "103.png")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "Images_png" / "000001_01_02" / "104.png")
    module = folder("deeplesion", tmp_path, image_size=40)
    with pytest.warns(UserWarning, match="1 not a 16-bit grey PNG"):
        assert "test 1 slices of 1 patient" in module.describe()
    batch = next(iter(module.train_dataloader()))
    hu = (batch["hu_offset"] + batch["hu_scale"] * batch["image"])[0, 0]
    np.testing.assert_allclose(hu, np.clip(body_hu(), -1000, 2000), atol=1e-3)


def test_all_slices_for_test_and_nothing_to_train_on(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.stack([body_hu()] * 3))
    module = folder("numpy", tmp_path, split="all", scaling="minmax")
    batch = next(iter(module.test_dataloader()))
    assert batch["image"].min() == 0
    assert batch["image"].max() == 1
    assert len(module.test_dataloader()) == 3
    with pytest.raises(DataError, match=r"no slices for train with data\.split=all below .*: choose another split"):
        module.train_dataloader()
    record: SplitRecord = {part: {key: torch.tensor([1]) for key in ("patients", "slices")} for part in PARTS}
    module = SliceDataModule(module.config.changed(split="random"), split=RunSplit(record))
    message = rf"no slices for train .*below {tmp_path}: .*give the folder with the run's slices \(evaluate"
    with pytest.warns(UserWarning, match="came after the run began"), pytest.raises(DataError, match=message):
        module.train_dataloader()


def test_files_of_one_slice_that_count_as_patients_are_said(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for k in range(4):
        np.save(tmp_path / f"p01_{k}.npy", body_hu(seed=k)[None])
    folder("numpy", tmp_path).setup()
    (line,) = [str(warning.message) for warning in recwarn.list]
    assert re.search("each of 4 files with one slice counts as a patient .*too narrow", line)


def test_copies_count_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A file is known by its SOPInstanceUID and its pixels, and a frame of a file also by its number."""
    root = tmp_path / "ct"
    for k in range(3):
        make_ct(root / f"P{k}/a.dcm", body_hu(seed=k), PatientID=f"P{k}")
        make_ct(root / f"P{k}/frames.dcm", np.stack([body_hu(seed=20), body_hu(seed=20 + k)]), PatientID=f"P{k}")
        for name in ("a.dcm", "frames.dcm"):
            (root / f"Q{k}").mkdir(exist_ok=True)
            shutil.copy(root / f"P{k}" / name, root / f"Q{k}" / name.upper())
    module = folder("dicom", root)
    module.setup()
    assert sum(len(part.source) for part in module.parts.values()) == 9
    lines = [str(it.message) for it in recwarn.list]
    assert "skipped 9 of its files or frames (9 a copy of another file (SOPInstanceUID)): Q0/A.DCM" in lines[0]


def test_the_same_uid_with_other_pixels_and_the_same_pixels_in_another_file_are_said(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    for k in range(4):
        uid = f"1.2.{[0, 1, 1, 2][k]}"
        make_ct(tmp_path / "ct" / f"{k}.dcm", body_hu(seed=5 * min(k, 2)), PatientID=f"P{k}", SOPInstanceUID=uid)
    module = folder("dicom", tmp_path / "ct")
    module.setup()
    assert sum(len(part.source) for part in module.parts.values()) == 4
    of_uid, of_pixels = (str(it.message) for it in recwarn.list)
    assert of_uid.endswith("1 slices have the SOPInstanceUID of another slice, but other pixels: each counts (2.dcm)")
    assert of_pixels.endswith("1 slices have the pixels of one in another file: both count (3.dcm)")


def test_slices_of_two_series_at_one_place_are_said(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Quarter dose beside full dose: each anatomy counted twice, and half of the truths were noisy."""
    for p in range(3):
        for s, dose in enumerate(("full_3mm", "quarter_3mm")[: 2 - (p == 2)]):
            for z in (30, 33):
                make_ct(
                    tmp_path / f"ct/P{p}/{dose}/{z}.dcm", body_hu(seed=20 * p + 5 * s + z), PatientID=f"P{p}",
                    ImagePositionPatient=[-10, -20, z], SeriesInstanceUID=f"1.2.{p + 1}.{s + 1}",
                )  # fmt: skip
    folder("dicom", tmp_path / "ct").setup()
    (line,) = (str(warning.message) for warning in recwarn.list)
    assert "4 slices of 2 patients are within a millimetre of a slice of another series of the patient" in line
    assert "(P0/quarter_3mm/30.dcm, P0/quarter_3mm/33.dcm, P1/quarter_3mm/30.dcm, P1/quarter_3mm/33.dcm)" in line


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="this system sends its signals to the run alone")
def test_workers_live_through_what_stops_their_run() -> None:
    """It needs them for the step at hand, and SLURM or a terminal that goes signals them as well.

    Also with a thread that a library starts in every process that is forked: it would hear them first.
    """
    forking = True
    os.register_at_fork(  # which cannot be taken back
        after_in_child=lambda: forking and threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    )
    batches: Any = iter(phantoms(n_train=64, batch_size=1, num_workers=1, prefetch_factor=1).train_dataloader())
    forking = False
    next(batches)
    (worker,) = batches._workers
    for number in set(SIGNALS) - {signal.SIGTERM}:  # by which its own process ends it
        os.kill(worker.pid, number)
    for _ in range(5):
        next(batches)
    assert worker.is_alive()
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(timeout=30)
    assert worker.exitcode == 0


def test_fine_phantoms_are_the_same_phantoms() -> None:
    plain = phantoms(n_train=4, batch_size=4, augment=True, image_size=32)
    finer = phantoms(n_train=4, batch_size=4, augment=True, image_size=32, simulation_factor=2)
    a, b = (next(iter(module.train_dataloader())) for module in (plain, finer))
    assert "fine" not in a
    assert torch.equal(a["image"], b["image"])
    assert b["fine"].shape == (4, 1, 64, 64)
    mean = torch.nn.functional.avg_pool2d(b["fine"], 2)
    assert (mean - b["image"]).abs().mean() < 1e-3  # but for clipped values
    assert (b["fine"] - mean.repeat_interleave(2, 2).repeat_interleave(2, 3)).abs().mean() > 3e-3


def test_fine_slices_of_a_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "a.npy", rng.uniform(-1000, 1500, (3, 64, 64)).astype(np.float32))
    data = folder("numpy", tmp_path, split="all", scaling="minmax", simulation_factor=4)
    (batch, _) = SliceDataModule(data.config, first=2).test_dataloader()
    (plain, _) = SliceDataModule(data.config.changed(simulation_factor=1), first=2).test_dataloader()
    assert torch.equal(plain["image"], batch["image"])
    x = (np.load(tmp_path / "a.npy")[0] - float(batch["hu_offset"])) / float(batch["hu_scale"])
    np.testing.assert_allclose(batch["fine"][0, 0], np.clip(x, 0, 1), atol=1e-5)


def test_a_worker_whose_parent_died_before_it_began_ends() -> None:
    """By then the system has told nobody, and torch takes the new parent for its own."""
    loader = phantoms(num_workers=1).train_dataloader()
    child = os.fork()
    if not child:
        worker = os.fork()  # its parent is not who has made the loader
        if not worker:
            assert loader.worker_init_fn is not None
            loader.worker_init_fn(0)
            os._exit(7)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_worker_that_cannot_send_its_batch_ends() -> None:
    """Python would drop the batch, as of a lambda, and the run would wait for it without end."""
    end: Any = partial(_end_with_parent_only, os.getpid())
    loader: Any = DataLoader([lambda: 0], batch_size=None, num_workers=1, timeout=20, worker_init_fn=end)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(iter(loader))


@pytest.mark.parametrize("scaling", ["attenuation", "minmax"])
def test_a_disc_at_the_lower_left(scaling: str) -> None:
    size = 64
    options: dict[str, Any] = {"image_size": size, "scaling": scaling, "batch_size": 2, "simulation_factor": 2}
    plain, marked = (next(iter(phantoms(disc=disc, **options).test_dataloader())) for disc in (False, True))
    for name, n in (("image", size), ("fine", 2 * size)):
        changed = (plain[name] - marked[name]).abs() > 1e-6
        rows, columns = torch.where(changed.any(dim=0)[0])
        for place, centre in ((rows, 0.75), (columns, 0.25)):
            assert abs(float(place.min() + place.max() + 1) / 2 / n - centre) < 1.5 / n
            assert abs(float(place.max() - place.min() + 1) / n - 0.17) < 2.5 / n
        x = marked[name][:, 0, round(0.75 * n), round(0.25 * n)]
        torch.testing.assert_close(x, plain["image"].amax(dim=(1, 2, 3)), atol=1e-5, rtol=0)
    assert torch.equal(plain["hu_scale"], marked["hu_scale"])


@pytest.mark.parametrize("name", ["attenuation", "minmax"])
def test_the_way_back_gives_hu(name: str) -> None:
    config = section("data", "phantoms", scaling=name)
    hu = np.random.default_rng(0).uniform(-1000, 2000, (9, 9)).astype(np.float32)
    scaling = scaling_of(config, hu)
    x = scaling.to_unit(hu)
    assert (x.dtype, x.min() >= 0, x.max() <= 1) == (np.float32, True, True)
    np.testing.assert_allclose(scaling.offset + scaling.scale * x, hu, atol=1e-3)
    metal = np.array([[-1024.0, 0.0, 500.0, 9000.0]], np.float32)
    np.testing.assert_allclose(Scaling(-1000.0, 2000.0).to_unit(metal), [[0, 0.5, 0.75, 1]])
    flat = np.full((3, 3), 7.0, np.float32)
    assert (scaling_of(config, flat).to_unit(flat) == (0 if name == "minmax" else 1007 / 3000)).all()


class Same(MySlices):
    """One slice, whose pixels all differ."""

    def load(self, index: int) -> Any:
        return np.arange(64, dtype=np.float32).reshape(8, 8)


def test_augmentation_is_by_sample_number_and_keeps_the_pixels() -> None:
    """The same slice has all eight symmetries of the square in some epochs."""
    keys = {"_target_": f"{__name__}.Same", "year": 2016, "image_size": 8, "scaling": "minmax", "augment": True}
    turned = SliceDataModule(section("data", "custom", **keys)).dataset("train")
    seen = [turned[n]["image"] for n in range(64)]
    assert len({tuple(image.flatten().tolist()) for image in seen}) == 8
    for n, image in enumerate(seen):
        assert torch.equal(turned[n]["image"], image)
        assert torch.equal(image.flatten().sort()[0], torch.arange(64) / 63)
