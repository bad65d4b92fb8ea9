"""Memory that holds KV pages: paged pools, page owners, shared segments, copies, checksums and
snapshots.
"""
