"""The JSON schema of preset files, for editors."""

from __future__ import annotations

from typing import Any, Union, cast

from vlarl import registry
from vlarl.config.schema import RunConfig


def preset_schema() -> dict[str, Any]:
    """JSON schema of a preset file: any registered plug-in, every key optional, plus `extends`.

    Imports every registered plug-in.
    """
    sections: Any = tuple(
        Union[tuple(registry.module(kind, name).Config for name in registry.names(kind))]  # noqa: UP007
        for kind in registry.KINDS
    )
    model = cast("type[RunConfig]", RunConfig.__class_getitem__(sections))
    schema = model.model_json_schema()
    schema["title"] = "vlarl preset"
    schema["properties"]["extends"] = {
        "description": "Presets this one builds on, merged left to right.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("required", None)  # what is missing here may come from a base
    return schema
