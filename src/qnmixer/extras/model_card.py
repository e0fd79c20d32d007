"""The model card of a weights file: what it is, its training, its measured results, and its limits.

No figure in it is typed by hand. The figures come from the checkpoint, results.json and the tables in the run folder.
"""

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qnmixer.engine.checkpoints.reading import built_from
from qnmixer.engine.config import Config, effective_batch, to_plain
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.data import DataConfig, FolderData, MixedData, PhantomData
from qnmixer.engine.config.overrides import quoted, values_of
from qnmixer.engine.config.sections import GeometryConfig
from qnmixer.engine.config.target import TARGET, keys_of, options, values_of_option
from qnmixer.engine.plugins import trust_words
from qnmixer.engine.reconstructor import method_name
from qnmixer.engine.reports.tables import markdown_table
from qnmixer.engine.tracking.results import duration, read_results
from qnmixer.weights import CHECKPOINT_KEY, PRETRAINED, SHIPPED

_UNKNOWN = "unknown"


@dataclass(kw_only=True)
class Exported:
    """Weights that were exported to a file, and their origin.

    Attributes:
        file: the weights file.
        size: size of the file in bytes.
        n_parameters: parameters of the network.
        config: config of the run.
        run: the run folder.
        checkpoint: name of the checkpoint, such as "best" or "last".
        weights: digest of the weights.
        step: optimizer steps of the checkpoint.
        sources: a Markdown text about the slices: collections and licences.
    """

    file: Path
    size: int
    n_parameters: int
    config: Config
    run: Path
    checkpoint: str
    weights: str
    step: int
    sources: str = ""

    @property
    def megabytes(self) -> str:
        """The size as text."""
        return f"{self.size / 1e6:.2f} MB"

    @property
    def name(self) -> str:
        """The value for `run=` and `finetune=`."""
        return PRETRAINED if self.file.resolve() == SHIPPED else self.file.name


@dataclass(kw_only=True)
class Measured:
    """One evaluation in a run folder: its name and its table. results.json gives its slices and its noise."""

    folder: str
    text: str
    data: str
    noise: dict[str, Any]


def model_card(of: Exported) -> str:
    """The card as Markdown."""
    config, record = of.config, read_results(of.run)
    measured = [*_evaluations(of, record)]
    but = ". Arguments of the user's own classes are not left out" if own_arguments(config) else ""
    size = f"{config.data.image_size} × {config.data.image_size} pixels"
    lines = [
        f"# {method_name(config)}, {size}, {config.geometry.n_views} views",
        "",
        f"`{of.file.name}`: {of.n_parameters:,} parameters in float32, {of.megabytes}. It reconstructs a CT slice from "
        f"a sparse-view {'parallel' if config.geometry.beam == 'parallel' else 'fan'}-beam sinogram. It is not a "
        "medical device: do not use its images for diagnosis.",
        "",
        "## Network",
        "",
        markdown_table(("", ""), _network(config)),
        "",
        "## Training",
        "",
        markdown_table(("", ""), _training(of, record)),
        "",
        *(["### Where the slices come from", "", of.sources, ""] if of.sources else []),
        "## Evaluations",
        "",
        *_measured(measured),
        "## How to use",
        "",
        *_use(of),
        "",
        "## Where it fails",
        "",
        *(f"- {line}" for line in _limits(config, measured, record)),
        "",
        f"The metadata of the file has the whole configuration of the run, under `{CHECKPOINT_KEY}`. Folders, patients "
        f"and accounts are left out{but}.",
    ]
    return "\n".join(lines) + "\n"


def _network(config: Config) -> Iterator[tuple[str, str]]:
    g, size = config.geometry, config.data.image_size
    T = f", T = {config.model.T}" if config.model.T > 1 else ""
    yield "network", f"{method_name(config)}{T}"
    yield "settings", _settings(config.model)
    yield (
        "input",
        f"{g.n_views} views over {math.degrees(abs(g.angle_span)):.4g}° × {g.n_detectors} detector bins of "
        f"{g.detector_pitch:.4g} mm{f', {g.detector_offset:+.4g} bins off the middle' if g.detector_offset else ''}",
    )
    yield "scan", f"{_beam(g)}, FBP filter {g.fbp_filter}"
    scale = f"−1000 to {config.data.hu_max:.4g} HU" if config.data.scaling == "attenuation" else "each slice's own"
    pixel = f"{g.field_of_view / size:.4g} mm ({g.field_of_view:.4g} mm in all)"
    yield "output", f"{size} × {size} pixels of {pixel}; 0 to 1 is {scale}"


def _beam(g: GeometryConfig) -> str:
    if g.beam == "parallel":
        return "parallel beam"
    kind = "flat" if g.beam == "fan_flat" else "curved"
    return f"{kind} fan beam, source to axis {g.source_to_axis:.4g} mm, axis to detector {g.axis_to_detector:.4g} mm"


def _training(of: Exported, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    config, trainer, batch = of.config, of.config.trainer, effective_batch(of.config)
    yield "slices", _slices(config)
    yield "sinograms", _sinograms(config, record)
    yield "started from", _started_from(config, record)
    score = f", {record['best'][config.monitor]:.4g}" if of.checkpoint == "best" and "best" in record else ""
    chosen = {"best": f"the best of the run by {config.monitor}{score}", "last": "the last of the run"}
    total = record.get("steps", _UNKNOWN)
    yield "optimizer steps", f"{of.step} of {total}: {chosen.get(of.checkpoint, f'{of.checkpoint}.ckpt')}"
    yield "slices seen", f"at most {of.step * batch:,}, {batch} an optimizer step"
    yield "seeds", f"{config.seed}, of slices {config.data.seed}"
    yield "loss", _settings(config.loss)
    clip = trainer.gradient_clip_val
    yield "optimizer", f"{_settings(config.optimizer)}{'' if clip is None else f'; gradients clipped at {clip:g}'}"
    yield "schedule", f"{_settings(config.schedule)}; fractions are of the whole run"
    yield "time", f"{duration(record['seconds'])}, the whole run" if "seconds" in record else _UNKNOWN
    yield "hardware", _hardware(config, record)
    yield "started at", str(record.get("started", _UNKNOWN))
    if "resumed" in record:
        yield "resumed", f"after steps {', '.join(str(one['step']) for one in record['resumed'])}"
    if record.get("status") != "done":
        yield "ended", str(record.get("status", _UNKNOWN))
    yield "commit", str(record.get("git_commit") or _UNKNOWN)
    versions = record.get("versions", {})
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items()) or _UNKNOWN


def _started_from(config: Config, record: dict[str, Any]) -> str:
    given = values_of(record.get("overrides", []))  # of the first start, also if the run was resumed later
    if config.finetune or given.get("finetune", "null") != "null":
        return "the weights of another run (finetune), whose training is not in this table"
    if given.get("resume", "null") != "null":
        return "a checkpoint of another run (resume), whose steps are in this table, but not its time"
    return "random weights"


def _slices(config: Config) -> str:
    data = config.data
    if not isinstance(data, MixedData):
        epoch = f" of {data.n_train}" if isinstance(data, PhantomData) else ""
        return _of_source(data, epoch)
    sources = [replace(source, train_slices=None) for source in data.by_section().values()]
    few = (
        f"; the same {data.train_slices} slices at most in every epoch, of all sources together"
        if data.train_slices
        else ""
    )
    return (
        "; ".join(
            f"{100 * share:.4g} % {_of_source(source)}"
            for share, source in zip(data.shares.values(), sources, strict=True)
        )
        + few
    )


def _of_source(data: DataConfig, epoch: str = "") -> str:
    size = f"{data.image_size} × {data.image_size}"
    augmented = ", flipped and turned at random" if data.augment else ""
    if isinstance(data, PhantomData):
        few = data.train_slices and min(data.train_slices, data.n_train)
        which = f"the same {few} in every epoch" if few else f"new ones every epoch{epoch}"
        return (
            f"phantoms drawn by this program, {size}, {which}; "
            f"{100 * data.anatomy_share:.4g} % resemble a body, the others are ellipses{augmented}"
        )
    split = f", split {data.split}" if isinstance(data, FolderData) else ""
    number = f"at most {data.train_slices}" if data.train_slices else _UNKNOWN
    return f"slices from files, data={data.name}, {size}{split}{augmented}; number of slices: {number}"


def _were_measured(config: Config, record: dict[str, Any]) -> bool:
    """Whether a scanner measured the sinograms. Of a class of the user's own only the record says so."""
    return config.data.measured or record.get("sinograms") == "measured"


def _sinograms(config: Config, record: dict[str, Any]) -> str:
    if _were_measured(config, record):
        return f"those of data={config.data.name}, to which no noise was added"
    factor = config.data.simulation_factor
    grid = f"a {factor} times finer grid" if factor > 1 else "the grid of the image"
    return f"simulated from {grid}; noise {_settings(config.noise)}"


def _hardware(config: Config, record: dict[str, Any]) -> str:
    trainer = config.trainer
    n = (trainer.devices or 1) * trainer.num_nodes
    threads = f", threads: {record['threads']}" if trainer.accelerator == "cpu" and "threads" in record else ""
    name = record.get("device", _UNKNOWN)
    devices = f"{n} × {name}" if n > 1 else name
    tf32 = " with products in TF32" if trainer.tf32 else ""
    return f"{devices}{threads}; strategy {config.strategy.name}, precision {trainer.precision}{tf32}"


def _settings(section: Any) -> str:
    """The option of a group, and its keys."""
    keys = ", ".join(f"{key} {_number(value)}" for key, value in keys_of(section).items() if key != TARGET)
    return f"{section.name}{f': {keys}' if keys else ''}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _evaluations(of: Exported, record: dict[str, Any]) -> Iterator[Measured]:
    """The tables of training and of `qnmixer.evaluate` below the run folder, if they belong to these weights."""
    for path in sorted(of.run.rglob("table.md")):
        by_training = path.parent == of.run / "evaluation"
        its = read_results(path.parent) or (record if by_training else {})
        what = its.get("evaluated", {})
        if its.get("status") == "done" and what.get("weights") == of.weights:
            folder = str(path.parent.relative_to(of.run))
            yield Measured(folder=folder, text=path.read_text().strip(), data=what["data"], noise=what["noise"])


def _measured(measured: list[Measured]) -> Iterator[str]:
    if not measured:
        yield from ("None of these weights was found in the run's folder.", "")
    for one in measured:
        yield from (f"### {one.folder}", "", one.text, "")


def _use(of: Exported) -> Iterator[str]:
    config = of.config
    words = shlex.join([f"finetune={quoted(of.name)}", *_of_run(config), "data=dicom", "data.root=/path/to/dicom"])
    groups = [group for group in ("model", "noise") if own_arguments(config, group)]
    own = " (add +GROUP.KEY=VALUE for each argument of its own classes, as listed above)" if groups else ""
    yield "```bash"
    run = shlex.join([f"run={quoted(of.name)}", *trust_words(built_from(config).values())])
    yield f"python -m qnmixer.reconstruct {run} input=/path/to/dicom output=out"
    yield f"python -m qnmixer.evaluate {run} data=dicom data.root=/path/to/dicom"
    yield f"python -m qnmixer.train {words}"
    yield "```"
    yield ""
    yield (
        f"The first command reconstructs DICOM slices from {config.geometry.n_views} simulated views. It also takes "
        "measured sinograms, as .npy and .mat. The second compares the network with FBP. The third trains it further "
        f"on your slices{own}."
    )


def _of_run(config: Config) -> Iterator[str]:
    """The overrides for `qnmixer.train` that build the same network, scan and noise.

    Keys whose default is the same are left out, and so are arguments of the user's own classes.
    """
    usual, ours = compose("train", []), to_plain(config)
    sections = [
        section for section in (config.model, config.noise) if section._target_ != usual[section.group]._target_
    ]
    chosen = [word for section in sections for word in section.choice()]
    yield from chosen
    usual = compose("train", chosen)
    keys = {"model": ours["model"], "geometry": ours["geometry"], "noise": ours["noise"]}
    for section, those in {**keys, "data": ("image_size", "scaling", "hu_max")}.items():
        known = {*usual[section]}  # all other keys are arguments
        for key in those:
            value = ours[section][key]
            if key in known and key != TARGET and usual[section].get(key) != value:
                yield f"{section}.{key}={value if isinstance(value, str) else json.dumps(value)}"


def own_arguments(config: Config, *groups: str) -> dict[str, Any]:
    """Arguments of the user's own classes and functions, by key: in the given groups, or in all groups but data."""
    found: dict[str, Any] = {}
    for group in groups or ("model", "noise", "loss", "optimizer", "schedule"):
        section = getattr(config, group)
        known = values_of_option(group, section.name if section.name in options(group) else "custom")
        found |= {f"{group}.{key}": value for key, value in section.arguments.items() if key not in known}
    return found


def _limits(config: Config, measured: list[Measured], record: dict[str, Any]) -> Iterator[str]:
    g, size = config.geometry, config.data.image_size
    yield (
        "Like any learned reconstruction, it can remove small details, or invent details that look right. The tables "
        "are means over slices. They say nothing about a single lesion."
    )
    if isinstance(config.data, PhantomData):
        yield f"It has seen no patient: it was trained on drawn phantoms only. {_on_real_slices(measured)}"
    else:
        yield (
            f"It was trained on slices of {_sources(config.data)}. With other scanners, protocols and anatomy its "
            "results can be worse: evaluate it on such slices. It does not know its training slices. If you evaluate "
            "a folder that has them, they count as test slices."
        )
    if _were_measured(config, record):
        yield (
            f"It was trained on the sinograms of one set (data={config.data.name}), with that set's noise and errors. "
            "On other scans its results may be worse than in every table here."
        )
    else:
        yield _on_noise(config, measured)
        yield (
            "Its sinograms were simulated with rays of one energy, without scatter, beam hardening, motion and metal "
            "artefacts. On measured scans its results may be worse than in every table here."
        )
    yield (
        f"It is for one scan and one grid: {g.n_views} views, {g.n_detectors} bins, {size} × {size} pixels of "
        f"{g.field_of_view / size:.4g} mm. Slices are resampled to that grid. Scans with other rays are interpolated "
        "to its rays. No table here measures such scans."
    )
    yield f"It is one run with one seed ({config.seed}). How much other seeds differ is not known."


def _sources(data: DataConfig) -> str:
    names = [source.name for source in data.by_section().values()]
    return f"one source (data={data.name})" if len(names) == 1 else f"{len(names)} sources ({', '.join(names)})"


def _on_real_slices(measured: list[Measured]) -> str:
    if found := [one.folder for one in measured if one.data != "phantoms"]:
        return f"Its results on real slices are in {', '.join(found)} above."
    return "No table above is of real slices, so its results there are not known."


def _on_noise(config: Config, measured: list[Measured]) -> str:
    trained = "without noise" if config.noise.name == "none" else f"with noise {_settings(config.noise)}"
    if found := [one.folder for one in measured if one.noise != keys_of(config.noise)]:
        return f"It was trained {trained}. Its results with other noise are in {', '.join(found)} above."
    return f"It was trained {trained}. Its results with other noise are not known, as no table above has other noise."
