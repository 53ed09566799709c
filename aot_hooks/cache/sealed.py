"""JSON with a checksum, in files that another process reads whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, data: Any) -> None:
    """Write `data` to `path`, in place of what is there. Raises `OSError` if it can't be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    text = json.dumps(data)
    try:
        part.write_text(json.dumps({"sha256": _digest(text), "content": text}))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read(path: Path) -> Any:
    """The data of `write`. Raises `OSError` if there is no file, `ValueError` for one that is damaged."""
    try:
        stored = json.loads(path.read_bytes())
        text, digest = str(stored["content"]), stored["sha256"]
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"it is no file of this package ({type(e).__name__}: {e})") from e
    if _digest(text) != digest:
        raise ValueError("its checksum differs from its content")
    return json.loads(text)
