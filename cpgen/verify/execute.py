"""Runs a case on one rank: the reference, then the generated class unbound and under each way to parallelize it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import checkpoint

from cpgen.probes import build_inputs
from cpgen.verify.case import DDP, FSDP, NONE, UNBOUND, Case, CaseError, Deviation, ProbeError, RankReport, worst
from cpgen.verify.compare import (
    Gradients,
    compare_gradients,
    compare_outputs,
    explain_gradient,
    explain_output,
    may_be_rounding,
    named_tensors,
)
from cpgen.verify.float64 import AsFloat64, to_float64
from cpgen.verify.gather import whole
from cpgen.verify.models import build_model, load_package, load_reference, mesh_for, randomise
from cpgen.verify.quiet import quietly


@dataclass(frozen=True)
class _Expected:
    """The reference's weights and results, and the weights of the loss."""

    state: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss_weights: list[Tensor]
    gradients: Gradients


_KEPT = 32  # references: more than a package has probes, in float32 and float64
_recent: dict[str, _Expected] = {}  # the least recently used first


@dataclass(frozen=True)
class _ModeReport:
    mode: str
    forward: list[Deviation]
    gradients: list[Deviation]
    failures: list[str]
    doubts: list[str]  # gradients above the tolerance by what may be rounding: `may_be_rounding`
    checkpointed: bool = False


def execute(case: Case) -> RankReport:
    """See `cpgen.verify.case.run_case`."""
    rank = dist.get_rank()
    assert dist.get_world_size() == case.ranks, "the pool gives a case exactly cp * tp ranks"
    with quietly():
        reports = _run_modes(case, case.modes, torch.float32)
        forward = worst(deviation for report in reports for deviation in report.forward)
        decided = reports
        if _on_any_rank(_has(reports, "doubts")) and not _on_any_rank(_has(reports, "failures")):
            # A gradient that is truly zero (of a key's bias, under softmax) is all rounding, in which the two may
            # differ. With 29 more bits rounding passes the same tolerance, and an error does not.
            with AsFloat64():
                decided = _run_modes(case, tuple(mode for mode in case.modes if mode != UNBOUND), torch.float64)
    failures = [
        f"{report.mode}{'' if decided is reports else ' in float64'}: {text}"
        for report in decided
        for text in report.failures + report.doubts
    ]
    # What float32 could decide counts as measured there.
    settled = [gradient for report in reports for gradient in report.gradients if gradient.ok]
    gradient = worst([*settled, *(gradient for report in decided for gradient in report.gradients)])
    return RankReport(
        rank,
        forward,
        gradient,
        tuple(failures),
        "float32" if decided is reports else "float64",
        checkpointed=any(report.checkpointed for report in reports),
    )


def _run_modes(case: Case, modes: tuple[str, ...], dtype: torch.dtype) -> list[_ModeReport]:
    expected = _reference(case, dtype)
    with _failing_as_case_error("import", case.directory):
        package = load_package(case.directory, case.package)
        for name, degree in (("CP_DEGREE", case.cp), ("TP_DEGREE", case.tp)):
            if getattr(package, name) != degree:
                raise ValueError(f"the package was emitted with {name} {getattr(package, name)}, not {degree}")
        model_class = getattr(package, case.reference.class_name)
    reports = []
    for mode in modes:
        with _failing_as_case_error(mode, case.directory):
            model = build_model(model_class, case.probe, case.seed, dtype)
            model.load_state_dict(expected.state, strict=True)
            # In float64 without checkpointing: AsFloat64 is off in backward, where that runs forward again.
            checkpointed = mode in (FSDP, DDP) and dtype == torch.float32 and _has_checkpointing(model)
            if checkpointed:
                _enable_checkpointing(model)
            if mode != UNBOUND:
                options = {} if dtype == torch.float32 else {"reduce_dtype": dtype}
                model = package.parallelize(model, mesh_for(package), data_parallel=mode, **options)
            reports.append(replace(_run_mode(case, mode, expected, model, dtype), checkpointed=checkpointed))
    return reports


def _has_checkpointing(model: nn.Module) -> bool:
    """Whether the class offers gradient checkpointing: diffusers' have the method in any case, and a mark."""
    marked = getattr(model, "_supports_gradient_checkpointing", True)
    return bool(marked) and callable(getattr(model, "enable_gradient_checkpointing", None))


def _enable_checkpointing(model: Any) -> None:
    takes_function = "gradient_checkpointing_func" in inspect.signature(model.enable_gradient_checkpointing).parameters
    model.enable_gradient_checkpointing(*([_checkpointed] if takes_function else []))  # diffusers' own method does


def _checkpointed(module: Any, *args: Any, **kwargs: Any) -> Any:
    """As diffusers' own function, but it takes the keyword arguments that some classes pass (HunyuanImage)."""
    return checkpoint.checkpoint(module.__call__, *args, use_reentrant=False, **kwargs)


def _reference(case: Case, dtype: torch.dtype) -> _Expected:
    """The reference's results, kept for cases that follow: strategies and degrees have the same."""
    key = repr((case.reference, case.probe, case.seed, dtype))
    expected = _recent.pop(key, None) or _run_reference(case, dtype)
    _recent[key] = expected
    if len(_recent) > _KEPT:
        del _recent[next(iter(_recent))]
    return expected


def _run_reference(case: Case, dtype: torch.dtype) -> _Expected:
    with _failing_as_case_error("import of the reference", case.directory):
        model_class = load_reference(case.reference)
    try:
        model = build_model(model_class, case.probe, case.seed, dtype)
        randomise(model, case.seed)
        inputs = _inputs(case, dtype)
        outputs = dict(named_tensors(_forward(model, case, inputs, return_dict=True)))
        weights = [_loss_weights(out, index) for index, out in enumerate(outputs.values())]
        _backward(list(outputs.values()), weights)
    except Exception as error:
        folder = str(Path(inspect.getfile(model_class)).parent)
        raise ProbeError(f"the reference fails on it: {_brief(error, folder)}") from error
    gradients = Gradients(_parameter_gradients(model), _input_gradients(inputs))
    for name, tensor in [*outputs.items(), *gradients.parameters.items(), *gradients.inputs.items()]:
        if not torch.isfinite(tensor).all():
            raise ProbeError(f"the reference's own values are not finite: {name!r} {tuple(tensor.shape)}")
    if not any(out.any() for out in outputs.values()):
        raise ProbeError("the reference's output is all zeros, which proves nothing")
    if not any(gradient.any() for gradient in gradients.parameters.values()):
        raise ProbeError("no parameter of the reference gets a gradient, which proves nothing")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return _Expected(state, {name: out.detach() for name, out in outputs.items()}, weights, gradients)


def _run_mode(case: Case, mode: str, expected: _Expected, model: nn.Module, dtype: torch.dtype) -> _ModeReport:
    inputs = _inputs(case, dtype)
    # The reference returned its output class. Both forms leave the class by different lines: run each in some mode.
    named = list(named_tensors(_forward(model, case, inputs, return_dict=mode == NONE)))
    outputs = [tensor for _, tensor in named]
    forward, failures = compare_outputs([out.detach() for out in outputs], expected.outputs)
    if _on_any_rank(bool(failures)):
        # Without backward, on every rank: its collectives need all of them.
        return _ModeReport(mode, forward, [], failures, [])
    _backward(outputs, expected.loss_weights)
    parameters, of_inputs = _parameter_gradients(model), _input_gradients(inputs)
    if mode == NONE:
        parameters = _mean_over_ranks(parameters)
    if mode != UNBOUND:
        of_inputs = _mean_over_ranks(of_inputs)
    missing = parameters.keys() ^ expected.gradients.parameters.keys()
    if missing:
        raise ValueError(f"parameter names differ from the reference's: {', '.join(sorted(missing)[:5])}")
    of_parameters = compare_gradients(parameters, expected.gradients.parameters)
    of_tensors = compare_gradients(of_inputs, expected.gradients.inputs)

    exact = mode == UNBOUND
    for deviation, out, ref in zip(forward, outputs, expected.outputs.values(), strict=True):
        if not deviation.accepted(exact):
            failures.append(explain_output(out.detach(), ref, deviation))
    doubts: list[str] = []
    for kind, deviations, gradients, reference in (
        ("parameter", of_parameters, parameters, expected.gradients.parameters),
        ("input", of_tensors, of_inputs, expected.gradients.inputs),
    ):
        wrong = [deviation for deviation in deviations if not deviation.accepted(exact)]
        if wrong:
            # One sentence for the worst of them: a fault early in backward spoils all that follow.
            shown = worst(wrong)
            assert shown is not None
            sentence = explain_gradient(gradients[shown.name], reference[shown.name], shown)
            rounding = not exact and may_be_rounding(wrong, reference)
            (doubts if rounding else failures).append(
                f"gradient of {kind} {sentence} ({len(wrong)} of {len(deviations)} {kind} gradients wrong)"
            )
    return _ModeReport(mode, forward, of_parameters + of_tensors, failures, doubts)


def _has(reports: list[_ModeReport], what: str) -> bool:
    return any(getattr(report, what) for report in reports)


def _inputs(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    inputs = build_inputs(case.probe, case.seed)
    return inputs if dtype == torch.float32 else to_float64(inputs)


def _forward(model: nn.Module, case: Case, inputs: dict[str, Any], *, return_dict: bool) -> Any:
    if "return_dict" not in inputs and "return_dict" in inspect.signature(model.forward).parameters:
        return model(**inputs, return_dict=return_dict)
    return model(**inputs)


def _loss_weights(out: Tensor, index: int) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(index))


def _backward(outputs: list[Tensor], weights: list[Tensor]) -> None:
    terms = [
        (out * weight.to(out.dtype)).sum() for out, weight in zip(outputs, weights, strict=True) if out.requires_grad
    ]
    if not terms:
        raise ValueError("no output requires grad")
    torch.autograd.backward(torch.stack(terms).sum())


def _parameter_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients on every rank. All ranks call this together: a shard's is a collective."""
    return whole(
        {
            name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach()
            for name, parameter in model.named_parameters()
        }
    )


def _input_gradients(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in named_tensors(inputs)
        if tensor.requires_grad
    }


def _mean_over_ranks(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    if not gradients:
        return {}
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    dist.all_reduce(flat)
    sizes = [gradient.numel() for gradient in gradients.values()]
    parts = torch.split(flat / dist.get_world_size(), sizes)
    return {name: part.view_as(gradient) for (name, gradient), part in zip(gradients.items(), parts, strict=True)}


def _on_any_rank(flag: bool) -> bool:
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags)


@contextmanager
def _failing_as_case_error(phase: str, folder: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CaseError(f"{phase}: {_brief(error, folder)}") from error


def _brief(error: Exception, folder: str) -> str:
    """Type and message, without the pages that torch appends to some; and the last line that ran in `folder`."""
    lines = str(error).splitlines()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    return "\n".join(
        [
            f"{type(error).__name__}: {lines[0] if lines else ''}",
            *lines[1:6],
            *(["..."] if lines[6:] else []),
            *(f"at {Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in frames[-1:]),
        ]
    )
