"""The command `qnmixer.evaluate`: a trained run on its own slices, or on others in the form that its network needs."""

from collections.abc import Collection, Sequence
from copy import copy
from pathlib import Path

from qnmixer.data.own_datamodule import OwnDataModule
from qnmixer.data.splits import Overlap, RunSplit, SplitRecord
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.evaluation.evaluate import PAGE, RunData, evaluate, evaluated_source, what_was_evaluated, write_evaluation
from qnmixer.evaluation.evaluate_config import EvaluateConfig, RunEvaluationConfig, ScoringConfig
from qnmixer.evaluation.logs import log_evaluation
from qnmixer.evaluation.scores import Evaluation
from qnmixer.files import path_of
from qnmixer.measurement.build import build_geometry, measure_of
from qnmixer.measurement.own_data import build_own_data
from qnmixer.parallel.devices import choose_device
from qnmixer.reconstruction.checkpoints import Checkpoint, network_of, run_of
from qnmixer.reconstruction.cures import Cures
from qnmixer.reconstruction.reconstructor import Reconstructor, on_scan
from qnmixer.reconstruction.sections import AsTrained, WithCures, scan_for
from qnmixer.reconstruction.weights import SUFFIX, find_checkpoint, located
from qnmixer.runs.loggers import recording_scores
from qnmixer.runs.records import is_signed, own_modules, read_results
from qnmixer.runs.terminal import Console
from qnmixer.settings.compose import values_of
from qnmixer.settings.data import DataConfig, FolderData, PairData, PhantomData
from qnmixer.settings.plugins import check_trusted, is_trusted, module_of
from qnmixer.settings.rules import one_scale, scan_of_set
from qnmixer.settings.run import section, targets_of

_LOADING = "batch_size", "num_workers", "prefetch_factor", "pin_memory", "cache_dir"
"""Keys of how slices are loaded. They change no slice."""
_KEYS_OF_TEST = "simulation_factor", "disc"  # keys that turn the run's own slices into another test
_NO_PLACE = "{} does not say where its slices are: give data=NAME data.root=FOLDER, as data=dicom"


def evaluate_run(config: EvaluateConfig, folder: Path, overrides: list[str]) -> Evaluation:
    """Run `qnmixer.evaluate`: compare a run with FBP, and write table, picture and results.json.

    Raises CheckpointError, ConfigError or DataError.
    """
    console = Console()
    module, slices, split_record = on_test(config, config.run, overrides, needs_truth=False)
    if config.evaluation.first_order and module.network.first_order() is None:
        raise ConfigError(f"evaluation.first_order=true is for a network of second order: {config.run} has H = I")
    if config.n_slices is not None:
        slices = first_slices(slices, config.split, config.n_slices)
    device = choose_device(config.accelerator)
    with recording_scores(module.config, config.logger, device.type, folder, overrides) as (record, loggers):
        evaluation = evaluate(module, slices, config.split, config.evaluation, device, config.symmetries)
        evaluation.trained = slices.trained(config.split, split_record) if split_record else Overlap()
        record |= {config.split: evaluation.means(), "evaluated": what_was_evaluated(module, evaluation)}
        picture = write_evaluation(folder, evaluation, console)
        record["picture"] = str(picture)
        log_evaluation(loggers, evaluation, folder, config.split)
    console.lines(f"picture: {picture}", f"to look through: {folder / PAGE}")
    return evaluation


def on_test(
    config: ScoringConfig, run: str, overrides: list[str], seed: int | None = None, *, needs_truth: bool = True
) -> tuple[Reconstructor, RunData, SplitRecord | None]:
    """The trained network of a run with the noise of an evaluation, its slices, and the record of the run's split.

    It has the scan and the cures of the evaluation, if its config has any. `seed`: of phantoms and noise; None: the
    run's. Raises CheckpointError or ConfigError for what does not fit.
    """
    checkpoint = Checkpoint(find_checkpoint(run, config.checkpoint))
    trust = [*config.trust, *map(module_of, targets_of(config).values()), *own_modules(run_of(checkpoint.path))]
    trained, split_record = network_of(checkpoint, trust, "metrics."), checkpoint.split
    test = trained.config.changed(data=with_own_cache(trained.config.data, checkpoint.path))
    if isinstance(config, RunEvaluationConfig):
        test.geometry = scan_for(config.geometry, test.geometry)
    datamodule = trained.config.datamodule
    if isinstance(config.data, AsTrained):
        if not is_trusted(datamodule.target, ()) and checkpoint.path.suffix == SUFFIX:
            raise CheckpointError(_NO_PLACE.format(run))
        data, from_run = as_trained(run, config.data, test.data, trust), True
        check_trusted(run, datamodule.targets(), trust)
        if not datamodule.is_of_slices and data != test.data:
            raise CheckpointError(f"{run} has {datamodule.as_typed}, which takes no key of data: leave it out")
    else:
        data, from_run = other_slices(config.data, test.data, overrides)
        test.datamodule = section("datamodule", "default")
    scan_of_set(data, test.geometry)
    if seed is not None:
        data = data.changed(seed=seed) if isinstance(evaluated_source(data), PhantomData) else data
        test.seed = seed
    test.data, test.noise = data, config.noise or test.noise
    one_scale(test.data, test.noise)
    split = RunSplit(split_record if from_run else None)
    for_measured = test.noise.load().for_measured
    slices: RunData
    if test.datamodule.is_of_slices:
        # Noise of simulated sinograms is drawn on the device.
        measure = measure_of(test) if for_measured else None
        slices = test.datamodule.build(data, split=split, geometry=build_geometry(test), measure=measure)
    else:
        slices = build_own_data(test, config.split)
    source = test.source_as_typed
    if needs_truth and not slices.has_truth:
        raise ConfigError(f"{source} has no truth to compare with: give slices, as data=dicom, or use plain evaluate")
    if config.noise is not None and slices.measured and not for_measured:
        raise ConfigError(f"noise={config.noise.name} has no effect on measured sinograms of {source}: leave it out")
    cures = Cures(config.passes, config.start, config.mix) if isinstance(config, WithCures) else None
    return on_scan(trained, test, cures), slices, split_record


def first_slices(slices: RunData, part: str, n: int | None) -> RunData:
    """The same slices with the first n of a part only, from all patients in turn; None: all of it."""
    chosen = copy(slices)
    if isinstance(chosen, OwnDataModule):  # nobody knows its patients
        chosen.first = n
    else:
        chosen.setup()
        slices_of_part = chosen.parts[part]
        patients = slices_of_part.patients or range(len(slices_of_part.source))
        chosen.parts = chosen.parts | {part: slices_of_part.only(in_turn(patients)[:n])}
    return chosen


def in_turn(patients: Sequence[int]) -> list[int]:
    """The indices of slices, first the middle one of each patient, then its next one, until all are named."""
    places: dict[int, list[int]] = {}
    for index, patient in enumerate(patients):
        places.setdefault(patient, []).append(index)
    turns: dict[int, int] = {}
    for indices in places.values():
        middle = (len(indices) - 1) / 2
        nearest = sorted(range(len(indices)), key=lambda place: abs(place - middle))
        turns |= {indices[place]: turn for turn, place in enumerate(nearest)}
    return sorted(turns, key=lambda index: (turns[index], index))


def as_trained(run: str, changed: AsTrained, data: DataConfig, trust: Collection[str] = ()) -> DataConfig:
    """The run's own slices, with the changes that an evaluation may ask for.

    Raises CheckpointError for a weights file that was trained on files, because it does not name their folder. Also for
    data.root, if the run had no folder or several. Raises PluginError if the class of the slices is in no module of
    `trust`.
    """
    of_phantoms = all(isinstance(source, PhantomData) for source in data.by_section().values())
    if located(run).suffix == SUFFIX and not of_phantoms:
        raise CheckpointError(_NO_PLACE.format(run))
    check_trusted(run, data.targets(), trust)
    if changed.root is not None and not isinstance(data, FolderData | PairData):
        why = f"is for a run on one folder, but {run} was trained with data={data.name}"
        raise CheckpointError(f"data.root={changed.root} {why}: leave it out, or choose slices with data=dicom too")
    return data.changed(**{key: value for key, value in changed if value is not None})


def with_own_cache(data: DataConfig, checkpoint: Path) -> DataConfig:
    """The slices of a run. If somebody else started it, they are cached where this user does, not where it names."""
    if is_signed(read_results(run_of(checkpoint))):
        return data
    return data.with_each_source(
        lambda source: source.changed(cache_dir=None) if isinstance(source, FolderData) else source
    )


def other_slices(data: DataConfig, trained: DataConfig, overrides: list[str]) -> tuple[DataConfig, bool]:
    """Slices that the run was not trained on, in the form that its network needs; all of them, if no split is given.

    Also returns whether they are the run's own slices after all; then its split says which are test slices. Raises
    ConfigError for a key that would change these, and CheckpointError for one that the network cannot use.
    """
    keys = {key.removeprefix("data.") for key in values_of(overrides) if key.startswith("data.")}
    of_set = {"max_attenuation"} & data.arguments.keys() & trained.arguments.keys()
    fixed = {key: getattr(trained, key) for key in ("image_size", "scaling", "hu_max", *of_set)}
    for key, value in fixed.items():
        if key in keys and getattr(data, key) != value:
            raise CheckpointError(f"the run was trained with data.{key}={value}: leave it out, or train another one")
    seed = data.seed if "seed" in keys else trained.seed
    data = data.changed(**fixed, seed=seed)
    if isinstance(data, FolderData) and "split" not in keys:
        for source in trained.by_section().values():
            if isinstance(source, FolderData) and _folder(data) == _folder(source):
                # else the evaluation would use slices that the network was trained on
                if conflicts := sorted(keys - {"root", *fixed, *_KEYS_OF_TEST, *_LOADING}):
                    raise ConfigError(
                        f"data.root={data.root} is the run's own folder, which was split already: leave out "
                        f"data.{conflicts[0]}, or give data.split=all too for other slices of the folder"
                    )
                changed = [*_KEYS_OF_TEST, *(key for key in _LOADING if key in keys)]
                return source.changed(**{key: getattr(data, key) for key in changed}), True
        data = data.changed(split="all")
    if isinstance(data, FolderData) and "pixel_size" not in keys and trained.at_true_size:
        data = data.changed(pixel_size="header")
    return data, False


def _folder(data: FolderData) -> Path:
    return path_of(str(data.root)).resolve()
