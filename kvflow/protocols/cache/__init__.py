"""The prefix index: the cached tokens, the pages that hold them in each tier, and the order of
eviction. Pure.

**A copy names runs of pages, never nodes.** Pages that were inserted together are a run. A page is
identified by its run and its offset there, and this identity is never used again. A copy under way
(`writes.Write`) holds offsets of runs. The tree is an index over runs: its nodes are cut as prompts
diverge, and a cut moves no page to another run, so a copy that ends later finds its pages however
often their nodes were cut. Every write has a number, which its first end removes: a late or second
acknowledgement changes no page, even if the same tokens are cached again.

**Why a compressed tree and not a map of pages.** A map from (parent, tokens of one page) to a
record would need no splits, but it would pay for every page, in Python: a slice, a hash, a record,
a place in the order of eviction. The Mooncake conversation trace inserts and evicts some 160 pages
of 64 tokens per request. The tree pays per node: one `bytes.startswith` (memcmp) compares a node of
any length, one slice of numpy hands its pages over, and eviction cuts the pages that it needs from
the end of a leaf. Since the identity of pages lies in their runs, a split costs two slices and
decides nothing.

**Rules.** Each node is readable in some paged tier: PRESENT on the device or on the host. In every
tier leaves go first, and a node leaves a tier only if it is in the other one, too, or has no
children; so every page that a prompt matches can be loaded. A lock is held at the last node of a
path and keeps the device pages of the whole path. A tier that a copy reads from is pinned until the
copy ends.

**Namespaces.** Prompts match only within one `Namespace` (salt, LoRA). In the default namespace the
chain of page hashes is the one that all subscribers know; in any other, a digest of the namespace
takes the place of the digest before the first page: `chain_root`.

**Events.** An index made with `events` records which pages can be read in each tier from now on,
and which no longer can: `events`.

**Models with states.** A node may end in a state, which a request keeps beside its pages (conv,
SSM, ring of a sliding window). An index made with `needs_state` matches only up to such a node:
`states`.
"""
