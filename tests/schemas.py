"""The class of each command's config, by its name. Those of extras are left out where a copy has none."""

from importlib.util import find_spec

from qnmixer.doctor import DoctorConfig
from qnmixer.evaluation.evaluate_config import EvaluateConfig
from qnmixer.memory.plan_config import PlanConfig
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.settings.run import Config
from qnmixer.settings.validation import Section

EXTRAS = all(map(find_spec, ("qnmixer.extras", "qnmixer_studies")))
SCHEMAS: dict[str, type[Section]] = {
    schema.command: schema for schema in (Config, PlanConfig, DoctorConfig, EvaluateConfig, ReconstructConfig)
}
if EXTRAS:
    from qnmixer.extras.calibration.calibrate_config import CalibrateConfig
    from qnmixer.extras.export.export_config import ExportConfig
    from qnmixer_studies.comparison.compare_config import CompareConfig
    from qnmixer_studies.robustness.robustness_config import RobustnessConfig

    of_extras: tuple[type[Section], ...] = (CalibrateConfig, CompareConfig, ExportConfig, RobustnessConfig)
    SCHEMAS |= {schema.command: schema for schema in of_extras}
