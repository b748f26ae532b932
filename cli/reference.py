"""Command line, settings and assets as text: usage lines, docs/cli.md, presets.md, assets.md."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from .main import app

_CLI_HEADER = """\
# Command line

Written by `pytest tests/cli/test_surface.py --update-golden`; do not edit.

- stdout is data, stderr is talk. `--json` prints one JSON document, `-q` only the id or path.
  `NO_COLOR` and a stdout that is no terminal turn colours and bars off.
- Exit codes: 0 done · 1 the run failed · 2 usage or config wrong, nothing started · 3 something is
  missing and the fix is printed · 4 `--fail-under` not met · 130 interrupted.
- Nothing is overwritten unless an option says so. `--dry-run` writes and starts nothing.
  `vlarl train --dry-run` plans on a machine without weights or GPU, too: it lists what is missing
  and ends with 0, where the run itself ends with 3.
- `KEY=VALUE` arguments override a preset; values are YAML: `optim.lr=1e-5`,
  `'env.tasks=[reach-v3, push-v3]'`, `log.wandb=null`.
- `vlarl --debug ...` shows the traceback behind an error message.
- Environment variables: `VLARL_HOME` (cached checkpoints, default `~/.cache/vlarl`), `VLARL_RUNS`
  (run directories, default `./runs`), `HF_ENDPOINT`, `HF_HUB_OFFLINE` and `HF_TOKEN` for downloads.
  `vlarl doctor` lists all that matter.
"""

_PRESETS_HEADER = """\
# Presets and settings

Written by `pytest tests/cli/test_surface.py --update-golden`; do not edit.

A preset is a short YAML file: what differs from the defaults below. Its first comment line says
what it is. `vlarl presets copy NAME mine.yaml` gives you one to edit; `--preset` takes a name or a
`.yaml` file.

- `extends: [base/x, ./mine.yaml]` builds on shipped presets by name and on files by path, relative
  to the file that says so. Sections merge key by key, later ones over earlier ones, the preset's
  own keys last, then `KEY=VALUE` arguments.
- Lists replace lists. A section whose `name` changes is replaced as a whole.
- There are no variables, expressions or anchors. Unknown keys and keys written twice are errors;
  all errors are reported at once.
- `vlarl config show --preset NAME --sources` prints every setting and where it was set.
"""


_ASSETS_HEADER = """\
# Assets

Written by `pytest tests/cli/test_surface.py --update-golden` from `vlarl/assets/manifest.yaml`; do
not edit.

`vlarl download NAME` puts an asset into `$VLARL_HOME/NAME` (default `~/.cache/vlarl/NAME`), where
`policy.checkpoint=NAME` and `vlarl eval NAME` find it. Every file is verified by size and by the
hash the hub states. An unfinished download lies in a hidden folder `.NAME.partial` beside it, is
continued by the same command, and is never taken for the asset. `vlarl download NAME --dry-run`
shows files, sizes and free space; `vlarl download --list` shows what is here.

- `HF_ENDPOINT=https://a.mirror` asks a mirror. `HF_HUB_OFFLINE=1` asks nobody: what is complete is
  verified, what is not is listed (exit code 3).
- `HF_TOKEN`, or `hf auth login`, opens gated and private repositories. The token goes to the hub
  and is never printed or written.
- An asset that was copied by hand needs the files below, under `$VLARL_HOME/NAME`.
- A revision that is no commit hash moves with its branch: the commit that came is noted in
  `.vlarl_download` in the folder. `--revision SHA` asks for another one, `--force` replaces.
- *unknown* means that no public page that states it was seen, not that there is none. Read the
  model card before you use a checkpoint.
"""


def surface() -> str:
    """One usage line per command, in the order of `vlarl --help`."""
    return "".join(f"{_usage(path, command)}\n" for path, command in _commands())


def cli_markdown() -> str:
    """docs/cli.md."""
    return "\n".join([_CLI_HEADER, *(_section(path, command) for path, command in _commands())])


def presets_markdown() -> str:
    """docs/presets.md: the shipped presets, then every setting. Imports every plug-in."""
    from vlarl import registry
    from vlarl.config import presets, schema
    from vlarl.sft_config import SftConfig

    parts = [_PRESETS_HEADER, "## Shipped presets\n"]
    parts += [
        f"### {name}\n\n```yaml\n{presets.read(name).rstrip()}\n```\n"
        for name in presets.all_names()
    ]
    parts += ["## Settings of `vlarl train`\n", *_sections(schema.RunConfig)]
    parts.append("## Plug-ins\n")
    for kind in registry.KINDS:
        for name in registry.names(kind):
            config = registry.module(kind, name).Config
            parts.append(_settings(f"`{kind}`, name: {name}", f"{kind}.", config))
    parts += ["## Settings of `vlarl sft`\n", *_sections(SftConfig)]
    return "\n".join(parts)


def assets_markdown() -> str:
    """docs/assets.md: everything that `vlarl download` knows."""
    from vlarl.assets import manifest

    return "\n".join([_ASSETS_HEADER, *(_asset(manifest.get(n)) for n in manifest.names())])


def _asset(asset: Any) -> str:
    from vlarl.assets.manifest import used_by
    from vlarl.assets.sizes import readable

    presets = ", ".join(f"`{name}`" for name in used_by(asset.name)) or "none yet"
    lines = [
        f"## {asset.name}",
        "",
        f"{asset.about}. {asset.note}".rstrip(),
        "",
        f"- repository: [{asset.repo}](https://huggingface.co/{asset.repo}) at `{asset.revision}`",
        f"- licence: {asset.licence or 'unknown'}",
        f"- size by the files below: {readable(asset.num_bytes)}",
        f"- presets: {presets}",
        "",
        "| file | | number | bytes |",
        "|---|---|---|---|",
    ]
    for file in asset.files:
        number = "1 or more" if file.count is None else str(file.count)
        size = "unknown" if file.bytes is None else f"{file.bytes:,}"
        lines.append(_row(f"`{file.pattern}`", file.what, number, size))
    return "\n".join(lines) + "\n"


def _sections(model: Any) -> Iterator[str]:
    """A table of the keys at the top, then one for each section that is not a plug-in's."""
    from vlarl import registry
    from vlarl.config.explain import section_of

    yield _settings("At the top", "", model)
    for key, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section and key not in registry.KINDS and isinstance(field.default, section):
            yield _settings(f"`{key}`", f"{key}.", section)


def _commands() -> Iterator[tuple[str, Any]]:
    """(words, command) of every command, groups and root included, parents first."""

    def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield path, command
        children = getattr(command, "commands", {})
        for name in command.list_commands(None) if children else ():
            yield from walk(f"{path} {name}", children[name])

    return walk("vlarl", typer.main.get_command(app))


def _usage(path: str, command: Any) -> str:
    """`vlarl presets copy NAME [FILE] [--json] [--quiet]`."""
    pieces = []
    for param in command.params:
        words = _words(param)
        optional = not param.required and not words.startswith("[")
        pieces.append(f"[{words}]" if optional else words)
    return " ".join([path, *pieces])


def _words(param: Any) -> str:
    """`--nproc N|auto`, `--json`, `NAME`."""
    name = _name(param)
    if not name.startswith("-"):
        return param.metavar or name.upper()
    if param.is_flag:
        return "|".join([name, *param.secondary_opts])
    return f"{name} {param.metavar or param.name.upper()}"


def _name(param: Any) -> str:
    """The longest spelling of an option, the name of an argument."""
    return str(max(param.opts, key=len))


def _section(path: str, command: Any) -> str:
    lines = [f"## {path}", "", command.help.strip()]
    if not hasattr(command, "commands"):
        lines += ["", "```", *_wrap(_usage(path, command)), "```"]
    if command.params:
        lines += ["", "| | | default |", "|---|---|---|", *map(_option_row, command.params)]
    if command.epilog:
        examples = command.epilog.replace(r"\[", "[").split("\n\n")[1:]
        lines += ["", "```", *examples, "```"]
    return "\n".join(lines) + "\n"


def _wrap(usage: str) -> list[str]:
    """Lines of a usage text, cut only between options."""
    glued = re.sub(r"\[[^]]*]", lambda option: option[0].replace(" ", "\0"), usage)
    lines = textwrap.wrap(
        glued, 96, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    return [line.replace("\0", " ") for line in lines]


def _option_row(param: Any) -> str:
    names = "`, `".join([_words(param), *(o for o in param.opts if o != _name(param))])
    value = getattr(param.default, "value", param.default)
    shown = "" if value in (None, False) or callable(value) else f"`{value}`"
    return _row(f"`{names}`", param.help, "required" if param.required else shown)


def _settings(title: str, prefix: str, section: Any) -> str:
    head = [f"### {title}", "", inspect.cleandoc(section.__doc__), ""]
    table = ["| key | | default |", "|---|---|---|", *_setting_rows(prefix, section)]
    return "\n".join(head + table) + "\n"


def _setting_rows(prefix: str, section: Any) -> list[str]:
    from vlarl import registry
    from vlarl.config.explain import section_of

    rows = []
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if key in registry.KINDS or (inner and isinstance(field.default, inner)):
            continue  # has a table of its own
        rows.append(_row(f"`{prefix}{key}`", field.description, _setting_default(field)))
        if inner:  # a section that is off unless its keys are set
            rows += _setting_rows(f"{prefix}{key}.", inner)
    return rows


def _setting_default(field: Any) -> str:
    if field.is_required():
        return "required"
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(default)}`"


def _row(*cells: str | None) -> str:
    texts = (" ".join((cell or "").split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(texts)} |"
