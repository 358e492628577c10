"""Configuration: one strict model, read from a TOML file, then the environment, then the command line."""

from pace_agent.config.clock import ClockSection
from pace_agent.config.load import build_config, load_config
from pace_agent.config.models import (
    EngineSection,
    EnvSection,
    EvalSection,
    ModelSection,
    PoolSection,
    RolloutSection,
    RunConfig,
    RunSection,
    SandboxSection,
)
from pace_agent.config.resume import check_resume, config_fingerprint
from pace_agent.config.sglang import SglangSection
from pace_agent.config.toml import dump_toml
from pace_agent.config.trainer import trainer_options

__all__ = [
    "ClockSection",
    "EngineSection",
    "EnvSection",
    "EvalSection",
    "ModelSection",
    "PoolSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "SandboxSection",
    "SglangSection",
    "build_config",
    "check_resume",
    "config_fingerprint",
    "dump_toml",
    "load_config",
    "trainer_options",
]
