"""What the hub says and sends, in our words. The only module that talks to the network.

Files come over plain HTTP, which huggingface_hub resumes by Range requests; its whole-file
functions throw an unfinished file away when the process ends. Messages are written here and never
quote the client's: those carry signed addresses. HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and the
stored token are read by huggingface_hub.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers
from huggingface_hub.utils import logging as hub_logging

import vlarl
from vlarl.assets.record import HubFile
from vlarl.errors import DownloadFailed, MissingError, VlarlError

WAITS_S = (1.0, 2.0, 4.0)
"""Pauses before a failed request is sent again."""

_TIMEOUT_S = 10
_PASSING = (408, 429, 500, 502, 503, 504)


class Unreachable(DownloadFailed):
    """No answer: offline mode, no network, or a server that is not there."""


class Interrupted(DownloadFailed):
    """The hub failed in a way that may pass: the same request may work a little later."""


class NoRevision(DownloadFailed):
    """The repository is there, the revision is not."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit. files: by path."""

    commit: str
    files: dict[str, HubFile]


def endpoint() -> str:
    """The hub's address, or its mirror's, from HF_ENDPOINT; for messages, so without a password."""
    scheme, there, rest = constants.ENDPOINT.partition("://")
    return f"{scheme}{there}{rest.rpartition('@')[2]}"


def tell_waits(say: Callable[[str], None]) -> None:
    """Have pauses before another attempt said; the client's own words quote signed addresses."""

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            pause = re.search(r"(?:Retrying in|Waiting) ([\d.]+)s", record.getMessage())
            if pause is not None:
                say(f"{endpoint()} is busy or does not answer; asking again in {pause[1]} s")

    words = hub_logging.get_logger()
    words.handlers = [Waits()]


def listing(repo: str, revision: str) -> Listing:
    """The files of a repository at a revision: branch, tag or commit.

    Raises Unreachable, Interrupted, MissingError (a token is needed) or DownloadFailed.
    """
    api = HfApi(library_name="vlarl", library_version=vlarl.__version__)
    with _explained(repo, revision):
        commit = api.model_info(repo, revision=revision, timeout=_TIMEOUT_S).sha
        tree = list(api.list_repo_tree(repo, recursive=True, revision=commit))
    if commit is None:
        raise DownloadFailed(f"{endpoint()} does not say which commit '{revision}' of {repo} is")
    return Listing(commit, {f.path: _hub_file(repo, f) for f in tree if isinstance(f, RepoFile)})


def append(
    repo: str, commit: str, path: str, to: Path, *, size: int, on_bytes: Callable[[int], None]
) -> None:
    """Add to the file `to` what it still lacks of a file of `size` bytes.

    on_bytes: gets the number of bytes that came; negative when the server started anew. What it
    raises ends the transfer; the bytes so far are kept. Raises as `listing`.
    """
    url = hf_hub_url(repo, path, revision=commit)
    headers = build_hf_headers(library_name="vlarl", library_version=vlarl.__version__)
    with to.open("ab") as file, _explained(repo, commit, path):
        http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=headers,
            expected_size=size,
            displayed_filename=path,
            tqdm_class=cast("Any", functools.partial(_Counter, on_bytes)),
        )


class _Counter:
    """What http_get takes for a progress bar."""

    def __init__(self, on_bytes: Callable[[int], None], **_: object) -> None:
        self.update = on_bytes

    def __enter__(self) -> _Counter:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _hub_file(repo: str, file: RepoFile) -> HubFile:
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or "\\" in file.path:
        raise DownloadFailed(f"{repo} lists '{file.path}', which would leave the folder")
    if file.lfs is not None:
        return HubFile(size=file.lfs.size, sha256=file.lfs.sha256)
    return HubFile(size=file.size, git_sha1=file.blob_id)


@contextmanager
def _explained(repo: str, revision: str, path: str | None = None) -> Generator[None]:
    """Errors of the client as ours."""
    what = f"{path} of {repo}" if path else repo
    try:
        yield
    except OfflineModeIsEnabled:
        raise Unreachable("offline mode is on (HF_HUB_OFFLINE)") from None
    except HfHubHTTPError as error:
        raise _refused(error, what, repo, revision) from None
    except HTTPError as error:
        kind = type(error).__name__
        raise Unreachable(f"no answer from {endpoint()} about {what} ({kind})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DownloadFailed(
            f"{endpoint()} does not answer as a hub does ({type(error).__name__} on {what}); "
            "check HF_ENDPOINT and the proxy"
        ) from None
    except OSError as error:
        if error.errno is not None:
            raise  # the disk's, not the hub's
        raise Interrupted(f"{endpoint()} sent only a part of {what}") from None


def _refused(error: HfHubHTTPError, what: str, repo: str, revision: str) -> VlarlError:
    status = error.response.status_code
    hub = endpoint()
    if status in _PASSING:
        return Interrupted(f"{hub} answered {status} about {what}")
    if isinstance(error, RevisionNotFoundError):
        return NoRevision(f"{repo} has no revision '{revision}' at {hub}")
    gated = isinstance(error, GatedRepoError)
    if status in (401, 403) or gated:
        return _needs_token(status, gated, repo)
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return DownloadFailed(f"{what} is not at {hub} (404); was it renamed or taken down?")
    return DownloadFailed(f"{hub} answered {status} about {what}")


def _needs_token(status: int, gated: bool, repo: str) -> MissingError:
    """Without a token, the hub answers 401 for a repository that does not exist, too."""
    if get_token() is None:
        state = "no token is set; log in, or set HF_TOKEN"
    else:
        state = "the token that is set gives no access"
    about = f"its terms have to be accepted once at {endpoint()}/{repo}; " if gated else ""
    kind = "is gated" if gated else "is private, gated or not there"
    return MissingError(
        f"{repo} {kind} ({status} from {endpoint()}); {about}{state}", fix="hf auth login"
    )
