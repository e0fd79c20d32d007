import re
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config import Config, effective_batch, parse, to_plain
from qnmixer.engine.config.commands import parse_evaluate, parse_reconstruct
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.data import AsTrained, FolderData, PhantomData
from qnmixer.engine.config.named import WandbConfig
from qnmixer.engine.config.run import batch_of_replica, devices_per_replica
from qnmixer.errors import ConfigError


def train(*overrides: str) -> Config:
    """The config that Hydra composes from overrides, parsed."""
    return parse(compose("train", list(overrides)))


@cache
def composed(config_name: str, *choices: str) -> DictConfig:
    root = ["data.root=/ct"] if "data=dicom" in choices else []
    return compose(config_name, [*choices, *root])


def changed(*overrides: str, config_name: str = "train") -> DictConfig:
    """As Hydra would compose it, without composing again for every value (0.1 s each)."""
    groups = ("data", "noise", "loss", "optimizer", "schedule", "model", "strategy", "run")
    choices = [o for o in overrides if o.split("=")[0] in groups]
    values = OmegaConf.from_dotlist([override for override in overrides if override not in choices])
    config = composed(config_name, *choices).copy()
    OmegaConf.set_struct(config, False)
    result = OmegaConf.merge(config, values)
    assert isinstance(result, DictConfig)
    return result


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def refusal(*overrides: str) -> str:
    """What `parse` says of these values."""
    with pytest.raises(ConfigError) as error:
        parse(changed(*overrides))
    return one_line(error)


def refusal_by_hydra(*overrides: str) -> str:
    """What `parse` says of the config that Hydra composes from these overrides, whatever they add or remove."""
    with pytest.raises(ConfigError) as error:
        train(*overrides)
    return one_line(error)


def test_defaults_are_typed() -> None:
    config = train()
    assert type(config.data) is PhantomData
    assert type(config.optimizer.lr) is float
    (logger,) = config.logger.values()
    assert type(logger) is WandbConfig
    assert logger.mode == "offline"
    assert config.optimizer.betas == [0.9, 0.999]
    assert (config.model.n_iterations, config.model.channels, config.model.patch_size) == (14, 96, 4)
    assert (config.geometry.n_views, config.geometry.first_angle) == (32, None)
    assert (config.seed, config.data.seed) == (42, 42)
    assert train("seed=7").data.seed == 7


@pytest.mark.parametrize(
    ("override", "section", "schema"),
    [
        ("data=dicom", "data", FolderData),
        ("data=deeplesion", "data", FolderData),
        ("data=numpy", "data", FolderData),
    ],
)
def test_each_variant_has_its_own_type(override: str, section: str, schema: type) -> None:
    assert type(getattr(train(override, "data.root=/ct"), section)) is schema


def test_overrides_are_converted_to_the_type_of_the_field() -> None:
    config = train("trainer.precision=32", "trainer.gradient_clip_val=1", "geometry.field_of_view=300", "seed=3")
    assert config.trainer.precision == "32"
    assert type(config.trainer.gradient_clip_val) is float
    assert type(config.geometry.field_of_view) is float
    assert type(config.seed) is int


def test_plain_form_holds_plain_things_only_and_is_read_back() -> None:
    config = train(
        "data=dicom", "data.root=/ct", "data.split=explicit", "data.val_patients=[P1,P2]", "loss=ssim_mix",
        "noise=physical",
    )  # fmt: skip
    plain = to_plain(config)

    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert type(value) is dict
            for key, item in value.items():
                assert type(key) is str
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (int, float, str, bool)

    check(plain)
    assert parse(plain) == config


SMALLEST = {  # key: (allowed, one step outside), the rest of the config being as it is
    "seed": ("0", "-1"),
    "data.image_size": ("8", "4"),
    "data.batch_size": ("1", "0"),
    "data.num_workers": ("0", "-1"),
    "data.prefetch_factor": ("1", "0"),
    "data.hu_max": ("-999", "-1000"),
    "data.n_train": ("1", "0"),
    "data.n_val": ("1", "0"),
    "data.n_test": ("1", "0"),
    "data.anatomy_share": ("0", "-0.1"),
    "geometry.field_of_view": ("1", "0"),
    "geometry.n_views": ("1", "0"),
    "geometry.n_detectors": ("1", "0"),
    "geometry.detector_pitch": ("0.1", "0"),
    "geometry.source_to_axis": ("0.1", "0"),
    "model.n_iterations": ("1", "0"),
    "model.channels": ("4", "0"),
    "model.patch_size": ("1", "0"),
    "model.n_mixer_layers": ("1", "0"),
    "model.mlp_ratio": ("0.5", "0"),
    "model.latent_factor": ("4", "0"),
    "model.latent_channels": ("1", "0"),
    "optimizer.lr": ("1e-9", "0"),
    "optimizer.weight_decay": ("0", "-0.1"),
    "optimizer.step_size_lr_factor": ("0.1", "0"),
    "schedule.warmup": ("0", "-0.1"),
    "trainer.devices": ("1", "0"),
    "trainer.accumulate_grad_batches": ("1", "0"),
    "trainer.log_every_n_steps": ("1", "0"),
    "trainer.max_steps": ("1", "-2"),
    "evaluation.n_pictures": ("1", "0"),
}


@pytest.mark.parametrize("key", SMALLEST)
def test_lower_bounds(key: str) -> None:
    allowed, outside = SMALLEST[key]
    parse(changed(f"{key}={allowed}"))
    message = refusal(f"{key}={outside}")
    assert message.startswith((f"{key}={outside}", "data.seed=-1"))
    assert "too small: give" in message


@pytest.mark.parametrize(
    ("choice", "key", "allowed", "outside"),
    [
        ("noise=field", "noise.photons", "1", "0"),
        ("noise=field", "noise.sigma", "0", "-1"),
        ("noise=physical", "noise.photons", "1", "0"),
        ("noise=physical", "noise.water_attenuation", "0.01", "0"),
        ("noise=physical", "noise.electronic_sigma", "0", "-1"),
        ("noise=mixed", "noise.physical_share", "0", "-1"),
        ("noise=mixed", "noise.field_photons", "1", "0"),
        ("loss=ssim_mix", "loss.ssim_weight", "0", "-0.1"),
        ("optimizer=sgd", "optimizer.momentum", "0", "-0.1"),
        ("optimizer=muon", "optimizer.adamw_lr", "1e-9", "0"),
        ("schedule=step", "schedule.at", "0.1", "0"),
        ("schedule=step", "schedule.factor", "0.1", "0"),
        ("data=dicom", "data.val_fraction", "0.2", "0"),
        ("data=dicom", "data.test_fraction", "0.2", "0"),
        ("model=tv", "model.weight", "1e-9", "0"),
        ("model=tv", "model.noise_weight", "0", "-1e-9"),
        ("model=tv", "model.gap", "0", "-0.1"),
    ],
)
def test_lower_bounds_of_variants(choice: str, key: str, allowed: str, outside: str) -> None:
    parse(changed(choice, f"{key}={allowed}"))
    parsed = OmegaConf.from_dotlist([f"x={outside}"]).x
    assert re.match(rf"{key}={parsed}(\.0)? is too small|optimizer\.momentum", refusal(choice, f"{key}={outside}"))


@pytest.mark.parametrize(
    ("model", "key", "allowed", "outside"),
    [
        ("tv", "n_iterations", 1, 0),
        ("fbpconvnet", "channels", 4, 3),
        ("fbpconvnet", "depth", 1, 0),
        ("learn", "n_iterations", 1, 0),
        ("learn", "channels", 1, 0),
        ("learned_primal_dual", "n_primal", 2, 1),
        ("learned_primal_dual", "n_dual", 1, 0),
        ("regformer", "n_heads", 1, 0),
        ("regformer", "window_size", 2, 1),
    ],
)
def test_lower_bounds_of_networks(model: str, key: str, allowed: int, outside: int) -> None:
    parse(changed(f"model={model}", f"model.{key}={allowed}"))
    refused = refusal(f"model={model}", f"model.{key}={outside}")
    assert refused == f"model.{key}={outside} is too small: give {allowed} or more"


@pytest.mark.parametrize(
    ("key", "outside"),
    [
        ("data.anatomy_share", "1.1"),
        ("loss.ssim_weight", "1.1"),
        ("schedule.warmup", "1.1"),
        ("schedule.at", "1.1"),
        ("data.val_fraction", "1.0"),
        ("seed", "4294967296"),
        ("geometry.n_views", "8193"),
        ("geometry.n_detectors", "99999999999999999999"),
        ("data.image_size", "65536"),
        ("data.n_val", "99999999999999999999"),
        ("data.batch_size", "99999999999999999999"),
        ("model.n_iterations", "99999999999999999999"),
        ("model.channels", "100000"),
        ("model.mlp_ratio", "1e+30"),
    ],
)
def test_upper_bounds(key: str, outside: str) -> None:
    variant = {
        "loss.ssim_weight": ["loss=ssim_mix"],
        "schedule.at": ["schedule=step"],
        "data.val_fraction": ["data=dicom"],
    }
    message = refusal(*variant.get(key, []), f"{key}={outside}")
    assert f"{key}={outside}" in message
    assert "too large: give" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val"),
        ("trainer.val_every_n_steps=0", "trainer.val_every_n_steps"),
        ("trainer.limit_val_batches=0", "trainer.limit_val_batches"),
        ("trainer.max_epochs=0", "trainer.max_epochs"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("optimizer.betas=[2.0,3.0]", "optimizer.betas"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas"),
    ],
)
def test_what_would_break_only_in_the_middle_of_a_run(override: str, words: str) -> None:
    assert words in refusal(override)


def test_tags_that_wandb_takes() -> None:
    assert train(f"tags=[{'a' * 64},b]").tags == ["a" * 64, "b"]
    assert (
        refusal(f"tags=[{'a' * 65}]") == f"the tag '{'a' * 20}' has 65 characters: give tags=[…] of 1 to 64 characters"
    )
    assert refusal("tags=['']") == "the tag '' has 0 characters: give tags=[…] of 1 to 64 characters"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("key", ["optimizer.lr", "geometry.axis_to_detector", "data.hu_max", "geometry.angle_span"])
def test_not_finite(key: str, value: str) -> None:
    assert refusal(f"{key}={value}") == f"{key}={value} is not a finite number: give one"


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("monitor=val/pnsr", "did you mean val/psnr?"),
        ("model.codec=orthonormall", "did you mean orthonormal?"),
        ("model.data_term=fpb", "did you mean fbp?"),
        ("model.hessian=bfg", "did you mean bfgs?"),
        ("model.hessian_gradient=none", "choose full, detach"),
        ("geometry.fbp_filter=shepp", "did you mean shepp-logan?"),
        ("data.scaling=min-max", "did you mean minmax?"),
        ("trainer.precision=16", "16-mixed"),
        ("trainer.precision=64", "choose 32, 16-mixed, bf16-mixed"),
        ("trainer.accelerator=cpuu", "did you mean cpu?"),
        ("logger.wandb.mode=ofline", "did you mean offline?"),
    ],
)
def test_choices_say_the_nearest(override: str, near: str) -> None:
    message = refusal(override)
    assert "is not known" in message
    assert near in message


@pytest.mark.parametrize(
    "override",
    [
        "data.image_size=abc",
        "data.image_size=32.5",
        "data.augment=perhaps",
        "model.n_iterations=2.5",
        "optimizer.lr=fast",
        "trainer.max_steps=null",
        "geometry.angle_span=null",
        "optimizer.betas=0.9",
        "evaluation.window=5",
        "evaluation.window=[a,b]",
        "model.shared_regularizer=[true]",
    ],
)
def test_wrong_types_name_the_key(override: str) -> None:
    assert refusal(override).startswith(override.split("=")[0])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.image_size=30"], ["data.image_size=30", "model.patch_size=4", "data.image_size=28"]),
        (["model.patch_size=5"], ["not divisible by model.patch_size=5"]),
        (["model.latent_factor=3", "model.latent_channels=9"], ["not divisible by model.latent_factor=3"]),
        (["data.image_size=8", "model.patch_size=16"], ["choose data.image_size=16"]),
        (["model.channels=10"], ["model.channels=10", "multiple of 4"]),
        (["model.codec=strided", "model.latent_factor=1"], ["model.latent_factor=1", "choose 2, 4, 8 or 16"]),
        (["data=dicom", "data.val_fraction=0.6", "data.test_fraction=0.6"], ["their sum must be below 1"]),
        (["data=dicom", "data.val_patients=[a]"], ["only with data.split=explicit, not data.split=random"]),
        (["model.latent_channels=17"], ["model.latent_channels=17", "16", "model.latent_factor"]),
        (
            ["model=fbpconvnet", "data.image_size=24"],
            ["not divisible by 16, as model.depth=4 needs", "data.image_size=16"],
        ),
        (["model=regformer", "data.image_size=30"], ["not divisible by model.window_size=8", "data.image_size=24"]),
        (["model=regformer", "model.channels=64"], ["model.channels=64", "multiple of 6", "model.channels=66"]),
        (["model=tv", "strategy=ddp", "trainer.devices=2"], ["model=tv has no weights", "strategy=single"]),
        (["model=fbpconvnet", "strategy=pipeline", "trainer.devices=2"], ["model=fbpconvnet has 1", "ddp or fsdp"]),
        (["model=learn", "strategy=pipeline", "trainer.devices=51"], ["51 stages", "model.n_iterations=50"]),
        (["trainer.devices=2"], ["trainer.devices=2", "strategy=ddp, fsdp or pipeline"]),
        (["finetune=a", "resume=b"], ["finetune", "resume"]),
        (["trainer.max_steps=-1"], ["never end", "trainer.max_steps", "trainer.max_epochs"]),
        (["evaluation.window=[1]"], ["evaluation.window", "[low, high]"]),
        (["evaluation.window=[5,5]"], ["evaluation.window", "[low, high]"]),
        (["evaluation.window=[240,-160]"], ["evaluation.window", "[low, high]"]),
        (["evaluation.window=[nan,1]"], ["evaluation.window", "is not a finite number"]),
        (["evaluation.window=[0,inf]"], ["evaluation.window", "is not a finite number"]),
        (["tags=paper"], ["tags=paper is not a list: write tags=[paper]"]),
        (["evaluation.window=40"], ["evaluation.window=40 is not a list"]),
        (["noise=physical", "data.scaling=minmax"], ["noise=physical", "data.scaling=attenuation", "noise=field"]),
    ],
)
def test_rules_between_keys(overrides: list[str], words: list[str]) -> None:
    message = refusal(*overrides)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.image_size=28"],
        ["model.patch_size=8"],
        ["model.codec=strided", "model.latent_channels=17"],
        ["trainer.max_steps=-1", "trainer.max_epochs=1"],
        ["noise=field", "data.scaling=minmax"],
        ["evaluation.window=[-1,0]"],
    ],
)
def test_what_the_rules_allow(overrides: list[str]) -> None:
    parse(changed(*overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+model.n_iteration=3", "unknown key model.n_iteration: did you mean model.n_iterations?"),
        ("+trainer.max_step=3", "unknown key trainer.max_step: did you mean trainer.max_steps?"),
        ("+sed=3", "unknown key sed: did you mean seed?"),
        ("+monitr=val/psnr", "unknown key monitr: did you mean monitor?"),
        ("+data.foo=1", "data.foo: qnmixer.engine.data.phantoms.PhantomSource has no such argument, only n_train,"),
        ("++foo.bar=1", "unknown key foo: "),
        ("+data.root=/ct", "data.root works with data=deeplesion or dicom or lodopab or numpy or two_detect only"),
        ("+noise.photons=1", "noise.photons works with noise=field or mixed or physical or physical_lodopab only"),
        ("+loss.ssim_weight=0.3", "loss.ssim_weight works with loss=ssim_mix only"),
        ("+optimizer.momentum=0.9", "optimizer.momentum works with optimizer=muon or sgd only"),
        ("+schedule.at=0.5", "schedule.at works with schedule=step only"),
        ("~model", "the config has no model: choose one with model=…"),
        ("data=dicom", "data.root has no value: give one with data.root=…"),
        (
            "data=as_trained",
            "data has no _target_ (as_trained is for evaluate only): choose an option, as in data=",
        ),
        ("+data.name=dicom", "data.name is no key: choose an option by its name, as in data=deeplesion"),
        ("+optimizer.name=sgd", "optimizer.name is no key: choose an option by its name, as in optimizer=adafactor"),
        ("+loss._args_=[1]", "loss._args_ is not known: give _target_ and arguments of the target"),
        ("loss._target_=torch.optim.SGD", "loss._target_=torch.optim.SGD is not a function (image, truth), nor a"),
    ],
)
def test_keys_that_are_not_there(override: str, message: str) -> None:
    assert refusal_by_hydra(override).startswith(message)


def test_a_checkpoint_of_a_later_version_is_refused_by_its_key() -> None:
    plain = to_plain(train())
    plain["model"]["momentum_terms"] = 3
    with pytest.raises(ConfigError, match=r"model\.momentum_terms: qnmixer\.models\.QNMixer has no such argument"):
        parse(plain)


def test_evaluate_as_trained_and_otherwise() -> None:
    as_trained = parse_evaluate(compose("evaluate", ["run=runs/x"]))
    assert as_trained.data == AsTrained(_target_=None, root=None, simulation_factor=None, disc=None)
    assert (as_trained.noise, as_trained.split) == (None, "test")
    other = parse_evaluate(compose("evaluate", ["run=runs/x", "data=dicom", "data.root=/ct", "noise=field"]))
    assert isinstance(other.data, FolderData)
    assert other.data.root == "/ct"
    assert other.noise is not None
    assert other.noise.name == "field"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "run has no value"),
        (["run=x", "split=tset"], "did you mean test"),
        (["run=x", "checkpoint=first"], "choose best, last"),
        (["run=x", "data=dicom"], "data.root has no value"),
        (["run=x", "evaluation.window=[3,1]"], "evaluation.window"),
        (["run=x", "accelerator=tpu"], "accelerator=tpu is not known"),
        (["run=x", "noise=field", "noise.photons=0"], "noise.photons=0"),
        (["run=x", "+runn=3"], "unknown key runn: did you mean run?"),
    ],
)
def test_evaluate_refuses(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_evaluate(compose("evaluate", overrides))
    assert words in str(error.value)


def test_reconstruct() -> None:
    config = parse_reconstruct(compose("reconstruct", ["run=x", "input=a", "output=b", "formats=[png]"]))
    assert asdict(config) == {
        "run": "x", "input": "a", "output": "b", "kind": "auto", "formats": ["png"], "window": None,
        "unit": "attenuation", "water_attenuation": 0.0192, "detector_pitch": None, "angle_span": None,
        "checkpoint": "best", "accelerator": "auto", "batch_size": None, "precision": "32", "trust": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run=x", "input=a"], "output has no value"),
        (["run=x", "output=a"], "input has no value"),
        (["input=x", "output=a"], "run has no value"),
        (["formats=[dcom]"], "did you mean dicom?"),
        (["formats=[npz]"], "did you mean npy?"),
        (["formats=[]"], "formats"),
        (["window=[240,-160]"], "window"),
        (["kind=sinogram"], "did you mean sinograms?"),
        (["unit=counts"], "choose attenuation, value"),
        (["water_attenuation=0"], "water_attenuation=0"),
        (["batch_size=0"], "batch_size=0"),
        (["precision=16"], "precision=16"),
        (["+inputt=3"], "did you mean input?"),
    ],
)
def test_reconstruct_refuses(overrides: list[str], words: str) -> None:
    given = [] if "no value" in words else ["run=x", "input=a", "output=b"]
    with pytest.raises(ConfigError) as error:
        parse_reconstruct(compose("reconstruct", [*given, *overrides]))
    assert words in str(error.value)


def test_a_wrong_value_is_named_by_the_key_that_was_given() -> None:
    """Not by a key that follows it."""
    assert refusal_by_hydra("seed=null").startswith("seed=null is not a whole number")


PIPELINE = ["strategy=pipeline", "trainer.devices=4"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.num_nodes=2"], ["trainer.num_nodes=2", "strategy=ddp, fsdp or pipeline"]),
        (["strategy=ddp", "strategy.static_graph=true", "trainer.accumulate_grad_batches=2"], ["static_graph"]),
        (["strategy=fsdp", "callbacks=ema"], ["callbacks=ema", "strategy=fsdp", "strategy=ddp"]),
        ([*PIPELINE, "callbacks=ema"], ["callbacks=ema", "strategy=pipeline", "strategy=ddp"]),
        (["strategy=fsdp", "optimizer=adafactor"], ["optimizer=adafactor", "optimizer=adamw", "strategy=ddp"]),
        (["strategy=pipeline", "trainer.devices=1"], ["strategy=pipeline", "trainer.devices", "strategy=single"]),
        (["strategy=pipeline", "trainer.devices=15"], ["15 stages", "model.n_iterations=14"]),
        ([*PIPELINE, "strategy.devices_per_pipeline=3"], ["devices_per_pipeline=3", "trainer.devices=4"]),
        ([*PIPELINE, "strategy.microbatch_size=3"], ["data.batch_size=1 × 4", "microbatch_size=3"]),
        ([*PIPELINE, "strategy.microbatch_size=2"], ["1f1b", "4, and has 2", "data.batch_size=2"]),
        ([*PIPELINE, "strategy.cut=[4,4,4,4]"], ["strategy.cut=[4, 4, 4, 4]", "model.n_iterations=14"]),
        ([*PIPELINE, "strategy.cut=[7,7]"], ["strategy.cut=[7, 7]", "2 stages"]),
        ([*PIPELINE, "strategy.schedule=interleaved"], ["interleaved", "stages_per_device=1"]),
        ([*PIPELINE, "strategy.stages_per_device=2"], ["1f1b", "stages_per_device=2"]),
        ([*PIPELINE, "strategy.schedule=interleaved", "strategy.stages_per_device=4"], ["16 stages"]),
    ],
)
def test_strategies_that_cannot_work(overrides: list[str], words: list[str]) -> None:
    message = refusal_by_hydra(*overrides)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=ddp", "trainer.precision=16-mixed", "trainer.accumulate_grad_batches=4", "memory=recompute"],
        ["strategy=fsdp", "trainer.num_nodes=2", "memory=offload"],
        ["strategy=pipeline", "strategy.schedule=sequential", "strategy.microbatch_size=4"],
        ["strategy=pipeline", "strategy.schedule=interleaved", "strategy.stages_per_device=3", "data.batch_size=2"],
        ["strategy=pipeline", "strategy.devices_per_pipeline=2", "strategy.cut=[6,8]", "trainer.num_nodes=2"],
    ],
)
def test_what_composes(overrides: list[str]) -> None:
    config = parse(compose("train", ["trainer.devices=4", *overrides]))
    nodes, accumulate = config.trainer.num_nodes, config.trainer.accumulate_grad_batches
    assert effective_batch(config) == config.data.batch_size * 4 * nodes * accumulate
    pipelines = 4 * nodes // devices_per_replica(config)
    assert effective_batch(config) == batch_of_replica(config) * pipelines * accumulate
