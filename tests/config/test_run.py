"""The config of a run: types, bounds, rules between keys. Wrong keys on real command lines are in tests/promises."""

import inspect
from dataclasses import asdict, fields
from functools import cache
from typing import Any

import lightning as L
import pytest
from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config import Config, effective_batch, parse, to_plain
from qnmixer.engine.config.commands import parse_evaluate, parse_reconstruct
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.data import AsTrained, FolderData, PhantomData
from qnmixer.engine.config.keys import answers, check_trainer, flat_keys, habit, unknown_key
from qnmixer.engine.config.overrides import with_length
from qnmixer.engine.config.run import batch_of_replica, devices_per_replica, section
from qnmixer.engine.config.search_path import CONF
from qnmixer.engine.config.sections import PASSED_ON, TrainerConfig
from qnmixer.errors import ConfigError

REFUSED = answers()["trainer"]


def train(*overrides: str) -> Config:
    """The config that Hydra composes from overrides, parsed."""
    return parse(compose("train", list(overrides)))


@cache
def composed(*choices: str) -> DictConfig:
    root = ["data.root=/ct"] if "data=dicom" in choices else []
    return compose("train", [*choices, *root])


def changed(*overrides: str) -> DictConfig:
    """As Hydra would compose it, without composing again for every value (0.1 s each)."""
    choices = [it for it in overrides if (CONF / it.partition("=")[0]).is_dir()]
    config = composed(*choices).copy()
    OmegaConf.set_struct(config, False)
    result = OmegaConf.merge(config, OmegaConf.from_dotlist([it for it in overrides if it not in choices]))
    assert isinstance(result, DictConfig)
    return result


def refusal(*overrides: str) -> str:
    """What `parse` says of these values."""
    with pytest.raises(ConfigError) as error:
        parse(changed(*overrides))
    (line,) = str(error.value).splitlines()
    return line


def test_defaults_are_typed() -> None:
    config = train("seed=7", "trainer.precision=32", "trainer.gradient_clip_val=1", "geometry.field_of_view=300")
    assert type(config.data) is PhantomData
    assert (config.seed, config.data.seed, config.trainer.precision) == (7, 7, "32")
    assert type(config.optimizer.lr) is type(config.trainer.gradient_clip_val) is type(config.geometry.field_of_view)
    assert config.optimizer.betas == [0.9, 0.999]
    assert (config.model.n_iterations, config.model.channels, config.model.patch_size) == (14, 96, 4)
    assert (config.geometry.n_views, config.geometry.first_angle) == (32, None)
    for reader in ("dicom", "deeplesion", "numpy"):
        assert type(section("data", reader, root="/ct")) is FolderData


def test_plain_form_holds_plain_things_only_and_is_read_back() -> None:
    config = train(
        "data=dicom", "data.root=/ct", "data.split=explicit", "data.val_patients=[P1,P2]", "loss=ssim_mix",
        "noise=physical", "+trainer.max_time=00:00:01:00", "+trainer.profiler=simple", "+trainer.limit_train_batches=3",
    )  # fmt: skip
    assert config.trainer.extra == {"max_time": "00:00:01:00", "profiler": "simple", "limit_train_batches": 3}
    plain = to_plain(config)

    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert {type(key) for key in value} <= {str}
            value = [*value.values()]
        if isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (int, float, str, bool)

    check(plain)
    assert parse(plain) == config


BOUNDS = {  # group=option: key: the least value that is allowed, one below it, and one above the largest
    "data=phantoms": {
        "image_size": (8, 4, 65536), "batch_size": (1, 0, 10**19), "num_workers": (0, -1, 10**6),
        "prefetch_factor": (1, 0, 10**6), "hu_max": (-999, -1000), "n_train": (1, 0, 10**19),
        "n_val": (1, 0, 10**19), "n_test": (1, 0, 10**19), "anatomy_share": (0, -0.1, 1.1),
        "simulation_factor": (1, 0, 3), "seed": (0, -1, 2**32), "train_slices": (1, 0, 10**10),
    },
    "data=dicom": {"val_fraction": (0.2, 0, 1.0), "test_fraction": (0.2, 0, 1.0), "simulation_factor": (1, 0, 17)},
    "data=two_detect": {"mode": (1, 0, 4), "max_attenuation": (0.01, 0)},
    "geometry=paper": {
        "field_of_view": (1, 0), "n_views": (1, 0, 8193), "n_detectors": (1, 0, 10**19), "detector_pitch": (0.1, 0),
        "source_to_axis": (0.1, 0),
    },
    "model=qn_mixer": {
        "n_iterations": (1, 0, 10**19), "channels": (4, 0, 10**5), "patch_size": (1, 0), "n_mixer_layers": (1, 0),
        "mlp_ratio": (0.5, 0, 1e30), "latent_factor": (4, 0), "latent_channels": (1, 0),
    },
    "model=tv": {"n_iterations": (1, 0), "weight": (1e-9, 1e-20), "noise_weight": (0, -1e-9, 1e30), "gap": (0, -0.1)},
    "model=fbpconvnet": {"channels": (4, 3), "depth": (1, 0)},
    "model=itnet": {"channels": (4, 3), "depth": (1, 0), "n_memory": (1, 0)},
    "model=learn_pp": {"n_iterations": (1, 0), "channels": (1, 0)},
    "model=learn": {"n_iterations": (1, 0), "channels": (1, 0)},
    "model=learned_primal_dual": {"n_primal": (2, 1), "n_dual": (1, 0)},
    "model=regformer": {"n_heads": (1, 0), "window_size": (2, 1)},
    "noise=field": {"photons": (1, 0), "sigma": (0, -1)},
    "noise=physical": {"photons": (1, 0), "water_attenuation": (0.01, 0), "electronic_sigma": (0, -1)},
    "noise=mixed": {"physical_share": (0, -1), "field_photons": (1, 0)},
    "loss=ssim_mix": {"ssim_weight": (0, -0.1, 1.1)},
    "optimizer=adamw": {"lr": (1e-9, 0, 1e39), "weight_decay": (0, -0.1), "step_size_lr_factor": (0.1, 0, 1e30)},
    "optimizer=muon": {"adamw_lr": (1e-9, 0)},
    "schedule=step": {"warmup": (0, -0.1, 1.1), "at": (0.1, 0, 1.1), "factor": (0.1, 0)},
    "trainer=default": {
        "devices": (1, 0), "num_nodes": (1, 0), "accumulate_grad_batches": (1, 0), "log_every_n_steps": (1, 0),
        "max_steps": (-1, -2), "max_epochs": (1, 0), "gradient_clip_val": (0.1, 0), "val_every_n_steps": (1, 0),
        "save_every_n_steps": (1, 0), "limit_val_batches": (1, 0),
    },
    "evaluation=default": {"n_pictures": (1, 0), "tv_weight": (1e-9, 1e-30, 1e30), "tv_noise_weight": (0, -1, 1e30)},
    "strategy=pipeline": {"microbatch_size": (1, 0), "devices_per_pipeline": (2, 1), "stages_per_device": (1, 0)},
    "debug=few_batches": {"batches": (1, 0)},
    "debug=profile": {"warm_up": (1, 0), "steps": (1, 0)},
}  # fmt: skip


@pytest.mark.parametrize("option", BOUNDS)
def test_bounds(option: str) -> None:
    group, name = option.split("=")
    root = {"root": "/ct"} if option in ("data=dicom", "data=two_detect") else {}
    for key, (least, below, *above) in BOUNDS[option].items():
        section(group, name, **root, **{key: least})
        for value, says in ((below, "too small"), *((value, "too large") for value in above)):
            with pytest.raises(ConfigError) as error:
                section(group, name, **root, **{key: value})
            assert str(error.value).startswith(f"{group}.{key}={value}")
            assert f" is {says}: give " in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=-1", "seed=-1 is too small"),
        ("seed=null", "seed=null is not a whole number"),  # not data.seed, which follows it
        ("seed=true", "seed=true is not a number: give one"),
        ("model.n_iterations=true", "model.n_iterations=true is not a number: give one"),
        ("optimizer.lr=nan", "optimizer.lr=nan is not a finite number: give one"),
        ("geometry.axis_to_detector=inf", "geometry.axis_to_detector=inf is not a finite number: give one"),
        ("geometry.angle_span=null", "geometry.angle_span=null is not a number"),
        ("data.image_size=32.5", "data.image_size=32.5 is not a whole number"),
        ("data.augment=perhaps", "data.augment=perhaps is neither true nor false"),
        ("data.scaling=min-max", "data.scaling=min-max is not known: did you mean minmax?"),
        ("model.hessian=bfg", "model.hessian=bfg is not known: did you mean bfgs?"),
        ("model.hessian_gradient=none", "model.hessian_gradient=none is not known: choose full, detach"),
        ("model.shared_regularizer=[true]", "model.shared_regularizer="),
        ("optimizer.betas=0.9", "optimizer.betas=0.9 is not a list: write optimizer.betas=[0.9]"),
        ("optimizer.betas=[2.0,3.0]", "optimizer.betas"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas"),
        ("geometry.fbp_filter=shepp", "geometry.fbp_filter=shepp is not known: did you mean shepp-logan?"),
        ("trainer.precision=64", "trainer.precision=64 is not known: choose 32, 16-mixed, bf16-mixed"),
        ("trainer.max_steps=null", "trainer.max_steps=null is not a whole number"),
        ("logger.wandb.mode=ofline", "logger.wandb.mode=ofline is not known: did you mean offline?"),
        ("evaluation.window=5", "evaluation.window=5 is not a list"),
        ("evaluation.window=[1]", "evaluation.window=[1.0] is not [low, high]"),
        ("evaluation.window=[5,5]", "evaluation.window=[5.0, 5.0] is not [low, high]"),
        ("evaluation.window=[nan,1]", "evaluation.window="),
        ("optimizer.weight_decay=1e300", "optimizer.weight_decay=1e+300 is too large for 32-bit floats"),
        ("optimizer.betas=[0.9,1e-300]", "optimizer.betas=[0.9, 1e-300] is too small for 32-bit floats: give 0, or"),
        ("evaluation.window=[true,31]", "evaluation.window=[True, 31] is not a number"),
        (f"optimizer.betas=[{','.join(['1'] * 2500)}]", "optimizer.betas=[1, 1, 1, 1,"),
        ("geometry.name=[1]", "geometry.name=[1] is not known"),
        ("trainer.extra=a", "trainer.extra is no key: write +trainer.KEY=…"),
        ("tags=paper", "tags=paper is not a list: write tags=[paper]"),
        (f"tags=[{'a' * 65}]", f"the tag '{'a' * 20}' has 65 characters: give tags=[…] of 1 to 64 characters"),
        ("tags=['']", "the tag '' has 0 characters"),
        ("monitor=val/pnsr", "monitor=val/pnsr is not known: did you mean val/psnr?"),
        ("data.foo=1", "data.foo: qnmixer.engine.data.phantoms.PhantomSource has no such argument"),
        ("module.foo=1", "unknown key module.foo"),
        ("optimizer.name=sgd", "optimizer.name is no key: choose an option by its name, as in optimizer=adafactor"),
        ("loss._args_=[1]", "loss._args_ is not known: give _target_ and arguments of the target"),
        ("loss._target_=torch.optim.SGD", "loss._target_=torch.optim.SGD is not a function (image, truth), nor a"),
        ("trainer.max_time=an_hour", "trainer.max_time=an_hour is not DAYS:HOURS:MINUTES:SECONDS"),
        ("trainer.profiler=simpel", "trainer.profiler=simpel is not known: did you mean simple?"),
        ("trainer.limit_train_batches=0", "trainer.limit_train_batches=0 is too small"),
        ("trainer.limit_train_batches=1.5", "trainer.limit_train_batches=1.5 is too large for a share"),
        ("trainer.limit_train_batches=few", "trainer.limit_train_batches=few is not a number"),
        ("trainer.extra={foo: 1}", "trainer.extra.foo is not known"),
        ("trainer.limit_train_batch=3", "unknown key trainer.limit_train_batch: did you mean trainer.limit_train_b"),
    ],
)
def test_a_value_that_does_not_fit_is_one_line(override: str, message: str) -> None:
    assert refusal(override).startswith(message)
    assert len(refusal(override)) < 500


PIPELINE = ["strategy=pipeline", "trainer.devices=4"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.image_size=30"], ["data.image_size=30", "model.patch_size=4", "data.image_size=28"]),
        (["data.image_size=8", "model.patch_size=16"], ["choose data.image_size=16"]),
        (["model.codec=strided", "model.latent_factor=1"], ["model.latent_factor=1", "choose 2, 4, 8 or 16"]),
        (["model.latent_channels=17"], ["model.latent_channels=17", "16", "model.latent_factor"]),
        (["data=dicom", "data.val_fraction=0.6", "data.test_fraction=0.6"], ["their sum must be below 1"]),
        (["data=dicom", "data.val_patients=[a]"], ["only with data.split=explicit, not data.split=random"]),
        (["model=fbpconvnet", "data.image_size=24"], ["by 16, as model.depth=4 needs", "data.image_size=16"]),
        (["model=itnet", "data.image_size=24"], ["by 16, as model.depth=4 needs", "data.image_size=16"]),
        (["model=regformer", "data.image_size=30"], ["not divisible by model.window_size=8", "data.image_size=24"]),
        (["model=regformer", "model.channels=64"], ["model.channels=64", "multiple of 6", "model.channels=66"]),
        (["model=tv", "strategy=ddp", "trainer.devices=2"], ["model=tv has no weights", "strategy=single"]),
        (["model=fbpconvnet", "strategy=pipeline", "trainer.devices=2"], ["model=fbpconvnet has 1", "ddp or fsdp"]),
        (["model=learn", "strategy=pipeline", "trainer.devices=51"], ["51 stages", "model.n_iterations=50"]),
        (["finetune=a", "resume=b"], ["finetune", "resume"]),
        (["trainer.max_steps=-1"], ["never end", "trainer.max_steps", "trainer.max_epochs"]),
        (
            ["trainer.limit_train_batches=3", "trainer.accumulate_grad_batches=2"],
            ["no multiple of trainer.accum"],
        ),
        (["noise=physical", "data.scaling=minmax"], ["noise=physical", "data.scaling=attenuation", "noise=field"]),
        (["strategy=fsdp", "callbacks=ema"], ["callbacks=ema", "strategy=fsdp", "strategy=ddp"]),
        ([*PIPELINE, "callbacks=ema"], ["callbacks=ema", "strategy=pipeline", "strategy=ddp"]),
        ([*PIPELINE, "strategy.stages_per_device=2"], ["1f1b", "stages_per_device=2"]),
        ([*PIPELINE, "strategy.schedule=interleaved", "strategy.stages_per_device=4"], ["16 stages"]),
        (
            ["data=lodopab", "data.root=/ct"],
            ["geometry.beam=fan_flat is not that of data=lodopab", "parallel"],
        ),
        (["data=lodopab", "data.root=/ct", "geometry=lodopab", "data.hu_max=2000"], ["data.hu_max=2000", "3071"]),
        (["data=two_detect", "data.root=/ct", "geometry=two_detect", "data.augment=true"], ["changes images"]),
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
        [f"tags=[{'a' * 64},b]"],
    ],
)
def test_what_the_rules_allow(overrides: list[str]) -> None:
    parse(changed(*overrides))


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
def test_samples_of_a_step(overrides: list[str]) -> None:
    config = parse(changed("trainer.devices=4", *overrides))
    nodes, accumulate = config.trainer.num_nodes, config.trainer.accumulate_grad_batches
    assert effective_batch(config) == config.data.batch_size * 4 * nodes * accumulate
    pipelines = 4 * nodes // devices_per_replica(config)
    assert effective_batch(config) == batch_of_replica(config) * pipelines * accumulate


def test_a_checkpoint_of_a_later_version_is_refused_by_its_key() -> None:
    plain = to_plain(train())
    plain["model"]["momentum_terms"] = 3
    with pytest.raises(ConfigError, match=r"model\.momentum_terms: qnmixer\.models\.QNMixer has no such argument"):
        parse(plain)


def test_files_from_before_a_key_was_there_are_read() -> None:
    now = train()
    older = to_plain(now)
    del older["tags"], older["callbacks"], older["metrics"], older["module"], older["datamodule"]
    del older["geometry"]["beam"], older["geometry"]["detector_offset"], older["trainer"]["tf32"]
    read = parse(older)
    assert (read.tags, read.callbacks) == ([], {})
    for key in ("metrics", "module", "datamodule", "geometry", "trainer"):
        assert getattr(read, key) == getattr(now, key)


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        (["experiment=demo", "trainer.max_epochs=10"], (-1, 10)),
        (["trainer.max_epochs=10", "debug=few_batches"], (-1, 10)),
        (["trainer.max_epochs=10", "trainer.max_steps=7"], (7, 10)),
        (["trainer.max_epochs=null"], (10000, None)),
    ],
)
def test_epochs_given_alone_are_the_only_limit(overrides: list[str], length: tuple[int, int | None]) -> None:
    trainer = train(*overrides).trainer
    assert (trainer.max_steps, trainer.max_epochs) == length
    once = with_length(["-m", *overrides])
    assert with_length(once) == once


def test_every_argument_of_the_trainer_is_taken_or_answered() -> None:
    theirs = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    ours = {field.name for field in fields(TrainerConfig)} - {"extra"}
    assert theirs <= ours | PASSED_ON | REFUSED.keys()
    assert PASSED_ON | REFUSED.keys() <= theirs
    assert len(ours | PASSED_ON | REFUSED.keys()) == len(ours) + len(PASSED_ON) + len(REFUSED)
    for name in REFUSED:
        with pytest.raises(ConfigError, match=rf"^trainer\.{name} cannot be set: .*(use |leave it out)"):
            check_trainer(["max_steps", name])


def test_habits_are_answered_and_are_no_keys_here() -> None:
    habits, values = answers()["habits"], train()
    taken = {*flat_keys(to_plain(values))} - {"logger.wandb.notes"}  # with a + only
    assert not {*habits, *answers()["prefixes"]} & taken
    for option in habits:
        group, _, name = option.partition("=")
        assert not (CONF / group / f"{name}.yaml").exists()
    assert habit(["seed=1", "+ckpt_path=a.ckpt"]) == f"ckpt_path is not known here: {habits['ckpt_path']}"
    assert habit(["trainer=ddp", "seed=1"]) == f"trainer=ddp is not known here: {habits['trainer=ddp']}"
    for key, way in {
        "hparams_search": "use -m hydra/sweeper=search",
        "paths.output_dir": "use hydra.run.dir=",
        "callbacks.model_checkpoint.save_top_k": "monitor=… chooses which one is best",
        "logger.wandb.notes": "write +logger.wandb.notes=…",
    }.items():
        assert str(unknown_key(key)).startswith(f"{key} is not known here: ")
        assert way in str(unknown_key(key))
    assert habit(["trainer=slurm", "optimizer.lr=1", "-m"]) is None


def test_evaluate_as_trained_and_otherwise() -> None:
    as_trained = parse_evaluate(compose("evaluate", ["run=runs/x"]))
    assert as_trained.data == AsTrained(_target_=None, root=None, simulation_factor=None, disc=None)
    assert (as_trained.noise, as_trained.split, as_trained.trust) == (None, "test", [])
    other = parse_evaluate(compose("evaluate", ["run=x", "data=dicom", "data.root=/ct", "noise=field", "trust=own"]))
    assert isinstance(other.data, FolderData)
    assert (other.data.root, other.noise and other.noise.name, other.trust) == ("/ct", "field", ["own"])


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
        (["checkpoint=first"], "choose best, last"),
        (["formats=[npz]"], "did you mean npy?"),
        (["formats=[]"], "formats=[] would write nothing"),
        (["window=[240,-160]"], "window"),
        (["kind=sinogram"], "did you mean sinograms?"),
        (["unit=counts"], "choose attenuation, value"),
        (["water_attenuation=0"], "water_attenuation=0"),
        (["batch_size=0"], "batch_size=0"),
        (["precision=16"], "precision=16"),
        (["accelerator=tpu"], "accelerator=tpu is not known"),
        (["+inputt=3"], "did you mean input?"),
    ],
)
def test_reconstruct_refuses(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_reconstruct(compose("reconstruct", ["run=x", "input=a", "output=b", *overrides]))
    assert words in str(error.value)
