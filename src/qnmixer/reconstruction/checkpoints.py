"""Checkpoints and weights files with the config of their run: load, resume, fine-tune and write them."""

import json
import shlex
from collections.abc import Collection, Iterator
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qnmixer.data.splits import SplitRecord, is_split_record
from qnmixer.errors import CheckpointError, say
from qnmixer.measurement.build import build_geometry, build_network, build_projector
from qnmixer.models.data_term import follow_scan
from qnmixer.reconstruction.pretrained import (
    NETWORK,
    digest_of_file,
    in_float32,
    load_state,
    of_another_version,
    packed,
    read,
    require_fit,
)
from qnmixer.reconstruction.reconstructor import Reconstructor, same_scan, say_scan
from qnmixer.reconstruction.weights import CHECKPOINT_KEY, RUN_KEY, SUFFIX, find_checkpoint
from qnmixer.runs.processes.process import rank
from qnmixer.runs.public_config import without_places
from qnmixer.runs.records import own_modules
from qnmixer.settings.compose import value_as_typed
from qnmixer.settings.data import DataConfig
from qnmixer.settings.options import TARGET, values_of_option
from qnmixer.settings.plugins import check_trusted, is_trusted
from qnmixer.settings.run import Config, Strictness, checked, effective_batch, parse_file, targets_of
from qnmixer.settings.target import Target

_NEVER_READ: dict[str, Any] = {"callbacks": {}, "logger": {}}
"""Keys that are dropped from the config of a file: only the command line may name callbacks and loggers."""


def run_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint: of runs/DIR/checkpoints/best.ckpt, runs/DIR."""
    return checkpoint.absolute().parent.parent


class Checkpoint:
    """A checkpoint or weights file of this program, read once: a large one takes seconds. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        content = read(path)
        self.path, self.state = path, content["state_dict"]
        self.settings: dict[str, Any] = content[CHECKPOINT_KEY]["config"]  # with callbacks, which `config` drops
        self.steps: int = content.get("global_step", 0)  # of the optimizer; a weights file does not say
        self._run_record = content.get(RUN_KEY)

    @cached_property
    def config(self) -> Config:
        """The config, with its network and noise checked if they are of qnmixer."""
        try:
            config = parse_file(self.settings | _NEVER_READ)
            own = all(is_trusted(target, ()) for target in built_from(config).values())
            return checked(config, "model", "noise") if own else config
        except Exception as error:  # a section may contain anything
            raise of_another_version(self.path, error) from error

    @property
    def split(self) -> SplitRecord | None:
        """The patients for training, validation and test in its run; None for a weights file."""
        record, path = self._run_record, self.path
        split = record.get("split") if isinstance(record, dict) else record
        if split is not None and not is_split_record(split):
            raise CheckpointError(f"{path} has a record of its training patients that cannot be read: it is damaged")
        return split


def load_run(run: str | Path, checkpoint: str = "best", trust: Collection[str] = (), *sections: str) -> Reconstructor:
    """Load the trained module of a run folder (or .ckpt or .safetensors file) on the CPU: that of `network_of`."""
    return network_of(Checkpoint(find_checkpoint(run, checkpoint)), trust, *sections)


def network_of(checkpoint: Checkpoint, trust: Collection[str] = (), *sections: str) -> Reconstructor:
    """The trained module of a checkpoint.

    `trust`: modules outside qnmixer whose classes the file may name; a run of this user may name those that it has
    imported. `sections`: as in `built_from`. Raises PluginError for others, and CheckpointError for a file that cannot
    be read.
    """
    path, state = checkpoint.path, checkpoint.state
    check_trusted(str(path), built_from(checkpoint.config, *sections), [*trust, *own_modules(run_of(path))])
    config = checked(checkpoint.config, "model", "noise")
    with in_float32():
        if all(is_trusted(target, ()) for target in built_from(config).values()):
            require_fit(partial(build_network, config), build_geometry(config), state, path)
        module = Reconstructor(config)
    load_state(module.network, state, path)
    return module


def load_weights(module: Any, run: str | Path, strict: Strictness = True) -> None:
    """Load the weights of a run into a module of a run, or a Reconstructor, that was built from another config.

    The scans may differ: then the step sizes follow the scan of the module, and a line says so. Raises CheckpointError
    if the networks or their image sizes differ.

    Args:
        module: it has a `network` and a `config`.
        run: as in `find_checkpoint`.
        strict: False: another network gets the weights that fit it by name and shape, and lines list the others.
            "repeat": also, iterations that the run does not have start as its last one.
    """
    checkpoint = Checkpoint(find_checkpoint(run))
    path, config, state = checkpoint.path, checkpoint.config, checkpoint.state
    own: dict[str, Tensor] = {}
    if strict is not True:
        own = _load_fitting(module.network, state, path, strict == "repeat")
    else:
        _require_same_network(path, config, module.config)
        load_state(module.network, state, path)
    if not same_scan(config, module.config):
        say_scan(config, module.config, follow_scan(module.network, build_projector(config)))
        module.network.load_state_dict(own, strict=False)  # these never had the scan of the run


def _require_same_network(path: Path, config: Config, current: Config) -> None:
    """Raise CheckpointError unless the weights of one config are those of a network of the other."""
    if config.data.image_size != current.data.image_size:
        raise CheckpointError(
            f"{path} was trained at data.image_size={config.data.image_size}, this run has {current.data.image_size}: "
            "the two must be equal, or load what fits with finetune_strict=false"
        )
    if _differing(config, current, "model"):
        words = shlex.join(_words_for(config, current))
        raise CheckpointError(  # the words last, so that they can be pasted
            f"load what fits with finetune_strict=false, as {path} has another network: to build the same one, set "
            f"{words}"
        )


def _load_fitting(network: nn.Module, state: dict[str, Any], path: Path, repeat: bool) -> dict[str, Tensor]:
    """Load the weights that fit by name and shape. Returns those that the network keeps.

    torch's strict=False allows other names, but no other shapes. Raises CheckpointError if none fits.
    """
    weights = {name.removeprefix(NETWORK): tensor for name, tensor in state.items() if name.startswith(NETWORK)}
    own = {name: tensor.clone() for name, tensor in network.state_dict().items() if isinstance(tensor, Tensor)}
    sources = {name: _last_iteration(name, weights) if repeat else name for name in own}
    fits = {
        name: weights[old] for name, old in sources.items() if old in weights and weights[old].shape == own[name].shape
    }
    if not fits:
        raise CheckpointError(f"{path} has no weight that fits this network by name and shape: leave finetune= out")
    load_state(network, {f"{NETWORK}{name}": tensor for name, tensor in fits.items()}, path, strict=False)
    others = {
        "the last iteration again": [name for name in fits if sources[name] != name],
        "of another shape": [name for name, old in sources.items() if old in weights and name not in fits],
        "new": [name for name, old in sources.items() if old not in weights],
        "left out": [name for name in weights if name not in own],
    }
    if rank() == 0:
        n_loaded, n_all = (sum(tensor.numel() for tensor in part.values()) for part in (fits, own))
        say(f"{100 * n_loaded / n_all:.1f} % of the weights ({n_loaded:,} of {n_all:,}) are those of {path}")
        for what, names in others.items():
            if names:
                say(f"  {what}: {', '.join(_parts(names, {*own, *weights}.difference(names)))}")
    return {name: tensor for name, tensor in own.items() if name not in fits}


def _last_iteration(name: str, weights: Collection[str]) -> str:
    """The name of a weight; if no weight has it, that of the last iteration that has such a weight."""
    part, _, rest = name.partition(".")
    number, dot, inner = rest.partition(".")
    earlier = range(int(number), -1, -1) if number.isdecimal() else ()
    return next((old for t in earlier if (old := f"{part}.{t}{dot}{inner}") in weights), name)


def _parts(names: Collection[str], others: Collection[str]) -> dict[str, None]:
    """Names of weights; PART.* for those of a part that none of the others is in."""
    parts: dict[str, None] = {}
    for name in names:
        prefixes = accumulate(name.split(".")[:-1], "{}.{}".format)
        own = (prefix for prefix in prefixes if not any(other.startswith(f"{prefix}.") for other in others))
        prefix = next(own, None)
        parts[name if prefix is None else f"{prefix}.*"] = None
    return parts


def _words_for(config: Config, current: Config) -> list[str]:
    """The overrides that build the network of a config, after those of the current one."""
    model, now = config.model, current.model
    wanted, there, words = _settings(model, now), now.arguments, list[str]()
    if model.target != now.target:
        if model.name != model.target or now.name != now.target:  # another option, which brings its own keys
            option = "custom" if model.name == model.target else model.name
            there, words = dict(values_of_option("model", option)), [f"model={option}"]
        if model.name == model.target:
            words.append(f"{model.key}={model.target}")
    values = there if model.target != now.target else now.defaults() | there
    for key, value in wanted.items():
        if key != TARGET and values.get(key, ...) != value:
            words.append(f"{'' if key in there else '+'}model.{key}={value_as_typed(value)}")
    return words + [f"~model.{key}" for key in there if key not in (*wanted, TARGET)]


def built_from(config: Config, *sections: str) -> dict[str, str]:
    """Targets that `Reconstructor` imports, by key. `sections`: others that the caller builds, as "metrics."."""
    targets, prefixes = targets_of(config).items(), ("model.", "noise.", *sections)
    return {key: target for key, target in targets if key.startswith(prefixes)}


# What a resumed run may not change

_FIXED_SECTIONS = ("model", "data", "geometry", "noise", "loss", "optimizer")  # a resumed run may not change these
_FREE_KEYS = {"batch_size", "num_workers", "prefetch_factor", "pin_memory", "cache_dir", "root"}
"""Keys of slices that a resumed run may change. A folder may move: slices of ours are known by their pixels."""


def resumable(config: Config, run: Path) -> Checkpoint:
    """The checkpoint that a run resumes from: last.ckpt of a run folder, or the given file.

    Raises CheckpointError if network, slices, scan, noise, loss, optimizer, seed or the slices of an optimizer step
    differ. Everything else may change: length, schedule, hardware, memory settings, callbacks.
    """
    path = find_checkpoint(run, "last")
    if path.suffix == SUFFIX:
        raise CheckpointError(
            f"{path} has weights only, without the optimizer state that resume= needs: start a run from them with "
            "finetune="
        )
    checkpoint = Checkpoint(path)
    if words := next(_changes(checkpoint.config, config), None):
        raise CheckpointError(
            f"{path} was trained with {words}, and resume= needs the same settings: change them back, or start a new "
            "run from its weights with finetune="
        )
    return checkpoint


def _changes(old_config: Config, new_config: Config) -> Iterator[str]:
    """The settings that a resumed run may not change, and that differ, as overrides."""
    for section in _FIXED_SECTIONS:
        for key, (old_value, new_value) in _differing(old_config, new_config, section).items():
            if key == TARGET:
                yield f"{section}={getattr(old_config, section).name}, not {getattr(new_config, section).name}"
            else:
                yield f"{section}.{key}={old_value}, not {new_value}"
    if old_config.seed != new_config.seed:
        yield f"seed={old_config.seed}, not {new_config.seed}"
    if (old_batch := effective_batch(old_config)) != (new_batch := effective_batch(new_config)):
        keys = "data.batch_size, trainer.accumulate_grad_batches"
        yield f"{old_batch} slices per optimizer step, not {new_batch} ({keys})"


def _differing(old_config: Config, new_config: Config, section: str) -> dict[str, tuple[Any, Any]]:
    """The settings of a section that differ and that change results: their values before and now, by key."""
    checked_section = getattr(new_config, section)
    old, new = (_settings(getattr(config, section), checked_section) for config in (old_config, new_config))
    return {key: (old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)}


def _settings(section: Any, checked_section: Any) -> dict[str, Any]:
    """The keys of a section as it was written, with defaults for those that its target got later.

    `checked_section`: the same section of a checked config. Only its target is imported.
    """
    keys = section.plain()
    if isinstance(section, DataConfig):
        keys = _without_keys(keys, _FREE_KEYS)
    is_same = isinstance(checked_section, Target) and section.target == checked_section.target
    return (checked_section.defaults() if is_same else {}) | keys


def _without_keys(keys: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The keys of slices without these names, also inside the sources of a mix."""
    return {
        key: _without_keys(value, names) if isinstance(value, dict) else value
        for key, value in keys.items()
        if key not in names
    }


def encode(config: Config, state: dict[str, Tensor]) -> bytes:
    """Encode a weights file: tensors by their state-dict names, half precision as float32, and the config.

    The same weights and config give the same bytes. The metadata also has a digest of both.
    """
    header = {"format": 1, "config": without_places(config).plain()}
    header["digest"] = digest_of_file(header, state)
    return packed(state, {CHECKPOINT_KEY: json.dumps(header)})  # one key: safetensors writes several in random order
