"""SGLang engines for tests: over tiny models, with short waits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tiny_models import VOCAB

from pace_agent.engine.sglang.client import Keys
from pace_agent.engine.sglang.engine import SGLangEngine, SGLangOptions
from pace_agent.engine.sglang.serving.router import Router
from pace_agent.engine.sglang.weights.kept import WeightKeeper
from pace_agent.engine.sglang.weights.transports import make_transport


def sglang_engine(
    urls: Sequence[str],
    model: Path,
    *,
    update: Literal["disk", "tensor", "group"] = "disk",
    keys: Keys | None = None,
    router: Router | None = None,
    **options: Any,
) -> SGLangEngine:
    """An engine over servers that have the weights in `model`. `options` are those of SGLangOptions."""
    return SGLangEngine(
        urls,
        options=SGLangOptions(**{"vocab_size": VOCAB, "stream_interval": 1, **options}),
        transport=make_transport(update),
        keeper=WeightKeeper(model),
        model=model,
        keys=keys,
        router=router,
    )
