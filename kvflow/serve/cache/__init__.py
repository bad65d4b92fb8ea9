"""The prefix cache and its tiers. Cached pages outlive the request that computed them.

`protocols.cache` decides which pages are in which tier, and which are evicted first. This package
contains the memory, the copies between tiers, the stores, and the publisher of cache events.
"""
