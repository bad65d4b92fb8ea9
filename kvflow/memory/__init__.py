"""The memory of KV pages: paged pools, page allocators, shared segments, copies, checksums, staging
and snapshots.
"""
