"""CPU time of the commands that must be quick enough for a pre-commit hook, warm: the best of several runs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

RUNS = 5
COMMANDS = {
    "cpgen --help": ["--help"],
    "cpgen emit (Wan)": ["emit", "--model", "WanTransformer3DModel", "--cp", "4"],
    "cpgen check (Wan)": ["check", "wan_transformer_3d"],
    "cpgen list": ["list"],
}


def cpu_seconds(arguments: list[str], folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "cpgen", *arguments], cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in COMMANDS.items():
            times = [cpu_seconds(arguments, folder) for _ in range(RUNS)]
            print(f"{name:20} {min(times):.3f} s CPU (best of {RUNS}, worst {max(times):.3f} s)")


if __name__ == "__main__":
    os.environ.setdefault("NO_COLOR", "1")
    main()
