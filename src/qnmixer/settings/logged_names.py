"""The names under which a run logs numbers and pictures of its own, and the columns of its tables.

Callbacks, loggers and tables take them from here. A metric with such a name would be written over.
"""

from collections.abc import Collection

LOSS, ITERATES, RESIDUAL = "loss", "iterates", "residual"
"""Of each validation, as val/NAME, beside the metrics and what follows. The residual needs no truth."""
OF_NETWORKS = ("cosine_zs", "skipped_pairs")  # what the networks of this package tell of their state in a validation
PICTURE, TABLE = "picture", "table"  # of the evaluation after training, as test/NAME, beside the metrics
IN_WINDOW = {"window_psnr": "window PSNR, dB", "window_ssim": "window SSIM × 100"}
"""Headings of the metrics inside the HU window, by name. Each final table has them."""
_USUAL = ("psnr", "ssim", *IN_WINDOW)
COLUMNS_OF_IMAGES = ("number", "slice", "method", "patient")
COLUMNS_OF_COMPARISON = ("method", "seed", "data_seed", "test", "number", "slice", "patient")


def best_name(metric: str) -> str:
    """The name of the best value so far of a monitored metric."""
    return f"{metric}_best"


def deviation_name(metric: str) -> str:
    """The column of a metric's standard deviation."""
    return f"{metric}_std"


def taken_names(metrics: Collection[str]) -> set[str]:
    """All names that a run with these metrics uses beside theirs."""
    names = {LOSS, ITERATES, RESIDUAL, *OF_NETWORKS, PICTURE, TABLE}
    names |= {*IN_WINDOW, *COLUMNS_OF_IMAGES, *COLUMNS_OF_COMPARISON}
    for metric in (*metrics, *_USUAL, LOSS, RESIDUAL):
        names |= {best_name(metric), deviation_name(metric)}
    return names
