"""The PACE pool: which completed rollouts are fresh enough to train on, and when new ones may start."""

from pace_agent.pool.figures import PoolSummary
from pace_agent.pool.options import PoolOptions
from pace_agent.pool.pool import Arrivals, Draw, Entry, PacePool
from pace_agent.pool.staleness import Spans, SpanTable

__all__ = ["Arrivals", "Draw", "Entry", "PacePool", "PoolOptions", "PoolSummary", "SpanTable", "Spans"]
