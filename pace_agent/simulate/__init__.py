"""The pool without a model: drawn lengths, speeds and tool stalls, and a given production to consumption ratio."""

from pace_agent.simulate.results import Figures
from pace_agent.simulate.simulator import Simulator
from pace_agent.simulate.workload import DecodeCurve, Workload

__all__ = ["DecodeCurve", "Figures", "Simulator", "Workload"]
