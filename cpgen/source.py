"""Source files, found and read as text: nothing is imported, neither diffusers nor the user's module."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cpgen.diagnostics import Location, fail


@dataclass(frozen=True)
class SourceModule:
    """One Python file. `label` is how messages and headers name it, without any path of this machine."""

    name: str  # dotted, as it would be imported
    path: Path
    label: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            place = Location(self.label, error.lineno or 1, error.offset or 1, 1, (error.text or "").rstrip("\n"))
            raise fail("CP301", f"{self.label} is not valid Python: {error.msg}", place) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise fail("CP301", f"{self.label} cannot be parsed: {str(error) or 'nested too deeply'}") from None

    @cached_property
    def lines(self) -> list[str]:
        """The lines that `ast` counts: str.splitlines would also break at form feeds and U+2028."""
        return [line for line in re.split(r"(?<=\n)", self.text) if line]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def package(self) -> str:
        """The package that relative imports of this file start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def definitions(self) -> dict[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
        """Classes and functions at module level, by name."""
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return {node.name: node for node in self.tree.body if isinstance(node, kinds)}

    @cached_property
    def imported(self) -> dict[str, tuple[str, str | None]]:
        """Names that imports bind, functions' own aside: name -> (module, name there; None for the module itself)."""
        names: dict[str, tuple[str, str | None]] = {}
        for node in _outside_functions(self.tree):
            if isinstance(node, ast.ImportFrom):
                module = self.absolute(node)
                for alias in node.names:
                    names[alias.asname or alias.name] = (module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    names[alias.asname or alias.name.partition(".")[0]] = (alias.name, None)
        return names

    @cached_property
    def bound(self) -> set[str]:
        """Names that the module has at run time: definitions, imports and variables, also those in a condition.

        What it imports for type checkers stands in annotations only.
        """
        inner = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        names: set[str] = set()
        nodes: list[ast.AST] = [*self.tree.body]
        while nodes:
            node = nodes.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                nodes += node.orelse
            elif not isinstance(node, inner):
                nodes += ast.iter_child_nodes(node)
        return names

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that `node` imports from, without leading dots. Raises CpgenError past the top package."""
        if not node.level:
            return node.module or ""
        base = self.package.split(".") if self.package else []
        if node.level > len(base):
            raise fail(
                "CP302",
                f"relative import in {self.label}, which is in no package",
                self.location(node),
                help="make it absolute, or name the class as package.module:Class",
            )
        return ".".join(base[: len(base) - node.level + 1] + ([node.module] if node.module else []))

    def indent(self, node: ast.stmt) -> str:
        """The white space ahead of `node`. Raises CpgenError if it shares a line, so that none can go around it."""
        first, last = self.lines[node.lineno - 1], self.lines[(node.end_lineno or node.lineno) - 1]
        before = first.encode()[: node.col_offset].decode()
        behind = last.encode()[node.end_col_offset :].decode().strip()
        if before.strip() or (behind and not behind.startswith("#")):
            raise fail(
                "CP503",
                f"a statement in {self.label} shares its line with another",
                self.location(node),
                note="a line must go ahead of it or behind it",
            )
        return before

    @cached_property
    def open_lines(self) -> set[int]:
        """The lines that cannot take a comment at their end: inside a string, or continued by a backslash."""
        found = {i for i, line in enumerate(self.lines, start=1) if line.rstrip("\n").endswith("\\")}
        starts = []
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            name = tokenize.tok_name[token.type]
            if name == "FSTRING_START":
                starts.append(token.start[0])
            elif name == "FSTRING_END":
                found |= set(range(starts.pop(), token.end[0]))
            elif name == "STRING":
                found |= set(range(token.start[0], token.end[0]))
        return found

    def location(self, node: ast.AST) -> Location:
        """Where `node` starts."""
        line = getattr(node, "lineno", 1)
        text = self.lines[line - 1].rstrip("\n") if line <= len(self.lines) else ""
        column = len(text.encode()[: getattr(node, "col_offset", 0)].decode(errors="ignore")) + 1
        end = getattr(node, "end_col_offset", None) if getattr(node, "end_lineno", None) == line else None
        width = (
            len(text.encode()[:end].decode(errors="ignore")) - column + 1 if end is not None else len(text) - column + 1
        )
        return Location(self.label, line, column, max(1, width), text)


@dataclass
class SourceTree:
    """Looks modules up by dotted name and keeps what it has read."""

    _modules: dict[str, SourceModule | None] = field(default_factory=dict)

    def find(self, name: str) -> SourceModule | None:
        """The module of this name, or None if it has no Python source here."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def resolve(self, module: SourceModule, name: str) -> tuple[SourceModule, str] | None:
        """Where `name`, as seen in `module`, is defined: follows re-exports. None for what has no source."""
        for _ in range(20):
            if name in module.definitions or name not in module.imported:
                return module, name
            origin, inner = module.imported[name]
            # torch and the like are large, and nothing of theirs is ever edited: don't read them.
            followed = inner is not None and origin.partition(".")[0] in (module.name.partition(".")[0], "diffusers")
            found = self.find(origin) if followed else None
            if found is None or inner is None:
                return None
            module, name = found, inner
        return None

    def _read(self, name: str) -> SourceModule | None:
        top, *rest = name.split(".")
        try:
            spec = importlib.util.find_spec(top)  # does not run the package: only a dotted name would
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            candidates = [Path(spec.origin)] if spec.origin and not rest else []
        else:
            folders = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations]
            candidates = [folder.with_suffix(".py") for folder in folders if rest]
            candidates += [folder / "__init__.py" for folder in folders]
        for path in candidates:
            if path.suffix == ".py" and path.is_file():
                is_package = path.name == "__init__.py"
                label = "/".join([*name.split("."), "__init__.py"]) if is_package else name.replace(".", "/") + ".py"
                return SourceModule(name, path, label, read_source(path, label), is_package)
        return None


def read_source(path: Path, label: str) -> str:
    """The text of a Python file with LF line ends. Raises CpgenError if it cannot be read as UTF-8."""
    try:
        content = path.read_bytes()
        for line in content.split(b"\n", 2)[:2]:
            declared = re.match(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", line)
            if declared and declared[1].decode().lower().replace("_", "-") not in (
                "utf-8",
                "utf8",
                "ascii",
                "us-ascii",
            ):
                raise fail("CP303", f"{label} declares another encoding than UTF-8: {declared[1].decode()}")
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise fail("CP303", f"cannot read {label}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise fail("CP303", f"{label} is not UTF-8 text") from None


def diffusers_version(tree: SourceTree) -> str:
    """The version of the installed diffusers. Raises CpgenError if it is not installed."""
    root = tree.find("diffusers")
    if root is None:
        raise fail("CP304", "diffusers is not installed", help="pip install 'cpgen[run]', or diffusers alone")
    match = re.search(r"^__version__ = \"([0-9][0-9A-Za-z.+-]*)\"$", root.text, re.MULTILINE)
    return match[1] if match else "unknown"


def exported_models(tree: SourceTree) -> dict[str, str]:
    """Model classes that diffusers exports: class -> dotted module. Read from its lazy import table."""
    diffusers_version(tree)
    models = tree.find("diffusers.models")
    table: dict[str, str] = {}
    if models is None:
        return table
    for node in ast.walk(models.tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Subscript)
            and isinstance(node.targets[0].slice, ast.Constant)
            and isinstance(node.value, ast.List)
        ):
            for item in node.value.elts:
                if isinstance(item, ast.Constant):
                    table[str(item.value)] = f"diffusers.models.{node.targets[0].slice.value!s}"
    return table


def _outside_functions(tree: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found += [child, *_outside_functions(child)]
    return found
