"""A generated class before `parallelize` is upstream's: weights, configuration, backends, pipelines, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from torch.utils._pytree import tree_leaves

from cpgen.verify.models import build_model, load_package, load_reference

from .emitted import TINY, Emitted, emit, inputs_of, reference_and_model, shipped

MODELS = [*shipped(), TINY]
# Upstream's class fails on the backend that the test chooses: it passes masks of two dims, which that does not read.
NOT_ON_NATIVE_MATH = {"LongCatAudioDiTTransformer"}


@pytest.fixture(params=MODELS, ids=lambda model: model.rpartition(":")[2])
def emitted(request: pytest.FixtureRequest, tmp_path: Path) -> Emitted:
    return emit(tmp_path / "generated", request.param, 4)


def test_each_class_reads_the_others_files(emitted: Emitted, tmp_path: Path) -> None:
    if emitted.plan.wraps is not None:
        pytest.skip("upstream cannot save it: its models are saved one by one")
    reference, model, package = reference_and_model(emitted, emitted.probe(), torch.float32)
    name = emitted.reference.class_name
    ours, theirs = getattr(package, name), load_reference(emitted.reference)
    reference.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    model.save_pretrained(tmp_path / "ours")  # type: ignore[operator]
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
    assert (tmp_path / "ours/config.json").read_text() == (tmp_path / "theirs/config.json").read_text()
    for loaded in (
        ours.from_pretrained(tmp_path / "theirs"),  # type: ignore[attr-defined]
        theirs.from_pretrained(tmp_path / "ours"),  # type: ignore[attr-defined]
    ):
        expected = reference.state_dict()
        found = loaded.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert _set_by_user(loaded.config) == _set_by_user(reference.config)


def _set_by_user(config: Any) -> dict[str, Any]:
    """Without what diffusers notes about how the object came to be; as JSON, which has no tuples."""
    kept = {key: value for key, value in config.items() if key not in ("_name_or_path", "_use_default_values")}
    return json.loads(json.dumps(kept))  # type: ignore[no-any-return]


def test_diffusers_hooks_are_refused_with_the_reason(emitted: Emitted) -> None:
    _, model, _ = reference_and_model(emitted, emitted.probe(), torch.float32)
    with pytest.raises(ValueError, match=r"written into the source.*parallelize\(model, mesh\)"):
        model.enable_parallelism(config=None)  # type: ignore[operator]


def test_an_attention_backend_of_choice_runs(emitted: Emitted) -> None:
    reference, model, _ = reference_and_model(emitted, emitted.probe(), torch.float32)
    for each in (reference, model):
        each.set_attention_backend("_native_math")  # type: ignore[operator]
    inputs = inputs_of(emitted.probe(), torch.float32)
    with torch.no_grad():
        if emitted.reference.class_name in NOT_ON_NATIVE_MATH:
            for each in (reference, model):
                with pytest.raises(RuntimeError, match="must match the size"):
                    each(**inputs)
        else:
            found, expected = (tree_leaves(each(**inputs, return_dict=False)) for each in (model, reference))
            assert len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))
    reference.set_attention_backend("native")  # type: ignore[operator]  # diffusers keeps it for the whole process


def test_wan_in_its_pipeline(tmp_path: Path) -> None:
    emitted = emit(tmp_path, "WanTransformer3DModel", 4)
    reference, model, _ = reference_and_model(emitted, emitted.probe(), torch.float32)

    def sample(transformer: torch.nn.Module) -> Any:
        scheduler = FlowMatchEulerDiscreteScheduler()
        pipeline = WanPipeline(
            tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=transformer
        )
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        return pipeline(
            prompt_embeds=torch.randn(1, 7, 16, generator=generator),
            negative_prompt_embeds=torch.randn(1, 7, 16, generator=generator),
            height=32,
            width=32,
            num_frames=5,
            num_inference_steps=2,
            generator=generator,
            output_type="latent",
        ).frames

    assert torch.equal(sample(model), sample(reference))


def test_two_packages_of_one_class_do_not_mix(tmp_path: Path) -> None:
    """A module-level state would make one model's binding another's."""
    first = emit(tmp_path / "one", TINY, 2)
    second = emit(tmp_path / "two", TINY, 4, package="other_tiny")
    one, two = (load_package(each.directory, each.name) for each in (first, second))
    assert (one.CP_DEGREE, two.CP_DEGREE) == (2, 4)
    name, probe = first.reference.class_name, first.probe()
    models = [build_model(getattr(package, name), probe, 0, torch.float32) for package in (one, two)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = inputs_of(probe, torch.float32)
    with torch.no_grad():
        assert torch.equal(*(model(**inputs, return_dict=False)[0] for model in models))
