"""The third tier: pages in a store outside this process, under the digests of their prefixes.

A *backend* (`port.Backend`) is blocking code over one store: `file` uses a directory, `mooncake` a
Mooncake Store. `guarded.GuardedStorage` wraps a backend as the `port.Storage` that the tiers use:
asynchronous batch calls, bounded in number and time, in separate threads. An error in a store never
fails a request: a page that cannot be written counts as not stored, and a page that cannot be read
counts as absent.

**Identity.** A key is the digest of a page's prefix (`protocols.cache.hashes`). It does not depend
on the model or on the layout of the bytes, but the identity of the store does (`identity`). Every
record contains the key and the identity, and the length and a checksum of its bytes (`record`). A
record whose header differs from the expected one counts as absent.

**Holes.** A prompt's pages are read up to the first missing one. That page and the pages after it
are stored again the next time that pages of the prompt are stored (`serve.cache.tiers`).
"""
