"""tools/prove.py and tools/tables.py: which versions and plans run, what is kept of it, and what the tables say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from cpgen import proofs
from cpgen.plan import Plan
from cpgen.plan_files import read_plan
from cpgen.proofs import Proof, Run, of_probes, read_proofs
from cpgen.verify.run import Result
from tests.unit.projects import REPOSITORY
from tools import prove, tables

WAN = read_plan(REPOSITORY / "plans/wan.yaml", "plans/wan.yaml")
FLUX = read_plan(REPOSITORY / "plans/flux.yaml", "plans/flux.yaml")
RESULT = Result("M", "m", "one", 2, "ulysses", 2.0e-6, 4.0, 3.0e-6, True, None, 1.0)


def proof(plan: Plan, version: str, *, failed: int = 0, error: str | None = None) -> Proof:
    runs = (Run("allgather", 2, 1.0e-7, 2.0e-6, 0), Run("ulysses", 2, 0.0, 3.0e-6, failed))
    return Proof(plan.model, version, plan.meaning, of_probes(plan), runs, error)


def test_newest_patch_of_the_last_minors() -> None:
    texts = ["0.42.1", "0.42.0", "0.43.0rc1", "0.41.0", "0.40.2", "0.40.10", "0.39.0", "0.38.0", "0.9.9"]
    newest = ["0.38.0", "0.39.0", "0.40.10", "0.41.0", "0.42.1"]
    assert prove.last_minors([Version(text) for text in texts]) == newest
    assert prove.last_minors([Version("1.0.0"), Version("0.9.0")], 2) == ["0.9.0", "1.0.0"]


def test_a_run_keeps_the_worst_of_its_probes() -> None:
    bad = replace(RESULT, probe="two", grad_max_rel=0.5, ok=False, error="rank 0: output differs\nby much")
    other = replace(RESULT, cp=4, forward_max_abs=None, reference_max_abs=None, grad_max_rel=None)
    assert list(prove._runs([RESULT, bad, other])) == [
        Run("ulysses", 2, 5.0e-7, 0.5, 1),
        Run("ulysses", 4, 0.0, 0.0, 0),
    ]
    assert prove._first_failure([RESULT, bad]) == "two, cp 2, ulysses: rank 0: output differs"
    assert prove._first_failure([RESULT]) is None and prove._first_failure([]) == "nothing was run"


def test_of_an_error_its_message_and_place() -> None:
    message = (
        "error[CP104]: no such loop\n   --> wan.yaml:10:19\n   |\n10 |   begin\n\nerror[CP104]: other\n --> b:1:1\n"
    )
    assert prove._shortened(f"a warning\n{message}") == "error[CP104]: no such loop (wan.yaml:10:19)"
    assert prove._shortened("internal error: KeyError: 'x'\n") == "internal error: KeyError: 'x'"
    assert prove._shortened("") == "cpgen verify printed nothing"


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was verified, in a run that verifies nothing: all pass."""
    done: list[tuple[str, str]] = []

    def pretend(plan: Plan, path: Path, version: str) -> Proof:
        done.append((plan.model, version))
        return proof(plan, version)

    monkeypatch.setattr(proofs, "proofs_file", lambda: tmp_path / "proofs.json")
    monkeypatch.setattr(prove, "prove", pretend)
    monkeypatch.setattr(prove, "released", lambda: [Version(f"0.{minor}.0") for minor in range(30, 43)])
    monkeypatch.setattr(prove, "installed_version", lambda name: "0.42.0")
    return done


def test_only_what_is_not_proven_runs(ran: list[tuple[str, str]]) -> None:
    proofs.write_proofs([proof(WAN, "0.42.0"), proof(FLUX, "0.42.0", error="one failed")])
    assert prove.main(["--model", WAN.model, "--model", FLUX.model]) == 0
    assert ran == [(FLUX.model, "0.42.0")] and all(each.passed for each in read_proofs())
    assert prove.main(["--model", WAN.model, "--again"]) == 0
    assert ran[1:] == [(WAN.model, "0.42.0")] and len(read_proofs()) == 2


def test_what_a_class_requires_is_looked_for(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "read_plan", lambda path, name: replace(WAN, requires=("torch", "no_such_package")))
    assert prove.main(["--model", WAN.model]) == 0
    assert ran == [] and read_proofs() == []
    assert capsys.readouterr().err == f"{WAN.model}: not run, since no_such_package is not installed\n"


def test_versions_are_the_last_five(ran: list[tuple[str, str]]) -> None:
    prove.main(["--versions"])
    assert ran == [(model, f"0.{minor}.0") for minor in range(38, 43) for model in prove.SEVEN]


def test_failure_counts_where_the_plan_claims_the_version(
    ran: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "prove", lambda plan, path, version: proof(plan, version, failed=1, error="no"))
    assert prove.main(["--model", WAN.model]) == 1
    monkeypatch.setattr(prove, "released", lambda: [Version("0.30.0")])
    assert prove.main(["--model", WAN.model, "--versions"]) == 0
    assert {(each.diffusers, each.passed) for each in read_proofs()} == {("0.30.0", False), ("0.42.0", False)}


def test_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        prove.main(["--model", "Wan"])
    assert exit_.value.code == 2 and "no shipped plan for Wan" in capsys.readouterr().err


def test_tables() -> None:
    stale = replace(proof(FLUX, "0.42.0"), plan="of another plan")
    known = [proof(WAN, "0.42.0"), stale, proof(WAN, "0.41.0", failed=2, error="one, cp 2, ulysses: differs")]
    known.append(replace(proof(FLUX, "0.41.0"), runs=(), error="error[CP104]: gone (flux.yaml:3:1)"))
    models = tables.models_table([FLUX, WAN], known, "0.42.0").splitlines()
    assert models[0] == "| model | plan | probes | allgather, cp 2 | ulysses, cp 2 |"
    assert models[2].endswith("| not run | not run |") and models[3].endswith("| 1.0e-07 / 2.0e-06 | 0 / 3.0e-06 |")
    versions = tables.versions_table([FLUX, WAN], known)
    assert f"| `{FLUX.model}` | `{FLUX.diffusers}` | does not fit | not run |\n" in versions
    assert f"| `{WAN.model}` | `{WAN.diffusers}` | 2 failed | 1.0e-07 / 3.0e-06 |\n" in versions
    assert f"- `{FLUX.model}` on 0.41.0: error[CP104]: gone (flux.yaml:3:1)\n" in versions
    text = tables.summary([FLUX, WAN], known, "0.42.0")
    assert text.startswith("1 of 2 plans are proven on diffusers 0.42.0, worst errors 1.0e-07 / 3.0e-06:\n")
    assert f"\n`{WAN.model}`\n" in text and f"where what they require is installed: `{FLUX.model}`\n" in text
