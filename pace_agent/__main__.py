"""`python -m pace_agent` is `pace-agent`."""

import sys

from pace_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
