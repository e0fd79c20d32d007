"""Which slices a run is measured on, and which of them are drawn."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from qnmixer.config import Config, sources_of
from qnmixer.config.data import AsTrained, CustomData, DataConfig, FolderData, MixedData, PhantomData
from qnmixer.config.option import check_bounds
from qnmixer.config.overrides import values_of
from qnmixer.errors import CheckpointError
from qnmixer.plugins import check_trusted
from qnmixer.weights import SUFFIX, located


def as_trained(run: str, changed: AsTrained, data: DataConfig, trust: Collection[str] = ()) -> DataConfig:
    """The run's own slices, but for what an evaluation may ask of them.

    Raises CheckpointError for weights files of slices from files, as these say nothing of the folder, and PluginError
    for slices of a class that lies in no module of `trust`.
    """
    for key, source in sources_of(data).items():
        if located(run).suffix == SUFFIX and not isinstance(source, PhantomData):
            where = f"_target_={source._target_}" if isinstance(source, CustomData) else "root=FOLDER"
            raise CheckpointError(f"{run} does not say where its slices are: give data={source.name} data.{where}")
        if isinstance(source, CustomData):
            check_trusted(run, {f"{key}._target_": source._target_}, trust)
    changes = {key: value for key, value in vars(changed).items() if key != "name" and value is not None}
    data = replace(data, **changes)
    for source in sources_of(data).values():
        check_bounds("data.", source)
    return data


def other_slices(data: DataConfig, trained: Config, overrides: list[str]) -> DataConfig:
    """Slices that the run was not trained on, as its network needs them; all of them, unless told otherwise."""
    given = values_of(overrides)
    fixed = {key: getattr(trained.data, key) for key in ("image_size", "scaling", "hu_max")}
    for key, value in fixed.items():
        if f"data.{key}" in given and getattr(data, key) != value:
            raise CheckpointError(
                f"the run was trained with data.{key}={value}: leave data.{key} out, or train another"
            )
    data = replace(data, **fixed, seed=trained.data.seed)
    if isinstance(data, FolderData) and "data.split" not in given:
        for source in sources_of(trained.data).values():
            if isinstance(source, FolderData) and _folder(data) == _folder(source):
                # or slices that it was trained on would be measured
                return replace(source, simulation_factor=data.simulation_factor, disc=data.disc)
        return replace(data, split="all")
    return data


def kind_of(data: DataConfig) -> str:
    """The source of validation and test slices: dicom, say; mixed where they are of several."""
    if isinstance(data, MixedData) and data.evaluate_on is not None:
        return sources_of(data)[f"data.sources.{data.evaluate_on}"].name
    return data.name


def _folder(data: FolderData) -> Path:
    return Path(str(data.root)).expanduser().resolve()


def pictured(n_images: int, n_pictures: int) -> set[int]:
    """Which images to draw: spread over the split, since neighbours look alike."""
    n = min(n_pictures, n_images)
    return {(2 * k + 1) * n_images // (2 * n) for k in range(n)}
