"""For mkdocs: a fence may say how tests treat it (```python notest), which Markdown takes for no fence at all."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"^( *```python) \w+$", r"\1", markdown, flags=re.MULTILINE)
