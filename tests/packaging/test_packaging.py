"""What is installed: every folder, every preset, nothing that clashes with other packages."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest there

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def _sources():
    return [p for top in ("vlarl", "cli", "presets") for p in sorted((ROOT / top).rglob("*.py"))]


def test_the_package_list_is_complete():
    found = set()
    for top, package in (("vlarl", "vlarl"), ("cli", "vlarl_cli"), ("presets", "vlarl_presets")):
        for init in (ROOT / top).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / top).parts
            found.add(".".join([package, *inner]))
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_every_folder_with_code_is_a_package():
    bare = {p.parent for p in _sources() if not (p.parent / "__init__.py").exists()}
    assert bare == set()


def test_the_mapped_folders_are_named_once():
    assert SETUPTOOLS["package-dir"] == {"vlarl_cli": "cli", "vlarl_presets": "presets"}


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nobody_imports_a_second_copy(path):
    """`cli` and `presets` are folders here, not packages; inside `cli` imports are relative."""
    forbidden = r"^\s*(from|import) (cli|presets|click)\b"
    if path.is_relative_to(ROOT / "cli"):
        forbidden += r"|^\s*(from|import) vlarl_cli\b"
    assert not re.search(forbidden, path.read_text(), re.MULTILINE)


def test_a_decoy_in_the_working_directory_is_not_imported(tmp_path):
    for name in ("cli", "presets", "config", "output"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('decoy')\n")
    script = Path(sys.executable).with_name("vlarl")
    for command in ([sys.executable, "-m", "vlarl_cli"], [str(script)]):
        done = subprocess.run(
            [*command, "presets", "list", "-q"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "tiny_metaworld_grpo" in done.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names in a wheel built from a copy of the sources, without the network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("vlarl", "cli", "presets"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    readme = ROOT / "README.md"
    (source / "README.md").write_text(readme.read_text() if readme.exists() else "vlarl\n")
    code = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(out)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


@pytest.mark.slow
def test_the_wheel_holds_code_presets_and_assets(wheel):
    names = {"cli": "vlarl_cli", "presets": "vlarl_presets", "vlarl": "vlarl"}
    wanted = set()
    for top, package in names.items():
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".yaml") or (path.is_file() and "tiny" in path.parts):
                wanted.add(f"{package}/{path.relative_to(ROOT / top).as_posix()}")
    assert {"vlarl_presets/base/grpo.yaml", "vlarl_cli/main.py"} <= wanted
    assert wanted - wheel == set()
    assert "vlarl/py.typed" in wheel


@pytest.mark.slow
def test_the_wheel_claims_no_other_name(wheel):
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {
        "vlarl",
        "vlarl_cli",
        "vlarl_presets",
    }
