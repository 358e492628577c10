"""The default engine: transformers models over a row cache, in a process of its own or in this one.

`pace_agent.engine.local.slots` is the decoder, `process` and `inprocess` are engines around it. Importing this package
loads no torch.
"""

from pathlib import Path
from typing import Literal

from pace_agent.clock import Clock
from pace_agent.costs import Costs
from pace_agent.engine.base import Engine


def make_local_engine(
    path: str | Path,
    *,
    process: bool = True,
    max_slots: int = 128,
    context_length: int | None = None,
    dtype: str = "float32",
    threads: int = 1,
    stale_cache: Literal["recompute", "keep"] = "recompute",
    version: int = 0,
    clock: Clock | None = None,
    costs: Costs | None = None,
) -> Engine:
    """An engine for a saved model folder; nothing is loaded before `start`.

    `threads` is for the process of its own; in this process torch keeps the threads that it has. `context_length`
    None is the model's. `version` is the policy version of the weights in `path`. `clock` and `costs` are for an
    engine in this process, on virtual time.
    """
    if process:
        from pace_agent.engine.local.process import ProcessEngine

        return ProcessEngine(
            path,
            max_slots=max_slots,
            context_length=context_length,
            dtype=dtype,
            threads=threads,
            stale_cache=stale_cache,
            version=version,
        )
    from pace_agent.engine.local.inprocess import LocalEngine

    return LocalEngine(
        path,
        max_slots=max_slots,
        context_length=context_length,
        dtype=dtype,
        stale_cache=stale_cache,
        version=version,
        clock=clock,
        costs=costs,
    )


__all__ = ["make_local_engine"]
