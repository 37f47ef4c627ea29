from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import tuning
from pallas_kernels.tuning import DecodeConfig, Entry, PrefillConfig, TuningTable, WriteConfig

H200 = "NVIDIA H200"
LLAMA: dict[str, Any] = {
    "head_dim": 128,
    "value_dim": 128,
    "group": 4,
    "kv_heads": 8,
    "block_size": 16,
    "kv_dtype": "bfloat16",
    "batch": 64,
    "context": 8192,
}
CONFIG = {"block_kv": 32, "num_warps": 2, "num_stages": 4, "splits": 4}
RAW: dict[str, Any] = {
    "kernel": "decode",
    "device": H200,
    "head_dim": 128,
    "kv_dtype": "bfloat16",
    "config": CONFIG,
}


def decode(
    device: str = H200, *, q_dtype: str = "bfloat16", table: TuningTable | None = None, **sizes: Any
) -> DecodeConfig:
    return tuning.decode_config(device, q_dtype=q_dtype, table=table, **(LLAMA | sizes))


def entry(splits: int, **key: Any) -> Entry:
    """An entry that can be told from others by its splits."""
    return Entry(
        **({"kernel": "decode", "device": H200, "head_dim": 128, "kv_dtype": "bfloat16"} | key),
        config=DecodeConfig(splits=splits),
    )


def table_of(*entries: Entry) -> TuningTable:
    return TuningTable(entries)


def written(tmp_path: Path, *entries: Any, **document: Any) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"schema": 1, "entries": list(entries)} | document))
    return path


# ---------------------------------------------------------------------------- which entry


def test_the_nearest_bucket_at_or_above_serves() -> None:
    table = table_of(
        entry(1, batch=256), entry(2, batch=64), entry(4, batch=16), entry(8), entry(16, batch=512)
    )
    for batch, splits in ((1, 4), (16, 4), (17, 2), (64, 2), (65, 1), (257, 16), (513, 8)):
        assert decode(batch=batch, table=table).splits == splits


def test_group_counts_before_batch_and_batch_before_context() -> None:
    near_context = entry(1, group=8, batch=64, context=8192)
    near_batch = entry(2, group=4, batch=64, context=2**20)
    near_group = entry(4, group=4, batch=256, context=2**20)
    assert decode(table=table_of(near_context, near_batch, near_group)).splits == 2
    assert decode(table=table_of(near_context, near_group)).splits == 4


def test_an_entry_that_names_a_size_goes_before_one_for_any() -> None:
    table = table_of(entry(1), entry(2, block_size=16), entry(4, kv_heads=8))
    assert decode(table=table).splits == 4
    assert decode(table=table, kv_heads=4).splits == 2
    assert decode(table=table, kv_heads=4, block_size=64).splits == 1


@pytest.mark.parametrize(
    "other",
    [
        {"device": "NVIDIA H200 NVL"},
        {"head_dim": 64},
        {"kv_dtype": "int8"},
        {"kernel": "prefill"},
        {"backend": "pallas_mosaic"},
        {"group": 3},
        {"batch": 63},
        {"context": 8191},
        {"block_size": 32},
        {"kv_heads": 4},
        {"value_dim": 64},
    ],
    ids=str,
)
def test_an_entry_for_something_else_is_not_taken(other: dict[str, Any]) -> None:
    config = PrefillConfig() if other.get("kernel") == "prefill" else DecodeConfig(splits=32)
    mine = dataclasses.replace(entry(32), config=config, **other)
    assert decode(table=table_of(mine)) == decode()
    assert decode().splits != 32


def test_a_latent_cache_takes_no_entry_of_a_plain_one() -> None:
    plain = entry(1, head_dim=576, kv_dtype="bfloat16")
    latent = dataclasses.replace(plain, value_dim=512, config=DecodeConfig(splits=2))
    sizes = {"head_dim": 576, "value_dim": 512, "kv_heads": 1, "group": 128}
    assert decode(table=table_of(plain, latent), **sizes).splits == 2
    assert decode(table=table_of(plain), **sizes) == decode(**sizes)


def test_float16_takes_the_entries_of_bfloat16() -> None:
    table = table_of(entry(32))
    assert decode(table=table, kv_dtype="float16", q_dtype="float16").splits == 32


def test_entries_of_8_bit_caches_are_not_for_float32_queries() -> None:
    table = table_of(entry(32, kv_dtype="int8"))
    assert decode(table=table, kv_dtype="int8").splits == 32
    assert decode(table=table, kv_dtype="int8", q_dtype="float32").splits != 32


def test_splits_come_from_the_rule_where_an_entry_has_none(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "splits"}
    table = tuning.load_table(written(tmp_path, RAW | {"config": config, "ctas_per_sm": 4}))
    for batch, splits in ((64, 2), (16, 8), (1, 32), (256, 1)):
        assert decode(table=table, batch=batch).splits == splits
        assert decode(table=table, batch=batch).block_kv == CONFIG["block_kv"]


def test_prefill_and_write_find_their_own_entries() -> None:
    sizes = {name: value for name, value in LLAMA.items() if name != "batch"}
    key: dict[str, Any] = {"device": H200, "head_dim": 128, "kv_dtype": "bfloat16", "batch": 2048}
    table = table_of(
        Entry(kernel="prefill", config=PrefillConfig(block_rows=32), **key),
        Entry(kernel="write", config=WriteConfig(block_tokens=2), **key),
    )
    found = tuning.prefill_config(H200, q_dtype="bfloat16", tokens=2048, table=table, **sizes)
    assert found == PrefillConfig(block_rows=32)
    del sizes["group"], sizes["context"]
    assert tuning.write_config(H200, tokens=2048, table=table, **sizes).block_tokens == 2
    assert tuning.write_config(H200, tokens=2049, table=table, **sizes).block_tokens != 2


# ---------------------------------------------------------------------------- without an entry


@pytest.mark.parametrize(
    ("programs", "context", "ctas", "splits"),
    [
        (512, 8192, 3, 1),  # they fill the 396 places
        (256, 8192, 3, 2),
        (8, 32768, 3, 32),  # never more than 32
        (8, 4096, 3, 16),  # 256 tokens each
        (8, 511, 3, 1),
        (8, 512, 3, 2),
        (128, 8192, 2, 4),
    ],
)
def test_the_rule_for_splits(programs: int, context: int, ctas: int, splits: int) -> None:
    found = tuning.decode_splits(
        programs=programs, context=context, ctas_per_sm=ctas, min_split_tokens=256
    )
    assert found == splits


def test_programs_that_share_a_head_count_for_the_splits() -> None:
    sizes = {"head_dim": 576, "value_dim": 512, "kv_heads": 1, "batch": 32, "context": 2**17}
    alone = decode("another GPU", group=16, **sizes)
    shared = decode("another GPU", group=128, **sizes)
    assert alone.splits == 8 * shared.splits > 8


@given(
    head_dim=st.integers(16, 576),
    kv_dtype=st.sampled_from(["bfloat16", "float16", "float32", "int8", "float8_e4m3fn"]),
    group=st.integers(1, 128),
    kv_heads=st.integers(1, 64),
    batch=st.integers(1, 2048),
    context=st.integers(1, 2**20),
)
def test_an_unknown_device_gets_what_fits_small_ones(
    head_dim: int, kv_dtype: str, group: int, kv_heads: int, batch: int, context: int
) -> None:
    sizes: dict[str, Any] = {
        "head_dim": head_dim,
        "value_dim": head_dim,
        "group": group,
        "kv_heads": kv_heads,
        "block_size": 16,
        "kv_dtype": kv_dtype,
        "q_dtype": "bfloat16",
        "context": context,
    }
    config = tuning.decode_config("NVIDIA L4", batch=batch, **sizes)
    element = {"float32": 4, "int8": 1, "float8_e4m3fn": 1}.get(kv_dtype, 2)
    in_flight = (config.num_stages - 1) * config.block_kv * 2 * head_dim * element
    assert in_flight <= 99 * 1024 or config.block_kv == 16
    assert config.splits == 1 or config.splits * 256 <= context
    prefill = tuning.prefill_config("NVIDIA L4", tokens=batch, **sizes)
    in_flight = (prefill.num_stages - 1) * prefill.block_kv * 2 * head_dim * element
    assert in_flight <= 99 * 1024 or prefill.block_kv == 16


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 576])
def test_float32_queries_of_8_bit_caches_get_what_float32_caches_do(
    head_dim: int, kv_dtype: str
) -> None:
    sizes: dict[str, Any] = {
        "head_dim": head_dim,
        "value_dim": min(head_dim, 512),
        "group": 2,
        "kv_heads": 8,
        "block_size": 16,
        "q_dtype": "float32",
        "context": 8192,
    }
    for device in ("NVIDIA L4", "NVIDIA H200"):
        eight = tuning.decode_config(device, batch=1024, kv_dtype=kv_dtype, **sizes)
        assert eight == tuning.decode_config("L4", batch=1024, kv_dtype="float32", **sizes)
        chunk = tuning.prefill_config(device, tokens=2048, kv_dtype=kv_dtype, **sizes)
        assert chunk == tuning.prefill_config("L4", tokens=2048, kv_dtype="float32", **sizes)


@pytest.mark.parametrize(
    "device", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA GH200 480GB"]
)
def test_devices_with_the_same_chip_take_the_entries_of_the_h200(device: str) -> None:
    own = entry(16, device=device)
    assert decode(device, table=table_of(entry(32))).splits == 32
    assert decode(device, table=table_of(entry(32), own)).splits == 16
    for other in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA GB200", "AMD MI300X"):
        assert decode(other, table=table_of(entry(32))).splits != 32


def test_a_table_of_ones_own_goes_before_the_packages() -> None:
    shipped = decode()
    assert decode(table=table_of(entry(16, device="other"))) == shipped
    assert decode(table=table_of(entry(16))).splits == 16


# ---------------------------------------------------------------------------- files


def test_the_packages_table_is_read_once_and_is_as_it_would_be_written(tmp_path: Path) -> None:
    table = tuning.builtin_table()
    assert tuning.builtin_table() is table
    kernels = {one.kernel for one in table.entries if one.device == H200}
    assert kernels == {"decode", "prefill", "write"}
    tuning.write_table(table.entries, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == tuning.TABLE_PATH.read_text()


def test_the_rule_has_the_programs_a_multiprocessor_holds() -> None:
    for one in tuning.builtin_table().entries:
        assert not one.splits_from_rule or one.ctas_per_sm is not None, one


entries = st.builds(
    Entry,
    kernel=st.just("decode"),
    device=st.text(min_size=1),
    head_dim=st.integers(1, 576),
    kv_dtype=st.sampled_from(["bfloat16", "float32", "int8", "float8_e4m3fn"]),
    config=st.builds(
        DecodeConfig,
        block_kv=st.sampled_from([16, 32, 128]),
        num_warps=st.sampled_from([2, 8]),
        num_stages=st.integers(1, 7),
        carry_pages=st.booleans(),
        splits=st.just(8),  # what a file without splits stands for
    ),
    backend=st.sampled_from(["pallas_triton", "pallas_mosaic"]),
    value_dim=st.none() | st.integers(1, 512),
    kv_heads=st.none() | st.integers(1, 64),
    block_size=st.none() | st.sampled_from([16, 128]),
    group=st.none() | st.integers(1, 128),
    batch=st.none() | st.integers(1, 512),
    context=st.none() | st.integers(1, 2**17),
    splits_from_rule=st.booleans(),
    ctas_per_sm=st.none() | st.integers(1, 16),
    note=st.text(),
)


@given(st.lists(entries, unique_by=lambda one: one.key, max_size=4))
def test_what_is_written_is_read_back(tmp_path_factory: Any, listed: list[Entry]) -> None:
    path = tmp_path_factory.mktemp("table") / "table.json"
    tuning.write_table(listed, path)
    assert tuning.load_table(path) == TuningTable(tuple(listed))


def test_two_entries_for_one_thing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine.json', entry 1 is for the same as entry 0"):
        tuning.load_table(written(tmp_path, RAW, RAW | {"note": "again"}))
    with pytest.raises(ValueError, match="is for the same as"):
        tuning.write_table([entry(1), entry(2)], tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head": 128}, "entry 1: head is no field; there are backend, batch"),
        ({"head_dim": 0}, "entry 1: head_dim is 0, but must be a whole number from 1"),
        ({"head_dim": "128"}, "entry 1: head_dim is '128'"),
        ({"head_dim": True}, "entry 1: head_dim is True"),
        ({"block_size": 24}, "entry 1: block_size is 24, but must be a power of two"),
        ({"batch": -1}, "entry 1: batch is -1"),
        ({"group": 1.5}, "entry 1: group is 1.5"),
        ({"kernel": "encode"}, "entry 1: kernel is 'encode', but must be one of decode, prefill"),
        ({"kernel": []}, "entry 1: kernel is []"),
        ({"kv_dtype": "fp8"}, "entry 1: kv_dtype is 'fp8', but must be one of bfloat16"),
        ({"backend": "cuda"}, "entry 1: backend is 'cuda'"),
        ({"device": ""}, "entry 1: device is ''"),
        ({"note": 5}, "entry 1: note is 5"),
        ({"splits_from_rule": True}, "entry 1: splits_from_rule is no field"),
        ({"config": None}, "entry 1: config is None"),
        ({"config": CONFIG | {"warps": 4}}, "entry 1: config.warps is no field"),
        ({"config": CONFIG | {"block_kv": 48}}, "entry 1: config.block_kv is 48, but must be a"),
        ({"config": CONFIG | {"num_warps": 3}}, "entry 1: config.num_warps is 3"),
        ({"config": CONFIG | {"num_stages": 0}}, "entry 1: config.num_stages is 0"),
        ({"config": CONFIG | {"splits": 64}}, "entry 1: config.splits is 64"),
        ({"config": CONFIG | {"carry_pages": 1}}, "entry 1: config.carry_pages is 1"),
        ({"kernel": "write"}, "entry 1: config.block_kv is no field"),
    ],
    ids=str,
)
def test_a_bad_entry_is_named_with_its_field(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = written(tmp_path, RAW, {**RAW, "batch": 1, **change})
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        tuning.load_table(path)
    assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize("name", ["kernel", "device", "head_dim", "kv_dtype", "config"])
def test_an_entry_without_a_needed_field_is_refused(tmp_path: Path, name: str) -> None:
    raw = {key: value for key, value in RAW.items() if key != name}
    with pytest.raises(ValueError, match=f"entry 0: {name} is missing"):
        tuning.load_table(written(tmp_path, raw))


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for text, said in (
        ("{", "is no JSON"),
        ("[]", "must be an object"),
        ('{"entries": []}', "must be an object"),
        ('{"schema": 2, "entries": []}', "has schema 2, but this version reads 1"),
        ('{"schema": 1, "entries": {}}', '"entries" must be a list'),
        ('{"schema": 1, "entries": [3]}', "entry 0: it is 3"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            tuning.load_table(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is no JSON"):
        tuning.load_table(path)


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda: PrefillConfig(block_rows=8), "block_rows"),
        (lambda: PrefillConfig(block_kv=65), "block_kv"),
        (lambda: WriteConfig(block_tokens=3), "block_tokens"),
        (lambda: DecodeConfig(min_split_tokens=0), "min_split_tokens"),
        (lambda: DecodeConfig(num_stages=True), "num_stages"),
    ],
)
def test_configs_refuse_what_cannot_be_compiled(made: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is "):
        made()
