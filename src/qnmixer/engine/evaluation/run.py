"""The command `qnmixer.evaluate`: a trained run on its own slices, or on others in the form that its network needs."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from qnmixer.engine.checkpoints import find_checkpoint, load_run, split_of
from qnmixer.engine.config.commands import EvaluateConfig
from qnmixer.engine.config.compose import values_of
from qnmixer.engine.config.data import LOADING, AsTrained, DataConfig, FolderData, MixedData, PairData, PhantomData
from qnmixer.engine.config.options import keys_of
from qnmixer.engine.config.rules import one_scale
from qnmixer.engine.config.run import Config, targets_of
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.splits import RunSplit
from qnmixer.engine.evaluation.evaluate import PAGE, evaluate, title_of, what_was_evaluated, write_evaluation
from qnmixer.engine.evaluation.scores import Evaluation
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.plugins import check_trusted, module_of
from qnmixer.engine.reconstructor import build_noise
from qnmixer.engine.reports.terminal import Console
from qnmixer.engine.tracking.records import is_signed, read_results
from qnmixer.engine.tracking.run import Run
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.files import path_of
from qnmixer.weights import SUFFIX, located

_KEYS_OF_TEST = "simulation_factor", "disc"
"""Keys that turn the run's own slices into another test."""


def evaluate_run(config: EvaluateConfig, folder: Path, overrides: list[str]) -> Evaluation:
    """Run `qnmixer.evaluate`: compare a run with FBP, and write table, picture and results.json.

    Raises CheckpointError, ConfigError or DataError.
    """
    console = Console()
    trust = [*config.trust, *map(module_of, targets_of(config).values())]
    module = load_run(config.run, config.checkpoint, trust, "metrics.")
    checkpoint = find_checkpoint(config.run, config.checkpoint)
    trained, before = with_own_cache(module.config, checkpoint), split_of(checkpoint)
    data, own = (
        (as_trained(config.run, config.data, trained.data, trust), True)
        if isinstance(config.data, AsTrained)
        else other_slices(config.data, trained, overrides)
    )
    slices = SliceDataModule(data, split=RunSplit(before if own else None), geometry=module.projector.geometry)
    if config.noise is not None:
        trained.noise = config.noise
        one_scale(trained)
        module.measurement.noise = build_noise(trained)
    with Run(folder, overrides).recording() as record:
        if config.noise is not None and slices.measured:
            raise ConfigError(
                f"noise={config.noise.name} has no effect on the sinograms of data={data.name}, which were measured: "
                "leave it out"
            )
        device = choose_device(config.accelerator)
        evaluation = evaluate(module, slices, config.split, config.evaluation, device)
        evaluation.n_trained = slices.split.trained(config.split, before) if before else 0
        record |= {config.split: evaluation.means(), "evaluated": what_was_evaluated(module, data)}
        title = title_of(trained, slices, config.split)
        measured = replace(trained, data=data, evaluation=config.evaluation)
        picture = write_evaluation(folder, evaluation, title, measured, device, console, located(config.run))
        record["picture"] = str(picture)
    console.print(f"picture: {picture}", soft_wrap=True)
    if (folder / PAGE).exists():
        console.print(f"to look through: {folder / PAGE}", soft_wrap=True)
    return evaluation


def as_trained(run: str, changed: AsTrained, data: DataConfig, trust: Collection[str] = ()) -> DataConfig:
    """The run's own slices, with the changes that an evaluation may ask for.

    Raises CheckpointError for a weights file that was trained on files, because it does not name their folder. Also for
    data.root, if the run had no folder or several. Raises PluginError if the class of the slices is in no module of
    `trust`.
    """
    for source in data.by_section().values():
        if located(run).suffix == SUFFIX and not isinstance(source, PhantomData):
            where = [*source.choice(), *(["data.root=FOLDER"] if isinstance(source, FolderData | PairData) else [])]
            raise CheckpointError(f"{run} does not say where its slices are: give {' '.join(where)}")
    check_trusted(run, data.targets(), trust)
    if changed.root is not None and not isinstance(data, FolderData | PairData):
        raise CheckpointError(
            f"data.root={changed.root} is for a run on one folder, but {run} was trained with data={data.name}: leave "
            "it out, or choose other slices with data=dicom too"
        )
    changes = {key: value for key, value in vars(changed).items() if key != "_target_" and value is not None}
    return replace(data, **changes)


def with_own_cache(trained: Config, checkpoint: Path) -> Config:
    """The config of a run. If somebody else started it, slices are cached where this user does, not where it names."""
    data = trained.data
    if is_signed(read_results(checkpoint.parent.parent)):
        return trained
    if isinstance(data, MixedData):
        its = {name: given | dict.fromkeys({"cache_dir"} & given.keys()) for name, given in data.sources.items()}
        return replace(trained, data=replace(data, sources=its))
    return replace(trained, data=replace(data, cache_dir=None)) if isinstance(data, FolderData) else trained


def other_slices(data: DataConfig, trained: Config, overrides: list[str]) -> tuple[DataConfig, bool]:
    """Slices that the run was not trained on, in the form that its network needs; all of them, if no split is given.

    Also returns whether they are the run's own slices after all; then its split says which are test slices. Raises
    ConfigError for a key that would change these, and CheckpointError for one that the network cannot use.
    """
    given, asked = values_of(overrides), keys_of(data)
    of_set = {"max_attenuation"} & data.arguments.keys() & trained.data.arguments.keys()
    fixed = {key: getattr(trained.data, key) for key in ("image_size", "scaling", "hu_max", *of_set)}
    for key, value in fixed.items():
        if f"data.{key}" in given and getattr(data, key) != value:
            raise CheckpointError(
                f"the run was trained with data.{key}={value}: leave data.{key} out, or train another network"
            )
    seed = data.seed if "data.seed" in given else trained.data.seed
    data = data.changed(**{key: fixed.pop(key) for key in of_set})
    data = replace(data, **fixed, seed=seed)
    if isinstance(data, FolderData) and "data.split" not in given:
        for source in trained.data.by_section().values():
            if isinstance(source, FolderData) and _folder(data) == _folder(source):
                # else the evaluation would use slices that the network was trained on
                changed = [*_KEYS_OF_TEST, *(key for key in ("pixel_size", *LOADING) if f"data.{key}" in given)]
                own = replace(source, **{key: getattr(data, key) for key in changed})
                for key, value in asked.items():
                    if f"data.{key}" in given and key != "root" and value != (its := keys_of(own).get(key)):
                        raise ConfigError(
                            f"data.root={data.root} is the run's own folder, whose slices have data.{key}={its}: "
                            f"leave out data.{key}, or give data.split=all too for other slices of the folder"
                        )
                return own, True
        data = replace(data, split="all")
    if isinstance(data, FolderData) and "data.pixel_size" not in given and trained.data.at_true_size:
        data = replace(data, pixel_size="header")
    data.check(trained)
    return data, False


def _folder(data: FolderData) -> Path:
    return path_of(str(data.root)).resolve()
