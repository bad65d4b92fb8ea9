"""The settings, which are read from environment variables with the prefix `KVFLOW_SGLANG_`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import msgspec

from kvflow.connectors.staging import ALWAYS, check_staging, check_staging_bytes
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.limits import Bounds, Timing, check_count, check_time
from kvflow.transports.control.curve import read_key
from kvflow.transports.control.registry import registry_address
from kvflow.transports.data.select import check_plane

PREFIX = "KVFLOW_SGLANG_"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one SGLang server. Times are seconds."""

    transfer_backend: str = "mooncake"
    """The data plane: local (one machine), mooncake or nixl; the same on both sides."""
    host: str = ""
    """The address at which the other side reaches this one.

    Empty: SGLang's `--host`, or for a wildcard address the address that SGLang finds for this
    machine.
    """
    ib_device: str = ""
    """RDMA device; empty for SGLang's `--disaggregation-ib-device`, and TCP without that."""
    staging: str = "auto"
    """Transfers through host memory beside the KV cache: auto where the cache is on a device,
    always everywhere.
    """
    staging_bytes: int = 0
    """Host memory of the staging of each rank. 0: at a decode, where requests wait for it and a
    prompt must fit, as much as the KV cache; 256 MiB at a prefill, or more where 4 decodes
    need it.
    """
    decode_tp_size: int = 0
    """At a prefill, the `--tp-size` of its decodes: a divisor of its own. 0: the same."""
    verify_transfers: bool = False
    """Send a checksum with every chunk. Set it on both sides."""
    control_key_file: str = ""
    """The file with the key from `kvflow keygen`, which a prefill and its decodes share. Empty: no
    encryption, and any caller is accepted.
    """
    rendezvous_s: float = 30.0
    """The time for which one half of a room waits for the other half."""
    lost_after_s: float = 10.0
    """The silence after which the other side counts as lost: requests fail, and their pages wait
    for proof. SGLang's own backends fail after more than 10 s, so a shorter pause of a server ends
    no request with either.
    """
    quarantine_share: float = Bounds().quarantine_share
    """Requests are refused while more than this share of decode's pages is waiting for proof."""
    max_decodes: int = Bounds().targets
    """At a prefill: the decodes that each of its workers knows at a time; more are refused."""
    decodes_per_address: int = Bounds().decodes_per_address
    """At a prefill: how many of them may come from one network address."""
    fingerprint: str = ""
    """The identity of the model, for weights that kvflow cannot read. It must be the same text on
    both sides.

    Empty: computed from the files.
    """
    rate_limit_bytes_per_s: float | None = None
    """The limit of this prefill's writes; for tests."""

    @staticmethod
    def needs_segment(environment: Mapping[str, str]) -> bool:
        """Return True if peers write into the KV cache over the local data plane. If it is always
        staged, they write into the staging only.
        """
        plane, staging = (
            environment.get(variable(name), "").strip() for name in ("transfer_backend", "staging")
        )
        return plane == "local" and staging != ALWAYS

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Return the settings in `environment`. An empty variable counts as not set.

        Raises: MisuseError naming the variable and its limits.
        """
        known = {variable(field.name): field for field in msgspec.structs.fields(cls)}
        values = {}
        for name, text in environment.items():
            if not name.startswith(PREFIX) or not text.strip():
                continue
            field = known.get(name)
            if field is None:
                raise MisuseError(f"{name} is not a setting; there are {', '.join(known)}")
            try:
                values[field.name] = msgspec.convert(text.strip(), field.type, strict=False)
            except msgspec.ValidationError as error:
                raise MisuseError(f"{name} is {text!r:.80}: {error}") from None
        found = cls(**values)
        found.check()
        return found

    def check(self) -> None:
        """Check every value. Raises: MisuseError naming the variable and its limits."""
        checks: dict[str, Callable[[], object]] = {
            "host": self._check_host,
            "transfer_backend": self._check_plane,
            "staging": lambda: check_staging(self.staging),
            "staging_bytes": lambda: check_staging_bytes(self.staging_bytes),
            "control_key_file": lambda: read_key(self.control_key_file),
            "rendezvous_s": lambda: check_time("rendezvous_s", self.rendezvous_s),
            "lost_after_s": lambda: Timing(lost_after_s=self.lost_after_s),
            "quarantine_share": lambda: Bounds(quarantine_share=self.quarantine_share),
            "max_decodes": lambda: check_count("max_decodes", self.max_decodes),
            "decodes_per_address": lambda: check_count(
                "decodes_per_address", self.decodes_per_address
            ),
            "rate_limit_bytes_per_s": self._check_rate,
        }
        for name, check in checks.items():
            try:
                check()
            except MisuseError as error:
                raise MisuseError(f"{variable(name)}: {error}") from None

    def _check_host(self) -> None:
        if self.host:
            registry_address(self.host, 1)
        if self.host.strip("[]") in ("0.0.0.0", "::"):
            raise MisuseError(
                f"host {self.host}: the other side cannot reach that; name an address of this "
                "machine"
            )

    def _check_plane(self) -> None:
        check_plane(self.transfer_backend, self.ib_device, self.host)

    def _check_rate(self) -> None:
        rate = self.rate_limit_bytes_per_s
        if rate is not None and not rate > 0:
            raise MisuseError(f"rate_limit_bytes_per_s {rate} is not above 0")

    @property
    def timing(self) -> Timing:
        # The two legs of a request may arrive a whole model step apart.
        return Timing(
            lost_after_s=self.lost_after_s,
            rendezvous_s=self.rendezvous_s,
            announced_s=self.rendezvous_s,
        )

    @property
    def bounds(self) -> Bounds:
        return Bounds(
            quarantine_share=self.quarantine_share,
            targets=self.max_decodes,
            decodes_per_address=self.decodes_per_address,
        )


def variable(field: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + field.upper()
