"""Tests of `qnmixer_studies`. A copy without the studies has none of them."""

from ..schemas import EXTRAS

collect_ignore_glob = [] if EXTRAS else ["*"]
