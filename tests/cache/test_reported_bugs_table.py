"""Which test answers which report: the rows on keys, isolation, memory, pins and concurrency of a list of what users of
other caches reported, by the numbers of public trackers. Where nothing here can go wrong so, the reason stands there.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = "tests/cache/test_reported_bugs.py"

ROWS: dict[str, tuple[str, ...]] = {
    "a salt was ignored (2878, 4825)": (f"{HERE}::test_similar_names_give_different_namespaces",),
    "an adapter was not in the key (vLLM 44250, 2960, 2961, 2962)": (
        f"{HERE}::test_similar_names_give_different_namespaces",
        f"{HERE}::test_adapters_of_one_name_and_other_weights_differ",
    ),
    "dtype, layout, revision were not in the key (4903)": (
        f"{HERE}::test_another_dtype_or_layout_over_one_store_is_a_miss",
    ),
    "sixteen bits of an image's hash (3301, 4086)": (f"{HERE}::test_a_hundred_thousand_images_have_distinct_keys",),
    "a builtin hash, cut short": (
        f"{HERE}::test_ids_that_collide_in_a_builtin_hash_stay_distinct",
        "tests/block/test_vectors.py::test_chains_equal_the_vectors",
    ),
    "ranks packed into eight bits": (f"{HERE}::test_ranks_of_any_world_size_have_distinct_addresses",),
    "code taken from the network (5128)": ("tests/cache/test_reported_bugs_table.py::test_no_module_executes_data",),
    "a read lease that ran out in a queue (4691, 4137, vLLM 35931)": (
        f"{HERE}::test_an_old_match_is_served_or_a_clean_miss",
    ),
    "an eviction thread that died (4817)": (f"{HERE}::test_stores_are_accepted_after_many_evictions",),
    "a timestamp for each hash ever seen": (f"{HERE}::test_memory_does_not_grow_with_past_requests",),
    "pages given away under a store (2706, 4612, 4822, vLLM 52360)": (
        f"{HERE}::test_later_page_writes_do_not_change_stored_blocks",
        "tests/cache/test_device.py::test_stores_and_loads_wait_for_the_engines_stream",
    ),
    "ranks that disagree after an eviction (1379, 1467, 1101)": (
        f"{HERE}::test_a_block_lost_by_one_rank_is_a_miss_for_all",
    ),
    "fewer tokens than were promised (910, 953, 1770, 2106, 1835, 2865, 4600)": (
        f"{HERE}::test_a_failed_read_is_reported_per_block",
    ),
    "crashes under concurrency (3536, 3406)": (f"{HERE}::test_evictions_lookups_and_loads_run_concurrently",),
    "types of ctypes that leak with each call (3767)": (
        "tests/cache/test_reported_bugs_table.py::test_no_function_creates_ctypes_types",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_names_an_existing_test(row: str) -> None:
    for named in ROWS[row]:
        path, _, name = named.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in names, f"{named} is not there"


def _sources() -> list[tuple[Path, ast.Module]]:
    paths = sorted((ROOT / "kvcache").rglob("*.py"))
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def test_no_module_executes_data() -> None:
    """Neither a format that can carry code is read anywhere, nor text run."""
    carries_code = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = []
    for path, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                found += [f"{path}: {name}" for name in names if name.partition(".")[0] in carries_code]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                found.append(f"{path}:{node.lineno}: {node.func.id}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                found.append(f"{path}:{node.lineno}: torch.load")
    assert found == []


def test_no_function_creates_ctypes_types() -> None:
    """`ctypes.c_char * n` and POINTER make types that are kept for ever."""
    found = []
    for path, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                found += [f"{path}:{node.lineno}" for s in (node.left, node.right) if "ctypes.c_" in ast.unparse(s)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("POINTER"):
                found.append(f"{path}:{node.lineno}")
    assert found == []
