"""An experiment together with options that it does not choose itself."""

import pytest

from qnmixer.config.compose import compose, compose_sweep, fitted
from qnmixer.config.run import parse
from qnmixer.errors import ConfigError

ROOT = "data.root=/ct"


@pytest.mark.parametrize(
    ("overrides", "dropped"),
    [
        (["experiment=demo", "model=fbp"], {"~model.n_iterations", "~model.channels"}),
        (["experiment=demo", "model=fbpconvnet"], {"~model.n_iterations"}),
        (["experiment=demo", "model=learn"], set()),
        (["experiment=demo", "data=numpy", ROOT], set()),
        (["experiment=demo", "logger=[wandb,tensorboard]"], set()),
        (["experiment=pretrained", "data=dicom", ROOT], {"~data.sources"}),
        (["experiment=measured", "data=numpy", ROOT], {"~data.n_val", "~data.n_test", "~data.anatomy_share"}),
        (["experiment=compare_small", "data=dicom", ROOT], {"~data.n_val", "~data.n_test"}),
        (["experiment=paper_aapm", "data=phantoms"], {"~data.split", "~data.include"}),
    ],
)
def test_keys_that_the_chosen_option_lacks_are_dropped(overrides: list[str], dropped: set[str]) -> None:
    more = fitted("train", overrides)[len(overrides) :]
    assert {it for it in more if it.startswith("~")} == dropped
    parse(compose("train", overrides))
    assert fitted("train", [*overrides, *more]) == [*overrides, *more]


def test_a_deleted_group_is_no_choice() -> None:
    """As users of Hydra leave out a group."""
    assert parse(compose("train", ["experiment=demo", "~logger"])).logger == {}


def test_a_model_that_lacks_a_key_keeps_its_own_sizes() -> None:
    own = compose("train", ["model=tv"])
    fit = compose("train", ["experiment=demo", "model=tv"])
    assert (fit.model, fit.data.image_size) == (own.model, 64)
    assert compose("train", ["experiment=demo", "model=tv", "model.n_iterations=7"]).model.n_iterations == 7
    assert compose("train", ["experiment=demo", "model=learn"]).model.n_iterations == 6


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_an_option_keeps_its_own_value_where_it_cannot_take_that_of_the_experiment(command: str) -> None:
    overrides = ["experiment=demo", "model=regformer"]
    own, fit = compose("train", overrides[1:]).model, compose(command, overrides).model
    assert (own.channels, fit.channels, fit.n_iterations) == (96, 96, 6)  # three heads share half of the channels
    more = fitted(command, overrides)
    assert more == [*overrides, "model.channels=96"] == fitted(command, more)
    with pytest.raises(ConfigError, match=r"^model.channels=32 is not a multiple of 6"):
        parse(compose("train", [*overrides, "model.channels=32"]))


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_folder_that_is_still_missing_hides_no_rule(command: str) -> None:
    config = compose(command, ["experiment=compare_real", "model=regformer"])
    assert config.model.channels == compose(command, ["model=regformer"]).model.channels


@pytest.mark.parametrize(
    ("experiment", "chosen", "of_experiment"),
    [
        ("demo", "geometry=htc2022", {"n_views": 16}),
        ("demo", "geometry=ge_lightspeed", {"n_views": 16}),
        ("demo", "optimizer=sgd", {}),
        ("demo", "optimizer=adafactor", {}),
        ("demo", "geometry=paper", {"n_views": 16, "n_detectors": 128, "detector_pitch": 7.5}),
        ("demo", "optimizer=adamw", {}),
        ("demo", "optimizer=muon", {}),
        ("pretrained", "optimizer=muon", {"lr": 8e-3, "adamw_lr": 2e-3, "step_size_lr_factor": 2.0}),
        ("measured", "geometry=htc2022", {"n_detectors": 280, "detector_pitch": 0.4}),
    ],
)
def test_another_scanner_or_optimizer_keeps_its_own_values(
    experiment: str, chosen: str, of_experiment: dict[str, float]
) -> None:
    """An experiment's detector is that of its own scanner, and its rate that of its own optimizer."""
    group, overrides = chosen.partition("=")[0], [f"experiment={experiment}", chosen]
    assert compose("train", overrides)[group] == {**compose("train", [chosen])[group], **of_experiment}
    typed = f"{group}.{'lr' if group == 'optimizer' else 'detector_pitch'}=0.5"
    assert compose("train", [*overrides, typed])[group] == {
        **compose("train", [chosen, typed])[group],
        **{key: value for key, value in of_experiment.items() if not typed.startswith(f"{group}.{key}=")},
    }


def test_keys_that_are_typed_still_fail() -> None:
    with pytest.raises(ConfigError, match=r"^model.channels works with model=\S+ or .* only"):
        parse(compose("train", ["experiment=demo", "model=tv", "model.channels=3"]))


def test_each_job_of_a_sweep_is_fitted() -> None:
    first = compose_sweep("train", ["experiment=demo", "model=fbp,qn_mixer"])
    assert "channels" not in first.model
