"""Memory that holds KV pages: paged pools, the allocator that knows every page's owner, shared
segments.
"""
