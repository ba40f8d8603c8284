"""The Hugging Face hub: which names mean it, and what went wrong when it did not answer."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from snugtune.errors import HubError, SnugtuneError

_HUB_ID = re.compile(r"\w[\w.-]{0,95}(/[\w.-]{1,96})?", re.ASCII)
_HTTP_LIBRARIES = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}
_WAYS_OUT = (
    "set HF_ENDPOINT to a mirror (in mainland China for instance HF_ENDPOINT=https://hf-mirror.com); "
    "or download it on another machine and name its folder here instead of the id; "
    "or fill the cache there, copy it to HF_HOME and set HF_HUB_OFFLINE=1"
)


def quiet_hub() -> None:
    """Ask the hub's libraries for no telemetry; call it before any of them is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def is_local(name_or_path: str | Path) -> bool:
    """Whether this means a place on this machine: it exists, or no hub id looks like it."""
    if isinstance(name_or_path, Path) or not _HUB_ID.fullmatch(name_or_path):
        return True
    return Path(name_or_path).exists()


@contextmanager
def hub_errors(name_or_path: str, *, kind: Literal["model", "data set"] = "model") -> Iterator[None]:
    """Turn what the hub's libraries raise inside the block into one error that shows the ways out.

    The hub is asked for a sign of life first. Without an answer the block may only use the cache, as
    the libraries would otherwise retry each file for half a minute. Something local is left alone.

    Args:
        name_or_path: The hub id or the path that the block loads.
        kind: What it is, for the message.

    Raises:
        HubError: The hub does not answer, the id is not there or not for this user, or HF_HUB_OFFLINE is
            set and the cache lacks it. All other errors pass through.
    """
    if is_local(name_or_path):
        yield
        return
    from huggingface_hub import constants

    silence = None if constants.is_offline_mode() else _silence(constants.ENDPOINT)
    with _only_cache() if silence else nullcontext():
        try:
            yield
        except SnugtuneError:
            raise
        except Exception as error:
            explained = _explain(error, silence)
            if explained is None:
                raise
            why, do = explained
            what = f"the {kind} {name_or_path!r} could not be fetched from the hub at {constants.ENDPOINT}"
            raise HubError(what, why=why, do=do) from error
    if silence:
        says = "%s does not answer (%s); %s was taken from the local cache"
        logging.getLogger(__name__).warning(says, constants.ENDPOINT, silence, name_or_path)


def _silence(endpoint: str) -> Exception | None:
    """Why the hub does not answer; None if it does, whatever the answer is."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the HTTP library behind the session differs between hub versions
        return error
    return None


@contextmanager
def _only_cache() -> Iterator[None]:
    """Keep the hub's libraries to their caches, as HF_HUB_OFFLINE does; they read it at import only."""
    import huggingface_hub.constants  # noqa: F401

    names = ("huggingface_hub.constants", "datasets.config")
    before = {name: sys.modules[name].HF_HUB_OFFLINE for name in names if name in sys.modules}
    for name in before:
        sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:  # one that was first imported inside has copied our True
            if name in sys.modules:
                sys.modules[name].HF_HUB_OFFLINE = before.get(name, False)  # type: ignore[attr-defined]


def _explain(error: Exception, silence: Exception | None) -> tuple[str, str] | None:
    """Why and what to do, for an error of the hub; None for any other error."""
    from huggingface_hub import constants, errors

    chain = list(_causes(error))

    def met(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    not_found = any(type(cause).__name__ == "DatasetNotFoundError" for cause in chain)
    if met(errors.GatedRepoError) or (not_found and "gated" in str(error)):
        page = f"its page at {constants.ENDPOINT}"
        return "its owner lets only chosen accounts in", f"ask for access on {page}, then run: hf auth login"
    if met(errors.RevisionNotFoundError) or (not_found and str(error).startswith("Revision")):
        return "it exists, but not in this revision", "check the revision: a branch, a tag or a commit"
    if not_found or met(errors.RepositoryNotFoundError, errors.DisabledRepoError, errors.HFValidationError):
        return (
            "no folder here has this name, and the hub shows nothing public under this id",
            "check the spelling (owner/name); for a private one run: hf auth login",
        )
    kinds = (
        "OfflineModeIsEnabled",
        "LocalEntryNotFoundError",
        "RevisionResolutionError",
    )  # the last since 2.0
    lost = met(*(getattr(errors, name) for name in kinds if hasattr(errors, name)))
    lost = lost or any(_is_connection_trouble(cause) for cause in chain)
    if silence or constants.is_offline_mode():
        # transformers says of a file that the cache lacks only that it is not there: OSError without a number
        if not lost and not (type(error) is OSError and error.errno is None):
            return None
        why = f"it does not answer ({silence})" if silence else "HF_HUB_OFFLINE is set"
        return f"{why}, and the cache {constants.HF_HOME} does not hold all of it", _WAYS_OUT
    missing_file = met(errors.EntryNotFoundError) and not met(errors.LocalEntryNotFoundError)
    if missing_file or not (lost or met(errors.HfHubHTTPError)):
        return None
    return f"the connection failed: {_first_line(chain[-1])}", _WAYS_OUT


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_connection_trouble(error: BaseException) -> bool:
    library = type(error).__module__.partition(".")[0]
    return library in _HTTP_LIBRARIES or type(error) is ConnectionError


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
