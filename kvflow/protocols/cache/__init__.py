"""The prefix index: the cached tokens, the pages that hold them in each tier, and the order of
eviction. It performs no I/O.

**A copy names runs of pages, never nodes.** Pages that were inserted together are a run. A page is
identified by its run and its offset there, and this identity is never used again. A copy in
progress (`writes.Write`) names runs and offsets. The tree is an index over runs. Its nodes are
split where prompts diverge, but a split moves no page to another run, so a copy finds its pages
when it ends, however often their nodes were split. Every write has a number, which becomes invalid
when the write ends: a late or repeated acknowledgement changes no page, even if the same tokens are
cached again.

**Why a compressed tree and not a map of pages.** A map from (parent, tokens of one page) to a
record would need no splits, but it would pay for every page, in Python: a slice, a hash, a record,
a place in the order of eviction. The Mooncake conversation trace inserts and evicts some 160 pages
of 64 tokens per request. The tree pays per node: one `bytes.startswith` (memcmp) compares a node of
any length, one numpy slice returns its pages, and eviction cuts the pages that it needs from the
end of a leaf. Pages are identified by their runs, so a split costs two slices and invalidates
nothing.

**Rules.** Each node is readable in some paged tier: PRESENT on the device or on the host. Every
tier evicts leaves first. A node that has children leaves a tier only if the other tier has it too,
so every page that a prompt matches can be loaded. A lock is held at the last node of a path and
keeps the device pages of the whole path. A node is pinned in the tier from which a copy reads it,
until the copy ends.

**Namespaces.** Prompts match only within one `Namespace` (salt, LoRA). In the default namespace,
page hashes are the ones that every subscriber computes. In any other, the chain of hashes begins
with a digest of the namespace: see `chain_root`.

**Events.** An index created with `events=True` records which pages become readable in each tier,
and which stop being readable there: see `events`.

**Models with states.** A node may carry a state: the data that a request keeps in addition to its
pages (convolution, SSM, ring of a sliding window). An index created with `needs_state=True` matches
only prefixes that end at such a node: see `states`.
"""
