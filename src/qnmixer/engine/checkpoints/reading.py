"""Read checkpoints. A checkpoint must come from this program and fit the network. No code in it is unpickled."""

import pickle
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from qnmixer.engine.checkpoints.weights_file import decode
from qnmixer.engine.config import Config, effective_batch, to_plain
from qnmixer.engine.config.data import FolderData, PairData
from qnmixer.engine.config.groups import Group
from qnmixer.engine.config.run import checked, parse_file, targets_of
from qnmixer.engine.config.target import keys_of
from qnmixer.engine.data.splits import SplitRecord, is_split_record
from qnmixer.engine.parallel.shards import load_checked, merge_shards
from qnmixer.engine.plugins import check_trusted, is_trusted
from qnmixer.engine.reconstructor import Reconstructor
from qnmixer.errors import CheckpointError, ConfigError, first_line
from qnmixer.files import newest_complete
from qnmixer.weights import CHECKPOINT_KEY, RUN_KEY, SUFFIX, checkpoint_in, located

if TYPE_CHECKING:
    from qnmixer.engine.run_module import RunModule

_DROPPED = 64 * 2**20
"""Bytes of weights that a small network may drop while it is built."""
_NEVER_READ: dict[str, Any] = {"callbacks": {}, "logger": {}}
"""Keys that are dropped from the config of a file: only the command line may name callbacks and loggers."""


def find_checkpoint(run: str | Path, which: str = "best") -> Path:
    """The checkpoint of a run folder: best.ckpt, or last.ckpt if there is no best. A file is returned unchanged.

    "pretrained" is the weights file that the package ships, as in `located`. Raises CheckpointError if there is no
    file.
    """
    run = located(run)
    if run.suffix == ".ckpt" and (path := newest_complete(run)).exists():
        return path
    if run.is_file():
        return run
    if not run.is_dir():
        raise CheckpointError(f"no run folder at {run}: give the folder that training printed, run=runs/…")
    for name in dict.fromkeys((which, "best", "last")):
        path = newest_complete(checkpoint_in(run, name))
        if path.exists():
            return path
    raise CheckpointError(f"{run} has no checkpoints/best.ckpt or last.ckpt: is it a run folder of qnmixer.train?")


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
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}): it is damaged or no checkpoint") from error
    ours = checkpoint.get(CHECKPOINT_KEY) if isinstance(checkpoint, dict) else None
    state: Any = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    weights = isinstance(state, dict) and all(isinstance(it, torch.Tensor) for it in state.values())
    if not (weights and isinstance(ours, dict) and isinstance(ours.get("config"), dict)):
        ours_from = "qnmixer.export" if path.suffix == SUFFIX else "qnmixer.train"
        raise CheckpointError(f"{path} was written by another program: use one that {ours_from} wrote")
    try:
        config = parse_file(ours["config"] | _NEVER_READ)
        if all(is_trusted(target, ()) for target in built_from(config).values()):
            config = checked(config, "model", "noise")
        return config, state
    except ConfigError as error:
        raise CheckpointError(f"{path} was written by another version of qnmixer ({error}): use that one") from error
    except Exception as error:  # a section may contain anything
        raise CheckpointError(f"{path} has a config that cannot be read ({first_line(error)})") from error


def load_run(run: str | Path, which: str = "best", trust: Collection[str] = (), *more: str) -> Reconstructor:
    """Load the trained module of a run folder (or .ckpt or .safetensors file) on the CPU.

    `trust`: modules outside qnmixer whose classes the file may name. `more`: as in `built_from`. Raises PluginError for
    others, and CheckpointError for a file that cannot be read.
    """
    path = find_checkpoint(run, which)
    config, state = read_checkpoint(path)
    check_trusted(str(path), built_from(config, *more), trust)
    config = checked(config, "model", "noise")
    with _no_more_weights_than(state, path):
        module = Reconstructor(config)
    _load_state(module, state, path)
    return module


@contextmanager
def _no_more_weights_than(state: dict[str, Any], path: Path) -> Iterator[None]:
    """Raise CheckpointError as soon as a network that the block builds has far more weights than its file.

    The config of a file may ask for terabytes. Storage is counted, because a tensor of any size can be a view of one
    number. A network may drop weights while it is built: it replaces a layer, ties or normalises weights.
    """
    storages = [tensor.untyped_storage() for tensor in state.values()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    most, built = 4 * held + _DROPPED, 0
    known: set[int] = set()

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal built
        built += parameter.nbytes * (id(parameter) not in known)
        known.add(id(parameter))
        if built > most:
            raise CheckpointError(
                f"{path} has weights that do not fit its own config, of a larger network: it is damaged"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    except RuntimeError as error:  # torch raises this if it cannot allocate so much at once
        raise CheckpointError(
            f"{path} has the config of a network that cannot be built ({first_line(error)})"
        ) from error
    finally:
        handle.remove()


def load_weights(module: "Reconstructor | RunModule", run: str | Path) -> None:
    """Load the weights of a run into a module that was built from another config.

    Raises CheckpointError if the networks or their image sizes differ. The numbers of views may differ.
    """
    path = find_checkpoint(run)
    config, state = read_checkpoint(path)
    if config.data.image_size != module.config.data.image_size:
        raise CheckpointError(
            f"{path} was trained at data.image_size={config.data.image_size}, this run has "
            f"{module.config.data.image_size}: the two must be equal"
        )
    if _completed(config.model, module.config.model) != _completed(module.config.model, module.config.model):
        now = keys_of(module.config.model)
        other = config.model.choice() if config.model._target_ != module.config.model._target_ else []
        keys = {key: value for key, value in keys_of(config.model).items() if key != "_target_"}
        other += [f"model.{key}={value}" for key, value in keys.items() if now.get(key) != value]
        raise CheckpointError(f"{path} has another network: to build the same one, set {' '.join(other)}")
    _load_state(module, state, path)


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
    before, _ = read_checkpoint(path)
    if differing := _differences(before, config):
        raise CheckpointError(
            f"{path} was trained with {differing[0]}, and resume= needs the same settings: change them back, or "
            "start a new run from its weights with finetune="
        )
    if effective_batch(before) != effective_batch(config):
        raise CheckpointError(
            f"{path} was trained with {effective_batch(before)} slices per optimizer step, this run has "
            f"{effective_batch(config)}: change data.batch_size or trainer.accumulate_grad_batches"
        )
    return path


def built_from(config: Config, *more: str) -> dict[str, str]:
    """Targets that `Reconstructor` imports, by key. `more`: other sections that the caller builds, as "metrics."."""
    return {key: it for key, it in targets_of(config).items() if key.startswith(("model.", "noise.", *more))}


def steps_of(path: Path) -> int:
    """The optimizer steps of a checkpoint."""
    return int(load(path)["global_step"])


def split_of(path: Path) -> SplitRecord | None:
    """The patients for training, validation and test in the run of a checkpoint; None for a weights file.

    Raises CheckpointError if the record cannot be read.
    """
    ours = load(path).get(RUN_KEY)
    found = ours.get("split") if isinstance(ours, dict) else ours
    if found is not None and not is_split_record(found):
        raise CheckpointError(f"{path} has a record of its training patients that cannot be read: it is damaged")
    return found


def _completed(section: Group, now: Group) -> dict[str, Any]:
    """The keys of a section, with defaults for those that its target got after it was written.

    Args:
        now: the same section of a checked config. Only its target is imported.
    """
    defaults = replace(now, arguments={}).settings() if section._target_ == now._target_ else {}
    return defaults | keys_of(section)


def _differences(before: Config, config: Config) -> list[str]:
    """The settings of network, slices, scan, loss, optimizer and seed that differ, as overrides."""
    old, new = _that_count(before), _that_count(config)
    found = []
    for section in ("model", "data", "geometry", "noise", "loss", "optimizer"):
        if isinstance(now_section := getattr(config, section), Group):
            old[section] = _completed(getattr(before, section), now_section)
            new[section] = _completed(now_section, now_section)
        for key in old[section] | new[section]:
            value, now = old[section].get(key), new[section].get(key)
            if value != now:
                if key == "_target_":
                    found.append(f"{section}={getattr(before, section).name}, not {getattr(config, section).name}")
                else:
                    found.append(f"{section}.{key}={value}, not {now}")
    return found if before.seed == config.seed else [*found, f"seed={before.seed}, not {config.seed}"]


def _that_count(config: Config) -> dict[str, Any]:
    """The config without folders and keys of loading. The record of the split identifies slices by their pixels."""
    plain = to_plain(config)
    data = plain["data"]
    for key in ("batch_size", "num_workers", "prefetch_factor", "pin_memory"):
        del data[key]
    for section, source in config.data.by_section().items():
        its = data if section == "data" else data["sources"][section.removeprefix("data.sources.")]
        for key in ("cache_dir", "root", "reference_root") if isinstance(source, FolderData | PairData) else ():
            its.pop(key, None)
    return plain


def _load_state(module: "Reconstructor | RunModule", state: dict[str, Any], path: Path) -> None:
    kinds = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    if other := [it.dtype for name, it in state.items() if it.dtype != kinds.get(name, it.dtype)]:
        raise CheckpointError(f"{path} has {str(other[0]).removeprefix('torch.')} weights: use one of float32")
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} has weights that do not fit its own config: use the qnmixer version that wrote it"
        ) from error


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint file, or the folder of shards that strategy=fsdp writes with sharded_checkpoint=true."""
    if path.suffix == SUFFIX:
        return decode(path)
    return merge_shards(path) if path.is_dir() else load_checked(path)
