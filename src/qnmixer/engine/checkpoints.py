"""Read checkpoints and weights files. Each must come from this program and fit the network. No code in it is unpickled.

A weights file has the tensors of a network as safetensors, and the config that builds it as metadata.
"""

import errno
import hashlib
import json
import pickle
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from qnmixer.engine.config.data import DataConfig
from qnmixer.engine.config.files import TARGET
from qnmixer.engine.config.run import Config, checked, effective_batch, parse_file, targets_of, without_places
from qnmixer.engine.config.target import Target
from qnmixer.engine.data.splits import SplitRecord, is_split_record
from qnmixer.engine.parallel.shards import load_checked
from qnmixer.engine.plugins import check_trusted, is_trusted
from qnmixer.engine.reconstructor import (
    Reconstructor,
    build_geometry,
    build_network,
    build_projector,
    same_scan,
    say_scan,
)
from qnmixer.engine.tracking.records import own_modules
from qnmixer.errors import CheckpointError, first_line
from qnmixer.files import digest
from qnmixer.models.data_term import follow_scan
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.weights import CHECKPOINT_KEY, RUN_KEY, SUFFIX, checkpoint_in, located

# Checkpoints of a run

_NEVER_READ: dict[str, Any] = {"callbacks": {}, "logger": {}}
"""Keys that are dropped from the config of a file: only the command line may name callbacks and loggers."""
_NETWORK = "network."
_NO_FIT = "has weights that do not fit its own config: use the qnmixer version that wrote it"


def find_checkpoint(run: str | Path, checkpoint: str = "best") -> Path:
    """The checkpoint of a run folder: best.ckpt, or last.ckpt if there is no best. A file is returned unchanged.

    "pretrained" is the weights file that the package ships, as in `located`. Raises CheckpointError if there is no
    file.
    """
    run = located(run)
    if run.is_file():
        return run
    if not run.is_dir():
        raise CheckpointError(f"no run folder at {run}: give the folder that training printed, run=runs/…")
    for name in dict.fromkeys((checkpoint, "best", "last")):
        path = checkpoint_in(run, name)
        if path.is_file():
            return path
    raise CheckpointError(f"{run} has no checkpoints/best.ckpt or last.ckpt: is it a run folder of qnmixer.train?")


def run_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint: of runs/DIR/checkpoints/best.ckpt, runs/DIR."""
    return checkpoint.absolute().parent.parent


def read_checkpoint(path: Path) -> tuple[Config, dict[str, Any]]:
    """Read config and state dict of a checkpoint or weights file of this program. Raises CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols; unreadable files get a message below
            checkpoint = load(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} contains code or is no checkpoint (it does not load with weights_only=True): "
            "use one that qnmixer.train wrote"
        ) from error
    except Exception as error:  # on bytes of another format the unpickler can raise anything
        is_cut = isinstance(error, safetensors.SafetensorError) or getattr(error, "errno", None) == errno.EINVAL
        is_cut |= "PytorchStreamReader" in str(error)
        why = "it is not whole" if is_cut else first_line(error)  # the words of these libraries are for programmers
        raise CheckpointError(f"{path} cannot be read ({why}): it is damaged or no checkpoint") from error
    header = checkpoint.get(CHECKPOINT_KEY) if isinstance(checkpoint, dict) else None
    state: Any = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    weights = isinstance(state, dict) and all(isinstance(tensor, torch.Tensor) for tensor in state.values())
    if not (weights and isinstance(header, dict) and isinstance(header.get("config"), dict)):
        command = "qnmixer.export" if path.suffix == SUFFIX else "qnmixer.train"
        raise CheckpointError(f"{path} was written by another program: use one that {command} wrote")
    try:
        config = parse_file(header["config"] | _NEVER_READ)
        if all(is_trusted(target, ()) for target in built_from(config).values()):
            config = checked(config, "model", "noise")
        return config, state
    except Exception as error:  # a section may contain anything
        raise CheckpointError(
            f"{path} was written by another version of qnmixer, or is damaged ({first_line(error)}): use that version"
        ) from error


def settings_of(path: Path) -> dict[str, Any]:
    """The config of a checkpoint that `read_checkpoint` takes, as plain data, with what that drops: callbacks."""
    settings: dict[str, Any] = load(path)[CHECKPOINT_KEY]["config"]
    return settings


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint or a weights file."""
    return decode(path) if path.suffix == SUFFIX else load_checked(path)


def load_run(run: str | Path, checkpoint: str = "best", trust: Collection[str] = (), *sections: str) -> Reconstructor:
    """Load the trained module of a run folder (or .ckpt or .safetensors file) on the CPU.

    `trust`: modules outside qnmixer whose classes the file may name; a run of this user may name those that it has
    imported. `sections`: as in `built_from`. Raises PluginError for others, and CheckpointError for a file that cannot
    be read.
    """
    path = find_checkpoint(run, checkpoint)
    config, state = read_checkpoint(path)
    check_trusted(str(path), built_from(config, *sections), [*trust, *own_modules(run_of(path))])
    config = checked(config, "model", "noise")
    default_dtype = torch.get_default_dtype()  # of the user's program
    torch.set_default_dtype(torch.float32)
    try:
        if all(is_trusted(target, ()) for target in built_from(config).values()):
            _require_fit(config, state, path)
        module = Reconstructor(config)
    finally:
        torch.set_default_dtype(default_dtype)
    _load_state(module, state, path)
    return module


class _Outline(FanBeamProjector):
    """The projector of a scan without its matrices: enough to build a network of ours, not to use it."""

    def __init__(self, geometry: FanBeamGeometry) -> None:
        nn.Module.__init__(self)
        self.geometry, self.fbp_filter = geometry, ""

    def _largest_eigenvalue(self, *_: Any) -> float:
        return 1.0


def _require_fit(config: Config, state: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if the weights do not have the shapes that the config of their file gives them.

    The config of a small file may ask for terabytes. So a network of ours is built without data and matrices first, and
    not beyond the tensors of the file. Storage is counted, because a tensor of any size can be a view of one number.
    """
    misfit = CheckpointError(f"{path} {_NO_FIT}")
    budget = 4 * len(state) + 100  # a network may replace layers while it is built

    def count(*_: Any) -> None:
        nonlocal budget
        budget -= 1
        if budget < 0:
            raise misfit

    handle = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            network = build_network(config, _Outline(build_geometry(config)))
    except RuntimeError as error:  # a size that torch cannot count
        raise misfit from error
    finally:
        handle.remove()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.values()}
    is_larger = sum(p.nbytes for p in network.parameters()) > 2 * sum(storages.values())  # the file may be in 16 bits
    shapes = {name: tensor.shape for name, tensor in state.items()}
    if is_larger or any(shapes.get(f"network.{name}") != tensor.shape for name, tensor in network.state_dict().items()):
        raise misfit


def load_weights(module: Any, run: str | Path) -> None:
    """Load the weights of a run into a module of a run, or a Reconstructor, that was built from another config.

    The scans may differ: then the step sizes follow the scan of the module, and a line says so. Raises CheckpointError
    if the networks or their image sizes differ.
    """
    path = find_checkpoint(run)
    config, state = read_checkpoint(path)
    if config.data.image_size != module.config.data.image_size:
        raise CheckpointError(
            f"{path} was trained at data.image_size={config.data.image_size}, this run has "
            f"{module.config.data.image_size}: the two must be equal"
        )
    if differing := _differing(config, module.config, "model"):
        words = config.model.choice() if differing.pop(TARGET, None) else []
        words += [f"model.{key}={'null' if value is None else value}" for key, (value, _) in differing.items()]
        raise CheckpointError(f"{path} has another network: to build the same one, set {' '.join(words)}")
    _load_state(module, state, path)
    if not same_scan(config, module.config):
        say_scan(config, module.config, follow_scan(module.network, build_projector(config)))


def _load_state(module: Any, state: dict[str, Any], path: Path) -> None:
    kinds = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    if dtypes := [tensor.dtype for name, tensor in state.items() if tensor.dtype != kinds.get(name, tensor.dtype)]:
        raise CheckpointError(f"{path} has {str(dtypes[0]).removeprefix('torch.')} weights: use one of float32")
    weights = {name.removeprefix(_NETWORK): tensor for name, tensor in state.items() if name.startswith(_NETWORK)}
    try:
        module.network.load_state_dict(weights)  # a checkpoint also has a discriminator, which only trains
    except RuntimeError as error:
        raise CheckpointError(f"{path} {_NO_FIT}") from error


def built_from(config: Config, *sections: str) -> dict[str, str]:
    """Targets that `Reconstructor` imports, by key. `sections`: others that the caller builds, as "metrics."."""
    return {
        key: target for key, target in targets_of(config).items() if key.startswith(("model.", "noise.", *sections))
    }


def steps_of(path: Path) -> int:
    """The optimizer steps of a checkpoint."""
    return int(load(path)["global_step"])


def split_of(path: Path) -> SplitRecord | None:
    """The patients for training, validation and test in the run of a checkpoint; None for a weights file.

    Raises CheckpointError if the record cannot be read.
    """
    run_record = load(path).get(RUN_KEY)
    split = run_record.get("split") if isinstance(run_record, dict) else run_record
    if split is not None and not is_split_record(split):
        raise CheckpointError(f"{path} has a record of its training patients that cannot be read: it is damaged")
    return split


# What a resumed run may not change

_FIXED_SECTIONS = ("model", "data", "geometry", "noise", "loss", "optimizer")
"""Sections that a resumed run may not change."""
_FREE_KEYS = {"batch_size", "num_workers", "prefetch_factor", "pin_memory", "cache_dir", "root"}
"""Keys of slices that a resumed run may change. A folder may move: slices of ours are known by their pixels."""


def resumable(config: Config, run: Path) -> Path:
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
    old_config, _ = read_checkpoint(path)
    if words := next(_changes(old_config, config), None):
        raise CheckpointError(
            f"{path} was trained with {words}, and resume= needs the same settings: change them back, or start a new "
            "run from its weights with finetune="
        )
    return path


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
    old_settings = _settings(getattr(old_config, section), checked_section)
    new_settings = _settings(checked_section, checked_section)
    pairs = {key: (old_settings.get(key), new_settings.get(key)) for key in old_settings | new_settings}
    return {key: (old_value, new_value) for key, (old_value, new_value) in pairs.items() if old_value != new_value}


def _settings(section: Any, checked_section: Any) -> dict[str, Any]:
    """The keys of a section, with defaults for those that its target got after it was written.

    Args:
        section: as it was written.
        checked_section: the same section of a checked config. Only its target is imported.
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


# Weights files


def encode(config: Config, state: dict[str, Tensor]) -> bytes:
    """Encode a weights file: tensors by their state-dict names, half precision as float32, and the config.

    The same weights and config give the same bytes. The metadata also has a digest of both.
    """
    header = {"format": 1, "config": without_places(config).plain()}
    header["digest"] = _digest_of_file(header, state)
    return _packed(state, {CHECKPOINT_KEY: json.dumps(header)})  # one key: safetensors writes several in random order


def _digest_of_file(header: dict[str, Any], state: dict[str, Tensor]) -> str:
    return digest([header["config"], digest_of_weights(state)])


def digest_of_weights(state: dict[str, Tensor]) -> str:
    """SHA-256 of the weights only: the same for a checkpoint and for the weights file that was exported from it."""
    return hashlib.sha256(_packed(state)).hexdigest()


def _packed(state: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    # Copies, because safetensors refuses two names for one tensor. A module may count in whole numbers: they stay.
    half = torch.float16, torch.bfloat16
    full = {name: torch.float32 if tensor.dtype in half else tensor.dtype for name, tensor in state.items()}
    tensors = {name: tensor.to(full[name], copy=True).contiguous() for name, tensor in state.items()}
    return safetensors.torch.save(tensors, metadata)


def decode(path: Path) -> dict[str, Any]:
    """Decode a weights file into the form of a checkpoint. The config is None for a file of another program.

    Raises safetensors.SafetensorError, ValueError or OSError for a damaged file.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {}).get(CHECKPOINT_KEY, "null"))
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    if isinstance(header, dict) and "config" in header and header.get("digest") != _digest_of_file(header, state):
        raise ValueError("its digest does not match")
    return {CHECKPOINT_KEY: header, "state_dict": state}
