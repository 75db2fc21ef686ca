"""Tokens that a model puts ahead of a stream, as many as its config says: before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.before_and_after import check_forward, code, findings
from tests.unit.projects import function_in, module_text, operated, plan_text

BEFORE = """
def forward(self, hidden_states, extra):
    hidden_states = self.proj_in(hidden_states, self.config.lead)
    for block in self.blocks:
        if self.training:
            hidden_states = self._gradient_checkpointing_func(
                block,
                hidden_states,
                self.config.lead,
            )
        else:
            hidden_states = block(hidden_states, lead=self.config.lead)
    hidden_states = self.proj_out(hidden_states[:, self.config.lead :])
    return hidden_states
"""
LEAD = 'cp.local_prefix(self.config.lead, "latent")'
REASON = "  # cpgen: those in this rank's latent"


def test_each_read_of_the_config_in_the_region_is_of_this_ranks_tokens(tmp_path: Path) -> None:
    """Not those ahead of it, nor behind it."""
    check_forward(
        tmp_path,
        BEFORE,
        BEFORE.replace(
            "    for block",
            "    cp = begin_region(self)  # cpgen: region begins\n    hidden_states = <IN>\n    for block",
        )
        .replace(" block,", " cp.pin(block),  # cpgen: recompute with this forward's lengths")
        .replace("                self.config.lead,", f"                {LEAD},{REASON}")
        .replace("lead=self.config.lead)", f"lead={LEAD}){REASON}")
        .replace("    hidden_states = self.proj_out", "    hidden_states = <OUT>\n    hidden_states = self.proj_out"),
        prefix="{self.config.lead: latent}",
        gather="{hidden_states: {after: blocks, dim: 1, ndim: 3, stream: latent}}",
    )


@pytest.mark.parametrize("start", ["self.config.lead", "extra_start"])
def test_value_without_the_leading_tokens(tmp_path: Path, start: str) -> None:
    shard = f"{{extra: {{dim: 1, ndim: 3, stream: latent, start: {start}, optional: true}}}}"
    forward = code(BEFORE).replace("extra)", "extra, extra_start)")
    text = function_in(operated(tmp_path, module_text(forward=forward), plan_text(shard=shard)), "def forward")
    cut = f'extra = cp.shard(extra, "extra", dim=1, ndim=3, stream="latent", optional=True, start={start})'
    assert f"    {cut}  # cpgen: cut latent\n" in text


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"prefix": "{self.config.led: latent}"}, "CP104 forward does not read self.config.led in the region"),
        (
            {"shard": "{extra: {dim: 1, ndim: 3, stream: latent, start: self.config.led}}"},
            "CP104 forward does not read self.config.led",
        ),
        (
            {"shard": "{extra: {dim: 1, ndim: 3, stream: latent, start: led}}"},
            "CP104 'led' has no value there in Model.forward",
        ),
    ],
)
def test_no_such_number(tmp_path: Path, plan: dict[str, str], message: str) -> None:
    assert findings(tmp_path, module_text(forward=code(BEFORE)), plan_text(**plan)) == [message]


def test_a_config_that_is_read_outside_of_the_region_alone(tmp_path: Path) -> None:
    forward = code(
        """
        def forward(self, hidden_states):
            for block in self.blocks:
                hidden_states = block(hidden_states)
            hidden_states = self.proj_out(hidden_states)
            hidden_states = hidden_states[:, self.config.lead :]
            return hidden_states
        """
    )
    found = findings(tmp_path, module_text(forward=forward), plan_text(prefix="{self.config.lead: latent}"))
    assert found == ["CP104 forward does not read self.config.lead in the region"]
