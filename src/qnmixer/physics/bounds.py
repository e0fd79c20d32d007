"""The bounds that an annotation gives a number, such as `Annotated[float, Gt(0), Le(1)]`, checked in Python."""

import math
import operator

from annotated_types import Ge, Gt, Le, Lt

_BOUNDS = (
    (Ge, "ge", operator.ge, "at least"), (Gt, "gt", operator.gt, "above"),
    (Le, "le", operator.le, "at most"), (Lt, "lt", operator.lt, "below"),
)  # fmt: skip


def require_bounds(name: str, value: float, annotation: object) -> None:
    """Raise ValueError for a number that its annotation excludes, and for NaN and infinite ones where it has bounds."""
    fits, words = True, []
    for bound in getattr(annotation, "__metadata__", ()):
        for kind, attribute, compare, word in _BOUNDS:
            if isinstance(bound, kind):
                limit = getattr(bound, attribute)
                fits = fits and compare(value, limit)
                words.append(f"{word} {limit:g}")
    if words and not (fits and math.isfinite(value)):
        raise ValueError(f"{name}={value} must be {' and '.join(words)}")
