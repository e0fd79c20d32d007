"""An experiment together with options that it does not choose itself."""

import pytest

from qnmixer.engine.config.compose import compose, compose_as_given, compose_sweep, fitted
from qnmixer.engine.config.run import parse
from qnmixer.errors import ConfigError

ROOT = "data.root=/ct"
HTC = ["geometry.n_detectors=560", "geometry.detector_pitch=0.2"]


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ("experiment=demo model=tv", "model.n_iterations=5000 ~model.channels"),
        ("experiment=demo model=tv model.n_iterations=7", "~model.channels"),
        ("experiment=demo model=tv model.n_iterations=7 ~model.channels", ""),  # completed before
        ("experiment=demo model=regformer", "model.n_iterations=12 model.channels=96"),
        ("experiment=demo model=qn_mixer optimizer=muon geometry=paper", ""),  # its own choices
        ("experiment=demo optimizer=sgd logger=[wandb,tensorboard]", ""),
        (
            "experiment=pretrained optimizer=adamw data.sources.slices.root=/ct",
            "optimizer.lr=0.001 ~optimizer.adamw_lr optimizer.step_size_lr_factor=",
        ),
        ("experiment=demo geometry=htc2022", " ".join(HTC)),
        ("experiment=measured geometry=htc2022", ""),
        (f"experiment=measured data=numpy {ROOT}", "~data.n_val ~data.n_test ~data.anatomy_share"),
        (f"experiment=pretrained data=dicom {ROOT}", "~data.sources"),
        ("experiment=paper_aapm data=phantoms", "~data.split ~data.include"),
        ("experiment/small=learn model=fbp", "~model.n_iterations ~model.channels ~model.data_term"),
        ("model=tv geometry=htc2022", ""),
        ("experiment=demo ~logger", ""),
    ],
)
def test_an_option_keeps_its_own_values(overrides: str, more: str) -> None:
    """An experiment's sizes are those of its own network, scanner and optimizer; the setting stays."""
    words = overrides.split()
    if "experiment/small" in overrides:
        words = ["experiment=compare_small", *words]
    completed = fitted("train", words)
    added = sorted(completed[len(words) :])
    assert completed[: len(words)] == words
    assert len(added) == len(more.split())
    for found, word in zip(added, sorted(more.split()), strict=True):
        assert found.startswith(word)
    parse(compose_as_given("train", completed))


def test_the_setting_stays() -> None:
    config = compose("plan", ["experiment=demo", "model=learn", "geometry=ge_lightspeed"])
    assert (config.data.image_size, config.geometry.n_views, config.geometry.n_detectors) == (64, 16, 888)
    assert (config.model.n_iterations, config.trainer.max_steps) == (50, 700)


def test_keys_that_are_typed_still_fail() -> None:
    with pytest.raises(ConfigError, match=r"^model.channels works with model=\S+ or .* only"):
        parse(compose("train", ["experiment=demo", "model=tv", "model.channels=3"]))


def test_each_job_of_a_sweep_is_fitted() -> None:
    first = compose_sweep("train", ["experiment=demo", "model=fbp,qn_mixer"])
    assert "channels" not in first.model
