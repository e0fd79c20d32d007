"""The split into training, validation and test. It is by patient, so no anatomy is in two parts.

A checkpoint has the record of its run's split. So files that are added, removed or renamed move no patient.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from qnmixer.data.fingerprints import WORDS_OF_LOOK, alike
from qnmixer.data.slices import SliceInfo, shortlist
from qnmixer.errors import DataError, suggest
from qnmixer.files import digest_of_bytes
from qnmixer.settings.data import FolderData, SinogramData

PARTS = ("train", "val", "test")
_KEYS = "patients", "slices"
_OF_SLICES = "slices", "originals", "looks", "people"

Split = dict[str, list[int]]
SplitRecord = dict[str, dict[str, Tensor]]
"""For each split `patients` and `slices`: digests of names and pixels, int64; `originals`, `looks` and `people` as in
`Traces`. Under `base` is the same, without `patients`, of the slices that the weights of `finetune` were trained on."""


class Traces(NamedTuple):
    """What is known of a slice in any size: the numbers of `qnmixer.data.fingerprints`, and digests of ids."""

    original: int
    look: list[int]
    people: list[int]


class Overlap(NamedTuple):
    """How many slices of a test a network was trained on."""

    same: int = 0  # these very slices
    likely: int = 0  # others that look like training slices, or are of patients with the same ids


class RunSplit:
    """The split of a run: drawn at its start, later read from the checkpoint.

    `saved_record`: of the checkpoint that the run resumes from or that is evaluated; None for a new run. `base`: slices
    that its initial weights were trained on, as `seen_by` returns them.
    """

    def __init__(self, saved_record: SplitRecord | None = None, base: dict[str, Tensor] | None = None) -> None:
        self._saved_record, self._base = saved_record, base
        self._found: dict[str, dict[str, list[int]]] = {part: {key: [] for key in _KEYS} for part in PARTS}
        self._traces: dict[str, list[Traces]] = {part: [] for part in PARTS}
        self._sections: dict[str, list[str]] = {part: [] for part in PARTS}  # of each slice

    @property
    def record(self) -> SplitRecord:
        """The record for a checkpoint."""
        if self._saved_record is not None:
            return self._saved_record
        base = {} if self._base is None else {"base": self._base}
        return base | {
            part: {key: _int64(columns[key]) for key in _KEYS} | _columns(self._traces[part])
            for part, columns in self._found.items()
        }

    def settle(
        self, section: str, patients: list[str], digests: list[int], config: FolderData, traces: Sequence[Traces] = ()
    ) -> tuple[Split, list[str]]:
        """Indices of the slices of each part, and the patients in no part, because the record does not know them.

        Each slice has its patient, a digest of its pixels, and its traces, if they are known. The section of the config
        separates the sources of a mix, which may have patients of the same name.
        """
        names = {patient: digest_of_bytes(f"{section}\0{patient}".encode(errors="replace")) for patient in patients}
        if self._saved_record is None:
            part_of, new_patients = draw_split(patients, config), set[str]()
        else:
            part_of = _part_by_record(self._saved_record, patients, names, digests)
            new_patients = names.keys() - part_of.keys()
        split: Split = {
            part: [i for i, patient in enumerate(patients) if part_of.get(patient) == part] for part in PARTS
        }
        for part, indices in split.items():
            self._found[part]["patients"] += dict.fromkeys(names[patients[i]] for i in indices)
            self._found[part]["slices"] += [digests[i] for i in indices]
            self._traces[part] += [traces[i] for i in indices if traces]
            self._sections[part] += [section] * len(indices)
        return split, sorted(new_patients)

    def trained(self, part: str, record: SplitRecord, section: str | None = None, first: int | None = None) -> Overlap:
        """The slices of a split that a run was trained on, whatever the names and sizes of their files are.

        `section`: of the only source that counts; `first`: how many of its slices count. None: all count.
        """
        indices = [i for i, name in enumerate(self._sections[part]) if section in (None, name)][:first]
        seen, slices = seen_by(record), self._found[part]["slices"]
        same_slices = torch.isin(_int64([slices[i] for i in indices]), seen["slices"])
        if not self._traces[part]:
            return Overlap(int(same_slices.sum()))
        traces = [self._traces[part][i] for i in indices]
        columns, people = _columns(traces), {*seen["people"].tolist()}
        same_slices |= torch.isin(columns["originals"], seen["originals"])
        likely_slices = alike(columns["looks"], seen["looks"])
        likely_slices |= torch.tensor([not people.isdisjoint(trace.people) for trace in traces], dtype=torch.bool)
        return Overlap(int(same_slices.sum()), int((likely_slices & ~same_slices).sum()))


def _columns(traces: Sequence[Traces]) -> dict[str, Tensor]:
    return {
        "originals": _int64([trace.original for trace in traces]),
        "looks": _int64([number for trace in traces for number in trace.look]),
        "people": _int64([*dict.fromkeys(number for trace in traces for number in trace.people)]),
    }


def traces_of(
    infos: Sequence[SliceInfo], originals: Sequence[int], looks: Sequence[list[int]], config: FolderData
) -> list[Traces]:
    """The traces of the slices of a folder. Ids are the UIDs, and the patient's tag unless folders are the patients."""
    traces = []
    for info, digest, appearance in zip(infos, originals, looks, strict=True):
        ids = [f"uid\0{uid}" for uid in info.uids.split()]
        if info.patient and config.patient_from == "tag":
            ids.append(f"patient\0{info.patient}")
        traces.append(Traces(digest, appearance, [digest_of_bytes(text.encode(errors="replace")) for text in ids]))
    return traces


def _part_by_record(
    record: SplitRecord, patients: Sequence[str], names: dict[str, int], digests: Sequence[int]
) -> dict[str, str]:
    """The part of each patient. Its name or any of its slices may be in the record.

    If the record gives several parts, it counts as trained: a file may have got the name of another file.
    """
    by_name = {name: part for part in PARTS for name in record[part]["patients"].tolist()}
    # By pixels too: a renamed patient must not move from training to test.
    by_digest: dict[int, set[str]] = {}
    for part in PARTS:
        for number in record[part]["slices"].tolist():
            by_digest.setdefault(number, set()).add(part)
    candidates: dict[str, set[str]] = {}
    for patient, number in zip(patients, digests, strict=True):
        named_part, parts = by_name.get(names[patient]), by_digest.get(number, set())
        # Slices that are alike, as empty ones are, may be in several parts.
        candidates.setdefault(patient, set()).update(
            {named_part} if named_part is not None and (named_part in parts or not parts) else parts
        )
    return {patient: min(parts, key=PARTS.index) for patient, parts in candidates.items() if parts}


def is_split_record(record: Any) -> TypeGuard[SplitRecord]:
    """Whether an object from a file is a record of this program."""
    if not (isinstance(record, dict) and {*PARTS} <= {*record} <= {*PARTS, "base"}):
        return False
    for part, columns in record.items():
        if not isinstance(columns, dict) or {*columns} != {*_OF_SLICES, *(_KEYS if part in PARTS else ())}:
            return False
        if not all(
            isinstance(column, Tensor) and column.dtype == torch.int64 and column.ndim == 1
            for column in columns.values()
        ):
            return False
        if len(columns["looks"]) != WORDS_OF_LOOK * len(columns["originals"]):
            return False
    return True


def seen_by(record: SplitRecord) -> dict[str, Tensor]:
    """The slices that the weights were trained on, in this run or in the run that `finetune` names."""
    parts = [record[part] for part in ("train", "base") if part in record]
    return {key: torch.cat([columns[key] for columns in parts]) for key in _OF_SLICES}


def patients_of(infos: Sequence[SliceInfo], config: FolderData) -> list[str]:
    """The patient of each slice: the patient that the file names, or else a folder.

    That is the first folder below the common part of all paths. Without such a folder each `.npy` file, or file of
    sinograms, is a patient of its own, and other files belong to the folder that contains them.
    """
    folders = [PurePosixPath(info.path).parent.parts for info in infos]
    common = 0
    while all(len(parts) > common and parts[common] == folders[0][common] for parts in folders):
        common += 1

    def patient_of(info: SliceInfo, parts: tuple[str, ...]) -> str:
        if info.patient and config.patient_from == "tag":
            return info.patient
        if len(parts) > common:
            return parts[common]
        path = PurePosixPath(info.path)
        is_one = path.suffix.lower() == ".npy" or isinstance(config, SinogramData)
        return path.stem if is_one else [Path(str(config.root)).resolve().name, *parts][-1]

    return [patient_of(info, parts) for info, parts in zip(infos, folders, strict=True)]


def files_as_patients(infos: Sequence[SliceInfo], patients: Sequence[str]) -> list[str]:
    """The files with one slice that `patients_of` takes for a patient each: no tag and no folder names one."""
    return [
        info.path
        for info, patient in zip(infos, patients, strict=True)
        if info.n_frames == 1
        and patient == PurePosixPath(info.path).stem
        and patient not in (info.patient, *PurePosixPath(info.path).parent.parts)
    ]


def draw_split(patients: Sequence[str], config: FolderData) -> dict[str, str]:
    """The split of each patient by the rule that `config.split` names. Who is in no split is left out."""
    if config.split == "train":
        return dict.fromkeys(patients, "train")
    if config.split == "all":
        return dict.fromkeys(patients, "test")
    if config.split == "random":
        return _random(patients, config)
    return _explicit(patients, config)


def _random(patients: Sequence[str], config: FolderData) -> dict[str, str]:
    """Split patients at random by the seed. Each split gets at least one. The patient with the most slices trains."""
    counts = Counter(patients)
    names = sorted(counts)
    if len(names) < 3:
        by_tag = "take data.patient_from=folder if each folder is a patient, " if config.patient_from == "tag" else ""
        raise DataError(
            f"data.root={config.root} shows {len(names)} patient(s) ({', '.join(names)}), too few for train, val and "
            f"test by patient: add patients, {by_tag}or take data.split=all to evaluate only, or "
            "data.split=train trainer.limit_val_batches=0 test_after_training=false to train only"
        )
    largest = max(names, key=lambda name: counts[name])
    # The second number gives the split a stream of its own, apart from other draws with this seed.
    candidates = [name for name in names if name != largest]
    permutation = [candidates[i] for i in np.random.default_rng([config.seed, 0x5B117]).permutation(len(candidates))]
    n_val = max(1, round(config.val_fraction * len(names)))
    n_test = max(1, min(round(config.test_fraction * len(names)), len(permutation) - n_val))
    n_val = min(n_val, len(permutation) - n_test)
    part_of = dict.fromkeys(names, "train") | dict.fromkeys(permutation[:n_val], "val")
    return part_of | dict.fromkeys(permutation[n_val : n_val + n_test], "test")


def _explicit(patients: Sequence[str], config: FolderData) -> dict[str, str]:
    """Split patients by the three lists. An empty training list takes all others."""
    patient_names = sorted(set(patients))
    lists = {"train": config.train_patients, "val": config.val_patients, "test": config.test_patients}
    part_of: dict[str, str] = {}
    for part, names in lists.items():
        for name in names:
            if name not in patient_names:
                raise DataError(
                    f"data.{part}_patients={name} is no patient below {config.root}: "
                    f"{suggest(name, patient_names, len(patient_names))}"
                )
            if name in part_of:
                raise DataError(f"data.{part}_patients={name} is also in data.{part_of[name]}_patients: name it once")
            part_of[name] = part
    if not config.train_patients:
        part_of = dict.fromkeys(patient_names, "train") | part_of
    if missing := [part for part in PARTS if part not in part_of.values()]:
        raise DataError(
            f"data.split=explicit finds nothing for {' and '.join(missing)} below {config.root}: fill the lists "
            f"data.val_patients and data.test_patients; there are {shortlist(patient_names)}"
        )
    return part_of


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
