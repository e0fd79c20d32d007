from collections import Counter
from typing import Any

import pytest

from qnmixer.engine.config.run import section
from qnmixer.engine.data.slices import SliceInfo
from qnmixer.engine.data.splits import AAPM_PATIENTS, PARTS, RunSplit, Split, files_as_patients, patients_of
from qnmixer.engine.data.splits import join_patients as join
from qnmixer.errors import DataError


def infos_of(*paths: str, patient: str = "") -> list[SliceInfo]:
    return [SliceInfo(path, 0, 1, patient, path.rpartition("/")[0], float(i)) for i, path in enumerate(paths)]


def names(paths: list[str], patient: str = "", **options: Any) -> list[str]:
    return patients_of(infos_of(*paths, patient=patient), section("data", "dicom", root="some/root", **options))


def split_of(infos: list[SliceInfo], patients: list[str], **options: Any) -> Split:
    config = section("data", "dicom", root="somewhere", **options)
    return RunSplit().settle("data", infos, patients, [0] * len(infos), config)[0]


def split(patients: list[str], **options: Any) -> Split:
    return split_of([SliceInfo(f"{p}/{i}", 0, 1, p, p, float(i)) for i, p in enumerate(patients)], patients, **options)


@pytest.mark.parametrize(
    ("paths", "tag", "options", "patients"),
    [
        (["a/x", "b/c/y"], "", {}, ["a", "b"]),
        (["all/a/s1/x", "all/b/s1/y", "all/b/s2/y"], "", {}, ["a", "b", "b"]),
        (["full_3mm/L067/x.IMA", "full_1mm/L067/y.IMA"], "", {}, ["L067", "L067"]),
        (["x", "y"], "", {}, ["root", "root"]),
        (["x.npy", "y.npy"], "", {}, ["x", "y"]),
        (["a/x", "b/y"], "ANON", {}, ["ANON", "ANON"]),
        (["a/x", "b/y"], "ANON", {"patient_from": "folder"}, ["a", "b"]),
        (
            ["L333/a/L333_FD_1.IMA", "L310/x.IMA", "y.IMA"],
            "Anonymous",
            {"split": "aapm"},
            ["L333", "L310", "Anonymous"],
        ),
        (["L310_1.npy", "L310_2.npy", "L3100.npy"], "", {"split": "aapm"}, ["L310", "L310", "L3100"]),
        (["L310/a.IMA"], "mayo-L067-x", {"split": "aapm"}, ["L067"]),
    ],
)
def test_a_patient_is_the_tag_or_a_folder(
    paths: list[str], tag: str, options: dict[str, str], patients: list[str]
) -> None:
    assert names(paths, tag, **options) == patients


@pytest.mark.parametrize(
    ("infos", "lone"),
    [
        (infos_of("p1_0.npy", "all/p1_1.npy"), ["p1_0.npy"]),
        (infos_of("all/p1_0.npy", "all/p1_1.NPY"), ["all/p1_0.npy", "all/p1_1.NPY"]),
        (infos_of("p1/p1.npy", "p2/s/p2.npy", "L067/L067.npy"), []),
        (infos_of("x", "y"), []),
        ([*infos_of("x.npy", patient="x"), *infos_of("y.npy", patient="y")], []),
        ([SliceInfo(f"{k}.npy", 0, 2, "", f"{k}.npy", 0.0) for k in "ab"], []),
    ],
)
def test_files_of_one_slice_are_told_from_patients_with_a_folder_or_a_stack(
    infos: list[SliceInfo], lone: list[str]
) -> None:
    assert files_as_patients(infos, patients_of(infos, section("data", "dicom", root="root"))) == lone


@pytest.mark.parametrize(
    ("slices", "patients", "joined"),
    [
        ([("A", "1 2"), ("", "1 2"), ("B", "3 4")], ["A", "A", "B"], ["1 = A"]),
        ([("", "1 2"), ("", "1 3"), ("", "4 5"), ("", "")], ["0", "0", "2", "3"], ["0 = 1"]),
        ([("A", "1"), ("B", "9"), ("C", "8"), ("C", "9"), ("A", "8"), ("D", "")], [*"AAAAAD"], ["A = B = C"]),
        ([("A", "1 2"), ("B", "3 4"), ("A", "5 6")], ["A", "B", "A"], []),
        ([("A", ""), ("B", ""), ("", "")], ["A", "B", "2"], []),
    ],
)
def test_a_study_or_series_is_of_one_patient(
    slices: list[tuple[str, str]], patients: list[str], joined: list[str]
) -> None:
    infos = [SliceInfo(f"{k}/x", 0, 1, patient, "same for all", 0.0, uids) for k, (patient, uids) in enumerate(slices)]
    assert join(infos, patients_of(infos, section("data", "dicom", root="r"))) == (patients, joined)


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


@pytest.mark.parametrize(
    ("patients", "options", "says"),
    [
        ([*"aab"], {}, r"2 patient\(s\) \(a, b\), too few.*patient_from=folder.*data\.split=slices"),
        (["L333", "L067"], {"split": "aapm"}, "nothing for test"),
        (["abcd", "b", "c"], {"split": "explicit", "val_patients": ["abce"]}, "did you mean abcd"),
        ([*"abc"], {"split": "explicit", "val_patients": ["b"], "test_patients": ["b"]}, r"also in data\.val_patients"),
        ([*"abc"], {"split": "explicit", "val_patients": ["b"]}, "nothing for test"),
        ([*"ab"], {"split": "slices"}, "3 slices or more"),
    ],
)
def test_what_cannot_be_split_says_what_to_do(patients: list[str], options: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        split(patients, **options)


def test_splits_by_rule() -> None:
    patients = [*AAPM_PATIENTS, "L333", "somebody"]
    parts = split(patients, split="aapm")
    assert {patients[i] for i in parts["val"]} == {"L333"}
    assert [patients[i] for i in parts["test"]] == ["L310"]
    assert len(parts["train"]) == 8
    parts = split([*"abcd"], split="explicit", val_patients=["b"], test_patients=["d"])
    assert parts == {"train": [0, 2], "val": [1], "test": [3]}
    assert split([*"aa"], split="all") == {"train": [], "val": [], "test": [0, 1]}


def test_blocks_are_contiguous_and_of_one_series_of_one_patient() -> None:
    parts = split(["a"] * 20 + ["b"] * 3 + ["c"], split="slices")
    assert parts == {"train": [*range(16), 20, 23], "val": [16, 17, 21], "test": [18, 19, 22]}
    infos = infos_of(*(f"x_{k:02}.npy" for k in range(10)))  # each such file is a patient, but their folder is a series
    parts = split_of(infos, [info.path for info in infos], split="slices")
    assert parts == {"train": [*range(8)], "val": [8], "test": [9]}
    infos = [SliceInfo(f"{name}/{k}", 0, 1, name, "1.2", float(k)) for name in "ab" for k in range(3)]
    parts = split_of(infos, [*"aaabbb"], split="slices")  # de-identified files may have the same series for all
    assert parts == {"train": [0, 3], "val": [1, 4], "test": [2, 5]}


TEN = {f"P{number}": [10 * number, 10 * number + 1] for number in range(10)}


def settled(run: RunSplit, slices: dict[str, list[int]], **options: Any) -> tuple[dict[str, list[str]], list[str]]:
    """Patients of each part, and the new ones; `slices`: digests of the slices of each patient."""
    patients = [name for name, digests in slices.items() for _ in digests]
    infos = [SliceInfo(f"{p}/{i}", 0, 1, p, p, float(i)) for i, p in enumerate(patients)]
    digests = [digest for its in slices.values() for digest in its]
    config = section("data", "dicom", root="somewhere", **options)
    split, new = run.settle("data", infos, patients, digests, config)
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
    swapped = {name: its for name, its in TEN.items() if name != train} | {test: TEN[train]}
    assert test in settled(RunSplit(record), swapped)[0]["train"]
    assert settled(RunSplit(record), swapped)[0]["test"] == []


def test_slices_that_are_alike_change_no_part() -> None:
    """As empty ones are; also where the drawing rule has nothing to say any more."""
    alike = {name: [*its, 7] for name, its in TEN.items()}
    parts, record = begun(alike)
    assert settled(RunSplit(record), alike) == (parts, [])
    two = {name: alike[name] for name in (parts["train"][0], parts["test"][0])}
    assert settled(RunSplit(record), two)[0] == {"train": parts["train"][:1], "val": [], "test": parts["test"]}


def test_names_keep_the_split_at_another_pixel_size() -> None:
    """There the digests of all slices differ."""
    for rule in ("aapm", "slices"):
        infos = infos_of(*(f"{name}/{k}.IMA" for name in AAPM_PATIENTS for k in range(3)), patient="Anonymous")
        config = section("data", "dicom", root="r", split=rule)
        patients, run = patients_of(infos, config), RunSplit()
        split, _ = run.settle("data", infos, patients, [*range(30)], config)
        assert RunSplit(run.record).settle("data", infos, patients, [*range(100, 130)], config) == (split, [])


def test_blocks_of_slices_are_kept_by_their_digests() -> None:
    def blocks(digests: list[int], names: str) -> tuple[list[SliceInfo], list[str], list[int], Any]:
        infos = [SliceInfo(f"A/{name}", 0, 1, "A", "A", float(i)) for i, name in enumerate(names)]
        return infos, ["A"] * len(digests), digests, section("data", "dicom", root="somewhere", split="slices")

    run = RunSplit()
    split, _ = run.settle("data", *blocks([*range(20)], "abcdefghijklmnopqrst"))
    shorter, new = RunSplit(run.record).settle("data", *blocks([*range(5, 20), 99], "ABCDEFGHIJKLMNOP"))
    for part in ("val", "test"):
        assert [i + 5 for i in shorter[part]] == split[part]
    assert new == ["A"]


def test_copies_of_trained_slices_are_counted() -> None:
    parts, record = begun()
    other = RunSplit()
    copies = {f"copy of {name}": its for name, its in TEN.items()} | {"new": [1000]}
    settled(other, copies, split="all")
    assert other.trained("test", record) == 2 * len(parts["train"])
    tuned = RunSplit(base=record["train"]["slices"])
    settled(tuned, {"a": [2000], "b": [2001], "c": [2002]})
    assert other.trained("test", tuned.record) == 2 * len(parts["train"])
