from collections import Counter
from typing import Any

import pytest

from qnmixer.engine.config.run import section
from qnmixer.engine.data.slices import SliceInfo
from qnmixer.engine.data.splits import (
    AAPM_PATIENTS,
    PARTS,
    RunSplit,
    Split,
    SplitRecord,
    files_as_patients,
    join_patients,
    patients_of,
    split_slices,
)
from qnmixer.errors import DataError


def infos_of(*paths: str, patient: str = "") -> list[SliceInfo]:
    return [SliceInfo(path, 0, 1, patient, path.rpartition("/")[0], float(i)) for i, path in enumerate(paths)]


def split(patients: list[str], **options: Any) -> Split:
    infos = [SliceInfo(f"{p}/{i}", 0, 1, p, p, float(i)) for i, p in enumerate(patients)]
    return split_slices(infos, patients, section("data", "dicom", root="somewhere", **options))


def names(paths: list[str], **options: Any) -> list[str]:
    return patients_of(infos_of(*paths), section("data", "dicom", root="somewhere/root", **options))


def test_patients_without_a_tag_are_split_by_folder() -> None:
    assert names(["a/x", "b/c/y"]) == ["a", "b"]
    assert names(["all/a/s1/x", "all/b/s1/y", "all/b/s2/y"]) == ["a", "b", "b"]
    assert names(["full_3mm/L067/x.IMA", "full_1mm/L067/y.IMA"]) == ["L067", "L067"]
    assert names(["L333/full_3mm/x.IMA"]) == ["L333"]
    assert names(["x", "y"]) == ["root", "root"]
    assert names(["x.npy", "y.npy"]) == ["x", "y"]


def test_files_of_one_slice_are_told_from_patients_with_a_folder_or_a_stack() -> None:
    def lone(*infos: SliceInfo) -> list[str]:
        return files_as_patients(infos, patients_of(infos, section("data", "dicom", root="root")))

    assert lone(*infos_of("p1_0.npy", "p1_1.npy", "p2_0.NPY")) == ["p1_0.npy", "p1_1.npy", "p2_0.NPY"]
    assert lone(*infos_of("all/p1_0.npy", "all/p1_1.npy")) == ["all/p1_0.npy", "all/p1_1.npy"]
    assert lone(*infos_of("p1/p1.npy", "p2/s/p2.npy", "L067/L067.npy")) == []
    assert lone(*infos_of("x", "y")) == []
    assert lone(*infos_of("x.npy", patient="x"), *infos_of("y.npy", patient="y")) == []
    assert lone(*(SliceInfo(f"{k}.npy", 0, 2, "", f"{k}.npy", 0.0) for k in "ab")) == []


def test_tags_win_unless_the_folder_is_asked_for() -> None:
    infos = infos_of("a/x", "b/y", patient="ANON")
    assert patients_of(infos, section("data", "dicom", root="r")) == ["ANON", "ANON"]
    assert patients_of(infos, section("data", "dicom", root="r", patient_from="folder")) == ["a", "b"]


def test_a_study_or_series_is_of_one_patient() -> None:
    def joined(*slices: tuple[str, str]) -> tuple[list[str], list[str]]:
        infos = [
            SliceInfo(f"{k}/x", 0, 1, patient, "same for all", 0.0, uids) for k, (patient, uids) in enumerate(slices)
        ]
        return join_patients(infos, patients_of(infos, section("data", "dicom", root="r")))

    assert joined(("A", "1 2"), ("", "1 2"), ("B", "3 4")) == (["A", "A", "B"], ["1 = A"])
    assert joined(("", "1 2"), ("", "1 3"), ("", "4 5"), ("", "")) == (["1", "1", "2", "3"], ["0 = 1"])
    assert joined(("A", "1 2"), ("A", "1 2"), ("B", "1 9"), ("C", "8 9"), ("D", "")) == (
        ["A", "A", "A", "A", "D"],
        ["A = B = C"],
    )
    assert joined(("A", "1 2"), ("B", "3 4"), ("A", "5 6")) == (["A", "B", "A"], [])
    assert joined(("A", ""), ("B", ""), ("", "")) == (["A", "B", "2"], [])


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
@pytest.mark.parametrize("seed", range(4))
def test_three_patients_go_one_to_each_part_and_the_largest_trains(fraction: float, seed: int) -> None:
    patients = ["a"] * 20 + ["b"] + ["c"]
    parts = split(patients, seed=seed, val_fraction=fraction, test_fraction=fraction)
    assert Counter(len(members) for members in parts.values()) == {20: 1, 1: 2}
    assert len(parts["train"]) == 20


def test_too_few_patients_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"2 patient\(s\) \(a, b\), too few.*patient_from=folder.*data\.split=slices"):
        split(["a", "a", "b"])
    with pytest.raises(DataError, match=r"add patients, or take data\.split=slices"):
        split(["a", "a", "b"], patient_from="folder")


def test_aapm_split_by_name() -> None:
    patients = [*AAPM_PATIENTS, "L333", "somebody"]
    parts = split(patients, split="aapm")
    assert {patients[i] for i in parts["val"]} == {"L333"}
    assert [patients[i] for i in parts["test"]] == ["L310"]
    assert len(parts["train"]) == 8
    with pytest.raises(DataError, match="nothing for test"):
        split(["L333", "L067"], split="aapm")


def test_aapm_names_are_found_in_tags_and_paths() -> None:
    infos = infos_of("L333/full_3mm/L333_FD_3_1.IMA", "L310/x.IMA", "L067/x.IMA", "y.IMA", patient="Anonymous")
    config = section("data", "dicom", root="r", split="aapm")
    patients = patients_of(infos, config)
    assert patients == ["L333", "L310", "L067", "Anonymous"]
    assert split_slices(infos, patients, config) == {"val": [0], "test": [1], "train": [2]}
    flat = infos_of("L310_1_target.npy", "L310_2_target.npy", "L3100.npy")
    assert patients_of(flat, config) == ["L310", "L310", "L3100"]
    assert patients_of(infos_of("L310/a.IMA", patient="mayo-L067-x"), config) == ["L067"]


def test_an_aapm_split_is_kept_where_all_have_one_tag() -> None:
    """At another pixel size the digests of the slices differ, so only names tell the patients apart."""
    infos = infos_of(*(f"{name}/{k}.IMA" for name in AAPM_PATIENTS for k in range(2)), patient="Anonymous")
    config = section("data", "dicom", root="r", split="aapm")
    patients, run = patients_of(infos, config), RunSplit()
    split, _ = run.settle("data", infos, patients, [*range(20)], config)
    assert RunSplit(run.record).settle("data", infos, patients, [*range(100, 120)], config) == (split, [])


def test_explicit_lists() -> None:
    patients = ["a", "b", "c", "d"]
    parts = split(patients, split="explicit", val_patients=["b"], test_patients=["d"])
    assert parts == {"train": [0, 2], "val": [1], "test": [3]}
    with pytest.raises(DataError, match="did you mean abcd"):
        split(["abcd", "b", "c"], split="explicit", val_patients=["abce"], test_patients=["c"])
    with pytest.raises(DataError, match=r"also in data\.val_patients"):
        split(patients, split="explicit", val_patients=["b"], test_patients=["b"])
    with pytest.raises(DataError, match="nothing for test"):
        split(patients, split="explicit", val_patients=["b"])


def test_blocks_are_contiguous_and_disjoint() -> None:
    parts = split(["a"] * 20 + ["b"] * 3 + ["c"], split="slices")
    assert parts["train"] == [*range(16), 20, 23]
    assert parts["val"] == [16, 17, 21]
    assert parts["test"] == [18, 19, 22]
    with pytest.raises(DataError, match="3 slices or more"):
        split(["a", "b"], split="slices")


def test_blocks_of_files_with_one_slice_are_of_their_folder() -> None:
    """Each such file in .npy is a patient, but their folder is one series."""
    infos = infos_of(*(f"x_{k:02}.npy" for k in range(10)))
    config = section("data", "numpy", root="somewhere", split="slices")
    parts = split_slices(infos, patients_of(infos, config), config)
    assert parts == {"train": [*range(8)], "val": [8], "test": [9]}


def test_blocks_are_of_one_patient() -> None:
    """De-identified files may have the same series for all."""
    infos = [SliceInfo(f"{name}/{k}", 0, 1, name, "1.2", float(k)) for name in "ab" for k in range(3)]
    config = section("data", "dicom", root="somewhere", split="slices")
    parts = split_slices(infos, patients_of(infos, config), config)
    assert parts == {"train": [0, 3], "val": [1, 4], "test": [2, 5]}


def test_all_is_test() -> None:
    assert split(["a", "a"], split="all") == {"train": [], "val": [], "test": [0, 1]}


TEN = {f"P{number}": [10 * number, 10 * number + 1] for number in range(10)}


def settled(run: RunSplit, slices: dict[str, list[int]], **options: Any) -> tuple[dict[str, list[str]], list[str]]:
    """Patients of each part, and the new ones; `slices`: digests of the slices of each patient."""
    patients = [name for name, digests in slices.items() for _ in digests]
    infos = [SliceInfo(f"{p}/{i}", 0, 1, p, p, float(i)) for i, p in enumerate(patients)]
    digests = [digest for its in slices.values() for digest in its]
    config = section("data", "dicom", root="somewhere", **options)
    split, new = run.settle("data", infos, patients, digests, config)
    return {part: sorted({patients[i] for i in split[part]}) for part in PARTS}, new


def begun(slices: dict[str, list[int]] = TEN, **options: Any) -> tuple[dict[str, list[str]], SplitRecord]:
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


def test_blocks_of_slices_are_kept_by_their_digests() -> None:
    def blocks(digests: list[int]) -> tuple[list[SliceInfo], list[str], list[int], Any]:
        infos = [SliceInfo(f"A/{i}", 0, 1, "A", "A", float(i)) for i in range(len(digests))]
        return infos, ["A"] * len(digests), digests, section("data", "dicom", root="somewhere", split="slices")

    run = RunSplit()
    split, _ = run.settle("data", *blocks([*range(20)]))
    shorter, new = RunSplit(run.record).settle("data", *blocks([*range(5, 20), 99]))
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
