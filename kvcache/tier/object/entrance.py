"""The way from settings to a store: Amazon's, Google's, Microsoft's, a directory. Asks nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from kvcache.errors import ConfigError

RETRIES = 3
_EXPECTED = "expected s3://BUCKET, gs://BUCKET, az://ACCOUNT/CONTAINER or file:///DIRECTORY"


def _options(file: str) -> dict[str, str]:
    """Of a file with `name = value` a line, which may hold secrets; nothing of it stands in an error."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"object.credentials_file = {file!r}: {type(error).__name__}; expected a file") from None
    found = {}
    for line in (line.strip() for line in lines):
        name, equals, value = line.partition("=")
        if line and not line.startswith("#"):
            if not equals:
                raise ConfigError(f"object.credentials_file = {file!r}: expected `name = value` a line")
            found[name.strip().lower()] = value.strip().strip("\"'")
    return found


def opened(url: str, *, endpoint: str, region: str, credentials_file: str, timeout_s: float) -> Any:
    """The store of a URL, of which nothing is asked yet. ConfigError where it is none."""
    try:
        from obstore.store import from_url
    except ModuleNotFoundError:
        raise ConfigError("object.enabled: needs obstore; pip install 'kvcache-tiers[object]'") from None
    parts = urlsplit(url)
    config: dict[str, Any] = _options(credentials_file) if credentials_file else {}
    if "@" in parts.netloc or parts.query:
        raise ConfigError("object.url: holds credentials; give them in object.credentials_file or the environment")
    if not parts.scheme:
        raise ConfigError(f"object.url = {url!r}: {_EXPECTED}")
    try:
        if parts.scheme == "file":
            return from_url(url, mkdir=True, automatic_cleanup=True)
        if parts.scheme == "memory":
            return from_url(url)
        named = _container(parts) if parts.scheme == "az" else {}
        if parts.scheme == "s3":  # which has no other way to move an object where nothing is
            config.setdefault("copy_if_not_exists", "multipart")
        config |= named
        config |= {"base_url" if parts.scheme == "gs" else "endpoint": endpoint} if endpoint else {}
        config |= {"region": region} if region else {}
        options = {"timeout": f"{timeout_s}s", "connect_timeout": f"{timeout_s}s"}
        if endpoint.startswith("http://"):
            options["allow_http"] = True  # type: ignore[assignment]  # a table of both
        retries = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=timeout_s),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
        }
        make = cast(Callable[..., Any], from_url)
        where = f"az://{named['container_name']}" if named else url
        return make(where, config=config, client_options=options, retry_config=retries)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  whatever obstore makes of a URL or an option
        said = type(error).__name__ if credentials_file else str(error).splitlines()[0]
        raise ConfigError(f"object.url = {url!r}: {said}; {_EXPECTED}") from None


def _container(parts: SplitResult) -> dict[str, str]:
    """Of `az://ACCOUNT/CONTAINER`: obstore's own `az://` names a container and no account."""
    container = parts.path.strip("/")
    if not parts.netloc or not container or "/" in container:
        raise ConfigError(f"object.url = {parts.geturl()!r}: expected az://ACCOUNT/CONTAINER")
    return {"account_name": parts.netloc, "container_name": container}
