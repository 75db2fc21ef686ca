"""load_pretrained on what save_checkpoint wrote: a run, one of its steps, and checkpoints that can't be loaded."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from diffusers import WanTransformer3DModel

from cpgen.runtime.checkpoint_content import read_metadata, storage_entries
from cpgen.runtime.checkpoint_writer import quiet
from cpgen.runtime.weight_files import INDEX, SINGLE
from cpgen.verify.pool import WorkerPool
from tests.runtime import training_models as models
from tests.runtime import weight_cases as cases


@pytest.fixture(scope="module")
def saved(root, pool: WorkerPool, tmp_path_factory):
    """A run's directory with the checkpoints of Wan after steps 1 and 2, and the weights after step 2."""
    folder = tmp_path_factory.mktemp("saved")
    state = pool.run(cases.save_trained, root, "wan", 2, str(folder), [1, 2], {})[0]
    return folder, state


@pytest.mark.parametrize(
    ("cp", "options", "world_size"),
    [(2, {}, 4), (1, {}, 4), (1, {}, 2), (2, {"data_parallel": "ddp"}, 4), (1, {"data_parallel": "none"}, 1)],
)
def test_load_from_a_run(pool: WorkerPool, root, saved, cp, options, world_size):
    folder, expected = saved
    total = sum(tensor.numel() for tensor in expected.values())
    model = models.wan_model()
    model.load_state_dict(expected)
    with torch.no_grad():
        output = model.eval()(**models.wan_batch(0), return_dict=False)[0]
    for state, others, held, ours in pool.run(
        cases.load_weights, root, "wan", cp, str(folder), options, world_size=world_size
    ):
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert torch.equal(others["rope.freqs_cos"], model.rope.freqs_cos)
        assert torch.allclose(ours, output, rtol=1e-6, atol=1e-6)
        assert held == total if options else held < 1.2 * total / world_size


def test_load_from_one_step(pool: WorkerPool, root, saved):
    folder, latest = saved
    for step in (1, 2):
        state = pool.run(cases.load_weights, root, "wan", 2, str(folder / f"step_{step}"), {}, world_size=2)[0][0]
        assert torch.equal(state["proj_out.weight"], latest["proj_out.weight"]) == (step == 2)


def test_load_from_a_run_in_half_precision(pool: WorkerPool, root, saved, tmp_path):
    folder, expected = saved
    model = models.wan_model()
    model.load_state_dict(expected)
    model.save_pretrained(tmp_path)
    reference = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).state_dict()
    options = {"dtype": torch.bfloat16}
    state = pool.run(cases.load_weights, root, "wan", 2, str(folder), options, world_size=2)[1][0]
    assert {name: tensor.dtype for name, tensor in state.items()} == {n: t.dtype for n, t in reference.items()}
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.items())


def test_a_checkpoint_with_a_buffer_and_scalars(pool: WorkerPool, root, tmp_path):
    expected = pool.run(cases.save_trained, root, "tiny", 1, str(tmp_path), [1], {"data_parallel": "ddp"})[0]
    for state, *_ in pool.run(cases.load_weights, root, "tiny", 1, str(tmp_path), {}):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0] / "step_2", tmp_path / "run/step_2")
    return tmp_path / "run/step_2"


def checkpoint_of_another_class(copy):
    edit_description(copy, lambda config: config.update(_class_name="SkyReelsV2Transformer3DModel"))
    return f"{copy} is a checkpoint of SkyReelsV2Transformer3DModel, not of WanTransformer3DModel"


def checkpoint_of_another_config(copy):
    edit_description(copy, lambda config: config.update(ffn_dim=40, num_layers=1, cross_attn_norm=False))
    return (
        f"{copy} does not hold the weights of WanTransformer3DModel as model.json describes it:\n"
        f"  shape of blocks.0.ffn.net.0.proj.bias: [32] in step_2, [40] in the model\n"
    )


def checkpoint_of_another_layout(copy):
    edit_description(copy, lambda config: config.update(qk_norm=None, num_layers=3))
    return "\n  missing: blocks.2.attn1.norm_k.weight\n"


def edit_description(copy, edit):
    content = json.loads((copy / "model.json").read_text())
    edit(content["config"])
    (copy / "model.json").write_text(json.dumps(content))


def no_description(copy):
    (copy / "model.json").unlink()
    return f"{copy} does not say which model it holds"


def broken_description(copy):
    (copy / "model.json").write_text("{}")
    return f"{copy / 'model.json'} is damaged"


def broken_metadata(copy):
    (copy / ".metadata").write_bytes(b"no pickle")
    return f"{copy / '.metadata'} is damaged"


def damaged_part(copy):
    index, place = storage_entries(read_metadata(copy), "model.")[-1]
    file = copy / place.relative_path
    content = bytearray(file.read_bytes())
    content[content.index(b"archive/data/0", place.offset) + 76] ^= 0xFF  # name and padding come first
    file.write_bytes(content)
    return f"{file} is damaged at {index.fqn}"


def lost_file(copy):
    (copy / "__1_0.distcp").unlink()
    return f"{copy / '__1_0.distcp'} is damaged at model."


def incomplete(copy):
    (copy / ".metadata").unlink()
    return f"has neither {SINGLE} nor {INDEX}, and is no checkpoint"


@pytest.mark.parametrize(
    "damage",
    [
        checkpoint_of_another_class,
        checkpoint_of_another_config,
        checkpoint_of_another_layout,
        no_description,
        broken_description,
        broken_metadata,
        damaged_part,
        lost_file,
        incomplete,
    ],
)
def test_checkpoints_that_can_not_be_loaded(pool: WorkerPool, root, copy, damage):
    message = damage(copy)
    for error in pool.run(cases.load_error, root, "wan_cp2", str(copy.parent), world_size=2):
        assert message in error


def test_a_checkpoint_without_a_description_and_with_a_config(pool: WorkerPool, root, saved, copy):
    no_description(copy)
    models.wan_model().save_config(copy)
    state = pool.run(cases.load_weights, root, "wan", 2, str(copy), {}, world_size=2)[0][0]
    assert all(torch.equal(state[name], tensor) for name, tensor in saved[1].items())


def test_a_directory_of_plain_dcp(pool: WorkerPool, root, tmp_path):
    with quiet():
        dcp.save({"module": {"weight": torch.zeros(3)}}, checkpoint_id=tmp_path, no_dist=True)
    for error in pool.run(cases.load_error, root, "wan_cp2", str(tmp_path), world_size=2):
        assert f"{tmp_path} holds no model: save_checkpoint did not write it" in error
