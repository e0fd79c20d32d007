"""The slices of an evaluation, beside those that its network was trained on."""

from functools import cache

import pytest

from qnmixer.engine.config import Config, parse
from qnmixer.engine.config.commands import parse_evaluate
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.data import DataConfig, FolderData
from qnmixer.engine.evaluation.slices import other_slices
from qnmixer.errors import CheckpointError, ConfigError


@cache
def run_of(*overrides: str) -> Config:
    """The config of a run, which no test changes."""
    return parse(compose("train", [*overrides]))


def others(trained: list[str], overrides: list[str]) -> DataConfig:
    """The slices of an evaluation, beside those of a run with these overrides."""
    chosen = parse_evaluate(compose("evaluate", ["run=.", *overrides]))
    assert isinstance(chosen.data, DataConfig)
    data, own = other_slices(chosen.data, run_of(*trained), overrides)
    assert not own
    return data


def test_phantoms_have_the_seed_that_is_given_else_that_of_the_run() -> None:
    assert others(["seed=7"], ["data=phantoms"]).seed == 7
    assert others(["seed=7"], ["data=phantoms", "data.seed=1"]).seed == 1


def test_another_scale_than_that_of_the_network_is_refused() -> None:
    trained = ["experiment=two_detect", "data.root=/set", "data.max_attenuation=0.07"]
    words = ["data=two_detect", "data.root=/other"]
    for given in ([], ["data.max_attenuation=0.07"]):
        assert others(trained, [*words, *given]).attenuation_of_one == 0.07
    with pytest.raises(
        CheckpointError, match=r"trained with data\.max_attenuation=0\.07: leave data\.max_attenuation out"
    ):
        others(trained, [*words, "data.max_attenuation=0.06"])


SIZED = ["data=dicom", "data.root=/ct", "geometry.field_of_view=500", "data.pixel_size=header"]


def test_slices_have_their_true_size_where_the_run_was_trained_so(recwarn: pytest.WarningsRecorder) -> None:
    for given, expected in (([], "header"), (["data.pixel_size=field_of_view"], "field_of_view")):
        data = others(SIZED, ["data=dicom", "data.root=/other", *given])
        assert isinstance(data, FolderData)
        assert data.pixel_size == expected
    own_reader = ["data=numpy", "data._target_=collections.Counter"]
    data = others([*own_reader, *SIZED[1:]], [*own_reader, "data.root=/other"])
    assert isinstance(data, FolderData)
    assert data.pixel_size == "header"
    assert not recwarn.list


@pytest.mark.parametrize("option", ["numpy", "deeplesion"])
def test_files_that_never_say_a_size_fill_the_field(option: str, recwarn: pytest.WarningsRecorder) -> None:
    for given, expected in (([], "field_of_view"), (["data.pixel_size=header"], "header")):
        data = others(SIZED, [f"data={option}", "data.root=/other", *given])
        assert isinstance(data, FolderData)
        assert data.pixel_size == expected
    assert [str(it.message) for it in recwarn.list] == [
        f"each slice of data={option} is taken to be 500 mm wide: data.pixel_size=header, as in the run, needs files "
        "with a pixel size"
    ]


def test_slices_of_a_source_have_the_size_of_that_source() -> None:
    """Of a mix, where another source has its true size."""
    trained = ["data=mixed", "data.sources.slices.root=/a", "+data.sources.more={share: 0, name: dicom, root: /b, "
               "pixel_size: header}"]  # fmt: skip
    for root, expected in (("/a", "field_of_view"), ("/b", "header")):
        overrides = ["data=dicom", f"data.root={root}"]
        chosen = parse_evaluate(compose("evaluate", ["run=.", *overrides]))
        assert isinstance(chosen.data, DataConfig)
        data, own = other_slices(chosen.data, run_of(*trained), overrides)
        assert isinstance(data, FolderData)
        assert (data.pixel_size, own) == (expected, True)


def own_folder(*given: str) -> FolderData:
    """The slices of an evaluation on the folder of a run, in which some keys are given."""
    words = ["data=dicom", "data.root=/ct", "data.batch_size=3", "data.include='*.dcm'"]
    trained = run_of(*words)
    overrides = ["data=dicom", "data.root=/ct", *given]
    chosen = parse_evaluate(compose("evaluate", ["run=.", *overrides]))
    assert isinstance(chosen.data, DataConfig)
    data, own = other_slices(chosen.data, trained, overrides)
    assert isinstance(data, FolderData)
    assert own
    return data


def test_how_slices_of_the_run_are_loaded_can_be_changed() -> None:
    loading = ["data.num_workers=0", "data.prefetch_factor=5", "data.pin_memory=false", "data.cache_dir='~/c'"]
    data = own_folder(*loading, "data.disc=true")
    assert (data.num_workers, data.prefetch_factor, data.pin_memory, data.cache_dir) == (0, 5, False, "~/c")
    assert (data.batch_size, data.include, data.disc) == (3, "*.dcm", True)
    assert own_folder("data.batch_size=1").batch_size == 1


@pytest.mark.parametrize(
    "key", ["data.include='*'", "data.patient_from=folder", "data.val_fraction=0.2", "data.seed=5", "data.augment=true"]
)
def test_other_keys_of_the_slices_of_the_run_are_refused(key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^data.root=/ct is the run's own folder.*: leave out {name}"):
        own_folder(key)


def test_a_key_that_says_what_the_run_has_is_taken() -> None:
    assert own_folder("data.include='*.dcm'", "data.patient_from=tag").include == "*.dcm"
