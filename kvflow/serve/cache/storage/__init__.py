"""The third tier: pages by the digest of their prefix, in a store outside this process's memory.

A *backend* (`port.Backend`) is blocking code over one store: `file` keeps a directory, `mooncake`
uses a Mooncake Store. `guarded.GuardedStorage` wraps a backend as the `port.Storage` that the tiers
use: asynchronous, bounded batch calls in separate threads, each with an end that can be awaited,
and a circuit breaker each for reading and writing. An error of a store is never an error of a
request: a page that a store cannot write or read counts as "not stored" or "not there".

**Identity.** A key is the digest of a page's prefix (`protocols.cache.hashes`), which does not
depend on the model or the order of the bytes. The identity of the store does (`identity`). Every
record contains both, with the length and a checksum of its bytes (`record`), and a record without
exactly the expected header counts as absent.

**Holes.** Keys are independent of each other: a missing page does not hide those that follow it,
and the next write-through stores it again.
"""
