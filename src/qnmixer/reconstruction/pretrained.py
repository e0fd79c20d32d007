"""Read checkpoints and weights files, and build their networks: in plain torch, with what the base installs.

Each must come from this program and fit the network. No code in it is unpickled. A weights file has the tensors of a
network as safetensors, and the config that builds it as metadata. `qnmixer.reconstruction.checkpoints` reads the same
files with the whole config of their run, by these functions.
"""

import errno
import hashlib
import inspect
import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.serialization import get_unsafe_globals_in_checkpoint

from qnmixer.errors import CheckpointError, ConfigError, PluginError, first_line, say, suggest
from qnmixer.files import digest
from qnmixer.measurement.measurement import scan_of
from qnmixer.models.data_term import follow_scan
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.physics.bounds import require_bounds
from qnmixer.physics.fbp import FBP_WINDOWS
from qnmixer.reconstruction.cures import NO_CHOICE, Cures, Scans, put_on
from qnmixer.reconstruction.weights import CHECKPOINT_KEY, SUFFIX

NETWORK = "network."
_NO_FIT = "has weights that do not fit its own config: use the qnmixer version that wrote it"
_TARGET = "_target_"
_MODELS = "qnmixer.models"
_WORDS, _COUNTS = ("name", "beam", "fbp_filter"), ("n_views", "n_detectors")
_MOST_VALUES, _DEEPEST = 1_000_000, 32  # limits of a checkpoint; measured: 16 values a tensor of weights, 7 levels


def load_network(path: Path, cures: Cures = NO_CHOICE, **changes: Any) -> UnrolledNetwork[Any] | None:
    """The network of a checkpoint or weights file, on the CPU, if it is one of `qnmixer.models` with plain arguments.

    None for another one, such as a class of the user's: `load_run` of `qnmixer.reconstruction.checkpoints` builds it.
    `changes`: of its scan. Then its step sizes follow, and lines say so and what cures it gets.

    Raises:
        CheckpointError: the file cannot be read, or its weights do not fit.
        ConfigError: a change is none.
        GeometryError: the scan is impossible.
    """
    content = read(path)
    config, state = content[CHECKPOINT_KEY]["config"], content["state_dict"]
    try:
        build = _builder(config["model"])
        if build is None:
            return None
        geometry = scan_of(config["geometry"], config["data"]["image_size"])
        with in_float32():
            require_fit(build, geometry, state, path)
            trained = FanBeamProjector(geometry, fbp_filter=config["geometry"]["fbp_filter"])
    except CheckpointError:
        raise
    except Exception as error:  # a section may contain anything
        raise of_another_version(path, error) from error
    section = changed_scan(config["geometry"], changes)
    geometry = scan_of(section, config["data"]["image_size"])
    is_same = geometry == trained.geometry and section["fbp_filter"] == trained.fbp_filter
    with in_float32():
        network = build(trained if is_same else FanBeamProjector(geometry, fbp_filter=section["fbp_filter"]))
    load_state(network, state, path)
    if not is_same:
        say(line_of_scan(config["geometry"], section, follow_scan(network, trained)))
    scans = Scans(*(config["data"].get(key, ()) for key in ("views", "arcs")))
    if line := put_on(network, trained, cures, scans=scans):
        say(line)
    return network


def changed_scan(section: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A section `geometry` with changes. Raises ConfigError for an unknown key, and for a value of another type."""
    changed = {"beam": "fan_flat", "detector_offset": 0.0} | dict(section)  # what a file may leave out
    for key, value in changes.items():
        if key not in changed:
            raise ConfigError(f"geometry has no key {key}: {suggest(key, changed)}")
        kind: Any = str if key in _WORDS else Integral if key in _COUNTS else Real
        if (not isinstance(value, kind) or isinstance(value, bool)) and not (key == "first_angle" and value is None):
            what = {str: "text", Integral: "a whole number", Real: "a number"}[kind]
            raise ConfigError(f"geometry.{key}={value} must be {what}")
        changed[key] = value if value is None or kind is str else int(value) if kind is Integral else float(value)
    if (name := changed["fbp_filter"]) not in FBP_WINDOWS:
        raise ConfigError(f"geometry.fbp_filter={name} is not known: choose {', '.join(FBP_WINDOWS)}")
    return changed


def line_of_scan(before: Mapping[str, Any], now: Mapping[str, Any], factor: float) -> str:
    """What differs from the scan of the training, and by what the step sizes are multiplied."""
    differing = [f"{key}={value}, not {now[key]}" for key, value in before.items() if now[key] != value]
    follows = "" if factor == 1 else f": its step sizes follow the scan, × {factor:.4g}"
    what = f"geometry.{', '.join(differing)}" if differing else "another pixel size"
    return f"the network was trained with {what}{follows}"


def _builder(section: Mapping[str, Any]) -> Callable[[FanBeamProjector], UnrolledNetwork[Any]] | None:
    """The class of a section `model` with its arguments; None if it needs more than these."""
    arguments = dict(section)
    module, _, name = str(arguments.pop(_TARGET)).rpartition(".")
    if not f"{module}.".startswith(f"{_MODELS}.") or _TARGET in str(arguments):
        return None
    network_class = getattr(import_module(module), name)
    if not (isinstance(network_class, type) and issubclass(network_class, UnrolledNetwork)):
        return None
    parameters = inspect.signature(network_class).parameters
    if "variance" in parameters:  # of the noise of its run
        return None
    for argument, value in arguments.items():
        require_bounds(argument, value, parameters[argument].annotation)
    return partial(network_class, **arguments)


@contextmanager
def in_float32() -> Iterator[None]:
    """Build networks in float32, whatever the default of the user's program is."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default_dtype)


# Files


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint or weights file, with a config that is not checked. Raises CheckpointError."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, of pickle protocols: such a file gets a line below
            checkpoint: Any = load(path)
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
    return checkpoint


def of_another_version(path: Path, error: Exception) -> CheckpointError:
    """The error for a file whose config this version cannot build."""
    return CheckpointError(
        f"{path} was written by another version of qnmixer, or is damaged ({first_line(error)}): use that version"
    )


def load(path: Path) -> dict[str, Any]:
    """Load a weights file, or a file of torch.save. Raises an error if a byte has changed.

    torch.load does not notice it. torch.save writes a checksum of each tensor. Checking them costs 0.3 s for 1 GB. It
    compresses nothing. So a file that grows when it is read is refused: 1 MB could become 1 GB.
    """
    if path.suffix == SUFFIX:
        return decode(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise zipfile.BadZipFile("it is larger when unpacked")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    _require_few_values(content)
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
    return content


def _require_few_values(content: Any) -> None:
    """Raise ValueError for endless unpickled values: a few bytes can hold one list a billion times, or itself."""
    stack = [(content, 0)]
    for _ in range(_MOST_VALUES):
        if not stack:
            return
        value, depth = stack.pop()
        if isinstance(value, dict | list | tuple | set) and depth < _DEEPEST:
            stack += [(child, depth + 1) for child in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, dict | list | tuple | set):
            break
    raise ValueError("it has too many values")


def encoded_readably(content: dict[str, Any]) -> io.BytesIO:
    """The bytes of a checkpoint. Raises PluginError, which names the entry, for content that `read` would refuse."""
    for key, value in content.items():
        try:
            _require_few_values(value)
        except ValueError:
            raise _not_readable(value, (key,)) from None
    encoded = io.BytesIO()
    torch.save(content, encoded)
    encoded.seek(0)
    if get_unsafe_globals_in_checkpoint(encoded):
        raise _not_readable(*_unsafe(content, ()))
    for name, value in content.get("state_dict", {}).items():
        if not isinstance(value, Tensor):  # of `get_extra_state`
            raise _not_readable(value, ("state_dict", name))
    return encoded


def _not_readable(value: Any, place: tuple[Any, ...]) -> PluginError:
    entry, kind = "".join(f"[{key!r}]" for key in place), type(value)
    return PluginError(
        f"checkpoint{entry} is a {kind.__module__}.{kind.__qualname__} that nothing could read back: give plain "
        "numbers, texts, tensors, or short lists or dicts of them"
    )


def _unsafe(value: Any, place: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The innermost value that torch does not load with weights_only=True, and its place."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list | tuple) else [])
    for key, child in items:
        encoded = io.BytesIO()
        torch.save(child, encoded)
        encoded.seek(0)
        if get_unsafe_globals_in_checkpoint(encoded):
            return _unsafe(child, (*place, key))
    return value, place


# Weights


class Outline(FanBeamProjector):
    """The projector of a scan without its matrices: enough to build a network of ours, not to use it."""

    def __init__(self, geometry: FanBeamGeometry) -> None:
        nn.Module.__init__(self)
        self.geometry, self.fbp_filter = geometry, ""

    def _largest_eigenvalue(self, *_: Any) -> float:
        return 1.0


def require_fit(
    build: Callable[[FanBeamProjector], nn.Module], geometry: FanBeamGeometry, state: dict[str, Any], path: Path
) -> None:
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
            network = build(Outline(geometry))
    except RuntimeError as error:  # a size that torch cannot count
        raise misfit from error
    finally:
        handle.remove()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.values()}
    is_larger = sum(p.nbytes for p in network.parameters()) > 2 * sum(storages.values())  # the file may be in 16 bits
    shapes = {name: tensor.shape for name, tensor in state.items()}
    if is_larger or any(shapes.get(f"network.{name}") != tensor.shape for name, tensor in network.state_dict().items()):
        raise misfit


def load_state(network: nn.Module, state: dict[str, Any], path: Path, strict: bool = True) -> None:
    """Load the weights of a file into its network. Raises CheckpointError if they do not fit. `strict`: as in torch."""
    weights = {name.removeprefix(NETWORK): tensor for name, tensor in state.items() if name.startswith(NETWORK)}
    kinds = {name: tensor.dtype for name, tensor in network.state_dict().items()}
    if dtypes := [tensor.dtype for name, tensor in weights.items() if tensor.dtype != kinds.get(name, tensor.dtype)]:
        raise CheckpointError(f"{path} has {str(dtypes[0]).removeprefix('torch.')} weights: use one of float32")
    try:
        network.load_state_dict(weights, strict)  # a checkpoint also has a discriminator, which only trains
    except RuntimeError as error:
        raise CheckpointError(f"{path} {_NO_FIT}") from error


# Weights files


def digest_of_file(header: dict[str, Any], state: dict[str, Tensor]) -> str:
    """The digest of the config and the weights of a file."""
    return digest([header["config"], digest_of_weights(state)])


def digest_of_weights(state: dict[str, Tensor]) -> str:
    """SHA-256 of the weights only: the same for a checkpoint and for the weights file that was exported from it."""
    return hashlib.sha256(packed(state)).hexdigest()


def packed(state: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Tensors as the bytes of a safetensors file, half precision as float32."""
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
    if isinstance(header, dict) and "config" in header and header.get("digest") != digest_of_file(header, state):
        raise ValueError("its digest does not match")
    return {CHECKPOINT_KEY: header, "state_dict": state}
