"""That the probes of a shipped plan pass every argument of the class's forward, but for those named here."""

from __future__ import annotations

import ast

import pytest

from cpgen import resources
from cpgen.plan import Plan
from cpgen.plan_files import read_plan
from cpgen.source import SourceTree
from cpgen.target import find_target

SHIPPED = [read_plan(path, f"plans/{path.name}") for path in resources.shipped_plans().values()]

NO_PROJECTION = "upstream's time embedding has no projection for it"
NEEDS_PROCESSOR = "of processors that fill a cache, whose modes the plan refuses"
NOT_PROBED = {
    ("BriaTransformer2DModel", "controlnet_single_block_samples"): "upstream cuts the text off blocks' image tokens",
    ("CogVideoXTransformer3DModel", "timestep_cond"): NO_PROJECTION,
    ("ConsisIDTransformer3DModel", "timestep_cond"): NO_PROJECTION,
    ("CosmosTransformer3DModel", "padding_mask"): "needs torchvision: tests/runtime/test_cosmos.py",
    ("EasyAnimateTransformer3DModel", "timestep_cond"): NO_PROJECTION,
    ("Flux2Transformer2DModel", "kv_cache"): NEEDS_PROCESSOR,
    ("Flux2Transformer2DModel", "kv_cache_mode"): NEEDS_PROCESSOR,
    ("Flux2Transformer2DModel", "num_ref_tokens"): NEEDS_PROCESSOR,
    ("Flux2Transformer2DModel", "ref_fixed_timestep"): NEEDS_PROCESSOR,
    ("GlmImageTransformer2DModel", "kv_caches"): "an object that two forwards share: tests/runtime/test_kv_cache.py",
    ("QwenImageTransformer2DModel", "guidance"): "upstream's time embedding takes none",
}


@pytest.mark.parametrize("plan", SHIPPED, ids=lambda plan: plan.model)
def test_every_argument_of_forward_is_in_a_probe(plan: Plan) -> None:
    forward = next(
        node
        for node in find_target(plan.model, SourceTree()).node.body
        if isinstance(node, ast.FunctionDef) and node.name == "forward"
    )
    arguments = {each.arg for each in (*forward.args.args, *forward.args.kwonlyargs)} - {"self", "return_dict"}
    probed = {name for probe in plan.probes for name in probe.inputs}
    named = {argument for model, argument in NOT_PROBED if model == plan.model}
    assert arguments - probed == named
