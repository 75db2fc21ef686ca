"""Attention functions: the exchange around each call, masks, and lengths that must be the whole streams'."""

from __future__ import annotations

import ast

from cpgen.conditions import parse_condition
from cpgen.diagnostics import Finding, did_you_mean
from cpgen.plan import AttentionFunction, Site, Whole
from cpgen.strategy import Exchange
from cpgen.surgery.cached_keys import first_use, misuse
from cpgen.surgery.edits import Edit, Insertion
from cpgen.surgery.functions import ATTENTION_LAYOUT, Function, argument, attention_function, is_none, may_be_causal
from cpgen.surgery.reads import later_use, length_read, reads_of
from cpgen.surgery.region_edits import shard_arguments, wrap

_SIMPLE_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)


def attention_edits(
    plan: AttentionFunction, function: Function, exchange: Exchange, names: list[str], findings: list[Finding]
) -> list[Edit]:
    """The edits to one attention function. `names` are free variable names, as many as `variables_of` says."""
    calls = function.attention_calls()
    _check_complete(plan, function, calls, findings)
    edits: list[Edit] = []
    exchanging = [site for site in plan.sites if site.streams and site.call < len(calls)]
    for site, cp in zip(exchanging, names, strict=False):
        call = calls[site.call]
        assert isinstance(call, ast.Call)
        statement = function.statement_of(call)
        together = any(other is not call and function.statement_of(other) is statement for other in calls)
        edits += _site_edits(site, call, function, exchange, together, cp, findings)
    if plan.shards and calls:
        edits += _cut_edits(plan, function, calls, names, findings)
    if plan.whole and not exchanging:
        findings.append(Finding("CP105", f"{plan.owner} has no site that exchanges tokens", plan.location))
    elif plan.whole:
        for whole in plan.whole:
            edits += _whole_edits(whole, function, names[0], findings)
    return edits


def variables_of(plan: AttentionFunction) -> int:
    """How many variables the edits need: one a site that exchanges tokens, and one for cuts where none of those always
    does."""
    exchanging = [site for site in plan.sites if site.streams]
    return len(exchanging) + (bool(plan.shards) and not _always(exchanging))


def _always(exchanging: list[Site]) -> list[Site]:
    return [site for site in exchanging if site.when is None]


def _check_complete(
    plan: AttentionFunction, function: Function, calls: list[ast.Call], findings: list[Finding]
) -> None:
    described = {site.call for site in plan.sites}
    for number, call in enumerate(calls):
        if number not in described:
            place = function.module.location(call)
            message = f"call {number} of {plan.owner} attends, but the plan does not describe it"
            note = f"it is at {place.file}:{place.line}: {(place.text or '').strip()}"
            findings.append(Finding("CP501", message, plan.location, note=note))
    for site in plan.sites:
        if site.call >= len(calls):
            message = f"{plan.owner} has no attention call {site.call}: there are {len(calls)}, counted from 0"
            place = function.module.location(function.node)
            note = f"{plan.owner}.{function.node.name} is defined at {place.file}:{place.line}"
            findings.append(Finding("CP104", message, site.location, note=note))
        if site.when is not None:
            unknown = sorted(parse_condition(site.when)[1] - set(function.parameters))
            for name in unknown:
                message = f"'{name}' is not a parameter of {plan.owner}.{function.node.name}"
                note = "a site's condition is evaluated where the function begins"
                hint = did_you_mean(name, function.parameters)
                findings.append(Finding("CP104", message, site.location, hint=hint, note=note))


def _site_edits(
    site: Site,
    call: ast.Call,
    function: Function,
    exchange: Exchange,
    together: bool,  # with other attention calls in one statement
    cp: str,
    findings: list[Finding],
) -> list[Edit]:
    def find(message: str, note: str | None = None) -> None:
        place = function.module.location(call)
        findings.append(
            Finding("CP502", message, site.location, note=note or f"the call is at {place.file}:{place.line}")
        )

    module = _module(function)
    if module == "self" and function.node.name == "__call__":
        find(f"{function.owner.name}.__call__ has no parameter 'attn', the attention module that it works for")
    statement = function.statement_of(call)
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(k.arg is None for k in call.keywords):
        find("the call takes * or ** arguments: a mask or a causal flag could hide in them")
        return []
    if not isinstance(statement, _SIMPLE_STATEMENTS) or _may_not_run(call, statement, function):
        find(
            "the call must stand in a statement of its own, which always runs it: not in a condition or a branch of one"
        )
        return []
    given = [argument(call, position, name) for position, name in enumerate(("query", "key", "value"))]
    transposed = all(_transposed(tensor) is not None for tensor in given)
    tensors: list[ast.expr | None] = [_transposed(tensor) for tensor in given] if transposed else given
    if not all(isinstance(tensor, ast.Name) for tensor in tensors):
        find("query, key and value of the call must be variables, or all three NAME.transpose(1, 2)")
        return []
    query, key, value = (tensor.id for tensor in tensors)  # type: ignore[union-attr]
    sized = length_read(call, tensors, function)
    if sized is not None:
        find(f"'{ast.unparse(sized)}' in the call would be of this rank's tokens or heads, or of the exchanged ones")
    if exchange.outer == "allgather" and not exchange.ulysses and not together and query in (key, value):
        find(f"'{query}' is the query as well as the key or value: gathered, it would be both")
    causal = may_be_causal(call)
    if causal and site.kv is not None:
        find("the call may be causal, but its keys are other streams than its queries")
    if causal and site.kind != "causal":
        find(f"the call may be causal, but the plan says {site.kind}", "write kind: causal")
    target = statement.targets[0] if isinstance(statement, ast.Assign) and statement.value is call else None
    others = target.elts[1:] if isinstance(target, (ast.Tuple, ast.List)) else []
    read = [name for other in others for name in reads_of(other, function)]
    if read:
        find(f"'{read[0]}', which the call returns beside its output, is of this rank's heads or tokens only")
    if exchange.outer == "ring" and others:
        find("ring attention returns the output alone, not a tuple", "emit with another strategy")

    place: ast.stmt = statement
    if site.cache is not None:
        place = first_use(site.cache, statement, function) or statement
        wrong = misuse(site.cache, place, statement, {query, key, value}, function)
        if place is statement:
            find(f"'{site.cache}' is not used ahead of the call, as a cache would be")
        elif together:
            find("calls that stand in one statement exchange inside of it, and not ahead of a cache")
        elif wrong is not None:
            find(wrong)
    indent = function.module.indent(place)
    before_the_call = exchange.before_the_call and not together
    edits: list[Edit] = [
        Insertion(
            function.first_statement.lineno,
            function.module.indent(function.first_statement),
            _site_code(site, module, attention_function(call) or "", transposed and before_the_call, cp),
            _site_reason(site),
        )
    ]
    if together:
        return [*edits, _call_edit(call, function, exchange, cp)]
    rebound: tuple[str, ...] = ()
    if exchange.ulysses:
        code = f"{query}, {key}, {value} = {cp}.seq_to_heads({query}, {key}, {value})"
        reason = f"all tokens{' of the inner ranks' if exchange.outer else ''}, this rank's heads"
        edits.append(Insertion(place.lineno, indent, code, reason))
        edits.append(_heads_to_seq(call, statement, function, cp))
        rebound = (query, key, value)
    if exchange.outer == "allgather":
        code = f"{key}, {value} = {cp}.gather_kv({query}, {key}, {value})"
        edits.append(Insertion(place.lineno, indent, code, "keys and values of all tokens"))
        rebound = rebound or (key, value)
    if exchange.outer == "ring":
        edits.append(wrap(function, call.func, f"{cp}.ring_attention(", ")", "keys and values of all tokens, in turn"))
    elif exchange.outer == "allgather" and causal:
        edits.append(wrap(function, call.func, f"{cp}.own_queries(", ")", "this rank's rows of the causal mask"))
    later = later_use(function, call, statement, rebound)
    if later is not None:
        find(f"'{later.id}' is used again at line {later.lineno}, where it would be the exchanged one")
    mask = argument(call, 3, "attn_mask")
    if mask is not None and not is_none(mask):
        # Cut to heads first, while its rows are whole. Ring attention cuts rows by itself.
        methods = {"mask_rows": exchange.outer == "allgather", "mask_heads": exchange.ulysses}
        before = "".join(f"{cp}.{method}(" for method, wanted in methods.items() if wanted)
        reasons = {"rows": exchange.outer == "allgather", "heads": exchange.ulysses}
        reason = f"this rank's {' and '.join(what for what, wanted in reasons.items() if wanted)}"
        if before:
            edits.append(wrap(function, mask, before, ")" * before.count("("), reason))
    return edits


def _module(function: Function) -> str:
    return "attn" if "attn" in function.parameters else "self"


def _call_edit(call: ast.Call, function: Function, exchange: Exchange, cp: str) -> Edit:
    """The exchange inside of a call that stands in one statement with others: what they both read stays as it is."""
    inside = {
        "trading_heads": exchange.ulysses,
        "gathering_kv": exchange.outer == "allgather",
        "ring_attention": exchange.outer == "ring",
    }
    methods = [name for name, wanted in inside.items() if wanted]
    before = "".join(f"{cp}.{name}(" for name in methods)
    return wrap(function, call.func, before, ")" * len(methods), "all tokens, by an exchange inside of the call")


def _cut_edits(
    plan: AttentionFunction, function: Function, calls: list[ast.Call], names: list[str], findings: list[Finding]
) -> list[Edit]:
    """Cuts behind the last attention call: ahead of it a mask, say, is over all keys."""
    exchanging = [site for site in plan.sites if site.streams]
    edits: list[Edit] = []
    if _always(exchanging):
        cp = names[exchanging.index(_always(exchanging)[0])]
    else:
        cp = names[len(exchanging)]
        first = function.first_statement
        code = f'{cp} = attention_site({_module(function)}, "{plan.shards[0].streams[0]}")'
        edits.append(Insertion(first.lineno, function.module.indent(first), code, "to cut by this rank's tokens"))
    last = function.top_statement_of(calls[-1])
    line = (last.end_lineno or 0) + 1
    for shard in plan.shards:
        if shard.variable not in function.bound_before(line):
            message = f"'{shard.variable}' has no value behind the calls of {plan.owner}"
            hint = did_you_mean(shard.variable, function.names)
            findings.append(Finding("CP104", message, shard.location, hint=hint))
            continue
        code = f"{shard.variable} = {cp}.shard({shard.variable}, {shard_arguments(shard)})"
        reason = f"cut {shard.streams[0]}"
        edits.append(Insertion(line, function.module.indent(last), code, reason, follows=True))
    return edits


def _transposed(tensor: ast.expr | None) -> ast.Name | None:
    """NAME, if `tensor` is NAME.transpose(1, 2): the same tensor in the other layout."""
    if not isinstance(tensor, ast.Call) or not isinstance(tensor.func, ast.Attribute) or tensor.keywords:
        return None
    swap = tensor.func.attr == "transpose" and [ast.unparse(a) for a in tensor.args] in (["1", "2"], ["2", "1"])
    return tensor.func.value if swap and isinstance(tensor.func.value, ast.Name) else None


def _site_code(site: Site, module: str, called: str, transposed: bool, cp: str) -> str:
    layout = site.layout or ATTENTION_LAYOUT[called]

    def site_of(streams: tuple[str, ...], kv: tuple[str, ...] | None, when: str | None = None) -> str:
        arguments = [module, *map(_quoted, streams)]
        if site.within:
            by_list = ", ".join(f"{_quoted(name)}: {_tuple(of)}" for name, of in site.within)
            arguments = [module, f"within={{{by_list}}}"]
        if kv is not None:
            arguments.append(f"kv={_tuple(kv)}")
        if layout != "BSHD":
            arguments.append(f'layout="{layout}"')
        if transposed:
            arguments.append("transposed=True")
        if when is not None:
            arguments.append(f"when={when}")
        return f"attention_site({', '.join(arguments)})"

    if site.otherwise is None:
        return f"{cp} = {site_of(site.streams, site.kv, site.when)}"
    return f"{cp} = {site_of(site.streams, site.kv)} if {site.when} else {site_of(site.otherwise, None)}"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _tuple(names: tuple[str, ...]) -> str:
    return f"({', '.join(map(_quoted, names))}{',' if len(names) == 1 else ''})"


def _site_reason(site: Site) -> str:
    if site.within:
        return "attention over the streams of the list of blocks that it is in"
    if site.when is None or site.otherwise:
        return f"{site.kind} attention"
    return f"{site.kind} attention, else local: every rank has all keys"


def _heads_to_seq(call: ast.Call, statement: ast.stmt, function: Function, cp: str) -> Edit:
    reason = "this rank's tokens, all heads"
    if isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, (ast.Tuple, ast.List)):  # (output, log-sum-exp) and the like
            target = target.elts[0]
        if isinstance(target, ast.Name):
            assert statement.end_lineno is not None
            code = f"{target.id} = {cp}.heads_to_seq({target.id})"
            indent = function.module.indent(statement)
            return Insertion(statement.end_lineno + 1, indent, code, reason, follows=True)
    return wrap(function, call, f"{cp}.heads_to_seq(", ")", reason)


def _whole_edits(whole: Whole, function: Function, cp: str, findings: list[Finding]) -> list[Edit]:
    names = [name for name in (whole.before, whole.after, whole.until) if name]
    missing = [name for name in names if not function.assignments_of(name)]
    missing += [name for name, _ in whole.variables if name not in function.names]
    for name in missing:
        message = f"{function.owner.name}.{function.node.name} does not assign '{name}'"
        hint = did_you_mean(name, function.names)
        findings.append(Finding("CP104", message, whole.location, hint=hint))
    if missing:
        return []
    first = function.assignments_of(whole.before or whole.after or "")[0]
    last = function.assignments_of(whole.until)[-1] if whole.until else None
    if last is not None and (last.lineno < first.lineno or (last is first and not whole.before)):
        message = f"'{whole.until}' is assigned last at line {last.lineno}, where the lengths are not whole yet"
        note = f"they are from '{whole.before or whole.after}' at line {first.lineno} on"
        findings.append(Finding("CP502", message, whole.location, note=note))
        return []
    edits: list[Edit] = []
    for name, streams in whole.variables:
        arguments = ", ".join([name, *(f'"{stream}"' for stream in streams)])
        line = first.lineno if whole.before else (first.end_lineno or first.lineno) + 1
        reason = f"the length of all of {', '.join(streams)}"
        code = f"{name} = {cp}.whole_length({arguments})"
        indent = function.module.indent(first)
        edits.append(Insertion(line, indent, code, reason, follows=not whole.before))
        if last is not None:
            code = f"{name} = {cp}.local_length({arguments})"
            line = (last.end_lineno or last.lineno) + 1
            indent = function.module.indent(last)
            edits.append(Insertion(line, indent, code, "this rank's again", follows=True))
    return edits


def _may_not_run(call: ast.Call, statement: ast.stmt, function: Function) -> bool:
    node: ast.AST = call
    while node is not statement:
        node = function.parents[node]
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            return True
    return False
