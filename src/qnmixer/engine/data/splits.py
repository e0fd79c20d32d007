"""The split into training, validation and test. It is by patient, so no anatomy is in two parts.

A checkpoint has the record of its run's split. So files that are added, removed or renamed move no patient.
"""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from qnmixer.engine.config.data import FolderData
from qnmixer.engine.data.slices import SliceInfo
from qnmixer.errors import DataError
from qnmixer.files import digest_of_bytes

PARTS = ("train", "val", "test")
AAPM_PATIENTS = ("L067", "L096", "L109", "L143", "L192", "L286", "L291", "L310", "L333", "L506")
AAPM_VAL, AAPM_TEST = "L333", "L310"
_AAPM_NAME = re.compile(r"(?<![A-Za-z0-9])L\d{3}(?![0-9])")

Split = dict[str, list[int]]
SplitRecord = dict[str, dict[str, Tensor]]
"""For each split `patients` and `slices`: digests of names and pixels, int64; under `base` the `slices` that the
weights of `finetune` were trained on."""


class RunSplit:
    """The split of a run: drawn at its start, later read from the checkpoint.

    Args:
        before: of the checkpoint that the run resumes from or that is evaluated; None for a new run.
        base: slices that its initial weights were trained on.
    """

    def __init__(self, before: SplitRecord | None = None, base: Tensor | None = None) -> None:
        self._before, self._base = before, base
        self._patients: dict[str, list[int]] = {part: [] for part in PARTS}
        self._slices: dict[str, list[int]] = {part: [] for part in PARTS}

    @property
    def record(self) -> SplitRecord:
        """The record for a checkpoint."""
        if self._before is not None:
            return self._before
        base = {} if self._base is None else {"base": {"slices": self._base}}
        return base | {
            part: {"patients": _int64(self._patients[part]), "slices": _int64(self._slices[part])} for part in PARTS
        }

    def settle(
        self, section: str, infos: Sequence[SliceInfo], patients: Sequence[str], digests: Sequence[int], its: FolderData
    ) -> tuple[Split, list[str]]:
        """Indices of the slices of each part, and the patients in no part, because the record does not know them.

        Args:
            section: of the config. It separates the sources of a mix, which may have patients of the same name.
            infos: of all slices.
            patients: the patient of each slice.
            digests: digest of the pixels of each slice.
            its: the source.
        """
        names = [digest_of_bytes(f"{section}\0{patient}".encode(errors="replace")) for patient in patients]
        split = self._drawn(infos, patients, digests, its)
        if split is None:
            split = self._as_before(patients, names, digests, by_slice=its.split == "slices")
        for part, indices in split.items():
            self._patients[part] += dict.fromkeys(names[i] for i in indices)
            self._slices[part] += [digests[i] for i in indices]
        kept = {i for indices in split.values() for i in indices}
        new = {patients[i] for i in range(len(patients)) if i not in kept} if self._before is not None else set()
        return split, sorted(new)

    def digests(self, part: str) -> list[int]:
        """Digests of the pixels of each slice of a split; empty for slices that are not from a folder."""
        return self._slices[part]

    def trained(self, part: str, record: SplitRecord) -> int:
        """The number of slices of a split that a run was trained on, whatever the names of their files are."""
        return int(torch.isin(_int64(self._slices[part]), seen_by(record)).sum())

    def _drawn(
        self, infos: Sequence[SliceInfo], patients: Sequence[str], digests: Sequence[int], its: FolderData
    ) -> Split | None:
        """The split by its rule, unless the record has a slice elsewhere. So equal slices stay in their parts."""
        if self._before is None:
            return split_slices(infos, patients, its)
        try:
            split = split_slices(infos, patients, its)
        except DataError:  # for example, too few patients are left
            return None
        known = {part: {*self._before[part]["slices"].tolist()} for part in PARTS}
        return split if all({digests[i] for i in split[part]} <= known[part] for part in PARTS) else None

    def _as_before(
        self, patients: Sequence[str], names: Sequence[int], digests: Sequence[int], by_slice: bool
    ) -> Split:
        """Each patient, or each slice, in its part by the record. Its name or any of its slices may be in the record.

        If the record gives several parts, it counts as trained: a file may have got the name of another file.
        """
        assert self._before is not None
        by_name = {name: part for part in PARTS for name in self._before[part]["patients"].tolist()}
        # By pixels too: a renamed patient must not move from training to test.
        by_digest: dict[int, set[str]] = {}
        for part in PARTS:
            for number in self._before[part]["slices"].tolist():
                by_digest.setdefault(number, set()).add(part)
        units = [str(i) for i in range(len(patients))] if by_slice else patients
        found: dict[str, set[str]] = {unit: set() for unit in units}
        for unit, name, number in zip(units, names, digests, strict=True):
            own = None if by_slice else by_name.get(name)
            parts = by_digest.get(number, set())
            found[unit] |= {own} if own is not None and (own in parts or not parts) else parts
        return _by_part(units, {unit: min(parts, key=PARTS.index) for unit, parts in found.items() if parts})


def is_split_record(found: Any) -> TypeGuard[SplitRecord]:
    """Whether an object from a file is a record of this program."""
    if not (isinstance(found, dict) and {*PARTS} <= {*found} <= {*PARTS, "base"}):
        return False
    keys = {part: {"patients", "slices"} if part in PARTS else {"slices"} for part in found}
    return all(
        isinstance(its, dict)
        and {*its} == keys[part]
        and all(isinstance(it, Tensor) and it.dtype == torch.int64 and it.ndim == 1 for it in its.values())
        for part, its in found.items()
    )


def seen_by(record: SplitRecord) -> Tensor:
    """The slices that the weights were trained on, in this run or in the run that `finetune` names."""
    return torch.cat([record[key]["slices"] for key in ("train", "base") if key in record])


def patients_of(infos: Sequence[SliceInfo], config: FolderData) -> list[str]:
    """The patient of each slice: the patient that the file names, or else a folder.

    That folder has a name like L067 (AAPM-Mayo), or else it is the first folder below the common part of all paths.
    Without such a folder each `.npy` file is a patient of its own, and other files belong to the folder that contains
    them. With split=aapm a name like L067 anywhere in this patient or in the path is the patient.
    """
    folders = [PurePosixPath(info.path).parent.parts for info in infos]
    root_name = Path(str(config.root)).resolve().name
    common = 0
    while all(len(parts) > common and parts[common] == folders[0][common] for parts in folders):
        common += 1

    def by_folder(info: SliceInfo, parts: tuple[str, ...]) -> str:
        named = [part for part in parts if _AAPM_NAME.fullmatch(part)]
        if named:
            return named[0]
        if len(parts) > common:
            return parts[common]
        if info.path.lower().endswith(".npy"):
            return PurePosixPath(info.path).stem
        return parts[-1] if parts else root_name

    patients = [
        info.patient if info.patient and config.patient_from == "tag" else by_folder(info, parts)
        for info, parts in zip(infos, folders, strict=True)
    ]
    if config.split == "aapm":
        found = [_AAPM_NAME.search(f"{patient} {info.path}") for patient, info in zip(patients, infos, strict=True)]
        return [name.group() if name else patient for name, patient in zip(found, patients, strict=True)]
    return patients


def join_patients(infos: Sequence[SliceInfo], patients: Sequence[str]) -> tuple[list[str], list[str]]:
    """The patient of each slice where a study or series has one only, and the names that were joined, as "A = B".

    Such a patient has the tag that most of its slices have.
    """
    above: dict[str, str] = {}  # a patient or UID, and one that is of the same patient

    def top(it: str) -> str:
        while above.setdefault(it, it) != it:
            above[it] = above[above[it]]  # shorter ways for the next ones
            it = above[it]
        return it

    for info, patient in zip(infos, patients, strict=True):
        for uid in info.uids.split():
            above[top(f"UID {uid}")] = top(f"patient {patient}")
    groups = [top(f"patient {patient}") for patient in patients]
    names: dict[str, Counter[tuple[bool, str]]] = {group: Counter() for group in groups}
    for group, info, patient in zip(groups, infos, patients, strict=True):
        names[group][patient == info.patient, patient] += 1
    best = {group: max(its, key=lambda name: (name[0], its[name], name))[1] for group, its in names.items()}
    joined = [sorted({name for _, name in its}) for its in names.values()]
    return [best[group] for group in groups], [" = ".join(its) for its in joined if len(its) > 1]


def files_as_patients(infos: Sequence[SliceInfo], patients: Sequence[str]) -> list[str]:
    """The `.npy` files with one slice that `patients_of` takes for a patient each: no tag and no folder names one."""
    return [
        info.path
        for info, patient in zip(infos, patients, strict=True)
        if info.n_frames == 1
        and info.path.lower().endswith(".npy")
        and patient not in (info.patient, *PurePosixPath(info.path).parent.parts)
    ]


def split_slices(infos: Sequence[SliceInfo], patients: Sequence[str], config: FolderData) -> Split:
    """Indices of the slices of each split, by the rule that `config.split` names."""
    if config.split == "all":
        return {"train": [], "val": [], "test": list(range(len(infos)))}
    if config.split == "slices":
        return _blocks(infos, config)
    rules = {"random": _random, "aapm": _aapm, "explicit": _explicit}
    split = _by_part(patients, rules[config.split](patients, config))
    if missing := [part for part in PARTS if not split[part]]:
        needs = f"it needs {AAPM_VAL} (val), {AAPM_TEST} (test) and one of the other eight"
        if config.split == "explicit":
            needs = f"fill data.{missing[0]}_patients"
        raise DataError(
            f"data.split={config.split} finds nothing for {' and '.join(missing)} below {config.root}: {needs}; there "
            f"are {few(sorted(set(patients)))}"
        )
    return split


def _by_part(patients: Sequence[str], part_of: dict[str, str]) -> Split:
    """Indices of each split, from the split of each patient. Patients without one are left out."""
    split: Split = {part: [] for part in PARTS}
    for i, patient in enumerate(patients):
        if patient in part_of:
            split[part_of[patient]].append(i)
    return split


def _random(patients: Sequence[str], config: FolderData) -> dict[str, str]:
    """Split patients at random by the seed. Each split gets at least one. The patient with the most slices trains."""
    counts = Counter(patients)
    names = sorted(counts)
    if len(names) < 3:
        by_tag = "take data.patient_from=folder if each folder is a patient, " if config.patient_from == "tag" else ""
        raise DataError(
            f"data.root={config.root} shows {len(names)} patient(s) ({', '.join(names)}), too few for train, val and "
            f"test by patient: add patients, {by_tag}or take data.split=slices, which leaks anatomy between the parts, "
            "or data.split=all to evaluate only"
        )
    largest = max(names, key=lambda name: counts[name])
    others = [name for name in names if name != largest]
    drawn = [others[i] for i in np.random.default_rng([config.seed, 0x5B117]).permutation(len(others))]
    n_val = max(1, round(config.val_fraction * len(names)))
    n_test = max(1, min(round(config.test_fraction * len(names)), len(drawn) - n_val))
    n_val = min(n_val, len(drawn) - n_test)
    part_of = dict.fromkeys(names, "train") | dict.fromkeys(drawn[:n_val], "val")
    return part_of | dict.fromkeys(drawn[n_val : n_val + n_test], "test")


def _aapm(patients: Sequence[str], config: FolderData) -> dict[str, str]:
    """Split of the AAPM 2016 Low-Dose challenge: L333 validates, L310 tests, the other eight train."""
    return dict.fromkeys(AAPM_PATIENTS, "train") | {AAPM_VAL: "val", AAPM_TEST: "test"}


def _explicit(patients: Sequence[str], config: FolderData) -> dict[str, str]:
    """Split patients by the three lists. An empty training list takes all others."""
    known = sorted(set(patients))
    lists = {"train": config.train_patients, "val": config.val_patients, "test": config.test_patients}
    part_of: dict[str, str] = {}
    for part, names in lists.items():
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {few(known)}"
                raise DataError(f"data.{part}_patients={name} is no patient below {config.root}: {hint}")
            if name in part_of:
                raise DataError(f"data.{part}_patients={name} is also in data.{part_of[name]}_patients: name it once")
            part_of[name] = part
    return part_of if config.train_patients else dict.fromkeys(known, "train") | part_of


def _blocks(infos: Sequence[SliceInfo], config: FolderData) -> Split:
    """Contiguous blocks of every series: train, then val, then test. This leaks: neighbouring slices are similar."""
    series: dict[tuple[str, str], list[int]] = {}
    for i, info in enumerate(infos):  # the tag: `patients_of` may take each file of a series for a patient
        series.setdefault((info.patient, info.series), []).append(i)
    split: Split = {part: [] for part in PARTS}
    for members in series.values():
        n_val, n_test = (max(1, round(share * len(members))) for share in (config.val_fraction, config.test_fraction))
        n_train = max(1, len(members) - n_val - n_test)
        end = n_train + min(n_val, len(members) - n_train - 1)
        if len(members) < 3:
            n_train = end = len(members)
        split["train"] += members[:n_train]
        split["val"] += members[n_train:end]
        split["test"] += members[end:]
    if not split["val"]:
        raise DataError(
            f"data.split=slices needs a series of 3 slices or more below {config.root}, but the longest has "
            f"{max(map(len, series.values()))}: add slices, or use data.split=all to evaluate only"
        )
    return split


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def few(names: Sequence[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:8]) + ", …" * (len(names) > 8)
