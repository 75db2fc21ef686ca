"""Gathers behind the last assignment of a variable, as ControlNets need, and behind a loop: before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.before_and_after import check_forward, code, findings
from tests.unit.projects import function_in, module_text, operated, plan_text

SAMPLES = 'cp.gather(samples, "samples", "*", dim=1, ndim=3, stream="latent")  # cpgen: region ends'


def test_behind_the_last_assignment(tmp_path: Path) -> None:
    check_forward(
        tmp_path,
        """
        def forward(self, hidden_states, scale):
            samples = ()
            for block in self.blocks:
                hidden_states = block(hidden_states)
                samples = samples + (hidden_states,)
            samples = [sample * scale for sample in samples]
            samples = (
                samples or None
            )
            return samples
        """,
        """
        def forward(self, hidden_states, scale):
            samples = ()
            cp = begin_region(self)  # cpgen: region begins
            hidden_states = <IN>
            for block in self.blocks:
                hidden_states = block(hidden_states)
                samples = samples + (hidden_states,)
            samples = [sample * scale for sample in samples]
            samples = (
                samples or None
            )
            samples = <GATHER>
            return samples
        """.replace("<GATHER>", SAMPLES.replace('"latent")', '"latent", optional=True)')),
        gather="{'samples[*]': {dim: 1, ndim: 3, stream: latent, optional: true}}",
    )


def test_behind_the_whole_loop_that_assigns_it(tmp_path: Path) -> None:
    forward = code(
        """
        def forward(self, hidden_states):
            samples = []
            for block in self.blocks:
                if block:
                    samples += [block(hidden_states)]
            return samples
        """
    )
    text = operated(
        tmp_path, module_text(forward=forward), plan_text(gather="{'samples[*]': {dim: 1, ndim: 3, stream: latent}}")
    )
    lines = function_in(text, "def forward").splitlines()
    assert lines[-2] == f"    samples = {SAMPLES}"


def test_behind_the_loops_over_a_module_list(tmp_path: Path) -> None:
    """Ahead of what would slice this rank's tokens as if they were all; the last of several loops counts."""
    check_forward(
        tmp_path,
        """
        def forward(self, hidden_states):
            for block in self.blocks:
                hidden_states = block(hidden_states)
            if self.training:
                for block in self.blocks:
                    hidden_states = block(hidden_states)
                hidden_states = hidden_states * 2
            hidden_states = self.proj_out(hidden_states[:, 1:])
            return hidden_states
        """,
        """
        def forward(self, hidden_states):
            cp = begin_region(self)  # cpgen: region begins
            hidden_states = <IN>
            for block in self.blocks:
                hidden_states = block(hidden_states)
            if self.training:
                for block in self.blocks:
                    hidden_states = block(hidden_states)
                hidden_states = hidden_states * 2
            hidden_states = <OUT>
            hidden_states = self.proj_out(hidden_states[:, 1:])
            return hidden_states
        """,
        gather="{hidden_states: {after: blocks, dim: 1, ndim: 3, stream: latent}}",
    )


def test_no_such_variable_behind_the_loop(tmp_path: Path) -> None:
    plan = plan_text(gather="{output: {after: blocks, dim: 1, ndim: 3, stream: latent}}")
    assert findings(tmp_path, module_text(), plan) == ["CP104 'output' has no value there in Model.forward"]


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("sample", "CP104 forward assigns no 'sample' in the region"),
        ("early", "CP104 forward assigns no 'early' in the region"),
    ],
)
def test_no_such_assignment(tmp_path: Path, variable: str, message: str) -> None:
    forward = code(
        """
        def forward(self, hidden_states):
            early = 1
            for block in self.blocks:
                hidden_states = block(hidden_states)
            samples = hidden_states * early
            return samples
        """
    )
    plan = plan_text(gather=f"{{{variable}: {{dim: 1, ndim: 3, stream: latent}}}}")
    assert findings(tmp_path, module_text(forward=forward), plan) == [message]
