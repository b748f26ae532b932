"""The env a checkpoint was made for, in a file beside its weights, so that `eval` plays the same.

`vlarl_env.json` holds an env section without what belongs to one run (slots, tasks, trials).
Policies copy it when they are saved. A checkpoint without it is none the worse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlarl.atomic import new_file
from vlarl.errors import CorruptFile

FILE = "vlarl_env.json"

_OF_ONE_RUN = {"num_slots", "suite", "tasks", "train_trials", "eval_trials", "worker_models"}


def write_env(folder: Path, section: Mapping[str, Any]) -> None:
    """Put an env section, as JSON values, beside a checkpoint's weights."""
    kept = {key: value for key, value in section.items() if key not in _OF_ONE_RUN}
    with new_file(folder / FILE, overwrite=True) as draft:
        draft.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def read_env(folder: Path) -> dict[str, Any]:
    """The env section beside a checkpoint; empty when there is none.

    Raises:
        CorruptFile: the file is there but holds something else.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        section = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptFile(f"cannot read {path}: {error}; delete it or restore it") from None
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        raise CorruptFile(f"{path} is not an env section; delete it or restore it")
    return section
