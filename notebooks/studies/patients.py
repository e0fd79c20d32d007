"""The table of an evaluation over patients: python notebooks/studies/patients.py evaluations/DIR

The unit is the patient, because slices of one look alike: the means over slices in table.md say less about others.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

from qnmixer.evaluation.scores import titles_of
from qnmixer.evaluation.statistics import difference, half_width
from qnmixer.runs.tables import NOTHING, Table, in_digits

Values = dict[str, dict[str, dict[str, float]]]
"""method → metric → patient → mean over the patient's slices."""


def read_images(path: Path) -> Values:
    """The scores in the images.csv of an evaluation. A slice whose patient is not known stands alone."""
    slices: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            patient = row["patient"] or f"slice {row['number']}"
            for metric in titles_of({}):
                if row[metric]:
                    slices[row["method"]][metric][patient].append(float(row[metric]))
    return {
        method: {metric: {name: mean(values) for name, values in of.items()} for metric, of in metrics.items()}
        for method, metrics in slices.items()
    }


def patients_table(values: Values) -> str:
    """Means over patients ± half of the 95 % interval. Last the PSNR minus that of total variation, else of FBP."""
    titles = {name: title for name, title in titles_of({}).items() if name in ("psnr", "ssim")}
    rivals = [name for name in values if name in ("FBP", "TV")]
    rows = []
    for method, metrics in values.items():
        columns = [[*metrics.get(metric, {}).values()] for metric in titles]
        cells = [in_digits(mean(of), half_width(of)) if of else NOTHING for of in columns]
        for rival in rivals[-1:]:
            minus = difference({(0, 0): metrics["psnr"]}, {(0, 0): values[rival]["psnr"]})
            cells.append(in_digits(minus.mean, minus.over_patients, 10) if minus and method not in rivals else NOTHING)
        rows.append([method, *cells])
    n_patients = len(next(iter(values.values()))["psnr"])
    note = f"Means over {n_patients} patients, ± half of the 95 % interval for other patients. Data range 1."
    headings = ["method", *titles.values(), *(f"over {rival}, dB" for rival in rivals[-1:])]
    return Table(headings, rows, note=note).markdown()


def main(folder: Path) -> None:
    """Print the table of an evaluation's folder, with its warnings and title."""
    titles = [line for line in (folder / "table.md").read_text().splitlines() if line.startswith("**")]
    print(*titles, patients_table(read_images(folder / "images.csv")), sep="\n\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
