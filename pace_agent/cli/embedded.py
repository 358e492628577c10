"""The model that a run without `--model` starts from: shipped, or made here once and kept in the user's cache.

A folder in the cache is complete or absent: it is made beside its place and moved there when it is whole.
"""

import os
import shutil
import tempfile
from pathlib import Path

from pace_agent import __version__
from pace_agent.errors import UserError

STEPS = 600
CONVERSATIONS = 6_000
SEED = 0


def embedded_model(*, steps: int = STEPS, conversations: int = CONVERSATIONS) -> Path:
    """The folder of the warm-started Shop model.

    The one shipped with the package where it is whole, else the one in the cache, else a new one, which takes some
    three minutes and shows a progress bar on the standard error. UserError when the cache folder can't be written.
    """
    shipped = shipped_folder()
    if is_model(shipped):
        return shipped
    cached = cache_folder()
    if not is_model(cached):
        try:
            _make_cached(cached, steps, conversations)
        except OSError as error:
            raise UserError(
                f"the embedded model can't be kept in {cached}: {error.strerror or error}; "
                "set XDG_CACHE_HOME to a folder that can be written"
            ) from error
    return cached


def shipped_folder() -> Path:
    """Where the package keeps the checkpoint; the folder may be missing."""
    import pace_agent.envs.shop as shop

    return Path(shop.__file__).parent / "warm_start"


def cache_folder() -> Path:
    """Where a model made on this machine is kept; another version of the package makes its own."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pace-agent" / f"shop-warm-start-{__version__}"


def is_model(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def make_embedded_model(folder: Path, *, steps: int = STEPS, conversations: int = CONVERSATIONS) -> Path:
    """Make the warm-started Shop model in `folder`, with a progress bar. The defaults give the shipped checkpoint."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from pace_agent.envs.shop.demonstrations import demonstrations, tool_schemas
    from pace_agent.trainers.warm_start import make_warm_start

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("Making the embedded model", total=steps, loss="-")

        def show(done: int, _steps: int, loss: float) -> None:
            progress.update(bar, completed=done, loss=f"{loss:.3f}")

        played = [each.messages for each in demonstrations(conversations, seed=SEED)]
        return make_warm_start(played, folder, tools=tool_schemas(), steps=steps, seed=SEED, on_step=show)


def _make_cached(target: Path, steps: int, conversations: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    try:
        make_embedded_model(made, steps=steps, conversations=conversations)
        made.chmod(0o755)
        try:
            made.rename(target)
        except OSError:
            if not is_model(target):  # not another process that was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
