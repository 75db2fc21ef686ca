"""Parts of Markdown files that commands write."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def replace_section(path: Path, name: str, text: str) -> None:
    """Put `text` between the lines `<!-- NAME: begin (command) -->` and `<!-- NAME: end -->`. Exits without them."""
    section = re.compile(rf"(<!-- {name}: begin \(.*\) -->\n).*?(<!-- {name}: end -->\n)", re.DOTALL)
    new, count = section.subn(lambda match: match[1] + text + match[2], path.read_text("utf-8"))
    if count != 1:
        sys.exit(f"{path} has no section <!-- {name}: begin (command) --> ... <!-- {name}: end -->")
    path.write_text(new, "utf-8")
