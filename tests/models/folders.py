"""Files of a model's folder, changed."""

import json
from pathlib import Path
from typing import Any


def change_json(path: Path, **changes: Any) -> None:
    """Give these entries of a JSON object other values."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
