"""A changed default shows up in review as the list of presets that it changes."""

import json

import pytest

from vlarl import sft_config
from vlarl.config import presets
from vlarl.config.compose import build, command_of, compose
from vlarl.config.resolved import resolved


@pytest.mark.parametrize("name", presets.names())
def test_resolved_preset(name, check_golden):
    composed = compose(name)
    config = sft_config.build(composed) if command_of(composed) == "sft" else build(composed)
    values = resolved(config, composed.sources).values
    check_golden(f"presets/{name}.json", json.dumps(values, indent=2) + "\n")


def test_every_golden_file_is_a_preset(request):
    folder = request.config.rootpath / "tests" / "golden" / "presets"
    assert sorted(p.stem for p in folder.rglob("*.json")) == presets.names()
