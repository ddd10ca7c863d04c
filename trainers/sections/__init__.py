"""The sections of the configuration, each checked as it is built. Free of JAX."""

from trainers.sections.evaluation import CheckpointConfig, EvaluationConfig, PreviewConfig, ScoreConfig, UnitConfig
from trainers.sections.model import DataConfig, LossConfig, MeshConfig, ModelConfig
from trainers.sections.optimizer import LossScaleConfig, OptimizerConfig, ParameterGroup, PruningConfig, ScheduleConfig
from trainers.sections.watching import AnomalyConfig, DistributionConfig, MetricsConfig, ProfileConfig

__all__ = [
    "AnomalyConfig",
    "CheckpointConfig",
    "DataConfig",
    "DistributionConfig",
    "EvaluationConfig",
    "LossConfig",
    "LossScaleConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "PreviewConfig",
    "ProfileConfig",
    "PruningConfig",
    "ScheduleConfig",
    "ScoreConfig",
    "UnitConfig",
]
