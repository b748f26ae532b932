"""The manifest is sound, and shipped presets name what it holds."""

import re

import pytest
from pydantic import ValidationError

from vlarl.assets import manifest, store
from vlarl.assets.manifest import Asset
from vlarl.assets.sizes import readable
from vlarl.config import presets
from vlarl.config.compose import compose
from vlarl.errors import ConfigError


def test_it_holds_what_the_recipes_use():
    names = manifest.names()
    assert [n for n in names if n.startswith("wan-")] == [
        "wan-libero-spatial",
        "wan-libero-object",
        "wan-libero-goal",
    ]
    for suite in ("spatial", "object", "goal", "10"):
        assert f"openvla-oft-libero-{suite}-traj1" in names
    for name in ("openvla-oft-libero-90-base", "openvla-oft-libero-130-base"):
        assert name in names
    for policy in ("openvla-oft", "pi0", "pi05"):
        assert f"{policy}-metaworld-sft" in names
    assert len({manifest.get(n).repo for n in names}) == len(names)


@pytest.mark.parametrize("name", manifest.names())
def test_every_entry_is_sound(name):
    asset = manifest.get(name)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", asset.repo)
    assert asset.revision == "main" or re.fullmatch(r"[0-9a-f]{40}", asset.revision)
    assert manifest.named_by(asset.repo) == name
    assert name not in store._folders(store._shipped())
    for file in asset.files:
        assert asset.wants(file.pattern)
        if file.bytes is not None:  # a size is of a known number of files
            assert file.count is not None


def test_sizes_are_the_published_ones():
    assert manifest.get("wan-libero-goal").num_bytes == 14_223_247_492
    assert manifest.get("wan-libero-spatial").num_bytes is None
    assert manifest.total([1, 2]) == 3
    assert manifest.total([1, None]) is None


def test_unknown_names_come_with_near_ones():
    with pytest.raises(ConfigError, match=r"no asset named 'wan-libero-gaol'.*'wan-libero-goal'"):
        manifest.get("wan-libero-gaol")


def test_presets_that_use_an_asset_are_found(monkeypatch):
    composed = compose("tiny_metaworld_grpo")
    monkeypatch.setattr(presets, "names", lambda: ["tiny_metaworld_grpo"])
    assert composed.values["policy"]["checkpoint"] == "tiny-oft-metaworld"
    assert manifest.used_by("tiny-oft-metaworld") == ["tiny_metaworld_grpo"]
    assert manifest.used_by("wan-libero-goal") == []


@pytest.mark.parametrize("name", presets.names())
def test_checkpoints_of_presets_are_shipped_or_in_the_manifest(name):
    checkpoint = compose(name).values["policy"].get("checkpoint", "random")
    shipped = store._folders(store._shipped())
    assert checkpoint in ["random", *shipped, *manifest.names()]


def test_lacking_names_patterns_numbers_and_sizes():
    fields = {"name": "a", "about": "a", "repo": "o/a"}
    data = {"pattern": "d/*.npy", "what": "d", "count": 2, "bytes": 30}
    asset = Asset(**fields, files=[{"pattern": "c.json", "what": "c"}, data], skip=["x/*"])
    assert asset.lacking({}) == ["c.json", "d/*.npy (2 files)"]
    assert asset.lacking({"c.json": 1, "d/1.npy": 10}) == ["d/*.npy (1 of 2)"]
    assert asset.lacking({"c.json": 1, "d/1.npy": 10, "d/2.npy": 10}) == [
        "d/*.npy (20 of 30 bytes)"
    ]
    assert asset.lacking({"c.json": 1, "d/1.npy": 10, "d/2.npy": 20}) == []
    assert [asset.wants(p) for p in ("c.json", "x/y", ".gitattributes")] == [True, False, False]


def test_a_hash_is_of_one_file():
    file = {"pattern": "*.a", "what": "a", "sha256": "0" * 64}
    with pytest.raises(ValidationError, match="sha256 goes with count: 1"):
        Asset(name="a", about="a", repo="o/a", files=[file])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (45_379_978, "45.4 MB"),
        (97_910_364, "97.9 MB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (14_223_247_492, "14.2 GB"),
        (None, "unknown"),
    ],
)
def test_sizes_read_well(size, text):
    assert readable(size) == text
