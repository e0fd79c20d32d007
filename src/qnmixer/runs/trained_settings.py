"""What a run trains: its settings without those that change no weight. It tells methods apart. No torch import."""

from collections.abc import Mapping
from typing import Any

from qnmixer.files import digest
from qnmixer.settings.options import flat
from qnmixer.settings.run import Config

_OTHER_KEYS = ("evaluation", "finetune_strict", "logger", "resume", "tags", "test_after_training")
_OF_LOADING = (".cache_dir", ".num_workers", ".pin_memory", ".prefetch_factor", ".seed")
_OF_DEVICES = ("accelerator", "devices", "log_every_n_steps", "num_nodes", "save_every_n_steps")
SLICES_PER_STEP = "slices_per_step"
_WATCHING = ("IteratePictures", "LearningRateMonitor", "DeviceStatsMonitor", "RichProgressBar", "TQDMProgressBar")
"""Callbacks that change nothing, by the last word of their target."""


def what_is_trained(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what a run trains, by dotted key, without its seeds; from its config as plain data."""
    kept = {key: value for key, value in settings.items() if key not in _OTHER_KEYS}
    callbacks = settings.get("callbacks", {}).items()
    kept["callbacks"] = {name: keys for name, keys in callbacks if not str(keys.get("_target_")).endswith(_WATCHING)}
    monitored = settings["monitor"].split("/")[1]  # the best checkpoint is that by this metric
    kept["metrics"] = settings.get("metrics", {}).get(monitored)
    trainer = settings["trainer"]
    kept["trainer"] = {key: value for key, value in trainer.items() if key not in _OF_DEVICES}
    # The same batch on more devices makes a larger step.
    n_devices = (trainer["devices"] or 1) * trainer["num_nodes"]
    kept[SLICES_PER_STEP] = settings["data"]["batch_size"] * trainer["accumulate_grad_batches"] * n_devices
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in flat(kept)
        if not (isinstance(value, Mapping) or key == "seed" or (key.startswith("data.") and key.endswith(_OF_LOADING)))
    }


def digest_of_training(config: Config) -> str:
    """A digest of what a run trains, with its seeds: the same before and after its devices are known, and resumed.

    A resumed run has no `finetune` any more. So it is not in the digest: the overrides tell it.
    """
    settings = config.plain()
    trained = what_is_trained(settings | {"finetune": None})
    del trained[SLICES_PER_STEP]
    return digest([trained, settings["seed"], settings["data"]["seed"]], sort_keys=True)
