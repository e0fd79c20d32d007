"""The slices of an evaluation, beside those that its network was trained on."""

import pytest

from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.evaluation.evaluate_config import EvaluateConfig
from qnmixer.evaluation.evaluate_run import other_slices
from qnmixer.settings.compose import compose
from qnmixer.settings.data import DataConfig, FolderData

from ..conftest import config_of


def others(trained: list[str], overrides: list[str], *, own: bool = False) -> DataConfig:
    """The slices of an evaluation, beside those of a run with these overrides; own: they are of the run's folder."""
    chosen = EvaluateConfig.parse(compose("evaluate", ["run=.", *overrides]))
    run = config_of(*trained)
    data, is_own = other_slices(chosen.data, run.data, overrides)
    assert is_own == own
    return data


@pytest.mark.extras
def test_another_scale_than_that_of_the_network_is_refused() -> None:
    trained = ["experiment=two_detect", "data.root=/set", "data.max_attenuation=0.07"]
    words = ["data=two_detect", "data.root=/other"]
    for given in ([], ["data.max_attenuation=0.07"]):
        assert others(trained, [*words, *given]).attenuation_of_one == 0.07
    with pytest.raises(CheckpointError, match=r"trained with data\.max_attenuation=0\.07: leave it out"):
        others(trained, [*words, "data.max_attenuation=0.06"])


SIZED = ["data=dicom", "data.root=/ct", "geometry.field_of_view=500", "data.pixel_size=header"]


@pytest.mark.parametrize(("given", "expected"), [([], "header"), (["data.pixel_size=field_of_view"], "field_of_view")])
def test_slices_have_their_true_size_where_the_run_was_trained_so(given: list[str], expected: str) -> None:
    data = others(SIZED, ["data=dicom", "data.root=/other", *given])
    assert data.pixel_size == expected


def own_folder(*given: str) -> FolderData:
    """The slices of an evaluation on the folder of a run, in which some keys are given."""
    folder = ["data=dicom", "data.root=/ct"]
    return others([*folder, "data.batch_size=3", "data.include='*.dcm'"], [*folder, *given], own=True)


def test_how_slices_of_the_run_are_loaded_can_be_changed() -> None:
    loading = ["data.num_workers=0", "data.prefetch_factor=5", "data.pin_memory=false", "data.cache_dir='~/c'"]
    data = own_folder(*loading, "data.disc=true")
    assert (data.num_workers, data.prefetch_factor, data.pin_memory, data.cache_dir) == (0, 5, False, "~/c")
    assert (data.batch_size, data.include, data.disc) == (3, "*.dcm", True)
    assert own_folder("data.batch_size=1").batch_size == 1


@pytest.mark.parametrize("key", ["data.include='*'", "data.seed=5"])
def test_other_keys_of_the_slices_of_the_run_are_refused(key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^data.root=/ct is the run's own folder.*: leave out {name}"):
        own_folder(key)
