"""The prefix index: the cached tokens, the pages that hold them in each tier, and the order of
eviction. It performs no I/O.

**A copy names runs of pages, never nodes.** Pages that were inserted together are a run. A page is
identified by its run and its offset in that run, and this identity is never reused. A copy in
progress (`writes.Write`) names runs and offsets. The tree is an index over runs. Its nodes are
split where prompts diverge, but a split moves no page to another run. So a copy finds its pages
when it ends, no matter how often their nodes were split. Every write has a number, which becomes
invalid when the write ends. A late or repeated acknowledgement therefore changes no page, even if
the same tokens are cached again.

**Why a compressed tree and not a map of pages.** A map from (parent, tokens of one page) to a
record would need no splits, but every page would cost a slice, a hash, a record, and a place in the
order of eviction, all in Python. The Mooncake conversation trace inserts and evicts some 160 pages
of 64 tokens per request. The tree pays per node: one `bytes.startswith` (memcmp) compares a node of
any length, one array has its pages, and eviction cuts the pages that it needs from the end of a
leaf. Pages are identified by their runs, so a split costs a few slices and invalidates nothing.

**Rules.** Each node is readable in at least one paged tier: PRESENT on the device or on the host.
Every tier evicts leaves first. A node that has children leaves a tier only if the other tier has it
too, so every page that a prompt matches can be loaded. A lock on the last node of a path keeps the
pages of the whole path on the device. While a copy reads a node from a tier, the node stays there.

**Namespaces.** Prompts match only within one `Namespace` (salt, LoRA). In the default namespace,
page hashes depend only on the tokens, so subscribers can compute them. In any other namespace, the
chain of hashes begins with a digest of the namespace: see `chain_root`.

**Events.** An index created with `events=True` records which pages become readable in each tier,
and which stop being readable there: see `events`.

**Models with states.** A node may carry a state: the data that a request keeps in addition to its
pages (convolution, SSM, ring of a sliding window). An index created with `needs_state=True` matches
only prefixes that end at a node with a state: see `states`.
"""
