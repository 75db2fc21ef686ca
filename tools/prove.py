"""Runs `cpgen verify` on shipped plans, and records what came out in plans/proofs.json.

    python -m tools.prove                   every shipped plan not proven on the installed diffusers
    python -m tools.prove --versions        SEVEN, on the newest patch release of each of the last five minor versions

Each result is written as soon as it is there, so it can be stopped, and goes on where it was. `--model M` limits it to
some plans, `--again` also runs those that are proven.

Other versions are installed from the package index, alone (no dependencies), into ~/.cache/cpgen/diffusers. There a
plan runs whatever range it says: whether the range is right is what this finds out (tests/unit/test_proofs.py
compares). Exits 1 if a plan fails on a version in its range.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cpgen.plan import Plan
from cpgen.plan_files import read_plan
from cpgen.proofs import Proof, Run, of_probes, read_proofs, write_proofs
from cpgen.resources import shipped_plans
from cpgen.verify.report import forward_error, from_json
from cpgen.verify.run import Result

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cpgen/diffusers"
CASES = ("--cp", "2", "--cp", "4", "--strategy", "ulysses", "--strategy", "allgather")
SEVEN = (
    "CogVideoXTransformer3DModel",
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prove", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", metavar="M", help="only this one; may be given several times")
    parser.add_argument("--versions", action="store_true", help="on the last five minor versions of diffusers")
    parser.add_argument("--again", action="store_true", help="also those that are proven")
    options = parser.parse_args(arguments)
    plans = shipped_plans()
    models = options.model or (SEVEN if options.versions else sorted(plans))
    if unknown := set(models) - set(plans):
        parser.error(f"no shipped plan for {', '.join(sorted(unknown))}")
    versions = last_minors(released()) if options.versions else [installed_version("diffusers")]
    failed = 0
    for version in versions:
        for model in models:
            plan = read_plan(plans[model], f"plans/{plans[model].name}")
            if missing := [name for name in plan.requires if importlib.util.find_spec(name) is None]:
                print(f"{model}: not run, since {', '.join(missing)} is not installed", file=sys.stderr, flush=True)
                continue
            known = next((proof for proof in read_proofs() if _is_for(proof, plan, version)), None)
            if known is None or not known.passed or options.again:
                print(f"{model} on diffusers {version}", file=sys.stderr, flush=True)
                known = prove(plan, plans[model], version)
                _record(known)
                print(f"  {known.error or 'passed'}", file=sys.stderr, flush=True)
            failed += not known.passed and version in SpecifierSet(plan.diffusers or "")
    return 1 if failed else 0


def released() -> list[Version]:
    """The releases of diffusers in the package index."""
    command = [sys.executable, "-m", "pip", "index", "versions", "diffusers"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"^Available versions: (.*)$", listed, re.MULTILINE)
    return [Version(text.strip()) for text in line.split(",")]


def last_minors(releases: Sequence[Version], count: int = 5) -> list[str]:
    """The newest patch release of each of the last `count` minor versions, oldest first."""
    newest: dict[tuple[int, int], Version] = {}
    for release in sorted(release for release in releases if not release.is_prerelease):
        newest[release.major, release.minor] = release
    return [str(newest[minor]) for minor in sorted(newest)[-count:]]


def prove(plan: Plan, path: Path, version: str) -> Proof:
    """Verify the plan at `path` on a version of diffusers."""
    with tempfile.TemporaryDirectory(prefix="cpgen-prove-") as folder:
        text = re.sub(r"^diffusers:.*$", f'diffusers: "=={version}"', path.read_text("utf-8"), flags=re.MULTILINE)
        (Path(folder) / path.name).write_text(text, "utf-8")
        search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        if version != installed_version("diffusers"):
            search.insert(0, str(_installed(version)))
        command = ["verify", "--model", plan.model, "--plan", path.name, *CASES, "--json"]
        ran = subprocess.run(
            [sys.executable, "-m", "cpgen", *command],
            cwd=folder,  # so that messages name the plan without a path
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
            capture_output=True,
            text=True,
        )
    plan = plan.on(version)
    probes = of_probes(plan)
    if ran.returncode not in (0, 1):
        return Proof(plan.model, version, plan.meaning, probes, (), _shortened(ran.stderr))
    results = from_json(ran.stdout)
    return Proof(plan.model, version, plan.meaning, probes, tuple(_runs(results)), _first_failure(results))


def _is_for(proof: Proof, plan: Plan, version: str) -> bool:
    return proof.diffusers == version and proof.is_of(plan)


def _record(proof: Proof) -> None:
    others = [old for old in read_proofs() if (old.model, old.diffusers) != (proof.model, proof.diffusers)]
    write_proofs([*others, proof])


def _installed(version: str) -> Path:
    """A directory that holds this version of diffusers. Installed first, where it isn't yet."""
    place = CACHE / version
    if not place.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:  # a killed install leaves no half version
            package = Path(folder) / "package"
            install = ["install", "--quiet", "--no-deps", "--target", str(package), f"diffusers=={version}"]
            subprocess.run([sys.executable, "-m", "pip", *install], check=True)
            package.rename(place)
    return place


def _runs(results: Sequence[Result]) -> Iterator[Run]:
    for strategy, cp in sorted({(result.strategy, result.cp) for result in results}):
        of_run = [result for result in results if (result.strategy, result.cp) == (strategy, cp)]
        forward = max((forward_error(result) or 0.0 for result in of_run), default=0.0)
        gradient = max((result.grad_max_rel or 0.0 for result in of_run), default=0.0)
        failed = sum(not result.ok for result in of_run)
        yield Run(strategy, cp, float(f"{forward:.1e}"), float(f"{gradient:.1e}"), failed)


def _first_failure(results: Sequence[Result]) -> str | None:
    for result in results:
        if not result.ok:
            return f"{result.probe}, cp {result.cp}, {result.strategy}: {(result.error or '').splitlines()[0]}"
    return None if results else "nothing was run"


def _shortened(message: str) -> str:
    """The first error's message and place, of what the command line prints."""
    lines = message.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("error[")), 0)
    place = next((line.split("--> ")[1] for line in lines[start : start + 3] if "--> " in line), None)
    text = lines[start] if lines else "cpgen verify printed nothing"
    return f"{text} ({place})" if place else text


if __name__ == "__main__":
    sys.exit(main())
