"""The settings in `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from kvflow.connectors.staging import check_staging, check_staging_bytes
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.limits import Bounds, Timing, check_count, check_time
from kvflow.transports.control.registry import RegistryClient, registry_address
from kvflow.transports.data.select import check_plane

FIELD = "kv_connector_extra_config"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one vLLM instance. Times are seconds."""

    transfer_backend: str = "mooncake"
    """The data plane: local (one machine), mooncake, nixl, ascend or mori; the same on both
    sides.
    """
    host: str = "127.0.0.1"
    """The address at which the other side reaches this one."""
    bootstrap_port: int = 8998
    """The registry port of a prefill. Decodes find rank r at this port + r, and the same port also
    serves /health and /metrics.

    The ports of a data-parallel engine follow those of the engine before it.
    """
    ib_device: str = ""
    """RDMA device; empty for TCP."""
    staging: str = "auto"
    """Transfers through host memory beside the KV cache: auto where the cache is on a device,
    always everywhere.
    """
    staging_bytes: int = 0
    """Host memory of the staging of each node. 0: at a decode, where loads wait for it and a prompt
    must fit, as much as the KV cache or more; 256 MiB at a prefill, or more where 4 decodes need
    it.
    """
    decode_workers: int | None = None
    """At a prefill: the number of workers (tensor times pipeline parallel) in each of its decodes,
    if it is not that of prefill: a divisor or a multiple of prefill's tensor parallel size. With
    None, worker n holds the same part on both sides.
    """
    verify_transfers: bool = False
    """Send a checksum with every chunk. Set it on both sides."""
    control_key_file: str = ""
    """The file with the key from `kvflow keygen`, which a prefill and its decodes share. Empty: no
    encryption, and any caller is accepted.
    """
    api_key: str = ""
    """The key that decodes need to ask a prefill's registry; empty: no key."""
    source_deadline_s: float = 30.0
    """The time for which a prefill keeps the blocks of a prompt for a decode that has not asked for
    them, and for which decode's half of a room waits for prefill's half. Once a decode has asked,
    prefill waits for as long as that decode lives.
    """
    load_deadline_s: float | None = 300.0
    """The time for which a decode lends blocks to a prefill that does not fill them. None: for as
    long as prefill lives.
    """
    recompute_below_tokens: int = 0
    """A decode computes prompts of fewer tokens itself, and fetches nothing for them."""
    lost_after_s: float = Timing().lost_after_s
    """The silence after which the other side counts as lost: requests fail, and their blocks wait
    for proof.
    """
    quarantine_share: float = Bounds().quarantine_share
    """Loads are refused while more than this share of decode's blocks is waiting for proof."""
    max_decodes: int = Bounds().targets
    """At a prefill: the decodes that each of its workers knows at a time; more are refused."""
    decodes_per_address: int = Bounds().decodes_per_address
    """At a prefill: how many of them may come from one network address."""
    status_port: int = 0
    """The status port of a decode: rank r serves GET /health and /metrics at this port + r. 0: not
    served.
    """
    fingerprint: str = ""
    """The identity of the model, for weights that kvflow cannot read. It must be the same text on
    both sides.

    Empty: computed from the files.
    """
    rate_limit_bytes_per_s: float | None = None
    """The limit of this prefill's writes; for tests."""

    @classmethod
    def read(cls, extra: dict[str, Any]) -> Self:
        """Return the settings in `extra`. Raises: MisuseError naming the field and its limits."""
        try:
            found = msgspec.convert(extra, cls)
        except msgspec.ValidationError as error:
            names = ", ".join(cls.__struct_fields__)
            raise MisuseError(f"{FIELD}: {error}; it may have {names}") from None
        try:
            found.check()
        except MisuseError as error:
            raise MisuseError(f"{FIELD}: {error}") from None
        return found

    def port_of_engine(self, number: int, ranks: int) -> int:
        """Return the registry port of an engine's rank 0. Each engine takes a port per rank."""
        return self.bootstrap_port + number * ranks

    def check(self) -> None:
        """Check every value. Raises: MisuseError for a value outside its limits."""
        self._check_host()
        check_plane(self.transfer_backend, self.ib_device, self.host)
        check_staging(self.staging)
        check_staging_bytes(self.staging_bytes)
        # The client raises for a key that an HTTP header cannot carry.
        RegistryClient(self.api_key)
        check_time("source_deadline_s", self.source_deadline_s)
        if self.load_deadline_s is not None:
            check_time("load_deadline_s", self.load_deadline_s)
        if self.recompute_below_tokens < 0:
            raise MisuseError(f"recompute_below_tokens {self.recompute_below_tokens} is below 0")
        for name, least in (("bootstrap_port", 1), ("status_port", 0)):
            if not least <= getattr(self, name) < 1 << 16:
                raise MisuseError(f"{name} {getattr(self, name)} is outside {least}..65535")
        if self.rate_limit_bytes_per_s is not None and not self.rate_limit_bytes_per_s > 0:
            raise MisuseError(
                f"rate_limit_bytes_per_s {self.rate_limit_bytes_per_s} is not above 0"
            )
        check_count("max_decodes", self.max_decodes)
        check_count("decodes_per_address", self.decodes_per_address)
        self.timing, self.bounds  # noqa: B018 - what they refuse is refused here

    def _check_host(self) -> None:
        try:
            registry_address(self.host, self.bootstrap_port)
        except MisuseError as error:
            raise MisuseError(f"host: {error}") from None
        if self.host.strip("[]") in ("0.0.0.0", "::"):
            raise MisuseError(
                f"host {self.host}: the other side cannot reach that; name an address of this "
                "machine"
            )

    @property
    def timing(self) -> Timing:
        # The two legs of a request may arrive a whole model step apart.
        return Timing(
            lost_after_s=self.lost_after_s,
            rendezvous_s=self.source_deadline_s,
            announced_s=self.source_deadline_s,
        )

    @property
    def bounds(self) -> Bounds:
        return Bounds(
            quarantine_share=self.quarantine_share,
            targets=self.max_decodes,
            decodes_per_address=self.decodes_per_address,
        )


def check_engine(vllm_config: Any) -> None:
    """Check that kvflow can serve an engine with this configuration. Raises: MisuseError."""
    if vllm_config.model_config.enable_sleep_mode:
        raise MisuseError(
            "--enable-sleep-mode: in this mode vLLM takes the memory of the KV cache away, and "
            "kvflow's connector cannot prove that nothing writes into it any more"
        )
    _check_continues(vllm_config)


def _check_continues(vllm_config: Any) -> None:
    """Check that vLLM can compute the rest of a prompt whose prefix is cached.

    vLLM can do so with chunked prefill or prefix caching. It switches both off for MLA on CPUs
    without AMX, for layers that are not causal, and on RISC-V. Without both, it would compute the
    rest of a loaded prompt without attention to the prefix.

    Raises: MisuseError if both are off.
    """
    if (
        vllm_config.scheduler_config.enable_chunked_prefill
        or vllm_config.cache_config.enable_prefix_caching
    ):
        return
    model = vllm_config.model_config
    kind = ("MLA on " if model.use_mla else "") + str(vllm_config.device_config.device_type)
    raise MisuseError(
        f"vLLM has switched chunked prefill and prefix caching off here ({model.model}, {kind}): "
        "it cannot go on from KV cache that was loaded, and its answers would be wrong without "
        "an error; if that was your command line, leave one of them on"
    )
