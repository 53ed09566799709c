"""For mkdocs: README.md as the first page, and what Markdown on GitHub takes but mkdocs does not.

A fence may say how tests treat it (```python notest), which Markdown takes for no fence at all. A link to a file of the
checkout that is no page leads nowhere on the site: its path is shown instead.
"""

import pathlib
import re
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any, **_: Any) -> Files:
    readme = pathlib.Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", readme).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    out_of_docs = "../" * (page.file.src_uri.count("/") + 1)  # a page of docs/decisions/ is one folder deeper
    markdown = re.sub(r"^( *```python) \w+$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(rf"\[([^]]+)\]\({re.escape(out_of_docs)}([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)
