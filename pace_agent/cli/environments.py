"""`pace-agent env list`."""

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pace_agent.registry import Description, describe, env_ids


def print_environments(*, as_json: bool) -> None:
    """Every id with what is known of it; a broken one with its error."""
    found = [describe(env_id) for env_id in env_ids()]
    if as_json:
        print(json.dumps({"environments": [each.to_dict() for each in found]}, indent=2))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("id", "what the model does", "tools", "from"):
        table.add_column(name, overflow="fold")
    for each in found:
        table.add_row(Text(each.id, style="bold"), _says(each), ", ".join(each.tools) or "-", each.source)
    console = Console(highlight=False)
    console.print(table)
    if any(each.needs_sandbox for each in found):
        console.print("\n* needs a sandbox for the code that the model writes", style="dim")


def _says(each: Description) -> Text:
    if each.error:
        return Text(f"can't be loaded: {each.error}", style="red")
    return Text(each.summary + (" *" if each.needs_sandbox else ""))
