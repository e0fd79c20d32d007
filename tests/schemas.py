"""The class of each command's config, by its name."""

from qnmixer.engine.checkup.config import DoctorConfig
from qnmixer.engine.config.checking import Section
from qnmixer.engine.config.run import Config
from qnmixer.engine.evaluation.config import EvaluateConfig
from qnmixer.engine.inference.config import ReconstructConfig
from qnmixer.engine.memory.config import PlanConfig
from qnmixer.extras.calibration.config import CalibrateConfig
from qnmixer.extras.comparison.config import CompareConfig
from qnmixer.extras.export.config import ExportConfig
from qnmixer.extras.robustness.config import RobustnessConfig

SCHEMAS: dict[str, type[Section]] = {
    schema.command: schema
    for schema in (
        Config, PlanConfig, DoctorConfig, EvaluateConfig, RobustnessConfig, CompareConfig, ReconstructConfig,
        ExportConfig, CalibrateConfig,
    )
}  # fmt: skip
