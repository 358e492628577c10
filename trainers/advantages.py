"""Group-relative advantages: how much better a rollout is than the others that answered the same task.

Pure numpy in float64, so that whoever closes a group can compute them without loading torch.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

Scale = Literal["std", "none"]

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does: nearly equal rewards then give small advantages, not huge ones."""


def group_advantages(rewards: Sequence[float], scale: Scale = "std") -> tuple[float, ...]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4), or r_i - mean(r) with `scale="none"` (the choice of Dr. GRPO).

    `std` is the sample standard deviation (n - 1). Rewards that are all equal give exactly 0 and so does a single one:
    they say nothing about which rollout was better, and rounding must not decide it. ValueError for a reward that is
    not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if values.size == 0 or values.min() == values.max():
        return (0.0,) * values.size
    centred = values - values.mean()
    if scale == "std":
        centred = centred / (values.std(ddof=1) + EPSILON)
    return tuple(centred.tolist())
