"""Which slices train, which validate and which test: by patient, so that no anatomy is seen twice."""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

import numpy as np

from qnmixer.config.data import FolderData
from qnmixer.data.slices import SliceInfo
from qnmixer.errors import DataError

PARTS = ("train", "val", "test")
AAPM_PATIENTS = ("L067", "L096", "L109", "L143", "L192", "L286", "L291", "L310", "L333", "L506")
AAPM_VAL, AAPM_TEST = "L333", "L310"
_AAPM_NAME = re.compile(r"(?<![A-Za-z0-9])L\d{3}(?![0-9])")

Split = dict[str, list[int]]


def patients_of(infos: Sequence[SliceInfo], *, patient_from: str, root_name: str) -> list[str]:
    """Who each slice shows: the patient that the file names, or else the folder that tells patients apart.

    That folder is one named like L067 (AAPM-Mayo) if there is one, else the first below what all files have in common.
    Without such a folder a `.npy` file is a patient of its own, and other files share the folder that they lie in.
    """
    folders = [PurePosixPath(info.path).parent.parts for info in infos]
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

    return [
        info.patient if info.patient and patient_from == "tag" else by_folder(info, parts)
        for info, parts in zip(infos, folders, strict=True)
    ]


def split_slices(infos: Sequence[SliceInfo], patients: Sequence[str], config: FolderData) -> Split:
    """Indices of the slices of each part, by the rule that `config.split` names."""
    rules: dict[str, Callable[[], Split]] = {
        "random": lambda: _random(patients, config),
        "aapm": lambda: _aapm(infos, patients, config),
        "explicit": lambda: _explicit(patients, config),
        "slices": lambda: _blocks(infos, patients, config),
        "all": lambda: {"train": [], "val": [], "test": list(range(len(infos)))},
    }
    return rules[config.split]()


def _by_part(patients: Sequence[str], part_of: dict[str, str]) -> Split:
    """Indices of each part, from the part of each patient; patients without one are left out."""
    split: Split = {part: [] for part in PARTS}
    for i, patient in enumerate(patients):
        if patient in part_of:
            split[part_of[patient]].append(i)
    return split


def _random(patients: Sequence[str], config: FolderData) -> Split:
    """Patients drawn by the seed; each part gets one at least, and the one with the most slices always trains."""
    counts = Counter(patients)
    names = sorted(counts)
    if len(names) < 3:
        raise DataError(
            f"data.root={config.root} shows {len(names)} patient(s) ({', '.join(names)}), too few for train, val and "
            "test by patient: add patients, or take data.split=slices, which leaks anatomy between the parts, "
            "or data.split=all to evaluate only"
        )
    largest = max(names, key=lambda name: counts[name])
    others = [name for name in names if name != largest]
    drawn = [others[i] for i in np.random.default_rng([config.seed, 0x5B117]).permutation(len(others))]
    n_val = max(1, round(config.val_fraction * len(names)))
    n_test = max(1, min(round(config.test_fraction * len(names)), len(drawn) - n_val))
    n_val = min(n_val, len(drawn) - n_test)
    part_of = dict.fromkeys(names, "train")
    part_of |= dict.fromkeys(drawn[:n_val], "val")
    part_of |= dict.fromkeys(drawn[n_val : n_val + n_test], "test")
    return _by_part(patients, part_of)


def _aapm(infos: Sequence[SliceInfo], patients: Sequence[str], config: FolderData) -> Split:
    """Split of the AAPM 2016 Low-Dose challenge: L333 validates, L310 tests, the other eight train."""
    names = []
    for info, patient in zip(infos, patients, strict=True):
        found = _AAPM_NAME.search(patient) or _AAPM_NAME.search(info.path)
        names.append(found.group() if found else patient)
    part_of = dict.fromkeys(AAPM_PATIENTS, "train") | {AAPM_VAL: "val", AAPM_TEST: "test"}
    split = _by_part(names, part_of)
    missing = [part for part in PARTS if not split[part]]
    if missing:
        raise DataError(
            f"data.split=aapm finds nothing for {', '.join(missing)} below {config.root}: it needs {AAPM_VAL} (val), "
            f"{AAPM_TEST} (test) and one of the other eight; found {_few(sorted(set(names)))}"
        )
    return split


def _explicit(patients: Sequence[str], config: FolderData) -> Split:
    """Patients as the three lists name them; an empty training list takes everybody else."""
    known = sorted(set(patients))
    lists = {"train": config.train_patients, "val": config.val_patients, "test": config.test_patients}
    part_of: dict[str, str] = {}
    for part, names in lists.items():
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {_few(known)}"
                raise DataError(f"data.{part}_patients: {name} is no patient below {config.root}; {hint}")
            if name in part_of:
                raise DataError(f"data.{part}_patients: {name} is also in data.{part_of[name]}_patients; name it once")
            part_of[name] = part
    if not config.train_patients:
        part_of = dict.fromkeys(known, "train") | part_of
    split = _by_part(patients, part_of)
    for part in PARTS:
        if not split[part]:
            raise DataError(
                f"data.split=explicit leaves nobody for {part}: fill data.{part}_patients from {_few(known)}"
            )
    return split


def _blocks(infos: Sequence[SliceInfo], patients: Sequence[str], config: FolderData) -> Split:
    """Contiguous blocks of every series: train, then val, then test. Neighbouring slices look alike, so this leaks."""
    series: dict[tuple[str, str], list[int]] = {}
    for i, (info, patient) in enumerate(zip(infos, patients, strict=True)):
        series.setdefault((patient, info.series), []).append(i)
    split: Split = {part: [] for part in PARTS}
    for members in series.values():
        if len(members) < 3:
            split["train"] += members
            continue
        n_val = max(1, round(config.val_fraction * len(members)))
        n_test = max(1, round(config.test_fraction * len(members)))
        n_train = max(1, len(members) - n_val - n_test)
        split["train"] += members[:n_train]
        split["val"] += members[n_train : n_train + min(n_val, len(members) - n_train - 1)]
        split["test"] += members[n_train + min(n_val, len(members) - n_train - 1) :]
    if not split["val"]:
        raise DataError(
            f"data.split=slices needs a series of 3 slices or more below {config.root}; the longest has "
            f"{max(map(len, series.values()))}: add slices, or take data.split=all to evaluate only"
        )
    return split


def _few(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:8]) + ", …" * (len(names) > 8)
