"""Attention in a class that has a `_cp_plan`: which calls exchange tokens, and of which streams in which order."""

from __future__ import annotations

import ast
from collections.abc import Callable

from cpgen.conditions import ConditionError, parse_condition
from cpgen.plan import AttentionFunction, Site
from cpgen.surgery.functions import Function, attention_function, is_none, may_be_causal, method
from cpgen.target import Target

LATENT, TEXT = "hidden_states", "encoder_hidden_states"  # diffusers' names for the two usual streams
_WRITTEN_OUT = ("softmax", "MultiheadAttention", "flash_attn_func", "flash_attn_varlen_func", "flex_attention")
_TEXT_WORDS = ("encoder", "context", "txt", "text", "cap")


def attention_functions(
    target: Target, streams: list[str], latent: str, find: Callable[[ast.AST, str], None]
) -> list[AttentionFunction]:
    """The attention functions of the class's file, with a site for each call in them.

    `streams` are those of tokens, `latent` the main one of them. What the convention does not cover goes to `find`.
    """
    functions = []
    for name, node in target.module.definitions.items():
        if not isinstance(node, ast.ClassDef):
            continue
        function = method(target.module, node, "__call__") or method(target.module, node, "forward")
        calls = function.attention_calls() if function is not None else []
        if function is None or not calls:
            continue
        sites = [
            _site(i, call, function, streams, latent, find)
            for i, call in enumerate(calls)
            if isinstance(call, ast.Call)
        ]
        functions.append(AttentionFunction(name, tuple(sites)))
    if not any(site.streams for function in functions for site in function.sites):
        find(target.node, "no attention call in this file has a parallel_config: nothing would be exchanged")
    for call in ast.walk(target.module.tree):
        called = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if called in _WRITTEN_OUT:
            find(call, f"{called} may be attention written out, which diffusers' convention does not cover")
    return functions


def _site(
    number: int,
    call: ast.Call,
    function: Function,
    streams: list[str],
    latent: str,
    find: Callable[[ast.AST, str], None],
) -> Site:
    place = function.module.location(call)
    local = Site(number, "cross", location=place)
    config = next((k.value for k in call.keywords if k.arg == "parallel_config"), None)
    if attention_function(call) != "dispatch_attention_fn":
        find(call, "attention that does not go through dispatch_attention_fn is not in diffusers' convention")
        return local
    if config is None or is_none(config):
        return local
    when = None
    if isinstance(config, ast.IfExp):
        test = config.test if is_none(config.orelse) else ast.UnaryOp(ast.Not(), config.test)
        try:
            when = parse_condition(ast.unparse(test))[0]
        except ConditionError:
            find(config, "this condition is not one that a plan may hold")
    kind = "causal" if may_be_causal(call) else "self"
    if TEXT not in streams or latent == TEXT:
        return Site(number, kind, (latent,), when=when, location=place)
    order = _concatenation_order(function)
    if order is not None:
        joint = tuple(TEXT if is_text else latent for is_text in order)
        return Site(number, "joint", joint, when=when, location=place)
    if when is None and TEXT in function.parameters and _reads_keys_from_text(function):
        # Self- and cross-attention in one function, and the text is cut: its keys are put together like others.
        given = f"{TEXT} is not None"
        return Site(number, "cross", (latent,), (TEXT,), given, (latent,), location=place)
    return Site(number, kind, (latent,), when=when, location=place)


def _concatenation_order(function: Function) -> list[bool] | None:
    """For the concatenation that joins text and latent tokens: for each part, whether it is text."""
    for node in ast.walk(function.node):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("cat", "concat")
        ):
            continue
        parts = node.args[0].elts if node.args and isinstance(node.args[0], (ast.List, ast.Tuple)) else []
        flags = [any(word in ast.unparse(part) for word in _TEXT_WORDS) for part in parts]
        if len(flags) == 2 and flags[0] != flags[1]:
            return flags
    return None


def _reads_keys_from_text(function: Function) -> bool:
    return any(
        isinstance(node, ast.Call)
        and "to_k" in ast.unparse(node.func)
        and any(isinstance(a, ast.Name) and a.id == TEXT for a in node.args)
        for node in ast.walk(function.node)
    )
