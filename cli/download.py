"""`vlarl download`: checkpoints and world models of the recipes, by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from vlarl.errors import ConfigError
from vlarl.signals import INTERRUPTED, stop_on_signals

from .options import DryRunOpt, JsonOpt, QuietOpt
from .output import Output, format_table

if TYPE_CHECKING:
    from vlarl.assets.download_plan import Plan

EXAMPLES = (
    "vlarl download --list",
    "vlarl download wan-libero-spatial --dry-run",
    "vlarl download wan-libero-spatial openvla-oft-libero-spatial-traj1",
    "vlarl download openvla-oft-metaworld-sft --to /data/checkpoints",
    "vlarl download wan-libero-goal --force -q",
)

_SHOWN = 20


def complete_asset(incomplete: str) -> list[str]:
    """Names of the manifest, for shell completion."""
    from vlarl.assets.manifest import names

    return [name for name in names() if name.startswith(incomplete)]


def download(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Assets, see --list.",
            autocompletion=complete_asset,
            show_default=False,
        ),
    ] = None,
    list_: Annotated[
        bool,
        typer.Option("--list", help="Show what there is, and what is here.", rich_help_panel="Run"),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Put DIR/NAME there; default $VLARL_HOME, where names are looked up.",
            rich_help_panel="Output",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="SHA",
            help="Commit, tag or branch other than the manifest's.",
            rich_help_panel="Run",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Fetch everything again; what is there is replaced when that is complete.",
            rich_help_panel="Run",
        ),
    ] = False,
    dry_run: DryRunOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Download checkpoints and world models; verify, resume, and put complete folders in place.

    The same command continues what was interrupted. HF_ENDPOINT names a mirror,
    HF_HUB_OFFLINE=1 forbids the network, HF_TOKEN opens gated repositories.
    """
    out = Output(json=json, quiet=quiet)
    if list_:
        if names:
            raise ConfigError("--list shows every asset; leave out the names")
        _list(out)
        return
    if not names:
        raise ConfigError("name what to download, or see --list")
    if revision is not None and len(names) > 1:
        raise ConfigError("--revision goes with one asset; download them one by one")
    if revision == "":
        raise ConfigError("--revision is empty; name a commit, tag or branch, or leave it out")
    _check_endpoint()  # before huggingface_hub is imported, which fails in its own words
    from vlarl.assets import hub
    from vlarl.assets.download_plan import check_space, plan, refuse_unreachable, require

    require(names)  # a typo in the last name is told before the first is looked at
    hub.tell_waits(out.hint)
    plans = [plan(n, to=to, revision=revision, force=force) for n in dict.fromkeys(names)]
    for one in plans:
        out.hint(_describe(one))
    if dry_run:
        out.result(_planned(plans), text=_table_of(plans), ident=[p.folder for p in plans])
        _say_space(out, plans, check_space(plans))
        return
    refuse_unreachable(plans)
    _say_space(out, plans, check_space(plans))
    stopped = not _fetch(plans, quiet=quiet)
    if stopped:
        out.warn("interrupted; the same command continues")
        raise typer.Exit(INTERRUPTED)
    done = [{**_summary(p), "fetched_bytes": p.bytes_to_fetch} for p in plans]
    text = "\n".join(f"{p.asset.name} is in {p.folder}, complete and verified" for p in plans)
    out.result(done, text=text, ident=[p.folder for p in plans])


def _check_endpoint() -> None:
    """Raise ConfigError when HF_ENDPOINT is no address. Shows no password."""
    address = os.environ.get("HF_ENDPOINT")
    if address is None:
        return
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(
            f"HF_ENDPOINT is '{address.rpartition('@')[2]}'; expected an address such as "
            "https://huggingface.co, or unset it"
        )


def _list(out: Output) -> None:
    from vlarl.assets import manifest, store
    from vlarl.assets.sizes import readable

    rows = []
    for name in manifest.names():
        asset = manifest.get(name)
        folder = store.home() / name
        state = "incomplete" if store.draft_of(folder).is_dir() else "no"
        if folder.is_dir():
            state = "incomplete" if store.lacking(name, folder) else "yes"
        rows.append((asset, state))
    if out.json:
        data = [
            {
                **asset.model_dump(),
                "bytes": asset.num_bytes,
                "here": state,
                "presets": manifest.used_by(asset.name),
            }
            for asset, state in rows
        ]
        out.result(data, text="")
        return
    out.table(
        [
            {
                "name": asset.name,
                "here": state,
                "size": readable(asset.num_bytes),
                "licence": asset.licence or "unknown",
                "what": asset.about,
            }
            for asset, state in rows
        ],
        ident="name",
    )


def _describe(plan: Plan) -> str:
    from vlarl.assets.sizes import readable

    name, asset = plan.asset.name, plan.asset
    if plan.is_complete:
        return f"{name}: complete and verified in {plan.folder}, commit {plan.commit}"
    if plan.unreachable is not None:
        return (
            f"{name}: {plan.unreachable}; what follows is from the manifest of this version: "
            f"{asset.repo} at {plan.revision or asset.revision} -> {plan.folder}"
            + (f". {asset.note}" if asset.note else "")
        )
    return (
        f"{name}: {readable(plan.bytes_to_fetch)} of {readable(plan.num_bytes)} to fetch from "
        f"{asset.repo}, commit {plan.commit} -> {plan.folder}"
    )


def _say_space(out: Output, plans: list[Plan], space: tuple[int, int]) -> None:
    from vlarl.assets.sizes import readable

    needed, free = space
    if any(plan.bytes_to_fetch is None for plan in plans):
        known = f"{readable(needed)} and " if needed else ""
        out.hint(f"{known}files of unknown size to fetch, {readable(free)} free")
    elif needed:
        out.hint(f"{readable(needed)} to fetch, {readable(free)} free")


def _summary(plan: Plan) -> dict[str, object]:
    return {
        "name": plan.asset.name,
        "folder": plan.folder,
        "repo": plan.asset.repo,
        "commit": plan.commit,
        "bytes": plan.num_bytes,
    }


def _planned(plans: list[Plan]) -> list[dict[str, object]]:
    return [
        {
            **_summary(plan),
            "bytes_to_fetch": plan.bytes_to_fetch,
            "complete": plan.is_complete,
            "unreachable": plan.unreachable,
            "files": [
                {"path": f.path, "bytes": f.size, "have_bytes": f.have, "here": f.is_here}
                for f in plan.files
            ],
        }
        for plan in plans
    ]


def _table_of(plans: list[Plan]) -> str:
    """Every file of every plan; of a long list of small ones only how many they are."""
    from vlarl.assets.sizes import readable

    rows: list[dict[str, object]] = []
    for plan in plans:
        largest = sorted(plan.files, key=lambda f: (-(f.size or 0), f.path))
        for file in largest[:_SHOWN]:
            here = "yes" if file.is_here else readable(file.have) if file.have else "no"
            rows.append(
                {
                    "asset": plan.asset.name,
                    "file": file.path,
                    "size": readable(file.size),
                    "here": here,
                }
            )
        rest = largest[_SHOWN:]
        if rest:
            size = sum(f.size or 0 for f in rest)
            here = f"{sum(f.is_here for f in rest)} of {len(rest)}"
            rows.append(
                {
                    "asset": plan.asset.name,
                    "file": f"{len(rest)} smaller files",
                    "size": readable(size),
                    "here": here,
                }
            )
    return format_table(rows)


def _fetch(plans: list[Plan], *, quiet: bool) -> bool:
    """Carry the plans out, one after the other. False when somebody interrupted."""
    from vlarl.assets.download import download as carry_out

    from .transfer import Transfer

    todo = [p for p in plans if not p.is_complete]
    with stop_on_signals() as should_stop:
        for plan in todo:
            with Transfer(plan.asset.name, plan.bytes_to_fetch or 0, quiet=quiet) as transfer:
                if not carry_out(plan, on_bytes=transfer.add, should_stop=should_stop):
                    return False
    return True
