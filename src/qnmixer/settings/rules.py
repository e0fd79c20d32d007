"""The rules between sections of a config. Each says why two settings do not go together, and what to choose instead.

Rules inside a section are in its class, and those of a network in the network's. A rule may import the network and the
noise that the config names. So they are checked after the targets of a file are trusted. Each raises ConfigError.
"""

import math
from collections.abc import Mapping

from qnmixer.errors import ConfigError
from qnmixer.settings.data import DataConfig, PairData
from qnmixer.settings.parts import CallbackConfig, DataModuleConfig, ModelConfig, ModuleConfig, NoiseConfig
from qnmixer.settings.sections import (
    DebugConfig,
    FewBatchesConfig,
    GeometryConfig,
    MemoryConfig,
    ProfileConfig,
    TrainerConfig,
)


def scan_of_set(data: DataConfig, geometry: GeometryConfig) -> None:
    """The sinograms of a set were measured with one scan, and its images have one scale."""
    if not isinstance(data, PairData):
        return
    of_set = data.load()
    for key, value in of_set.scan.items() if data.measured else ():
        value_here = getattr(geometry, key)
        if value_here != value and not (isinstance(value, float) and math.isclose(value_here, value, rel_tol=1e-4)):
            raise ConfigError(f"geometry.{key}={value_here} is not that of data={data.name}, {value}")
    for key, value in {"scaling": "attenuation", "hu_max": getattr(of_set, "hu_max", data.hu_max)}.items():
        if getattr(data, key) != value:
            raise ConfigError(f"data.{key}={getattr(data, key)} is not that of data={data.name}: give {value}")


def scans_to_simulate(data: DataConfig, datamodule: DataModuleConfig) -> None:
    """Only slices of which a run simulates the sinograms can have another scan in each step."""
    key = "views" if data.views else "arcs"
    if data.n_scans and not datamodule.is_of_slices:
        raise ConfigError(f"data.{key} does not reach the batches of {datamodule.as_typed}: leave it out")
    if data.n_scans and data.measured:
        raise ConfigError(f"data.{key}: the sinograms of data={data.name} were measured with one scan: leave it out")


def one_scale(data: DataConfig, noise: NoiseConfig) -> None:
    """Photon counts make sense only if all slices have the same scale of attenuation."""
    if data.scaling == "minmax" and noise.load().needs_one_scale:
        raise ConfigError(f"noise={noise.name} needs one scale of all slices: choose data.scaling=attenuation")


def profile_of_scan(noise: NoiseConfig, geometry: GeometryConfig) -> None:
    """A profile has the counts of every bin of the scan."""
    profile, n_bins = noise.keywords().get("profile"), geometry.n_detectors
    if noise.target.startswith("qnmixer.") and profile is not None and len(profile) != n_bins:
        raise ConfigError(f"noise.profile has {len(profile)} bins, and the scan {n_bins}, as geometry.n_detectors says")


def divided_image(data: DataConfig, model: ModelConfig) -> None:
    """Patches, windows or levels of a network divide the image: it would need padding, which none of them has."""
    size = data.image_size
    for key, part in model.divisors().items():
        if size % part:
            value = model.settings().get(key)
            needed = f"model.{key}={value}" if part == value else f"{part}, as model.{key}={value} needs"
            raise ConfigError(f"data.image_size={size} is not divisible by {needed}")


def one_start(finetune: str | None, resume: str | None) -> None:
    """A run starts from weights, or goes on."""
    if finetune is not None and resume is not None:
        raise ConfigError("finetune= starts a new run from weights, resume= continues a run: give only one of them")


def an_end(trainer: TrainerConfig, debug: DebugConfig | FewBatchesConfig | ProfileConfig) -> None:
    """Schedules need the length of a run. The last step of an epoch must not be smaller than the others."""
    if trainer.max_steps == -1 and trainer.max_epochs in (None, -1):
        raise ConfigError("training would never end: give trainer.max_steps=… or trainer.max_epochs=…")
    if isinstance(debug, ProfileConfig) and -1 < trainer.max_steps < debug.warm_up + debug.steps:
        raise ConfigError(f"trainer.max_steps={trainer.max_steps} ends before debug=profile has its steps")
    if trainer.profiler is not None and isinstance(debug, ProfileConfig):
        raise ConfigError(f"trainer.profiler={trainer.profiler} does not work with debug=profile: give one of them")
    window = trainer.accumulate_grad_batches
    for key in ("limit_train_batches", "overfit_batches", "val_check_interval"):
        if isinstance(batches := getattr(trainer, key), int) and batches % window:
            raise ConfigError(f"trainer.{key}={batches} is no multiple of trainer.accumulate_grad_batches={window}")
    if isinstance(trainer.val_check_interval, str | dict) and (window > 1 or trainer.n_devices > 1):
        raise ConfigError(  # Lightning asks each rank's own clock, after each batch
            "trainer.val_check_interval as a time needs one device, and trainer.accumulate_grad_batches=1"
        )


def what_needs_validation(trainer: TrainerConfig, model: ModelConfig, callbacks: Mapping[str, CallbackConfig]) -> None:
    """Without validation nothing is monitored, and only last.ckpt is written."""
    if trainer.validates:
        return
    needing = [f"model={model.name}, which has no weights"] * (not model.has_weights)
    needing += [part.as_typed for part in callbacks.values() if str(part.arguments.get("monitor")).startswith("val/")]
    if needing:
        raise ConfigError(f"trainer.limit_val_batches=0 leaves no validation for {needing[0]}: leave one of them out")


def plain_network(model: ModelConfig, memory: MemoryConfig, module: ModuleConfig) -> None:
    """A plain torch module has no steps, which could be computed again or have losses. A pipeline says so itself."""
    if model.has_steps:
        return
    if memory.name == "recompute":
        raise ConfigError(f"memory=recompute runs steps again, but {model.as_typed} has none: use keep or offload")
    if module.name == "all_iterates":
        raise ConfigError(f"module=all_iterates needs the iterates of steps, but {model.as_typed} has none")
