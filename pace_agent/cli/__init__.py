"""The command line. `main` is its one boundary: an error becomes a message and an exit code here, and nowhere else."""

import sys
from collections.abc import Sequence

from pace_agent.errors import PaceError, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command: 0 when it went well, 2 for bad input, 1 when the run couldn't go on, 130 after Ctrl-C.

    The command line's own errors and `--help` leave through SystemExit.
    """
    from pace_agent.cli.app import app

    try:
        app(args=None if arguments is None else list(arguments), prog_name="pace-agent")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
