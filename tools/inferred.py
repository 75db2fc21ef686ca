"""Runs `cpgen plan infer` on the classes that have shipped plans, with the plans' probes, and records what it finds.

    python -m tools.inferred                all that are not in docs/inferred.json yet
    python -m tools.inferred --model M      some, again

What is found is compared with the shipped plan. Where it says the same, the proof of that is its proof; else it is
verified (cp 2, ulysses and allgather). The table in docs/models.md is written from docs/inferred.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path

from cpgen.diagnostics import CpgenError
from cpgen.infer.command import prove
from cpgen.infer.draft import differences, plan_text
from cpgen.infer.inference import infer_plan
from cpgen.plan_files import read_plan
from cpgen.plan_loader import load_plan
from cpgen.resources import shipped_plans
from cpgen.source import SourceTree
from cpgen.target import find_target
from tools.sections import replace_section

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs/inferred.json"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.inferred", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", metavar="M", help="only this one; may be given several times")
    options = parser.parse_args(arguments)
    plans = shipped_plans()
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    for model in options.model or sorted(set(plans) - set(record)):
        print(model, file=sys.stderr, flush=True)
        record[model] = {"diffusers": installed_version("diffusers"), **outcome(model, plans[model])}
        print(f"  {record[model]}", file=sys.stderr, flush=True)
        write(record, plans)
    write(record, plans)


def write(record: Mapping[str, Mapping[str, str]], plans: Mapping[str, Path]) -> None:
    kept = {name: record[name] for name in sorted(record) if name in plans}
    RECORD.write_text(json.dumps(kept, indent=2) + "\n", "utf-8")
    replace_section(ROOT / "docs/models.md", "inferred", table(kept, len(plans)))


def outcome(model: str, path: Path) -> dict[str, object]:
    """`found` is "same" or "other", both proven, or "no"; `why` names what differs, or the first thing left open."""
    written = read_plan(path, f"plans/{path.name}")
    tree = SourceTree()
    try:
        inferred = infer_plan(find_target(model, tree), written.probes, tree)
        plan, problems = inferred.plan, inferred.problems
        if not problems:
            text = plan_text(plan, "found")
            different = sorted(differences(load_plan(text, "found"), written))
            if not different:
                return {"found": "same", "why": ""}
            problems, _ = prove(model, text)
            if not problems:
                return {"found": "other", "why": ", ".join(different)}
    except CpgenError as error:
        problems = list(error.findings)
    first = problems[0]
    where = f" ({first.location.file.rpartition('/')[2]}:{first.location.line})" if first.location else ""
    note = f": {first.note.splitlines()[0]}" if first.code == "CP606" and first.note else ""
    return {"found": "no", "why": f"{first.message}{where}{note}"}


def table(record: Mapping[str, Mapping[str, str]], plans: int) -> str:
    """What was tried, and of how many `plans` that are shipped."""
    count = {kind: sum(each["found"] == kind for each in record.values()) for kind in ("same", "other", "no")}
    version = ", ".join(sorted({each["diffusers"] for each in record.values()}))
    lines = [
        f"diffusers {version}: {count['same'] + count['other']} of {len(record)} found and proven, "
        f"{count['same']} of them as shipped, {count['other']} in other words."
        + (f" {plans - len(record)} more plans have not been tried yet." if plans > len(record) else "")
        + "\n",
        "\n| model | found | |\n| --- | --- | --- |\n",
    ]
    words = {"same": "as shipped", "other": "in other words", "no": "no"}
    for model, each in sorted(record.items()):
        why = each["why"].replace("|", "\\|")
        lines.append(f"| `{model}` | {words[each['found']]} | {why} |\n")
    return "".join(lines)


if __name__ == "__main__":
    main()
