"""The SGLang engine on real GPUs with a real model: are its promises kept, what does an update cost, how fast is it?

    python benchmarks/gpu/sglang.py MODEL_FOLDER [--python INTERPRETER] [--gpus 0,1] [--update disk,tensor,group]
    python benchmarks/gpu/sglang.py tiny --cpu --python INTERPRETER       (the same on a CPU, to try the script itself)

The last GPU is the trainer's, which also recomputes log-probabilities; the others have a server each. With one GPU both
share it, and updates by group are left out: NCCL wants a GPU for each rank.

1. Promises: an abort returns the tokens so far, a cancelled name is free again, nothing is sampled during a pause, a
   bad id is refused alone.
2. Tokens per second with 1, 32 and 256 turns at once.
3. For each transport, 32 turns with three pauses, updates and resumes in their middle. Every log-probability is
   recomputed by transformers in bfloat16 under the weights of its stamp. Kernels differ, so single tokens do too; what
   must hold is that the mean is below 0.05, and below half of what the weights of another version give. The column
   `mean, rounding` is how far transformers in bfloat16 is from itself in float32: a measure, not judged.
4. `pace-agent train` over servers of its own, with the summary's figures.

Prints tables, and as the last line one JSON object. Exit code 0: all held. 1: something did not. 2: nothing was run.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from subject import Place, subject_of
from tables import Row, show
from training import ROOT, train
from turns import examine

from pace_agent.cli.embedded import embedded_model
from pace_agent.errors import PaceError, UserError

TRANSPORTS = ("disk", "tensor", "group")


def refuse(reason: str) -> NoReturn:
    print(f"{reason}. Nothing was run.", file=sys.stderr)
    raise SystemExit(2)


def find_place(cpu: bool, wanted: Sequence[int], python: str) -> Place:
    """The GPUs to use: those wanted, else the first two that are seen."""
    if cpu:
        return Place((), python)
    if wanted:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, wanted))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        build = torch.version.cuda or "none: this torch is built for CPUs"
        refuse(f"This check needs a CUDA GPU, and torch {torch.__version__} sees no CUDA device (its CUDA: {build})")
    if wanted and count != len(wanted):
        refuse(f"--gpus {','.join(map(str, wanted))} names {len(wanted)}, but torch sees {count} of them")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    try:
        return Place(tuple(map(int, seen.split(",")))[: len(wanted) or 2], python)
    except ValueError:
        refuse(f"CUDA_VISIBLE_DEVICES = {seen} holds no numbers: name the GPUs by --gpus")


def find_model(name: str) -> Path:
    folder = embedded_model() if name == "tiny" else Path(name).expanduser().resolve()
    if not (folder / "config.json").is_file():
        refuse(f"{folder} is not a model folder: it holds no config.json")
    return folder


def run(model: Path, place: Place, given: argparse.Namespace, folder: Path) -> dict[str, list[Row]]:
    transports = given.update
    tables = examined(model, place, transports, folder) if transports else {}
    if place.gpus:
        torch.cuda.empty_cache()  # the trainer needs the memory
    if given.steps:
        env = given.env or ("pace/Shop-v0" if given.model == "tiny" else "pace/MathPython-v0")
        update = transports[-1] if transports else "disk"
        tables["training"] = [train(model, place, env, update, given.steps, folder)]
        show(tables["training"])
    return tables


def examined(model: Path, place: Place, transports: Sequence[str], folder: Path) -> dict[str, list[Row]]:
    with subject_of(model, place, folder) as subject:
        return asyncio.run(examine(subject, transports))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_FOLDER", help="a folder such as Qwen3-0.6B, or `tiny`")
    parser.add_argument("--python", default="", help="the interpreter that has SGLang; default: this one")
    parser.add_argument("--gpus", type=numbers, default=[], help="as nvidia-smi numbers them; default: the first two")
    parser.add_argument(
        "--update", type=transport_names, default=list(TRANSPORTS), help="the last one trains too; '': training alone"
    )
    parser.add_argument("--env", help="default: pace/MathPython-v0; for `tiny` pace/Shop-v0, which it knows")
    parser.add_argument("--steps", type=int, default=6, help="of training; 0: none")
    parser.add_argument("--folder", type=Path, help="where logs, weights and the run folder stay; default: nowhere")
    parser.add_argument("--cpu", action="store_true", help="gloo and a CPU in the place of NCCL and GPUs")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def transport_names(text: str) -> list[str]:
    names = [each for each in text.split(",") if each]
    if unknown := [each for each in names if each not in TRANSPORTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(TRANSPORTS)}")
    return names


def main() -> None:
    given = arguments()
    place = find_place(given.cpu, given.gpus, given.python)
    model = find_model(given.model)
    if place.shared and "group" in given.update:
        print("group is left out: NCCL wants a GPU for each rank, and there is one", flush=True)
        given.update.remove("group")
    print(f"{model} on {place.name}, servers on {place.servers or 'the CPU'}, trainer on {place.ours}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pace-agent-gpu-") as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        os.chdir(ROOT)  # in this script's folder its name would hide SGLang from the servers
        try:
            tables = run(model, place, given, folder)
        except UserError as error:
            refuse(str(error))
        except PaceError as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from error
    kept = all(row.get("kept", True) for rows in tables.values() for row in rows)
    figures = {name: [rounded(row) for row in rows] for name, rows in tables.items()}
    print(json.dumps({"kept": kept, "device": place.name, "gpus": len(place.gpus), **figures}))
    raise SystemExit(0 if kept else 1)


def rounded(row: Row) -> Row:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


if __name__ == "__main__":
    main()
