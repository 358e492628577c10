"""Make the shipped checkpoint of the embedded model anew, in about three minutes on one core:

    python -m scripts.make_warm_start [FOLDER]

The folder is `envs/shop/warm_start` if none is given. Run it from the root of a checkout. The same version of torch on
the same kind of processor gives the same bytes; another may differ in the last bits and sample a little differently.
"""

import sys
from pathlib import Path

from pace_agent.cli.embedded import make_embedded_model, shipped_folder

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else shipped_folder()
    print(make_embedded_model(folder))
