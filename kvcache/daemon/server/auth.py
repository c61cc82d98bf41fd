"""Authentication: bearer tokens and the tenants file.

    ["acme"]
    tokens = ["sha256:2c26..."]               # from `kvcache token`, which prints the token itself once
    certificates = ["engine.acme.example"]    # names in a client's certificate, or sha256: and its fingerprint
    users = [1001]                            # user ids of processes on this host
    share = "copy"                            # bytes over the socket; "map": the client maps its tenant's slabs
    bandwidth = "2GiB"                        # bytes a second, both directions together
    operations = 5000                         # a second
    host_quota_bytes = "64GiB"                # at most; nvme_quota_bytes alike
    host_guaranteed_bytes = "8GiB"            # not taken by other tenants; nvme_guaranteed_bytes alike

Each table is one tenant. The tenant `*` is an operator: it may name any tenant, and sees all of them. Without the file
every client that the socket's mode admits is an operator. With it a client that matches no table is refused.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from kvcache.errors import ConfigError
from kvcache.settings.cache import Tenant as TenantQuota
from kvcache.settings.types import as_number, as_size

# Bearer tokens: 256 random bits, of which the file holds the SHA-256 only. A plain hash is enough, because no attacker
# can try 2^256 tokens; a password chosen by a person would need a slow hash.

BEARER_PREFIX = "kvcache_"
"""Prefix of every token, so that a scanner finds a token that was committed by mistake."""
_HASH = re.compile("sha256:[0-9a-f]{64}")


def new_token() -> str:
    return BEARER_PREFIX + secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """Return the form of a token that a file may hold: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()}"


def is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


class TokenTable:
    """Finds the owner of a token by its `token_hash`.

    Each lookup compares every known hash in full, so that its time reveals nothing.
    """

    def __init__(self, owners: Iterable[tuple[str, str]]) -> None:
        """`owners` are pairs of hash and owner."""
        self._owners = list(owners)

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, hash_: str) -> str | None:
        found = None
        for known, owner in self._owners:
            if compare_digest(known, hash_):
                found = owner
        return found


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPERATOR = "*"
MAX_TENANT_NAME_CHARS = 128


def _check_hash(text: str) -> str:
    if not is_hash(text):
        raise ValueError("expected sha256: and 64 hexadecimal digits, as `kvcache token` prints them; never a token")
    return text


TokenHash = Annotated[str, AfterValidator(_check_hash)]
OperationRate = Annotated[float, BeforeValidator(as_number), Field(gt=0, allow_inf_nan=False)]


class Tenant(TenantQuota):
    """One table of the tenants file, with the tenant's name."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_TENANT_NAME_CHARS)]
    tokens: tuple[TokenHash, ...] = ()
    certificates: tuple[str, ...] = ()
    users: tuple[Annotated[int, Field(ge=0)], ...] = ()
    share: Literal["map", "copy"] = "map"
    bandwidth: Annotated[int, BeforeValidator(as_size), Field(gt=0)] | None = None
    operations: OperationRate | None = None

    @property
    def operator(self) -> bool:
        return self.name == OPERATOR

    def may_act_as(self, name: str) -> bool:
        """Return whether this tenant may use namespaces of tenant `name`."""
        return self.operator or name == self.name


UNRESTRICTED_TENANT = Tenant(name=OPERATOR)
"""The tenant of every client where there is no tenants file."""


class Tenants:
    """Finds a tenant by credentials. ConfigError where two tenants have one in common."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self.by_name: Mapping[str, Tenant] = {tenant.name: tenant for tenant in tenants}
        each = self.by_name.values()
        self._tokens = TokenTable(
            _unique_owners("tokens", ((hash_, t.name) for t in each for hash_ in t.tokens)).items()
        )
        self._users = _unique_owners("users", ((user, t.name) for t in each for user in t.users))
        self._certificates = _unique_owners("certificates", ((name, t.name) for t in each for name in t.certificates))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Tenants:
        """Read the file; ConfigError in one line where it is invalid or world-writable. The error contains no hash."""
        setting = f"daemon.tenants_file = {os.fspath(path)!r}"
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                tables = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"{setting}: {error.strerror or error}; give the path of a TOML file") from None
        except ValueError as error:
            raise ConfigError(f"{setting}: not TOML: {error}") from None
        if mode & stat.S_IWOTH:
            raise ConfigError(f"{setting}: any user may write to it; run chmod o-w")
        return cls(_tenant(setting, name, table) for name, table in tables.items())

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    @property
    def certificates(self) -> int:
        return len(self._certificates)

    def by_token(self, token: str) -> Tenant | None:
        return self.by_hash(token_hash(token))

    def by_hash(self, hash_: str) -> Tenant | None:
        owner = self._tokens.owner(hash_)
        return None if owner is None else self.by_name[owner]

    def by_user(self, user: int) -> Tenant | None:
        return self.by_name.get(self._users.get(user, ""))

    def by_certificate(self, names: Iterable[str]) -> Tenant | None:
        """Return the tenant of a verified certificate.

        Args:
            names: Names in the certificate, and its fingerprint.

        Returns:
            None where no tenant has them, or several tenants do.
        """
        owners = {self._certificates[name] for name in names if name in self._certificates}
        return self.by_name[owners.pop()] if len(owners) == 1 else None


def _tenant(setting: str, name: str, table: Any) -> Tenant:
    if not isinstance(table, dict):
        raise ConfigError(f"{setting}: {name!r} is not a table; expected [{name!r}] with credentials below it")
    try:
        return TypeAdapter(Tenant).validate_python({**table, "name": name})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{setting}: {name!r}: {field}: {first['msg'].removeprefix('Value error, ')}") from None
    except ConfigError as error:
        raise ConfigError(f"{setting}: {name!r}: {error}") from None


def _unique_owners(what: str, owners: Iterable[tuple[Any, str]]) -> dict[Any, str]:
    found: dict[Any, str] = {}
    for identity, owner in owners:
        if found.setdefault(identity, owner) != owner:
            raise ConfigError(f"daemon.tenants_file: {owner!r} and {found[identity]!r} share one of `{what}`")
    return found
