"""Imports and text: relative, local, conditional ones; definitions that come along; line ends and encodings."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError
from cpgen.plan_loader import load_plan
from cpgen.source import SourceTree
from cpgen.surgery.operate import Operation, operate
from cpgen.target import find_target
from tests.unit.projects import CALL, FORMS, FORWARD, module_text, operated, plan_text

# A package like diffusers: the model in made/models/transformers/, what it uses in other files.
MODEL = """\
from typing import TYPE_CHECKING

from ...utils import logging
from ..attention import Block
from . import helper
from .other import (  # noqa
    Thing,  # a thing
    other as another,
)

if TYPE_CHECKING:
    from ..outputs import Output

try:
    from ...optional import fast
except ImportError:
    fast = None


class Model:
    def __init__(self, heads=4):
        self.blocks = [Block()]
        self.proj_out = None

    @staticmethod
    def late():
        from ..late import (
            late,
        )

        return late

    def forward(self, hidden_states) -> "Output":
        for block in self.blocks:
            hidden_states = block(hidden_states)
        hidden_states = self.proj_out(hidden_states)
        return super().forward(hidden_states)
"""
ATTENTION = """\
# The licence.
# Second line.
from __future__ import annotations

import math as m
from typing import TYPE_CHECKING

from backend import dispatch_attention_fn

from ..utils import (
    deprecate,
    logging,
)

if TYPE_CHECKING:
    from .outputs import Output

try:
    from ..optional import fast
except ImportError:
    fast = None

LIMIT: int = 8
if LIMIT > 4:
    FACTOR = 2
else:
    FACTOR = 3


def register(cls):
    return cls


class Unrelated:
    pass


# Why this class is
# the way it is.
@register
class Processor:
    \"\"\"Attends: größer.\"\"\"

    @property
    def limit(self) -> Output:
        from ..utils import late

        return late(LIMIT * FACTOR + m.floor(1.5)) if fast is None else fast

    def __call__(self, attn, query, key, value):
        out = dispatch_attention_fn(query, key, value)  # attend
        return super().__call__(out) if deprecate else logging


class Block:
    def __init__(self):
        self.attn = Processor()
        self.unrelated = Unrelated

    def check(self, other: Unrelated):
        return isinstance(other, Processor)


class Bystander:
    def check(self, other: Processor):
        return isinstance(other, Processor)
"""
FILES = {
    "__init__.py": "",
    "utils.py": "def deprecate(*args): ...\n\n\nlogging = late = deprecate\n",
    "models/__init__.py": "",
    "models/attention.py": ATTENTION,
    "models/late.py": "late = 1\n",
    "models/transformers/__init__.py": "",
    "models/transformers/helper.py": "",
    "models/transformers/other.py": "class Thing: ...\n\n\ndef other(): ...\n",
    "models/transformers/transformer_made.py": MODEL,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / "made" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    (tmp_path / "backend.py").write_text("def dispatch_attention_fn(*tensors): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path / "made"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("made", "backend")]:
        del sys.modules[name]


def emitted(plan: str | None = None) -> Operation:
    tree = SourceTree()
    target = find_target("made.models.transformers.transformer_made:Model", tree)
    return operate(target, load_plan(plan or plan_text(), "made.yaml"), FORMS["ulysses"], "cpgen.runtime", tree)


def text_of(operation: Operation, name: str) -> str:
    return next(file.text for file in operation.files if file.name == name)


def test_model_file_changes_only_where_imports_were_relative(package: Path) -> None:
    text = text_of(emitted(), "transformer_made.py")
    assert text[: text.index("class Model")] == (
        textwrap.dedent(
            """\
            from typing import TYPE_CHECKING

            from made.utils import logging
            from .attention import Block
            from made.models.transformers import helper
            from made.models.transformers.other import (  # noqa
                Thing,  # a thing
                other as another,
            )
            from cpgen.runtime import begin_region  # cpgen: what the edits below call

            if TYPE_CHECKING:
                from made.models.outputs import Output

            try:
                from made.optional import fast
            except ImportError:
                fast = None


            """
        )
    )
    assert "        from made.models.late import (\n            late,\n        )\n" in text
    assert "        return super().forward(hidden_states)\n" in text


def test_only_edited_definitions_and_those_that_construct_them_come_along(package: Path) -> None:
    operation = emitted()
    assert [file.name for file in operation.files] == ["transformer_made.py", "attention.py"]
    text = text_of(operation, "attention.py")
    assert text == textwrap.dedent(
        """\
        # The licence.
        # Second line.

        from __future__ import annotations

        import math as m
        from backend import dispatch_attention_fn
        from made.models.attention import FACTOR
        from made.models.attention import LIMIT
        from made.models.attention import Unrelated
        from made.models.attention import fast
        from made.models.attention import register
        from made.utils import deprecate
        from made.utils import logging
        from cpgen.runtime import attention_site  # cpgen: what the edits below call


        # Why this class is
        # the way it is.
        @register
        class Processor:
            \"\"\"Attends: größer.\"\"\"

            @property
            def limit(self) -> Output:
                from made.utils import late

                return late(LIMIT * FACTOR + m.floor(1.5)) if fast is None else fast

            def __call__(self, attn, query, key, value):
                cp = attention_site(attn, "latent")  # cpgen: self attention
                query, key, value = cp.seq_to_heads(query, key, value)  # cpgen: all tokens, this rank's heads
                out = dispatch_attention_fn(query, key, value)  # attend
                out = cp.heads_to_seq(out)  # cpgen: this rank's tokens, all heads
                return super().__call__(out) if deprecate else logging


        class Block:
            def __init__(self):
                self.attn = Processor()
                self.unrelated = Unrelated

            def check(self, other: Unrelated):
                return isinstance(other, Processor)
        """
    )


def test_carried_file_runs(package: Path) -> None:
    namespace: dict[str, object] = {"__name__": "carried"}
    text = text_of(emitted(), "attention.py").replace("from cpgen.runtime import attention_site", "attention_site = 1")
    exec(compile(text, "attention.py", "exec"), namespace)
    processor = namespace["Processor"]
    assert isinstance(processor, type) and processor().limit is None


def test_processor_named_in_the_models_own_import(package: Path) -> None:
    path = package / "models/transformers/transformer_made.py"
    path.write_text(
        MODEL.replace("import Block", "import Processor as Attend, Unrelated").replace("Block()", "Attend()")
    )
    text = text_of(emitted(), "transformer_made.py")
    assert "from made.models.attention import Unrelated\nfrom .attention import Processor as Attend\n" in text


def test_reexported_definition_is_taken_from_where_it_is_defined(package: Path) -> None:
    (package / "models/__init__.py").write_text("from .attention import Processor as Processor\n")
    path = package / "models/transformers/transformer_made.py"
    path.write_text(
        MODEL.replace("..attention import Block", ".. import Processor, late").replace("Block", "Processor")
    )
    text = text_of(emitted(), "transformer_made.py")
    assert "\nfrom made.models import late\nfrom .attention import Processor\n" in text


def test_carried_file_that_would_take_the_models_name(package: Path) -> None:
    (package / "models/attention.py").rename(package / "models/transformer_made.py")
    path = package / "models/transformers/transformer_made.py"
    path.write_text(MODEL.replace("..attention", "..transformer_made"))
    with pytest.raises(CpgenError, match="two upstream files of the package are called"):
        emitted()


def test_relative_imports_of_a_package_module(package: Path) -> None:
    source = "from . import helper\nfrom .other import Thing\nfrom ..attention import Unrelated\n" + module_text()
    (package / "models/transformers/__init__.py").write_text(source)
    tree = SourceTree()
    module = tree.find("made.models.transformers")
    assert module is not None and module.package == "made.models.transformers"
    assert {name: module.imported[name] for name in ("helper", "Thing", "Unrelated")} == {
        "helper": ("made.models.transformers", "helper"),
        "Thing": ("made.models.transformers.other", "Thing"),
        "Unrelated": ("made.models.attention", "Unrelated"),
    }
    with pytest.raises(CpgenError, match="a package cannot hold a file called"):
        find_target("made.models.transformers:Model", tree)


def test_model_file_in_a_package_is_named_by_path(package: Path) -> None:
    path = package / "models/transformers/transformer_made.py"
    tree = SourceTree()
    operation = operate(
        find_target(f"{path}:Model", tree), load_plan(plan_text(), "p"), FORMS["ulysses"], "cpgen.runtime", tree
    )
    assert "from made.utils import logging\n" in text_of(operation, "transformer_made.py")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from .other import *", "star import in made/models/transformers/transformer_made.py"),
        ("from somewhere import *", "star import in"),
        ("from .other import Thing; x = 1", "several statements on an import's line"),
        ("if 1: from .other import Thing", "several statements on an import's line"),
        (
            "from .....other import Thing",
            "relative import in made/models/transformers/transformer_made.py, which is in no",
        ),
        ("from .other \\\n    import Thing", "laid out in an unknown way"),
    ],
)
def test_imports_that_are_errors(package: Path, line: str, message: str) -> None:
    path = package / "models/transformers/transformer_made.py"
    path.write_text(line + "\n" + MODEL)
    with pytest.raises(CpgenError, match=message) as error:
        emitted()
    (finding,) = error.value.findings
    assert finding.location is not None and finding.location.line == 1 and finding.location.text == line.split("\n")[0]


def test_star_import_in_a_function_local_block_is_found_too(package: Path) -> None:
    path = package / "models/transformers/transformer_made.py"
    path.write_text(MODEL.replace("except ImportError:\n", "except ImportError:\n    from .other import *\n"))
    with pytest.raises(CpgenError, match="star import"):
        emitted()


def test_relative_import_outside_a_package(tmp_path: Path) -> None:
    with pytest.raises(CpgenError, match="which is in no package") as error:
        operated(tmp_path, "from .a import b\n" + module_text(), plan_text())
    assert "make it absolute" in str(error.value)


def test_many_names_are_split_over_lines(package: Path) -> None:
    names = [f"a_rather_long_name_{i}" for i in range(6)]
    (package / "models/attention.py").write_text(ATTENTION + "".join(f"\n\ndef {n}(): ...\n" for n in names))
    path = package / "models/transformers/transformer_made.py"
    path.write_text(MODEL.replace("import Block", f"import Block, {', '.join(names)}"))
    text = text_of(emitted(), "transformer_made.py")
    assert "from made.models.attention import (\n    a_rather_long_name_0,\n" in text
    assert max(map(len, text.splitlines())) <= 120


# Where the runtime's import goes


def test_runtime_import_behind_the_last_import_at_the_top(tmp_path: Path) -> None:
    source = '"""Doc."""\n' + module_text() + "\n\nimport late\n"
    lines = operated(tmp_path, source, plan_text()).splitlines()
    assert lines[3] == "from cpgen.runtime import attention_site, begin_region  # cpgen: what the edits below call"
    assert lines[-1] == "import late"


@pytest.mark.parametrize("docstring", ["", '"""Doc."""\n\n'])
@pytest.mark.parametrize("decorator", ["", "@print\n"])
def test_runtime_import_without_any_other(tmp_path: Path, docstring: str, decorator: str) -> None:
    plain = module_text().replace("(nn.Module)", "").replace("import torch.nn as nn\n", "")
    source = docstring + decorator + plain.replace("from backend import dispatch_attention_fn\n\n\n", "")
    text = operated(tmp_path, source, plan_text())
    assert text.startswith(f"{docstring}from cpgen.runtime import attention_site, begin_region")
    assert f"call\n{decorator}class Processor:" in text


# Text


def test_crlf_and_byte_order_mark_become_plain_lf(tmp_path: Path) -> None:
    plain = operated(tmp_path, module_text(), plan_text())
    crlf = module_text().replace("\n", "\r\n").encode()
    assert operated(tmp_path, crlf, plan_text()) == plain
    assert operated(tmp_path, b"\xef\xbb\xbf" + crlf, plan_text()) == plain
    assert operated(tmp_path, module_text().replace("\n", "\r").encode(), plan_text()) == plain


@pytest.mark.parametrize("character", ["\x0c", "\x0b", "\x1c", "\x85", "\u2028", "\u2029"])
def test_only_line_feeds_end_a_line(tmp_path: Path, character: str) -> None:
    source = (
        module_text()
        .replace("\n\nclass Model", f'\nX = "{character}"\n\nclass Model')
        .replace("\n\nclass P", "\n\x0c\nclass P")
    )
    assert strip_marked(operated(tmp_path, source, plan_text())) == source


def test_non_ascii_text_ahead_of_an_edit_on_the_same_line(tmp_path: Path) -> None:
    call = CALL.replace("query, key, value)\n    r", 'query, key, value, scale="äöü𝔸", attn_mask=attn.ß)\n    r')
    text = operated(tmp_path, module_text(call=call), plan_text())
    assert 'scale="äöü𝔸", attn_mask=cp.mask_heads(attn.ß))  # cpgen' in text


def test_tabs_stay_tabs(tmp_path: Path) -> None:
    forward = FORWARD.replace("    for", "    from ..made import thing\n    for", 1)
    (tmp_path / "made").mkdir()
    for folder in (tmp_path / "made", tmp_path / "made/inner"):
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    source = module_text(forward).replace("    ", "\t")
    text = operated(tmp_path, source, plan_text(), file="made/inner/model.py")
    assert "\t\tfrom made.made import thing\n\t\tcp = begin_region(self)" in text
    assert "\n    " not in text
    ast.parse(text)


def test_comments_stay(tmp_path: Path) -> None:
    call = CALL.replace("value)\n", "value)  # attend\n    # then\n").replace(
        "def", "# Copied from nowhere\n@wraps(  # w\n)\ndef"
    )
    source = module_text(call=call) + "\n# The end.\n"
    assert strip_marked(operated(tmp_path, source, plan_text())) == source


def strip_marked(text: str) -> str:
    """The text without inserted lines: nothing is wrapped in these tests."""
    return "\n".join(line for line in text.split("\n") if "# cpgen:" not in line)
