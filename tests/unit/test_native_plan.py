"""A class's own `_cp_plan`, in diffusers' convention, as a third party would write it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError, Finding
from cpgen.native_plan import has_native_plan, native_plan
from cpgen.package import Request, generate
from cpgen.plan import Plan
from cpgen.source import SourceTree
from cpgen.surgery.operate import operate
from cpgen.target import find_target
from tests.unit.projects import FORMS, function_in

PLAN = """\
    _cp_plan = {
        "rope": {
            0: ContextParallelInput(split_dim=1, expected_dims=4, split_output=True),
            1: ContextParallelInput(split_dim=1, expected_dims=4, split_output=True),
        },
        "": {
            "timestep": ContextParallelInput(split_dim=1, expected_dims=2),
            "control": [ContextParallelInput(1, 3), ContextParallelInput(1, 3)],
        },
        "blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3, split_output=False)},
        "blocks.*": {"encoder_hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
        "norm_out": {"temb": ContextParallelInput(split_dim=1, expected_dims=3)},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
"""
SOURCE = '''\
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn


class SelfProcessor:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None):
        query, key, value = attn.qkv(hidden_states)
        hidden_states = dispatch_attention_fn(query, key, value, parallel_config=self._parallel_config)
        return attn.to_out(hidden_states)


class LocalProcessor:
    def __call__(self, attn, hidden_states):
        query, key, value = attn.qkv(hidden_states)
        return dispatch_attention_fn(query, key, value, parallel_config=None)


class MixedProcessor:
    def __call__(self, attn, hidden_states, context=None):
        query, key, value = attn.qkv(hidden_states)
        config = None
        return dispatch_attention_fn(
            query, key, value, parallel_config=(self._parallel_config if context is None else None)
        )


class JointProcessor:
    def __call__(self, attn, hidden_states, encoder_hidden_states):
        query = torch.cat([attn.add_q(encoder_hidden_states), attn.to_q(hidden_states)], dim=1)
        key, value = query, query
        return dispatch_attention_fn(query, key, value, parallel_config=self._parallel_config)


class CrossProcessor:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None):
        query, key, value = attn.to_q(hidden_states), attn.to_k(encoder_hidden_states), attn.to_v(hidden_states)
        return dispatch_attention_fn(query, key, value, parallel_config=self._parallel_config)


class Block(nn.Module):
    def __init__(self):
        self.attn = nn.Linear(1, 1)

    def forward(self, hidden_states, encoder_hidden_states, rotary, temb=None):
        return self.attn(hidden_states)


class Rope(nn.Module):
    def forward(self, x):
        return x.cos(), x.sin()


class Norm(nn.Module):
    def forward(self, hidden_states, temb):
        return hidden_states


class Model(nn.Module):
<PLAN>
    def __init__(self, num_attention_heads=4):
        self.rope = Rope()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm_out = Norm()
        self.proj_out = nn.Linear(1, 1)

    def forward(self, hidden_states, encoder_hidden_states, timestep, temb, control=None):
        """Run."""
        rotary = self.rope(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, encoder_hidden_states, rotary, temb=temb)
        hidden_states = self.norm_out(hidden_states, temb)
        output = self.proj_out(hidden_states)
        return output
'''


def written(folder: Path, plan: str = PLAN, *changes: tuple[str, str]) -> str:
    """The model file with a `_cp_plan` and other changes; how --model names its class."""
    text = SOURCE.replace("<PLAN>\n", plan)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / "third_party.py").write_text(text)
    return f"{folder}/third_party.py:Model"


def read(folder: Path, plan: str = PLAN, *changes: tuple[str, str]) -> Plan:
    tree = SourceTree()
    return native_plan(find_target(written(folder, plan, *changes), tree), tree)


def findings(folder: Path, plan: str = PLAN, *changes: tuple[str, str]) -> list[Finding]:
    with pytest.raises(CpgenError) as error:
        read(folder, plan, *changes)
    return list(error.value.findings)


def only(*entries: str) -> str:
    """A plan of these entries."""
    return "    _cp_plan = {\n" + "".join(f"        {entry},\n" for entry in entries) + "    }\n"


CUT = '"blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)}'
GATHER = '"proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3)'


def test_whole_plan(tmp_path: Path) -> None:
    plan = read(tmp_path)
    assert (plan.model, plan.heads, plan.blocks, plan.begin) == ("Model", "num_attention_heads", ("blocks",), None)
    assert plan.name == "third_party.py (_cp_plan)" and plan.diffusers is None
    assert [
        (s.variable, s.path, s.dim, s.ndim, s.streams, s.optional, s.when, s.after, s.before, s.argument_of)
        for s in plan.shards
    ] == [
        ("rotary", (0,), 1, 4, ("rope[0]",), False, None, "rope", None, None),
        ("rotary", (1,), 1, 4, ("rope[1]",), False, None, "rope", None, None),
        ("timestep", (), 1, 2, ("timestep",), False, "timestep is not None and timestep.ndim > 1", None, None, None),
        ("control", (0,), 1, 3, ("control[0]",), True, None, None, None, None),
        ("control", (1,), 1, 3, ("control[1]",), True, None, None, None, None),
        ("hidden_states", (), 1, 3, ("hidden_states",), False, None, None, "blocks", None),
        ("encoder_hidden_states", (), 1, 3, ("encoder_hidden_states",), True, None, None, "blocks", None),
        ("temb", (), 1, 3, ("temb",), False, None, None, None, "norm_out"),
    ]
    assert [(g.variable, g.path, g.dim, g.ndim, g.stream, g.after) for g in plan.gathers] == [
        ("output", (), 1, 3, "hidden_states", "proj_out")
    ]


def test_attention_is_read_from_parallel_config(tmp_path: Path) -> None:
    sites = {
        function.owner: [(s.kind, s.streams, s.kv, s.when, s.otherwise) for s in function.sites]
        for function in read(tmp_path).attention
    }
    latent, text = "hidden_states", "encoder_hidden_states"
    assert sites == {
        "SelfProcessor": [("self", (latent,), None, None, None)],
        "LocalProcessor": [("cross", (), None, None, None)],
        "MixedProcessor": [("self", (latent,), None, "context is None", None)],
        "JointProcessor": [("joint", (text, latent), None, None, None)],
        "CrossProcessor": [("cross", (latent,), (text,), f"{text} is not None", (latent,))],
    }


def test_latent_first_where_the_source_concatenates_so(tmp_path: Path) -> None:
    first = "[attn.add_q(encoder_hidden_states), attn.to_q(hidden_states)]"
    second = "[attn.to_q(hidden_states), attn.add_q(encoder_hidden_states)]"
    plan = read(tmp_path, PLAN, (first, second))
    site = next(f for f in plan.attention if f.owner == "JointProcessor").sites[0]
    assert site.streams == ("hidden_states", "encoder_hidden_states")


def test_without_text_every_site_is_over_latent(tmp_path: Path) -> None:
    plan = read(tmp_path, only(CUT, GATHER))
    assert plan.streams == ("hidden_states",)
    assert {s.streams for f in plan.attention for s in f.sites} == {("hidden_states",), ()}


def test_negated_condition_and_outputs_by_position(tmp_path: Path) -> None:
    plan = read(
        tmp_path,
        only(CUT, '"proj_out": [ContextParallelOutput(gather_dim=1, expected_dims=3)]'),
        ("self._parallel_config if context is None else None", "None if context is None else self._parallel_config"),
    )
    site = next(f for f in plan.attention if f.owner == "MixedProcessor").sites[0]
    assert site.when == "not context is None"
    assert [gather.path for gather in plan.gathers] == [(0,)]


def test_results_unpacked_into_variables(tmp_path: Path) -> None:
    entry = '"rope": {1: ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)}'
    changes = ("rotary = self.rope(hidden_states)", "cos, sin = rotary = self.rope(hidden_states)")
    plan = read(tmp_path, only(CUT, entry, GATHER), changes)
    assert [(s.variable, s.path, s.streams) for s in plan.shards if s.after] == [("sin", (), ("rope[1]",))]


@pytest.mark.parametrize("strategy", ["ulysses", "allgather"])
def test_plan_fits_its_source(tmp_path: Path, strategy: str) -> None:
    tree = SourceTree()
    target = find_target(written(tmp_path), tree)
    text = operate(target, native_plan(target, tree), FORMS[strategy], "cpgen.runtime", tree).files[0].text
    forward = function_in(text[text.index("class Model") :], "def forward")
    assert forward == textwrap.dedent(
        '''\
        def forward(self, hidden_states, encoder_hidden_states, timestep, temb, control=None):
            """Run."""
            cp = begin_region(self)  # cpgen: region begins
            timestep = cp.shard(timestep, "timestep", dim=1, ndim=2, stream="timestep", when=timestep is not None and timestep.ndim > 1)  # cpgen: cut timestep
            control = cp.shard(control, "control", 0, dim=1, ndim=3, stream="control[0]", optional=True)  # cpgen: cut control[0]
            control = cp.shard(control, "control", 1, dim=1, ndim=3, stream="control[1]", optional=True)  # cpgen: cut control[1]
            rotary = self.rope(hidden_states)
            rotary = cp.shard(rotary, "rotary", 0, dim=1, ndim=4, stream="rope[0]")  # cpgen: cut rope[0]
            rotary = cp.shard(rotary, "rotary", 1, dim=1, ndim=4, stream="rope[1]")  # cpgen: cut rope[1]
            hidden_states = cp.shard(hidden_states, "hidden_states", dim=1, ndim=3, stream="hidden_states")  # cpgen: cut hidden_states
            encoder_hidden_states = cp.shard(encoder_hidden_states, "encoder_hidden_states", dim=1, ndim=3, stream="encoder_hidden_states", optional=True)  # cpgen: cut encoder_hidden_states
            for block in self.blocks:
                hidden_states = block(hidden_states, encoder_hidden_states, rotary, temb=temb)
            hidden_states = self.norm_out(hidden_states, cp.shard(temb, "temb", dim=1, ndim=3, stream="temb"))  # cpgen: cut temb
            output = self.proj_out(hidden_states)
            output = cp.gather(output, "output", dim=1, ndim=3, stream="hidden_states")  # cpgen: region ends
            return output
        '''  # noqa: E501
    )


def test_emitted_without_a_plan_file(tmp_path: Path) -> None:
    made = generate(Request(written(tmp_path), 2, package="third"), tmp_path / "generated")
    assert "# plan:   third_party.py (_cp_plan) sha256:" in made.files["third_party.py"]
    assert "heads=None" in made.files["parallelize.py"]  # nn.Module alone has no config to read it from


@pytest.mark.parametrize(
    ("plan", "has"), [(PLAN, True), ("", False), ("    _cp_plan = None\n", False), ("    _cp_plan = {}\n", False)]
)
def test_whether_there_is_one(tmp_path: Path, plan: str, has: bool) -> None:
    assert has_native_plan(find_target(written(tmp_path, plan), SourceTree())) is has
    annotated = plan.replace("_cp_plan =", "_cp_plan: dict =")
    assert has_native_plan(find_target(written(tmp_path, annotated), SourceTree())) is has


IN = "ContextParallelInput(split_dim=1, expected_dims=3)"


@pytest.mark.parametrize(
    ("entry", "message", "source"),
    [
        (f'NAME: {{"hidden_states": {IN}}}', "a module id in _cp_plan must be a plain string", "NAME"),
        (f'"": {{"hidden_state": {IN}}}', "forward has no parameter 'hidden_state'", IN),
        (f'"gone": {{"x": {IN}}}', "forward does not call self.gone", '"gone"'),
        (f'"blocks.1": {{"hidden_states": {IN}}}', "'blocks.1': only the first block, or '*'", '"blocks.1"'),
        (f'"blocks.0": {{"hiden": {IN}}}', "'hiden' of self.blocks is not one variable of forward", '"blocks.0"'),
        (f'"blocks.*": {{"hidden_states": {IN}}}', "'hidden_states' changes from block to block", '"blocks.*"'),
        (f'"rope": {{0: {IN}}}', "inputs are split by parameter name, outputs by index", IN),
        (f'"gone": {{0: {IN[:-1]}, split_output=True)}}', "forward does not call self.gone", '"gone"'),
        ('"": {"temb": [1]}', "expected a ContextParallelInput(...)", "1"),
        ('"": {"temb": ContextParallelInput(split_dim=DIM)}', "ContextParallelInput must hold plain numbers", None),
        ('"": {"temb": ContextParallelInput(split_dim=-1)}', "must hold plain numbers", None),
        ('"": {"temb": ContextParallelInput(split_dim=3, expected_dims=3)}', "dim 3 cannot be", None),
        ('"": {"temb": ContextParallelInput(expected_dims=3)}', "must hold plain numbers", None),
        ('"norm_out": ContextParallelInput(1)', "expected a ContextParallelOutput(...)", None),
        ('"": ContextParallelOutput(gather_dim=1)', "the root's output cannot be gathered", '""'),
        ('"gone": ContextParallelOutput(gather_dim=1)', "forward does not call self.gone", '"gone"'),
    ],
)
def test_entry_that_has_no_counterpart(tmp_path: Path, entry: str, message: str, source: str | None) -> None:
    (found,) = findings(tmp_path, only(CUT, entry, GATHER))
    assert found.code == "CP111" and message in found.message
    place = found.location
    assert place is not None and place.file == "third_party.py" and place.text == f"        {entry},"
    if source is not None:
        assert place.text[place.column - 1 : place.column - 1 + place.width] == source
    assert found.help and ":Model --write FILE finds one where it can; else write one" in found.help


def test_result_that_is_not_a_variable(tmp_path: Path) -> None:
    entry = '"rope": {0: ContextParallelInput(1, 4, split_output=True)}'
    (found,) = findings(tmp_path, only(CUT, entry, GATHER), ("rotary = self", "self.rotary = self"))
    assert "the result of self.rope is not assigned to a variable" in found.message


def test_attention_outside_the_convention(tmp_path: Path) -> None:
    changes = (
        "return dispatch_attention_fn(query, key, value, parallel_config=None)",
        "return F.scaled_dot_product_attention(query, key, value)",
    )
    (found,) = findings(tmp_path, PLAN, changes)
    assert found.code == "CP111" and "does not go through dispatch_attention_fn" in found.message
    assert found.location is not None and "F.scaled_dot_product_attention" in (found.location.text or "")


def test_condition_outside_the_grammar(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, PLAN, ("if context is None else", "if check(context) else"))
    assert "this condition is not one that a plan may hold" in found.message


def test_class_without_blocks_or_forward(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, only(GATHER), ("nn.ModuleList([Block() for _ in range(2)])", "Block()"))
    assert "no list of blocks" in found.message
    (found,) = findings(
        tmp_path, PLAN, ("    def forward(self, hidden_states, encoder_hidden_states, t", "    def run(self, t")
    )
    assert found.code == "CP504"


def test_all_findings_come_at_once(tmp_path: Path) -> None:
    found = findings(
        tmp_path, only(CUT, f'"gone": {{"x": {IN}}}', f'"": {{"y": {IN}}}', '"lost": ContextParallelOutput(1)')
    )
    assert len(found) == 3
