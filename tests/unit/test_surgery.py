"""Surgery on a whole module: what it lists, and what it says of a plan that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.before_and_after import findings
from tests.unit.projects import FORWARD, module_text, operated, operation, plan_text


def test_processors_are_listed(tmp_path: Path) -> None:
    (processor,) = operation(tmp_path, module_text(), plan_text()).processors
    assert (processor.module, processor.name) == ("transformer_made", "Processor")


def test_edits_are_listed_in_source_order_with_upstreams_lines(tmp_path: Path) -> None:
    source = module_text()
    edits = operation(tmp_path, source, plan_text()).files[0].edits
    lines = source.splitlines()
    assert [edit.line for edit in edits] == sorted(edit.line for edit in edits)
    begin = next(edit for edit in edits if edit.code == "cp = begin_region(self)")
    assert lines[begin.line - 1] == "        for block in self.blocks:"


def test_class_of_diffusers_refuses_hooks(tmp_path: Path) -> None:
    source = module_text().replace(
        "class Model(nn.Module):\n", 'class Model(ModelMixin):\n    """Doc."""\n\n    # Why.\n'
    )
    text = operated(tmp_path, source, plan_text())
    refusal = "    enable_parallelism = refuse_enable_parallelism  # cpgen: diffusers' hooks would cut a second time\n"
    assert f'    """Doc."""\n\n{refusal}    # Why.\n    def __init__' in text


@pytest.mark.parametrize(
    ("forward", "plan", "found"),
    [
        ("", {"shard": "{hidden_state: {dim: 1, ndim: 3, stream: latent}}"}, "CP104 'hidden_state' has no value there"),
        (
            "",
            {"shard": "{hidden_states: {dim: 1, ndim: 3, stream: latent, when: temb is None}}"},
            "CP104 'temb' has no value there in Model.forward",
        ),
        (
            "",
            {"shard": "{hidden_states: {dim: 1, ndim: 3, stream: latent, after: proj}}"},
            "CP104 forward does not call self.proj",
        ),
        (
            "",
            {"shard": "{hidden_states: {dim: 1, ndim: 3, stream: latent, before: bloks}}"},
            "CP104 forward neither loops over self.bloks nor calls it",
        ),
        ("", {"refuse": "[{when: mode is not None}]"}, "CP104 'mode' has no value there in Model.forward"),
        ("", {"prefix": "{frames: latent}"}, "CP104 'frames' has no value there in Model.forward"),
        (
            "",
            {"gather": "{hidden_states: {after: norm_out, dim: 1, ndim: 3, stream: latent}}"},
            "CP104 forward neither calls self.norm_out in the region nor loops over it",
        ),
        (
            "",
            {"gather": "{out: {after: proj_out, dim: 1, ndim: 3, stream: latent}}"},
            "CP104 the result of self.proj_out is not called 'out'",
        ),
        ("", {"owner": "Procesor"}, "CP104 transformer_made.py neither defines nor imports a class 'Procesor'"),
        ("", {"sites": "[{call: 1, kind: cross}]"}, "CP501 call 0 of Processor attends"),
        (
            "",
            {"sites": "[{call: 0, kind: self, stream: latent, when: x is None}]"},
            "CP104 'x' is not a parameter of Processor.__call__",
        ),
        (
            "",
            {"sites": "{sites: [{call: 0, kind: cross}], whole: [{variables: {n: latent}, after: n}]}"},
            "CP105 Processor has no site that exchanges tokens",
        ),
        (
            "",
            {
                "sites": "{sites: [{call: 0, kind: self, stream: latent}],"
                " whole: [{variables: {query: latent}, after: n}]}"
            },
            "CP104 Processor.__call__ does not assign 'n'",
        ),
        (
            "",
            {
                "sites": "{sites: [{call: 0, kind: self, stream: latent}],"
                " whole: [{variables: {query: latent}, after: out, until: out}]}"
            },
            "CP502 'out' is assigned last at line 7, where the lengths are not whole yet",
        ),
        ("", {"outside": "[Nothing]"}, "CP104 'outside' names 'Nothing'"),
        (
            FORWARD.replace("(hidden_states)\n    return", "(hidden_states); print()\n    return"),
            {},
            "CP503 a statement in transformer_made.py shares its line",
        ),
        (
            FORWARD.replace("    hidden_states = self.proj", "    if True: hidden_states = self.proj"),
            {},
            "CP503 a statement in transformer_made.py shares its line",
        ),
        (
            FORWARD.replace("self.proj_out(hidden_states)\n", "1 + self.proj_out(hidden_states) \\\n        + 1\n"),
            {},
            "CP503 no comment can stand at the end of this line",
        ),
        (
            FORWARD.replace("self.proj_out(hidden_states)\n", '1, self.proj_out("""\n    """)\n'),
            {},
            "CP503 no comment can stand at the end of this line",
        ),
    ],
)
def test_plan_that_does_not_fit_the_source(tmp_path: Path, forward: str, plan: dict[str, str], found: str) -> None:
    assert any(
        line.startswith(found) for line in findings(tmp_path, module_text(forward or FORWARD), plan_text(**plan))
    )


def test_attention_that_the_plan_forgot(tmp_path: Path) -> None:
    source = module_text() + "\n\nclass Pooling(nn.Module):\n    def forward(self, q):\n"
    source += "        return dispatch_attention_fn(q, q, q)\n"
    (message,) = findings(tmp_path, source, plan_text())
    assert message == "CP501 Pooling.forward attends, but the plan does not describe it"
    assert "class Pooling" in operated(tmp_path, source, plan_text(outside="[Pooling]"))


def test_inherited_forward_is_an_error(tmp_path: Path) -> None:
    source = module_text().replace("def forward", "def backward")
    assert findings(tmp_path, source, plan_text()) == ["CP504 Model defines no forward of its own"]


def test_all_findings_come_at_once(tmp_path: Path) -> None:
    plan = plan_text(
        shard="{x: {dim: 1, ndim: 3, stream: latent}, y: {dim: 1, ndim: 3, stream: latent}}",
        gather="{hidden_states: {after: norm, dim: 1, ndim: 3, stream: latent}}",
        owner="Other",
    ).replace("blocks: [blocks]", "blocks: [blocks, more]")
    assert len(findings(tmp_path, module_text(), plan)) == 5
