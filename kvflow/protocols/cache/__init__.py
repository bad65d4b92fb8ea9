"""The prefix index: which tokens are cached, in which pages of which tier, and which of them go
first. Pure.

**What is in flight names a run of pages, never a node.** Pages that were inserted together are a
run, and a page's identity is its run and its offset there; it is never used again. A copy that is
under way (`writes.Write`) holds offsets of runs. The tree is an index over runs: its nodes are cut
as prompts diverge, and a cut moves no page to another run, so whatever ends later finds its pages
however often they have been cut. A write has a number of its own, and its first end takes it: a
late or second acknowledgement finds nothing, even if the same tokens are cached again.

**Why a compressed tree and not a map of pages.** A map from (parent, tokens of one page) to a
record would have no splits at all, but pays for every page, in Python: a slice, a hash, a record, a
place in the order of eviction. The Mooncake conversation trace inserts and evicts some 160 pages of
64 tokens per request. Here each costs per node: one `bytes.startswith` (memcmp) compares a node of
any length, one slice of numpy hands its pages over, and eviction cuts what is needed from the end
of a leaf. Since runs have identities of their own, a split costs two slices and decides nothing.

**Rules.** Each node is readable somewhere: PRESENT on the device or on the host. In every tier
leaves go first, and a node leaves a tier only if it is in the other one, too, or has no children;
so whatever a prompt matches can be loaded. A lock is held at the last node of a path and keeps the
device pages of all of it. A tier that a copy reads from is pinned until the copy has ended.

**Namespaces.** Prompts match only within one `Namespace` (salt, LoRA). Without one the chain of
page hashes is the one all subscribers know; with one, a digest of it stands where the digest before
the first page would: `chain_root`.

**Events.** An index made with `events` records what can be read in each tier from now on, and what
cannot: `events`.

**Models with states.** A node may end in a state, what a request keeps beside its pages (conv, SSM,
ring of a sliding window). An index made with `needs_state` matches only up to such a node:
`states`.
"""
