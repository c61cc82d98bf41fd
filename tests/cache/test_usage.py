"""Who used a cache and when: held against a plain dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.cache.usage import UsageLog


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


SPACES = st.sampled_from([bytes([i]) * 32 for i in range(4)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), SPACES),
        st.tuples(
            st.just("add"),
            SPACES,
            st.sampled_from(["", "planner", "critic"]),
            st.integers(0, 100),
            st.dictionaries(st.sampled_from(["host", "nvme"]), st.integers(1, 50)),
        ),
        st.tuples(st.just("forget"), SPACES),
    ),
    max_size=40,
)


@given(STEPS)
def test_usage_sums_tokens_and_last_uses(steps: list[tuple[object, ...]]) -> None:
    clock = Clock()
    uses = UsageLog(clock)
    spaces: dict[bytes, list[object]] = {}
    agents: dict[tuple[str, str], list[object]] = {}
    for step in steps:
        clock.time += 1
        if step[0] == "touch":
            uses.touch(step[1])
            spaces.setdefault(step[1], [0.0, 0, 0, {}])[0] = clock.time
        elif step[0] == "forget":
            uses.forget(step[1])
            spaces.pop(step[1], None)
        else:
            _, space, agent, asked, hits = step
            uses.add(space, "acme", agent, asked, hits)
            rows = [spaces.setdefault(space, [0.0, 0, 0, {}])]
            rows += [agents.setdefault(("acme", agent), [0.0, 0, 0, {}])] if agent else []
            for row in rows:
                row[0], row[1], row[2] = clock.time, row[1] + 1, row[2] + asked
                row[3] = {tier: row[3].get(tier, 0) + hits.get(tier, 0) for tier in {*row[3], *hits}}
    for told, expected in ((uses.namespaces(), spaces), (uses.agents(), agents)):
        assert {n: [u.last, u.requests, u.asked_tokens, u.hit_tokens] for n, u in told.items()} == expected


def test_the_least_recently_used_entry_is_dropped_first() -> None:
    clock = Clock()
    uses = UsageLog(clock, namespaces=2, agents=2)
    for space, agent in ((b"a", "1"), (b"b", "2"), (b"a", "1"), (b"c", "3")):
        clock.time += 1
        uses.add(space, "t", agent, 1, {})
    assert set(uses.namespaces()) == {b"a", b"c"}
    assert set(uses.agents()) == {("t", "1"), ("t", "3")}


def test_reported_usage_is_a_copy() -> None:
    uses = UsageLog(Clock())
    uses.add(b"a", "t", "", 16, {"host": 16})
    uses.namespaces()[b"a"].hit_tokens["host"] = 0
    assert uses.namespaces()[b"a"].hit_tokens == {"host": 16}
    assert uses.agents() == {}
