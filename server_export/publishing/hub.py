"""A published folder on its way to Hugging Face's hub, or to another that `HF_ENDPOINT` names.

The token comes from `HF_TOKEN` or `hf auth login`. It is sent to the hub, and neither shown nor written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prge.errors import PrgeError, shown

# Of the one question that tells whether the hub answers.
_SECONDS = 10.0
_TOKENS = "https://huggingface.co/settings/tokens"
_REMEDIES = {
    401: f"it doesn't take the token: make one that may write at {_TOKENS}, and set HF_TOKEN",
    403: f"the token may not write there: give a repository of yours, or a token that may, from {_TOKENS}",
    409: "it exists already: give another name, or --overwrite for a further commit to it",
}


@dataclass(frozen=True)
class Repository:
    """A repository `owner/name` that may be written, and whether it is there already."""

    name: str
    public: bool
    exists: bool
    token: str = field(repr=False)


def find_repository(name: str, public: bool, overwrite: bool) -> Repository:
    """Ask the hub for a repository before anything takes time.

    Args:
        name: `owner/name`.
        public: whether all may read it; one that exists stays as it is.
        overwrite: whether it may exist.

    Raises:
        PrgeError: there is no token, or it isn't taken; the name can't be one; the hub doesn't answer; the
            repository exists and may not, or all may read it though `public` is not given.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        if name.count("/") != 1:
            raise HFValidationError("the owner is missing")
    except HFValidationError as error:
        raise PrgeError(
            f"--push is {shown(name)}, which names no repository: {_first_line(error)}",
            remedy="give OWNER/NAME, the owner being your name on the hub or an organization's",
            code="hub-name",
        ) from None
    with _told(name, token := _usable(get_token() or "")):
        try:
            found = HfApi(token=token).model_info(name, timeout=_SECONDS)
        except HfHubHTTPError as error:
            if error.response.status_code != 404:
                raise
            return Repository(name, public, False, token)
    if not overwrite:
        raise PrgeError(f"{name} can't be pushed to", remedy=_REMEDIES[409], code="hub-exists")
    if not found.private and not public:
        raise PrgeError(
            f"{name} is there, and all may read it",
            remedy="give --public if they may this too",
            code="hub-public",
        )
    return Repository(name, public, True, token)


def push(folder: Path, repository: Repository) -> str:
    """Upload a folder, into a repository that is made if need be; returns its address.

    Raises:
        PrgeError: the hub refuses, or doesn't answer; the folder stays.
    """
    from huggingface_hub import HfApi

    api, name = HfApi(token=repository.token), repository.name
    with _told(name, repository.token, f"; {folder} is whole, the same with --overwrite tries again"):
        if not repository.exists:
            api.create_repo(name, private=not repository.public)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Published by prge")
    return f"{api.endpoint}/{name}"


def _usable(token: str) -> str:
    if not token:
        raise PrgeError(
            "--push needs a token of the hub, and there is none",
            remedy=f"make one that may write at {_TOKENS}, and set HF_TOKEN, or run `hf auth login`",
            code="hub-no-token",
        )
    if not re.fullmatch(r"[!-~]+", token):  # libraries would show it in what they raise
        raise PrgeError(
            "the token of the hub has characters that none has",
            remedy="set HF_TOKEN again",
            code="hub-token-unusable",
        )
    return token


@contextmanager
def _told(name: str, token: str, further: str = "") -> Iterator[None]:
    """Tell what the library raises inside as a PrgeError without the token."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise PrgeError(
            f"{name} can't be pushed to offline",
            remedy=f"unset HF_HUB_OFFLINE{further}",
            code="hub-offline",
        ) from None
    except HfHubHTTPError as error:
        code = error.response.status_code
        remedy = _REMEDIES.get(code, "look at the hub's own pages, or try again later")
        what = f"{name} can't be pushed to: the hub answers {code}: {_first_line(error)}"
        raise PrgeError(what.replace(token, "***"), remedy=f"{remedy}{further}", code=f"hub-{code}") from None
    except Exception as error:  # of whatever class: a traceback might show the token
        what = f"{name} can't be pushed to: {type(error).__name__}: {_first_line(error)}"
        where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise PrgeError(
            what.replace(token, "***"),
            remedy=f"check that {where} can be reached{further}",
            code="hub-unreachable",
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["it says nothing more"])[0]
