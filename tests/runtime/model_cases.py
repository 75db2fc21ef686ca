"""Emitted models on the workers: traffic, recomputation, compilation, and what must be refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_leaves

from cpgen.plan import Probe
from cpgen.probes import build_inputs
from cpgen.verify.float64 import to_float64

from .emitted import Emitted, gradients, inputs_of, loss_of, reference_and_model, worst
from .exchange_cases import Traffic


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    output: Tensor = model(**inputs, return_dict=False)[0]
    return output


def bound(emitted: Emitted, probe: Probe, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    reference, model, package = reference_and_model(emitted, probe, dtype)
    return reference, package.parallelize(model, package.build_mesh("cpu"), data_parallel="none")


def full_gradients(model: nn.Module, reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole gradients of a wrapped model, but for zeros that `reference` lacks: a compiled block gives zeros to
    parameters of outputs that nobody uses, where eager gives none."""
    found = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    return {n: g for n, g in found.items() if g is not None and (n in reference or bool(g.any()))}


def averaged(found: dict[str, Tensor]) -> dict[str, Tensor]:
    for gradient in found.values():
        dist.all_reduce(gradient)
    return {name: gradient / dist.get_world_size() for name, gradient in found.items()}


def traffic(emitted: Emitted, probe: Probe) -> tuple[dict[str, int], int, dict[str, int], int]:
    """Collectives and bytes sent, in forward and in backward, in float32."""
    _, model = bound(emitted, probe, torch.float32)
    inputs = inputs_of(probe, torch.float32)
    with Traffic() as forward:
        loss = loss_of(run(model, inputs))
    with Traffic() as backward:
        loss.backward()
    return forward.calls, forward.sent, backward.calls, backward.sent


def interleaved(emitted: Emitted, probes: tuple[Probe, Probe], how: str) -> float:
    """Two forwards of different lengths, then both backwards, the first one's first: each must see its own lengths.

    `how`: "model" uses the model's own gradient checkpointing, "outside" wraps its blocks.
    """
    reference, model = bound(emitted, probes[0])
    if how == "model":
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    else:
        for name in ("joint_blocks", "blocks"):
            blocks = getattr(model, name)
            for i, block in enumerate(blocks):
                blocks[i] = checkpoint_wrapper(block)
    error = 0.0
    losses = [loss_of(run(model, inputs_of(probe))) for probe in probes]
    for probe, loss in zip(probes, losses, strict=True):
        model.zero_grad()
        reference.zero_grad()
        loss.backward()
        loss_of(run(reference, inputs_of(probe))).backward()
        found = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(model).items()}
        error = max(error, worst(averaged(found), gradients(reference)))
    return error


def sharing(emitted: Emitted, probes: tuple[Probe, Probe]) -> float:
    """Two models with the same blocks: both forwards, of different lengths, then both backwards."""
    reference, model, package = reference_and_model(emitted, probes[0])
    second_reference, second = copy.deepcopy(reference), copy.deepcopy(model)
    for one, other in ((reference, second_reference), (model, second)):
        other.joint_blocks, other.blocks = one.joint_blocks, one.blocks
        for each in (one, other):
            each.enable_gradient_checkpointing()  # type: ignore[operator]
    mesh = package.build_mesh("cpu")
    for each in (model, second):
        package.parallelize(each, mesh, data_parallel="none")
    pairs = ((model, reference), (second, second_reference))
    for place in (0, 1):
        losses = [loss_of(run(pair[place], inputs_of(probe))) for pair, probe in zip(pairs, probes, strict=True)]
        for loss in losses:
            loss.backward()
    # Copies: the mean is taken in place, and they share gradients as well.
    found = [{name: gradient.clone() for name, gradient in gradients(model).items()} for model, _ in pairs]
    return max(worst(averaged(each), gradients(theirs)) for each, (_, theirs) in zip(found, pairs, strict=True))


def refused_when_compiled(emitted: Emitted, probe: Probe) -> str:
    """The message for a foreign processor that is set after parallelize, before the first call, which is compiled."""
    _, model = bound(emitted, probe)
    model.blocks[0].attn1.set_processor(_Foreign())
    try:
        run(torch.compile(model, backend="eager"), inputs_of(probe))
    except Exception as error:
        return str(error)
    return ""


class _Foreign:
    def __call__(self, attn: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("it ran")


def refused_processor(emitted: Emitted, probe: Probe, when: str) -> str:
    """The message for a processor without context-parallel calls, set before or after parallelize."""

    _, model, package = reference_and_model(emitted, probe)
    attention = model.blocks[0].attn1
    try:
        if when == "before":
            attention.set_processor(_Foreign())
        model = package.parallelize(model, package.build_mesh("cpu"), data_parallel="none")
        if when == "after":
            attention.set_processor(_Foreign())
        run(model, inputs_of(probe))
    except ValueError as error:
        return str(error)
    return ""


def replaced_without_processor(emitted: Emitted, probe: Probe, what: str) -> str:
    """`what` of the second block, or all of it, made anew: its class attends by itself, without a processor."""
    _, model = bound(emitted, probe, torch.float32)
    dim = model.proj_in.out_features
    if what == "block":
        model.blocks[1] = type(model.blocks[1])(dim, 4)
    else:
        setattr(model.blocks[1], what, type(model.blocks[1].attn1)(dim, 4))
    try:
        model(**inputs_of(probe, torch.float32))
    except ValueError as error:
        return str(error)
    return ""


def replaced_module(emitted: Emitted, probe: Probe) -> str:
    _, model = bound(emitted, probe)
    block = model.blocks[0]
    block.attn1 = type(block.attn1)(32, 4, block.attn1.processor)
    try:
        run(model, inputs_of(probe))
    except ValueError as error:
        return str(error)
    return ""


def copied(emitted: Emitted, probe: Probe) -> float:
    """A deep copy of a bound model, as for a moving average, computes the same."""
    reference, model = bound(emitted, probe)
    twin = copy.deepcopy(model)
    first, second = run(model, inputs_of(probe)), run(twin, inputs_of(probe))
    assert torch.equal(first, second)
    return float((first - run(reference, inputs_of(probe))).detach().abs().max())


def message_for(emitted: Emitted, probe: Probe, changes: dict[str, Any]) -> str:
    """The error that inputs with `changes` (argument -> shape, or None) give."""
    _, model = bound(emitted, probe)
    inputs = inputs_of(probe)
    for name, shape in changes.items():
        inputs[name] = None if shape is None else torch.ones(*shape, dtype=inputs[name].dtype)
    try:
        run(model, inputs)
    except ValueError as error:
        return str(error)
    return ""


def compiled(
    emitted: Emitted,
    probe: Probe,
    backend: str,
    sizes: tuple[Probe, ...] = (),
    checkpointing: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, float, int]:
    """Compile the whole bound model as one graph; returns output and gradient errors, and graphs per call."""
    import torch._dynamo as dynamo
    import torch._dynamo.testing

    dynamo.reset()
    warnings.simplefilter("ignore")
    reference, model = bound(emitted, probe, dtype)
    if checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    counter = dynamo.testing.CompileCounterWithBackend(backend)
    whole = torch.compile(model, fullgraph=True, backend=counter)
    forward = backward = 0.0
    for each in (probe, *sizes):
        reference.zero_grad()
        model.zero_grad()
        ours, theirs = (tree_leaves(m(**inputs_of(each, dtype), return_dict=False)) for m in (whole, reference))
        for outputs in (ours, theirs):
            sum(loss_of(output) for output in outputs).backward()  # type: ignore[union-attr]
        for one, other in zip(ours, theirs, strict=True):
            forward = max(forward, float((one - other).detach().abs().max() / other.detach().abs().max()))
        expected = gradients(reference)
        backward = max(backward, worst(averaged(full_gradients(model, expected)), expected))
    return forward, backward, counter.frame_count


def with_lora(emitted: Emitted, probe: Probe) -> float:
    """LoRA adapters through peft: gradients of adapters as in the reference with the same adapters."""
    from peft import LoraConfig

    reference, model, package = reference_and_model(emitted, probe)
    config = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
    for each in (reference, model):
        torch.manual_seed(1)
        each.add_adapter(config)  # type: ignore[operator]
    model = package.parallelize(model, package.build_mesh("cpu"), data_parallel="none")
    for each in (reference, model):
        loss_of(run(each, inputs_of(probe))).backward()
    ours, theirs = averaged(gradients(model)), gradients(reference)
    assert any("lora_A" in name for name in ours)
    return worst(ours, theirs)


def mixed_precision(emitted: Emitted, probe: Probe) -> float:
    """Under bfloat16 the output stays near float32's: the exchange carries any dtype."""
    reference, model = bound(emitted, probe, torch.float32)
    model.to(torch.bfloat16)
    inputs = {
        name: value.detach().to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value
        for name, value in inputs_of(probe, torch.float32).items()
    }
    ours = run(model, inputs)
    assert ours.dtype == torch.bfloat16
    theirs = run(reference, inputs_of(probe, torch.float32))
    return float((ours.float() - theirs).detach().abs().max() / theirs.detach().abs().max())


def with_image_prompt(emitted: Emitted, probe: Probe) -> tuple[float, float]:
    """Flux with IP-adapter processors of the package in its double-stream blocks: output and gradient errors."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor as Upstream

    reference, model, package = reference_and_model(emitted, probe)
    ours = importlib.import_module(f"{emitted.name}.transformer_flux").FluxIPAdapterAttnProcessor
    for each, processor_class in ((reference, Upstream), (model, ours)):
        for i, block in enumerate(each.transformer_blocks):
            torch.manual_seed(i)
            block.attn.set_processor(processor_class(64, 8, num_tokens=(4,), scale=0.7, dtype=torch.float64))
    model = package.parallelize(model, package.build_mesh("cpu"), data_parallel="none")
    prompts = [torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)]
    outputs = []
    for each in (reference, model):
        out = run(each, inputs_of(probe) | {"joint_attention_kwargs": {"ip_hidden_states": prompts}})
        loss_of(out).backward()
        outputs.append(out.detach())
    ours_, theirs = averaged(gradients(model)), gradients(reference)
    assert any("to_k_ip" in name for name in ours_)
    return float((outputs[0] - outputs[1]).abs().max()), worst(ours_, theirs)


def under_autocast(emitted: Emitted, probe: Probe) -> float:
    """Relative difference to the reference, both under autocast: queries are float32 there, values bfloat16."""
    reference, model = bound(emitted, probe, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (run(each, inputs_of(probe, torch.float32)) for each in (model, reference))
    loss_of(ours.double()).backward()
    return float((ours.float() - theirs.float()).detach().abs().max() / theirs.detach().float().abs().max())


def draws_after_dropout(emitted: Emitted, probe: Probe) -> tuple[float, float, bool]:
    """With active dropout: a number drawn before and after a step, and whether the output was finite."""
    _, model = bound(emitted, probe)
    model.train()
    torch.manual_seed(5)
    before = float(torch.rand(1))
    output = run(model, inputs_of(probe))
    loss_of(output).backward()
    return before, float(torch.rand(1)), bool(output.isfinite().all())


def with_pair_mask(emitted: Emitted, probe: Probe, tokens: int) -> float:
    """Flux with a 2-D bias over pairs of tokens, which both the dispatcher and torch take as (queries, keys)."""
    reference, model = bound(emitted, probe)
    bias = torch.randn(tokens, tokens, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    outputs = [
        run(m, inputs_of(probe) | {"joint_attention_kwargs": {"attention_mask": bias}}) for m in (reference, model)
    ]
    return float((outputs[0] - outputs[1]).detach().abs().max())


def over_data_ranks(
    emitted: Emitted,
    probe: Probe,
    data_parallel: str,
    axes: dict[str, int],
    options: dict[str, Any] | None = None,
    checkpointing: bool = False,
) -> tuple[float, float]:
    """Other data on each data rank: gradients against their mean in one process, and the clipped norm against its.

    Those of the second of two steps, so that nothing of the first may be left. Pipeline ranks compute all of the model.
    """
    from cpgen.runtime.mesh import data_rank

    reference, model, package = reference_and_model(emitted, probe)
    if checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
        model.train()
    mesh = package.build_mesh("cpu", **axes)
    with _compiling_for("aot_eager"):
        model = package.parallelize(
            model, mesh, data_parallel=data_parallel, **{"reduce_dtype": torch.float64, **(options or {})}
        )
    rank, size = data_rank(mesh)

    def inputs(seed: int) -> dict[str, Any]:
        found: dict[str, Any] = to_float64(build_inputs(probe, seed))
        return found

    for _ in range(2):
        model.zero_grad()
        loss_of(run(model, inputs(rank))).backward()
    for seed in range(size):
        (loss_of(run(reference, inputs(seed))) / size).backward()
    error = worst(full_gradients(model, gradients(reference)), gradients(reference))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    return error, float((norm - expected).abs() / expected)


@contextlib.contextmanager
def _compiling_for(backend: str) -> Iterator[None]:
    """What is compiled inside is so by `backend`: inductor takes a compiler and a minute."""
    compile_module = nn.Module.compile
    nn.Module.compile = functools.partialmethod(compile_module, backend=backend)  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.compile = compile_module  # type: ignore[method-assign]


def compiled_frames(
    emitted: Emitted, probe: Probe, data_parallel: str, compile: bool | str, backend: str
) -> tuple[int, float, float]:
    """Graphs of a step with gradient checkpointing on the parallelized model, and output's and gradients' errors."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    reference, model, package = reference_and_model(emitted, probe)
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    with _compiling_for(backend):
        model = package.parallelize(
            model,
            package.build_mesh("cpu"),
            data_parallel=data_parallel,
            reduce_dtype=torch.float64,
            compile=compile,
        )
    outputs = [run(each.train(), inputs_of(probe)) for each in (model, reference)]
    for output in outputs:
        loss_of(output).backward()
    ours = full_gradients(model, gradients(reference))
    error = (outputs[0] - outputs[1]).detach().abs().max() / outputs[1].detach().abs().max()
    if data_parallel == "none":
        ours = averaged(ours)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], float(error), worst(ours, gradients(reference))


def gradient_reductions(emitted: Emitted, probe: Probe, cap_mb: float | None) -> int:
    """All-reduces of gradients in a DDP model's backward."""
    _, model, package = reference_and_model(emitted, probe)
    model = package.parallelize(model, package.build_mesh("cpu"), data_parallel="ddp", bucket_cap_mb=cap_mb)
    loss = loss_of(run(model, inputs_of(probe)))
    with CommDebugMode() as counted:
        loss.backward()
    return int(counted.get_comm_counts()[torch.ops.c10d.allreduce_])


def late_adapter(emitted: Emitted, probe: Probe, data_parallel: str, how: str, directory: str) -> None:
    """Put an adapter into a wrapped model: by its own method, or past it and save. The caller expects an error."""
    from peft import LoraConfig, inject_adapter_in_model

    _, model, package = reference_and_model(emitted, probe, torch.float32)
    model = package.parallelize(model, package.build_mesh("cpu"), data_parallel=data_parallel)
    config = LoraConfig(r=2, target_modules=["to_q"])
    if how == "add_adapter":
        model.add_adapter(config)
        return
    inject_adapter_in_model(config, model)
    package.save_checkpoint(directory, model, step=1)


def losses_with_evaluation(emitted: Emitted, probe: Probe, data_parallel: str, options: dict[str, Any]) -> float:
    """Three steps, each with a forward without gradients between backward and the optimizer's step: loss error."""
    reference, model, package = reference_and_model(emitted, probe)
    model = package.parallelize(
        model, package.build_mesh("cpu"), data_parallel=data_parallel, reduce_dtype=torch.float64, **options
    )
    losses = []
    for each in (reference, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(3):
            loss = loss_of(run(each, inputs_of(probe)))
            loss.backward()
            with torch.no_grad():
                run(each, inputs_of(probe))
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss))
    assert len(set(losses[0])) == 3
    return max(abs(a - b) / abs(b) for a, b in zip(losses[1], losses[0], strict=True))


def draw_after_a_bad_batch(emitted: Emitted, probe: Probe) -> float:
    """A number drawn after a forward in training that was refused: it must be the same on all ranks."""
    _, model = bound(emitted, probe)
    model.train()
    torch.manual_seed(5)
    try:
        run(model, inputs_of(probe))
    except ValueError:
        return float(torch.rand(1))
    raise AssertionError("it was not refused")


def compiled_with_dropout(emitted: Emitted, probe: Probe) -> None:
    """parallelize a model with dropout, compiled as a whole; the caller expects an error."""
    _, model, package = reference_and_model(emitted, probe)
    model.blocks[0].drop = nn.Dropout(0.1)
    package.parallelize(model, package.build_mesh("cpu"), compile="model")
