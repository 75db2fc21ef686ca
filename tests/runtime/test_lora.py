"""LoRA adapters (peft): trained under FSDP2 and CP as in one process, saved as pipelines load them, resumed."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.training_utils import _collate_lora_metadata
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from cpgen.verify.pool import WorkerPool
from tests.runtime import lora_cases as cases
from tests.runtime.emitted import emit, worst
from tests.unit.projects import run

WAN = "WanTransformer3DModel"
FILE = "pytorch_lora_weights.safetensors"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ulysses(tmp_path_factory):
    return emit(tmp_path_factory.mktemp("ulysses"), WAN, 2)


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return emit(tmp_path_factory.mktemp("ring"), WAN, 4, "ring")


@pytest.fixture(scope="module")
def base(ulysses, tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    cases.save_base(ulysses, str(directory))
    return str(directory)


@pytest.fixture(scope="module")
def expected(ulysses, base):
    """Two steps in one process, on one and on two samples."""
    return {samples: cases.one_process(ulysses, base, cases.add_random, samples, 2) for samples in (1, 2)}


def close(ours, theirs):
    return ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ulysses", {}),
        ("ulysses", {"data_parallel": "ddp"}),
        ("ulysses", {"whole": True}),
        ("ring", {}),
        ("ring", {"data_parallel": "ddp"}),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(pool: WorkerPool, request, base, expected, strategy, options):
    emitted = request.getfixturevalue(strategy)
    one = expected[2 if strategy == "ulysses" else 1]  # data ranks
    assert any("lora_A" in name for name in one.gradients) and "proj_out.lora_B.default.weight" in one.gradients
    for rank, losses, trained in pool.run(cases.train, emitted, base, cases.add_random, {}, 2, options):
        assert close(losses, [step[rank] for step in one.losses])
        assert worst(trained.gradients, one.gradients) <= TOLERANCE
        for name, tensor in one.after.items():
            if "lora_" in name:
                # Adam divides by small gradients.
                assert torch.allclose(trained.after[name], tensor, rtol=0, atol=1e-5), name
            else:
                assert torch.equal(trained.after[name], tensor), name


@pytest.mark.parametrize("options", [{}, {"data_parallel": "none"}])
def test_adapters_begin_as_in_one_process(pool: WorkerPool, ulysses, base, options):
    one = cases.one_process(ulysses, base, cases.add, 1, 0).before
    assert all(tensor.abs().max() > 0 for name, tensor in one.items() if "lora_A" in name)
    for _, _, trained in pool.run(cases.train, ulysses, base, cases.add, {}, 0, options):
        assert trained.before.keys() == one.keys()
        assert all(torch.equal(trained.before[name], tensor) for name, tensor in one.items())


def test_adapters_that_differ_from_rank_to_rank(pool: WorkerPool, ulysses, base):
    arguments = (ulysses, base, cases.add_after_another_seed, "", "")
    for error in pool.run(cases.error_of, *arguments, world_size=2):
        assert "hold different weights" in error and "lora_A.default.weight" in error


@pytest.mark.parametrize(
    ("prepare", "options", "dtypes"),
    [
        (cases.add_random, {"dtype": torch.bfloat16}, {torch.bfloat16}),
        (cases.add_wide, {"dtype": torch.bfloat16}, {torch.float32}),
        (cases.add_wide, {"dtype": torch.bfloat16, "data_parallel": "ddp"}, {torch.float32}),
        (cases.add_wide, {"dtype": torch.bfloat16, "param_dtype": torch.bfloat16}, {torch.float32}),
    ],
)
def test_half_precision(pool: WorkerPool, ulysses, base, prepare, options, dtypes):
    one = cases.one_process(ulysses, base, prepare, 2, 1, torch.bfloat16)
    for rank, losses, trained in pool.run(cases.train, ulysses, base, prepare, {}, 1, options):
        adapters = {name: tensor for name, tensor in trained.after.items() if "lora_" in name}
        assert {tensor.dtype for tensor in adapters.values()} == dtypes
        others = {name: tensor.dtype for name, tensor in trained.after.items() if "lora_" not in name}
        assert others == {name: one.after[name].dtype for name in others}
        assert losses == pytest.approx([step[rank] for step in one.losses], rel=1e-2)
        # As exact as bfloat16: what attention sees was rounded once more or less often.
        assert worst(trained.gradients, one.gradients) < 2**-4


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, ulysses, base, tmp_path_factory):
    """(directory with what save_lora wrote, what was trained)."""
    directory = tmp_path_factory.mktemp("saved") / "lora"
    results = pool.run(cases.train, ulysses, base, cases.add_random, {}, 1, {}, str(directory))
    return directory, results[0][2]


def header(path):
    with safe_open(path, framework="pt") as file:
        return list(file.keys()), dict(file.metadata())


def test_the_file_is_that_of_diffusers(saved, base, tmp_path):
    directory, trained = saved
    model = WanTransformer3DModel.from_pretrained(base)
    cases.add_random(model)
    model.load_state_dict(trained.after)
    WanPipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(model),
        **_collate_lora_metadata({"transformer": model}),
    )
    assert [path.name for path in directory.iterdir()] == [FILE]
    (keys, metadata), (their_keys, their_metadata) = header(directory / FILE), header(tmp_path / FILE)
    assert keys == their_keys and "transformer.blocks.0.attn1.to_q.lora_A.weight" in keys
    tensors, theirs = load_file(directory / FILE), load_file(tmp_path / FILE)
    assert all(torch.equal(tensors[key], theirs[key]) for key in keys)
    assert metadata.keys() == their_metadata.keys()
    described, their_description = (json.loads(one["lora_adapter_metadata"]) for one in (metadata, their_metadata))
    for one in (described, their_description):
        one["transformer.target_modules"].sort()  # a set: theirs is in another order in each process
    assert described == their_description and described["transformer.lora_alpha"] == 5


@pytest.mark.parametrize("through", ["model", "pipeline"])
def test_diffusers_loads_it(saved, ulysses, base, through):
    directory, trained = saved
    model = WanTransformer3DModel.from_pretrained(base)
    plain = model(**cases.batch(ulysses, 0), return_dict=False)[0]
    if through == "model":
        model.load_lora_adapter(directory, use_safetensors=True)
    else:
        pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=model)
        pipeline.load_lora_weights(directory)
    with torch.no_grad():
        output = model(**cases.batch(ulysses, 0), return_dict=False)[0]
    assert torch.allclose(output, trained.output, rtol=0, atol=1e-5 * float(output.abs().max()))
    assert not torch.allclose(plain, trained.output, atol=1e-2)


def test_keys_of_dora_are_those_of_peft(base):
    from cpgen.runtime.lora import adapters_of

    model = WanTransformer3DModel.from_pretrained(base)
    model.add_adapter(cases.config(use_dora=True), "default")
    model.add_adapter(cases.config(lora_bias=True), "other")
    for name in ("default", "other"):
        assert adapters_of(model)[name].tensors.keys() == get_peft_model_state_dict(model, adapter_name=name).keys()


@pytest.mark.parametrize("whole", [True, False])
def test_a_published_adapter_trains_on(pool: WorkerPool, ulysses, base, saved, whole):
    prepare = cases.Published(str(saved[0]))
    one = cases.one_process(ulysses, base, prepare, 2, 1)
    for rank, losses, trained in pool.run(cases.train, ulysses, base, prepare, {}, 1, {"whole": whole}):
        assert close(losses, [step[rank] for step in one.losses])
        assert worst(trained.gradients, one.gradients) <= TOLERANCE
        for name, tensor in saved[1].after.items():
            assert torch.equal(trained.before[name], tensor)


# --- checkpoints -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(pool: WorkerPool, ring, base, tmp_path_factory):
    """(directory of a run at cp 4 with checkpoints/ and lora/, its losses)."""
    directory = tmp_path_factory.mktemp("run")
    return directory, pool.run(cases.save, ring, base, cases.add, {}, str(directory))[0]


def test_a_checkpoint_holds_no_frozen_weights(checkpoint):
    content = json.loads((checkpoint[0] / "checkpoints/step_2/model.json").read_text())
    assert content["tensors"] and all("lora_" in name for name in content["tensors"])


@pytest.mark.parametrize(
    ("strategy", "axes", "options"),
    [("ring", {}, {}), ("ring", {}, {"data_parallel": "ddp"}), ("ulysses", {"dp_replicate": 1}, {})],
)
def test_resumed_losses(pool: WorkerPool, request, base, checkpoint, strategy, axes, options):
    directory, losses = checkpoint
    world_size = 2 if strategy == "ulysses" else 4  # one data rank, as the run that was saved
    emitted = request.getfixturevalue(strategy)
    arguments = (emitted, base, f"{directory}/checkpoints", axes, options)
    for resumed in pool.run(cases.resume, *arguments, world_size=world_size):
        if strategy == "ring" and not options:
            assert resumed == losses[2:]
        else:
            assert close(resumed, losses[2:])


def test_export_writes_the_adapter(checkpoint, tmp_path):
    directory, _ = checkpoint
    (tmp_path / "out").mkdir()
    (tmp_path / "out/diffusion_pytorch_model.safetensors").write_text("base weights")
    (tmp_path / "out" / FILE).write_text("an older adapter")
    arguments = ("export", str(directory / "checkpoints"), "--to", str(tmp_path / "out"))
    assert run(*arguments).exit == 2
    ran = run(*arguments, "--force")
    assert ran.exit == 0, ran.err
    assert ran.out == f"{tmp_path}/out/{FILE}\n"
    written, expected = tmp_path / "out" / FILE, directory / "lora" / FILE
    assert header(written) == header(expected)  # not bytes: safetensors puts metadata in any order
    tensors = load_file(expected)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(written).items())
    assert (tmp_path / "out/diffusion_pytorch_model.safetensors").read_text() == "base weights"
    half = run("export", str(directory / "checkpoints"), "--to", str(tmp_path / "half"), "--dtype", "bfloat16")
    assert half.exit == 0, half.err
    for name, tensor in load_file(tmp_path / "half" / FILE).items():
        assert torch.equal(tensor, tensors[name].bfloat16())


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (cases.add_two, "it has not one adapter but: default, second"),
        (cases.add_and_train_a_bias, "these trained, too: proj_out.base_layer.bias"),
    ],
)
def test_what_export_refuses(pool: WorkerPool, ulysses, base, tmp_path, prepare, message):
    pool.run(cases.save, ulysses, base, prepare, {}, str(tmp_path), world_size=2)
    ran = run("export", str(tmp_path / "checkpoints"), "--to", str(tmp_path / "out"))
    assert ran.exit == 2 and message in ran.err and "Traceback" not in ran.err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "lora" / FILE).exists()  # save_lora can name one


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepare", "what", "message"),
    [
        (cases.nothing, "save_lora", "the model has not one adapter but: none"),
        (cases.add_two, "save_lora", "the model has not one adapter but: default, second; name one"),
        (cases.add, "save_lora second", "the model has no adapter 'third'; its adapters: default"),
        (cases.add, "save_pretrained", "(adapters: default), under names that plain diffusers does not know"),
        (cases.raises, "", "prepare failed: KeyError: 'mine'"),
        (cases.AddWith({"target_modules": ["to_nothing"]}), "", "Target modules {'to_nothing'} not found"),
        (cases.AddWith({"init_lora_weights": "pissa"}), "", "must be added to a whole model, before parallelize"),
        (cases.AddWith({"use_dora": True}), "", "must be added to a whole model, before parallelize"),
        (cases.AddWith({"modules_to_save": ["proj_out"], "target_modules": ["to_q"]}), "", "without a value: proj_out"),
    ],
)
def test_errors(pool: WorkerPool, ulysses, base, tmp_path, prepare, what, message):
    for error in pool.run(cases.error_of, ulysses, base, prepare, what, str(tmp_path / "out"), world_size=2):
        assert message in error
    assert not (tmp_path / "out").exists()


def test_a_place_that_can_not_be_written(pool: WorkerPool, ulysses, base, tmp_path):
    (tmp_path / "file").write_text("")
    arguments = (ulysses, base, cases.add, "save_lora", str(tmp_path / "file"))
    for error in pool.run(cases.error_of, *arguments, world_size=2):
        assert f"{tmp_path / 'file' / FILE} can't be written" in error


def test_checkpoints_and_models_with_other_adapters(pool: WorkerPool, ulysses, base, checkpoint, tmp_path):
    directory = f"{checkpoint[0]}/checkpoints"
    for prepare, present in ((cases.nothing, "[]"), (cases.add_two, "['default', 'second']")):
        for error in pool.run(cases.error_of, ulysses, base, prepare, "load_checkpoint", directory, world_size=2):
            assert f"was saved with the adapters ['default'], the model has {present}" in error
    for error in pool.run(
        cases.error_of, ulysses, base, cases.add_stronger, "load_checkpoint", directory, world_size=2
    ):
        assert "'lora_alpha': 5," in error and "the model's with" in error and "'lora_alpha': 50," in error
    for error in pool.run(cases.error_of, ulysses, directory, cases.add, "", "", world_size=2):
        assert (
            "step_2 is a checkpoint of adapters (default): load the base model's weights with load_pretrained" in error
        )


def test_what_trains_besides_the_adapter_is_told(pool: WorkerPool, ulysses, base, tmp_path):
    first, second = pool.run(cases.warning_of_save, ulysses, base, str(tmp_path), world_size=2)
    assert len(first) == 1 and "proj_out.base_layer.bias" in first[0] and second == []
