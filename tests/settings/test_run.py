"""The config of a run: types, bounds, rules between keys. Wrong keys on real command lines are in tests/promises."""

from pathlib import Path

import pytest
import yaml

from qnmixer.errors import ConfigError
from qnmixer.evaluation.evaluate_config import EvaluateConfig
from qnmixer.reconstruction.sections import AsTrained
from qnmixer.settings.compose import compose, with_one_limit
from qnmixer.settings.data import FolderData, PhantomData
from qnmixer.settings.override import override
from qnmixer.settings.run import effective_batch, parse, section

from ..conftest import config_of
from .conftest import refusal


def test_values_are_typed_and_the_plain_form_is_read_back() -> None:
    config = config_of(
        "seed=7", "trainer.precision=32", "trainer.gradient_clip_val=1", "trainer.max_time=00:00:01:00",
        "trainer.limit_train_batches=3",
    )  # fmt: skip
    assert type(config.data) is PhantomData
    assert (config.seed, config.data.seed, config.trainer.precision) == (7, 7, "32")
    assert type(config.optimizer.lr) is type(config.trainer.gradient_clip_val) is float
    assert config.optimizer.betas == [0.9, 0.999]
    assert (config.trainer.max_time, config.trainer.limit_train_batches) == ("00:00:01:00", 3)
    files = config_of(
        "data=dicom", "data.root=/ct", "data.split=explicit", 'data.val_patients=[P1,"2"]', "noise=physical"
    )
    assert (type(files.data), files.data.val_patients) == (FolderData, ["P1", "2"])
    for it in (config, files):
        plain = it.plain()
        assert parse(yaml.safe_load(yaml.safe_dump(plain))) == it  # numbers, texts, lists and dicts only
        assert parse(plain) == it


def test_a_profile_is_read_from_its_file_once_and_has_the_bins_of_the_scan(tmp_path: Path) -> None:
    (tmp_path / "profile.txt").write_text("0.5\n1\n0.5\n")
    given = "noise=physical", f"noise.profile={tmp_path}/profile.txt"
    config = config_of(*given, "geometry.n_detectors=3", "geometry.detector_pitch=100")
    assert config.noise.profile == [0.5, 1, 0.5]
    assert parse(config.plain()) == config
    assert "noise.profile has 3 bins, and the scan 512" in refusal(*given)
    assert "noise.profile=none.npy cannot be read" in refusal("noise=physical", "noise.profile=none.npy")


BOUNDS = {
    "data=phantoms": "image_size=4 image_size=65536 batch_size=0 num_workers=-1 prefetch_factor=0 hu_max=-1000 "
    "n_train=0 n_val=0 anatomy_share=1.1 simulation_factor=0 seed=4294967296 train_slices=0",
    "data=dicom": "val_fraction=0 test_fraction=1.0 simulation_factor=17",
    "data=two_detect": "mode=4 max_attenuation=0",
    "geometry=paper": "field_of_view=0 n_views=0 n_views=8193 n_detectors=99999999 detector_pitch=0 source_to_axis=0",
    "model=qn_mixer": "n_iterations=0 n_iterations=10000 channels=100000 patch_size=0 mlp_ratio=1e+30 latent_factor=0",
    "model=tv": "n_iterations=0 weight=1e-20 noise_weight=-1.0 gap=-0.1",
    "model=learned_primal_dual": "n_primal=1 n_dual=0",
    "model=regformer": "channels=20 window_size=1",
    "noise=physical": "photons=0 water_attenuation=0 electronic_sigma=-1 crosstalk=0.3",
    "noise=insert": "dose=0 dose=1.1",
    "noise=mixed": "physical_share=-1 field_photons=0",
    "loss=ssim_mix": "ssim_weight=1.1",
    "optimizer=adamw": "lr=0 lr=1e+39 weight_decay=-0.1 step_size_lr_factor=0",
    "optimizer=muon": "adamw_lr=0",
    "schedule=step": "warmup=1.1 at=0 factor=0",
    "evaluation=default": "n_pictures=0 tv_weight=1e-30 tv_noise_weight=-1",
    "trainer=default": "devices=0 num_nodes=0 accumulate_grad_batches=0 max_steps=-2 max_epochs=0 gradient_clip_val=-1",
    "strategy=pipeline": "microbatch_size=0 devices_per_pipeline=1",
    "debug=profile": "warm_up=0 steps=0",
}


@pytest.mark.parametrize(
    "option", [pytest.param(it, marks=[pytest.mark.extras] * (it == "data=two_detect")) for it in BOUNDS]
)
def test_bounds(option: str) -> None:
    group, name = option.split("=")
    root = {"root": "/ct"} if option in ("data=dicom", "data=two_detect") else {}
    for word in BOUNDS[option].split():
        key, value = word.split("=")
        with pytest.raises(ConfigError) as error:
            section(group, name, **root, **{key: yaml.safe_load(value)})
        assert str(error.value).startswith(f"{group}.{word} should be ")


EXTRAS = pytest.mark.extras
DICOM, INTERVAL = "data=dicom data.root=/ct", "trainer.val_check_interval"


@pytest.mark.parametrize(("overrides", "message"), [
    ("seed=null", "seed=null should be a valid integer"),  # not data.seed, which follows it
    ("seed=true", "seed=true should be a number"),
    ("model.regularizer=foo", "model.regularizer=foo should be callable"),
    ("optimizer.weight_decay=1e300", "optimizer.weight_decay=1e+300 should be a 32-bit float"),
    (f"optimizer.betas=[{','.join('1' * 400)}]", "optimizer.betas=[1, 1, 1, 1,"),
    (f"tags=[{'a' * 65}]", f"tags={'a' * 65}: string should have at most 64 characters"),
    ("+loss._args_=[1]", "unknown key loss._args_: qnmixer.losses.mse has no such key"),
    ("loss._target_=torch.optim.SGD", "loss._target_=torch.optim.SGD is not a function (image, truth) or a"),
    ("trainer.limit_train_batches=1.5", "trainer.limit_train_batches=1.5 should be less than or equal to 1"),
    ("trainer.devices=[1,1]", "trainer.devices=[1, 1] is no list of different devices: give for example [0,1]"),
    ("trainer.devices=[]", "trainer.devices=[] is no list of different devices"),
    ("trainer.val_check_interval=1.5", "trainer.val_check_interval=1.5 should be less than or equal to 1"),
    ("trainer.val_check_interval=3h", "trainer.val_check_interval=3h should be a valid number"),
    ("trainer.fast_dev_run=-1", "trainer.fast_dev_run=-1 should be a valid boolean"),
    ("trainer.profiler=xla", "trainer.profiler=xla should be 'simple', 'advanced' or 'pytorch'"),
    (f"logger.wandb.name={'n' * 129}", f"logger.wandb.name={'n' * 129}: string should "),
    (f"logger.wandb.group={'n' * 129}", f"logger.wandb.group={'n' * 129}: string should "),
    (f"logger.wandb.tags=[{'t' * 65}]", f"logger.wandb.tags={'t' * 65}: string should have at most 64 characters"),
    ("logger.wandb.id=a/b", "logger.wandb.id=a/b: string should match pattern "),
    ("logger.wandb.resume=bogus", "logger.wandb.resume=bogus should be 'allow', 'must', 'never' or 'auto'"),
    ("logger.wandb.log_model=every", "logger.wandb.log_model=every should be a valid boolean"),
    ("trainer.limit_train_batch=3", "unknown key trainer.limit_train_batch: did you mean trainer.limit_train_b"),
    ("+metrics.loss._target_=a.b", "metrics.loss: there is a column loss already"),
    ("+metrics.psnr.mode=mini", "metrics.psnr.mode=mini should be 'max' or 'min'"),
    # rules between keys
    ("model.codec=strided model.latent_factor=1", "model: latent_factor=1 does not fit"),
    ("model=fbpconvnet data.image_size=24", "data.image_size=24 is not divisible by 16, as model.depth=4 needs"),
    (f"{DICOM} data.val_fraction=0.6 data.test_fraction=0.6", "data.val_fraction + test_fraction leave"),
    (f"{DICOM} data.val_patients=[a]", "data.split=random uses no lists of patients"),
    ("trainer.limit_train_batches=3 trainer.accumulate_grad_batches=2", "trainer.limit_train_batches=3 is no"),
    (f"{INTERVAL}=3 trainer.accumulate_grad_batches=2", f"{INTERVAL}=3 is no multiple of trainer.accumulate_grad_b"),
    (f"{INTERVAL}=00:00:30:00 trainer.accumulate_grad_batches=2", f"{INTERVAL} as a time needs one device, and"),
    (f"{INTERVAL}=00:00:30:00 strategy=ddp trainer.devices=2", f"{INTERVAL} as a time needs one device, and"),
    ("trainer.overfit_batches=3 trainer.accumulate_grad_batches=2", "trainer.overfit_batches=3 is no multiple of"),
    ("trainer.profiler=simple debug=profile", "trainer.profiler=simple does not work with debug=profile: give one of"),
    ("trainer.max_epochs=-1 trainer.max_steps=-1",
     "training would never end: give trainer.max_steps=… or trainer.max_epochs=…"),
    ("model=tv strategy=ddp trainer.devices=2", "model=tv has no weights to train on several devices"),
    ("strategy=fsdp callbacks=ema", "callbacks=ema does not work with strategy=fsdp"),
    ("strategy=pipeline trainer.devices=4 callbacks=ema", "callbacks=ema does not work with strategy=pipeline"),
    ("model=fbpconvnet strategy=pipeline trainer.devices=4",
     "strategy=pipeline cuts iterations into stages, but model=fbpconvnet has 1"),
    pytest.param("data=lodopab data.root=/ct", "geometry.beam=fan_flat is not that of data=lodopab, parallel",
                 marks=EXTRAS),
    pytest.param("data=two_detect data.root=/ct geometry=two_detect data.augment=true",
                 "data.augment=True changes images", marks=EXTRAS),
])  # fmt: skip
def test_values_that_do_not_fit_are_one_line(overrides: str, message: str) -> None:
    assert refusal(*overrides.split(" ")).startswith(message)


@pytest.mark.parametrize("overrides", [
    ["strategy=ddp", "trainer.precision=16-mixed", "trainer.accumulate_grad_batches=4", "memory=recompute"],
    ["strategy=fsdp", "trainer.num_nodes=2", "memory=offload", "noise=field", "data.scaling=minmax"],
    ["strategy=pipeline", "strategy.schedule=sequential", "strategy.microbatch_size=4"],
    ["strategy=pipeline", "strategy.devices_per_pipeline=2", "trainer.num_nodes=2"],
])  # fmt: skip
def test_samples_of_a_step(overrides: list[str]) -> None:
    config = config_of("trainer.devices=4", *overrides)
    nodes, accumulate = config.trainer.num_nodes, config.trainer.accumulate_grad_batches
    assert effective_batch(config) == config.data.batch_size * 4 * nodes * accumulate
    pipelines = 4 * nodes // config.strategy.devices_per_replica(config)
    assert effective_batch(config) == config.strategy.batch_of_replica(config) * pipelines * accumulate


def test_files_of_other_versions() -> None:
    """A key that they lack has its default; a key that is not known here is refused."""
    now, older, later = config_of(), config_of().plain(), config_of().plain()
    del older["tags"], older["callbacks"], older["metrics"], older["module"], older["datamodule"]
    del older["geometry"]["beam"], older["geometry"]["detector_offset"], older["trainer"]["tf32"]
    read = parse(older)
    assert (read.tags, read.callbacks) == ([], {})
    for key in ("metrics", "module", "datamodule", "geometry", "trainer"):
        assert getattr(read, key) == getattr(now, key)
    later["model"]["momentum_terms"] = 3
    with pytest.raises(ConfigError, match=r"model\.momentum_terms"):
        parse(later)
    now.metrics["fbp/psnr"] = now.metrics["psnr"]  # Hydra's words cannot have it
    with pytest.raises(ConfigError, match=r"^metrics\.fbp/psnr: a name has letters, digits, _ and -"):
        parse(now.plain())


@pytest.mark.parametrize(("overrides", "length"), [
    (["experiment=demo", "trainer.max_epochs=10"], (-1, 10)),
    (["trainer.max_epochs=10", "trainer.max_steps=7"], (7, 10)),
    (["trainer.max_epochs=null"], (10000, None)),
])  # fmt: skip
def test_epochs_given_alone_are_the_only_limit(overrides: list[str], length: tuple[int, int | None]) -> None:
    trainer = config_of(*overrides).trainer
    assert (trainer.max_steps, trainer.max_epochs) == length
    once = with_one_limit(["--cfg", "job", *overrides])
    assert with_one_limit(once) == once


@pytest.mark.parametrize("words", [
    "logger=csv", "logger=[csv,tensorboard]", "logger=custom logger._target_=lightning.pytorch.loggers.CSVLogger",
    "callbacks=[ema,early_stopping]", "metrics=rmse_hu", "seed=7", "seed=7 data.seed=1", "trainer.max_epochs=3",
    "model.n_iterations=3 model=learn",
])  # fmt: skip
def test_a_program_gets_what_hydra_composes(words: str) -> None:
    assert override(config_of("experiment=demo"), words).plain() == config_of("experiment=demo", *words.split()).plain()


def test_an_option_that_does_not_exist_in_a_program() -> None:
    for option in ("nope", "as_trained"):
        with pytest.raises(ConfigError, match=f"^data={option} does not exist: choose deeplesion, dicom"):
            section("data", option)


def test_evaluate_as_trained_and_otherwise() -> None:
    as_trained = EvaluateConfig.parse(compose("evaluate", ["run=runs/x"]))
    assert as_trained.data == AsTrained(_target_=None, root=None, simulation_factor=None, disc=None)
    assert (as_trained.noise, as_trained.split, as_trained.trust) == (None, "test", [])
    other = EvaluateConfig.parse(
        compose("evaluate", ["run=x", "data=dicom", "data.root=/ct", "noise=field", "trust=own"])
    )
    assert isinstance(other.data, FolderData)
    assert (other.data.root, other.noise and other.noise.name, other.trust) == ("/ct", "field", ["own"])
