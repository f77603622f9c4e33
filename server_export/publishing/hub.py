"""Upload a published folder to Hugging Face's hub, or to the hub that `HF_ENDPOINT` names.

The token comes from `HF_TOKEN` or `hf auth login`. It is sent to the hub, and never printed or written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prge.errors import PrgeError, format_value

# Timeout of the first request, in seconds.
_SECONDS = 10.0
_TOKENS = "https://huggingface.co/settings/tokens"
_REMEDIES = {
    401: f"The hub rejects the token. Create one with write access at {_TOKENS}, and set HF_TOKEN.",
    403: f"The token has no write access. Use a repository of yours, or another token from {_TOKENS}.",
    409: "The repository exists. Give another name, or --overwrite to add a commit.",
}


@dataclass(frozen=True)
class Repository:
    """A repository `owner/name` that can be written, and whether it exists already."""

    name: str
    public: bool
    exists: bool
    token: str = field(repr=False)


def find_repository(name: str, public: bool, overwrite: bool) -> Repository:
    """Ask the hub for a repository, before anything else is done.

    Args:
        name: `owner/name`.
        public: whether everybody may read a new repository; an existing one stays as it is.
        overwrite: whether the repository may exist.

    Raises:
        PrgeError: there is no token, or the hub rejects it; the name is invalid; the hub doesn't answer; the
            repository exists without `overwrite`, or is public without `public`.
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
            f"--push is {format_value(name)}, which names no repository: {_first_line(error)}",
            remedy="Give OWNER/NAME, where OWNER is your name on the hub or an organization's.",
            code="hub-name",
        ) from None
    with _translated_errors(name, token := _usable(get_token() or "")):
        try:
            info = HfApi(token=token).model_info(name, timeout=_SECONDS)
        except HfHubHTTPError as error:
            if error.response.status_code != 404:
                raise
            return Repository(name, public, False, token)
    if not overwrite:
        raise PrgeError(f"Cannot push to {name}.", remedy=_REMEDIES[409], code="hub-exists")
    if not info.private and not public:
        raise PrgeError(
            f"{name} exists, and everybody can read it.",
            remedy="Give --public if everybody may read this folder too.",
            code="hub-public",
        )
    return Repository(name, public, True, token)


def push(folder: Path, repository: Repository) -> str:
    """Upload a folder to a repository, which is created if it doesn't exist, and return its URL.

    Raises:
        PrgeError: the hub refuses, or doesn't answer; the local folder stays.
    """
    from huggingface_hub import HfApi

    api, name = HfApi(token=repository.token), repository.name
    retry = f" {folder} is complete; run the same command with --overwrite to try again."
    with _translated_errors(name, repository.token, retry):
        if not repository.exists:
            api.create_repo(name, private=not repository.public)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Published by prge")
    return f"{api.endpoint}/{name}"


def _usable(token: str) -> str:
    """Return a token that can be sent; raises PrgeError for any other."""
    if not token:
        raise PrgeError(
            "--push needs a token of the hub, and there is none.",
            remedy=f"Create one with write access at {_TOKENS}, and set HF_TOKEN or run `hf auth login`.",
            code="hub-no-token",
        )
    if not re.fullmatch(r"[!-~]+", token):  # libraries would show it in their exceptions
        raise PrgeError(
            "The token of the hub has characters that no token has.",
            remedy="Set HF_TOKEN again.",
            code="hub-token-unusable",
        )
    return token


@contextmanager
def _translated_errors(name: str, token: str, further: str = "") -> Iterator[None]:
    """Turn exceptions of the library into PrgeErrors whose text lacks the token.

    Args:
        name: name of the repository.
        token: the token.
        further: added to the remedy.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise PrgeError(
            f"Cannot push to {name} because the hub is offline.",
            remedy=f"Unset HF_HUB_OFFLINE.{further}.",
            code="hub-offline",
        ) from None
    except HfHubHTTPError as error:
        code = error.response.status_code
        remedy = _REMEDIES.get(code, "See the status of the hub, or try again later.")
        what = f"Cannot push to {name}: the hub answers {code}: {_first_line(error)}"
        raise PrgeError(what.replace(token, "***"), remedy=f"{remedy}{further}", code=f"hub-{code}") from None
    except Exception as error:  # a traceback of any other exception might show the token
        what = f"Cannot push to {name}: {type(error).__name__}: {_first_line(error)}"
        where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise PrgeError(
            what.replace(token, "***"),
            remedy=f"Check that {where} can be reached.{further}.",
            code="hub-unreachable",
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no further message"])[0]
