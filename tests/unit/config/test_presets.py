import pytest

from vlarl.config import presets
from vlarl.config.compose import compose
from vlarl.config.sources import read_tree
from vlarl.errors import ConfigError

RECIPES = [
    "libero_10_grpo_openvlaoft",
    "libero_10_ppo_openvlaoft",
    "libero_130_grpo_openvlaoft",
    "libero_90_grpo_openvlaoft",
    "libero_goal_grpo_openvlaoft",
    "libero_object_grpo_openvlaoft",
    "libero_spatial_grpo_openvlaoft",
    "metaworld_50_grpo_openvlaoft",
]


def test_the_shipped_presets_are_found():
    names = presets.names()
    assert [name for name in names if name.endswith("_openvlaoft")] == RECIPES
    assert {"tiny_metaworld_grpo", "tiny_metaworld_ppo", "tiny_metaworld_sft"} < set(names)
    assert set(presets.all_names()) > set(names)
    assert "base/grpo" not in names


@pytest.mark.parametrize("name", presets.all_names())
def test_a_preset_is_short_and_says_what_it_is(name):
    text = presets.read(name)
    assert len(text.splitlines()) <= 40
    assert len(presets.description(text)) > 10


@pytest.mark.parametrize("name", presets.all_names())
def test_a_preset_names_only_shipped_things(name):
    tree = read_tree(presets.read(name), name)
    extends = tree["extends"].value if "extends" in tree else []
    assert set(extends) <= set(presets.all_names())
    checkpoint = compose(name).values.get("policy", {}).get("checkpoint", "word")
    assert "/" not in checkpoint


def test_an_unknown_preset_lists_near_names():
    with pytest.raises(ConfigError, match="did you mean 'tiny_metaworld_grpo'"):
        presets.read("tiny_metaworld_grop")


def test_a_preset_name_is_no_way_out_of_the_folder():
    with pytest.raises(ConfigError, match="no preset named"):
        presets.read("../pyproject")


def test_description_is_the_first_comment():
    assert presets.description("# What it is.\n# More.\na: 1\n") == "What it is."
    assert presets.description("a: 1\n# late\n") == ""


def test_copy_gives_the_same_text_and_never_overwrites(tmp_path):
    target = tmp_path / "mine.yaml"
    assert presets.copy(RECIPES[0], target) == target
    assert target.read_text() == presets.read(RECIPES[0])
    target.write_text("mine: 1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml exists already"):
        presets.copy(RECIPES[0], target)
    assert target.read_text() == "mine: 1\n"


def test_copy_goes_to_the_working_directory_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert presets.copy(RECIPES[0]).read_text() == presets.read(RECIPES[0])
    assert [p.name for p in tmp_path.iterdir()] == [f"{RECIPES[0]}.yaml"]


def test_copy_to_a_missing_folder_or_another_suffix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        presets.copy(RECIPES[0], tmp_path / "no" / "mine.yaml")
    with pytest.raises(ConfigError, match=r"must end in \.yaml"):
        presets.copy(RECIPES[0], tmp_path / "mine.txt")
