"""Who comes in as whom: the tenants file, tokens, users; and that a tenant reaches nothing but its own."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache
from kvcache.block.chain import bind_signatures, bind_signatures_reference
from kvcache.daemon.server.auth import BEARER_PREFIX, Tenant, Tenants, TokenTable, new_token, token_hash
from kvcache.daemon.server.control import pin
from kvcache.daemon.server.report import Report
from kvcache.errors import AccessError, ConfigError
from kvcache.index.block_run import BlockRun
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon

ACME, BETA, ROOT = (f"{BEARER_PREFIX}{name}-{'x' * 32}" for name in ("acme", "beta", "root"))


def written(path: Path, **tables: dict[str, Any]) -> Path:
    """A tenants file."""
    lines = []
    for name, fields in tables.items():
        lines += [f"[{json.dumps('*' if name == 'operator' else name)}]"]
        lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
    path.write_text("\n".join(lines))
    return path


def everybody(path: Path, **more: dict[str, Any]) -> Path:
    of = {"acme": ACME, "beta": BETA, "operator": ROOT}
    return written(path, **{name: {"tokens": [token_hash(t)], **more.get(name, {})} for name, t in of.items()})


@pytest.fixture
def shared(make_in_process: Callable[..., InProcessDaemon], tmp_path: Path) -> InProcessDaemon:
    return make_in_process(daemon__tenants_file=str(everybody(tmp_path / "tenants")))


def came_in(in_process: InProcessDaemon, token: str, tmp_path: Path, **more: Any) -> Any:
    """A client that shows this token."""
    file = tmp_path / f"token-{token_hash(token)[7:15]}"
    file.write_text(f"{token}\n")
    return in_process.open(token_file=str(file), **more)


class TestFile:
    def test_a_tenant_is_found_by_its_credentials(self, tmp_path: Path) -> None:
        path = written(
            tmp_path / "t",
            acme={"tokens": [token_hash("a"), token_hash("b")], "users": [7], "bandwidth": "2MiB", "operations": 5},
            beta={"certificates": ["beta.example", f"sha256:{'0' * 64}"], "share": "copy"},
        )
        tenants = Tenants.read(path)
        assert (tenants.tokens, tenants.certificates) == (2, 2)
        acme, beta = tenants.by_name["acme"], tenants.by_name["beta"]
        assert (acme.bandwidth, acme.operations, acme.share, beta.share) == (2 << 20, 5, "map", "copy")
        assert tenants.by_token("a") is tenants.by_token("b") is tenants.by_user(7) is acme
        assert tenants.by_certificate(["other.example", "beta.example"]) is beta
        assert tenants.by_token("c") is tenants.by_user(8) is tenants.by_certificate([]) is None
        assert acme.may_act_as("acme")
        assert not acme.may_act_as("beta")
        assert Tenant(name="*").may_act_as("beta")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("acme = 1", "not a table"),
            ("[acme]\nsecret = 1", "secret"),
            ('[acme]\ntokens = ["kvcache_abc"]', "never a token"),
            ('[acme]\nshare = "all"', "share"),
            ("[acme]\noperations = 0", "operations"),
            ("[acme]\noperations = true", "operations"),
            ('[acme]\nbandwidth = "fast"', "bandwidth"),
            ("[acme]\nusers = [-1]", "users"),
            ("[acme]\nusers = [1]\n[beta]\nusers = [1]", "share one of"),
            ('[""]\nusers = [1]', "name"),
            ("[acme", "not TOML"),
        ],
    )
    def test_an_invalid_file_is_refused_in_one_line(self, tmp_path: Path, text: str, said: str) -> None:
        path = tmp_path / "t"
        path.write_text(text)
        with pytest.raises(ConfigError, match=said) as caught:
            Tenants.read(path)
        assert "kvcache_abc" not in str(caught.value), "a token is said"

    def test_the_file_must_exist_and_be_private(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            Tenants.read(tmp_path / "none")
        path = written(tmp_path / "t", acme={"users": [1]})
        path.chmod(0o666)
        with pytest.raises(ConfigError, match="chmod o-w"):
            Tenants.read(path)

    @given(st.lists(st.text(min_size=1), max_size=5, unique=True), st.text())
    def test_tokens_are_a_dict_of_hashes(self, known: list[str], asked: str) -> None:
        plain = {token: f"of {i}" for i, token in enumerate(known)}
        tokens = TokenTable((token_hash(token), owner) for token, owner in plain.items())
        for token in (*known, asked):
            assert tokens.owner(token_hash(token)) == plain.get(token)

    def test_new_tokens_are_unique(self) -> None:
        made = {new_token() for _ in range(100)}
        assert len(made) == 100
        assert all(token.startswith(BEARER_PREFIX) and len(token) > 40 for token in made)


class TestDoor:
    def test_a_token_selects_the_tenant(self, shared: InProcessDaemon, tmp_path: Path) -> None:
        acme = came_in(shared, ACME, tmp_path)
        assert bound_to(acme).namespace.tenant == bound_to(acme, tenant="acme").namespace.tenant == "acme"
        assert bound_to(acme).id == bound_to(acme, tenant="acme").id
        with pytest.raises(AccessError, match="'beta'"):
            bound_to(acme, tenant="beta")
        assert bound_to(came_in(shared, ROOT, tmp_path), tenant="beta").namespace.tenant == "beta"

    def test_an_unknown_token_is_refused(
        self, shared: InProcessDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(AccessError, match="user"):
            shared.open()
        with pytest.raises(AccessError, match="no tenant has this token"):
            came_in(shared, f"{ACME}x", tmp_path)
        with pytest.raises(AccessError, match="token_file"):
            shared.open(token_file=str(tmp_path / "none"))
        (tmp_path / "hash").write_text(token_hash(ACME))
        with pytest.raises(ConfigError, match="one token"):
            shared.open(token_file=str(tmp_path / "hash"))
        monkeypatch.setenv("KVCACHE_TOKEN", BETA)
        assert bound_to(shared.open()).namespace.tenant == "beta"

    def test_a_local_user_is_identified_by_the_kernel(
        self, make_in_process: Callable[..., InProcessDaemon], tmp_path: Path
    ) -> None:
        path = written(tmp_path / "t", mine={"users": [os.getuid()]}, other={"users": [os.getuid() + 1]})
        assert bound_to(make_in_process(daemon__tenants_file=str(path)).open()).namespace.tenant == "mine"


class TestApart:
    def test_each_tenant_finds_only_its_own_blocks(self, shared: InProcessDaemon, tmp_path: Path) -> None:
        acme, beta, root = (bound_to(came_in(shared, t, tmp_path)) for t in (ACME, BETA, ROOT))
        tokens = list(range(16))
        mine = store(acme, tokens, 1)
        assert load(acme, tokens) == mine
        assert load(beta, tokens) == []
        theirs = store(beta, tokens, 2)
        assert (load(acme, tokens), load(beta, tokens)) == (mine, theirs)
        assert load(root, tokens) == [], "an operator's own namespace is another one"
        assert load(bound_to(came_in(shared, ROOT, tmp_path), tenant="acme"), tokens) == mine

    def test_client_reports_cannot_name_anothers_blocks(self, shared: InProcessDaemon, tmp_path: Path) -> None:
        """A client that knows all of another tenant's namespace, and gives that one's very signatures as its own: it
        neither finds the blocks, nor sees that there are any by not being able to store its own."""
        acme, beta = (bound_to(came_in(shared, token, tmp_path)) for token in (ACME, BETA))
        tokens = list(range(16))
        mine = store(acme, tokens, 1)
        engine, ids = Engine(LAYOUT), list(range(4))
        engine.fill(2, ids)
        theirs = [engine.block(i) for i in ids]
        for _ in range(2):
            with acme.request() as known, beta.request() as r:
                known.match(tokens)
                r._chain.packed = known._chain.packed
                with beta.cache.connected() as connection:
                    number = r.number(connection, resend=False)
                    found = connection.call("match", request=number, signatures=known._chain.packed)
                if found["blocks"]:  # his own, the second time
                    r.load(4, engine.described, engine.ids(ids)).wait(60)
                    assert [engine.block(i) for i in ids] == theirs
                else:
                    assert found["reason"] == "cold"
                    assert r.store(engine.described, engine.ids(ids)).wait(60)
                    assert r.match().blocks == 4, "it can tell that somebody has them"
        assert load(acme, tokens) == mine

    def test_keys_are_checked_before_the_index_is_asked(
        self, shared: InProcessDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[bytes] = []
        index = shared.cache.index
        tier_masks, lookup = index.tier_masks, index.lookup

        def watched_masks(run: BlockRun) -> Any:
            seen.append(bytes(run.signatures))
            return tier_masks(run)

        class Watched:
            def __init__(self, *given: Any) -> None:
                self._own = lookup(*given)

            def match(self, packed: bytes) -> None:
                seen.append(bytes(packed))
                self._own.match(packed)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._own, name)

        monkeypatch.setattr(index, "tier_masks", watched_masks)
        monkeypatch.setattr(index, "lookup", Watched)
        acme = bound_to(came_in(shared, ACME, tmp_path))
        tokens = list(range(16))
        store(acme, tokens, 1)
        with acme.request() as r:
            r.match(tokens[:8])
            said = r.signatures
            r.extend(tokens[8:])
            assert r.match().blocks == 4
            known = bind_signatures(acme.id, b"".join(r.signatures))
        assert seen
        assert all(signatures in known for signatures in seen if signatures)
        assert not any(one in signatures for one in said for signatures in seen)

    @given(st.binary(min_size=32, max_size=32), st.lists(st.binary(min_size=32, max_size=32)))
    def test_native_key_derivation_equals_the_reference(self, space: bytes, signatures: list[bytes]) -> None:
        assert bind_signatures(space, b"".join(signatures)) == bind_signatures_reference(space, b"".join(signatures))

    def test_a_tenants_statistics_show_no_other_tenant(self, shared: InProcessDaemon, tmp_path: Path) -> None:
        acme, beta, root = (came_in(shared, token, tmp_path) for token in (ACME, BETA, ROOT))
        store(bound_to(acme), list(range(16)), 1)
        shared.cache.namespace_usage.take(anew=True)
        assert acme.stats()["tiers"]["host"]["records"] == 4
        assert beta.stats()["tiers"] == {}
        assert root.stats()["tiers"]["host"]["records"] == 4
        assert "operator" in acme.check()[0]
        assert root.check() == []
        assert bound_to(beta).clear() == 0
        assert bound_to(acme).clear() == 4

    def test_explanations_reveal_nothing_of_other_tenants(self, shared: InProcessDaemon, tmp_path: Path) -> None:
        """A decoy shares the first block with a guess of another tenant's prompt."""
        acme, beta = (bound_to(came_in(shared, token, tmp_path)) for token in (ACME, BETA))
        said = []
        for first, kept in ((100, True), (200, False)):
            guess = list(range(first, first + 16))
            decoy = [*guess[:4], *range(900 + first, 912 + first)]
            for handle, tokens in ((acme, decoy), (beta, guess)) if kept else ((acme, decoy),):
                assert load(handle, tokens) == []
                store(handle, tokens, 1)
            with acme.request(id=f"guess-{kept}") as r:
                before = r.match(guess)
                r.admit()
                after = r.match()
            said.append((before.blocks, before.reason, after.blocks, after.reason))
        assert said[0] == said[1] == (1, "diverged", 1, "diverged")

    def test_an_operator_can_look_up_prompts_by_tokens(self, shared: InProcessDaemon, tmp_path: Path) -> None:
        acme = bound_to(came_in(shared, ACME, tmp_path))
        store(acme, list(range(16)), 1)
        ids = array("I", range(20)).tobytes()
        for tenant in (None, "acme"):
            (story,) = Report(shared.cache, tenant).explain({"ids": ids})
            assert (story["blocks"], story["found_blocks"]) == (5, 4)
        assert pin(shared.cache, {"ids": ids, "seconds": 60})["made"]["by_tier"] == {"host": 16}

    def test_requests_are_joined_within_a_tenant(self, shared: InProcessDaemon, tmp_path: Path) -> None:
        acme, beta = (bound_to(came_in(shared, token, tmp_path)) for token in (ACME, BETA))
        again = bound_to(came_in(shared, ACME, tmp_path))
        with acme.request(id="r") as r:
            r.match(list(range(16)))
            with again.join("r") as joined:
                assert len(joined.signatures) == 4
            with pytest.raises(kvcache.RequestError):
                beta.join("r")
