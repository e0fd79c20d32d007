from collections import Counter
from typing import Any

import pytest

from qnmixer.data.slices import SliceInfo
from qnmixer.data.splits import PARTS, RunSplit, Split, files_as_patients, patients_of, seen_by
from qnmixer.errors import DataError
from qnmixer.settings.run import section


def infos_of(*paths: str, patient: str = "") -> list[SliceInfo]:
    return [SliceInfo(path, 0, 1, patient, path.rpartition("/")[0], float(i)) for i, path in enumerate(paths)]


def names(paths: list[str], patient: str = "", **options: Any) -> list[str]:
    return patients_of(infos_of(*paths, patient=patient), section("data", "dicom", root="some/root", **options))


def split(patients: list[str], **options: Any) -> Split:
    config = section("data", "dicom", root="somewhere", **options)
    return RunSplit().settle("data", patients, [0] * len(patients), config)[0]


@pytest.mark.parametrize(("paths", "tag", "options", "patients"), [
    (["a/x", "b/c/y"], "", {}, ["a", "b"]),
    (["all/a/s1/x", "all/b/s1/y", "all/b/s2/y"], "", {}, ["a", "b", "b"]),
    (["x", "y"], "", {}, ["root", "root"]),
    (["x.npy", "y.npy"], "", {}, ["x", "y"]),
    (["a/x", "b/y"], "ANON", {}, ["ANON", "ANON"]),
    (["a/x", "b/y"], "ANON", {"patient_from": "folder"}, ["a", "b"]),
])  # fmt: skip
def test_a_patient_is_tag_or_folder(paths: list[str], tag: str, options: dict[str, str], patients: list[str]) -> None:
    assert names(paths, tag, **options) == patients


@pytest.mark.parametrize(("infos", "lone"), [
    (infos_of("p1_0.npy", "all/p1_1.npy"), ["p1_0.npy"]),
    (infos_of("all/p1_0.npy", "all/p1_1.NPY"), ["all/p1_0.npy", "all/p1_1.NPY"]),
    (infos_of("p1/p1.npy", "p2/s/p2.npy", "L067/L067.npy"), []),
    (infos_of("x", "y"), []),
    ([*infos_of("x.npy", patient="x"), *infos_of("y.npy", patient="y")], []),
    ([SliceInfo(f"{k}.npy", 0, 2, "", f"{k}.npy", 0.0) for k in "ab"], []),
])  # fmt: skip
def test_files_of_one_slice_are_no_patients_with_a_folder_or_a_stack(infos: list[SliceInfo], lone: list[str]) -> None:
    assert files_as_patients(infos, patients_of(infos, section("data", "dicom", root="root"))) == lone


def test_random_split_keeps_patients_apart_and_gives_each_part_one() -> None:
    patients = [f"p{i % 11}" for i in range(100)]
    parts = split(patients)
    people = {part: {patients[i] for i in members} for part, members in parts.items()}
    assert sum(map(len, parts.values())) == 100
    assert sum(map(len, people.values())) == 11
    assert all(people.values())
    assert parts == split(patients)
    assert any(parts != split(patients, seed=seed) for seed in range(2, 8))


@pytest.mark.parametrize("fraction", [0.01, 0.45, 0.49])
@pytest.mark.parametrize("seed", range(3))
def test_three_patients_go_one_to_each_part_and_the_largest_trains(fraction: float, seed: int) -> None:
    parts = split([*"aaaaabc"], seed=seed, val_fraction=fraction, test_fraction=fraction)
    assert Counter(len(members) for members in parts.values()) == {5: 1, 1: 2}
    assert len(parts["train"]) == 5


@pytest.mark.parametrize(("patients", "options", "says"), [
    ([*"aab"], {}, r"2 patient\(s\) \(a, b\), too few.*patient_from=folder.*data\.split=all"),
    (["abcd", "b", "c"], {"split": "explicit", "val_patients": ["abce"]}, "did you mean abcd"),
    ([*"abc"], {"split": "explicit", "val_patients": ["b"], "test_patients": ["b"]}, r"also in data\.val_patients"),
    ([*"abc"], {"split": "explicit", "val_patients": ["b"]}, "nothing for test"),
])  # fmt: skip
def test_what_cannot_be_split_says_what_to_do(patients: list[str], options: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        split(patients, **options)


def test_splits_by_rule() -> None:
    parts = split([*"abcd"], split="explicit", val_patients=["b"], test_patients=["d"])
    assert parts == {"train": [0, 2], "val": [1], "test": [3]}
    parts = split([*"abcd"], split="explicit", train_patients=["a"], val_patients=["b"], test_patients=["d"])
    assert parts == {"train": [0], "val": [1], "test": [3]}
    assert split([*"aa"], split="all") == {"train": [], "val": [], "test": [0, 1]}


TEN = {f"P{number}": [10 * number, 10 * number + 1] for number in range(10)}


def settled(run: RunSplit, slices: dict[str, list[int]], **options: Any) -> tuple[dict[str, list[str]], list[str]]:
    """Patients of each part, and the new ones; `slices`: digests of the slices of each patient."""
    patients = [name for name, digests in slices.items() for _ in digests]
    digests = [digest for its in slices.values() for digest in its]
    config = section("data", "dicom", root="somewhere", **options)
    split, new = run.settle("data", patients, digests, config)
    return {part: sorted({patients[i] for i in split[part]}) for part in PARTS}, new


def begun(slices: dict[str, list[int]] = TEN, **options: Any) -> tuple[dict[str, list[str]], Any]:
    run = RunSplit()
    parts, new = settled(run, slices, **options)
    assert new == []
    return parts, run.record


def test_a_run_keeps_its_split_whoever_comes_or_goes() -> None:
    parts, record = begun()
    for gone in TEN:
        fewer, new = settled(RunSplit(record), {name: its for name, its in TEN.items() if name != gone})
        assert fewer == {part: [name for name in names if name != gone] for part, names in parts.items()}
        assert new == []
    more = TEN | {f"N{number}": [1000 + number] for number in range(10)}
    run = RunSplit(record)
    assert settled(run, more) == (parts, sorted({*more} - {*TEN}))
    assert run.record is record


def test_a_patient_is_known_by_name_and_by_slices() -> None:
    parts, record = begun()
    test, train = parts["test"][0], parts["train"][0]
    renamed = {("other" if name == test else name): its for name, its in TEN.items()}
    assert settled(RunSplit(record), renamed)[0]["test"] == ["other"]
    anew = TEN | {train: [500, 501], test: [*TEN[test], 502]}  # reconstructed again, and one more
    assert settled(RunSplit(record), anew) == (parts, [])
    finer = {name: [1000 + it for it in its] for name, its in TEN.items()}  # the digests of another pixel size
    assert settled(RunSplit(record), finer) == (parts, [])
    swapped = {name: its for name, its in TEN.items() if name != train} | {test: TEN[train]}
    assert test in settled(RunSplit(record), swapped)[0]["train"]
    assert settled(RunSplit(record), swapped)[0]["test"] == []
    both = {name: its for name, its in TEN.items() if name != train} | {test: [*TEN[test], *TEN[train]]}
    assert test in settled(RunSplit(record), both)[0]["train"]


def test_slices_that_are_alike_change_no_part() -> None:
    """As empty ones are; also where the drawing rule has nothing to say any more."""
    alike = {name: [*its, 7] for name, its in TEN.items()}
    parts, record = begun(alike)
    assert settled(RunSplit(record), alike) == (parts, [])
    two = {name: alike[name] for name in (parts["train"][0], parts["test"][0])}
    assert settled(RunSplit(record), two)[0] == {"train": parts["train"][:1], "val": [], "test": parts["test"]}


def test_copies_of_trained_slices_are_counted() -> None:
    parts, record = begun()
    other = RunSplit()
    copies = {f"copy of {name}": its for name, its in TEN.items()} | {"new": [1000]}
    settled(other, copies, split="all")
    assert other.trained("test", record) == (2 * len(parts["train"]), 0)
    tuned = RunSplit(base=seen_by(record))
    settled(tuned, {"a": [2000], "b": [2001], "c": [2002]})
    assert other.trained("test", tuned.record) == (2 * len(parts["train"]), 0)
