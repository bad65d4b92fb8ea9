"""Settings: precedence, conversions, limits, and one clear line for everything else."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.serve.config.catalog import FIELDS_OF_ROLE, GROUPS, describe, flag_of
from kvflow.serve.config.kv_events import KvEvents
from kvflow.serve.config.settings import DEFAULT_PORTS, Role, Settings
from kvflow.serve.config.sources import ConfigError, resolve, resolve_other
from kvflow.serve.launch.process import PARENT_PID, READY_FD
from tests.shells import ROOT

MODEL = {"model_path": "m"}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvflow.toml"
    path.write_text(text)
    return str(path)


def test_flag_beats_environment_beats_role_table_beats_top_level_beats_default(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "page_size = 2\n[decode]\npage_size = 4\n")
    environment = {"KVFLOW_PAGE_SIZE": "8"}
    assert resolve("decode", MODEL, env={}).page_size == 16
    assert resolve("prefill", MODEL, env={}, config=path).page_size == 2
    assert resolve("decode", MODEL, env={}, config=path).page_size == 4
    assert resolve("decode", MODEL, env=environment, config=path).page_size == 8
    assert (
        resolve("decode", {**MODEL, "page_size": "32"}, env=environment, config=path).page_size
        == 32
    )


def test_the_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path, 'model_path = "from-file"\n')
    assert resolve("prefill", {}, env={"KVFLOW_CONFIG": path}).model_path == "from-file"


def test_familiar_names_are_aliases(tmp_path: Path) -> None:
    path = write(tmp_path, 'model = "m"\nbootstrap-port = 9000\n')
    settings = resolve("prefill", {}, env={"KVFLOW_TRANSFER_BACKEND": "mooncake"}, config=path)
    assert settings.model_path == "m"
    assert settings.disaggregation_bootstrap_port == 9000
    assert settings.disaggregation_transfer_backend == "mooncake"


def test_settings_of_other_roles_in_the_file_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 'model_path = "m"\nprefill_workers = 3\n[prefill]\nport = 1234\n')
    assert resolve("decode", {}, env={}, config=path).port == DEFAULT_PORTS["decode"]
    assert resolve("prefill", {}, env={}, config=path).port == 1234
    assert resolve("up", {}, env={}, config=path).prefill_workers == 3


@pytest.mark.parametrize("wrong", ["gpu", "cuda:", "cuda:one", "cuda:-1", ""])
def test_a_device_is_named_as_torch_names_it(wrong: str) -> None:
    assert [
        resolve("up", {"device": name}, env={}).device for name in ("auto", "cpu", "cuda", "cuda:3")
    ][3] == "cuda:3"
    with pytest.raises(ConfigError, match=f"--device: '{wrong}' is not auto, cpu, cuda or cuda:N"):
        resolve("decode", {**MODEL, "device": wrong}, env={})


@pytest.mark.parametrize(
    ("role", "name"), [("prefill", "tp"), ("decode", "tp"), ("up", "decode_tp")]
)
def test_shards_run_on_the_cpu_only(role: Role, name: str) -> None:
    assert getattr(resolve(role, {**MODEL, name: "2", "device": "cpu"}, env={}), name) == 2
    with pytest.raises(
        ConfigError, match=f"^{flag_of(name)} 2 with --device cuda:0: shards run on the CPU only"
    ):
        resolve(role, {**MODEL, name: "2", "device": "cuda:0"}, env={})


def test_lists_come_as_repeated_flags_commas_or_arrays(tmp_path: Path) -> None:
    path = write(tmp_path, 'prefill = ["http://a:1"]\ndecode = ["http://b:1", "http://b:2"]\n')
    assert resolve("router", {}, env={}, config=path).decode == ("http://b:1", "http://b:2")
    environment = {"KVFLOW_PREFILL": "http://a:1, http://a:2", "KVFLOW_DECODE": "http://b:1"}
    assert resolve("router", {}, env=environment).prefill == ("http://a:1", "http://a:2")


def test_booleans_are_words_in_the_environment() -> None:
    assert resolve("decode", MODEL, env={"KVFLOW_SGLANG_METRICS": "true"}).sglang_metrics is True


NO_EFFECT = "it has no effect; leave it out"
EVENTS = "prefix_cache=lru kv_events_config="
REFUSED = [
    ("prefill page_size=0", "--page-size: '0': expected int >= 1 and <= 65536"),
    ("prefill page_size=65537", "--page-size: '65537': expected int >= 1 and <= 65536"),
    ("prefill page_size=many", "--page-size: 'many': expected int, got str"),
    ("prefill KVFLOW_PAGE_SIZE=0", "environment KVFLOW_PAGE_SIZE: '0': expected int >= 1 and"),
    ("decode new_token_ratio=1.5", "--new-token-ratio: '1.5': expected float >= 0 and <= 1"),
    (
        "prefill decodes_per_address=0",
        "--decodes-per-address: '0': expected int >= 1 and <= 1048576",
    ),
    ("prefill rendezvous_s=0", "--rendezvous-s: '0': expected float > 0 and <= 3600"),
    ("prefill optimistic_prefill=-1", "--optimistic-prefill: '-1': expected int >= 0 and <= 1000"),
    ("prefill transfer_rate_limit=-1", "--transfer-rate-limit: '-1': expected int >= 0"),
    ("prefill port=70000", "--port: '70000': expected int >= 0 and <= 65535"),
    (
        "prefill control_port=65534 pp=2 tp=2",
        "--control-port: the ranks of this prefill take 65534 "
        "to 65537, the last port is 65535; choose a lower one",
    ),
    (
        "up worker_ports=65534 prefill_workers=2",
        "--worker-ports: the 3 workers take 65534 to 65536, the last port is 65535; choose a lower",
    ),
    (
        "up worker_ports=7999",
        "--worker-ports: the 2 workers take 7999 to 8000, and the router 8000 (--port); choose",
    ),
    ("decode tls_cert=c", "--tls-cert without --tls-key: HTTPS needs both files"),
    ("prefill tls_key=k", "--tls-key without --tls-cert: HTTPS needs both files"),
    ("prefill host=", "--host: '': expected str of length >= 1"),
    (
        "prefill dtype=int3",
        "--dtype: 'int3': expected one of 'auto', 'float32', 'bfloat16', 'float",
    ),
    (
        "prefill disaggregation_transfer_backend=pigeon",
        "'pigeon': expected one of 'local', 'mooncake', 'nixl', 'ascend', 'mori'",
    ),
    (
        "prefill disaggregation_mode=decode",
        "--disaggregation-mode decode does not match `kvflow prefill`; leave it out",
    ),
    (
        "decode kv_events_key_file=k",
        f"--kv-events-key-file k without --kv-events-config: {NO_EFFECT}",
    ),
    (
        "prefill prefix_cache=off kv_events_config={}",
        "--kv-events-config with --prefix-cache off: nothing is cached",
    ),
    (f"decode {EVENTS}{{", "--kv-events-config: Input data was truncated"),
    (
        f'decode {EVENTS}{{"publisher":"kafka"}}',
        "--kv-events-config: Invalid enum value 'kafka' - at `$.publisher`",
    ),
    (
        f'prefill {EVENTS}{{"endpoint":"tcp://*:99999"}}',
        "--kv-events-config: endpoint 'tcp://*:99999': the last port is 65535",
    ),
    (
        f'up {EVENTS}{{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}}',
        "--kv-events-config: 2 workers take ports 5557 to 5558 for endpoint, and 5558 to 5559 for "
        "replay_endpoint: choose two that are 2 apart",
    ),
    (
        f'up decode_workers=3 {EVENTS}{{"endpoint":"tcp://*:65533"}}',
        "--kv-events-config: endpoint 'tcp://*:65533': the last port is 65535, and number 3 would "
        "take 65536",
    ),
    (
        "prefill prefix_cache=off cache_host_bytes=4096",
        "--cache-host-bytes 4096 with --prefix-cache off: nothing is cached",
    ),
    (
        "decode mem_fraction=0.5 num_pages=8",
        "--mem-fraction 0.5 with --num-pages 8: each of them sizes the pool; leave one out",
    ),
    ("up mem_fraction=0.25 KVFLOW_POOL_BYTES=65536", "--mem-fraction 0.25 with --pool-bytes 65536"),
    ("up mem_fraction=1.5", "--mem-fraction: '1.5': expected float >= 0 and <= 1"),
    ("prefill prefix_cache=lru l3=file l3_dir=x", "--l3 file needs --cache-host-bytes"),
    ("decode prefix_cache=lru cache_host_bytes=65536 l3=file", "--l3 file needs --l3-dir"),
    (
        "decode prefix_cache=lru cache_host_bytes=65536 l3=mooncake",
        "--l3 mooncake needs --mooncake-master",
    ),
    (
        "prefill prefix_cache=off cache_state_bytes=5",
        f"--cache-state-bytes 5 without a prefix cache: {NO_EFFECT}",
    ),
    (
        "decode prefix_cache=lru cache_write_policy=write_back",
        f"--cache-write-policy write_back without --cache-host-bytes: {NO_EFFECT}",
    ),
    ("up KVFLOW_L3_DIR=x", f"--l3-dir x without --l3 file: {NO_EFFECT}"),
    (
        "up prefix_cache=lru cache_host_bytes=65536 l3=file l3_dir=x mooncake_master=a:1",
        f"--mooncake-master a:1 without --l3 mooncake: {NO_EFFECT}",
    ),
    ("up tokenizer_path=m", f"--tokenizer-path m without --kv-events-config: {NO_EFFECT}"),
    ("router", "router needs at least one --prefill URL and one --decode URL, or an"),
    ("router api_key=k", "or an --admin-api-key, with which workers join it"),
    ("router api_key=k admin_api_key=k", "--admin-api-key is the --api-key: every client would be"),
    (
        "router api_key=k tokenizer_path=m policy=round_robin",
        f"--tokenizer-path m without --policy cache_aware: {NO_EFFECT}",
    ),
    ("router api_key=k engine=sglang", "--engine: 'sglang': expected one of 'kvflow', 'vllm'"),
    ("router api_key=k legs=together", f"--legs together without --engine vllm: {NO_EFFECT}"),
    (
        "router api_key=k engine=vllm tokenizer_path=m",
        f"--tokenizer-path m without --engine kvflow: {NO_EFFECT}",
    ),
    (
        "router engine=vllm prefill=http://a,http://b decode=http://b",
        "'http://b' is given as --prefill and as --decode: a vLLM server is one of them",
    ),
    ("router tokenizer_path=/nowhere", "--tokenizer-path '/nowhere' does not exist"),
    (
        "router prefill=ftp://x decode=http://d",
        "--prefill: 'ftp://x' is not an http:// or https:// URL",
    ),
]
"""A role and what it is given, by flags or, in capitals, by the environment; what is said."""


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_a_bad_value_is_one_line_with_setting_source_and_limit(given: str, said: str) -> None:
    role, *words = given.split()
    pairs = [word.split("=", 1) for word in words]
    environment = {name: value for name, value in pairs if name.isupper()}
    flags: dict[str, object] = {} if role == "router" else dict(MODEL)
    for name, value in pairs:
        if name not in environment:
            flags[name] = tuple(value.split(",")) if name in ("prefill", "decode") else value
    with pytest.raises(ConfigError) as caught:
        resolve(cast(Role, role), flags, env=environment)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_no_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--model-path"):
        resolve("decode", {}, env={})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("pagesize = 1\n", "unknown setting 'pagesize'; did you mean page_size?"),
        ("page-sise = 1\n", "unknown setting 'page-sise'; did you mean page_size?"),
        ("qqqq = 1\n", "unknown setting 'qqqq'"),
        ("[decod]\npage_size = 1\n", "unknown setting 'decod'; did you mean decode?"),
        ("[decode]\nmodle = 1\n", "[decode] unknown setting 'modle'; did you mean model?"),
        (
            "[prefill]\npagesize = 1\n",
            "[prefill] unknown setting 'pagesize'; did you mean page_size?",
        ),
        (
            "[decode]\nprefill_workers = 1\n",
            "'prefill_workers' is not a setting of decode, but of up",
        ),
        (
            "[router]\npage_size = 1\n",
            "'page_size' is not a setting of router, but of prefill, decode, up",
        ),
        ("[decode]\npage_size = 0\n", "[decode] page_size: 0: expected int >= 1"),
        ("page_size = 1.5\n", "page_size: 1.5: expected int"),
        ("page_size = \n", "line 1"),
        ('page_size = "16x"\n', "page_size"),
    ],
)
def test_a_bad_file_is_one_line_with_its_path(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        resolve("decode", MODEL, env={}, config=path)
    assert path in str(caught.value)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        resolve("decode", MODEL, env={}, config="/nowhere/kvflow.toml")


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_a_key_is_never_shown(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, f"{name} = 12345\n")
    with pytest.raises(ConfigError) as caught:
        resolve("decode", MODEL, env={}, config=path)
    assert "12345" not in str(caught.value)


def test_every_setting_belongs_to_a_role_and_says_what_it_is() -> None:
    of_roles = {name for names in FIELDS_OF_ROLE.values() for name in names}
    assert of_roles == set(Settings.__struct_fields__)
    assert all(describe(name) for name in of_roles)


def test_every_setting_stands_in_one_group_of_the_help() -> None:
    grouped = sorted(name for names in GROUPS.values() for name in names)
    assert grouped == sorted(Settings.__struct_fields__)


@pytest.mark.parametrize("role", ["prefill", "decode", "up"])
def test_the_example_file_is_valid(role: Role) -> None:
    path = ROOT / "examples" / "kvflow.toml"
    settings = resolve(role, MODEL, env={}, config=str(path))
    assert settings.num_pages == {"prefill": 2048, "decode": 4096, "up": 0}[role]


def test_a_worker_that_becomes_the_other_role_reads_that_roles_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path, "[prefill]\nchunked-prefill-size = 64\n[decode]\nnew-token-ratio = 0.5\n"
    )
    monkeypatch.setenv("KVFLOW_MAX_BATCH_TOKENS", "128")
    monkeypatch.setenv("KVFLOW_DISAGGREGATION_MODE", "decode")
    flags = {
        **MODEL,
        "num_pages": "7",
        "host_memory_bytes": "9",
        "disaggregation_mode": "decode",
        "join": None,
    }
    found = resolve_other("prefill", flags, path)
    assert (found.chunked_prefill_size, found.max_batch_tokens, found.num_pages) == (64, 128, 7)
    assert (found.disaggregation_mode, found.host_memory_bytes, found.new_token_ratio) == (
        "",
        1 << 28,
        0.7,
    )


def test_the_limits_on_decodes_are_prefills() -> None:
    flags = {"max_decodes": "5000", "decodes_per_address": "3000"}
    found = resolve("prefill", {**MODEL, **flags}, env={})
    assert (found.max_decodes, found.decodes_per_address) == (5000, 3000)
    found = resolve("up", MODEL, env={"KVFLOW_DECODES_PER_ADDRESS": "3000"})
    assert (found.max_decodes, found.decodes_per_address) == (1024, 3000)
    assert not flags.keys() & set(FIELDS_OF_ROLE["decode"])


def test_the_rendezvous_may_take_minutes_at_prefill() -> None:
    assert resolve("prefill", MODEL, env={}).rendezvous_s == 5.0
    assert resolve("up", MODEL, env={"KVFLOW_RENDEZVOUS_S": "300"}).rendezvous_s == 300.0
    assert "rendezvous_s" not in FIELDS_OF_ROLE["decode"]


@pytest.mark.parametrize(
    ("variable", "closest"),
    [
        ("KVFLOW_PAGESIZE", "; did you mean KVFLOW_PAGE_SIZE?"),
        ("KVFLOW_CONFG", "; did you mean KVFLOW_CONFIG?"),
        ("KVFLOW_TRANSFER_BACKENDS", "; did you mean KVFLOW_TRANSFER_BACKEND?"),
        ("KVFLOW_", ""),
        ("KVFLOW_QQQQQQQQQQQQQQQQQQQQ", ""),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "router"])
def test_a_variable_that_nothing_reads_is_refused(role: Role, variable: str, closest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(role, MODEL, env={variable: "secret"})
    assert str(caught.value) == f"environment {variable}: unknown variable{closest}"


def test_a_variable_of_another_role_or_purpose_is_left_alone() -> None:
    environment = {
        READY_FD: "3",
        PARENT_PID: "1",
        "KVFLOW_POLL_S": "2",
        "KVFLOW_URL": "http://x",
        "kvflow_page": "1",
    }
    assert resolve("decode", MODEL, env=environment).poll_s == Settings().poll_s


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_number_that_is_none_is_no_time(value: str) -> None:
    with pytest.raises(ConfigError, match="--request-timeout-s"):
        resolve("decode", {**MODEL, "request_timeout_s": value}, env={})


def test_workers_of_one_machine_publish_at_ports_of_their_own() -> None:
    found = KvEvents.parse(
        '{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://[::1]:0", "topic": "kv"}'
    )
    assert found is not None
    third = KvEvents.parse(found.of_worker(2))
    assert third is not None and (third.endpoint, third.replay_endpoint) == (
        "tcp://*:5559",
        "tcp://[::1]:*",
    )
    assert third.topic == "kv"
    last = KvEvents.parse('{"endpoint": "tcp://*:65533"}')
    assert last is not None and last.of_worker(2)
    with pytest.raises(
        MisuseError,
        match=r"endpoint 'tcp://\*:65533': the last port is 65535, and number 3 would take",
    ):
        last.of_worker(3)
    for off in (
        '{"publisher": "null"}',
        '{"publisher": null}',
        '{"enable_kv_cache_events": false}',
    ):
        assert KvEvents.parse(off) is None
