"""The model card of a weights file: what it is, its training, its measured results, and its limits.

No figure in it is typed by hand. The figures come from the checkpoint, results.json and the tables in the run folder.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qnmixer.engine.checkpoints import built_from, digest_of_weights, steps_of
from qnmixer.engine.config.compose import quoted, values_of
from qnmixer.engine.config.options import TARGET, keys_of
from qnmixer.engine.config.run import Config, effective_batch, without_places
from qnmixer.engine.plugins import trust_words
from qnmixer.engine.reconstructor import Reconstructor, method_name
from qnmixer.engine.reports.terminal import markdown_table
from qnmixer.engine.tracking.records import best_of, duration, read_results, read_text
from qnmixer.weights import CHECKPOINT_KEY, PRETRAINED, SHIPPED, hub_library

_CARD = """\
# {method}, {size} × {size} pixels, {n_views} views

`{file}`: {n_parameters:,} parameters in float32, {megabytes}. It reconstructs a CT slice from a sparse-view {beam} \
sinogram. It is not a medical device: do not use its images for diagnosis.

## Training

{training}
{sources}
## Settings

{settings}

Lengths are in mm, angles in radians. The metadata of the file has the same settings, under `{key}`. Folders, patients \
and accounts are left out. Arguments of the user's own classes are not left out.

## Evaluations

{evaluations}

## How to use

```bash
python -m qnmixer.reconstruct {run} input=/path/to/dicom output=out
python -m qnmixer.evaluate {run} data=dicom data.root=/path/to/dicom
```

The first command reconstructs DICOM slices from {n_views} simulated views. It also takes measured sinograms, as \
.npy. The second compares the network with FBP. To train it further, give `finetune={name}` and the settings \
above to `qnmixer.train`.

## Where it fails

- Like any learned reconstruction, it can remove small details, or invent details that look right. The tables are \
means over slices. They say nothing about a single lesion.
- It was trained on slices of {slices}. With other scanners, protocols and anatomy its results can be worse: evaluate \
it on such slices. It does not know its training slices: in a folder that has them, they count as test slices.
- {sinograms} On other scans its results may be worse than in every table here.
- It is for one scan and one grid: {n_views} views, {n_detectors} bins, {size} × {size} pixels of {pixel:.4g} mm. \
Slices are resampled to that grid. Scans with other rays are interpolated to its rays, and no table here measures such \
scans.
- It is one run with one seed ({seed}). How much other seeds differ is not known.
"""
_UNKNOWN = "unknown"
_SECTIONS = ("model", "geometry", "data", "noise", "loss", "optimizer", "schedule", "strategy", "trainer")


def model_card(
    module: Reconstructor, checkpoint: Path, file: Path, size: int, sources: str = "", name: str | None = None
) -> str:
    """The card as Markdown.

    Args:
        module: the network that was exported.
        checkpoint: that it comes from, in a run folder.
        file: the weights file.
        size: size of the file in bytes.
        sources: a Markdown text about the slices: collections and licences.
        name: what `run=` calls the file. Default: its own name.
    """
    config, run = module.config, checkpoint.parent.parent
    record, geometry = read_results(run), config.geometry
    name = quoted(name or (PRETRAINED if file.resolve() == SHIPPED else file.name))
    shared = without_places(config)
    settings = [(section, _settings(getattr(shared, section))) for section in _SECTIONS]
    of_weights = evaluations(run, digest_of_weights(module.state_dict()))
    tables = [f"### {folder.relative_to(run)}\n\n{read_text(folder / 'table.md').strip()}" for folder in of_weights]
    return _CARD.format(
        method=method_name(config),
        size=config.data.image_size,
        n_views=geometry.n_views,
        n_detectors=geometry.n_detectors,
        pixel=geometry.field_of_view / config.data.image_size,
        beam="parallel-beam" if geometry.beam == "parallel" else "fan-beam",
        file=file.name,
        n_parameters=sum(parameter.numel() for parameter in module.network.parameters()),
        megabytes=f"{size / 1e6:.2f} MB",
        training=markdown_table(("", ""), _training(config, record, checkpoint)),
        sources=f"\n### Where the slices come from\n\n{sources}\n" if sources else "",
        settings=markdown_table(("", ""), settings),
        key=CHECKPOINT_KEY,
        evaluations="\n\n".join(tables) or "None of these weights was found in the run's folder.",
        run=shlex.join([f"run={name}", *trust_words(built_from(config).values())]),
        name=name,
        slices=", ".join(source.name for source in config.data.by_section().values()),
        sinograms=_sinograms(config, record),
        seed=config.seed,
    )


def _training(config: Config, record: dict[str, Any], checkpoint: Path) -> Iterator[tuple[str, str]]:
    step, batch, which = steps_of(checkpoint), effective_batch(config), checkpoint.name.split(".")[0]
    yield "started from", _started_from(config, record)
    monitor, best = best_of(record)
    score = f", {best:.4g}" if best is not None and monitor == config.monitor else ""
    chosen = {"best": f"the best of the run by {config.monitor}{score}", "last": "the last of the run"}
    yield "optimizer steps", f"{step} of {record.get('steps', _UNKNOWN)}: {chosen.get(which, checkpoint.name)}"
    yield "slices seen", f"at most {step * batch:,}, {batch} an optimizer step"
    yield "seed", str(config.seed)
    yield "time", f"{duration(record['seconds'])}, the whole run" if "seconds" in record else _UNKNOWN
    for title, key in {"device": "device", "started at": "started", "ended": "status", "commit": "git_commit"}.items():
        yield title, str(record.get(key) or _UNKNOWN)
    if "resumed" in record:
        yield "resumed", f"after steps {', '.join(str(one.get('step', _UNKNOWN)) for one in record['resumed'])}"
    versions = record.get("versions", {})
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items()) or _UNKNOWN


def _started_from(config: Config, record: dict[str, Any]) -> str:
    given = values_of(record.get("overrides", []))  # of the first start, also if the run was resumed later
    if config.finetune or given.get("finetune", "null") != "null":
        return "the weights of another run (finetune), whose training is not in this table"
    if given.get("resume", "null") != "null":
        return "a checkpoint of another run (resume), whose steps are in this table, but not its time"
    return "random weights" if record else _UNKNOWN


def _settings(section: Any) -> str:
    """The option of a group, if it has a name, and its keys."""
    keys = {key: value for key, value in keys_of(section).items() if key not in (TARGET, "name")}
    words = [f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in keys.items()]
    return ": ".join(filter(None, (getattr(section, "name", ""), ", ".join(words))))


def evaluations(run: Path, weights: str) -> Iterator[Path]:
    """The evaluations of training and of `qnmixer.evaluate` below the run folder: folders with a table.

    Only those of the weights with this digest.
    """
    for path in sorted(run.rglob("table.md")):
        by_training = path.parent == run / "evaluation"
        its = read_results(path.parent) or (read_results(run) if by_training else {})
        if its.get("status") == "done" and its.get("evaluated", {}).get("weights") == weights:
            yield path.parent


def hub_card(text: str) -> str:
    """A card with the header that a hub reads."""
    tags = ["computed-tomography", "sparse-view", "image-reconstruction"]
    header = hub_library().ModelCardData(library_name="qnmixer", tags=tags)
    return f"---\n{header.to_yaml()}\n---\n\n{text}"


def _sinograms(config: Config, record: dict[str, Any]) -> str:
    """A limit: the sinograms of its training. Of a class of the user's own only the record says who measured them."""
    if config.data.measured or record.get("sinograms") == "measured":
        return (
            f"It was trained on the sinograms of one set (data={config.data.name}), with that set's noise and errors."
        )
    noise = "without noise" if config.noise.name == "none" else f"with noise {_settings(config.noise)}"
    return (
        f"Its sinograms were simulated {noise}, with rays of one energy, without scatter, beam hardening, motion and "
        "metal artefacts."
    )
