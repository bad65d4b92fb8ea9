"""The third tier: pages by the digest of their prefix, in a store outside of this process's memory.

A *backend* (`port.Backend`) is blocking code over one store: `file` keeps a directory, `mooncake`
speaks to a Mooncake Store. `guarded.GuardedStorage` makes of any of them what the tiers use
(`port.Storage`): asynchronous batch calls in threads of their own, bounded, each with an end that
can be awaited, and a circuit breaker for reading and one for writing. No error of a store is an
error of a request: what a store cannot do is "not stored" or "not there", counted.

**Whose bytes.** A key is the digest of a page's prefix (`protocols.cache.hashes`), which says
nothing about the model or about the order of the bytes. Those are in the store's identity
(`identity`), and every record carries both, beside the length and a checksum of its bytes
(`record`); what does not carry exactly the expected header is not there.

**Holes.** Keys are independent of each other: a page that is missing hides nothing behind it, and
comes back with the next write-through of it.
"""
