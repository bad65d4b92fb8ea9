"""All settings of all roles, in one typed Struct; `catalog` lists those of each role.

Each field declares its limits and its description. Flags, KVFLOW_* variables, keys of the config
file and help texts follow from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvflow.protocols.cache.choices import EvictionPolicy, PrefetchPolicy, WritePolicy
from kvflow.protocols.limits import Timing

Role = Literal["prefill", "decode", "router", "up"]
DEFAULT_PORTS: dict[str, int] = {"prefill": 30000, "decode": 30001, "router": 8000, "up": 8000}
ENV_PREFIX = "KVFLOW_"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a role. Zero or empty means "choose a value" if the description states it."""

    host: Annotated[str, Meta(description="Address to listen on.", min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(description="HTTP port; 0 picks a free one.", ge=0, le=65535)] = 0
    api_key: Annotated[
        str,
        Meta(
            description=(
                "Bearer key that clients need for all but /livez, /health and /metrics; it opens "
                "no route for operators."
            )
        ),
    ] = ""
    admin_api_key: Annotated[
        str,
        Meta(
            description=(
                "Bearer key of the operator, the same at router and workers: for the routes by "
                "which workers join, roles are switched, caches flushed, requests aborted and "
                "listed, and peers declared dead."
            )
        ),
    ] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(description="Origin whose pages may call this server (repeat for more; * = any)."),
    ] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Log level.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="Log lines for people, or one JSON object a line."),
    ] = "text"
    access_log: Annotated[
        bool, Meta(description="One log line per request; polled routes only at debug level.")
    ] = True
    drain_timeout_s: Annotated[
        float,
        Meta(
            description="Seconds that running requests may take to finish after SIGTERM.",
            ge=0,
            le=3600,
        ),
    ] = 10.0
    sse_keepalive_s: Annotated[
        float,
        Meta(
            description="Seconds of silence in a stream after which an empty line is sent.",
            gt=0,
            le=60,
        ),
    ] = 0.1
    sse_headers_after_s: Annotated[
        float,
        Meta(
            description="Seconds without a first token after which a stream's headers are sent; "
            "later errors are events, no statuses.",
            ge=0,
            le=3600,
        ),
    ] = 10.0
    sglang_metrics: Annotated[bool, Meta(description="Also publish the sglang:* metric names.")] = (
        False
    )
    threads: Annotated[
        int,
        Meta(description="CPU threads of the model; 0 = OMP_NUM_THREADS, else 1.", ge=0, le=1024),
    ] = 0

    model_path: Annotated[str, Meta(description="Directory or Hugging Face name of the model.")] = (
        ""
    )
    served_model_name: Annotated[
        str, Meta(description="Model name for clients; the model path when empty.")
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Data type of weights and KV."),
    ] = "auto"
    device: Annotated[
        str,
        Meta(
            description=(
                "Where model, pool and sampling are: auto (the first CUDA device that torch sees, "
                "else the CPU), cpu, cuda or cuda:N."
            )
        ),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "packed", "pad"],
        Meta(
            description=(
                "Batching of the model's attention; auto picks packed where the model allows it."
            )
        ),
    ] = "auto"
    sliding_window_rows: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description=(
                "Layers with a sliding window keep only its tokens, in one row a request; auto "
                "does so for windows of at most 256 tokens and an eighth of the context. Needs "
                "packed attention, and the same choice at prefill and decode."
            )
        ),
    ] = "auto"
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Meta(
            description="Sampling of the OpenAI routes where a request does not say: the model's "
            "generation_config.json, or 1.0 throughout."
        ),
    ] = "model"
    page_size: Annotated[int, Meta(description="Tokens per page.", ge=1, le=65536)] = 16
    num_pages: Annotated[
        int,
        Meta(
            description="Pages of the pool; 0 = 65536 tokens, within --pool-bytes.",
            ge=0,
            le=1 << 26,
        ),
    ] = 0
    pool_bytes: Annotated[
        int,
        Meta(
            description="Upper limit in bytes of a pool whose --num-pages is 0, its rows included.",
            ge=1 << 16,
        ),
    ] = 1 << 30
    pool_order: Annotated[
        Literal["page_first", "layer_first"], Meta(description="Memory order of the pool.")
    ] = "page_first"
    prefix_cache: Annotated[
        Literal["auto", "off", EvictionPolicy],
        Meta(
            description=(
                "Pages that ended requests leave in the pool for prompts that begin alike, and "
                "which go first where others need them: the longest or the least often used, "
                "those of low priority, the deepest; auto is lru, or off for a model that cannot "
                "take it."
            )
        ),
    ] = "auto"
    cache_host_bytes: Annotated[
        int,
        Meta(
            description=(
                "Bytes of host memory, taken at the start, that cached pages are copied to, and "
                "back from when the pool has evicted them; 0 = none."
            ),
            ge=0,
        ),
    ] = 0
    cache_state_bytes: Annotated[
        int,
        Meta(
            description=(
                "Host memory at most, taken at the start of a prefill that caches prefixes of a "
                "model with a state for each request: for copies of states at ends of pages, "
                "where later prompts go on."
            ),
            ge=0,
        ),
    ] = 1 << 30
    l3: Annotated[
        Literal["off", "file", "mooncake"],
        Meta(
            description=(
                "Where cached pages are kept that outlive the process: `file` is a directory "
                "(--l3-dir), `mooncake` a Mooncake Store (--mooncake-master). Needs "
                "--cache-host-bytes, which they pass through."
            )
        ),
    ] = "off"
    l3_dir: Annotated[
        str,
        Meta(
            description=(
                "Directory of --l3 file, of this process alone; `kvflow up` makes one for each "
                "worker."
            )
        ),
    ] = ""
    l3_bytes: Annotated[
        int,
        Meta(
            description="Bytes that --l3 file takes at most; the longest unused pages go first.",
            ge=1 << 12,
        ),
    ] = 10 << 30
    mooncake_master: Annotated[
        str,
        Meta(
            description=(
                "host:port of the mooncake_master of --l3 mooncake; `kvflow up` without it starts "
                "one of its own."
            )
        ),
    ] = ""
    mooncake_metadata_server: Annotated[
        str,
        Meta(
            description=(
                "Metadata server of all clients of that store: P2PHANDSHAKE (they ask each other), "
                "or its URL."
            ),
            min_length=1,
        ),
    ] = "P2PHANDSHAKE"
    mooncake_global_segment_size: Annotated[
        int,
        Meta(
            description=(
                "Bytes of memory that this worker lends to that store, for pages of any worker; 0 "
                "= none."
            ),
            ge=0,
        ),
    ] = 1 << 30
    mooncake_local_buffer_size: Annotated[
        int,
        Meta(
            description="Bytes of memory that the client of that store takes for itself.",
            ge=1 << 20,
        ),
    ] = 16 << 20
    cache_write_policy: Annotated[
        WritePolicy,
        Meta(
            description=(
                "What is copied to the host tier: all that is cached, what another prompt has "
                "found, or what must leave the pool, which waits for it."
            )
        ),
    ] = "write_through"
    cache_prefetch_policy: Annotated[
        PrefetchPolicy,
        Meta(
            description=(
                "How long a prompt waits for what is copied back for it: 1 s and a quarter of a "
                "second for each 1,000 tokens, or until all is there; best_effort takes what --l3 "
                "has brought by the time its turn comes. What host memory has is loaded in its "
                "turn, and held until it begins."
            )
        ),
    ] = "timeout"
    pp: Annotated[
        int,
        Meta(
            description="Stages of prefill: processes, each with some of the model's layers.",
            ge=1,
            le=64,
        ),
    ] = 1
    tp: Annotated[
        int,
        Meta(
            description=(
                "Shards of prefill's stages, or of decode: each has a share of every layer."
            ),
            ge=1,
            le=64,
        ),
    ] = 1
    decode_tp: Annotated[
        int, Meta(description="Shards of decode, as --tp of `kvflow decode`.", ge=1, le=64)
    ] = 1
    chunked_prefill_size: Annotated[
        int, Meta(description="Tokens per prefill chunk.", ge=1, le=1 << 20)
    ] = 512
    max_batch_tokens: Annotated[
        int, Meta(description="Tokens per model step, all rooms together.", ge=1, le=1 << 20)
    ] = 2048
    max_running_requests: Annotated[
        int, Meta(description="Completions served at once; further ones wait.", ge=1, le=1 << 20)
    ] = 256
    max_queued_requests: Annotated[
        int,
        Meta(
            description=(
                "Completions (prompts times n) that may wait besides those being served, at a "
                "router requests that may wait for a worker that is up; further ones are answered "
                "503."
            ),
            ge=0,
            le=1 << 20,
        ),
    ] = 1024
    request_timeout_s: Annotated[
        float, Meta(description="Seconds that a request may take.", gt=0, le=86400)
    ] = 600.0
    schedule_low_priority_values_first: Annotated[
        bool,
        Meta(
            description=(
                "Of waiting requests, the smallest priority starts first, as in vLLM; else the "
                "largest."
            )
        ),
    ] = False

    disaggregation_mode: Annotated[
        Literal["", "prefill", "decode"],
        Meta(description="Accepted for compatibility with SGLang; must match the command."),
    ] = ""
    disaggregation_bootstrap_port: Annotated[
        int,
        Meta(
            description="Port of prefill's bootstrap registry; 0 picks a free one at prefill.",
            ge=0,
            le=65535,
        ),
    ] = 8998
    disaggregation_transfer_backend: Annotated[
        Literal["local", "mooncake", "nixl", "ascend", "mori"], Meta(description="Data plane.")
    ] = "local"
    staging: Annotated[
        Literal["auto", "always"],
        Meta(
            description=(
                "Transfers through host memory beside the pool: auto where the pool is on a "
                "device, or slices of pages would be tiny; always everywhere."
            )
        ),
    ] = "auto"
    staging_bytes: Annotated[
        int,
        Meta(
            description=(
                "Host memory of a staging; 0 = as much as the pool at decode, where requests wait "
                "for it and a prompt must fit, 256 MiB at prefill."
            ),
            ge=0,
        ),
    ] = 0
    disaggregation_prefill_tp: Annotated[
        int,
        Meta(
            description="--tp of decode's prefills, whose slices may be tiny; 0 = not known.",
            ge=0,
            le=64,
        ),
    ] = 0
    disaggregation_ib_device: Annotated[
        str, Meta(description="RDMA device of the data plane; the number of an NPU for ascend.")
    ] = ""
    kv_events_config: Annotated[
        str,
        Meta(
            description=(
                "Publish events of the prefix cache, as vLLM and SGLang do: a JSON object with "
                "publisher (zmq), endpoint (tcp://127.0.0.1:5557), replay_endpoint, topic, "
                "buffer_steps, dialect (vllm, or sglang, which dynamo reads, too): by whose names "
                "events call the media, and positional (false): events as arrays, for subscribers "
                "of older releases, in place of maps."
            )
        ),
    ] = ""
    kv_events_key_file: Annotated[
        str,
        Meta(
            description=(
                "File of `kvflow keygen`, the same at workers and router: cache events are sent to "
                "subscribers that have it (CURVE), and to no others."
            )
        ),
    ] = ""
    transfer_rate_limit: Annotated[
        int, Meta(description="Bytes per second that prefill sends at most; 0 = no limit.", ge=0)
    ] = 0
    verify_transfers: Annotated[
        bool,
        Meta(
            description=(
                "Compare every chunk's checksum after landing; set it at prefill and decode."
            )
        ),
    ] = False
    rendezvous_s: Annotated[
        float,
        Meta(
            description=(
                "Seconds that prefill's half of a room waits for a decode that has not announced "
                "itself; raise it, up to minutes, behind proxies that call decode late."
            ),
            gt=0,
            le=3600,
        ),
    ] = Timing().rendezvous_s
    optimistic_prefill: Annotated[
        int,
        Meta(
            description=(
                "How often prefill may begin a prompt before decode has lent its pages, in pages "
                "that nothing else needs; a request that needs them takes them, and the work is "
                "lost. 0 = never."
            ),
            ge=0,
            le=1000,
        ),
    ] = 0
    control_port: Annotated[
        int,
        Meta(
            description=(
                "Port of prefill's control endpoint, and the ports after it those of its other "
                "ranks; 0 picks free ones."
            ),
            ge=0,
            le=65535,
        ),
    ] = 0

    control_key_file: Annotated[
        str,
        Meta(
            description=(
                "File of `kvflow keygen`, the same at prefill and decode; peers without it are "
                "refused."
            )
        ),
    ] = ""
    max_quarantine_share: Annotated[
        float,
        Meta(
            description=(
                "Share of decode's pages, overdue in quarantine, above which new requests are "
                "refused."
            ),
            ge=0,
            le=1,
        ),
    ] = 0.5

    new_token_ratio: Annotated[
        float,
        Meta(
            description=(
                "Share of a request's new tokens for which decode promises it pages; it decays "
                "while requests run. 1.0 = all of them: nothing is ever retracted."
            ),
            ge=0,
            le=1,
        ),
    ] = 0.7
    host_memory_bytes: Annotated[
        int,
        Meta(
            description=(
                "Bytes of host memory for the state of requests that decode has retracted, taken "
                "when it starts; 0 = none."
            ),
            ge=0,
        ),
    ] = 1 << 28
    host_memory_full: Annotated[
        Literal["recompute", "refuse"],
        Meta(
            description=(
                "Requests that decode retracts while host memory is full, or where there is none: "
                "compute their state again later, or answer 503."
            )
        ),
    ] = "recompute"

    max_pinned_share: Annotated[
        float,
        Meta(
            description=(
                "Share of prefill's pages above which a decode that takes no writes is refused."
            ),
            ge=0,
            le=1,
        ),
    ] = 0.5

    prefill: Annotated[
        tuple[str, ...], Meta(description="URL of a prefill worker (repeat for more).")
    ] = ()
    decode: Annotated[
        tuple[str, ...], Meta(description="URL of a decode worker (repeat for more).")
    ] = ()
    engine: Annotated[
        Literal["kvflow", "vllm"],
        Meta(
            description=(
                "What the router's workers are: kvflow's own, or vLLM servers with a KV connector."
            )
        ),
    ] = "kvflow"
    legs: Annotated[
        Literal["sequential", "together"],
        Meta(
            description=(
                "With --engine vllm, in which order both are asked: decode when prefill has "
                "answered, as any connector needs it; or both at once, where prefill has kvflow's "
                "connector."
            )
        ),
    ] = "sequential"
    join: Annotated[
        tuple[str, ...],
        Meta(
            description="URL of a router to join, and to leave before the drain (repeat for more)."
        ),
    ] = ()
    poll_s: Annotated[
        float, Meta(description="Seconds between two health checks of a worker.", gt=0, le=3600)
    ] = 1.0
    retry_timeout_s: Annotated[
        float,
        Meta(
            description=(
                "Seconds that a request without a token may wait, in all, for workers that are "
                "back; other workers are tried at once."
            ),
            ge=0,
            le=3600,
        ),
    ] = 10.0

    policy: Annotated[
        Literal["cache_aware", "least_loaded", "round_robin"],
        Meta(
            description=(
                "Which prefill and which decode get a request: those that have most of its prompt "
                "in their prefix caches, and are not overloaded; the least loaded; or one after "
                "another."
            )
        ),
    ] = "cache_aware"
    balance_abs_threshold: Annotated[
        int,
        Meta(
            description=(
                "With --policy cache_aware, a worker is overloaded that has more than so many "
                "requests more than the least loaded one, and more than --balance-rel-threshold "
                "times its requests."
            ),
            ge=0,
            le=1 << 20,
        ),
    ] = 8
    tokenizer_path: Annotated[
        str,
        Meta(
            description=(
                "Directory or Hugging Face name of the workers' tokenizer, with which --policy "
                "cache_aware finds a text in what workers publish with --kv-events-config. "
                "Without it their events count for prompts of token ids alone, and a text is "
                "matched with those that a worker was sent before."
            )
        ),
    ] = ""
    balance_rel_threshold: Annotated[
        float, Meta(description="As a factor: see --balance-abs-threshold.", ge=1, le=1e6)
    ] = 1.5

    prefill_workers: Annotated[
        int, Meta(description="Prefill processes to start.", ge=1, le=64)
    ] = 1
    decode_workers: Annotated[int, Meta(description="Decode processes to start.", ge=1, le=64)] = 1
    start_timeout_s: Annotated[
        float, Meta(description="Seconds that a role may take to become healthy.", gt=0, le=86400)
    ] = 300.0

    @property
    def model_name(self) -> str:
        """Name of the model for clients."""
        return self.served_model_name or self.model_path
