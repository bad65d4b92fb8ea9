"""All settings of all roles, in one typed Struct. `catalog` lists the settings of each role.

Each field declares its limits, and the string below it is its description. Flags, KVFLOW_*
variables, keys of the config file and help texts are derived from the fields.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvflow.protocols.cache.choices import EvictionPolicy, PrefetchPolicy, WritePolicy
from kvflow.protocols.limits import Bounds, Timing

Role = Literal["prefill", "decode", "router", "up"]
DEFAULT_PORTS: dict[str, int] = {"prefill": 30000, "decode": 30001, "router": 8000, "up": 8000}
ENV_PREFIX = "KVFLOW_"

Port = Annotated[int, Meta(ge=0, le=65535)]
Share = Annotated[float, Meta(ge=0, le=1)]
Processes = Annotated[int, Meta(ge=1, le=64)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
SizeOrNone = Annotated[int, Meta(ge=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a role. Zero or "" means "choose a value" only if the description says so."""

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """HTTP port; 0 picks a free one."""
    api_key: str = ""
    """Bearer key that clients need for all but /livez, /health and /metrics; it opens no route for
    operators."""
    admin_api_key: str = ""
    """Bearer key of the operator, the same at router and workers: for the routes by which workers
    join, roles are switched, caches flushed, requests aborted and listed, and peers declared dead.
    """
    tls_cert: str = ""
    """PEM file of this server's certificate and its chain: every HTTP port of the process serves
    HTTPS, and prefills' registries are asked by it. A new file is used without a restart."""
    tls_key: str = ""
    """PEM file of that certificate's private key, without a password."""
    tls_ca: str = ""
    """PEM file of the certificates that servers at https:// URLs must prove (workers, routers,
    registries of prefills); the system's when empty. With it, decode asks registries by HTTPS."""
    tls_server_name: str = ""
    """Name in those servers' certificates, where it is not the host of their URLs: one certificate
    can then serve workers at any address."""
    allowed_origins: tuple[str, ...] = ()
    """Origin whose pages may call this server (repeat for more; * = any)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    log_format: Literal["text", "json"] = "text"
    """Log lines for people, or one JSON object a line."""
    access_log: bool = True
    """One log line per request; polled routes only at debug level."""
    otlp_endpoint: str = ""
    """Collector of OpenTelemetry traces, by its base URL, as in http://localhost:4318; empty = no
    traces."""
    otlp_sample_ratio: Share = 1.0
    """Share of the traces to record; a client that sends `traceparent` decides for its own."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Seconds that running requests may take to finish after SIGTERM."""
    sse_keepalive_s: Annotated[float, Meta(gt=0, le=60)] = 0.1
    """Seconds of silence in a stream after which an empty line is sent."""
    sse_headers_after_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Seconds without a first token after which a stream's headers are sent; later errors are
    events, no statuses."""
    sglang_metrics: bool = False
    """Also publish the sglang:* metric names."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """CPU threads of the model; 0 = OMP_NUM_THREADS, else 1."""

    model_path: str = ""
    """Directory or Hugging Face name of the model."""
    served_model_name: str = ""
    """Model name for clients; the model path when empty."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV."""
    device: str = "auto"
    """Where model, pool and sampling are: auto (the first CUDA device that torch sees, else the
    CPU), cpu, cuda or cuda:N."""
    attention: Literal["auto", "packed", "pad"] = "auto"
    """Batching of the model's attention; auto picks packed where the model allows it."""
    sliding_window_rows: Literal["auto", "always", "never"] = "auto"
    """Layers with a sliding window keep only its tokens, in one row a request; auto does so for
    windows of at most 256 tokens and an eighth of the context. Needs packed attention, and the same
    choice at prefill and decode."""
    max_model_len: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    """Most tokens of a prompt and its completion together; a pool that cannot hold them is refused.
    0 = the model's context, or what the pool holds where that is less."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Sampling of the OpenAI routes where a request does not say: the model's
    generation_config.json, or 1.0 throughout."""

    chat_template: str = ""
    """File with a chat template, or the template itself, in place of the model's."""
    tool_call_parser: Literal[
        "auto",
        "off",
        "hermes",
        "qwen25",
        "qwen3_coder",
        "llama3_json",
        "llama3",
        "mistral",
        "deepseek_v3",
        "deepseekv3",
        "deepseek_v31",
        "deepseekv31",
        "kimi_k2",
        "glm45",
        "glm47",
        "gpt_oss",
        "gpt-oss",
        "openai",
    ] = "auto"
    """How the model writes tool calls: by name of vLLM's or SGLang's parser; auto fits the chat
    template. Where it is off, or none fits, requests with tools are refused."""
    reasoning_parser: Literal[
        "off",
        "auto",
        "qwen3",
        "deepseek_r1",
        "deepseek-r1",
        "deepseek_v3",
        "deepseek-v3",
        "kimi_k2",
        "glm45",
        "gpt_oss",
        "gpt-oss",
        "openai_gptoss",
    ] = "off"
    """How the model marks its reasoning, which answers then have apart from their text: by name of
    vLLM's or SGLang's parser; auto fits the chat template. Where it is off, it stays in the text.
    """

    page_size: Annotated[int, Meta(ge=1, le=65536)] = 16
    """Tokens per page."""
    num_pages: Annotated[int, Meta(ge=0, le=1 << 26)] = 0
    """Pages of the pool; 0 = 65536 tokens, within --pool-bytes."""
    pool_bytes: Annotated[int, Meta(ge=1 << 16)] = 1 << 30
    """Upper limit in bytes of a pool whose --num-pages is 0, its rows included."""
    mem_fraction: Share = 0.0
    """Size of the pool, its rows included, as a share of the memory that is available once the
    model is loaded; in place of --num-pages and --pool-bytes. `kvflow up` divides it among its
    workers, and a prefill among its ranks. 0 = those decide."""
    pool_order: Literal["page_first", "layer_first"] = "page_first"
    """Memory order of the pool."""

    prefix_cache: Literal["auto", "off", EvictionPolicy] = "auto"
    """Pages that ended requests leave in the pool for prompts that begin alike, and which go first
    where others need them: the longest or the least often used, those of low priority, the deepest;
    auto is lru, or off for a model that cannot take it."""
    cache_host_bytes: SizeOrNone = 0
    """Bytes of host memory, taken at the start, that cached pages are copied to, and back from when
    the pool has evicted them; 0 = none."""
    cache_state_bytes: SizeOrNone = 1 << 30
    """Host memory at most, taken at the start of a prefill that caches prefixes of a model with a
    state for each request: for copies of states at ends of pages, where later prompts go on."""
    l3: Literal["off", "file", "mooncake"] = "off"
    """Where cached pages are kept that outlive the process: `file` is a directory (--l3-dir),
    `mooncake` a Mooncake Store (--mooncake-master). Needs --cache-host-bytes, which they pass
    through."""
    l3_dir: str = ""
    """Directory of --l3 file, of this process alone; `kvflow up` makes one for each worker."""
    l3_bytes: Annotated[int, Meta(ge=1 << 12)] = 10 << 30
    """Bytes that --l3 file takes at most; the longest unused pages go first."""
    mooncake_master: str = ""
    """host:port of the mooncake_master of --l3 mooncake; `kvflow up` without it starts one of its
    own."""
    mooncake_metadata_server: Annotated[str, Meta(min_length=1)] = "P2PHANDSHAKE"
    """Metadata server of all clients of that store: P2PHANDSHAKE (they ask each other), or its URL.
    """
    mooncake_global_segment_size: SizeOrNone = 1 << 30
    """Bytes of memory that this worker lends to that store, for pages of any worker; 0 = none."""
    mooncake_local_buffer_size: Annotated[int, Meta(ge=1 << 20)] = 16 << 20
    """Bytes of memory that the client of that store takes for itself."""
    cache_write_policy: WritePolicy = "write_through"
    """What is copied to the host tier: all that is cached, what another prompt has found, or what
    must leave the pool, which waits for it."""
    cache_prefetch_policy: PrefetchPolicy = "timeout"
    """How long a prompt waits for what is copied back for it: 1 s and a quarter of a second for
    each 1,000 tokens, or until all is there; best_effort takes what --l3 has brought by the time
    its turn comes. What host memory has is loaded in its turn, and held until it begins."""

    pp: Processes = 1
    """Stages of prefill: processes, each with some of the model's layers."""
    tp: Processes = 1
    """Shards of prefill's stages, or of decode: each has a share of every layer."""
    decode_tp: Processes = 1
    """Shards of decode, as --tp of `kvflow decode`."""
    chunked_prefill_size: Count = 512
    """Tokens per prefill chunk."""
    max_batch_tokens: Count = 2048
    """Tokens per model step, all rooms together."""

    max_running_requests: Count = 256
    """Completions served at once; further ones wait."""
    max_queued_requests: Annotated[int, Meta(ge=0, le=1 << 20)] = 1024
    """Completions (prompts times n) that may wait besides those being served, at a router requests
    that may wait for a worker that is up; further ones are answered 503."""
    request_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    """Seconds that a request may take."""
    schedule_low_priority_values_first: bool = False
    """Of waiting requests, the smallest priority starts first, as in vLLM; else the largest."""

    local_prefill_chunk: SizeOrNone = 128
    """Tokens of prompts that decode computes itself in one step, at most, while other requests
    decode, whose tokens wait for it; 0 = it computes no prompt."""

    disaggregation_mode: Literal["", "prefill", "decode"] = ""
    """Accepted for compatibility with SGLang; must match the command."""
    disaggregation_bootstrap_port: Port = 8998
    """Port of prefill's bootstrap registry; 0 picks a free one at prefill."""
    disaggregation_transfer_backend: Literal["local", "mooncake", "nixl", "ascend", "mori"] = (
        "local"
    )
    """Data plane."""
    staging: Literal["auto", "always"] = "auto"
    """Transfers through host memory beside the pool: auto where the pool is on a device, or slices
    of pages would be tiny; always everywhere."""
    staging_bytes: SizeOrNone = 0
    """Host memory of a staging; 0 = as much as the pool at decode, where requests wait for it and a
    prompt must fit, 256 MiB at prefill, or more where 4 decodes need it."""
    disaggregation_prefill_tp: Annotated[int, Meta(ge=0, le=64)] = 0
    """--tp of decode's prefills, whose slices may be tiny; 0 = not known."""
    disaggregation_ib_device: str = ""
    """RDMA device of the data plane; the number of an NPU for ascend."""
    kv_events_config: str = ""
    """Publish events of the prefix cache, as vLLM and SGLang do: a JSON object with publisher
    (zmq), endpoint (tcp://127.0.0.1:5557), replay_endpoint, topic, buffer_steps, dialect (vllm, or
    sglang, which dynamo reads, too): by whose names events call the media, and positional (false):
    events as arrays, for subscribers of older releases, in place of maps."""
    kv_events_key_file: str = ""
    """File of `kvflow keygen`, the same at workers and router: cache events are sent to subscribers
    that have it (CURVE), and to no others."""
    transfer_rate_limit: SizeOrNone = 0
    """Bytes per second that prefill sends at most; 0 = no limit."""
    verify_transfers: bool = False
    """Compare every chunk's checksum after landing; set it at prefill and decode."""

    rendezvous_s: Annotated[float, Meta(gt=0, le=3600)] = Timing().rendezvous_s
    """Seconds that prefill's half of a room waits for a decode that has not announced itself; raise
    it, up to minutes, behind proxies that call decode late."""
    optimistic_prefill: Annotated[int, Meta(ge=0, le=1000)] = 0
    """How often prefill may begin a prompt before decode has lent its pages, in pages that nothing
    else needs; a request that needs them takes them, and the work is lost. 0 = never."""
    control_port: Port = 0
    """Port of prefill's control endpoint, and the ports after it those of its other ranks; 0 picks
    free ones."""
    control_key_file: str = ""
    """File of `kvflow keygen`, the same at prefill and decode; peers without it are refused."""
    max_quarantine_share: Share = 0.5
    """Share of decode's pages, or of its rows, overdue in quarantine, above which new requests are
    refused."""

    new_token_ratio: Share = 0.7
    """Share of a request's new tokens for which decode promises it pages; it decays while requests
    run. 1.0 = all of them: nothing is ever retracted."""
    host_memory_bytes: SizeOrNone = 1 << 28
    """Bytes of host memory for the state of requests that decode has retracted, taken when it
    starts; 0 = none."""
    host_memory_full: Literal["recompute", "refuse"] = "recompute"
    """Requests that decode retracts while host memory is full, or where there is none: compute
    their state again later, or answer 503."""

    max_pinned_share: Share = 0.5
    """Share of prefill's pages, or of its rows, above which a decode that takes no writes is
    refused."""
    max_decodes: Count = Bounds().targets
    """Decodes that one prefill rank knows at a time; more are refused, unless a silent one makes
    place."""
    decodes_per_address: Count = Bounds().decodes_per_address
    """How many of them may come from one network address; raise it for decodes behind one NAT or
    proxy, or where one host runs many."""

    prefill: tuple[str, ...] = ()
    """URL of a prefill worker (repeat for more)."""
    decode: tuple[str, ...] = ()
    """URL of a decode worker (repeat for more)."""
    engine: Literal["kvflow", "vllm"] = "kvflow"
    """What the router's workers are: kvflow's own, or vLLM servers with a KV connector."""
    legs: Literal["sequential", "together"] = "sequential"
    """With --engine vllm, in which order both are asked: decode when prefill has answered, as any
    connector needs it; or both at once, where prefill has kvflow's connector."""
    join: tuple[str, ...] = ()
    """URL of a router to join, and to leave before the drain (repeat for more)."""
    poll_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """Seconds between two health checks of a worker."""
    retry_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Seconds that a request without a token may wait, in all, for workers that are back; other
    workers are tried at once."""

    policy: Literal["cache_aware", "least_loaded", "round_robin"] = "cache_aware"
    """Which prefill and which decode get a request: those that have most of its prompt in their
    prefix caches, and are not overloaded; the least loaded; or one after another."""
    balance_abs_threshold: Annotated[int, Meta(ge=0, le=1 << 20)] = 8
    """With --policy cache_aware, a worker is overloaded that has more than so many requests more
    than the least loaded one, and more than --balance-rel-threshold times its requests."""
    local_prefill_tokens: SizeOrNone = 0
    """A prompt goes to decode alone, which computes it between its steps, where decode has at most
    so many tokens of prompts to compute then: what its prefix cache lacks of this one, and what it
    was sent before. 0 = each prompt goes to a pair."""
    tokenizer_path: str = ""
    """Directory or Hugging Face name of the workers' tokenizer, with which --policy cache_aware
    finds a text in what workers publish with --kv-events-config. Without it their events count for
    prompts of token ids alone, and a text is matched with those that a worker was sent before."""
    balance_rel_threshold: Annotated[float, Meta(ge=1, le=1e6)] = 1.5
    """As a factor: see --balance-abs-threshold."""

    prefill_workers: Processes = 1
    """Prefill processes to start."""
    decode_workers: Processes = 1
    """Decode processes to start."""
    worker_ports: Port = 0
    """First of the workers' HTTP ports, which follow each other: prefills, then decodes; 0 picks
    free ones."""
    start_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0
    """Seconds that a role may take to become healthy."""

    @property
    def model_name(self) -> str:
        """Name by which clients know the model."""
        return self.served_model_name or self.model_path
